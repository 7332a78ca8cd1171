"""Compiles attention for sm_90a without a GPU and prints, as JSON, what its machine code has, by name.

A process of its own, since another test's process may have loaded Triton as an interpreter.  With an argument it
compiles every launch of the table, which takes longer.
"""

import json
import sys
from importlib import import_module
from typing import Any

from machine_code import Case, build, counted

from slackwater_kernels.plan import BF16_ATTENTION, FP8_ATTENTION, AttentionLaunch

COUNTED = {
    "tensor_core": r"\bH(?:G)?MMA\.",
    "async_copies": r"\bLDGSTS\.",
    "byte_reads": r"\bLDS\.[US]8\b",
    "reads": r"\bLDS\.",
    "matrix_reads": r"\bLDSM\.",
    "plain_loads": r"\bLDG\.",
    "spilled": r"\b(?:LDL|STL)\b",
    "waits": r"\bACQBULK\b",
    "lets_next_start": r"\bPREEXIT\b",
}


def main(*, every: bool) -> None:
    kernels = import_module("slackwater_kernels.attention_source")
    found = {name: counted(build(case, 90), COUNTED) for name, case in cases(kernels, every=every).items()}
    sys.stdout.write(json.dumps(found))


def cases(kernels: Any, *, every: bool) -> dict[str, Case]:
    """By name."""
    made: dict[str, Case] = {}
    for form, launches in (("fp8", FP8_ATTENTION), ("bf16", BF16_ATTENTION)):
        for page in (16, 64):
            made[f"{form} page {page}"] = decode(kernels, form, page, launches[0], quantise=False)
        for launch in launches[1:] if every else ():
            made[f"{form} {launch}"] = decode(kernels, form, 64, launch, quantise=False)
        pool = {"k_pool_ptr": CODES[form][2], "v_pool_ptr": CODES[form][2]}
        pointers = {"k_ptr": "*bf16", "v_ptr": "*bf16"} | pool | SCALES | {"table_ptr": "*i32", "lengths_ptr": "*i32"}
        constants = {"HEADS": 8, "ROWS": 8, "PAGE": 64, "FP8": form == "fp8", "CHANNEL": False, "PDL": True}
        sizes = {"num_pages": "i32", "width": "i32"}
        made[f"append {form}"] = kernels.append_kernel, pointers | sizes, constants, {"num_warps": 4}
    made["fp8 quantised"] = decode(kernels, "fp8", 64, FP8_ATTENTION[0], quantise=True)
    return made


# Types of keys and of values as attention reads them, and of both as they are written.
CODES = {"fp8": ("*fp8e4nv", "*i16", "*u8"), "bf16": ("*bf16", "*bf16", "*bf16")}
SCALES = {"k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32"}


def decode(kernels: Any, form: str, page: int, launch: AttentionLaunch, *, quantise: bool) -> Case:
    keys, values, _ = CODES[form]
    signature = {"q_ptr": "*bf16", "k_ptr": keys, "v_ptr": values} | SCALES
    signature |= {"table_ptr": "*i32", "lengths_ptr": "*i32", "out_ptr": "*u8" if quantise else "*bf16"}
    signature |= {"out_scales_ptr": "*fp32", "partials_ptr": "*fp32", "stats_ptr": "*fp32", "counters_ptr": "*i32"}
    signature |= {"scale": "fp32", "max_length": "i32", "num_pages": "i32", "width": "i32", "MP": "i32"}
    constants: dict[str, Any] = {"HEADS": 8, "SHARERS": 4, "ROWS": 4, "PAGE": page, "BLOCK": launch.block}
    constants |= {"CHUNK": launch.chunk, "STAGES": launch.stages, "FP8": form == "fp8"}
    constants |= {"QUANTISE": quantise, "PDL": True}
    options: dict[str, Any] = {"num_warps": launch.warps, "num_stages": launch.stages, "maxnreg": launch.registers}
    return kernels.decode_kernel, signature, constants, options


if __name__ == "__main__":
    main(every=len(sys.argv) > 1)
