"""Objects with every field set, and thousands of odd ones made from them by changing one field.

For tests that ask two judges of the same object whether they agree.
"""

import copy
import random
from collections.abc import Iterator
from typing import Any, Final

from slackwater_operator.testing.resources import (
    REMOVED,
    Object,
    a_flavor,
    a_job,
    a_pool,
    a_question,
    a_reclaim,
    a_service,
)

FULL: Final[dict[str, Object]] = {
    "flavor": a_flavor(
        tolerations=[{"key": "a", "operator": "Equal", "value": "b", "effect": "NoExecute", "tolerationSeconds": 3}],
        resourceName="nvidia.com/gpu",
        memory="141Gi",
        hourlyCost="3.2",
        slurmGres="gpu:h200",
    ),
    "pool": a_pool(
        nodeSelector={"region": "east"},
        flavors=[{"name": "h200", "count": 8}],
        inference={"reservedGPUs": 2},
        lending={"lendAfter": "1s", "maxLentFraction": "0.5"},
        reclaim={"deadline": "15s", "retargetAfter": "8s", "maxParallel": 3},
        queues=[{"name": "asr", "weight": 2, "maxGPUs": 3}],
        slurm={"cluster": "east", "partition": "cleaning"},
    ),
    "service": a_service(
        minReplicas=1,
        variants=[{"flavor": "h200", "slotsPerReplica": 8, "gpus": 1, "preference": 0}],
        autoscaling={
            "burstSlots": 1,
            "objective": {"ttfaP95": "250ms"},
            "scaleDown": {"window": "5s", "deadband": 1},
            "panicWindow": "6s",
            "stableWindow": "60s",
            "staleAfter": "5s",
        },
        drain={"grace": "3s"},
        gateway={"controlURL": "http://gateway", "replicas": 1, "maxQueued": 3},
        revisionGate={"template": {"spec": {"containers": [{"name": "gate", "image": "i"}]}}},
        template={
            "metadata": {"labels": {"a": "b"}, "annotations": {"a": "b"}},
            "spec": {
                "terminationGracePeriodSeconds": 30,
                "containers": [
                    {"name": "engine", "image": "i", "resources": {"limits": {"cpu": 1}, "requests": {"cpu": "1"}}}
                ],
                "initContainers": [{"name": "first", "image": "i"}],
            },
        },
    ),
    "job": a_job(
        queue="asr",
        minWorkers=1,
        placement=["Kubernetes", "Slurm"],
        gpusPerWorker=1,
        ledger={"claimName": "ledger", "path": "/ledger"},
        input={"claimName": "input", "path": "/input"},
        checkpoint={"flushTimeout": "8s", "verify": "Digest"},
        restartPolicy="Hold",
        suspend=False,
        keeper={"url": "http://keeper"},
        slurm={"inputPath": "/in", "ledgerPath": "/out", "settings": {"a": "b"}},
    ),
    "reclaim": a_reclaim(),
    "question": a_question(pool="east", flavor="h200", reason="traffic", deadline="3s"),
}

ODD: Final[tuple[Any, ...]] = (
    REMOVED,
    *(
        "",
        "x",
        "X",
        "a b",
        "a/b",
        "a.b",
        "-a",
        "a-",
        "é",
        "a\n",
        "0",
        "1",
        "-1",
        "1.0",
        "0.5",
        "1e3",
        "x" * 41,
        "x" * 320,
    ),
    *("0s", "5ms", "1h1m", "100s", "1d", "http://x", "/x", "x/", "12Gi", "gpu:x", "nvidia.com/gpu"),
    *("Exists", "None", "Slurm", "Pod", "CleaningJob", "traffic"),
    *(0, 1, 2, 9, -1, 31, 65, 1001, 4097, 100_001, 2**31, 2**40, 0.5, 1.5, True, False),
    *([], ["x"], ["x", "x"], ["Slurm"], [1], [{}], [{"name": "engine", "image": "i"}]),
    *({}, {"x": "y"}, {"x": 1}, {"slackwater.dev/a": "b"}, {"nvidia.com/gpu": 1}, {"cpu": 0.5}, {"cpu": True}),
)

Place = tuple[str | int, ...]


def _places(value: Any, path: Place) -> Iterator[Place]:
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield from _places(one, (*path, key))


def _changed(obj: Object, path: Place, value: Any) -> Object:
    copied = copy.deepcopy(obj)
    at: Any = copied
    for key in path[:-1]:
        at = at[key]
    if value is REMOVED:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return copied


def odd_objects(obj: Object, count: int, seed: int) -> Iterator[tuple[str, Object]]:
    """What was changed, and the object with it."""
    every = [(place, value) for place in _places(obj["spec"], ("spec",)) if len(place) > 1 for value in ODD]
    for place, value in random.Random(seed).sample(every, min(count, len(every))):
        shown = "removed" if value is REMOVED else f"= {value!r}"
        yield f"{'.'.join(map(str, place))} {shown}", _changed(obj, place, value)
