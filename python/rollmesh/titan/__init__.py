"""rollmesh as the generator of torchtitan's RL stack (TitanRL, torchtitan.experiments.rl). Needs
torchtitan, torchmonarch and torchstore; vLLM is not needed. docs/titan.md says how.
"""

from __future__ import annotations

from rollmesh.titan import _packages  # noqa: F401 (for what it does)
from rollmesh.titan.generator import RollmeshGenerator
from rollmesh.titan.install import install
from rollmesh.titan.trainer import RollmeshTrainer

__all__ = ["RollmeshGenerator", "RollmeshTrainer", "install"]
