"""The scheduler and prompts that begin alike: pieces that are shared, prefixes that are held."""

from dataclasses import replace

import pytest

from slackwater_inference.core import BadRequest
from slackwater_inference.testing.scheduler import hold, request, scheduler, step


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
