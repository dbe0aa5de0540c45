"""Rules that join several keys of a configuration. Each violation is a ConfigError that names the
first key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmesh import _core
from rollmesh.errors import ConfigError
from rollmesh.model.families import FAMILIES
from rollmesh.run.tables import show
from rollmesh.runtime.devices import CUDA_FAMILIES, device_name
from rollmesh.runtime.messages import plain

if TYPE_CHECKING:
    from rollmesh.run.config import Config, GeneratorTable, ModelTable

# Keys of [correction] that each value of importance_sampling reads.
USED = {
    "token_truncate": ("cap",),
    "sequence_truncate": ("cap",),
    "token_mask": ("mask_low", "mask_high"),
}


def check_together(c: Config) -> None:
    _check_model(c.model)
    stages, files, r = c.data.stage_steps, len(c.data.train), c.reward
    _require(
        not stages or len(stages) == files - 1,
        f"[data] stage_steps: expected {files - 1} steps for {files} files in train, got "
        f"{len(stages)}",
    )
    _require(
        all(a < b for a, b in zip((0, *stages), stages, strict=False)),
        f"[data] stage_steps: expected ascending steps above 0, got {list(stages)}",
    )
    _require(bool(r.functions), "[reward] functions: expected at least one, got none")
    _require(
        len(r.weights) in (0, len(r.functions)),
        f"[reward] weights: expected {len(r.functions)}, one a function, got {len(r.weights)}",
    )
    betas = c.train.betas
    _require(
        len(betas) == 2 and all(0 <= b < 1 for b in betas),
        f"[train] betas: expected two numbers in [0, 1), got {list(betas)}",
    )
    _require(
        not c.train.minibatches or c.rollout.prompts % c.train.updates == 0,
        f"[train] updates: {c.train.updates} minibatches do not divide [rollout] "
        f"prompts={c.rollout.prompts}",
    )
    _require(
        c.train.dtype == c.generator.dtype or c.sync.cast,
        f"[sync] cast: expected true where [train] dtype={c.train.dtype} and [generator] "
        f"dtype={c.generator.dtype} differ, got false",
    )
    _require(
        c.rollout.max_tokens < c.generator.max_model_len,
        f"[rollout] max_tokens: expected below [generator] "
        f"max_model_len={c.generator.max_model_len}, got {c.rollout.max_tokens}",
    )
    _check_rollout(c)
    _check_correction(c)
    for table, device in (("generator", c.generator.device), ("train", c.train.device)):
        try:
            device_name(device)
        except ConfigError:
            raise ConfigError(
                f'[{table}] device: expected "cpu", "cuda" or "cuda:N", got "{plain(device)}"'
            ) from None
    if c.generator.engine == "vllm":
        _check_vllm(c)
    else:
        _check_device(c)


def uses_tensor_cores(g: GeneratorTable) -> bool:
    """Tensor cores sum in another order than rollmesh's other kernels."""
    return g.isa == "cuda_mma" and g.dtype == "bfloat16"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _check_model(m: ModelTable) -> None:
    _require(
        (m.path is None) != (m.architecture is None),
        f"[model]: give either path (a checkpoint folder) or architecture ({', '.join(FAMILIES)}) "
        "and its sizes",
    )
    fields = m.hf_fields()
    if m.architecture is None:
        _require(
            not fields,
            f"[model] {next(iter(fields), '')}: not allowed beside path; the folder's config.json "
            "has it",
        )
        return
    _require(
        not m.ignore, f"[model] ignore: expected path beside it, got {show(list(m.ignore))} alone"
    )
    _require(
        m.architecture in FAMILIES,
        f"[model] architecture: expected one of {', '.join(map(show, FAMILIES))}, got "
        f"{show(m.architecture)}",
    )
    of_some = {key for family in FAMILIES.values() for key in family.keys.split()}
    own = FAMILIES[m.architecture].keys.split()
    for key in fields:
        _require(
            key not in of_some or key in own,
            f'[model] {key}: not a key of architecture "{m.architecture}"',
        )


