"""The scheduler and its KV blocks: who is admitted, who is lent the next one."""

from slackwater_inference.core import EndReason
from slackwater_inference.testing.scheduler import request, scheduler, step


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
