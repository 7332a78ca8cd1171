import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater_inference.codec.codec import Codec
from slackwater_inference.codec.decoder import Decoder
from slackwater_inference.codec.encoder import Encoder
from slackwater_inference.codec.layers import Past
from slackwater_inference.codec.shapes import decode_shapes, decode_state_size, encode_shapes
from slackwater_inference.codec.weights import seeded_codec_weights
from slackwater_inference.config import CodecConfig, tiny
from slackwater_inference.config.codec import CodecTransformerConfig
from slackwater_inference.testing.codec import random_codec_weights, reference_decode, reference_encode
from slackwater_inference.testing.model import micro_codec

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_CODEBOOKS, NUM_SEMANTIC = 3, 40


def transformer(**changes):
    fields = {"n_layer": 2, "n_head": 2, "head_dim": 4, "intermediate_size": 12, "window_size": 5, **changes}
    return CodecTransformerConfig(**fields)


def micro(**changes):
    return CodecConfig.model_validate({**micro_codec().model_dump(), "post_module": transformer(), **changes})


def codec_of(config, seed=0):
    weights = random_codec_weights(config, NUM_CODEBOOKS, NUM_SEMANTIC, seed)
    return Codec(config, NUM_CODEBOOKS, NUM_SEMANTIC, weights), weights


MICRO = micro()
CODEC, WEIGHTS = codec_of(MICRO)


def codes(num_frames, bs=1, seed=0, num_codebooks=NUM_CODEBOOKS, size=MICRO.residual_codebook_size):
    return torch.randint(0, size, (bs, num_codebooks, num_frames), generator=torch.Generator().manual_seed(seed))


def sound(seconds_of_frames, config=MICRO, seed=0):
    return torch.randn(seconds_of_frames * config.frame_samples, generator=torch.Generator().manual_seed(seed))


def decoded(codec, whole, chunks):
    state, parts = codec.new_state(), []
    for part in whole.split(chunks, dim=2):
        audio, (state,) = codec.decode(part, [state])
        parts.append(audio)
    return torch.cat(parts, dim=1)


