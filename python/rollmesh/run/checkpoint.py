"""Checkpoints: safetensors and JSON. Reading one executes no code.

    DIR/checkpoints/step_000120/
      config.json, model.safetensors, tokenizer files   a Hugging Face folder, for `rollmesh
                                                        generate` and transformers
      trainer/optimizer.safetensors                     AdamW's moments and step by parameter,
                                                        torch's random state
      trainer/state.json                                next step, the run's configuration, SHA-256
                                                        of each safetensors file
      trainer/rollouts.safetensors                      with [rollout] async_level = N: the next N
                                                        batches

A folder is written under another name and renamed when it is complete; then the oldest folders are
removed. So after a crash or on a full disk the newest complete checkpoint remains. The disk needs
room for keep + 1 checkpoints. A resumed run is bit-identical to one without a break: weights,
moments and random state are stored, and everything else is a function of (run seed, step).
Rollouts of older versions are stored too; a run with other options generates them again. A run that
resumes an older checkpoint moves the later ones to DIR/abandoned.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.errors import ConfigError, FormatError
from rollmesh.run.config import Config
from rollmesh.run.data import Dataset, Prompt, completion_text
from rollmesh.run.files import expect_file, library_errors, writing
from rollmesh.run.samples import Completion, Rollout
from rollmesh.runtime.messages import listed, plain, shown

_log = logging.getLogger("rollmesh.grpo")
FORMAT = 1
STATE = "trainer/state.json"
OPTIMIZER = "trainer/optimizer.safetensors"
ROLLOUTS = "trainer/rollouts.safetensors"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW, for each parameter
# Fields of a completion that are stored, if the run records them.
RECORDS = ("token_ids", "logprobs", "versions", "kept_tokens", "routed_experts")
# Keys on which the prompts depend.
MAKE_DATA = ("data.", "tokenizer.", "model.path", "generator.max_model_len", "rollout.max_tokens")
# Keys that a resumed run may change.
MAY_DIFFER = (
    *("train.steps", "eval.", "checkpoint.", "generator.threads", "generator.engine"),
    "train.gradient_checkpointing",
    *("rollout.log_completions", "rollout.num_completions_to_print"),
)


class TrainerState(typing.Protocol):
    """The parts of a trainer that a checkpoint uses."""

    model: Any
    optimizer: Any
    num_updates: int  # number of updates of the weights that have begun


def save(
    root: Path,
    trainer: TrainerState,
    tokenizer: Any,
    config: Config,
    next_step: int,
    rollouts: Sequence[Rollout] = (),
    data: str | None = None,
) -> Path:
    """Writes root/checkpoints/step_N, then removes the oldest checkpoints beyond [checkpoint] keep.
    rollouts: those of next_step and later steps. data: Dataset.digest, for `check_data`.

    Raises OSError, for example for a full disk; the files of this checkpoint are then removed, and
    the other checkpoints remain."""
    final = root / "checkpoints" / f"step_{next_step:06d}"
    for unfinished in final.parent.glob(".step_*.partial"):  # of a killed run
        shutil.rmtree(unfinished)
    partial = final.with_name(f".{final.name}.partial")
    try:
        with writing(final):
            (partial / "trainer").mkdir(parents=True)
            trainer.model.save_pretrained(str(partial))
            tokenizer.save_pretrained(str(partial))
            _save_optimizer(trainer, partial / OPTIMIZER)
            if rollouts:
                save_rollouts(rollouts, partial / ROLLOUTS)
            state = {
                "format": FORMAT,
                "next_step": next_step,
                "rollouts": len(rollouts),
                "data": data,
                "sha256": _digests(partial),
                "config": config.as_dict(),
            }
            (partial / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
            if final.exists():
                shutil.rmtree(final)
            os.replace(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    older = [path for step, path in _checkpoints(final.parent).items() if step <= next_step]
    for old in older[: -config.checkpoint.keep]:
        try:
            shutil.rmtree(old)
        except OSError as error:  # a link, a file, no permission; the new one is complete
            _log.warning("%s, an older checkpoint, was not removed: %s", old, plain(error))
    return final


def _save_optimizer(trainer: TrainerState, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {
        f"{key}:{name}": torch.as_tensor(value).contiguous()
        for name, parameter in trainer.model.named_parameters()
        for key, value in trainer.optimizer.state[parameter].items()
    }
    save_file({**tensors, "rng": torch.get_rng_state()}, str(path))


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with path.open("rb") as file:
            found[path.relative_to(folder).as_posix()] = hashlib.file_digest(
                file, "sha256"
            ).hexdigest()
    return found


def verify(folder: Path) -> None:
    """Raises FormatError if a safetensors file has changed since it was written, since the run
    would differ. Checkpoints of older versions have no digests."""
    wanted = _read(folder).get("sha256")
    if wanted is None:
        return
    if not isinstance(wanted, dict):
        raise FormatError(f"{folder / STATE}: expected sha256, a table, got {shown(wanted)}")
    found = _digests(folder)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            last = _step(folder) or 0
            older = [p for step, p in _checkpoints(folder.parent).items() if step < last]
            advice = f". The checkpoint before: --resume {older[-1]}" if older else ""
            raise FormatError(
                f"{folder / name}: expected the file that was written, of SHA-256 "
                f"{shown(wanted.get(name))} in {STATE}, "
                f"got {shown(found.get(name))}; it was changed or damaged since{advice}"
            )


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Returns the checkpoints of a folder by step, in order, without copies that a user made, such
    as step_000120.bak."""
    found = [file.parent.parent for file in folder.glob(f"step_*/{STATE}")]
    return dict(sorted((step, path) for path in found if (step := _step(path)) is not None))


