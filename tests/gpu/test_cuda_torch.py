"""torch's own tensors into a generator on a GPU: of this process, of another process (CUDA IPC),
and while their writer is still working. Without a GPU torch's tensors are on the CPU and the
generator's device is simulated, which only tests the tests.

Input: small models. Oracle: a CPU generator that received the same numbers by NumPy. Bound: 0
differing bits."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
from test_cuda_engine import DENSE, MOE, library  # noqa: F401  (fixtures)
from test_cuda_sources import from_the_host, logits

import rollmesh as rm
from rollmesh import sources

torch = pytest.importorskip("torch")


def on(where: str, config: helpers.Config, seed: int, dtype: str = "float32") -> dict[str, Any]:
    return {
        name: tensor.to(where)
        for name, tensor in helpers.state_dict(helpers.Case("", config), dtype, seed).items()
    }


@pytest.fixture
def where() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


# -------------------------------------------------------------------------------- of this process
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_a_state_dict(
    make: Callable[..., rm.Generator], where: str, config: helpers.Config, dtype: str
) -> None:
    gpu = make(config)
    report = gpu.sync_weights(on(where, config, 1, dtype), cast=True)
    assert (report.digest, logits(gpu)) == from_the_host(
        make, config, helpers.numpy_state_dict(config, 1, dtype)
    )


def test_views(make: Callable[..., rm.Generator], where: str) -> None:
    """Views: transposed, one of a stack, a part of a wider tensor, and a parameter that requires a
    gradient."""

    def view(tensor: Any, i: int) -> Any:
        if tensor.ndim < 2:
            return torch.nn.Parameter(tensor)
        wide = torch.cat([tensor, -tensor], dim=1)
        return [
            tensor.T.contiguous().T,
            torch.stack([-tensor, tensor])[1],
            wide[:, : tensor.shape[1]],
        ][i % 3]

    gpu = make(DENSE)
    report = gpu.sync_weights(
        {n: view(tensor, i) for i, (n, tensor) in enumerate(on(where, DENSE, 1).items())}, cast=True
    )
    assert (report.digest, logits(gpu)) == from_the_host(
        make, DENSE, helpers.numpy_state_dict(DENSE, 1)
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a stream of torch's: torch sees no GPU")
def test_an_optimizer_is_still_writing(make: Callable[..., rm.Generator]) -> None:
    """The optimizer writes on a separate stream, behind work that takes a while: the sync reads the
    final values."""
    gpu, state, stream = make(DENSE), on("cuda", DENSE, 1), torch.cuda.Stream()
    final = {name: tensor.clone() for name, tensor in state.items()}
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(100):
            busy = busy @ busy * 1e-3
        for name in state:
            state[name].copy_(final[name] + 0 * busy[0, 0].nan_to_num(0.0, 0.0, 0.0))
        report = gpu.sync_weights(state, cast=True)
    assert (report.digest, logits(gpu)) == from_the_host(
        make, DENSE, helpers.numpy_state_dict(DENSE, 1)
    )


# ----------------------------------------------------------------------------- of another process
def trainer(pipe: Connection, folder: Path, where: str) -> None:
    """Publishes a version for each seed that it receives, and changes the tensors in place when
    their reader has them."""
    with sources.SharedWriter(folder) as writer:
        pipe.send(writer.address)
        state = on(where, MOE, 0)
        while (seed := pipe.recv()) is not None:
            for name, tensor in on(where, MOE, seed).items():
                state[name].copy_(tensor)
            pipe.send(writer.publish(state, lend_to=1))
            writer.wait_until_read(120)
            for tensor in state.values():
                tensor.zero_()


@pytest.fixture
def remote(tmp_path: Path, where: str) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    process = context.Process(target=trainer, args=(end, tmp_path, where), daemon=True)
    process.start()
    end.close()
    yield pipe
    pipe.send(None)
    process.join(120)
    assert process.exitcode == 0


def test_versions_of_another_process(make: Callable[..., rm.Generator], remote: Connection) -> None:
    assert remote.poll(120)
    gpu = make(MOE)
    with sources.SharedReader(remote.recv()) as reader:
        for seed in (1, 2, 3):
            remote.send(seed)
            assert remote.poll(120)
            version = remote.recv()
            assert reader.refresh() == version
            report = gpu.sync_weights(reader, version=version, cast=True)
            assert (report.digest, logits(gpu)) == from_the_host(
                make, MOE, helpers.numpy_state_dict(MOE, seed)
            )
    assert np.isfinite(np.frombuffer(logits(gpu)[0], np.float32)).all()
