"""What a demo run leaves behind: demo-report.json, demo-report.html, demo-speech.mp3 and a table in the terminal.

Owns writing the files and the table's rows; `page` owns the page, `wording` the words.  Called by
the demo when its run is over.
"""

import json
import os
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from slackwater_operator.core import PermanentError
from slackwater_operator.demo import page, wording
from slackwater_operator.demo.result import DemoResult

JSON_NAME = "demo-report.json"
HTML_NAME = "demo-report.html"
SPEECH_NAME = "demo-speech.mp3"


def write(result: DemoResult, folder: Path) -> list[Path]:
    """Write the files into `folder`, made if absent; returns their paths: JSON, HTML and the speech, if there is any.

    Older files stay whole until all new ones are on disk.
    Raises PermanentError when they cannot be written.
    """
    documents = {
        folder / JSON_NAME: json.dumps(result.as_json(), indent=1).encode(),
        # A name with undecodable bytes becomes a "?" on the page; the JSON keeps it, escaped.
        folder / HTML_NAME: page.render(result).encode("utf-8", "replace"),
    }
    if result.speech:
        documents[folder / SPEECH_NAME] = result.speech
    temporaries = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in documents}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in documents.items():
            with temporaries[path].open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in temporaries.items():
            temporary.replace(path)
    except OSError as error:
        raise PermanentError(
            f"the report needs {sum(map(len, documents.values())) / 1e6:.1f} MB in {folder}, which cannot be written: "
            f"{error.strerror or error}; free some space there or name another folder"
        ) from error
    finally:
        if folder.is_dir():
            for temporary in temporaries.values():
                temporary.unlink(missing_ok=True)
    return list(documents)


def table(result: DemoResult) -> RenderableType:
    """The figures, for 80 columns and more; the verdict is the caller's to say."""
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bright_black")
    grid.add_column()
    for name, value, style in _rows(result):
        grid.add_row(Text(name), Text(value, style))
    return grid


def _rows(result: DemoResult) -> list[tuple[str, str, str]]:
    """(what, figure, style): a figure that ought to be zero turns red when it is not."""
    figures = result.figures()

    def quantiles(key: str) -> str:
        return f"p50 {wording.seconds(figures[f'{key}_p50_s'])}, p99 {wording.seconds(figures[f'{key}_p99_s'])}"

    quarantined = figures["items_quarantined"]
    unverified = figures["evictions"] - figures["evictions_verified"]
    return [
        (
            "Useful ratio",
            f"{wording.percent(result.useful_ratio)} with filling, "
            f"{wording.percent(result.useful_ratio_without_filling)} without: {wording.quotient(result)}",
            "bold",
        ),
        (
            "Evictions for traffic",
            f"{figures['evictions']:,}, of which {figures['evictions_verified']:,} read back and verified",
            "red" if unverified else "",
        ),
        ("Slot taken back in", quantiles("reclaim"), ""),
        ("First audio, quiet", quantiles("first_audio_quiet"), ""),
        ("First audio, burst", quantiles("first_audio_burst"), ""),
        (
            "Requests",
            f"{figures['requests_answered']:,} answered, {figures['requests_refused']:,} refused, "
            f"{figures['requests_failed']:,} failed",
            "red" if figures["requests_failed"] else "",
        ),
        (
            "Items",
            f"{figures['items_done']:,} done, {figures['items_lost']:,} lost, {figures['items_doubled']:,} doubled"
            + (f", {quarantined:,} quarantined" if quarantined else ""),
            "red" if figures["items_lost"] or figures["items_doubled"] else "",
        ),
    ]
