"""The codec's weights: read from a file, checked against the config, baked, or seeded for the embedded voice.

Owns what a codec file may look like.  A weight-normed tensor stays as it lies in the file until the part that
needs it is built (`bake`), so that a server which only decodes never touches the pages of the encoder.
Called at start-up and by the network's parts.
"""

import hashlib
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from slackwater_inference.codec.shapes import codec_weight_shapes, encode_shapes
from slackwater_inference.config import CodecConfig

Weights = dict[str, Tensor]

# Gain and direction of a weight-normed tensor: as the codec's own convolutions and its codebooks' projections have it.
_NORMED = ((".parametrizations.weight.original0", ".parametrizations.weight.original1"), (".weight_g", ".weight_v"))

# In the published file, and not needed: tables that are computed, and a part that only training has.
IGNORED_SUFFIXES = (".causal_mask", ".freqs_cis")
IGNORED_PREFIXES = ("quantizer.semantic_predictor_module.",)

_FINGERPRINT_VALUES = 64
_ROUGH_LEVEL = 2  # the block of the decoder that makes the hum
_HUM_LEVEL = 0.5  # gain of the last convolution, for a root mean square near 0.17


def bake(weights: Weights, name: str) -> Tensor:
    """fp32 weight of the convolution under `name`, whether it lies there whole or as gain and direction."""
    if f"{name}.weight" in weights:
        whole: Tensor = weights[f"{name}.weight"].float()
        return whole
    for gain_suffix, direction_suffix in _NORMED:
        if f"{name}{gain_suffix}" in weights:
            gain, direction = weights[f"{name}{gain_suffix}"].float(), weights[f"{name}{direction_suffix}"].float()
            length: Tensor = torch.linalg.vector_norm(direction, dim=(1, 2), keepdim=True)
            return direction * (gain / length)
    raise KeyError(f"{name}.weight")


