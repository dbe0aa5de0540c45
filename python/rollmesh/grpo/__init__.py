"""GRPO on rollmesh: rollouts, rewards, advantages, loss, trainer, loop. Read loop.py first; it
states the protocol of a step.

Needs the `train` extra (torch, transformers, safetensors, rich, matplotlib, tensorboard); modules
import them where they are used.
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_RUN = (
    "config tables seeds files user_code data hf_datasets generator vllm overlap metrics progress "
    "tracking"
)
_MOVED = {
    **{f"{__name__}.{name}": f"rollmesh.run.{name}" for name in _RUN.split()},
    f"{__name__}.pretrained": "rollmesh.run.models",
    f"{__name__}.interrupts": "rollmesh.run.signals",
    f"{__name__}.reply_tokens": "rollmesh.request.reply_tokens",
    f"{__name__}.routing_replay": "rollmesh.torch.routing_replay",
}


class _MovedModules(MetaPathFinder, Loader):
    """Imports a moved module by its former name, with a DeprecationWarning."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name in _MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        warnings.warn(f"{name} is now {_MOVED[name]}", DeprecationWarning, stacklevel=2)
        sys.modules[name] = importlib.import_module(_MOVED[name])


sys.meta_path.append(_MovedModules())
