"""Numbers, dates, times, money and measures of a text into words.

Owns the order in which they are looked for and what is never touched.  Owns neither their patterns (dates.py,
amounts.py), nor the words (numerals.py), nor the guess of the language (detect.py).  Called by the API before a text
is cut into parts.

What fits no pattern stays as it was written, as do speaker tags, [cues], (parentheses), addresses of the web, versions
(1.2.3), fractions (1/2) and names with digits (H100).
"""

import re
from functools import cache, partial

from slackwater_inference.text import amounts, dates
from slackwater_inference.text.detect import LANGUAGES, detect
from slackwater_inference.text.patterns import Rule

_KEPT = re.compile(
    r"""
    <\|speaker:[0-9]+\|>
    | \[[^\[\]\n]*\]
    | \([^()\n]*\)
    | https?://\S+ | www\.\S+ | [\w.+-]{1,64}@[\w-]+\.[\w.-]+
    """,
    re.VERBOSE,
)
_WIDE = str.maketrans("０１２３４５６７８９％", "0123456789%")


def normalize(text: str, language: str | None = None) -> str:
    """`text` with its numbers in words.

    language: such as "en", "de-AT" or "zh_CN"; None = guessed from the text.  In a language whose numbers are not known
    here the text stays as it is.
    """
    text = text.translate(_WIDE)
    if not any("0" <= char <= "9" for char in text):
        return text
    code = detect(text) if language is None else re.split("[-_]", language)[0].lower()
    if code not in LANGUAGES:
        return text
    pieces: list[str] = []
    start = 0
    for kept in _KEPT.finditer(text):
        pieces += [_normalized(text[start : kept.start()], code), kept[0]]
        start = kept.end()
    return "".join([*pieces, _normalized(text[start:], code)])


def _normalized(text: str, language: str) -> str:
    for pattern, words in _rules(language):
        text = pattern.sub(partial(words, language), text)
    return text


@cache
def _rules(language: str) -> tuple[Rule, ...]:
    """The rules of one language, from the most to the least special."""
    return (
        *dates.dates(language),
        *dates.times(language),
        *amounts.phones_and_ranges(language),
        *amounts.money(language),
        *dates.decades(language),
        *amounts.ordinals(language),
        *amounts.measures(language),
        *dates.years(language),
        *amounts.numbers(language),
    )
