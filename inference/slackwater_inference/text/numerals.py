"""Numbers in words, in the languages of `detect.LANGUAGES`.

Owns what the libraries leave open: decimals, digit by digit, years, dates, money and measures.  The words themselves
are Unicode's (CLDR): numbers by unicode-rbnf, months and units by Babel.  Called by normalize.py.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

from babel import Locale
from babel.dates import get_month_names
from babel.numbers import format_decimal
from babel.units import format_unit
from unicode_rbnf import RbnfEngine

_MAX_CARDINAL = 10**12  # longer ones are read digit by digit


@dataclass(frozen=True, slots=True)
class Money:
    """Words of a currency.  one, few, many: by CLDR's plural categories; cent: likewise, empty = has none."""

    one: str
    few: str
    many: str
    cents: tuple[str, str, str] | None = None
    is_feminine: bool = False


@dataclass(frozen=True, slots=True)
class Grammar:
    """What one language needs beside CLDR's words.

    group, point: separators inside a number.   space: between words.
    """

    group: str
    point: str
    point_word: str
    minus: str
    plus: str
    to: str  # 10-20
    percent: str
    and_cents: str
    scale_of: str = ""  # between "million" and the currency
    space: str = " "
    scales: tuple[str, ...] = ()
    feminine_units: tuple[str, ...] = ()


_NBSP = "\u00a0\u202f "
GRAMMARS = {
    "en": Grammar(",", ".", "point", "minus", "plus", "to", "{} percent", " and ",
                  scales=("thousand", "million", "billion", "trillion")),
    "de": Grammar(".\u00a0\u202f", ",", "Komma", "minus", "plus", "bis", "{} Prozent", " ",
                  scales=("Tausend", "Million", "Millionen", "Milliarde", "Milliarden", "Billion", "Billionen"),
                  feminine_units=("duration-second", "duration-minute", "duration-hour", "mass-tonne", "length-mile")),
    "fr": Grammar(_NBSP, ",", "virgule", "moins", "plus", "à", "{} pour cent", " ", "de ",
                  scales=("mille", "million", "millions", "milliard", "milliards"),
                  feminine_units=("duration-second", "duration-minute", "duration-hour", "mass-tonne", "mass-pound",
                                  "mass-ounce")),
    "es": Grammar(".\u00a0\u202f", ",", "coma", "menos", "más", "a", "{} por ciento", " con ", "de ",
                  scales=("mil", "millón", "millones"),
                  feminine_units=("duration-hour", "mass-tonne", "mass-pound", "mass-ounce", "length-mile")),
    "ru": Grammar(_NBSP, ",", "запятая", "минус", "плюс", "–", "{} процент", " ",
                  scales=("тысяча", "тысячи", "тысяч", "миллион", "миллиона", "миллионов", "миллиард", "миллиарда",
                          "миллиардов"),
                  feminine_units=("duration-second", "duration-minute", "mass-tonne", "length-mile")),
    "ja": Grammar(",", ".", "点", "マイナス", "プラス", "から", "{}パーセント", "", space="",
                  scales=("万", "億", "兆")),
    "zh": Grammar(",", ".", "点", "负", "正", "到", "百分之{}", "", space="", scales=("万", "亿", "兆")),
}  # fmt: skip

