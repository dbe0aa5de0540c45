"""A progress bar over finished requests, if tqdm is installed and it is asked for."""

from __future__ import annotations

import importlib
import importlib.util
from types import TracebackType
from typing import Any


class Progress:
    """Shows finished/total on stderr, if tqdm is installed and show is True."""

    def __init__(self, total: int, show: bool):
        self._total = total
        self.is_shown = show and importlib.util.find_spec("tqdm") is not None
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self.is_shown:
            self._bar = importlib.import_module("tqdm").tqdm(
                total=self._total, desc="requests", unit="req", dynamic_ncols=True
            )
        return self

    def advance(self, count: int) -> None:
        if self._bar is not None and count:
            self._bar.update(count)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
