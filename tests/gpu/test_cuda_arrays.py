"""Arrays of a CUDA device as arguments and results of rollmesh.ops: tensors of other libraries,
streams, consumers. Refusals and failures are in test_cuda_array_refusals.py.

Input: tensors of another library in this process (gpu_trainer.Trainer) whose work is still pending,
on the simulated device (tests/gpu/simt), which runs work only when a thread waits for it. Oracle:
the CPU's ops; for bf16 on tensor cores the order of docs/numerics.md §10 in exact sums. Bound: zero
differing bits. After every test all of the device's memory is free again."""

from __future__ import annotations

import ctypes as C
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cuda_device
import dlpack
import numpy as np
import ops_cases
import pytest
from gpu_trainer import OnGpu, Trainer

from rollmesh import _core, errors, ops
from rollmesh.runtime.devices import LIBRARY_SWITCH

pytestmark = [pytest.mark.usefixtures("simulated")]
DL_INT32, DL_INT64, DL_BFLOAT16 = (dlpack.INT, 32, 1), (dlpack.INT, 64, 1), (dlpack.BFLOAT, 16, 1)


@pytest.fixture
def simulated(simt_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The library of the simulated devices; every test must restore both devices."""
    library = str(simt_library)
    monkeypatch.setenv("ROLLMESH_CUDA_LIBRARY", library)
    before = [_core.cuda_available(library, ordinal) for ordinal in (0, 1)]
    yield library
    gc.collect()
    ops.release_devices()
    monkeypatch.undo()
    assert [_core.cuda_available(library, ordinal) for ordinal in (0, 1)] == before
    assert dlpack.alive == 0


@pytest.fixture
def trainer(simt_library: Path) -> Iterator[Trainer]:
    made = Trainer(simt_library, 0)
    yield made
    made.close()


@pytest.fixture
def second(simt_library: Path) -> Iterator[Trainer]:
    made = Trainer(simt_library, 1)
    yield made
    made.close()


def read(trainer: Trainer, tensor: OnGpu) -> np.ndarray:
    """Reads the tensor through the trainer's own stream."""
    with trainer.current():
        data = trainer.device.read(tensor._managed.tensor.data, tensor.array.nbytes)
    return np.frombuffer(data, tensor.array.dtype).reshape(tensor.array.shape)


def matrices(
    rng: np.random.Generator, m: int = 5, n: int = 17, k: int = 33
) -> tuple[np.ndarray, np.ndarray]:
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((m, k), (n, k)))
    return x, ops.pack(w, dtype="float32")


# ----------------------------------------------------------------------- other libraries' tensors
def test_a_tensor_that_is_still_being_written(trainer: Trainer, rng: np.random.Generator) -> None:
    """The producer's copies are enqueued when the op is called: the op runs after them."""
    x, w = matrices(rng)
    y = ops.gemm(trainer.tensor(x), trainer.tensor(w), 17)
    assert isinstance(y, ops.DeviceArray)
    assert (y.shape, y.dtype, y.ndim, y.nbytes, y.device) == ((5, 17), "float32", 2, 340, "cuda:0")
    assert (y.numpy() == ops.gemm(x, w, 17)).all()
    again = ops.gemm(y, ops.to_device(ops.pack(np.eye(17, dtype=np.float32), dtype="float32")), 17)
    assert (again.numpy() == y.numpy()).all()


def test_bfloat16_is_a_type_and_not_words(trainer: Trainer, rng: np.random.Generator) -> None:
    x = ops_cases.normal(rng, (3, 32), "bfloat16")
    norm = np.ascontiguousarray(x[0])
    want = ops.rms_norm(x, norm, eps=1e-6)
    for dtype in (DL_BFLOAT16, (1, 16, 1)):
        got = ops.rms_norm(
            trainer.tensor(x, dtype=dtype), trainer.tensor(norm, dtype=dtype), eps=1e-6
        )
        assert got.dtype == "bfloat16"
        assert (got.numpy() == want).all()


