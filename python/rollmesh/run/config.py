"""The run's configuration: one frozen dataclass a TOML table, read strictly.

A run is described by one TOML file. Every table below is a dataclass and every key a field, so this
file is also the manual: a key that is not here is an error, as is a value of the wrong type or out
of range, and the message gives the path: `[train] lr: expected a number, got "x"`.
`--set train.lr=1e-3` on the command line replaces a key before the check.

Paths in the file are relative to the file. `[model]` takes the keys of a family's transformers
config (a random model) or `path`, a checkpoint folder that the *trainer* reads; the generator never
sees it.
"""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import rollmesh as rm
from rollmesh import _core
from rollmesh.model.families import FAMILIES
from rollmesh.run.tables import number, override, read_table, read_value, show
from rollmesh.runtime.devices import CUDA_FAMILIES, device_name
from rollmesh.runtime.messages import plain


@dataclass(frozen=True)
class ModelTable:
    """A random model of this shape, or the checkpoint folder `path`. Keys left out take
    transformers' default."""

    architecture: str | None = (
        None  # of FAMILIES (model/families.py); it takes its family's keys alone
    )
    path: str | None = None  # folder with config.json and safetensors; excludes all keys but ignore
    ignore: tuple[str, ...] = ()  # keys and tensors of it that do not matter (docs/models.md)
    vocab_size: int | None = number(None, at_least=1)  # default: the tokenizer's
    hidden_size: int | None = number(None, at_least=1)
    intermediate_size: int | None = number(None, at_least=1)
    num_hidden_layers: int | None = number(None, at_least=1)
    num_attention_heads: int | None = number(None, at_least=1)
    num_key_value_heads: int | None = number(None, at_least=1)
    head_dim: int | None = number(None, at_least=1)
    hidden_act: str | None = None
    max_position_embeddings: int | None = number(None, at_least=1)
    initializer_range: float | None = number(None, above=0)
    rms_norm_eps: float | None = number(None, above=0)
    tie_word_embeddings: bool | None = None
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool | None = None
    use_sliding_window: bool | None = None
    sliding_window: int | None = number(None, at_least=1)
    max_window_layers: int | None = number(None, at_least=0)
    layer_types: tuple[str, ...] | None = None
    no_rope_layers: tuple[int, ...] | None = number(None, at_least=0, at_most=1)
    no_rope_layer_interval: int | None = number(None, at_least=1)
    qkv_bias: bool | None = None
    use_qk_norm: bool | None = None
    # with experts
    moe_intermediate_size: int | None = number(None, at_least=1)
    num_experts: int | None = number(None, at_least=1)
    num_local_experts: int | None = number(None, at_least=1)
    n_routed_experts: int | None = number(None, at_least=1)
    num_experts_per_tok: int | None = number(None, at_least=1)
    norm_topk_prob: bool | None = None
    decoder_sparse_step: int | None = number(None, at_least=1)
    mlp_only_layers: tuple[int, ...] | None = None
    first_k_dense_replace: int | None = number(None, at_least=0)
    n_group: int | None = number(None, at_least=1)
    topk_group: int | None = number(None, at_least=1)
    routed_scaling_factor: float | None = number(None, above=0)
    n_shared_experts: int | None = number(None, at_least=0)
    shared_expert_intermediate_size: int | None = number(None, at_least=1)

    def hf_fields(self) -> dict[str, Any]:
        """The keys that were given, as keyword arguments of the transformers config class."""
        of_table = ("architecture", "path", "ignore")
        names = [f.name for f in dataclasses.fields(self) if f.name not in of_table]
        given = {name: getattr(self, name) for name in names}
        return {
            k: list(v) if isinstance(v, tuple) else v for k, v in given.items() if v is not None
        }


@dataclass(frozen=True)
class TokenizerTable:
    path: str | None = None  # folder or tokenizer.json; default: the model's folder


