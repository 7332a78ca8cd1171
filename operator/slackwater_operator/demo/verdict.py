"""Whether a demo run shows what it promises."""

from slackwater_operator.demo.result import DemoResult

FEWEST_EVICTIONS = 3
LEAST_GAIN = 1.6  # useful ratio with filling over without


def verdict(result: DemoResult, *, filling: bool) -> str:
    """Empty when all holds; else the first thing that does not, in words."""
    if result.verdict:
        return result.verdict
    figures = result.figures()
    if figures["items_lost"] or figures["items_doubled"]:
        return f"The ledgers do not hold: {figures['items_lost']} items lost, {figures['items_doubled']} doubled."
    if figures["requests_failed"]:
        return f"{figures['requests_failed']} of {figures['requests']} requests failed without an honest refusal."
    if not filling:
        return ""
    if figures["evictions"] < FEWEST_EVICTIONS:
        return (
            f"Only {figures['evictions']} slots were taken back for traffic; at least {FEWEST_EVICTIONS} were expected."
        )
    gain = figures["useful_ratio"] / max(figures["useful_ratio_without_filling"], 1e-9)
    if gain < LEAST_GAIN:
        return f"The useful ratio rose only {gain:.2f} times by filling; at least {LEAST_GAIN} times was expected."
    return ""
