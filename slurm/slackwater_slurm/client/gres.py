"""Reads how Slurm writes GPUs, index sets, host lists and spans of time.

Pure: text in, values out.  Owns every spelling that releases 22.05 to 25.11 use for these four.
Called by all adapters and by `check`.  Raises UnknownShape on anything else: a GPU that is not counted
would be a GPU that is given away twice.
"""

import re
from collections.abc import Iterator

from slackwater_slurm.core import GpuCount, OutputCut, UnknownShape

NOTHING = frozenset({"", "(null)", "N/A", "n/a", "none", "NONE", "None", "null"})
Indexes = tuple[tuple[str, tuple[int, ...]], ...]

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
_COUNT = re.compile(r"(\d+)([KMG]?)")
_PART = re.compile(r"[^,()]+(?:\([^()]*\))?")


def gpus(text: str) -> GpuCount:
    """Count GPUs in a GRES or TRES text; other resources are passed over.

    `gpu:4`, `gpu:h200:4(S:0-1)`, `gpu:h200:2(IDX:0-1,3)`, `gres:gpu:1`, `gres/gpu:h200:1`, `gpu`,
    `cpu=16,gres/gpu=4,gres/gpu:h200=4` (there the first is the sum of the second), `(null)`.
    """
    named: list[tuple[str, int]] = []
    sums: list[tuple[str, int]] = []
    for part in _parts(text):
        kind, count, is_sum = _part(part)
        if kind is not None:
            (sums if is_sum else named).append((kind, count))
    typed = [(kind, count) for kind, count in sums if kind]
    rest = sum(count for kind, count in sums if not kind) - sum(count for _, count in typed)
    return GpuCount.of([*named, *typed, ("", max(0, rest))])


def gpu_indexes(text: str) -> Indexes:
    """Sorted (type, indexes) of a text with `(IDX:…)` parts; types without any index are left out."""
    found: dict[str, set[int]] = {}
    for part in _parts(text):
        kind, _, _ = _part(part)
        inside = re.search(r"\(IDX:([^()]*)\)", part)
        if kind is not None and inside is not None:
            found.setdefault(kind, set()).update(numbers(inside[1]))
    return tuple(sorted((kind, tuple(sorted(indexes))) for kind, indexes in found.items() if indexes))


def numbers(text: str) -> tuple[int, ...]:
    """`0-3,5` or `1-9:2` as numbers, in the order written; nothing for `N/A`."""
    if text.strip() in NOTHING:
        return ()
    if "..." in text:
        raise OutputCut(f"a set of numbers was shortened by Slurm: {text[:80]!r}; SLURM_BITSTR_LEN=0 must be set")
    found: list[int] = []
    for part in text.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip())
        if bounds is None or (bounds[3] is not None and int(bounds[3]) < 1):
            raise UnknownShape(f"numbers such as 0-3,5 were expected, got {text[:80]!r}")
        first = int(bounds[1])
        found.extend(range(first, int(bounds[2] or first) + 1, int(bounds[3] or 1)))
    return tuple(found)


def hosts(text: str) -> tuple[str, ...]:
    """`h[1-2],r1,n[001-003]-ib` as names, in the order written."""
    if text.strip() in NOTHING:
        return ()
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text.strip()):
        names.extend(_host_names(part, text))
    if text.count("[") != text.count("]"):
        raise OutputCut(f"a host list ends inside a bracket: {text[-80:]!r}")
    return tuple(names)


def span_s(text: str) -> int | None:
    """`1-12:00:00`, `30:00`, `90` (minutes, as Slurm reads a lone number) in seconds; None = no limit."""
    if text in NOTHING or text.upper() in ("UNLIMITED", "INFINITE", "PARTITION_LIMIT", "NOT_SET"):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if found is None:
        raise UnknownShape(f"a time such as 1-12:00:00 was expected, got {text[:80]!r}")
    days = int(found[1] or 0)
    parts = [int(part) for part in found.group(2, 3, 4) if part is not None]
    if found[1] is not None or len(parts) == 3:  # hours[:minutes[:seconds]]
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:  # minutes[:seconds]
        hours, minutes, seconds = 0, *[*parts, 0][:2]
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def moment_s(text: str) -> float | None:
    """Seconds since the epoch, as commands print them under SLURM_TIME_FORMAT=%s; None for no moment."""
    if text in NOTHING or text in ("Unknown", "0"):
        return None
    if not text.isdecimal():
        raise UnknownShape(
            f"a moment in seconds was expected, got {text[:80]!r}; this release ignores SLURM_TIME_FORMAT"
        )
    return float(text)


def _parts(text: str) -> Iterator[str]:
    """The parts between commas that are not inside parentheses."""
    text = text.strip()
    if text in NOTHING:
        return
    if text.count("(") != text.count(")"):
        raise OutputCut(f"a list of resources ends inside a parenthesis: {text[-80:]!r}")
    yield from (part.strip() for part in _PART.findall(text))


def _part(part: str) -> tuple[str | None, int, bool]:
    """(GPU type, count, is a TRES sum) of one part; the type is None for another resource."""
    body = part.split("(", 1)[0]
    body = body.removeprefix("gres:").removeprefix("gres/")
    is_sum = "=" in body
    words = body.replace("=", ":").split(":")
    if words[0] != "gpu":
        return None, 0, is_sum
    words = [word for word in words[1:] if word != "no_consume"]
    count = _COUNT.fullmatch(words[-1]) if words else None
    if count is not None:
        words = words[:-1]
    if len(words) > 1 or "" in words:
        raise UnknownShape(f"GPUs such as gpu:h200:4 were expected, got {part[:80]!r}")
    number = int(count[1]) * _UNITS[count[2]] if count is not None else 1
    return (words[0] if words else ""), number, is_sum


def _host_names(part: str, text: str) -> list[str]:
    names = [""]
    for piece in re.findall(r"\[[^\[\]]*\]|[^\[\]]+", part):
        endings = _bracket(piece[1:-1], text) if piece.startswith("[") else [piece]
        names = [name + ending for name in names for ending in endings]
    return names


def _bracket(inside: str, text: str) -> list[str]:
    """`001-003,7` as 001, 002, 003, 7: leading zeros are kept."""
    found: list[str] = []
    for part in inside.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if bounds is None:
            raise UnknownShape(f"a host list such as n[01-16] was expected, got {text[:80]!r}")
        first, last = bounds[1], bounds[2] or bounds[1]
        found.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return found
