"""vLLM's configuration, read by rollmesh: what of it is refused, what is changed, and what an engine is made from.

Refused is whatever would change what is computed, or would have to, and is not done here: each by a ConfigError that names the
option, the value seen and the value wanted, out of the user's own LLM(…) call. Options that choose among vLLM's kernels
(compilation, CUDA graphs, custom all-reduce, load_format) have nothing to choose here and are let through.

Settings of rollmesh that vLLM has no option for come in additional_config, vLLM's place for those of a platform:
LLM(…, additional_config={"rollmesh": {"threads": 8}}); see `Options`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from rollmesh import _core
from rollmesh.distributed.mesh import Mesh, check_backend
from rollmesh.errors import ConfigError
from rollmesh.model.spec import ModelSpec
from rollmesh.runtime.arguments import choice, integer, page_positions
from rollmesh.runtime.devices import CUDA_FAMILIES
from rollmesh.runtime.messages import listed, shown

WORKER = "rollmesh.vllm.worker.worker.Worker"
SCHEDULER, ASYNC_SCHEDULER = "rollmesh.vllm.scheduler.Scheduler", "rollmesh.vllm.scheduler.AsyncScheduler"
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
DTYPES = ("bfloat16", "float32")
EXCHANGES = ("host", "nccl")
BACKEND = "rollmesh"  # of weight transfer
OMP_SET_BY_VLLM = "VLLM_OMP_NUM_THREADS_SET_BY_VLLM"


@dataclass(frozen=True, slots=True)
class Options:
    """additional_config["rollmesh"], a dict with some of these keys.

    threads            of a worker; None: the cores that this process may use, shared out among the workers of the machine
    ep_backend         how tokens travel with enable_expert_parallel; see rm.Generator
    sequence_parallel  see rm.Generator
    isa                see rm.Generator
    exchange           "host": workers exchange by way of the host's memory, whatever they run on; "nccl": what lies in GPUs' memories goes
                       between them by NCCL, and the rest by the host. The first needs nothing of the machine, so it is the default
    """

    threads: int | None = None
    ep_backend: str = "alltoall"
    sequence_parallel: bool = False
    isa: str | None = None
    exchange: str = "host"


class _Rule(NamedTuple):
    """An option that has to have one of some values."""

    path: str  # attributes from the VllmConfig on
    wanted: tuple[Any, ...]
    why: str


# What vLLM offers and is not done here. An attribute on the way that is None has the feature switched off.
_RULES = (
    _Rule("model_config.runner_type", ("generate",), "models that pool are not served"),
    _Rule("model_config.is_multimodal_model", (False,), "only text goes in"),
    _Rule("model_config.is_encoder_decoder", (False,), "only decoders are served"),
    _Rule("model_config.enable_prompt_embeds", (False,), "only token ids go in"),
    _Rule("model_config.quantization", (None,), "weights are bfloat16 or float32"),
    _Rule("model_config.logprobs_mode", LOGPROBS_MODES, "logits are not given out"),
    _Rule("model_config.return_sampling_mask", (False,), "masks are not recorded"),
    _Rule("model_config.use_fp64_gumbel", (False,), "draws are the engine's own, exact in float32 logits"),
    _Rule("model_config.enable_trace_replay", (False,), "tokens are drawn, not replayed"),
    _Rule("cache_config.kv_sharing_fast_prefill", (False,), "every layer has KV of its own"),
    _Rule("cache_config.kv_offloading_size", (None, 0), "KV is not offloaded"),
    _Rule("parallel_config.pipeline_parallel_size", (1,), "there are no pipeline stages"),
    _Rule("parallel_config.prefill_context_parallel_size", (1,), "contexts are not split over ranks"),
    _Rule("parallel_config.decode_context_parallel_size", (1,), "contexts are not split over ranks"),
    _Rule("parallel_config.enable_eplb", (False,), "experts stay on their rank"),
    _Rule("parallel_config.expert_placement_strategy", ("linear",), "experts lie on the ranks in their order"),
    _Rule("parallel_config.all2all_backend", ("allgather_reducescatter",), 'see "ep_backend" of additional_config["rollmesh"]'),
    _Rule("parallel_config.enable_elastic_ep", (False,), "the mesh is fixed"),
    _Rule("parallel_config.enable_dbo", (False,), "a batch is not cut in two"),
    _Rule("parallel_config.enable_batch_sharded_sampling", (None, False), "all ranks have every draw"),
    _Rule("parallel_config.enable_fault_tolerance", (False,), "a mesh ends with its first lost rank"),
    _Rule("attention_config.backend", (None,), "attention is rollmesh's own"),
    _Rule("weight_transfer_config.backend", (BACKEND,), "weights come through rollmesh's engine"),
    _Rule("offload_config.uva.cpu_offload_gb", (0,), "weights are not offloaded"),
    _Rule("offload_config.prefetch.offload_group_size", (0,), "weights are not offloaded"),
)
_ABSENT = {
    "lora_config": "LoRA adapters",
    "speculative_config": "speculative decoding",
    "diffusion_config": "diffusion models",
    "watermark_config": "watermarks",
    "kv_transfer_config": "KV connectors",
    "ec_transfer_config": "encoder caches that are shared",
    "engram_config": "engrams",
    "quant_config": "quantized weights",
}


# ---------------------------------------------------------------------------------------------------------------- refuse
def check(vllm_config: Any) -> None:
    """ConfigError for the first thing that is asked for and not done. Without a model (as vLLM's own tests have it): nothing."""
    if vllm_config.model_config is None:
        return
    for name, what in _ABSENT.items():
        if getattr(vllm_config, name, None) is not None:
            raise ConfigError(f"{name} is set, wanted None: {what} are not offered")
    for rule in _RULES:
        value = _at(vllm_config, rule.path)
        if value is not _MISSING and value not in rule.wanted:
            raise ConfigError(f"{rule.path} = {shown(value)}, wanted {' or '.join(map(shown, rule.wanted))}: {rule.why}")
    _check_cache(vllm_config.cache_config, dtype_name(vllm_config.model_config.dtype))
    _check_sizes(vllm_config)
    options(vllm_config)
    spec = model_spec(vllm_config)
    mesh = mesh_of(vllm_config.parallel_config, vllm_config.model_config.is_moe)
    if mesh.world == 1 and options(vllm_config).exchange != "host":
        raise ConfigError("exchange = 'nccl', wanted 'host' or more workers: one alone exchanges nothing")
    if mesh.ep > 1 and spec.num_experts % mesh.ep:
        raise ConfigError(f"enable_expert_parallel over {mesh.ep} ranks, which does not divide num_experts = {spec.num_experts}")


class _Missing:
    """No such option, or one of a feature that is off."""


_MISSING = _Missing()


def _at(vllm_config: Any, path: str) -> Any:
    value = vllm_config
    for name in path.split("."):
        if value is None:
            return _MISSING
        value = getattr(value, name)
    return value


def _check_cache(cache_config: Any, dtype: str) -> None:
    if cache_config.cache_dtype not in ("auto", dtype):
        raise ConfigError(f"kv_cache_dtype = {shown(cache_config.cache_dtype)}, wanted 'auto' or the model's dtype {dtype!r}")
    page_positions("block_size", cache_config.block_size)
    if cache_config.prefix_match_unit not in (None, cache_config.block_size):
        raise ConfigError(
            f"prefix_match_unit = {cache_config.prefix_match_unit}, wanted None or block_size = {cache_config.block_size}: "
            "a page is shared whole"
        )


def _check_sizes(vllm_config: Any) -> None:
    """The engine's own limits, said before a worker is started."""
    scheduler = vllm_config.scheduler_config
    integer("max_model_len", vllm_config.model_config.max_model_len, 1, 2**24)
    integer("max_num_seqs", scheduler.max_num_seqs, 1, 2**16)
    integer("max_num_batched_tokens", scheduler.max_num_batched_tokens, 1, 2**20)
    integer("seed", vllm_config.model_config.seed, 0, 2**63 - 1)
    if (given := vllm_config.cache_config.kv_cache_memory_bytes) is not None and _workers_are_here(vllm_config):
        integer("kv_cache_memory_bytes", given, 1, total_memory())


# ---------------------------------------------------------------------------------------------------------------- change
def update(vllm_config: Any) -> None:
    """Puts rollmesh's worker and scheduler in, and switches compilation off. Doing it again changes nothing.

    A worker or scheduler class of the user's own stays if it derives from rollmesh's.
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
        _check_derived("scheduler_cls", scheduler.scheduler_cls, "rollmesh.vllm.scheduler.EndsFailed")
    vllm_config.compilation_config.mode = CompilationMode.NONE
    vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE


def _check_derived(option: str, value: Any, base: str) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    given = resolve_obj_by_qualname(value) if isinstance(value, str) else value
    wanted = resolve_obj_by_qualname(base)
    if not (isinstance(given, type) and issubclass(given, wanted)):
        raise ConfigError(f"{option} = {shown(value)}, wanted a class that derives from {base}, or none")


# ------------------------------------------------------------------------------------------------------------------ read
def model_spec(vllm_config: Any) -> ModelSpec:
    """The model, from the config that vLLM read (hf_overrides are in it)."""
    values = vllm_config.model_config.hf_config.to_dict()
    return ModelSpec.from_hf(values)


def dtype_name(dtype: Any) -> str:
    """ "bfloat16" or "float32" for a torch.dtype; ConfigError for any other."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype = {shown(name)}, wanted {' or '.join(DTYPES)}")
    return name


