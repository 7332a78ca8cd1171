"""`slackwater engine quantize`: what it writes, what it leaves alone, and what is there when it cannot end."""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from slackwater_inference import quantize as module
from slackwater_inference.cli import app
from slackwater_inference.config.published import WeightFormat
from slackwater_inference.core import PermanentError
from slackwater_inference.folder import inspect
from slackwater_inference.model.headers import INDEX, SINGLE
from slackwater_inference.model.shapes import FAST, SLOW
from slackwater_inference.quantize import REPORT, quantize
from slackwater_inference.testing.checkpoint import split_projections, write_checkpoint, write_json, write_weights
from slackwater_inference.testing.model import micro
from slackwater_kernels import reference

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKSCALE, MXFP8 = WeightFormat
PROJECTIONS = ("attention.wqkv", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
W2 = f"{SLOW}layers.1.feed_forward.w2.weight"


def voice(**changes):
    """A voice whose matrices are whole groups, no two of their sizes alike."""
    sizes = {"dim": 256, "heads": (4, 2), "head_dim": 96, "intermediate_size": 640} | changes
    return micro(**sizes).model_copy(update={"weight_dtype": "bfloat16"})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A model's folder in two shards, with files that only its publisher needs."""
    folder = tmp_path_factory.mktemp("quantize") / "model"
    folder.mkdir()
    write_checkpoint(folder, voice(), num_shards=2)
    (folder / "LICENSE.md").write_text("terms")
    (folder / ".gitattributes").write_text("hidden")
    return folder


def tensors_of(folder):
    return {
        name: tensor for file in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(file).items()
    }


def bits(tensor):
    return tensor.view(torch.uint8)


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("form", WeightFormat)
def test_projections_become_what_the_kernels_reference_says_and_the_rest_stays_to_the_bit(written, tmp_path, form):
    out = tmp_path / "out"

    quantize(written, out, form)

    before, after = tensors_of(written), tensors_of(out)
    chosen = {f"{part}.{name}.weight" for part in (f"{SLOW}layers.0", f"{SLOW}layers.1", f"{FAST}layers.0")
              for name in PROJECTIONS}  # fmt: skip
    assert after.keys() == before.keys() | {f"{name}_scale_inv" for name in chosen}
    for name in chosen:
        small = reference.quantize_weight(before[name]) if form is BLOCKSCALE else reference.quantize_mx(before[name])
        assert after[name].dtype == torch.float8_e4m3fn
        assert torch.equal(bits(after[name]), small.codes)
        assert torch.equal(after[f"{name}_scale_inv"], small.scales)
    for name in before.keys() - chosen:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(bits(after[name]), bits(before[name]))


def test_the_new_folder_has_the_old_ones_files_and_says_its_form(written, tmp_path):
    out = tmp_path / "out"

    quantize(written, out)

    assert {path.name for path in out.iterdir()} == {
        path.name for path in written.iterdir() if path.name != ".gitattributes"
    } | {REPORT}
    for name in ("codec.safetensors", "codec.json", "tokenizer.json", "LICENSE.md"):
        assert (out / name).read_bytes() == (written / name).read_bytes()
    config = json.loads((out / "config.json").read_text())
    said = config.pop("quantization_config")
    assert config == json.loads((written / "config.json").read_text())
    assert (said["format"], said["version"], said["quant_method"]) == ("fp8_e4m3_128x128", 1, "fp8")
    assert said["weight_block_size"] == [128, 128]
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_of(out).values())
    assert index["weight_map"][f"{W2}_scale_inv"] == index["weight_map"][W2]
    assert inspect(out).quantization.format is BLOCKSCALE


def test_the_same_model_gives_the_same_bytes_in_whatever_pieces(written, tmp_path, monkeypatch):
    quantize(written, tmp_path / "one")
    monkeypatch.setattr(module, "_PIECE_BYTES", 5000)  # under a block of rows, and no multiple of anything

    quantize(written, tmp_path / "two")

    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")


