"""GRPO on rollmesh: the algorithm. Start with loop.py, which opens with the flow of data and the
protocol of a step. rollmesh.run has the configuration, data, files, checkpoints and signals.

Needs the extra `train`. Modules import torch, transformers and the others where they use them.
"""

from rollmesh.run.moved import MovedModules

_RUN = """async_rollouts checkpoint config tables seeds files user_code data generator vllm metrics
    progress forward routing_replay"""
_OTHERS = {
    "interrupts": "run.signals",
    "pretrained": "run.models",
    "hf_datasets": "run.data",
    "overlap": "run.async_rollouts",
    "tracking": "run.metrics",
    "reply_tokens": "request.reply_tokens",
    "mismatch": "grpo.loss",
    "multi_turn": "grpo.environment",
    "dynamic_sampling": "grpo.rollout",
}
_MOVED = {name: f"run.{name}" for name in _RUN.split()} | _OTHERS
MovedModules({f"rollmesh.grpo.{old}": f"rollmesh.{new}" for old, new in _MOVED.items()})