def test_outputs_that_are_the_callers(trainer: Trainer, rng: np.random.Generator) -> None:
    """out=, a residual and a KV cache of another library are written in place, and its own stream
    sees the result immediately."""
    x, w = matrices(rng)
    out = trainer.tensor(np.full((5, 17), np.nan, np.float32))
    ops.gemm(trainer.tensor(x), trainer.tensor(w), 17, out=out)
    assert (read(trainer, out) == ops.gemm(x, w, 17)).all()
    residual, state = trainer.tensor(x), x.copy()
    normed = ops.rms_norm(residual, trainer.tensor(x[0].copy()), eps=1e-6, x=trainer.tensor(x))
    assert (normed.numpy() == ops.rms_norm(state, x[0].copy(), eps=1e-6, x=x)).all()
    assert (read(trainer, residual) == state).all()
    case = ops_cases.qkv_case(rng, "float32", 7, 4, 2, 62, 16, "normal")
    caches = ops.kv_cache(int(case["pages"]), 2, 16, 62, dtype="float32")
    theirs = [trainer.tensor(cache) for cache in caches]
    types = {"positions": DL_INT32, "slots": DL_INT64}
    given = {
        name: trainer.tensor(array, dtype=types.get(name))
        for name, array in case.items()
        if name != "pages"
    }
    q = ops.qk_rope_kv(
        **given, k_cache=theirs[0], v_cache=theirs[1], num_heads=4, page_size=16, eps=1e-6
    )
    arrays = {name: array for name, array in case.items() if name != "pages"}
    assert (
        q.numpy()
        == ops.qk_rope_kv(
            **arrays, k_cache=caches[0], v_cache=caches[1], num_heads=4, page_size=16, eps=1e-6
        )
    ).all()
    for mine, cache in zip(theirs, caches):
        assert (read(trainer, mine) == cache).all()


def test_a_norm_over_all_heads(trainer: Trainer, rng: np.random.Generator) -> None:
    case = ops_cases.qkv_case(rng, "float32", 7, 4, 2, 62, 16, "normal")
    weights = {
        "q_weight": rng.standard_normal(4 * 62, np.float32),
        "k_weight": rng.standard_normal(2 * 62, np.float32),
    }
    arrays = {name: array for name, array in {**case, **weights}.items() if name != "pages"}
    got = {}
    for device, ship in (
        ("cpu", lambda array: array),
        ("cuda:0", lambda array: ops.to_device(array)),
    ):
        given = {name: ship(array) for name, array in arrays.items()}
        caches = ops.kv_cache(int(case["pages"]), 2, 16, 62, dtype="float32", device=device)
        squares = ops.head_squares(given["qkv"], 4, 62)
        q = ops.qk_rope_kv(
            **given,
            k_cache=caches[0],
            v_cache=caches[1],
            num_heads=4,
            page_size=16,
            eps=1e-6,
            squares=squares,
        )
        got[device] = [x if device == "cpu" else x.numpy() for x in (*squares, q, *caches)]
    assert all((ours == theirs).all() for ours, theirs in zip(got["cpu"], got["cuda:0"]))


def test_indices_of_the_host_and_of_the_device(trainer: Trainer, rng: np.random.Generator) -> None:
    table, ids = rng.standard_normal((9, 40), np.float32), np.array([3, 8, 0, 3], np.int32)
    for given in (ids, trainer.tensor(ids, dtype=DL_INT32), ops.to_device(ids)):
        assert (ops.embed(given, trainer.tensor(table)).numpy() == table[ids]).all()
    empty = ops.embed(np.zeros(0, np.int32), trainer.tensor(table))
    assert (empty.shape, empty.numpy().shape) == ((0, 40), (0, 40))
    many = rng.integers(0, 9, 5000).astype(np.int32)  # larger than the buffer for indices
    assert (ops.gather_rows(ops.to_device(table), ops.to_device(many)).numpy() == table[many]).all()


