"""The rules of engine-api.md 1.4 that equal frames alone do not show."""

import pytest
import torch

from slackwater_inference.config import TransformerConfig
from slackwater_inference.model.fast import FastTransformer
from slackwater_inference.model.layers import head_norm, rms_norm, rope_table, rotate
from slackwater_inference.model.slow import SlowTransformer
from slackwater_inference.model.weights import FAST, SLOW, check_weights, seeded_weights
from slackwater_inference.testing.model import micro

MODEL = micro()
WEIGHTS = seeded_weights(MODEL, 0)


def published_positions():
    return TransformerConfig(
        vocab_size=1,
        n_layer=1,
        dim=8,
        n_head=1,
        n_local_heads=1,
        head_dim=128,
        intermediate_size=8,
        max_seq_len=32_768,
        attention_qk_norm=False,
    )


def test_the_rope_table_holds_bfloat16_values_for_every_position():
    table = torch.view_as_real(rope_table(published_positions()))

    assert table.shape == (32_768, 64, 2)
    assert torch.equal(table, table.bfloat16().float())
    exact = torch.arange(32_768, dtype=torch.float64)[:, None] * 1e6 ** -(torch.arange(0, 128, 2).double() / 128)
    # bf16 keeps 8 bits; the angle itself, in fp32, is good to 2e-3 at the last position.
    assert (table[..., 0] - exact.cos()).abs().max() < 2**-9 + 4e-3
    assert (table[..., 1] - exact.sin()).abs().max() < 2**-9 + 4e-3


def test_rotation_turns_neighbours_and_not_halves():
    turns = torch.polar(torch.ones(2), torch.tensor([torch.pi / 2, 0.0]))

    turned = rotate(torch.tensor([1.0, 0.0, 3.0, 4.0]).view(1, 1, 1, 4), turns)

    torch.testing.assert_close(turned.flatten(), torch.tensor([0.0, 1.0, 3.0, 4.0]), atol=1e-6, rtol=0.0)


def test_a_semantic_position_is_the_sum_of_token_and_codes_over_the_root_of_their_number():
    token = MODEL.semantic_begin_id + 5
    columns = torch.tensor([[[token, 5, 6, 7], [65, 0, 0, 0]]])

    made = SlowTransformer(WEIGHTS, MODEL).embed(columns)[0]

    table, codes = WEIGHTS[f"{SLOW}embeddings.weight"], WEIGHTS[f"{FAST}codebook_embeddings.weight"]
    expected = (table[token] + codes[5] + codes[40 + 6] + codes[80 + 7]) / 4**0.5
    torch.testing.assert_close(made[0], expected)
    assert torch.equal(made[1], table[65])


def test_the_cut_head_gives_the_logits_of_the_rows_that_can_be_sampled():
    slow = SlowTransformer(WEIGHTS, MODEL)
    hidden = torch.randn(2, MODEL.text_config.dim, generator=torch.Generator().manual_seed(0))

    logits = slow.logits(hidden)

    ids = [*range(MODEL.semantic_begin_id, MODEL.semantic_begin_id + MODEL.num_semantic), MODEL.im_end_id]
    assert slow.head_ids.tolist() == ids
    torch.testing.assert_close(logits, (hidden @ WEIGHTS[f"{SLOW}embeddings.weight"].T)[:, ids])


def test_the_fast_cache_of_an_earlier_frame_is_never_read():
    fast = FastTransformer(WEIGHTS, MODEL, max_batch=2)
    hidden = torch.randn(2, MODEL.text_config.dim, generator=torch.Generator().manual_seed(0))
    semantic, code = torch.tensor([1, 2]), torch.tensor([3, 4])
    fresh = fast.first_logits(hidden, semantic), fast.next_logits(code, 1)

    fast._cache.fill_(float("nan"))
    again = fast.first_logits(hidden, semantic), fast.next_logits(code, 1)

    assert torch.equal(fresh[0], again[0])
    assert torch.equal(fresh[1], again[1])


def test_residual_logits_are_as_many_as_the_codec_has_entries():
    fast = FastTransformer(WEIGHTS, MODEL, max_batch=1)

    assert fast.first_logits(torch.zeros(1, 32), torch.tensor([0])).shape == (1, 24)


def test_bfloat16_norms_round_where_the_published_ones_do():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = torch.linspace(0.5, 1.5, 32).bfloat16()
    normed = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()

    before_scale, after_scale = normed.bfloat16() * weight, (normed * weight.float()).bfloat16()

    assert not torch.equal(before_scale, after_scale)
    assert (rms_norm(x, weight, 1e-6) != before_scale).float().mean() < 0.01  # the root's last bit
    assert (head_norm(x, weight, 1e-6) != after_scale).float().mean() < 0.01


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        pytest.param(lambda w: w.pop(f"{FAST}norm.weight"), "missing audio_decoder.norm.weight", id="missing"),
        pytest.param(lambda w: w.update(stray=torch.zeros(1)), "extra stray", id="extra"),
        pytest.param(
            lambda w: w.update({f"{SLOW}norm.weight": torch.ones(31)}),
            r"norm.weight must be \[32\], got \[31\]",
            id="shape",
        ),
        pytest.param(
            lambda w: w.update({f"{SLOW}norm.weight": torch.ones(32).half()}), "must be torch.float32", id="dtype"
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(change, complaint):
    weights = dict(WEIGHTS)
    change(weights)

    with pytest.raises(ValueError, match=complaint):
        check_weights(weights, MODEL)
