"""rollmesh.torch.patch takes a model whose parts are exactly those that its config makes.

Input: the models of helpers.py with one change, made before patch or after a first pass. Oracle:
the same model unpatched. Each change is a ConfigError that names the part, or has no effect on
logits (1e-3 of the largest, where a change rounds weights). Bound of what must not differ: 0 bits.
"""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import helpers
import pytest
import torch
from test_torch_patch import DENSE, IDS, MOE, generator_of, model_of, pefts
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import rollmesh as rm

Change = Callable[[Any], Any]


class Doubled(nn.Linear):
    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


class Twice(nn.Module):
    def forward(self, weight: Any) -> Any:
        return 2 * weight


def setting(path: str, name: str, value: Any) -> Change:
    return lambda model: setattr(
        model.get_submodule(path), name, value(model) if callable(value) else value
    )


def put(path: str, new: Callable[[Any], Any]) -> Change:
    return lambda model: model.set_submodule(path, new(model.get_submodule(path)))


def linear_like(cls: Any, **options: Any) -> Callable[[Any], Any]:
    def new(old: Any) -> Any:
        made = cls(old.in_features, old.out_features, **{"bias": False} | options)
        made.weight = old.weight
        return made

    return new


def at(path: str, change: Callable[[Any], Any]) -> Change:
    return lambda model: change(model.get_submodule(path))


def biased(linear: Any) -> None:
    linear.bias = nn.Parameter(torch.ones(linear.out_features))


