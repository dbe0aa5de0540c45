"""Weight sync from the caller's side: mapping, iterator, block and pieces; errors and the state
after them; requests in flight; the self-test. test_sync.py and test_sync_tensors.py test which
names and tensors the engine accepts."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import tiny_config
from test_generator import STATES, make, same, word_tokenizer

import rollmesh as rm


@pytest.fixture
def gen() -> Iterator[rm.Generator]:
    with make() as generator:
        generator.sync_weights(STATES[0], version=1)
        yield generator


# ------------------------------------------------------------------------------------------- sync
def test_a_mapping_an_iterator_and_pieces_are_the_same_sync() -> None:
    digests, numbers = set(), set()
    with make() as generator:
        for version, how in enumerate(("mapping", "iterator", "reversed", "block", "pieces")):
            if how == "mapping":
                report = generator.sync_weights(STATES[0], version=version)
            elif how in ("iterator", "reversed"):
                items = list(STATES[0].items())
                report = generator.sync_weights(
                    iter(items if how == "iterator" else items[::-1]), version=version
                )
            else:
                sync = generator.begin_sync(version=version)
                if how == "block":
                    with sync as s:
                        for name, tensor in STATES[0].items():
                            s.push(name, tensor)
                else:
                    for name, tensor in STATES[0].items():
                        sync.push(name, tensor)
                    sync.commit()
                assert sync.report is not None
                report = sync.report
            assert report.version == generator.version == version
            assert report.num_tensors == report.num_parameters == len(STATES[0])
            assert report.num_skipped == 0
            assert report.bytes == sum(tensor.nbytes for tensor in STATES[0].values())
            assert report.seconds >= report.copy_seconds > 0
            assert report.gb_per_s == report.bytes / report.copy_seconds / 1e9
            digests.add(report.digest)
            numbers.add(
                generator.generate([1, 2, 3], rm.SamplingParams(seed=1), use_tqdm=False)[0]
                .outputs[0]
                .logprobs.tobytes()
            )
        assert len(digests) == len(numbers) == 1
        assert len(digests.pop()) == 16
        assert generator.sync_weights(STATES[1]).digest not in digests


def test_one_error_lists_all_offenders(gen: rm.Generator) -> None:
    names = list(STATES[0])
    before = gen.score([[1, 2, 3, 4]])[0].tobytes()

    def check(
        kind: type[rm.Error], state: dict[str, Any], words: Sequence[str], **options: Any
    ) -> None:
        with pytest.raises(kind) as caught:
            gen.sync_weights(state, **options)
        for word in words:
            assert word in str(caught.value)
        assert gen.version == 1
        assert gen.score([[1, 2, 3, 4]])[0].tobytes() == before

    state = dict(STATES[1])
    check(rm.MissingKeyError, {name: state[name] for name in names[5:]}, names[:5])
    check(
        rm.UnexpectedKeyError,
        {**state, "alpha": state[names[0]], "beta.weight": state[names[0]]},
        ["alpha", "beta.weight"],
    )
    check(
        rm.ShapeError, {**state, names[1]: state[names[0]], names[2]: state[names[0]]}, names[1:3]
    )
    wide = {name: state[name].astype(np.float64) for name in (names[1], names[3])}
    check(rm.DTypeError, {**state, **wide}, list(wide))
    poisoned = {name: tensor.copy() for name, tensor in state.items()}
    poisoned[names[4]].flat[3] = np.nan
    poisoned[names[7]].flat[0] = np.inf
    check(rm.NonFiniteError, poisoned, [names[4], names[7]])
    check(rm.LimitError, {f"weight{i}": state[names[0]] for i in range(100_000)}, ["100000"])
    check(
        rm.UnexpectedKeyError,
        {**{name: state[name] for name in names[1:]}, "gamma": state[names[0]]},
        ["gamma", "1 MissingKeyError"],
    )
    check(rm.IncompleteSyncError, iter([(name, state[name]) for name in names[3:]]), names[:3])  # type: ignore[arg-type]
    for bad in ({"mode": "fast"}, {"inflight": "now"}, {"keep_kv": True}, {"timeout": -1}):
        check(rm.ConfigError, state, [str(next(iter(bad.values())))], **bad)
    check(rm.VersionError, state, ["-1"], version=-1)
    check(rm.errors.DeadlineError, state, ["timeout"], timeout=0)


def test_torch_tensors_with_autograd(gen: rm.Generator) -> None:
    torch = pytest.importorskip("torch")
    state = {
        name: torch.nn.Parameter(torch.from_numpy(tensor.copy()))
        for name, tensor in STATES[1].items()
    }
    with make() as other:
        want = other.sync_weights(STATES[1], version=2).digest
    assert gen.sync_weights(state, version=2).digest == want

    class Sharded:  # has the attributes of a DTensor
        def __init__(self, tensor: Any):
            self.tensor = tensor

        def full_tensor(self) -> Any:
            return self.tensor

    sharded = {name: Sharded(tensor) for name, tensor in state.items()}
    assert gen.sync_weights(sharded).digest == want
    with pytest.raises(rm.UnsupportedTensorError, match="state_dict"):
        gen.sync_weights(torch.nn.Linear(2, 2))


def test_a_set_in_pieces_stays_open_until_its_commit(gen: rm.Generator) -> None:
    """Steps leave the set open, and the old version serves; a repeated name is refused."""
    before = gen.score([[1, 2, 3]])[0].tobytes()
    sync = gen.begin_sync(version=7)
    for name, tensor in STATES[1].items():
        sync.push(name, tensor)
        gen.generate([1], use_tqdm=False)
    gen.submit([1])
    gen.poll(min_outputs=1)
    assert gen.version == 1
    assert gen.score([[1, 2, 3]])[0].tobytes() == before
    with pytest.raises(rm.DuplicateKeyError):
        sync.push("lm_head.weight", STATES[1]["lm_head.weight"])
    assert sync.commit().version == gen.version == 7
    with pytest.raises(rm.StateError, match="committed as version 7"):
        sync.push("lm_head.weight", STATES[1]["lm_head.weight"])
    sync = gen.begin_sync()
    sync.push("model.norm.weight", STATES[0]["model.norm.weight"])
    gen.generate([1], use_tqdm=False)
    with pytest.raises(rm.IncompleteSyncError, match=r"lm_head\.weight"):
        sync.commit()
    with pytest.raises(rm.StateError, match="closed"):
        sync.push("lm_head.weight", STATES[0]["lm_head.weight"])
    assert gen.version == 7
    with gen.begin_sync() as block:
        for name, tensor in STATES[0].items():
            block.push(name, tensor)
        with pytest.raises(rm.DuplicateKeyError):
            block.push("lm_head.weight", STATES[0]["lm_head.weight"])
    assert gen.version == 8  # the block continues after an error that it handled


def test_a_pushed_tensor_is_not_kept(gen: rm.Generator) -> None:
    """The tensor is released after its push and after an error; a refused name is read again."""
    state = dict(STATES[0])
    bad = state["model.norm.weight"].copy()
    bad[0] = np.nan
    with gen.begin_sync() as sync:
        with pytest.raises(rm.NonFiniteError):
            sync.push("model.norm.weight", bad)
        gone = weakref.ref(bad)
        del bad
        gen.metrics()  # the engine has dropped the call that failed
        gc.collect()
        assert gone() is None
        for name, tensor in state.items():
            copy = tensor.copy()
            sync.push(name, copy)
            gone = weakref.ref(copy)
            del copy
            gen.metrics()
            assert gone() is None
    assert sync.report is not None
    assert sync.report.digest == gen.sync_weights(state).digest


def test_restart_starts_stop_strings_again() -> None:
    tokenizer = word_tokenizer()
    with make(tokenizer=tokenizer) as generator, make(tokenizer=tokenizer) as fresh:
        generator.sync_weights(STATES[0], version=1)
        fresh.sync_weights(STATES[1], version=2)
        free = rm.SamplingParams(max_tokens=60, seed=5, n=3)
        # Stops sample 0 of version 1.
        early = (
            generator.generate("abc", free, use_tqdm=False)[0].outputs[0].token_ids[3:4].tolist()
        )
        late = fresh.generate("abc", free, use_tqdm=False)[0].outputs[1].token_ids[20:21].tolist()
        params = dataclasses.replace(free, stop=[tokenizer.decode(early), tokenizer.decode(late)])
        generator.submit("abc", params)
        for _ in range(6):
            assert generator.poll() == []
        generator.sync_weights(STATES[1], version=2, inflight="restart")
        (output,) = generator.poll(min_outputs=1)
        want = fresh.generate("abc", params, use_tqdm=False)[0]
        assert any(sample.finish_reason == "stop" for sample in want.outputs)
        assert all(
            same(a, b) and a.text == b.text
            for a, b in zip(output.outputs, want.outputs, strict=True)
        )


def test_wait_cannot_finish_what_is_paused(gen: rm.Generator) -> None:
    gen.submit([1, 2, 3], rm.SamplingParams(max_tokens=24, seed=1))
    gen.poll()
    gen.pause("keep")
    with pytest.raises(rm.StateError, match="paused"):
        gen.sync_weights(STATES[1])
    assert gen.version == 1
    gen.sync_weights(STATES[1], inflight="keep")
    gen.resume()
    assert set(gen.poll(min_outputs=1)[0].outputs[0].versions.tolist()) == {1, 2}


# ------------------------------------------------------------------------------- self-test, close
def test_self_test(gen: rm.Generator) -> None:
    report = gen.self_test(gen.score)
    assert report.max_abs_diff == report.mean_abs_diff == 0.0
    assert report.num_tokens == 8 * (7 + 32)
    assert report.version == 1

    def off_by(delta: float) -> Any:
        def scorer(sequences: list[np.ndarray]) -> list[np.ndarray]:
            scores = gen.score(sequences)
            scores[2][11] += np.float32(delta)
            return scores

        return scorer

    assert gen.self_test(off_by(0.0625), threshold=0.125).worst == (2, 12)
    with pytest.raises(rm.NumericsError, match=r"0\.25.*sequence 2, token 12"):
        gen.self_test(off_by(0.25), prompts=[[1], [2], [3]], threshold=0.125)
    with pytest.raises(rm.NumericsError):
        gen.self_test(off_by(float("nan")))
    for wrong, said in (
        (lambda sequences: None, "^scorer: expected an iterable, got a NoneType"),
        (
            lambda sequences: gen.score(sequences)[1:],
            "^scorer: expected logprobs of 8 sequences, got those of 7$",
        ),
        (
            lambda sequences: [*gen.score(sequences), None],
            "^scorer: expected at most 8 items, got more$",
        ),
        (lambda sequences: [None] * 8, "^scorer: expected logprobs, got None$"),
    ):
        with pytest.raises(rm.ConfigError, match=said):
            gen.self_test(wrong)
    with make() as other:
        other.sync_weights(STATES[1])
        with pytest.raises(rm.NumericsError):
            gen.self_test(other.score)  # a generator with other weights is not the trainer


def test_self_test_with_a_transformers_model() -> None:
    pytest.importorskip("transformers")
    import helpers

    case = helpers.Case("self_test", tiny_config(), prompt_lens=(5,))
    model = helpers.hf_model(case)
    with make() as generator:
        generator.sync_weights(model.state_dict())
        model.train()
        report = generator.self_test(model)
        assert 0.0 < report.max_abs_diff <= 1e-3  # float32, two orders of summation
        assert model.training
        with pytest.raises(rm.NumericsError):
            generator.self_test(model, threshold=0.0)
