"""rm.Generator(device="cuda"): the whole engine on a CUDA device. Runs on the fibres of
tests/gpu/simt, whose device memory the host cannot access and whose queue runs work only when a
thread waits; or on a GPU if there is one.

Oracle: the same calls with device="cpu". The kernels that run here compute with the contract's own
FMA chains, so tokens, logprobs, logits, routed experts and digests are bit-identical to the CPU's.
Bound: equality."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_device
import dlpack
import helpers
import numpy as np
import pytest
import test_external_scheduler
from marks import full, some

import rollmesh as rm
from rollmesh import _core
from rollmesh.runtime.devices import LIBRARY_SWITCH, library_path
from rollmesh.runtime.messages import byte_text

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9] * 6, [5], [7, 8, 3] * 4]
PARAMS = [
    rm.SamplingParams(
        n=3, max_tokens=6, seed=3, logprobs=3, top_p=0.9, min_tokens=2, prompt_logprobs=2
    ),
    rm.SamplingParams(
        temperature=0.7, max_tokens=5, seed=5, top_k=5, min_p=0.01, n=2, kept_tokens=True
    ),
    rm.SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0),
    rm.SamplingParams(
        n=2,
        max_tokens=7,
        seed=9,
        logit_bias={7: 3.5, 8: -2},
        repetition_penalty=1.4,
        frequency_penalty=0.8,
        top_p=0.9,
        presence_penalty=-0.3,
        allowed_token_ids=range(3, 150),
        min_tokens=3,
        stop_token_ids=range(3, 90),
    ),
]
DENSE, MOE = helpers.tiny_config(), helpers.tiny_config(moe=True)


@pytest.fixture(autouse=True)
def library(simt_library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library of the GPU, if there is one."""
    real = library_path()
    if real.exists() and _core.cuda_count(str(real)) > 0:
        return real
    if os.environ.get("RM_NEEDS_GPU"):
        cuda_device.no_gpu(f"no GPU here, or no {real}")
    monkeypatch.setenv(LIBRARY_SWITCH, str(simt_library))
    return simt_library


def is_simt(library: Path) -> bool:
    return "simt" in library.name


@pytest.fixture
def simt(library: Path) -> None:
    if not is_simt(library):
        pytest.skip("a stand-in's settings mean nothing to a GPU")


@pytest.fixture
def two_gpus(library: Path) -> None:
    if _core.cuda_count(str(library)) < 2:
        pytest.skip("needs two GPUs, or the simulated device")


def bits(value: Any) -> Any:
    """Returns the contents of a value, with arrays as bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, rm.TopLogprobs):
        return bits(value.ids), bits(value.logprobs)
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


def told(outputs: list[rm.RequestOutput]) -> Any:
    """Returns all fields of an output except the family and the request's number."""
    return [
        (bits(o.prompt_token_ids), o.num_cached_tokens, bits(o.prompt_logprobs),
        bits(o.prompt_top_logprobs), str(o.error),
         [(bits(c.token_ids), bits(c.logprobs), bits(c.sampling_logprobs), bits(c.versions),
         bits(c.routed_experts), bits(c.top_logprobs),
           bits(c.kept_tokens), c.finish_reason, c.cumulative_logprob) for c in o.outputs])
        for o in outputs
    ]  # fmt: skip


def everything(generator: rm.Generator) -> Any:
    outputs = generator.generate(PROMPTS, PARAMS, use_tqdm=False)
    again = generator.generate(PROMPTS, PARAMS, use_tqdm=False)  # by prefix hits
    logits = generator.logits([[3, 1, 2, 9], [4] * 40])
    plain = generator.score([[3, 1, 2, 9, 8, 7], [6] * 40])
    ways = [
        rm.SamplingParams(temperature=0.8, top_k=7, **changes)
        for changes in ({}, {"logit_bias": {9: 2.5}, "allowed_token_ids": range(9)})
    ]
    sampled = generator.score([[3, 1, 2, 9, 8, 7]] * 2, ways)
    return told(outputs), told(again), bits(logits), bits(plain), bits(sampled)


