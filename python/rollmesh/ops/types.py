"""Arguments and results of rollmesh.ops that are not arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollmesh.errors import RequestError
from rollmesh.runtime.arguments import MAX_FLOAT32, MAX_TOKENS, integer_of, is_real, items_of
from rollmesh.runtime.engine_views import Floats, Ids
from rollmesh.runtime.messages import shown


class LmHead(NamedTuple):
    """Results of lm_head for each row: logits [rows, vocab] (None if they were not kept), (max, Σ
    exp(logit − max)), the target's logprob, and flags."""

    logits: Floats | None
    stats: Floats
    target_logprobs: Floats | None
    row_flags: NDArray[np.uint8]


class LmHeadPairs(NamedTuple):
    """Results of lm_head for a shard of the vocabulary: logits [rows, vocab] (None if they were not
    kept), (max, Σ exp(logit − max)) of each block of 128 entries [blocks, rows, 2], the target's
    logit (0 if it is not in this shard), and flags."""

    logits: Floats | None
    pairs: Floats
    target_logits: Floats | None
    row_flags: NDArray[np.uint8]


class Routing(NamedTuple):
    """The experts of each row [rows, top_k], best first, and their gates [rows, top_k]."""

    ids: Ids
    gates: Floats


class Sampled(NamedTuple):
    """Draws of each row: the token (−1 for a flagged row), its logprob under the model and under
    the distribution it was drawn from, and with kept=True the number of tokens it was drawn from.
    Without banned tokens these are the first `kept` tokens of the row's top_logprobs."""

    tokens: Ids
    logprobs: Floats
    sampling_logprobs: Floats
    kept: Ids | None = None


@dataclass(frozen=True)
class SampleParams:
    """Parameters of the draw of one row. `forced` ≥ 0: return the logprobs of that token instead of
    drawing. Raises RequestError for a number that does not fit its C type; `sample` raises it for a
    number out of range."""

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = -1
    seed: int = 0
    counter: int = 0
    banned: Sequence[int] = ()
    forced: int = -1
    COLUMNS: ClassVar[dict[str, type[np.generic]]] = {
        "temperature": np.float32,
        "top_p": np.float32,
        "min_p": np.float32,
        "top_k": np.int32,
        "seed": np.uint64,
        "counter": np.uint64,
        "forced": np.int32,
    }

    def __post_init__(self) -> None:
        for name, dtype in self.COLUMNS.items():
            value = getattr(self, name)
            if issubclass(dtype, np.integer):
                bounds = np.iinfo(dtype)
                integer_of(RequestError, name, value, bounds.min, bounds.max)
            elif not is_real(value) or MAX_FLOAT32 < abs(value) < np.inf:
                raise RequestError(f"{name}: expected a float32 number, got {shown(value)}")
        try:
            object.__setattr__(
                self, "banned", tuple(items_of(RequestError, "banned", self.banned, MAX_TOKENS))
            )
        except TypeError as error:
            raise RequestError(
                f"banned: expected a sequence of tokens, got {shown(self.banned)}"
            ) from error
        for token in self.banned:
            integer_of(RequestError, "a token of banned", token, -(2**31), 2**31 - 1)
