import pickle

import pytest
import torch
from safetensors.torch import save_file

from slackwater_inference.codec.codec import Codec
from slackwater_inference.codec.shapes import codec_weight_shapes
from slackwater_inference.codec.weights import check_codec_weights, load_codec, seeded_codec_weights
from slackwater_inference.config import CodecConfig
from slackwater_inference.testing.codec import published_layout, random_codec_weights
from slackwater_inference.testing.model import micro_codec

pytestmark = pytest.mark.usefixtures("one_thread")

MICRO = micro_codec()
DIMS = (MICRO, 3, 40)
WEIGHTS = random_codec_weights(*DIMS, seed=0)


@pytest.fixture
def stored():
    return published_layout(WEIGHTS, MICRO)


def test_the_published_codec_has_the_tensors_of_its_file():
    shapes = codec_weight_shapes(CodecConfig(), 10, 4096)

    # Counts and anchors as dumps of the published file list them, less its six tables of masks and positions.
    parts = [sum(name.startswith(part) for name in shapes) for part in ("encoder.", "quantizer.", "decoder.")]
    assert parts == [126, 240, 89]
    assert CodecConfig().frame_samples == 2048
    anchors = {
        "encoder.block.0.conv.weight": (64, 1, 7),
        "encoder.block.4.block.4.conv.weight": (1024, 512, 16),
        "encoder.block.4.block.5.layers.3.attention.wqkv.weight": (3072, 1024),
        "encoder.block.6.conv.weight": (1024, 1024, 3),
        "quantizer.semantic_quantizer.quantizers.0.codebook.weight": (4096, 8),
        "quantizer.semantic_quantizer.quantizers.0.in_proj.weight": (8, 1024, 1),
        "quantizer.quantizer.quantizers.8.out_proj.weight": (1024, 8, 1),
        "quantizer.downsample.1.0.conv.weight": (1024, 1024, 2),
        "quantizer.upsample.1.1.pwconv1.weight": (4096, 1024),
        "quantizer.post_module.layers.7.feed_forward.w1.weight": (3072, 1024),
        "decoder.model.0.conv.weight": (1536, 1024, 7),
        "decoder.model.1.block.1.conv.weight": (1536, 768, 16),
        "decoder.model.4.block.4.block.1.conv.weight": (96, 96, 7),
        "decoder.model.5.alpha": (1, 96, 1),
        "decoder.model.6.conv.weight": (1, 96, 7),
    }
    assert {name: shapes[name] for name in anchors} == anchors


def saved_pth(tensors, folder):
    torch.save(tensors, folder / "codec.pth")
    return folder / "codec.pth"


def saved_wrapped(tensors, folder):
    generator = {f"generator.{name}": tensor for name, tensor in tensors.items()}
    return saved_pth({"state_dict": {**generator, "discriminator.conv.weight": torch.zeros(3)}}, folder)


def saved_safetensors(tensors, folder):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "codec.safetensors")
    return folder / "codec.safetensors"


@pytest.mark.parametrize("save", [saved_pth, saved_wrapped, saved_safetensors])
def test_a_file_in_the_published_layout_sounds_as_its_weights(save, stored, tmp_path):
    codec = Codec(*DIMS, load_codec(save(stored, tmp_path), *DIMS))

    codes = torch.randint(0, 24, (1, 3, 20), generator=torch.Generator().manual_seed(0))
    audio, _ = codec.decode(codes, [codec.new_state()])
    plain = Codec(*DIMS, WEIGHTS)
    expected, _ = plain.decode(codes, [plain.new_state()])
    torch.testing.assert_close(audio, expected, atol=1e-5, rtol=0)
    assert torch.equal(codec.encode(expected[0]), plain.encode(expected[0]))


def test_a_file_in_bf16_is_computed_in_fp32(tmp_path):
    halves = {name: tensor.bfloat16() for name, tensor in WEIGHTS.items()}

    codec = Codec(*DIMS, load_codec(saved_pth(halves, tmp_path), *DIMS))

    audio, _ = codec.decode(torch.ones(1, 3, 4, dtype=torch.int64), [codec.new_state()])
    assert audio.dtype == torch.float32