# ------------------------------------------------------------------------------------------- bits
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_all_that_a_caller_sees_is_the_cpus(
    make: Callable[..., rm.Generator], config: helpers.Config, dtype: str
) -> None:
    state = helpers.numpy_state_dict(config, seed=1)
    cpu, gpu = make(config, "cpu", dtype=dtype), make(config, dtype=dtype)
    reports = [generator.sync_weights(state, cast=True) for generator in (cpu, gpu)]
    assert reports[0].digest == reports[1].digest
    assert everything(gpu) == everything(cpu)
    assert gpu.metrics()["device"] == "cuda:0"
    assert gpu.metrics()["family"] == "cuda_fma"


@pytest.mark.parametrize("config", some([DENSE, MOE], [0]), ids=["dense", "moe"])
def test_tensor_cores_are_a_family_of_their_own(
    make: Callable[..., rm.Generator], config: helpers.Config
) -> None:
    """On the shim over a model of the instruction: close to the CPU's numbers, and bit-identical
    alone, in a batch, in chunks, and scored."""
    state = helpers.numpy_state_dict(config, seed=1)
    cpu = make(config, "cpu")
    gpu, small = (
        make(config, isa="cuda_mma"),
        make(config, isa="cuda_mma", max_num_batched_tokens=5, max_num_seqs=1),
    )
    reports = [generator.sync_weights(state, cast=True) for generator in (cpu, gpu, small)]
    assert len({report.digest for report in reports}) == 1
    near, own = cpu.logits([[4] * 40])[0], gpu.logits([[4] * 40])[0]
    assert 0 < np.abs(near - own).max() < 0.02 * np.abs(near).max()
    assert everything(gpu)[2:] == everything(small)[2:]
    params = rm.SamplingParams(max_tokens=20, seed=4, ignore_eos=True)
    together = gpu.generate([[1, 2, 3], [9] * 30, [5, 6]], params, use_tqdm=False)
    alone = [
        small.generate([list(output.prompt_token_ids)], params, use_tqdm=False)[0]
        for output in together
    ]
    for one, other in zip(together, alone, strict=True):
        tokens, logprobs = one.outputs[0].token_ids, one.outputs[0].logprobs
        assert bits([tokens, logprobs]) == bits(
            [other.outputs[0].token_ids, other.outputs[0].logprobs]
        )
        scored = gpu.score([[*one.prompt_token_ids.tolist(), *tokens.tolist()]])[0]
        assert scored[-len(tokens) :].tobytes() == logprobs.tobytes()
        # The family of the card's architecture.
        assert re.fullmatch(r"cuda_mma_sm\d+", one.outputs[0].contract.family)
    with pytest.raises(rm.ConfigError, match="isa: expected one of cuda_fma, cuda_mma, got 'avx2'"):
        make(config, isa="avx2")


