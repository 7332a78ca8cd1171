"""Compiles MXFP8 attention without a GPU; prints, as JSON, what its machine code has, by target and name.

A process of its own, since another test's process may have loaded Triton as an interpreter.
"""

import json
import re
import sys
from importlib import import_module
from typing import Any

from machine_code import Case, build, counted

from slackwater_kernels.mx_attention import DECODE, TILES

TARGETS = {"sm_120a": 120, "sm_90a": 90}
WIDENED = ("decode page 64", "extend page 64")  # of what is compiled for sm_90a, where tests run it
COUNTED = {
    "block_scaled": r"\bQMMA\.SF\.\S*E8\b",
    "plain_fp8": r"\bQMMA\.(?!SF)",
    "widened": r"\bH[GM]MMA\b|\bHMMA\.",
    "async_copies": r"\bLDGSTS\.",
    "byte_reads": r"\bLDS\.[US]8\b",
    "turned_reads": r"\bLDSM\.16\.MT88",
    "matrix_reads": r"\bLDSM\.",
    "spilled": r"\b(?:LDL|STL)\b",
    "waits": r"\bACQBULK\b",
    "lets_next_start": r"\bPREEXIT\b",
}


def main() -> None:
    kernels = import_module("slackwater_kernels.mx_attention_source")
    found: dict[str, dict[str, dict[str, int]]] = {}
    for target, capability in TARGETS.items():
        found[target] = {}
        for name, case in cases(kernels).items():
            if target == "sm_90a" and name not in WIDENED:
                continue
            built = build(case, capability)
            found[target][name] = counted(built, COUNTED, target) | {
                "block_scaled_ptx": len(re.findall(r"^\s*mma\.\S*block_scale", built.ptx, re.MULTILINE)),
                "copies_ahead": max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", built.ptx)), default=0),
                "subnormals_lost": built.ptx.count(".ftz"),
            }
    sys.stdout.write(json.dumps(found))


STORED = {"k_ptr": "*fp8e4nv", "k_scales_ptr": "*i32", "v_ptr": "*i16", "v_scales_ptr": "*fp32"}
WRITTEN = {"keys_ptr": "*u8", "key_scales_ptr": "*u8", "values_ptr": "*u8", "value_scales_ptr": "*fp32"}
BATCH = {"T": "i32", "num_rows": "i32", "max_new": "i32"}
SIZES = {"max_length": "i32", "num_pages": "i32", "width": "i32"}


def cases(kernels: Any) -> dict[str, Case]:
    """By name."""
    made: dict[str, Case] = {}
    for page in (16, 64):
        made[f"decode page {page}"] = decode(kernels, page)
        made[f"extend page {page}"] = tiles(kernels, page, paged=True)
    made["prefill"] = tiles(kernels, TILES.block, paged=False)
    source = {"k_ptr": "*bf16", "v_ptr": "*bf16"} | WRITTEN
    rows = {"table_ptr": "*i32", "lengths_ptr": "*i32", "starts_ptr": "*i32"} | BATCH | SIZES
    heads = {"HEADS": 8, "SPAN": 8, "PDL": True}
    for name, ragged, tokens in (("append", False, 1), ("append tokens", True, 8)):
        constants = heads | {"TOKENS": tokens, "PAGE": 64, "RAGGED": ragged}
        made[name] = kernels.append_mx_kernel, source | rows, constants, {"num_warps": 4}
    made["quantise"] = kernels.quantise_tokens_kernel, source | {"T": "i32"}, heads | {"TOKENS": 8}, {"num_warps": 4}
    return made


def decode(kernels: Any, page: int) -> Case:
    signature = {"q_ptr": "*bf16"} | STORED | {"table_ptr": "*i32", "lengths_ptr": "*i32", "out_ptr": "*bf16"}
    signature |= {"partials_ptr": "*fp32", "stats_ptr": "*fp32", "counters_ptr": "*i32", "scale": "fp32"} | SIZES
    constants: dict[str, Any] = {"HEADS": 8, "SHARERS": 4, "ROWS": 4, "PAGE": page, "BLOCK": DECODE.block}
    constants |= {"CHUNK": DECODE.chunk, "STAGES": DECODE.stages, "PDL": True}
    options = {"num_warps": DECODE.warps, "num_stages": DECODE.stages, "maxnreg": DECODE.registers}
    return kernels.decode_mx_kernel, signature, constants, options


def tiles(kernels: Any, page: int, *, paged: bool) -> Case:
    signature = {"q_ptr": "*bf16"} | STORED | {"table_ptr": "*i32", "lengths_ptr": "*i32", "starts_ptr": "*i32"}
    signature |= {"out_ptr": "*bf16", "scale": "fp32"} | BATCH | SIZES
    constants: dict[str, Any] = {"HEADS": 8, "SHARERS": 4, "ROWS": TILES.rows, "PAGE": page, "BLOCK": TILES.block}
    constants |= {"STAGES": TILES.stages, "PAGED": paged, "PDL": True}
    return kernels.tiles_mx_kernel, signature, constants, {"num_warps": TILES.warps, "num_stages": TILES.stages}


if __name__ == "__main__":
    main()
