"""Who gives a GPU next, against the plainest search."""

import random

import pytest

from slackwater_operator.core import Limits, Node, Snapshot
from slackwater_operator.policy.pool import Pool

NOW_S = 100.0
REST_S = 10.0


def pool_of(seed: int) -> Pool:
    """Nodes of two flavors with some GPUs idle, and some of these for long enough."""
    rng = random.Random(seed)
    nodes = tuple(
        Node(
            f"n{number:02}",
            rng.choice("ab"),
            8,
            idle_since_s=tuple(NOW_S - rng.choice([1.0, 20.0]) for _ in range(rng.randint(0, 8))),
        )
        for number in range(12)
    )
    return Pool(Snapshot(NOW_S, nodes, (), limits=Limits(lend_after_s=REST_S)))


def plainest(pool: Pool, flavor: str, gpus: int, counted: dict[str, int]) -> str:
    """The fullest node that has so many, the first by name of these; "" if none has."""
    roomy = [name for name in pool.flavor_nodes(flavor) if counted[name] >= gpus]
    return min(roomy, key=lambda name: (pool.free[name], name), default="")


@pytest.mark.parametrize("seed", range(40))
def test_whatever_was_taken_before_the_fullest_node_that_has_room_is_next(seed: int) -> None:
    pool, rng = pool_of(seed), random.Random(seed)
    taken = 0

    for _ in range(120):
        flavor, gpus, what = rng.choice("ab"), rng.choice([1, 1, 1, 2, 4]), rng.choice(["free", "rested", "coming"])
        if what == "coming":  # takes free ones too, behind the back of the other two
            pool.take_coming(flavor, gpus)
            continue
        expected = plainest(pool, flavor, gpus, pool.free if what == "free" else pool.rested)
        before = dict(pool.free)
        got = pool.take_free(flavor, gpus) if what == "free" else pool.take_rested(flavor, gpus)

        changed = [name for name in before if pool.free[name] != before[name]]
        assert got is bool(expected)
        assert changed == ([expected] if expected else [])
        taken += got

    assert taken
    assert all(0 <= pool.rested[name] <= pool.free[name] for name in pool.free)
