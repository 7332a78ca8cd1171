import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater_inference.core import BadRequest, EndReason, Frame, FrameBudget, QueueFull, Request, SamplingParams
from slackwater_inference.scheduler import Limits, Scheduler


def request(name, prompt_len=5, frames=4):
    return Request(name, ((1, 0),) * prompt_len, FrameBudget(frames, frames), SamplingParams())


def scheduler(slots=2, queued=8, block=4, blocks=64, prefill=16, pace=0.0, burst=2):
    return Scheduler(Limits(slots, queued, block, blocks, prefill, pace, burst))


def step(s, now_s=0.0, ends=()):
    """Run one step as the engine does; returns the plan and what ended."""
    plan = s.plan(now_s)
    made = [seq.request.request_id for seq in plan.decode] + [
        c.sequence.request.request_id for c in plan.prefill if c.is_last
    ]
    frames = [Frame(name, 9, () if name in ends else (1,)) for name in made]
    ended = s.commit(plan, frames, now_s)
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


def test_the_whole_budget_is_reserved_so_that_a_running_stream_never_waits_for_a_block():
    s = scheduler(slots=8, block=4, blocks=7)
    for i in range(4):
        s.add(request(f"r{i}", prompt_len=5, frames=8))  # 12 positions: 3 blocks each

    step(s)
    assert (s.num_running, s.num_waiting) == (2, 2)
    while s.num_running == 2:
        plan, _ = step(s)
        assert len(plan.decode) == 2


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
    s.add(request("b", prompt_len=40))
    s.add(request("c", prompt_len=10))

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


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_slots_and_blocks_are_conserved_whatever_happens(data):
    s = scheduler(slots=3, queued=4, block=4, blocks=12, prefill=8)
    accepted, over = set(), set()

    for i in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["add", "abort", "step", "step"])):
            case "add":
                try:
                    s.add(request(f"r{i}", data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))))
                    accepted.add(f"r{i}")
                except QueueFull:
                    assert s.num_running + s.num_waiting == 7
            case "abort" if accepted - over:
                name = data.draw(st.sampled_from(sorted(accepted - over)))
                assert s.abort(name)
                over.add(name)
            case _:
                _, ended = step(s)
                over |= ended.keys()
        s.check()
    for _ in range(1000):
        if not s.plan(0.0):
            break
        over |= step(s)[1].keys()

    assert over == accepted
    assert (s.num_running, s.num_waiting, s.kv_used_ratio) == (0, 0, 0.0)
