"""The language of a text, or that it cannot be told."""

import pytest

from slackwater_inference.text.language import language_of, languages_of


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Hello there, this is a recording of my voice.", "en"),
        ("Guten Tag, das hier ist eine Aufnahme meiner Stimme.", "de"),
        ("Bonjour, je m'appelle Marie et voici ma voix.", "fr"),
        ("你好,这是我的声音", "zh"),
        ("안녕하세요", "ko"),
        ("Emma", None),
        ("123", None),
        ("", None),
    ],
)
def test_a_sentence_has_a_language_and_a_name_has_none(text, code):
    assert language_of(text) == code


def test_several_texts_have_each_language_once_in_order():
    texts = ["안녕하세요", "Emma", "Hello there, this is a recording of my voice.", "안녕하세요 여러분"]

    assert languages_of(texts) == ("ko", "en")