def test_the_report_tells_each_error_and_why_the_rest_was_left(written, tmp_path):
    report = quantize(written, tmp_path / "out", MXFP8)

    before = tensors_of(written)
    for weight in report.quantized:
        exact = before[weight.name].double()
        off = reference.dequantize_mx(reference.quantize_mx(before[weight.name])) - exact
        assert weight.relative_error == pytest.approx((off.norm() / exact.norm()).item(), rel=1e-5)
        assert weight.max_error == pytest.approx(off.abs().max().item(), rel=1e-5)
        assert weight.after_bytes == exact.numel() * 33 // 32
    reasons = {kept.name: kept.reason for kept in report.kept}
    assert reasons[f"{SLOW}norm.weight"] == "a vector"
    assert reasons[f"{SLOW}embeddings.weight"] == "a table: its rows are looked up"
    assert reasons[f"{FAST}output.weight"].startswith("outside the layers")
    assert {w.name for w in report.quantized} | reasons.keys() == before.keys()
    assert report.after_bytes == sum(tensor.nbytes for tensor in tensors_of(tmp_path / "out").values())
    assert json.loads((tmp_path / "out" / REPORT).read_text())["quantized"][0]["name"] == report.quantized[0].name


def test_rows_that_are_no_whole_groups_stay_as_they_are_and_say_so(tmp_path):
    (tmp_path / "model").mkdir()
    write_checkpoint(tmp_path / "model", voice(intermediate_size=200))

    report = quantize(tmp_path / "model", tmp_path / "out")

    left = {kept.name: kept.reason for kept in report.kept}
    assert left[W2] == "its rows are no multiple of 128 values"
    assert W2.replace("w2", "w1") not in left
    assert inspect(tmp_path / "out").headers[W2].dtype == "BF16"


def test_names_stay_as_the_checkpoint_has_them_also_of_an_older_one(tmp_path):
    (tmp_path / "model").mkdir()
    model, weights = write_checkpoint(tmp_path / "model", voice())
    write_weights(tmp_path / "model", split_projections(weights, model))

    report = quantize(tmp_path / "model", tmp_path / "out")

    names = {weight.name for weight in report.quantized}
    assert {f"{SLOW}layers.0.attention.{part}.weight" for part in ("wq", "wk", "wv")} <= names
    assert inspect(tmp_path / "out").headers.keys() >= {f"{name}_scale_inv" for name in names}


def test_an_audio_encoder_that_the_engine_does_not_read_is_carried_along(tmp_path):
    (tmp_path / "model").mkdir()
    write_checkpoint(tmp_path / "model", voice())
    weights = load_file(tmp_path / "model" / SINGLE)
    odd = {"audio_encoder.step": torch.tensor(7), "audio_encoder.layers.0.attention.wo.weight": torch.ones(128, 128)}
    save_file(weights | odd, tmp_path / "model" / SINGLE)

    quantize(tmp_path / "model", tmp_path / "out")

    after = tensors_of(tmp_path / "out")
    assert all(torch.equal(after[name], tensor) for name, tensor in odd.items())
    assert after["audio_encoder.step"].dtype == torch.int64


def nothing_is_left(folder, names=("model",)):
    return sorted(path.name for path in folder.iterdir()) == sorted(names)


def refusal(model, out):
    with pytest.raises(PermanentError) as caught:
        quantize(model, out)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_model_with_a_number_that_is_none_is_refused_by_name_and_place(tmp_path, value):
    (tmp_path / "model").mkdir()
    write_checkpoint(tmp_path / "model", voice())
    weights = load_file(tmp_path / "model" / SINGLE)
    weights[W2][200, 300] = value
    save_file(weights, tmp_path / "model" / SINGLE)

    assert f"{W2} is {value} at [200, 300]" in refusal(tmp_path / "model", tmp_path / "out")
    assert nothing_is_left(tmp_path)


def test_what_cannot_be_begun_is_refused_in_words(written, tmp_path):
    shutil.copytree(written, tmp_path / "model")
    quantize(tmp_path / "model", tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "narrow").mkdir()
    write_checkpoint(tmp_path / "narrow")

    assert "out exists; choose another name" in refusal(tmp_path / "model", tmp_path / "out")
    assert "link exists" in refusal(tmp_path / "model", tmp_path / "link")
    assert "fp8_e4m3_128x128 already" in refusal(tmp_path / "out", tmp_path / "again")
    assert "nowhere must be a folder" in refusal(tmp_path / "model", tmp_path / "nowhere" / "out")
    assert "no multiple of 128 values" in refusal(tmp_path / "narrow", tmp_path / "again")
    assert "not a usable checkpoint" in refusal(tmp_path / "empty", tmp_path / "again")
    assert nothing_is_left(tmp_path, ("link", "model", "narrow", "out"))