def mesh_of(parallel_config: Any, is_moe: bool) -> Mesh:
    """vLLM's degrees as a mesh. The replicas of a dense model are engines of their own to vLLM, so each is a mesh with dp = 1."""
    tp, dp = parallel_config.tensor_parallel_size, parallel_config.data_parallel_size if is_moe else 1
    return Mesh(tp=tp, dp=dp, ep=dp * tp if is_moe and parallel_config.enable_expert_parallel else 1)


def options(vllm_config: Any) -> Options:
    """Of additional_config["rollmesh"]; ConfigError for a key or a value that is not one."""
    extra = vllm_config.additional_config
    if isinstance(extra, dict) and set(extra) - {"rollmesh"}:  # a SupportsHash of the user's own is for his own classes
        raise ConfigError(f'additional_config has {listed(list(extra.items()))}, wanted "rollmesh" alone: the platform reads no other key')
    given = extra.get("rollmesh", {}) if isinstance(extra, dict) else {}
    if not isinstance(given, dict):
        raise ConfigError(f'additional_config["rollmesh"] = {shown(given)}, wanted a dict')
    known = [field.name for field in fields(Options)]
    if unknown := [(key, value) for key, value in given.items() if key not in known]:
        raise ConfigError(f'additional_config["rollmesh"] has {listed(unknown)}, wanted some of {", ".join(known)}')
    chosen = Options(**given)
    if chosen.threads is not None:
        integer("threads", chosen.threads, 1, 256)
    check_backend(chosen.ep_backend)
    if not isinstance(chosen.sequence_parallel, bool):
        raise ConfigError(f"sequence_parallel = {shown(chosen.sequence_parallel)}, wanted a bool")
    if chosen.isa is not None and not isinstance(chosen.isa, str):  # what its name may be, a ray worker's own machine says
        raise ConfigError(f"isa = {shown(chosen.isa)}, wanted a str or None")
    from vllm.platforms import current_platform  # which is being made when this module is imported

    if chosen.isa is not None and _workers_are_here(vllm_config):
        choice("isa", chosen.isa, CUDA_FAMILIES if current_platform.engine_device == "cuda" else _core.available_isas())
    choice("exchange", chosen.exchange, EXCHANGES)
    if chosen.exchange == "nccl" and current_platform.engine_device != "cuda":
        raise ConfigError("exchange = 'nccl', wanted 'host' where engines run on the CPU: NCCL moves what lies in GPUs' memories")
    return chosen


