"""Checks of the generator's arguments: each returns the value in its plain form or raises an error that names what was seen and
what is wanted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np

from rollmesh.bounded import MAX_ITEMS, items_of, says_more_than
from rollmesh.comm import Comm
from rollmesh.errors import CapacityError, ConfigError, Error, RequestError
from rollmesh.mesh import Mesh
from rollmesh.sampling import SamplingParams
from rollmesh.show import shown
from rollmesh.spec import ModelSpec

MAX_TIMEOUT = 10**9  # 31 years: what every clock and lock can count
EP_BACKENDS = ("disabled", "local_allreduce", "allgather_reducescatter", "alltoall")
DEEPEP_LACKS = "an adapter over the deep_ep package, which needs NVSHMEM and a CUDA device for each rank"
BYTES = (bytes, bytearray, memoryview)  # iterable, and of integers, but no prompt
PARTS = {"weights": 1, "kv": 2}  # the bits of csrc/engine/engine.h, as the next
KEEP = 4
REAL = (int, float, np.integer, np.floating)
MAX_GIB = 2**20
MIN_FLOAT64 = 2.2250738585072014e-308  # the smallest normal one: what is below it the engine takes for 0


def check_surroundings(mesh: Mesh | None, comm: object, ep_backend: str, sequence_parallel: bool) -> None:
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ConfigError(f"mesh is a {type(mesh).__name__}, wanted a Mesh")
    if comm is not None and not isinstance(comm, Comm):
        raise ConfigError(f"comm = {shown(comm)}, wanted None, rm.comm.shm(…), rm.comm.torch(…) or rm.comm.nccl(…)")
    check_backend(ep_backend)
    if not isinstance(sequence_parallel, bool):
        raise ConfigError(f"sequence_parallel = {shown(sequence_parallel)}, wanted a bool")


def check_backend(name: Any) -> str:
    """A token dispatcher of this build. DeepEP's place is here: what it takes and gives is what the others do."""
    if isinstance(name, str) and name == "deepep":
        raise ConfigError(f"ep_backend = 'deepep' is not built in: it lacks {DEEPEP_LACKS}; wanted one of {', '.join(EP_BACKENDS)}")
    return choice("ep_backend", name, EP_BACKENDS)


