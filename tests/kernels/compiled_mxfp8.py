"""Compiles the MXFP8 kernels and the sampler without a GPU; prints, as JSON, what their code has, by target and name.

A process of its own, since another test's process may have loaded Triton as an interpreter.
"""

import json
import re
import sys
from importlib import import_module
from typing import Any

from machine_code import Case, build

from slackwater_kernels.mxfp8 import mx_launch
from slackwater_kernels.plan import Take, sum_tree

TARGETS = {"sm_120a": 120, "sm_103a": 103, "sm_90a": 90}
PRODUCTS = {"gate_up": (19456, 2560, (1,)), "down": (2560, 9728, (1, 64, 512))}  # N, K and rows
COUNTED = {
    "block_scaled": r"\bQMMA\.SF\.\S*E8\b",
    "plain_fp8": r"\bQMMA\.(?!SF)",
    "widened": r"\bH[GM]MMA\b|\bHMMA\.",
    "spilled": r"\b(?:LDL|STL)\b",
    "waits": r"\bACQBULK\b",
    "lets_next_start": r"\bPREEXIT\b",
}


def main() -> None:
    kernels = import_module("slackwater_kernels.mxfp8_source")
    found: dict[str, dict[str, dict[str, int]]] = {}
    for target, capability in TARGETS.items():
        found[target] = {}
        for name, case in cases(kernels, target.removesuffix("a")).items():
            built = build(case, capability)
            found[target][name] = {what: len(re.findall(pattern, built.code)) for what, pattern in COUNTED.items()} | {
                "block_scaled_ptx": built.ptx.count("block_scale"),
                "approximate_logarithms": built.ptx.count("lg2.approx"),
                "subnormals_lost": built.ptx.count(".ftz"),
                "of_target": built.ptx.count(f".target {target}"),
                "shared_bytes": built.shared_bytes,
            }
    sys.stdout.write(json.dumps(found))


def cases(kernels: Any, on: str) -> dict[str, Case]:
    """By name."""
    made: dict[str, Case] = {}
    quantised = {"codes_ptr": "*u8", "scales_ptr": "*u8", "M": "i32", "MP": "i32"}
    sizes = {"BLOCKS": 20, "PER": 4, "FLOOR": False, "PDL": True}
    floor, whole = sizes | {"FLOOR": True}, sizes | {"PER": 32}
    of_x, of_gate = {"x_ptr": "*bf16"} | quantised, {"gate_up_ptr": "*bf16"} | quantised
    of_norm = {"x_ptr": "*bf16", "gain_ptr": "*bf16"} | quantised | {"eps": "fp32"}
    made["quantise"] = kernels.quantize_mx_kernel, of_x, sizes, {"num_warps": 4}
    made["quantise swiglu"] = kernels.swiglu_quantize_mx_kernel, of_gate, floor, {"num_warps": 4}
    made["quantise norm"] = kernels.rmsnorm_quantize_mx_kernel, of_norm, whole, {"num_warps": 8}
    pointers = {"weight_ptr": "*fp8e4nv", "weight_scales_ptr": "*u8", "x_ptr": "*fp8e4nv", "x_scales_ptr": "*u8"}
    pointers |= {"residual_ptr": "*bf16", "out_ptr": "*bf16", "partials_ptr": "*fp32", "counters_ptr": "*i32"}
    for name, (n, k, many) in PRODUCTS.items():
        for m in many:
            tree, chosen = sum_tree(n, k), mx_launch(m, on)
            constants: dict[str, Any] = {"N": n, "BLOCKS": k // 128, "LEAF": tree.leaf, "GROUP": tree.group}
            constants |= {"ALL": chosen.take is Take.ALL, "ROWS": chosen.rows, "TOKENS": chosen.tokens}
            constants |= {"STAGES": chosen.stages, "RESIDUAL": True, "PDL": True}
            options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
            made[f"{name} {m}"] = kernels.mx_kernel, pointers | {"M": "i32", "MP": "i32"}, constants, options
    sampler = import_module("slackwater_kernels.sampling_source").draw_kernel
    rows = {"logits_ptr": "*fp32", "seeds_ptr": "*i64", "steps_ptr": "*i64", "temperature_ptr": "*fp32"}
    rows |= {"top_p_ptr": "*fp32", "top_k_ptr": "*i64", "window_ptr": "*i32", "ids_ptr": "*i64", "first_ptr": "*u8"}
    rows |= {"out_ptr": "*i64", "stage": "i32", "num_semantic": "i32", "high_temperature": "fp32", "high_top_p": "fp32"}
    made["draw"] = sampler, rows, {"V": 4097, "SIZE": 8192, "MAX_K": 30, "W": 10, "CW": 11}, {"num_warps": 8}
    return made


if __name__ == "__main__":
    main()
