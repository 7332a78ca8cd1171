"""Two judges of one object, the models and the CustomResourceDefinitions, say the same about every field.

Each rule stands twice, in Python and in CEL.  tests/controlplane asks a real API server as the third judge.
"""

from pathlib import Path

import pytest
import yaml

from slackwater_operator.core import PermanentError
from slackwater_operator.resources import KINDS, parse
from slackwater_operator.schemas import CRD_FOLDER
from slackwater_operator.testing.admission import Admission
from slackwater_operator.testing.odd import FULL, odd_objects

ROOT = Path(__file__).parents[2]
MODELS = {model.names.kind: model for model in KINDS}
SEED = 20261130
NUM_CHANGES = 500  # of each object


@pytest.mark.parametrize("name", FULL)
def test_models_and_definitions_agree_on_every_field(name: str) -> None:
    obj = FULL[name]
    model = MODELS[obj["kind"]]
    door = Admission(yaml.safe_load((ROOT / CRD_FOLDER / f"{model.names.plural}.yaml").read_text()))
    assert door.refusals(obj) == []
    num_refused = num_taken = 0

    for change, odd in odd_objects(obj, NUM_CHANGES, SEED):
        try:
            parse(model, odd)
            ours = ""
        except PermanentError as error:
            ours = str(error)
        theirs = door.refusals(odd)
        assert bool(ours) == bool(theirs), f"{change}: models {ours or 'take it'}; definitions {theirs or 'take it'}"
        num_refused, num_taken = num_refused + bool(ours), num_taken + (not ours)

    assert min(num_refused, num_taken) > 0
