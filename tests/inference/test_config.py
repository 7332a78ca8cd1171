import pytest
from pydantic import ValidationError

from slackwater_inference.config import EngineConfig, ModelConfig, tiny


def changed(**fields):
    return ModelConfig.model_validate({**tiny().model_dump(), **fields})


def test_the_tiny_preset_has_the_published_frame_rate_and_exercises_every_rule():
    model = tiny()

    assert model.codec.frame_samples == 2048
    assert model.codec.frame_rate_hz == pytest.approx(21.533, abs=1e-3)
    assert model.text_config.attention_qk_norm
    assert not model.audio_decoder_config.attention_qk_norm
    assert model.text_config.n_head > model.text_config.n_local_heads > 1
    assert model.codec.residual_codebook_size < model.num_semantic


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        pytest.param({"semantic_begin_id": 700}, "past the vocabulary of 776", id="ids past the vocabulary"),
        pytest.param({"num_codebooks": 9}, "must hold 9 codebooks", id="more codebooks than fast positions"),
        pytest.param({"voice_id": 776}, "voice_id 776 must be in the vocabulary", id="an id past the vocabulary"),
        pytest.param({"im_end_id": 300}, "im_end_id 300 must be .* no semantic id", id="a stop that is a code"),
        pytest.param(
            {"text_config": {**tiny().text_config.model_dump(), "n_local_heads": 3}}, "multiple", id="uneven heads"
        ),
        pytest.param({"frame_rate": 21.5}, "Extra inputs", id="an unknown key"),
    ],
)
def test_refuses_a_model_whose_parts_do_not_fit(fields, complaint):
    with pytest.raises(ValidationError, match=complaint):
        changed(**fields)


def test_qk_norm_must_be_said_for_each_part():
    config = tiny().audio_decoder_config.model_dump()
    del config["attention_qk_norm"]

    with pytest.raises(ValidationError, match="attention_qk_norm"):
        changed(audio_decoder_config=config)


@pytest.mark.parametrize("slots", [1, 4, 8])
def test_every_slot_can_hold_the_longest_sequence(slots):
    config = EngineConfig(max_running_requests=slots)

    assert config.kv_blocks(tiny()) * config.block_size == slots * tiny().text_config.max_seq_len