MONEY = {
    "en": {
        "USD": Money("dollar", "dollars", "dollars", ("cent", "cents", "cents")),
        "EUR": Money("euro", "euros", "euros", ("cent", "cents", "cents")),
        "GBP": Money("pound", "pounds", "pounds", ("penny", "pence", "pence")),
        "JPY": Money("yen", "yen", "yen"),
        "CNY": Money("yuan", "yuan", "yuan"),
        "RUB": Money("ruble", "rubles", "rubles", ("kopeck", "kopecks", "kopecks")),
        "INR": Money("rupee", "rupees", "rupees", ("paisa", "paise", "paise")),
    },
    "de": {
        "USD": Money("Dollar", "Dollar", "Dollar", ("", "", "")),
        "EUR": Money("Euro", "Euro", "Euro", ("", "", "")),
        "GBP": Money("Pfund", "Pfund", "Pfund", ("", "", "")),
        "JPY": Money("Yen", "Yen", "Yen"),
        "CNY": Money("Yuan", "Yuan", "Yuan"),
        "RUB": Money("Rubel", "Rubel", "Rubel", ("", "", "")),
        "INR": Money("Rupie", "Rupien", "Rupien", is_feminine=True),
    },
    "fr": {
        "USD": Money("dollar", "dollars", "dollars", ("", "", "")),
        "EUR": Money("euro", "euros", "euros", ("", "", "")),
        "GBP": Money("livre", "livres", "livres", ("", "", ""), is_feminine=True),
        "JPY": Money("yen", "yens", "yens"),
        "CNY": Money("yuan", "yuans", "yuans"),
        "RUB": Money("rouble", "roubles", "roubles", ("", "", "")),
        "INR": Money("roupie", "roupies", "roupies", is_feminine=True),
    },
    "es": {
        "USD": Money("dólar", "dólares", "dólares", ("", "", "")),
        "EUR": Money("euro", "euros", "euros", ("", "", "")),
        "GBP": Money("libra", "libras", "libras", ("", "", ""), is_feminine=True),
        "JPY": Money("yen", "yenes", "yenes"),
        "CNY": Money("yuan", "yuanes", "yuanes"),
        "RUB": Money("rublo", "rublos", "rublos", ("", "", "")),
        "INR": Money("rupia", "rupias", "rupias", is_feminine=True),
    },
    "ru": {
        "USD": Money("доллар", "доллара", "долларов", ("цент", "цента", "центов")),
        "EUR": Money("евро", "евро", "евро", ("цент", "цента", "центов")),
        "GBP": Money("фунт", "фунта", "фунтов", ("пенс", "пенса", "пенсов")),
        "JPY": Money("иена", "иены", "иен", is_feminine=True),
        "CNY": Money("юань", "юаня", "юаней"),
        "RUB": Money("рубль", "рубля", "рублей", ("копейка", "копейки", "копеек")),
        "INR": Money("рупия", "рупии", "рупий", is_feminine=True),
    },
    "ja": {
        code: Money(word, word, word)
        for code, word in {"USD": "ドル", "EUR": "ユーロ", "GBP": "ポンド", "JPY": "円", "CNY": "元", "RUB": "ルーブル",
                           "INR": "ルピー"}.items()
    },
    "zh": {
        code: Money(word, word, word)
        for code, word in {"USD": "美元", "EUR": "欧元", "GBP": "英镑", "JPY": "日元", "CNY": "元", "RUB": "卢布",
                           "INR": "卢比"}.items()
    },
}  # fmt: skip
_SCALES = {
    "en": (("thousand",) * 3, ("million",) * 3, ("billion",) * 3, ("trillion",) * 3),
    "de": (
        ("Tausend",) * 3,
        ("Million", "Millionen", "Millionen"),
        ("Milliarde", "Milliarden", "Milliarden"),
        ("Billion", "Billionen", "Billionen"),
    ),
    "fr": (
        ("mille",) * 3,
        ("million", "millions", "millions"),
        ("milliard", "milliards", "milliards"),
        ("billion", "billions", "billions"),
    ),
    "es": (
        ("mil",) * 3,
        ("millón", "millones", "millones"),
        ("mil millones",) * 3,
        ("billón", "billones", "billones"),
    ),
    "ru": (
        ("тысяча", "тысячи", "тысяч"),
        ("миллион", "миллиона", "миллионов"),
        ("миллиард", "миллиарда", "миллиардов"),
        ("триллион", "триллиона", "триллионов"),
    ),
}
_RUSSIAN_PERCENT = {"one": "процент", "few": "процента", "many": "процентов", "other": "процента"}
_RUSSIAN_FEMININE_CENTS = "копейка"


@lru_cache(maxsize=len(GRAMMARS))
def _engine(language: str) -> RbnfEngine:
    return RbnfEngine.for_language(language)


@lru_cache(maxsize=4096)
def _spelled(language: str, number: int, rules: str) -> str:
    spelled = _engine(language).format_number(number, ruleset_names=[rules]).text
    return spelled.replace("\u00ad", "")  # hyphenation hints are no letters


def cardinal(language: str, number: int, gender: str = "") -> str:
    """`number` in words.  gender: "m" or "f" where a noun follows; "" counts alone."""
    if abs(number) >= _MAX_CARDINAL:
        return digits(language, str(abs(number)))
    rules = "spellout-numbering"
    if gender and language in ("de", "fr", "es", "ru"):
        rules = "spellout-cardinal-feminine" if gender == "f" else "spellout-cardinal-masculine"
    elif language == "zh":
        rules = "spellout-cardinal-alternate2" if gender and number == 2 else "spellout-cardinal"
    return _spelled(language, number, rules)


def digits(language: str, text: str) -> str:
    """The digits of `text` one by one."""
    grammar = GRAMMARS[language]
    if language == "zh":
        return "".join("零一二三四五六七八九"[int(digit)] for digit in text)
    return grammar.space.join(_spelled(language, int(digit), "spellout-numbering") for digit in text)


def ordinal(language: str, number: int, form: str = "") -> str:
    """`number` as an ordinal.  form: the end of CLDR's rule name, such as `masculine-genitive` or `n`
    ("e" = none)."""
    if language == "zh":
        return "第" + cardinal("zh", number)
    default = {"fr": "masculine", "es": "masculine", "ru": "masculine"}.get(language, "")
    form = "" if form == "e" else form or default
    return _spelled(language, number, f"spellout-ordinal-{form}" if form else "spellout-ordinal")


def year(language: str, number: int) -> str:
    """A year, where a language reads it unlike a count: nineteen ninety-nine, 二零二六."""
    if language == "zh":
        return digits("zh", str(number))
    return (
        _spelled(language, number, "spellout-numbering-year")
        if language in ("en", "de")
        else cardinal(language, number)
    )


