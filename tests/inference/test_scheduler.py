from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater_inference.batch import Pace
from slackwater_inference.core import BadRequest, EndReason, Frame, FrameBudget, QueueFull, Request, SamplingParams
from slackwater_inference.scheduler import Limits, Scheduler


def request(name, prompt_len=5, frames=4, expected=None, base=0):
    """A request of `frames` frames at most; another base is another prompt."""
    prompt = tuple((base + i, 0) for i in range(prompt_len))
    return Request(name, prompt, FrameBudget(frames if expected is None else expected, frames), SamplingParams())


def scheduler(slots=2, queued=8, block=4, blocks=64, prefill=16, piece=None, held=0, pace=0.0, burst=2, loop=0):
    return Scheduler(Limits(slots, queued, block, blocks, prefill, piece or prefill, held, pace, burst, loop))


def step(s, now_s=0.0, ends=(), abort=None):
    """Run one step as the engine does; returns the plan and what ended.  abort: a request that goes away meanwhile."""
    plan = s.plan(now_s)
    made = [seq.request.request_id for seq in plan.decode] + [
        c.sequence.request.request_id for c in plan.prefill if c.is_last
    ]
    if abort is not None:
        assert s.abort(abort)
        s.check()
    # Also of a sequence that is gone, the step that is running reads where it lies.
    block = s.limits.block_size
    assert all(c.stop <= len(c.sequence.blocks) * block for c in plan.prefill)
    assert all(seq.next_position < len(seq.blocks) * block for seq in plan.decode)
    ended = s.commit(plan, [Frame(name, 9, () if name in ends else (1,)) for name in made], now_s)
    s.check()
    return plan, ended


def names(sequences):
    return [seq.request.request_id for seq in sequences]


def test_a_prefilled_sequence_decodes_from_the_next_step_until_its_budget():
    s = scheduler()
    s.add(request("a", frames=3))

    first, _ = step(s)
    second, _ = step(s)
    third, ended = step(s)

    assert [(c.start, c.stop) for c in first.prefill] == [(0, 5)]
    assert not first.decode
    assert names(second.decode) == names(third.decode) == ["a"]
    assert ended == {"a": EndReason.LENGTH}
    assert not s.plan(0.0)
    assert s.kv_used_ratio == 0.0


def test_im_end_ends_a_sequence_before_its_budget():
    s = scheduler()
    s.add(request("a", frames=50))
    step(s)

    _, ended = step(s, ends={"a"})

    assert ended == {"a": EndReason.STOP}
    assert s.num_running == 0


def test_requests_get_slots_in_order_of_arrival():
    s = scheduler(slots=2)
    for name in "abc":
        s.add(request(name, frames=2))

    step(s)
    assert (s.num_running, s.num_waiting) == (2, 1)
    step(s)  # a and b end
    plan, _ = step(s)

    assert [c.sequence.request.request_id for c in plan.prefill] == ["c"]


def test_a_large_request_at_the_head_is_not_overtaken():
    s = scheduler(slots=3, block=4, blocks=6)
    s.add(request("a", prompt_len=9, frames=8))  # 4 blocks
    step(s)
    s.add(request("large", prompt_len=9, frames=8))
    s.add(request("small", prompt_len=1, frames=2))

    step(s)

    assert (s.num_running, s.num_waiting) == (1, 2)


def test_refuses_what_exceeds_slots_and_queue():
    s = scheduler(slots=1, queued=1)
    s.add(request("a"))
    s.add(request("b"))

    with pytest.raises(QueueFull, match="all 1 slots and 1 places"):
        s.add(request("c"))

    s.abort("b")
    s.add(request("c"))


def test_refuses_what_could_never_be_admitted():
    s = scheduler(block=4, blocks=4)

    with pytest.raises(BadRequest, match="needs 5 KV blocks, the engine has 4"):
        s.add(request("a", prompt_len=10, frames=8))

    assert s.num_waiting == 0


def test_long_prompts_are_spread_over_steps_while_running_streams_go_on():
    s = scheduler(slots=3, prefill=16)
    s.add(request("a", frames=20))
    step(s)
    s.add(request("b", prompt_len=40, base=100))
    s.add(request("c", prompt_len=10, base=200))

    chunks = []
    for _ in range(4):
        plan, _ = step(s)
        assert "a" in names(plan.decode)
        assert sum(c.stop - c.start for c in plan.prefill) <= 16
        chunks.append([(c.sequence.request.request_id, c.start, c.stop) for c in plan.prefill])

    assert chunks == [[("b", 0, 16)], [("b", 16, 32)], [("b", 32, 40)], [("c", 0, 10)]]


