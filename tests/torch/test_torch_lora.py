"""LoRA of peft on a patched model: merged weights are pushed and computed with, and only adapters
and whole parts learn.

Oracles: the generator's record, bit for bit; peft's own forward and backward pass in float32.
Bounds: 0 differing bits; 1e-4 of a gradient's norm, and 1e-2 inside autocast."""

from __future__ import annotations

import copy
from typing import Any

import helpers
import pytest
import torch
from test_torch_patch import (
    DENSE,
    DTYPES,
    FAMILIES,
    IDS,
    drawn,
    generator_of,
    pefts,
    plain_logprobs,
    scored,
    step,
    weighted,
    worst,
)
from torch import Tensor

import rollmesh as rm

TARGETS = {
    "dense": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "moe": ["q_proj", "k_proj", "o_proj"],
}
WHOLE = {
    "dense": ["lm_head", "embed_tokens", "norm", "mlp"],
    "moe": ["lm_head", "embed_tokens", "k_norm", "gate", "experts"],
}


@pytest.mark.quick(3)
@pefts
@pytest.mark.parametrize("whole", [False, True], ids=["adapters", "modules_to_save"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FAMILIES)
def test_lora(case: helpers.Case, dtype: str, whole: bool) -> None:
    """The merged weights are pushed and used; only adapters and wholly trained parts learn, with
    the gradients of peft. Such a part may contain adapters (mlp) and is the base model's while they
    are off."""
    peft = pytest.importorskip("peft")
    saved = WHOLE[case.name] if whole else None
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=TARGETS[case.name],
        lora_dropout=0.0,
        init_lora_weights=False,
        modules_to_save=saved,
    )
    torch.manual_seed(0)
    plain = peft.get_peft_model(helpers.hf_model(case).requires_grad_(), config)
    model = rm.torch.patch(copy.deepcopy(plain), dtype=dtype)
    with generator_of(case, dtype) as generator:
        for version in range(2):
            rm.torch.push(model, generator, version)
            batch = drawn(generator, case)
            assert (batch.of(scored(model, batch)) == batch.recorded).all()
            step(model, batch, [p for p in model.parameters() if p.requires_grad])
            assert (batch.of(scored(model, batch)) != batch.recorded).any()
        with model.disable_adapter():
            rm.torch.push(model, generator)
            batch = drawn(generator, case)
            assert (batch.of(scored(model, batch)) == batch.recorded).all()
            assert (
                scored(model, batch).logprobs
                == scored(rm.torch.patch(helpers.hf_model(case), dtype=dtype), batch).logprobs
            ).all()
    merged = helpers.hf_model(case)
    merged.load_state_dict(rm.torch.state_dict(model))
    for got, want in zip(
        merged.state_dict().values(), model.merge_and_unload().state_dict().values(), strict=True
    ):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    if dtype == "float32":
        model = rm.torch.patch(copy.deepcopy(plain))
        names = [name for name, p in plain.named_parameters() if p.requires_grad]
        weighted(scored(model, batch).logprobs, batch).backward()
        weighted(plain_logprobs(plain, batch), batch).backward()
        mine, theirs = (dict(m.named_parameters()) for m in (model, plain))
        assert worst({n: mine[n].grad for n in names}, {n: theirs[n].grad for n in names}) < 1e-4
        assert all(p.grad is None for n, p in mine.items() if n not in names)


