"""Dates, times and years of a text into words.

Owns how they are written in each language and in which case they are read.  Called by normalize.py.
"""

import re

from slackwater_inference.text import numerals
from slackwater_inference.text.patterns import DOT, END, LETTER, NO_LETTER, SPACE, START, Match, Rule, alternatives

_GERMAN_CASE = re.compile(r"\b(?:am|im|vom|zum|beim|dem|den|des|der|die|das|bis|ab|seit|nach|vor)\s+\Z", re.IGNORECASE)
_RUSSIAN_YEAR = {
    "год": "masculine",
    "года": "masculine-genitive",
    "году": "masculine-locative",
    "годом": "masculine-ablative",
    "г": "masculine-genitive",
}


def dates(language: str) -> list[Rule]:
    """2026-11-30, 3/4/2026, 30.11.2026, and dates with the month's name."""
    return [
        (re.compile(rf"{START}([12][0-9]{{3}})-([01][0-9])-([0-3][0-9]){END}(?!-)"), _iso_date),
        (re.compile(rf"{START}([0-3]?[0-9])([./])([0-3]?[0-9])\2([12][0-9]{{3}}){END}"), _written_date),
        *_month_dates(language),
    ]


def times(language: str) -> list[Rule]:
    """14:30, 14:30:05, and what the language writes besides: 3 pm, 14h30."""
    clock = r"([01]?[0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9]))?"
    match language:
        case "en":
            noon = rf"([apAP])(?:\.[mM]{DOT}|[mM]\b)"
            return [
                (re.compile(rf"{START}{clock}(?:{SPACE}{noon})?{END}"), _time),
                (re.compile(rf"{START}([01]?[0-9])()(){SPACE}{noon}{NO_LETTER}"), _time),
            ]
        case "de":
            return [(re.compile(rf"{START}{clock}(?:{SPACE}Uhr\b)?{END}"), _time)]
        case "fr":
            hours = rf"([01]?[0-9]|2[0-3]){SPACE}h{SPACE}([0-5][0-9])()"
            return [(re.compile(rf"{START}{written}{END}"), _time) for written in (clock, hours)]
        case _:
            return [(re.compile(rf"{START}{clock}{END}"), _time)]


def decades(language: str) -> list[Rule]:
    """The 1990s and '90s, which only English writes so."""
    if language != "en":
        return []
    return [(re.compile(rf"{START}['’]?((?:1[0-9]|20)?[0-9]0)['’]?s\b"), _decade)]


def years(language: str) -> list[Rule]:
    """Numbers that are read as years: by their size, or by the word that follows."""
    match language:
        case "en":
            return [(re.compile(rf"{START}(1[1-9][0-9]{{2}}|20[0-9]{{2}}){END}"), _year)]
        case "de":
            return [(re.compile(rf"{START}(1[1-9][0-9]{{2}}){END}"), _year)]
        case "ru":
            words = alternatives([*_RUSSIAN_YEAR])
            return [(re.compile(rf"{START}([12][0-9]{{3}}){SPACE}({words})(?![{LETTER}]){DOT}"), _russian_year)]
        case "zh":
            return [(re.compile(rf"{START}([12][0-9]{{3}})(?=年)"), _year)]
        case _:
            return []


def _month_dates(language: str) -> list[Rule]:
    names = [*numerals.months(language)]
    if language in ("en", "de"):  # "may 5 of them come" is no date
        month = rf"({alternatives([name.title() for name in names])}){NO_LETTER}{DOT}"
    else:
        month = rf"((?i:{alternatives(names)})){NO_LETTER}{DOT}"
    day, year = r"([0-3]?[0-9])", r"([12][0-9]{3})"
    match language:
        case "en":
            day += "(?:st|nd|rd|th)?"
            written = [
                (rf"\b{month}{SPACE}{day}(?:,?{SPACE}{year})?{END}(?![%°])", _month_day),
                (rf"{START}{day}{SPACE}(?:of )?{month}(?:,?{SPACE}{year})?{NO_LETTER}", _day_month),
            ]
        case "de":
            written = [(rf"{START}{day}\.{SPACE}{month}(?:{SPACE}{year})?{NO_LETTER}", _day_month)]
        case "fr":
            written = [(rf"{START}{day}(?:er)?{SPACE}{month}(?:{SPACE}{year})?{NO_LETTER}", _day_month)]
        case "es":
            written = [(rf"{START}{day}{SPACE}de{SPACE}{month}(?:{SPACE}del?{SPACE}{year})?{NO_LETTER}", _day_month)]
        case "ru":
            year += rf"(?:{SPACE}(?:года|г(?![{LETTER}]){DOT}))?"
            written = [(rf"{START}{day}{SPACE}{month}(?:{SPACE}{year})?{NO_LETTER}", _day_month)]
        case _:
            written = []
    return [(re.compile(pattern), words) for pattern, words in written]