def test_a_disk_without_room_is_said_before_anything_is_written(written, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_500_000))

    said = refusal(written, tmp_path / "out")

    assert "out takes 3 MB and the disk has 1 MB free; make room first" in said
    assert nothing_is_left(tmp_path, ())


def test_a_disk_that_fills_up_leaves_one_line_and_no_file(written, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)  # a write past it fails as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
    try:
        said = refusal(written, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert "out could not be written: File too large; what was begun of it is removed" in said
    assert nothing_is_left(tmp_path, ())


def test_what_a_killed_run_left_is_replaced_and_a_running_one_is_not(written, tmp_path):
    begun = tmp_path / ".out.begun"
    begun.mkdir()
    (begun / "model-00001-of-00002.safetensors").write_bytes(b"half")
    with (tmp_path / ".out.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        assert "another process is writing" in refusal(written, tmp_path / "out")
        assert (begun / "model-00001-of-00002.safetensors").read_bytes() == b"half"

    quantize(written, tmp_path / "out")
    assert nothing_is_left(tmp_path, ("out",))
    assert inspect(tmp_path / "out").quantization is not None


def test_a_source_that_shrinks_meanwhile_is_no_new_model(written, tmp_path):
    shutil.copytree(written, tmp_path / "model")

    def cut_off(name, done_bytes, total_bytes):
        for shard in (tmp_path / "model").glob("model-*"):
            os.truncate(shard, 4096)

    with pytest.raises(PermanentError, match="was it changed meanwhile"):
        quantize(tmp_path / "model", tmp_path / "out", progress=cut_off)

    assert nothing_is_left(tmp_path)


def test_a_terminated_process_removes_what_it_began(written, tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from slackwater_inference import quantize as m\n"
        "from slackwater_inference.commands.quantize import quantize\n"
        "whole = m._quantize\n"
        "def stop(*a):\n    os.kill(os.getpid(), signal.SIGTERM); return whole(*a)\n"
        "m._quantize = stop\n"
        f"quantize(Path({str(written)!r}), Path({str(tmp_path / 'out')!r}))"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)

    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert nothing_is_left(tmp_path, ())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the proof needs Linux's /proc")
def test_memory_does_not_grow_with_the_model(tmp_path):
    for name, vocab_size in (("small", 400), ("large", 500_000)):
        folder = tmp_path / name
        folder.mkdir()
        write_checkpoint(folder, voice(intermediate_size=8192, n_layer=1))
        weights = load_file(folder / SINGLE)
        weights[f"{SLOW}embeddings.weight"] = torch.zeros(vocab_size, 256, dtype=torch.bfloat16)
        save_file(weights, folder / SINGLE)
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["vocab_size"] = vocab_size
        write_json(folder / "config.json", config)
    code = (
        "import re; from pathlib import Path; from slackwater_inference.quantize import quantize\n"
        "for name in ('small', 'large'):\n"
        "    quantize(Path(name), Path(f'{name}-out'))\n"
        "    print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
    )

    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=True, timeout=120
    ).stdout

    small_kb, large_kb = map(int, out.split())
    assert large_kb - small_kb < 60_000  # for a table of 256 MB; it is read 4 MB at a time


def run(*arguments):
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)], env={"COLUMNS": "200"})


def test_the_command_sums_up_what_it_did(written, tmp_path):
    result = run(written, tmp_path / "out")

    assert result.exit_code == 0, result.output
    assert "feed_forward.w2: 3 in fp8_e4m3_128x128, relative error 2." in result.stdout
    assert "left in BF16: 3 tensors" in result.stdout
    assert "Weights:" in result.stdout


def test_the_command_prints_its_report_as_json_and_its_refusal_as_one_line(written, tmp_path):
    result = run(written, tmp_path / "out", "--format", "mxfp8", "--json")
    refused = run(written, tmp_path / "out")

    assert json.loads(result.stdout)["format"] == "mxfp8_e4m3_1x32"
    assert refused.exit_code == 1
    assert refused.stdout == ""
    assert refused.stderr == f"Error: {tmp_path / 'out'} exists; choose another name, or remove it first\n"


def test_a_long_run_says_how_far_it_is(written, tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 6))
    monkeypatch.setattr("slackwater_inference.commands.quantize.time.monotonic", lambda: float(next(clock)))

    result = run(written, tmp_path / "out")

    lines = [line for line in result.stderr.splitlines() if "s left:" in line]
    assert len(lines) >= 3
    assert lines[-1].startswith(("9", "100%"))
    assert Path(tmp_path / "out").is_dir()
