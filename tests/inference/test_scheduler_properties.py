"""The scheduler, whatever happens to it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater_inference.core import QueueFull
from slackwater_inference.testing.scheduler import hold, request, scheduler, step


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_everybody_finishes_and_nothing_is_lost_whatever_happens(data):
    s = scheduler(
        slots=data.draw(st.integers(1, 6)),
        queued=6,
        block=2,
        blocks=data.draw(st.integers(20, 60)),
        prefill=8,
        piece=4,
        held=data.draw(st.integers(0, 6)),
        pace=data.draw(st.sampled_from([0.0, 10.0])),
    )
    accepted, over, holds = set(), set(), set()
    now_s = 0.0

    for i in range(data.draw(st.integers(1, 50))):
        match data.draw(st.sampled_from(["add", "add", "hold", "release", "abort", *["step"] * 4])):
            case "add":
                frames = data.draw(st.integers(1, 16))
                asked = request(
                    f"r{i}",
                    data.draw(st.integers(1, 12)),
                    frames,
                    data.draw(st.integers(1, frames)),
                    data.draw(st.sampled_from([0, 100])),
                )
                try:
                    s.add(asked, goes_on=data.draw(st.booleans()))
                    accepted.add(f"r{i}")
                except QueueFull:
                    pass
            case "hold":
                hold(s, f"h{i}", data.draw(st.integers(0, 9)), data.draw(st.sampled_from([0, 100, 200])))
                holds.add(f"h{i}")
            case "release" if holds:
                s.release_hold(holds.pop())
            case "abort" if accepted - over:
                name = data.draw(st.sampled_from(sorted(accepted - over)))
                over |= {name, *step(s, now_s, abort=name)[1]}
            case _:
                now_s += data.draw(st.sampled_from([0.0, 0.1]))
                _, ended = step(s, now_s)
                over |= ended.keys()
        s.check()

    for _ in range(2000):
        plan, ended = step(s, now_s)
        over |= ended.keys()
        if not plan:
            if plan.wake_at_s is None:
                break
            now_s = plan.wake_at_s + 0.001
    assert over == accepted
    for name in holds:
        s.release_hold(name)
    s.check()
    assert (s.num_running, s.num_waiting, s.kv_used_ratio) == (0, 0, 0.0)
