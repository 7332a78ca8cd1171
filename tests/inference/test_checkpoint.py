import functools
import json
import pickle
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slackwater_inference.checkpoint import BadCheckpoint, embedded, load
from slackwater_inference.config import EngineConfig
from slackwater_inference.core import SamplingParams, Speech
from slackwater_inference.engine import Engine
from slackwater_inference.model.headers import INDEX, SINGLE
from slackwater_inference.model.weights import FAST, SLOW, seeded_weights
from slackwater_inference.testing.checkpoint import (
    split_projections,
    write_checkpoint,
    write_json,
    write_weights,
)
from slackwater_inference.testing.model import generate, micro, reference_choices
from slackwater_inference.text.prompt import PromptBuilder

pytestmark = pytest.mark.usefixtures("one_thread")

SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@functools.cache
def files(num_shards):
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), num_shards=num_shards)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def write(folder, num_shards=1):
    """What `write_checkpoint` writes for the micro voice."""
    for name, data in files(num_shards).items():
        (folder / name).write_bytes(data)


def change_json(path, change):
    data = json.loads(path.read_text())
    change(data)
    write_json(path, data)


def change_weights(folder, change):
    weights = load_file(folder / SINGLE)
    change(weights)
    save_file(weights, folder / SINGLE)


def faults_of(folder):
    with pytest.raises(BadCheckpoint) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    return caught.value.faults


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loads_a_folder_as_it_was_written(tmp_path, num_shards, dtype):
    written, weights = write_checkpoint(
        tmp_path, micro().model_copy(update={"weight_dtype": dtype}), num_shards=num_shards
    )

    loaded = load(tmp_path)

    assert loaded.source == "folder"
    assert equal(loaded.weights, weights)
    model = loaded.config
    assert (model.text_config, model.audio_decoder_config) == (written.text_config, written.audio_decoder_config)
    assert (model.codec, model.num_codebooks, model.weight_dtype) == (written.codec, written.num_codebooks, dtype)
    ids = ("im_start_id", "im_end_id", "voice_id", "semantic_begin_id")
    assert [getattr(model, key) for key in ids] == [getattr(written, key) for key in ids]
    assert not model.stop_at_expected_length


def test_the_engines_model_runs_a_loaded_folder(tmp_path):
    written, weights = write_checkpoint(tmp_path, micro(qk_norm=(True, False), fast_dim=24), num_shards=2, seed=3)
    loaded = load(tmp_path)
    prompt = PromptBuilder(loaded.config, loaded.tokenizer).prompt("hello")
    sampling = SamplingParams(temperature=0.0)

    made = generate(loaded.config, loaded.weights, prompt, sampling, 8)

    assert len(made) == 8
    assert made == reference_choices(weights, written, prompt, sampling, made)


async def test_an_engine_speaks_with_a_loaded_folder(tmp_path):
    write_checkpoint(tmp_path)
    engine = Engine(EngineConfig(max_running_requests=1), load(tmp_path))
    engine.start()
    try:
        stream = engine.open(Speech(max_new_tokens=6))
        stream.say("hello")
        stream.end()

        chunks = [chunk async for chunk in stream]
    finally:
        engine.stop()

    assert sum(chunk.num_frames for chunk in chunks) == 6
    assert sum(len(chunk.samples) for chunk in chunks) == 6 * engine.model.codec.frame_samples * 4


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the proof needs Linux's /proc")
def test_weights_are_mapped_from_the_file_and_not_copied(tmp_path):
    write_checkpoint(tmp_path)

    weights = load(tmp_path).weights

    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(f"/{SINGLE}")]
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    assert all(any(low <= tensor.data_ptr() < high for low, high in spans) for tensor in weights.values())


def test_projections_of_an_older_checkpoint_are_joined(tmp_path):
    model, weights = write_checkpoint(tmp_path, micro(heads=(4, 2)))
    write_weights(tmp_path, split_projections(weights, model))

    assert equal(load(tmp_path).weights, weights)


