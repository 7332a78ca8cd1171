"""Which language a text is in.

Owns the threshold under which we say that we do not know.  Called when a voice is stored, so that voices can be
found by language.
"""

from functools import cache
from typing import Protocol

# Names and two-word titles score below it, sentences above 0.9.
_MIN_CONFIDENCE = 0.6


class _Identifier(Protocol):
    def classify(self, text: str) -> tuple[str, float]: ...


def language_of(text: str) -> str | None:
    """ISO 639-1 code of the language of `text`; None if it is too short or too mixed to tell.

    The first call takes about half a second; make it in a thread.
    """
    code, confidence = _identifier().classify(text)
    return code if confidence >= _MIN_CONFIDENCE else None


def languages_of(texts: list[str]) -> tuple[str, ...]:
    """The languages of several texts, the first one's first, each once."""
    return tuple(dict.fromkeys(code for code in map(language_of, texts) if code is not None))


@cache
def _identifier() -> _Identifier:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier: _Identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    return identifier
