"""In which language the numbers of a text are to be read.

Owns the guess by script and by a few function words: it costs microseconds and no model.  Called by normalize.py.
It does not name the language of a text (language.py does): a wrong guess costs a number that is read in the wrong
language, so unsure texts in Latin script count as English, and common languages that we cannot read numbers in are
told apart.
"""

import re

LANGUAGES = ("en", "de", "fr", "es", "ru", "ja", "zh")

_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_KANA = re.compile(r"[\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f]")
_CYRILLIC = re.compile(r"[\u0400-\u04ff]")
_NOT_RUSSIAN = re.compile(r"[іїєґўјљњћђџѓќѕәғқңөұүһ]", re.IGNORECASE)  # Ukrainian, Belarusian, Serbian, Kazakh ...
_LATIN = re.compile(r"[a-zß-ÿœ]", re.IGNORECASE)
_ALPHABETIC = re.compile(r"[^\W\d_]")
_WORD = re.compile(r"[a-zß-ÿœ]+", re.IGNORECASE)

# A letter that is rare in the others.
_TELLING_LETTERS = {
    "de": re.compile(r"[äöüß]", re.IGNORECASE),
    "fr": re.compile(r"[êèçœàû]", re.IGNORECASE),
    "es": re.compile(r"[ñ¿¡]", re.IGNORECASE),
}
# Frequent words.  The languages after Spanish are there to be told apart: their numbers stay as they are.
_WORDS = {
    "en": "the and of to is in it that was for you on with at by this are be have from we i my he she they not",
    "de": "der die das und ist ich nicht sie es ein eine mit den dem von zu auf für im am um wir hat uhr sind war bis",
    "fr": "le la les et est je pas vous il elle un une des du que dans pour avec sur au aux nous ce à en coûte heures",
    "es": "el la los las y es no que un una del en por para con se su lo al mi son está hay cuesta años a de",
    "it": "il lo la gli e è di che non un una per con del della sono alle ha ho costa anni nel i",
    "pt": "o os as e é que não um uma do da em por para com são anos custa às no na",
    "nl": "de het een en is van ik niet dat op met voor zijn te aan er om uur kost jaar",
    "pl": "i w na z nie się jest to że do od za po lat kosztuje",
}
_WORD_SETS = {code: frozenset(words.split()) for code, words in _WORDS.items()}


def detect(text: str) -> str | None:
    """Code of the language in `LANGUAGES`; None for one whose numbers we do not read.

    Digits alone are English, never Chinese.
    """
    han, kana = len(_HAN.findall(text)), len(_KANA.findall(text))
    latin, cyrillic = len(_LATIN.findall(text)), len(_CYRILLIC.findall(text))
    # An ideograph or kana says about as much as two or three letters.
    if 2 * (han + kana) > latin + cyrillic:
        return "ja" if kana else "zh"
    if cyrillic > latin:
        return None if _NOT_RUSSIAN.search(text) else "ru"
    if latin:
        return _latin(text)
    return None if _ALPHABETIC.search(text) else "en"


def _latin(text: str) -> str | None:
    words = [word.lower() for word in _WORD.findall(text)]
    scores = {code: float(sum(word in known for word in words)) for code, known in _WORD_SETS.items()}
    for code, letters in _TELLING_LETTERS.items():
        if letters.search(text):
            scores[code] += 0.5
    best = max(scores, key=lambda code: scores[code])  # the first of equals
    return best if best in LANGUAGES else None
