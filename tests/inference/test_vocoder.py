import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater_inference.codec.codec import Codec
from slackwater_inference.codec.weights import seeded_codec_weights
from slackwater_inference.testing.model import micro
from slackwater_inference.vocoder import Vocoder

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = micro()
DIMS = (MODEL.codec, MODEL.num_codebooks, MODEL.num_semantic)
WEIGHTS = seeded_codec_weights(*DIMS, seed=0)
FRAME_S = 1 / MODEL.codec.frame_rate_hz


class CountingCodec(Codec):
    """Notes the shape of every batch."""

    def __init__(self):
        super().__init__(*DIMS, WEIGHTS)
        self.batches = []

    def decode(self, codes, states):
        self.batches.append((codes.shape[0], codes.shape[2]))
        return super().decode(codes, states)


@pytest.fixture
def codec():
    return CountingCodec()


def vocoder(codec, max_frames=64):
    return Vocoder(codec, min_chunk_frames=4, max_chunk_frames=16, low_buffer_frames=8, max_frames=max_frames)


def frame(i):
    return (i % 24,) * MODEL.num_codebooks


def put(stream, frames):
    for i in frames:
        stream.put(frame(i))


def opened(v, num_frames=0, said_s=0.0, min_chunk_frames=None):
    """A stream in its first part, with that many frames."""
    stream = v.open(min_chunk_frames)
    stream.begin_part(0, said_s)
    put(stream, range(num_frames))
    return stream


def listening(v, num_heard_frames, num_frames, now_s=0.0):
    """A stream whose listener has that many frames left to hear at `now_s`, and that many wait to be decoded."""
    stream = opened(v, 16)
    list(v.run([stream], now_s - (16 - num_heard_frames) * FRAME_S))
    put(stream, range(num_frames))
    return stream


def sizes(chunks):
    return [chunk.num_frames for _, chunk in chunks]


def test_first_audio_comes_at_four_frames_and_chunks_are_large_once_the_listener_has_enough(codec):
    v = vocoder(codec)
    stream = opened(v)
    made = []

    for i in range(50):  # all within a moment
        stream.put(frame(i))
        made += sizes(v.run([stream], 0.0))

    assert made == [4, 4, 16, 16]


def test_a_stream_can_have_a_smallest_chunk_of_its_own(codec):
    v = vocoder(codec)
    quick, patient = opened(v, min_chunk_frames=1), opened(v, min_chunk_frames=6)
    made = {quick: [], patient: []}

    for i in range(6):
        for stream in made:
            stream.put(frame(i))
        for stream, chunk in v.run(made, 0.0):
            made[stream].append(chunk.num_frames)

    assert made == {quick: [1] * 6, patient: [6]}


@pytest.mark.parametrize("speed", [1.0, 1.16, 3.0])
def test_a_listener_never_runs_dry_when_frames_come_at_real_time_or_faster(codec, speed):
    v = vocoder(codec)
    stream = opened(v, 4)
    list(v.run([stream], 0.0))
    put(stream, range(4, 10))  # the burst

    list(v.run([stream], 0.0))
    for i in range(10, 300):
        now_s = (i - 9) * FRAME_S / speed
        assert now_s <= stream.dry_s, f"dry at frame {i}"
        stream.put(frame(i))
        list(v.run([stream], now_s))

    assert stream.dry_s == pytest.approx(stream.num_sent * FRAME_S)
    assert stream.num_underruns == 0


def test_a_listener_with_little_left_gets_a_small_chunk(codec):
    v = vocoder(codec)
    stream = listening(v, 16, 5)
    due_s = v.next_due_s([stream], 0.0)

    early = list(v.run([stream], due_s - 1e-6))
    made = sizes(v.run([stream], due_s + 1e-6))

    assert due_s == pytest.approx(8 * FRAME_S)
    assert early == []
    assert made == [5]


