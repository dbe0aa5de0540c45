"""The generator of a run: rm.Generator, or vLLM with rollmesh inside (run/vllm.py).

The loop pushes weights, generates and closes. `RolloutGenerator` has these calls with the names and
results of rm.Generator. For one configuration both generators give the same tokens and logprobs,
bit for bit, so a run can be resumed with the other.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any, Protocol

from rollmesh import Generator, Mesh, ModelSpec, SamplingParams, SyncReport
from rollmesh.comm import Comm, nccl
from rollmesh.errors import ConfigError
from rollmesh.options import ROWS
from rollmesh.request.arguments import check_vocabulary, eos_ids
from rollmesh.run.config import Config, GeneratorTable
from rollmesh.weights.self_test import Generates

# Keys of [generator] that are passed to rm.Generator as they are.
SAME = (ROWS.keys() & {key.name for key in fields(GeneratorTable)}) - {"comm", "threads"}
_log = logging.getLogger("rollmesh.grpo")


class RolloutGenerator(Generates, Protocol):
    """Created from a model's configuration, without weights."""

    def sync_weights(self, source: Any, version: int, cast: bool = False) -> SyncReport:
        """Loads a whole state dict as `version`, or raises and keeps serving the old version."""
        ...

    def abort(self) -> Any:
        """Ends the calls of generate in other threads."""
        ...

    def close(self) -> None: ...


def make_generator(
    config: Config, hf_config: Any, tokenizer: Any, comm: Comm | None = None
) -> RolloutGenerator:
    """Makes the generator of a run. hf_config: config of the model whose weights will be pushed.
    comm: the comm of this rank, if this process is a rank of the generator's mesh."""
    spec = ModelSpec.from_hf(hf_config)
    check_vocabulary(tokenizer, spec)
    g, eos, top_k = config.generator, eos_ids(None, tokenizer, spec), config.rollout.top_k
    if not eos:
        _log.warning(
            "no token ends a completion: neither tokenizer, config.json nor "
            "generation_config.json has an eos_token_id"
        )
    if top_k >= spec.vocab_size:
        raise ConfigError(
            f"[rollout] top_k: expected below the {spec.vocab_size} tokens of the model's "
            f"vocabulary, got {top_k}"
        )
    if g.engine == "vllm":
        from rollmesh.run.vllm import VllmGenerator

        return VllmGenerator(g, hf_config, eos, routing=config.correction.routing_replay)
    return Generator(
        spec,
        mesh=Mesh(tp=g.tp, dp=g.dp, ep=g.ep),
        comm=nccl(comm) if g.exchange == "nccl" else comm,
        eos_token_ids=eos,
        threads=g.threads or None,
        seed=config.seed,
        **{name: getattr(g, name) for name in SAME},
    )


def group_sampling(config: Config) -> SamplingParams:
    """Returns the parameters of a group of rollouts."""
    t = config.rollout
    filters: dict[str, Any] = {}
    if t.top_k:
        filters = {"top_k": t.top_k, "top_p": t.top_p, "min_p": t.min_p, "kept_tokens": True}
    return SamplingParams(
        n=t.samples, max_tokens=t.max_tokens, temperature=t.temperature, **filters
    )
