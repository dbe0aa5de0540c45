"""rollmesh.torch.patch: the forward pass of a transformers model is the generator's.

Input: the models of helpers.py, their prompts, and completions that a generator draws. Oracles: the
generator's record, bit for bit; transformers' own forward and backward pass in float32. Bounds: 0
differing bits; 1e-3 of a gradient's norm, and 1e-4 if only the order of sums differs."""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
import torch
from marks import SUMMARY, some
from torch import Tensor

import rollmesh as rm
from rollmesh.torch import Scored

DENSE, MOE = helpers.CASES_BY_NAME["dense"], helpers.CASES_BY_NAME["moe"]
# peft 0.21 on transformers 5.23.
pefts = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
FAMILIES = [pytest.param(DENSE, id="dense"), pytest.param(MOE, id="moe")]
DTYPES = ["float32", "bfloat16"]


def model_of(case: helpers.Case, dtype: str = "float32", seed: int | None = None) -> Any:
    """Returns a model like a trainer's: float32 weights, whatever dtype the forward pass computes
    in."""
    return rm.torch.patch(
        helpers.hf_model(case, "float32", seed).eval().requires_grad_(),
        dtype=dtype,
        max_model_len=case.max_model_len,
    )


def generator_of(case: helpers.Case, dtype: str = "float32", **options: Any) -> rm.Generator:
    limits = {
        "max_model_len": case.max_model_len,
        "max_num_seqs": 16,
        "kv_cache_gib": 0.05,
        "threads": 2,
    }
    return rm.Generator(rm.ModelSpec.from_hf(case.config), dtype=dtype, **{**limits, **options})


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[Any, rm.Generator]]]:
    """Returns (a patched model, a generator that serves its weights)."""
    made: list[rm.Generator] = []

    def of(case: helpers.Case, dtype: str = "float32", **options: Any) -> tuple[Any, rm.Generator]:
        model = model_of(case, dtype)
        made.append(generator_of(case, dtype, **options))
        rm.torch.push(model, made[-1])
        return model, made[-1]

    yield of
    for generator in made:
        generator.close()


class Batch:
    """Completions in a trainer's layout: `left` pads every second sequence on the left, the others
    on the right."""

    def __init__(self, outputs: list[rm.RequestOutput], left: bool = True):
        pairs = [(list(o.prompt_token_ids), s) for o in outputs for s in o.outputs]
        self.sequences = [[*prompt, *map(int, s.token_ids)] for prompt, s in pairs]
        self.completions = [s for _, s in pairs]
        self.recorded = np.concatenate([np.asarray(s.sampling_logprobs) for s in self.completions])
        most = max(map(len, self.sequences))
        self.ids = torch.full((len(pairs), most), 7)
        self.mask, self.wanted = (
            torch.zeros_like(self.ids),
            torch.zeros_like(self.ids, dtype=torch.bool),
        )
        for i, ((prompt, _), tokens) in enumerate(zip(pairs, self.sequences, strict=True)):
            at = most - len(tokens) if left and i % 2 else 0
            self.ids[i, at : at + len(tokens)] = torch.tensor(tokens)
            self.mask[i, at : at + len(tokens)] = 1
            self.wanted[i, at + len(prompt) : at + len(tokens)] = True

    def of(self, scored: Scored) -> np.ndarray:
        """Returns the wanted logprobs, in the order of `recorded`."""
        return scored.logprobs[self.wanted[:, 1:]].detach().numpy()


def drawn(
    generator: rm.Generator,
    case: helpers.Case,
    temperature: float = 1.0,
    tokens: int = 20,
    seed: int = 3,
) -> Batch:
    params = rm.SamplingParams(
        n=2, max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True
    )
    return Batch(
        generator.generate(helpers.prompts(case.config, (1, 5, 33)), params, use_tqdm=False)
    )


def scored(model: Any, batch: Batch, **options: Any) -> Scored:
    return rm.torch.logprobs(model, batch.ids, batch.mask, wanted=batch.wanted, **options)


# ------------------------------------------------------------------------------------------- bits
QUICK = ("dense", "moe", "tied_bias", "moe_mlp_only", "window_40")