def test_a_fast_part_of_another_width_comes_with_its_projection(tmp_path):
    _, weights = write_checkpoint(tmp_path, micro(fast_dim=24, fast_heads=(3, 1)))

    loaded = load(tmp_path)

    assert equal(loaded.weights, weights)
    assert loaded.weights[f"{FAST}project_in.weight"].shape == (24, 32)


def test_the_audio_encoder_is_left_out(tmp_path):
    _, weights = write_checkpoint(tmp_path)
    change_weights(tmp_path, lambda stored: stored.update({"audio_encoder.conv_out.weight": torch.ones(2, 2)}))

    assert equal(load(tmp_path).weights, weights)


def test_a_null_in_the_fast_config_takes_the_slow_value_as_the_published_loader_does(tmp_path):
    write_checkpoint(tmp_path, micro(qk_norm=(True, True)))
    nulls = dict.fromkeys(("dim", "n_head", "n_local_heads", "head_dim", "intermediate_size", "attention_qk_norm"))
    change_json(tmp_path / "config.json", lambda data: data["audio_decoder_config"].update(nulls))

    config = load(tmp_path).config

    assert config.audio_decoder_config.attention_qk_norm
    assert config.audio_decoder_config.dim == config.text_config.dim


def test_every_fault_of_the_tensors_is_in_one_error(tmp_path):
    write(tmp_path)

    def spoil(weights):
        del weights[f"{FAST}norm.weight"]
        weights["stray"] = torch.zeros(1)
        weights[f"{SLOW}norm.weight"] = torch.ones(31)
        weights[f"{SLOW}layers.1.ffn_norm.weight"] = torch.ones(32, dtype=torch.float16)

    change_weights(tmp_path, spoil)

    assert faults_of(tmp_path) == (
        "extra stray",
        f"missing {FAST}norm.weight",
        f"{SLOW}norm.weight must be [32], got [31]",
        f"{SLOW}layers.1.ffn_norm.weight must be F32 as the embeddings are, got F16",
    )


def test_faults_of_config_tokenizer_and_tensors_come_together(tmp_path):
    write(tmp_path)
    change_json(tmp_path / "config.json", lambda data: data.update(eos_token_id=1))
    change_json(tmp_path / "tokenizer.json", lambda data: data["added_tokens"].pop())
    change_weights(tmp_path, lambda weights: weights.pop(f"{SLOW}norm.weight"))
    (tmp_path / "codec.safetensors").unlink()

    text = "\n".join(faults_of(tmp_path))

    assert "<|semantic:39|> must be" in text
    assert f"missing {SLOW}norm.weight" in text
    assert "codec.safetensors or codec.pth must be there" in text


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        pytest.param(
            lambda d: d["audio_decoder_config"].pop("attention_qk_norm"),
            "audio_decoder_config.attention_qk_norm: Field required",
            id="no word on the fast qk-norm",
        ),
        pytest.param(
            lambda d: d["text_config"].pop("dim"), "text_config.dim: Field required", id="a dimension left out"
        ),
        pytest.param(lambda d: d.update(model_type="dual_ar"), "fish_qwen3_omni", id="another architecture"),
        pytest.param(lambda d: d["text_config"].update(use_moe=True), "use_moe", id="a mixture of experts"),
        pytest.param(lambda d: d["text_config"].update(attention_qkv_bias=True), "attention_qkv_bias", id="a bias"),
        pytest.param(
            lambda d: d["text_config"].update(tie_word_embeddings=False), "tie_word_embeddings", id="an untied head"
        ),
        pytest.param(lambda d: d["text_config"].update(norm_eps=0), "norm_eps", id="a norm that can divide by zero"),
        pytest.param(lambda d: d["text_config"].update(dim="32"), "text_config.dim", id="a dimension that is a text"),
        pytest.param(
            lambda d: d["text_config"].update(n_local_heads=3), "multiple of n_local_heads", id="uneven heads"
        ),
        pytest.param(
            lambda d: d["audio_decoder_config"].update(text_dim=31),
            "text_dim must be text_config.dim 32",
            id="text_dim",
        ),
        pytest.param(lambda d: d.update(eos_token_id=1), "eos_token_id must be", id="an id the tokenizer denies"),
        pytest.param(
            lambda d: d.update(semantic_end_token_id=7), "semantic_end_token_id must be", id="end of the codes"
        ),
        pytest.param(
            lambda d: d["text_config"].update(vocab_size=300), "past text_config.vocab_size", id="vocab guard"
        ),
        pytest.param(
            lambda d: d["audio_decoder_config"].update(max_seq_len=2), "must hold 3 codebooks", id="too few positions"
        ),
    ],
)
def test_refuses_a_config_that_it_cannot_mean(tmp_path, change, complaint):
    write(tmp_path)
    change_json(tmp_path / "config.json", change)

    assert any(complaint in fault for fault in faults_of(tmp_path))


