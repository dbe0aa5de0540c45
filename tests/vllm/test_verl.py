"""verl 0.9 on rollmesh: verl's vLLM rollout with VLLM_PLUGINS=rollmesh, on examples/verl/on_cpu.py
on machines without a GPU.

The first part tests the weight transfer alone: verl's sender and verl's receiver in one or two of
vLLM's workers. Oracle: a Generator with the same weights, bit for bit; each refusal keeps the old
weights. The second part runs examples/verl/grpo.py: verl's GRPO with its trainer, servers and agent
loops in Ray's processes. Oracle: verl's comparison of the trainer's probabilities with the
rollout's; bound 1e-5 in float32. The tests of learning, and of two ranks everywhere, take some
minutes:

    pytest -m slow tests/vllm/test_verl.py
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm_support as support
from paths import ROOT

import rollmesh as rm

EXAMPLE = ROOT / "examples/verl"
CHOICES = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "on_cpu",
    "TOKENIZERS_PARALLELISM": "false",
}
os.environ |= CHOICES | {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(EXAMPLE), os.environ.get("PYTHONPATH")]))
}
sys.path.insert(0, str(EXAMPLE))

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("verl") is None,
        reason="needs verl; .ci/verl makes an environment that has it",
    ),
    pytest.mark.filterwarnings("ignore"),  # warnings of verl, Ray and vLLM
]

EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"
ENGINES: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
}
WAIT_S, BUCKET = 60, 100_000
State = dict[str, Any]


# ---------------------------------------------------------------------------- its weight transfer
class Served:
    """An engine with verl's extension in its workers, and the weights that it should serve."""

    def __init__(self, llm: Any):
        self.llm, self.oracle, self.seed = llm, support.Oracle("moe", "bfloat16"), 0
        self.push(self.weights(0))

    def weights(self, seed: int) -> State:
        import torch

        words = support.weights_of("moe", "bfloat16", seed)
        return {
            name: torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
            for name, x in words.items()
        }

    def push(self, state: State) -> None:
        """Sends like verl's ServerAdapter: a sender for each worker, and update_weights_from_ipc on
        all."""
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

        # Otherwise the sender raises, and the receiver waits.
        assert max(tensor.nbytes for tensor in state.values()) <= BUCKET
        senders = [
            BucketedWeightSender(handle, use_shm=True)
            for handle in self.llm.collective_rpc("_get_zmq_handle")
        ]
        for sender in senders:
            sender.bucket_size = BUCKET
        threads = [
            threading.Thread(
                target=asyncio.run, args=[sender.async_send_weights(iter(state.items()))]
            )
            for sender in senders
        ]
        for thread in threads:
            thread.daemon = True
            thread.start()
        try:
            self.llm.collective_rpc(
                "update_weights_from_ipc", timeout=WAIT_S, kwargs={"use_shm": True}
            )
        finally:
            for thread in threads:
                thread.join(WAIT_S)
                assert not thread.is_alive(), "the trainer waits on"

    def hold(self) -> None:
        """Checks by their answers that the weights of `seed` serve."""
        self.oracle.serve(support.weights_of("moe", "bfloat16", self.seed))
        requests = support.drawn("moe", self.seed)
        support.agree(
            support.without_ranks(support.generate(self.llm, requests)),
            support.without_ranks(self.oracle.answers(requests)),
        )

    def next(self) -> None:
        self.seed += 1
        self.push(self.weights(self.seed))
        self.hold()


