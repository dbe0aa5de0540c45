"""The loop's interface to a generator, and its two implementations: rm.Generator, and vLLM with
rollmesh inside.

The loop pushes weights, generates, and closes. `RolloutGenerator` is these calls with
rm.Generator's names and results, so rm.Generator implements it as it is. For one configuration both
give the same tokens and logprobs, bit for bit; a run can be resumed with the other.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import rollmesh as rm
from rollmesh.request.arguments import check_vocabulary
from rollmesh.run.config import Config
from rollmesh.run.data import eos_ids
from rollmesh.weights.self_test import Generates

_log = logging.getLogger("rollmesh.grpo")


class Pushed(Protocol):
    """What a push returns."""

    @property
    def gb_per_s(self) -> float: ...


class RolloutGenerator(Generates, Protocol):
    """Created without weights, from a model's configuration."""

    def sync_weights(self, source: Any, version: int, cast: bool = False) -> Pushed:
        """Takes a whole state dict as `version`, or raises and keeps serving the old one."""
        ...

    def abort(self) -> Any:
        """Ends what another thread generates."""
        ...

    def close(self) -> None: ...


def make_generator(
    config: Config, hf_config: Any, tokenizer: Any, comm: rm.comm.Comm | None = None
) -> RolloutGenerator:
    """`hf_config`: of the model whose weights will be pushed. `comm`: this process is one rank of
    the generator's mesh."""
    check_vocabulary(tokenizer, hf_config)
    g, eos, top_k = config.generator, eos_ids(tokenizer, hf_config), config.rollout.top_k
    if not eos:
        _log.warning(
            "no token ends a completion: neither tokenizer, config.json nor "
            "generation_config.json has an eos_token_id"
        )
    if top_k >= hf_config.vocab_size:
        raise rm.ConfigError(
            f"[rollout] top_k: expected below the {hf_config.vocab_size} tokens of the model's "
            f"vocabulary, got {top_k}"
        )
    if g.engine == "vllm":
        from rollmesh.run.vllm import VllmGenerator

        return VllmGenerator(g, hf_config, eos, routing=config.correction.routing_replay)
    return rm.Generator(
        rm.ModelSpec.from_hf(hf_config),
        mesh=rm.Mesh(tp=g.tp, dp=g.dp, ep=g.ep),
        comm=rm.comm.nccl(comm) if g.exchange == "nccl" else comm,
        sequence_parallel=g.sequence_parallel,
        device=g.device,
        dtype=g.dtype,
        ep_backend=g.ep_backend,
        eos_token_ids=eos,
        max_model_len=g.max_model_len,
        max_num_seqs=g.max_num_seqs,
        kv_cache_gib=g.kv_cache_gib,
        enforce_eager=g.enforce_eager,
        isa=g.isa,
        threads=g.threads or None,
        seed=config.seed,
    )
