"""Former names of modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class MovedModules(MetaPathFinder, Loader):
    """Imports a module by its former name, with a DeprecationWarning. moved: former → new name."""

    def __init__(self, moved: Mapping[str, str]) -> None:
        self._moved = moved
        sys.meta_path.append(self)

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name in self._moved else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        warnings.warn(f"{name} is now {self._moved[name]}", DeprecationWarning, stacklevel=2)
        sys.modules[name] = importlib.import_module(self._moved[name])
