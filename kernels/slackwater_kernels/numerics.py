"""The 8-bit formats by their bits: E4M3 values, E8M0 exponents and what NaN and infinity become.

Owns the rounding and saturation rules in plain torch on any device; they are exact, so every GPU kernel is
compared with them bit for bit.  Owns no layout.  Called by `reference` and `layout`.

E4M3 (fn): bias 7, largest 448, no infinity, NaN is 0x7F or 0xFF.  E8M0: a byte b is 2^(b - 127), 255 is NaN;
there is no zero and no sign.
"""

import torch
from torch import Tensor

from slackwater_kernels.core import AMAX_FLOOR, E4M3_MAX, E4M3_NAN, E8M0_BIAS, E8M0_NAN, SCALE_FLOOR, MxRule

_FLOAT_MAX = torch.finfo(torch.float32).max
_MANTISSA_1_75 = 0x600000  # the fp32 mantissa bits of 1.75: 448 = 1.75 * 2^8


def finite(values: Tensor) -> Tensor:
    """fp32 values with infinities at the largest finite number; NaN stays NaN."""
    return values.float().clamp(-_FLOAT_MAX, _FLOAT_MAX)


def to_e4m3(values: Tensor) -> Tensor:
    """fp32 to E4M3 bytes (uint8): nearest even, saturating at 448, NaN to 0x7F."""
    # The clamp is explicit: torch releases differ in what their cast makes of numbers above 448.
    cast = values.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), torch.full_like(cast, E4M3_NAN), cast)


def from_e4m3(codes: Tensor) -> Tensor:
    """E4M3 bytes (uint8) to fp32, exactly."""
    return codes.view(torch.float8_e4m3fn).float()


def activation_scale(amax: Tensor) -> tuple[Tensor, Tensor]:
    """(multiplier, scale) of groups of activations by their largest magnitude, fp32.

    multiplier = 448 / max(amax, 1e-10) and scale = 1 / multiplier, each division rounded to nearest once.
    """
    # A number over a tensor is a reciprocal and a product to torch: two roundings.
    multiplier = torch.full_like(amax, E4M3_MAX) / amax.clamp(min=AMAX_FLOOR)
    return multiplier, torch.ones_like(amax) / multiplier


def weight_scale(amax: Tensor) -> Tensor:
    """The scale of weight blocks by their largest magnitude, fp32.

    amax / 448 as checkpoints have it, never subnormal, and 1 for a zero block.
    """
    scale = (amax / torch.full_like(amax, E4M3_MAX)).clamp(min=SCALE_FLOOR)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def e8m0_byte(amax: Tensor, rule: MxRule) -> Tensor:
    """The shared exponent's byte (uint8) of blocks by their largest magnitude, from fp32 bits.

    `RCEIL`: the smallest e with amax <= 448 * 2^e.  `OCP_FLOOR`: floor(log2 amax) - 8.  Both kept in [-127, 127];
    zero and subnormal magnitudes give byte 0 or near it, NaN gives 255.
    """
    bits = amax.float().contiguous().view(torch.int32)
    exponent = (bits >> 23) - 127  # amax is not negative, so the sign bit is 0
    mantissa = bits & 0x7FFFFF
    e = exponent - 8
    if rule is MxRule.RCEIL:
        e = e + (mantissa > _MANTISSA_1_75).int()
    byte = (e.clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS).to(torch.uint8)
    return torch.where(amax.isnan(), torch.full_like(byte, E8M0_NAN), byte)


def e8m0_value(byte: Tensor) -> Tensor:
    """E8M0 bytes (uint8) to fp32, exactly; byte 0 is the subnormal 2^-127."""
    b = byte.int()
    bits = torch.where(b == 0, torch.full_like(b, 1 << 22), b << 23)
    value = bits.view(torch.float32)
    return torch.where(b == E8M0_NAN, torch.full_like(value, torch.nan), value)


def e8m0_reciprocal(byte: Tensor) -> Tensor:
    """1 / 2^(b - 127) as fp32, exactly: the byte mirrored about 127; byte 254 gives the subnormal 2^-127."""
    mirrored = (254 - byte.int()).clamp(min=0).to(torch.uint8)
    return e8m0_value(torch.where(byte == E8M0_NAN, byte, mirrored))