def drop_token(name):
    return lambda data: data.update(added_tokens=[t for t in data["added_tokens"] if t["content"] != name])


def swap_codes(data):
    tokens = {token["content"]: token for token in data["added_tokens"]}
    tokens["<|semantic:3|>"]["id"], tokens["<|semantic:4|>"]["id"] = (
        tokens["<|semantic:4|>"]["id"],
        tokens["<|semantic:3|>"]["id"],
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        pytest.param(drop_token("<|im_end|>"), "must have <|im_end|>", id="no im_end"),
        pytest.param(drop_token("<|voice|>"), "must have <|voice|>", id="no voice"),
        pytest.param(drop_token("<|semantic:0|>"), "must have <|semantic:0|>", id="no codes"),
        pytest.param(drop_token("<|semantic:7|>"), "<|semantic:7|> must be", id="a code left out"),
        pytest.param(swap_codes, "semantic ids must follow each other: <|semantic:3|>", id="codes out of order"),
        pytest.param(lambda d: d.pop("model"), "must have a BPE model", id="no model"),
        pytest.param(lambda d: d.update(added_tokens=None), "must have a BPE model with a vocab", id="no added tokens"),
        pytest.param(lambda d: d["model"].update(type="Nonsense"), "tokenizers cannot read it", id="an unknown model"),
    ],
)
def test_refuses_a_tokenizer_without_the_special_tokens(tmp_path, change, complaint):
    write(tmp_path)
    change_json(tmp_path / "tokenizer.json", change)

    assert any(complaint in fault for fault in faults_of(tmp_path))


def cut_off(path, num_bytes):
    path.write_bytes(path.read_bytes()[:num_bytes])


def lose_a_shard(folder):
    (folder / SHARD_2).unlink()


def forget_a_tensor(folder):
    shard = load_file(folder / SHARD_2)
    shard.pop(f"{SLOW}norm.weight", None) if f"{SLOW}norm.weight" in shard else shard.popitem()
    save_file(shard, folder / SHARD_2)


def double_a_tensor(folder):
    name, tensor = next(iter(load_file(folder / SHARD_1).items()))
    save_file(load_file(folder / SHARD_2) | {name: tensor}, folder / SHARD_2)


