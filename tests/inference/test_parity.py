"""The model as the engine runs it, in pieces and over paged memory, against the plain reference of `testing`."""

import random

import pytest

from slackwater_inference import sampler
from slackwater_inference.core import Reference, SamplingParams, Voice
from slackwater_inference.model.weights import seeded_weights
from slackwater_inference.testing.model import generate, micro, reference_choices, reference_columns
from slackwater_inference.text.prompt import PromptBuilder
from slackwater_inference.text.tokenizer import ByteTokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_FRAMES = 64


def random_model(draw):
    heads = [(1, 1), (2, 1), (4, 2), (3, 3), (4, 1), (6, 2)]
    return micro(
        n_layer=draw.choice([1, 1, 2, 3]),
        heads=draw.choice(heads),
        head_dim=draw.choice([4, 8, 16]),
        dim=draw.choice([16, 24, 32, 48]),
        intermediate_size=draw.choice([20, 48, 64]),
        num_codebooks=draw.choice([2, 3, 3, 4, 4, 5, 10]),
        qk_norm=(draw.random() < 0.5, draw.random() < 0.5),
        fast_layers=draw.choice([1, 1, 2]),
        fast_heads=draw.choice(heads),
        fast_dim=draw.choice([None, 16, 40]),
        residual_codebook_size=draw.choice([8, 24, 40]),
        rope_base=draw.choice([1e4, 1e6]),
        norm_eps=draw.choice([1e-6, 1e-5, 1e-3]),
    )


def random_codes(draw, model, num_frames):
    sizes = model.codec.codebook_sizes(model.num_codebooks, model.num_semantic)
    return tuple(tuple(draw.randrange(size) for size in sizes) for _ in range(num_frames))


def random_prompt(draw, model):
    references = tuple(
        Reference("said", random_codes(draw, model, draw.randint(1, 20)), speaker)
        for speaker in range(draw.randint(0, 2))
    )
    previous = [("before", random_codes(draw, model, 9))] if draw.random() < 0.3 else []
    return PromptBuilder(model, ByteTokenizer()).prompt("Now.", Voice("v", references), previous)


@pytest.mark.parametrize("number", range(20))
def test_64_greedy_frames_of_a_random_model_equal_those_of_the_reference(number, monkeypatch):
    draw = random.Random(number)
    # Small windows make repeats common, which is where the second draw takes over.
    monkeypatch.setattr(sampler, "WINDOW_FRAMES", draw.choice([1, 4, 10, 16]))
    model = random_model(draw)
    weights = seeded_weights(model, number)
    prompt = random_prompt(draw, model)
    sampling = SamplingParams(temperature=0.0, seed=number)

    made = generate(model, weights, prompt, sampling, NUM_FRAMES)

    assert made == reference_choices(weights, model, prompt, sampling, made)
    assert len(made) == NUM_FRAMES


def test_what_the_reference_chooses_after_its_own_columns_are_those_columns():
    model = micro()
    weights = seeded_weights(model, 2)
    prompt = random_prompt(random.Random(2), model)
    sampling = SamplingParams(temperature=0.9, top_p=0.9, seed=2)

    made = reference_columns(weights, model, prompt, sampling, 12)

    assert reference_choices(weights, model, prompt, sampling, made) == made


@pytest.mark.parametrize("part", ["slow", "fast"])
def test_the_reference_sees_a_rotation_by_halves(part):
    """The proof that the comparison above can fail: half-split rotary positions still make fluent frames."""
    model = micro()
    weights = seeded_weights(model, 1)
    prompt = random_prompt(random.Random(1), model)
    sampling = SamplingParams(temperature=0.0)
    prefix = "text_model.model." if part == "slow" else "audio_decoder."
    halves = [*range(0, 16, 2), *range(1, 16, 2)]  # the permutation between the two conventions
    permuted = {name: tensor.clone() for name, tensor in weights.items()}
    for name, tensor in permuted.items():
        if name.startswith(prefix) and "wqkv" in name:
            rows = tensor.view(-1, 16, tensor.shape[1])
            rows[:-1] = rows[:-1, halves]  # all heads but the value's

    made = generate(model, permuted, prompt, sampling, 24)

    assert made != reference_choices(weights, model, prompt, sampling, made)


def test_bfloat16_makes_the_first_frames_of_float32():
    # Weights that both types hold exactly, so that only the arithmetic differs.
    exact = {name: tensor.bfloat16() for name, tensor in seeded_weights(micro(), 4).items()}
    half = micro().model_copy(update={"weight_dtype": "bfloat16"})
    prompt = random_prompt(random.Random(4), half)
    sampling = SamplingParams(temperature=0.0, seed=4)

    made = generate(half, exact, prompt, sampling, 5)

    assert made == generate(micro(), {name: tensor.float() for name, tensor in exact.items()}, prompt, sampling, 5)