def test_tables_that_are_made_for_a_device(rng: np.random.Generator) -> None:
    inv_freq = rng.random(16, np.float32)
    for made, want in zip(
        ops.rope_table(inv_freq, 9, scale=1.5, device="cuda"),
        ops.rope_table(inv_freq, 9, scale=1.5),
    ):
        assert made.device == "cuda:0"
        assert (made.numpy() == want).all()
    for made, want in zip(ops.kv_cache(2, 3, 16, 40, device="cuda:1"), ops.kv_cache(2, 3, 16, 40)):
        assert (made.device, made.dtype) == ("cuda:1", "bfloat16")
        assert (made.shape, made.numpy().any()) == (want.shape, False)


def test_weights_are_packed_where_they_are(trainer: Trainer, rng: np.random.Generator) -> None:
    for source in (np.float32, np.float64, np.float16):
        w = rng.standard_normal((3, 20, 40)).astype(source)
        assert (ops.pack(trainer.tensor(w)).numpy() == ops.pack(w)).all()
        assert (
            ops.pack_gate_up(trainer.tensor(w), trainer.tensor(-w)).numpy()
            == ops.pack_gate_up(w, -w)
        ).all()


def test_every_op_takes_and_gives_arrays_of_a_device(rng: np.random.Generator) -> None:
    """Runs a mixture of experts, then the head in three parts of the vocabulary, the last without a
    row, and the sampling."""
    x, router, head = (
        rng.standard_normal(shape, np.float32) for shape in ((7, 33), (8, 33), (300, 33))
    )
    gate, up, down = (
        rng.standard_normal(shape, np.float32) for shape in ((8, 20, 33), (8, 20, 33), (8, 33, 20))
    )
    targets, params = (
        np.array([299, -1, 0, 5, 130, 129, 7], np.int32),
        [ops.SampleParams(seed=i, top_k=9, top_p=0.9) for i in range(7)],
    )

    def run(ship: Callable[[np.ndarray], Any]) -> list[Any]:
        def packed(w: np.ndarray) -> Any:
            return ship(ops.pack(w, dtype="float32"))

        rows = ship(x)
        ids, gates = ops.router(
            rows, packed(router), 8, 3, bias=ship(np.linspace(-1, 1, 8, dtype=np.float32))
        )
        sent, group_rows, place = ops.permute(rows, ids, 8)
        inner = ops.gemm_swiglu(
            sent, ship(ops.pack_gate_up(gate, up, dtype="float32")), 20, group_rows=group_rows
        )
        out = ops.combine(
            ops.gemm(inner, packed(down), 33, group_rows=group_rows), place, ids, gates, 8
        )
        whole = ops.lm_head(out, packed(head), 300, targets=ship(targets))
        parts = [
            ops.lm_head_pairs(out, packed(head[a:b]), b - a)
            for a, b in ((0, 256), (256, 300), (300, 300))
        ]
        pairs = np.concatenate(
            [part.pairs if ship is np.copy else part.pairs.numpy() for part in parts]
        )
        merged = ops.merge_pairs(ship(pairs))
        drawn = ops.sample(whole.logits, whole.stats, params)
        top = ops.top_logprobs(whole.logits, whole.stats, 4)
        return [
            ids,
            gates,
            out,
            *whole,
            *(v for part in parts for v in part),
            *merged,
            *drawn,
            *top,
            ops.ranks(whole.logits, drawn[0]),
        ]

    for mine, its in zip(run(np.copy), run(ops.to_device), strict=True):
        assert (mine is None) == (its is None)
        assert (
            mine is None or ops_cases.bits(its.numpy()).tobytes() == ops_cases.bits(mine).tobytes()
        )


def test_what_another_library_left_in_the_thread(simulated: str, rng: np.random.Generator) -> None:
    """A failed call of the other library is not reported by the next op or by a copy, and does not
    end the device."""
    x, w = matrices(rng)
    leave_error = C.CDLL(simulated).simt_leave_error
    leave_error()
    there = ops.to_device(x), ops.to_device(w)
    for _ in range(2):
        leave_error()
        y = ops.gemm(*there, 17)
        leave_error()
        assert (y.numpy() == ops.gemm(x, w, 17)).all()


