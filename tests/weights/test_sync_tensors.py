"""Weight sync against bad tensors: shapes, dtypes, strides, DLPack, values. After the fault the
same version serves, its digest is the same and its logits have the same bits.

Input: tiny random models. Oracle of what was copied: the digest and the logits of the same values
sent as plain contiguous arrays, and torch's .to() for conversions. Bound: zero.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import dlpack
import numpy as np
import pytest
from dlpack import Producer
from helpers import numpy_state_dict, tiny_config
from sync_cases import (
    DENSE,
    IDS,
    MOE,
    NORM,
    TIED,
    Q,
    State,
    Stubborn,
    digest_of,
    make,
    new_state,
    refused,
    unchanged,
)

import rollmesh as rm


# ---------------------------------------------------------------------------------------- tensors
def bad_shapes() -> Iterator[tuple[str, str, Callable[[np.ndarray], np.ndarray], str]]:
    """config, name, what is done to the tensor, what the message must say."""
    down, experts = "model.layers.1.mlp.down_proj.weight", "model.layers.0.mlp.experts"
    yield "moe", down, lambda x: x.T, "transposed"
    yield "moe", down, lambda x: x.reshape(-1), "[6144]"
    yield (
        "moe",
        f"{experts}.0.down_proj.weight",
        lambda x: x[None],
        "[1, 64, 32]; this name holds one expert",
    )
    yield "moe", down, lambda x: x[:, :1], "expected shape [64, 96], got [64, 1]"
    yield "moe", down, lambda x: x[:1], "[1, 96]"
    yield "moe", down, lambda x: x[:0], "[0, 96]"
    yield "moe", down, lambda x: np.zeros((2, 2, 2, 2, 2), np.float32), "got 5"
    yield "moe", down, lambda x: np.zeros((), np.float32), "expected shape [64, 96], got []"
    yield "moe", NORM, lambda x: x[:, None], "[64, 1]"
    yield "moe", NORM, lambda x: x[:1], "[1]"
    yield "moe", Q, lambda x: np.concatenate([x, x, x]), "one part and a fused"
    yield (
        "moe",
        "model.layers.0.self_attn.qkv_proj.weight",
        lambda x: np.zeros((64, 64), np.float32),
        "fused tensor and one part",
    )
    yield (
        "moe",
        f"{experts}.gate_up_proj",
        lambda x: np.zeros((8, 32, 64), np.float32),
        "gate and up fused",
    )
    yield (
        "moe",
        f"{experts}.gate_up_proj",
        lambda x: np.zeros((8, 64, 32), np.float32),
        "expected shape [8, 64, 64]",
    )
    yield "moe", f"{experts}.down_proj", lambda x: np.zeros((8, 32, 64), np.float32), "transposed"
    yield "moe", f"{experts}.down_proj", lambda x: np.zeros((64, 32), np.float32), "all experts"
    # A padded vocabulary.
    yield ("tied", "model.embed_tokens.weight", lambda x: np.vstack([x, x[:1]]), "[152, 64]")
    yield "tied", "model.embed_tokens.weight", lambda x: x[:-1], "[150, 64]"


@pytest.mark.parametrize(("config", "name", "change", "words"), list(bad_shapes()))
def test_shape(
    served: dict[str, rm.Generator],
    config: str,
    name: str,
    change: Callable[[Any], Any],
    words: str,
) -> None:
    state = new_state({"moe": MOE, "tied": TIED}[config])
    bad = change(state.get(name, state[NORM]))
    replaced = (".qkv_proj", ".experts.gate_up_proj", ".experts.down_proj")
    fused = {
        ".qkv_proj": (".0.self_attn.q_p", ".0.self_attn.k_p", ".0.self_attn.v_p"),
        replaced[1]: (".0.mlp.experts",),
        replaced[2]: (),
    }
    drop = next((parts for part, parts in fused.items() if part in name), ())
    state = {k: v for k, v in state.items() if not any(part in k for part in drop)}
    with unchanged(served[config]), pytest.raises(rm.ShapeError) as caught:
        served[config].sync_weights(iter([(name, bad), *state.items()]))
    for word in (words, name):
        assert word in str(caught.value)


def test_a_dense_parameter_is_no_expert(served: dict[str, rm.Generator]) -> None:
    x = new_state(DENSE)[Q]
    with (
        unchanged(served["dense"]),
        pytest.raises(rm.ShapeError, match=r"expected shape \[64, 64\], got \[1, 64, 64\]$"),
    ):
        served["dense"].sync_weights(iter([(Q, x[None])]))


@pytest.mark.parametrize(
    "dtype",
    [
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "int64",
        "bool",
        "complex64",
        "float64",
        "float16",
        ">f4",
        "S4",
    ],
)
def test_numpy_dtype(served: dict[str, rm.Generator], dtype: str) -> None:
    state = new_state(DENSE)
    refused(served["dense"], {**state, Q: state[Q].astype(dtype)}, rm.DTypeError, Q)
    if dtype not in ("float64", "float16"):
        refused(served["dense"], {**state, Q: state[Q].astype(dtype)}, rm.DTypeError, Q, cast=True)


@pytest.mark.parametrize(
    "dtype",
    ["int8", "bool", "complex64", "float64", "float8_e4m3fn", "float8_e5m2", "bfloat16", "int64"],
)
def test_torch_dtype(served: dict[str, rm.Generator], dtype: str) -> None:
    torch = pytest.importorskip("torch")
    state = new_state(DENSE)
    refused(
        served["dense"],
        {**state, Q: torch.from_numpy(state[Q]).to(getattr(torch, dtype))},
        rm.DTypeError,
        Q,
    )


@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("to", ["bfloat16", "float32"])
def test_cast_is_torchs(source: str, to: str) -> None:
    """Values over the whole range: denormals of both types, ties, overflow to infinity, both
    zeros."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    state = new_state(DENSE)
    bits = rng.integers(0, 2**32, state[Q].shape, dtype=np.uint32)
    wild = torch.from_numpy(np.where(np.isfinite(bits.view(np.float32)), bits, 0).view(np.float32))
    wild[0, :8] = torch.tensor(
        [0.0, -0.0, 1e-45, -1e-45, 1.17549421e-38, 3.3895314e38, 1.00390625, 65519.0]
    )
    if source == "float64":
        wild = wild.double() * torch.from_numpy(1 + rng.random(tuple(wild.shape)) * 1e-8)
    tensors: State = {
        name: torch.from_numpy(x).to(getattr(torch, source)) for name, x in state.items()
    }
    tensors[Q] = wild.to(getattr(torch, source))
    want = {name: x.to(getattr(torch, to)) for name, x in tensors.items()}
    options = {"allow_nonfinite": True}
    with make(DENSE, dtype=to) as generator:
        digest = generator.sync_weights(want, **options).digest
        assert generator.sync_weights(tensors, cast=True, **options).digest == digest
        flipped = want[Q].clone()
        flipped[31, 31] = 0.125
        assert generator.sync_weights({**want, Q: flipped}, **options).digest != digest


