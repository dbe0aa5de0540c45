"""Every op of every variant: its speed, or its bits over a long run.

    python -m benchmarks.ops                      time per op and variant, GB/s, GFLOP/s, share of
                                                  the machine's rate (measured in the same run),
                                                  speed relative to the reference
    python -m benchmarks.ops --elements 1e9       compares that many elements with the reference
                                                  instead; some minutes

Other options of checkops are passed on. Both commands run tests/support/native/checkops: the timed
code is the code that the tests compare with the reference. Shapes are those of models of 0.6B and
30B-A3B parameters. RM_EMULATE=1 compares variants that this processor lacks in emulation; their
times are meaningless."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import native_build  # noqa: E402 - a module of the tests


def main() -> int:
    program = native_build.build(
        "checkops", ROOT / "build" / "native", emulate=bool(os.environ.get("RM_EMULATE"))
    )
    return subprocess.run([str(program), *(sys.argv[1:] or ["--bench"])], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
