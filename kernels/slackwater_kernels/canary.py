"""The check at load: does a prepared weight multiply as its canonical form says?

Owns the one-hot probes.  A scale in a wrong place costs no speed and little cosine, so metadata cannot find it and a
glance at the output does not either; these compare every row with every block of K that has a scale, exactly.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slackwater_kernels.core import E8M0_BIAS, GROUP, MX_BLOCK, CanaryError
from slackwater_kernels.gemm import Workspace, bsgemm
from slackwater_kernels.layout import CanonicalMx, CanonicalWeight, Fp8Activations, Fp8Weight, MxWeight, MxWords
from slackwater_kernels.mxfp8 import mxgemm
from slackwater_kernels.numerics import e8m0_value, from_e4m3

_ONE = 0x38  # 1.0 in E4M3
_FORMS = (16, GROUP)  # probes a product: as decode multiplies one sequence, and as it multiplies many


def check_weight(
    weight: Fp8Weight,
    canonical: CanonicalWeight,
    multiply: Callable[[Fp8Activations, Fp8Weight, Workspace], Tensor] = bsgemm,
) -> None:
    """Raise CanaryError unless one-hot rows through the real kernel read the canonical values back, bit for bit.

    One column of each K-block is probed, for all rows of the weight.  Synchronises: for loading, not for serving.
    """
    workspace = Workspace(weight.codes.device)
    scales = canonical.scales.cpu().repeat_interleave(GROUP, 0)[: weight.n]

    def product(codes: Tensor) -> Tensor:
        ones = torch.ones(len(codes), weight.k // GROUP, device=codes.device)
        return multiply(Fp8Activations.pack(codes, ones), weight, workspace)

    _probe(canonical.codes, scales, GROUP, weight.codes.device, product)


def check_mx_weight(
    weight: MxWeight,
    canonical: CanonicalMx,
    multiply: Callable[[MxWords, MxWeight, Workspace], Tensor] = mxgemm,
) -> None:
    """The same for MXFP8, where each 32 values of a row have an exponent of their own."""
    workspace = Workspace(weight.codes.device)

    def product(codes: Tensor) -> Tensor:
        ones = torch.full((len(codes), weight.k // MX_BLOCK), E8M0_BIAS, dtype=torch.uint8, device=codes.device)
        rows = MxWords.prepare(CanonicalMx(codes, ones, canonical.rule), codes.device)
        return multiply(rows, weight, workspace)

    _probe(canonical.codes, e8m0_value(canonical.scales.cpu()), MX_BLOCK, weight.codes.device, product)


def _probe(
    codes: Tensor, scales: Tensor, block_size: int, device: torch.device, product: Callable[[Tensor], Tensor]
) -> None:
    """codes: uint8 [N, K].   scales: fp32 [N, K / block_size] on the CPU."""
    k = codes.shape[1]
    block = torch.arange(k // block_size)
    columns = block * block_size + block * 53 % block_size  # another place inside the block each time
    one_hot = torch.zeros(len(block), k, dtype=torch.uint8)
    one_hot[block, columns] = _ONE
    values = from_e4m3(codes[:, columns.to(codes.device)]).cpu()  # [N, blocks]
    wanted = (values * scales).T.bfloat16()  # [blocks, N]
    for size in _FORMS:
        for start in range(0, len(block), size):
            got = product(one_hot[start : start + size].to(device)).cpu()
            _compare(got, wanted[start : start + size], start)


def _compare(got: Tensor, wanted: Tensor, first_block: int) -> None:
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    if not same.all():
        block, row = (~same).nonzero()[0].tolist()
        raise CanaryError(
            f"row {row}, K-block {first_block + block} reads {got[block, row].item():.6g} and should be "
            f"{wanted[block, row].item():.6g} ({int((~same).sum())} of {same.numel()} differ); "
            "codes or scales of this weight lie in a wrong order"
        )
