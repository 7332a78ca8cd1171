"""The codec as the rest of the engine sees it: sound to codes, codes to sound.

Owns the checks of what goes in, and the life of both halves: the decoder is built at once, the encoder when
something is first encoded.  Called by the vocoder (decoding, one thread) and by the cloner (encoding, another).
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from slackwater_inference.codec.decoder import Decoder
from slackwater_inference.codec.encoder import Encoder
from slackwater_inference.codec.layers import Past
from slackwater_inference.codec.shapes import decode_state_size
from slackwater_inference.codec.weights import Weights, check_codec_weights, fingerprint
from slackwater_inference.config import CodecConfig

# What one stream carries from chunk to chunk: fp32 [decode_state_size].
CodecState = Tensor

_ENCODE_FRAMES = 32  # of one piece: bounds the memory of a long recording


class Codec:
    """Encoder and decoder of one codec.  Holds no stream's state itself."""

    def __init__(self, config: CodecConfig, num_codebooks: int, num_semantic: int, weights: Weights) -> None:
        """Raises ValueError naming each tensor that does not fit.  The weights are kept for the encoder."""
        check_codec_weights(weights, config, num_codebooks, num_semantic)
        self.config = config
        self.num_codebooks = num_codebooks
        self._num_semantic = num_semantic
        self._weights = weights
        self._decoder = Decoder.of(weights, config, num_codebooks)
        self._state_size = decode_state_size(config)

    @cached_property
    def revision(self) -> str:
        """Names the codes that this codec makes, in caches: another config or other weights have another one."""
        return fingerprint(self._weights, self.config, self.num_codebooks, self._num_semantic)

    def new_state(self) -> CodecState:
        """The state before a stream's first frame: silence."""
        return torch.zeros(self._state_size)

    @torch.inference_mode()
    def decode(self, codes: Tensor, states: Sequence[CodecState]) -> tuple[Tensor, list[CodecState]]:
        """Samples in [-1, 1], fp32 [b, n * frame_samples], and the states to carry on with.

        codes: int64 [b, num_codebooks, n >= 1].   states: one for each of the b streams.   Neither is mutated.
        Any split of a stream's frames gives the sound of decoding them at once; a code past its codebook's end
        counts as the last entry.
        """
        if codes.ndim != 3 or codes.shape[1] != self.num_codebooks or codes.shape[2] == 0 or codes.dtype != torch.int64:
            raise ValueError(
                f"codes must be int64 [b, {self.num_codebooks}, n >= 1], got {codes.dtype} {list(codes.shape)}"
            )
        if len(states) != len(codes):
            raise ValueError(f"each of the {len(codes)} streams must bring one state, got {len(states)}")
        past = Past(torch.stack(list(states)))
        samples = self._decoder(codes, past)
        # A clone: a view would keep the whole batch's memory alive for one stream.
        return samples, [state.clone() for state in past.renewed()]

    @torch.inference_mode()
    def encode(self, samples: Tensor | NDArray[np.float32]) -> Tensor:
        """int64 codes [num_codebooks, ceil(T / frame_samples)] of fp32 mono samples [T >= 1] at sample_rate_hz.

        The last frame is filled up with silence.  Blocking: hundreds of milliseconds for a long recording.
        """
        waveform = torch.as_tensor(samples)
        if waveform.ndim != 1 or len(waveform) == 0 or waveform.dtype != torch.float32:
            raise ValueError(f"samples must be fp32 [T >= 1], got {waveform.dtype} {list(waveform.shape)}")
        if not waveform.isfinite().all():
            raise ValueError("samples must be finite numbers, got NaN or infinity; decode the recording anew")
        waveform = F.pad(waveform, (0, -len(waveform) % self.config.frame_samples))
        pieces: list[Tensor] = []
        carried: Tensor | None = None
        for piece in torch.split(waveform, _ENCODE_FRAMES * self.config.frame_samples):
            past = Past(carried)
            pieces.append(self._encoder(piece, past))
            carried = past.renewed()
        return torch.cat(pieces, 1)

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder.of(self._weights, self.config, self.num_codebooks)