# ---------------------------------------------------------------------------------------- streams
def test_on_a_stream_ops_take_their_turn(trainer: Trainer, rng: np.random.Generator) -> None:
    """An op runs after the stream's earlier work and before its later work: the trainer writes its
    tensor before the op and overwrites it after the op, without a wait."""
    x, w = matrices(rng)
    tensor, weights = trainer.tensor(x), trainer.tensor(w)
    out = trainer.tensor(np.zeros((5, 17), np.float32))
    data = tensor._managed.tensor.data
    with trainer.current():
        pinned = trainer.device.alloc_pinned(x.nbytes)
        C.memmove(pinned, (-x).ctypes.data, x.nbytes)
        trainer.device.copy_to_device(data, pinned, x.nbytes)
    with ops.on_stream(trainer.device.table.stream, "cuda:0"):
        ops.gemm(tensor, weights, 17, out=out)
    with trainer.current():
        assert trainer.device.poll() == cuda_device.BUSY
        trainer.device.zero_2d(data, x.nbytes, x.nbytes, 1)
    assert (read(trainer, out) == ops.gemm(-x, w, 17)).all()
    assert (read(trainer, tensor) == 0).all()


def test_streams_that_ops_cannot_be_ordered_with(
    trainer: Trainer, second: Trainer, rng: np.random.Generator
) -> None:
    """Invalid streams, streams of another device and capturing streams are refused, in on_stream
    and from a consumer. Ops and arrays work as before afterwards."""
    x, w = matrices(rng)
    mine, weights = ops.to_device(x), ops.to_device(w)
    before = ops.gemm(mine, weights, 17)

    def is_refused(stream: int, why: str) -> None:
        whole = f"stream: expected one of cuda:0, got {stream}: {why}"
        with ops.on_stream(stream, "cuda:0"), pytest.raises(errors.ConfigError, match=whole):
            ops.gemm(mine, weights, 17)
        with pytest.raises(errors.ConfigError, match=f"got {stream}: {why}"):
            before.__dlpack__(stream=stream)
        assert (ops.gemm(mine, weights, 17).numpy() == before.numpy()).all()

    is_refused(12345, "invalid resource handle")
    for nowhere in (3, 4095):
        is_refused(nowhere, "it is not a stream handle")
    is_refused(second.device.table.stream, "it is another device's")
    with cuda_device.Library(Path(os.environ[LIBRARY_SWITCH])).open(0) as capturing:
        assert capturing.begin_capture() == cuda_device.OK
        with (
            ops.on_stream(capturing.table.stream, "cuda:0"),
            pytest.raises(errors.ConfigError, match="it is being captured"),
        ):
            ops.gemm(mine, weights, 17)
        with pytest.raises(
            errors.CapacityError, match="operation not permitted when stream is capturing"
        ):
            ops.gemm(mine, weights, 17)  # this thread captures, so the op cannot allocate
        # The other device of this thread has invalidated the capture.
        assert capturing.end_capture()[0] == cuda_device.CAPTURE_INVALIDATED
    assert (ops.gemm(mine, weights, 17).numpy() == before.numpy()).all()


def test_an_array_of_ours_that_a_stream_has_written(
    trainer: Trainer, rng: np.random.Generator
) -> None:
    """A consumer writes an array that was exported by DLPack; the next op on the consumer's stream
    reads the new values."""
    x, w = matrices(rng)
    mine, weights = ops.to_device(np.zeros_like(x)), ops.to_device(w)
    view = taken(mine, trainer.device.table.stream)
    with trainer.current():
        pinned = trainer.device.alloc_pinned(x.nbytes)
        C.memmove(pinned, x.ctypes.data, x.nbytes)
        trainer.device.copy_to_device(view.data, pinned, x.nbytes)
    with ops.on_stream(trainer.device.table.stream, "cuda:0"):
        y = ops.gemm(mine, weights, 17)
    view.delete()
    assert (y.numpy() == ops.gemm(x, w, 17)).all()


