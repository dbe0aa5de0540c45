"""torchtitan's modules on a machine without a GPU, for tests. Import this before torchtitan:
without an accelerator torchtitan selects the device "cuda", which it reads at import."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType

import torch._utils
from torch.autograd import Function
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

torch._utils._get_available_device_type = lambda: "cpu"

# torchtitan's Qwen3.5 imports kernels for GPUs. Here transformers' loop over the tokens replaces
# them.
_FLA: dict[str, dict[str, object]] = {
    "fla": {},
    "fla.modules": {},
    "fla.modules.conv": {},
    "fla.modules.conv.triton": {},
    "fla.modules.conv.triton.ops": {"CausalConv1dFunction": Function},
    "fla.ops": {},
    "fla.ops.gated_delta_rule": {
        "chunk_gated_delta_rule": torch_recurrent_gated_delta_rule,
        "fused_recurrent_gated_delta_rule": torch_recurrent_gated_delta_rule,
    },
    "fla.ops.gated_delta_rule.chunk": {"ChunkGatedDeltaRuleFunction": Function},
    "fla.ops.gated_delta_rule.fused_recurrent": {"FusedRecurrentFunction": Function},
}
for name, members in _FLA.items():
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(members)

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
    from torchtitan.models.qwen3_5 import model_registry as qwen35_registry
    from torchtitan.models.qwen3_5 import qwen3_5_configs

for name in _FLA:
    del sys.modules[name]  # transformers asks whether there is such a package

__all__ = [
    "attention", "feed_forward", "linear", "llama3_configs", "llama3_layers", "llama3_registry",
    "model_registry", "moe", "qwen3_5_configs", "qwen3_configs", "qwen35_registry", "rope",
    "token_dispatcher",
]  # fmt: skip