def choice(name: str, value: Any, words: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in words:
        raise ConfigError(f"{name} = {shown(value)}, wanted one of {', '.join(words)}")
    return value


def integer(name: str, value: Any, low: int, high: int) -> int:
    return integer_of(ConfigError, name, value, low, high)


def integer_of(error: type[Error], name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= int(value) <= high:
        raise error(f"{name} = {shown(value)}, wanted an integer in [{low}, {high}]")
    return int(value)


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise ConfigError(f"{name} = {shown(value)}, wanted a bool")
    return bool(value)


def is_masked(array: Any) -> bool:
    """An array of numpy.ma, or of another class with a mask, which np.asarray drops without a word."""
    return isinstance(array, np.ndarray) and hasattr(type(array), "mask")


def page_positions(name: str, value: Any) -> int:
    if integer(name, value, 16, 4096) % 16:
        raise ConfigError(f"{name} = {shown(value)}, wanted a multiple of 16")
    return int(value)


def gib_bytes(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, REAL) or not 0.0 < value < MAX_GIB:
        raise ConfigError(f"{name} = {shown(value)}, wanted a number of GiB above 0 and below {MAX_GIB}")
    return int(float(value) * 2**30)


def share_of_memory(fraction: Any, kv_cache_gib: float | None) -> float:
    """memory_fraction, 0 where the size of the KV cache is said."""
    if isinstance(fraction, bool) or not isinstance(fraction, REAL) or not 0.0 < fraction <= 1.0:
        raise ConfigError(f"memory_fraction = {shown(fraction)}, wanted a number above 0 and at most 1")
    if float(fraction) < MIN_FLOAT64:
        raise ConfigError(f"memory_fraction = {shown(fraction)} is not 0, but below {MIN_FLOAT64}, the smallest normal float64")
    return 0.0 if kv_cache_gib is not None else float(fraction)


def eos_ids(given: int | Sequence[int] | None, tokenizer: Any, spec: ModelSpec) -> tuple[int, ...]:
    """The ids given; else the tokenizer's and the model config's together."""
    if given is None:
        from_tokenizer = getattr(tokenizer, "eos_token_id", None)
        given = sorted({*spec.eos_token_ids, *([] if from_tokenizer is None else [from_tokenizer])})
    ids = items_of(ConfigError, "eos_token_ids", given, spec.vocab_size) if hasattr(given, "__iter__") else [given]
    return tuple(integer("eos_token_ids", token, 0, spec.vocab_size - 1) for token in ids)


def check_vocabulary(tokenizer: Any, spec: ModelSpec) -> None:
    """A model may have more ids than its tokenizer (padding), never fewer."""
    count = getattr(tokenizer, "get_vocab_size", None)
    size = count() if callable(count) else len(tokenizer) if hasattr(tokenizer, "__len__") else 0
    if size > spec.vocab_size:
        raise ConfigError(f"the tokenizer has {size} tokens, wanted at most vocab_size = {spec.vocab_size}")


def deadline_of(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, REAL) or not timeout >= 0:
        raise ConfigError(f"timeout = {shown(timeout)}, wanted seconds >= 0 or None")
    if timeout == math.inf:
        return None
    if timeout > MAX_TIMEOUT:
        raise ConfigError(f"timeout is above {MAX_TIMEOUT} seconds; inf and None mean no limit")
    return time.monotonic() + float(timeout)


def prompt_list(prompts: Any) -> list[Any]:
    """One prompt or several. One: a text, a list of ints, or an integer array of one dim."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (Mapping, *BYTES)) or not hasattr(prompts, "__iter__"):
        raise RequestError(f"prompts is a {type(prompts).__name__}, wanted text, token ids, or a list of them")
    if getattr(prompts, "ndim", None) == 1:
        return [prompts]
    items = items_of(RequestError, "prompts", prompts)
    return [items] if items and isinstance(items[0], (int, np.integer)) else items


def check_ids(prompt: Any) -> None:
    """Nothing that NumPy would read in a way that nobody means, or for ever."""
    if isinstance(prompt, BYTES):
        raise RequestError(f"prompt is {type(prompt).__name__}, wanted text or token ids")
    if is_masked(prompt):
        raise RequestError("prompt is a masked array, wanted a plain one: .filled(value) makes it")
    if says_more_than(prompt, MAX_ITEMS):
        raise RequestError(f"prompt has more than {MAX_ITEMS} token ids, wanted at most {MAX_ITEMS}")


def param_list(params: Any, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    chosen = list(islice(params, count + 1)) if isinstance(params, Sequence) else []
    if len(chosen) != count or not all(isinstance(param, SamplingParams) for param in chosen):
        raise RequestError(f"params is not a SamplingParams or a sequence of {count} of them")
    return chosen


@contextmanager
def naming_prompt(index: int) -> Iterator[None]:
    """Says which prompt of the call was refused."""
    try:
        yield
    except (RequestError, CapacityError) as error:
        raise type(error)(f"prompt {index}: {error}") from error


def request_ids(ids: Any) -> list[int]:
    """One request id or several."""
    items = items_of(RequestError, "ids", ids) if hasattr(ids, "__iter__") else [ids]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
            raise RequestError(f"request id {shown(item)}, wanted an integer")
    return [int(item) for item in items]


def part_mask(parts: Any) -> int:
    names = [parts] if isinstance(parts, str) else list(islice(parts, len(PARTS) + 1)) if hasattr(parts, "__iter__") else []
    if not 0 < len(names) <= len(PARTS) or not all(isinstance(name, str) and name in PARTS for name in names):
        raise ConfigError(f"parts = {shown(parts)}, wanted 'weights', 'kv' or both")
    mask = 0
    for name in names:
        mask |= PARTS[name]
    return mask


def part_names(mask: int) -> str:
    return " and ".join(part for part, bit in PARTS.items() if mask & bit)