@dataclass(frozen=True)
class DataTable:
    """Rows with `prompt` (text) or `messages` (chat), and any columns the reward wants, such as
    `answer`. JSONL, one object a line; by the library `datasets` a folder of its save_to_disk, a
    .parquet or .arrow file, or hf://datasets/ORG/NAME[@REVISION] of the Hub."""

    train: tuple[str, ...] = ()  # files; with stage_steps they are stages, easiest first
    heldout: tuple[
        str, ...
    ] = ()  # files; none: heldout_share of the training prompts, by a hash of their text
    heldout_share: float = number(0.05, above=0, at_most=0.5)
    dataset_config: str | None = None  # of a dataset of the Hub that has several
    dataset_train_split: str = "train"  # of datasets in `train` that have several
    dataset_test_split: str = "test"  # of those in `heldout`
    stage_steps: tuple[
        int, ...
    ] = ()  # step at which train[i+1] joins; empty: all files from the start
    chat: bool = False  # wrap a text prompt as a user message in the tokenizer's chat template
    overlong: Literal["raise", "drop", "truncate"] = (
        "raise"  # prompts without room for max_tokens; truncate: their last tokens stay
    )


@dataclass(frozen=True)
class RolloutTable:
    prompts: int = number(32, at_least=1, at_most=2**20)  # a step
    samples: int = number(16, at_least=2, at_most=2**20)  # of each prompt: the group
    max_tokens: int = number(128, at_least=1)
    temperature: float = number(1.0, above=0)
    # Filters, as SamplingParams has them; all logprobs are then of the distribution over the tokens
    # that they kept (docs/grpo.md).
    top_k: int = number(
        0, at_least=0
    )  # 0: off; above 0 with either of the next two, since the tokens kept are recorded
    top_p: float = number(1.0, above=0, at_most=1)
    min_p: float = number(0.0, at_least=0, at_most=1)
    log_completions: int = number(
        16, at_least=0
    )  # of each step, in completions.jsonl: the first so many
    num_completions_to_print: int = number(
        0, at_least=0
    )  # of each displayed step: the first so many
    environment: str | None = (
        # module:function that replies to what the policy wrote (multi_turn.py); none: one turn
        None
    )
    max_assistant_turns: int = number(
        8, at_least=2
    )  # of the policy in a completion, with an environment
    # leave out groups of equal rewards and draw others (DAPO's dynamic sampling,
    # dynamic_sampling.py)
    filter_groups: bool = False
    max_num_gen_batches: int = number(
        10, at_least=1
    )  # of a step with filter_groups: batches that are generated at most
    async_level: int = number(
        0, at_least=0, at_most=64
    )  # N: generated while the trainer learns, at most N versions behind it; 0: by turns


@dataclass(frozen=True)
class GeneratorTable:
    """Arguments of rm.Generator and rm.Mesh, and which engine runs them: the numbers are the
    same."""

    engine: Literal["rollmesh", "vllm"] = (
        "rollmesh"  # vllm: its AsyncLLM schedules, rollmesh computes (docs/vllm.md)
    )
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: str = "cpu"
    threads: int = number(0, at_least=0, at_most=256)  # 0: one per core this process may use
    max_model_len: int = number(4096, at_least=2)
    max_num_seqs: int = number(256, at_least=1)
    kv_cache_gib: float = number(1.0, above=0)
    tp: int = number(1, at_least=1)
    dp: int = number(1, at_least=1)
    ep: int = number(1, at_least=1)
    ep_backend: str = "alltoall"
    sequence_parallel: bool = False
    exchange: Literal["host", "nccl"] = (
        "host"  # between GPUs: by way of the host, or by NCCL beside the comm
    )
    enforce_eager: bool = False  # on a GPU: no CUDA graphs
    isa: str | None = (
        # of the CPU: ref, avx2, …; of a GPU the family of kernels: cuda_fma, cuda_mma. Default: the
        # first that is here
        None
    )
    comm: Literal["auto", "threads", "shm", "torch"] = (
        "auto"  # auto: shm where torchrun started the ranks, else threads
    )
    comm_timeout: float = number(1800.0, above=0)  # seconds that a rank waits for the others


