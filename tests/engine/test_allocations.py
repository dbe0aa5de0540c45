"""Allocation failures through the extension: each request of the engine, of the interpreter and to
the system is refused, at every site. (tests/support/native/alloc_fail.c does the same for the C
core alone, with the leak detector on.)"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import numpy_state_dict, tiny_config
from marks import SUMMARY, full
from paths import SUPPORT

import rollmesh as rm
from rollmesh import _core

DENSE, MOE = tiny_config(), tiny_config(moe=True)
PROMPTS = [[5, 6, 7, 8, 9], list(range(1, 40)), [3]]
PARAMS = rm.SamplingParams(
    n=2, max_tokens=6, temperature=0.7, seed=4, logprobs=2, prompt_logprobs=1
)


def rollout(gen: rm.Generator) -> list[bytes]:
    outputs = gen.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [
        np.asarray(record).tobytes()
        for output in outputs
        for s in output.outputs
        for record in (s.token_ids, s.logprobs)
    ]


class Life:
    """One generator's life, a list of calls. Site n, counted over all of them, is refused: that
    call raises, does not change the generator, and is repeated."""

    def __init__(self, config: dict[str, Any]):
        self.spec = rm.ModelSpec.from_hf(config)
        self.states = [numpy_state_dict(config, seed) for seed in (1, 2)]
        self.gen: rm.Generator | None = None
        self.serving: list[bytes] | None = (
            None  # the rollout of the version that serves, where it is known
        )
        self.failed_in = ""

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        version, mapped = self.gen.version if self.gen else None, _core.memory_mapped()
        try:
            return function()
        except (MemoryError, rm.CapacityError):
            _core.memory_fail_at(0)
            if self.failed_in:  # fails only once
                raise
        self.failed_in = name
        if self.gen is None:
            assert _core.memory_mapped() == mapped, name
        else:
            assert self.gen.version == version, name
            if self.serving and not self.gen.metrics()["asleep"]:
                assert rollout(self.gen) == self.serving, name
        return function()

    def sync(self, gen: rm.Generator, state: dict[str, Any], mode: str) -> None:
        self.call(f"sync {mode}", lambda: gen.sync_weights(iter(state.items()), mode=mode))
        self.serving = None
        self.serving = self.call("generate", lambda: rollout(gen))

    def run(self, site: int, for_ever: bool) -> list[Any]:
        options = {"dtype": "float32", "threads": 2, "kv_cache_gib": 0.002, "max_model_len": 128}
        results = []
        _core.memory_fail_at(site, for_ever)
        try:
            self.gen = gen = self.call("create", lambda: rm.Generator(self.spec, **options))
            for state, mode in zip(self.states * 2, ("staged", "staged", "inplace"), strict=False):
                self.sync(gen, state, mode)
                results.append(self.serving)
                results.append(
                    [rows.tobytes() for rows in self.call("logits", lambda: gen.logits(PROMPTS))]
                )
                self.call("sleep", lambda: gen.sleep("kv"))
                self.call("wake", lambda: gen.wake("kv"))
        finally:
            _core.memory_fail_at(0)
            if self.gen:
                self.gen.close()
        return results


@pytest.mark.parametrize("config", [full(DENSE), MOE], ids=["dense", "moe"])
def test_every_allocation_of_the_engine(
    config: dict[str, Any], pytestconfig: pytest.Config
) -> None:
    """Calls: create, sync, generate, logits, sleep, wake, sync in place, close. Oracle: each error
    is a MemoryError or CapacityError, the repeated call succeeds, all results are bit-identical to
    those of an undisturbed life, and close unmaps all memory."""
    mapped = _core.memory_mapped()
    want = Life(config).run(0, False)
    met: dict[str, int] = {}
    for for_ever in (False, True):
        for site in range(1, 400):
            life = Life(config)
            assert life.run(site, for_ever) == want, (site, for_ever)
            assert _core.memory_mapped() == mapped, (site, for_ever)
            if not life.failed_in:
                break
            met[life.failed_in] = met.get(life.failed_in, 0) + 1
        assert not life.failed_in
    assert {"create", "sync staged", "generate", "logits", "wake"} <= set(met)
    assert met["create"] >= 2 * 20
    pytestconfig.stash[SUMMARY].append(
        f"allocations through the extension, failed once and for ever: {met}"
    )


INTERPRETER = """
import gc, sys
import _testcapi
sys.path.insert(0, sys.argv[1])
import numpy as np, rollmesh as rm
from helpers import numpy_state_dict, tiny_config
from rollmesh import _core
from rollmesh.request.requests import EngineRequest

