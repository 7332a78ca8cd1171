"""Compiles every kernel for sm_90a without a GPU and prints, as JSON, which instructions its machine code has.

A process of its own, since another test's process may have loaded Triton as an interpreter.
"""

import json
import re
import sys
from importlib import import_module
from typing import Any

from machine_code import Case, build

from slackwater_kernels.plan import Launch, Take, gated_launch, launch, sum_tree

COUNTED = {"QGMMA", "HGMMA", "HMMA", "LDGSTS", "UTMALDG", "ACQBULK", "PREEXIT", "LDL", "STL"}


def main() -> None:
    found = {}
    for name, case in cases(import_module("slackwater_kernels.triton_source")).items():
        built = build(case, 90)
        words = re.findall(r"\b[A-Z][A-Z0-9]+\b", built.code)
        found[name] = {word: words.count(word) for word in COUNTED} | {"target": built.ptx.count("sm_90a")}
    sys.stdout.write(json.dumps(found))


def cases(kernels: Any) -> dict[str, Case]:
    """By name."""
    quantised = {"codes_ptr": "*u8", "scales_ptr": "*fp32", "M": "i32", "MP": "i32"}
    sizes = {"BLOCKS": 20, "PER": 4, "PDL": True}
    made: dict[str, Case] = {
        "quantise": (kernels.quantize_kernel, {"x_ptr": "*bf16"} | quantised, sizes, {"num_warps": 4}),
        "swiglu": (kernels.swiglu_quantize_kernel, {"gate_up_ptr": "*bf16"} | quantised, sizes, {"num_warps": 4}),
        "norm": (
            kernels.rmsnorm_quantize_kernel,
            {"x_ptr": "*bf16", "gain_ptr": "*bf16"} | quantised | {"eps": "fp32"},
            sizes | {"PER": 32},
            {"num_warps": 8},
        ),
    }
    for name, n, k, m in (("wqkv", 6144, 2560, 1), ("down", 2560, 9728, 16), ("many", 2560, 9728, 64)):
        made[name] = product(kernels, n, k, launch(n, k, m), gated=False)
    made["gated"] = product(kernels, 19456, 2560, gated_launch(1), gated=True)
    made["gated many"] = product(kernels, 19456, 2560, gated_launch(64), gated=True)
    return made


def product(kernels: Any, n: int, k: int, chosen: Launch, *, gated: bool) -> Case:
    tree, tma = sum_tree(n, k), chosen.tma
    constants: dict[str, Any] = {"N": n, "BLOCKS": k // 128, "LEAF": tree.leaf, "GROUP": tree.group}
    constants |= {"ROWS": chosen.rows, "TOKENS": chosen.tokens, "RESIDUAL": True, "PDL": True}
    head = {"weight_ptr": "*fp8e4nv", "weight_scales_ptr": "*fp32", "x_ptr": "*fp8e4nv", "x_scales_ptr": "*fp32"}
    tail = {"residual_ptr": "*bf16", "out_ptr": "*bf16", "partials_ptr": "*fp32", "counters_ptr": "*i32"}
    hidden = {"out_ptr": "*u8" if gated else "*bf16", "out_scales_ptr": "*fp32", "hidden_ptr": "*bf16"}
    sizes = {"M": "i32", "MP": "i32"}
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    if chosen.take is Take.LEAF:
        return kernels.stream_kernel, head | tail | sizes, constants, options
    tiles = f"tensordesc<fp8e4nv[{chosen.rows}, 128]>", f"tensordesc<fp8e4nv[{chosen.tokens}, 128]>"
    boxes = {"weight_desc": tiles[0], "x_desc": tiles[1], "x_scales_desc": f"tensordesc<fp32[{chosen.tokens}]>"}
    if not tma:
        constants |= dict.fromkeys(boxes)
        boxes = {}
    constants |= {"ALL": chosen.take is Take.ALL, "STAGES": chosen.stages, "TMA": tma, "GATED": gated}
    constants |= {"AHEAD": chosen.ahead, "EARLY": chosen.early}
    return kernels.loop_kernel, head | boxes | tail | hidden | sizes, constants, options


if __name__ == "__main__":
    main()
