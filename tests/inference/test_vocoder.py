import pytest
import torch

from slackwater_inference.codec.decoder import CodecDecoder
from slackwater_inference.testing import micro
from slackwater_inference.vocoder import Vocoder

MODEL = micro()


class CountingCodec(CodecDecoder):
    """Notes the shape of every batch."""

    def __init__(self):
        super().__init__(MODEL.codec, MODEL.num_codebooks, MODEL.num_semantic, seed=0)
        self.batches = []

    def decode(self, codes, states):
        self.batches.append((codes.shape[0], codes.shape[2]))
        return super().decode(codes, states)


@pytest.fixture
def codec():
    return CountingCodec()


FRAME_S = 1 / MODEL.codec.frame_rate_hz


def vocoder(codec, max_batch_frames=64):
    return Vocoder(
        codec, min_chunk_frames=4, max_chunk_frames=16, low_buffer_frames=8, max_batch_frames=max_batch_frames
    )


def frame(i):
    return (i % 24,) * MODEL.num_codebooks


def test_first_audio_comes_at_four_frames_and_chunks_are_large_once_the_listener_has_enough(codec):
    v = vocoder(codec)
    stream = v.open()
    sizes = []

    for i in range(50):  # all within a moment
        stream.pending.append(frame(i))
        sizes += [chunk.num_frames for _, chunk in v.run([stream], 0.0)]

    assert sizes == [4, 4, 16, 16]


@pytest.mark.parametrize("speed", [1.0, 1.16, 3.0])
def test_a_listener_never_runs_dry_when_frames_come_at_real_time_or_faster(codec, speed):
    v = vocoder(codec)
    stream = v.open()
    stream.pending += map(frame, range(4))
    list(v.run([stream], 0.0))
    stream.pending += map(frame, range(4, 10))  # the burst
    heard_until_s = 4 * FRAME_S

    list(v.run([stream], 0.0))
    for i in range(10, 300):
        now_s = (i - 9) * FRAME_S / speed
        assert now_s <= heard_until_s, f"dry at frame {i}"
        stream.pending.append(frame(i))
        list(v.run([stream], now_s))
        heard_until_s = stream.num_sent * FRAME_S


def test_a_listener_with_little_left_gets_a_small_chunk(codec):
    v = vocoder(codec)
    stream = v.open()
    stream.num_sent, stream.first_sent_s = 16, 0.0
    stream.pending += map(frame, range(5))

    early = list(v.run([stream], 8 * FRAME_S - 0.001))
    ((_, chunk),) = v.run([stream], 8 * FRAME_S + 0.001)

    assert early == []
    assert chunk.num_frames == 5


def test_the_last_frames_of_a_stream_are_spoken_however_few(codec):
    v = vocoder(codec)
    stream = v.open()
    stream.pending += [frame(0), frame(1)]
    assert list(v.run([stream], 0.0)) == []

    stream.has_ended = True
    ((_, chunk),) = v.run([stream], 0.0)

    assert chunk.num_frames == 2
    assert list(v.run([stream], 0.0)) == []


def test_streams_share_batches_of_bounded_size_and_first_audio_goes_first(codec):
    v = vocoder(codec, max_batch_frames=16)
    old = [v.open() for _ in range(3)]
    for stream in old:
        stream.pending += map(frame, range(16))
        stream.num_sent, stream.first_sent_s = 16, 0.0
    new = [v.open() for _ in range(5)]
    for stream in new:
        stream.pending += map(frame, range(4))

    order = [stream for stream, _ in v.run([*old, *new], 0.0)]

    assert codec.batches == [(4, 4), (1, 4), (1, 16), (1, 16), (1, 16)]
    assert order == [*new, *old]


def test_the_chunks_of_a_stream_are_the_int16_of_its_audio_at_once(codec):
    v = vocoder(codec)
    stream = v.open()
    pcm = b""

    for i in range(30):
        stream.pending.append(frame(i))
        stream.has_ended = i == 29
        while chunks := list(v.run([stream], 0.0)):
            pcm += b"".join(chunk.pcm for _, chunk in chunks)

    codes = torch.tensor([frame(i) for i in range(30)]).T[None]
    at_once, _ = codec.decode(codes, [codec.new_state()])
    spoken = torch.frombuffer(bytearray(pcm), dtype=torch.int16).float() / 32767
    torch.testing.assert_close(spoken, at_once[0], atol=1.1 / 32767, rtol=0)