CONFIGS = [
    pytest.param(MICRO, id="micro"),
    pytest.param(micro(downsample_factors=()), id="no down-sampling"),
    pytest.param(micro(downsample_factors=(2, 3), latent_dim=6), id="uneven down-sampling"),
    pytest.param(
        micro(
            encoder_rates=(2, 4, 5),
            decoder_rates=(5, 8),
            decoder_dim=12,
            encoder_transformers=(transformer(window_size=3), None, transformer(n_layer=1, head_dim=6)),
            dilations=(1, 3, 9),
        ),
        id="transformers between rates, published dilations",
    ),
    pytest.param(
        micro(
            pre_module=transformer(n_layer=3, n_head=1, head_dim=8, window_size=2),
            post_module=transformer(n_head=4, rope_base=100.0, norm_eps=1e-3, window_size=64),
            codebook_dim=8,
            dilations=(2,),
        ),
        id="other transformers",
    ),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_decodes_as_the_plain_reference_of_the_published_network(config):
    codec, weights = codec_of(config, seed=1)
    whole = codes(23, bs=2)

    audio, _ = codec.decode(whole, [codec.new_state() for _ in range(2)])

    assert audio.std() > 0.05
    torch.testing.assert_close(audio, reference_decode(weights, config, whole), atol=1e-5, rtol=0)


@pytest.mark.parametrize("config", CONFIGS)
def test_encodes_as_the_plain_reference_of_the_published_network(config):
    codec, weights = codec_of(config, seed=2)
    samples = sound(70, config)  # three pieces

    made = codec.encode(samples)

    assert made.dtype == torch.int64
    assert all(len(row.unique()) > 3 for row in made)
    assert torch.equal(made, reference_encode(weights, config, NUM_CODEBOOKS, samples))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_a_stream_in_any_chunks_sounds_as_decoded_at_once(chunks, seed):
    whole = codes(sum(chunks), seed=seed)

    parts = decoded(CODEC, whole, chunks)

    torch.testing.assert_close(parts, decoded(CODEC, whole, [sum(chunks)]), atol=1e-5, rtol=0)


def test_a_stream_of_thousands_of_frames_sounds_as_decoded_at_once_and_carries_no_more_than_at_its_start():
    whole = codes(2000)
    _, (state,) = CODEC.decode(whole, [CODEC.new_state()])

    parts = decoded(CODEC, whole, 23)

    torch.testing.assert_close(parts, decoded(CODEC, whole, 2000), atol=1e-5, rtol=0)
    torch.testing.assert_close(parts[:, -160:], reference_decode(WEIGHTS, MICRO, whole)[:, -160:], atol=1e-5, rtol=0)
    assert state.numel() == CODEC.new_state().numel() == decode_state_size(MICRO)


def test_the_same_chunks_of_the_same_codes_are_the_same_to_the_bit():
    whole = codes(30)

    assert torch.equal(decoded(CODEC, whole, 4), decoded(CODEC, whole, 4))


def test_streams_of_a_batch_of_different_age_do_not_hear_each_other():
    states = []
    for age in (1, 3, 40):
        _, (state,) = CODEC.decode(codes(age, seed=age), [CODEC.new_state()])
        states.append(state)
    states.append(CODEC.new_state())
    following = codes(6, bs=4, seed=2)

    together, _ = CODEC.decode(following, states)

    for row in range(4):
        alone, _ = CODEC.decode(following[row : row + 1], [states[row]])
        torch.testing.assert_close(alone[0], together[row], atol=1e-5, rtol=0)


def test_a_frame_makes_its_samples_at_once_and_nothing_is_left_to_flush():
    audio, _ = CODEC.decode(codes(3), [CODEC.new_state()])

    assert audio.shape == (1, 3 * MICRO.frame_samples)


def test_a_later_frame_changes_nothing_before_it():
    one, other = codes(6), codes(6)
    other[:, :, 4] = (other[:, :, 4] + 1) % MICRO.residual_codebook_size
    change = 4 * MICRO.frame_samples

    a, _ = CODEC.decode(one, [CODEC.new_state()])
    b, _ = CODEC.decode(other, [CODEC.new_state()])

    assert torch.equal(a[:, :change], b[:, :change])
    assert not torch.equal(a[:, change:], b[:, change:])


def test_codes_past_a_codebooks_end_sound_as_its_last_entry_and_stay_as_they_are():
    too_large = torch.full((1, NUM_CODEBOOKS, 4), 4095)
    last = torch.tensor([NUM_SEMANTIC - 1, *[MICRO.residual_codebook_size - 1] * (NUM_CODEBOOKS - 1)])

    audio, _ = CODEC.decode(too_large, [CODEC.new_state()])

    expected, _ = CODEC.decode(last[None, :, None].expand(1, -1, 4).contiguous(), [CODEC.new_state()])
    assert torch.equal(audio, expected)
    assert torch.equal(audio, decoded(CODEC, too_large, 4))
    assert (too_large == 4095).all()


def test_decoding_does_not_touch_its_inputs():
    chunk, (_, (state,)) = codes(4), CODEC.decode(codes(3), [CODEC.new_state()])
    before = chunk.clone(), state.clone()

    CODEC.decode(chunk, [state])

    assert torch.equal(chunk, before[0])
    assert torch.equal(state, before[1])


@pytest.mark.parametrize(
    ("wrong", "states", "complaint"),
    [
        pytest.param(codes(4).int(), 1, "int64", id="int32"),
        pytest.param(codes(4)[0], 1, r"\[b, 3, n >= 1\], got torch.int64 \[3, 4\]", id="no batch"),
        pytest.param(codes(4, num_codebooks=2), 1, r"got torch.int64 \[1, 2, 4\]", id="a codebook short"),
        pytest.param(codes(0), 1, r"n >= 1\], got torch.int64 \[1, 3, 0\]", id="no frame"),
        pytest.param(codes(4, bs=2), 1, "2 streams must bring one state, got 1", id="a state short"),
    ],
)
def test_refuses_codes_of_another_layout(wrong, states, complaint):
    with pytest.raises(ValueError, match=complaint):
        CODEC.decode(wrong, [CODEC.new_state()] * states)


@pytest.mark.parametrize(
    ("num_samples", "num_frames"), [(1, 1), (MICRO.frame_samples, 1), (MICRO.frame_samples + 1, 2), (1000, 125)]
)
def test_the_last_frame_of_a_recording_is_filled_up_with_silence(num_samples, num_frames):
    samples = sound(200)[:num_samples]
    filled = torch.zeros(num_frames * MICRO.frame_samples)
    filled[:num_samples] = samples

    made = CODEC.encode(samples.numpy())

    assert made.shape == (NUM_CODEBOOKS, num_frames)
    assert torch.equal(made, CODEC.encode(filled))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        pytest.param(torch.zeros(0), "T >= 1", id="nothing"),
        pytest.param(torch.zeros(2, 100), r"got torch.float32 \[2, 100\]", id="stereo"),
        pytest.param(torch.zeros(100).double(), "fp32", id="double"),
        pytest.param(torch.tensor([0.0, float("nan")]), "finite", id="NaN"),
    ],
)
def test_refuses_samples_that_are_no_mono_fp32_sound(wrong, complaint):
    with pytest.raises(ValueError, match=complaint):
        CODEC.encode(wrong)