def test_streams_that_are_none(rng: np.random.Generator) -> None:
    x, w = map(ops.to_device, matrices(rng))
    for stream in (-1, 2**64, 1.0, None, True):
        with pytest.raises(errors.ConfigError, match="stream"), ops.on_stream(stream, "cuda:0"):  # type: ignore[arg-type]
            raise AssertionError
    for device in ("cpu", "cuda:9", "gpu", None):
        with pytest.raises(errors.ConfigError, match="device"), ops.on_stream(0, device):  # type: ignore[arg-type]
            raise AssertionError
    want = ops.gemm(x, w, 17).numpy()
    with ops.on_stream(0, "cuda:1"):  # another device's
        assert (ops.gemm(x, w, 17).numpy() == want).all()
    with ops.on_stream(0, "cuda:0"):
        y = ops.gemm(x, w, 17)
    assert (y.numpy() == want).all()


def test_arrays_that_go_while_their_op_is_under_way(
    trainer: Trainer, rng: np.random.Generator
) -> None:
    """Memory is freed when the enqueued work is done with it; a device that is dropped completely
    finishes its work too."""
    x, w = matrices(rng)
    out = trainer.tensor(np.zeros((5, 17), np.float32))
    with ops.on_stream(trainer.device.table.stream, "cuda:0"):
        ops.gemm(ops.to_device(x), ops.to_device(w), 17, out=out)
        y = ops.gemm(ops.to_device(x), ops.to_device(w), 17)
    ops.release_devices()
    again = ops.gemm(ops.to_device(x), ops.to_device(w), 17)  # on the same device, opened once more
    identity = ops.pack(np.eye(17, dtype=np.float32), dtype="float32")
    assert (ops.gemm(y, ops.to_device(identity), 17).numpy() == again.numpy()).all()
    assert (read(trainer, out) == ops.gemm(x, w, 17)).all()
    assert (again.numpy() == ops.gemm(x, w, 17)).all()


def test_threads_share_a_device(rng: np.random.Generator) -> None:
    """Each thread uses different indices, on the device and on the host, concurrently with the
    others, with and without its own stream."""
    table = rng.standard_normal((50, 40), np.float32)
    there = ops.to_device(table)

    def work(seed: int) -> bool:
        own, good = np.random.default_rng(seed), True
        for turn in range(25):
            ids = own.integers(0, 50, int(own.integers(1, 60))).astype(np.int32)
            with ops.on_stream(1, "cuda:0") if turn % 2 else nullcontext():
                got = ops.embed(ops.to_device(ids) if turn % 3 else ids, there)
            good &= bool((got.numpy() == table[ids]).all())
        return good

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


# -------------------------------------------------------------------------------------- consumers
class Taken:
    """A capsule in its consumer's hands: renamed, so that the producer does not free it, and
    deleted on the consumer's request."""

    def __init__(self, capsule: Any, name: str) -> None:
        get = C.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = C.c_void_p, [C.py_object, C.c_char_p]
        rename = C.pythonapi.PyCapsule_SetName
        rename.argtypes = [C.py_object, C.c_char_p]
        self.at = get(capsule, name.encode())
        self._used = f"used_{name}".encode()
        rename(capsule, self._used)
        kind: Any = dlpack._Versioned if "versioned" in name else dlpack._Managed
        self.managed = kind.from_address(self.at)
        self.data = self.managed.tensor.data

    def delete(self) -> None:
        C.CFUNCTYPE(None, C.c_void_p)(self.managed.deleter)(self.at)


def taken(array: Any, stream: int | None, **how: Any) -> Taken:
    how = {"max_version": (1, 1)} | how
    name = "dltensor_versioned" if how["max_version"] else "dltensor"
    return Taken(array.__dlpack__(stream=stream, **how), name)


def test_who_takes_an_output_keeps_its_memory(simulated: str) -> None:
    free = _core.cuda_available(simulated, 0)
    array = ops.to_device(np.arange(12, dtype=np.float32).reshape(3, 4))
    capsule = array.__dlpack__(stream=-1, max_version=(1, 0))
    view, old = taken(array, -1), taken(array, -1, max_version=None)
    assert array.__dlpack_device__() == (2, 0)
    t = view.managed.tensor
    assert (t.n_dims, t.device_type, t.device_id, t.code, t.bits, t.lanes) == (2, 2, 0, 2, 32, 1)
    assert (t.shape[:2], t.strides[:2], t.data - old.data) == ([3, 4], [4, 1], 0)
    assert (view.managed.major, view.managed.flags) == (1, 0)
    assert (array.numpy() == np.arange(12, dtype=np.float32).reshape(3, 4)).all()
    del array, capsule  # a capsule that was never consumed frees its array
    for holder in (old, view):
        assert _core.cuda_available(simulated, 0) == free - 48
        holder.delete()
    assert _core.cuda_available(simulated, 0) == free


