"""Finds a voice that repeats itself.

Owns the rule; pure.  Does not own what follows from it (the scheduler ends the sequence).  A model that has lost
its text says one pattern of frames for ever; with the text's frame budget alone a listener would hear that for
twice the length of the text.
"""

from collections import deque

MAX_PERIOD = 8


class LoopDetector:
    """Watches one sequence's frames, all codes of each."""

    def __init__(self, num_frames: int) -> None:
        """num_frames: so many frames of one repeated pattern are a loop; at least 2 * MAX_PERIOD, so that any repeats.

        Raises ValueError if it is fewer.
        """
        if num_frames < 2 * MAX_PERIOD:
            raise ValueError(
                f"a loop must have at least {2 * MAX_PERIOD} frames, got {num_frames}; 0 would be no guard"
            )
        self._num_frames = num_frames
        self._last: deque[tuple[int, ...]] = deque(maxlen=MAX_PERIOD)
        self._num_equal = [0] * MAX_PERIOD  # [p - 1]: how many frames up to now equal the one p before them

    def is_loop(self, codes: tuple[int, ...]) -> bool:
        """Take the next frame; True if the last `num_frames` frames are one pattern of 1 .. MAX_PERIOD, repeated."""
        for period in range(1, len(self._last) + 1):
            self._num_equal[period - 1] = self._num_equal[period - 1] + 1 if self._last[-period] == codes else 0
        self._last.append(codes)
        return any(equal + period >= self._num_frames for period, equal in enumerate(self._num_equal, 1) if equal)
