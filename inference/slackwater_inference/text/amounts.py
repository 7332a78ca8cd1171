"""Telephone numbers, ranges, money, shares, measures, ordinals and plain numbers of a text into words.

Owns how they are written: symbols, short words for millions, units, endings of ordinals.  Called by normalize.py.
"""

import re

from slackwater_inference.text import numerals
from slackwater_inference.text.dates import german_ending
from slackwater_inference.text.numerals import GRAMMARS, MONEY
from slackwater_inference.text.patterns import (
    DOT,
    END,
    LETTER,
    NO_LETTER,
    SIGN,
    SPACE,
    START,
    Match,
    Rule,
    alternatives,
    amount,
)

_SYMBOLS = {"$": "USD", "US$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY", "￥": "JPY", "₽": "RUB", "₹": "INR"}
# Thousands of thousands; those of the first row only stand beside a currency.
_MONEY_SCALES = {"k": 1, "K": 1, "m": 2, "M": 2, "mn": 2, "bn": 3, "b": 3, "B": 3, "tn": 4}
_WORD_SCALES = {"Mio": 2, "Mrd": 3, "тыс": 1, "млн": 2, "млрд": 3, "трлн": 4}
_UNITS = {
    "km/h": "speed-kilometer-per-hour", "kmh": "speed-kilometer-per-hour", "mph": "speed-mile-per-hour",
    "m/s": "speed-meter-per-second",
    "km²": "area-square-kilometer", "m²": "area-square-meter", "m³": "volume-cubic-meter",
    "km": "length-kilometer", "cm": "length-centimeter", "mm": "length-millimeter", "m": "length-meter",
    "mi": "length-mile", "ft": "length-foot",
    "kg": "mass-kilogram", "mg": "mass-milligram", "g": "mass-gram", "lb": "mass-pound", "lbs": "mass-pound",
    "oz": "mass-ounce", "t": "mass-tonne",
    "ml": "volume-milliliter", "mL": "volume-milliliter", "l": "volume-liter", "L": "volume-liter",
    "°C": "temperature-celsius", "℃": "temperature-celsius", "°F": "temperature-fahrenheit", "°": "angle-degree",
    "ms": "duration-millisecond", "s": "duration-second", "sec": "duration-second", "min": "duration-minute",
    "h": "duration-hour", "hrs": "duration-hour",
    "kWh": "energy-kilowatt-hour", "kW": "power-kilowatt", "MW": "power-megawatt", "W": "power-watt",
    "kHz": "frequency-kilohertz", "MHz": "frequency-megahertz", "GHz": "frequency-gigahertz", "Hz": "frequency-hertz",
    "kB": "digital-kilobyte", "KB": "digital-kilobyte", "MB": "digital-megabyte", "GB": "digital-gigabyte",
    "TB": "digital-terabyte",
    "км/ч": "speed-kilometer-per-hour", "км": "length-kilometer", "см": "length-centimeter", "мм": "length-millimeter",
    "кг": "mass-kilogram", "мин": "duration-minute", "м": "length-meter", "л": "volume-liter", "т": "mass-tonne",
}  # fmt: skip

_PHONE = re.compile(
    rf"""
    (?<![\w.,/:-])
    (?: \+[0-9]{{1,3}}(?:[ .-]?[0-9]{{2,5}}){{2,5}}
    |   0[0-9]{{1,5}}(?:[ /-][0-9]{{2,8}}){{1,4}}
    |   (?:1-)?[0-9]{{3}}[ .-][0-9]{{3}}[ .-][0-9]{{4}}
    |   [0-9]{{3}}-[0-9]{{4}}
    ){END}(?!-[0-9])
    """,
    re.VERBOSE,
)
_RUSSIAN_ORDINAL = {"й": "masculine", "я": "feminine", "е": "neuter", "го": "masculine-genitive",
                    "му": "masculine-dative", "м": "masculine-locative", "ю": "feminine-accusative",
                    "х": "plural-genitive"}  # fmt: skip
# Before these a Chinese 2 is 两.
_CHINESE_COUNTED = "个位名只条张本次公里米天年周小块元种件台杯岁家"


