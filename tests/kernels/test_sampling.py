"""The sampler's kernel on small rows without a GPU, against the reference; and what both refuse."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch

from slackwater_kernels import reference
from slackwater_kernels.core import LayoutError, UnsupportedError
from slackwater_kernels.draws import Draws, Repeats
from slackwater_kernels.sampling import draw, run_draw

ROWS, WINDOW = 24, 10


@pytest.fixture
def slow_kernels(interpreted):
    """`slackwater_kernels.sampling_source`, run by NumPy on CPU tensors."""
    return import_module("slackwater_kernels.sampling_source")


@pytest.fixture
def kernels(slow_kernels, monkeypatch):
    """The same with NumPy's sort for Triton's network, each step of which the interpreter takes a millisecond for."""
    interpreter, tl = import_module("triton.runtime.interpreter"), import_module("triton.language")

    def topk(keys, num_best):
        best = np.sort(keys.handle.data)[::-1][: tl.constexpr(num_best).value]
        return tl.tensor(interpreter.TensorHandle(best.copy(), tl.int64), tl.block_type(tl.int64, list(best.shape)))

    monkeypatch.setattr(tl, "topk", topk)
    return slow_kernels


def draws(rows: int = ROWS, **changes) -> Draws:
    """Every temperature beside every filter."""
    r = torch.arange(rows)
    made = Draws(
        seeds=r * 2**40 + 7 * r,
        steps=r % 5 * 1000,
        temperature=torch.tensor([0.0, 0.3, 0.7, 1.0])[r % 4],
        top_p=torch.tensor([0.7, 1.0, 0.0])[r % 3],
        top_k=torch.tensor([30, 5, 1, 30, 2])[r % 5],
        max_top_k=30,
    )
    return replace(made, **changes)


def logits(size: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(size)) * 3


def repeats(size: int, seed: int, rows: int = ROWS) -> Repeats:
    """Windows that hold about half of the ids; the last index is no semantic token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(5 * size, generator=generator)[:size]
    window = torch.zeros(rows, WINDOW, 3, dtype=torch.int32)
    window[:, :, 0] = ids[torch.randint(0, size, (rows, WINDOW), generator=generator)].int()
    return Repeats(window, ids, size - 1, torch.arange(rows) % 6 == 5, temperature=1.0, top_p=0.9)


@pytest.mark.parametrize("size", [1, 7, 30, 33, 513])
@pytest.mark.parametrize("stage", [0, 4])
def test_draws_what_the_reference_draws(kernels, size, stage):
    assert torch.equal(run_draw(kernels, logits(size), draws(), stage), reference.draw(logits(size), draws(), stage))


def test_the_network_of_the_real_sort_gives_the_same(slow_kernels):
    some = Draws(*(getattr(draws(), name)[:3] for name in ("seeds", "steps", "temperature", "top_p", "top_k")), 30)

    assert torch.equal(run_draw(slow_kernels, logits(70)[:3], some, 1), reference.draw(logits(70)[:3], some, 1))


@pytest.mark.parametrize("size", [5, 40])
def test_a_token_of_the_window_is_drawn_anew_as_the_reference_does(kernels, size):
    changed = 0
    for seed in range(2):
        window = repeats(size, seed)

        got = run_draw(kernels, logits(size), draws(), 0, window)

        assert torch.equal(got, reference.draw(logits(size), draws(), 0, window))
        changed += int((got != run_draw(kernels, logits(size), draws(), 0)).sum())
    assert changed  # so the second draw was at stake


def test_equal_numbers_go_to_the_lower_index(kernels):
    flat = torch.tensor([[1.0, 2.0, 2.0, 0.0, -0.0, 2.0] * 10]).repeat(ROWS, 1)
    greedy = draws(temperature=torch.zeros(ROWS), top_p=torch.full((ROWS,), 0.0))

    for settings in (draws(), greedy):
        assert torch.equal(run_draw(kernels, flat, settings, 2), reference.draw(flat, settings, 2))
    assert run_draw(kernels, flat, greedy, 2).tolist() == [1] * ROWS


def test_a_row_does_not_depend_on_the_rows_beside_it(kernels):
    window = repeats(40, 0)
    whole = run_draw(kernels, logits(40), draws(), 0, window)

    part = draws()
    alone = Draws(*(getattr(part, name)[3:4] for name in ("seeds", "steps", "temperature", "top_p", "top_k")), 30)
    row = replace(window, window=window.window[3:4], is_first=window.is_first[3:4])

    assert run_draw(kernels, logits(40)[3:4], alone, 0, row).tolist() == whole[3:4].tolist()


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        pytest.param(lambda: draws(seeds=torch.arange(ROWS).int()), "seeds must be int64", id="int32 seeds"),
        pytest.param(lambda: draws(temperature=torch.ones(ROWS, 1)), "temperature must be", id="a column"),
        pytest.param(lambda: draws(top_p=torch.ones(ROWS).bfloat16()), "top_p must be float32", id="bf16 top_p"),
        pytest.param(lambda: draws(top_k=torch.ones(3, dtype=torch.int64)), r"top_k must be int64 \[24\]", id="few"),
        pytest.param(lambda: draws(max_top_k=33), "1 to 32, got 33", id="too many ranks"),
        pytest.param(lambda: run_draw(None, logits(9).double(), draws(), 0), "logits must be float32", id="fp64"),
        pytest.param(lambda: run_draw(None, logits(9).T.contiguous().T, draws(), 0), "row-major", id="by column"),
        pytest.param(lambda: run_draw(None, logits(9, 3), draws(), 0), r"float32 \[24, 9\]", id="rows"),
        pytest.param(lambda: run_draw(None, logits(9)[:, :0], draws(), 0), r"float32 \[24, V\]", id="no columns"),
        pytest.param(lambda: run_draw(None, logits(9), draws(), 0, repeats(8, 0)), "ids must be int64", id="few ids"),
        pytest.param(
            lambda: run_draw(None, logits(9), draws(), 0, replace(repeats(9, 0), window=repeats(9, 0).window.long())),
            "window must be int32", id="int64 window",
        ),
        pytest.param(
            lambda: run_draw(None, logits(9), draws(), 0, replace(repeats(9, 0), is_first=torch.zeros(ROWS))),
            "is_first must be bool", id="float flags",
        ),
        pytest.param(lambda: run_draw(None, logits(9).to("meta"), draws(), 0), "seeds on cpu", id="elsewhere"),
    ],
)  # fmt: skip
def test_refuses_what_it_would_have_to_cast_or_guess(make, complaint):
    with pytest.raises(LayoutError, match=complaint):
        make()


def test_a_cpu_is_refused_by_name_with_the_alternative():
    with pytest.raises(UnsupportedError, match=r"draw has no kernel for cpu: .*; use \w+\.reference\.draw"):
        draw(logits(9), draws(), 0)