@dataclass(frozen=True)
class SyncTable:
    cast: bool = False  # convert the trainer's dtype to the generator's, as torch's .to does
    self_test: float = number(
        0.0, at_least=0
    )  # > 0: after the run's first sync, raise if trainer and generator differ by more
    inflight: Literal["wait", "keep", "restart"] = (
        "wait"  # what a sync does with the rollouts that run, see async_rollouts.py
    )


@dataclass(frozen=True)
class RewardTable:
    functions: tuple[str, ...] = (
        "char_match",
    )  # built-in names, or module:function with TRL's signature
    weights: tuple[float, ...] = ()  # of each function; empty: 1
    shuffle: bool = False  # control experiment: permute a step's rewards over its completions


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
    """What is done where trainer and generator differ; formulas and papers: loss.py,
    routing_replay.py.

    A table of its own, because one cause has remedies in two places: in the loss, and in the
    forward of the trainer's experts.
    """

    importance_sampling: Literal["none", "token_truncate", "sequence_truncate", "token_mask"] = (
        "none"  # the last is IcePop's
    )
    cap: float = number(2.0, at_least=1)  # of a weight, where they are truncated
    mask_low: float = number(
        0.5, at_least=0, at_most=1
    )  # tokens with a ratio outside these two are masked
    mask_high: float = number(5.0, at_least=1)
    routing_replay: bool = False  # the trainer uses the experts that the generator recorded


@dataclass(frozen=True)
class TrainTable:
    kernels: Literal["rollmesh", "torch"] | None = (
        None  # of the forward pass (docs/trainer.md); None: kernels_of decides
    )
    mismatch: Literal["raise", "record"] = (
        "raise"  # where trainer and generator must agree bit for bit and do not
    )
    steps: int = number(100, at_least=1)
    updates: int = number(1, at_least=1, at_most=2**20)  # optimizer steps a step
    minibatches: bool = (
        False  # updates split the batch by prompts; false: each is a pass over all of it
    )
    micro_batch: int = number(
        0, at_least=0
    )  # sequences a forward; 0: all. Gradients add up, the update is the same
    # keep each layer's input alone, and compute the layer again in the backward pass: the same bits
    gradient_checkpointing: bool = False
    lr: float = number(1e-6, above=0, at_most=1e18)
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # to 0 at `steps`
    warmup_steps: int = number(0, at_least=0)
    betas: tuple[float, ...] = (0.9, 0.999)
    weight_decay: float = number(0.0, at_least=0)
    grad_clip: float = number(1.0, above=0)  # norm of all gradients together
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"  # torch's: cpu, cuda or cuda:N
    threads: int = number(
        0, at_least=0, at_most=1024
    )  # torch's; 0: one per core this process may use


@dataclass(frozen=True)
class EvalTable:
    every: int = number(10, at_least=1)  # steps; the first and the last are always evaluated
    prompts: int = number(256, at_least=1)  # the first so many of the held-out set
    temperature: float = number(0.0, at_least=0)


@dataclass(frozen=True)
class CheckpointTable:
    every: int = number(50, at_least=0)  # steps; 0: only at the end, and where a run ends early
    keep: int = number(2, at_least=1)


@dataclass(frozen=True)
class Config:
    model: ModelTable
    tokenizer: TokenizerTable
    data: DataTable
    rollout: RolloutTable
    generator: GeneratorTable
    sync: SyncTable
    reward: RewardTable
    loss: LossTable
    correction: CorrectionTable
    train: TrainTable
    eval: EvalTable
    checkpoint: CheckpointTable
    seed: int = number(0, at_least=0, at_most=2**63 - 1)
    folder: str = "."  # of the TOML file; not a key

    def path(self, name: str) -> Path:
        """`name` relative to the TOML file."""
        return Path(self.folder) / Path(name).expanduser()

    def as_dict(self) -> dict[str, Any]:
        table = dataclasses.asdict(self)
        del table["folder"]
        return table