def _step(folder: Path) -> int | None:
    """Returns the step in a folder name made by `save`."""
    name = re.fullmatch(r"step_(\d{6,})", folder.name)
    return int(name[1]) if name else None


def newest(root: Path) -> Path | None:
    """Returns the checkpoint of the last step in the run folder `root`, if there is one."""
    return next(reversed(_checkpoints(root / "checkpoints").values()), None)


def set_aside(root: Path, next_step: int, resumed: Path | None) -> None:
    """Moves checkpoints of `next_step` and of later steps, except the resumed one, from
    root/checkpoints to root/abandoned. They belong to a run that is not continued, and `newest`
    would return them."""
    aside = root / "abandoned"
    for step, old in _checkpoints(root / "checkpoints").items():
        if step < next_step or (resumed is not None and old.samefile(resumed)):
            continue
        names = (old.name, *(f"{old.name}-{i}" for i in range(2, 10_000)))
        new = next(path for name in names if not (path := aside / name).exists())
        with writing(new):
            aside.mkdir(exist_ok=True)
            old.rename(new)
        _log.warning("%s belongs to a run that is not continued; it was moved to %s", old, new)


def find(where: Path) -> Path:
    """Returns `where`, a checkpoint, or the newest checkpoint of the run folder `where`.
    Raises ConfigError if there is no checkpoint, or if one of its files is a pipe."""
    found = where if (where / STATE).is_file() else newest(where)
    if found is None:
        parent = where if where.name == "checkpoints" else where.parent
        others = listed((path.name,) for path in _checkpoints(parent).values())
        had = f"; {parent} has {others}" if others else ""
        raise ConfigError(
            f"--resume {where}: no checkpoint there (looked for {STATE} and "
            f"checkpoints/step_*/{STATE}){had}"
        )
    for path in found.rglob("*"):
        expect_file(path)
    return found


def read_state(folder: Path, config: Config, overridden: Sequence[str]) -> int:
    """Returns the next step. Raises ConfigError if an option that affects the run differs and was
    not overridden, if an option of the model's shape differs, or if `steps` is below the next
    step."""
    state = _read(folder)
    step, steps = state["next_step"], config.train.steps
    then, now, changed = _changed(state, config)
    of_model = [k for k in changed if k.startswith("model.") and k != "model.path"]
    refused = of_model or [k for k in changed if k not in overridden]
    if refused:
        first = refused[0]
        advice = "a run keeps its model" if of_model else "override with --set to resume anyway"
        raise ConfigError(
            f"{folder} belongs to another run: {listed((key,) for key in refused)} differ "
            f"({plain(first)}: {shown(then.get(first))} there, {shown(now.get(first))} here); "
            f"{advice}"
        )
    if step > steps:
        raise ConfigError(
            f"[train] steps: expected at least {step}, which {folder} has made, got {steps}"
        )
    return step  # type: ignore[no-any-return]


def check_data(folder: Path, data: Dataset, overridden: Sequence[str]) -> None:
    """Raises ConfigError if the prompts differ from those of the run although the options are
    equal. Older checkpoints have no digest."""
    wanted = _read(folder).get("data")
    if wanted in (None, data.digest) or any(key.startswith(MAKE_DATA) for key in overridden):
        return
    raise ConfigError(
        f"{folder} belongs to a run with other prompts: expected those of SHA-256 "
        f"{shown(wanted)}, got {data.digest}; the files of [data] or the tokenizer changed since; "
        "--set data.train=… resumes with those that are there"
    )


def _read(folder: Path) -> dict[str, Any]:
    file = folder / STATE
    with library_errors(f"{file}: expected the state of a run"):
        state = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(state, dict):
        raise FormatError(f"{file}: expected the state of a run, got a {type(state).__name__}")
    if state.get("format") != FORMAT:
        raise FormatError(
            f"{folder}: checkpoint format {shown(state.get('format'))}, expected {FORMAT}"
        )
    step = state.get("next_step")
    if type(step) is not int or step < 0 or not isinstance(state.get("config"), dict):
        raise FormatError(
            f"{file}: expected next_step, an integer from 0, and config, a table, got "
            f"next_step={shown(step)}"
        )
    if (named := _step(folder)) not in (None, step):
        raise FormatError(f"{file}: expected next_step={named}, as the folder is named, got {step}")
    return state


