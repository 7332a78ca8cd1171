"""The part planner: where it cuts, that it loses nothing, that the way the text came does not matter."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater_inference.text.parts import PartPlanner


def planned(text: str, max_bytes: int = 300, min_bytes: int = 50) -> list[str]:
    planner = PartPlanner(max_bytes, min_bytes)
    return planner.feed(text) + planner.flush()


def without_space(text: str) -> str:
    return "".join(text.split())


# What texts are made of, so that random ones hit the rules.
PIECES = [
    *"ab.,!?…。，！？ \n\t\u00a0\"'”」)[]<|>:-—é日本語ไ",
    "Hello world", "word ", "3.14", " 12. ", "Dr. ", "e.g. ", "\n\n", "<|speaker:0|>", "<|speaker:12|>", "<|spea",
    "[laugh]", "[a. b! c]", "[" + "y" * 60, "e\u0301", "👨\u200d👩\u200d👧", "🇩🇪🇫🇷", "你好。",
    "\x00", "\u200b", "x" * 40, "日" * 30,
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


def test_first_sentence_goes_out_at_once_and_later_ones_wait_for_the_least_length() -> None:
    planner = PartPlanner(300, 50)

    first = planner.feed("Hi. Yes. ")
    later = planner.feed("This one makes both of them together long enough. So")

    assert first == ["Hi."]
    assert later == ["Yes. This one makes both of them together long enough."]
    assert planner.flush() == ["So"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        pytest.param("It is 3.14 now. Then", ["It is 3.14 now.", "Then"], id="decimal"),
        pytest.param("Dr. Who is here. Then", ["Dr. Who is here.", "Then"], id="title"),
        pytest.param("Fruit, e.g. a pear. Then", ["Fruit, e.g. a pear.", "Then"], id="inner-dots"),
        pytest.param("By J. S. Bach. Then", ["By J. S. Bach.", "Then"], id="initials"),
        pytest.param("Am 3. Mai war es. Dann", ["Am 3. Mai war es.", "Dann"], id="ordinal"),
        pytest.param('"Stop!" he said. Then', ['"Stop!" he said.', "Then"], id="speech-goes-on"),
        pytest.param('He said "no." Then', ['He said "no."', "Then"], id="speech-ends"),
        pytest.param("你好。今天很好！", ["你好。", "今天很好！"], id="chinese"),
        pytest.param("「そうです。」と言う。はい", ["「そうです。」", "と言う。", "はい"], id="japanese-quotes"),
        pytest.param("नमस्ते।ठीक है", ["नमस्ते।", "ठीक है"], id="danda"),
        pytest.param("A title\n\nThe text", ["A title", "The text"], id="blank-line"),
        pytest.param("one line\nthe next", ["one line\nthe next"], id="wrapped-line"),
        pytest.param("Oh [wow. really! yes] fine. Then", ["Oh [wow. really! yes] fine.", "Then"], id="marks-in-a-cue"),
        pytest.param("See a.example.org now. Then", ["See a.example.org now.", "Then"], id="address"),
    ],
)
def test_cuts_where_a_sentence_ends(text: str, parts: list[str]) -> None:
    assert planned(text, min_bytes=0) == parts


@pytest.mark.parametrize("text", ["", "  \n\t ", "\u200b\ufeff", "\x00\x07 \n", "<|speaker:0|> \n <|speaker:1|>"])
def test_nothing_to_say_makes_no_part(text: str) -> None:
    assert planned(text) == []


def test_every_one_of_1200_words_is_in_a_part() -> None:
    words = [f"word{number}" for number in range(1200)]

    parts = planned(" ".join(words))

    assert " ".join(parts).split() == words
    assert max(len(part.encode()) for part in parts) <= 300


def test_prefers_a_clause_over_a_word_and_a_word_over_a_character() -> None:
    clause = "x" * 60 + ", " + "y " * 40
    words = "z" * 60 + " " + "z" * 60
    characters = "z" * 150

    assert planned(clause, max_bytes=100)[0] == "x" * 60 + ","
    assert planned(words, max_bytes=100)[0] == "z" * 60
    assert planned(characters, max_bytes=100) == ["z" * 100, "z" * 50]


def test_a_cut_inside_a_line_of_chinese_keeps_numbers_and_marks_whole() -> None:
    parts = planned("汉" * 15 + "2026" + "字" * 20, max_bytes=48, min_bytes=10)

    assert parts[0] == "汉" * 15
    assert parts[1].startswith("2026")


def test_a_family_emoji_and_an_accent_are_not_torn() -> None:
    family = "👨\u200d👩\u200d👧"

    parts = planned("日" * 12 + family + "e\u0301" * 20, max_bytes=40, min_bytes=10)

    assert any(family in part for part in parts)
    assert not any(part.startswith("\u0301") for part in parts)


def test_turns_of_speakers_make_parts_that_carry_their_tag() -> None:
    text = "<|speaker:0|>Hello there. How are you?<|speaker:1|> " + "I am very well today, thank you. " * 3

    parts = planned(text, min_bytes=40)

    assert parts == [
        "<|speaker:0|>Hello there.",
        "<|speaker:0|>How are you?",
        "<|speaker:1|>I am very well today, thank you. I am very well today, thank you.",
        "<|speaker:1|>I am very well today, thank you.",
    ]


def test_a_cue_longer_than_a_part_goes_whole() -> None:
    cue = "[" + "very " * 20 + "slow]"

    parts = planned(f"Well, {cue} yes it is.", max_bytes=60, min_bytes=10)

    assert cue in parts
    assert without_space("".join(parts)) == without_space(f"Well, {cue} yes it is.")


@given(TEXTS, st.integers(32, 90), st.integers(0, 32))
@settings(max_examples=200, deadline=None)
def test_parts_hold_the_whole_text_within_the_bounds(text: str, max_bytes: int, min_bytes: int) -> None:
    text = text.replace("<|speaker:0|>", "").replace("<|speaker:12|>", "")  # repeated in front of parts

    parts = planned(text, max_bytes, min_bytes)

    control = str.maketrans("", "", "\x00\u200b")
    assert without_space("".join(parts).translate(control)) == without_space(text.translate(control))
    assert all(len(part.encode()) <= max_bytes or "[" in part for part in parts)
    assert all(part == part.strip() and part for part in parts)


@given(st.data(), TEXTS, st.integers(32, 90), st.integers(0, 32))
@settings(max_examples=200, deadline=None)
def test_how_the_text_came_in_does_not_matter(data: st.DataObject, text: str, max_bytes: int, min_bytes: int) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    planner = PartPlanner(max_bytes, min_bytes)

    parts: list[str] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += planner.feed(text[start:end])
    parts += planner.flush()

    assert parts == planned(text, max_bytes, min_bytes)


def test_a_tag_that_is_still_coming_does_not_force_a_cut() -> None:
    text = "a" * 15 + " " + "b" * 16 + " <|speaker:0|>c"
    planner = PartPlanner(32, 0)

    parts = planner.feed(text[:36]) + planner.feed(text[36:]) + planner.flush()

    assert parts == planned(text, 32, 0) == ["a" * 15 + " " + "b" * 16, "<|speaker:0|>c"]


def test_after_a_flush_the_first_sentence_is_quick_again() -> None:
    planner = PartPlanner(300, 50)
    planner.feed("One. ")
    planner.flush()

    assert planner.feed("Two. ") == ["Two."]


@pytest.mark.parametrize(("max_bytes", "min_bytes"), [(31, 0), (100, 101), (100, -1)])
def test_refuses_bounds_that_cannot_hold(max_bytes: int, min_bytes: int) -> None:
    with pytest.raises(ValueError, match="min_bytes <= max_bytes"):
        PartPlanner(max_bytes, min_bytes)


def test_a_text_of_nothing_speakable_takes_no_time() -> None:
    # Zero-width spaces once went one by one, each for as long as a part: 18 kB of them took 40 s.
    planner = PartPlanner(300, 50)
    began_s = time.process_time()

    parts = [*planner.feed("\u200b" * 6_000 + "Hello."), *planner.flush()]

    assert time.process_time() - began_s < 5
    assert [part.strip("\u200b") for part in parts] == ["Hello."]
