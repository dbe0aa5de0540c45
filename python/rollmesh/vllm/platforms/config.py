"""Reads vLLM's configuration: refuses unsupported options, changes others, and returns the options
from which the engine is made.

Unsupported options that would change the results raise ConfigError in the user's own LLM(…) call.
Options that choose among vLLM's kernels (compilation, CUDA graphs, custom all-reduce, load_format)
are accepted without effect.

Options that vLLM does not have belong in additional_config, which vLLM provides for platforms:
LLM(…, additional_config={"rollmesh": {"threads": 8}}); see `Options`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollmesh import _core
from rollmesh._core import usable_cores
from rollmesh.distributed.mesh import Mesh
from rollmesh.errors import ConfigError
from rollmesh.model.spec import ModelSpec
from rollmesh.options import DTYPES, check_option
from rollmesh.runtime.arguments import choice, integer
from rollmesh.runtime.devices import CUDA_FAMILIES
from rollmesh.runtime.messages import listed, shown
from rollmesh.vllm.update_info import info_of

WORKER = "rollmesh.vllm.worker.worker.Worker"
SCHEDULER = "rollmesh.vllm.scheduler.Scheduler"
ASYNC_SCHEDULER = "rollmesh.vllm.scheduler.AsyncScheduler"
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
EXCHANGES = ("host", "nccl")
BACKEND = "rollmesh"  # name of the weight transfer backend
OMP_SET_BY_VLLM = "VLLM_OMP_NUM_THREADS_SET_BY_VLLM"


@dataclass(frozen=True, slots=True)
class Options:
    """additional_config["rollmesh"], a dict with some of these keys.

    threads            number of threads of a worker; None: the cores that this process may use,
                       divided by the number of workers on the machine
    ep_backend         the token dispatcher with enable_expert_parallel; see rm.Generator
    sequence_parallel  see rm.Generator
    isa                see rm.Generator
    exchange           "host": workers exchange activations through host memory; "nccl": through
                       NCCL, between GPUs. "host" works on every machine, so it is the default
    """

    threads: int | None = None
    ep_backend: str = "alltoall"
    sequence_parallel: bool = False
    isa: str | None = None
    exchange: str = "host"


# Attributes of the VllmConfig that must be None, False, 0 or missing, and why.
_OFF = {
    "model_config.is_multimodal_model": "only text is supported",
    "model_config.is_encoder_decoder": "only decoders are supported",
    "model_config.enable_prompt_embeds": "only token ids are supported",
    "model_config.quantization": "weights are bfloat16 or float32",
    "model_config.return_sampling_mask": "masks are not recorded",
    "model_config.use_fp64_gumbel": "draws are the engine's own, exact in float32 logits",
    "model_config.enable_trace_replay": "tokens are drawn, not replayed",
    "cache_config.kv_sharing_fast_prefill": "layers do not share KV",
    "cache_config.kv_offloading_size": "KV is not offloaded",
    "parallel_config.enable_eplb": "experts do not move between ranks",
    "parallel_config.enable_elastic_ep": "the mesh is fixed",
    "parallel_config.enable_dbo": "there is no dual batch overlap",
    "parallel_config.enable_batch_sharded_sampling": "all ranks sample",
    "parallel_config.enable_fault_tolerance": "a mesh ends with its first lost rank",
    "attention_config.backend": "attention is rollmesh's",
    "offload_config.uva.cpu_offload_gb": "weights are not offloaded",
    "offload_config.prefetch.offload_group_size": "weights are not offloaded",
    "lora_config": "LoRA adapters are not supported",
    "speculative_config": "speculative decoding is not supported",
    "diffusion_config": "diffusion models are not supported",
    "watermark_config": "watermarks are not supported",
    "kv_transfer_config": "KV connectors are not supported",
    "ec_transfer_config": "shared encoder caches are not supported",
    "engram_config": "engrams are not supported",
    "quant_config": "quantized weights are not supported",
}
# Attributes with other accepted values. If an attribute on the path is None, the feature is off.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "model_config.runner_type": (("generate",), "pooling models are not supported"),
    "model_config.logprobs_mode": (LOGPROBS_MODES, "logits are not returned"),
    "parallel_config.pipeline_parallel_size": ((1,), "there are no pipeline stages"),
    "parallel_config.prefill_context_parallel_size": ((1,), "there is no context parallelism"),
    "parallel_config.decode_context_parallel_size": ((1,), "there is no context parallelism"),
    "parallel_config.expert_placement_strategy": (("linear",), "experts are placed in order"),
    "parallel_config.all2all_backend": (
        ("allgather_reducescatter",),
        'use "ep_backend" of additional_config["rollmesh"]',
    ),
    "weight_transfer_config.backend": ((BACKEND,), "weights go through rollmesh's engine"),
}


# ----------------------------------------------------------------------------------------- refuse
def check(vllm_config: Any) -> None:
    """Raises ConfigError for the first unsupported option. Does nothing without a model, as in
    vLLM's own tests."""
    if vllm_config.model_config is None:
        return
    for path, why in _OFF.items():
        if value := _at(vllm_config, path):
            raise ConfigError(f"{path}: expected None, False or 0, got {shown(value)}; {why}")
    for path, (accepted, why) in _ONLY.items():
        if (value := _at(vllm_config, path)) not in (None, *accepted):
            raise ConfigError(
                f"{path}: expected {' or '.join(map(shown, accepted))}, got {shown(value)}; {why}"
            )
    _check_cache(vllm_config.cache_config, dtype_name(vllm_config.model_config.dtype))
    _check_sizes(vllm_config)
    options(vllm_config)
    spec = model_spec(vllm_config)
    mesh = mesh_of(vllm_config.parallel_config, vllm_config.model_config.is_moe)
    if mesh.world == 1 and options(vllm_config).exchange != "host":
        raise ConfigError("exchange: expected 'host' with one worker, got 'nccl'")
    if mesh.ep > 1 and spec.num_experts % mesh.ep:
        raise ConfigError(
            f"enable_expert_parallel over {mesh.ep} ranks, which does not divide num_experts = "
            f"{spec.num_experts}"
        )


