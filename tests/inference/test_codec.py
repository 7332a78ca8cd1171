import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater_inference.codec.decoder import CodecDecoder
from slackwater_inference.config import tiny
from slackwater_inference.testing import micro

MICRO = micro()
CODEC = CodecDecoder(MICRO.codec, MICRO.num_codebooks, MICRO.num_semantic, seed=0)


def codes(num_frames, bs=1, seed=0, model=MICRO):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        0, model.codec.residual_codebook_size, (bs, model.num_codebooks, num_frames), generator=generator
    )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_a_stream_in_any_chunks_sounds_as_decoded_at_once(chunks, seed):
    whole = codes(sum(chunks), seed=seed)
    state = CODEC.new_state()
    parts = []

    for part in whole.split(chunks, dim=2):
        audio, (state,) = CODEC.decode(part, [state])
        parts.append(audio)

    at_once, _ = CODEC.decode(whole, [CODEC.new_state()])
    # The same sums in another order: a few ulps, far under the 3e-5 of an int16 step.
    torch.testing.assert_close(torch.cat(parts, dim=1), at_once, atol=1e-6, rtol=0)


def test_a_frame_makes_its_samples_at_once_and_nothing_is_left_to_flush():
    audio, _ = CODEC.decode(codes(3), [CODEC.new_state()])

    assert audio.shape == (1, 3 * MICRO.codec.frame_samples)


def test_a_later_frame_changes_nothing_before_it():
    one, other = codes(6), codes(6)
    other[:, :, 4] = (other[:, :, 4] + 1) % MICRO.codec.residual_codebook_size
    change = 4 * MICRO.codec.frame_samples

    a, _ = CODEC.decode(one, [CODEC.new_state()])
    b, _ = CODEC.decode(other, [CODEC.new_state()])

    assert torch.equal(a[:, :change], b[:, :change])
    assert not torch.equal(a[:, change:], b[:, change:])


def test_streams_of_a_batch_do_not_hear_each_other():
    first = codes(4, bs=3, seed=1)
    states = [CODEC.new_state() for _ in range(3)]
    _, states = CODEC.decode(first, states)
    second = codes(4, bs=3, seed=2)

    together, _ = CODEC.decode(second, states)

    for row in range(3):
        alone, _ = CODEC.decode(second[row : row + 1], [states[row]])
        torch.testing.assert_close(alone[0], together[row], atol=1e-6, rtol=0)


def test_decoding_does_not_touch_its_inputs():
    chunk, state = codes(4), CODEC.new_state()
    before = chunk.clone(), [part.clone() for part in state]

    CODEC.decode(chunk, [state])

    assert torch.equal(chunk, before[0])
    assert all(torch.equal(a, b) for a, b in zip(state, before[1], strict=True))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_seeded_voice_hums_audibly_and_does_not_hurt(seed):
    model = tiny()
    codec = CodecDecoder(model.codec, model.num_codebooks, model.num_semantic, seed)

    audio, _ = codec.decode(codes(40, model=model), [codec.new_state()])

    power = torch.fft.rfft(audio[0]).abs().square()
    hz = torch.fft.rfftfreq(audio.shape[1], 1 / model.codec.sample_rate_hz)
    assert audio.abs().max() < 1.0
    assert 0.02 < (audio - audio.mean()).square().mean().sqrt() < 0.4
    assert power[(hz > 100) & (hz < 2000)].sum() > 5 * power[hz > 2000].sum()  # a hum, no hiss
    assert power[(hz > 100) & (hz < 2000)].sum() > 0.1 * power[hz > 1].sum()  # above a loudspeaker's lower end
    loudness = audio.view(40, -1).square().mean(1).sqrt()
    assert loudness.std() > 0.05 * loudness.mean()  # it varies from frame to frame
