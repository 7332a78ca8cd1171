"""From text to token ids, and which ids mean more than text.

Owns the two tokenizers (bytes for the embedded voice, a Hugging Face `tokenizer.json` for a checkpoint) and the
special tokens' names.  Does not own the prompt's layout.  Called by `checkpoint` (which reads files through it)
and `prompt`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
VOICE = "<|voice|>"
PAD = "<|pad|>"
AUDIO_PAD = "<|audio_pad|>"


def semantic_token(code: int) -> str:
    """The name of semantic code `code`."""
    return f"<|semantic:{code}|>"


class Tokenizer(Protocol):
    """Text to ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, none of them special, whatever the text spells; nothing is added before or behind."""


class ByteTokenizer:
    """The embedded vocabulary: a text's UTF-8 bytes.  Special ids are all above 255."""

    def encode(self, text: str) -> list[int]:
        """One id a byte."""
        return list(text.encode())


class BpeTokenizer:
    """A `tokenizer.json` without its added tokens, so that no text can spell one of them.

    The published tokenizer reads `<|im_end|>` in a text as the token that ends a turn; here it is the letters.
    `<|speaker:0|>` is not an added token in S2-Pro, so it has the published ids.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        """data: the parsed file.  Raises ValueError if `tokenizers` cannot read it or it makes special ids."""
        # Here, since the embedded voice needs no tokenizers and an engine should start light.
        from tokenizers import Tokenizer as Bpe

        plain = {**data, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        special = {token["id"] for token in data.get("added_tokens", [])}
        try:
            self._bpe = Bpe.from_str(json.dumps(plain))
        except Exception as error:  # tokenizers raises no narrower one, whatever the fault of the file
            raise ValueError(f"tokenizers cannot read it: {error}") from error
        spelt = {
            token["content"]
            for token in data.get("added_tokens", [])
            if not special.isdisjoint(self.encode(token["content"]))
        }
        if spelt:
            raise ValueError(f"its model spells the special tokens {', '.join(sorted(spelt)[:4])} by itself")

    def encode(self, text: str) -> list[int]:
        """The text's BPE ids."""
        return list(self._bpe.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The ids that a prompt and a stop rule are made of.  Semantic code c has the id semantic_begin + c."""

    im_start: int
    im_end: int
    voice: int
    pad: int
    audio_pad: int
    semantic_begin: int


def special_ids(data: Mapping[str, Any], num_semantic: int) -> SpecialIds:
    """Read the ids from a parsed `tokenizer.json`.

    Raises ValueError naming each token that is absent, two that share an id, or the first semantic one that breaks
    the row.
    """
    ids = {token["content"]: int(token["id"]) for token in data.get("added_tokens", [])}
    missing = [token for token in (IM_START, IM_END, VOICE, PAD, AUDIO_PAD, semantic_token(0)) if token not in ids]
    if missing:
        raise ValueError(f"added_tokens must have {', '.join(missing)}; is this the tokenizer of an S2 voice?")
    tokens = {**data["model"]["vocab"], **ids}  # an added token may stand in the vocabulary, too
    owners = {token_id: token for token, token_id in tokens.items()}
    for token, token_id in tokens.items():
        if owners[token_id] != token:  # a text that has the one would say the other
            raise ValueError(f"an id must be one token's, {token_id} is that of {token} and of {owners[token_id]}")
    begin = ids[semantic_token(0)]
    for code in range(num_semantic):
        token = semantic_token(code)
        if ids.get(token) != begin + code:
            came = f"id {ids[token]}" if token in ids else "none"
            raise ValueError(f"semantic ids must follow each other: {token} must be {begin + code}, got {came}")
    return SpecialIds(ids[IM_START], ids[IM_END], ids[VOICE], ids[PAD], ids[AUDIO_PAD], begin)
