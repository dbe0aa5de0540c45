"""ModelSpec.from_torchtitan, from torchtitan's own configs, whose modules then compute the oracle.

Oracle: the forward pass of torchtitan 0.3.0 in float32 on the generator's state dict, with its
experts in float32 too (GroupedExperts.forward multiplies in bfloat16 whatever the dtype). Bound of
the logits: 1e-5 of the largest; results without the setting differ by more than 1e-2. Settings that
the engine does not support must be refused by name."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("torchtitan")

import torch
import torch.nn.functional as F
from titan_cpu import (
    attention,
    feed_forward,
    linear,
    llama3_configs,
    llama3_layers,
    llama3_registry,
    model_registry,
    moe,
    qwen3_5_configs,
    qwen3_configs,
    qwen35_registry,
    rope,
    token_dispatcher,
)

import rollmesh as rm

# torchtitan's router uses float32.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")

Config = Any
BOUND = 1e-5
SPECIAL = ("image_id", "video_id")  # tokens that Qwen3.5 replaces where there is an image or video


def config(flavor: str = "debugmodel_moe", layers: int = 2) -> Config:
    """Returns the config of a flavor ("llama3": its debug model), reduced to a few layers, with an
    attention that works on a CPU."""
    if flavor.startswith("qwen3_5"):
        return config35(flavor.removeprefix("qwen3_5_"))
    made = (
        llama3_registry("debugmodel", attn_backend="flex")
        if flavor == "llama3"
        else model_registry(flavor, attn_backend="flex")
    )
    model = copy.deepcopy(made.model)
    # Copied, because the registry shares rope and attention among layers.
    model.layers = [copy.deepcopy(layer) for layer in model.layers[:layers]]
    for layer in model.layers:
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    return model


def config35(flavor: str = "debugmodel") -> Config:
    """Returns the config of a flavor of Qwen3.5 with one layer of each kind and few tokens."""
    model = copy.deepcopy(qwen35_registry(flavor, attn_backend="flex").model)
    model.layers = model.layers[2:4]
    model.layers[1].attention.inner_attention = attention.ScaledDotProductAttention.Config()
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = 500
    return model


def text_of(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the weights of the model of text in a state dict."""
    return {name: tensor for name, tensor in state.items() if "vision_encoder" not in name}


def in_float32(self: Any, x: Any, counts: Any) -> Any:
    """GroupedExperts.forward without its casts."""
    experts = zip(
        x.split(list(map(int, counts.tolist()))),
        self.w1_EFD.unbind(),
        self.w2_EDF.unbind(),
        self.w3_EFD.unbind(),
        strict=True,
    )
    return torch.cat([(F.silu(rows @ w1.T) * (rows @ w3.T)) @ w2.T for rows, w1, w2, w3 in experts])


@pytest.fixture(autouse=True)
def experts_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe.GroupedExperts, "forward", in_float32)


def built(model: Config) -> Any:
    """The module with random weights, wide enough for every setting to have an effect, and a router
    bias that changes choices."""
    torch.manual_seed(3)
    module = model.build()
    module.init_states()
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
                if hasattr(module, "vision_encoder") and not name.endswith(".attn.norm.weight"):
                    tensor -= 1  # of OffsetRMSNorm
            elif "expert_bias" in name:
                tensor.uniform_(-0.02, 0.02)
            elif "gate" in name or "conv" in name:
                tensor.normal_(std=0.3)
            elif "rope" not in name and "tokens_per_expert" not in name:
                tensor.normal_(std=0.08)
    return module


def worst(model: Config, spec: rm.ModelSpec | None = None, module: Any = None) -> float:
    """Returns the largest difference of logits, relative to the largest logit. spec: replaces the
    config's."""
    module = built(model) if module is None else module
    ids = torch.randint(0, model.vocab_size, (1, 70), generator=torch.Generator().manual_seed(1))
    inputs: dict[str, Any] = {}
    if hasattr(module, "vision_encoder"):
        inputs = {"positions": torch.arange(70)[None], "special_tokens": dict.fromkeys(SPECIAL, -1)}
    with torch.no_grad():
        expected = module(ids, **inputs)[0].numpy()
    spec = rm.ModelSpec.from_torchtitan(model) if spec is None else spec
    with rm.Generator(
        spec, dtype="float32", max_model_len=128, kv_cache_gib=0.05, threads=1
    ) as generator:
        generator.sync_weights(text_of(module.state_dict()))
        [logits] = generator.logits([ids[0].tolist()])
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