def phones_and_ranges(language: str) -> list[Rule]:
    """555-123-4567 digit by digit; 10-20 with the word for "to"."""
    number = amount(language)
    pattern = rf"(?<![\w.,/:–-])({number}){SPACE}([-–~〜～]){SPACE}(?=({number})(?![0-9.,:/–~-]*[0-9]))"
    return [(_PHONE, _phone), (re.compile(pattern), _range)]


def money(language: str) -> list[Rule]:
    """$3.50, 3,50 €, $5bn, 3,5 Mio. Euro, 5 EUR."""
    symbols = alternatives([*_SYMBOLS, *MONEY["en"]])
    named = alternatives([*_SYMBOLS, *MONEY["en"], *_names(language)])
    whole = rf"{SPACE}({alternatives(GRAMMARS[language].scales)}){NO_LETTER}"
    spaced = rf"{SPACE}({alternatives([*_WORD_SCALES])}){NO_LETTER}\.?"
    scale = rf"(?:{whole}|{spaced}|({alternatives([*_MONEY_SCALES])}){NO_LETTER})?"
    number = amount(language)
    return [
        (re.compile(rf"({SIGN})({symbols}){SPACE}({number}){scale}{END}"), _money_before),
        (re.compile(rf"{START}({SIGN})({number}){scale}{SPACE}({named})(?![A-Za-z0-9])"), _money_after),
    ]


def measures(language: str) -> list[Rule]:
    """5 %, 20 km/h, 5 млн."""
    number = rf"{START}({SIGN})({amount(language)}){SPACE}"
    return [
        (re.compile(rf"{number}%"), _percent),
        (re.compile(rf"{number}({alternatives([*_UNITS])})(?![{LETTER}0-9²³])"), _measure),
        (re.compile(rf"{number}({alternatives([*_WORD_SCALES])}){NO_LETTER}{DOT}"), _scaled_number),
    ]


def ordinals(language: str) -> list[Rule]:
    """21st, der 3. Stock, 1er, 3º, 5-го, 第3."""
    match language:
        case "en":
            return [(re.compile(rf"{START}([0-9]{{1,6}})(?:st|nd|rd|th)\b"), _ordinal)]
        case "de":
            return [(re.compile(rf"{START}([0-9]{{1,3}})\.(?= [A-ZÄÖÜ])"), _german_ordinal)]
        case "fr":
            return [(re.compile(rf"{START}([0-9]{{1,6}})(ers?|res?|ères?|es?|èmes?){NO_LETTER}"), _french_ordinal)]
        case "es":
            return [(re.compile(rf"{START}([0-9]{{1,3}})\.?([ºª])"), _spanish_ordinal)]
        case "ru":
            endings = alternatives([*_RUSSIAN_ORDINAL])
            return [(re.compile(rf"{START}([0-9]{{1,6}})-({endings}){NO_LETTER}"), _russian_ordinal)]
        case "ja":
            return [(re.compile(r"第([0-9]{1,6})(?![0-9.,])"), _counted_ordinal)]
        case _:
            return [
                (re.compile(r"第([0-9]{1,6})(?![0-9.,])"), _counted_ordinal),
                (re.compile(rf"{START}2(?=[{_CHINESE_COUNTED}])"), _counted),
            ]


def numbers(language: str) -> list[Rule]:
    """What is left: a sign and an amount; more digits than any amount has are read one by one."""
    return [
        (re.compile(rf"{START}({SIGN})({amount(language)}){END}"), _number),
        (re.compile(rf"{START}[0-9]{{16,}}{END}"), _digits),
    ]


def _names(language: str) -> dict[str, str]:
    """The currencies' own words, with the codes."""
    return {name: code for code, words in MONEY[language].items() for name in (words.one, words.few, words.many)}


def _phone(language: str, match: Match) -> str:
    plus = GRAMMARS[language].plus + GRAMMARS[language].space if match[0][0] == "+" else ""
    comma = "、" if language == "ja" else "，" if language == "zh" else ", "
    return plus + comma.join(numerals.digits(language, group) for group in re.findall("[0-9]+", match[0]))


