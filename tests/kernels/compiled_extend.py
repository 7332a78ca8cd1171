"""Compiles attention of many queries a row for sm_90a without a GPU and prints, as JSON, what its machine code has.

A process of its own, since another test's process may have loaded Triton as an interpreter.  With an argument it
compiles every launch of the table, which takes longer.
"""

import json
import sys
from importlib import import_module
from typing import Any

from machine_code import CONVERTED_CONSTANT, Case, build, counted

from slackwater_kernels.plan import BF16_EXTEND, FP8_EXTEND, ExtendLaunch, append_tokens_each

COUNTED = {
    "warpgroup_products": r"\bHGMMA\.",
    "small_products": r"\bHMMA\.",
    "async_copies": r"\bLDGSTS\.",
    "wide_copies": r"\bLDGSTS\.\S*\.128\b",
    "byte_reads": r"\bLDS\.[US]8\b",
    "byte_writes": r"\bSTS\.[US]8\b",
    "converted_constants": CONVERTED_CONSTANT,
    "spilled": r"\b(?:LDL|STL)\b",
    "waits": r"\bACQBULK\b",
    "lets_next_start": r"\bPREEXIT\b",
}


def main(*, every: bool) -> None:
    kernels = import_module("slackwater_kernels.extend_source")
    found = {name: counted(build(case, 90), COUNTED) for name, case in cases(kernels, every=every).items()}
    sys.stdout.write(json.dumps(found))


def cases(kernels: Any, *, every: bool) -> dict[str, Case]:
    """By name."""
    made: dict[str, Case] = {}
    for form, launches in (("fp8", FP8_EXTEND), ("bf16", BF16_EXTEND)):
        for page in (16, 64, 128):
            made[f"extend {form} page {page}"] = extend(kernels, form, page, launches[0])
        for launch in launches[1:] if every else ():
            made[f"extend {form} {launch}"] = extend(kernels, form, 64, launch)
        made[f"append {form}"] = append(kernels, form)
    made["prefill"] = extend(kernels, "bf16", None, BF16_EXTEND[0])
    return made


# Types of keys and values as attention reads them, and as they are written.
CODES = {"fp8": ("*fp8e4nv", "*u8"), "bf16": ("*bf16", "*bf16")}
SCALES = {"k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32"}
ROWS = {"table_ptr": "*i32", "lengths_ptr": "*i32", "starts_ptr": "*i32"}
SIZES = dict.fromkeys(("T", "num_rows", "max_new", "max_length", "num_pages", "width"), "i32")


def extend(kernels: Any, form: str, page: int | None, launch: ExtendLaunch) -> Case:
    codes = CODES[form][0]
    signature = {"q_ptr": "*bf16", "k_ptr": codes, "v_ptr": codes} | SCALES | ROWS
    signature |= {"out_ptr": "*bf16", "scale": "fp32"} | SIZES
    constants: dict[str, Any] = {"HEADS": 8, "SHARERS": 4, "ROWS": launch.rows, "PAGE": page or launch.block}
    constants |= {"BLOCK": launch.block, "STAGES": launch.stages, "FP8": form == "fp8"}
    constants |= {"PAGED": page is not None, "PDL": True}
    return kernels.extend_kernel, signature, constants, {"num_warps": launch.warps, "num_stages": launch.stages}


def append(kernels: Any, form: str) -> Case:
    pool = {"k_pool_ptr": CODES[form][1], "v_pool_ptr": CODES[form][1]}
    signature = {"k_ptr": "*bf16", "v_ptr": "*bf16"} | pool | SCALES | ROWS | SIZES
    constants: dict[str, Any] = {"HEADS": 8, "ROWS": 8, "TOKENS": append_tokens_each(8), "PAGE": 64}
    constants |= {"FP8": form == "fp8", "PDL": True}
    return kernels.append_tokens_kernel, signature, constants, {"num_warps": 8}


if __name__ == "__main__":
    main(every=len(sys.argv) > 1)