def test_how_an_array_may_be_asked_for() -> None:
    array = ops.to_device(np.zeros(3, np.float32))
    for stream in (0, -2):
        with pytest.raises(ValueError, match="stream"):
            array.__dlpack__(stream=stream)
    for how in ({"dl_device": (1, 0)}, {"dl_device": (2, 1)}, {"copy": True}):
        with pytest.raises(BufferError, match="cuda:0"):
            array.__dlpack__(**how)
    taken(array, 1, dl_device=(2, 0)).delete()
    taken(array, None, copy=False).delete()


def test_an_array_is_not_copied_unasked() -> None:
    """NumPy would make an array with one object. Like any array with dims it has a length; its
    truth value is an error."""
    array = ops.to_device(np.zeros((3, 2), np.float32))
    for ask in (
        np.asarray,
        np.array,
        lambda a: np.asarray(a, np.float32),
        lambda a: np.stack([a, a]),
        lambda a: np.array(a, copy=None),
    ):
        with pytest.raises(
            errors.UnsupportedTensorError,
            match=r"__array__: expected .*got float32 on cuda:0; \.numpy\(\) copies it",
        ):
            ask(array)
    for ask in (bool, lambda a: a or None):
        with pytest.raises(
            errors.UnsupportedTensorError, match=r"bool\(\): expected .*got float32 on cuda:0"
        ):
            ask(array)
    empty = ops.to_device(np.zeros((0, 2), np.float32))
    assert (len(array), len(empty), len(array.numpy())) == (3, 0, 3)
    with pytest.raises(TypeError, match=r"len\(\): expected an array with dims"):
        len(ops.to_device(np.zeros((), np.float32)))


def test_a_read_only_tensor_is_read_and_not_written(
    trainer: Trainer, rng: np.random.Generator
) -> None:
    x, w = matrices(rng)
    tensor, out = trainer.tensor(x), trainer.tensor(np.zeros((5, 17), np.float32))
    for kept in (tensor, out):
        kept._managed.flags = 1
    assert (ops.gemm(tensor, trainer.tensor(w), 17).numpy() == ops.gemm(x, w, 17)).all()
    with pytest.raises(errors.LayoutError, match="out: expected a writable array"):
        ops.gemm(tensor, trainer.tensor(w), 17, out=out)
    with pytest.raises(errors.LayoutError, match="residual: expected a writable array"):
        ops.rms_norm(tensor, trainer.tensor(x[0].copy()), eps=1e-6, x=trainer.tensor(x))
    assert (read(trainer, out) == 0).all()


# ----------------------------------------------------------------------- products of tensor cores
def mma16(s: np.float32, x: np.ndarray, w: np.ndarray) -> np.float32:
    """One instruction as in tests/gpu/simt/mma_model.h, for normal numbers and zeros: the terms are
    aligned to the largest exponent and are cut, and so is their sum."""
    terms, exponents = np.append(x * w, s), np.append(np.frexp(x)[1] + np.frexp(w)[1] - 1, 0)
    exponents[-1] = np.frexp(s)[1]
    if not terms.any():
        return np.float32(0)
    unit = 2.0 ** int(exponents[terms != 0].max() - 26)
    total = int(np.trunc(terms / unit).sum())
    cut = max(abs(total).bit_length() - 24, 0)
    return np.float32(np.sign(total) * (abs(total) >> cut << cut) * unit)


