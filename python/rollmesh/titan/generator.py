"""The actor: VLLMGenerator's endpoints on rm.Generator.

    Controller ─► router ─► generate ─────────────► gen.agenerate          rank 0; the other ranks
                                                                           follow it
                        └─► pull_model_state_dict ─► torchstore ─► gen.sync_weights

Every rank of the actor's mesh is a process with a Generator; where there are several, rank 0 alone
makes the calls (Generator.follow).
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from monarch.actor import Actor, concurrent_endpoint, current_rank
from torchtitan.config import CompileConfig, Configurable
from torchtitan.experiments.rl.actors.generator import SamplingConfig, VLLMGenerator
from torchtitan.experiments.rl.observability import metrics as m
from torchtitan.experiments.rl.types import Completion
from torchtitan.observability import structured_logger as sl
from torchtitan.protocols.model_spec import ModelSpec as TitanSpec

import rollmesh as rm
from rollmesh.errors import ConfigError
from rollmesh.model.placement import placements
from rollmesh.options import DTYPES, check_option
from rollmesh.request.outputs import RequestOutput
from rollmesh.request.text import tokenizer_of_folder
from rollmesh.runtime.arguments import choice, integer
from rollmesh.runtime.messages import shown
from rollmesh.runtime.threads import to_thread
from rollmesh.titan.pull import names, pull, pull_shards

_DEFAULTS = VLLMGenerator.Config()


class RollmeshGenerator(Actor, Configurable):
    """Generates for TitanRL's Controller; replaces VLLMGenerator."""

    @dataclass(kw_only=True, slots=True)
    class Config(VLLMGenerator.Config):
        """VLLMGenerator's fields, and rollmesh's own.

        These fields of VLLMGenerator keep their meaning: parallelism (one process per rank),
        sampling, model_dtype, max_num_batched_tokens, debug.seed, cudagraph.enable (on a GPU), and
        reset_running_requests_on_weight_sync: True recomputes the KV of running requests, False
        keeps the stale KV. gpu_memory_limit is the share of a GPU's free memory if kv_cache_gib is
        None. The other fields of debug and cudagraph, parallelism.spmd_backend and
        max_engine_steps_between_decisions have no effect, since results do not depend on them.

        ConfigError: override.imports, reset_prefix_cache_on_weight_sync=False, another
        intra_generator_router than the default.
        """

        mesh: rm.Mesh | None = None
        """Ranks that are threads of one process, where parallelism is 1; None: the degrees of
        parallelism, a process each."""

        device: str = "cpu"
        """As rm.Generator's: "cpu" or "cuda"."""

        kv_cache_gib: float | None = 1.0
        """KV cache of each rank in units of 2^30 bytes; None: gpu_memory_limit decides."""

        max_model_len: int | None = None
        """Most positions of a sequence; None: the model's max_seq_len."""

        threads: int | None = None
        """Of each process; None: one for each core it may use."""

        def __post_init__(self) -> None:
            self._check_types()
            VLLMGenerator.Config.__post_init__(self)
            if self.override.imports:
                raise ConfigError(
                    f"generator.override: expected none, got {shown(self.override.imports)}; "
                    "install(config, override=OverrideConfig()) drops them"
                )
            if not self.reset_prefix_cache_on_weight_sync:
                raise ConfigError(
                    "generator.reset_prefix_cache_on_weight_sync: expected True, as old KV serves "
                    "no new request, got False"
                )
            if self.intra_generator_router != _DEFAULTS.intra_generator_router:
                raise ConfigError(
                    "generator.intra_generator_router: expected the default, as rollmesh chooses "
                    f"the dp rank, got {shown(self.intra_generator_router)}"
                )
            if self.mesh is not None and self.num_processes > 1:
                raise ConfigError(
                    f"generator.mesh: expected None with {self.num_processes} processes, "
                    f"got {self.mesh}"
                )

        def _check_types(self) -> None:
            for field in fields(VLLMGenerator.Config):
                default, value = getattr(_DEFAULTS, field.name), getattr(self, field.name)
                if (is_dataclass(default) or isinstance(default, bool)) and not isinstance(
                    value, type(default)
                ):
                    raise ConfigError(
                        f"generator.{field.name}: expected a {type(default).__qualname__}, got "
                        f"{shown(value)}"
                    )

        @property
        def num_processes(self) -> int:
            return int(
                self.parallelism.data_parallel_degree * self.parallelism.tensor_parallel_degree
            )

        def spec_of(self, model: TitanSpec) -> rm.ModelSpec:
            """ConfigError if the generator does not compute this model, or not with these
            settings."""
            spec = read_spec(model)
            if self.max_model_len is not None:
                integer("generator.max_model_len", self.max_model_len, 1, model.model.max_seq_len)
            for name in ("device", "threads", "kv_cache_gib", "max_num_batched_tokens"):
                if (value := getattr(self, name)) is not None:
                    check_option(name, value, "generator.")
            choice("generator.model_dtype", self.model_dtype, DTYPES)
            if self.debug.seed is not None:
                integer("generator.debug.seed", self.debug.seed, 0, 2**63 - 1)
            _params_of(self.sampling)
            placements(spec, *self.made_mesh.degrees)
            return spec

        @property
        def made_mesh(self) -> rm.Mesh:
            """ConfigError if `mesh` is none, or the degrees break a rule."""
            if self.mesh is not None:
                if not isinstance(self.mesh, rm.Mesh):
                    raise ConfigError(f"generator.mesh: expected a Mesh, got {shown(self.mesh)}")
                return self.mesh
            degrees = self.parallelism
            return rm.Mesh(
                tp=degrees.tensor_parallel_degree,
                dp=degrees.data_parallel_degree,
                ep=degrees.expert_parallel_degree,
            )

    def __init__(
        self,
        config: Config,
        *,
        model_spec: TitanSpec,
        model_path: str,
        compile_config: CompileConfig,
        max_num_seqs: int,
        output_dir: str,
    ):
        del compile_config  # rollmesh compiles no model
        rank = current_rank().rank
        sl.init_structured_logger(
            source="rl_generator",
            output_dir=output_dir,
            rank=rank,
            enable=config.debug.enable_structured_logging,
        )
        logging.getLogger("torchstore.transport").setLevel(logging.WARNING)
        self.config, self.policy_version, self._rank = config, 0, rank
        self._in_flight: set[str] = set()
        self._follower: asyncio.Task[None] | None = None
        self._is_started = False
        self.gen = _make_generator(config, model_spec, model_path, max_num_seqs)

    @concurrent_endpoint
    async def sync_log_step(self, step: int, relative_step: int | None = None) -> None:
        """The step of torchtitan's structured log."""
        sl.set_step(step, relative_step=relative_step)

    @concurrent_endpoint
    async def start_engine_loop(self) -> None:
        """On all ranks, once, before the first generate: ranks above 0 begin to follow rank 0."""
        if self._is_started:
            return
        self._is_started = True
        if self._rank == 0:
            await to_thread(self.gen.follow)
            return
        loop = asyncio.get_running_loop()

        def pieces(version: int | None) -> Mapping[str, Any]:
            shards = self._shards(asyncio.run_coroutine_threadsafe(names(), loop).result())
            return asyncio.run_coroutine_threadsafe(pull_shards(shards), loop).result()

        self._follower = asyncio.create_task(to_thread(self.gen.follow, pieces))

    def _shards(self, names: list[str]) -> dict[str, rm.Shard]:
        return {name: self.gen.shard(name) for name in names}

    @concurrent_endpoint
    @sl.log_trace_span("generate")
    async def generate(
        self,
        prompt_token_ids: list[int],
        *,
        request_id: str,
        routing_session_id: str,
        sampling_config: SamplingConfig | None = None,
        metrics_prefix: str = "generator",
    ) -> Completion:
        """Completes one prompt, on rank 0. request_id: comes back in the Completion; ValueError if
        one of that name is in flight. routing_session_id: for the router between generators
        only."""
        del routing_session_id
        self._check_rank_0("generate")
        if request_id in self._in_flight:
            raise ValueError(f"request_id {request_id!r} is already in flight")
        self._in_flight.add(request_id)
        try:
            params = _params_of(sampling_config or self.config.sampling)
            # Otherwise all generators would draw alike.
            if params.seed is None and self.config.debug.seed is None:
                params = replace(params, seed=secrets.randbits(63))
            output = await self.gen.agenerate(prompt_token_ids, params)
            in_flight = len(self._in_flight)
        finally:
            self._in_flight.discard(request_id)
        return _completion(
            output, request_id, self.policy_version, _metrics(output, metrics_prefix, in_flight)
        )

    @concurrent_endpoint
    @sl.log_trace_span("pull_model_state_dict")
    async def pull_model_state_dict(self, version: int) -> None:
        """On rank 0: the weights in the store become `version`, whole or not at all. Requests run
        on."""
        self._check_rank_0("pull_model_state_dict")
        if self.config.num_processes == 1:
            source: Mapping[str, Any] = await pull()
        else:
            source = await pull_shards(await to_thread(self._shards, await names()))
        keep_kv = not self.config.reset_running_requests_on_weight_sync
        report = await to_thread(
            self.gen.sync_weights, source, version=version, inflight="keep", keep_kv=keep_kv
        )
        self.policy_version = report.version

    @concurrent_endpoint
    async def close(self) -> None:
        """On all ranks. Requests in flight end with StateError."""
        if self._rank == 0 or self._follower is None:
            await to_thread(self.gen.close)
        else:
            await self._follower

    def _check_rank_0(self, endpoint: str) -> None:
        if self._rank != 0:
            raise RuntimeError(
                f"{endpoint}: expected a call to rank 0, got one to rank {self._rank}"
            )
        if not self._is_started:
            raise RuntimeError(f"{endpoint}: call start_engine_loop on all ranks first")


