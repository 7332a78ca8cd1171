"""The embedded voices' dimensions.  Called where a model is chosen by name."""

from slackwater_inference.config.codec import CodecConfig
from slackwater_inference.config.model import ModelConfig, TransformerConfig


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
        codec=CodecConfig(
            residual_codebook_size=128, latent_dim=32, rates=(8, 8, 8, 4), channels=(32, 32, 16, 4, 2), dilations=(1,)
        ),
        num_codebooks=4,
        im_start_id=256,
        im_end_id=257,
        voice_id=258,
        semantic_begin_id=264,
        stop_at_expected_length=True,
    )
