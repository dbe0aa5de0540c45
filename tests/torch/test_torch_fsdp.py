"""rollmesh.torch.patch under FSDP2: layers or whole models that fully_shard has sharded, over Gloo.

Input, oracles and bounds: those of test_torch_patch.py.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from paths import child_environment
from test_torch_patch import DENSE, MOE, drawn, generator_of, model_of, scored

import rollmesh as rm


def fsdp_rank(rank: int, store: str) -> None:
    """Two steps of two ranks over Gloo, each with its half of the batch: the generator of rank 0
    records, all ranks recompute."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
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
                (
                    2 * (mine * halves.wanted[:, 1:]).sum()
                ).backward()  # FSDP takes the mean of its ranks
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
                        other.copy_(full)  # so that what rounding made of it is not carried on
    distributed.destroy_process_group()
    sys.stdout.write("OK\n")
    sys.stdout.flush()
    os._exit(0)  # torch's threads of Gloo may call std::terminate while the interpreter ends


SHARDED = """
    import os
    import sys
    import helpers
    import torch
    import rollmesh as rm
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    for around in (False, True):
        models = [helpers.hf_model(helpers.CASES_BY_NAME["dense"]) for _ in range(2)]
        model, alone = map(rm.torch.patch, models)
        whole = fully_shard(torch.nn.Sequential(model) if around else model)
        for _ in range(3):
            got, want = (m(torch.tensor([[1, 2, 3]])).logits for m in (whole, alone))
            assert (got == want).all()
            with torch.no_grad():
                for parameter in (*whole.parameters(), *alone.parameters()):
                    parameter.mul_(0.5)
    sys.stdout.write("OK\\n")
    sys.stdout.flush()
    os._exit(0)
"""


def test_a_model_sharded_as_a_whole_follows_its_weights() -> None:
    """Its layers are not sharded by themselves. FSDP2 gathers weights into memory that may be where
    an earlier pass had it, uncounted."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SHARDED)],
        env=child_environment(),
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "OK\n", ran.stderr


@pytest.mark.full
def test_fsdp2(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(r), str(tmp_path / "store")],
            env=child_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(2)
    ]
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)] == [
        (0, "OK\n")
    ] * 2


if __name__ == "__main__":
    fsdp_rank(int(sys.argv[1]), sys.argv[2])
