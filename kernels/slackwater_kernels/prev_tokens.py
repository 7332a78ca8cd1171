"""The repetition window of a decode batch.

Owns the one operation on it and its contract.  Does not own the window's storage (the model
runner does) nor what the window is for (the sampler does).  Called once a frame.
"""

from torch import Tensor, int32


def prev_tokens_shift_inplace(prev: Tensor, next_tokens: Tensor) -> None:
    """Drop the oldest frame of each window and append the new one, in place.

    prev: int32 [bs, W, cw], contiguous, mutated, oldest frame first.   next_tokens: int32 [bs, cw], contiguous.
    Raises ValueError on any other dtype, shape, stride or device; nothing is cast or broadcast, since
    a silent cast sounds like a worse model.
    """
    _check(prev, next_tokens)
    if prev.shape[0] == 0:
        return
    # The two slices overlap, so the kept frames go through a copy.
    prev[:, :-1] = prev[:, 1:].clone()
    prev[:, -1] = next_tokens


def _check(prev: Tensor, next_tokens: Tensor) -> None:
    if prev.dim() != 3 or prev.shape[1] == 0 or prev.shape[2] == 0:
        raise ValueError(f"prev must be int32 [bs, W >= 1, cw >= 1], got {_describe(prev)}; pass the whole window")
    bs, _, cw = prev.shape
    if next_tokens.shape != (bs, cw):
        raise ValueError(
            f"next_tokens must be int32 [{bs}, {cw}] for prev [{', '.join(map(str, prev.shape))}], "
            f"got {_describe(next_tokens)}; do not unsqueeze or flatten it"
        )
    for name, tensor in (("prev", prev), ("next_tokens", next_tokens)):
        if tensor.dtype != int32:
            raise ValueError(f"{name} must be int32, got {_describe(tensor)}; make it int32 where it is produced")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, got {_describe(tensor)} with strides {tensor.stride()}; "
                "was it transposed or sliced?"
            )
    if prev.device != next_tokens.device:
        raise ValueError(f"prev is on {prev.device} but next_tokens on {next_tokens.device}; keep both on one device")


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
