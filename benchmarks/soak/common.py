"""Shared by the parts of the soak: two tiny models, a tokenizer, and the interface of a part.

A part has kinds of call; a call returns its number of operations. After a round of all of them
`settle` brings the part into the state in which it is measured, and compares a rollout with the
first one, bit for bit, because a soak whose calls do nothing would not show growth either.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import rollmesh as rm

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))

from helpers import numpy_state_dict, tiny_config

__all__ = [
    "DENSE",
    "MOE",
    "SIZES",
    "Interrupted",
    "Letters",
    "State",
    "Work",
    "bits",
    "in_thread",
    "numpy_state_dict",
    "refused",
]

VOCAB = 32
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
DENSE = tiny_config(**SMALL)
MOE = tiny_config(True, **SMALL, num_experts=3, moe_intermediate_size=8)
SIZES: dict[str, Any] = {
    "threads": 2,
    "max_model_len": 64,
    "kv_cache_gib": 0.0005,
    "max_num_seqs": 64,
}
GONE_S = 10.0
State = dict[str, np.ndarray]


class Letters:
    """A tokenizer with a letter for each id."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + token) for token in ids)


class Interrupted(Exception):
    """Raised by user code in the middle of a sync."""


def refused(kind: type[BaseException], call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    try:
        call(*args, **kwargs)
    except kind:
        return
    raise AssertionError(f"{call} was not refused with {kind.__name__}")


def in_thread(call: Callable[[], Any], beside: Callable[[], Any] | None = None) -> None:
    """Runs `call` in a separate thread and `beside` in this one. Returns when the kernel has
    removed the thread, because join returns a little earlier and the thread would still be counted.
    Raises the error of `call`."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 (passed on)
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    task = Path(f"/proc/self/task/{thread.native_id}")
    if beside is not None:
        beside()
    thread.join()
    end = time.monotonic() + GONE_S
    while task.exists() and time.monotonic() < end:
        time.sleep(1e-4)
    for error in errors:
        raise error


def bits(gen: rm.Generator) -> bytes:
    sample = gen.generate(
        [[1, 2, 3]], rm.SamplingParams(max_tokens=3, seed=1, ignore_eos=True), use_tqdm=False
    )[0].outputs[0]
    return sample.token_ids.tobytes() + sample.logprobs.tobytes()


class Work:
    """One part of the soak. `handed` are the objects that its calls pass in."""

    name: str
    calls: list[Callable[[], int]]
    handed: list[Any]

    def settle(self) -> int:
        """The last call of a round; operations done."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
