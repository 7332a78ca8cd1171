"""What a draw of tokens is told: how each row draws, and what it must not repeat.

Owns these values and their checks, which read metadata alone.  Owns no arithmetic.  Called by `sampling` and
`reference`.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from slackwater_kernels.core import LayoutError
from slackwater_kernels.layout import require

MAX_RANKS = 32  # more candidates than this are not sorted out


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """How each of b rows draws.

    seeds, steps: int64 [b], not negative.   temperature, top_p: fp32 [b].   top_k: int64 [b].   max_top_k: how many of
    the best are looked at, and how many uniforms a stage has.
    """

    seeds: Tensor
    steps: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    max_top_k: int

    def __post_init__(self) -> None:
        rows = self.seeds.shape[0] if self.seeds.dim() else 0
        for name in ("seeds", "steps", "top_k"):
            require(name, getattr(self, name), torch.int64, (rows,), "one number a row")
        for name in ("temperature", "top_p"):
            require(name, getattr(self, name), torch.float32, (rows,), "one number a row")
        if not 1 <= self.max_top_k <= MAX_RANKS:
            raise LayoutError(f"max_top_k must be 1 to {MAX_RANKS}, got {self.max_top_k}")


@dataclass(frozen=True, slots=True, eq=False)
class Repeats:
    """What a row must not repeat, and how it draws instead.

    window: int32 [b, W, cw], oldest first; only the ids (column 0) are compared.   ids: int64 [V], an index's token id.
    num_semantic: from this index on no token counts.   is_first: bool [b], rows that have no window yet.
    temperature, top_p: of the second draw, which is one stage further.
    """

    window: Tensor
    ids: Tensor
    num_semantic: int
    is_first: Tensor
    temperature: float
    top_p: float


def check(logits: Tensor, draws: Draws, repeats: Repeats | None) -> None:
    """Raise LayoutError unless these fit each other."""
    rows = draws.seeds.shape[0]
    size = logits.shape[1] if logits.dim() == 2 else 0
    if size == 0:
        raise LayoutError(f"logits must be float32 [{rows}, V], got {logits.dtype} {list(logits.shape)}")
    require("logits", logits, torch.float32, (rows, size), "one row for each draw; widen them where they are made")
    if repeats is not None:
        window = repeats.window
        if window.dim() != 3 or 0 in window.shape[1:]:
            raise LayoutError(f"window must be int32 [{rows}, W, cw], got {window.dtype} {list(window.shape)}")
        require("window", window, torch.int32, (rows, *window.shape[1:]), "one window for each row")
        require("ids", repeats.ids, torch.int64, (size,), "one token id for each column of logits")
        require("is_first", repeats.is_first, torch.bool, (rows,), "one answer for each row")
    for settings in (draws, repeats):
        for name in () if settings is None else (field.name for field in fields(settings)):
            tensor = getattr(settings, name)
            if isinstance(tensor, Tensor) and tensor.device != logits.device:
                raise LayoutError(
                    f"logits are on {logits.device} but {name} on {tensor.device}; keep all on one device"
                )
