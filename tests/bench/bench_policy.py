"""One hour of the real trace through the policy in simulated time, against the same hour with nothing lent."""

import time
from dataclasses import replace

from run import Row

from slackwater_operator.simulate import Fleet, simulate
from slackwater_operator.traces import load_conversation, overlay
from slackwater_operator.traffic import Window

NOTHING_LENT = "nothing lent"
# As in tests/operator/test_simulate.py: sized so that the peak fills 70 % of the fleet.
ONE_SERVICE = Fleet(gpus=32, slots_per_replica=4, checkpoint_s=3.0)
POOL = Fleet(gpus=56, slots_per_replica=16)
TUNED_POOL = replace(POOL, window=Window(down_s=30, rise_quantile=0.9))


def measure() -> list[Row]:
    one = load_conversation()
    eight = overlay(one, 8, apart_s=7.3)
    rows = []
    for name, fleet, requests in (
        ("one service on 32 GPUs", ONE_SERVICE, one),
        ("eight services on 56 GPUs", POOL, eight),
        ("the same, windows tuned", TUNED_POOL, eight),
    ):
        began_s = time.process_time()
        outcome = simulate(fleet, requests)
        took_s = time.process_time() - began_s
        alone = simulate(replace(fleet, open_units=0), requests)
        rows += [
            Row(f"useful_ratio, {name}", outcome.useful_ratio, "ratio", NOTHING_LENT, alone.useful_ratio),
            Row(f"longest_wait_s, {name}", outcome.wait_max_s, "s", NOTHING_LENT, alone.wait_max_s),
            Row(f"lost_gpu_s, {name}", round(outcome.lost_s, 6), "s", note="committed work is what counts as useful"),
            Row(f"evictions, {name}", outcome.evictions, "count"),
            Row(f"cpu_s, {name}", took_s, "s", note="of the simulation, one core"),
        ]
    return rows
