"""Folders that only an adversary or a broken disk would make: each is refused in words, none by a traceback."""

import json
import struct

import pytest

from slackwater_inference.folder import BadCheckpoint, inspect
from slackwater_inference.model.headers import SINGLE
from slackwater_inference.testing.checkpoint import write_checkpoint

MANY_BRACKETS = b"[" * 100_000


def with_header(change):
    """Rewrite the weights' header; the data behind it stay as they are."""

    def spoil(folder):
        stored = (folder / SINGLE).read_bytes()
        (length,) = struct.unpack("<Q", stored[:8])
        header = json.dumps(change(json.loads(stored[8 : 8 + length]))).encode()
        (folder / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + stored[8 + length :])

    return spoil


def with_json(name, change):
    def spoil(folder):
        data = json.loads((folder / name).read_text())
        change(data)
        (folder / name).write_text(json.dumps(data))

    return spoil


def with_bytes(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def laid_over_each_other(header):
    fast = "audio_decoder.layers.0.feed_forward."
    header[f"{fast}w1.weight"]["data_offsets"] = header[f"{fast}w3.weight"]["data_offsets"]
    return header


def with_half_a_row(header):
    header["audio_decoder.norm.weight"]["shape"] = [header["audio_decoder.norm.weight"]["shape"][0] + 0.5]
    return header


def in_front_of_the_file(header):
    begin, stop = header["audio_decoder.norm.weight"]["data_offsets"]
    header["audio_decoder.norm.weight"]["data_offsets"] = [-8, stop - begin - 8]
    return header


def share_an_id(data):
    data["added_tokens"][1]["id"] = data["added_tokens"][2]["id"]  # im_start and im_end


def spell_im_end(data):
    ids = {token["content"]: token["id"] for token in data["added_tokens"]}
    data["model"]["vocab"]["a"] = ids["<|im_end|>"]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        pytest.param(with_bytes("config.json", MANY_BRACKETS), "config.json cannot be read", id="many brackets"),
        pytest.param(
            with_bytes("model.safetensors.index.json", MANY_BRACKETS), "cannot be read", id="many brackets in the index"
        ),
        pytest.param(with_header(lambda header: None), "must have a header that maps names", id="a null header"),
        pytest.param(with_header(list), "must have a header that maps names", id="a header that is a list"),
        pytest.param(with_header(laid_over_each_other), "some overlap", id="two tensors in one place"),
        pytest.param(with_header(with_half_a_row), "an entry that is no tensor", id="half a row"),
        pytest.param(with_header(in_front_of_the_file), "an entry that is no tensor", id="data in front of the data"),
        pytest.param(with_json("tokenizer.json", share_an_id), "an id must be one token's", id="one id for two tokens"),
        pytest.param(with_json("tokenizer.json", spell_im_end), "an id must be one token's", id="a letter is im_end"),
        pytest.param(
            with_json("config.json", lambda data: data["text_config"].update(max_seq_len=10**12)),
            "text_config.max_seq_len: Input should be less than or equal to",
            id="more positions than memory",
        ),
    ],
)
def test_a_planted_folder_is_refused_in_one_line_for_each_fault(tmp_path, spoil, complaint):
    write_checkpoint(tmp_path)
    spoil(tmp_path)

    with pytest.raises(BadCheckpoint) as caught:
        inspect(tmp_path)

    assert complaint in caught.value.faults[0]
    assert not any("\n" in fault for fault in caught.value.faults)


def test_a_fault_of_the_slow_part_is_not_told_again_of_the_fast_part(tmp_path):
    write_checkpoint(tmp_path)
    with_json("config.json", lambda data: data["text_config"].update(head_dim=7))(tmp_path)

    with pytest.raises(BadCheckpoint) as caught:
        inspect(tmp_path)

    assert [fault for fault in caught.value.faults if "multiple of 2" in fault] == [
        "config.json: text_config: head_dim: Input should be a multiple of 2, got 7"
    ]


def test_the_message_is_one_line_that_tells_the_faults_apart(tmp_path):
    with pytest.raises(BadCheckpoint) as caught:
        inspect(tmp_path)

    assert len(caught.value.faults) >= 3
    assert str(caught.value) == f"{tmp_path} is not a usable checkpoint: {'; '.join(caught.value.faults)}"
