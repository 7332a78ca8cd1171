"""The scheduler: who gets a slot, what a step computes, how a sequence ends."""

import pytest

from slackwater_inference.core import BadRequest, EndReason, Frame, QueueFull
from slackwater_inference.testing.scheduler import computed, names, request, scheduler, step


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


def test_a_sequence_that_repeats_itself_is_ended():
    s = scheduler(loop=16)
    s.add(request("a", frames=50))
    ended = {}
    for _ in range(15):
        ended |= step(s)[1]
    assert not ended

    assert step(s)[1] == {"a": EndReason.LOOP}
    assert s.kv_used_ratio == 0.0


def test_requests_get_slots_in_order_of_arrival():
    s = scheduler(slots=2)
    for name in "abc":
        s.add(request(name, frames=2))

    step(s)
    assert (s.num_running, s.num_waiting) == (2, 1)
    step(s)  # a and b end
    plan, _ = step(s)

    assert computed(plan.prefill) == ["c"]


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


def test_while_a_listener_has_little_left_only_a_piece_of_a_prompt_is_computed():
    s = scheduler(slots=2, prefill=16, piece=4)
    s.add(request("a", frames=20))
    step(s)
    s.add(request("b", prompt_len=40, base=100))

    urgent = s.plan(0.0, is_urgent=True)
    calm = s.plan(0.0)

    assert computed(urgent.prefill) == ["b"]
    assert computed(calm.prefill) == ["b"] * 4
    assert names(urgent.decode) == names(calm.decode) == ["a"]


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
    assert computed(s.plan(0.0).prefill) == ["b"]


def test_a_step_that_outlives_an_abort_keeps_writing_to_its_own_old_slot():
    s = scheduler(slots=2)
    s.add(request("a"))
    s.add(request("b"))
    step(s)
    plan = s.plan(0.0)
    slots = [seq.slot for seq in plan.decode]

    s.abort("a")

    assert [seq.slot for seq in plan.decode] == slots


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

    assert computed(plan.prefill) == ["b.1"]
    assert s.num_waiting == 1


def test_the_prompt_of_a_stream_that_goes_on_is_computed_first():
    s = scheduler(slots=3, prefill=4, piece=4)
    s.add(request("long", prompt_len=12))
    step(s)
    s.add(request("b.1", prompt_len=4, base=50), goes_on=True)

    plan, _ = step(s)

    assert computed(plan.prefill) == ["b.1"]