def test_the_loop_learns_when_it_has_something_to_decode(codec):
    v = vocoder(codec)

    assert v.next_due_s([], 1.0) is None
    assert v.next_due_s([opened(v), opened(v, 3)], 1.0) is None  # not before more frames come
    assert v.next_due_s([opened(v), opened(v, 4)], 1.0) == 1.0
    assert v.next_due_s([listening(v, 16, 3)], 0.0) is None
    assert v.next_due_s([listening(v, 16, 4), listening(v, 12, 4)], 0.0) == pytest.approx(4 * FRAME_S)


def test_the_last_frames_of_a_part_are_spoken_however_few(codec):
    v = vocoder(codec)
    stream = opened(v, 2)
    assert list(v.run([stream], 0.0)) == []

    stream.end_part()

    assert v.next_due_s([stream], 0.0) == 0.0
    assert sizes(v.run([stream], 0.0)) == [2]
    assert stream.num_pending == 0
    assert list(v.run([stream], 0.0)) == []
    assert v.next_due_s([stream], 0.0) is None


def test_a_chunk_belongs_to_one_part(codec):
    v = vocoder(codec)
    stream = opened(v, 6)
    stream.end_part()
    stream.begin_part(1, 0.0)
    put(stream, range(6, 9))
    stream.end_part()

    chunks = [chunk for _ in range(3) for _, chunk in v.run([stream], 0.0)]

    assert [(chunk.part, chunk.num_frames) for chunk in chunks] == [(0, 6), (1, 3)]


def test_a_part_without_any_frame_leaves_no_chunk(codec):
    v = vocoder(codec)
    stream = opened(v)
    stream.end_part()
    stream.begin_part(1, 0.0)
    put(stream, range(4))

    ((_, chunk),) = v.run([stream], 0.0)

    assert chunk.part == 1


def test_frames_must_belong_to_an_open_part(codec):
    stream = vocoder(codec).open()

    with pytest.raises(ValueError, match="call begin_part first"):
        stream.put(frame(0))
    with pytest.raises(ValueError, match="no part is open"):
        stream.end_part()
    stream.begin_part(0, 0.0)
    with pytest.raises(ValueError, match="after part 0 has ended"):
        stream.begin_part(1, 0.0)


def test_the_stream_whose_listener_runs_dry_first_is_decoded_first(codec):
    v = vocoder(codec)
    streams = {left: listening(v, left, 5 + i) for i, left in enumerate([7, -2, 3, 5])}
    new = opened(v, 9)
    codec.batches.clear()

    order = [stream for stream, _ in v.run([*streams.values(), new], 0.0)]

    assert order == [streams[-2], new, streams[3], streams[5], streams[7]]
    assert codec.batches == [(1, 6), (1, 9), (1, 7), (1, 8), (1, 5)]


def test_streams_of_equal_length_share_the_batch_of_the_most_urgent(codec):
    v = vocoder(codec)
    late, urgent, other = listening(v, 7, 5), listening(v, 1, 5), listening(v, 3, 6)
    codec.batches.clear()

    order = [stream for stream, _ in v.run([late, urgent, other], 0.0)]

    assert codec.batches == [(2, 5), (1, 6)]
    assert order == [urgent, late, other]


def test_a_call_is_bounded_and_leaves_the_least_urgent_for_the_next(codec):
    v = vocoder(codec, max_frames=20)
    new = [opened(v, 4) for _ in range(7)]
    codec.batches.clear()

    first = [stream for stream, _ in v.run(new, 0.0)]
    assert v.next_due_s(new, 0.0) == 0.0
    second = [stream for stream, _ in v.run(new, 0.0)]

    assert codec.batches == [(5, 4), (2, 4)]
    assert first + second == new


def test_a_chunk_is_never_larger_than_what_a_call_may_decode(codec):
    v = vocoder(codec, max_frames=6)
    stream = opened(v, 16)
    stream.end_part()

    made = [n for _ in range(4) for n in sizes(v.run([stream], 0.0))]

    assert made == [6, 6, 4]


