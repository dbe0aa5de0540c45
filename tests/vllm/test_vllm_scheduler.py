"""vLLM's schedulers with requests that fail: the failed request ends with its reason, and the
others continue as if it had never existed.

The tests drive the schedulers like an engine core, with outputs made here. Oracle: the same
requests in the same scheduler, where the failed request is aborted instead. A worker that fails a
request in a real engine is in test_vllm_updates.py.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_config

os.environ.setdefault("VLLM_PLUGINS", "rollmesh")
pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

with warnings.catch_warnings():  # which are errors here, and vLLM's own
    warnings.simplefilter("ignore")
    import torch
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.engine import FinishReason
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    from rollmesh.vllm.scheduler import FAILED

BLOCK = 16


class Engine:
    """A scheduler, driven like by an engine core. `blocks` counts vLLM's null block."""

    def __init__(
        self,
        folder: Path,
        asynchronous: bool,
        blocks: int = 64,
        finished_sets: bool = False,
        **options: Any,
    ):
        (folder / "config.json").write_text(
            json.dumps({"architectures": ["Qwen3ForCausalLM"], **tiny_config()})
        )
        config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            max_model_len=256,
            async_scheduling=asynchronous,
            block_size=BLOCK,
            **options,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            include_finished_set=finished_sets,
            block_size=BLOCK,
        )
        self.asynchronous, self.waiting = asynchronous, []
        self.ended: dict[str, tuple[FinishReason, Any]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.hits: dict[str, int] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int = 40) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=self.hasher))

    def step(self, failed: dict[str, str] | None = None) -> None:
        """Schedules, and processes the output of the previous step (asynchronous) or of this one.
        Tokens are 7, 8, 9 …"""
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            for new in scheduled.scheduled_new_reqs:
                self.hits.setdefault(new.req_id, new.num_computed_tokens)
            draws = [name for name in scheduled.num_scheduled_tokens if self._draws(name)]
            self.waiting.append((scheduled, draws))
        if len(self.waiting) > self.asynchronous or not self.scheduler.has_requests():
            self._take(*self.waiting.pop(0), failed or {})

    def _draws(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return request.num_computed_tokens >= request.num_prompt_tokens

    def _take(self, scheduled: Any, draws: list[str], failed: dict[str, str]) -> None:
        names = list(scheduled.num_scheduled_tokens)
        tokens = [
            [7 + len(self.tokens.get(name, ()))] if name in draws and name not in failed else []
            for name in names
        ]
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, tokens)
        if failed:
            setattr(output, FAILED, failed)
            output = copy.copy(output)  # objects from another process are copies
        for some in self.scheduler.update_from_output(scheduled, output).values():
            for one in some.outputs:
                self.tokens.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    assert one.request_id not in self.ended
                    self.ended[one.request_id] = (one.finish_reason, one.stop_reason)

    def run(self) -> None:
        for _ in range(300):
            if not self.scheduler.has_requests() and not self.waiting:
                return
            self.step()
        raise AssertionError("it does not end")

    @property
    def free(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("when", [0, 1, 3])
def test_one_fails(tmp_path: Path, asynchronous: bool, when: int) -> None:
    """A request fails in the prefill, at the first token, or later."""
    engine = Engine(tmp_path, asynchronous)
    assert type(engine.scheduler).__module__ == "rollmesh.vllm.scheduler"
    free = engine.free
    for i, name in enumerate("abc"):
        engine.add(name, list(range(i, i + 40)))
    for _ in range(when + asynchronous):
        engine.step()
    engine.step({"b": "NumericsError: row 3"})
    assert engine.ended == {"b": (FinishReason.ERROR, "NumericsError: row 3")}
    assert "b" not in engine.scheduler.requests
    engine.run()
    assert {name: reason for name, (reason, _) in engine.ended.items()} == {
        "a": FinishReason.LENGTH,
        "b": FinishReason.ERROR,
        "c": FinishReason.LENGTH,
    }
    assert [engine.tokens[name] for name in "ac"] == [list(range(7, 47))] * 2
    assert engine.tokens["b"] == list(range(7, 7 + when))
    assert engine.free == free


def test_all_fail(tmp_path: Path, asynchronous: bool) -> None:
    """Every request of a step fails, as without weights; then the next requests are served."""
    engine = Engine(tmp_path, asynchronous)
    free = engine.free
    for name in "abc":
        engine.add(name, list(range(30)))
    for _ in range(asynchronous):
        engine.step()
    engine.step(dict.fromkeys("abc", "NotSyncedError: none"))
    assert engine.ended == dict.fromkeys("abc", (FinishReason.ERROR, "NotSyncedError: none"))
    engine.run()
    assert engine.free == free
    engine.add("d", list(range(30)))
    engine.run()
    assert engine.hits["d"] == 0  # pages that were never written are not cached
    assert engine.tokens["d"] == list(range(7, 47))


def test_pages_of_a_failed_request_are_not_reused(tmp_path: Path, asynchronous: bool) -> None:
    """The next request with the same prompt has no cache hit; the pages of a request that succeeded
    stay cached."""
    prompt = list(range(100))
    for fails in (False, True):
        engine = Engine(tmp_path, asynchronous)
        engine.add("first", prompt, max_tokens=3)
        for _ in range(asynchronous):
            engine.step()
        engine.step({"first": "NumericsError"} if fails else None)
        engine.run()
        engine.add("second", prompt, max_tokens=3)
        engine.run()
        assert engine.hits["second"] == (0 if fails else 96)
        assert engine.ended["second"][0] == FinishReason.LENGTH


def test_one_that_was_preempted_or_is_unknown(tmp_path: Path, asynchronous: bool) -> None:
    """A failure may come when its request waits again, or has ended."""
    engine = Engine(tmp_path, asynchronous, blocks=12)
    free = engine.free
    for i, name in enumerate("abc"):
        engine.add(name, list(range(i, i + 40)), max_tokens=60)
    preempted = None
    for _ in range(60):
        engine.step()
        preempted = next(
            (
                name
                for name, one in engine.scheduler.requests.items()
                if one.status == RequestStatus.PREEMPTED
            ),
            None,
        )
        if preempted:
            break
    assert preempted is not None
    engine.step({preempted: "NumericsError: late", "nobody": "gone"})
    assert engine.ended == {preempted: (FinishReason.ERROR, "NumericsError: late")}
    engine.run()
    assert sorted(engine.ended) == ["a", "b", "c"]
    assert engine.free == free


def test_its_end_is_told_once(tmp_path: Path, asynchronous: bool) -> None:
    """Front ends of several engines learn from a set which requests have ended, in the same
    output."""
    engine = Engine(tmp_path, asynchronous, finished_sets=True)
    engine.add("a", list(range(20)))
    engine.add("b", list(range(20)))
    for _ in range(asynchronous):
        engine.step()
    scheduled = engine.scheduler.schedule()
    if asynchronous:
        engine.waiting.append((scheduled, ["a", "b"]))
        scheduled = engine.waiting.pop(0)[0]
    output = ModelRunnerOutput(["a", "b"], {"a": 0, "b": 1}, [[7], []])
    setattr(output, FAILED, {"b": "why"})
    outputs = engine.scheduler.update_from_output(scheduled, output)[0]
    assert outputs.finished_requests == {"b"}
    assert [(one.request_id, one.finish_reason, one.stop_reason) for one in outputs.outputs] == [
        ("a", None, None),
        ("b", FinishReason.ERROR, "why"),
    ]
