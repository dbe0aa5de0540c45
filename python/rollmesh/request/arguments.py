"""Checks of the arguments of generate, score and submit: prompts, sampling parameters, request ids
and eos ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np

from rollmesh.errors import CapacityError, ConfigError, RequestError
from rollmesh.model.spec import ModelSpec
from rollmesh.request.sampling import SamplingParams
from rollmesh.runtime.arguments import (
    BYTES,
    integer,
    is_integer,
    items_of,
)
from rollmesh.runtime.messages import shown


def eos_ids(given: int | Sequence[int] | None, tokenizer: Any, spec: ModelSpec) -> tuple[int, ...]:
    """Returns the given ids; without them, those of the tokenizer and the model config together."""
    if given is None:
        from_tokenizer = getattr(tokenizer, "eos_token_id", None)
        given = sorted({*spec.eos_token_ids, *([] if from_tokenizer is None else [from_tokenizer])})
    ids = (
        items_of(ConfigError, "eos_token_ids", given, spec.vocab_size)
        if hasattr(given, "__iter__")
        else [given]
    )
    return tuple(integer("eos_token_ids", token, 0, spec.vocab_size - 1) for token in ids)


def check_vocabulary(tokenizer: Any, spec: ModelSpec) -> None:
    """Checks that the model has at least as many ids as its tokenizer; it may have more, as
    padding."""
    count = getattr(tokenizer, "get_vocab_size", None)
    size = count() if callable(count) else len(tokenizer) if hasattr(tokenizer, "__len__") else 0
    if size > spec.vocab_size:
        raise ConfigError(
            f"tokenizer: expected at most vocab_size = {spec.vocab_size} tokens, got {size}"
        )


def prompt_list(prompts: Any) -> list[Any]:
    """Returns a list of prompts from one prompt or several. A single prompt is a text, a list of
    ints, or an integer array of one dim."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (Mapping, *BYTES)) or not hasattr(prompts, "__iter__"):
        raise RequestError(
            f"prompts: expected text, token ids, or a list of them, got a {type(prompts).__name__}"
        )
    if getattr(prompts, "ndim", None) == 1:
        return [prompts]
    items = items_of(RequestError, "prompts", prompts)
    return [items] if items and isinstance(items[0], (int, np.integer)) else items


def param_list(params: Any, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    chosen = list(islice(params, count + 1)) if isinstance(params, Sequence) else []
    if len(chosen) != count or not all(isinstance(param, SamplingParams) for param in chosen):
        of = f" of {len(chosen)}{' or more' * (len(chosen) > count)}"
        raise RequestError(
            f"params: expected a SamplingParams or a sequence of {count} of them, got a "
            f"{type(params).__name__}{of * isinstance(params, Sequence)}"
        )
    return chosen


@contextmanager
def naming_prompt(index: int) -> Iterator[None]:
    """Adds the number of the refused prompt to an error."""
    try:
        yield
    except (RequestError, CapacityError) as error:
        raise type(error)(f"prompt {index}: {error}") from error


def request_ids(ids: Any) -> list[int]:
    """Returns a list of request ids from one id or several."""
    items = items_of(RequestError, "ids", ids) if hasattr(ids, "__iter__") else [ids]
    for item in items:
        if not is_integer(item):
            raise RequestError(f"request id: expected an integer, got {shown(item)}")
    return [int(item) for item in items]
