"""Compiles attention for sm_90a without a GPU and prints, as JSON, what its machine code has, by name.

A process of its own, since another test's process may have loaded Triton as an interpreter.  With an argument it
compiles every launch for every size of page, which takes longer.
"""

import json
import sys
from importlib import import_module
from typing import Any

from machine_code import CONVERTED_CONSTANT, Case, build, counted

from slackwater_kernels.plan import BF16_ATTENTION, FP8_ATTENTION, AttentionLaunch

PAGES = 16, 64, 128
COUNTED = {
    "fp8_products": r"\bQGMMA\.",
    "other_products": r"\bH(?:G)?MMA\.",
    "async_copies": r"\bLDGSTS\.",
    "byte_reads": r"\bLDS\.[US]8\b",
    "matrix_reads": r"\bLDSM\.",
    "converted_constants": CONVERTED_CONSTANT,
    "spilled": r"\b(?:LDL|STL)\b",
    "waits": r"\bACQBULK\b",
    "lets_next_start": r"\bPREEXIT\b",
}


def main(*, every: bool) -> None:
    found = {name: counted(build(case, 90), COUNTED) for name, case in cases(every=every).items()}
    sys.stdout.write(json.dumps(found))


def cases(*, every: bool) -> dict[str, Case]:
    """By name."""
    made = {f"append {form}": append(form) for form in CODES}
    made["fp8 quantised"] = decode("fp8", 64, FP8_ATTENTION[0], quantise=True)
    for form, launches in (("fp8", FP8_ATTENTION), ("bf16", BF16_ATTENTION)):
        for i, launch in enumerate(launches):
            for page in PAGES:
                # Of a launch that is not taken one size of page will do, and in bf16 none.
                if every or i == 0 or (form == "fp8" and page == PAGES[i % 3]):
                    made[f"{form} launch {i} page {page}"] = decode(form, page, launch, quantise=False)
    return made


# Types of keys and values as attention reads them, and as they are written.
CODES = {"fp8": ("*fp8e4nv", "*u8"), "bf16": ("*bf16", "*bf16")}
SCALES = {"k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32"}
ROWS = {"table_ptr": "*i32", "lengths_ptr": "*i32"}


def decode(form: str, page: int, launch: AttentionLaunch, *, quantise: bool) -> Case:
    kernels = import_module(f"slackwater_kernels.{'fp8_' if form == 'fp8' else ''}attention_source")
    signature = {"q_ptr": "*bf16", "k_ptr": CODES[form][0], "v_ptr": CODES[form][0]}
    signature |= (SCALES if form == "fp8" else {}) | ROWS | {"out_ptr": "*u8" if quantise else "*bf16"}
    signature |= {"out_scales_ptr": "*fp32", "partials_ptr": "*fp32", "stats_ptr": "*fp32", "counters_ptr": "*i32"}
    signature |= {"scale": "fp32", "max_length": "i32", "num_pages": "i32", "width": "i32", "MP": "i32"}
    constants: dict[str, Any] = {"HEADS": 8, "SHARERS": 4, "ROWS": 4, "PAGE": page, "BLOCK": launch.block}
    constants |= {"CHUNK": launch.chunk, "STAGES": launch.stages, "QUANTISE": quantise, "PDL": True}
    options: dict[str, Any] = {"num_warps": launch.warps, "num_stages": launch.stages, "maxnreg": launch.registers}
    return kernels.decode_kernel, signature, constants, options


def append(form: str) -> Case:
    kernels = import_module("slackwater_kernels.attention_source")
    pool = {"k_pool_ptr": CODES[form][1], "v_pool_ptr": CODES[form][1]}
    signature = {"k_ptr": "*bf16", "v_ptr": "*bf16"} | pool | SCALES | ROWS | {"num_pages": "i32", "width": "i32"}
    constants = {"HEADS": 8, "ROWS": 8, "PAGE": 64, "FP8": form == "fp8", "PDL": True}
    return kernels.append_kernel, signature, constants, {"num_warps": 4}


if __name__ == "__main__":
    main(every=len(sys.argv) > 1)