NORMED = "decoder.model.0.conv.parametrizations.weight."


@pytest.mark.parametrize(
    ("name", "tensor", "complaint"),
    [
        pytest.param("decoder.model.0.conv.bias", None, "missing decoder.model.0.conv.bias", id="missing"),
        pytest.param(f"{NORMED}original0", None, f"missing {NORMED}original0", id="a gain is missing"),
        pytest.param(f"{NORMED}original1", None, f"missing {NORMED}original1", id="a direction is missing"),
        pytest.param("decoder.model.9.alpha", torch.ones(1, 2, 1), "extra decoder.model.9.alpha", id="extra"),
        pytest.param(
            "decoder.model.0.conv.weight", torch.zeros(8, 8, 7), f"extra {NORMED}original0", id="whole and apart"
        ),
        pytest.param(
            "quantizer.post_module.norm.weight", torch.ones(9), r"norm.weight must be \[8\], got \[9\]", id="shape"
        ),
        pytest.param(
            f"{NORMED}original0", torch.ones(1, 8, 1), r"original0 must be \[8, 1, 1\], got \[1, 8, 1\]", id="gain's"
        ),
        pytest.param(
            "encoder.block.0.conv.bias", torch.zeros(4, dtype=torch.int8), "floating point, got int8", id="integers"
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(name, tensor, complaint, stored, tmp_path):
    stored.pop(name, None)
    if tensor is not None:
        stored[name] = tensor

    with pytest.raises(ValueError, match=complaint) as caught:
        load_codec(saved_pth(stored, tmp_path), *DIMS)

    assert "\n" not in str(caught.value)


def test_every_fault_is_named_at_once():
    weights = {name: tensor for name, tensor in WEIGHTS.items() if "in_proj" not in name}

    with pytest.raises(ValueError, match="missing") as caught:
        check_codec_weights(weights, *DIMS)

    assert str(caught.value).count("missing") == 6  # weight and bias of three codebooks


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('the file ran code')",))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        pytest.param("codec.pth", b"", id="empty"),
        pytest.param("codec.pth", b"not a checkpoint at all", id="other bytes"),
        pytest.param("codec.pth", pickle.dumps(Bomb()), id="a pickle that runs code"),
        pytest.param("codec.safetensors", b"\xff" * 100, id="no safetensors"),
        pytest.param("codec.pth", None, id="no file"),
    ],
)
def test_a_file_that_is_no_codec_is_refused_in_one_line(file, content, tmp_path):
    if content is not None:
        (tmp_path / file).write_bytes(content)

    with pytest.raises(ValueError, match="cannot read it") as caught:
        load_codec(tmp_path / file, *DIMS)

    assert "\n" not in str(caught.value)


def test_a_cut_file_is_refused(stored, tmp_path):
    path = saved_pth(stored, tmp_path)
    path.write_bytes(path.read_bytes()[:-500])

    with pytest.raises(ValueError, match="cannot read it"):
        load_codec(path, *DIMS)


def test_a_zipped_pickle_that_runs_code_is_refused(tmp_path):
    torch.save({"x": Bomb()}, tmp_path / "codec.pth")

    with pytest.raises(ValueError, match="cannot read it"):
        load_codec(tmp_path / "codec.pth", *DIMS)


@pytest.mark.parametrize("content", [torch.zeros(3), {"epoch": 3}, [torch.zeros(3)]])
def test_a_file_of_other_things_is_refused(content, tmp_path):
    torch.save(content, tmp_path / "codec.pth")

    with pytest.raises(ValueError, match="must map names to tensors"):
        load_codec(tmp_path / "codec.pth", *DIMS)


def test_seeded_weights_fit_and_depend_on_the_seed_only():
    one, same, other = (seeded_codec_weights(*DIMS, seed) for seed in (5, 5, 6))

    check_codec_weights(one, *DIMS)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["decoder.model.0.conv.weight"], other["decoder.model.0.conv.weight"])