def _at(vllm_config: Any, path: str) -> Any:
    """Returns the attribute at a path, or None if an attribute on the way is None."""
    return functools.reduce(
        lambda value, name: getattr(value, name, None), path.split("."), vllm_config
    )


def _check_cache(cache_config: Any, dtype: str) -> None:
    if cache_config.cache_dtype not in ("auto", dtype):
        raise ConfigError(
            f"kv_cache_dtype: expected 'auto' or the model's dtype {dtype!r}, got "
            f"{shown(cache_config.cache_dtype)}"
        )
    check_option("block_size", cache_config.block_size)
    if cache_config.prefix_match_unit not in (None, cache_config.block_size):
        raise ConfigError(
            f"prefix_match_unit: expected None or block_size = {cache_config.block_size}, got "
            f"{cache_config.prefix_match_unit}; "
            "only whole pages are shared"
        )


def _check_sizes(vllm_config: Any) -> None:
    """Checks the engine's own limits before a worker is started."""
    scheduler = vllm_config.scheduler_config
    check_option("max_model_len", vllm_config.model_config.max_model_len)
    check_option("max_num_seqs", scheduler.max_num_seqs)
    check_option("max_num_batched_tokens", scheduler.max_num_batched_tokens)
    integer("seed", vllm_config.model_config.seed, 0, 2**63 - 1)
    if (given := vllm_config.cache_config.kv_cache_memory_bytes) is not None and _workers_are_here(
        vllm_config
    ):
        integer("kv_cache_memory_bytes", given, 1, total_memory())


# ----------------------------------------------------------------------------------------- change
def update(vllm_config: Any) -> None:
    """Sets rollmesh's worker and scheduler, and disables compilation. Idempotent.

    Keeps the user's own worker or scheduler class if it derives from rollmesh's.
    """
    from vllm.config.compilation import CompilationMode, CUDAGraphMode

    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if parallel.worker_cls == "auto":
        parallel.worker_cls = WORKER
    elif parallel.worker_cls != WORKER:
        _check_derived("worker_cls", parallel.worker_cls, WORKER)
    if scheduler.scheduler_cls in (None, SCHEDULER, ASYNC_SCHEDULER):
        scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
    else:
        _check_derived(
            "scheduler_cls", scheduler.scheduler_cls, "rollmesh.vllm.scheduler.EndsFailed"
        )
    vllm_config.compilation_config.mode = CompilationMode.NONE
    vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE


def _check_derived(option: str, value: Any, base: str) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    given = resolve_obj_by_qualname(value) if isinstance(value, str) else value
    if not (isinstance(given, type) and issubclass(given, resolve_obj_by_qualname(base))):
        raise ConfigError(
            f"{option}: expected a class that derives from {base}, or none, got {shown(value)}"
        )


