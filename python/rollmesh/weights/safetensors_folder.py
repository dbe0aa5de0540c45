"""A Hugging Face checkpoint folder as a mapping: `gen.sync_weights(SafetensorsFolder(path))`.

Opening a folder reads only the headers; the pages of an entry are read when it is accessed, so a
checkpoint may be larger than memory. The library `safetensors` checks the headers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rollmesh.errors import ConfigError, FormatError, UnsupportedTensorError
from rollmesh.model.adapters import refuse_adapter
from rollmesh.runtime.messages import plain, shown
from rollmesh.weights import mxfp4

INDEX = "model.safetensors.index.json"


def is_ignored(name: str, ignore: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in ignore)


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class SafetensorsFolder(Mapping[str, Any]):
    """The tensors of a folder or of one file, by name. In a folder the files are those of its index
    or, without an index, all *.safetensors.

    ignore: names of tensors to leave out, with * for any characters. A name may match no tensor.

    Values are torch tensors if torch is installed, otherwise NumPy arrays (bfloat16 then needs
    ml_dtypes). MXFP4 tensors are bfloat16 tensors (mxfp4.py). Raises FormatError for a file that is
    missing, truncated or malformed, and ConfigError for a folder with a PEFT adapter; `path` may
    then be the model's own file. If a file is written to or truncated later, the next access raises
    FormatError.
    """

    def __init__(self, path: str | Path, ignore: Collection[str] = ()):
        is_list = isinstance(ignore, (tuple, list, set, frozenset))
        if not is_list or not all(isinstance(name, str) for name in ignore):
            raise ConfigError(f"ignore: expected a tuple of names of tensors, got {shown(ignore)}")
        if not isinstance(path, (str, os.PathLike)):
            raise ConfigError(f"path: expected a path of a folder or a file, got {shown(path)}")
        self.path = Path(path)
        self._files: dict[Path, Any] = {}
        self._states: dict[Path, tuple[int, ...]] = {}  # state of each file when it was opened
        try:
            every = self._names().items()
            self._where = {name: file for name, file in every if not is_ignored(name, ignore)}
            self._tensors = mxfp4.joined(self._where)
        except OSError as error:
            raise FormatError(
                f"{plain(self.path)}: {error.strerror}; expected a checkpoint folder or file"
            ) from error

    def __getitem__(self, name: str) -> Any:
        parts = [self._stored(part) for part in self._tensors[name]]
        return parts[0] if len(parts) == 1 else mxfp4.dequantized(name, *parts)

    def _stored(self, name: str) -> Any:
        file = self._where[name]
        self._require_unchanged(file)
        try:
            return self._open(file).get_tensor(name)
        except TypeError as error:  # "data type 'bfloat16' not understood"
            raise UnsupportedTensorError(
                f"{name} in {file}: {error}; install torch or ml_dtypes"
            ) from error

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Returns the dtype, by safetensors' name, and the shape, without reading data."""
        stored = self._tensors[name][-1]
        part = self._open(self._where[stored]).get_slice(stored)
        dtype, shape = part.get_dtype(), tuple(part.get_shape())
        if stored == name:
            return dtype, shape
        if len(shape) != 3:
            raise FormatError(
                f"{plain(stored)}: expected scales [experts, rows, groups], got shape {shape}"
            )
        return "BF16", (shape[0], 32 * shape[2], shape[1])  # of MXFP4 scales

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _names(self) -> dict[str, Path]:
        refuse_adapter(self.path)
        if self.path.is_file():
            return dict.fromkeys(self._open(self.path).keys(), self.path)
        if (index := self.path / INDEX).is_file():
            return self._indexed(index)
        where: dict[str, Path] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            for name in self._open(file).keys():  # noqa: SIM118 (a safe_open is not a dict)
                if name in where:
                    raise FormatError(
                        f"{plain(name)}: expected it in one file, got {where[name].name} and "
                        f"{file.name}"
                    )
                where[name] = file
        if not where:
            raise FormatError(f"{self.path}: expected *.safetensors files, got none")
        return where

    def _indexed(self, index: Path) -> dict[str, Path]:
        try:
            weight_map = dict(json.loads(index.read_text("utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(
                f"{index}: expected an index of safetensors: {type(error).__name__}: {plain(error)}"
            ) from error
        where = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise FormatError(
                    f"{index}: {plain(name)}: expected a file of this folder, got {shown(file)}"
                )
            where[name] = self.path / file
        for file in set(where.values()):
            held = set(self._open(file).keys())
            if absent := [name for name, at in where.items() if at == file and name not in held]:
                raise FormatError(
                    f"{index}: {plain(absent[0])}: expected it in {plain(file.name)}, which does "
                    "not have it"
                )
        return where

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            from safetensors import SafetensorError, safe_open

            try:
                status = os.stat(file)
            except (FileNotFoundError, ValueError) as error:  # ValueError: a NUL in the name
                raise FormatError(
                    f"{plain(file)}: expected a safetensors file, got none"
                ) from error
            except OSError as error:
                raise FormatError(f"{plain(file)}: {plain(error)}") from error
            if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
                raise FormatError(
                    f"{plain(file)}: expected a regular file, "
                    f"got mode {stat.filemode(status.st_mode)}"
                )
            self._states[file] = _state(status)
            try:
                self._files[file] = safe_open(file, framework=self._framework())
            except (SafetensorError, OSError) as error:
                raise FormatError(f"{plain(file)}: {plain(error)}") from error
        return self._files[file]

    def _require_unchanged(self, file: Path) -> None:
        """Raises FormatError if a mapped file was written to or truncated, which changes the mapped
        tensors. A file that was removed, or replaced by a rename, stays mapped unchanged."""
        try:
            now = _state(os.stat(file))
        except OSError:
            return
        before = self._states[file]
        if now[:2] == before[:2] and now != before:
            raise FormatError(
                f"{plain(file)}: expected the file as it was opened, got one that was written to "
                "since; make a new SafetensorsFolder"
            )

    @staticmethod
    def _framework() -> str:
        if importlib.util.find_spec("torch"):
            return "pt"
        if importlib.util.find_spec("ml_dtypes"):
            importlib.import_module("ml_dtypes")  # registers the dtype bfloat16 with NumPy
        return "np"
