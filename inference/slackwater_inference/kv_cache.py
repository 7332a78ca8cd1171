"""Which sequence holds which KV block, and which blocks hold a prompt that may come again.

Pure bookkeeping: owns block numbers, not tensors (the model runner has those).  Called by the scheduler.

The cache keeps prompts in pieces, runs of whole blocks that the model computes at one go.  A piece's key
hashes everything up to its end, so a key stands for one context and nothing else.  Sequences share a piece as
its holders; one that nobody holds stays until its blocks are wanted.  Generated frames are never cached.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slackwater_inference.core import Column


def piece_keys(namespace: str, prompt: Sequence[Column], piece: int) -> tuple[bytes, ...]:
    """The key of each whole piece of `piece` positions of a prompt, each chained to the one before it.

    All codes of every column are hashed, not the token ids alone: two voices that say the same words differ in
    their residual codes only.  namespace: keeps tenants and voices apart even so.
    """
    key = hashlib.sha256(repr(namespace).encode()).digest()
    keys = []
    for start in range(0, len(prompt) - piece + 1, piece):
        key = hashlib.sha256(key + repr(tuple(prompt[start : start + piece])).encode()).digest()
        keys.append(key)
    return tuple(keys)


@dataclass(slots=True)
class _Piece:
    blocks: list[int]
    num_holders: int


class KvCache:
    """Hands out the numbers 0 .. num_blocks - 1, each to one sequence, or to one piece of a prompt.

    A holder of a piece holds all pieces before it, too; so of those that nobody holds, whichever was let go of
    first is a leaf, if a sequence lets go of its last piece first.
    """

    def __init__(self, num_blocks: int, blocks_per_piece: int) -> None:
        self.num_blocks = num_blocks
        self.blocks_per_piece = blocks_per_piece
        # Reversed, so that low numbers go first; a block freed last is taken first, still warm in the cache.
        self._free = list(reversed(range(num_blocks)))
        self._private: set[int] = set()
        self._held: dict[bytes, _Piece] = {}
        self._idle: OrderedDict[bytes, _Piece] = OrderedDict()  # nobody holds these; next to go first

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: those that are free, and those of pieces that nobody holds."""
        return len(self._free) + self.num_cached

    @property
    def num_cached(self) -> int:
        """Blocks of pieces that nobody holds."""
        return len(self._idle) * self.blocks_per_piece

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_available

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks for one sequence, evicting the pieces that were let go of first where it must.

        Raises ValueError if there are not so many: ask `num_available` first.
        """
        if not 0 <= num_blocks <= self.num_available:
            raise ValueError(f"wanted {num_blocks} KV blocks, {self.num_available} of {self.num_blocks} are available")
        while len(self._free) < num_blocks:
            _, piece = self._idle.popitem(last=False)
            self._free += reversed(piece.blocks)
        taken = [self._free.pop() for _ in range(num_blocks)]
        self._private.update(taken)
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks of one sequence back.

        Raises ValueError if one is not held so: a double free would give it to two sequences.
        """
        for block in blocks:
            if block not in self._private:
                raise ValueError(f"KV block {block} is freed but not held")
            self._private.remove(block)
            self._free.append(block)

    def num_hits(self, keys: Sequence[bytes]) -> int:
        """How many of the first `keys` are here, held or not."""
        return next((i for i, key in enumerate(keys) if key not in self._held and key not in self._idle), len(keys))

    def share(self, keys: Iterable[bytes]) -> list[int]:
        """Become a holder of pieces that are here; returns their blocks, in order."""
        blocks: list[int] = []
        for key in keys:
            if key in self._idle:
                self._held[key] = self._idle.pop(key)
            self._held[key].num_holders += 1
            blocks += self._held[key].blocks
        return blocks

    def unshare(self, keys: Sequence[bytes]) -> None:
        """Hold pieces no longer; `keys` from the first piece on.  They stay until their blocks are wanted."""
        for key in reversed(keys):
            piece = self._held[key]
            piece.num_holders -= 1
            if piece.num_holders == 0:
                self._idle[key] = self._held.pop(key)

    def publish(self, key: bytes, blocks: list[int]) -> list[int]:
        """Turn a sequence's blocks into the piece `key`, of which it is the holder; returns the piece's blocks.

        Those are others if somebody else was first; `blocks` are free then, as both hold the same values.
        """
        if self.num_hits([key]):
            self.free(blocks)
            return self.share([key])
        self._private.difference_update(blocks)
        self._held[key] = _Piece(list(blocks), 1)
        return blocks

    def num_holders(self, key: bytes) -> int:
        """How many sequences hold a piece that somebody holds; its blocks are available when the last lets go."""
        return self._held[key].num_holders

    def check(self, holders: Iterable[tuple[Sequence[bytes], Sequence[int]]]) -> None:
        """Raise AssertionError unless `holders` (their pieces' keys, their own blocks) account for every block once."""
        num_holders: dict[bytes, int] = {}
        private: list[int] = []
        for keys, blocks in holders:
            private += blocks
            for key in keys:
                num_holders[key] = num_holders.get(key, 0) + 1
        assert len(private) == len(set(private)), "a KV block is held twice"
        assert set(private) == self._private, f"held and used KV blocks differ by {set(private) ^ self._private}"
        assert num_holders == {key: p.num_holders for key, p in self._held.items()}, "a piece's holders are miscounted"
        pieces = [*self._held.values(), *self._idle.values()]
        assert all(len(p.blocks) == self.blocks_per_piece for p in pieces), "a piece has lost a block"
        everywhere = [*self._free, *self._private, *(block for p in pieces for block in p.blocks)]
        assert sorted(everywhere) == list(range(self.num_blocks)), "a KV block is lost or doubled"
