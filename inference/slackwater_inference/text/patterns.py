"""Pieces of the patterns that the rules of normalising share.

Owns where a number begins and ends and how an amount is written.  Used by dates.py, amounts.py and normalize.py.
"""

import re
from collections.abc import Callable

Match = re.Match[str]
# A pattern, and what makes words of its match: it gets the language's code and the match.
Rule = tuple[re.Pattern[str], Callable[[str, Match], str]]

LETTER = r"A-Za-z_\u00aa\u00b5\u00ba\u00c0-\u024f\u0370-\u052f"
NO_LETTER = rf"(?![{LETTER}0-9])"
# A number starts and ends where neither letter, digit nor a further piece of an address or version adjoins.
START = rf"(?<![{LETTER}0-9])(?<![0-9][.,:/])(?<!/)"
END = rf"{NO_LETTER}(?![.,:/][0-9])(?!/)"
SIGN = r"(?:(?<![^\s\"'“„«(])[-−+])?"
SPACE = r"[ \u00a0\u202f]?"

# The dot of an abbreviation, unless it may end the sentence, too.
DOT = r"(?:\.(?=\s*[0-9,]|\s+[a-zß-ÿа-яё]))?"

_PLAIN_AMOUNT = r"[0-9]{1,3}(?:[.,\u00a0\u202f][0-9]{3}){1,4}(?:[.,][0-9]+)?|[0-9]{1,15}(?:[.,][0-9]+)?"
_SPACED_AMOUNT = r"[0-9]{1,3}(?:[ \u00a0\u202f][0-9]{3}){1,4}(?:[.,][0-9]+)?|" + _PLAIN_AMOUNT


def amount(language: str) -> str:
    """A number of up to 15 digits as it is written in `language`, without a sign.

    French and Russian group by plain spaces, too.
    """
    return _SPACED_AMOUNT if language in ("fr", "ru") else _PLAIN_AMOUNT


def alternatives(words: "list[str] | tuple[str, ...]") -> str:
    """Any of `words`, the longest first."""
    return "|".join(sorted(map(re.escape, words), key=len, reverse=True))