def test_a_chunk_that_comes_after_its_listener_ran_dry_is_an_underrun(codec):
    v = vocoder(codec)
    stream = opened(v, 4)
    list(v.run([stream], 0.0))
    for gap_s, num_frames in ((0.25, 4), (0.5, 4), (0.125, 8)):
        put(stream, range(num_frames))
        list(v.run([stream], stream.dry_s + gap_s))
    put(stream, range(4))
    list(v.run([stream], stream.dry_s - 1e-6))  # in time

    assert stream.num_underruns == 3
    assert stream.longest_gap_s == pytest.approx(0.5)


def test_waiting_for_the_callers_text_is_no_underrun_and_waiting_for_us_is(codec):
    v = vocoder(codec)
    stream = opened(v, 4)
    list(v.run([stream], 0.0))
    stream.end_part()

    stream.begin_part(1, said_s=stream.dry_s + 5.0)  # the caller paused
    put(stream, range(4))
    list(v.run([stream], stream.dry_s + 6.0))
    assert stream.num_underruns == 0

    stream.end_part()
    stream.begin_part(2, said_s=stream.dry_s - 0.01)  # this text was there in time
    put(stream, range(4))
    list(v.run([stream], stream.dry_s + 1.0))
    assert stream.num_underruns == 1


def test_the_chunks_of_a_stream_are_the_samples_of_its_audio_at_once_over_all_parts(codec):
    v = vocoder(codec)
    stream = opened(v)
    spoken = b""

    for i in range(30):
        stream.put(frame(i))
        if i in (12, 29):
            stream.end_part()
            if i == 12:
                stream.begin_part(1, 0.0)
        spoken += b"".join(chunk.samples for _, chunk in v.run([stream], 0.0))
    while chunks := list(v.run([stream], 0.0)):
        spoken += b"".join(chunk.samples for _, chunk in chunks)

    at_once, _ = codec.decode(torch.tensor([frame(i) for i in range(30)]).T[None], [codec.new_state()])
    torch.testing.assert_close(torch.frombuffer(bytearray(spoken), dtype=torch.float32), at_once[0], atol=1e-5, rtol=0)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["put", "end", "wait"])), min_size=1, max_size=60),
    st.integers(1, 40),
)
@settings(max_examples=15, deadline=None)
def test_every_frame_is_spoken_once_in_order_and_no_call_exceeds_its_bound(actions, max_frames):
    codec = CountingCodec()
    v = vocoder(codec, max_frames)
    streams = [opened(v) for _ in range(5)]
    given_frames = [[0] for _ in streams]  # frames of each part
    heard = [[] for _ in streams]
    now_s = 0.0

    def run():
        codec.batches.clear()
        chunks = list(v.run(streams, now_s))
        assert sum(b * n for b, n in codec.batches) <= max_frames
        for stream, chunk in chunks:
            heard[streams.index(stream)].append((chunk.part, chunk.num_frames))
        return chunks

    for index, action in actions:
        if action == "put":
            put(streams[index], range(3))
            given_frames[index][-1] += 3
        elif action == "end":
            streams[index].end_part()
            streams[index].begin_part(len(given_frames[index]), now_s)
            given_frames[index].append(0)
        else:
            now_s += 0.05
            run()
    for stream in streams:
        stream.end_part()
    while v.next_due_s(streams, now_s) is not None:
        assert run()

    for index, parts in enumerate(given_frames):
        assert [part for part, _ in heard[index]] == sorted(part for part, _ in heard[index])
        assert [sum(n for p, n in heard[index] if p == part) for part in range(len(parts))] == parts


def test_a_listener_is_low_while_it_hears_the_last_frames_of_a_part_that_goes_on(codec):
    v = vocoder(codec)
    stream = opened(v, num_frames=16)
    before_first = v.is_anyone_low([stream], 0.0)
    list(v.run([stream], 0.0))  # 16 frames to hear
    then, later = (v.is_anyone_low([stream], at * FRAME_S) for at in (7, 9))
    stream.end_part()

    assert (before_first, then, later) == (False, False, True)
    assert not v.is_anyone_low([stream], 9 * FRAME_S)
