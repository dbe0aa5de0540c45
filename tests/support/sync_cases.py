"""Models, weights and checks of the tests of weight syncs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from helpers import numpy_state_dict, tiny_config

import rollmesh as rm

IDS = [[1, 2, 3, 4, 5, 6, 7]]
DENSE = tiny_config()
MOE = tiny_config(True, num_hidden_layers=3, mlp_only_layers=[1])
TIED = tiny_config(tie_word_embeddings=True)
Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"
State = dict[str, Any]


def make(config: dict[str, Any], weights: State | None = None, **options: Any) -> rm.Generator:
    generator = rm.Generator(
        rm.ModelSpec.from_hf(config),
        **{"dtype": "float32", "max_model_len": 64, "kv_cache_gib": 0.004, "threads": 2, **options},
    )
    if weights is not None:
        generator.sync_weights(weights, version=5)
    return generator


OLD: dict[str, State] = {
    name: numpy_state_dict(config, seed=1)
    for name, config in (("dense", DENSE), ("moe", MOE), ("tied", TIED))
}


@contextmanager
def unchanged(generator: rm.Generator) -> Iterator[None]:
    def state() -> tuple[Any, ...]:
        return generator.version, generator._engine.sync_state(), generator.logits(IDS)[0].tobytes()

    before = state()
    yield
    assert state() == before


def new_state(config: dict[str, Any]) -> State:
    return numpy_state_dict(config, seed=2)


def both_ways(state: State) -> Iterator[Any]:
    """Yields the state as a mapping, which is checked as a whole, and as a stream, which is checked
    entry by entry."""
    yield state
    yield iter(list(state.items()))


def refused(
    generator: rm.Generator, state: State, error: type[BaseException], *words: str, **options: Any
) -> None:
    for source in both_ways(state):
        with unchanged(generator), pytest.raises(error) as caught:
            generator.sync_weights(source, **options)
        for word in words:
            assert word in str(caught.value)


def digest_of(config: dict[str, Any], state: State, **options: Any) -> str:
    with make(config) as generator:
        return str(generator.sync_weights(state, **options).digest)


class Stubborn(Exception):
    pass
