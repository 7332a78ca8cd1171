import hashlib
import json
import math
import os
import struct
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from slackwater_inference.budget import budget, fit
from slackwater_inference.codec.shapes import codec_weight_shapes
from slackwater_inference.commands.plan import plan
from slackwater_inference.config import CodecConfig, EngineConfig, ModelConfig, TransformerConfig, tiny
from slackwater_inference.model.shapes import weight_shapes
from slackwater_inference.model.weights import seeded_weights
from slackwater_inference.model_runner import ModelRunner
from slackwater_inference.testing.checkpoint import write_json
from slackwater_inference.testing.model import micro

APP = typer.Typer()
APP.command()(plan)


def s2_pro():
    """The published dimensions, engine-api.md 1.1."""
    slow = TransformerConfig(
        vocab_size=155_776,
        n_layer=36,
        dim=2560,
        n_head=32,
        n_local_heads=8,
        head_dim=128,
        intermediate_size=9728,
        max_seq_len=32_768,
        attention_qk_norm=True,
    )
    changes = {"vocab_size": 4096, "n_layer": 4, "max_seq_len": 11, "attention_qk_norm": False}
    return ModelConfig(
        name="s2-pro",
        text_config=slow,
        audio_decoder_config=slow.model_copy(update=changes),
        codec=CodecConfig(),
        num_codebooks=10,
        im_start_id=151_644,
        im_end_id=151_645,
        voice_id=151_673,
        semantic_begin_id=151_678,
        weight_dtype="bfloat16",
    )


def engine(slots=8, length=None):
    return EngineConfig(max_running_requests=slots, max_length=length)


def planned(model, slots=8, length=None, dtype="bfloat16"):
    return budget(model, engine(slots, length), dtype)


def sizes(plan):
    return {item.name: item.size_bytes for item in plan.items}


def write_published_folder(folder):
    """The published folder in sparse files: names, shapes and types are there, no weight is."""
    model = s2_pro()
    offset, header = 0, {}
    shapes = weight_shapes(model.text_config, model.audio_decoder_config, model.num_codebooks)
    for name, shape in shapes.items():
        stop = offset + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)
    os.truncate(folder / "model.safetensors", 8 + len(head) + offset)
    (folder / "codec.pth").touch()
    bias = {"attention_qkv_bias": False, "attention_o_bias": False}
    write_json(
        folder / "config.json",
        {
            "model_type": "fish_qwen3_omni",
            "text_config": model.text_config.model_dump() | bias | {"tie_word_embeddings": True},
            "audio_decoder_config": model.audio_decoder_config.model_dump()
            | bias
            | {"tie_word_embeddings": False, "num_codebooks": 10, "text_dim": 2560},
            "eos_token_id": 151_645,
            "pad_token_id": 151_669,
            "audio_pad_token_id": 151_677,
            "semantic_start_token_id": 151_678,
            "semantic_end_token_id": 155_773,
        },
    )
    special = {"<|im_start|>": 151_644, "<|im_end|>": 151_645, "<|pad|>": 151_669, "<|voice|>": 151_673}
    special |= {"<|audio_pad|>": 151_677} | {f"<|semantic:{code}|>": 151_678 + code for code in range(4096)}
    tokens = [{"content": content, "id": token_id, "special": True} for content, token_id in special.items()]
    write_json(folder / "tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": tokens})


def test_the_published_dimensions_give_the_published_sizes():
    plan = planned(s2_pro(), slots=64, length=1000)

    assert plan.kv_bytes_per_token == 147_456
    assert plan.num_parameters == 4_561_852_416
    assert plan.num_codec_parameters == 391_398_385
    assert plan.num_kv_blocks == 64 * 63
    assert sizes(plan)["KV cache"] == 64 * 63 * 16 * 147_456
    assert sizes(plan)["fast cache"] == 64 * 10 * 4 * 2 * 8 * 128 * 2


