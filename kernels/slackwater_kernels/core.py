"""The numbers that every kernel agrees on, and the room's errors.

Owns the group sizes, the bounds of the 8-bit formats and the error tree.  Owns no tensor.
Imported by every other module of this room; imports nothing of ours.
"""

from enum import StrEnum

GROUP = 128  # values that share one fp32 scale: along K of an activation, along N and K of a weight
MX_BLOCK = 32  # values that share one E8M0 byte
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E8M0_NAN = 0xFF
E8M0_BIAS = 127
AMAX_FLOOR = 1e-10  # below it a group of activations counts as this large, so its scale is never 0
SCALE_FLOOR = 2.0**-126  # a weight's scale is never subnormal: a GPU may take such a number for 0
ROW_PAD = 4  # activation scales are stored for a multiple of this many rows


class KernelsError(Exception):
    """Root of the kernels room's errors."""


class LayoutError(KernelsError, ValueError):
    """A tensor has another dtype, shape, stride or form than the one that is read here."""


class UnsupportedError(KernelsError):
    """This architecture has no such kernel.  The message names it and what to use in its place."""


class CanaryError(KernelsError):
    """A prepared weight does not multiply as its canonical form says."""


class MxRule(StrEnum):
    """How a block's shared exponent follows from its largest value."""

    RCEIL = "rceil"  # the smallest at which nothing clips (NVIDIA's recipe)
    OCP_FLOOR = "ocp_floor"  # the OCP v1.0 reference: values above 1.75 times the power of two saturate


class KvForm(StrEnum):
    """How keys and values lie in pages."""

    BF16 = "bf16"
    FP8 = "fp8"  # a scale a token and head, the values turned in their pages


def padded(count: int, to: int) -> int:
    """`count` rounded up to a multiple of `to`."""
    return -(-count // to) * to