def codec_faults(weights: Weights, config: CodecConfig, num_codebooks: int, num_semantic: int) -> list[str]:
    """One line for each tensor that is missing, extra, of a wrong shape or no floating-point number; sorted."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in codec_weight_shapes(config, num_codebooks, num_semantic).items():
        expected |= _as_stored(weights, name, shape)
    faults = [f"missing {name}" for name in expected.keys() - weights.keys()]
    faults += [f"extra {name}" for name in weights.keys() - expected.keys() if not _is_ignored(name)]
    for name in expected.keys() & weights.keys():
        tensor, shape = weights[name], expected[name]
        if tuple(tensor.shape) != shape:
            faults.append(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
        if not tensor.is_floating_point():
            faults.append(f"{name} must be floating point, got {str(tensor.dtype).removeprefix('torch.')}")
    return sorted(faults)


def check_codec_weights(weights: Weights, config: CodecConfig, num_codebooks: int, num_semantic: int) -> None:
    """Raise ValueError naming every fault of `codec_faults`."""
    if faults := codec_faults(weights, config, num_codebooks, num_semantic):
        raise ValueError(f"the codec's weights do not fit its config: {'; '.join(faults)}")


def load_codec(path: Path, config: CodecConfig, num_codebooks: int, num_semantic: int) -> Weights:
    """The tensors of a codec file, memory-mapped, by the names of `codec_weight_shapes`; weight-norm is not baked yet.

    path: `*.safetensors`, or a `torch.save` file (`codec.pth`), of which nothing but tensors is ever unpickled.  Its
    tensors may lie under `state_dict`, and under `generator.` beside a discriminator, which is left out.
    Raises ValueError in one line for a file that cannot be read or does not fit the config, naming every fault.
    """
    tensors = _read(path)
    if any(name.startswith("generator.") for name in tensors):
        tensors = {n.removeprefix("generator."): t for n, t in tensors.items() if n.startswith("generator.")}
    weights = {name: tensor for name, tensor in tensors.items() if not _is_ignored(name)}
    check_codec_weights(weights, config, num_codebooks, num_semantic)
    return weights


def _read(path: Path) -> Weights:
    try:
        if path.suffix == ".safetensors":
            loaded: Any = load_file(path)
        else:
            loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]  # torch goes on with advice, in colours
        raise ValueError(f"must be a file of the codec's tensors, cannot read it ({reason}); copy it anew") from error
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError("must map names to tensors and nothing else; is it a codec's file?")
    return loaded


def fingerprint(weights: Weights, config: CodecConfig, num_codebooks: int, num_semantic: int) -> str:
    """Short name of what encoding depends on: the config and values spread evenly over each tensor.

    A sample, since hashing two gigabytes at start-up would read in the encoder that may never be needed.
    """
    digest = hashlib.sha256(f"{config.model_dump_json()} {num_codebooks} {num_semantic}".encode())
    for name, shape in sorted(encode_shapes(config, num_codebooks, num_semantic).items()):
        for stored in sorted(_as_stored(weights, name, shape)):
            flat = weights[stored].flatten()
            picked = flat[:: max(1, len(flat) // _FINGERPRINT_VALUES)]
            digest.update(stored.encode() + picked.float().numpy().tobytes())
    return digest.hexdigest()[:16]


def seeded_codec_weights(config: CodecConfig, num_codebooks: int, num_semantic: int, seed: int) -> Weights:
    """Random weights that depend on the arguments only, with which any codes hum pleasantly.

    Raised-cosine kernels only smooth and interpolate.  One level alone has a random kernel: it repeats with every
    input of that level, which makes a hum of that frequency, and no hiss.
    """
    g = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, shape in codec_weight_shapes(config, num_codebooks, num_semantic).items():
        if name.endswith((".alpha", "norm.weight")):
            value = torch.ones(shape)
        elif name.endswith(".gamma"):
            value = torch.full(shape, 0.1)
        elif name.endswith(".bias"):
            value = torch.zeros(shape)
        elif name.endswith("codebook.weight") or len(shape) == 2:
            value = torch.randn(shape, generator=g) * shape[1] ** -0.5
        elif name.startswith("decoder."):
            value = _humming_kernel(g, name, shape, len(config.decoder_rates))
        else:
            value = torch.randn(shape, generator=g) * math.prod(shape[1:]) ** -0.5
        weights[name] = value
    return weights


def _humming_kernel(g: torch.Generator, name: str, shape: tuple[int, ...], num_blocks: int) -> Tensor:
    """A decoder's kernel: [out, in, k], or [in, out, 2 * stride] of a transposed convolution.

    From the rough level on, the second half of the channels is the first one's negative: what Snake adds to both is
    equal, cancels in their difference, and so brings neither rumble nor an offset into the sound.
    """
    position, _, rest = name.removeprefix("decoder.model.").partition(".")
    block, is_transposed = int(position), rest == "block.1.conv.weight"
    is_rough = is_transposed and block == _ROUGH_LEVEL
    channels_in, channels_out = shape[:2] if is_transposed else (shape[1], shape[0])
    is_behind_rough = block > _ROUGH_LEVEL or (block == _ROUGH_LEVEL and not is_transposed)
    has_mirrored_out = block >= _ROUGH_LEVEL and channels_out % 2 == 0
    has_mirrored_in = is_behind_rough and channels_in % 2 == 0
    num_out = channels_out // 2 if has_mirrored_out else channels_out
    num_in = channels_in // 2 if has_mirrored_in else channels_in

    mix = torch.randn((num_out, num_in, shape[2] if is_rough else 1), generator=g)
    mix = mix / mix.square().sum(1, keepdim=True).mean(2, keepdim=True).sqrt()
    kernel = _bump(shape[2])
    if is_rough:
        mix = mix - (mix * kernel).sum(2, keepdim=True) / kernel.sum()  # a constant input makes no offset
    mix = mix * kernel if is_transposed else mix * kernel / kernel.sum()
    if block > num_blocks:
        mix = mix * _HUM_LEVEL
    elif rest.endswith(".block.3.conv.weight"):
        mix = mix * 0.5  # a residual unit colours, it does not drown what it is added to
    if has_mirrored_in:
        mix = torch.cat((mix, -mix), 1) / 2
    if has_mirrored_out:
        mix = torch.cat((mix, -mix), 0)
    return mix.transpose(0, 1).contiguous() if is_transposed else mix


def _bump(length: int) -> Tensor:
    """A raised cosine; copies of it half a length apart add up to 1."""
    return torch.sin(math.pi * (torch.arange(length) + 0.5) / length).square()


def _as_stored(weights: Weights, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names and shapes under which the tensor `name` lies in `weights`: whole, or as gain and direction."""
    stem = name.removesuffix(".weight")
    if name not in weights and stem != name:
        for gain_suffix, direction_suffix in _NORMED:
            if f"{stem}{gain_suffix}" in weights or f"{stem}{direction_suffix}" in weights:
                return {f"{stem}{gain_suffix}": (shape[0], 1, 1), f"{stem}{direction_suffix}": shape}
    return {name: shape}


def _is_ignored(name: str) -> bool:
    return name.endswith(IGNORED_SUFFIXES) or name.startswith(IGNORED_PREFIXES)
