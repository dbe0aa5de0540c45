"""The parts of vLLM that rollmesh's weight transfer engine needs, where vLLM is not installed or
takes too long to import: its base class and its factory. Workers (vllm_ranks) run with it; the
behavior under vLLM itself is tested where vLLM is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

HAS_VLLM = find_spec("vllm") is not None


class WeightTransferEngine:
    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model


class WeightTransferEngineFactory:
    _registry: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_engine(cls, name: str, module: str, kind: str) -> None:
        cls._registry[name] = module, kind

    @classmethod
    def create_engine(cls, config: Any, *made: Any) -> Any:
        module, kind = cls._registry[config.backend]
        return getattr(importlib.import_module(module), kind)(config, *made)


@contextmanager
def installed() -> Iterator[None]:
    """Installs the stand-in, unless vLLM is installed, and removes it afterwards."""
    if HAS_VLLM:
        yield
        return
    install()
    try:
        yield
    finally:
        for name in [
            name
            for name in sys.modules
            if name.split(".")[0] == "vllm" or name in ("rollmesh.vllm.transfer", "vllm_ranks")
        ]:
            del sys.modules[name]


def install() -> None:
    added = {
        name: ModuleType(name)
        for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer")
    }
    base = added["vllm.distributed.weight_transfer.base"] = ModuleType(
        "vllm.distributed.weight_transfer.base"
    )
    base.WeightTransferEngine = WeightTransferEngine  # type: ignore[attr-defined]
    added[
        "vllm.distributed.weight_transfer"
    ].WeightTransferEngineFactory = WeightTransferEngineFactory  # type: ignore[attr-defined]
    sys.modules.update(added)


def serve(*args: Any) -> None:
    """A rank of vllm_ranks.Processes without vLLM."""
    install()
    import vllm_ranks

    vllm_ranks.serve(*args)
