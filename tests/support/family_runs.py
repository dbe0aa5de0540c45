"""Generators of the models of family_models.py, and what the tests of families compare."""

from __future__ import annotations

from typing import Any

import family_models
import helpers
from marks import some

import rollmesh as rm

TRIED = list(family_models.FAMILIES)
LIKE_OTHERS = {"mistral", "qwen2", "qwen3", "olmoe"}  # others have their features
SOME = some(TRIED, lambda family: family not in LIKE_OTHERS)
LIMITS = {**helpers.SMALL, "max_model_len": 256}


def generator(model: Any, state: Any = None, **options: Any) -> rm.Generator:
    gen = rm.Generator(
        rm.ModelSpec.from_hf(model.config), **{**LIMITS, "dtype": "float32", **options}
    )
    gen.sync_weights(model.state if state is None else state, cast=True)
    return gen


def cut(family: str, seed: int) -> Any:
    """Draws a model that a mesh can cut, though not into equal parts."""
    return family_models.draw(family, 300, seed, **family_models.cuttable(family))


def told(gen: rm.Generator) -> list[bytes]:
    """Returns all results of a few requests that the contract fixes."""
    prompts = [[7], [1, 2], list(range(100, 133)), list(range(40, 57))]
    outs = gen.generate(
        prompts,
        rm.SamplingParams(n=2, max_tokens=5, seed=11, prompt_logprobs=0, ignore_eos=True),
        use_tqdm=False,
    )
    words = [
        x
        for out in outs
        for c in out.outputs
        for x in (c.token_ids, c.logprobs, c.sampling_logprobs, c.routed_experts)
    ]
    return [
        x.tobytes()
        for x in (*words, *(out.prompt_logprobs for out in outs), *gen.logits(prompts))
        if x is not None
    ]