def _range(language: str, match: Match) -> str:
    """The first number and the word for "to"; the second is left to the rules that follow."""
    first, dash, second = match[1], match[2], match[3]
    low, high = (float(".".join(numerals.parse(language, number)).rstrip(".")) for number in (first, second))
    if dash == "-" and not low < high:  # a score, a name
        return match[0]
    grammar = GRAMMARS[language]
    return f"{first}{grammar.space}{grammar.to}{grammar.space}"


def _money_before(language: str, match: Match) -> str:
    sign, symbol, number, *scales = match.groups()
    return _money(language, sign, number, symbol, scales)


def _money_after(language: str, match: Match) -> str:
    sign, number, *scales, symbol = match.groups()
    return _money(language, sign, number, symbol, scales)


def _money(language: str, sign: str, number: str, symbol: str, scales: list[str | None]) -> str:
    currency = {**_names(language), **_SYMBOLS}.get(symbol, symbol)
    if language == "zh" and symbol in "¥￥":
        currency = "CNY"
    scale = scales[0] or ""
    short = scales[1] or scales[2]
    if short:
        thousands = {**_MONEY_SCALES, **_WORD_SCALES}[short]
        if language in ("ja", "zh"):  # they count by ten thousands
            number = _scaled(number, thousands)
        else:
            scale = numerals.scale(language, thousands, numerals.plural(language, number))
    return _sign(language, sign) + numerals.money(language, number, currency, scale)


def _scaled_number(language: str, match: Match) -> str:
    sign, number, short = match.groups()
    if language in ("ja", "zh"):
        return match[0]
    scale = numerals.scale(language, _WORD_SCALES[short], numerals.plural(language, number))
    return f"{_sign(language, sign)}{numerals.counted_scale(language, number, scale)}"


def _scaled(amount: str, thousands: int) -> str:
    """`amount` times 1000 ** `thousands`, in digits."""
    whole, rest = numerals.parse("en", amount)
    digits = 3 * thousands
    scaled = whole + rest[:digits].ljust(digits, "0")
    return scaled + (f".{rest[digits:]}" if rest[digits:] else "")


def _percent(language: str, match: Match) -> str:
    return _sign(language, match[1]) + numerals.percent(language, match[2])


def _measure(language: str, match: Match) -> str:
    return _sign(language, match[1]) + numerals.measure(language, match[2], _UNITS[match[3]])


def _ordinal(language: str, match: Match) -> str:
    return numerals.ordinal(language, int(match[1]))


def _german_ordinal(language: str, match: Match) -> str:
    """3. before a capital is an ordinal only after an article or preposition; else it ends a sentence."""
    ending = german_ending(match)
    return match[0] if ending is None else numerals.ordinal(language, int(match[1]), ending)


def _french_ordinal(language: str, match: Match) -> str:
    is_plural, is_feminine = match[2].endswith("s"), match[2].startswith(("re", "ère"))
    form = ("feminine" if is_feminine else "masculine") + ("-plural" if is_plural else "")
    return numerals.ordinal(language, int(match[1]), form)


def _spanish_ordinal(language: str, match: Match) -> str:
    return numerals.ordinal(language, int(match[1]), "feminine" if match[2] == "ª" else "masculine")


def _russian_ordinal(language: str, match: Match) -> str:
    return numerals.ordinal(language, int(match[1]), _RUSSIAN_ORDINAL[match[2]])


def _counted_ordinal(language: str, match: Match) -> str:
    return "第" + numerals.cardinal(language, int(match[1]))


def _counted(language: str, match: Match) -> str:
    return numerals.cardinal(language, int(match[0]), "m")


def _number(language: str, match: Match) -> str:
    return _sign(language, match[1]) + numerals.number(language, match[2])


def _digits(language: str, match: Match) -> str:
    return numerals.digits(language, match[0])


def _sign(language: str, text: str) -> str:
    """The word for a sign that `text` begins with, and the space after it."""
    grammar = GRAMMARS[language]
    word = {"-": grammar.minus, "−": grammar.minus, "+": grammar.plus}.get(text[:1], "")
    return word and word + grammar.space
