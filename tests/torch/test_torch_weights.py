"""The weights of a patched model: every forward pass uses the model's current weights.

Input: the models of test_torch_patch.py; writes of every kind, with and without torch's version
counter; syncs, sleep and close of the generator in the middle of a pass. Oracle: a copy of the
model that is patched after the write, or an undisturbed pass. Bound: 0 differing bits."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from gloo_ranks import on_ranks
from test_torch_patch import (
    DENSE,
    FAMILIES,
    IDS,
    MOE,
    drawn,
    generator_of,
    model_of,
    pair,
    scored,
    step,
    weighted,
)
from torch import Tensor

import rollmesh as rm

__all__ = ["pair"]  # a fixture
Pair = Callable[..., tuple[Any, rm.Generator]]
OTHER = helpers.numpy_state_dict(DENSE.config, seed=9)


def computed(model: Any) -> Tensor:
    return rm.torch.logprobs(model, IDS).logprobs.detach()


def fresh(model: Any) -> Tensor:
    """Computes with a new model of the same weights."""
    return computed(rm.torch.patch(rm.torch.unpatch(copy.deepcopy(model))))


# ----------------------------------------------------------------------------------------- writes
def down(model: Any) -> Any:
    return model.model.layers[0].mlp.down_proj


def in_place(model: Any) -> None:
    with torch.no_grad():
        down(model).weight.mul_(0.5)


def by_data(model: Any) -> None:
    down(model).weight.data.mul_(0.5)


def by_numpy(model: Any) -> None:
    down(model).weight.detach().numpy()[3:] *= 0.5


def of_two_rows(model: Any) -> None:
    """Swaps two rows: a sum of the values does not change."""
    values = down(model).weight.detach().numpy()
    values[[1, 2]] = values[[2, 1]]


def another(model: Any) -> None:
    down(model).weight = torch.nn.Parameter(down(model).weight.detach() * 0.5)


def of_data(model: Any) -> None:
    down(model).weight.data = down(model).weight.detach() * 0.5


def loaded(model: Any) -> None:
    model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})


def vector(model: Any) -> None:
    """Puts new values in new memory behind the same parameters."""
    parameters = list(model.parameters())
    torch.nn.utils.vector_to_parameters(
        torch.nn.utils.parameters_to_vector(parameters).detach() * 0.5, parameters
    )


def swapped(model: Any) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.bfloat16)
        in_place(model)
        model.to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def stepped(**options: bool) -> Callable[[Any], None]:
    """A fused optimizer, transformers' default, does not raise version counters."""

    def write(model: Any) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
        rm.torch.logprobs(model, IDS).logprobs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return write