def doubled(module: Any) -> None:
    module.register_forward_hook(lambda _, args, out: 2 * out)


ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
BIASED = (f"{MLP}.gate_proj", f"{MLP}.up_proj", f"{ATTENTION}.k_proj")
CHANGES: dict[str, tuple[Change, str]] = {
    **{f"a bias of {x}": (at(x, biased), f"{x}.bias") for x in BIASED},
    "a LayerNorm": (
        put("model.norm", lambda old: nn.LayerNorm(64)),
        "model.norm: .*got a .*LayerNorm",
    ),
    "torch's RMSNorm": (
        put("model.norm", lambda old: nn.RMSNorm(64)),
        "model.norm: .*got a .*RMSNorm",
    ),
    "no norm": (
        put("model.layers.1.input_layernorm", lambda old: nn.Identity()),
        "layers.1.input_layernorm: .*Identity",
    ),
    "a bias of a norm": (
        lambda m: m.model.norm.register_parameter("bias", nn.Parameter(torch.ones(64))),
        "model.norm.bias",
    ),
    "another eps of q_norm": (
        setting(f"{ATTENTION}.q_norm", "variance_epsilon", 0.5),
        "q_norm.variance_epsilon: expected 1e-06",
    ),
    "other frequencies": (
        at("model.rotary_emb", lambda r: r.inv_freq.mul_(0.5)),
        "rotary_emb.inv_freq",
    ),
    "another scale of rope": (
        setting("model.rotary_emb", "attention_scaling", 2.0),
        "rotary_emb.attention_scaling: expected 1.0",
    ),
    "a forward of rope": (
        setting("model.rotary_emb", "forward", lambda m: print),
        "rotary_emb.forward: expected the method",
    ),
    "a Linear of another class": (
        put(f"{MLP}.up_proj", linear_like(Doubled)),
        "up_proj: expected a torch.nn.modules.linear.Linear",
    ),
    "a forward of attention": (
        setting(ATTENTION, "forward", lambda m: print),
        "self_attn.forward: expected the method",
    ),
    "attention that looks ahead": (
        setting(ATTENTION, "is_causal", False),
        "self_attn.is_causal: expected True",
    ),
    "a window of one layer": (
        setting(ATTENTION, "sliding_window", 2),
        "self_attn.sliding_window: expected None",
    ),
    "dropout of one layer": (
        setting(ATTENTION, "attention_dropout", 0.5),
        "self_attn.attention_dropout: expected 0.0",
    ),
    "no activation": (
        lambda m: m.model.layers[0].mlp._modules.pop("act_fn"),
        f"{MLP}: expected the modules",
    ),
    "a pruned weight": (
        at(f"{MLP}.up_proj", lambda x: prune.l1_unstructured(x, "weight", 0.5)),
        "up_proj: .*hook",
    ),
    "a pruned weight without its hook": (
        at(
            f"{MLP}.up_proj",
            lambda x: (prune.l1_unstructured(x, "weight", 0.5), x._forward_pre_hooks.clear()),
        ),
        "up_proj.weight_orig: expected none",
    ),
    "weight norm": (
        at(f"{MLP}.up_proj", parametrizations.weight_norm),
        "up_proj: .*ParametrizedLinear",
    ),
    "a parametrized norm": (
        at("model.norm", lambda x: parametrize.register_parametrization(x, "weight", Twice())),
        "model.norm: .*ParametrizedQwen3RMSNorm",
    ),
    "another shape": (
        put(f"{MLP}.up_proj", lambda old: nn.Linear(64, 95, bias=False)),
        "up_proj.out_features: expected 96, .*got 95",
    ),
    "a weight without values": (
        put(f"{MLP}.up_proj", lambda old: nn.Linear(64, 96, bias=False, device="meta")),
        "meta device",
    ),
    "a weight of bytes": (
        setting(
            f"{MLP}.up_proj",
            "weight",
            lambda m: nn.Parameter(torch.ones(96, 64, dtype=torch.uint8), requires_grad=False),
        ),
        "up_proj.weight: expected a tensor of float32, .* got a torch.uint8 Parameter",
    ),
    "a weight moved to the meta device": (
        at(f"{MLP}.up_proj", lambda x: x.to("meta")),
        "up_proj.weight: .* on the meta device",
    ),
    "a weight whose memory is freed": (
        at(f"{MLP}.up_proj", lambda x: x.weight.untyped_storage().resize_(0)),
        "up_proj.weight: .* whose memory is freed",
    ),
    "a norm whose memory is freed": (
        at("model.norm", lambda x: x.weight.untyped_storage().resize_(0)),
        "model.norm.weight: .* whose memory is freed",
    ),
    "a sparse weight": (
        setting(
            f"{MLP}.up_proj",
            "weight",
            lambda m: nn.Parameter(m.model.layers[0].mlp.up_proj.weight.detach().to_sparse()),
        ),
        "up_proj.weight: .* of layout torch.sparse_coo",
    ),
    "a weight that is lazily negated": (
        setting(
            f"{MLP}.up_proj",
            "weight",
            lambda m: nn.Parameter(torch._neg_view(m.model.layers[0].mlp.up_proj.weight.detach())),
        ),
        "up_proj.weight: .* that is lazily negated",
    ),
    "embeddings that are cut": (
        setting("model.embed_tokens", "max_norm", 0.1),
        "embed_tokens.max_norm: expected None",
    ),
    "layers in another order": (
        lambda m: setattr(m.model, "layers", nn.ModuleList([m.model.layers[1], m.model.layers[0]])),
        "layers.0.self_attn.layer_idx",
    ),
    "one layer": (
        lambda m: setattr(m.model, "layers", m.model.layers[:1]),
        r"model.layers: expected the modules \['0', '1'\]",
    ),
    "a hook of an MLP": (at(MLP, doubled), f"{MLP}: expected no hook"),
    "a hook of a norm": (at("model.norm", doubled), "model.norm: expected no hook"),
    "a backward hook": (
        at(MLP, lambda x: x.register_full_backward_hook(lambda *_: None)),
        f"{MLP}: expected no hook",
    ),
    "noise on embeddings": (at("model.embed_tokens", doubled), "embed_tokens: expected no hook"),
    "a hook that changes a layer's output": (
        at("model.layers.0", doubled),
        "layers.0: expected its own forward method, and hooks",
    ),
    "a hook that writes to it": (
        at(
            "model.layers.0",
            lambda x: x.register_forward_hook(lambda _, args, out: (out.mul_(2), None)[1]),
        ),
        "layers.0: expected its own forward method, and hooks that change no tensor",
    ),
    "a hook that changes a layer's input": (
        at("model.layers.1", lambda x: x.register_forward_pre_hook(lambda _, args: (2 * args[0],))),
        "layers.1: expected its own",
    ),
    "a hook of lm_head": (at("lm_head", doubled), "lm_head: expected its own forward method"),
    "a hook that changes the tokens": (
        at(
            "model",
            lambda x: x.register_forward_pre_hook(
                lambda _, args, options: (args, options | {"input_ids": options["input_ids"] + 1}),
                with_kwargs=True,
            ),
        ),
        "model: expected its own forward method, and hooks that change no tensor",
    ),
    "a config edited": (
        lambda m: setattr(m.config, "rms_norm_eps", 0.5),
        "variance_epsilon: expected 0.5|rms_norm_eps=1e-06, as at",
    ),
    "a rope_theta edited": (
        lambda m: m.config.rope_parameters.update(rope_theta=5.0),
        "rotary_emb|rope_parameters=.* as at patch",
    ),
}