def is_patchable(case: helpers.Case) -> bool:
    """transformers' router has no bias; a generator's may."""
    return not case.router_bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    some([c for c in helpers.CASES if is_patchable(c)], lambda c: c.name in QUICK),
    ids=lambda case: case.name,
)
def test_logprobs_are_those_of_the_rollout(
    pair: Callable[..., tuple[Any, rm.Generator]],
    case: helpers.Case,
    dtype: str,
    request: pytest.FixtureRequest,
) -> None:
    model, generator = pair(case, dtype)
    tokens = min(20, case.max_model_len - 33)
    for temperature in (1.0, 0.7):
        batch = drawn(generator, case, temperature, tokens)
        got = scored(model, batch, temperature=temperature, routed_experts=True)
        assert (batch.of(got) == batch.recorded).all()
        for row, mask, sample in zip(
            got.routed_experts if got.routed_experts is not None else (),
            batch.mask,
            batch.completions,
            strict=False,
        ):
            assert (row[mask.bool()][:-1].numpy() == sample.routed_experts).all()
    lines = request.config.stash.setdefault(SUMMARY, [])
    lines.append(f"patched {case.name} {dtype}: {2 * len(batch.recorded)} logprobs, 0 differ")


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FAMILIES)
def test_nothing_but_weights_and_tokens_changes_a_bit(
    pair: Callable[..., tuple[Any, rm.Generator]], case: helpers.Case, dtype: str
) -> None:
    """Varies padding, packing, order, grad mode, checkpointing, threads, instruction sets, the
    prompt's logprobs, and the way the rollout was made."""
    model, generator = pair(case, dtype, max_num_batched_tokens=16, enable_prefix_caching=True)
    batch = drawn(generator, case, tokens=30)
    want = scored(model, batch)
    assert (batch.of(want) == batch.recorded).all()
    everything = rm.torch.logprobs(model, batch.ids, batch.mask).logprobs

    params = rm.SamplingParams(n=2, max_tokens=30, seed=3, ignore_eos=True)
    right = Batch(
        generator.generate(helpers.prompts(case.config, (1, 5, 33)), params, use_tqdm=False),
        left=False,
    )
    assert (right.recorded == batch.recorded).all()
    assert (right.of(scored(model, right)) == batch.recorded).all()
    packed = torch.tensor([[token for sequence in batch.sequences for token in sequence]])
    positions = torch.cat([torch.arange(len(s)) for s in batch.sequences])[None]
    got = rm.torch.logprobs(model, packed, position_ids=positions).logprobs[0]
    assert (got[positions[0, 1:] > 0] == everything[everything != 0]).all()
    for row, sequence in enumerate(batch.sequences[::-1]):
        alone = rm.torch.logprobs(model, torch.tensor([sequence])).logprobs
        mask = batch.mask[-1 - row].bool()
        assert (alone[0] == everything[-1 - row][mask[1:] & mask[:-1]]).all()
    with torch.no_grad():
        assert (scored(model, batch).logprobs == want.logprobs).all()
    with torch.inference_mode():
        assert (scored(model, batch).logprobs == want.logprobs).all()
    for options in (
        {"threads": 1},
        {"threads": 3},
        *({"isa": isa} for isa in rm.ops.available_isas()),
    ):
        other = rm.torch.patch(
            copy.deepcopy(rm.torch.unpatch(copy.deepcopy(model))), dtype=dtype, **options
        )
        assert (scored(other, batch).logprobs == want.logprobs).all()
    score = generator.score([list(map(int, s)) for s in batch.sequences])
    for row, (mask, sequence) in enumerate(zip(batch.mask.bool(), score, strict=True)):
        assert (everything[row][mask[1:] & mask[:-1]].detach().numpy() == sequence).all()


def test_logits_are_the_generators(pair: Callable[..., tuple[Any, rm.Generator]]) -> None:
    model, generator = pair(MOE)
    prompts = helpers.prompts(MOE.config, (9, 9))
    want = generator.logits(prompts)
    output = model(torch.tensor(prompts))
    assert output.logits.dtype == torch.float32
    assert (output.logits.detach().numpy() == np.stack(want)).all()
    last = model(torch.tensor(prompts), logits_to_keep=1).logits
    assert (last[:, 0] == output.logits[:, -1]).all()


def test_a_mesh_gives_what_the_trainer_gives() -> None:
    for dtype in DTYPES:
        model = model_of(MOE, dtype)
        with generator_of(MOE, dtype, mesh=rm.Mesh(tp=2, dp=2, ep=4)) as generator:
            rm.torch.push(model, generator)
            batch = drawn(generator, MOE)
            assert (batch.of(scored(model, batch)) == batch.recorded).all()