def test_an_abort_frees_slot_and_blocks_at_once_also_in_the_middle_of_a_step():
    s = scheduler(slots=1)
    s.add(request("a", frames=9))
    s.add(request("b"))
    step(s)
    plan = s.plan(0.0)

    assert s.abort("a")
    assert s.kv_used_ratio == 0.0
    ended = s.commit(plan, [Frame("a", 9, (1,))], 0.0)

    s.check()
    assert ended == {}
    assert not s.abort("a")
    assert [c.sequence.request.request_id for c in s.plan(0.0).prefill] == ["b"]


def test_a_step_that_outlives_an_abort_keeps_writing_to_its_own_old_slot():
    s = scheduler(slots=2)
    s.add(request("a"))
    s.add(request("b"))
    step(s)
    plan = s.plan(0.0)
    slots = [seq.slot for seq in plan.decode]

    s.abort("a")

    assert [seq.slot for seq in plan.decode] == slots


def test_a_paced_stream_runs_freely_through_its_burst_and_then_at_its_rate():
    s = scheduler(pace=10.0, burst=3)
    s.add(request("a", frames=50))
    made = 0
    at_s = []

    for tick_ms in range(0, 1000, 20):
        while s.plan(tick_ms / 1000):
            step(s, tick_ms / 1000)
            made += 1
            at_s.append(tick_ms / 1000)

    assert at_s[:3] == [0.0, 0.0, 0.0]
    assert made == 3 + 9


def test_paced_streams_are_due_together_whenever_they_began():
    s = scheduler(slots=3, pace=10.0, burst=1)
    for i, at_s in enumerate((0.01, 0.03, 0.07)):
        s.add(request(f"r{i}", frames=9))
        step(s, at_s)

    waiting = s.plan(0.08)
    due = s.plan(0.101)

    assert not waiting
    assert waiting.wake_at_s == pytest.approx(0.1)
    assert len(due.decode) == 3


def test_a_pause_of_the_stream_is_not_caught_up_with_but_begins_a_new_burst():
    s = scheduler(pace=10.0, burst=3)
    pace = Pace()
    s.add(request("r.0", frames=4), pace)
    at_s = [t / 100 for t in range(0, 100, 2) for _ in range(_num_steps(s, t / 100))]
    assert at_s == [0.0, 0.0, 0.0, 0.1]

    s.add(request("r.1", frames=20), pace, goes_on=True)
    at_s = [t / 100 for t in range(500, 560, 2) for _ in range(_num_steps(s, t / 100))]

    assert at_s == [5.0, 5.0, 5.0, 5.1, 5.2, 5.3, 5.4, 5.5]


def test_the_next_part_goes_on_at_the_pace_of_its_stream():
    s = scheduler(pace=10.0, burst=3)
    pace = Pace()
    s.add(request("r.0", frames=3), pace)
    assert _num_steps(s, 0.0) == 3

    s.add(request("r.1", frames=20), pace, goes_on=True)

    assert _num_steps(s, 0.0) == 1  # its first frame comes with its prompt
    assert [_num_steps(s, t) for t in (0.05, 0.1, 0.2, 0.3)] == [0, 0, 1, 1]


def _num_steps(s, now_s):
    count = 0
    while s.plan(now_s):
        step(s, now_s)
        count += 1
    return count


def test_a_stream_that_goes_on_overtakes_new_ones_and_finds_the_queue_never_full():
    s = scheduler(slots=1, queued=1)
    s.add(request("a", frames=2))
    step(s)
    s.add(request("new"))
    with pytest.raises(QueueFull):
        s.add(request("newer"))

    s.add(request("b.1", frames=2), goes_on=True)
    step(s)
    plan, _ = step(s)

    assert [c.sequence.request.request_id for c in plan.prefill] == ["b.1"]
    assert s.num_waiting == 1


def test_the_prompt_of_a_stream_that_goes_on_is_computed_first():
    s = scheduler(slots=3, prefill=4, piece=4)
    s.add(request("long", prompt_len=12))
    step(s)
    s.add(request("b.1", prompt_len=4, base=50), goes_on=True)

    plan, _ = step(s)

    assert [c.sequence.request.request_id for c in plan.prefill] == ["b.1"]


# Memory


def test_is_admitted_by_its_expected_length_and_grows_block_by_block():
    s = scheduler(slots=8, block=4, blocks=24)
    for i in range(4):
        s.add(request(f"r{i}", prompt_len=4, frames=33, expected=9, base=100 * i))  # 9 blocks at most, 5 expected

    step(s)

    assert s.num_running == 4
    assert s.kv_used_ratio == 4 / 24
    step(s)
    assert s.kv_used_ratio == 8 / 24


def test_is_not_admitted_while_the_running_ones_are_expected_to_need_the_room():
    s = scheduler(slots=8, block=4, blocks=12)
    s.add(request("a", prompt_len=4, frames=33))  # 9 blocks, all expected
    s.add(request("b", prompt_len=9, frames=4, base=50))  # 3 blocks
    s.add(request("c", prompt_len=4, frames=1, base=90))

    step(s)

    assert (s.num_running, s.num_waiting) == (2, 1)


