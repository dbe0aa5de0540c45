"""The options of a generator and of its engine: one row each, with name, type, default and doc.

SharedOptions      rows that the engine reads as the caller gave them
GeneratorOptions   the arguments of rollmesh.Generator: those rows, and rows that Generator converts
EngineOptions      what the engine reads: those rows, and results of the conversion

A row's type and its `check` decide which values are valid. The bounds of integers are the engine's
own (RM_ENGINE_OPTIONS in csrc/engine/engine.h). Generator's arguments and their documentation and
the command line (cli/options.py) follow from these rows. The [generator] table of a run
(run/config.py) and the integrations with vLLM and torchtitan name the rows that they have.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.distributed.comm import Comm
from rollmesh.distributed.mesh import Mesh, check_backend
from rollmesh.errors import ConfigError
from rollmesh.model.spec import ModelSpec
from rollmesh.runtime.arguments import (
    MIN_FLOAT64,
    boolean,
    choice,
    integer,
    is_real,
    thread_count,
)
from rollmesh.runtime.devices import device_name
from rollmesh.runtime.messages import shown

DTYPES = ("bfloat16", "float32")
MAX_GIB = 2**20
OF_A_RANK = {"of_a_rank": True}  # ranks of a mesh may differ: results do not depend on the option
P = ParamSpec("P")
S = TypeVar("S")
O = TypeVar("O")  # noqa: E741
Check = Callable[[str, Any], Any]  # from a name for messages and a value to the value in plain form


def option(
    default: Any,
    doc: str,
    check: Check | tuple[str, ...] | None = None,
    command: str | None = None,
    **more: Any,
) -> Any:
    """Declares a row.

    check    a function, or the valid words. None checks the type: bool, or an integer within the
             engine's bounds; values of other types are checked where they are used
    command  group of options of `rollmesh` commands that has the row: "mesh" or "engine"
    more     OF_A_RANK, if ranks of a mesh may differ in it
    """
    return field(default=default, metadata={"doc": doc, "check": check, "command": command, **more})


# ----------------------------------------------------------------------------------------- checks
def _instance_of(kind: type, expected: str) -> Check:
    def check(name: str, value: Any) -> Any:
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{name}: expected {expected}, got {shown(value)}")
        return value

    return check


def _page_positions(name: str, value: Any) -> int:
    if integer(name, value, *LIMITS["block_size"]) % 16:
        raise ConfigError(f"{name}: expected a multiple of 16, got {shown(value)}")
    return int(value)


def _gib(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if not is_real(value) or not 0.0 < value < MAX_GIB:
        raise ConfigError(
            f"{name}: expected a number of GiB above 0 and below {MAX_GIB}, got {shown(value)}"
        )
    return float(value)


def _share(name: str, value: Any) -> float:
    if not is_real(value) or not 0.0 < value <= 1.0:
        raise ConfigError(f"{name}: expected a number above 0 and at most 1, got {shown(value)}")
    if float(value) < MIN_FLOAT64:
        raise ConfigError(
            f"{name}: expected at least {MIN_FLOAT64}, the smallest normal float64, got "
            f"{shown(value)}"
        )
    return float(value)


# ------------------------------------------------------------------------------------------- rows
@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    dtype: str = option(
        "bfloat16",
        'dtype of weights, activations and KV: "bfloat16", or "float32" for debugging',
        DTYPES,
        command="engine",
    )
    ep_backend: str = option(
        "alltoall",
        'how tokens reach their experts if mesh.ep > 1: "alltoall", "allgather_reducescatter", '
        '"local_allreduce" (ep = tp). On GPUs the first two are the same in short steps, and in '
        "all steps with NCCL",
        lambda name, value: check_backend(value),
        command="mesh",
    )
    sequence_parallel: bool = option(
        False, "compute norms and residuals on token shards; no effect if mesh.tp = 1"
    )
    max_num_seqs: int = option(256, "largest number of samples that run at the same time")
    max_num_batched_tokens: int = option(
        2048, "largest number of rows of an engine step; longer prompts are prefilled in chunks"
    )
    block_size: int = option(
        16, "number of positions of a KV page, a multiple of 16", _page_positions
    )
    state_interval: int = option(
        0,
        "in models with delta nets: the prefix cache keeps a state every so many positions, a "
        "multiple of block_size, and at the last full page of a prompt and of a sequence. 0: 256 "
        "in whole pages, or fewer if the KV of fewer takes as much memory as a state",
    )
    enable_prefix_caching: bool = option(True, "reuse the KV of equal prompt prefixes")
    enforce_eager: bool = option(
        False,
        "on a GPU: launch each op of each step, instead of replaying decode steps as CUDA graphs; "
        "for debugging",
    )
    threads: int | None = option(
        None,
        "number of threads; None: one for each core that this process may use, by its affinity and "
        "the quota of its control groups",
        lambda name, value: thread_count(value, name),
        command="engine",
        **OF_A_RANK,
    )
    seed: int = option(
        0,
        "0 <= seed < 2^64. The seed of a request without one is made from this seed and the number "
        "of earlier requests",
    )
    profile: bool = option(False, "on the CPU: time every op, for profile()")


@dataclass(frozen=True)
class GeneratorOptions(SharedOptions):
    """The arguments of Generator, checked one by one. Generator checks rules that join several."""

    spec: ModelSpec
    _: KW_ONLY
    mesh: Mesh | None = option(
        None,
        "degrees of parallelism (rm.Mesh). Without comm, the ranks are threads of this process and "
        "share `threads`",
        _instance_of(Mesh, "a Mesh"),
    )
    comm: Comm | None = option(
        None,
        "None: all ranks are threads of this process. rm.comm.shm or rm.comm.torch: this process "
        "is one rank. rm.comm.nccl over one of these: NCCL moves activations between GPUs; "
        "otherwise the host moves them",
        _instance_of(Comm, "None, rm.comm.shm(…), rm.comm.torch(…) or rm.comm.nccl(…)"),
    )
    device: str = option(
        "cpu",
        '"cpu"; "cuda": rank r on GPU r modulo the number of GPUs; "cuda:N": all ranks of this '
        "process on GPU N",
        lambda name, value: device_name(value),
        command="mesh",
    )
    isa: str | None = option(
        None,
        'CPU: an instruction set ("ref", "avx2", …); None: the fastest. GPU: "cuda_fma" (default) '
        'is bit-identical to the CPU; "cuda_mma" uses tensor cores for bfloat16 and rounds '
        "differently",
        command="engine",
    )
    fast: bool = option(
        False,
        'with device="cuda" and bfloat16: use NVIDIA\'s cuBLASLt for dense matmuls. Their sums may '
        'depend on the batch, so samples have no contract, metrics()["invariant"] is False, and '
        "score() equals generate() only up to rounding. Experts, router and lm_head still use "
        "rollmesh's kernels (cuda_mma if isa=None)",
    )
    tokenizer: Any = option(
        None,
        "a transformers tokenizer or a tokenizers.Tokenizer, for text prompts, output texts and "
        "stop strings",
    )
    eos_token_ids: int | Sequence[int] | None = option(
        None, "ids that end a sample; None: the tokenizer's and the model config's"
    )
    max_model_len: int | None = option(
        None,
        "largest number of positions of a sequence, prompt and completion together; the rope table "
        "has this length. None: 4096, or the config's max_position_embeddings for the rope types "
        "dynamic and longrope, whose frequencies depend on it. A warning is logged if it exceeds "
        "the number of positions in the config",
        command="engine",
    )
    kv_cache_gib: float | None = option(
        1.0,
        "size of each rank's KV cache in units of 2^30 bytes; None: memory_fraction decides",
        _gib,
        command="engine",
    )
    memory_fraction: float = option(
        0.9,
        "with kv_cache_gib=None: the share of the device's free memory for two copies of the "
        "weights and the KV cache. The rest is left for CUDA graphs, NCCL and the trainer's "
        "tensors. Ranks on one GPU (on the CPU: on one machine) share it. All ranks of a mesh get "
        "the same number of pages, the largest number that fits on every rank",
        _share,
    )

    def __post_init__(self) -> None:
        if not isinstance(self.spec, ModelSpec):
            raise ConfigError(
                "spec: expected a ModelSpec (ModelSpec.from_hf makes one), got a "
                f"{type(self.spec).__name__}"
            )
        for name in ROWS:
            object.__setattr__(self, name, check_option(name, getattr(self, name)))

    def shared(self) -> dict[str, Any]:
        """Returns the rows that the engine reads as they are."""
        return {name: getattr(self, name) for name in _SHARED}


@dataclass(frozen=True, kw_only=True)
class EngineOptions(SharedOptions):
    """Options as ext/engine/options.c reads them. A rank's device and libraries are found by the
    modules named here; text of None means none."""

    max_model_len: int
    eos_token_ids: NDArray[np.int32]
    tp: int = 1
    dp: int = 1
    ep: int = 1
    kv_bytes: int = 0
    memory_fraction: float = 0.0  # decides if kv_bytes is 0
    external_pages: int = 0  # > 0: an external scheduler (vLLM's) hands out so many KV pages
    isa: str | None = field(default=None, metadata=OF_A_RANK)  # of the CPU
    # None: the CPU. This and the next: runtime/devices.py
    cuda_library: str | None = field(default=None, metadata=OF_A_RANK)
    cuda_ordinal: int = field(default=-1, metadata=OF_A_RANK)
    cuda_family: str | None = None
    # This and the next: distributed/comm.py
    nccl_library: str | None = field(default=None, metadata=OF_A_RANK)
    cublas_library: str | None = field(default=None, metadata=OF_A_RANK)  # runtime/cublas.py
    cublas_version: str | None = None

    def shared_by_ranks(self) -> dict[str, Any]:
        """Returns the options that must be equal on all ranks of a mesh."""
        return {
            row.name: getattr(self, row.name)
            for row in fields(self)
            if not row.metadata.get("of_a_rank")
        }


# --------------------------------------------------------------------------------- use of the rows
LIMITS = _core.engine_limits()  # name → (least, most)
_HINTS = get_type_hints(GeneratorOptions)
# Generator's arguments after `spec`, those that it converts first.
_SHARED = [row.name for row in fields(SharedOptions)]
ROWS = {
    row.name: row
    for row in sorted(fields(GeneratorOptions), key=lambda row: row.name in _SHARED)
    if row.name != "spec"
}


def kind_of(name: str) -> type:
    """Returns the type of a row's values other than None."""
    hint = _HINTS[name]
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) else object