def _check_rollout(c: Config) -> None:
    r, inflight = c.rollout, c.sync.inflight
    _require(
        bool(r.top_k) or (r.top_p == 1 and r.min_p == 0),
        f"[rollout] top_k: expected above 0 with top_p = {r.top_p:g}, min_p = {r.min_p:g} (at most "
        "so many tokens are kept, and recorded), got 0",
    )
    _require(
        r.async_level > 0 or inflight == "wait",
        '[sync] inflight: expected "wait" with [rollout] async_level = 0, where nothing runs '
        f'during a sync, got "{inflight}"',
    )
    _require(
        r.filter_groups or r.max_num_gen_batches == type(r).max_num_gen_batches,
        "[rollout] filter_groups: expected true with max_num_gen_batches = "
        f"{r.max_num_gen_batches}, got false",
    )
    _require(
        not r.filter_groups or not r.async_level,
        f"[rollout] filter_groups: expected false with async_level = {r.async_level}, whose "
        "rollouts are drawn before others have their rewards, got true",
    )
    _require(
        not r.filter_groups or not c.reward.shuffle,
        "[rollout] filter_groups: expected false with [reward] shuffle, which makes other groups "
        "of rewards, got true",
    )
    _require(
        r.environment is not None or r.max_assistant_turns == type(r).max_assistant_turns,
        "[rollout] environment: expected one with max_assistant_turns = "
        f"{r.max_assistant_turns}, got none",
    )
    _require(
        r.environment is None or not r.async_level,
        f"[rollout] environment: expected none with async_level = {r.async_level}, whose rollouts "
        f'are generated by another thread, got "{plain(r.environment)}"',
    )


def _check_correction(c: Config) -> None:
    t, architecture = c.correction, c.model.architecture
    for key in ("cap", "mask_low", "mask_high"):
        modes = [mode for mode, keys in USED.items() if key in keys]
        names = " or ".join(f'"{mode}"' for mode in modes)
        _require(
            getattr(t, key) == getattr(type(t), key) or t.importance_sampling in modes,
            f"[correction] {key}: expected importance_sampling = {names} beside it, got "
            f'"{t.importance_sampling}"',
        )
    _require(
        not t.routing_replay or architecture is None or FAMILIES[architecture].has_experts,
        "[correction] routing_replay: expected false where [model] architecture is "
        f'"{architecture}", which routes nothing, got true',
    )
    if c.train.kernels == "rollmesh":
        _require(
            not t.routing_replay,
            '[correction] routing_replay: expected false where [train] kernels is "rollmesh", '
            "whose routing is the generator's, got true",
        )
        _require(
            not uses_tensor_cores(c.generator),
            '[train] kernels: expected "torch" where [generator] isa is "cuda_mma", which sums in '
            'another order, got "rollmesh"',
        )


def _check_device(c: Config) -> None:
    g = c.generator
    if g.device == "cpu":
        _require(
            c.train.device == "cpu",
            "[train] device: expected cpu with [generator] device = 'cpu', got "
            f"{c.train.device!r}; use cuda for both, or cpu",
        )
        _require(
            not g.enforce_eager,
            '[generator] enforce_eager: expected false where device is "cpu", which records no '
            "graphs, got true",
        )
    known = _core.available_isas() if g.device == "cpu" else CUDA_FAMILIES
    names = ", ".join(map(show, known))
    _require(
        g.isa is None or g.isa in known,
        f'[generator] isa: expected one of {names} where device is "{plain(g.device)}", got '
        f'"{plain(g.isa)}"',
    )
    _require(
        g.exchange == "host" or (g.device != "cpu" and max(g.tp, g.ep) > 1),
        '[generator] exchange: expected "host" where device is "cpu", or with tp=1 and ep=1, whose '
        f'ranks exchange nothing, got "{g.exchange}"',
    )


def _check_vllm(c: Config) -> None:
    """vLLM starts the ranks of its mesh, chooses their devices, does not return the kept tokens and
    syncs between batches. enforce_eager is an option of vLLM too."""
    g = c.generator
    accepted = {
        "generator.device": ("cpu",),
        "generator.comm": ("auto", "threads"),
        "generator.comm_timeout": (type(g).comm_timeout,),
        "generator.ep": sorted({1, g.dp * g.tp}),
        "generator.state_interval": (0,),
        "rollout.top_k": (0,),
        "sync.inflight": ("wait",),
    }
    for key, values in accepted.items():
        table, name = key.split(".")
        value = getattr(getattr(c, table), name)
        _require(
            value in values,
            f"[{table}] {name}: expected {' or '.join(map(show, values))} where [generator] engine "
            f'is "vllm" (docs/vllm.md), got {show(value)}',
        )