def load(file: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a TOML file, applies `key=value` overrides, checks everything. Raises
    rm.ConfigError."""
    file = Path(file)
    try:
        table = tomllib.loads(
            file.read_bytes().decode()
        )  # not read_text, which makes a line's end of a lone CR
    except OSError as e:
        raise rm.ConfigError(f"{plain(file)}: {e.strerror}") from e
    except (
        ValueError,
        RecursionError,
    ) as e:  # no TOML, no UTF-8, a number of too many digits, nested too deeply
        raise rm.ConfigError(f"{plain(file)}: {plain(e)}") from e
    for text in overrides:
        override(table, text)
    return from_dict(table, folder=str(file.parent.absolute()))


def from_dict(table: Mapping[str, Any], folder: str = ".") -> Config:
    sections = {f.name: f for f in dataclasses.fields(Config) if f.name != "folder"}
    unknown = sorted(set(table) - set(sections))
    if unknown:
        what = "table" if isinstance(table[unknown[0]], dict) else "key"
        raise rm.ConfigError(
            f"{plain(unknown[0])}: no such {what}; there are {', '.join(sections)}"
        )
    hints = typing.get_type_hints(Config)
    values: dict[str, Any] = {}
    for name, f in sections.items():
        if dataclasses.is_dataclass(hints[name]):
            values[name] = read_table(hints[name], table.get(name, {}), name)
        else:
            values[name] = read_value(f, hints[name], table.get(name, f.default), name)
    config = Config(**values, folder=folder)
    _check_together(config)
    return config


def _check_together(c: Config) -> None:
    """Rules that join several keys."""
    _check_model(c.model)
    d, stages = c.data, c.data.stage_steps
    if stages and len(stages) != len(d.train) - 1:
        raise rm.ConfigError(
            f"[data] stage_steps: expected {len(d.train) - 1} steps for {len(d.train)} files in "
            f"train, got {len(stages)}"
        )
    if any(a >= b for a, b in zip((0, *stages), stages, strict=False)):
        raise rm.ConfigError(
            f"[data] stage_steps: expected ascending steps above 0, got {list(stages)}"
        )
    r = c.reward
    if not r.functions:
        raise rm.ConfigError("[reward] functions: expected at least one")
    if r.weights and len(r.weights) != len(r.functions):
        raise rm.ConfigError(
            f"[reward] weights: expected {len(r.functions)}, one a function, got {len(r.weights)}"
        )
    if len(c.train.betas) != 2 or not all(0 <= b < 1 for b in c.train.betas):
        raise rm.ConfigError(
            f"[train] betas: expected two numbers in [0, 1), got {list(c.train.betas)}"
        )
    if c.train.minibatches and c.rollout.prompts % c.train.updates:
        raise rm.ConfigError(
            f"[train] updates: {c.train.updates} minibatches do not divide [rollout] "
            f"prompts={c.rollout.prompts}"
        )
    if c.train.dtype != c.generator.dtype and not c.sync.cast:
        raise rm.ConfigError(
            f"[sync] cast: expected true where [train] dtype={c.train.dtype} and [generator] "
            f"dtype={c.generator.dtype} differ, got false"
        )
    if c.rollout.max_tokens >= c.generator.max_model_len:
        raise rm.ConfigError(
            "[rollout] max_tokens: expected below [generator] "
            f"max_model_len={c.generator.max_model_len}, got {c.rollout.max_tokens}"
        )
    _check_filters(c)
    _check_correction(c)
    _check_kernels(c)
    _check_async(c)
    _check_filter_groups(c)
    _check_environment(c)
    for table, device in (("generator", c.generator.device), ("train", c.train.device)):
        _check_name(table, device)
    if c.generator.engine == "vllm":
        _check_vllm(c.generator)
    else:
        _check_device(c.generator)


def _check_model(m: ModelTable) -> None:
    if (m.path is None) == (m.architecture is None):
        raise rm.ConfigError(
            "[model]: give either path (a checkpoint folder) or architecture "
            f"({', '.join(FAMILIES)}) and its sizes"
        )
    if m.architecture is None:
        if fields := m.hf_fields():
            raise rm.ConfigError(
                f"[model] {next(iter(fields))}: not allowed beside path; the folder's config.json "
                "has it"
            )
        return
    if m.ignore:
        seen = show(list(m.ignore))
        raise rm.ConfigError(f"[model] ignore: expected path beside it, got {seen} alone")
    if m.architecture not in FAMILIES:
        raise rm.ConfigError(
            f"[model] architecture: expected one of {', '.join(map(show, FAMILIES))}, got "
            f"{show(m.architecture)}"
        )
    of_some = {key for family in FAMILIES.values() for key in family.keys.split()}
    for key in m.hf_fields():
        if key in of_some and key not in FAMILIES[m.architecture].keys.split():
            raise rm.ConfigError(f'[model] {key}: not a key of architecture "{m.architecture}"')


def _check_filters(c: Config) -> None:
    r = c.rollout
    if not r.top_k and (r.top_p < 1 or r.min_p > 0):
        seen = f"top_p = {r.top_p:g}, min_p = {r.min_p:g}"
        raise rm.ConfigError(
            f"[rollout] top_k: expected above 0 with {seen} (at most so many tokens are kept, and "
            "recorded), got 0"
        )
    if r.top_k and c.generator.engine == "vllm":
        raise rm.ConfigError(
            '[rollout] top_k: expected 0 where [generator] engine is "vllm", which does not '
            f"return the tokens kept, got {r.top_k}"
        )


def kernels_of(c: Config) -> str:
    """[train] kernels, or what stands for none: "rollmesh" for a trainer on the CPU, where it has
    the generator's bits."""
    if c.train.kernels is not None:
        return c.train.kernels
    has_own_bits = _has_own_bits(c.generator) or c.correction.routing_replay
    return "rollmesh" if c.train.device == "cpu" and not has_own_bits else "torch"


def _has_own_bits(g: GeneratorTable) -> bool:
    """Tensor cores sum in an order of their own."""
    return g.isa == "cuda_mma" and g.dtype == "bfloat16"


def _check_kernels(c: Config) -> None:
    if c.train.kernels != "rollmesh":
        return
    if c.correction.routing_replay:
        raise rm.ConfigError(
            '[correction] routing_replay: expected false where [train] kernels is "rollmesh", '
            "whose routing is the generator's, got true"
        )
    if _has_own_bits(c.generator):
        raise rm.ConfigError(
            '[train] kernels: expected "torch" where [generator] isa is "cuda_mma", which has '
            'bits of its own, got "rollmesh"'
        )


def _check_correction(c: Config) -> None:
    """A key that the chosen correction does not read is a mistake, and so is a routing of a model
    without experts."""
    t = c.correction
    used = {
        "token_truncate": ("cap",),
        "sequence_truncate": ("cap",),
        "token_mask": ("mask_low", "mask_high"),
    }
    for key in ("cap", "mask_low", "mask_high"):
        value, default = getattr(t, key), getattr(CorrectionTable, key)
        modes = [mode for mode, keys in used.items() if key in keys]
        if value != default and t.importance_sampling not in modes:
            names = " or ".join(f'"{mode}"' for mode in modes)
            raise rm.ConfigError(
                f"[correction] {key}: expected importance_sampling = {names} beside it, got "
                f'"{t.importance_sampling}"'
            )
    architecture = c.model.architecture
    if t.routing_replay and architecture is not None and not FAMILIES[architecture].has_experts:
        raise rm.ConfigError(
            "[correction] routing_replay: expected false where [model] architecture is "
            f'"{architecture}", which routes nothing, got true'
        )


def _check_async(c: Config) -> None:
    level, inflight = c.rollout.async_level, c.sync.inflight
    if level == 0 and inflight != "wait":
        raise rm.ConfigError(
            '[sync] inflight: expected "wait" with [rollout] async_level = 0, where nothing runs '
            f'during a sync, got "{inflight}"'
        )
    if inflight != "wait" and c.generator.engine == "vllm":
        raise rm.ConfigError(
            f'[sync] inflight: expected "wait" where [generator] engine is "vllm", got "{inflight}"'
        )


def _check_filter_groups(c: Config) -> None:
    r = c.rollout
    if not r.filter_groups:
        if r.max_num_gen_batches != RolloutTable.max_num_gen_batches:
            raise rm.ConfigError(
                "[rollout] filter_groups: expected true with max_num_gen_batches = "
                f"{r.max_num_gen_batches}, got false"
            )
        return
    if r.async_level:
        why = "whose rollouts are drawn before others have their rewards"
        raise rm.ConfigError(
            f"[rollout] filter_groups: expected false with async_level = {r.async_level}, {why}, "
            "got true"
        )
    if c.reward.shuffle:
        raise rm.ConfigError(
            "[rollout] filter_groups: expected false with [reward] shuffle, which makes other "
            "groups of rewards, got true"
        )


def _check_environment(c: Config) -> None:
    r = c.rollout
    if r.environment is None and r.max_assistant_turns != RolloutTable.max_assistant_turns:
        raise rm.ConfigError(
            "[rollout] environment: expected one with max_assistant_turns = "
            f"{r.max_assistant_turns}, got none"
        )
    if r.environment is not None and r.async_level:
        seen = (
            f"{r.async_level}, whose rollouts are generated by another thread, got "
            f'"{plain(r.environment)}"'
        )
        raise rm.ConfigError(f"[rollout] environment: expected none with async_level = {seen}")


def _check_name(table: str, device: str) -> None:
    """Whether there is such a device is asked where the run is."""
    try:
        device_name(device)
    except rm.ConfigError:
        raise rm.ConfigError(
            f'[{table}] device: expected "cpu", "cuda" or "cuda:N", got "{plain(device)}"'
        ) from None


def _check_device(g: GeneratorTable) -> None:
    """What only GPUs have, and which kernels. vLLM's workers have a device of their own, and say so
    themselves; enforce_eager is vLLM's own option there."""
    if g.device == "cpu" and g.exchange != "host":
        raise rm.ConfigError(
            f'[generator] exchange: expected "host" where device is "cpu", got "{g.exchange}"'
        )
    if g.device == "cpu" and g.enforce_eager:
        raise rm.ConfigError(
            '[generator] enforce_eager: expected false where device is "cpu", which records no '
            "graphs, got true"
        )
    known = _core.available_isas() if g.device == "cpu" else CUDA_FAMILIES
    if g.isa is not None and g.isa not in known:
        names = ", ".join(f'"{isa}"' for isa in known)
        raise rm.ConfigError(
            f'[generator] isa: expected one of {names} where device is "{plain(g.device)}", got '
            f'"{plain(g.isa)}"'
        )
    if g.exchange != "host" and g.tp == g.ep == 1:
        raise rm.ConfigError(
            '[generator] exchange: expected "host" with tp=1 and ep=1, whose ranks exchange '
            f'nothing, got "{g.exchange}"'
        )


def _check_vllm(g: GeneratorTable) -> None:
    """What vLLM, which starts the ranks of its mesh itself, cannot be told."""
    if g.device != "cpu":
        told = "ROLLMESH_VLLM_DEVICE tells its workers"
        raise rm.ConfigError(
            f'[generator] device: expected "cpu" where engine is "vllm" ({told}), got "{g.device}"'
        )
    if g.comm not in ("auto", "threads"):
        raise rm.ConfigError(
            f'[generator] comm: expected "auto" or "threads" where engine is "vllm", got "{g.comm}"'
        )
    if g.ep not in (1, g.dp * g.tp):
        raise rm.ConfigError(
            f'[generator] ep: expected 1 or dp*tp={g.dp * g.tp} where engine is "vllm", got {g.ep}'
        )