@pefts
def test_lora_inside_autocast() -> None:
    """Merging, pushing and computing give the same results inside autocast as outside; the
    gradients of the adapters are those of autocast, which rounds to bfloat16."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = rm.torch.patch(peft.get_peft_model(helpers.hf_model(DENSE).requires_grad_(), config))
    want: dict[str, Tensor] = {}
    with generator_of(DENSE) as generator:
        for inside in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                rm.torch.push(model, generator)
                batch = drawn(generator, DENSE)
                made = scored(model, batch)
                weighted(made.logprobs, batch).backward()
            assert (batch.of(made) == batch.recorded).all()
            got = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
            assert {g.dtype for g in got.values()} == {torch.float32}
            want = want or got
            assert worst(got, want) < 1e-2
            model.zero_grad()


@pefts
def test_lora_that_no_rollout_has() -> None:
    peft = pytest.importorskip("peft")
    dropping = peft.get_peft_model(
        helpers.hf_model(DENSE), peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)
    )
    with pytest.raises(rm.ConfigError, match=r"lora_dropout: expected 0 in training, got 0.1"):
        rm.torch.patch(dropping).train()(torch.tensor([[1, 2]]))
    dora = peft.get_peft_model(
        helpers.hf_model(DENSE), peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    )
    with pytest.raises(
        rm.ConfigError, match=r"expected plain LoRA adapters.* adapter 'default' with Dora"
    ):
        rm.torch.patch(dora)(torch.tensor([[1, 2]]))
    biased = peft.get_peft_model(
        helpers.hf_model(helpers.CASES_BY_NAME["attention_bias"]),
        peft.LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True),
    )
    with pytest.raises(rm.ConfigError, match="lora_bias: expected False, got True"):
        rm.torch.patch(biased)(torch.tensor([[1, 2]]))


@pefts
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # of peft, about norms
def test_adapters_of_other_parts_and_kinds() -> None:
    """Adapters that the forward pass would ignore, and adapters that a push cannot merge, are
    refused."""
    peft = pytest.importorskip("peft")
    experts = peft.LoraConfig(
        r=2,
        target_modules=[],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    for case, config, words in (
        (
            DENSE,
            peft.LNTuningConfig(target_modules=["input_layernorm"]),
            "input_layernorm: .* got a peft LNTuningLayer of a Qwen3RMSNorm",
        ),
        (
            DENSE,
            peft.LNTuningConfig(target_modules=["q_norm"]),
            "q_norm: .* got a peft LNTuningLayer",
        ),
        (
            DENSE,
            peft.LNTuningConfig(target_modules=["post_attention_layernorm"]),
            "post_attention_layernorm: .* got a peft LNTuningLayer",
        ),
        (
            DENSE,
            peft.LNTuningConfig(target_modules=["model.norm"]),
            "model.norm: .* got a peft LNTuningLayer",
        ),
        (
            DENSE,
            peft.LoHaConfig(r=2, target_modules=["q_proj"]),
            "q_proj: .* got a peft Linear of a Linear",
        ),
        (DENSE, peft.HRAConfig(r=2, target_modules=["q_proj"]), "q_proj: .* got a peft HRALinear"),
        (
            DENSE,
            peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj"]),
            "q_proj: .* got a peft SVDLinear",
        ),
        (
            DENSE,
            peft.LoraConfig(r=2, target_modules=["embed_tokens"]),
            "embed_tokens: .* got a peft Embedding of a Embedding",
        ),
        (
            helpers.CASES_BY_NAME["moe"],
            experts,
            "mlp.experts: .* got a peft ParamWrapper of a Qwen3MoeExperts",
        ),
    ):
        first = rm.torch.patch(helpers.hf_model(case))
        patched, plain = (
            peft.get_peft_model(first, config),
            peft.get_peft_model(helpers.hf_model(case), config),
        )
        for call in (
            lambda patched=patched: rm.torch.logprobs(patched, torch.tensor([[1, 2]])),
            lambda patched=patched: rm.torch.state_dict(patched),
            lambda plain=plain: rm.torch.state_dict(plain),
            lambda plain=plain: rm.torch.patch(plain),
        ):
            with pytest.raises(rm.ConfigError, match=f"{words}.*merge it into the model"):
                call()


@pefts
def test_adapters_that_are_switched() -> None:
    """Off (the usual reference model), to another adapter, and to another scale: a pass computes
    with the active setting."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model = rm.torch.patch(peft.get_peft_model(helpers.hf_model(DENSE), config))
    model.add_adapter("two", config)
    plain = helpers.hf_model(DENSE)
    with generator_of(DENSE) as generator:
        for shared in (False, True):
            if shared:
                rm.torch.push(model, generator)
            one = rm.torch.logprobs(model, IDS).logprobs
            with model.disable_adapter():
                assert (
                    rm.torch.logprobs(model, IDS).logprobs
                    == rm.torch.logprobs(rm.torch.patch(plain), IDS).logprobs
                ).all()
                rm.torch.unpatch(plain)
            assert (rm.torch.logprobs(model, IDS).logprobs == one).all()
            model.set_adapter("two")
            assert (rm.torch.logprobs(model, IDS).logprobs != one).any()
            model.set_adapter("default")
        for module in model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", 3.0)
        assert (rm.torch.logprobs(model, IDS).logprobs != one).any()