def load_optimizer(folder: Path, trainer: TrainerState) -> None:
    """Restores AdamW's state and torch's random state. The trainer has read the weights already."""
    import torch
    from safetensors.torch import load_file

    file = folder / OPTIMIZER
    with library_errors(f"{file}: expected the optimizer's state"):
        tensors = load_file(str(file))
        torch.set_rng_state(tensors.pop("rng"))
    parameters = dict(trainer.model.named_parameters())
    wanted = {
        f"{kind}:{name}": torch.Size() if kind == "step" else parameter.shape
        for name, parameter in parameters.items()
        for kind in MOMENTS
    }
    for key in sorted(wanted.keys() | tensors.keys()):
        x, shape = tensors.get(key), wanted.get(key, ())
        is_negative = x is not None and key.startswith("step:") and (x < 0).any()
        if x is None or x.shape != shape or not x.is_floating_point() or is_negative:
            expected = f"{list(shape)} of floats, a step from 0" if key in wanted else "no such key"
            got = None if x is None else f"{list(x.shape)} of {x.dtype}"
            raise FormatError(f"{file}: {key}: expected {expected}, got {got}")
    state = {
        i: {kind: tensors[f"{kind}:{name}"] for kind in MOMENTS}
        for i, name in enumerate(parameters)
    }
    groups = trainer.optimizer.state_dict()["param_groups"]
    trainer.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _changed(
    state: dict[str, Any], config: Config
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Returns the options of the checkpoint, those of the config, and the names of options that
    differ and affect the run. Keys that an older checkpoint does not have count as their
    defaults."""
    defaults, now = (_flat(json.loads(json.dumps(c.as_dict()))) for c in (Config(), config))
    then = {**defaults, "train.kernels": "torch", **_flat(state["config"])}
    changed = [
        k
        for k in sorted(then.keys() | now.keys())
        if then.get(k) != now.get(k) and not k.startswith(MAY_DIFFER)
    ]
    return then, now, changed


def save_rollouts(rollouts: Sequence[Rollout], path: Path) -> None:
    """Stores rollouts without prompts and texts, which follow from the step and the tokens."""
    from safetensors.numpy import save_file

    tensors: dict[str, NDArray[Any]] = {}
    for i, rollout in enumerate(rollouts):
        every = rollout.completions
        arrays: dict[str, Any] = {
            "lengths": [len(c.token_ids) for c in every],
            "stopped": [c.stopped for c in every],
            "seconds": [rollout.seconds],
        }
        for name in RECORDS:
            records = [getattr(c, name) for c in every]
            if records[0] is not None:
                arrays[name] = np.concatenate(records)
            if name == "routed_experts" and name in arrays:
                arrays["positions"] = [len(record) for record in records]
        tensors |= {f"{i}:{name}": np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(tensors, str(path))


def read_rollouts(folder: Path, config: Config, data: Dataset, tokenizer: Any) -> list[Rollout]:
    """Returns the stored rollouts, from the checkpoint's next step on. The list is empty if an
    option that affects the run was changed."""
    from safetensors.numpy import load_file

    state, file, table = _read(folder), folder / ROLLOUTS, config.rollout
    # Older checkpoints do not have the number of rollouts.
    if _changed(state, config)[2] or not state.get("rollouts", file.is_file()):
        return []
    rollouts = []
    with library_errors(f"{file}: expected rollouts"):
        tensors = load_file(str(file))
        for i in range(table.async_level):
            prompts = data.draw(config.seed, state["next_step"] + i, table.prompts)
            repeated = [p for p in prompts for _ in range(table.samples)]
            arrays = {
                key.partition(":")[2]: v for key, v in tensors.items() if key.startswith(f"{i}:")
            }
            rollouts.append(_rollout(arrays, repeated, tokenizer))
    return rollouts


def _rollout(arrays: dict[str, NDArray[Any]], prompts: Sequence[Prompt], tokenizer: Any) -> Rollout:
    records: dict[str, list[NDArray[Any]]] = {}
    for name in arrays.keys() & RECORDS:
        lengths = arrays["positions" if name == "routed_experts" else "lengths"]
        records[name] = np.split(arrays[name], np.cumsum(lengths)[:-1])
    completions = []
    for i, (prompt, stopped) in enumerate(zip(prompts, arrays["stopped"].tolist(), strict=True)):
        fields: dict[str, Any] = {name: each[i] for name, each in records.items()}
        ids = fields["token_ids"] = fields["token_ids"].tolist()
        text = completion_text(tokenizer, prompt.ids, ids, stopped)
        drawn = np.ones(len(ids), bool)
        completions.append(Completion(prompt, **fields, drawn=drawn, text=text, stopped=stopped))
    return Rollout(completions, float(arrays["seconds"][0]))


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:  # an empty one is a value too
            out.update(_flat(value, f"{prefix}{key}."))
        else:
            out[prefix + key] = value
    return out