def mma_dot(x: Any, w: Any) -> np.float32:
    """docs/numerics.md §10 for one output."""
    k = -(-len(x) // 32) * 32
    xs, ws = (
        np.concatenate([ops_cases.values(row).astype(np.float64), np.zeros(k - len(row))])
        for row in (x, w)
    )
    acc = np.float32(0)
    for segment in range(0, k, 512):
        s = np.float32(0)
        for at in range(segment, min(segment + 512, k), 16):
            s = mma16(s, xs[at : at + 16], ws[at : at + 16])
        acc = np.float32(acc + s)
    return acc


def test_products_of_tensor_cores(rng: np.random.Generator) -> None:
    """gemm, lm_head and embed over weights that the same family has packed; a row gives the same
    result alone and in a batch."""
    x, w = ops_cases.normal(rng, (9, 700), "bfloat16"), ops_cases.normal(rng, (35, 700), "bfloat16")
    source = ops_cases.values(w)
    there, matrix = ops.to_device(x), ops.pack(ops.to_device(source), isa="cuda_mma")
    y = ops.gemm(there, matrix, 35, float32_out=True, isa="cuda_mma").numpy()
    want = np.array([[mma_dot(row, column) for column in w] for row in x])
    assert (ops_cases.bits(y) == ops_cases.bits(want)).all()
    # The CPU adds in a different order.
    assert (y != ops.gemm(x, ops.pack(source), 35, float32_out=True)).any()
    head = ops.lm_head(there, matrix, 35, isa="cuda_mma")
    assert head.logits is not None
    assert (ops_cases.bits(head.logits.numpy()) == ops_cases.bits(y)).all()
    alone = ops.gemm(
        ops.to_device(x[4:5].copy()), matrix, 35, float32_out=True, isa="cuda_mma"
    ).numpy()
    assert (ops_cases.bits(alone[0]) == ops_cases.bits(y[4])).all()
    rows = np.array([34, 0, 7], np.int32)
    assert (ops.embed(rows, matrix, packed=(35, 700), isa="cuda_mma").numpy() == w[rows]).all()


def test_a_layer_on_tensor_cores_keeps_rows_apart(rng: np.random.Generator) -> None:
    """Keys and values are written and read in the family's own layout: each row of a batch equals
    the row alone, bit for bit, and is close to the CPU's."""
    rows, heads, kv_heads, head_dim, page_size = 40, 4, 2, 32, 16
    case = ops_cases.qkv_case(rng, "bfloat16", rows, heads, kv_heads, head_dim, page_size, "normal")
    case["slots"], case["positions"] = (
        np.arange(rows, dtype=np.int64),
        np.arange(rows, dtype=np.int32),
    )
    indices = {
        "seq_of_row": np.zeros(rows, np.int32),
        "block_tables": np.arange(3, dtype=np.int32)[None],
    }
    how = {"page_size": page_size, "scale": head_dim**-0.5}

    def layer(
        device: str, isa: str | None, ship: Callable[[Any], Any]
    ) -> tuple[Any, Any, Any, Any]:
        k, v = ops.kv_cache(3, kv_heads, page_size, head_dim, device=device)
        given = {name: ship(array) for name, array in case.items() if name != "pages"}
        q = ops.qk_rope_kv(
            **given, k_cache=k, v_cache=v, num_heads=heads, page_size=page_size, eps=1e-6, isa=isa
        )
        return q, k, v, ops.attention(q, k, v, case["positions"], **indices, **how, isa=isa)

    q, k, v, out = layer("cuda:0", "cuda_mma", ops.to_device)
    whole, of_cpu = out.numpy(), layer("cpu", None, lambda array: array)[3]
    for row in range(rows):
        one = ops.to_device(q.numpy()[row : row + 1].copy())
        at = {
            "positions": case["positions"][row : row + 1],
            **indices,
            "seq_of_row": indices["seq_of_row"][:1],
        }
        assert (
            ops.attention(one, k, v, **at, **how, isa="cuda_mma").numpy()[0] == whole[row]
        ).all()
    # Two bf16 roundings of a convex combination of values, and the sums' own: 2^-6 of the largest
    # value is a generous bound.
    bound = 2.0**-6 * np.abs(ops_cases.values(case["qkv"])).max()
    assert np.abs(ops_cases.values(whole) - ops_cases.values(of_cpu)).max() < bound
