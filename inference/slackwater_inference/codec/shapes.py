"""What the codec's weights are called, how large they are, and how much a stream carries.

Owns the names and shapes of `codec.pth` with weight-norm baked in.  Pure: no torch, so that a memory plan
can count without it.  Called by `weights`, by the network's parts and by the memory plan.
"""

import itertools

from slackwater_inference.config import CodecConfig
from slackwater_inference.config.codec import CodecTransformerConfig

CONV_KERNEL = 7  # of the first and last convolution of the decoder, of residual units and of ConvNeXt blocks
ENCODER_OUT_KERNEL = 3
MLP_RATIO = 4  # of ConvNeXt blocks

PRE_MODULE = "quantizer.pre_module."
POST_MODULE = "quantizer.post_module."
DOWNSAMPLE = "quantizer.downsample."
UPSAMPLE = "quantizer.upsample."

Shapes = dict[str, tuple[int, ...]]


def codebook_name(index: int) -> str:
    """Prefix of codebook `index`, 0 being the semantic one."""
    return (
        "quantizer.semantic_quantizer.quantizers.0." if index == 0 else f"quantizer.quantizer.quantizers.{index - 1}."
    )


def decode_shapes(config: CodecConfig, num_codebooks: int, num_semantic: int) -> Shapes:
    """Every tensor that decoding reads."""
    shapes: Shapes = {}
    for i, size in enumerate(config.codebook_sizes(num_codebooks, num_semantic)):
        shapes[f"{codebook_name(i)}codebook.weight"] = (size, config.codebook_dim)
        shapes |= _conv(f"{codebook_name(i)}out_proj", config.latent_dim, config.codebook_dim, 1)
    shapes |= _transformer(POST_MODULE, config.post_module, config.latent_dim)
    for i, factor in enumerate(reversed(config.downsample_factors)):
        shapes |= _transposed(f"{UPSAMPLE}{i}.0.conv", config.latent_dim, config.latent_dim, factor)
        shapes |= _convnext(f"{UPSAMPLE}{i}.1.", config.latent_dim)
    dims = config.decoder_dims
    shapes |= _conv("decoder.model.0.conv", dims[0], config.latent_dim, CONV_KERNEL)
    for i, rate in enumerate(config.decoder_rates):
        block = f"decoder.model.{i + 1}.block."
        shapes |= _snake(f"{block}0", dims[i])
        shapes |= _transposed(f"{block}1.conv", dims[i], dims[i + 1], 2 * rate)
        shapes |= _residual_units(block, 2, config, dims[i + 1])
    last = len(config.decoder_rates) + 1
    shapes |= _snake(f"decoder.model.{last}", dims[-1])
    shapes |= _conv(f"decoder.model.{last + 1}.conv", 1, dims[-1], CONV_KERNEL)
    return shapes


def encode_shapes(config: CodecConfig, num_codebooks: int, num_semantic: int) -> Shapes:
    """Every tensor that encoding reads; codebooks and their out_proj are shared with decoding."""
    dims = config.encoder_dims
    shapes = _conv("encoder.block.0.conv", dims[0], 1, CONV_KERNEL)
    num_units = len(config.dilations)
    for i, (rate, transformer) in enumerate(zip(config.encoder_rates, config.encoder_transformers, strict=True)):
        block = f"encoder.block.{i + 1}.block."
        shapes |= _residual_units(block, 0, config, dims[i])
        shapes |= _snake(f"{block}{num_units}", dims[i])
        shapes |= _conv(f"{block}{num_units + 1}.conv", dims[i + 1], dims[i], 2 * rate)
        if transformer is not None:
            shapes |= _transformer(f"{block}{num_units + 2}.", transformer, dims[i + 1])
    last = len(config.encoder_rates) + 1
    shapes |= _snake(f"encoder.block.{last}", dims[-1])
    shapes |= _conv(f"encoder.block.{last + 1}.conv", config.latent_dim, dims[-1], ENCODER_OUT_KERNEL)
    for i, factor in enumerate(config.downsample_factors):
        shapes |= _conv(f"{DOWNSAMPLE}{i}.0.conv", config.latent_dim, config.latent_dim, factor)
        shapes |= _convnext(f"{DOWNSAMPLE}{i}.1.", config.latent_dim)
    shapes |= _transformer(PRE_MODULE, config.pre_module, config.latent_dim)
    for i, size in enumerate(config.codebook_sizes(num_codebooks, num_semantic)):
        shapes |= _conv(f"{codebook_name(i)}in_proj", config.codebook_dim, config.latent_dim, 1)
        shapes |= _conv(f"{codebook_name(i)}out_proj", config.latent_dim, config.codebook_dim, 1)
        shapes[f"{codebook_name(i)}codebook.weight"] = (size, config.codebook_dim)
    return shapes


