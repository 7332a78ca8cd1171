"""What tests of the codec share: random weights, the published file's layout, and a slow reference of the network.

The reference does everything at once, with the paddings and trims that the published code has, and shares with the
product only the weights' names.  Not imported by the product.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from slackwater_inference.codec.shapes import codebook_name, codec_weight_shapes
from slackwater_inference.codec.weights import Weights
from slackwater_inference.config import CodecConfig
from slackwater_inference.config.codec import CodecTransformerConfig


def random_codec_weights(config: CodecConfig, num_codebooks: int, num_semantic: int, seed: int) -> Weights:
    """Weights in which every tensor matters: gains and Snake's alpha vary, layer scales are large."""
    g = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, shape in codec_weight_shapes(config, num_codebooks, num_semantic).items():
        noise = torch.randn(shape, generator=g)
        if name.endswith((".alpha", "norm.weight", ".gamma")):
            weights[name] = 1.0 + 0.2 * noise.clamp(-2, 2)
        elif name.endswith(".bias"):
            weights[name] = 0.1 * noise
        else:
            weights[name] = 0.7 * noise * math.prod(shape[1:]) ** -0.5
    return weights


def published_layout(weights: Weights, config: CodecConfig) -> Weights:
    """The same weights as `codec.pth` has them: gain and direction apart, and the tables that nobody needs."""
    stored: Weights = {}
    for name, tensor in weights.items():
        stem = name.removesuffix(".weight")
        length = tensor.reshape(len(tensor), -1).norm(dim=1).view(-1, 1, 1)
        if name.endswith((".in_proj.weight", ".out_proj.weight")):
            stored |= {f"{stem}.weight_g": length, f"{stem}.weight_v": 3.0 * tensor}
        elif name.endswith(".conv.weight") and name.startswith(("encoder.", "decoder.")):
            normed = f"{stem}.parametrizations.weight."
            stored |= {f"{normed}original0": length, f"{normed}original1": 3.0 * tensor}
        else:
            stored[name] = tensor
    for module in ("pre_module", "post_module"):
        stored[f"quantizer.{module}.causal_mask"] = torch.ones(4, 4, dtype=torch.bool)
        stored[f"quantizer.{module}.freqs_cis"] = torch.zeros(4, config.post_module.head_dim // 2, 2).bfloat16()
    return stored


def reference_decode(weights: Weights, config: CodecConfig, codes: Tensor) -> Tensor:
    """Samples [b, n * frame_samples] of codes [b, num_codebooks, n]."""
    x = torch.zeros(len(codes), config.latent_dim, codes.shape[2])
    for i in range(codes.shape[1]):
        name = codebook_name(i)
        rows = weights[f"{name}codebook.weight"]
        entries = rows[codes[:, i].clamp(max=len(rows) - 1)].transpose(1, 2)  # [b, codebook_dim, n]
        x = x + F.conv1d(entries, weights[f"{name}out_proj.weight"], weights[f"{name}out_proj.bias"])
    x = _transformer(weights, "quantizer.post_module.", config.post_module, x)
    for i, factor in enumerate(reversed(config.downsample_factors)):
        x = _transposed(weights, f"quantizer.upsample.{i}.0.conv", x, factor)
        x = _convnext(weights, f"quantizer.upsample.{i}.1.", x)
    x = _conv(weights, "decoder.model.0.conv", x)
    for i, rate in enumerate(config.decoder_rates):
        block = f"decoder.model.{i + 1}.block."
        x = _transposed(weights, f"{block}1.conv", _snake(weights, f"{block}0", x), rate)
        for j, dilation in enumerate(config.dilations):
            x = _residual_unit(weights, f"{block}{j + 2}.block.", x, dilation)
    last = len(config.decoder_rates) + 1
    x = _conv(weights, f"decoder.model.{last + 1}.conv", _snake(weights, f"decoder.model.{last}", x))
    return x.tanh()[:, 0]


def reference_encode(weights: Weights, config: CodecConfig, num_codebooks: int, samples: Tensor) -> Tensor:
    """Codes [num_codebooks, n] of samples [n * frame_samples]."""
    x = _conv(weights, "encoder.block.0.conv", samples[None, None])
    num_units = len(config.dilations)
    for i, (rate, transformer) in enumerate(zip(config.encoder_rates, config.encoder_transformers, strict=True)):
        block = f"encoder.block.{i + 1}.block."
        for j, dilation in enumerate(config.dilations):
            x = _residual_unit(weights, f"{block}{j}.block.", x, dilation)
        x = _conv(weights, f"{block}{num_units + 1}.conv", _snake(weights, f"{block}{num_units}", x), stride=rate)
        if transformer is not None:
            x = _transformer(weights, f"{block}{num_units + 2}.", transformer, x)
    last = len(config.encoder_rates) + 1
    x = _conv(weights, f"encoder.block.{last + 1}.conv", _snake(weights, f"encoder.block.{last}", x))
    for i, factor in enumerate(config.downsample_factors):
        x = _conv(weights, f"quantizer.downsample.{i}.0.conv", x, stride=factor)
        x = _convnext(weights, f"quantizer.downsample.{i}.1.", x)
    residual = _transformer(weights, "quantizer.pre_module.", config.pre_module, x)
    rows = []
    for i in range(num_codebooks):
        name = codebook_name(i)
        entries = weights[f"{name}codebook.weight"]
        projected = F.conv1d(residual, weights[f"{name}in_proj.weight"], weights[f"{name}in_proj.bias"])[0].T
        unit, unit_entries = (t / t.norm(dim=1, keepdim=True) for t in (projected, entries))
        code = (unit[:, None] - unit_entries[None]).square().sum(2).argmin(1)
        rows.append(code)
        chosen = entries[code].T[None]
        residual = residual - F.conv1d(chosen, weights[f"{name}out_proj.weight"], weights[f"{name}out_proj.bias"])
    return torch.stack(rows)


def _conv(weights: Weights, name: str, x: Tensor, stride: int = 1, dilation: int = 1, groups: int = 1) -> Tensor:
    weight = weights[f"{name}.weight"]
    span = (weight.shape[2] - 1) * dilation + 1
    padded = F.pad(x, (span - stride, 0))
    return F.conv1d(padded, weight, weights[f"{name}.bias"], stride, 0, dilation, groups)


def _transposed(weights: Weights, name: str, x: Tensor, stride: int) -> Tensor:
    out = F.conv_transpose1d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], stride)
    return out[:, :, : x.shape[2] * stride]