# ------------------------------------------------------------------------------------------- read
def model_spec(vllm_config: Any) -> ModelSpec:
    """Returns the model's spec, from the config that vLLM has read (with hf_overrides)."""
    return ModelSpec.from_hf(vllm_config.model_config.hf_config)


def dtype_name(dtype: Any) -> str:
    """Returns "bfloat16" or "float32" for a torch.dtype. Raises ConfigError for any other."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype: expected {' or '.join(DTYPES)}, got {shown(name)}")
    return name


def mesh_of(parallel_config: Any, is_moe: bool) -> Mesh:
    """Returns vLLM's degrees as a mesh. vLLM runs replicas of a dense model as separate engines, so
    each replica is a mesh with dp = 1."""
    tp = parallel_config.tensor_parallel_size
    dp = parallel_config.data_parallel_size if is_moe else 1
    return Mesh(
        tp=tp, dp=dp, ep=dp * tp if is_moe and parallel_config.enable_expert_parallel else 1
    )


def options(vllm_config: Any) -> Options:
    """Reads additional_config["rollmesh"]. Raises ConfigError for unknown keys and wrong values."""
    extra = vllm_config.additional_config
    # A SupportsHash object instead of a dict is for the user's own classes.
    if isinstance(extra, dict) and set(extra) - {"rollmesh"}:
        raise ConfigError(
            f'additional_config: expected "rollmesh" alone, got {listed(list(extra.items()))}'
        )
    given = extra.get("rollmesh", {}) if isinstance(extra, dict) else {}
    chosen = info_of(Options, given, ConfigError, 'additional_config["rollmesh"]')
    for name in ("threads", "ep_backend", "sequence_parallel"):
        check_option(name, getattr(chosen, name))
    # The name is checked on the worker's machine, which may be another one.
    if chosen.isa is not None and not isinstance(chosen.isa, str):
        raise ConfigError(f"isa: expected a str or None, got {shown(chosen.isa)}")
    # Imported here because vLLM is creating the platform when it imports this module.
    from vllm.platforms import current_platform

    if chosen.isa is not None and _workers_are_here(vllm_config):
        choice(
            "isa",
            chosen.isa,
            CUDA_FAMILIES if current_platform.engine_device == "cuda" else _core.available_isas(),
        )
    choice("exchange", chosen.exchange, EXCHANGES)
    if chosen.exchange == "nccl" and current_platform.engine_device != "cuda":
        raise ConfigError("exchange: expected 'host' where engines run on the CPU, got 'nccl'")
    return chosen


def total_memory() -> int:
    """Returns this machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _workers_are_here(vllm_config: Any) -> bool:
    return bool(vllm_config.parallel_config.distributed_executor_backend != "ray")


def num_threads(vllm_config: Any) -> int:
    """Returns the number of threads of one worker: the option, or the worker's share of the cores.

    OMP_NUM_THREADS counts only if vLLM set it to divide the cores; torchrun always sets it to 1.
    """
    asked = options(vllm_config).threads
    if asked is not None:
        return asked
    share = max(1, usable_cores() // local_workers(vllm_config.parallel_config))
    return min(256, share, *_share_of_vllm())


def cuda_ordinal(parallel: Any, local_rank: int, devices: int) -> int:
    """Returns the CUDA ordinal of a worker in this process: the GPU that vLLM assigned or, without
    an assignment, the worker's number on this machine."""
    assigned = getattr(parallel, "assigned_physical_gpu_ids", None)
    if assigned:
        physical = str(assigned[local_rank])
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        return visible.index(physical) if physical in visible else int(physical)
    return (
        int((parallel.data_parallel_rank_local or 0) * parallel.local_world_size + local_rank)
        % devices
    )


def local_workers(parallel: Any) -> int:
    if parallel.distributed_executor_backend == "external_launcher":
        return int(os.environ.get("LOCAL_WORLD_SIZE", parallel.world_size))
    return int(parallel.local_world_size * max(1, parallel.data_parallel_size_local))


def _share_of_vllm() -> Iterator[int]:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if os.environ.get(OMP_SET_BY_VLLM) == "1" and threads.isdecimal() and int(threads):
        yield int(threads)


def engine_seed(vllm_config: Any) -> int:
    """Returns the seed for requests without one. Replicas that are separate engines get different
    seeds."""
    parallel = vllm_config.parallel_config
    return int((vllm_config.model_config.seed + parallel.data_parallel_index) % 2**64)