def refuse_each(name, call, state):
    for n in range(1000):
        before, error, result = state(), None, None
        gc.disable()
        _testcapi.set_nomemory(n, n + 1)
        try:
            result = call()
        except BaseException as caught:
            error = caught
        _testcapi.remove_mem_hooks()
        gc.enable()
        if error is None:
            print(name, n)
            return result
        assert isinstance(error, MemoryError), (name, n, error)
        assert state() == before, (name, n)
    raise AssertionError(name)

config = tiny_config(moe=True)
gen = rm.Generator(rm.ModelSpec.from_hf(config), dtype="float32", threads=2, kv_cache_gib=0.002,
    max_model_len=128)
engine = gen._engine._engine

def state():
    stats = {key: value for key, value in engine.stats().items() if not key.endswith("seconds")}
    return engine.sync_state(), engine.ids(), engine.finished(), engine.unfinished(), stats

refuse_each("stats", engine.stats, state)
refuse_each("manifest", engine.manifest, state)
refuse_each("sync_begin", lambda: engine.sync_begin(-1), state)
for name, tensor in numpy_state_dict(config).items():
    entry = refuse_each("sync_resolve", lambda: engine.sync_resolve(name), state)
    refuse_each("sync_take", lambda: engine.sync_take(entry, tensor), state)
    refuse_each("sync_push", lambda: engine.sync_push([entry]), state)
engine.sync_commit("refuse")
request = EngineRequest(n=2, max_tokens=4, min_tokens=0, temperature=1.0, top_p=1.0, min_p=0.0,
    top_k=-1, has_seed=True, seed=1,
                         ignore_eos=True, logprobs=2, prompt_logprobs=2, score=False,
                             score_sampling=False)
prompt, none = np.arange(1, 9, dtype=np.int32), np.empty(0, np.int32)
id = refuse_each("add", lambda: engine.add(prompt, none, request, None), state)
assert engine.ids() == [id]
everyone = {id} | {engine.add(prompt, none, request, None) for _ in range(300)}
while engine.unfinished():
    engine.step()
refuse_each("finished", engine.finished, lambda: (engine.ids(), engine.unfinished(),
    engine.sync_state()))
assert engine.finished() == everyone, "a finished request was lost"
for name, call in (("request", lambda: engine.request(id)), ("sample", lambda: engine.sample(id,
    1)),
                   ("tokens", lambda: engine.tokens(id, 0, 1)), ("ids", engine.ids), ("sync_state",
                       engine.sync_state)):
    refuse_each(name, call, lambda: (engine.ids(), engine.unfinished(), engine.sync_state()))
assert engine.finished() == everyone
for other in everyone - {id}:
    engine.release(other)
refuse_each("release", lambda: engine.release(id), lambda: None)
assert not engine.ids() and not engine.finished()
refuse_each("sleep", lambda: engine.sleep(2), state)
refuse_each("wake", lambda: engine.wake(2), state)
refuse_each("close", engine.close, lambda: None)
assert _core.memory_mapped() == 0
print("end")
"""


def script(text: str, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", text, str(SUPPORT), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


def test_every_allocation_of_the_interpreter() -> None:
    """The n-th object that a method of the extension requests from CPython is refused, for every n:
    the call raises MemoryError without a change, and succeeds when it is repeated."""
    pytest.importorskip(
        "_testcapi", reason="this Python has no _testcapi, whose set_nomemory refuses allocations"
    )
    printed = script(INTERPRETER).splitlines()
    sites = dict(line.split() for line in printed[:-1])
    assert printed[-1] == "end"
    assert int(sites["add"]) >= 5
    assert int(sites["sample"]) >= 10


NO_THREADS = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import rollmesh as rm
from helpers import numpy_state_dict, tiny_config
from rollmesh import _core
config = tiny_config()
spec = rm.ModelSpec.from_hf(config)
options = {"dtype": "float32", "kv_cache_gib": 0.002, "max_model_len": 64}
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000, -1))
try:
    rm.Generator(spec, threads=256, **options)
except rm.CapacityError as error:
    print(error)
assert _core.memory_mapped() == 0 and int(open("/proc/self/stat").read().rsplit(")",
    1)[1].split()[17]) == threads_before
"""


def test_the_system_refuses_a_thread() -> None:
    """Stacks of 256 threads do not fit in the process's address-space limit. The threads that
    started are stopped again, and fewer threads work."""
    count = "open('/proc/self/stat').read().rsplit(')', 1)[1].split()[17]"
    text = NO_THREADS.replace("used =", f"threads_before = int({count})\nused =") + (
        "with rm.Generator(spec, threads=2, **options) as gen:\n"
        "    gen.sync_weights(numpy_state_dict(config))\n"
        "    assert len(gen.logits([[1, 2]])) == 1\n"
        "print('serves')\n"
    )
    printed = script(text).splitlines()
    assert "the system refuses thread" in printed[0]
    assert "threads=256" in printed[0]
    assert printed[1] == "serves"
