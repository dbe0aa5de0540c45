"""rollmesh._core as an extension module: its objects are garbage collected, and it refuses a
subinterpreter.

Input: a cycle through each type that keeps an object of its caller; a subinterpreter, in a separate
process. Oracle: a weak reference to the caller's object is dead after gc.collect(); the exception
in the subinterpreter. Bound: equality.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import helpers
import numpy as np
import pytest

from rollmesh import ConfigError, _core
from rollmesh.options import EngineOptions


class Exchange:
    """The exchange of a group, or any callable; `keeps` closes the cycle."""

    keeps: object = None

    def __call__(self, *args: object) -> list[bytes]:
        raise AssertionError("nobody calls")


def comm(exchange: Exchange) -> _core.Comm:
    return _core.Comm(exchange, 0, 2)


def engine(exchange: Exchange, dtype: str = "float32") -> _core.Engine:
    options = EngineOptions(
        dtype=dtype,
        threads=1,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        kv_bytes=1 << 20,
        enable_prefix_caching=False,
        eos_token_ids=np.zeros(0, np.int32),
        dp=2,
    )
    return _core.Engine(
        helpers.tiny_spec().engine_values(64), options, (0, None, None, comm(exchange))
    )


KEEPERS: dict[str, Callable[[Exchange], object]] = {
    "comm": comm,
    "engine": engine,
}


@pytest.mark.parametrize("keeper", KEEPERS)
def test_a_cycle_is_collected(keeper: str) -> None:
    exchange = Exchange()
    exchange.keeps = KEEPERS[keeper](exchange)
    reference = weakref.ref(exchange)
    del exchange
    gc.collect()
    assert reference() is None


def test_a_closed_group_gives_back_its_exchange() -> None:
    exchange = Exchange()
    end, reference = comm(exchange), weakref.ref(exchange)
    end.close()
    del exchange
    assert reference() is None


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (b"float32", r"dtype: expected str or None, got b'float32'"),
        ("float32\0", r"dtype: expected UTF-8 text without NUL, got 'float32\\x00'"),
        ("\ud800", r"dtype: expected UTF-8 text without NUL, got '\\ud800'"),
        (None, "expected dtype='bfloat16' or 'float32', got None"),
    ],
)
def test_an_option_that_is_no_text(dtype: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(Exchange(), dtype)


def test_a_subinterpreter_is_refused() -> None:
    if sys.version_info < (3, 13):
        import _xxsubinterpreters as interpreters
    else:
        import _interpreters as interpreters
    code = f"""
import {interpreters.__name__} as interpreters
one = interpreters.create()
interpreters.run_string(one, '''
try:
    import rollmesh._core
except ImportError as error:
    print(error)
''')
interpreters.destroy(one)
import rollmesh._core
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "subinterpreter" in done.stdout
