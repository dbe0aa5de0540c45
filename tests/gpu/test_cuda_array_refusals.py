"""The arrays of a CUDA device that rollmesh.ops refuses, and the errors when a device is missing,
full, broken or owned by another process.

Input: as in test_cuda_arrays.py, plus arguments and arrays that every call must refuse. Oracle: the
class of the error and its words, and the CPU's result for the next call. Bound: zero differing
bits. After every test all of the device's memory is free again.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import dlpack
import numpy as np
import ops_cases
import pytest
from gpu_trainer import Trainer
from test_cuda_arrays import DL_INT32, matrices, read, second, simulated, trainer  # noqa: F401  (fixtures)

from rollmesh import _core, errors, ops

pytestmark = [pytest.mark.usefixtures("simulated")]


# --------------------------------------------------------------------------------------- refusals
def test_arrays_of_two_places(trainer: Trainer, second: Trainer, rng: np.random.Generator) -> None:
    x, w = matrices(rng)
    for other, where in (
        (w, "the CPU"),
        (second.tensor(w), "cuda:1"),
        (ops.to_device(w, "cuda:1"), "cuda:1"),
    ):
        with pytest.raises(
            errors.UnsupportedTensorError, match=f"on one device, got w on {where} and x on cuda:0"
        ):
            ops.gemm(trainer.tensor(x), other, 17)
    with pytest.raises(errors.UnsupportedTensorError, match="got x on the CPU and w on cuda:0"):
        ops.gemm(x, ops.to_device(w), 17)
    core = ops.gemm(ops.to_device(x), ops.to_device(w), 17).op_device
    kernels, there = (
        _core.Kernels("cuda_fma", 1, core),
        [ops.to_device(array) for array in (np.zeros((5, 17), np.float32), x)],
    )
    for other, message in (
        (w, "of float32 on cuda:0, got .*ndarray"),
        (ops.to_device(w, "cuda:1"), "on cuda:0, got one on cuda:1"),
    ):
        with pytest.raises(errors.UnsupportedTensorError, match=message):
            kernels.run("gemm", {"out": there[0], "x": there[1], "w": other, "n": 17})
    # The other device alone works.
    assert (ops.gemm(second.tensor(x), second.tensor(w), 17).numpy() == ops.gemm(x, w, 17)).all()


def test_a_family_belongs_to_its_arrays(rng: np.random.Generator) -> None:
    x, w = matrices(rng)
    there = ops.to_device(x), ops.to_device(w)
    for isa in ("cuda_fma", "cuda_mma"):
        with pytest.raises(errors.ConfigError, match=f"since x is on the CPU, got '{isa}'"):
            ops.gemm(x, w, 17, isa=isa)
    for isa in ("ref", "cuda", "", 3):
        with pytest.raises(
            errors.ConfigError, match="expected cuda_fma or cuda_mma, since x is on cuda:0"
        ):
            ops.gemm(*there, 17, isa=isa)  # type: ignore[arg-type]
    for threads in (2, 0, None):
        with pytest.raises(errors.ConfigError, match="threads"):
            ops.gemm(*there, 17, threads=threads)  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="isa: expected a CUDA family"):
        _core.Kernels("cuda_fast", 1, there[0].op_device)
    with pytest.raises(errors.ConfigError, match="op_device: expected an OpDevice or None, got 3"):
        _core.Kernels("cuda_fma", 1, 3)  # type: ignore[arg-type]


def test_tensors_that_no_op_takes(trainer: Trainer, rng: np.random.Generator) -> None:
    x, w = matrices(rng)
    there = trainer.tensor(w)
    wide = rng.standard_normal((5, 66), np.float32)
    for wrong, kind, message in (
        (trainer.tensor(x, strides=(1, 5)), errors.LayoutError, "x: expected a C-contiguous array"),
        (trainer.tensor(wide[:, ::2]), errors.LayoutError, "x: expected a C-contiguous array"),
        (
            trainer.tensor(x, shape=(4, 33), byte_offset=2),
            errors.LayoutError,
            "x: expected an aligned array",
        ),
        (
            trainer.tensor(x, shape=(6, 33)),
            errors.UnsupportedTensorError,
            "x: expected memory of cuda:0",
        ),
        (
            trainer.tensor(x, dtype=DL_INT32),
            errors.DTypeError,
            r"x: expected bfloat16 \(its words in uint16\) or float32, got int32",
        ),
        (
            trainer.tensor(x, dtype=(dlpack.COMPLEX, 32, 1)),
            errors.DTypeError,
            "x: expected bfloat16, float32, .*got complex32",
        ),
        (
            trainer.tensor(x, dtype=(9, 8, 2)),
            errors.DTypeError,
            "x: expected bfloat16, .*got DLPack type of bits 8 in vectors",
        ),
        (
            trainer.tensor(x.reshape(1, 1, 1, 5, 33)),
            errors.ShapeError,
            "x: expected at most 4 dims, got 5",
        ),
        (trainer.tensor(x[None]), errors.ShapeError, "x: expected 2 dims, got 3"),
        (trainer.tensor(x[:, :32].copy()), errors.ShapeError, "w: expected size"),
    ):
        with pytest.raises(kind, match=message):
            ops.gemm(wrong, there, 17)
    with pytest.raises(errors.LayoutError, match="w: expected memory aligned to 16 bytes"):
        ops.gemm(trainer.tensor(x), trainer.tensor(np.concatenate([w[:1], w])[1:]), 17)
    with pytest.raises(errors.DTypeError, match="out: expected dtype float32, got int32"):
        ops.gather_rows(
            trainer.tensor(x),
            np.zeros(5, np.int32),
            out=trainer.tensor(np.zeros((5, 33), np.int32), dtype=DL_INT32),
        )
    with pytest.raises(
        errors.UnsupportedTensorError,
        match=r"inv_freq: expected a NumPy array of float32, got .*DeviceArray",
    ):
        ops.rope_table(ops.to_device(x[0].copy()), 4)  # type: ignore[arg-type]
    with pytest.raises(
        errors.UnsupportedTensorError, match="array: expected a NumPy array, got a list"
    ):
        ops.to_device([1.0])
    for wrong in (np.zeros(3, np.complex64), np.zeros(3, np.uint32)):
        with pytest.raises(
            errors.DTypeError,
            match=rf"expected a NumPy array of uint16 .*got dtype\('{wrong.dtype}'\)",
        ):
            ops.to_device(wrong)
    with pytest.raises(errors.LayoutError):
        ops.to_device(wide[:, ::2])


INDICES: dict[str, tuple[type[errors.Error], str, Callable[[Callable[[Any], Any]], Any]]] = {
    "embed": (errors.RequestError, "ids: expected "
                                   ".*got 9", lambda i: ops.embed(i([0, 9]), f32(9, 4))),
    "gather_rows": (errors.RequestError, "rows: expected "
                                         ".*got -1", lambda i: ops.gather_rows(f32(9, 4), i([-1]))),
    "gemm": (errors.ShapeError, "last of group_rows: "
                                ".*got 3",
                                lambda i: ops.gemm(f32(4, 32), f32(1024), 16,
                                group_rows=i([0, 1, 3]))),
    "activate": (errors.ShapeError, "out: .*",
    lambda i: ops.activate(f32(4, 32), "silu", out=f32(4, 31))),
    "swiglu": (errors.ShapeError, "group_rows: "
                                  ".*got 1",
                                  lambda i: ops.gemm_swiglu(f32(4, 32), f32(3072), 16,
                                  group_rows=i([0, 2, 1, 4]))),
    "permute": (errors.RequestError, "ids: expected "
                                     ".*got 2", lambda i: ops.permute(f32(1, 4), i([[0, 2]]), 2)),
    "combine": (errors.RequestError, "ids: expected "
                                     ".*got 1",
                                     lambda i: ops.combine(f32(2, 4), i([[0, 1]]), i([[1, 1]]),
                                     f32(1, 2), 2)),
    "place": (errors.RequestError, "place: expected "
                                   ".*got 2",
                                   lambda i: ops.combine(f32(2, 4), i([[0, 2]]), i([[0, 1]]),
                                   f32(1, 2), 2)),
    "lm_head": (errors.RequestError, "targets: expected "
                                     ".*got 16",
                                     lambda i: ops.lm_head(f32(1, 32), f32(512), 16,
                                     targets=i([16]))),
    "ranks": (errors.RequestError, "tokens: expected "
                                   ".*got -2", lambda i: ops.ranks(f32(1, 8), i([-2]))),
    "positions": (errors.RequestError, "positions: expected "
                                       ".*got 16", lambda i: attend(i([16]), i([0]), i([[0]]))),
    "seq_of_row": (errors.RequestError, "seq_of_row: expected "
                                        ".*got 1", lambda i: attend(i([0]), i([1]), i([[0]]))),
    "block_tables": (errors.RequestError, "block_tables: expected .*got 7 at "
                                          "index 1",
                                          lambda i: attend(i([0]), i([1]), i([[0], [7]]))),
}  # fmt: skip


def f32(*shape: int) -> Any:
    return ops.to_device(np.zeros(shape, np.float32))


def attend(positions: Any, seqs: Any, tables: Any) -> Any:
    return ops.attention(
        f32(1, 1, 32),
        f32(1, 1, 512),
        f32(1, 1, 512),
        positions,
        seqs,
        tables,
        page_size=16,
        scale=1.0,
    )


@pytest.mark.parametrize("there", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("name", INDICES)
def test_indices_out_of_range(name: str, there: bool) -> None:
    """Indices on the host and on the device: a kernel that used them would end the device. The next
    call uses its own indices."""
    kind, message, call = INDICES[name]
    with pytest.raises(kind, match=message):
        call(
            lambda values: (
                ops.to_device(np.array(values, np.int32)) if there else np.array(values, np.int32)
            )
        )
    table = np.arange(36, dtype=np.float32).reshape(9, 4)
    assert (
        ops.embed(np.array([8, 1], np.int32), ops.to_device(table)).numpy() == table[[8, 1]]
    ).all()


def test_indices_of_a_call_that_was_refused_come_to_no_other(rng: np.random.Generator) -> None:
    """A call that is refused for its output has requested its indices already; they must not arrive
    in the buffer of the next call."""
    table = rng.standard_normal((9, 4), np.float32)
    there, wrong = ops.to_device(table), ops.to_device(np.array([7, 7, 7], np.int32))
    out = ops.to_device(np.zeros((3, 5), np.float32))
    with pytest.raises(errors.ShapeError, match="out: expected size 4 in dim 1, got 5"):
        ops.embed(wrong, there, out=out)
    assert (ops.embed(np.array([0, 1, 2], np.int32), there).numpy() == table[:3]).all()


def test_slots_and_parameters_out_of_range(rng: np.random.Generator) -> None:
    case = ops_cases.qkv_case(rng, "float32", 2, 1, 1, 32, 16, "normal")
    given = {
        name: ops.to_device(array) for name, array in case.items() if name not in ("pages", "slots")
    }
    caches = dict(
        zip(("k_cache", "v_cache"), ops.kv_cache(1, 1, 16, 32, dtype="float32", device="cuda:0"))
    )
    for slots in (np.array([0, 16]), np.array([-2, 0])):
        with pytest.raises(errors.RequestError, match="slots: expected values in"):
            ops.qk_rope_kv(
                **given, **caches, slots=ops.to_device(slots), num_heads=1, page_size=16, eps=1e-6
            )
    logits, stats = f32(2, 8), f32(2, 2)
    for params in (
        ops.SampleParams(temperature=-1.0),
        ops.SampleParams(top_p=0.0),
        ops.SampleParams(forced=8),
    ):
        with pytest.raises(errors.RequestError):
            ops.sample(logits, stats, params)


# --------------------------------------------------------------------- what is missing, or breaks
def test_no_library_and_no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x = np.zeros(3, np.float32)
    monkeypatch.setenv("ROLLMESH_SIMT_DEVICES", "0")
    with pytest.raises(errors.ConfigError, match="expected an NVIDIA driver, got none"):
        ops.to_device(x)
    monkeypatch.setenv("ROLLMESH_SIMT_DEVICES", "1")
    with pytest.raises(errors.ConfigError, match=r"one of the driver's 1 device, .*got 'cuda:1'"):
        ops.to_device(x, "cuda:1")
    with pytest.raises(errors.ConfigError, match="expected 'cuda' or 'cuda:N'"):
        ops.to_device(x, "cpu")
    monkeypatch.setenv("ROLLMESH_CUDA_LIBRARY", str(tmp_path / "none.so"))
    caches, table = (
        (lambda: ops.kv_cache(1, 1, 16, 32, device="cuda")),
        (lambda: ops.rope_table(x, 1, device="cuda:0")),
    )
    for call in (lambda: ops.to_device(x), caches, table):
        with pytest.raises(errors.ConfigError, match="which is not a file"):
            call()
    with pytest.raises(errors.ConfigError, match="which is not a file"):
        ops.rms_norm(dlpack.Producer(x[None], device=2, version=(1, 0)), x, eps=1e-6)


def test_a_device_that_is_full(
    simulated: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """The arrays are kept: a smaller result that fits is computed afterwards."""
    x, w = matrices(rng)
    there = ops.to_device(x), ops.to_device(w)
    monkeypatch.setenv("ROLLMESH_SIMT_MEMORY", str(1 << 20))
    with pytest.raises(errors.CapacityError, match=r"an array takes .* MiB and cuda:0 has"):
        ops.kv_cache(64, 1, 64, 128, device="cuda:0")
    logits, stats = (
        ops.to_device(np.zeros((1, 100_000), np.float32)),
        ops.to_device(np.ones((1, 2), np.float32)),
    )
    monkeypatch.setenv(
        "ROLLMESH_SIMT_MEMORY", str((1 << 20) - _core.cuda_available(simulated, 0) + 8192)
    )
    with pytest.raises(errors.CapacityError, match="the workspace of ops takes"):
        ops.sample(logits, stats, ops.SampleParams())
    assert (ops.gemm(*there, 17).numpy() == ops.gemm(x, w, 17)).all()
    with pytest.raises(errors.ShapeError, match=r"fewer than 2\^63 bytes"):
        ops.kv_cache(2**31 - 1, 2**31 - 1, 16, 2, device="cuda:0")


@pytest.mark.parametrize(
    "failing", [nullcontext, lambda: ops.on_stream(2, "cuda:0")], ids=["waited", "stream"]
)
def test_a_fault_of_the_device(
    failing: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """The op that failed raises the error, or on a stream the next call does; every later call
    raises it too, and memory can still be freed."""
    x, w = matrices(rng)
    monkeypatch.setenv("ROLLMESH_SIMT_FAULT", "2")
    there = [ops.to_device(x), ops.to_device(w)]
    monkeypatch.delenv("ROLLMESH_SIMT_FAULT")
    assert (ops.gemm(*there, 17).numpy() == ops.gemm(x, w, 17)).all()

    def twice() -> None:  # on a stream the next call tells
        with failing():
            ops.gemm(*there, 17)
            ops.gemm(*there, 17)

    with pytest.raises(errors.DeviceError, match=r"cuda:0: .*illegal memory access"):
        twice()
    for call in (
        lambda: ops.gemm(*there, 17),
        there[0].numpy,
        lambda: ops.to_device(x),
        lambda: there[0].__dlpack__(stream=1),
    ):
        with pytest.raises(errors.DeviceError):
            call()
    there.clear()
    del call
    gc.collect()
    ops.release_devices()
    # The device was opened again.
    assert (ops.gemm(ops.to_device(x), ops.to_device(w), 17).numpy() == ops.gemm(x, w, 17)).all()


def test_a_forked_child_is_told(rng: np.random.Generator) -> None:
    x, w = matrices(rng)
    there = ops.to_device(x), ops.to_device(w)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            there[0].numpy()
        except errors.StateError as error:
            status = 7 if "forked child" in str(error) else 2
        del there
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (ops.gemm(*there, 17).numpy() == ops.gemm(x, w, 17)).all()
