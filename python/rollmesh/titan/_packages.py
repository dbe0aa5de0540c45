"""Checks the packages that rollmesh.titan needs; must be imported first. ImportError names the
missing one. torchtitan.experiments.rl always imports vLLM, so a stand-in replaces vLLM where it is
not installed, also in Monarch's processes."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

STAND_IN = Path(__file__).parent / "without_vllm"

missing = [name for name in ("torchtitan", "monarch", "torchstore") if find_spec(name) is None]
if missing:
    raise ImportError(
        f"rollmesh.titan needs {', '.join(missing)}; docs/titan.md says how to install them"
    )
if find_spec("vllm") is None:
    sys.path.append(str(STAND_IN))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH"), str(STAND_IN)])
    )
