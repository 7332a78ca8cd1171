"""Folders with weights in 8 bits: read back, widened or laid out for kernels, and refused where they do not fit."""

import json
import logging
from dataclasses import replace

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from slackwater_inference.budget import budget
from slackwater_inference.checkpoint import BadCheckpoint, load
from slackwater_inference.commands.plan import plan
from slackwater_inference.config import EngineConfig
from slackwater_inference.config.published import VERSION, Quantization, WeightFormat
from slackwater_inference.core import SamplingParams
from slackwater_inference.folder import inspect
from slackwater_inference.model import eight_bit
from slackwater_inference.model.headers import SINGLE
from slackwater_inference.model.shapes import FAST, SLOW
from slackwater_inference.quantize import quantize
from slackwater_inference.testing.checkpoint import split_projections, write_checkpoint, write_weights
from slackwater_inference.testing.model import generate, micro, reference_choices
from slackwater_inference.text.prompt import PromptBuilder
from slackwater_kernels import layout, reference
from slackwater_kernels.canary import check_mx_weight, check_weight

pytestmark = pytest.mark.usefixtures("one_thread")

WQKV, W1 = f"{SLOW}layers.0.attention.wqkv.weight", f"{SLOW}layers.1.feed_forward.w1.weight"
FORMS = pytest.mark.parametrize("form", WeightFormat)