@pytest.fixture(scope="module", params=ENGINES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    at, changes = tmp_path_factory.mktemp("vllm"), ENGINES[request.param]
    with (
        support.environment(VERL_RAY_JOB_ID=f"test.{secrets.token_hex(8)}"),
        support.engine(
            at,
            "moe",
            "bfloat16",
            processes=bool(changes),
            worker_extension_cls=EXTENSION,
            **changes,
        ) as llm,
    ):
        made = Served(llm)
        try:
            yield made
        finally:
            made.oracle.close()


def test_weights_in_buckets(served: Served) -> None:
    served.hold()
    served.next()
    served.next()


def _nan(tensor: Any) -> Any:
    spoiled = tensor.clone()
    spoiled[-1, 3] = float("nan")
    return spoiled


LATE = "model.layers.1.mlp.experts.7.down_proj.weight"
SPOILED: dict[str, tuple[Callable[[State], State], type[rm.Error]]] = {
    "not finite, first": (
        lambda s: {name: _nan(x) if name == next(iter(s)) else x for name, x in s.items()},
        rm.NonFiniteError,
    ),
    "not finite, late": (lambda s: s | {LATE: _nan(s[LATE])}, rm.NonFiniteError),
    "transposed": (lambda s: s | {LATE: s[LATE].T.contiguous()}, rm.ShapeError),
    "missing": (
        lambda s: {name: x for name, x in s.items() if name != LATE},
        rm.IncompleteSyncError,
    ),
    "unexpected": (lambda s: {"model.of.nothing": s[LATE]} | s, rm.UnexpectedKeyError),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_spoiled_set(served: Served, how: str) -> None:
    """The trainer gets the error by its class, and does not wait for an answer that never comes;
    the old weights serve."""
    spoil, error = SPOILED[how]
    with pytest.raises(Exception, match=error.__name__):
        served.push(spoil(served.weights(served.seed + 1)))
    served.hold()
    served.next()


def test_asleep_between_steps(served: Served) -> None:
    """Sleeps and wakes like verl's servers around a training step."""
    served.llm.sleep(level=2)
    served.llm.wake_up(tags=["weights"])
    served.seed += 1
    served.push(served.weights(served.seed))
    served.llm.wake_up(tags=["kv_cache"])
    served.hold()


def test_tokens_that_the_tokenizer_lacks(served: Served) -> None:
    forbidden = {11, 140, *range(200, 300)}
    requests = [support.request([3, 1, 4, i], max_tokens=60, seed=i) for i in range(6)]

    def drawn() -> set[int]:
        return {
            token for [answer] in support.generate(served.llm, requests) for token in answer.tokens
        }

    assert drawn() & forbidden
    served.llm.collective_rpc(
        "monkey_patch_model", kwargs={"vocab_size": 200, "banned_token_ids": [11, 140]}
    )
    assert not drawn() & forbidden


# --------------------------------------------------------------------------------------- its GRPO
def run(out: Path, *arguments: str, timeout: float = 900) -> list[dict[str, float]]:
    """Returns the metrics of each step."""
    ours = ("PYTEST_", "VLLM_", "CUDA_VISIBLE_DEVICES")  # Ray counts the devices that are visible
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE / "grpo.py"), "--out", str(out), *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said = process.communicate(timeout=timeout)[0]
    finally:
        if process.poll() is None:
            # Kills verl's driver too; Ray's processes end with it.
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said[-8000:]
    return [json.loads(line)["data"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def check(steps: list[dict[str, float]], wanted: int) -> None:
    assert len(steps) == wanted
    for step in steps:
        assert step["training/rollout_probs_diff_valid"] == 1
        assert step["training/rollout_probs_diff_max"] <= 1e-5
    assert steps[0]["actor/grad_norm"] > 0


def test_grpo(tmp_path: Path) -> None:
    steps = run(tmp_path, "--steps", "3")
    check(steps, 3)
    assert steps[0]["critic/score/mean"] < 0.4
    # The rollouts use the weights that were pushed last.
    assert steps[2]["critic/score/mean"] > steps[0]["critic/score/mean"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [(), ("--ranks", "2", "--tp", "2", "--ep", "2"), ("--dense", "--ranks", "2")],
    ids=" ".join,
)
def test_grpo_learns(arguments: tuple[str, ...], tmp_path: Path) -> None:
    steps = run(tmp_path, "--steps", "30", *arguments)
    check(steps, 30)
    assert steps[-1]["critic/score/mean"] >= 0.9
