"""What a worker says to a person and to a supervisor."""

import io
import json

from slackwater_workers.core import Progress, Receipt
from slackwater_workers.events import ParentLink
from slackwater_workers.pipeline.report import PersonReport, SupervisorReport

HALF = Progress(items_total=10, items_done=4, items_quarantined=1, audio_s=8.0, shards_total=3, shards_open=2)
RECEIPT = Receipt("/ledger/part/s000000/1", 123, "ab" * 32)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_person_sees_one_line_with_what_is_settled_and_how_fast() -> None:
    lines: list[str] = []
    clock = Clock()
    report = PersonReport(lines.append, is_terminal=True, monotonic_s=clock)

    report.working(HALF)
    clock.now_s = 2.0
    report.durable("unit", RECEIPT, audio_s=100.0)

    assert lines == [
        "cleaning: 5 of 10 items, 1 quarantined",
        "cleaning: 6 of 10 items, 1 quarantined, 50x realtime",
    ]


def test_a_log_file_is_not_flooded() -> None:
    lines: list[str] = []
    report = PersonReport(lines.append, is_terminal=False, monotonic_s=Clock())

    report.working(HALF)
    for _ in range(100):
        report.durable("unit", RECEIPT, audio_s=1.0)

    assert len(lines) == 1


def test_a_supervisor_hears_this_process_own_sums() -> None:
    out = io.StringIO()
    report = SupervisorReport(ParentLink(out, None), "job")

    report.working(HALF)
    report.durable("a", RECEIPT, audio_s=1.5)
    report.durable("b", RECEIPT, audio_s=2.0)

    working, _, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert (working["items_done"], working["items_open"], working["shards_open"]) == (5, 5, 2)
    assert (second["unit"], second["items"], second["audio_s"]) == ("b", 2, 3.5)