def read_spec(model: TitanSpec) -> rm.ModelSpec:
    spec = rm.ModelSpec.from_torchtitan(model)
    if spec.layer_kinds:  # PolicyTrainer calls the model without special_tokens, which it needs
        raise ConfigError("model_spec: expected Qwen3 or Llama 3 with TitanRL, got Qwen3.5")
    return spec


def _make_generator(
    config: RollmeshGenerator.Config, model: TitanSpec, model_path: str, max_num_seqs: int
) -> rm.Generator:
    degrees = config.parallelism
    eos = getattr(
        tokenizer_of_folder(Path(model_path)), "eos_token_id", None
    )  # a request brings the renderer's stop tokens besides
    options: dict[str, Any] = {}
    if config.max_num_batched_tokens is not None:
        options["max_num_batched_tokens"] = config.max_num_batched_tokens
    return rm.Generator(
        config.spec_of(model),
        mesh=config.made_mesh,
        comm=_comm(config) if config.num_processes > 1 else None,
        device=config.device,
        dtype=config.model_dtype,
        sequence_parallel=degrees.enable_sequence_parallel,
        eos_token_ids=[] if eos is None else eos,
        max_model_len=model.model.max_seq_len
        if config.max_model_len is None
        else config.max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_gib=config.kv_cache_gib,
        memory_fraction=config.gpu_memory_limit,
        enforce_eager=not config.cudagraph.enable,
        threads=config.threads,
        seed=config.debug.seed or 0,
        **options,
    )


