"""The configuration of a run: one frozen dataclass per TOML table.

This file is the manual. Each table is a dataclass and each key a field. Unknown keys, values of the
wrong type and values out of range raise an error that names the key:
`[train] lr: expected a number, got "x"`. `--set train.lr=1e-3` replaces a key before the check.

Paths are relative to the TOML file. `[model]` takes the keys of a transformers config, for a random
model, or `path`, a checkpoint folder. Only the trainer reads that folder, never the generator.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollmesh.errors import ConfigError
from rollmesh.options import LIMITS, ROWS
from rollmesh.run.config_rules import check_together, uses_tensor_cores
from rollmesh.run.tables import NO_KEY, number, override, read_table
from rollmesh.runtime.arguments import MAX_THREADS
from rollmesh.runtime.messages import plain


def same(name: str) -> Any:
    """A key with the default and the bounds of Generator's argument of this name."""
    bounds = dict(zip(("at_least", "at_most"), LIMITS.get(name, ()), strict=False))
    return number(ROWS[name].default, **bounds)


def _keys(hint: Any, names: str, **limits: float) -> list[tuple[str, Any, Any]]:
    """Returns optional fields of a type and a range. names: separated by blanks."""
    return [(name, hint | None, number(None, **limits)) for name in names.split()]


# Keys of a transformers config. Which of them a model has depends on its architecture
# (model/families.py).
_ModelKeys = dataclasses.make_dataclass(
    "_ModelKeys",
    [
        *_keys(
            int,
            "vocab_size "  # default: the tokenizer's
            "hidden_size intermediate_size num_hidden_layers head_dim num_attention_heads "
            "num_key_value_heads max_position_embeddings sliding_window no_rope_layer_interval "
            "moe_intermediate_size num_experts num_local_experts n_routed_experts n_group "
            "num_experts_per_tok decoder_sparse_step topk_group shared_expert_intermediate_size "
            "rotary_dim query_pre_attn_scalar sliding_window_pattern global_attn_every_n_layers "
            "moe_num_experts moe_k moe_topk moe_layer_interval q_lora_rank kv_lora_rank "
            "qk_nope_head_dim qk_rope_head_dim v_head_dim full_attention_interval "
            "linear_num_key_heads linear_num_value_heads linear_key_head_dim "
            "linear_value_head_dim linear_conv_kernel_dim",
            at_least=1,
        ),
        *_keys(
            int,
            "max_window_layers n_shared_experts num_shared_experts first_k_dense_replace "
            "num_dense_layers moe_num_shared_experts moe_layer_start_index moe_layer_end_index",
            at_least=0,
        ),
        *_keys(
            float,
            "initializer_range rms_norm_eps routed_scaling_factor router_scaling_factor "
            "moe_norm_min swiglu_alpha swiglu_limit attn_logit_softcapping "
            "final_logit_softcapping embedding_multiplier residual_multiplier "
            "attention_multiplier logits_scaling route_scale",
            above=0,
        ),
        *_keys(
            bool,
            "tie_word_embeddings attention_bias attention_out_bias qkv_bias use_qk_norm "
            "use_sliding_window norm_topk_prob mup_enabled rope_interleave",
        ),
        *_keys(str, "hidden_act hidden_activation"),
        *_keys(tuple[str, ...], "layer_types mlp_layer_types"),
        *_keys(tuple[int, ...], "mlp_only_layers"),
        *_keys(tuple[int, ...], "no_rope_layers", at_least=0, at_most=1),
        *_keys(dict[str, Any], "rope_parameters"),
    ],
    frozen=True,
)


@dataclass(frozen=True)
class ModelTable(_ModelKeys):  # type: ignore[misc,valid-type]
    """A random model of this shape, or the checkpoint folder `path`. Keys that are not given have
    transformers' default."""

    architecture: str | None = None  # a key of FAMILIES (model/families.py)
    path: str | None = None  # folder with config.json and safetensors; only `ignore` beside it
    ignore: tuple[str, ...] = ()  # keys and tensors of the folder to ignore (docs/models.md)

    def hf_fields(self) -> dict[str, Any]:
        """Returns the given keys of the transformers config."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
            if value is not None and name not in ("architecture", "path", "ignore")
        }


@dataclass(frozen=True)
class TokenizerTable:
    path: str | None = None  # folder or tokenizer.json; default: the model's folder


@dataclass(frozen=True)
class DataTable:
    """Rows with `prompt` (text) or `messages` (chat), and columns for the reward, such as `answer`.
    A file is JSONL with one object per line. With the library `datasets` an entry may also be a
    folder of save_to_disk, a .parquet or .arrow file, or hf://datasets/ORG/NAME[@REVISION]."""

    train: tuple[str, ...] = ()  # files; with stage_steps they are stages, easiest first
    # Files; default: heldout_share of the training prompts, chosen by a hash of their text.
    heldout: tuple[str, ...] = ()
    heldout_share: float = number(0.05, above=0, at_most=0.5)
    dataset_config: str | None = None  # for a dataset of the Hub with several configs
    dataset_train_split: str = "train"  # for datasets in `train`
    dataset_test_split: str = "test"  # for datasets in `heldout`
    # Steps at which train[1], train[2], … join; empty: all files from the start.
    stage_steps: tuple[int, ...] = ()
    chat: bool = False  # wrap a text prompt as a user message in the tokenizer's chat template
    # For prompts that leave no room for max_tokens; truncate keeps their last tokens.
    overlong: Literal["raise", "drop", "truncate"] = "raise"


