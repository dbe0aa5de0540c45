"""Registers, spills, stack and shared memory of every CUDA kernel, as ptxas reports them: needs nvcc, no GPU.

python -m benchmarks.cuda_report [--to DIR]       the exit status is 1 when a kernel spills
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'.*?(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def short_name(mangled: str) -> str:
    """gemm_kernel<bf16> of what nvcc makes of it."""
    found = re.search(r"\d([a-z]+_kernel)IL8rm_dtype(\d)", mangled)
    return f"{found[1]}<{('bf16', 'f32')[int(found[2])]}>" if found else mangled


def report(folder: Path) -> int:
    environment = os.environ | {"ROLLMESH_WERROR": "0"}  # a spill shall be a row here
    subprocess.run([sys.executable, "setup.py", "-q", "cuda", "--to", str(folder)], cwd=ROOT, env=environment, check=True)
    spilled = 0
    print(f"{'kernel':<28}{'arch':<9}{'registers':>10}{'stack':>7}{'spilled':>9}{'static shared':>15}")
    for path in sorted(folder.glob("kernels/cuda/*.ptxas")):
        for entry in ENTRY.finditer(path.read_text()):
            spill = int(entry["stores"]) + int(entry["loads"])
            shared = re.search(r"(\d+) bytes smem", entry["rest"])
            spilled += spill > 0
            cells = f"{entry['registers']:>10}{entry['stack']:>7}{spill:>9}{shared[1] if shared else 0:>15}"
            print(f"{short_name(entry['name']):<28}{entry['arch']:<9}{cells}")
    print(f"{spilled} kernels spill; dynamic shared memory is set at launch: gemm 2 KiB, attention 0.14 KiB + 12 bytes per head_dim")
    return int(spilled > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="keep the library and the reports here")
    options = parser.parse_args()
    if options.to:
        return report(options.to)
    with tempfile.TemporaryDirectory() as folder:
        return report(Path(folder))


if __name__ == "__main__":
    sys.exit(main())
