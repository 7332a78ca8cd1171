"""How long a part of a text may get beside everything else that its sequence must hold."""

import dataclasses

import pytest

from slackwater_inference.checkpoint import embedded
from slackwater_inference.config import EngineConfig
from slackwater_inference.core import BadRequest, SamplingParams, Speech
from slackwater_inference.jobs import Jobs
from slackwater_inference.metrics import EngineMetrics
from slackwater_inference.scheduler import Limits, Scheduler

pytestmark = pytest.mark.usefixtures("one_thread")


def jobs(max_length):
    """Of a voice that ends by itself, and that may take 14 times the expected length of a text before it must."""
    loaded = embedded(0)
    model = loaded.config.model_copy(update={"stop_at_expected_length": False, "length_margin": 14.0})
    loaded = dataclasses.replace(loaded, config=model)
    config = EngineConfig(max_length=max_length)
    metrics = EngineMetrics("tiny", config.max_running_requests)
    return Jobs(config, model, loaded.tokenizer, Scheduler(Limits.of(config, model)), metrics)


def request(text, max_length):
    return jobs(max_length).request("r", text, Speech(), SamplingParams())


def test_a_budget_that_does_not_fit_is_cut_to_what_is_left():
    ample, tight = request("x" * 60, max_length=4096), request("x" * 60, max_length=256)

    assert ample.budget.max_frames == 12 * 60
    assert len(tight.prompt) + tight.budget.max_frames == 256
    assert tight.budget.expected_frames == ample.budget.expected_frames == 56


def test_a_text_whose_expected_length_does_not_fit_twice_is_refused():
    with pytest.raises(BadRequest, match="at most 256 are kept; send shorter parts"):
        request("x" * 80, max_length=256)