# --------------------------------------------------------------------------------------- computed
def test_every_flavor_of_the_registry() -> None:
    registries = {
        model_registry: qwen3_configs,
        llama3_registry: llama3_configs,
        qwen35_registry: qwen3_5_configs,
    }
    for registry, flavor in [(get, name) for get, names in registries.items() for name in names]:
        spec = registry(flavor, attn_backend="flex")
        read = rm.ModelSpec.from_torchtitan(spec)
        assert read == rm.ModelSpec.from_torchtitan(spec.model)
        with torch.device("meta"):
            module = spec.model.build()
        if read.tie_word_embeddings:
            module.lm_head.weight = module.tok_embeddings.weight
        parameters = text_of(dict(module.named_parameters()))
        assert read.num_parameters == sum(p.numel() for p in parameters.values()), flavor
        assert read.router_bias == any("expert_bias_E" in name for name in module.state_dict())


def yarn(model: Config) -> None:
    for layer in model.layers:
        r = layer.attention.rope
        r.scaling, r.rope_factor, r.original_seq_len, r.beta_fast, r.theta = (
            "yarn",
            4.0,
            16,
            8.0,
            10000.0,
        )


def without_norm(model: Config) -> None:
    for layer in model.layers:
        layer.moe.router.route_norm = False


def no_bias(model: Config) -> None:
    for layer in model.layers:
        layer.moe.load_balance_coeff = None


def one_dense_layer(model: Config) -> None:
    model.layers[0] = config("debugmodel", 1).layers[0]


def sigmoid(model: Config) -> None:
    for layer in model.layers:
        layer.moe.router.score_func = "sigmoid"


def groups(model: Config) -> None:
    for layer in model.layers:
        layer.moe.router.num_expert_groups, layer.moe.router.num_limited_groups = 8, 3


def scaled(model: Config) -> None:
    for layer in model.layers:
        layer.moe.router.route_scale = 2.5


def shared_experts(model: Config) -> None:
    for layer in model.layers:
        layer.moe.shared_experts = config("debugmodel", 1).layers[0].feed_forward


def deepseeks(model: Config) -> None:
    """Returns a config with all of DeepSeek's settings."""
    for change in (sigmoid, groups, scaled, shared_experts):
        change(model)


def wide_eps(model: Config) -> None:
    for layer in model.layers:
        for norm in (layer.attention_norm, layer.ffn_norm, layer.attention.qk_norm):
            norm.eps = 0.1
    model.norm.eps = 0.1


@pytest.mark.parametrize(
    "flavor",
    ["debugmodel", "debugmodel_moe", "llama3", "qwen3_5_debugmodel", "qwen3_5_debugmodel_moe"],
)
def test_logits_are_torchtitans(flavor: str) -> None:
    # torchtitan's own float32 is 1.2e-5 off float64 in Qwen3.5's debug model with experts.
    assert worst(config(flavor)) < (3 * BOUND if flavor == "qwen3_5_debugmodel_moe" else BOUND)


