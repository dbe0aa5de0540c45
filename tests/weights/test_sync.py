"""Weight sync against bad input: names, limits, order of calls, failures, room.
test_sync_tensors.py has the tensors. What `unchanged` checks: after the fault the same version
serves, its digest is the same and its logits have the same bits.

Input: tiny random models. Oracle of what was copied: the digest and the logits of the same values
sent as plain contiguous arrays. Bound: zero.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from paths import SUPPORT
from sync_cases import (
    DENSE,
    IDS,
    MOE,
    NORM,
    OLD,
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
from rollmesh import _core


# ------------------------------------------------------------------------------------------ names
def test_missing_keys(served: dict[str, rm.Generator]) -> None:
    state = new_state(MOE)
    gone = [
        NORM,
        "model.layers.0.mlp.experts.3.up_proj.weight",
        "model.layers.2.mlp.gate.weight",
        "lm_head.weight",
    ]
    refused(
        served["moe"], {k: v for k, v in state.items() if k not in gone}, rm.MissingKeyError, *gone
    )
    refused(served["moe"], {}, rm.MissingKeyError, *list(state)[:9])
    with unchanged(served["moe"]):
        sync = served["moe"].begin_sync()
        for name, tensor in state.items():
            if name != NORM:
                sync.push(name, tensor)
        with pytest.raises(rm.IncompleteSyncError, match=f"lacks 1 of.*{NORM}"):
            sync.commit()


UNEXPECTED = [
    "model.layers.0.self_attn.rotary_emb.freqs",
    "model.layers.3.mlp.gate_proj.weight",  # layer 3 of 3
    "model.layers.00.input_layernorm.weight",
    "model.layers.-1.input_layernorm.weight",
    "model.layers.4294967296.input_layernorm.weight",
    "model.layers.0.mlp.experts.8.up_proj.weight",  # expert 8 of 8
    "model.layers.1.mlp.experts.0.up_proj.weight",  # layer 1 is dense
    "model.layers.0.mlp.up_proj.weight",  # layer 0 is not
    "model.layers.0.self_attn.q_proj.bias",  # attention_bias is off
    "model.layers.0.self_attn.q_proj.weight.",
    "model.layers.0.self_attn.q_proj",
    "lm_head.weight2",
    "",
    "model.",
    "\u00e9\u4e16",
]


@pytest.mark.parametrize("name", UNEXPECTED)
def test_unexpected_key(served: dict[str, rm.Generator], name: str) -> None:
    state = new_state(MOE)
    refused(served["moe"], {**state, name: state[NORM]}, rm.UnexpectedKeyError, name)


def test_not_strict_skips_them_and_keeps_what_is_missing() -> None:
    state = new_state(DENSE)
    with (
        make(DENSE, OLD["dense"]) as generator,
        make(DENSE, {**OLD["dense"], Q: state[Q]}) as mixed,
    ):
        report = generator.sync_weights({Q: state[Q], "novel": state[Q]}, strict=False)
        assert (report.num_skipped, report.num_tensors, generator.version) == (1, 1, 6)
        assert generator.logits(IDS)[0].tobytes() == mixed.logits(IDS)[0].tobytes()
        assert report.digest == mixed.sync_weights({}, strict=False).digest
    with make(DENSE) as fresh, pytest.raises(rm.MissingKeyError):
        fresh.sync_weights({Q: state[Q]}, strict=False)  # nothing to keep yet


def test_not_strict_never_serves_half_a_parameter() -> None:
    """The second part of a fused tensor is bad after its first part was written; the parameter must
    not keep that part."""
    state, prefix = new_state(MOE), "model.layers.0.mlp.experts"
    packed = np.stack(
        [
            np.concatenate(
                [state[f"{prefix}.{e}.gate_proj.weight"], state[f"{prefix}.{e}.up_proj.weight"]]
            )
            for e in range(8)
        ]
    )
    packed[5, 3, 3] = np.nan
    with make(MOE, OLD["moe"]) as generator, unchanged(generator):
        sync = generator.begin_sync(strict=False)
        with pytest.raises(rm.NonFiniteError, match=r"\[5, 3, 3\]"):
            sync.push(f"{prefix}.gate_up_proj", packed)
        with pytest.raises(rm.IncompleteSyncError, match=r"experts\.5\.gate_proj"):
            sync.commit()


def test_duplicates_and_two_spellings(served: dict[str, rm.Generator]) -> None:
    state = new_state(MOE)
    titan = "layers.0.attention.wq.weight"
    refused(served["moe"], {**state, titan: state[Q]}, rm.DuplicateKeyError, Q, titan)
    refused(served["moe"], {**state, "module._orig_mod." + Q: state[Q]}, rm.DuplicateKeyError, Q)
    stacked = np.stack(
        [state[f"model.layers.0.mlp.experts.{e}.down_proj.weight"] for e in range(8)]
    )
    refused(
        served["moe"],
        {**state, "model.layers.0.mlp.experts.down_proj": stacked},
        rm.DuplicateKeyError,
    )
    for name, said in (
        (Q, f"^{Q} has come already in this sync$"),
        (titan, f"^{titan}: {Q} has come already in this sync$"),
    ):
        with unchanged(served["moe"]), pytest.raises(rm.DuplicateKeyError, match=said):
            served["moe"].sync_weights(iter([*state.items(), (name, state[Q])]))


@pytest.mark.parametrize("head_first", [False, True])
def test_tied_lm_head(served: dict[str, rm.Generator], head_first: bool) -> None:
    state = new_state(TIED)
    embed = state["model.embed_tokens.weight"]

    def with_head(head: np.ndarray) -> State:
        return (
            {"lm_head.weight": head, **state} if head_first else {**state, "lm_head.weight": head}
        )

    for row, col in ((0, 0), (130, 7), (17, 63)):
        other = embed.copy()
        other[row, col] = np.nextafter(other[row, col], np.float32(9))  # one bit
        refused(
            served["tied"],
            with_head(other),
            rm.TiedWeightError,
            f"[{row}, {col}]",
            "tie_word_embeddings",
        )
    assert (
        digest_of(TIED, with_head(embed.copy()))
        == digest_of(TIED, with_head(embed))
        == digest_of(TIED, state)
    )


@pytest.mark.parametrize("head_first", [False, True])
def test_a_tied_lm_head_in_the_same_memory_is_read_once(head_first: bool) -> None:
    state, sent = new_state(TIED), sum(x.nbytes for x in new_state(TIED).values())
    twice = np.repeat(state["model.embed_tokens.weight"], 2, axis=0)
    embed = twice[: len(twice) // 2]
    with make(TIED, state) as generator:
        for other, read, as_sent in (
            (embed, 0, True),
            (embed[:], 0, True),
            (embed.copy(), embed.nbytes, True),
            (twice[::2], 0, False),  # begins at the same address
        ):
            state["model.embed_tokens.weight"] = embed
            pushed = (
                {"lm_head.weight": other, **state}
                if head_first
                else {**state, "lm_head.weight": other}
            )
            if not as_sent:
                refused(generator, pushed, rm.TiedWeightError, "[1, ")
                continue
            report = generator.sync_weights(pushed)
            assert (report.num_tensors, report.num_parameters, report.bytes) == (
                len(pushed),
                len(pushed),
                sent + read,
            )
            assert report.digest == digest_of(TIED, state)


# ----------------------------------------------------------------------------------------- limits
def test_names(served: dict[str, rm.Generator]) -> None:
    state = new_state(DENSE)
    for name in ("x" * 1025, "model." * 200_000, Q + "\0", "\0", "model.\ud800", "\udfff" + Q):
        start = time.thread_time()
        refused(served["dense"], {**state, name: state[Q]}, rm.LimitError)
        assert time.thread_time() - start < 1
    refused(served["dense"], {**state, "x" * 1024: state[Q]}, rm.UnexpectedKeyError)
    refused(
        served["dense"], {**state, "": state[Q]}, rm.UnexpectedKeyError, "'' is not a parameter"
    )
    refused(served["dense"], {**state, "_orig_mod." * 93: state[Q]}, rm.UnexpectedKeyError)


def test_a_million_keys(served: dict[str, rm.Generator]) -> None:
    x = np.zeros(1, np.float32)
    with unchanged(served["dense"]), pytest.raises(rm.LimitError):
        served["dense"].sync_weights({f"k{i}": x for i in range(1_000_001)})
    engine = served["dense"]._engine
    with unchanged(served["dense"]):
        sync = served["dense"].begin_sync(strict=False)
        entries = [engine.sync_resolve("k", True)] * 1000
        for _ in range(1000):
            engine.sync_push(entries)
        with pytest.raises(rm.LimitError, match="1000000"):
            sync.push("k", x)
        sync.abort()


# --------------------------------------------------------------------------- order, failure, room
def test_versions(served: dict[str, rm.Generator]) -> None:
    generator, state = served["dense"], new_state(DENSE)
    for version in (5, 4, 0):
        with (
            unchanged(generator),
            pytest.raises(rm.VersionError, match=f"version {version} does not exceed 5"),
        ):
            generator.sync_weights(state, version=version)
        with unchanged(generator), pytest.raises(rm.VersionError):
            generator.begin_sync(version=version)
    with make(DENSE) as fresh:
        assert fresh.version is None
        assert fresh.sync_weights(state, version=2**62).version == 2**62
        assert fresh.sync_weights(state).version == 2**62 + 1
        with pytest.raises(rm.VersionError):
            fresh.sync_weights(state, version=2**62 + 1)
        fresh.sync_weights(state, version=2**63 - 1)
        with pytest.raises(rm.VersionError, match="last number"):
            fresh.sync_weights(state)


def test_order_of_calls(served: dict[str, rm.Generator]) -> None:
    generator, state = served["dense"], new_state(DENSE)
    engine = generator._engine
    entry = engine.sync_resolve(Q)
    with unchanged(generator):
        for call in (
            lambda: engine.sync_push([entry]),  # before the first tensor was taken
            lambda: engine.sync_take(entry, state[Q]),
            lambda: engine.sync_push([engine.sync_resolve("k", True)]),
            lambda: engine.sync_push([Q]),
            lambda: engine.sync_commit("keep"),
        ):
            with pytest.raises(rm.StateError):
                call()
        engine.sync_abort()
        sync = generator.begin_sync()
        sync.push(Q, state[Q])
        other = generator.begin_sync()  # resets the open one
        for call in (lambda: sync.push(NORM, state[NORM]), sync.commit):
            with pytest.raises(rm.StateError):
                call()
        # The second set contains nothing from the first.
        with pytest.raises(rm.IncompleteSyncError, match="q_proj"):
            other.commit()
        for call in (lambda: other.push(Q, state[Q]), other.commit):
            with pytest.raises(rm.StateError, match="closed"):
                call()
        other.abort()
    closed = make(DENSE, state)
    closed.close()
    with pytest.raises(rm.StateError):
        closed.sync_weights(state)
    with make(DENSE, OLD["dense"]) as asleep:
        asleep.sleep("weights")
        with pytest.raises(rm.StateError, match="asleep"):
            asleep.sync_weights(state)
        asleep.wake("weights")
        assert asleep.version is None
        asleep.sync_weights(OLD["dense"])
        assert asleep.logits(IDS)[0].tobytes() == served["dense"].logits(IDS)[0].tobytes()


@pytest.mark.parametrize("error", [Stubborn, KeyboardInterrupt, MemoryError])
def test_exception_at_any_entry(
    served: dict[str, rm.Generator], error: type[BaseException]
) -> None:
    generator, items = served["moe"], list(new_state(MOE).items())
    for stop in (0, 1, len(items) // 2, len(items) - 1, len(items)):

        def entries(stop: int = stop) -> Iterator[tuple[str, Any]]:
            yield from items[:stop]
            raise error

        with unchanged(generator), pytest.raises(error):
            generator.sync_weights(entries())
        with unchanged(generator), pytest.raises(error):
            push_all(generator, entries())


def push_all(generator: rm.Generator, entries: Iterator[tuple[str, Any]]) -> None:
    with generator.begin_sync() as sync:
        for name, tensor in entries:
            sync.push(name, tensor)


def test_memory_is_given_back() -> None:
    gc.collect()
    before = _core.memory_mapped()
    generator = make(DENSE, OLD["dense"])
    one = _core.memory_mapped()
    generator.sync_weights(new_state(DENSE))
    two = _core.memory_mapped()
    assert two > one > before
    generator.sync_weights(OLD["dense"])
    assert _core.memory_mapped() == two  # the two blocks take turns
    generator.sync_weights(new_state(DENSE), mode="inplace")
    assert _core.memory_mapped() == one  # the second copy is gone
    generator.sleep("weights")
    assert _core.memory_mapped() < one
    generator.close()
    assert _core.memory_mapped() == before


def test_in_place() -> None:
    """A failure before anything is written keeps the old version. A failure half way leaves no
    version, and the next sync brings one."""
    state = new_state(DENSE)
    with make(DENSE, OLD["dense"]) as generator, make(DENSE, state) as other:
        with unchanged(generator):
            generator.begin_sync(mode="inplace").abort()
        with unchanged(generator), pytest.raises(rm.ShapeError):
            generator.sync_weights(iter([(Q, state[NORM])]), mode="inplace")
        sync = generator.begin_sync(mode="inplace")
        sync.push(Q, state[Q])
        sync.abort()
        assert generator.version is None
        with pytest.raises(rm.NotSyncedError):
            generator.logits(IDS)
        with pytest.raises(rm.VersionError):
            generator.sync_weights(state, version=5)
        generator.sync_weights(state, mode="inplace")
        assert generator.version == 6
        assert generator.logits(IDS)[0].tobytes() == other.logits(IDS)[0].tobytes()


NO_ROOM = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import numpy as np, rollmesh as rm
from helpers import numpy_state_dict, tiny_config
config = tiny_config(vocab_size=200_000)      # 100 MB
state = numpy_state_dict(config)
gen = rm.Generator(rm.ModelSpec.from_hf(config), dtype="float32", max_model_len=64,
    kv_cache_gib=0.004, threads=1)
gen.sync_weights(state)
before = gen.logits([[1, 2, 3]])[0].tobytes()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 60_000_000, -1))
try:
    gen.sync_weights(state)
except (MemoryError, rm.CapacityError) as error:
    print(type(error).__name__, error)
assert gen.version == 0 and gen.logits([[1, 2, 3]])[0].tobytes() == before
gen.sync_weights(state, mode="inplace")
assert gen.version == 1 and gen.logits([[1, 2, 3]])[0].tobytes() == before
print("in place")
"""


