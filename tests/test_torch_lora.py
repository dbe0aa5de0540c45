"""LoRA of peft on a patched model: what is merged is pushed and computed, and only adapters and whole parts learn.

Oracles: what the generator recorded, in bits; peft's own forward and backward pass in float32. Bounds: 0 differing bits; 1e-4 of a
gradient's norm, and 1e-2 inside autocast.
"""

from __future__ import annotations

import copy

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

TARGETS = {"dense": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"], "moe": ["q_proj", "k_proj", "o_proj"]}
WHOLE = {"dense": ["lm_head", "embed_tokens", "norm", "mlp"], "moe": ["lm_head", "embed_tokens", "k_norm", "gate", "experts"]}


@pefts
@pytest.mark.parametrize("whole", [False, True], ids=["adapters", "modules_to_save"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FAMILIES)
def test_lora(case: helpers.Case, dtype: str, whole: bool) -> None:
    """The merged weights are pushed and used; only adapters learn, and parts that are trained whole, by the gradients that peft gives
    them. Such a part may hold adapters (mlp) and is the base model's where they are off."""
    peft = pytest.importorskip("peft")
    saved = WHOLE[case.name] if whole else None
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=TARGETS[case.name], lora_dropout=0.0, init_lora_weights=False, modules_to_save=saved
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
            assert (scored(model, batch).logprobs == scored(rm.torch.patch(helpers.hf_model(case), dtype=dtype), batch).logprobs).all()
    merged = helpers.hf_model(case)
    merged.load_state_dict(rm.torch.state_dict(model))
    for got, want in zip(merged.state_dict().values(), model.merge_and_unload().state_dict().values(), strict=True):
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
    """What is merged, pushed and computed is as outside; the gradients of adapters are those of autocast, which rounds to bfloat16."""
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
    dropping = peft.get_peft_model(helpers.hf_model(DENSE), peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1))
    with pytest.raises(rm.ConfigError, match=r"lora_dropout: expected 0 in training, got 0.1"):
        rm.torch.patch(dropping).train()(torch.tensor([[1, 2]]))
    dora = peft.get_peft_model(helpers.hf_model(DENSE), peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    with pytest.raises(rm.ConfigError, match=r"expected plain LoRA adapters.* adapter 'default' with Dora"):
        rm.torch.patch(dora)(torch.tensor([[1, 2]]))
    biased = peft.get_peft_model(
        helpers.hf_model(helpers.CASES_BY_NAME["attention_bias"]), peft.LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True)
    )
    with pytest.raises(rm.ConfigError, match="lora_bias: expected False, got True"):
        rm.torch.patch(biased)(torch.tensor([[1, 2]]))


@pefts
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # of peft, about norms
def test_adapters_of_other_parts_and_kinds() -> None:
    """Where the forward pass would leave them out, and where a push cannot merge them."""
    peft = pytest.importorskip("peft")
    experts = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    for case, config, words in (
        (DENSE, peft.LNTuningConfig(target_modules=["input_layernorm"]), "got one of a norm, a LNTuningLayer"),
        (DENSE, peft.LNTuningConfig(target_modules=["q_norm"]), "got one of a norm, a LNTuningLayer"),
        (DENSE, peft.LNTuningConfig(target_modules=["post_attention_layernorm"]), "got one of a norm, a LNTuningLayer"),
        (DENSE, peft.LNTuningConfig(target_modules=["model.norm"]), "got one of a norm, a LNTuningLayer"),
        (DENSE, peft.LoHaConfig(r=2, target_modules=["q_proj"]), "expected LoRA layers of peft, got a Linear"),
        (DENSE, peft.HRAConfig(r=2, target_modules=["q_proj"]), "expected LoRA layers of peft, got a HRALinear"),
        (helpers.CASES_BY_NAME["moe"], experts, "got one of the router or of experts"),
    ):
        model = rm.torch.patch(peft.get_peft_model(helpers.hf_model(case), config))
        with pytest.raises(rm.ConfigError, match=words):
            rm.torch.logprobs(model, torch.tensor([[1, 2]]))
        with pytest.raises(rm.ConfigError, match=r"expected (adapters of attention and dense MLPs|LoRA layers of peft)"):
            rm.torch.state_dict(model)


@pefts
def test_adapters_that_are_switched() -> None:
    """Off (the usual reference model), to another one, and to another scale: a pass computes with
    what is active then."""
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
                assert (rm.torch.logprobs(model, IDS).logprobs == rm.torch.logprobs(rm.torch.patch(plain), IDS).logprobs).all()
                rm.torch.unpatch(plain)
            assert (rm.torch.logprobs(model, IDS).logprobs == one).all()
            model.set_adapter("two")
            assert (rm.torch.logprobs(model, IDS).logprobs != one).any()
            model.set_adapter("default")
        for module in model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", 3.0)
        assert (rm.torch.logprobs(model, IDS).logprobs != one).any()
