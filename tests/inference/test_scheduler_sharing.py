"""The scheduler and sequences that share a prompt: what they owe each other and what they give back."""

from slackwater_inference.core import EndReason
from slackwater_inference.testing.scheduler import request, scheduler, step


def test_a_piece_that_two_come_to_share_is_still_given_back_by_the_last_of_them():
    s = scheduler(slots=3, block=1, blocks=17, piece=4)
    for name in "ab":  # 7 blocks each, 4 of them one piece, which both compute in the first step
        s.add(request(name, prompt_len=5, frames=3, expected=1))
    s.add(request("all", prompt_len=1, frames=17, expected=1, base=50))  # wants all 17 blocks in the end
    ended = {}

    for _ in range(20):
        ended |= step(s)[1]

    assert ended == dict.fromkeys(["a", "b", "all"], EndReason.LENGTH)
