"""How a matrix product is divided: the order of its sum by (N, K) alone, the launch by M as well.

Owns the sum tree, the measured launch table and how attention's tokens are divided.  Owns no tensor and launches
nothing.  Called by `gemm`, `attention`, `extend` and `dispatch`.

An element of the product is a sum over K / 128 blocks.  Blocks are added in order inside a leaf, leaves in order
inside a group, groups in order.  Whether one CTA takes a leaf, a group or all of K, it adds in this order; so the bits
of a row depend neither on M nor on the launch, and no two runs differ.
"""

from dataclasses import dataclass
from enum import StrEnum

from slackwater_kernels.core import GROUP, KvForm

_RESIDENT = 264  # CTAs of 100 KB that an H200's 132 multiprocessors hold at once
_ALONE = 132  # from so many weight tiles on, the card is busy without a split
_MANY_LEAVES = 8  # from more leaves on, three make a group: above 32 rows each part costs traffic
BLOCK_ROWS = 16  # up to so many rows the feed-forward block is one launch: their FP8 lies beside the weights' ring
_SPLIT_M = 256  # above it the partial sums would cost more traffic than the split saves time


class Take(StrEnum):
    """What one CTA sums before anything is written."""

    LEAF = "leaf"  # `stream`: every weight of the leaf is asked for at once, before the kernel in front has ended
    GROUP = "group"  # `loop`: a pipeline over the blocks of a group
    ALL = "all"  # `loop` over all of K: nothing is left to add


