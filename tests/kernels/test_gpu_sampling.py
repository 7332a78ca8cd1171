"""The sampler's kernel on the GPU at the model's sizes, against the reference on the CPU; and the window in a graph."""

import pytest
import torch

from slackwater_kernels import reference
from slackwater_kernels.draws import Draws, Repeats
from slackwater_kernels.prev_tokens import prev_tokens_shift_inplace
from slackwater_kernels.sampling import draw

pytestmark = pytest.mark.gpu

SEMANTIC, CODES, WINDOW = 4097, 1024, 10
NAMES = ("seeds", "steps", "temperature", "top_p", "top_k")


def settings(rows: int, device: str) -> Draws:
    """Every temperature beside every filter."""
    r = torch.arange(rows)
    made = {
        "seeds": r * 2**40 + 7 * r,
        "steps": r % 50 * 1000,
        "temperature": torch.tensor([0.0, 0.3, 0.7, 1.0])[r % 4],
        "top_p": torch.tensor([0.7, 1.0, 0.5])[r % 3],
        "top_k": torch.tensor([30, 5, 1, 30, 12])[r % 5],
    }
    return Draws(*(made[name].to(device) for name in NAMES), 30)


def logits(rows: int, size: int) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows + size)) * 3


def repeats(of: torch.Tensor, device: str) -> Repeats:
    """Windows that hold the three likeliest ids of each row; the last index is no semantic token."""
    rows, size = of.shape
    ids = torch.arange(151_678, 151_678 + size)
    window = torch.zeros(rows, WINDOW, 11, dtype=torch.int32)
    window[:, 2:5, 0] = ids[of.topk(3).indices].int()
    is_first = torch.arange(rows) % 8 == 7
    return Repeats(window.to(device), ids.to(device), size - 1, is_first.to(device), 1.0, 0.8984375)


@pytest.mark.parametrize("rows", [1, 7, 64, 500])
def test_draws_what_the_reference_draws(rows):
    semantic, codes = logits(rows, SEMANTIC), logits(rows, CODES)

    first = draw(semantic.cuda(), settings(rows, "cuda"), 0, repeats(semantic, "cuda"))
    second = draw(codes.cuda(), settings(rows, "cuda"), 5)

    assert first.tolist() == reference.draw(semantic, settings(rows, "cpu"), 0, repeats(semantic, "cpu")).tolist()
    assert second.tolist() == reference.draw(codes, settings(rows, "cpu"), 5).tolist()


def test_equal_numbers_go_to_the_lower_index():
    of = logits(64, SEMANTIC).bfloat16().float()  # as a head in bf16 gives them: many are equal

    got = draw(of.cuda(), settings(64, "cuda"), 0)

    assert got.tolist() == reference.draw(of, settings(64, "cpu"), 0).tolist()


def test_draw_and_window_replay_from_a_graph_without_synchronising():
    of = logits(64, SEMANTIC)
    on, draws = repeats(of, "cuda"), settings(64, "cuda")
    here, same = repeats(of, "cpu"), settings(64, "cpu")
    scores, before = of.cuda(), on.window.clone()

    def frame() -> torch.Tensor:
        drawn = draw(scores, draws, 0, on)
        columns = on.ids[drawn][:, None].expand(-1, 11).int().contiguous()
        prev_tokens_shift_inplace(on.window, columns)
        draws.steps.add_(1)
        return drawn

    frame()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = frame()
    on.window.copy_(before)
    draws.steps.copy_(same.steps)

    for _ in range(12):
        captured.fill_(-1)
        torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        wanted = reference.draw(of, same, 0, here)
        assert torch.equal(captured.cpu(), wanted)
        prev_tokens_shift_inplace(here.window, here.ids[wanted][:, None].expand(-1, 11).int().contiguous())
        same.steps.add_(1)
