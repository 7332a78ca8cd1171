"""Compiles every kernel for sm_90a without a GPU and prints, as JSON, which instructions its machine code has.

A process of its own, since another test's process may have loaded Triton as an interpreter.
"""

import json
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from slackwater_kernels.plan import Launch, Take, gated_launch, launch, sum_tree

COUNTED = {"QGMMA", "HGMMA", "HMMA", "LDGSTS", "UTMALDG", "ACQBULK", "PREEXIT", "LDL", "STL"}


def main() -> None:
    import triton
    from triton import compile as build
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernels = import_module("slackwater_kernels.triton_source")
    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    found = {}
    for name, (kernel, signature, constants, options) in cases(kernels).items():
        types = dict.fromkeys(constants, "constexpr") | signature
        pointers = [key for key, kind in signature.items() if kind[0] == "*"]
        aligned = {(kernel.arg_names.index(key),): [["tt.divisibility", 16]] for key in pointers}
        source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
        built = build(source, target=GPUTarget("cuda", 90, 32), options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(built.asm["cubin"])
            cubin.flush()
            code = subprocess.run([disassembler, cubin.name], capture_output=True, text=True, check=True).stdout
        words = re.findall(r"\b[A-Z][A-Z0-9]+\b", code)
        found[name] = {word: words.count(word) for word in COUNTED} | {"target": built.asm["ptx"].count("sm_90a")}
    sys.stdout.write(json.dumps(found))


def cases(kernels: Any) -> dict[str, tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """name -> kernel, types of its arguments, its constants, its options."""
    quantised = {"codes_ptr": "*u8", "scales_ptr": "*fp32", "M": "i32", "MP": "i32"}
    sizes = {"BLOCKS": 20, "PER": 4, "PDL": True}
    made: dict[str, tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]] = {
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


def product(
    kernels: Any, n: int, k: int, chosen: Launch, *, gated: bool
) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]:
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