@dataclass(frozen=True, slots=True)
class SumTree:
    """The order in which one element's blocks are added."""

    blocks: int
    leaf: int  # blocks a leaf; the last leaf may be short
    group: int  # leaves a group; the last group may be short

    @property
    def leaves(self) -> int:
        return -(-self.blocks // self.leaf)

    @property
    def groups(self) -> int:
        return -(-self.leaves // self.group)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch."""

    take: Take
    rows: int  # rows of the weight a CTA takes, the 64-row operand of the tensor core
    tokens: int  # rows of the activations a CTA takes
    warps: int
    stages: int
    tma: bool
    ahead: int  # weight blocks asked into the L2 before the kernel in front has ended
    early: bool  # whether the next kernel may start at once or only when this one's loads are done


def sum_tree(n: int, k: int) -> SumTree:
    """The order of the sum for a weight [N, K].

    As many leaves as the card can hold CTAs at once, and one where N alone keeps it busy.
    """
    blocks, tiles = k // GROUP, -(-n // GROUP)
    if tiles >= _ALONE:
        return SumTree(blocks, blocks, 1)
    # Under 5 blocks a CTA ends before its loads are deep; over 8 they do not fit into shared memory.
    leaf = next((size for size in (5, 6, 7) if tiles * -(-blocks // size) <= _RESIDENT), 8)
    leaf = min(leaf, blocks)
    return SumTree(blocks, leaf, 3 if -(-blocks // leaf) > _MANY_LEAVES else 2)


def splits(tree: SumTree, take: Take) -> int:
    """How many CTAs share the sum of one tile."""
    return {Take.LEAF: tree.leaves, Take.GROUP: tree.groups, Take.ALL: 1}[take]


def launch(n: int, k: int, m: int) -> Launch:
    """The launch of a plain product, by measurements on an H200 (tests/bench/results/kernels.json)."""
    tree, tiles = sum_tree(n, k), -(-n // GROUP)
    if tree.leaves == 1:
        if m <= 16:
            return _loop(Take.ALL, 64, 16, stages=4, tma=False, early=False)
        if m <= 64:
            return _loop(Take.ALL, 64, 32 if m <= 32 else 64, stages=3 if m <= 32 else 4)
        return _loop(Take.ALL, 64, 128, stages=3)
    if m <= 16 or (m <= 32 and tree.leaves <= _MANY_LEAVES):
        warps = 4 if tiles * tree.leaves >= 192 and m <= 16 else 8
        return Launch(Take.LEAF, 128, 16 if m <= 16 else 32, warps, 3, tma=False, ahead=0, early=True)
    if m <= 32:
        return _loop(Take.GROUP, 128, 32, stages=6)
    if m <= _SPLIT_M:
        return _loop(Take.GROUP, 64, 64, stages=4 if m > 64 else 6 if tree.leaves <= _MANY_LEAVES else 5)
    return Launch(Take.ALL, 128, 64, 8, 3, tma=True, ahead=0, early=True)


def gated_launch(m: int) -> Launch:
    """The launch of gate_up with SwiGLU behind it: half of a CTA's rows are gate's, half up's."""
    if m <= 16:
        return _loop(Take.ALL, 64, 16, stages=4 if m <= 8 else 5, tma=False, ahead=3)
    if m <= 32:
        return _loop(Take.ALL, 64, 32, stages=5, ahead=3)
    return _loop(Take.ALL, 64, 64, stages=4)


def gates_at_once(m: int) -> bool:
    """Whether SwiGLU behind gate_up is faster than SwiGLU in front of down's quantiser; the bits are the same."""
    return m <= 32


def _loop(
    take: Take, rows: int, tokens: int, *, stages: int, tma: bool = True, ahead: int = 0, early: bool = True
) -> Launch:
    return Launch(take, rows, tokens, 4, stages, tma, ahead, early)


def described(tree: SumTree, chosen: Launch) -> dict[str, object]:
    """A product's form, tile, split and order of the sum, for people."""
    return {
        "takes": chosen.take.value,
        "tile": (chosen.rows, chosen.tokens),
        "warps": chosen.warps,
        "stages": chosen.stages,
        "split": splits(tree, chosen.take),
        "sum": f"{tree.blocks} blocks in leaves of {tree.leaf}, {tree.group} leaves a group",
        "batch_invariant": True,
    }


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """How a row's tokens are divided: blocks in order in a chunk, chunks in order; so `block` and `chunk` make bits.

    A chunk is a CTA's.  It is so many tokens whatever the batch and its lengths, so a row's bits are its own alone.
    """

    block: int  # tokens of one step of the pipeline
    warps: int
    stages: int
    chunk: int
    registers: int | None = None  # no thread may have more; of 4 warps 168 let three CTAs onto a multiprocessor


# The first of each is taken; the bench measures the others beside it.
FP8_ATTENTION = (
    AttentionLaunch(64, 4, 3, 1024, registers=96),
    AttentionLaunch(64, 4, 3, 1024),
    AttentionLaunch(64, 4, 2, 1024),
    AttentionLaunch(64, 4, 4, 1024),
    AttentionLaunch(64, 4, 3, 512),
    AttentionLaunch(64, 4, 3, 256),
    AttentionLaunch(64, 8, 3, 1024),
    AttentionLaunch(128, 4, 2, 1024),
    AttentionLaunch(128, 8, 3, 1024),
)
BF16_ATTENTION = (
    AttentionLaunch(64, 4, 3, 256, registers=168),
    AttentionLaunch(64, 4, 3, 512),
    AttentionLaunch(128, 8, 2, 512),
    AttentionLaunch(32, 4, 5, 256),
    AttentionLaunch(32, 2, 4, 256),
)
ATTENTION = {KvForm.BF16: BF16_ATTENTION, KvForm.FP8: FP8_ATTENTION}


def attention_launch(form: KvForm) -> AttentionLaunch:
    """The launch of attention over keys and values of this form."""
    return ATTENTION[form][0]


def attention_splits(max_length: int, launch: AttentionLaunch) -> int:
    """How many CTAs share a row and head of keys, where rows have up to `max_length` tokens."""
    return -(-max_length // launch.chunk)


@dataclass(frozen=True, slots=True)
class ExtendLaunch:
    """How attention of many queries a row is divided: blocks of keys from position 0 on, so `block` makes bits."""

    rows: int  # of the tensor core's tile: queries times the heads that share a head of keys; 64 for each four warps
    block: int  # keys of one step of the pipeline
    warps: int
    stages: int

    def queries(self, sharers: int) -> int:
        """Queries of one CTA, where so many heads share a head of keys."""
        return self.rows // sharers


# The first is taken: by what fits registers and shared memory, not by time.  Prefill takes those of bf16, so that it
# has the bits of an extension that begins at position 0.
FP8_EXTEND = (
    ExtendLaunch(128, 64, 8, 3),
    ExtendLaunch(64, 64, 4, 3),
)
BF16_EXTEND = (
    ExtendLaunch(128, 64, 8, 3),
    ExtendLaunch(128, 128, 8, 3),
    ExtendLaunch(64, 64, 4, 2),
)
_APPEND_HEADS = 64  # heads of keys, and of values, that one CTA puts into pages


def extend_launch(*, fp8: bool) -> ExtendLaunch:
    """The launch of attention with many queries a row over keys and values of this form."""
    return (FP8_EXTEND if fp8 else BF16_EXTEND)[0]


def append_tokens_each(num_kv_heads: int) -> int:
    """How many tokens one CTA puts into pages, a power of two."""
    return max(1, _APPEND_HEADS >> (num_kv_heads - 1).bit_length())


def flat_parts(num_tokens: int, num_rows: int, part: int) -> int:
    """Slots enough for the parts of `part` tokens of a flat batch, whatever its rows: `paged_source.part_of`."""
    return num_tokens // part + num_rows + 2