def _snake(weights: Weights, name: str, x: Tensor) -> Tensor:
    alpha = weights[f"{name}.alpha"]
    return x + (1.0 / (alpha + 1e-9)) * torch.sin(alpha * x) ** 2


def _residual_unit(weights: Weights, name: str, x: Tensor, dilation: int) -> Tensor:
    inner = _conv(weights, f"{name}1.conv", _snake(weights, f"{name}0", x), dilation=dilation)
    return x + _conv(weights, f"{name}3.conv", _snake(weights, f"{name}2", inner))


def _convnext(weights: Weights, name: str, x: Tensor) -> Tensor:
    inner = _conv(weights, f"{name}dwconv.conv", x, groups=x.shape[1]).transpose(1, 2)
    centred = inner - inner.mean(2, keepdim=True)
    inner = centred / (centred.square().mean(2, keepdim=True) + 1e-6).sqrt()
    inner = inner * weights[f"{name}norm.weight"] + weights[f"{name}norm.bias"]
    inner = inner @ weights[f"{name}pwconv1.weight"].T + weights[f"{name}pwconv1.bias"]
    inner = inner * 0.5 * (1.0 + torch.erf(inner / 2**0.5))
    inner = inner @ weights[f"{name}pwconv2.weight"].T + weights[f"{name}pwconv2.bias"]
    return x + (inner * weights[f"{name}gamma"]).transpose(1, 2)


def _transformer(weights: Weights, name: str, config: CodecTransformerConfig, x: Tensor) -> Tensor:
    x = x.transpose(1, 2)  # [b, n, dim]
    row, column = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])[None]
    is_hidden = (column > row) | (column < row - config.window_size + 1)
    for i in range(config.n_layer):
        layer = f"{name}layers.{i}."
        qkv = _norm(x, weights[f"{layer}attention_norm.weight"], config) @ weights[f"{layer}attention.wqkv.weight"].T
        outs = []
        for head in range(config.n_head):
            q, k, v = (part[..., head * config.head_dim : (head + 1) * config.head_dim] for part in qkv.chunk(3, dim=2))
            scores = _rotated(q, config) @ _rotated(k, config).transpose(1, 2) / config.head_dim**0.5
            outs.append(scores.masked_fill(is_hidden, float("-inf")).softmax(2) @ v)
        attended = torch.cat(outs, 2) @ weights[f"{layer}attention.wo.weight"].T
        x = x + attended * weights[f"{layer}attention_layer_scale.gamma"]
        normed = _norm(x, weights[f"{layer}ffn_norm.weight"], config)
        gate = normed @ weights[f"{layer}feed_forward.w1.weight"].T
        inner = gate * gate.sigmoid() * (normed @ weights[f"{layer}feed_forward.w3.weight"].T)
        x = x + inner @ weights[f"{layer}feed_forward.w2.weight"].T * weights[f"{layer}ffn_layer_scale.gamma"]
    return _norm(x, weights[f"{name}norm.weight"], config).transpose(1, 2)


def _norm(x: Tensor, weight: Tensor, config: CodecTransformerConfig) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight


def _rotated(x: Tensor, config: CodecTransformerConfig) -> Tensor:
    """Pairs (0, 1), (2, 3), ... of x [b, n, head_dim] turned by position times frequency, table in bf16."""
    frequencies = 1.0 / config.rope_base ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    angles = torch.outer(torch.arange(x.shape[1]), frequencies)
    cos, sin = angles.cos().bfloat16().float(), angles.sin().bfloat16().float()
    out = torch.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return out