WRITES: dict[str, Callable[[Any], None]] = {
    **{
        write.__name__: write
        for write in (
            in_place,
            by_data,
            by_numpy,
            of_two_rows,
            another,
            of_data,
            loaded,
            vector,
            swapped,
        )
    },
    **{
        f"a step, {options}": stepped(**options)
        for options in ({"fused": True}, {"foreach": True}, {"foreach": False})
    },
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", WRITES)
def test_every_write_is_seen(pair: Pair, name: str) -> None:
    """The first write comes after a push, the second after a pass of the model."""
    model, _ = pair(DENSE)
    for _ in range(2):
        before = computed(model)
        WRITES[name](model)
        gc.collect()
        after = computed(model)
        assert (after == fresh(model)).all()
        assert (after != before).any()


@torch.inference_mode()
def test_writes_in_inference_mode_are_seen() -> None:
    """Tensors of inference mode do not count writes."""
    model = rm.torch.patch(helpers.hf_model(DENSE))
    for _ in range(2):
        before = computed(model)
        down(model).weight = torch.nn.Parameter(down(model).weight.clone(), requires_grad=False)
        down(model).weight.mul_(0.5)
        after = computed(model)
        assert (after == fresh(model)).all()
        assert (after != before).any()


def collectives(rank: int) -> None:
    from torch import distributed

    model = rm.torch.patch(helpers.hf_model(DENSE))
    weight = down(model).weight
    if rank == 1:
        weight.data.fill_(0.01)
    for write in (distributed.broadcast, distributed.all_reduce):
        before, count = computed(model), weight._version
        write(weight.data, **({"src": 1} if write is distributed.broadcast else {}))
        assert weight._version == count
        after = computed(model)
        assert (after == fresh(model)).all()
        assert rank == 1 or (after != before).any()


def test_writes_of_collectives_are_seen(tmp_path: Path) -> None:
    """broadcast and all_reduce into a parameter's memory do not change its version counter."""
    on_ranks(2, collectives, tmp_path)


WRITER = """
import sys, numpy
numpy.memmap(sys.argv[1], numpy.float32, "r+")[:] *= 0.5
"""


def test_writes_of_another_process_are_seen(pair: Pair, tmp_path: Path) -> None:
    model, _ = pair(DENSE)
    weight = down(model).weight
    weight.detach().numpy().tofile(tmp_path / "weight")
    weight.data = torch.from_file(
        str(tmp_path / "weight"), shared=True, size=weight.numel()
    ).view_as(weight)
    before = computed(model)
    subprocess.run([sys.executable, "-c", WRITER, str(tmp_path / "weight")], check=True, timeout=60)
    after = computed(model)
    assert (after == fresh(model)).all()
    assert (after != before).any()


@pytest.mark.parametrize("case", FAMILIES)
def test_a_push_after_each_step(pair: Pair, case: helpers.Case) -> None:
    """After a push both sides agree, and before it they differ. A sync of other weights does not
    affect the trainer's side."""
    model, generator = pair(case)
    for version in range(1, 3):
        step(model, drawn(generator, case))
        stale = drawn(generator, case)
        assert (stale.of(scored(model, stale)) != stale.recorded).any()
        assert rm.torch.push(model, generator).version == version
        batch = drawn(generator, case)
        assert (batch.of(scored(model, batch)) == batch.recorded).all()
    generator.sync_weights(helpers.numpy_state_dict(case.config, seed=9), cast=True)
    assert (batch.of(scored(model, batch)) == batch.recorded).all()


# ------------------------------------------------------------------------ in the middle of a pass
def synced_and_pushed(model: Any, generator: rm.Generator) -> None:
    """At the end the generator serves the model's weights again, in the same memory."""
    for _ in range(2):
        generator.sync_weights(OTHER, cast=True)
    rm.torch.push(model, generator)


def synced_in_place(model: Any, generator: rm.Generator) -> None:
    generator.sync_weights(OTHER, cast=True, mode="inplace")


def half_synced(model: Any, generator: rm.Generator) -> None:
    """An open sync has written half of its weights."""
    for mode in ("staged", "inplace"):
        generator.begin_sync(cast=True, mode=mode).push("lm_head.weight", OTHER["lm_head.weight"])


def asleep(model: Any, generator: rm.Generator) -> None:
    generator.sleep()


def closed(model: Any, generator: rm.Generator) -> None:
    generator.close()


DISTURBED = {
    call.__name__: call
    for call in (synced_and_pushed, synced_in_place, half_synced, asleep, closed)
}


@pytest.fixture(params=["this thread", "another thread"])
def disturb(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Calls one of DISTURBED in the thread of the pass or in another one."""

    def call(name: str, *args: Any) -> None:
        if request.param == "this thread":
            DISTURBED[name](*args)
        else:
            with ThreadPoolExecutor(1) as other:
                other.submit(DISTURBED[name], *args).result(60)

    return call


@pytest.mark.parametrize("name", DISTURBED)
def test_nothing_disturbs_a_pass(pair: Pair, disturb: Callable[..., None], name: str) -> None:
    model, generator = pair(DENSE)
    want = model(IDS).logits
    hook = model.model.layers[1].register_forward_pre_hook(
        lambda *_: disturb(name, model, generator)
    )
    assert (model(IDS).logits == want).all()
    hook.remove()
    assert (model(IDS).logits == want).all()


@pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning"
)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", DISTURBED)
def test_nothing_disturbs_the_second_computation(
    pair: Pair, disturb: Callable[..., None], name: str, reentrant: bool
) -> None:
    """Gradient checkpointing runs the second computation in the backward pass."""
    model, generator = pair(DENSE)
    batch = drawn(generator, DENSE)
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    layer, in_backward, calls = model.model.layers[1], False, 0
    checkpoint = layer._gradient_checkpointing_func

    def watched(compute: Callable[..., Any], *args: Any) -> Any:
        def computes(*inner: Any) -> Any:
            nonlocal calls
            if in_backward:
                calls += 1
                if calls == 2:
                    disturb(name, model, generator)
            return compute(*inner)

        return checkpoint(computes, *args)

    layer._gradient_checkpointing_func = watched
    found = []
    for n in (1, 2):
        model.zero_grad()
        loss = weighted(scored(model, batch).logprobs, batch)
        in_backward = True
        loss.backward()
        in_backward = False
        assert calls == n
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert all((found[0][name] == found[1][name]).all() for name in found[0])


def test_passes_beside_syncs_and_rollouts(pair: Pair) -> None:
    """Two threads compute, one generates, one syncs, sleeps and pushes."""
    model, generator = pair(DENSE)
    want, stop, wrong = model(IDS).logits.detach(), threading.Event(), []

    def computes() -> Iterator[int]:
        while not stop.is_set():
            with torch.no_grad():
                yield int((model(IDS).logits != want).sum())

    def generates() -> Iterator[int]:
        while not stop.is_set():
            generator.generate([[1, 2, 3]], rm.SamplingParams(max_tokens=4), use_tqdm=False)
            yield 0

    with ThreadPoolExecutor(3) as others:
        running = [
            others.submit(lambda work=work: list(work()))
            for work in (computes, computes, generates)
        ]
        try:
            for _ in range(30):
                generator.sync_weights(OTHER, cast=True)
                generator.sync_weights(OTHER, cast=True, mode="inplace")
                rm.torch.push(model, generator)
        finally:
            stop.set()
        wrong = [different for done in running for different in done.result(60)]
    assert len(wrong) > 30
    assert not any(wrong)


def test_a_model_outlives_its_generator() -> None:
    model = model_of(DENSE)
    want = model(IDS).logits
    generator = generator_of(DENSE)
    rm.torch.push(model, generator)
    before = rm._core.memory_mapped()
    del generator
    deadline = time.monotonic() + 20  # its thread may hold the last reference for a moment
    while rm._core.memory_mapped() >= before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert rm._core.memory_mapped() < before  # the model keeps no reference to it
    assert (model(IDS).logits == want).all()


def test_deprecated_functions(pair: Pair) -> None:
    for case, matrices in ((DENSE, 2 * 4 + 1), (MOE, 2 * 5 + 1)):
        model, _ = pair(case)
        rm.torch.forget(model)
        assert rm.torch.weight_use(model) == rm.torch.WeightUse(0, 0, matrices, None)
