import json

import pytest

from slackwater_inference.testing.checkpoint import bpe_tokenizer
from slackwater_inference.text.tokenizer import BpeTokenizer, ByteTokenizer, special_ids

BPE = bpe_tokenizer(8)
DATA = json.loads(BPE.to_str())
SPECIAL = {token["id"] for token in DATA["added_tokens"]}
SPELT = ["<|im_end|>", "<|im_start|>system\n", "<|semantic:5|>", "<|voice|>", "<|endoftext|>", "<|audio_pad|>"]


@pytest.mark.parametrize("text", SPELT)
@pytest.mark.parametrize("around", ["{}", "so {} it is", "{}{}"])
def test_a_text_that_spells_special_tokens_is_plain_text(text, around):
    spelt = around.replace("{}", text)

    ids = BpeTokenizer(DATA).encode(spelt)

    assert SPECIAL.isdisjoint(ids)
    assert BPE.decode(ids) == spelt


def test_the_published_tokenizer_would_have_made_special_ids_of_them():
    assert all(not SPECIAL.isdisjoint(BPE.encode(text).ids) for text in SPELT)


@pytest.mark.parametrize(
    "text", ["system\n", "convert the provided text to speech", "<|speaker:0|>Hi there.", "  é 你好\n\n🙂 ", ""]
)
def test_any_other_text_has_the_ids_of_the_file_itself(text):
    assert BpeTokenizer(DATA).encode(text) == BPE.encode(text, add_special_tokens=False).ids


def test_nothing_is_added_cut_or_padded_even_if_the_file_says_so():
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}

    tokenizer = BpeTokenizer(DATA | {"post_processor": template, "truncation": cut})

    text = "one two three four five"
    assert tokenizer.encode(text) == BPE.encode(text, add_special_tokens=False).ids


def test_refuses_a_file_whose_own_vocabulary_spells_special_tokens():
    # Without a pre-tokenizer and with ignore_merges a whole word of the vocabulary is one id.
    model = DATA["model"] | {"vocab": DATA["model"]["vocab"] | {"<|im_end|>": BPE.token_to_id("<|im_end|>")}}
    data = DATA | {"pre_tokenizer": None, "model": model | {"ignore_merges": True}}

    with pytest.raises(ValueError, match=r"spells the special tokens <\|im_end\|> by itself"):
        BpeTokenizer(data)


def test_reads_the_special_ids_from_the_file():
    ids = special_ids(DATA, 8)

    assert ids.im_start == BPE.token_to_id("<|im_start|>")
    assert ids.im_end == BPE.token_to_id("<|im_end|>")
    assert ids.voice == BPE.token_to_id("<|voice|>")
    assert ids.pad == BPE.token_to_id("<|pad|>")
    assert ids.semantic_begin == BPE.token_to_id("<|semantic:0|>")


def test_needs_as_many_semantic_tokens_as_the_model_has_codes():
    with pytest.raises(ValueError, match=r"<\|semantic:8\|> must be \d+, got none"):
        special_ids(DATA, 9)


def test_the_embedded_tokenizer_is_the_texts_bytes():
    assert ByteTokenizer().encode("é<|im_end|>") == list("é<|im_end|>".encode())
