"""Two judges of one object, the models and the CustomResourceDefinitions, say the same about every field.

Each rule stands twice, in Python and in CEL; here objects with every field set get one field changed to something odd.
"""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slackwater_operator.core import PermanentError
from slackwater_operator.resources import KINDS, parse
from slackwater_operator.schemas import CRD_FOLDER
from slackwater_operator.testing.admission import Admission
from slackwater_operator.testing.resources import a_flavor, a_job, a_pool, a_question, a_reclaim, a_service

ROOT = Path(__file__).parents[2]
MODELS = {model.names.kind: model for model in KINDS}
SEED = 20261130
NUM_CHANGES = 500  # of each object

REMOVED = object()

FULL: dict[str, dict[str, Any]] = {
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

ODD: tuple[Any, ...] = (
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

Path_ = tuple[str | int, ...]


def places(value: Any, path: Path_) -> Iterator[Path_]:
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield from places(one, (*path, key))


def changed(obj: dict[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    copied = copy.deepcopy(obj)
    at: Any = copied
    for key in path[:-1]:
        at = at[key]
    if value is REMOVED:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return copied


def door(kind: str) -> Admission:
    return Admission(yaml.safe_load((ROOT / CRD_FOLDER / f"{MODELS[kind].names.plural}.yaml").read_text()))


@pytest.mark.parametrize("name", FULL)
def test_models_and_definitions_agree_on_every_field(name: str) -> None:
    obj = FULL[name]
    kind = obj["kind"]
    judge = door(kind)
    every = [(path, value) for path in places(obj["spec"], ("spec",)) if len(path) > 1 for value in ODD]
    chosen = random.Random(SEED).sample(every, min(NUM_CHANGES, len(every)))
    assert judge.refusals(obj) == []
    num_refused = 0

    for path, value in chosen:
        odd = changed(obj, path, value)
        try:
            parse(MODELS[kind], odd)
            ours = ""
        except PermanentError as error:
            ours = str(error)
        theirs = judge.refusals(odd)
        num_refused += bool(ours)
        assert bool(ours) == bool(theirs), f"{path} = {value!r}: models {ours or 'take it'}; definitions {theirs}"

    assert 0 < num_refused < len(chosen)
