"""The wire format of messages between ranks: values are restored exactly, other values are refused,
and foreign bytes raise FormatError.

Input: random values of every supported kind, nested. Oracle: the value itself, compared to the last
bit (including NaN payloads of arrays). Malformed input: random bytes, truncated messages, and
messages with bytes or header fields changed."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollmesh as rm
from rollmesh.distributed.peers import A_STEP, PUSHES, _pack, _unpack
from rollmesh.distributed.wire import KIND, decode, encode
from rollmesh.errors import FormatError
from rollmesh.request.outputs import Contract
from rollmesh.weights.transport.tensors import BF16

DTYPES = [
    np.dtype(name)
    for name in ("i1", "u1", "i2", "<i4", ">i4", "i8", "u8", "?", "f2", "<f4", ">f4", "f8")
] + [BF16]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Arrays of any bytes, so with NaNs of every payload; some are views with strides, reversed,
    without elements or without dims."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4).map(tuple))
    count = math.prod(shape)
    if dtype == np.bool_:
        array = np.array(
            draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype
        ).reshape(shape)
    else:
        data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
        array = np.frombuffer(data, dtype).reshape(shape)
    how = draw(st.sampled_from(["as it is", "transposed", "backwards", "every other"]))
    if array.ndim and how != "as it is":
        array = (
            array.T
            if how == "transposed"
            else array[::-1]
            if how == "backwards"
            else array[..., ::2]
        )
    return array


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.sampled_from(["", "\ud800", "\0", "kind"]),
)
VALUES = st.recursive(
    st.one_of(SCALARS, arrays()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(st.text(), st.sampled_from(["array", "error", "object"])), inner, max_size=4
        ),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        alike = (
            a.dtype == b.dtype
            and bool(a.dtype.metadata) == bool(b.dtype.metadata)
            and a.shape == b.shape
        )
        return alike and np.ascontiguousarray(a).tobytes() == b.tobytes()
    if isinstance(a, float):
        return a.hex() == b.hex()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Exception):
        return str(a) == str(b)
    return bool(a == b)


@settings(deadline=None, max_examples=300)
@given(VALUES)
def test_round_trip(value: Any) -> None:
    assert same(decode(encode(value)), value)


def test_a_tuple_becomes_a_list() -> None:
    assert decode(encode({"a": (1, (2,))})) == {"a": [1, [2]]}


def test_dataclasses_come_out_as_they_were() -> None:
    params = rm.SamplingParams(
        logit_bias={3: 1.5}, allowed_token_ids=range(5), stop=["a"], bad_words=["b"], seed=2**63
    )
    contract = Contract("x86", 1, "float32", (3, 4))
    assert decode(encode([params, contract])) == [params, contract]


def test_the_comparison_can_fail() -> None:
    nan = np.array([0x7FC00001], np.uint32).view(np.float32)
    pairs = [
        (1, True),
        (0.0, -0.0),
        ([1], [2]),
        ({"a": 1}, {"b": 1}),
        (nan, np.array([np.nan], np.float32)),
    ]
    pairs += [
        (np.zeros(2, np.uint16), np.zeros(2, np.uint16).view(BF16)),
        (np.zeros((1, 2)), np.zeros((2, 1))),
    ]
    assert not any(same(a, b) for a, b in pairs)


def test_arrays_come_out_writable_and_alone() -> None:
    one = np.arange(4, dtype=np.int32)
    first, second = decode(encode([one, one]))
    first[0] = 9
    assert second[0] == one[0] == 0


@pytest.mark.parametrize(
    "kind", [getattr(rm.errors, name) for name in rm.errors.__all__] + [MemoryError]
)
def test_errors_keep_their_class(kind: type[Exception]) -> None:
    assert same(decode(encode(kind("tensor 'a'[3] = nan"))), kind("tensor 'a'[3] = nan"))


def test_others_errors_become_ours() -> None:
    """Neither side looks up a class of user code by name."""
    for error in (
        KeyError("x"),
        OSError(2, "no file"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
    ):
        got = decode(encode(error))
        assert type(got) is rm.Error
        assert str(got) == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "value",
    [
        object(), {1, 2}, b"bytes", bytearray(b"x"), 1j, len, int, range(3), np.int64(3),
        np.float32(1), np.bool_(True), rm.Mesh(), np.zeros(2, np.complex64),
        np.array([object()]), np.array(["text"]), np.array([b"x"]), np.zeros(2, "V4"),
        np.zeros(2, [("a", "i4")]),
        np.array(["2026"], "M8[D]"), np.ma.masked_array([1], [True]),
        KeyboardInterrupt(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_foreign_objects_are_refused(value: Any) -> None:
    for nested in (value, [value], {"a": (value,)}):
        with pytest.raises(TypeError, match="cannot travel between ranks"):
            encode(nested)


# -------------------------------------------------------------------------- what is not a message
@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode(data)


@settings(deadline=None, max_examples=200)
@given(VALUES, st.data())
def test_changed_messages(value: Any, data: st.DataObject) -> None:
    """A cut or changed message gives a value, or FormatError, and nothing else. A cut message is
    always refused."""
    message = encode(value)
    at = data.draw(st.integers(0, len(message) - 1))
    with pytest.raises(FormatError):
        decode(message[:at])
    with pytest.raises(FormatError):
        decode(message + bytes(8))
    changed = bytearray(message)
    changed[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(FormatError):
        decode(bytes(changed))


def message(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tagged(*content: Any) -> dict[str, Any]:
    return {KIND: list(content)}


def array(dtype: Any, shape: Any) -> dict[str, Any]:
    return tagged("array", dtype, shape)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"1234567", message(b""), message(b"{"), message(b"\xff\xfe"),
        message(b"[" * 100_000), message(b"9" * 10_000), (1 << 63).to_bytes(8, "little"),
        message({KIND: None}), message({KIND: 3}), message(tagged()), message(tagged("array")),
        message(tagged("array", "<i4")), message(tagged("object", "Mesh", [])),
        message(tagged("object", "SyncReport", [])), message(tagged("object", "SyncReport", 3)),
        message(tagged("object", ["SyncReport"], [])), message(tagged("other", "Error", "x")),
        message(array("<i4", [2]), bytes(7)), message(array("<i4", [2]), bytes(16)),
        message(array("<i4", [-1]), bytes(8)),
        message(array("<i4", [1 << 62, 1 << 62])), message(array("<i4", [1 << 32, 1 << 32])),
        message(array("<i4", [1 << 80])),
        message(array("<i4", [2.0]), bytes(8)),
        message(array("<i4", 2), bytes(8)),
        message(array("<i4", [1] * 65), bytes(4)), message(array("|O", [1]), bytes(8)),
        message(array("V8", [1]), bytes(8)),
        message(array("i4,i4", [1]), bytes(8)), message(array("<U2", [1]), bytes(8)),
        message(array("M8[D]", [1]), bytes(8)),
        message(array("nothing", [1]), bytes(8)), message(array(3, [1]), bytes(8)),
        message(array(None, [1]), bytes(8)),
        message(array([["a", "i4"]], [1]), bytes(8)), message(array("c16", [0])),
        message(array("<i4", [0, 1 << 62])),
        message(array("<a4", [0])),
    ],
    ids=lambda data: repr(data[8:48]),
)  # fmt: skip
def test_malformed(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode(data)


def test_a_name_is_not_looked_up() -> None:
    """The kinds and the classes of errors are looked up in fixed lists."""
    for name in ("SystemExit", "__class__", "annotations", "Error.__base__"):
        got = decode(message(tagged("error", name, "x")))
        assert type(got) is rm.Error


@pytest.mark.parametrize(
    "value, why, leads, is_short",
    [
        (None, None, False, True),
        (0, None, False, True),
        (-7, None, False, True),
        ("push", None, False, False),
        (A_STEP, None, True, True),
        (A_STEP, None, False, False),
        (None, None, True, False),
        (None, "a reason", False, False),
        (True, None, False, False),
        ("none", None, False, False),
        ([["step", [1], None], None], None, True, False),
    ],
)
def test_messages_of_ranks(value: Any, why: str | None, leads: bool, is_short: bool) -> None:
    """Frequent messages have a short form, with any text as the call."""
    for call in (PUSHES, "", "generate(prompts=['a b: \ud800 €'])"):
        message = _pack(call, value, why, leads)
        assert message.startswith(b":") is not is_short
        got = _unpack(message)
        assert got == [call, value, why, leads]
        assert type(got[1]) is type(value)


@pytest.mark.parametrize("message", [b"", b"x", b"steps a", b"1.5 a", b"\xff a", b":", b":x"])
def test_bytes_that_no_rank_sends(message: bytes) -> None:
    with pytest.raises(FormatError):
        _unpack(message)
