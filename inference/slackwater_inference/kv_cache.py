"""Which sequence holds which KV block.

Pure bookkeeping: owns block numbers, not tensors (the model runner has those).  Called by the scheduler.
"""

from collections.abc import Iterable


class BlockAllocator:
    """Hands out the numbers 0 .. num_blocks - 1, each to one holder at a time."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Reversed, so that low numbers go first; a block freed last is taken first, still warm in the cache.
        self._free = list(reversed(range(num_blocks)))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return len(self._used)

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Take `num_blocks` blocks.  Raises ValueError if there are not so many: ask `num_free` first."""
        if not 0 <= num_blocks <= self.num_free:
            raise ValueError(f"wanted {num_blocks} KV blocks, {self.num_free} of {self.num_blocks} are free")
        taken = tuple(self._free.pop() for _ in range(num_blocks))
        self._used.update(taken)
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back.  Raises ValueError if one is not held: a double free would give it to two sequences."""
        for block in blocks:
            if block not in self._used:
                raise ValueError(f"KV block {block} is freed but not held")
            self._used.remove(block)
            self._free.append(block)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless `holders` hold exactly the used blocks, each once, and none is lost."""
        held = [block for blocks in holders for block in blocks]
        assert len(held) == len(set(held)), "a KV block is held twice"
        assert set(held) == self._used, f"held and used KV blocks differ by {set(held) ^ self._used}"
        assert sorted([*self._free, *self._used]) == list(range(self.num_blocks)), "a KV block is lost or doubled"
