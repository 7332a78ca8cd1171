"""Every spelling of GPUs, index sets, host lists and times that Slurm was seen to write, and cut or foreign ones."""

import pytest

from slackwater_slurm.client import gres
from slackwater_slurm.core import GpuCount, OutputCut, UnknownShape


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        pytest.param("gpu:4", {"": 4}, id="without a type"),
        pytest.param("gpu", {"": 1}, id="a bare word is one"),
        pytest.param("gpu:h200", {"h200": 1}, id="a bare type is one"),
        pytest.param("gpu:h200:4", {"h200": 4}, id="with a type"),
        pytest.param("gpu:h200:4(S:0)", {"h200": 4}, id="with a socket"),
        pytest.param("gpu:h200:8(S:0-1),gpu:rtx5090:2(S:1)", {"h200": 8, "rtx5090": 2}, id="several types"),
        pytest.param("gpu:h200:3(IDX:0-1,3)", {"h200": 3}, id="a comma inside the indexes"),
        pytest.param("gpu:h200:0(IDX:N/A)", {}, id="none in use"),
        pytest.param("gres:gpu:h200:1", {"h200": 1}, id="22.05's request"),
        pytest.param("gres/gpu:h200:2", {"h200": 2}, id="24.11's request"),
        pytest.param("cpu:2,gres/gpu:1", {"": 1}, id="a request of several resources"),
        pytest.param(
            "cpu=16,mem=62.5G,gres/gpu=4,gres/gpu:h200=4", {"h200": 4}, id="TRES: the sum is not counted twice"
        ),
        pytest.param("cpu=16,gres/gpu=4,gres/gpu:h200=3", {"": 1, "h200": 3}, id="TRES: the rest has no type"),
        pytest.param("gres/gpu=4", {"": 4}, id="TRES: only the sum"),
        pytest.param("gpu:2,gpu:h200:2", {"": 2, "h200": 2}, id="GRES: both are counted"),
        pytest.param("shard:h200:8,mps:100,gpu:1K", {"": 1024}, id="other resources and a suffix"),
        pytest.param("gpu:h200:no_consume:2", {"h200": 2}, id="a flag"),
        pytest.param("(null)", {}, id="null"),
        pytest.param("N/A", {}, id="not available"),
        pytest.param("", {}, id="empty"),
    ],
)
def test_counts_gpus_in(text: str, counts: dict[str, int]) -> None:
    assert gres.gpus(text) == GpuCount.of(counts)


@pytest.mark.parametrize("text", ["gpu:h200:4:what", "gpu:", "gpu:h200:four"])
def test_refuses_a_text_that_it_would_have_to_guess(text: str) -> None:
    with pytest.raises(UnknownShape, match=r"gpu:h200:4 were expected, got"):
        gres.gpus(text)


def test_says_that_a_text_was_cut_rather_than_counting_what_is_left() -> None:
    with pytest.raises(OutputCut, match="inside a parenthesis"):
        gres.gpus("gpu:h200:4(S:0")


def test_reads_which_gpus_are_held_by_type() -> None:
    found = gres.gpu_indexes("gpu:rtx5090:1(IDX:2),gpu:h200:4(IDX:0-1,5,7),shard:3(IDX:0),gpu:a:0(IDX:N/A)")

    assert found == (("h200", (0, 1, 5, 7)), ("rtx5090", (2,)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3,5", (0, 1, 2, 3, 5)), ("1-9:4", (1, 5, 9)), ("7", (7,)), ("N/A", ()), ("", ())],
)
def test_reads_sets_of_numbers(text: str, expected: tuple[int, ...]) -> None:
    assert gres.numbers(text) == expected


def test_a_set_that_slurm_shortened_is_not_taken_for_the_whole() -> None:
    with pytest.raises(OutputCut, match="SLURM_BITSTR_LEN"):
        gres.numbers("1,3,5,7,...")


@pytest.mark.parametrize("text", ["a-b", "1-", "-3", "1-9:0", "1 2"])
def test_refuses_what_is_no_set_of_numbers(text: str) -> None:
    with pytest.raises(UnknownShape, match="numbers such as"):
        gres.numbers(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h1", ("h1",)),
        ("h[1-2],r1", ("h1", "h2", "r1")),
        ("n[008-010,12]-ib", ("n008-ib", "n009-ib", "n010-ib", "n12-ib")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("(null)", ()),
        ("", ()),
    ],
)
def test_expands_host_lists(text: str, expected: tuple[str, ...]) -> None:
    assert gres.hosts(text) == expected


def test_a_cut_host_list_is_an_error() -> None:
    with pytest.raises(OutputCut, match="inside a bracket"):
        gres.hosts("h[1-2],r[1-")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("UNLIMITED", None),
        ("90", 5400),
        ("30:15", 1815),
        ("01:00:00", 3600),
        ("2-00:00:00", 172_800),
        ("1-12", 129_600),
        ("00:00:00", 0),
    ],
)
def test_reads_spans_of_time_as_slurm_does(text: str, seconds: int | None) -> None:
    assert gres.span_s(text) == seconds


def test_a_moment_that_is_not_in_seconds_is_refused() -> None:
    assert gres.moment_s("1796003364") == 1796003364.0
    assert gres.moment_s("Unknown") is None
    with pytest.raises(UnknownShape, match="SLURM_TIME_FORMAT"):
        gres.moment_s("2026-11-30T01:49:06")
