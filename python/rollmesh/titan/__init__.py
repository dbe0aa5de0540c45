"""rollmesh as the generator of torchtitan's RL stack (TitanRL, torchtitan.experiments.rl). Needs torchtitan, torchmonarch and torchstore;
vLLM is not needed. docs/titan.md says how.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_missing = [name for name in ("torchtitan", "monarch", "torchstore") if importlib.util.find_spec(name) is None]
if _missing:
    raise ImportError(f"rollmesh.titan needs {', '.join(_missing)}; docs/titan.md says how to install them")

if importlib.util.find_spec("vllm") is None:
    _folder = str(Path(__file__).parent / "without_vllm")
    sys.path.append(_folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), _folder]))  # of Monarch's processes

from rollmesh.titan.generator import RollmeshGenerator
from rollmesh.titan.install import install
from rollmesh.titan.trainer import RollmeshTrainer

__all__ = ["RollmeshGenerator", "RollmeshTrainer", "install"]