PATTERNS = {"use_rslora": True, "rank_pattern": {"o_proj": 2}, "alpha_pattern": {"q_proj": 32}}
ORDERS = (
    "merge disable",
    "merge disable pass enable",
    "merge disable enable",
    "merge_both disable",
    "merge set_two",
    "merge pass unmerge merge_two",
    "merge_two scale",
    "both scale",
    "merge pass scale disable",
)


@pefts
@pytest.mark.filterwarnings("ignore:Adapter cannot be set when the model is merged:UserWarning")
@pytest.mark.parametrize("options", [{}, PATTERNS], ids=["plain", "patterns"])
def test_merged_and_switched_adapters_are_pefts(options: dict[str, Any]) -> None:
    """The forward pass and push follow peft through merging, switching and disabling. A layer of
    peft unmerges when it is called while adapters are disabled."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False, **options
    )

    def made() -> Any:
        torch.manual_seed(0)
        model = peft.get_peft_model(helpers.hf_model(DENSE), config, adapter_name="one")
        model.add_adapter("two", config)
        return model.eval()

    steps = {
        "merge": lambda m: m.merge_adapter(),
        "merge_two": lambda m: m.merge_adapter(["two"]),
        "merge_both": lambda m: m.merge_adapter(["one", "two"]),
        "unmerge": lambda m: m.unmerge_adapter(),
        "disable": lambda m: m.base_model.disable_adapter_layers(),
        "enable": lambda m: m.base_model.enable_adapter_layers(),
        "set_two": lambda m: m.set_adapter("two"),
        "both": lambda m: m.base_model.set_adapter(["one", "two"]),
        "scale": lambda m: [
            x.set_scale("one", 3.0) for x in m.modules() if hasattr(x, "set_scale")
        ],
        "pass": lambda m: m(IDS, use_cache=False),
    }
    with generator_of(DENSE) as generator:
        for order in ORDERS:
            plain, patched = made(), rm.torch.patch(made())
            for step in order.split():
                steps[step](plain)
                steps[step](patched)
            rm.torch.push(patched, generator)
            want = plain(IDS, use_cache=False).logits
            got = patched(IDS).logits
            assert (got - want).abs().max() < 1e-4 * want.abs().max(), order
            assert (got[0].detach().numpy() == generator.logits([IDS[0].tolist()])[0]).all(), order


@pefts
def test_an_adapter_for_each_row() -> None:
    """peft passes the names to the layers by hooks, which stay when the call raises."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model = peft.get_peft_model(helpers.hf_model(DENSE), config, adapter_name="one").eval()
    want = rm.torch.patch(model)(IDS).logits
    with pytest.raises(
        rm.ConfigError, match=r"q_proj: expected the active adapters for all rows, got"
    ):
        model(IDS, adapter_names=["one"])
    assert (model(IDS).logits == want).all()


@pefts
def test_adapters_that_are_changed_by_hand() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    for change, words in (
        (
            lambda x: x.lora_A["default"].register_forward_hook(lambda *_: None),
            r"lora_A.default: expected no hook",
        ),
        (
            lambda x: x.lora_B.__setitem__("default", torch.nn.Linear(4, 64)),
            r"lora_B.default.bias: expected none",
        ),
        (lambda x: x.lora_A.to(torch.bfloat16), r"lora_A and lora_B of one dtype"),
        (
            lambda x: x.lora_dropout.__setitem__("default", torch.nn.AlphaDropout()),
            r"lora_dropout.default: .*AlphaDropout",
        ),
        (
            lambda x: setattr(x, "get_delta_weight", x.get_delta_weight),
            r"get_delta_weight: expected the method of Linear",
        ),
        (lambda x: x.register_forward_hook(lambda *_: None), r"q_proj: expected no hook"),
        (
            lambda x: x.base_layer.register_parameter("bias", torch.nn.Parameter(torch.ones(64))),
            r"q_proj.bias: expected none",
        ),
    ):
        model = rm.torch.patch(peft.get_peft_model(helpers.hf_model(DENSE), config))
        model(IDS)
        change(model.get_base_model().model.layers[0].self_attn.q_proj)
        with pytest.raises(rm.ConfigError, match=words):
            model(IDS)