def test_a_block_is_refused_where_nobody_could_be_sure_to_finish_and_lent_when_one_did():
    s = scheduler(slots=2, block=1, blocks=12)
    for i, name in enumerate("ab"):
        s.add(request(name, prompt_len=1, frames=10, expected=1, base=10 * i))
    num_kept_waiting, ended = 0, {}

    for _ in range(40):
        plan, now_ended = step(s)
        num_kept_waiting += plan.num_kept_waiting
        ended |= now_ended

    assert ended == {"a": EndReason.LENGTH, "b": EndReason.LENGTH}
    assert 0 < num_kept_waiting <= 10


def test_is_not_admitted_where_nobody_could_be_sure_to_finish_though_its_expected_need_fits():
    s = scheduler(slots=2, block=1, blocks=14)
    s.add(request("a", prompt_len=1, frames=10, expected=1))
    for _ in range(4):
        step(s)
    # a holds 4 blocks and may want 6 more; with the prompt of b 4 are left, and b may want 5.
    s.add(request("b", prompt_len=6, frames=6, expected=1, base=50))

    step(s)

    assert (s.num_running, s.num_waiting) == (1, 1)


def test_a_shared_piece_does_not_count_as_given_back_by_one_of_its_holders():
    s = scheduler(slots=3, block=1, blocks=12, piece=4)
    s.add(request("a", prompt_len=5, frames=2, expected=1))
    step(s)
    s.add(request("b", prompt_len=5, frames=8, expected=1))
    s.add(request("c", prompt_len=1, frames=8, expected=1, base=50))

    s.plan(0.0)

    # When a is done 7 blocks would be held by b and c, and either may want 7 more of the 5 others.
    assert (s.num_running, s.num_waiting) == (2, 1)


def test_a_cached_prompt_is_evicted_for_whoever_runs():
    s = scheduler(slots=1, block=4, blocks=8, prefill=4)
    s.add(request("a", prompt_len=20, frames=1))
    while step(s)[0]:
        pass
    assert s.kv_used_ratio == 0.0

    s.add(request("b", prompt_len=28, frames=4, base=50))
    while step(s)[0]:
        pass

    s.add(request("a again", prompt_len=20, frames=1))
    plan, _ = step(s)
    assert plan.prefill[0].start == 0


# The prefix cache


def run(s, asked):
    """Run a request alone; returns the bounds of the pieces that were computed for it."""
    s.add(asked)
    bounds = []
    while plan := step(s)[0]:
        bounds += [(c.start, c.stop) for c in plan.prefill]
    return bounds


def test_a_prompt_that_comes_again_is_computed_from_its_last_whole_piece_on():
    s = scheduler(prefill=16, piece=8)

    assert run(s, request("a", prompt_len=20)) == [(0, 8), (8, 16), (16, 20)]
    assert run(s, request("b", prompt_len=20)) == [(16, 20)]
    assert run(s, request("longer", prompt_len=30)) == [(16, 24), (24, 30)]
    assert run(s, request("whole pieces", prompt_len=16)) == [(8, 16)]  # the last position is always computed
    assert run(s, replace(request("other voice", prompt_len=20), namespace="v")) == [(0, 8), (8, 16), (16, 20)]


def test_generated_frames_are_not_cached():
    s = scheduler(prefill=16, piece=8)

    run(s, request("a", prompt_len=4, frames=20))

    assert s._cache.num_cached == 0


def test_sequences_that_come_together_share_what_the_first_one_computes():
    s = scheduler(slots=3, prefill=8, piece=8)
    for name in "abc":
        s.add(request(name, prompt_len=20, frames=9))
    computed = []

    for _ in range(6):
        plan, _ = step(s)
        computed += [(c.sequence.request.request_id, c.start) for c in plan.prefill]

    assert computed == [("a", 0), ("a", 8), ("a", 16), ("b", 16), ("c", 16)]
    assert s.kv_used_ratio == (4 + 3 * 2) / 64  # two pieces for all, and two blocks each


def test_an_abort_leaves_the_pieces_to_those_who_share_them():
    s = scheduler(slots=2, prefill=16, piece=8)
    s.add(request("a", prompt_len=20, frames=9))
    step(s)
    s.add(request("b", prompt_len=20, frames=9))
    step(s)

    s.abort("a")
    s.check()

    assert s.num_running == 1
    assert s.kv_used_ratio > 0
    s.abort("b")
    s.check()
    assert s.kv_used_ratio == 0.0


# Held prefixes


def hold(s, name, length=20, base=0):
    s.hold(replace(request(name, length, frames=0, base=base)))