def _comm(config: RollmeshGenerator.Config) -> rm.comm.Comm:
    """Between the processes of this actor's mesh, whose environment is that of torchrun."""
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        between: Any = rm.comm.shm()
    else:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        atexit.register(
            dist.destroy_process_group
        )  # else the threads of Gloo may end the process with SIGABRT
        between = rm.comm.torch(dist.group.WORLD)
    return rm.comm.nccl(between) if config.device.startswith("cuda") else between


def _params_of(sampling: SamplingConfig) -> rm.SamplingParams:
    values = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    return rm.SamplingParams(**{**values, "stop_token_ids": values["stop_token_ids"] or ()})


def _completion(
    output: RequestOutput, request_id: str, policy_version: int, metrics: list[m.Metric]
) -> Completion:
    [sample] = output.outputs
    # A request that was aborted before its first token has no versions.
    versions = sample.versions if len(sample.versions) else [policy_version]
    return Completion(
        min_policy_version=int(min(versions)),
        max_policy_version=int(max(versions)),
        request_id=request_id,
        token_ids=sample.token_ids.tolist(),
        token_logprobs=sample.logprobs.tolist(),
        finish_reason=sample.finish_reason,
        metrics=metrics,
    )


def _metrics(output: RequestOutput, prefix: str, in_flight: int) -> list[m.Metric]:
    """VLLMGenerator's, under its names."""
    times, count = output.metrics, len(output.outputs[0].token_ids)
    assert times is not None
    values = {
        "num_cached_tokens": output.num_cached_tokens,
        "inflight_requests_at_completion": in_flight,
        "queue_time_ms": 1e3 * (times.scheduled_ts - times.queued_ts),
    }
    if count > 0:
        values["time_to_first_token_ms"] = 1e3 * (times.first_token_ts - times.queued_ts)
        values["prefill_time_ms"] = 1e3 * (times.first_token_ts - times.scheduled_ts)
    if count > 1:
        decode = values["decode_time_ms"] = 1e3 * (times.last_token_ts - times.first_token_ts)
        values["inter_token_latency_ms"] = decode / (count - 1)
    return [
        m.Metric(f"{prefix}/{name}", kind(float(value)))
        for name, value in values.items()
        for kind in (m.Mean, m.Max)
    ]
