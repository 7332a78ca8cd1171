import pytest
import torch

from slackwater_inference import sampler
from slackwater_inference.testing.model import reference_draw


def draw(logits, temperature=1.0, top_p=1.0, top_k=30, uniforms=None):
    """One draw for each row of logits, all with the same settings."""
    bs = len(logits)
    return sampler.draw(
        sampler.candidates(logits),
        torch.full((bs, 1), temperature),
        torch.full((bs, 1), top_p),
        torch.full((bs, 1), top_k),
        sampler.noise(torch.arange(bs), torch.zeros(bs, dtype=torch.int64), 1)[:, 0] if uniforms is None else uniforms,
    )


@pytest.mark.parametrize("size", [1, 7, 30, 31, 513])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("top_p", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("top_k", [1, 5, 30])
def test_draws_what_a_full_sort_draws(size, temperature, top_p, top_k):
    logits = torch.randn(16, size, generator=torch.Generator().manual_seed(size)) * 3
    uniforms = sampler.noise(torch.arange(16), torch.full((16,), 3), 1)[:, 0]

    drawn = draw(logits, temperature, top_p, top_k, uniforms)

    expected = [reference_draw(row, temperature, top_p, top_k, u) for row, u in zip(logits, uniforms, strict=True)]
    assert drawn.tolist() == expected


def possible(probabilities, **settings):
    """The indices that 2,000 draws hit."""
    return set(draw(torch.tensor([probabilities]).log().repeat(2000, 1), **settings).tolist())


def test_the_token_that_crosses_top_p_is_removed():
    assert possible([0.5, 0.3, 0.15, 0.05], top_p=0.81) == {0, 1}
    assert possible([0.5, 0.3, 0.15, 0.05], top_p=0.79) == {0}


def test_the_best_token_stays_even_if_it_alone_crosses():
    assert possible([0.9, 0.1], top_p=0.5) == {0}


def test_top_k_cuts_by_rank():
    assert possible([0.1, 0.2, 0.3, 0.4], top_k=2) == {2, 3}


def test_the_filter_looks_at_probabilities_without_temperature():
    # At temperature 0.2 index 0 would hold more than 0.7 of the mass and stand alone.
    assert possible([0.4, 0.25, 0.2, 0.15], temperature=0.2, top_p=0.7) == {0, 1}
    # At temperature 5 the distribution is nearly flat, yet only the first one is under 0.85.
    assert possible([0.8, 0.1, 0.1], temperature=5.0, top_p=0.85) == {0}


def test_temperature_0_is_greedy():
    assert possible([0.26, 0.25, 0.25, 0.24], temperature=0.0) == {0}


def test_draws_follow_the_probabilities():
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])

    counts = draw(probabilities.log().repeat(20_000, 1)).bincount(minlength=4) / 20_000

    # Three standard deviations of a share of 20,000 draws are 0.011.
    assert (counts - probabilities).abs().max() < 0.012


def test_noise_of_a_row_does_not_depend_on_its_neighbours():
    seeds, steps = torch.tensor([5, 2**61 + 3, 0]), torch.tensor([9, 0, 700])

    together = sampler.noise(seeds, steps, 6)

    for row in range(3):
        assert torch.equal(sampler.noise(seeds[row : row + 1], steps[row : row + 1], 6)[0], together[row])
    assert torch.equal(sampler.noise(seeds, steps, 2), together[:, :2])


def test_noise_differs_between_seeds_steps_stages_and_ranks():
    seeds = torch.tensor([0, 1, 2**32, 2**32 + 1]).repeat_interleave(50)

    noise = sampler.noise(seeds, torch.arange(50).repeat(4), 5)

    # 23 bits: 30,000 values meet in a pair about 54 times by chance.
    assert noise.unique().numel() > noise.numel() - 120
    assert len({tuple(row.flatten().tolist()) for row in noise}) == len(noise)


def test_noise_is_uniform_and_never_0_or_1():
    noise = sampler.noise(torch.arange(4000), torch.zeros(4000, dtype=torch.int64), 1).flatten()

    assert noise.min() > 0.0
    assert noise.max() < 1.0
    assert torch.isfinite(-noise.log()).all()
    assert (-noise.log() > 0).all()
    shares = torch.histc(noise, 20, 0.0, 1.0) / noise.numel()
    assert (shares - 0.05).abs().max() < 0.003  # four standard deviations


def test_repeats_compares_the_ids_of_the_window_only_and_only_semantic_tokens():
    window = torch.zeros(4, 10, 3, dtype=torch.int32)
    window[0, 3, 0] = 300  # an id: counts
    window[1, 3, 1] = 300  # a code: does not
    window[2, 9, 0] = 257  # im_end: not semantic
    ids = torch.tensor([300, 300, 257, 300])

    repeated = sampler.repeats(ids, window, torch.tensor([True, True, False, True]))

    assert repeated.tolist() == [True, False, False, False]