def _iso_date(language: str, match: Match) -> str:
    year, month, day = (int(group) for group in match.groups())
    return _date(language, year, month, day, match)


def _written_date(language: str, match: Match) -> str:
    first, second, year = int(match[1]), int(match[3]), int(match[4])
    is_month_first = language in ("en", "ja", "zh") and match[2] == "/" and first <= 12
    day, month = (second, first) if is_month_first else (first, second)
    return _date(language, year, month, day, match)


def _date(language: str, year: int | None, month: int, day: int, match: Match) -> str:
    """A date in the order and with the cases of its language; what is no date stays as written."""
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return match[0]
    name = numerals.month(language, month)
    year_words = "" if year is None else numerals.year(language, year)
    match language:
        case "en":
            return f"{name} {numerals.ordinal('en', day)}" + (year_words and f", {year_words}")
        case "de":
            ordinal = numerals.ordinal("de", day, german_ending(match) or "r")
            return f"{ordinal} {name}" + (year_words and f" {year_words}")
        case "fr":
            day_words = numerals.ordinal("fr", 1) if day == 1 else numerals.cardinal("fr", day)
            return f"{day_words} {name}" + (year_words and f" {year_words}")
        case "es":
            return f"{numerals.cardinal('es', day)} de {name}" + (year_words and f" de {year_words}")
        case "ru":
            genitive = numerals.ordinal("ru", day, "neuter-genitive")
            tail = "" if year is None else f" {numerals.ordinal('ru', year, 'masculine-genitive')} года"
            return f"{genitive} {name}{tail}"
        case _:
            return f"{year_words}年{numerals.cardinal(language, month)}月{numerals.cardinal(language, day)}日"


def _month_day(language: str, match: Match) -> str:
    return _named_date(language, match[2], match[1], match[3], match)


def _day_month(language: str, match: Match) -> str:
    return _named_date(language, match[1], match[2], match[3], match)


def _named_date(language: str, day: str, month: str, year: str | None, match: Match) -> str:
    number = numerals.months(language)[month.lower()]
    return _date(language, int(year) if year else None, number, int(day), match)


def _time(language: str, match: Match) -> str:
    groups = match.groups()
    hour, minute, second = int(groups[0]), int(groups[1] or 0), groups[2]
    noon = groups[3] if len(groups) > 3 else None
    hours, minutes = numerals.cardinal(language, hour), numerals.cardinal(language, minute)
    seconds = numerals.cardinal(language, int(second)) if second else ""
    match language:
        case "en":
            if minute == 0 and not second:
                tail = [] if noon else ["o'clock"] if 1 <= hour <= 12 else ["hundred"]
            else:
                tail = [f"oh {minutes}" if minute < 10 else minutes, seconds]
            if noon:
                tail.append(f"{noon.upper()}M")
            return " ".join(filter(None, [hours, *tail]))
        case "de":
            hours = numerals.cardinal("de", hour, "m")
            return " ".join(filter(None, [hours, "Uhr", minutes if minute or second else "", seconds]))
        case "fr":
            hours = f"{numerals.cardinal('fr', hour, 'f')} {'heure' if hour < 2 else 'heures'}"
            return " ".join(
                filter(None, [hours, numerals.cardinal("fr", minute, "f") if minute or second else "", seconds])
            )
        case "es" | "ru":
            zero = numerals.cardinal(language, 0)
            return " ".join(filter(None, [hours, f"{zero} {minutes}" if 0 < minute < 10 else minutes, seconds]))
        case _:
            hour_sign, minute_sign, second_sign = ("時", "分", "秒") if language == "ja" else ("点", "分", "秒")
            tail = [minutes + minute_sign if minute or second else "", seconds + second_sign if second else ""]
            return hours + hour_sign + "".join(tail)


def german_ending(match: Match) -> str | None:
    """CLDR's name of the ending that a German ordinal takes after the word before it; None if none calls for one."""
    before = _GERMAN_CASE.search(match.string[: match.start()])
    if before is None:
        return None
    return "e" if before[0].strip().lower() in ("der", "die", "das") else "n"


def _decade(language: str, match: Match) -> str:
    words = numerals.year(language, int(match[1]))
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


def _year(language: str, match: Match) -> str:
    return numerals.year(language, int(match[1]))


def _russian_year(language: str, match: Match) -> str:
    word = "года" if match[2] == "г" else match[2]
    return f"{numerals.ordinal(language, int(match[1]), _RUSSIAN_YEAR[match[2]])} {word}"
