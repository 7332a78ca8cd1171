"""Where the bytes of a whole feed-forward block lie for the kernel that streams it: one piece a multiprocessor.

Owns the handle, the division of the block among CTAs and the way from and to the canonical form.  Owns no arithmetic.
`cuda/mlp.cu` reads what is written here and has the same constants.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, float32, uint8

from slackwater_kernels.core import GROUP, LayoutError
from slackwater_kernels.layout import CanonicalWeight, _Handle, _require_aligned, _require_one_device, require

K, HIDDEN, N = 2560, 9728, 2560  # the one size that the kernel is compiled for
CTAS = 128
UNIT = 64  # columns that are asked for at a time
_CHUNK = 16  # bytes of a row side by side in a matrix of 8 rows
_COLUMNS = HIDDEN // CTAS  # hidden values of a CTA: 76, four a group of 8 rows, gate above up
_GROUPS = _COLUMNS // 4
SPLITS = 8  # CTAs that share the sums of 160 rows of down
TILE_ROWS = N * SPLITS // CTAS
_SPLIT_COLUMNS = HIDDEN // SPLITS
_SPLIT_BLOCKS = 10  # 1216 columns lie in 9.5 blocks of 128
CTA_BYTES = _COLUMNS * 2 * K + TILE_ROWS * _SPLIT_COLUMNS
CTA_SCALES = K // GROUP * 4 + _SPLIT_BLOCKS * 2


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeights(_Handle):
    """gate_up [2 I, K] (gate above up) and down [N, I] in the order in which a CTA uses them.

    codes: uint8 [128, 583680], a CTA's piece a row: its gate and up rows, then its part of down, in units of 64
    columns, of each unit 16 bytes of all rows side by side.   scales: fp32 [128 * 100], those of a CTA side by side.
    Holds the same values as the two weights of the separate launches, 74.7 MB beside theirs.   Made by `prepare` alone.
    """

    codes: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        hint = "make the handle with `BlockWeights.prepare(gate_up, down)`"
        require("codes", self.codes, uint8, (CTAS, CTA_BYTES), hint)
        require("scales", self.scales, float32, (CTAS * CTA_SCALES,), hint)
        _require_one_device(self)
        _require_aligned(self)

    @classmethod
    def prepare(cls, gate_up: CanonicalWeight, down: CanonicalWeight, device: torch.device | str) -> "BlockWeights":
        """Lay the block out on a device; complete when this returns, also for kernels that start early."""
        for name, weight, shape in (("gate_up", gate_up, (2 * HIDDEN, K)), ("down", down, (N, HIDDEN))):
            if not isinstance(weight, CanonicalWeight):
                raise LayoutError(f"{name} must be a CanonicalWeight, got {type(weight).__name__}; quantise it first")
            if tuple(weight.codes.shape) != shape:
                raise LayoutError(
                    f"{name} must be {list(shape)} for the block in one launch, got {list(weight.codes.shape)}; "
                    "other sizes go through the separate launches"
                )
        codes = torch.cat((_first_pieces(gate_up.codes.to(device)), _second_pieces(down.codes.to(device))), 1)
        scales = torch.empty(CTAS, CTA_SCALES, dtype=float32, device=device)
        for place, (of_down, row, column) in _places(device).items():
            scales[:, place] = (down if of_down else gate_up).scales.to(device)[row, column]
        handle = cls(codes.contiguous(), scales.view(-1))
        if codes.is_cuda:
            torch.cuda.current_stream(codes.device).synchronize()  # the kernel reads weights before it waits
        return handle

    def canonical(self) -> tuple[CanonicalWeight, CanonicalWeight]:
        """(gate_up, down) as they stand on disk."""
        first, second = self.codes[:, : _COLUMNS * 2 * K], self.codes[:, _COLUMNS * 2 * K :]
        pieces = first.reshape(CTAS, K // UNIT, UNIT // _CHUNK, _GROUPS, 2, 4, _CHUNK)
        gate_up = pieces.permute(4, 0, 3, 5, 1, 2, 6).reshape(2 * HIDDEN, K)
        pieces = second.reshape(N // TILE_ROWS, SPLITS, -1, UNIT // _CHUNK, TILE_ROWS, _CHUNK)
        down = pieces.permute(0, 4, 1, 2, 3, 5).reshape(N, HIDDEN)
        device = self.codes.device
        gate_up_scales = torch.empty(2 * HIDDEN // GROUP, K // GROUP, device=device)
        down_scales = torch.empty(N // GROUP, HIDDEN // GROUP, device=device)
        scales = self.scales.view(CTAS, CTA_SCALES)
        for place, (of_down, row, column) in _places(device).items():
            (down_scales if of_down else gate_up_scales)[row, column] = scales[:, place]
        return CanonicalWeight(gate_up, gate_up_scales), CanonicalWeight(down, down_scales)


def _first_pieces(codes: Tensor) -> Tensor:
    """gate_up's codes [2 I, K] as a row a CTA: unit, 16 columns, group, gate or up, row, column."""
    pieces = codes.view(2, CTAS, _GROUPS, 4, K // UNIT, UNIT // _CHUNK, _CHUNK)
    return pieces.permute(1, 4, 5, 2, 0, 3, 6).reshape(CTAS, -1)


def _second_pieces(codes: Tensor) -> Tensor:
    """down's codes [N, I] as a row a CTA: unit, 16 columns, row, column."""
    pieces = codes.view(N // TILE_ROWS, TILE_ROWS, SPLITS, -1, UNIT // _CHUNK, _CHUNK)
    return pieces.permute(0, 2, 3, 4, 1, 5).reshape(CTAS, -1)


def _places(device: torch.device | str) -> dict[int, tuple[bool, Tensor, Tensor]]:
    """Place among a CTA's scales -> whether down's, row and column of the canonical scale, [CTAS] each.

    A CTA's rows touch at most two blocks of 128; where they touch one, the next one's scale stands there for nothing.
    """
    cta = torch.arange(CTAS, device=device)
    places = {}
    blocks = HIDDEN // GROUP
    for block in range(K // GROUP):
        for i in range(4):  # gate's first block of rows, its second, up's first, its second
            row = (cta * _COLUMNS // GROUP + i % 2).clamp(max=blocks - 1) + i // 2 * blocks
            places[block * 4 + i] = (False, row, torch.full_like(cta, block))
    for block in range(_SPLIT_BLOCKS):
        for i in range(2):
            row = (cta // SPLITS * TILE_ROWS // GROUP + i).clamp(max=N // GROUP - 1)
            column = cta % SPLITS * _SPLIT_COLUMNS // GROUP + block
            places[K // GROUP * 4 + block * 2 + i] = (True, row, column)
    return places