# -------------------------------------------------------------------------------------- gradients
def gradients(model: Any, batch: Batch, loss: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def plain_logprobs(model: Any, batch: Batch) -> Tensor:
    positions = (batch.mask.cumsum(1) - 1).clamp(min=0)
    logits = model(
        batch.ids, attention_mask=batch.mask, position_ids=positions, use_cache=False
    ).logits.float()
    return logits[:, :-1].log_softmax(-1).gather(-1, batch.ids[:, 1:, None])[..., 0]


def weighted(logprobs: Tensor, batch: Batch) -> Tensor:
    weights = torch.linspace(-1, 1, batch.wanted[:, 1:].numel()).view_as(batch.wanted[:, 1:])
    return (logprobs * weights * batch.wanted[:, 1:]).sum()


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(
        float((got[name] - want[name]).norm() / want[name].norm().clamp(min=1e-12)) for name in want
    )


GRADIENT_CASES = (
    "dense",
    "attention_bias",
    "tied_bias",
    "window_8_of_layer_1",
    "moe",
    "moe_raw_gates",
    "moe_mlp_only",
    "moe_7_of_33",
    "moe_top_1_raw",
)


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients_are_transformers(
    pair: Callable[..., tuple[Any, rm.Generator]], name: str
) -> None:
    case = helpers.CASES_BY_NAME[name]
    model, generator = pair(case)
    batch, plain = drawn(generator, case), rm.torch.unpatch(copy.deepcopy(model))
    got = gradients(model, batch, lambda m: weighted(scored(m, batch).logprobs, batch))
    want = gradients(plain, batch, lambda m: weighted(plain_logprobs(m, batch), batch))
    assert worst(got, want) < 1e-4


@pytest.mark.parametrize("case", FAMILIES)
def test_a_loss_of_logits(
    pair: Callable[..., tuple[Any, rm.Generator]], case: helpers.Case
) -> None:
    """transformers' own loss of labels, on logits of a patched model."""
    model, generator = pair(case)
    batch, plain = drawn(generator, case), rm.torch.unpatch(copy.deepcopy(model))
    labels = batch.ids.masked_fill(~batch.wanted, -100)
    options = {"attention_mask": batch.mask, "labels": labels, "use_cache": False}
    got = gradients(model, batch, lambda m: m(batch.ids, **options).loss)
    positions = (batch.mask.cumsum(1) - 1).clamp(min=0)
    want = gradients(plain, batch, lambda m: m(batch.ids, position_ids=positions, **options).loss)
    assert worst(got, want) < 1e-4


def test_the_padding_token_has_no_gradient_in_the_embedding() -> None:
    """The behavior is that of torch.nn.Embedding, even if a rollout has drawn the padding token."""
    plain = helpers.hf_model(MOE, pad_token_id=5).requires_grad_()
    model = rm.torch.patch(copy.deepcopy(plain))
    ids = torch.tensor([[1, 5, 2, 5]])
    for m in (model, plain):
        m(ids).logits.log_softmax(-1)[..., 3].sum().backward()
    got, want = (m.model.embed_tokens.weight.grad for m in (model, plain))
    assert not want[5].any()
    assert worst({"": got}, {"": want}) < 1e-4


@pytest.mark.parametrize("case", FAMILIES)
def test_bfloat16_on_float32_masters(
    pair: Callable[..., tuple[Any, rm.Generator]], case: helpers.Case
) -> None:
    """Gradients are float32, and equal those of the float32 model within bfloat16's rounding.
    Experts may be chosen differently, so only a dense model has a bound."""
    model, generator = pair(case, "bfloat16")
    batch, plain = drawn(generator, case), rm.torch.unpatch(copy.deepcopy(model))
    got = gradients(model, batch, lambda m: weighted(scored(m, batch).logprobs, batch))
    assert {g.dtype for g in got.values()} == {torch.float32}
    assert all(bool(g.isfinite().all()) for g in got.values())
    want = gradients(plain, batch, lambda m: weighted(plain_logprobs(m, batch), batch))
    if case is DENSE:
        assert worst(got, want) < 0.1


@pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning"
)
@pytest.mark.parametrize("case", FAMILIES)
def test_checkpointing_and_accumulation(
    pair: Callable[..., tuple[Any, rm.Generator]], case: helpers.Case
) -> None:
    model, generator = pair(case)
    batch = drawn(generator, case)
    want = gradients(model, batch, lambda m: weighted(scored(m, batch).logprobs, batch))
    model.train()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        got = gradients(model, batch, lambda m: weighted(scored(m, batch).logprobs, batch))
        assert worst(got, want) < 1e-6
    model.gradient_checkpointing_disable()
    model.zero_grad()
    for rows in (slice(0, 2), slice(2, None)):
        part = copy.copy(batch)
        part.ids, part.mask, part.wanted = batch.ids[rows], batch.mask[rows], batch.wanted[rows]
        weights = torch.linspace(-1, 1, batch.wanted[:, 1:].numel()).view_as(batch.wanted[:, 1:])[
            rows
        ]
        (scored(model, part).logprobs * weights * part.wanted[:, 1:]).sum().backward()
    assert worst({name: p.grad for name, p in model.named_parameters()}, want) < 1e-5


@pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning"
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_a_shared_expert_that_is_scaled(reentrant: bool) -> None:
    """Checkpoints allow one read of a saved tensor."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2MoeConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
    )  # fmt: skip
    model = rm.torch.patch(transformers.AutoModelForCausalLM.from_config(config)).train()

    def computed() -> dict[str, Tensor]:
        model.zero_grad()
        rm.torch.logprobs(model, torch.arange(12).view(2, 6)).logprobs.sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    want = computed()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert worst(computed(), want) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FAMILIES)
def test_autocast(case: helpers.Case, dtype: str) -> None:
    """The forward pass, and the backward pass inside and outside of autocast, are bit-identical to
    those without autocast. 300 tokens use another backward pass of attention."""
    model = model_of(case, dtype)
    for ids in (IDS, torch.arange(300)[None] % 151):

        def loss(inside: bool = True, ids: Tensor = ids) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                made = rm.torch.logprobs(model, ids, entropy=True, temperature=0.7)
            assert made.entropy is not None
            return (made.logprobs + 0.1 * made.entropy).sum()

        want, losses = {}, [loss(False), loss(), loss()]
        for i, each in enumerate(losses):
            assert each == losses[0]
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=i == 2):
                each.backward()
            got = {name: p.grad for name, p in model.named_parameters()}
            want = want or got
            assert {g.dtype for g in got.values()} == {torch.float32}
            assert all((got[name] == want[name]).all() for name in want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FAMILIES)
def test_logprobs_of_kept_tokens_are_those_of_the_rollout(
    pair: Callable[..., tuple[Any, rm.Generator]], case: helpers.Case, dtype: str
) -> None:
    """Under filters, and before and after an update of the weights: the ratio compares two
    distributions over the recorded tokens."""
    model, generator = pair(case, dtype, max_num_batched_tokens=16)
    prompts = helpers.prompts(case.config, (1, 5, 33))
    for temperature, filters in (
        (1.0, {"top_k": 20, "top_p": 0.9}),
        (0.7, {"top_k": 50, "min_p": 0.05}),
        (1.3, {"top_k": 7}),
    ):
        params = rm.SamplingParams(
            n=2,
            max_tokens=20,
            temperature=temperature,
            seed=3,
            ignore_eos=True,
            kept_tokens=True,
            **filters,
        )
        batch = Batch(generator.generate(prompts, params, use_tqdm=False))
        kept = torch.from_numpy(np.concatenate([s.kept_tokens for s in batch.completions]))
        got = scored(model, batch, temperature=temperature, kept_tokens=kept, entropy=True)
        assert (batch.of(got) == batch.recorded).all()
        logits = model(batch.ids, attention_mask=batch.mask).logits[:, :-1][batch.wanted[:, 1:]]
        among = (
            torch.full_like(logits, -torch.inf).scatter(1, kept.clamp(min=0).long(), 0.0)
            + logits / temperature
        )
        among[:, 0].masked_fill_(~(kept == 0).any(1), -torch.inf)
        p = among.softmax(-1)
        assert got.entropy is not None
        assert torch.allclose(
            got.entropy[batch.wanted[:, 1:]], torch.special.entr(p).sum(-1), rtol=1e-4, atol=1e-5
        )
    step(model, batch)
    later = batch.of(scored(model, batch, temperature=temperature, kept_tokens=kept))
    assert np.isfinite(later).all()
    assert (later != batch.recorded).any()


def test_entropy(pair: Callable[..., tuple[Any, rm.Generator]]) -> None:
    model, generator = pair(DENSE)
    batch = drawn(generator, DENSE)
    got = scored(model, batch, temperature=0.8, entropy=True)
    assert got.entropy is not None
    log_p = (model(batch.ids, attention_mask=batch.mask).logits[:, :-1] / 0.8).log_softmax(-1)
    want = -(log_p.exp() * log_p).sum(-1)[batch.wanted[:, 1:]]
    assert torch.allclose(got.entropy[batch.wanted[:, 1:]], want, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------- weights
def step(model: Any, batch: Batch, parameters: Any = None) -> None:
    optimizer = torch.optim.AdamW(
        list(model.parameters() if parameters is None else parameters), lr=1e-2
    )
    weighted(scored(model, batch).logprobs, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_parts_that_are_copied_or_replaced(pair: Callable[..., tuple[Any, rm.Generator]]) -> None:
    model, _ = pair(MOE)
    want = rm.torch.logprobs(model, IDS, routed_experts=True)
    model.lm_head, model.model.layers[0] = (
        copy.deepcopy(model.lm_head),
        copy.deepcopy(model.model.layers[0]),
    )
    got = rm.torch.logprobs(model, IDS, routed_experts=True)
    assert (got.logprobs == want.logprobs).all()
    assert want.routed_experts is not None
    assert got.routed_experts is not None
    assert (got.routed_experts == want.routed_experts).all()
    model.lm_head = torch.nn.Linear(64, 151, bias=False)
    for call in (lambda: model(IDS), lambda: rm.torch.logprobs(model, IDS)):
        with pytest.raises(
            rm.StateError,
            match="expected its parts as patch left them, got a Linear that is not patched",
        ):
            call()


def test_two_threads(pair: Callable[..., tuple[Any, rm.Generator]]) -> None:
    """One thread computes logits while the other computes logprobs."""
    model, _ = pair(DENSE)
    ids = torch.arange(400)[None] % 151
    logits, logprobs = model(ids).logits, rm.torch.logprobs(model, ids).logprobs
    with ThreadPoolExecutor(2) as pool, torch.no_grad():
        for _ in range(10):
            forward, scores = (
                pool.submit(lambda: model(ids).logits),
                pool.submit(lambda: rm.torch.logprobs(model, ids).logprobs),
            )
            assert (forward.result() == logits).all()
            assert (scores.result() == logprobs).all()


def test_inference_first_and_inputs_that_require_grad() -> None:
    """Values made in inference mode are not kept for training. transformers' hook on the embedding
    runs, which reentrant checkpointing needs if the embedding is frozen."""
    model = model_of(DENSE)
    with torch.inference_mode():
        rm.torch.logprobs(model, IDS)
    model.model.embed_tokens.requires_grad_(False)
    model.enable_input_require_grads()
    seen = []
    model.model.layers[0].register_forward_pre_hook(
        lambda _, args: seen.append(args[0].requires_grad)
    )
    rm.torch.logprobs(model, IDS).logprobs.sum().backward()
    assert seen == [True]
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_copy_and_the_way_back(pair: Callable[..., tuple[Any, rm.Generator]]) -> None:
    plain = helpers.hf_model(MOE).eval()
    ids = torch.tensor([[1, 2, 3, 4]])
    want = plain(ids).logits
    model, generator = pair(MOE)
    patched = model(ids).logits
    copied = copy.deepcopy(model)  # a reference model
    assert (copied(ids).logits == patched).all()
    step(model, drawn(generator, MOE))
    assert (copied(ids).logits == patched).all()
    assert (rm.torch.unpatch(copied)(ids).logits == want).all()
    assert type(copied.model.layers[0]) is type(plain.model.layers[0])
    assert [type(m).__name__ for m in model.modules()] == [
        type(m).__name__ for m in plain.modules()
    ]
    assert list(model.state_dict()) == list(plain.state_dict())


LOAD = """
import sys, torch
import rollmesh as rm
model = torch.load(sys.argv[1], weights_only=False)
ids = torch.tensor([[1, 2, 3]])
first = rm.torch.logprobs(model, ids).logprobs
first.sum().backward()
torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True).step()
stepped = rm.torch.logprobs(model, ids).logprobs
plain = rm.torch.unpatch(model)
again = rm.torch.logprobs(rm.torch.patch(plain, dtype="bfloat16", threads=2), ids).logprobs
print([values.tolist() for values in (first, stepped, again)])
"""


@pytest.mark.full
def test_a_model_that_is_saved_whole_and_loaded_by_another_process(tmp_path: Path) -> None:
    """The loaded model is patched as before, and follows the steps of optimizers."""
    model = rm.torch.patch(helpers.hf_model(MOE).requires_grad_(), dtype="bfloat16", threads=2)
    want = rm.torch.logprobs(model, IDS).logprobs
    torch.save(model, tmp_path / "model.pt")
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "model.pt")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert loaded.returncode == 0, loaded.stderr
    first, stepped, again = ast.literal_eval(loaded.stdout)
    assert first == want.tolist()
    assert stepped == again != first


@pefts
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("name", ["moe", "tied_bias"])
def test_saved_checkpoints_are_those_of_a_plain_model(
    name: str, adapters: bool, tmp_path: Path
) -> None:
    model = helpers.hf_model(helpers.CASES_BY_NAME[name])
    if adapters:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"])
        )
    model.save_pretrained(tmp_path / "plain")
    rm.torch.patch(model).save_pretrained(tmp_path / "patched")
    plain, patched = (
        {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
        for folder in ("plain", "patched")
    )
    assert plain == patched


# dynamo reads .grad.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compile_leaves_the_patched_parts_as_they_are(
    pair: Callable[..., tuple[Any, rm.Generator]],
) -> None:
    model, _ = pair(DENSE)
    ids = torch.tensor([[1, 2, 3, 4]])
    want = model(ids).logits
    assert (torch.compile(model, backend="eager")(ids).logits == want).all()


# --------------------------------------------------------------------------------------- refusals
IDS = torch.tensor([[1, 2, 3]])


def in_training(**changes: Any) -> Any:
    model = helpers.hf_model(DENSE, **changes)
    return rm.torch.patch(model.train())


def patch_with_bias(of: str) -> Callable[[Any], Any]:
    def patch(_: Any) -> Any:
        model = helpers.hf_model(DENSE)
        linear = model.get_submodule(of)
        model.set_submodule(of, torch.nn.Linear(linear.in_features, linear.out_features))
        return rm.torch.patch(model)

    return patch


def patch_with(of: str, name: str, value: Any) -> Callable[[Any], Any]:
    def patch(_: Any) -> Any:
        model = helpers.hf_model(DENSE)
        setattr(model.get_submodule(of) if of else model.config, name, value)
        return rm.torch.patch(model)

    return patch


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "twice": (lambda m: rm.torch.patch(m), rm.StateError, "expected one that is not patched"),
    "another model": (
        lambda m: rm.torch.patch(torch.nn.Linear(2, 2)),
        rm.ConfigError,
        "expected a transformers LlamaForCausalLM .*got a Linear",
    ),
    "not patched": (
        lambda m: rm.torch.unpatch(helpers.hf_model(DENSE)),
        rm.StateError,
        "expected a patched model",
    ),
    "a push of one not patched": (
        lambda m: rm.torch.push(helpers.hf_model(DENSE), "generator"),
        rm.StateError,
        r"call rollmesh.torch.patch first, or generator.sync_weights\(model.state_dict\(\), "
        r"cast=True\)",
    ),
    "dtype": (
        lambda m: rm.torch.patch(helpers.hf_model(DENSE), dtype="float16"),
        rm.ConfigError,
        "dtype: expected .*float16",
    ),
    "isa": (
        lambda m: rm.torch.patch(helpers.hf_model(DENSE), isa="sse"),
        rm.ConfigError,
        "isa: expected .*sse",
    ),
    "threads": (
        lambda m: rm.torch.patch(helpers.hf_model(DENSE), threads=0),
        rm.ConfigError,
        "threads: expected .*0",
    ),
    "a cache": (
        lambda m: m(IDS, use_cache=True),
        rm.ConfigError,
        "use_cache: expected none with a patched model, got True; generate with",
    ),
    "generate": (
        lambda m: m.generate(IDS, max_new_tokens=2),
        rm.ConfigError,
        "generate with a rollmesh generator",
    ),
    "embeddings": (
        lambda m: m(inputs_embeds=torch.ones(1, 2, 64)),
        rm.ConfigError,
        "inputs_embeds: expected none",
    ),
    "hidden states": (
        lambda m: m(IDS, output_hidden_states=True),
        rm.ConfigError,
        "output_hidden_states: expected none",
    ),
    "a mask of 4 dims": (
        lambda m: m(IDS, attention_mask=torch.ones(1, 1, 3, 3)),
        rm.ShapeError,
        "attention_mask: expected 2 dims",
    ),
    "one sequence": (
        lambda m: m(IDS[0]),
        rm.ShapeError,
        r"input_ids: expected a tensor \[batch, tokens\], got \(3,\)",
    ),
    "a token": (
        lambda m: m(torch.tensor([[1, 151]])),
        rm.RequestError,
        r"input_ids: expected tokens in \[0, 151\), got 1 to 151",
    ),
    "floats": (
        lambda m: rm.torch.logprobs(m, IDS.float()),
        rm.DTypeError,
        "input_ids: expected torch.int64 or torch.int32, got torch.float32",
    ),
    **{
        f"a bias of {of}": (
            patch_with_bias(of),
            rm.ConfigError,
            rf"{of}.bias: expected none, as the config says",
        )
        for of in ("lm_head", "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.o_proj")
    },
    "too long": (
        lambda m: m(torch.ones(1, 1200, dtype=torch.long)),
        rm.LimitError,
        "at most 1100 tokens .*got one of 1200",
    ),
    "one token": (lambda m: rm.torch.logprobs(m, IDS[:, :1]), rm.RequestError, "at least 2 tokens"),
    "wanted": (
        lambda m: rm.torch.logprobs(m, IDS, wanted=IDS[:, 1:]),
        rm.ShapeError,
        r"wanted: expected a tensor of shape \(1, 3\)",
    ),
    "temperature": (
        lambda m: rm.torch.logprobs(m, IDS, temperature=-1),
        rm.RequestError,
        "temperature: expected .*-1",
    ),
    "kept tokens": (
        lambda m: rm.torch.logprobs(m, IDS, kept_tokens=torch.ones(3, 1, dtype=torch.int32)),
        rm.ShapeError,
        r"kept_tokens: expected integers of shape \(2, k\), got torch.int32 of shape \(3, 1\)",
    ),
    "a layer by itself": (
        lambda m: m.model.layers[0](torch.ones(1, 3, 64)),
        rm.StateError,
        "called by its model",
    ),
    "a generator": (
        lambda m: rm.torch.push(m, "generator"),
        rm.UnsupportedTensorError,
        "expected a rollmesh.Generator, got a str",
    ),
    "dropout": (
        lambda m: in_training(attention_dropout=0.5)(IDS),
        rm.ConfigError,
        "attention_dropout: expected 0 in training, got 0.5",
    ),
    "another scale": (
        patch_with("model.layers.1.self_attn", "scaling", 0.5),
        rm.ConfigError,
        r"layers.1.self_attn.scaling: expected 0.\d+, as the config says, got 0.5",
    ),
    "another eps": (
        patch_with("model.norm", "variance_epsilon", 0.5),
        rm.ConfigError,
        "norm.variance_epsilon: .*got 0.5",
    ),
    "a config changed later": (
        patch_with("", "rms_norm_eps", 0.5),
        rm.ConfigError,
        "variance_epsilon: expected 0.5, as the config says",
    ),
    "another act_fn": (
        patch_with("model.layers.0.mlp", "act_fn", torch.nn.ReLU()),
        rm.ConfigError,
        "layers.0.mlp.act_fn: expected a .*SiLUActivation, as the config says, got a .*ReLU",
    ),
    "an activation": (
        lambda m: rm.torch.patch(helpers.hf_model(DENSE, hidden_act="relu")),
        rm.ConfigError,
        "hidden_act: .*got 'relu'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    """Checks type and words of the error; the model works as before."""
    model = model_of(DENSE)
    want = model(IDS).logits
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call(model)
    assert (model(IDS).logits == want).all()


def test_weights_that_are_not_finite(pair: Callable[..., tuple[Any, rm.Generator]]) -> None:
    model, _ = pair(MOE)
    weight = model.model.layers[1].mlp.experts.down_proj
    with torch.no_grad():
        kept = weight[3, 2, 1].clone()
        weight[3, 2, 1] = torch.nan
    for _ in range(2):
        with pytest.raises(
            rm.NonFiniteError,
            match=r"weight: expected finite numbers in float32, got a NaN or an infinity at \[3, "
            r"2, 1\]",
        ):
            model(IDS)
    with torch.no_grad():
        weight[3, 2, 1] = kept
    model(IDS)
