"""Compiles the CUDA sources to the cubins that the package ships, and writes beside each what it was made from.

Owns the compiler's flags.  For developers alone: who serves needs no nvcc.  It comes without an installation:

    pip install --target DIR nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
        nvidia-cuda-runtime==13.0.88
    chmod +x DIR/nvidia/cu13/bin/* DIR/nvidia/cu13/nvvm/bin/*
    python -m slackwater_kernels.cuda.build DIR/nvidia/cu13/bin/nvcc
"""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

CUDA = Path(__file__).parent
# `sm_90a` alone would also compile for plain sm_90, which has no wgmma.
FLAGS = ("-cubin", "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a")


def build(nvcc: Path) -> None:
    """Compile each source; the same source, compiler and flags give the same bytes."""
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    compiler = re.search(r"V(\d+\.\d+\.\d+)", told)
    assert compiler, told
    for source in sorted(CUDA.glob("*.cu")):
        cubin = source.with_suffix(".sm_90a.cubin")
        subprocess.run([nvcc, *FLAGS, source.name, "-o", cubin.name], cwd=CUDA, check=True)
        made = {
            "source": source.name,
            "source_sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
            "cubin_sha256": hashlib.sha256(cubin.read_bytes()).hexdigest(),
            "compiler": f"nvcc {compiler[1]}",
            "flags": list(FLAGS),
        }
        source.with_suffix(".json").write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
