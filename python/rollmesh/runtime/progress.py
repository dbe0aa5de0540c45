"""A progress bar over finished requests, if tqdm is installed and it is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int, show: bool) -> Iterator[Callable[[int], object] | None]:
    """Shows finished/total on stderr, if tqdm is installed and show is True. Yields the function
    that takes the number of newly finished requests, or None."""
    if not show or importlib.util.find_spec("tqdm") is None:
        yield None
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    with tqdm(total=total, desc="requests", unit="req", dynamic_ncols=True) as bar:
        yield bar.update
