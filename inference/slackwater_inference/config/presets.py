"""The embedded voices' dimensions.  Called where a model is chosen by name."""

from slackwater_inference.config.codec import CodecConfig, CodecTransformerConfig
from slackwater_inference.config.model import ModelConfig, TransformerConfig


def tiny_codec() -> CodecConfig:
    """The codec of `tiny`: every part of the published one in miniature, at its rates in time."""
    module = CodecTransformerConfig(n_layer=1, n_head=2, head_dim=16, intermediate_size=64, window_size=32)
    return CodecConfig(
        latent_dim=32,
        encoder_dim=2,
        encoder_rates=(4, 8, 8, 2),
        encoder_transformers=(None, None, None, module),
        pre_module=module,
        post_module=module,
        residual_codebook_size=128,
        decoder_dim=32,
        decoder_rates=(2, 8, 8, 4),
        dilations=(1, 3),
    )


def tiny() -> ModelConfig:
    """The smallest voice that exercises every rule; its weights are seeded, so it hums."""
    return ModelConfig(
        name="tiny",
        text_config=TransformerConfig(
            vocab_size=776,
            n_layer=2,
            dim=128,
            n_head=4,
            n_local_heads=2,
            head_dim=32,
            intermediate_size=256,
            max_seq_len=4096,
            attention_qk_norm=True,
        ),
        audio_decoder_config=TransformerConfig(
            vocab_size=512,
            n_layer=1,
            dim=128,
            n_head=4,
            n_local_heads=2,
            head_dim=32,
            intermediate_size=256,
            max_seq_len=5,
            attention_qk_norm=False,
        ),
        codec=tiny_codec(),
        num_codebooks=4,
        im_start_id=256,
        im_end_id=257,
        voice_id=258,
        semantic_begin_id=264,
        stop_at_expected_length=True,
    )
