"""Settings: wrong ones are named; the fingerprint changes with what changes the bytes, and with nothing else."""

from pathlib import Path

import pytest

from slackwater_workers.config import JobConfig, fingerprint, identity, load_config, work_key
from slackwater_workers.core import PermanentError, WrongLedger
from slackwater_workers.ledger.job import join_job
from slackwater_workers.ledger.store import PosixStore

VERSIONS = {"decode": "1", "vad_model": "abc"}


def test_an_assignment_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("loudness_lufs: -20\nshard_items: 7\n")

    config = load_config(file, ["shard_items=9"])

    assert (config.loudness_lufs, config.shard_items, config.sample_rate_hz) == (-20, 9, 24_000)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        pytest.param("loudnes=-20", "unknown setting 'loudnes'", id="misspelt"),
        pytest.param("sample_rate_hz=1", "setting 'sample_rate_hz'.*got 1", id="out of range"),
        pytest.param("sample_rate_hz=fast", "setting 'sample_rate_hz'.*got 'fast'", id="no number"),
        pytest.param("sample_rate_hz", "key=value", id="no sign"),
        pytest.param("min_segment_s=[9", "--set min_segment_s", id="unreadable value"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(assignment: str, words: str) -> None:
    with pytest.raises(PermanentError, match=words) as caught:
        load_config(None, [assignment])

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("a: [1", "is not YAML", id="broken"),
        pytest.param("- 1\n- 2\n", "key: value", id="a list"),
        pytest.param("speed: 3\n", "unknown setting 'speed'", id="unknown key"),
    ],
)
def test_a_wrong_file_is_named_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "job.yaml").write_text(text)

    with pytest.raises(PermanentError, match=words) as caught:
        load_config(tmp_path / "job.yaml", [])

    assert "\n" not in str(caught.value)


def test_segments_that_cannot_exist_are_refused() -> None:
    with pytest.raises(PermanentError, match="must be below max_segment_s"):
        load_config(None, ["min_segment_s=5", "max_segment_s=2"])


def test_the_fingerprint_follows_what_changes_the_bytes() -> None:
    plain = fingerprint(identity(JobConfig(), VERSIONS))

    assert fingerprint(identity(JobConfig(loudness_lufs=-20.0), VERSIONS)) != plain
    assert fingerprint(identity(JobConfig(), {**VERSIONS, "vad_model": "abd"})) != plain
    assert fingerprint(identity(JobConfig(ttl_s=60.0), VERSIONS)) == plain
    assert work_key("a" * 64, plain) != work_key("b" * 64, plain)


def test_a_ledger_of_other_settings_is_refused_and_says_which_differ(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    store.prepare()
    join_job(store, "first", identity(JobConfig(), VERSIONS))

    with pytest.raises(WrongLedger, match=r"loudness_lufs=-23.0 \(now -20.0\)"):
        join_job(store, "second", identity(JobConfig(loudness_lufs=-20.0), VERSIONS))


def test_a_folder_of_other_things_is_not_made_a_ledger(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("chapter one")

    with pytest.raises(WrongLedger, match=r"thesis\.tex"):
        join_job(PosixStore(tmp_path), "job", identity(JobConfig(), VERSIONS))
