"""A CUDA device under a benchmark: its description, the rates of its memory, and weights that are
made on it.

All calls use the functions of librollmesh_cuda.so (tests/support/cuda_device.py), so the simulated
device of the tests works too. torch is needed for one figure only, the rate of cuBLAS."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import ROOT, describe
from rollmesh.runtime.devices import library_path

sys.path.insert(0, str(ROOT / "tests" / "support"))

import cuda_device
import dlpack

ALIGNED = 256
NOISE = 33_000_002  # bytes; not a multiple of a tensor's, so that tensors differ
BUILT = ROOT / "build" / "cuda"  # from tests/support/cuda_build.py


@dataclass
class Limits:
    """Rates in 1e9 per second: bytes read; bytes copied (counted once) on the device, from and to
    pinned host memory; operations of a bf16 matmul of 8192³ by torch, which is cuBLAS. None: not
    measured, and `missing` says why."""

    read_gb_s: float | None
    copy_gb_s: float
    put_gb_s: float
    get_gb_s: float
    gemm_gflop_s: float | None
    missing: list[str]

    @property
    def memory_gb_s(self) -> float:
        """The limit for reading weights: the measured read rate, or twice the copy rate, because a
        copy moves every byte twice."""
        return self.read_gb_s or 2 * self.copy_gb_s


class Card:
    """The device of ordinal 0 between enter and leave. The rates of a simulated device are
    meaningless."""

    def __init__(self, library: cuda_device.Library, device: cuda_device.Device):
        self.device, self.is_simulated = device, library.is_simt

    def seconds(self, call: Callable[[], None]) -> float:
        """Returns the seconds until the work that `call` enqueues is done."""
        self.wait()
        begin = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - begin

    def wait(self) -> None:
        if self.device.wait() != cuda_device.OK:
            raise SystemExit(f"benchmarks: {self.device.message()}")

    def copy_rate(self, size: int, times: int = 5) -> float:
        """GB/s of copies of `size` bytes on the device, counted once: the best of `times`."""
        source, to = self.device.alloc(size), self.device.alloc(size)
        best = min(
            self.seconds(lambda: self.device.copy_2d(to, size, source, size, size, 1))
            for _ in range(times)
        )
        self.device.drop(to)
        self.device.drop(source)
        return size / best * 1e-9

    def host_rates(self, size: int, times: int = 5) -> tuple[float, float]:
        """GB/s to the device and back, of pinned memory: the best of `times`."""
        here, there = self.device.alloc_pinned(size), self.device.alloc(size)
        put = min(
            self.seconds(lambda: self.device.copy_to_device(there, here, size))
            for _ in range(times)
        )
        get = min(
            self.seconds(lambda: self.device.copy_to_host(here, there, size)) for _ in range(times)
        )
        self.device.drop(there)
        self.device.drop(here)
        return size / put * 1e-9, size / get * 1e-9

    def limits(self, size: int, built: Path) -> Limits:
        put, get = self.host_rates(size)
        found = Limits(None, self.copy_rate(size), put, get, None, [])
        if self.is_simulated:
            found.missing.append("reading and cuBLAS: a simulated device has neither")
            return found
        if (built / "bench_mma").exists():
            found.read_gb_s = float(said([str(built / "bench_mma"), "read"]))
        else:
            found.missing.append(
                f"reading: no {built / 'bench_mma'} (python tests/support/cuda_build.py gpu); "
                "twice the copy stands for it"
            )
        gemm = torch_gemm(8192, 8192, 8192)
        if gemm is None:
            found.missing.append("cuBLAS: no torch with CUDA here")
        else:
            found.gemm_gflop_s = 2 * 8192.0**3 / gemm * 1e-9
        return found

    def about(self) -> dict[str, str]:
        """Returns machine.describe with the card and its driver."""
        found = describe()
        if self.is_simulated:
            return found | {"card": "simulated", "driver": "none"}
        asked = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total",
            "--format=csv,noheader",
            "-i",
            "0",
        ]
        words = (
            said(asked).split(", ")
            if shutil.which("nvidia-smi")
            else ["unknown", "unknown", "unknown"]
        )
        return found | {"card": words[0], "driver": words[1], "card memory": words[2].strip()}


@contextmanager
def open_card() -> Iterator[Card]:
    """Exits with a message if something is missing."""
    path = library_path()
    if not path.exists():
        raise SystemExit(f"benchmarks: no {path}: this build has no kernels for GPUs")
    library = cuda_device.Library(path)
    if library.devices() < 1:
        raise SystemExit("benchmarks: no NVIDIA driver, or no device of it, is here")
    with library.open() as device:
        yield Card(library, device)


def said(command: list[str]) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"benchmarks: {Path(command[0]).name}: "
            f"{done.stdout.strip()[-400:] or f'status {done.returncode}'}"
        )
    return done.stdout


def torch_gemm(m: int, n: int, k: int, times: int = 20) -> float | None:
    """Seconds of x[m, k]·Wᵀ, W [n, k], in bf16 by torch: the best of `times`, by the device's
    clock. The numbers are nonzero, and the W rotate so that a cache cannot hold them."""
    if not importlib.util.find_spec("torch"):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = [
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        for _ in range(max(1, (256 << 20) // (2 * n * k)))
    ]
    best = float("inf")
    for i in range(times + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.matmul(x, w[i % len(w)].t())
        end.record()
        end.synchronize()
        if i >= 3:
            best = min(best, begin.elapsed_time(end) * 1e-3)
    del x, w
    torch.cuda.empty_cache()
    return best


class DeviceWeights:
    """A state dict of bf16 in one block of the device's memory: numbers of σ = 0.02, norms 1.
    `tensors` are views."""

    def __init__(self, card: Card, manifest: dict[str, Any], seed: int = 1):
        self._device = card.device
        places, size = {}, 0
        for name, info in manifest.items():
            if info.required:
                places[name] = size
                size += -(-2 * int(np.prod(info.shape)) // ALIGNED) * ALIGNED
        self.bytes = size
        self.block = card.device.alloc(size)
        noise = bfloat16(
            np.random.default_rng(seed).standard_normal(min(NOISE, size) // 2, np.float32)
            * np.float32(0.02)
        )
        card.device.write(self.block, noise.tobytes())
        done = noise.nbytes
        while done < size:  # the remaining size, once more
            more = min(done, size - done)
            card.device.copy_2d(self.block + done, more, self.block, more, more, 1)
            done += more
        for name, at in places.items():
            if is_norm(name):
                card.device.write(
                    self.block + at, np.full(manifest[name].shape, 0x3F80, np.uint16).tobytes()
                )
        card.wait()
        self.tensors = {
            name: on_device(self.block + at, manifest[name].shape) for name, at in places.items()
        }

    def drop(self) -> None:
        self._device.drop(self.block)


def host_weights(manifest: dict[str, Any], seed: int = 1) -> dict[str, Any]:
    """Returns the same weights in ordinary host memory, each tensor in a separate block."""
    noise = bfloat16(
        np.random.default_rng(seed).standard_normal(NOISE // 2, np.float32) * np.float32(0.02)
    )
    made = {}
    for name, info in manifest.items():
        if info.required:
            count = int(np.prod(info.shape))
            flat = (
                np.full(count, 0x3F80, np.uint16)
                if is_norm(name)
                else np.tile(noise[:count], -(-count // noise.size))[:count]
            )
            made[name] = dlpack.Producer(flat.reshape(info.shape), dtype=(dlpack.BFLOAT, 16, 1))
    return made


def is_norm(name: str) -> bool:
    return bool(re.search(r"norm(\.\w+)?\.weight$", name))


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32: truncated, not rounded."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def on_device(address: int, shape: tuple[int, ...]) -> dlpack.Producer:
    return dlpack.Producer(
        np.empty(0, np.uint16),
        shape=shape,
        strides=None,
        dtype=(dlpack.BFLOAT, 16, 1),
        data=address,
        device=2,
        version=(1, 0),
    )