@pytest.mark.quick(30)
@pytest.mark.parametrize("is_patched", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_part_that_is_not_the_configs(name: str, is_patched: bool) -> None:
    change, words = CHANGES[name]
    model = helpers.hf_model(DENSE).eval()
    if is_patched:
        rm.torch.patch(model)(IDS)
    with torch.no_grad():
        change(model)
    with torch.no_grad(), pytest.raises(rm.ConfigError, match=words):
        (model if is_patched else rm.torch.patch(model))(IDS)


@pytest.mark.parametrize(
    "part, name, value",
    [
        ("gate", "top_k", 1),
        ("gate", "norm_topk_prob", False),
        ("experts", "_is_expert_parallel", True),
    ],
)
def test_a_part_of_a_mixture(part: str, name: str, value: Any) -> None:
    model = helpers.hf_model(MOE)
    setattr(model.get_submodule(f"{MLP}.{part}"), name, value)
    with pytest.raises(rm.ConfigError, match=rf"{MLP}.{part}.{name}: expected .*, got {value}"):
        rm.torch.patch(model)


def test_a_class_or_function_that_is_not_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replaced method of a class, a function that it calls, and attention under another name,
    before and after patch, also behind functools.wraps."""
    import transformers
    from transformers.models.qwen3 import modeling_qwen3

    mlp = modeling_qwen3.Qwen3MLP
    replaced = (
        (mlp, "forward"),
        (mlp, "__call__"),
        (modeling_qwen3, "apply_rotary_pos_emb"),
        (modeling_qwen3, "eager_attention_forward"),
    )
    refused = pytest.raises(
        rm.ConfigError,
        match=r"expected Qwen3\w+ as transformers has it, got one with test_torch_parts",
    )
    for place, name in replaced:
        model, patched = helpers.hf_model(DENSE), rm.torch.patch(helpers.hf_model(DENSE))
        patched(IDS)
        function = getattr(place, name)
        for new in (
            lambda *args, **options: args,
            wraps(function)(lambda *args, **options: args),
        ):
            with monkeypatch.context() as changed:
                changed.setattr(place, name, new)
                with refused:
                    rm.torch.patch(model)
                with refused:
                    patched(IDS)
            patched(IDS)
        rm.torch.patch(model)
    transformers.AttentionInterface.register("of_this_test", lambda *args, **options: args)
    model.config._attn_implementation = "of_this_test"
    with pytest.raises(
        rm.ConfigError,
        match=r"_attn_implementation: expected one of transformers' own functions, got "
        r"'of_this_test'",
    ):
        model(IDS)


def test_changes_that_change_nothing() -> None:
    """Hooks that only look, rounded frequencies, generation options, a subclass with a method."""
    model = helpers.hf_model(DENSE).eval()
    model(IDS, output_hidden_states=True)  # leaves hooks behind
    model.__class__ = type("Mine", (type(model),), {"more": lambda self: 1})
    want = rm.torch.patch(model)(IDS).logits
    seen: list[Any] = []
    for module in (model, model.model, model.model.layers[0], model.lm_head):
        module.register_forward_hook(lambda *_: seen.append(1))
        module.register_forward_pre_hook(lambda *_: seen.append(1))
    model.enable_input_require_grads()
    model.config.update(
        {
            "pad_token_id": 0,
            "eos_token_id": 5,
            "use_cache": False,
            "_attn_implementation": "eager",
            "of_mine": 1,
        }
    )
    model.model.layers[0] = copy.deepcopy(model.model.layers[0])
    model.model.rotary_emb.to(torch.bfloat16)
    model.train()
    assert (model(IDS).logits == want).all()
    assert len(seen) == 8
    with torch.inference_mode():
        assert (model(IDS).logits == want).all()


@pytest.mark.parametrize(
    "name", ["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu2"]
)
def test_activations(name: str) -> None:
    """Each activation is accepted if the config names it, and refused with another function
    inside."""
    model = helpers.hf_model(DENSE, hidden_act=name)
    rm.torch.unpatch(rm.torch.patch(model))
    activation = model.model.layers[0].mlp.act_fn
    if hasattr(activation, "act"):
        activation.act = torch.tanh
        with pytest.raises(rm.ConfigError, match=r"act_fn.act: expected .*gelu.*, got .*tanh"):
            rm.torch.patch(model)


def test_inference_mode_and_wrappers() -> None:
    """torch counts no writes there; and changes around the model are visible only in the
    logprobs."""
    model = model_of(DENSE)
    handle = model.model.layers[0].register_forward_hook(
        lambda _, args, out: (out.mul_(2), None)[1]
    )
    with (
        torch.inference_mode(),
        pytest.raises(rm.ConfigError, match=r"layers.0: expected its own forward method"),
    ):
        model(IDS)
    handle.remove()
    model.model.forward = lambda **options: None
    with pytest.raises(
        rm.ConfigError,
        match=r"model: expected its own forward method|model.forward: expected the method",
    ):
        model(IDS)
    del model.model.forward
    want = rm.torch.logprobs(model, IDS).logprobs
    for hook in (
        lambda _, args, out: (out.logits.mul_(2), None)[1],
        lambda _, args, out: setattr(out, "logits", 2 * out.logits),
    ):
        handle = model.register_forward_hook(hook)
        with (
            torch.no_grad(),
            pytest.raises(rm.ConfigError, match=r"logits: expected those of the patched lm_head"),
        ):
            rm.torch.logprobs(model, IDS)
        handle.remove()
    assert (rm.torch.logprobs(model, IDS).logprobs == want).all()


@pefts
@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True`:UserWarning", "ignore:.*tied:UserWarning"
)
def test_tied_weights() -> None:
    """The generator uses the embedding as lm_head. Two separate weights are refused, and so is an
    adapter of one."""
    peft = pytest.importorskip("peft")
    case = helpers.CASES_BY_NAME["tied"]

    def apart(model: Any) -> Any:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    def adapters(**options: Any) -> Change:
        return lambda model: peft.get_peft_model(model, peft.LoraConfig(r=2, **options))

    for change in (
        apart,
        adapters(target_modules=["lm_head"]),
        adapters(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    ):
        with pytest.raises(
            rm.ConfigError,
            match=r"lm_head: expected the weight of embed_tokens, since tie_word_embeddings=True",
        ):
            rm.torch.patch(change(helpers.hf_model(case)))
    model = rm.torch.patch(helpers.hf_model(case))
    model(IDS)
    apart(model)
    with pytest.raises(rm.ConfigError, match=r"lm_head: expected the weight of embed_tokens"):
        model(IDS)


@pytest.mark.parametrize(
    "option, part, family",
    [("attention_dropout", "self_attn", "llama"), ("router_jitter_noise", "mlp", "mixtral")],
)
def test_noise_of_training(option: str, part: str, family: str) -> None:
    """Raises ConfigError if the part with noise is in training mode, whatever the mode of the
    rest."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    more = {"num_key_value_heads": 2, "eos_token_id": None, "max_position_embeddings": 64}
    config = transformers.AutoConfig.for_model(family, **sizes, **more, **{option: 0.5})
    model = rm.torch.patch(transformers.AutoModelForCausalLM.from_config(config).eval())
    want = model(IDS).logits
    model.train()
    model.model.layers[1].get_submodule(part).eval()
    for modes in (
        lambda: model.train(),
        lambda: model.eval() and model.model.layers[1].get_submodule(part).train(),
    ):
        modes()
        with pytest.raises(rm.ConfigError, match=f"{option}: expected 0 in training, got 0.5"):
            model(IDS)
    assert (model.eval()(IDS).logits == want).all()
    model.train()
    for layer in model.model.layers:
        layer.get_submodule(part).eval()
    assert (model(IDS).logits == want).all()


@pytest.mark.parametrize(
    "argument",
    [
        {"is_causal": False},
        {"scaling": 0.5},
        {"sliding_window": 2},
        {"dropout": 0.0},
        {"cache_position": IDS[0]},
    ],
)
def test_arguments_that_reach_attention(argument: dict[str, Any]) -> None:
    with pytest.raises(
        rm.ConfigError, match=f"{next(iter(argument))}: expected none with a patched model"
    ):
        model_of(DENSE)(IDS, **argument)
    model_of(DENSE)(IDS, output_attentions=False, output_hidden_states=False, use_cache=False)


def test_configs_of_a_copy_and_of_a_part() -> None:
    """A copy is compared with the config at patch, and every module's config is watched."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        "mistral", sliding_window=5, num_hidden_layers=1, **SMALL
    )
    model = rm.torch.patch(transformers.AutoModelForCausalLM.from_config(config))
    want = model(IDS).logits
    model.config.of_mine = 1
    copied = copy.deepcopy(model)
    assert (copied(IDS).logits == want).all()
    copied = copy.deepcopy(model)
    copied.config.sliding_window = 2
    with pytest.raises(rm.ConfigError, match=r"sliding_windows=\(5,\), as at patch, got \(2,\)"):
        copied(IDS)
    model.config = copy.deepcopy(model.config)
    assert (model(IDS).logits == want).all()
    model.model.config.sliding_window = 2
    with pytest.raises(rm.ConfigError, match=r"model.config: expected the model's, got another"):
        model(IDS)


def test_a_hook_around_the_model_that_changes_the_tokens() -> None:
    model = model_of(DENSE)
    model.register_forward_pre_hook(
        lambda _, args, options: (args, options | {"input_ids": options["input_ids"] + 1}),
        with_kwargs=True,
    )
    with pytest.raises(rm.ConfigError, match=r"input_ids, .*: expected those of this call, got"):
        rm.torch.logprobs(model, IDS)


def test_a_call_of_logprobs_inside_another() -> None:
    model = model_of(DENSE)
    want = rm.torch.logprobs(model, IDS).logprobs

    def call_again(*_: Any) -> None:
        handle.remove()
        rm.torch.logprobs(model, IDS)

    handle = model.register_forward_hook(call_again)
    with pytest.raises(rm.StateError, match="expected one call of logprobs at a time"):
        rm.torch.logprobs(model, IDS)
    assert (rm.torch.logprobs(model, IDS).logprobs == want).all()


def test_more_threads_than_an_op_takes() -> None:
    model, before = model_of(DENSE), torch.get_num_threads()
    want = model(IDS).logits
    torch.set_num_threads(300)
    try:
        assert (model(IDS).logits == want).all()
    finally:
        torch.set_num_threads(before)


def test_a_model_is_freed_and_a_check_costs_little() -> None:
    """The check leaves no reference. An idle machine compares 30 layers in one millisecond."""
    model = model_of(DENSE)
    model(IDS)
    parts = [weakref.ref(model), weakref.ref(model.model.layers[0].mlp)]
    gc.disable()
    try:
        del model
        assert [part() for part in parts] == [None, None]
    finally:
        gc.enable()
    model = rm.torch.patch(
        type(helpers.hf_model(DENSE))(
            type(helpers.hf_model(DENSE).config)(num_hidden_layers=30, **SMALL)
        )
    )
    patch = model.model._rollmesh[0]
    patch.check()
    took = []
    for _ in range(10):
        begun = time.thread_time()  # other work on the machine does not count
        patch.check()
        took.append(time.thread_time() - begun)
    assert min(took) < 0.02


SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


# ------------------------------------------------------------------------------------------- push
OTHER_GENERATORS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "eps": ({"rms_norm_eps": 1e-3}, {}, "rms_norm_eps=1e-06 and 0.001"),
    "theta": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {},
        "rope_settings=.*10000.* and .*500000",
    ),
    "activation": ({"hidden_act": "gelu"}, {}, "activation='silu' and 'gelu'"),
    "tied": ({"tie_word_embeddings": True}, {}, "tie_word_embeddings=False and True"),
    "windows": (
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {},
        r"sliding_windows=\(0, 0\) and \(0, 8\)",
    ),
    "dtype": ({}, {"dtype": "bfloat16"}, "dtype='float32' and 'bfloat16'"),
    "two": (
        {"rms_norm_eps": 1e-3},
        {"dtype": "bfloat16"},
        "rms_norm_eps=.*, dtype=.*; make both with the same",
    ),
}


@pytest.mark.parametrize("name", OTHER_GENERATORS)
def test_a_push_to_a_generator_of_another_function(name: str) -> None:
    """Raises a ConfigError with the difference; the version that served before still does."""
    changes, options, words = OTHER_GENERATORS[name]
    model = model_of(DENSE)
    spec = rm.ModelSpec.from_hf({**DENSE.config, **changes})
    with rm.Generator(
        spec, **{"dtype": "float32", "max_model_len": 64, "kv_cache_gib": 0.01, **options}
    ) as generator:
        with pytest.raises(
            rm.ConfigError,
            match=f"generator: expected the settings of the patched model.*{words}",
        ):
            rm.torch.push(model, generator)
        assert generator.version is None


def test_a_push_to_a_fast_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """fast=True needs a GPU, so this test changes what the generator reports with it."""
    model = model_of(DENSE)
    with generator_of(DENSE) as generator:
        reported = generator.metrics()
        assert reported["invariant"] is True
        monkeypatch.setattr(generator, "metrics", lambda: reported | {"invariant": False})
        with pytest.raises(rm.ConfigError, match=r"got others .*: fast=False and True; make both"):
            rm.torch.push(model, generator)
        assert generator.version is None


def test_a_push_looks_at_the_parts() -> None:
    model = model_of(DENSE)
    model.model.norm = nn.LayerNorm(64)
    with generator_of(DENSE) as generator:
        with pytest.raises(rm.ConfigError, match=r"model.norm: .*LayerNorm"):
            rm.torch.push(model, generator)
        assert generator.version is None


def test_a_push_where_nothing_that_matters_differs() -> None:
    model = rm.torch.patch(helpers.hf_model(DENSE))
    spec = rm.ModelSpec.from_hf({**DENSE.config, "eos_token_id": 7, "max_position_embeddings": 512})
    with rm.Generator(spec, dtype="float32", max_model_len=100, kv_cache_gib=0.01) as generator:
        rm.torch.push(model, generator)
        assert (
            model(IDS).logits[0].detach().numpy() == generator.logits([IDS[0].tolist()])[0]
        ).all()


ROPES = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 16, "factor": 4.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_rope_types_that_depend_on_the_length(kind: str) -> None:
    """The first push sets the length, for copies too. Another length is refused later."""
    changes = {"rope_parameters": ROPES[kind], "max_position_embeddings": 64}
    spec = rm.ModelSpec.from_hf({**DENSE.config, **changes})
    made = [
        rm.Generator(spec, dtype="float32", max_model_len=length, kv_cache_gib=0.01)
        for length in ((128, 128, 256) if kind == "dynamic" else (128, 256, 12))
    ]
    model = rm.torch.patch(helpers.hf_model(DENSE, **changes))
    with pytest.raises(
        rm.ConfigError,
        match=rf"max_model_len: expected the generator's, .*'{kind}' depend on it, got none",
    ):
        rm.torch.logprobs(model, IDS)
    ids = helpers.prompts(DENSE.config, (20,))
    for generator in made[:2]:
        rm.torch.push(model, generator)
        for each in (model, copy.deepcopy(model)):
            assert (
                each(torch.tensor(ids)).logits[0].detach().numpy() == generator.logits(ids)[0]
            ).all()
    explicit = rm.torch.patch(helpers.hf_model(DENSE, **changes), max_model_len=128)
    for each in (model, explicit):
        with pytest.raises(
            rm.ConfigError, match=rf"max_model_len=128 and {made[2].max_model_len}; make both"
        ):
            rm.torch.push(each, made[2])
    assert (explicit(torch.tensor(ids)).logits == model(torch.tensor(ids)).logits).all()
    for generator in made:
        generator.close()


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_of_an_earlier_batch(kind: str) -> None:
    """transformers keeps the frequencies of the longest batch so far; the config's frequencies are
    used instead."""
    model = helpers.hf_model(DENSE, rope_parameters=ROPES[kind], max_position_embeddings=64)
    model(torch.ones(1, 100, dtype=torch.long))
    rm.torch.patch(model, max_model_len=64)(IDS)
    model.model.rotary_emb.inv_freq.mul_(0.5)
    with pytest.raises(
        rm.ConfigError, match=r"rotary_emb.inv_freq: expected the frequencies of the config"
    ):
        model(IDS)
