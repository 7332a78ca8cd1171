"""Settings of the model, the codec and the engine, checked once at the edge.

Owns names, defaults and presets; owns no tensor.
"""

from slackwater_inference.config.codec import CodecConfig
from slackwater_inference.config.engine import EngineConfig
from slackwater_inference.config.model import ModelConfig, TransformerConfig
from slackwater_inference.config.presets import tiny

__all__ = ["CodecConfig", "EngineConfig", "ModelConfig", "TransformerConfig", "tiny"]
