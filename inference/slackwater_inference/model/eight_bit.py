"""Projections that a checkpoint holds in 8 bits: their values checked, widened again, or laid out for the kernels.

Owns what becomes of codes and scales at load.  Does not own their form (the kernels' `layout`) nor which tensors have
it (`scales`).  Called by `checkpoint`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slackwater_inference.config.published import Quantization, WeightFormat
from slackwater_kernels.canary import check_mx_weight, check_weight
from slackwater_kernels.core import E4M3_NAN, E8M0_NAN, GROUP, MX_BLOCK, MxRule
from slackwater_kernels.dispatch import supported
from slackwater_kernels.layout import CanonicalMx, CanonicalWeight, Fp8Weight, MxWeight
from slackwater_kernels.numerics import e8m0_value, from_e4m3

Canonical = CanonicalWeight | CanonicalMx
Handle = Fp8Weight | MxWeight

_PRODUCTS = {WeightFormat.BLOCKSCALE: "bsgemm", WeightFormat.MXFP8: "mxgemm"}

_ROWS = 8 * GROUP  # rows that are widened at a time: fp32 copies stay at some ten MB


def canonical(codes: Tensor, scales: Tensor, quantization: Quantization) -> Canonical:
    """codes float8_e4m3fn [N, K] and their scales, as a file holds them, in their form.   Raises LayoutError."""
    if quantization.rule is None:
        return CanonicalWeight(codes.view(torch.uint8), scales)
    return CanonicalMx(codes.view(torch.uint8), scales, MxRule(quantization.rule))


def value_fault(weight: Canonical) -> str | None:
    """What is wrong with the numbers: scales that cannot be, or codes that are none; None if nothing is."""
    scales = weight.scales
    bad = scales == E8M0_NAN if isinstance(weight, CanonicalMx) else ~(scales.isfinite() & (scales > 0))
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        return f"has the scale {scales[row, column].item():g} at [{row}, {column}], which no quantiser writes"
    for start in range(0, weight.codes.shape[0], _ROWS):
        is_nan = (weight.codes[start : start + _ROWS] & E4M3_NAN) == E4M3_NAN
        if is_nan.any():
            row, column = is_nan.nonzero()[0].tolist()
            return f"is NaN at [{start + row}, {column}]"
    return None


def widened(weight: Canonical, dtype: torch.dtype) -> Tensor:
    """Code times scale in fp32, rounded to `dtype`: [N, K]."""
    n, k = weight.codes.shape
    out = torch.empty(n, k, dtype=dtype)
    for start in range(0, n, _ROWS):
        codes = weight.codes[start : start + _ROWS]
        if isinstance(weight, CanonicalMx):
            group, scales = MX_BLOCK, e8m0_value(weight.scales[start : start + _ROWS])
        else:
            rows = weight.scales[start // GROUP : (start + _ROWS) // GROUP]
            group, scales = GROUP, rows.repeat_interleave(GROUP, 0)[: len(codes)]
        values = from_e4m3(codes).view(len(codes), -1, group) * scales[:, :, None]  # [rows, K / group, group]
        out[start : start + _ROWS] = values.view(len(codes), k)
    return out


def joined(parts: Sequence[Canonical]) -> Canonical | None:
    """The parts below each other; None where blocks of 128 rows would not stay whole."""
    if len(parts) == 1:
        return parts[0]
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    if isinstance(parts[0], CanonicalMx):
        return CanonicalMx(codes, scales, parts[0].rule)
    is_whole = all(part.codes.shape[0] % GROUP == 0 for part in parts[:-1])
    return CanonicalWeight(codes, scales) if is_whole else None


def runs_on(device: torch.device, form: WeightFormat) -> bool:
    """Whether the product with weights of this form has a kernel on the device."""
    return supported(_PRODUCTS[form], device)


def prepared(weight: Canonical, device: torch.device) -> Handle:
    """A weight as its kernel reads it, proven on the device itself.   Raises CanaryError."""
    if isinstance(weight, CanonicalMx):
        words = MxWeight.prepare(weight, device)
        check_mx_weight(words, weight)
        return words
    tiles = Fp8Weight.prepare(weight, device)
    check_weight(tiles, weight)
    return tiles