@dataclass(frozen=True)
class RolloutTable:
    prompts: int = number(32, at_least=1, at_most=2**20)  # per step
    samples: int = number(16, at_least=2, at_most=2**20)  # per prompt: the group
    max_tokens: int = number(128, at_least=1)
    temperature: float = number(1.0, above=0)
    # Filters, as in SamplingParams. All logprobs are then of the distribution over the tokens that
    # the filters kept (docs/grpo.md). These are recorded, so top_p and min_p need top_k.
    top_k: int = number(0, at_least=0)  # 0: off
    top_p: float = number(1.0, above=0, at_most=1)
    min_p: float = number(0.0, at_least=0, at_most=1)
    log_completions: int = number(16, at_least=0)  # number per step in completions.jsonl
    num_completions_to_print: int = number(0, at_least=0)  # per displayed step
    environment: str | None = None  # module:function that replies to the policy; None: one turn
    max_assistant_turns: int = number(8, at_least=2)  # per completion, with an environment
    # Replace groups of equal rewards (DAPO's dynamic sampling, grpo/rollout.py).
    filter_groups: bool = False
    max_num_gen_batches: int = number(10, at_least=1)  # per step, with filter_groups
    # N > 0: generate while the trainer learns, at most N versions behind it; 0: take turns.
    async_level: int = number(0, at_least=0, at_most=64)


@dataclass(frozen=True)
class GeneratorTable:
    """Arguments of rm.Generator (rollmesh/options.py) and rm.Mesh, and the engine that runs them.
    Both engines give the same numbers."""

    # vllm: vLLM's AsyncLLM schedules, rollmesh computes (docs/vllm.md).
    engine: Literal["rollmesh", "vllm"] = "rollmesh"
    dtype: Literal["bfloat16", "float32"] = same("dtype")
    device: str = same("device")
    threads: int = number(0, at_least=0, at_most=MAX_THREADS)  # 0: one per usable core
    max_model_len: int = number(4096, at_least=2)
    max_num_seqs: int = same("max_num_seqs")
    state_interval: int = same("state_interval")
    kv_cache_gib: float = number(1.0, above=0)
    tp: int = number(1, at_least=1)
    dp: int = number(1, at_least=1)
    ep: int = number(1, at_least=1)
    ep_backend: str = same("ep_backend")
    sequence_parallel: bool = same("sequence_parallel")
    exchange: Literal["host", "nccl"] = "host"  # between GPUs: through host memory, or NCCL
    enforce_eager: bool = same("enforce_eager")
    isa: str | None = same("isa")
    comm: Literal["auto", "threads", "shm", "torch"] = "auto"  # auto: shm under torchrun
    comm_timeout: float = number(1800.0, above=0)  # seconds that a rank waits for the others


@dataclass(frozen=True)
class SyncTable:
    cast: bool = False  # convert the trainer's dtype to the generator's, as torch's .to does
    # > 0: after the first sync, raise an error if trainer and generator differ by more than this.
    self_test: float = number(0.0, at_least=0)
    # Whether a sync waits for running rollouts (run/async_rollouts.py).
    inflight: Literal["wait", "keep", "restart"] = "wait"


@dataclass(frozen=True)
class RewardTable:
    functions: tuple[str, ...] = ("char_match",)  # built-in, or module:function like TRL's
    weights: tuple[float, ...] = ()  # one per function; empty: 1
    shuffle: bool = False  # control experiment: permute the rewards of a step


@dataclass(frozen=True)
class LossTable:
    clip_low: float = number(0.2, above=0, at_most=1)
    clip_high: float = number(0.2, above=0, at_most=1e18)
    entropy: float = number(0.0, at_least=0)  # bonus per token
    kl: float = number(0.0, at_least=0)  # penalty per token (k3) to the initial model
    aggregation: Literal["token-mean", "sequence-mean", "constant"] = "token-mean"
    baseline: Literal["mean", "leave-one-out"] = "mean"
    scale: Literal["group", "batch", "none"] = "group"