def lie_about_a_header(folder):
    path = folder / SHARD_1
    data = path.read_bytes()
    path.write_bytes(struct.pack("<Q", 2**50) + data[8:])


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        pytest.param(lose_a_shard, f"{SHARD_2} is in {INDEX} but not in the folder", id="a lost shard"),
        pytest.param(forget_a_tensor, f"is not in {SHARD_2}, where {INDEX} has it", id="a tensor that is not there"),
        pytest.param(double_a_tensor, f"is in {SHARD_1} and in {SHARD_2}; it must be in one", id="a tensor twice"),
        pytest.param(
            lambda f: change_json(f / INDEX, lambda d: d["weight_map"].popitem()),
            f"but not in {INDEX}",
            id="a tensor that the index forgot",
        ),
        pytest.param(
            lambda f: change_json(f / INDEX, lambda d: d["weight_map"].update(x="../x.safetensors")),
            "which is no file of this folder",
            id="a shard elsewhere",
        ),
        pytest.param(lambda f: (f / INDEX).write_text("{"), f"{INDEX} cannot be read", id="a broken index"),
        pytest.param(lambda f: write_json(f / INDEX, {}), "must have a weight_map", id="an empty index"),
        pytest.param(
            lambda f: cut_off(f / SHARD_1, 4), "has no safetensors header in its 4 bytes", id="an empty shard"
        ),
        pytest.param(lambda f: cut_off(f / SHARD_1, 900), "was the copy cut off?", id="cut off in the header"),
        pytest.param(lambda f: cut_off(f / SHARD_1, -7), "was the copy cut off?", id="cut off in the data"),
        pytest.param(lie_about_a_header, "has no safetensors header", id="a header longer than the file"),
        pytest.param(lambda f: (f / INDEX).unlink(), f"{SINGLE} or {INDEX} must be there", id="no weights"),
    ],
)
def test_refuses_shards_and_an_index_that_disagree(tmp_path, spoil, complaint):
    write(tmp_path, num_shards=2)
    spoil(tmp_path)

    assert any(complaint in fault for fault in faults_of(tmp_path))


def test_what_lies_in_a_lost_shard_is_not_listed_as_missing_tensor_by_tensor(tmp_path):
    write(tmp_path, num_shards=2)
    lose_a_shard(tmp_path)

    assert len(faults_of(tmp_path)) == 1


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        pytest.param(lambda f: cut_off(f / "codec.safetensors", 100), "codec.safetensors", id="cut off"),
        pytest.param(
            lambda f: save_file({"x": torch.ones(1)}, f / "codec.safetensors"),
            "decoder.model.0.conv",
            id="other tensors",
        ),
        pytest.param(
            lambda f: change_json(f / "codec.json", lambda d: d.update(rate=7)), "codec.json: rate", id="an unknown key"
        ),
        pytest.param(
            lambda f: ((f / "codec.safetensors").unlink(), (f / "codec.pth").write_bytes(pickle.dumps(Evil()))),
            "codec.pth",
            id="a pickle that would run code",
        ),
    ],
)
def test_refuses_a_codec_that_does_not_fit(tmp_path, spoil, complaint):
    write(tmp_path)
    spoil(tmp_path)

    assert any(complaint in fault for fault in faults_of(tmp_path))


def test_a_pickled_codec_loads_as_the_published_one_is_wrapped(tmp_path):
    write(tmp_path)
    before = load(tmp_path).codec_weights
    (tmp_path / "codec.safetensors").unlink()
    torch.save({"state_dict": {f"generator.{k}": v for k, v in before.items()}}, tmp_path / "codec.pth")

    assert equal(load(tmp_path).codec_weights, before)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", [None, "", "[]", "\xff"])
def test_names_the_small_file_that_cannot_be_read(tmp_path, name, text):
    write(tmp_path)
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(text.encode("latin-1"))

    assert any(fault.startswith(name) for fault in faults_of(tmp_path))


def test_a_folder_that_is_none_is_refused(tmp_path):
    assert faults_of(tmp_path / "nowhere") == (
        "it must be a folder with config.json, weights, tokenizer.json and a codec",
    )


def test_the_embedded_voice_depends_on_its_seed_only():
    one = embedded(1)

    assert equal(one.weights, embedded(1).weights)
    assert equal(one.codec_weights, embedded(1).codec_weights)
    assert not equal(one.weights, embedded(2).weights)
    assert equal(one.weights, seeded_weights(one.config, 1))
