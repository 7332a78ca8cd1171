"""Which weights a checkpoint may hold in 8 bits, and the names, shapes and types of their scales.

Owns what can be said of them without torch: `folder` refuses what does not fit before anything is loaded.  Does not
own the bytes' meaning (the kernels' canonical forms).  Called by `folder`, `eight_bit` and `quantize`.
"""

from collections.abc import Iterator, Mapping

from slackwater_inference.config.published import WeightFormat
from slackwater_inference.model.headers import TensorHeader
from slackwater_inference.model.shapes import FAST, SLOW, Shape
from slackwater_kernels.core import GROUP, MX_BLOCK

CODES_DTYPE = "F8_E4M3"
SCALES_DTYPES = {WeightFormat.BLOCKSCALE: "F32", WeightFormat.MXFP8: "U8"}
_SUFFIX = "_scale_inv"  # as DeepSeek's checkpoints call it: what a code is multiplied by
_PROJECTIONS = (
    *(f"attention.{name}.weight" for name in ("wqkv", "wq", "wk", "wv", "wo")),
    *(f"feed_forward.{name}.weight" for name in ("w1", "w2", "w3")),
)


def is_projection(name: str) -> bool:
    """Whether this is a matrix of a layer that is multiplied with each token: what the kernels serve."""
    return name.startswith((f"{SLOW}layers.", f"{FAST}layers.")) and name.endswith(_PROJECTIONS)


def fits_groups(shape: Shape) -> bool:
    """Whether a matrix's rows are whole groups of the kernels."""
    return shape[1] % GROUP == 0


def scale_name(name: str) -> str:
    """The name of a weight's scales."""
    return f"{name}{_SUFFIX}"


def scale_shape(form: WeightFormat, shape: Shape) -> Shape:
    """The shape of a weight's scales."""
    n, k = shape
    return (-(-n // GROUP), k // GROUP) if form is WeightFormat.BLOCKSCALE else (n, k // MX_BLOCK)


def stored_in_8_bits(headers: Mapping[str, TensorHeader]) -> set[str]:
    """The projections whose file holds codes."""
    return {name for name, header in headers.items() if is_projection(name) and header.dtype == CODES_DTYPE}


def scale_faults(headers: Mapping[str, TensorHeader], form: WeightFormat) -> Iterator[str]:
    """One line for each weight whose scales are missing or are not what its form has."""
    dtype = SCALES_DTYPES[form]
    for name in sorted(stored_in_8_bits(headers)):
        shape, scales = headers[name].shape, headers.get(scale_name(name))
        if len(shape) != 2 or not fits_groups(shape):
            yield f"{name} must be [N, K] with K a multiple of {GROUP} to be {form}, got {list(shape)}"
        elif scales is None:
            yield f"missing {scale_name(name)}, the scales of {name}"
        elif (scales.dtype, scales.shape) != (dtype, wanted := scale_shape(form, shape)):
            yield (
                f"{scale_name(name)} must be {dtype} {list(wanted)} for {name} {list(shape)}, "
                f"got {scales.dtype} {list(scales.shape)}; was it saved transposed?"
            )