def test_each_device_gives_the_large_kernels_their_shared_memory(
    make: Callable[..., rm.Generator], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has more rows than the gemm for few rows accepts: the result is bit-identical to that
    gemm's, on a second device of the process too. The card has one multiprocessor, because
    otherwise so small a model would use the smallest tiles."""
    if _core.cuda_count(str(library)) < 2:
        pytest.skip("one GPU here")
    monkeypatch.setenv("ROLLMESH_SIMT_PROCESSORS", "1")
    state, scored = helpers.numpy_state_dict(DENSE, seed=1), []
    for device, rows in (("cuda:0", 32), ("cuda:0", 96), ("cuda:1", 96)):
        generator = make(device=device, isa="cuda_mma", max_num_batched_tokens=rows)
        generator.sync_weights(state, cast=True)
        scored.append(bits(generator.score([[6, 2, 9] * 29])))
    assert scored[0] == scored[1] == scored[2]


@pytest.mark.parametrize("case", helpers.CASES, ids=lambda case: case.name)
def test_logits_of_each_shape(make: Callable[..., rm.Generator], case: helpers.Case) -> None:
    cpu, gpu = make(case.config, "cpu", dtype="float32"), make(case.config, dtype="float32")
    state = helpers.numpy_state_dict(case.config, case.seed, router_bias=case.router_bias)
    prompts = helpers.prompts(case.config, (1, 7, 35), seed=2)
    found = []
    for generator in (cpu, gpu):
        generator.sync_weights(state)
        found.append(bits(generator.logits(prompts)))
    assert found[0] == found[1]


@pytest.mark.full
def test_results_that_do_not_fit_are_fetched_in_between(make: Callable[..., rm.Generator]) -> None:
    """Top logprobs over the whole vocabulary: 1.1 MB for one prompt, and a step keeps 1
    (RESULTS_BYTES of csrc/engine/engine.c)."""
    wide = 1600
    config = helpers.tiny_config(vocab_size=wide)
    state = helpers.numpy_state_dict(config, seed=1)
    params = rm.SamplingParams(max_tokens=3, seed=1, logprobs=wide, prompt_logprobs=wide, n=2)
    prompts = [[1 + i % 7 for i in range(length)] for length in (90, 3)]
    found = []
    for device in ("cpu", "cuda"):
        generator = make(config, device, dtype="float32", max_num_batched_tokens=128)
        generator.sync_weights(state)
        found.append(told(generator.generate(prompts, params, use_tqdm=False)))
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------------ ranks
@pytest.mark.parametrize(
    "config, mesh, changes",
    [
        full(DENSE, rm.Mesh(tp=2), {}),
        (DENSE, rm.Mesh(tp=2), {"sequence_parallel": True}),
        (DENSE, rm.Mesh(dp=2), {"device": "cuda:1"}),
        full(MOE, rm.Mesh(tp=2), {"device": "cuda:0"}),
        full(MOE, rm.Mesh(tp=2, ep=2), {"ep_backend": "alltoall"}),
        (MOE, rm.Mesh(tp=2, ep=2), {"ep_backend": "allgather_reducescatter"}),
        full(MOE, rm.Mesh(tp=2, ep=2), {"ep_backend": "local_allreduce"}),
        full(MOE, rm.Mesh(tp=2, dp=2, ep=4), {"sequence_parallel": True}),
    ],
    ids=str,
)
def test_a_mesh_of_devices_gives_one_ranks_bits(
    make: Callable[..., rm.Generator],
    library: Path,
    config: helpers.Config,
    mesh: rm.Mesh,
    changes: dict[str, Any],
) -> None:
    """Each rank on a separate device, or all on one; activations are exchanged through the host
    (csrc/gpu/staged.h)."""
    if changes.get("device") == "cuda:1" and _core.cuda_count(str(library)) < 2:
        pytest.skip("one GPU here")
    state = helpers.numpy_state_dict(config, seed=1)
    cpu, gpu = make(config, "cpu"), make(config, mesh=mesh, **changes)
    found = []
    for generator in (cpu, gpu):
        generator.sync_weights(state, cast=True)
        generated, _, *scored = everything(generator)
        # Prefix hits depend on the prompts that a replica has seen.
        found.append(([output[:1] + output[2:] for output in generated], scored))
    assert found[0] == found[1]


# ---------------------------------------------------------------------------------------- weights
def strided(array: np.ndarray, how: str) -> np.ndarray:
    if how == "transposed" and array.ndim == 2:
        return np.ascontiguousarray(array.T).T
    if how == "reversed":
        return np.ascontiguousarray(array[::-1])[::-1]
    if how == "every second":
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    return array


@pytest.mark.parametrize("how", ["transposed", "reversed", "every second"])
@pytest.mark.parametrize("dtype", ["float64", "float16", "float32"])
def test_sources_of_any_stride_and_type(
    make: Callable[..., rm.Generator], how: str, dtype: str
) -> None:
    state = {
        name: strided(value.astype(dtype), how)
        for name, value in helpers.numpy_state_dict(MOE, seed=1).items()
    }
    reports = [make(MOE, device).sync_weights(state, cast=True) for device in ("cpu", "cuda")]
    assert reports[0].digest == reports[1].digest


def test_more_than_the_staging_buffer_holds(make: Callable[..., rm.Generator]) -> None:
    """82 MB at once through two halves of 32 (csrc/weights/sync.c): the first is filled again while
    the queue may still read it."""
    config = helpers.tiny_config(vocab_size=80_000)
    state = {
        name: value.astype("float64")
        for name, value in helpers.numpy_state_dict(config, seed=1).items()
    }
    reports = [make(config, device).sync_weights(state, cast=True) for device in ("cpu", "cuda")]
    assert reports[0].digest == reports[1].digest


@pytest.mark.parametrize("mode", ["staged", "inplace"])
def test_versions_follow_one_another(make: Callable[..., rm.Generator], mode: str) -> None:
    cpu, gpu = make(MOE, "cpu"), make(MOE)
    for version in range(3):
        state = helpers.numpy_state_dict(MOE, seed=version, dtype="bfloat16")
        if version == 1:
            state.pop("model.layers.0.self_attn.q_proj.weight")
        for generator in (cpu, gpu):
            generator.sync_weights(
                state, mode="staged" if version == 1 else mode, strict=version != 1
            )
        assert told(gpu.generate(PROMPTS, PARAMS, use_tqdm=False)) == told(
            cpu.generate(PROMPTS, PARAMS, use_tqdm=False)
        )


@pytest.mark.parametrize(
    "value, kind",
    [(np.nan, rm.NonFiniteError), (np.inf, rm.NonFiniteError), (None, rm.MissingKeyError)],
)
def test_a_bad_set_leaves_the_old_version(
    make: Callable[..., rm.Generator], value: float | None, kind: type[Exception]
) -> None:
    gpu = make()
    state = helpers.numpy_state_dict(DENSE, seed=1)
    gpu.sync_weights(state, cast=True)
    before = everything(gpu)
    bad = dict(helpers.numpy_state_dict(DENSE, seed=2))
    name = "model.layers.1.mlp.down_proj.weight"
    if value is None:
        del bad[name]
    else:
        bad[name] = bad[name].copy()
        bad[name][2, 5] = value
    with pytest.raises(kind, match=name if value is None else rf"{name}: element \[2, 5\]"):
        gpu.sync_weights(bad, cast=True)
    gpu.reset_prefix_cache()
    assert everything(gpu) == before


def test_a_tied_head_that_differs_is_named(make: Callable[..., rm.Generator]) -> None:
    config = helpers.tiny_config(tie_word_embeddings=True)
    gpu, state = (
        make(config),
        helpers.numpy_state_dict(
            helpers.tiny_config(tie_word_embeddings=True), seed=1, dtype="float32"
        ),
    )
    head = state["model.embed_tokens.weight"].copy()
    gpu.sync_weights({**state, "lm_head.weight": head}, cast=True)
    head[7, 3] += 1
    with pytest.raises(rm.TiedWeightError, match=r"element \[7, 3\]"):
        gpu.sync_weights({**state, "lm_head.weight": head}, cast=True)


def updated_in_mid_generation(generator: rm.Generator, how: dict[str, Any]) -> Any:
    """Returns the results of requests of a MOE that receives new weights after their second
    poll."""
    ids = generator.submit(PROMPTS, PARAMS)
    done = []
    for step in range(3):
        done += generator.poll()
        if step == 1:
            generator.sync_weights(helpers.numpy_state_dict(MOE, seed=2), **how)
    done += generator.poll(min_outputs=len(ids))
    return told(sorted(done, key=lambda output: output.request_id))


@pytest.mark.parametrize(
    "how",
    [
        {"inflight": "restart"},
        {"inflight": "keep"},
        {"inflight": "abort"},
        {"inflight": "keep", "keep_kv": True},
    ],
)
def test_updates_in_mid_generation(make: Callable[..., rm.Generator], how: dict[str, Any]) -> None:
    found = []
    for device in ("cpu", "cuda"):
        generator = make(MOE, device, dtype="float32")
        generator.sync_weights(helpers.numpy_state_dict(MOE, seed=1))
        found.append(updated_in_mid_generation(generator, how))
    assert found[0] == found[1]


# -------------------------------------------------------------------------- tensors of the device
class OnDevice(dlpack.Producer):
    """An array in the device's memory that behaves like torch's: it makes the reader's stream
    wait."""

    def __init__(self, device: cuda_device.Device, array: np.ndarray, **fields: Any) -> None:
        block = device.alloc(max(array.nbytes, 1))
        device.write(block, array.tobytes())
        super().__init__(
            np.ascontiguousarray(array), data=block, device=2, version=(1, 0), **fields
        )
        self.streams: list[int] = []

    def __dlpack__(self, **arguments: Any) -> Any:
        self.streams.append(arguments["stream"])
        return super().__dlpack__(**arguments)


def test_tensors_of_the_device_are_read_where_they_are(
    make: Callable[..., rm.Generator], library: Path
) -> None:
    state = helpers.numpy_state_dict(MOE, seed=1, dtype="float32")
    cpu, gpu = make(MOE, "cpu"), make(MOE)
    with cuda_device.Library(library).open() as device:
        tensors = {name: OnDevice(device, value) for name, value in state.items()}
        report = gpu.sync_weights(tensors, cast=True)
        assert all(
            len(set(tensor.streams)) == 1 and tensor.streams[0] for tensor in tensors.values()
        )
    assert report.digest == cpu.sync_weights(state, cast=True).digest
    assert everything(gpu) == everything(cpu)


@pytest.mark.parametrize(
    "fields, kind, message",
    [
        ({"data": 8192}, rm.UnsupportedTensorError, "0x2000 is not in the memory of cuda:0"),
        (
            {"ordinal": 1},
            rm.UnsupportedTensorError,
            "a capsule whose tensor is not on the __dlpack_device__",
        ),
        ({"shift": 1}, rm.LayoutError, "is not a multiple of the 4 bytes of an element"),
    ],
)
def test_tensors_of_the_device_that_are_refused(
    make: Callable[..., rm.Generator],
    library: Path,
    fields: dict[str, int],
    kind: type[Exception],
    message: str,
) -> None:
    gpu = make()
    state: dict[str, Any] = dict(helpers.numpy_state_dict(DENSE, seed=1))
    gpu.sync_weights(state, cast=True)
    before = everything(gpu)
    name = "model.norm.weight"
    with cuda_device.Library(library).open() as device:
        tensor = OnDevice(device, state[name])
        made = tensor._managed.tensor
        made.data = fields.get("data", made.data + fields.get("shift", 0))
        made.device_id = fields.get("ordinal", 0)
        with pytest.raises(kind, match=message):
            gpu.sync_weights({**state, name: tensor}, cast=True)
    gpu.reset_prefix_cache()
    assert everything(gpu) == before


def test_a_generator_on_the_cpu_takes_none_of_a_device(
    make: Callable[..., rm.Generator], library: Path
) -> None:
    state = helpers.numpy_state_dict(DENSE, seed=1)
    on_the_cpu = "expected a tensor on the CPU, got one on DLPack device type 2 "
    with (
        cuda_device.Library(library).open() as device,
        pytest.raises(rm.UnsupportedTensorError, match=on_the_cpu),
    ):
        make(DENSE, "cpu").sync_weights(
            {**state, "model.norm.weight": OnDevice(device, state["model.norm.weight"])}, cast=True
        )


# ----------------------------------------------------------------------------------------- memory
def free(library: Path) -> int:
    return _core.cuda_available(str(library), 0)


def slack(library: Path) -> int:
    """Memory that a GPU's runtime may allocate or keep meanwhile, including rounding to 2 MiB; zero
    on the stand-in."""
    return 0 if is_simt(library) else 64 << 20


def test_sleep_gives_memory_back_and_wake_restores(
    make: Callable[..., rm.Generator], library: Path
) -> None:
    cache = {} if is_simt(library) else {"kv_cache_gib": 0.5}
    gpu, cpu = make(**cache), make(DENSE, "cpu", **cache)
    state = helpers.numpy_state_dict(DENSE, seed=1)
    for generator in (gpu, cpu):
        generator.sync_weights(state, cast=True)
    before, awake = everything(gpu), free(library)
    kv, weights = gpu.metrics()["kv_bytes"], gpu.metrics()["weight_bytes"]
    gpu.sleep(["kv"])
    assert abs(free(library) - (awake + kv)) <= slack(library) < kv
    gpu.sleep(["weights"])
    assert free(library) >= awake + kv + weights - slack(library)
    with pytest.raises(rm.StateError, match="asleep"):
        gpu.generate(PROMPTS, PARAMS, use_tqdm=False)
    gpu.wake(["kv", "weights"])
    with pytest.raises(rm.NotSyncedError):
        gpu.generate(PROMPTS, PARAMS, use_tqdm=False)
    gpu.sync_weights(state, cast=True)
    assert free(library) >= awake - slack(library)
    assert everything(gpu)[2:] == before[2:] == everything(cpu)[2:]


def test_close_gives_everything_back(make: Callable[..., rm.Generator], library: Path) -> None:
    cache = {} if is_simt(library) else {"kv_cache_gib": 0.5}
    if cache:  # memory that a kernel's first use allocates stays with the process
        warm = make(MOE)
        warm.sync_weights(helpers.numpy_state_dict(MOE, seed=1), cast=True)
        everything(warm)
        warm.close()
    before, mapped = free(library), _core.memory_blocks()
    gpu = make(MOE, **cache)
    gpu.sync_weights(helpers.numpy_state_dict(MOE, seed=1), cast=True)
    everything(gpu)
    assert before - free(library) >= gpu.metrics()["kv_bytes"]
    gpu.close()
    assert abs(free(library) - before) <= slack(library)
    assert _core.memory_blocks() == mapped


def test_more_than_the_card_has_is_refused(
    make: Callable[..., rm.Generator], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device stays usable: the next generator gets its memory."""
    monkeypatch.setenv("ROLLMESH_SIMT_MEMORY", str(64 << 20))
    wanted = 1.5 * free(library) / 2**30
    with pytest.raises(
        rm.CapacityError,
        match=rf"the KV cache takes {byte_text(wanted * 2**30)} and cuda:0 has \S+ [MG]iB free",
    ):
        make(max_model_len=4096, block_size=1024, kv_cache_gib=wanted)
    gpu = make()
    gpu.sync_weights(helpers.numpy_state_dict(DENSE, seed=1), cast=True)
    assert len(gpu.generate(PROMPTS, PARAMS, use_tqdm=False)) == len(PROMPTS)


def test_the_cache_is_a_share_of_what_is_free(
    make: Callable[..., rm.Generator], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_SIMT_MEMORY", str(16 << 20))
    share = 0.5 if is_simt(library) else 0.02  # of 141 GB, with pages that are small
    before = free(library)
    for mesh in (rm.Mesh(), rm.Mesh(tp=2)):  # two ranks there take no more than one
        gpu = make(device="cuda:0", mesh=mesh, kv_cache_gib=None, memory_fraction=share)
        assert share * before / 2 < gpu.metrics()["kv_bytes"] < share * before
        gpu.close()


def test_memory_that_is_not_there_is_named(
    make: Callable[..., rm.Generator], library: Path, simt: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_SIMT_MEMORY", str(8 << 20))
    with pytest.raises(
        rm.CapacityError,
        match=r"the KV cache takes 51\.\d\d MiB and cuda:0 has [1-7]\.\d\d MiB free",
    ):
        make(kv_cache_gib=0.05)
    state = helpers.numpy_state_dict(DENSE, seed=1)
    gpu = make()
    gpu.sync_weights(state, cast=True)
    before = everything(gpu)
    full = (8 << 20) - free(library) + gpu.metrics()["weight_bytes"] // 2
    monkeypatch.setenv("ROLLMESH_SIMT_MEMORY", str(full))
    with pytest.raises(
        rm.CapacityError, match=r'a second copy of the weights .*mode="inplace" needs none'
    ):
        gpu.sync_weights(helpers.numpy_state_dict(DENSE, seed=2), cast=True)
    gpu.reset_prefix_cache()
    assert everything(gpu) == before
    gpu.sync_weights(state, cast=True, mode="inplace")
    assert everything(gpu)[2:] == before[2:]


def test_the_cache_takes_what_is_left(
    make: Callable[..., rm.Generator], simt: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_SIMT_MEMORY", str(16 << 20))
    gpu = make(kv_cache_gib=None, memory_fraction=0.5)
    assert 4 << 20 < gpu.metrics()["kv_bytes"] < 8 << 20
    gpu.sync_weights(helpers.numpy_state_dict(DENSE, seed=1), cast=True)
    gpu.sync_weights(helpers.numpy_state_dict(DENSE, seed=2), cast=True)
    with pytest.raises(
        rm.CapacityError, match=r"memory_fraction=0\.0001 .* expected more than two copies"
    ):
        make(kv_cache_gib=None, memory_fraction=0.0001)
    for wrong in (0, -1, 1.5, True, "all"):
        with pytest.raises(rm.ConfigError, match="memory_fraction"):
            make(kv_cache_gib=None, memory_fraction=wrong)


@pytest.mark.parametrize("memory", [1, 4096, 1 << 20, 4 << 20])
def test_a_device_with_next_to_no_memory(
    make: Callable[..., rm.Generator], simt: None, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    """Any allocation may be the first that fails, on one rank and on ranks that exchange; the
    parameters show how little memory there is."""
    monkeypatch.setenv("ROLLMESH_SIMT_MEMORY", str(memory))
    for changes in (
        {},
        {"mesh": rm.Mesh(tp=2)},
        {"mesh": rm.Mesh(tp=2, dp=2, ep=4)},
        {"kv_cache_gib": None},
    ):
        with pytest.raises(rm.CapacityError, match=r"( takes |expected more than)") as caught:
            make(MOE, device="cuda:0", max_num_batched_tokens=2048, **changes)
        assert not re.search(r"\b0\.00 ", str(caught.value))


# ----------------------------------------------------------------------------------------- faults
@pytest.mark.parametrize("launch", [1, 40, 400])
def test_a_fault_ends_the_engine_and_says_so(
    make: Callable[..., rm.Generator], simt: None, monkeypatch: pytest.MonkeyPatch, launch: int
) -> None:
    monkeypatch.setenv("ROLLMESH_SIMT_FAULT", str(launch))
    gpu = make()
    state = helpers.numpy_state_dict(DENSE, seed=1)

    def work() -> None:
        for _ in range(50):
            gpu.sync_weights(state, cast=True)
            everything(gpu)

    with pytest.raises(rm.DeviceError, match=r"cuda:0: .*illegal"):
        work()
    for _ in range(2):
        with pytest.raises(rm.Error, match=r"illegal|expected synced ones"):
            gpu.generate(PROMPTS, PARAMS, use_tqdm=False)
    with pytest.raises(rm.DeviceError, match="illegal"):
        gpu.sync_weights(state, cast=True)
    gpu.close()
    monkeypatch.delenv("ROLLMESH_SIMT_FAULT")
    again = make()
    again.sync_weights(state, cast=True)
    assert len(again.generate(PROMPTS, PARAMS, use_tqdm=False)) == len(PROMPTS)


@pytest.mark.parametrize(
    "name", ["gpu", "cuda:", "cuda:x", "CUDA", "cuda:-1", "cuda:99999", "", None, 0]
)
def test_names_that_are_no_device(make: Callable[..., rm.Generator], name: Any) -> None:
    with pytest.raises(rm.ConfigError, match="expected 'cpu', 'cuda' or 'cuda:N'"):
        make(DENSE, name)


def test_ops_of_a_gpu_are_not_timed(make: Callable[..., rm.Generator]) -> None:
    with pytest.raises(rm.ConfigError, match="profile: expected False on a GPU"):
        make(DENSE, profile=True)


def test_devices_that_are_not_here(
    make: Callable[..., rm.Generator], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(
        rm.ConfigError, match=r"one of the driver's \d+ devices?, numbered from 0, got 'cuda:99'"
    ):
        make(DENSE, "cuda:99")
    monkeypatch.setenv(LIBRARY_SWITCH, str(tmp_path / "none.so"))
    with pytest.raises(rm.ConfigError, match=r"none\.so, which is not a file"):
        make()
    (tmp_path / "none.so").write_bytes(b"no library")
    with pytest.raises(rm.ConfigError, match=r"the CUDA library cannot be loaded: .*none\.so"):
        make()


def test_ranks_on_gpus_of_two_architectures(
    make: Callable[..., rm.Generator], simt: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensor cores of the two architectures give different bits; the contract's arithmetic
    gives the same bits on both."""
    monkeypatch.setenv("ROLLMESH_SIMT_SM", "90,80")
    assert make(mesh=rm.Mesh(tp=2)).metrics()["family"] == "cuda_fma"
    with pytest.raises(
        rm.MeshMismatchError,
        match=r"expected cuda_mma_sm90 on all ranks, as on rank 0 \(cuda:0\), got cuda_mma_sm80",
    ):
        make(mesh=rm.Mesh(tp=2), isa="cuda_mma")
    assert (
        make(device="cuda:1", mesh=rm.Mesh(tp=2), isa="cuda_mma").metrics()["family"]
        == "cuda_mma_sm80"
    )


# -------------------------------------------------------------------------- a host that schedules
def test_a_host_schedules_on_a_device(library: Path) -> None:
    """The host schedules like vLLM (csrc/scheduler/external_scheduler.h): shared and reused pages,
    chunks, preemptions, a version in between."""
    found = []
    for where in ({}, {"cuda_library": str(library), "cuda_ordinal": 0}):
        engine = test_external_scheduler.make_engine(**where)
        test_external_scheduler.push(engine, 0)
        rng = np.random.default_rng(5)
        host = test_external_scheduler.served(
            engine, rng, test_external_scheduler.prompts_of(rng)[:5], pushes=(9,)
        )
        found.append((host.drawn, engine.stats()["device"]))
        engine.close()
    assert found[0][0] == found[1][0]
    assert [device for _, device in found] == ["cpu", "cuda:0"]
