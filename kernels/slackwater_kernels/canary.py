"""The check at load: does a prepared weight multiply as its canonical form says?

Owns the one-hot probe.  A scale in a wrong place costs no speed and little cosine, so metadata cannot find it and a
glance at the output does not either; this compares every row with every K-block, exactly.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slackwater_kernels.core import GROUP, CanaryError
from slackwater_kernels.gemm import Workspace, bsgemm
from slackwater_kernels.layout import CanonicalWeight, Fp8Activations, Fp8Weight
from slackwater_kernels.numerics import from_e4m3

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
    blocks, device = weight.k // GROUP, weight.codes.device
    block = torch.arange(blocks)
    columns = block * GROUP + block * 53 % GROUP  # another place inside the block each time
    codes = torch.zeros(blocks, weight.k, dtype=torch.uint8)
    codes[block, columns] = _ONE
    values = from_e4m3(canonical.codes[:, columns.to(canonical.codes.device)]).cpu()  # [N, blocks]
    scales = canonical.scales.cpu().repeat_interleave(GROUP, 0)[: weight.n]
    wanted = (values * scales).T.bfloat16()  # [blocks, N]
    workspace = Workspace(device)
    for size in _FORMS:
        for start in range(0, blocks, size):
            part = codes[start : start + size].to(device)
            probe = Fp8Activations.pack(part, torch.ones(part.shape[0], blocks, device=device))
            got = multiply(probe, weight, workspace).cpu()
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
