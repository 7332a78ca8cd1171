import pytest
from pydantic import ValidationError

from slackwater_inference.codec.shapes import codec_weight_shapes, decode_state_size
from slackwater_inference.config import CodecConfig, tiny


def test_the_defaults_are_the_codec_that_s2_pro_ships():
    codec = CodecConfig()

    assert codec.sample_rate_hz == 44_100
    assert codec.frame_samples == 2048
    assert codec.frame_rate_hz == pytest.approx(21.533, abs=1e-3)
    assert codec.encoder_dims == (64, 128, 256, 512, 1024)
    assert codec.decoder_dims == (1536, 768, 384, 192, 96)
    assert [t and (t.n_layer, t.window_size) for t in codec.encoder_transformers] == [None, None, None, (4, 512)]
    for module in (codec.pre_module, codec.post_module):
        assert (module.n_layer, module.n_head, module.head_dim, module.window_size) == (8, 16, 64, 128)
        assert (module.intermediate_size, module.rope_base, module.norm_eps) == (3072, 10_000.0, 1e-5)
    assert codec.codebook_sizes(10, 4096) == (4096, *[1024] * 9)


def test_a_streams_state_is_mostly_the_keys_and_values_of_its_window():
    keys_and_values = 8 * 2 * 127 * 1024

    assert keys_and_values < decode_state_size(CodecConfig()) < 1.1 * keys_and_values


def test_the_tiny_codec_has_every_part_of_the_published_one():
    def kinds(config, num_codebooks):
        shapes = codec_weight_shapes(config, num_codebooks, 64)
        return {name.split(".")[0] + name.rsplit(".", 2)[1] for name in shapes if "weight" in name}

    codec = tiny().codec
    assert codec.frame_samples == 2048
    assert codec.sample_rate_hz == 44_100
    assert kinds(codec, 4) == kinds(CodecConfig(), 10)


def test_a_config_survives_its_json():
    assert CodecConfig.model_validate_json(tiny().codec.model_dump_json()) == tiny().codec


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        pytest.param({"encoder_rates": (2, 4, 8, 4)}, "equal products", id="rates apart"),
        pytest.param({"encoder_transformers": (None,)}, "4 entries, one a rate .null for none., got 1", id="too few"),
        pytest.param({"decoder_dim": 1528}, "halve evenly 4 times", id="uneven halves"),
        pytest.param({"downsample_factors": (2, 0)}, "1 or more", id="a factor of nothing"),
        pytest.param({"dilations": ()}, "dilations", id="no residual unit"),
        pytest.param({"latent": 12}, "Extra inputs", id="an unknown key"),
        pytest.param(
            {"post_module": {"n_layer": 1, "n_head": 1, "head_dim": 3, "intermediate_size": 4, "window_size": 4}},
            "multiple of 2",
            id="odd heads",
        ),
        pytest.param(
            {"post_module": {"n_layer": 1, "n_head": 1, "intermediate_size": 4, "window_size": 1}},
            "window_size",
            id="a window of itself",
        ),
    ],
)
def test_refuses_a_codec_whose_parts_do_not_fit(fields, complaint):
    with pytest.raises(ValidationError, match=complaint):
        CodecConfig(**fields)
