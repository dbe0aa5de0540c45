"""A vLLM worker: one process per rank (or the engine core's own process, with one rank). vLLM
calls, in this order:

    __init__ ─► init_device ─► load_model ─► get_kv_cache_spec, determine_available_memory ─►
    initialize_from_config ─► steps …

Weights come from a trainer (weight_updates.py), not from a file. The engine is made in
initialize_from_config, when the number of KV pages is known. Ranks communicate through shared
memory if all are on one machine, otherwise over vLLM's own Gloo group; with
additional_config={"rollmesh": {"exchange": "nccl"}} NCCL sends activations.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import distributed
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from rollmesh import _core
from rollmesh.distributed import comm
from rollmesh.distributed.peers import join
from rollmesh.distributed.rank_engine import RankEngine
from rollmesh.errors import CapacityError, ConfigError, StateError
from rollmesh.model.placement import Placement, placements
from rollmesh.model.sizes import kv_bytes_per_token, rank_bytes, state_bytes
from rollmesh.options import EngineOptions
from rollmesh.runtime.devices import Device, device_of
from rollmesh.vllm.platforms import config
from rollmesh.vllm.weight_updates import WeightUpdates, answers, replies
from rollmesh.vllm.worker.external_edits import ExternalEdits
from rollmesh.vllm.worker.runner import Runner

LAYOUT = "LBNHC"  # a name that vLLM requires; the engine has its own layout of pages
NAME_BYTES = 32


def _of_updates(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of Worker that calls this method of its WeightUpdates."""

    @replies
    @wraps(method)
    def call(self: Worker, *args: Any, **options: Any) -> Any:
        return method(self.updates, *args, **options)

    return call