def llama_with(**changes: Any) -> Config:
    """The debug model of llama3 with two KV heads and short wavelengths, so that each setting of
    rope has an effect in 70 positions."""
    model = config("llama3")
    turn = {"theta": 50.0, "scaling": "llama", "original_max_position_embeddings": 64} | changes
    model.layers = llama3_layers(
        n_layers=2, dim=model.dim, n_heads=16, n_kv_heads=2, hidden_dim=320, fuse_qkv=False,
        attn_backend="flex",
        rope=rope.ComplexRoPE.Config(dim=model.dim // 16, max_seq_len=128, **turn),
    )  # fmt: skip
    for layer in model.layers:
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    return model


LLAMAS = [
    {},
    {"scaling": "none"},
    {"scaling_factor": 3.0},
    {"low_freq_factor": 2.0, "high_freq_factor": 9.0},
    {"original_max_position_embeddings": 24},
    {"scaling": "yarn", "rope_factor": 4.0, "original_seq_len": 16},
]


@pytest.mark.parametrize("changes", LLAMAS, ids=str)
def test_logits_of_llama3_are_torchtitans(changes: dict[str, Any]) -> None:
    model, plain = llama_with(**changes), llama_with()
    assert worst(model) < BOUND
    if changes:
        assert worst(model, rm.ModelSpec.from_torchtitan(plain), built(model)) > 1e-3, (
            "the setting does not show"
        )


def eps_of_35(model: Config) -> None:
    delta, full = model.layers
    attends = full.attention
    for norm in (
        *(model.norm, delta.attention_norm, delta.ffn_norm, delta.delta_net.norm),
        *(full.attention_norm, full.ffn_norm, attends.q_norm, attends.k_norm),
    ):
        norm.eps = 0.1


def turns_half(model: Config) -> None:
    attends = model.layers[1].attention
    attends.rotary_dim = attends.rope.dim = 32


def yarn_of_35(model: Config) -> None:
    r = model.layers[1].attention.rope
    r.theta, r.scaling, r.rope_factor, r.original_seq_len = 100.0, "yarn", 4.0, 16


def heads_of_35(model: Config) -> None:
    """One key head for six value heads of another size, and a shorter convolution."""
    net = model.layers[0].delta_net
    net.value_head_dim, net.conv_kernel_size = 24, 3
    for part in (net.in_proj_q, net.in_proj_k):
        part.out_features = 64
    for part in (net.in_proj_v, net.in_proj_z):
        part.out_features = net.out_proj.in_features = 6 * 24
    net.in_proj_a.out_features = net.in_proj_b.out_features = 6
    net.norm.dim = 24
    for conv, channels in ((net.conv_q, 64), (net.conv_k, 64), (net.conv_v, 6 * 24)):
        conv.in_channels = conv.out_channels = conv.groups = channels
        conv.kernel_size = 3


def plain_shared_expert(model: Config) -> None:
    for layer in model.layers:
        layer.moe.shared_experts = config("debugmodel", 1).layers[0].feed_forward


def other_router(model: Config) -> None:
    for change in (without_norm, sigmoid, scaled, no_bias):
        change(model)


@pytest.mark.parametrize(
    "change",
    [eps_of_35, turns_half, yarn_of_35, heads_of_35, plain_shared_expert, other_router],
    ids=lambda change: change.__name__,
)
def test_logits_of_other_settings_of_qwen3_5(change: Callable[[Config], None]) -> None:
    flavor = "debugmodel_moe" if change in (plain_shared_expert, other_router) else "debugmodel"
    model = config35(flavor)
    change(model)
    assert worst(model) < BOUND
    if change in (eps_of_35, turns_half, yarn_of_35):
        plain = rm.ModelSpec.from_torchtitan(config35(flavor))
        assert worst(model, plain, built(model)) > 1e-3, "the setting does not show"


def test_pushes_of_qwen3_5() -> None:
    """By its own names and by to_hf, on one rank and on two."""
    model = config35()
    own, spec = built(model).state_dict(), rm.ModelSpec.from_torchtitan(model)
    hf = qwen35_registry("debugmodel").state_dict_adapter(model, None).to_hf(own)
    hf = {name: tensor for name, tensor in hf.items() if "visual" not in name}
    digests = set()
    for tp in (1, 2):
        with rm.Generator(
            spec, mesh=rm.Mesh(tp=tp), dtype="float32", max_model_len=64, kv_cache_gib=0.05
        ) as generator:
            digests |= {generator.sync_weights(state).digest for state in (text_of(own), hf)}
            digests.add(generator.sync_weights(own, strict=False).digest)
            assert generator.shard("layers.0.attn.conv_v.weight").shape == (256, 1, 4)
            with pytest.raises(rm.UnexpectedKeyError, match=r"vision_encoder\."):
                generator.sync_weights(own)
    assert len(digests) == 1


def test_to_hf_of_qwen3_5_transposes_experts() -> None:
    model = config35("debugmodel_moe")
    model.layers = model.layers[1:]
    no_bias(model)  # to_hf drops it
    own = text_of(built(model).state_dict())
    hf = qwen35_registry("debugmodel_moe").state_dict_adapter(model, None).to_hf(own)
    with (
        rm.Generator(
            rm.ModelSpec.from_torchtitan(model),
            dtype="float32",
            max_model_len=64,
            kv_cache_gib=0.05,
        ) as generator,
        pytest.raises(rm.Error, match=r"gate_up_proj: expected .*8, 512, 256.* got .*8, 256, 512"),
    ):
        generator.sync_weights(hf)


def test_pushes_of_llama3_by_its_own_names_and_by_to_hf_are_one() -> None:
    """wq and wk hold each pair of rope as neighbours, which to_hf separates."""
    spec = llama3_registry("debugmodel", attn_backend="flex")
    model = llama_with()
    own = built(model).state_dict()
    hf = spec.state_dict_adapter(model, None).to_hf(own)
    with rm.Generator(
        rm.ModelSpec.from_torchtitan(model), dtype="float32", max_model_len=64, kv_cache_gib=0.05
    ) as generator:
        states = own, hf, {name: tensor.to(torch.float64) for name, tensor in own.items()}
        assert len({generator.sync_weights(state, cast=True).digest for state in states}) == 1
        broken = own["layers.1.attention.qkv_linear.wk.weight"].clone()
        broken[16 + 5, 7] = float("nan")
        with pytest.raises(
            rm.NonFiniteError,
            match=r"layers.1.attention.qkv_linear.wk.weight: element \[21, 7\] is not finite",
        ):
            generator.sync_weights({**own, "layers.1.attention.qkv_linear.wk.weight": broken})


CHANGES = [
    yarn,
    without_norm,
    no_bias,
    one_dense_layer,
    wide_eps,
    sigmoid,
    groups,
    scaled,
    shared_experts,
    deepseeks,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_logits_of_other_settings_are_torchtitans(change: Callable[[Config], None]) -> None:
    model, plain = config(), config()
    change(model)
    assert worst(model) < BOUND
    # The weights show these changes.
    if change not in (no_bias, one_dense_layer, shared_experts, deepseeks):
        other = built(model)
        assert worst(model, rm.ModelSpec.from_torchtitan(plain), other) > 1e-2, (
            "the setting does not show"
        )


def cast_linear() -> Any:
    """torchtitan's own module, without its package's __init__, which imports vLLM."""
    name = "torchtitan.experiments.rl.models.cast_linear"
    where = importlib.util.spec_from_file_location(
        name, Path(linear.__file__).parents[2] / "experiments/rl/models/cast_linear.py"
    )
    assert where is not None
    assert where.loader is not None
    module = importlib.util.module_from_spec(where)
    sys.modules[name] = module  # a dataclass with slots looks its module up
    try:
        where.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def test_logits_of_titanrls_own_lm_head_are_torchtitans() -> None:
    """torchtitan's dense Qwen3 examples use it (alphabet_sort, dapo_math)."""
    converter = cast_linear().LMHeadCastConverter
    model = converter(converter.Config()).convert(config())
    assert rm.ModelSpec.from_torchtitan(model) == rm.ModelSpec.from_torchtitan(config())
    assert worst(model) < BOUND
    with pytest.raises(
        rm.ConfigError, match=r"model.lm_head.compute_dtype: expected 'float32', got 'bfloat16'"
    ):
        rm.ModelSpec.from_torchtitan(
            converter(converter.Config(compute_dtype="bfloat16")).convert(config())
        )


# ---------------------------------------------------------------------------------------- refused
def set_of(path: str, value: Any) -> Callable[[Config], None]:
    """Sets a field of layer 1, or of the model."""

    def change(model: Config) -> None:
        *parents, field = path.split(".")
        node = model if parents and parents[0] == "model" else model.layers[1]
        for name in parents[1:] if parents and parents[0] == "model" else parents:
            node = getattr(node, name)
        setattr(node, field, value)

    return change


def in_all_layers(field: str, value: Any) -> Callable[[Config], None]:
    def change(model: Config) -> None:
        for layer in model.layers:
            setattr(layer.moe.router, field, value)

    return change


def complex_rope(model: Config) -> None:
    r = model.layers[1].attention.rope
    model.layers[1].attention.rope = rope.ComplexRoPE.Config(
        dim=r.dim, max_seq_len=r.max_seq_len, theta=r.theta
    )


def dropping(model: Config) -> None:
    experts = model.layers[1].moe.routed_experts
    experts.token_dispatcher = token_dispatcher.HybridEPTokenDispatcher.Config(
        num_experts=64, top_k=8, non_blocking_capacity_factor=0.5
    )


def shared(model: Config) -> None:
    model.layers[1].moe.shared_experts = config("debugmodel", 1).layers[0].feed_forward


class OwnLinear(linear.Linear):
    from dataclasses import dataclass

    @dataclass(kw_only=True, slots=True)
    class Config(linear.Linear.Config):
        rank: int = 4


REFUSED: list[tuple[Callable[[Config], None], str]] = [
    (
        set_of("moe.router.score_func", "tanh"),
        r"layers\[1\].moe.router.score_func: expected 'softmax' or 'sigmoid', got 'tanh'",
    ),
    (
        set_of("moe.router.score_func", "sigmoid"),
        r"score_func: expected one value for all layers, got softmax in layer 0 and sigmoid",
    ),
    (
        set_of("moe.router.route_scale", 2.5),
        r"routed_scaling_factor: expected one value for all layers, got 1.0 in layer 0 and 2.5",
    ),
    (
        set_of("moe.router.route_scale", 0.0),
        r"router.route_scale: expected a finite float32 > 0, got 0.0",
    ),
    (
        set_of("moe.router.num_expert_groups", 4),
        r"n_group: expected one value for all layers, got 1 in layer 0 and 4",
    ),
    (
        in_all_layers("num_expert_groups", 7),
        r"router.num_expert_groups: expected integers, or None, got 7 with num_limited_groups=None",
    ),
    (
        set_of("moe.router._debug_force_load_balance", True),
        r"router._debug_force_load_balance: expected False, got True",
    ),
    (
        set_of("moe.router.top_k", 2),
        r"num_experts_per_tok: expected one value for all layers, got 8 in layer 0 and 2 in "
        r"layer 1",
    ),
    (set_of("moe.router.route_norm", False), r"norm_topk_prob: expected one value for all layers"),
    (set_of("moe.load_balance_coeff", None), r"router_bias: expected one value for all layers"),
    (
        set_of("attention.rope.theta", 1e4),
        r"rope_theta: expected one value for all layers, got 1000000.0 in layer 0 and",
    ),
    (
        set_of("attention.rope.scaling", "llama"),
        r"rope.scaling: expected 'none' or 'yarn', got 'llama'",
    ),
    (set_of("attention.rope.dim", 64), r"rope.dim: expected 128, got 64"),
    (
        set_of("attention.qk_norm.eps", 1e-5),
        r"layers\[1\].attention.qk_norm.eps: expected 1e-06, got 1e-05",
    ),
    (
        set_of("attention.qk_norm", None),
        r"layers\[1\].attention.qk_norm: expected torchtitan's RMSNorm.Config, got "
        r"builtins.NoneType",
    ),
    (
        set_of("attention.qk_norm.elementwise_affine", False),
        r"qk_norm.elementwise_affine: expected True, got False",
    ),
    (
        set_of("model.norm.eps", 1e-5),
        r"model.norm.eps: expected 1e-06, got 1e-05",
    ),
    (set_of("attention.wo.bias", True), r"attention.wo.bias: expected False, got True"),
    (set_of("attention.qkv_linear.wqkv.bias", True), r"wqkv.bias: expected False, got True"),
    (set_of("moe.router.gate.bias", True), r"gate.bias: expected False, got True"),
    (set_of("model.lm_head.bias", True), r"model.lm_head.bias: expected False, got True"),
    (
        set_of("attention.inner_attention", attention.VarlenAttention.Config(window_size=(31, 0))),
        r"inner_attention.window_size: expected \(-1, 0\), got \(31, 0\)",
    ),
    (
        set_of("attention.wo", OwnLinear.Config(in_features=2048, out_features=256)),
        r"attention.wo: expected torchtitan's Linear.Config or RowParallelLinear.Config, got "
        r".*OwnLinear.Config",
    ),
    (
        complex_rope,
        r"attention.rope: expected torchtitan's CosSinRoPE.Config, got "
        r"torchtitan.models.common.rope.ComplexRoPE.Config",
    ),
    (dropping, r"token_dispatcher.non_blocking_capacity_factor: expected None, got 0.5"),
    (shared, r"shared_intermediate_size: expected one value for all layers, got 0 in layer 0 and"),
]


@pytest.mark.parametrize(
    "change, message", REFUSED, ids=lambda value: value[-60:] if isinstance(value, str) else ""
)
def test_what_is_not_computed_is_refused_by_name(
    change: Callable[[Config], None], message: str
) -> None:
    model = config()
    change(model)
    with pytest.raises(rm.ConfigError, match=message):
        rm.ModelSpec.from_torchtitan(model)


def test_what_is_not_computed_of_llama3() -> None:
    model = config("llama3")
    model.layers[1].attention.qk_norm, model.layers[0].attention.rope.scaling = (
        config().layers[0].attention.qk_norm,
        "linear",
    )
    with pytest.raises(rm.ConfigError) as caught:
        rm.ModelSpec.from_torchtitan(model)
    assert (
        "model.layers[0].attention.rope.scaling: expected 'none' or 'yarn' or 'llama', got 'linear'"
        in str(caught.value)
    )
    assert "model.layers[1].attention.qk_norm: expected None, got " in str(caught.value)
    model = config("llama3")
    model.layers[1].attention.rope = config().layers[0].attention.rope
    with pytest.raises(
        rm.ConfigError,
        match=r"attention.rope: expected torchtitan's ComplexRoPE.Config, got .*CosSinRoPE.Config",
    ):
        rm.ModelSpec.from_torchtitan(model)


REFUSED35: list[tuple[str, int, str, Any, str]] = [
    ("debugmodel", 0, "delta_net.norm.eps", 1e-5, r"delta_net.norm.eps: expected 1e-06, got 1e-05"),
    ("debugmodel", 0, "delta_net.conv_k.bias", True, r"conv_k.bias: expected False, got True"),
    ("debugmodel", 0, "delta_net.conv_k.stride", 2, r"conv_k.stride: expected no such field, "),
    ("debugmodel", 0, "delta_net.in_proj_a.bias", True, r"in_proj_a.bias: expected False"),
    (
        *("debugmodel", 0, "delta_net.key_head_dim", 0),
        r"delta_net.key_head_dim: expected an integer > 0, got 0",
    ),
    (
        *("debugmodel", 0, "delta_net.in_proj_v.out_features", None),
        r"in_proj_v.out_features: expected an integer > 0, got None",
    ),
    (
        *("debugmodel", 0, "delta_net", None),
        r"layers\[0\].delta_net: expected torchtitan's GatedDeltaNet.Config, got builtins.NoneType",
    ),
    ("debugmodel", 1, "attention.rope.dim", 64, r"attention.rope.dim: expected 16, got 64"),
    ("debugmodel", 1, "attention.rotary_dim", 15, r"rope.dim: expected 15, got 16"),
    ("debugmodel", 1, "attention.head_dim", None, r"head_dim: expected an integer > 0, got None"),
    ("debugmodel", 1, "attention.k_norm.eps", 1e-5, r"k_norm.eps: expected 1e-06, got 1e-05"),
    ("debugmodel", 1, "attention.rope.scaling", "llama", r"scaling: expected 'none' or 'yarn'"),
    ("debugmodel", 1, "ffn_norm", config().norm, r"ffn_norm: expected torchtitan's OffsetRMSNorm"),
    (
        *("debugmodel_moe", 1, "moe", None),
        r"layers\[1\].feed_forward: expected torchtitan's FeedForward.Config",
    ),
]


@pytest.mark.parametrize("flavor, layer, path, value, message", REFUSED35)
def test_what_is_not_computed_of_qwen3_5(
    flavor: str, layer: int, path: str, value: Any, message: str
) -> None:
    model = config35(flavor)
    *parents, field = path.split(".")
    node = model.layers[layer]
    for name in parents:
        node = getattr(node, name)
    setattr(node, field, value)
    with pytest.raises(rm.ConfigError, match=message):
        rm.ModelSpec.from_torchtitan(model)


def test_dense_layers_beside_experts_in_qwen3_5() -> None:
    model = config35("debugmodel_moe")
    model.layers[0] = config35().layers[0]
    with pytest.raises(
        rm.ConfigError, match=r"model.layers without experts: expected \[\], got \[0\]"
    ):
        rm.ModelSpec.from_torchtitan(model)


@pytest.mark.parametrize("heads", [0, "16", None])
def test_heads_that_are_no_number(heads: Any) -> None:
    model = config()
    model.layers[1].attention.n_heads, model.layers[1].attention.head_dim = heads, None
    with pytest.raises(
        rm.ConfigError, match=r"layers\[1\].attention.n_heads: expected an integer > 0, got "
    ):
        rm.ModelSpec.from_torchtitan(model)


@pytest.mark.parametrize("factor", [None, "4"])
def test_a_yarn_factor_that_is_no_number(factor: Any) -> None:
    model = config()
    yarn(model)
    for layer in model.layers:
        layer.attention.rope.rope_factor = factor
    with pytest.raises(rm.ConfigError, match=r"rope_factor: expected a number, got "):
        rm.ModelSpec.from_torchtitan(model)


def test_all_that_is_refused_is_listed() -> None:
    model = config()
    for change, _ in (REFUSED[2], REFUSED[6], REFUSED[8], REFUSED[9]):
        change(model)
    with pytest.raises(rm.ConfigError) as caught:
        rm.ModelSpec.from_torchtitan(model)
    assert str(caught.value).count("; ") == 3


@pytest.mark.parametrize(
    "model", [None, {}, "Qwen3", feed_forward.FeedForward, model_registry], ids=str
)
def test_what_is_no_config_of_torchtitan(model: Any) -> None:
    with pytest.raises(
        rm.ConfigError,
        match=r"model: expected torchtitan's Qwen3Model.Config or Llama3Model.Config or "
        r"Qwen35Model.Config, got ",
    ):
        rm.ModelSpec.from_torchtitan(model)


def test_a_field_that_nobody_has_looked_at_needs_its_default() -> None:
    """A later torchtitan may add such a field."""
    from dataclasses import dataclass

    @dataclass(kw_only=True)
    class Config(moe.TokenChoiceTopKRouter.Config):
        jitter: float = 0.0

    Config.__qualname__, Config.__module__ = (
        "TokenChoiceTopKRouter.Config",
        "torchtitan.models.common.moe",
    )
    model = config()
    router = model.layers[0].moe.router
    known = {
        name: getattr(router, name)
        for name in ("num_experts", "gate", "top_k", "score_func", "route_norm")
    }
    model.layers[0].moe.router = Config(**known)
    rm.ModelSpec.from_torchtitan(model)
    model.layers[0].moe.router = Config(**known, jitter=0.1)
    with pytest.raises(
        rm.ConfigError, match=r"layers\[0\].moe.router.jitter: expected no such field, .* got 0.1"
    ):
        rm.ModelSpec.from_torchtitan(model)


# ------------------------------------------------------------------------------ the router's bias
def test_a_push_without_the_router_bias_is_refused() -> None:
    """torchtitan's own to_hf drops the bias. The old version serves, and a later push with the bias
    succeeds."""
    model = config()
    module = built(model)
    adapter = model_registry("debugmodel_moe", attn_backend="flex").state_dict_adapter(model, None)
    with rm.Generator(
        rm.ModelSpec.from_torchtitan(model),
        dtype="float32",
        max_model_len=64,
        kv_cache_gib=0.02,
        threads=1,
    ) as generator:
        whole = module.state_dict()
        assert generator.manifest()["model.layers.0.mlp.gate.e_score_correction_bias"].required
        for how in (dict, lambda source: iter(source.items())):
            with pytest.raises(rm.Error, match="e_score_correction_bias") as caught:
                generator.sync_weights(how(adapter.to_hf(dict(whole))), allow_bias_removal=True)
            assert isinstance(caught.value, (rm.MissingKeyError, rm.IncompleteSyncError))
            assert "push the module's own state_dict()" in str(caught.value)
        assert generator.version is None
        report = generator.sync_weights(whole)
        assert report.digest == generator.sync_weights(whole).digest
        with pytest.raises(rm.MissingKeyError):
            generator.sync_weights(adapter.to_hf(dict(whole)))
        assert generator.version == 1