def check_option(name: str, value: Any, prefix: str = "") -> Any:
    """Returns the value of a row in plain form. Raises ConfigError, which names the row after
    `prefix`, if it is not valid."""
    row, kind, where = ROWS[name], kind_of(name), prefix + name
    rule = row.metadata["check"]
    if isinstance(rule, tuple):
        return choice(where, value, rule)
    if rule is not None:
        return rule(where, value)
    if kind is bool:
        return boolean(where, value)
    if kind is int and not (value is None and row.default is None):
        return integer(where, value, *LIMITS[name])
    return value


def documentation() -> str:
    """Returns the names and docs of Generator's arguments, as a docstring lists them."""
    rows = {"spec": "the model", **{name: row.metadata["doc"] for name, row in ROWS.items()}}
    return "\n".join(
        textwrap.fill(doc, 100, initial_indent=f"    {name:<24}", subsequent_indent=" " * 28)
        for name, doc in rows.items()
    )


def takes(
    options: Callable[P, O],
) -> Callable[[Callable[[S, O], None]], Callable[Concatenate[S, P], None]]:
    """Decorates a method whose argument is an instance of the dataclass `options`: callers pass
    the arguments of the dataclass instead."""

    def decorate(method: Callable[[S, O], None]) -> Callable[Concatenate[S, P], None]:
        @functools.wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            method(self, options(*args, **kwargs))

        rows = inspect.signature(options).parameters.values()
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        call.__signature__ = inspect.Signature([own, *rows])  # type: ignore[attr-defined]
        return call

    return decorate