def router_bias() -> State:
    values = np.linspace(-1, 1, 8, dtype=np.float32)
    return {f"model.layers.{i}.mlp.gate.e_score_correction_bias": values for i in range(2)}


def test_a_router_bias_that_the_spec_requires() -> None:
    """ModelSpec.from_torchtitan sets this; allow_bias_removal is not an exception."""
    config = tiny_config(True)
    bias = router_bias()
    state = numpy_state_dict(config, dtype="bfloat16")
    spec = replace(rm.ModelSpec.from_hf(config), router_bias=True)
    with rm.Generator(
        spec, dtype="bfloat16", threads=1, kv_cache_gib=0.01, max_model_len=64
    ) as generator:
        assert all(generator.manifest()[name].required for name in bias)
        generator.sync_weights({**state, **bias})
        for source, error in (
            (state, rm.MissingKeyError),
            (iter(state.items()), rm.IncompleteSyncError),
        ):
            with (
                unchanged(generator),
                pytest.raises(
                    error, match=r"e_score_correction_bias.*push the module's own state_dict\(\)"
                ),
            ):
                generator.sync_weights(source, allow_bias_removal=True)


def test_router_bias_is_float32_in_any_model() -> None:
    config = tiny_config(True)
    bias = router_bias()
    state = numpy_state_dict(config, dtype="bfloat16")
    with make(config, dtype="bfloat16") as generator:
        plain = generator.sync_weights(state)
        logits = generator.logits(IDS)[0].tobytes()
        zeros = generator.sync_weights(
            {**state, **{name: np.zeros(8, np.float32) for name in bias}}
        )
        assert generator.logits(IDS)[0].tobytes() == logits
        assert zeros.num_parameters == plain.num_parameters + 2
        generator.sync_weights({**state, **bias})
        assert generator.logits(IDS)[0].tobytes() != logits
        version = generator.version
        half = {name: x.astype(np.float16) for name, x in bias.items()}
        refused(generator, {**state, **half}, rm.DTypeError, "float32")
        refused(generator, state, rm.MissingKeyError, "router bias")  # had one, has none
        refused(
            generator, {**state, **dict(list(bias.items())[:1])}, rm.MissingKeyError, "layers.1."
        )
        assert generator.version == version
        generator.sync_weights(state, allow_bias_removal=True)
        # The KV is zero again and does not hold the old contents of the block.
        assert generator.logits(IDS)[0].tobytes() == logits
        generator.sync_weights(state)