@dataclass(frozen=True)
class CorrectionTable:
    """Corrects differences of trainer and generator (grpo/loss.py, run/routing_replay.py)."""

    # token_mask: IcePop.
    importance_sampling: Literal["none", "token_truncate", "sequence_truncate", "token_mask"] = (
        "none"
    )
    cap: float = number(2.0, at_least=1)  # largest weight; larger ones are truncated
    mask_low: float = number(0.5, at_least=0, at_most=1)  # smaller ratios are masked
    mask_high: float = number(5.0, at_least=1)  # larger ratios are masked
    routing_replay: bool = False  # the trainer uses the experts that the generator recorded


@dataclass(frozen=True)
class TrainTable:
    # The forward pass (docs/trainer.md). None: kernels_of decides.
    kernels: Literal["rollmesh", "torch"] | None = None
    # Whether to stop if logprobs that must be bit-identical to the generator's differ.
    mismatch: Literal["raise", "record"] = "raise"
    steps: int = number(100, at_least=1)
    updates: int = number(1, at_least=1, at_most=2**20)  # optimizer steps per step
    minibatches: bool = False  # updates split the batch by prompts; false: each uses all of it
    micro_batch: int = number(0, at_least=0)  # sequences per forward pass; 0: all
    # Store only the input of each layer, and compute the layer again in the backward pass.
    gradient_checkpointing: bool = False
    lr: float = number(1e-6, above=0, at_most=1e18)
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # to 0 at `steps`
    warmup_steps: int = number(0, at_least=0)
    betas: tuple[float, ...] = (0.9, 0.999)
    weight_decay: float = number(0.0, at_least=0)
    grad_clip: float = number(1.0, above=0)  # norm of all gradients together
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"  # torch's: cpu, cuda or cuda:N
    threads: int = number(0, at_least=0, at_most=1024)  # 0: one per core this process may use


@dataclass(frozen=True)
class EvalTable:
    every: int = number(10, at_least=1)  # steps; the first and the last are always evaluated
    prompts: int = number(256, at_least=1)  # number of held-out prompts, the first ones
    temperature: float = number(0.0, at_least=0)


@dataclass(frozen=True)
class CheckpointTable:
    every: int = number(50, at_least=0)  # steps; 0: only at the end or if a run ends early
    keep: int = number(2, at_least=1)


@dataclass(frozen=True)
class Config:
    model: ModelTable = ModelTable()
    tokenizer: TokenizerTable = TokenizerTable()
    data: DataTable = DataTable()
    rollout: RolloutTable = RolloutTable()
    generator: GeneratorTable = GeneratorTable()
    sync: SyncTable = SyncTable()
    reward: RewardTable = RewardTable()
    loss: LossTable = LossTable()
    correction: CorrectionTable = CorrectionTable()
    train: TrainTable = TrainTable()
    eval: EvalTable = EvalTable()
    checkpoint: CheckpointTable = CheckpointTable()
    seed: int = number(0, at_least=0, at_most=2**63 - 1)
    folder: str = dataclasses.field(default=".", metadata={NO_KEY: True})  # of the TOML file

    def path(self, name: str) -> Path:
        """Returns `name` relative to the TOML file."""
        return Path(self.folder) / Path(name).expanduser()

    def as_dict(self) -> dict[str, Any]:
        table = dataclasses.asdict(self)
        del table["folder"]
        return table


def load(file: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a TOML file, applies `key=value` overrides and checks all keys. Raises ConfigError."""
    file = Path(file)
    try:
        # read_text would turn a lone CR into a line end.
        table = tomllib.loads(file.read_bytes().decode())
    except OSError as e:
        raise ConfigError(f"{plain(file)}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:  # not TOML, not UTF-8, too many digits or levels
        raise ConfigError(f"{plain(file)}: {plain(e)}") from e
    for text in overrides:
        override(table, text)
    return from_dict(table, folder=str(file.parent.absolute()))


def from_dict(table: Mapping[str, Any], folder: str = ".") -> Config:
    config: Config = dataclasses.replace(read_table(Config, table), folder=folder)
    check_together(config)
    return config


def kernels_of(c: Config) -> str:
    """Returns [train] kernels. The default is "rollmesh" for a trainer on the CPU, where it is
    bit-identical to the generator, else "torch"."""
    if c.train.kernels is not None:
        return c.train.kernels
    differs = c.train.device != "cpu" or c.correction.routing_replay
    return "torch" if differs or uses_tensor_cores(c.generator) else "rollmesh"
