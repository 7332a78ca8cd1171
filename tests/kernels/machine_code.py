"""Compiles a Triton kernel without a GPU and reads what became of it; for the scripts beside this file."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONVERTED_CONSTANT = r"\bF2FP\S*PACK_AB_MERGE_C R\d+, RZ, RZ, R\d+"
"""A constant that is converted to FP8: two bytes come from a register that nobody has set (ptxas 12.8)."""

Case = tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]
"""A kernel, the types of its arguments, its constants, its options."""


@dataclass(frozen=True, slots=True)
class Built:
    """code: the machine code, disassembled.   usage: registers and memory, in cuobjdump's words."""

    ptx: str
    code: str
    usage: str
    shared_bytes: int
    threads: int


def build(case: Case, capability: int) -> Built:
    """For one architecture, 90 for sm_90a; every pointer is aligned to 16 bytes, as torch's are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, signature, constants, options = case
    pointers = [key for key, kind in signature.items() if kind[0] == "*"]
    source = ASTSource(
        fn=kernel,
        signature=dict.fromkeys(constants, "constexpr") | signature,
        constexprs=constants,
        attrs={(kernel.arg_names.index(key),): [["tt.divisibility", 16]] for key in pointers},
    )
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        code, usage = (
            subprocess.run([tools / tool, *words, cubin.name], capture_output=True, text=True, check=True).stdout
            for tool, *words in (("nvdisasm",), ("cuobjdump", "-res-usage"))
        )
    return Built(built.asm["ptx"], code, usage, built.metadata.shared, 32 * built.metadata.num_warps)


def counted(built: Built, patterns: dict[str, str], target: str = "sm_90a") -> dict[str, int]:
    """How often each pattern is in the machine code, and what the kernel takes: threads, shared bytes, registers."""
    return {what: len(re.findall(pattern, built.code)) for what, pattern in patterns.items()} | {
        "of_target": built.ptx.count(f".target {target}"),
        "threads": built.threads,
        "shared_bytes": built.shared_bytes,
        "registers": max(int(count) for count in re.findall(r"REG:(\d+)", built.usage)),
    }