def parse(language: str, text: str) -> tuple[str, str]:
    """Whole and decimal digits of a number as written: "1,234.5" is ("1234", "5").

    With both separators the last is the point.  With one, it groups if it is the language's grouping one and three
    digits follow; else it is the point.
    """
    for space in _NBSP:
        text = text.replace(space, "")
    dot, comma = text.rfind("."), text.rfind(",")
    at = max(dot, comma)
    if at < 0:
        return text, ""
    whole, rest = text[:at], text[at + 1 :]
    separator = text[at]
    is_mixed = dot >= 0 and comma >= 0
    is_group = separator in GRAMMARS[language].group and len(rest) == 3 and whole.lstrip("0") != ""
    if not is_mixed and (is_group or text.count(separator) > 1):
        return text.replace(separator, ""), ""
    return whole.replace(".", "").replace(",", ""), rest


def number(language: str, text: str, gender: str = "") -> str:
    """A number as written, in words: grouped, decimal, or with leading zeros (then digit by digit)."""
    whole, rest = parse(language, text)
    is_name = (len(whole) > 1 and whole[0] == "0") or (len(whole) >= 10 and whole == text)
    words = digits(language, whole) if is_name else cardinal(language, int(whole), "" if rest else gender)
    if not rest:
        return words
    grammar = GRAMMARS[language]
    return grammar.space.join([words, grammar.point_word, digits(language, rest)])


def plural(language: str, text: str) -> str:
    """CLDR's plural category of a number as written."""
    whole, rest = parse(language, text)
    value = float(f"{whole}.{rest}") if rest else int(whole)
    return str(_locale(language).plural_form(value))


def money(language: str, text: str, currency: str, scale: str = "") -> str:
    """An amount as written, with the words of its currency.  scale: million ..., as written."""
    grammar, words = GRAMMARS[language], MONEY[language][currency]
    gender = "f" if words.is_feminine else "m"
    if scale:
        of = "" if scale in ("mille", "mil") else grammar.scale_of
        if language == "fr" and of and words.many[0] in "aeiou":
            of = "d'"
        return grammar.space.join([counted_scale(language, text, scale), of + words.many])
    whole, rest = parse(language, text)
    if words.cents is None or len(rest) != 2:
        return grammar.space.join([number(language, text, gender), _counted(language, text, words)])
    large = grammar.space.join([number(language, whole, gender), _counted(language, whole, words)])
    if int(rest) == 0:
        return large
    small_words = Money(*words.cents)
    small_gender = "f" if small_words.one == _RUSSIAN_FEMININE_CENTS else "m" if small_words.one else ""
    small = number(language, str(int(rest)), small_gender)
    if small_words.one:
        small = f"{small} {_counted(language, str(int(rest)), small_words)}"
    return small if int(whole) == 0 and small_words.one else large + grammar.and_cents + small


def counted_scale(language: str, text: str, scale: str) -> str:
    """An amount as written, with thousand, million ... after it."""
    is_feminine = (language == "de" and scale != "Tausend") or scale.startswith("тысяч")
    return GRAMMARS[language].space.join([number(language, text, "f" if is_feminine else "m"), scale])


def scale(language: str, thousands: int, category: str) -> str:
    """1000 ** `thousands` (up to 4) in words, as a number of that plural category has it; not in ja and zh."""
    one, few, many = _SCALES[language][thousands - 1]
    return {"one": one, "few": few, "other": few}.get(category, many)


def percent(language: str, text: str) -> str:
    """A share as written, in words."""
    words = GRAMMARS[language].percent.format(number(language, text, "m" if language == "ru" else ""))
    if language == "ru":
        words = words.removesuffix("процент") + _RUSSIAN_PERCENT[plural("ru", text)]
    return words


def measure(language: str, text: str, unit: str) -> str:
    """A quantity as written.  unit: CLDR's name, such as `length-kilometer`."""
    whole, rest = parse(language, text)
    gender = "f" if unit in GRAMMARS[language].feminine_units else "m"
    value = float(f"{whole}.{rest}") if rest else int(whole)
    return _unit_pattern(language, unit, value).format(number(language, text, gender))


@lru_cache(maxsize=1024)
def _unit_pattern(language: str, unit: str, value: float) -> str:
    written = format_unit(value, unit, length="long", locale=language)
    pattern = written.replace(format_decimal(value, locale=language), "{}", 1)
    pattern = pattern.replace("\u00a0", " ")
    return pattern if GRAMMARS[language].space else pattern.replace(" ", "")


@cache
def months(language: str) -> dict[str, int]:
    """Names of the months as written in dates, lower case, long and short, with their numbers."""
    names: dict[str, int] = {}
    for width in ("wide", "abbreviated"):
        for context in ("format", "stand-alone"):
            for month, name in get_month_names(width, context=context, locale=language).items():
                names[name.lower().rstrip(".")] = int(month)
    return {**names, "sept": 9} if language == "en" else names


def month(language: str, number: int) -> str:
    """The month's name as it stands in a date."""
    return str(get_month_names("wide", locale=language)[number])


@cache
def _locale(language: str) -> Locale:
    return Locale.parse(language)


def _counted(language: str, text: str, words: Money) -> str:
    category = plural(language, text)
    if language == "ru" and category == "other":  # 2,5 доллара
        return words.few
    return {"one": words.one, "few": words.few}.get(category, words.many)
