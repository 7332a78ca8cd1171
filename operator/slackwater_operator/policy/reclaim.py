"""Whom to send away so that something more important can start.

Owns the choice of victims: the cheapest ones, and no one whose GPUs are not needed.  Called by `serve`
for replicas and by `planner` for training jobs, after free GPUs and those on their way have been used.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge

from slackwater_operator.core import Reason, Workload
from slackwater_operator.policy.draft import Draft, victim_order


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that waits for GPUs: replicas of a service, or one training job.

    shapes: GPUs of one replica on each flavor that it runs on, the preferred flavor first.
    uids: what runs there, by flavor: the beneficiary of an eviction.
    unmet: whether something is missing, given how many more replicas each flavor gets.
    most_gpus: a victim with more GPUs than this frees some that nobody waits for.
    """

    shapes: Mapping[str, int]
    uids: Mapping[str, str]
    unmet: Callable[[Mapping[str, int]], bool]
    most_gpus: int
    priority: int
    reason: Reason


def reclaim(draft: Draft, claim: Claim) -> dict[str, int]:
    """Evict for a claim and set the GPUs aside for it; returns how many replicas each flavor will get.

    More than `max_parallel` evictions are not begun at once: the rest of what is returned follows.

    A victim larger than the claim is taken only if no set of smaller ones suffices.
    """
    rank = {flavor: position for position, flavor in enumerate(claim.shapes)}

    def order(victim: Workload) -> tuple[int, float, int, float, str]:
        priority, lost, newest, uid = victim_order(victim, draft.snapshot.now_s)
        return priority, lost, rank[draft.pool.nodes[victim.node].flavor], newest, uid

    def able() -> Iterable[Workload]:
        return merge(*(draft.candidates(claim.priority, flavor) for flavor in rank), key=order)

    chosen = cheapest(draft, claim, (victim for victim in able() if victim.gpus <= claim.most_gpus))
    more = gained(draft, claim, chosen)
    if claim.unmet(more) and any(victim.gpus > claim.most_gpus for victim in able()):
        chosen = cheapest(draft, claim, able())
        more = gained(draft, claim, chosen)
    for victim in chosen[: draft.evictions_left]:
        draft.evict(victim, claim.reason, claim.uids[draft.pool.nodes[victim.node].flavor])
    for flavor, count in more.items():
        for _ in range(count):
            draft.pool.take_coming(flavor, claim.shapes[flavor])
    return more


def cheapest(draft: Draft, claim: Claim, able: Iterable[Workload]) -> list[Workload]:
    """The first victims of `able` that meet the claim, less those that turn out not to be needed.

    If all of them do not meet it, those that bring anything at all.
    """
    chosen: list[Workload] = []
    freed: dict[str, int] = {}
    for victim in able:
        if not claim.unmet(draft.pool.room(freed, claim.shapes)):
            break
        chosen.append(victim)
        freed[victim.node] = freed.get(victim.node, 0) + victim.gpus
    reached = draft.pool.room(freed, claim.shapes)
    met = not claim.unmet(reached)
    for victim in reversed(list(chosen)):
        without = freed | {victim.node: freed[victim.node] - victim.gpus}
        gain = draft.pool.room(without, claim.shapes)
        if (not claim.unmet(gain)) if met else gain == reached:
            chosen.remove(victim)
            freed = without
    return chosen


def gained(draft: Draft, claim: Claim, victims: Sequence[Workload]) -> dict[str, int]:
    """By flavor, how many more replicas fit once these victims are gone."""
    freed: dict[str, int] = {}
    for victim in victims:
        freed[victim.node] = freed.get(victim.node, 0) + victim.gpus
    return draft.pool.room(freed, claim.shapes)
