"""Who should hold which GPU: a plan from a snapshot.

Pure: no clock, no I/O, no memory between two plans; equal snapshots give equal plans, whatever the order
of their tuples.  Called by the loop and the simulator, each tick: `plan`, then `check_budget` before any
write.  The parts: `planner` (the order), `need` (slots and replicas), `pool` (GPUs that can be given
on), `draft` (what is decided so far), `serve` (one service up or down), `reclaim` (whom to send away),
`lend` (idle GPUs to cleaning), `budget` (the invariant).
"""

from slackwater_operator.policy.budget import check_budget
from slackwater_operator.policy.planner import plan

__all__ = ["check_budget", "plan"]
