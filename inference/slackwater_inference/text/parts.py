"""Where a text is cut into the parts that the engine speaks one after the other.

Owns the cut: after a sentence, else after a clause, else between words.  Does not change a word (normalize.py) and
knows no model.  Called by the API for each request, and by the websocket as the text comes in.

Every cut depends on the text alone, never on the pieces in which it came: `feed` waits for as much of what follows
as the decision needs.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

# Ends of sentences: in scripts with spaces only before one; elsewhere at once.  Closers belong to the sentence.
_CLOSERS = r"""["'”’»›)\]」』）】》〉｣]*"""
_SENTENCE_END = re.compile(
    rf"""
    (?P<mark>[.!?…]+)(?P<closers>{_CLOSERS})(?=\s|\Z)   # Latin, Cyrillic, Greek ...
    | [。！？｡．।॥؟۔።។။։]+{_CLOSERS}                     # CJK, Devanagari, Arabic, Ethiopic, Khmer, Burmese, Armenian
    | (?=\n[^\S\n]*\n)                                  # a blank line
    """,
    re.VERBOSE,
)
_CLAUSE_END = re.compile(r"[,;:—–](?=\s)|[，、；：،؛]|\n")
_SPACE = re.compile(r"\s+")
_TAG = re.compile(r"<\|speaker:\d{1,4}\|>")
_UNFINISHED_TAG = re.compile(r"<(\|(s(p(e(a(k(e(r(:(\d{1,4}\|?)?)?)?)?)?)?)?)?)?)?\Z")
_MAX_CUE_CHARS = 120
_CUE = re.compile(rf"\[[^\[\]\n]{{1,{_MAX_CUE_CHARS}}}\]")
_UNFINISHED_CUE = re.compile(rf"\[[^\[\]\n]{{0,{_MAX_CUE_CHARS}}}\Z")
# A dot after one of these does not end a sentence.
_ABBREVIATION = re.compile(
    r"""
    (?: mr|mrs|ms|dr|prof|st|sr|jr|rev|hon|gen|col|capt|lt|sgt|no|vs|approx|fig|vol|pp|ed|dept|inc|ltd|co|corp|cf|al
    | bzw|ca|vgl|evtl|ggf|inkl|zzgl|hr|fr|nr|abb|str|tel|bspw|sog|usw
    | mme|mlle|av|env|sra|sres|dra|ud|uds|pág|núm|ej
    | г|гг|ул|им|стр|см|рис|тыс|млн|млрд|руб
    | \d{1,2}                 # am 3. Mai, 1. First
    | [^\W\d_]               # J. S. Bach
    | \w{1,2} (?:\.\w{1,2})+  # e.g., z.B., U.S.
    )""",
    re.VERBOSE | re.IGNORECASE,
)
_WORD_BEFORE_DOT = re.compile(r"[\w.]*\Z")
_FIRST_LOOK_CHARS = 256


@dataclass(frozen=True, slots=True)
class _Window:
    """A stretch of one speaker's turn that begins where the next part begins, and what is known about it.

    cues: which are never cut.   sure: up to here no later character can make a cue or a tag.
    is_final: no character of this turn follows the window.
    """

    text: str
    cues: tuple[tuple[int, int], ...]
    sure: int
    is_final: bool

    def may_cut(self, at: int) -> bool:
        """True where a cut parts no cue, nor a tag that is still coming."""
        return at <= self.sure and not any(start < at < end for start, end in self.cues)


class PartPlanner:
    """Cuts a text that comes in pieces into parts of `min_bytes` to `max_bytes` UTF-8 bytes.

    A part ends at the first end of a sentence that makes it `min_bytes` long; the very first part (and the first
    after `flush`) at its first end of a sentence, since somebody waits for it.  Only what has no such end is cut
    elsewhere.  A speaker tag begins a new part; where a speaker's turn makes several parts, each carries the tag.
    No character is lost but the whitespace around a part, and parts that hold nothing else (or control characters).
    Raises ValueError unless 0 <= min_bytes <= max_bytes and max_bytes >= 32 (a tag and a word).
    """

    def __init__(self, max_bytes: int, min_bytes: int) -> None:
        if not (0 <= min_bytes <= max_bytes and max_bytes >= 32):
            raise ValueError(f"parts need 0 <= min_bytes <= max_bytes >= 32, got {min_bytes} and {max_bytes}")
        self._max_bytes = max_bytes
        self._min_bytes = min_bytes
        self._text = ""
        self._tag = ""
        self._is_first = True

    def feed(self, text: str) -> list[str]:
        """Add `text` and return the parts that are complete by it."""
        self._text += text
        return self._take(is_final=False)

    def flush(self) -> list[str]:
        """Return all that is left, in parts; the next text starts afresh, under the same speaker."""
        parts = self._take(is_final=True)
        self._is_first = True
        return parts

    def _take(self, is_final: bool) -> list[str]:
        parts: list[str] = []
        start = 0
        while True:
            start = _skip_space(self._text, start)
            tag = _TAG.match(self._text, start)
            if tag:
                self._tag = tag[0]
                start = tag.end()
                continue
            length = self._next_cut(start, is_final)
            if not length:
                break
            piece = self._text[start : start + length].strip()
            start += length
            if not _is_blank(piece):
                parts.append(self._tag + piece)
                self._is_first = False
        self._text = self._text[start:]
        return parts

    def _next_cut(self, start: int, is_final: bool) -> int:
        """Length of the part that begins at `start`; 0 while that is not known."""
        look = self._max_bytes + _FIRST_LOOK_CHARS
        while True:
            is_all = start + look >= len(self._text)
            window = _window(self._text[start : start + look], is_final and is_all)
            length = self._cut(window)
            if length or is_all:
                return length
            look *= 2

    def _cut(self, window: _Window) -> int:
        limit = self._max_bytes - len(self._tag)
        ends = _within(window, _sentence_ends(window), limit)
        for at in ends:
            if self._is_first or _num_bytes(window.text[:at]) >= self._min_bytes:
                return at
        if _num_bytes(window.text.rstrip()) <= limit:
            return len(window.text) if window.is_final else 0
        return self._forced_cut(window, ends, limit)

    def _forced_cut(self, window: _Window, ends: list[int], limit: int) -> int:
        """The best place within `limit` bytes of a text that has more than these; 0 while that is not known."""
        if not window.is_final and _num_bytes(window.text[: window.sure].rstrip()) <= limit:
            return 0
        clauses = _within(window, _clause_ends(window), limit)
        long_clauses = [at for at in clauses if _num_bytes(window.text[:at]) >= self._min_bytes]
        words = (match.start() for match in _SPACE.finditer(window.text))
        for places in (
            long_clauses,
            ends,
            clauses,
            _within(window, words, limit),
            _within(window, _soft_places(window), limit),
            _within(window, _graphemes(window), limit),
            _within(window, range(1, len(window.text)), limit),
        ):
            if places:
                return places[-1]
        # What no voice can say (_is_blank) fills a part: it goes at once, not one character after the other.
        if num_blank := min(_first_speakable(window.text), window.sure):
            return num_blank
        # One cue is longer than a part may be: it goes as a whole.
        return next((at for at in range(1, window.sure) if window.may_cut(at)), len(window.text) * window.is_final)


def _window(text: str, is_final: bool) -> _Window:
    turn = _TAG.search(text)
    if turn:
        text, is_final = text[: turn.start()], True
    sure = len(text)
    if not is_final:
        unfinished = (pattern.search(text) for pattern in (_UNFINISHED_TAG, _UNFINISHED_CUE))
        sure = min([sure, *(match.start() for match in unfinished if match)])
    return _Window(text, tuple(match.span() for match in _CUE.finditer(text)), sure, is_final)


def _within(window: _Window, places: Iterator[int] | range, limit: int) -> list[int]:
    """The places after something speakable, at most `limit` bytes from the start, where a cut is allowed."""
    found = []
    size = 0
    last = 0
    first = _first_speakable(window.text)
    for at in places:
        size += _num_bytes(window.text[last:at])
        last = at
        if size > limit or at > window.sure:
            break
        if at > first and window.may_cut(at):
            found.append(at)
    return found


def _sentence_ends(window: _Window) -> Iterator[int]:
    for match in _SENTENCE_END.finditer(window.text):
        at = match.end()
        if at == len(window.text) and not window.is_final:
            return  # a closer or another mark may follow
        if any(start < match.start() < end for start, end in window.cues):
            continue
        if match["mark"] == "." and not match["closers"] and _is_abbreviation(window.text[: match.start()]):
            continue
        if match["closers"]:  # "Stop!" he said: a small letter goes on with the sentence
            after = window.text[at:].lstrip()
            if not after and not window.is_final:
                return
            if after[:1].islower():
                continue
        yield at


def _clause_ends(window: _Window) -> Iterator[int]:
    return (match.end() for match in _CLAUSE_END.finditer(window.text))


def _soft_places(window: _Window) -> Iterator[int]:
    """Where a line of a script without spaces may break: not inside a Latin word or number, not before a mark."""
    for at in _graphemes(window):
        before, after = window.text[at - 1], window.text[at]
        is_inside_word = before.isalnum() and after.isalnum() and before < "\u2e80" and after < "\u2e80"
        if not is_inside_word and not unicodedata.category(after).startswith("P"):
            yield at


def _graphemes(window: _Window) -> Iterator[int]:
    """Between two characters as a reader sees them (the cases of Unicode's rules that occur in texts)."""
    text = window.text
    flags = 0  # regional indicators in a row before this place; two make one flag
    for at in range(1, len(text)):
        before, after = text[at - 1], text[at]
        flags = flags + 1 if "\U0001f1e6" <= before <= "\U0001f1ff" else 0
        if "\U0001f1e6" <= after <= "\U0001f1ff" and flags % 2:
            continue
        joins = after == "\u200d" or before == "\u200d" or "\U0001f3fb" <= after <= "\U0001f3ff"
        if joins or unicodedata.category(after).startswith("M") or "\u1160" <= after <= "\u11ff":
            continue
        yield at


def _is_abbreviation(before_dot: str) -> bool:
    """True where a dot after this text most likely ends no sentence."""
    word = _WORD_BEFORE_DOT.search(before_dot[-24:])
    return word is not None and _ABBREVIATION.fullmatch(word[0]) is not None


def _is_blank(text: str) -> bool:
    """True where there is nothing but whitespace and control characters: no voice can say that."""
    return all(char.isspace() or unicodedata.category(char) in ("Cc", "Cf") for char in text)


def _first_speakable(text: str) -> int:
    """Where the first character stands that a voice can say; the length of `text` if none does."""
    return next((at for at, char in enumerate(text) if not _is_blank(char)), len(text))


def _skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
