"""Stands in for vLLM where it is not installed. torchtitan.experiments.rl imports vLLM for
everyone, also for who generates with something else.

Any submodule and any name can be imported; torchtitan subclasses and decorates with some at import.
Using one raises ImportError.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__path__: list[str] = []


class _Name(type):
    """A class for each name that is imported; it can be a base class."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ImportError(
            f"vLLM is not installed, and {cls.__module__}.{cls.__qualname__} was called; pip "
            "install 'rollmesh[vllm]'"
        )

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{cls.__qualname__}.{name}", (), {"__module__": cls.__module__})


def _decorator(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda decorated: decorated


_AT_IMPORT = {
    "init_logger": logging.getLogger,
    "register_backend": _decorator,
    "support_torch_compile": _decorator,
}


def _name_of(module: str) -> Callable[[str], Any]:
    def getattr_(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AT_IMPORT.get(name) or _Name(name, (), {"__module__": module})

    return getattr_


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return (
            ModuleSpec(fullname, self, is_package=True)
            if fullname.startswith(f"{__name__}.")
            else None
        )

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _name_of(module.__name__)  # type: ignore[method-assign]


__getattr__ = _name_of(__name__)
sys.meta_path.append(_Finder())
