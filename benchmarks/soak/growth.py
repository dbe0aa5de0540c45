"""Measures whether a process grows while it repeats an operation. The meter of the soak.

Work is repeated in rounds that end in the same state. After a warm-up that fills caches, all
measures are read at up to 40 regular points between rounds; the first quarter of these is warm-up
too. A measure has grown if the median of its last quarter exceeds the median of its second quarter
by more than its bound. Medians, because one unusual reading must not decide; the second quarter,
because a level that was reached once and then stays is not a leak. Rejected: a comparison of the
end with the beginning, because it reports every cache as a leak or needs a bound that hides one.

Most measures are exact and have the bound 0. The others have noise; their bounds lie above the
noise and far below one per operation:

heap     glibc's bytes in use: all memory of C code except mapped memory. Blocks in the caches of
         threads and in fast bins count as used although they are free, so both are switched off;
         NumPy's own cache of small arrays remains.
rss      resident pages, including free pages that an allocator keeps: each thread that allocates
         gets a separate arena, up to 8 a core, and an arena keeps its free pages. So there is one
         arena, trimmed before each reading, and huge pages, which the kernel makes in the
         background, are off. The rest is pymalloc's (1 MiB each, touched as far as they are used).
         The pages are counted in the page tables: /proc/self/statm, which is used if that file is
         missing, is late by up to 64 pages a thread, and by megabytes on kernels 6.2 to 6.15 with
         many cores.
python   blocks of pymalloc, objects that the collector tracks, references to None, True, False and
         some types. CPython's cache of methods holds names and releases None as it fills, so it
         is emptied before each reading; free lists remain.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollmesh import _core

READINGS = 40
QUIET_MALLOC = "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
MALLINFO2 = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)
PF_EXITING = 4
PR_SET_THP_DISABLE = 41
PAGE = resource.getpagesize()
RSS_LINE = re.compile(r"^Rss:\s*(\d+) kB$", re.MULTILINE)
SINGLETONS = (
    None,
    True,
    False,
    (),
    int,
    str,
    dict,
    list,
    tuple,
    np.ndarray,
    np.dtype(np.int32),
    np.dtype(np.float32),
    _core.Engine,
)


def quiet_malloc() -> None:
    """Starts this process again with glibc's settings of QUIET_MALLOC, which glibc reads only at
    the start."""
    if os.environ.get("GLIBC_TUNABLES") != QUIET_MALLOC:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "GLIBC_TUNABLES": QUIET_MALLOC})


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLINFO2)


@dataclass(frozen=True)
class Measure:
    """One measured quantity; it has grown if it gained more than `bound` between the two
    quarters."""

    name: str
    unit: str
    bound: float
    read: Callable[[], float]


@dataclass(frozen=True)
class Growth:
    measure: Measure
    gained: float
    operations: float  # between the middles of the two quarters

    @property
    def grown(self) -> bool:
        return self.gained > self.measure.bound

    def __str__(self) -> str:
        rate = self.gained / self.operations
        unit = self.measure.unit
        return (
            f"{self.measure.name} grew by {self.gained:g} {unit} (bound "
            f"{self.measure.bound:g}), {rate:.4g} {unit} per operation"
        )


def rss_kib() -> float:
    try:
        rollup = Path("/proc/self/smaps_rollup").read_text()
    except OSError:  # a kernel without it
        rollup = ""
    if found := RSS_LINE.search(rollup):
        return float(found[1])
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 1024


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # without the listing's own


def threads() -> int:
    """Returns the number of threads that are not exiting: pthread_join returns while the kernel
    still lists the thread."""
    count = 0
    for task in os.listdir("/proc/self/task"):
        try:
            status = Path(f"/proc/self/task/{task}/stat").read_text()
        except OSError:  # it has gone
            continue
        count += not int(status.rpartition(")")[2].split()[6]) & PF_EXITING
    return count


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("\n")


def files_below(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*"))


class Meter:
    """Reads all measures of this process. `handed` are the objects that the work passes in: they
    must not be referenced afterwards."""

    def __init__(self, handed: Iterable[Any], folder: Path):
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
        self._trim = getattr(libc, "malloc_trim", int)
        # Needs glibc 2.33; without it, only the resident pages are measured.
        self._mallinfo = getattr(libc, "mallinfo2", None)
        if self._mallinfo is not None:
            self._mallinfo.restype = _Mallinfo2
        self._handed = list(handed)
        gc.collect()
        # Existing objects, mainly torch's modules, need not be searched each time.
        gc.freeze()
        self.measures = (
            Measure("rss", "KiB", 512, rss_kib),
            Measure("heap", "KiB", 8, self._heap_kib),
            Measure("mappings", "maps", 8, mappings),
            Measure("engine blocks", "blocks", 0, _core.memory_blocks),
            Measure("engine memory", "bytes", 0, _core.memory_mapped),
            Measure("fds", "fds", 0, open_fds),
            Measure("threads", "threads", 0, threads),
            Measure("files in shared memory", "files", 0, lambda: files_below(folder)),
            Measure("references to objects handed in", "references", 0, self._references),
            Measure(
                "references to None and types",
                "references",
                20,
                lambda: sum(map(sys.getrefcount, SINGLETONS)),
            ),
            Measure("python blocks", "blocks", 20, sys.getallocatedblocks),
            Measure("tracked objects", "objects", 10, lambda: len(gc.get_objects())),
        )

    def _heap_kib(self) -> float:
        if self._mallinfo is None:
            return 0.0
        info = self._mallinfo()
        return float(info.uordblks + info.hblkhd) / 1024

    def _references(self) -> int:
        return sum(map(sys.getrefcount, self._handed))

    def read(self, into: np.ndarray) -> None:
        gc.collect()
        getattr(sys, "_clear_type_cache", int)()
        self._trim(0)
        for index, measure in enumerate(self.measures):
            into[index] = measure.read()


def types_of_objects() -> Counter[str]:
    gc.collect()
    return Counter(
        f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.get_objects()
    )


@dataclass(frozen=True)
class Verdict:
    """The readings [points, measures] and what grew; `types` are the kinds of tracked objects whose
    number grew."""

    operations: int
    measures: Sequence[Measure]
    readings: np.ndarray
    growths: Sequence[Growth]
    types: Sequence[str]

    @property
    def grown(self) -> list[Growth]:
        return [growth for growth in self.growths if growth.grown]

    def spans(self, names: Sequence[str]) -> str:
        """First and last reading of some measures."""
        columns = {
            measure.name: (measure.unit, self.readings[[0, -1], i])
            for i, measure in enumerate(self.measures)
        }
        return ", ".join(
            f"{name} {ends[0]:,.6g} → {ends[1]:,.6g} {unit}"
            for name, (unit, ends) in columns.items()
            if name in names
        )


def watch(meter: Meter, one_round: Callable[[], int], wanted: int, warm_up: int) -> Verdict:
    """Does `warm_up` rounds, then as many as are needed for the `wanted` operations; a round
    returns its number of operations."""
    per_round = max([one_round() for _ in range(warm_up)])
    rounds = max(-(-wanted // per_round), 8)  # two readings a quarter
    points = min(READINGS, rounds)
    readings, at = np.zeros((points, len(meter.measures))), np.zeros(points)
    before = types_of_objects()
    done = operations = 0
    for point in range(points):
        while done < (point + 1) * rounds // points:
            operations += one_round()
            done += 1
        at[point] = operations
        meter.read(readings[point])
    more = types_of_objects() - before
    second, last = slice(points // 4, points // 2), slice(points - points // 4, points)
    gained = np.median(readings[last], axis=0) - np.median(readings[second], axis=0)
    span = float(np.median(at[last]) - np.median(at[second]))
    growths = [
        Growth(measure, float(gain), span)
        for measure, gain in zip(meter.measures, gained, strict=True)
    ]
    return Verdict(
        operations,
        meter.measures,
        readings,
        growths,
        [f"{count} {name}" for name, count in more.most_common(5)],
    )