class Worker(WorkerBase):  # type: ignore[misc]
    """The worker of one rank. vLLM may call any method by name between steps (collective_rpc)."""

    model_runner: Runner | None = None
    _nccl: str | None = None  # version and path of the library in use

    def init_device(self) -> None:
        """Joins vLLM's process groups, over which the ranks connect."""
        from vllm.distributed.parallel_state import (
            ensure_model_parallel_initialized,
            init_distributed_environment,
        )

        if self.model_runner is not None:
            self._refuse_again()
            return
        parallel = self.parallel_config
        self.device = torch.device("cpu")
        self.spec = config.model_spec(self.vllm_config)
        self.mesh = config.mesh_of(parallel, self.model_config.is_moe)
        init_distributed_environment(
            parallel.world_size, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        ensure_model_parallel_initialized(
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        )

    @replies
    def _refuse_again(self) -> None:
        raise StateError("init_device was called on a worker that has an engine; call it once")

    @replies
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Loads no weights; the trainer sends them later."""
        if load_dummy_weights:
            raise ConfigError(
                "load_dummy_weights: expected False, got True; weights come from a trainer only"
            )

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    # -------------------------------------------------------------------------------- the KV cache
    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Returns the same spec for all layers with pages, so that they share one block table.
        This includes sliding windows, whose pages are not freed early. vLLM has no part in states
        of sequences (external_scheduler.c), so that their size does not change the size of
        pages."""
        layers = self.spec.num_attention_layers
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=max(len(rank.kv_heads) for rank in self._placements()),
            head_size=kv_bytes_per_token(self.spec, 1, 1) // (2 * layers),  # as stored, padded
            dtype=self.model_config.dtype,
        )
        return {f"model.layers.{layer}.self_attn": spec for layer in range(layers)}

    def _placements(self) -> list[Placement]:
        return placements(self.spec, *self.mesh.degrees)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return [LAYOUT]

    def determine_available_memory(self) -> int:
        """Returns the bytes for pages: kv_cache_memory_bytes, or this worker's share of the free
        memory minus two copies of its weights; in both cases without the states that the engine
        adds to the pages (csrc/engine/kv_size.c)."""
        given = self.cache_config.kv_cache_memory_bytes
        return self._bytes_of_pages(self._cache_bytes() if given is None else int(given))

    def _bytes_of_pages(self, both: int) -> int:
        size, ranks = self.model_config.dtype.itemsize, self._placements()
        num_seqs: int = self.scheduler_config.max_num_seqs
        state = state_bytes(self.spec, max(len(rank.delta_heads) for rank in ranks), size)
        if not state:
            return both
        page: int = self.cache_config.block_size * kv_bytes_per_token(
            self.spec, max(len(rank.kv_heads) for rank in ranks), size
        )
        interval = -(-state // page)  # pages for each state that is kept
        left = both - (num_seqs + 1) * state
        if left < page:
            raise CapacityError(
                f"max_num_seqs={num_seqs}: expected more than {(num_seqs + 1) * state} bytes of KV "
                f"cache, a state of {state} bytes for each running request and another one, got "
                f"{both}"
            )
        caching = int(self.cache_config.enable_prefix_caching)
        return left * interval * page // (interval * page + caching * state)

    def _cache_bytes(self) -> int:
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        ranks = rank_bytes(self.spec, dtype, *self.mesh.degrees)
        # vLLM orders ranks by data parallel rank first, like rm.Mesh.
        weights = sum(ranks[self._group().rank_in_group].values())
        share = self._available_memory() * self.cache_config.gpu_memory_utilization
        if share <= 2 * weights:
            raise CapacityError(
                f"gpu_memory_utilization={self.cache_config.gpu_memory_utilization}: expected "
                f"more than {2 * weights} bytes, two copies of "
                f"this worker's weights, got {share:.0f}"
            )
        return int(share - 2 * weights)

    def _available_memory(self) -> float:
        """Returns this worker's share of its device's free memory, in bytes."""
        library, workers = _device().cuda_library, config.local_workers(self.parallel_config)
        if library is None:
            return min(available for _, available in _core.memory_pools()) / workers
        free = _core.cuda_available(library, self._cuda_ordinal(library))
        return free / -(-workers // _core.cuda_count(library))

    def _cuda_ordinal(self, library: str) -> int:
        return config.cuda_ordinal(self.parallel_config, self.local_rank, _core.cuda_count(library))

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Makes the engine, together with the other ranks."""
        options = config.options(self.vllm_config)
        library = _device().cuda_library
        engine_options = EngineOptions(
            dtype=config.dtype_name(self.model_config.dtype),
            isa=None if library else options.isa,
            threads=config.num_threads(self.vllm_config),
            max_model_len=self.model_config.max_model_len,
            max_num_seqs=self.scheduler_config.max_num_seqs,
            max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
            block_size=self.cache_config.block_size,
            seed=config.engine_seed(self.vllm_config),
            enable_prefix_caching=bool(self.cache_config.enable_prefix_caching),
            enforce_eager=bool(self.model_config.enforce_eager),
            eos_token_ids=np.zeros(0, np.int32),
            tp=self.mesh.tp,
            dp=self.mesh.dp,
            ep=self.mesh.ep,
            ep_backend=options.ep_backend,
            sequence_parallel=options.sequence_parallel,
            external_pages=kv_cache_config.num_blocks,
            cuda_library=library,
            cuda_ordinal=-1 if library is None else self._cuda_ordinal(library),
            cuda_family=options.isa if library else None,
        )
        edits = ExternalEdits(self.vllm_config)
        engine = self._make_engine(engine_options)
        updates = WeightUpdates(engine, self.vllm_config, self.rank)
        self.model_runner = Runner(engine, updates, edits, self.spec)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def _group(self) -> Any:
        from vllm.distributed.parallel_state import get_tp_group, get_world_group

        return get_world_group() if self.mesh.dp > 1 else get_tp_group()

    def _make_engine(self, options: EngineOptions) -> RankEngine:
        values = self.spec.engine_values(options.max_model_len)
        if self.mesh.world == 1:
            return join(values, options, None, self.mesh)
        group = self._comm()
        if config.options(self.vllm_config).exchange == "nccl":
            group = nccl = comm.nccl(group)
            self._nccl = str(nccl.library)
            nccl.place(Device(options.cuda_library, options.cuda_ordinal), self.mesh)
            options = replace(options, nccl_library=nccl.library.path)
        # Each data parallel rank has a different seed.
        return join(values, options, group, self.mesh, may_differ=("seed",))

    def _comm(self) -> comm.Comm:
        from vllm.distributed.parallel_state import in_the_same_node_as

        group = self._group()
        if not all(in_the_same_node_as(group.cpu_group, 0)) or self.mesh.world > comm.Shm.MAX_WORLD:
            return comm.torch(group.cpu_group)
        name = torch.frombuffer(
            bytearray(secrets.token_hex(NAME_BYTES // 2).encode()), dtype=torch.uint8
        )
        distributed.broadcast(name, group.ranks[0], group=group.cpu_group)
        return comm.shm(
            f"rollmesh-{bytes(name.tolist()).decode()}", group.rank_in_group, group.world_size
        )

    # --------------------------------------------------------------------------------------- steps
    @property
    def runner(self) -> Runner:
        if self.model_runner is None:
            raise StateError(
                "the worker has no engine: initialize_from_config was not called yet, or "
                "shutdown was"
            )
        return self.model_runner

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        return self.runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        return self.runner.sample_tokens(grammar_output)

    def execute_dummy_batch(self) -> None:
        """Takes part in a step of other data parallel ranks, if experts are spread over all of
        them."""
        self.runner.idle_step()

    def synchronize_device(self) -> None:
        """Does nothing: a step has finished when its call returns, and only text, decoders and
        drawn tokens are supported."""

    take_draft_token_ids = reset_mm_cache = reset_encoder_cache = synchronize_device

    def get_model(self) -> torch.nn.Module:
        return self.updates.model

    def check_health(self) -> None:
        """Raises an exception if the mesh was aborted."""
        self.runner.engine.stats()

    @replies
    def add_lora(self, lora: Any) -> bool:
        raise ConfigError("LoRA adapters are not supported")

    remove_lora = pin_lora = add_lora

    @replies
    def list_loras(self) -> set[int]:
        """Returns an empty set, since LoRA is not supported."""
        return set()

    @replies
    def profile(
        self, is_start: bool = True, profile_prefix: str | None = None, **kwargs: Any
    ) -> None:
        raise ConfigError(
            f"profile(is_start={is_start}) is not supported; use perf or py-spy on pid "
            f"{os.getpid()} for its C threads"
        )

    @replies
    def metrics(self) -> dict[str, Any]:
        """Returns the engine's counters, sizes and times, like Generator.metrics. Call it by
        collective_rpc("metrics")."""
        return {
            **self.runner.engine.stats(),
            "version": self.updates.weight_version(),
            "nccl": self._nccl,
        }

    @replies
    def why_failed(self, name: str) -> str | None:
        """Returns why a request failed, by the server's id for it; None if unknown."""
        return self.runner.why_failed(name)

    # ------------------------------------------------------------------------------ weight updates
    @property
    def answers(self) -> bool:
        """Whether this worker raises exceptions (weight_updates.replies)."""
        return answers(self.parallel_config, self.rank)

    @property
    def updates(self) -> WeightUpdates:
        return self.runner.updates

    def shutdown(self) -> None:
        """Frees all resources. Idempotent."""
        runner, self.model_runner = self.model_runner, None
        if runner is not None:
            runner.updates.shutdown()
            runner.engine.close()


for _name in (
    "init_weight_transfer_engine",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
    "shutdown_weight_transfer_engine",
    "weight_version",
    "compute_weight_checksums",
    "reset_weights",
    "sleep",
    "wake_up",
    "discard",
):
    setattr(Worker, _name, _of_updates(getattr(WeightUpdates, _name)))


def _device() -> Device:
    """Returns the device that the platform selected for engines."""
    from vllm.platforms import current_platform

    return device_of(current_platform.engine_device)
