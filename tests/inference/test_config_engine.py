import pytest
from pydantic import ValidationError

from slackwater_inference.config import EngineConfig, tiny
from slackwater_inference.testing.model import micro

MODEL = micro()  # 512 positions


def test_a_model_that_reads_far_does_not_get_all_of_it_for_each_slot():
    far = tiny().model_copy(update={"text_config": tiny().text_config.model_copy(update={"max_seq_len": 32_768})})

    assert EngineConfig(max_running_requests=2).kv_blocks(far) == 2 * 4096 // 16
    assert EngineConfig(max_running_requests=2, max_length=8192).kv_blocks(far) == 2 * 8192 // 16
    assert EngineConfig(max_length=8192).longest(MODEL) == 512
    assert EngineConfig(num_kv_blocks=20).longest(MODEL) == 320


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        pytest.param({"max_running_requests": 8}, 4 * 32, id="half of the blocks"),
        pytest.param({"max_running_requests": 1}, 0, id="one slot's sequence needs them all"),
        pytest.param({"num_kv_blocks": 40}, 8, id="what the longest sequence leaves"),
        pytest.param({"num_kv_blocks": 20}, 0, id="fewer than the longest sequence"),
        pytest.param({"max_held_ratio": 0.0}, 0, id="none wanted"),
    ],
)
def test_held_prefixes_leave_room_for_the_longest_sequence(settings, held):
    assert EngineConfig(**settings).held_blocks(MODEL) == held


def test_the_loop_guard_lasts_two_seconds_and_is_off_for_seeded_voices():
    speaking = MODEL.model_copy(update={"stop_at_expected_length": False})

    assert EngineConfig().loop_limit(speaking) == 43
    assert EngineConfig().loop_limit(MODEL) == 0
    assert EngineConfig(loop_frames=0).loop_limit(speaking) == 0
    assert EngineConfig(loop_frames=20).loop_limit(MODEL) == 20


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param({"prefill_piece": 40}, "a multiple of block_size 16", id="no whole blocks"),
        pytest.param({"prefill_piece": 512}, "at most max_prefill_tokens 128, got 512", id="more than a step computes"),
        pytest.param({"loop_frames": 15}, "0 or at least 16", id="a loop too short to be one"),
    ],
)
def test_refuses_settings_that_do_not_fit_together(settings, words):
    with pytest.raises(ValidationError, match=words):
        EngineConfig(**settings)
