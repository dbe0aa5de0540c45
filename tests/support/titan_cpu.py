"""torchtitan's modules on a machine without a GPU, for tests. Import this before torchtitan:
without an accelerator torchtitan selects the device "cuda", which it reads at import."""

from __future__ import annotations

import warnings

import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit's deprecations
    from torchtitan.models.common import (
        attention,
        feed_forward,
        linear,
        moe,
        rope,
        token_dispatcher,
    )
    from torchtitan.models.llama3 import _build_llama3_layers as llama3_layers
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.llama3 import model_registry as llama3_registry
    from torchtitan.models.qwen3 import model_registry, qwen3_configs

__all__ = [
    "attention", "feed_forward", "linear", "llama3_configs", "llama3_layers", "llama3_registry",
    "model_registry", "moe",
    "qwen3_configs", "rope", "token_dispatcher",
]  # fmt: skip
