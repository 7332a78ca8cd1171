"""Compiles attention over values by channel for sm_90a without a GPU; prints, as JSON, what its machine code has.

A process of its own, since another test's process may have loaded Triton as an interpreter.
"""

import json
import sys
from importlib import import_module
from typing import Any

from compiled_attention import CODES, SCALES
from machine_code import Case, build, counted

from slackwater_kernels.plan import CHANNEL_ATTENTION, AttentionLaunch

COUNTED = {
    "fp8_tensor_core": r"\bQGMMA\.",
    "other_tensor_core": r"\bH(?:G)?MMA\.",
    "async_copies": r"\bLDGSTS\.",
    "byte_reads": r"\bLDS\.[US]8\b",
    "spilled": r"\b(?:LDL|STL)\b",
    "waits": r"\bACQBULK\b",
    "lets_next_start": r"\bPREEXIT\b",
}


def main(*, every: bool) -> None:
    kernels = import_module("slackwater_kernels.channel_attention_source")
    chosen = CHANNEL_ATTENTION if every else CHANNEL_ATTENTION[:1]
    cases = {f"page {page}, {launch}": decode(kernels, page, launch) for launch in chosen for page in (16, 64, 128)}
    found = {name: counted(build(case, 90), COUNTED) for name, case in cases.items()}
    sys.stdout.write(json.dumps(found))


def decode(kernels: Any, page: int, launch: AttentionLaunch) -> Case:
    keys = CODES["fp8"][0]
    signature = {"q_ptr": "*bf16", "k_ptr": keys, "v_ptr": keys} | SCALES
    signature |= {"table_ptr": "*i32", "lengths_ptr": "*i32", "out_ptr": "*bf16"}
    signature |= {"out_scales_ptr": "*fp32", "partials_ptr": "*fp32", "stats_ptr": "*fp32", "counters_ptr": "*i32"}
    signature |= {"scale": "fp32", "max_length": "i32", "num_pages": "i32", "width": "i32", "MP": "i32"}
    constants: dict[str, Any] = {"HEADS": 8, "SHARERS": 4, "ROWS": 4, "PAGE": page, "BLOCK": launch.block}
    constants |= {"CHUNK": launch.chunk, "STAGES": launch.stages, "QUANTISE": False, "PDL": True}
    options: dict[str, Any] = {"num_warps": launch.warps, "num_stages": launch.stages, "maxnreg": launch.registers}
    return kernels.decode_kernel, signature, constants, options


if __name__ == "__main__":
    main(every=len(sys.argv) > 1)