def codec_weight_shapes(config: CodecConfig, num_codebooks: int, num_semantic: int) -> Shapes:
    """Every tensor of the codec."""
    return encode_shapes(config, num_codebooks, num_semantic) | decode_shapes(config, num_codebooks, num_semantic)


def decode_state_size(config: CodecConfig) -> int:
    """Numbers (fp32) that one stream carries from chunk to chunk, however long it is.

    Each convolution's last inputs, the post module's last keys and values, and its position.
    """
    post, dims = config.post_module, config.decoder_dims
    reach = CONV_KERNEL - 1
    size = 1 + post.n_layer * 2 * post.n_head * post.head_dim * (post.window_size - 1)
    size += len(config.downsample_factors) * config.latent_dim * reach  # ConvNeXt; the upsampling itself has no overlap
    size += config.latent_dim * reach
    for wide, narrow in itertools.pairwise(dims):
        size += wide + narrow * reach * sum(config.dilations)
    return size + dims[-1] * reach


def _conv(name: str, channels_out: int, channels_in: int, kernel: int) -> Shapes:
    return {f"{name}.weight": (channels_out, channels_in, kernel), f"{name}.bias": (channels_out,)}


def _transposed(name: str, channels_in: int, channels_out: int, kernel: int) -> Shapes:
    return {f"{name}.weight": (channels_in, channels_out, kernel), f"{name}.bias": (channels_out,)}


def _snake(name: str, channels: int) -> Shapes:
    return {f"{name}.alpha": (1, channels, 1)}


def _residual_units(block: str, first: int, config: CodecConfig, channels: int) -> Shapes:
    shapes: Shapes = {}
    for i in range(first, first + len(config.dilations)):
        unit = f"{block}{i}.block."
        shapes |= _snake(f"{unit}0", channels) | _conv(f"{unit}1.conv", channels, channels, CONV_KERNEL)
        shapes |= _snake(f"{unit}2", channels) | _conv(f"{unit}3.conv", channels, channels, 1)
    return shapes


def _convnext(name: str, dim: int) -> Shapes:
    return {
        f"{name}gamma": (dim,),
        **_conv(f"{name}dwconv.conv", dim, 1, CONV_KERNEL),
        f"{name}norm.weight": (dim,),
        f"{name}norm.bias": (dim,),
        f"{name}pwconv1.weight": (MLP_RATIO * dim, dim),
        f"{name}pwconv1.bias": (MLP_RATIO * dim,),
        f"{name}pwconv2.weight": (dim, MLP_RATIO * dim),
        f"{name}pwconv2.bias": (dim,),
    }


def _transformer(name: str, config: CodecTransformerConfig, dim: int) -> Shapes:
    width = config.n_head * config.head_dim
    shapes: Shapes = {f"{name}norm.weight": (dim,)}
    for i in range(config.n_layer):
        layer = f"{name}layers.{i}."
        shapes[f"{layer}attention.wqkv.weight"] = (3 * width, dim)
        shapes[f"{layer}attention.wo.weight"] = (dim, width)
        shapes[f"{layer}attention_norm.weight"] = (dim,)
        shapes[f"{layer}attention_layer_scale.gamma"] = (dim,)
        shapes[f"{layer}feed_forward.w1.weight"] = (config.intermediate_size, dim)
        shapes[f"{layer}feed_forward.w2.weight"] = (dim, config.intermediate_size)
        shapes[f"{layer}feed_forward.w3.weight"] = (config.intermediate_size, dim)
        shapes[f"{layer}ffn_norm.weight"] = (dim,)
        shapes[f"{layer}ffn_layer_scale.gamma"] = (dim,)
    return shapes
