"""Normalising: what is read how, what is left alone, and that nothing is lost."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater_inference.text.detect import detect
from slackwater_inference.text.normalize import normalize

READINGS = {
    "en": {
        "I paid $3.50 for 2 apples.": "I paid three dollars and fifty cents for two apples.",
        "$3.5 million, $5bn, $10k": "three point five million dollars, five billion dollars, ten thousand dollars",
        "£1, £0.05, ¥500, 20 EUR": "one pound, five pence, five hundred yen, twenty euros",
        "$1,234.56": "one thousand two hundred thirty-four dollars and fifty-six cents",
        "On 2026-11-30": "On November thirtieth, twenty twenty-six",
        "3/4/2026 and 30/4/2026": "March fourth, twenty twenty-six and April thirtieth, twenty twenty-six",
        "Nov 30, 2026, 30 Nov. 2026, May 5th": "November thirtieth, twenty twenty-six, November thirtieth, "
        "twenty twenty-six, May fifth",
        "on 5 Nov. We left": "on November fifth. We left",
        "14:30, 3:05 pm, 9:00, 3 p.m. Then": "fourteen thirty, three oh five PM, nine o'clock, three PM. Then",
        "1999, the 1990s, '90s": "nineteen ninety-nine, the nineteen nineties, nineties",
        "the 21st": "the twenty-first",
        "555-123-4567": "five five five, one two three, four five six seven",
        "20-30 km/h, 5–10%": "twenty to thirty kilometers per hour, five to ten percent",
        "-5°C, 1 kg, 3.14": "minus five degrees Celsius, one kilogram, three point one four",
        "007": "zero zero seven",
        "10,000": "ten thousand",
    },
    "de": {
        "Am 3. Mai 2026 um 14:30 Uhr": "Am dritten Mai zweitausendsechsundzwanzig um vierzehn Uhr dreißig",
        "der 30.11.2026": "der dreißigste November zweitausendsechsundzwanzig",
        "3,50 €, 1 Euro, 3,5 Mio. Euro": "drei Euro fünfzig, ein Euro, drei Komma fünf Millionen Euro",
        "1.234,5 km": "eintausendzweihundertvierunddreißig Komma fünf Kilometer",
        "die 3. Etage, 5 %, 10–20 kg": "die dritte Etage, fünf Prozent, zehn bis zwanzig Kilogramm",
        "im Jahr 1999": "im Jahr neunzehnhundertneunundneunzig",
    },
    "fr": {
        "Le 1er mai 2026 à 14h30": "Le premier mai deux mille vingt-six à quatorze heures trente",
        "3,50 €, 3,5 millions €": "trois euros cinquante, trois virgule cinq millions d'euros",
        "1 234,5 km": "mille deux cent trente-quatre virgule cinq kilomètres",
        "la 2e fois, 1 h, 5 %": "la deuxième fois, une heure, cinq pour cent",
    },
    "es": {
        "El 3 de abril de 2026": "El tres de abril de dos mil veintiséis",
        "3,50 €, 21 kg, 5 %": "tres euros con cincuenta, veintiún kilogramos, cinco por ciento",
        "el 3º, la 2ª": "el tercero, la segunda",
    },
    "ru": {
        "3 мая 2026 года в 14:30": "третьего мая две тысячи двадцать шестого года в четырнадцать тридцать",
        "в 2026 году": "в две тысячи двадцать шестом году",
        "в 1999 г. Потом": "в одна тысяча девятьсот девяносто девятого года. Потом",
        "2 ₽, 1,50 ₽, $5 млн": "два рубля, один рубль пятьдесят копеек, пять миллионов долларов",
        "5 %, 2 мин, 3-й": "пять процентов, две минуты, третий",
    },
    "ja": {
        "2026年11月30日の14:30に3.5%": "二千二十六年十一月三十日の十四時三十分に三点五パーセント",
        "第3回は1,234円": "第三回は千二百三十四円",
        "10~20kg": "十から二十キログラム",
    },
    "zh": {
        "2026年11月30日14:30": "二零二六年十一月三十日十四点三十分",
        "2公里,第2次,5%": "两公里,第二次,百分之五",
        "¥500，$3.5M，２０": "五百元，三百五十万美元，二十",
    },
}


@pytest.mark.parametrize(
    ("language", "text", "words"),
    [
        pytest.param(code, text, words, id=f"{code}-{text}")
        for code, cases in READINGS.items()
        for text, words in cases.items()
    ],
)
def test_reads_as_a_speaker_of_the_language_would(language: str, text: str, words: str) -> None:
    assert normalize(text, language) == words
    assert normalize(words, language) == words


@pytest.mark.parametrize(
    "text",
    [
        "<|speaker:1|>hello",
        "[pause 3 s] yes",
        "(take 2) yes",
        "see https://example.org/2026/11 now",
        "write to a1@example.org",
        "version 1.2.3",
        "1/2 of H100 and B2B",
        "no number here, only words.",
    ],
)
def test_leaves_alone_what_it_does_not_know(text: str) -> None:
    assert normalize(text, "en") == text


def test_a_language_without_rules_keeps_its_digits() -> None:
    assert normalize("Mam 3 koty", "pl") == "Mam 3 koty"
    assert normalize("나는 3개", None) == "나는 3개"
    assert normalize("de 3 Euro", "xx") == "de 3 Euro"


@pytest.mark.parametrize("text", ["12", "3.14", "1 2 3", "10:30", "2026"])
def test_digits_alone_are_never_read_in_chinese(text: str) -> None:
    assert normalize(text).isascii()
    assert detect(text) == "en"


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Das kostet 5 Euro", "de"),
        ("Il est 3 heures", "fr"),
        ("Cuesta 5 pesos", "es"),
        ("The 5 of them", "en"),
        ("Мне 3 года", "ru"),
        ("Мені 3 роки", None),
        ("今日は3時", "ja"),
        ("我有3个", "zh"),
        ("I have 3 北京 tickets", "en"),
        ("Ho 3 figli e un cane", None),
    ],
)
def test_guesses_the_language_by_script_and_small_words(text: str, language: str | None) -> None:
    assert detect(text) == language


def test_a_regional_code_means_its_language() -> None:
    assert normalize("3 km", "de-AT") == normalize("3 km", "DE") == "drei Kilometer"


# Words that mean nothing to any rule, with everything that does around them.
WORDS = ["apple", "Haus", "été", "niño", "слово", "言葉", "词语", "zebra"]
NUMBERS = re.split(
    "[|]",
    "0|00|7|1,5|1.234.567,8|1,000|12:30|99:99|2026-11-30|2026-99-99|31/12/2026|$5|€3.50|5%|-3|1-2|9–5|3rd|5e|2º|3-й|第3"
    "|1/2|H100|1.2.3|5km|20°C|$3.5M|3.|٣|²|+49 170 1234567|2 млн|Nov 31|3. Mai|0 de mayo|5 Mio.|"
    + "|".join(["9" * 20, "9" * 5000, "1" * 400 + ".5"]),
)
MARKS = [" ", ", ", ". ", "-", "/", "(", ")", "[", "]", "<|speaker:0|>", "\n", "\u00a0"]
TEXTS = st.lists(st.sampled_from([*WORDS, *NUMBERS, *MARKS]), max_size=15)
CODES = st.sampled_from([None, *READINGS])


@given(TEXTS, CODES)
@settings(max_examples=150, deadline=None)
def test_never_fails_and_keeps_every_plain_word_in_order(pieces: list[str], language: str | None) -> None:
    text = " ".join(pieces)

    words = normalize(text, language).split()

    rest = iter(words)
    assert all(piece in rest for piece in pieces if piece in WORDS)


@given(st.text(max_size=60), CODES)
@settings(max_examples=100, deadline=None)
def test_any_text_at_all_gives_a_text_with_its_speakable_end(text: str, language: str | None) -> None:
    assert bool(normalize(text, language).strip()) == bool(text.strip())


@given(TEXTS, st.sampled_from([*READINGS]))
@settings(max_examples=80, deadline=None)
def test_what_is_normalised_stays_so(pieces: list[str], language: str) -> None:
    once = normalize(" ".join(pieces), language)

    assert normalize(once, language) == once


@pytest.mark.parametrize("unit", ["1-", "a", "[", "(", "1,", "1 ", "a@", "$1 ", "0:", "1."])
def test_a_long_text_of_anything_takes_time_in_proportion(unit: str) -> None:
    text = "7" + unit * 20_000
    normalize("7", "en")

    start_s = time.process_time()
    normalize(text, "en")

    assert time.process_time() - start_s < 3.0  # quadratic would be minutes
