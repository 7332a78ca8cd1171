"""What pods of the standing cluster have to work with: recordings, folders, an image of links; and who names them."""

import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import yaml

from slackwater_controlplane import play
from slackwater_controlplane.errors import ControlPlaneError
from slackwater_controlplane.images import ROOT
from slackwater_controlplane.node.pods import python_paths

SAMPLE = ROOT / "manifests/samples/cluster-up"


def sample(kind: str) -> Iterator[dict[str, Any]]:
    for name in yaml.safe_load((SAMPLE / "kustomization.yaml").read_text())["resources"]:
        yield from (one for one in yaml.safe_load_all((SAMPLE / name).read_text()) if one["kind"] == kind)


@pytest.fixture
def speech(tmp_path: Path) -> Path:
    """Two recordings, one of them in a folder."""
    noise = np.random.default_rng(1).normal(0, 0.1, 800).astype("float32")
    (tmp_path / "speech/below").mkdir(parents=True)
    soundfile.write(tmp_path / "speech/one.wav", noise, 8000)
    soundfile.write(tmp_path / "speech/below/two.wav", noise[::-1], 8000)
    return tmp_path / "speech"


def test_no_two_copies_of_a_recording_are_one_item(speech: Path, tmp_path: Path) -> None:
    written = play.write_recordings(speech, tmp_path / "many")

    files = list((tmp_path / "many").rglob("*.flac"))
    assert written == len(files) == 2 * play.COPIES
    assert len({soundfile.read(file, dtype="int16")[0].tobytes() for file in files}) == len(files)


def test_recordings_are_written_once_and_whole(speech: Path, tmp_path: Path) -> None:
    (speech / "three.wav").write_bytes(b"not a recording")
    with pytest.raises(soundfile.LibsndfileError):
        play.write_recordings(speech, tmp_path / "many")
    (speech / "three.wav").unlink()
    left = list((tmp_path / "many").iterdir())

    first, again = (play.write_recordings(speech, tmp_path / "many") for _ in range(2))

    assert left == []
    assert (first, again) == (2 * play.COPIES, 0)


def test_nodes_see_what_the_sample_mounts(tmp_path: Path) -> None:
    folders = play.folders(tmp_path / "cache", tmp_path / "ledgers")

    seen = {path: source for source, path in (*folders.read, *folders.written)}
    mounted = {one["spec"]["hostPath"]["path"] for one in sample("PersistentVolume")}
    assert mounted == {play.RECORDINGS, play.PYTHON, f"{play.LEDGERS}/{play.LEDGER}"}
    assert {play.RECORDINGS, play.LEDGERS} <= seen.keys()
    assert (seen[play.LEDGERS] / play.LEDGER).stat().st_uid == play.USER
    assert {f"{play.PYTHON}{path}" for path in python_paths()} <= seen.keys()


def test_an_engine_that_a_pod_could_not_see_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(play, "python_paths", lambda: ["/tmp/clone/.venv"])

    with pytest.raises(ControlPlaneError, match="clone the repository somewhere else"):
        play.engine_image(tmp_path)


@pytest.mark.skipif(play.why_no_engine() is not None, reason=play.why_no_engine() or "")
def test_the_engines_image_leads_to_what_the_sample_mounts(tmp_path: Path) -> None:
    with tarfile.open(play.engine_image(tmp_path)) as archive:
        blobs = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
        documents = {name: blob.read() for name, blob in blobs.items() if blob is not None}
    [manifest] = json.loads(documents["index.json"])["manifests"]
    layers = json.loads(documents[f"blobs/sha256/{manifest['digest'].partition(':')[2]}"])
    config = json.loads(documents[f"blobs/sha256/{layers['config']['digest'].partition(':')[2]}"])["config"]
    layer = tmp_path / "layer.tar"
    layer.write_bytes(documents[f"blobs/sha256/{layers['layers'][0]['digest'].partition(':')[2]}"])
    with tarfile.open(layer) as archive:
        links = {member.name: member.linkname for member in archive if member.issym()}

    [service] = sample("InferenceDeployment")
    [engine] = service["spec"]["template"]["spec"]["containers"]
    assert f"docker.io/{engine['image']}" == play.ENGINE_IMAGE
    assert [mount["mountPath"] for mount in engine["volumeMounts"]] == [play.HOST]
    assert links == {name: f"{play.HOST}/{name}" for name in {Path(path).parts[1] for path in python_paths()}}
    assert config["Entrypoint"] == [sys.executable, "-m", "slackwater_operator"]