def voice():
    return micro(dim=256, heads=(4, 2), head_dim=96, intermediate_size=640).model_copy(
        update={"weight_dtype": "bfloat16"}
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders of one model, by form, and the model's weights."""
    top = tmp_path_factory.mktemp("eight")
    (top / "model").mkdir()
    model, weights = write_checkpoint(top / "model", voice())
    for form in WeightFormat:
        quantize(top / "model", top / form, form)
    return top, model, weights


@pytest.fixture
def small(folders, tmp_path):
    """A copy of the block-scaled folder, to be spoilt."""
    for path in (folders[0] / WeightFormat.BLOCKSCALE).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def change_weights(folder, change):
    weights = load_file(folder / SINGLE)
    change(weights)
    save_file(weights, folder / SINGLE)


def change_config(folder, change):
    data = json.loads((folder / "config.json").read_text())
    change(data)
    (folder / "config.json").write_text(json.dumps(data))


def faults_of(folder):
    with pytest.raises(BadCheckpoint) as caught:
        load(folder)
    return caught.value.faults


def widened(weight, form):
    if form is WeightFormat.BLOCKSCALE:
        return reference.dequantize_weight(reference.quantize_weight(weight)).float().bfloat16()
    return reference.dequantize_mx(reference.quantize_mx(weight)).float().bfloat16()


@FORMS
def test_without_a_kernel_the_weights_are_widened_and_it_is_said(folders, form, caplog):
    top, model, weights = folders

    with caplog.at_level(logging.WARNING):
        loaded = load(top / form)

    assert loaded.weights.keys() == weights.keys()
    assert not loaded.handles
    for name, weight in weights.items():
        wanted = (
            widened(weight, form) if name.endswith(("wqkv.weight", "wo.weight")) or "feed_forward" in name else weight
        )
        assert torch.equal(loaded.weights[name], wanted), name
    assert f"widened tensors=15 from={form} to=bfloat16: no kernel multiplies them in 8 bits on cpu" in caplog.text
    assert loaded.config.text_config == model.text_config


@FORMS
def test_the_engines_model_runs_such_a_folder(folders, form):
    loaded = load(folders[0] / form)
    prompt = PromptBuilder(loaded.config, loaded.tokenizer).prompt("hello")
    sampling = SamplingParams(temperature=0.0)

    made = generate(loaded.config, loaded.weights, prompt, sampling, 5)

    assert made == reference_choices(loaded.weights, loaded.config, prompt, sampling, made)


def test_projections_that_are_stored_apart_are_widened_and_joined(tmp_path):
    (tmp_path / "model").mkdir()
    model, weights = write_checkpoint(tmp_path / "model", voice())
    apart = split_projections(weights, model)
    write_weights(tmp_path / "model", apart)
    quantize(tmp_path / "model", tmp_path / "out")

    loaded = load(tmp_path / "out")

    parts = [apart[WQKV.replace("wqkv", part)] for part in ("wq", "wk", "wv")]
    assert torch.equal(loaded.weights[WQKV], torch.cat([widened(p, WeightFormat.BLOCKSCALE) for p in parts]))


def with_kernels(monkeypatch, spoil=lambda handle: handle):
    """As on a device with kernels, whose product is the reference."""

    def blockscale(x, weight, workspace):
        return reference.bsgemm(x, weight.canonical()).bfloat16()

    def mx(x, weight, workspace):
        return (reference.dequantize_mx(x.canonical()) @ reference.dequantize_mx(weight.canonical()).T).bfloat16()

    monkeypatch.setattr(eight_bit, "supported", lambda operation, device: True)
    monkeypatch.setattr(
        eight_bit, "check_weight", lambda handle, weight: check_weight(spoil(handle), weight, blockscale)
    )
    monkeypatch.setattr(eight_bit, "check_mx_weight", lambda handle, weight: check_mx_weight(spoil(handle), weight, mx))


@FORMS
def test_with_a_kernel_the_weights_become_handles_that_it_has_proven(folders, form, monkeypatch, caplog):
    top, _, weights = folders
    with_kernels(monkeypatch)

    loaded = load(top / form)

    assert loaded.handles.keys() | loaded.weights.keys() == weights.keys()
    assert len(loaded.handles) == 15
    quantised = {WeightFormat.BLOCKSCALE: reference.quantize_weight, WeightFormat.MXFP8: reference.quantize_mx}[form]
    whole, wanted = loaded.handles[WQKV].canonical(), quantised(weights[WQKV])
    assert torch.equal(whole.codes, wanted.codes)
    assert torch.equal(whole.scales, wanted.scales)
    assert "widened" not in caplog.text


@FORMS
def test_a_weight_that_its_kernel_misreads_is_refused_by_name(folders, form, monkeypatch):
    with_kernels(monkeypatch, lambda handle: replace(handle, scales=handle.scales.roll(1)))

    [fault] = faults_of(folders[0] / form)

    assert fault.startswith(f"{WQKV}: row ")
    assert "wrong order" in fault


@pytest.mark.gpu
def test_on_a_gpu_each_weight_is_proven_by_its_own_kernel(folders):
    loaded = load(folders[0] / WeightFormat.BLOCKSCALE, "cuda")

    assert len(loaded.handles) == 15
    assert all(handle.codes.is_cuda for handle in loaded.handles.values())


def test_parts_are_joined_only_where_blocks_stay_whole():
    def part(rows):
        return reference.quantize_weight(torch.randn(rows, 256))

    whole = [part(128), part(256), part(72)]

    joined = eight_bit.joined(whole)

    assert torch.equal(
        reference.dequantize_weight(joined), torch.cat([reference.dequantize_weight(weight) for weight in whole])
    )
    assert eight_bit.joined([part(72), part(128)]) is None


def drop(name):
    return lambda weights: weights.pop(name)


def put(name, make):
    return lambda weights: weights.update({name: make(weights[name])})


def at(value):
    def change(scales):
        scales[2, 1] = value
        return scales

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        pytest.param(drop(f"{W1}_scale_inv"), f"missing {W1}_scale_inv, the scales of {W1}", id="no scales"),
        pytest.param(
            put(f"{W1}_scale_inv", lambda s: s.T.contiguous()),
            f"{W1}_scale_inv must be F32 [5, 2] for {W1} [640, 256], got F32 [2, 5]; was it saved transposed?",
            id="transposed scales",
        ),
        pytest.param(
            put(f"{W1}_scale_inv", lambda s: s[:4].contiguous()), f"{W1}_scale_inv must be F32 [5, 2]", id="too few"
        ),
        pytest.param(put(f"{W1}_scale_inv", torch.Tensor.bfloat16), "got BF16 [5, 2]", id="scales in bf16"),
        pytest.param(
            put(f"{W1}_scale_inv", at(torch.nan)), f"{W1} has the scale nan at [2, 1]", id="a scale that is NaN"
        ),
        pytest.param(put(f"{W1}_scale_inv", at(0.0)), f"{W1} has the scale 0 at [2, 1]", id="a scale of zero"),
        pytest.param(put(f"{W1}_scale_inv", at(-1.0)), f"{W1} has the scale -1 at [2, 1]", id="a negative scale"),
        pytest.param(put(f"{W1}_scale_inv", at(torch.inf)), f"{W1} has the scale inf", id="an infinite scale"),
        pytest.param(
            put(W1, lambda w: at(0x7F)(w.view(torch.uint8)).view(torch.float8_e4m3fn)), f"{W1} is NaN at [2, 1]",
            id="a code that is NaN",
        ),
        pytest.param(put(W1, torch.Tensor.bfloat16), f"extra {W1}_scale_inv", id="scales of a plain weight"),
        pytest.param(
            put(f"{FAST}output.weight", lambda w: w.to(torch.float8_e4m3fn)), "output.weight must be BF16",
            id="a head in 8 bits",
        ),
    ],
)  # fmt: skip
def test_codes_and_scales_that_do_not_fit_are_refused_by_name(small, change, complaint):
    change_weights(small, change)

    faults = faults_of(small)

    assert len(faults) == 1
    assert complaint in faults[0]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        pytest.param({"version": 2}, "config.json: quantization_config.version: Input should be 1, got 2", id="newer"),
        pytest.param({"format": "fp8_rowwise"}, "quantization_config.format: Input should be 'fp8_e4m3_128x128'",
                     id="another format"),
        pytest.param({"format": None}, "quantization_config.format", id="no format"),
        pytest.param({"rule": "rceil"}, "rule must be left out with format fp8", id="a rule that it cannot have"),
        pytest.param({"format": "mxfp8_e4m3_1x32"}, "rule must be there with format mxfp8", id="no rule"),
    ],
)  # fmt: skip
def test_an_unknown_form_is_refused(small, change, complaint):
    change_config(small, lambda data: data["quantization_config"].update(change))

    assert any(complaint in fault for fault in faults_of(small))