def test_the_second_copy_does_not_fit() -> None:
    run = subprocess.run(
        [sys.executable, "-c", NO_ROOM, str(SUPPORT)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(("MemoryError", "CapacityError"))
    assert run.stdout.endswith("in place\n")


def test_a_push_that_failed_may_be_repeated(served: dict[str, rm.Generator]) -> None:
    state = new_state(DENSE)
    bad = state[Q].copy()
    bad[9, 9] = np.inf
    with make(DENSE, OLD["dense"]) as generator:
        with generator.begin_sync() as sync:
            for name, tensor in state.items():
                if name == Q:
                    with pytest.raises(rm.NonFiniteError):
                        sync.push(name, bad)
                    with pytest.raises(rm.ShapeError):
                        sync.push(name, tensor.T[:5])
                sync.push(name, tensor)
        assert sync.report is not None
        assert sync.report.digest == digest_of(DENSE, state)


def test_the_digest_tells_versions_apart() -> None:
    """The digest changes with any one changed element, two exchanged elements, or two exchanged
    tensors."""
    state = new_state(DENSE)
    k, v = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    changed = [state, {**state, k: state[v], v: state[k]}]
    for name in (Q, NORM, "model.embed_tokens.weight"):
        for bit in (0, 15, 31):
            other = state[name].copy()
            other.reshape(-1).view(np.uint32)[other.size // 3] ^= np.uint32(1) << np.uint32(bit)
            changed.append({**state, name: other})
        swapped = state[name].copy()
        flat = swapped.reshape(-1)
        flat[0], flat[-1] = flat[-1], flat[0]
        changed.append({**state, name: swapped})
    with make(DENSE) as generator:
        digests = [generator.sync_weights(s, allow_nonfinite=True).digest for s in changed]
        assert len(set(digests)) == len(changed)
        assert generator.sync_weights(state).digest == digests[0]
