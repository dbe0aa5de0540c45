"""The corrections of `[correction]` for a difference between trainer and generator: the loss's
weights, and routing replay.

Oracle: each formula of loss.py and routing_replay.py against loops in Python floats, its gradient
against central differences of the loops. The inputs of the loss in Trainer.learn, and the experts
that the trainer uses, are tested on a model of a few thousand weights whose generator computes in
bfloat16, so that trainer and generator differ. Bounds: derived from rounding, else equality.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from paths import ROOT
from rollouts import lists

import rollmesh as rm

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rollmesh.grpo import loop, rollout, trainer  # noqa: E402
from rollmesh.grpo.loss import (  # noqa: E402
    correction_weights,
    corrections,
    grpo_loss,
)
from rollmesh.run import (  # noqa: E402
    checkpoint,
    config,
    metrics,
    samples,
)
from rollmesh.run.config import CorrectionTable, LossTable  # noqa: E402
from rollmesh.run.routing_replay import replay, routers  # noqa: E402

MOE, DENSE = ROOT / "configs/qwen3_moe_debug.toml", ROOT / "configs/qwen3_debug.toml"
SMALL = [
    "model.hidden_size=32",
    "model.intermediate_size=32",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
]
EXPERTS = [
    "model.num_experts=16",
    "model.moe_intermediate_size=16",
    "model.num_hidden_layers=3",
    "model.mlp_only_layers=[1]",
]
SHORT = [
    "rollout.prompts=4", "rollout.samples=4", "eval.prompts=8", "generator.kv_cache_gib=0.01",
    "train.threads=1", "generator.threads=1",
    "generator.dtype=bfloat16", "sync.cast=true", "sync.self_test=0",
]  # fmt: skip
TINY = [*SMALL, *EXPERTS, *SHORT]
TABLES = [
    CorrectionTable("token_truncate", cap=1.5),
    CorrectionTable("sequence_truncate", cap=3.0),
    CorrectionTable("token_mask", mask_low=0.7, mask_high=1.6),
]
BY_MODE = pytest.mark.parametrize("table", TABLES, ids=lambda t: t.importance_sampling)
LENGTHS = [1, 7, 3, 13]
pytestmark = pytest.mark.usefixtures("torch_as_it_was", "no_pictures")


# --------------------------------------------------------------------------------------- formulas
def weights_by_hand(
    old: Any, gen: Any, lengths: list[int], t: CorrectionTable
) -> tuple[list[float], list[float]]:
    """Computes c and r of the docstring of loss.py, token by token."""
    ratios, at = [], 0
    for length in lengths:
        logs = [float(old[i]) - float(gen[i]) for i in range(at, at + length)]
        ratios += (
            [math.exp(sum(logs))] * length
            if t.importance_sampling == "sequence_truncate"
            else [math.exp(x) for x in logs]
        )
        at += length
    if t.importance_sampling == "token_mask":
        return [r if t.mask_low <= r <= t.mask_high else 0.0 for r in ratios], ratios
    return [r if r <= t.cap else t.cap for r in ratios], ratios


def logprobs(rng: np.random.Generator) -> tuple[Any, Any]:
    """Returns the float32 logprobs of two sides that differ by about 40 %."""
    old = -rng.random(sum(LENGTHS)) * 3
    return old.astype(np.float32), (old + 0.4 * rng.standard_normal(len(old))).astype(np.float32)


@BY_MODE
def test_weights_by_hand(table: CorrectionTable, rng: np.random.Generator) -> None:
    """Within 13 roundings of float64, which come from the sum of a sequence; both cut and uncut
    tokens occur."""
    old, gen = logprobs(rng)
    weights, ratios = correction_weights(
        torch.tensor(old), torch.tensor(gen), torch.tensor(LENGTHS), table
    )
    c, r = weights_by_hand(old, gen, LENGTHS, table)
    assert np.allclose(ratios, r, rtol=1e-13, atol=0)
    assert np.allclose(weights, c, rtol=1e-13, atol=0)
    cut = [x != y for x, y in zip(c, r)]
    assert 0 < sum(cut) < len(cut)
    said = corrections(old, gen, LENGTHS, table)
    assert said == {
        "correction_mean": pytest.approx(sum(c) / len(c), rel=1e-13),
        "correction_cut_share": sum(cut) / len(cut),
    }


def test_bounds_are_inside_and_equal_logprobs_have_weight_one() -> None:
    """Ratios 1/2, 1, 2 and their neighbours, exact in float64: the bounds of a mask are kept,
    values beyond are 0; a cap is kept and not counted."""
    log = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64) * math.log(2)
    mask = CorrectionTable(
        "token_mask", mask_low=float(log[1].exp()), mask_high=float(log[3].exp())
    )
    one = torch.ones(5, dtype=torch.int64)
    weights, ratios = correction_weights(log, torch.zeros_like(log), one, mask)
    assert weights.tolist() == [0.0, *ratios.tolist()[1:4], 0.0]
    weights, ratios = correction_weights(
        log, torch.zeros_like(log), one, CorrectionTable("token_truncate", cap=mask.mask_high)
    )
    assert weights.tolist() == [*ratios.tolist()[:4], mask.mask_high]
    for table in TABLES:
        weights, _ = correction_weights(log, log, torch.tensor([2, 3]), table)
        assert weights.tolist() == [1.0] * 5


def loss_by_hand(
    lp: Any, old: Any, c: Any, a: Any, h: Any, w: Any, t: LossTable, ref: Any
) -> float:
    total = 0.0
    for i in range(len(lp)):
        ratio, d = math.exp(lp[i] - old[i]), ref[i] - lp[i]
        clipped = min(max(ratio, 1 - t.clip_low), 1 + t.clip_high)
        total += w[i] * (
            -c[i] * min(ratio * a[i], clipped * a[i])
            - t.entropy * h[i]
            + t.kl * (math.exp(d) - 1 - d)
        )
    return total


@BY_MODE
def test_corrected_loss_and_gradient_by_hand(
    table: CorrectionTable, rng: np.random.Generator
) -> None:
    """Value within 1e-12 of the formula in float64; gradient against central differences of the
    formula, 1e-6. The entropy bonus and the reference penalty are not weighted; a masked token has
    only their gradient."""
    old, gen = logprobs(rng)
    n = len(old)
    lp = old.astype(np.float64) + 0.3 * rng.standard_normal(n)
    a, h, w, ref = rng.standard_normal(n), rng.random(n), rng.random(n), -rng.random(n) * 3
    c, _ = weights_by_hand(old, gen, LENGTHS, table)
    loss = LossTable(clip_low=0.1, clip_high=0.3, entropy=0.2, kl=0.4)
    weights, _ = correction_weights(
        torch.tensor(old), torch.tensor(gen), torch.tensor(LENGTHS), table
    )
    lp_N, h_N = torch.tensor(lp, requires_grad=True), torch.tensor(h, requires_grad=True)
    tensors = (torch.tensor(x) for x in (old.astype(np.float64), a, w))
    total, _ = grpo_loss(lp_N, h_N, *tensors, loss, torch.tensor(ref), weights)
    assert float(total.detach()) == pytest.approx(
        loss_by_hand(lp, old, c, a, h, w, loss, ref), abs=1e-12
    )
    total.backward()
    assert lp_N.grad is not None
    eps = 1e-6
    for i in range(n):
        up, down = lp.copy(), lp.copy()
        up[i] += eps
        down[i] -= eps
        slope = (
            loss_by_hand(up, old, c, a, h, w, loss, ref)
            - loss_by_hand(down, old, c, a, h, w, loss, ref)
        ) / (2 * eps)
        assert float(lp_N.grad[i]) == pytest.approx(slope, abs=1e-6)
    assert h_N.grad is not None
    assert np.allclose(h_N.grad, -loss.entropy * w, rtol=1e-12)


def test_without_a_correction_the_loss_has_the_bits_it_had(rng: np.random.Generator) -> None:
    """Oracle: the uncorrected formula, written out in the same torch calls. Weights of one do not
    change a bit either."""
    n = 101
    lp, old, h, w = (torch.tensor(-rng.random(n) * 3, dtype=torch.float32) for _ in range(4))
    a = torch.tensor(rng.standard_normal(n), dtype=torch.float32)
    results = []
    for correction in (None, torch.ones(n, dtype=torch.float64), "oracle"):
        x = lp.clone().requires_grad_()
        if isinstance(correction, str):
            ratio = torch.exp(x - old)
            loss = (w * (-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) - 0.1 * h)).sum()
        else:
            loss = grpo_loss(x, h, old, a, w, LossTable(entropy=0.1), correction_N=correction)[0]
        loss.backward()
        assert x.grad is not None
        results.append((loss.detach().numpy().tobytes(), x.grad.numpy().tobytes()))
    assert results[0] == results[1] == results[2]


# ---------------------------------------------------------------------------------- configuration
@pytest.mark.parametrize(
    "change, message",
    [
        (
            "correction.importance_sampling=tis",
            r'importance_sampling: expected one of "none", "token_truncate", .*, got "tis"',
        ),
        ("correction.cap=0.5", r"cap: expected at least 1, got 0.5"),
        (
            "correction.cap=3",
            r'cap: expected importance_sampling = "token_truncate" or "sequence_truncate" beside '
            r'it, got "none"',
        ),
        (
            'correction={importance_sampling="token_truncate", mask_low=0.1}',
            r'mask_low: expected .* = "token_mask" .*, got "token_truncate"',
        ),
        (
            'correction={importance_sampling="token_mask", cap=3}',
            r'cap: expected .* or "sequence_truncate" beside it, got "token_mask"',
        ),
        ("correction.mask_low=1.5", r"mask_low: expected at most 1, got 1.5"),
        ("correction.mask_high=0.5", r"mask_high: expected at least 1, got 0.5"),
        ("correction.replay=true", r"replay: no such key; there are importance_sampling, "),
    ],
)
def test_a_wrong_correction_is_an_error_that_names_its_key(change: str, message: str) -> None:
    with pytest.raises(rm.ConfigError, match=rf"^\[correction\] {message}"):
        config.load(MOE, [change])


def test_a_dense_model_has_no_routing_to_replay(tmp_path: Path) -> None:
    """The file's architecture allows an immediate error, a checkpoint's only after it is read."""
    with pytest.raises(
        rm.ConfigError,
        match=r'^\[correction\] routing_replay: .* architecture is "qwen3", which routes nothing, '
        r"got true",
    ):
        config.load(DENSE, ["correction.routing_replay=true"])
    with pytest.raises(
        rm.ConfigError,
        match=r"^\[correction\] routing_replay: expected false for a Linear without experts, got "
        r"true",
    ):
        routers(torch.nn.Linear(2, 2))
    this = loop.prepare(config.load(DENSE, [*SMALL, *SHORT]))
    this.close()
    assert this.trainer is not None
    this.trainer.model.save_pretrained(str(tmp_path))
    changes = [
        f'model={{path="{tmp_path}"}}',
        f'tokenizer.path="{ROOT / "data/chars"}"',
        *SHORT,
        "correction.routing_replay=true",
    ]
    with pytest.raises(
        rm.ConfigError,
        match=r"^\[correction\] routing_replay: expected false for a Qwen3ForCausalLM without "
        r"experts",
    ):
        loop.prepare(config.load(DENSE, changes))


def test_a_checkpoint_from_before_the_table_goes_on(tmp_path: Path) -> None:
    then = config.load(MOE).as_dict()
    del then["correction"]
    (tmp_path / "trainer").mkdir()
    (tmp_path / checkpoint.STATE).write_text(
        json.dumps({"format": checkpoint.FORMAT, "next_step": 5, "config": then})
    )
    assert checkpoint.read_state(tmp_path, config.load(MOE), []) == 5
    with pytest.raises(
        rm.ConfigError, match=r"belongs to another run: correction\.importance_sampling differ"
    ):
        checkpoint.read_state(
            tmp_path, config.load(MOE, ["correction.importance_sampling=token_mask"]), []
        )


# ------------------------------------------------------------------------------------ the trainer
def prepared(changes: list[str]) -> loop.Run:
    this = loop.prepare(config.load(MOE, [*TINY, *changes]))
    assert this.trainer is not None
    this.generator.sync_weights(this.trainer.state_dict(), version=0, cast=True)
    return this


@pytest.mark.quick(3)
@pytest.mark.parametrize("how", ["one", "passes", "minibatches"])
@BY_MODE
def test_what_reaches_the_loss(
    table: CorrectionTable, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Input: each micro batch of each update. The old logprobs are the trainer's before the first
    update (within 1e-5, because sequences are padded differently), and the weight equals the
    formula of them and the record, within float64's rounding. The ratio is 1 in the first
    update."""
    keys = {k: v for k, v in dataclasses.asdict(table).items() if v != getattr(CorrectionTable, k)}
    changes = [f"correction.{key}={value}" for key, value in keys.items()] + [
        "train.micro_batch=3",
        "train.lr=0.05",
        "train.kernels=torch",
    ]
    this = prepared(
        [
            *changes,
            f"train.updates={1 if how == 'one' else 2}",
            f"train.minibatches={json.dumps(how == 'minibatches')}",
        ]
    )
    calls: list[tuple[Any, ...]] = []

    def recorded(*arguments: Any) -> Any:
        calls.append(arguments)
        return grpo_loss(*arguments)

    monkeypatch.setattr(trainer, "grpo_loss", recorded)
    try:
        drawn = loop._roll_out(this, 0)
        assert this.trainer is not None
        before = this.trainer.logprobs_of(drawn)
        learned, returned = this.trainer.learn(drawn, np.linspace(-1, 1, len(drawn.completions)), 0)
    finally:
        this.close()
    lengths = [len(ids) for ids in lists(drawn).token_ids]
    gen = drawn.logprobs
    assert np.abs(returned - before).max() < 1e-5
    assert np.abs(before - gen).max() > 1e-3, "bfloat16 against float32"
    ends = np.concatenate([[0], np.cumsum(lengths)])
    at = moved = 0
    for number, (lp, _, old, _, _, _, _, weights) in enumerate(calls):
        here = slice(int(ends[at]), int(ends[at]) + len(lp))
        taken = lengths[at : int(np.searchsorted(ends, here.stop))]
        assert np.abs(old.numpy() - before[here]).max() < 1e-5
        assert np.allclose(
            weights, weights_by_hand(old.numpy(), gen[here], taken, table)[0], rtol=1e-13, atol=0
        )
        assert not old.requires_grad
        assert not weights.requires_grad
        distance = float((lp.detach() - old).abs().max())
        assert distance < 1e-5 if how == "one" or number < len(calls) // 2 else distance > 1e-2
        moved += distance > 1e-2
        at = (at + len(taken)) % len(lengths)
    assert moved == (0 if how == "one" else len(calls) // 2)
    wanted, ratios = weights_by_hand(returned, gen, lengths, table)
    assert learned["correction_mean"] == pytest.approx(np.mean(wanted), rel=1e-12)
    assert learned["correction_cut_share"] == pytest.approx(
        np.mean(np.array(wanted) != np.array(ratios))
    )


@pytest.mark.parametrize("mode", ["none", "token_truncate", "sequence_truncate", "token_mask"])
def test_a_corrected_run_says_what_it_did(mode: str, tmp_path: Path) -> None:
    """Two updates a step, with replayed experts; the last line has no update, and an uncorrected
    run has none of these metrics."""
    this = loop.prepare(
        config.load(
            MOE,
            [
                *TINY,
                "train.steps=1",
                f"correction.importance_sampling={mode}",
                "correction.routing_replay=true",
            ],
        )
    )
    try:
        loop.train(this, tmp_path)
    finally:
        this.close()
    first, last = metrics.read(tmp_path / "metrics.jsonl")
    assert {"correction_mean", "correction_cut_share"} & last.keys() == set()
    if mode == "none":
        assert {"correction_mean", "correction_cut_share"} & first.keys() == set()
    else:
        assert 0 < abs(first["correction_mean"] - 1) < 0.1
        assert 0 <= first["correction_cut_share"] < 0.1


# --------------------------------------------------------------------------------- routing replay
@pytest.fixture(scope="module")
def routed() -> tuple[Any, Any]:
    """Trainer and rollout; layers 0 and 2 of three have experts."""
    this = prepared(["correction.routing_replay=true"])
    try:
        drawn = loop._roll_out(this, 0)
    finally:
        this.close()
    assert drawn.completions[0].routed_experts is not None
    return this.trainer, drawn


def used(model: Any, call: Any) -> Any:
    """Records the arguments that a forward passes to the experts: ids and gates [rows, layers,
    k]."""
    seen: list[tuple[Any, Any]] = []
    handles = [
        module.register_forward_pre_hook(lambda _, inputs: seen.append((inputs[1], inputs[2])))
        for name, module in model.named_modules()
        if name.endswith("mlp.experts")
    ]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack([ids for ids, _ in seen], 1), torch.stack([gates for _, gates in seen], 1)


def test_every_position_that_matters_has_a_record(routed: tuple[Any, Any]) -> None:
    """The record covers the prompt and all generated tokens but the last; the record in the batch
    equals the generator's, position by position."""
    _, drawn = routed
    batch = samples.make_batch(drawn.completions)
    assert batch.routed_BTLK is not None
    assert len({len(ids) for ids in lists(drawn).token_ids}) > 1, "a shorter sequence is padded"
    for b, (prompt, ids, record) in enumerate(
        zip(lists(drawn).prompt, lists(drawn).token_ids, lists(drawn).routed_experts)
    ):
        length = len(prompt.ids) + len(ids) - 1
        assert record.shape == (length, 2, 2)
        assert record.dtype == np.int16
        assert batch.routed_BTLK[b, :length].tolist() == record.tolist()
        assert bool((batch.routed_BTLK[b, length:] == -1).all())
        assert int(batch.columns_N[batch.rows_N == b].max()) == length - 1


def test_the_experts_used_are_those_recorded(routed: tuple[Any, Any]) -> None:
    """0 ids differ from the record if there is one; without it the trainer routes itself, and some
    of these ids differ, so the test can fail. Afterwards the model gives the same bits as
    before."""
    this, drawn = routed
    batch = samples.make_batch(drawn.completions)
    record = batch.routed_BTLK.flatten(0, 1).long()
    known = record >= 0
    with torch.no_grad():
        plain = this.logprobs(batch)[0]
        own, _ = used(this.model, lambda: this.logprobs(batch))
        with replay(this.model, batch.routed_BTLK):
            ids, _ = used(this.model, lambda: this.logprobs(batch))
        with replay(this.model, None):
            assert torch.equal(this.logprobs(batch)[0], plain)
        again, _ = used(this.model, lambda: this.logprobs(batch))
        assert torch.equal(this.logprobs(batch)[0], plain)
    assert int((ids[known] != record[known]).sum()) == 0
    assert int((own[known] != record[known]).sum()) > 0, "bfloat16 routes otherwise somewhere"
    assert torch.equal(ids[~known].reshape(-1, 2, 2)[:, 0], own[~known].reshape(-1, 2, 2)[:, 0]), (
        "the first layer sees equal inputs"
    )
    assert torch.equal(again, own)


def with_experts(drawn: samples.Rollout, records: list[Any]) -> samples.Rollout:
    pairs = zip(drawn.completions, records, strict=True)
    return samples.Rollout([dataclasses.replace(c, routed_experts=r) for c, r in pairs])


def test_any_record_is_followed_in_its_own_layer(
    routed: tuple[Any, Any], rng: np.random.Generator
) -> None:
    """Ids drawn at random replace the trainer's routing completely, and the logprobs change."""
    this, drawn = routed
    wild = [
        np.stack([rng.permuted(np.arange(16))[:2] for _ in range(r.size // 2)])
        .reshape(r.shape)
        .astype(np.int16)
        for r in lists(drawn).routed_experts
    ]
    drawn = with_experts(drawn, wild)
    batch = samples.make_batch(drawn.completions)
    record = batch.routed_BTLK.flatten(0, 1).long()
    with torch.no_grad(), replay(this.model, batch.routed_BTLK):
        ids, _ = used(this.model, lambda: this.logprobs(batch))
    assert torch.equal(ids[record >= 0], record[record >= 0])
    replayed = this.logprobs_of(drawn)
    assert not np.array_equal(replayed, this.logprobs_of(with_experts(drawn, [None] * len(wild))))
    grouped = np.split(replayed, np.cumsum([len(ids) for ids in lists(drawn).token_ids])[:-1])
    for i, alone in enumerate(grouped):
        one = dataclasses.replace(drawn, completions=drawn.completions[i : i + 1])
        assert np.allclose(this.logprobs_of(one), alone, atol=1e-5), (
            "padding and neighbours do not matter"
        )


@pytest.mark.parametrize(
    "family, norm",
    [
        *(("qwen3_moe", norm) for norm in (True, False)),
        *(("glm4_moe", norm) for norm in (True, False)),
        ("qwen2_moe", False),
        ("olmoe", True),
        ("mixtral", True),
        ("gpt_oss", True),
    ],
)
def test_gates_and_their_gradient_by_hand(
    family: str, norm: bool, rng: np.random.Generator
) -> None:
    """One router, with recorded ids, none, and both in a row: gates against the docstring's
    formula, the gradient of a weighted sum of gates against central differences of it. Bounds: 5
    roundings of float32, and 1e-5."""
    from transformers import AutoConfig, AutoModelForCausalLM

    is_glm = family == "glm4_moe"
    own = (
        {"n_routed_experts": 8, "first_k_dense_replace": 0, "routed_scaling_factor": 1.5}
        if is_glm
        else {"num_experts": 8}
    )
    hf_config = AutoConfig.for_model(
        family, vocab_size=9, hidden_size=6, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, intermediate_size=4,
        moe_intermediate_size=4, num_experts_per_tok=3, norm_topk_prob=norm, pad_token_id=None,
        **own,
    )  # fmt: skip
    (router,) = routers(AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32))
    if is_glm:
        router.e_score_correction_bias.data = torch.tensor(
            rng.standard_normal(8), dtype=torch.float32
        )
    bias = router.bias.tolist() if family == "gpt_oss" else [0.0] * 8
    x, weight, v = (
        rng.standard_normal((4, 6)),
        rng.standard_normal((8, 6)),
        rng.standard_normal((4, 3)),
    )
    router.weight.data = torch.tensor(weight, dtype=torch.float32)
    record = np.int16([[3, 0, 7], [-1, -1, -1], [6, 5, 4], [1, 2, 0]])
    inputs = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    chosen = router(inputs)[2].numpy()
    ids = np.where(record >= 0, record, chosen)

    def gates(w: Any) -> Any:
        out = np.zeros((4, 3))
        for row in range(4):
            logits = [sum(x[row, i] * w[e, i] for i in range(6)) + bias[e] for e in range(8)]
            p = [
                1 / (1 + math.exp(-z)) if is_glm else math.exp(z) / sum(map(math.exp, logits))
                for z in logits
            ]
            kept = [p[e] for e in ids[row]]
            out[row] = [g / sum(kept) for g in kept] if norm else kept
        return out * (1.5 if is_glm else 1)

    with replay(torch.nn.ModuleList([router]), torch.tensor(record)[None, :, None]):
        logits, scores, indices = router(inputs)
    assert indices.tolist() == ids.tolist()
    assert torch.equal(logits, router(inputs)[0])
    assert np.allclose(scores.detach(), gates(weight), rtol=5 * 2**-20)
    (scores * torch.tensor(v)).sum().backward()
    assert inputs.grad is not None
    assert router.weight.grad is not None
    for e in range(8):
        for i in range(6):
            up, down = weight.copy(), weight.copy()
            up[e, i] += 1e-6
            down[e, i] -= 1e-6
            slope = ((gates(up) - gates(down)) * v).sum() / 2e-6
            assert float(router.weight.grad[e, i]) == pytest.approx(slope, abs=1e-5)


def test_the_gradient_of_a_replayed_update_reaches_every_router(routed: tuple[Any, Any]) -> None:
    this, drawn = routed
    batch = samples.make_batch(drawn.completions)
    with replay(this.model, batch.routed_BTLK):
        this.logprobs(batch)[0].sum().backward()
    gradients = [router.weight.grad for router in routers(this.model)]
    this.model.zero_grad(set_to_none=True)
    assert len(gradients) == 2
    assert all(bool((g.abs().sum(1) > 0).all()) for g in gradients), (
        "softmax gives each expert's row a gradient"
    )


def test_an_interrupted_forward_leaves_no_replay(routed: tuple[Any, Any]) -> None:
    this, drawn = routed
    batch = samples.make_batch(drawn.completions[:2])
    with pytest.raises(KeyboardInterrupt), replay(this.model, batch.routed_BTLK):
        raise KeyboardInterrupt
    assert not any(router._forward_hooks for router in routers(this.model))


def test_a_model_that_runs_without_its_routers_is_refused(
    routed: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that computes a whole layer bypasses the router: a record that is not used is an
    error."""
    this, drawn = routed
    monkeypatch.setattr(this.model.model.layers[2].mlp, "forward", lambda hidden: hidden)
    with pytest.raises(
        rm.ConfigError,
        match=r"routing_replay: expected false where the trainer runs 1 of the 2 routers of its "
        r"model, got true",
    ):
        this.logprobs_of(drawn)


def test_a_generator_without_a_record_is_refused(routed: tuple[Any, Any]) -> None:
    _, drawn = routed

    class Foreign:
        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> Any:
            one = SimpleNamespace(
                token_ids=np.int32([1]),
                sampling_logprobs=np.float32([-1]),
                versions=np.int64([0]),
                finish_reason="length",
                routed_experts=None,
                kept_tokens=None,
            )
            return [SimpleNamespace(outputs=[one]) for _ in prompts]

    options = {
        "sampling": rm.SamplingParams(max_tokens=1),
        "run_seed": 0,
        "step": 0,
        "purpose": "rollout",
        "versions": range(1),
    }
    tokenizer = SimpleNamespace(encode=list, decode=lambda ids, skip_special_tokens: "")
    message = (
        r"^\[correction\] routing_replay: expected false where Foreign records no routed "
        r"experts, got true"
    )
    with pytest.raises(rm.ConfigError, match=message):
        rollout.generate(Foreign(), tokenizer, lists(drawn).prompt[:1], routing=True, **options)  # type: ignore[arg-type]
    assert (
        rollout.generate(Foreign(), tokenizer, lists(drawn).prompt[:1], **options)
        .completions[0]
        .routed_experts
        is None
    )  # type: ignore[arg-type]
