"""One channel at one rate.

Owns the mix to mono and the change of rate (libsoxr, high quality), both block by block.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import soxr

from slackwater_workers.steps.decode import Block

VERSION = "1"


class MonoMix:
    """Mixes blocks to one channel and remembers whether the channels cancelled each other.

    channel: take only this one; None takes the mean of all.
    """

    def __init__(self, num_channels: int, channel: int | None) -> None:
        self._channel = channel
        self._energy = np.zeros(num_channels)
        self._mixed_energy = 0.0

    def mix(self, block: Block) -> Block:
        """float32 [n, num_channels] -> float32 [n]."""
        if block.shape[1] == 1:
            return np.ascontiguousarray(block[:, 0])
        mono: Block = block.mean(axis=1, dtype=np.float32) if self._channel is None else block[:, self._channel].copy()
        self._energy += np.square(block, dtype=np.float64).sum(axis=0)
        self._mixed_energy += float(np.square(mono, dtype=np.float64).sum())
        return mono

    def channel_instead(self) -> int | None:
        """The loudest channel when the mean lost 20 dB against the channels; None when it did not.

        That is what a microphone cable with swapped wires does: left and right cancel.
        """
        if self._channel is not None or self._mixed_energy >= 0.01 * self._energy.mean():
            return None
        return int(self._energy.argmax())


def resample(blocks: Iterable[Block], from_hz: int, to_hz: int) -> Iterator[Block]:
    """Change the rate of mono blocks (float32 [n]); the last block holds the filter's tail."""
    if from_hz == to_hz:
        yield from blocks
        return
    stream = soxr.ResampleStream(from_hz, to_hz, 1, dtype="float32", quality="HQ")
    for block in blocks:
        yield stream.resample_chunk(block)
    yield stream.resample_chunk(np.zeros(0, np.float32), last=True)
