"""Plain-torch references: slow, obviously right, and what every kernel is tested against.

Owns no storage and mutates nothing.  Called by tests only.
"""

import torch
from torch import Tensor


def prev_tokens_shift(prev: Tensor, next_tokens: Tensor) -> Tensor:
    """The window after one shift, as a new tensor.

    prev: int32 [bs, W, cw].   next_tokens: int32 [bs, cw].   Returns int32 [bs, W, cw].
    """
    return torch.cat((prev[:, 1:], next_tokens[:, None]), dim=1)
