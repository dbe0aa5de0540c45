"""transformers as the independent reference: float32, bfloat16, and a forward that is float64
throughout.

transformers casts to float32 inside norms, softmaxes and the router whatever the model's dtype.
`Double` rewrites those casts while it is active, so that rounding is far below every margin this
suite asks about. The rotary embedding is left in float32: round32(position · inv_freq) is part of
what both sides compute, not an error of either.

The reference for a router bias, which transformers' Qwen3-MoE does not have, is `BiasedRouter`:
their router with the choice made on scores plus bias and the gates taken from the scores.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import helpers
import numpy as np
import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

MARGIN = 1e-5  # below it, float32 noise may decide


class BiasedRouter(Qwen3MoeTopKRouter):
    def __init__(self, config: Any, weight: torch.Tensor, bias: torch.Tensor):
        super().__init__(config)
        self.weight = torch.nn.Parameter(weight)
        self.bias = bias

    def forward(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        scores = torch.nn.functional.softmax(logits, dtype=torch.float32, dim=-1)
        ids = torch.topk(scores + self.bias, self.top_k, dim=-1).indices
        gates = scores.gather(-1, ids)
        if self.norm_topk_prob:
            gates = gates / gates.sum(dim=-1, keepdim=True)
        return logits, gates.to(logits.dtype), ids


def config_of(fields: Mapping[str, Any]) -> Any:
    fields = copy.deepcopy(dict(fields))  # transformers edits rope_parameters in place
    return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)


def model(
    case: helpers.Case,
    state: Mapping[str, torch.Tensor],
    dtype: str,
    changes: Mapping[str, Any],
    experts: str = "eager",
) -> Any:
    """Attention and experts as in the modeling file ("eager"): the other implementations refuse
    float64 or odd widths."""
    fields = {**case.config, **changes}
    config = config_of(fields)
    # Built in its dtype, not cast to it: .to(bfloat16) would round inv_freq too.
    net = transformers.AutoModelForCausalLM.from_config(
        config,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        experts_implementation=experts,
    )
    biases = {name: x for name, x in state.items() if name.endswith("e_score_correction_bias")}
    module = helpers.module_state_dict(
        {name: x for name, x in state.items() if name not in biases}, fields
    )
    wanted = set(net.state_dict()) - (
        {"lm_head.weight"} if fields["tie_word_embeddings"] else set()
    )
    module = {name: x for name, x in module.items() if name in wanted}  # a change may drop biases
    missing = set(module) ^ wanted
    assert not missing, (
        f"the oracle's weights and transformers' parameters differ: {sorted(missing)}"
    )
    net.load_state_dict(module, strict=not fields["tie_word_embeddings"])
    net.tie_weights()
    for name, bias in biases.items():
        mlp = net.model.layers[int(name.split(".")[2])].mlp
        mlp.gate = BiasedRouter(config, mlp.gate.weight.data, bias)
    return net.eval().requires_grad_(False)


class Double(TorchFunctionMode):
    """While active, casts to float32 become casts to float64, except inside the modules given to
    `exempt`."""

    def __init__(self) -> None:
        super().__init__()
        self._exempt = 0

    @contextlib.contextmanager
    def exempting(self, module: torch.nn.Module) -> Iterator[None]:
        def enter(*_: Any) -> None:
            self._exempt += 1

        def leave(*_: Any) -> None:
            self._exempt -= 1

        hooks = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._exempt:
            return func(*args, **kwargs)
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {key: torch.float64 if x is torch.float32 else x for key, x in kwargs.items()}
        return func(*args, **kwargs)


@dataclasses.dataclass
class Forward:
    """One sequence through the reference."""

    logits: np.ndarray  # float64 [n][vocab]
    # float64 [n][moe_layers][experts]: log of what the choice is made on; empty without MoE layers
    scores: np.ndarray
    routed: np.ndarray  # int64 [n][moe_layers][k], best first

    def router_margin(self) -> np.ndarray:
        """float64 [n]: over the layers, the smallest gap between the last chosen and the first not
        chosen expert."""
        n, layers, experts = self.scores.shape
        k = self.routed.shape[2]
        if layers == 0 or k == experts:
            return np.full(n, np.inf)
        ranked = -np.sort(-self.scores, axis=-1)
        return (ranked[..., k - 1] - ranked[..., k]).min(axis=-1)

    def order_margin(self) -> np.ndarray:
        """float64 [n]: like router_margin, but over every neighbouring pair down to the first not
        chosen."""
        n, layers, _ = self.scores.shape
        ranked = -np.sort(-self.scores, axis=-1)[..., : self.routed.shape[2] + 1]
        if layers == 0 or ranked.shape[2] < 2:
            return np.full(n, np.inf)
        return (ranked[..., :-1] - ranked[..., 1:]).min(axis=(-1, -2))

    def argmax_margin(self) -> np.ndarray:
        top = -np.sort(-self.logits, axis=-1)[:, :2]
        return top[:, 0] - top[:, 1]


def forward(net: Any, ids: list[int], double: bool = False) -> Forward:
    """Runs the whole sequence at once. double: net was made with dtype "float64", and nothing in it
    rounds to float32."""
    records: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(router: Any, inputs: Any, outputs: Any) -> None:
        logits, _, chosen = outputs
        choice = torch.nn.functional.softmax(logits.double(), dim=-1)
        if isinstance(router, BiasedRouter):
            choice = (choice + router.bias.double()).clamp_min(1e-300)
        records.append((choice.log(), chosen))

    hooks = [
        module.register_forward_hook(record)
        for module in net.modules()
        if isinstance(module, Qwen3MoeTopKRouter)
    ]
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if double:
                stack.enter_context(Double().exempting(net.model.rotary_emb))
            logits = net(torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    if records:
        scores = torch.stack([choice for choice, _ in records], dim=1).numpy()
        routed = torch.stack([chosen for _, chosen in records], dim=1).numpy()
    else:
        scores, routed = np.zeros((len(ids), 0, 0)), np.zeros((len(ids), 0, 0), np.int64)
    return Forward(logits.double().numpy(), scores, routed)


def relative_error(logits: np.ndarray, truth: np.ndarray) -> float:
    """Frobenius norm of the difference over that of the truth: one number for a prompt's logits
    [n][vocab]."""
    return float(np.linalg.norm(logits - truth) / np.linalg.norm(truth))


def default_model(case: helpers.Case, state: Mapping[str, torch.Tensor], dtype: str) -> Any:
    """Like `model`, but with the implementations that transformers selects by default if they
    accept the shapes."""
    widths = (case.config["hidden_size"], case.config.get("moe_intermediate_size", 0))
    # grouped_mm needs rows of multiples of 16 bytes.
    grouped = case.is_moe and all(width % 8 == 0 for width in widths)
    net = model(case, state, dtype, {}, experts="grouped_mm" if grouped else "eager")
    net.set_attn_implementation("sdpa")
    return net


def batch_logits(net: Any, prompts: list[list[int]], double: bool = False) -> np.ndarray:
    """float64 [prompts][n][vocab] of prompts of one length."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        if double:
            stack.enter_context(Double().exempting(net.model.rotary_emb))
        return net(torch.tensor(prompts), use_cache=False).logits.double().numpy()
