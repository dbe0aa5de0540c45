"""rollmesh.torch.patch under FSDP2: layers or whole models that fully_shard has sharded, over Gloo.

Input, oracles and bounds: those of test_torch_patch.py.
"""

from __future__ import annotations

import copy
from pathlib import Path

import helpers
import pytest
import torch
from gloo_ranks import on_ranks
from test_torch_patch import DENSE, MOE, drawn, generator_of, model_of, scored

import rollmesh as rm


def two_steps(rank: int) -> None:
    """Each rank has its half of the batch. The generator of rank 0 records, all ranks recompute."""
    from torch.distributed.fsdp import fully_shard

    for case in (DENSE, MOE):
        model = model_of(case, "bfloat16")
        alone = model_of(case, "bfloat16")
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
        with generator_of(case, "bfloat16") as generator:
            for version in range(2):
                rm.torch.push(model, generator, version)
                batch = drawn(generator, case, seed=version)
                whole = scored(alone, batch).logprobs
                halves = copy.copy(batch)
                rows = slice(3 * rank, 3 * rank + 3)
                halves.ids, halves.mask, halves.wanted = (
                    batch.ids[rows],
                    batch.mask[rows],
                    batch.wanted[rows],
                )
                mine = scored(model, halves).logprobs
                assert (mine == whole[rows]).all()
                if version == 0:
                    assert (batch.of(scored(alone, batch)) == batch.recorded).all()
                # FSDP takes the mean over its ranks.
                (2 * (mine * halves.wanted[:, 1:]).sum()).backward()
                (whole * batch.wanted[:, 1:]).sum().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                for (name, shard), other in zip(
                    model.named_parameters(), alone.parameters(), strict=True
                ):
                    full = shard.full_tensor()
                    assert (full - other).norm() <= 1e-2 * other.norm(), name
                    with torch.no_grad():
                        other.copy_(full)  # so that rounding errors are not carried on


def sharded_as_a_whole(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    for around in (False, True):
        model, alone = (rm.torch.patch(helpers.hf_model(DENSE)) for _ in range(2))
        whole = fully_shard(torch.nn.Sequential(model) if around else model)
        for _ in range(3):
            got, want = (m(torch.tensor([[1, 2, 3]])).logits for m in (whole, alone))
            assert (got == want).all()
            with torch.no_grad():
                for parameter in (*whole.parameters(), *alone.parameters()):
                    parameter.mul_(0.5)


@pytest.mark.full
def test_a_model_sharded_as_a_whole_follows_its_weights(tmp_path: Path) -> None:
    """The layers are not sharded separately. FSDP2 may gather weights into memory that an earlier
    pass used, without a change of the version counter."""
    on_ranks(1, sharded_as_a_whole, tmp_path)


@pytest.mark.full
def test_fsdp2(tmp_path: Path) -> None:
    on_ranks(2, two_steps, tmp_path)