def test_codes_that_nothing_speaks_of_are_refused(small):
    change_config(small, lambda data: data.pop("quantization_config"))

    faults = faults_of(small)

    assert f"{W1} must be BF16 as the embeddings are, got F8_E4M3" in faults
    assert f"extra {W1}_scale_inv" in faults


def test_codes_of_another_kind_are_refused(small):
    change_weights(small, put(W1, lambda w: w.float().to(torch.float8_e5m2)))

    assert f"{W1} must be BF16 as the embeddings are, got F8_E5M2" in faults_of(small)


def test_a_claim_without_codes_is_refused(folders, small):
    (small / SINGLE).write_bytes((folders[0] / "model" / SINGLE).read_bytes())

    assert faults_of(small) == (
        "config.json: quantization_config says that weights are in 8 bits, but none is F8_E4M3",
    )


def test_a_byte_that_is_no_exponent_is_refused(folders, tmp_path):
    for path in (folders[0] / WeightFormat.MXFP8).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    change_weights(tmp_path, put(f"{W1}_scale_inv", at(255)))

    assert faults_of(tmp_path) == (f"{W1} has the scale 255 at [2, 1], which no quantiser writes",)


def test_the_names_on_disk_are_those_of_the_kernels_forms():
    said = {WeightFormat.BLOCKSCALE: layout.CanonicalWeight.FORMAT, WeightFormat.MXFP8: layout.CanonicalMx.FORMAT}

    assert {form: form.value for form in WeightFormat} == said
    assert Quantization(format=WeightFormat.BLOCKSCALE, version=VERSION).version == layout.VERSION == VERSION


@FORMS
def test_the_plan_counts_codes_and_scales_as_they_are(folders, form):
    top = folders[0]
    found = inspect(top / form)
    app = typer.Typer()
    app.command()(plan)

    small = CliRunner().invoke(app, [str(top / form), "--json", "--gpu-memory-gib", "2"])
    wide = CliRunner().invoke(app, [str(top / form), "--json", "--dtype", "bfloat16"])
    told = CliRunner().invoke(app, [str(top / form)], env={"COLUMNS": "200"})

    items = {item["name"]: item["size_bytes"] for item in json.loads(small.stdout)["items"]}
    counted = sum(items[name] for name in ("slow transformer", "fast transformer", "embeddings"))
    assert counted == sum(tensor.nbytes for tensor in load_file(top / form / SINGLE).values())
    assert json.loads(wide.stdout)["items"] == [
        {name: getattr(item, name) for name in ("group", "name", "size_bytes", "note", "is_estimate")}
        for item in budget(found.config, EngineConfig(), "bfloat16").items
    ]
    assert "10 matrices in 8 bits with their scales" in told.stdout
    assert "--dtype bfloat16 counts what a machine without their kernels takes" in told.stdout