def views(x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields arrays equal to x with other memory layouts."""
    rows, cols = x.shape
    yield "transposed", np.asfortranarray(x)
    wide = np.zeros((rows * 2, cols * 3), x.dtype)
    wide[::2, 1::3] = x
    yield "sliced", wide[::2, 1::3]
    yield "reversed rows", x[::-1].copy()[::-1]
    yield "reversed", x[::-1, ::-1].copy()[::-1, ::-1]
    buffer = np.zeros(x.nbytes + 3, np.uint8)
    buffer[3:] = x.reshape(-1).view(np.uint8)
    yield "misaligned", buffer[3:].view(x.dtype).reshape(x.shape)
    read_only = x.copy()
    read_only.flags.writeable = False
    yield "read-only", read_only
    yield "of bytes", np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape)


def test_strides_are_followed() -> None:
    state = new_state(DENSE)
    want = digest_of(DENSE, state)
    embed = "model.embed_tokens.weight"  # stored plainly; Q is stored packed
    with make(DENSE) as generator:
        for name in (Q, embed):
            for what, view in views(state[name]):
                assert np.array_equal(view, state[name])
                assert generator.sync_weights({**state, name: view}).digest == want, what
        backwards = {**state, NORM: state[NORM][::-1].copy()[::-1]}
        assert generator.sync_weights(backwards).digest == want
        expanded = np.broadcast_to(state[Q][3], state[Q].shape)
        overlapping = np.lib.stride_tricks.as_strided(
            state[embed].reshape(-1), state[Q].shape, (4, 4)
        )
        for view in (expanded, overlapping):
            assert generator.sync_weights({**state, Q: view}).digest == digest_of(
                DENSE, {**state, Q: view.copy()}
            )


def test_torch_strides_are_followed() -> None:
    torch = pytest.importorskip("torch")
    state = {name: torch.from_numpy(x).bfloat16() for name, x in new_state(DENSE).items()}
    want = digest_of(DENSE, state, cast=True)
    x = state[Q]
    big = torch.zeros(x.shape[0] + 3, x.shape[1] * 2, dtype=x.dtype)
    big[3:, ::2] = x
    with make(DENSE) as generator:
        for view in (
            x.t().contiguous().t(),
            big[3:, ::2],
            x.clone().requires_grad_(),
            torch.nn.Parameter(x),
            x.pin_memory() if torch.cuda.is_available() else x,
        ):
            assert generator.sync_weights({**state, Q: view}, cast=True).digest == want


def test_strides_outside_the_buffer(served: dict[str, rm.Generator]) -> None:
    """Refused before a byte is read, because some of these addresses are not mapped."""
    state = new_state(DENSE)
    x = state[Q]
    strided = np.lib.stride_tricks.as_strided
    for strides in (
        (2**40, 4),
        (4, 2**40),
        (-(2**40), 4),
        (256, -(2**33)),
        (260, 4),
        (256, 8),
        (-256, 4),
        (2**62, 4),
        (-(2**62), 4),
    ):
        refused(
            served["dense"], {**state, Q: strided(x, x.shape, strides)}, rm.LayoutError, Q, "reach"
        )
    one = np.ones(1, np.float32)
    refused(served["dense"], {**state, Q: strided(one, x.shape, (4, 4))}, rm.LayoutError, Q)
    half_strides = strided(
        np.zeros(x.size * 4, np.float16).view(np.uint8).view(np.float32), x.shape, (262, 6)
    )
    refused(served["dense"], {**state, Q: half_strides}, rm.LayoutError, "multiple")


HUGE = 2**62
OVERFLOWS: list[tuple[dict[str, Any], type[rm.Error]]] = [
    ({"shape": [HUGE, HUGE]}, rm.ShapeError),
    ({"shape": [2**32, 2**32]}, rm.ShapeError),
    ({"shape": [2**31 + 1, 64]}, rm.ShapeError),
    ({"shape": [-1, 64]}, rm.ShapeError),
    ({"shape": [64, -(2**63)]}, rm.ShapeError),
    ({"shape": [0, 64]}, rm.ShapeError),
    ({"shape": [64, 64], "n_dims": -1}, rm.ShapeError),
    ({"shape": [64, 64], "n_dims": 5}, rm.ShapeError),
    ({"shape": [64, 64], "n_dims": 2**31 - 1}, rm.ShapeError),
    ({"strides": [HUGE, 1]}, rm.LayoutError),
    ({"strides": [1, HUGE]}, rm.LayoutError),
    ({"strides": [-HUGE, 1]}, rm.LayoutError),
    ({"strides": [-(2**63), 1]}, rm.LayoutError),
    ({"strides": [2**63 - 1, 2**63 - 1]}, rm.LayoutError),
    ({"strides": [2**57, 1]}, rm.LayoutError),
    ({"byte_offset": 2**64 - 1}, rm.LayoutError),
    ({"data": 2**64 - 64}, rm.LayoutError),
    ({"data": None}, rm.UnsupportedTensorError),
    ({"no_shape": True}, rm.UnsupportedTensorError),
    ({"device": 2}, rm.UnsupportedTensorError),
    ({"device": 2, "said_device": (1, 0)}, rm.UnsupportedTensorError),
    ({"said_device": "cpu"}, rm.UnsupportedTensorError),
    ({"said_device": (1,)}, rm.UnsupportedTensorError),
    ({"gives": ...}, rm.UnsupportedTensorError),
    ({"gives": 7}, rm.UnsupportedTensorError),
    ({"version": (2, 0)}, rm.UnsupportedTensorError),
    ({"dtype": (dlpack.FLOAT, 32, 4)}, rm.DTypeError),
    ({"dtype": (dlpack.FLOAT, 8, 1)}, rm.DTypeError),
    ({"dtype": (dlpack.FLOAT, 128, 1)}, rm.DTypeError),
    ({"dtype": (dlpack.COMPLEX, 64, 1)}, rm.DTypeError),
    ({"dtype": (dlpack.BOOL, 8, 1)}, rm.DTypeError),
    ({"dtype": (dlpack.INT, 32, 1)}, rm.DTypeError),
    ({"dtype": (255, 16, 1)}, rm.DTypeError),
    ({"raises": BufferError("not today")}, rm.UnsupportedTensorError),
]


@pytest.mark.quick(10)
@pytest.mark.parametrize(("lie", "error"), OVERFLOWS, ids=lambda value: str(value))
def test_dlpack_that_lies(
    served: dict[str, rm.Generator], lie: dict[str, Any], error: type[rm.Error]
) -> None:
    state = new_state(DENSE)
    refused(served["dense"], {**state, Q: Producer(state[Q], **lie)}, error)
    gc.collect()
    assert dlpack.alive == 0


def test_honest_dlpack_of_both_kinds() -> None:
    state = new_state(DENSE)
    want = digest_of(DENSE, state)
    x = state[Q]
    with make(DENSE) as generator:
        for honest in (
            Producer(x),
            Producer(x, version=(1, 1)),
            Producer(x, strides=None),
            Producer(np.asfortranarray(x)),
            Producer(x, version=(1, 7)),
            Producer(
                np.concatenate([[0.0], x.reshape(-1)]).astype(np.float32),
                shape=x.shape,
                strides=(64, 1),
                byte_offset=4,
            ),
        ):
            count = sys.getrefcount(honest)
            assert generator.sync_weights({**state, Q: honest}).digest == want
            assert sys.getrefcount(honest) == count
    gc.collect()
    assert dlpack.alive == 0


def test_exceptions_of_user_code_pass(served: dict[str, rm.Generator]) -> None:
    state = new_state(DENSE)

    class BadDevice:
        def __dlpack_device__(self) -> Any:
            raise Stubborn("no device")

    class BadAttribute:
        @property
        def __dlpack_device__(self) -> Any:
            raise Stubborn("no attribute")

    for bad, error in (
        (Producer(state[Q], raises=Stubborn("no")), Stubborn),
        (Producer(state[Q], raises=KeyboardInterrupt()), KeyboardInterrupt),
        (Producer(state[Q], raises=TypeError("inside")), TypeError),
        (BadDevice(), Stubborn),
        (BadAttribute(), Stubborn),
    ):
        count = sys.getrefcount(bad)
        refused(served["dense"], {**state, Q: bad}, error)
        gc.collect()
        assert sys.getrefcount(bad) == count


def test_no_tensors(served: dict[str, rm.Generator]) -> None:
    state = new_state(DENSE)
    for bad in (
        None,
        1.0,
        [[1.0] * 64] * 64,
        "weights",
        b"\0" * 16384,
        memoryview(state[Q]),
        object(),
        np.float32,
    ):
        refused(served["dense"], {**state, Q: bad}, rm.UnsupportedTensorError, Q)
    # A masked array is refused even without masked elements.
    for bad in (np.ma.masked_array(state[Q]), np.ma.masked_array(state[Q], state[Q] > 0)):
        refused(served["dense"], {**state, Q: bad}, rm.UnsupportedTensorError, Q, "a masked array")
    for device in ((2**70, 0), (2, 2**70), ("cpu", 0)):
        refused(
            served["dense"],
            {**state, Q: Producer(state[Q], said_device=device)},
            rm.UnsupportedTensorError,
            Q,
            str(device),
        )
    for source in (None, 3, "path", b"bytes", object()):
        with unchanged(served["dense"]), pytest.raises(rm.UnsupportedTensorError):
            served["dense"].sync_weights(source)
    for entry in (Q, (Q,), (Q, state[Q], 1), None):
        with (
            unchanged(served["dense"]),
            pytest.raises((rm.UnsupportedTensorError, rm.UnexpectedKeyError)),
        ):
            served["dense"].sync_weights(iter([entry]))
    with unchanged(served["dense"]), pytest.raises(rm.UnexpectedKeyError):
        served["dense"].sync_weights(iter([(7, state[Q])]))


def test_a_mapping_whose_items_lie(served: dict[str, rm.Generator]) -> None:
    state = new_state(DENSE)
    pairs = list(state.items())

    class Lying(dict[str, Any]):
        told: list[Any]

        def items(self) -> Any:
            return iter(self.told)

    for told, error, said in (
        ([*pairs, 3], rm.UnsupportedTensorError, "expected pairs"),
        ([*pairs, (NORM,)], rm.UnsupportedTensorError, "expected pairs"),
        ([*pairs, (NORM, state[NORM])], rm.DuplicateKeyError, NORM),
        (pairs[:-1], rm.MissingKeyError, pairs[-1][0]),
    ):
        source = Lying(state)
        source.told = told
        refused(served["dense"], source, error, said)


@pytest.mark.filterwarnings(
    "ignore:.*quantized tensor creation", "ignore:The PyTorch API of MaskedTensors"
)
def test_torch_tensors_without_plain_memory(served: dict[str, rm.Generator]) -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    state = {name: torch.from_numpy(x) for name, x in new_state(DENSE).items()}
    x = state[Q]
    with FakeTensorMode():
        fake = torch.zeros(64, 64)
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    bad = {
        "sparse": x.to_sparse(),
        "quantized": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "meta": x.to("meta"),
        "fake": fake,
        "masked": torch.masked.masked_tensor(x, x > 0),
        "negated": torch.view_as_complex(torch.stack([x, x], -1)).conj().imag,
    }
    for what, tensor in bad.items():
        refused(served["dense"], {**state, Q: tensor}, rm.UnsupportedTensorError, Q, what)
    refused(served["dense"], {**state, Q: freed}, rm.Error, Q)
    if torch.cuda.is_available():
        refused(served["dense"], {**state, Q: x.cuda()}, rm.UnsupportedTensorError, Q)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nonfinite(served: dict[str, rm.Generator], value: float, dtype: str) -> None:
    """In every layout of the store, at the first, the last and a middle element; the error has the
    index in the sender's tensor."""
    names = (
        "model.embed_tokens.weight",
        Q,
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        NORM,
    )
    config = {**MOE, "head_dim": 20, "hidden_size": 52}
    bf16 = dtype == "bfloat16"
    state = numpy_state_dict(config, seed=2, dtype=dtype)
    with make(config, numpy_state_dict(config, seed=1, dtype=dtype), dtype=dtype) as generator:
        for name in names:
            for at in (0, state[name].size // 2 + 1, state[name].size - 1):
                bad = state[name].copy()
                bad.reshape(-1)[at] = value
                index = str([int(i) for i in np.unravel_index(at, bad.shape)])
                refused(generator, {**state, name: bad}, rm.NonFiniteError, name, index, dtype)
                if at:
                    bad.reshape(-1)[-1] = value  # a second one: the first is named
                    refused(generator, {**state, name: bad}, rm.NonFiniteError, index)
        too_large = {name: np.asarray(x, np.float64) for name, x in state.items()}
        too_large[Q][2, 3] = 3.4e38 if bf16 else 3.5e38  # finite, but not as the stored type
        refused(generator, too_large, rm.NonFiniteError, "[2, 3]", cast=True)
        assert generator.sync_weights({**state, name: bad}, allow_nonfinite=True).version == 6