def test_names_and_shapes_are_those_of_the_published_files():
    model = s2_pro()

    shapes = weight_shapes(model.text_config, model.audio_decoder_config, model.num_codebooks)
    codec = codec_weight_shapes(model.codec, model.num_codebooks, model.num_semantic)

    # A public inventory of fishaudio/s2-pro @ 1de9996: sha256 over the sorted lines name|type|sizes of its headers.
    lines = sorted(f"{name}|BF16|{'x'.join(map(str, shape))}" for name, shape in shapes.items())
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert digest == "7080b1c9b5d5e95589a1efa18db19616170d7e35664e2e4e7f744bbf7180adad"
    # The codec's file: 535 tensors of 391,430,530 numbers, of which 80 are gains of weight-norm, baked in here.
    assert len(codec) == 535 - 80
    assert sum(math.prod(shape) for shape in codec.values()) == 391_430_530 - 32_145


def test_the_weights_of_the_plan_are_the_bytes_of_the_tensors():
    model = micro(fast_dim=24)

    plan = planned(model, length=512, dtype="float32")

    counted = sum(sizes(plan)[name] for name in ("slow transformer", "fast transformer", "embeddings"))
    assert counted == sum(tensor.nbytes for tensor in seeded_weights(model, 0).values())


def test_the_cache_of_the_plan_is_the_cache_that_the_runner_allocates():
    model, config = micro(), engine(slots=3)
    runner = ModelRunner(
        model,
        seeded_weights(model, 0),
        max_running_requests=3,
        num_kv_blocks=config.kv_blocks(model),
        block_size=config.block_size,
    )

    plan = sizes(budget(model, config, "float32"))

    assert plan["KV cache"] == runner._cache.nbytes
    assert plan["fast cache"] == runner._fast._cache.nbytes


def test_twice_the_slots_and_twice_the_length_take_twice_the_cache():
    one = sizes(planned(s2_pro()))["KV cache"]

    assert sizes(planned(s2_pro(), slots=16))["KV cache"] == 2 * one
    assert sizes(planned(s2_pro(), length=8192))["KV cache"] == 2 * one


def test_what_fits_is_the_most_that_stays_within_the_memory():
    memory_bytes = 80 * 1024**3

    fits = fit(s2_pro(), engine(), "bfloat16", memory_bytes)

    assert planned(s2_pro(), slots=fits.slots).total_bytes + fits.reserve_bytes <= memory_bytes
    assert planned(s2_pro(), slots=fits.slots + 1).total_bytes + fits.reserve_bytes > memory_bytes


def test_a_memory_smaller_than_the_weights_fits_nothing():
    fits = fit(s2_pro(), engine(), "bfloat16", 8 * 1024**3)

    assert (fits.slots, fits.kv_tokens) == (0, 0)


def test_plans_the_published_folder_from_its_headers_alone(tmp_path):
    write_published_folder(tmp_path)

    result = CliRunner().invoke(APP, [str(tmp_path), "--json", "--length", "4096", "--gpu-memory-gib", "141"])

    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    assert data["kv_bytes_per_token"] == 147_456
    assert data["dtype"] == "bfloat16"
    assert data["total_bytes"] == sum(item["size_bytes"] for item in data["items"])
    assert data["fit"]["slots"] > 64


def test_the_table_names_every_item_and_says_what_fits():
    result = CliRunner().invoke(APP, ["tiny", "--slots", "16", "--gpu-memory-gib", "2"], env={"COLUMNS": "200"})

    assert result.exit_code == 0, result.output
    for item in planned(tiny(), slots=16, dtype="float32").items:
        assert f"{item.group}: {item.name}" in result.output
    assert "Fits:" in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        pytest.param(["nowhere"], "must be a folder", id="no folder"),
        pytest.param(["tiny", "--length", "9999"], "length must be at most 4096", id="longer than the model"),
        pytest.param(["tiny", "--slots", "0"], "--slots", id="no slot"),
        pytest.param(["tiny", "--dtype", "int4"], "int4", id="a type that is not loaded"),
    ],
)
def test_refuses_what_cannot_be_planned(arguments, complaint):
    result = CliRunner().invoke(APP, arguments, env={"COLUMNS": "200"})

    assert result.exit_code == 2
    assert complaint in result.output


def test_planning_imports_no_torch():
    code = (
        "import sys, typer\nfrom slackwater_inference.commands.plan import plan\n"
        "plan('tiny', slots=8, length=None, dtype=None, gpu_memory_gib=None, as_json=True)\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