def total_memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _workers_are_here(vllm_config: Any) -> bool:
    return bool(vllm_config.parallel_config.distributed_executor_backend != "ray")


def num_threads(vllm_config: Any) -> int:
    """Threads of one worker: as asked for, or its share of the cores.

    OMP_NUM_THREADS counts only where vLLM has set it to share the cores out: torchrun sets it to 1 for everybody.
    """
    asked = options(vllm_config).threads
    if asked is not None:
        return asked
    shares = [max(1, len(os.sched_getaffinity(0)) // local_workers(vllm_config.parallel_config)), *_share_of_vllm()]
    return min(256, *shares)


def cuda_ordinal(parallel: Any, local_rank: int, devices: int) -> int:
    """The CUDA device of a worker, as this process counts them: the one that vLLM has assigned, else by its number on this machine."""
    assigned = getattr(parallel, "assigned_physical_gpu_ids", None)
    if assigned:
        physical, visible = str(assigned[local_rank]), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        return visible.index(physical) if physical in visible else int(physical)
    return int((parallel.data_parallel_rank_local or 0) * parallel.local_world_size + local_rank) % devices


def local_workers(parallel: Any) -> int:
    if parallel.distributed_executor_backend == "external_launcher":
        return int(os.environ.get("LOCAL_WORLD_SIZE", parallel.world_size))
    return int(parallel.local_world_size * max(1, parallel.data_parallel_size_local))


def _share_of_vllm() -> Iterator[int]:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if os.environ.get(OMP_SET_BY_VLLM) == "1" and threads.isdecimal() and int(threads):
        yield int(threads)


def engine_seed(vllm_config: Any) -> int:
    """The seed that requests without one get theirs from. Replicas that are engines of their own draw from different ones."""
    parallel = vllm_config.parallel_config
    return int((vllm_config.model_config.seed + parallel.data_parallel_index) % 2**64)
