"""One rank of torchtitan's own trainer, which pushes its state dict into a mesh of generators:
torchrun --nproc-per-node 4 titan_ranks.py.

For each layout of the JSON on the command line the model is parallelized by torchtitan's
parallelize_qwen3, filled with the same weights, and pushed. Rank 0 prints a line each;
test_titan_layouts.py says what has to be in it. [flavor, degrees of the trainer, [tp, dp, ep] of
the generator]."""

from __future__ import annotations

import json
import os
import sys
import warnings
import zlib
from types import SimpleNamespace
from typing import Any

import titan_cpu
import torch
from torch import distributed
from torch.distributed.tensor import DTensor, distribute_tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.models.qwen3 import parallelize_qwen3

import rollmesh as rm
from rollmesh.weights.resharding import Resharding

BACKEND = "partial_dtensor"  # the other backends want torch 2.15


def weights_of(module: torch.nn.Module) -> None:
    """Fills each tensor from a seed that depends on its name, whatever its layout. A fused wqkv is
    one tensor here, and three in the state dict."""
    biases = [
        (name, tensor) for name, tensor in module.named_buffers() if name.endswith("expert_bias_E")
    ]
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *biases]:
            whole = torch.empty(tensor.shape).normal_(
                std=0.05, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))
            )
            if isinstance(tensor, DTensor):
                shared = distribute_tensor(
                    whole, tensor.device_mesh, tensor.placements, src_data_rank=None
                )
                tensor.to_local().copy_(shared.to_local())
            else:
                tensor.copy_(whole)


def parallel(flavor: str, degrees: dict[str, int]) -> tuple[Any, rm.ModelSpec]:
    config = titan_cpu.model_registry(flavor, attn_backend="flex").model
    config.layers = config.layers[:1]
    spec = rm.ModelSpec.from_torchtitan(config)
    parallelism = ParallelismConfig(spmd_backend=BACKEND, **degrees)
    dims = ParallelDims.from_config(parallelism, distributed.get_world_size())
    dims.build_mesh()
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"):
        module = config.build()
    module = parallelize_qwen3(
        module, parallel_dims=dims, training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False), ac_config=None, dump_folder="",
    )  # fmt: skip
    module.to_empty(device="cpu")
    module.init_states()
    weights_of(module)
    return module, spec


class Watch:
    """Counts what comes from other ranks, in bytes, and the tensors that are gathered whole."""

    def __init__(self) -> None:
        self.received = self.gathered = 0
        exchange, full_tensor = Resharding._exchange, DTensor.full_tensor

        def watched(resharding: Resharding, give: list[list[Any]], take: list[list[Any]]) -> None:
            self.received += sum(view.nbytes for views in take for view in views)
            exchange(resharding, give, take)

        def counted(tensor: Any, **how: Any) -> Any:
            self.gathered += 1
            return full_tensor(tensor, **how)

        Resharding._exchange = watched  # type: ignore[method-assign]
        DTensor.full_tensor = counted  # type: ignore[method-assign]


def needed(module: Any, generator: rm.Generator) -> int:
    """Bytes of this rank's shards that its part of the trainer does not hold: counted element by
    element, by their numbers."""
    engine, total = generator._engine, 0
    engine.sync_begin(
        -1,
        cast=True,
        allow_nonfinite=False,
        allow_partial=True,
        allow_bias_removal=False,
        in_place=False,
    )
    for name, tensor in module.state_dict().items():
        boxes = engine.sync_resolve(name).wanted()
        mine = torch.zeros(tensor.shape, dtype=torch.bool)
        n = mine.ndim
        for rank, *box in boxes.tolist():
            if rank == distributed.get_rank():
                mine[
                    tuple(
                        slice(first, first + size)
                        for first, size in zip(box[:n], box[4 : 4 + n], strict=True)
                    )
                ] = True
        if isinstance(tensor, DTensor):
            numbers = torch.arange(mine.numel()).reshape(mine.shape)
            held = distribute_tensor(
                numbers, tensor.device_mesh, tensor.placements, src_data_rank=None
            ).to_local()
            mine.view(-1)[held.reshape(-1)] = False
            total += int(mine.sum()) * tensor.element_size()
    engine.sync_abort()
    return total


def main() -> None:
    distributed.init_process_group("gloo")
    utils.set_spmd_backend(BACKEND)
    rank, watch = distributed.get_rank(), Watch()
    for number, (flavor, degrees, (tp, dp, ep)) in enumerate(json.loads(sys.argv[1])):
        module, spec = parallel(flavor, degrees)
        strided = sum(
            "_StridedShard" in str(getattr(tensor, "placements", ""))
            for tensor in module.state_dict().values()
        )
        comm = rm.comm.shm(
            f"titan.{os.environ['TORCHELASTIC_RUN_ID']}.{number}",
            rank,
            distributed.get_world_size(),
            60.0,
        )
        options = {"dtype": "float32", "max_model_len": 64, "kv_cache_gib": 0.02, "threads": 1}
        with rm.Generator(
            spec, mesh=rm.Mesh(tp=tp, dp=dp, ep=ep), comm=comm, **options
        ) as generator:
            wanted = needed(module, generator)
            watch.received = watch.gathered = 0
            digest = generator.sync_weights(module.state_dict()).digest
            told = [digest, watch.received, wanted, watch.gathered, strided]
            everyone: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(everyone, told)
        if rank == 0:
            print(json.dumps(everyone), flush=True)  # noqa: T201 (the answer)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