def test_what_was_decoded_can_be_encoded_again_and_always_to_the_same_codes():
    audio, _ = CODEC.decode(codes(12), [CODEC.new_state()])

    first = CODEC.encode(audio[0])

    assert first.shape == (NUM_CODEBOOKS, 12)
    assert all((row >= 0).all() and (row < size).all() for row, size in zip(first, (40, 24, 24), strict=True))
    assert torch.equal(CODEC.encode(audio[0]), first)
    again, _ = codec_of(MICRO)
    assert torch.equal(again.encode(audio[0]), first)


def test_each_half_needs_its_own_tensors_only():
    decode_only = {name: WEIGHTS[name] for name in decode_shapes(MICRO, NUM_CODEBOOKS, NUM_SEMANTIC)}
    encode_only = {name: WEIGHTS[name] for name in encode_shapes(MICRO, NUM_CODEBOOKS, NUM_SEMANTIC)}

    decoder = Decoder.of(decode_only, MICRO, NUM_CODEBOOKS)
    encoder = Encoder.of(encode_only, MICRO, NUM_CODEBOOKS)

    assert decode_only.keys() | encode_only.keys() == WEIGHTS.keys()
    torch.testing.assert_close(decoder(codes(5), Past(None)), decoded(CODEC, codes(5), 5), atol=1e-6, rtol=0)
    assert torch.equal(encoder(sound(5), Past(None)), CODEC.encode(sound(5)))


def test_the_revision_names_what_the_codes_depend_on():
    same, _ = codec_of(MICRO)
    other_weights, _ = codec_of(MICRO, seed=1)
    other_config, _ = codec_of(micro(pre_module=transformer(norm_eps=1e-4)))
    decoder_only = {**WEIGHTS, "decoder.model.0.conv.bias": WEIGHTS["decoder.model.0.conv.bias"] + 1}

    assert same.revision == CODEC.revision
    assert len({CODEC.revision, other_weights.revision, other_config.revision}) == 3
    assert Codec(MICRO, NUM_CODEBOOKS, NUM_SEMANTIC, decoder_only).revision == CODEC.revision


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_the_seeded_voice_hums_audibly_and_does_not_hurt(seed):
    model = tiny()
    weights = seeded_codec_weights(model.codec, model.num_codebooks, model.num_semantic, seed)
    codec = Codec(model.codec, model.num_codebooks, model.num_semantic, weights)

    audio = decoded(codec, codes(40, num_codebooks=model.num_codebooks, size=128), 40)[0]

    power = torch.fft.rfft(audio * torch.hann_window(len(audio))).abs().square()
    hz = torch.fft.rfftfreq(len(audio), 1 / model.codec.sample_rate_hz)
    assert audio.abs().max() < 0.98
    assert 0.05 < audio.square().mean().sqrt() < 0.3
    assert audio.mean().abs() < 0.01
    assert power[hz < 60].sum() < 0.01 * power.sum()  # no rumble
    assert power[hz > 2000].sum() < 0.01 * power.sum()
    assert power[hz > 8000].sum() < 1e-4 * power.sum()  # no hiss
    assert audio.diff().abs().max() < 0.15  # no click
    loudness = audio.view(40, -1).square().mean(1).sqrt()
    assert 0.05 < loudness.std() / loudness.mean() < 1  # it varies from frame to frame