def test_a_held_prefix_is_computed_without_a_slot_and_stays_until_it_is_released():
    s = scheduler(slots=1, block=4, blocks=32, prefill=16, piece=8, held=8)
    s.add(request("busy", frames=9, base=500))
    step(s)
    hold(s, "r1")

    plan, ended = step(s)
    assert [(c.start, c.stop, c.is_last) for c in plan.prefill] == [(0, 8, False), (8, 16, False)]
    assert ended == {}
    while step(s)[0]:
        pass
    assert s.kv_used_ratio == 4 / 32

    assert run(s, request("r1.0", prompt_len=20)) == [(16, 20)]
    s.release_hold("r1")
    s.check()
    assert s.kv_used_ratio == 0.0
    assert run(s, request("r2.0", prompt_len=20)) == [(16, 20)]  # it stays as long as nobody wants the room


def test_prefixes_are_held_up_to_their_share_and_the_rest_waits():
    s = scheduler(slots=1, block=4, blocks=32, prefill=16, piece=8, held=8)
    for i, name in enumerate(["r1", "r2", "r3"]):
        hold(s, name, base=100 * i)
    hold(s, "same as r1")

    while step(s)[0]:
        pass
    assert s.kv_used_ratio == 8 / 32

    s.release_hold("r1")
    while step(s)[0]:
        pass
    assert s.kv_used_ratio == 8 / 32
    for name in ("r2", "r3", "same as r1", "unknown"):
        s.release_hold(name)
    s.check()
    assert s.kv_used_ratio == 0.0


def test_a_hold_can_be_released_while_it_is_computed():
    s = scheduler(prefill=16, piece=8, held=8)
    hold(s, "r1")
    plan = s.plan(0.0)

    s.release_hold("r1")
    s.commit(plan, [], 0.0)

    s.check()
    assert s.kv_used_ratio == 0.0
    assert not s.plan(0.0)


def test_a_prefix_shorter_than_a_piece_is_not_held():
    s = scheduler(prefill=16, piece=8, held=8)

    hold(s, "r1", length=7)

    assert not s.plan(0.0)


def test_a_request_that_would_not_fit_beside_the_held_prefixes_is_refused():
    s = scheduler(block=4, blocks=16, held=8)

    with pytest.raises(BadRequest, match="needs 9 KV blocks, the engine has 8"):
        s.add(request("a", prompt_len=30, frames=7))


# Guards


def test_a_sequence_that_repeats_itself_is_ended():
    s = scheduler(loop=16)
    s.add(request("a", frames=50))
    ended = {}
    for _ in range(15):
        ended |= step(s)[1]
    assert not ended

    assert step(s)[1] == {"a": EndReason.LOOP}
    assert s.kv_used_ratio == 0.0


# Whatever happens


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_everybody_finishes_and_nothing_is_lost_whatever_happens(data):
    s = scheduler(
        slots=data.draw(st.integers(1, 6)),
        queued=6,
        block=2,
        blocks=data.draw(st.integers(20, 60)),
        prefill=8,
        piece=4,
        held=data.draw(st.integers(0, 6)),
        pace=data.draw(st.sampled_from([0.0, 10.0])),
    )
    accepted, over, holds = set(), set(), set()
    now_s = 0.0

    for i in range(data.draw(st.integers(1, 50))):
        match data.draw(st.sampled_from(["add", "add", "hold", "release", "abort", *["step"] * 4])):
            case "add":
                frames = data.draw(st.integers(1, 16))
                asked = request(
                    f"r{i}",
                    data.draw(st.integers(1, 12)),
                    frames,
                    data.draw(st.integers(1, frames)),
                    data.draw(st.sampled_from([0, 100])),
                )
                try:
                    s.add(asked, goes_on=data.draw(st.booleans()))
                    accepted.add(f"r{i}")
                except QueueFull:
                    pass
            case "hold":
                hold(s, f"h{i}", data.draw(st.integers(0, 9)), data.draw(st.sampled_from([0, 100, 200])))
                holds.add(f"h{i}")
            case "release" if holds:
                s.release_hold(holds.pop())
            case "abort" if accepted - over:
                name = data.draw(st.sampled_from(sorted(accepted - over)))
                over |= {name, *step(s, now_s, abort=name)[1]}
            case _:
                now_s += data.draw(st.sampled_from([0.0, 0.1]))
                _, ended = step(s, now_s)
                over |= ended.keys()
        s.check()

    for _ in range(2000):
        plan, ended = step(s, now_s)
        over |= ended.keys()
        if not plan:
            if plan.wake_at_s is None:
                break
            now_s = plan.wake_at_s + 0.001
    assert over == accepted
    for name in holds:
        s.release_hold(name)
    s.check()
    assert (s.num_running, s.num_waiting, s.kv_used_ratio) == (0, 0, 0.0)
