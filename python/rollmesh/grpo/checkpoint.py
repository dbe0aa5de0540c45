"""Checkpoints: safetensors and JSON, nothing that is executed when read.

    DIR/checkpoints/step_000120/
      config.json, model.safetensors, tokenizer files   a Hugging Face folder: `rollmesh generate`
                                                        and transformers read it
      trainer/optimizer.safetensors                     AdamW's moments and step by parameter,
                                                        torch's random state
      trainer/state.json                                next step, the run's configuration, SHA-256
                                                        of each safetensors file
      trainer/rollouts.safetensors                      with [rollout] async_level = N: the N
                                                        batches that are generated already

A folder is written under another name and renamed when complete; then the oldest are removed. So a
killed run or a full disk leaves no half of one, and the newest complete one stays; the disk needs
room for keep + 1. Resuming continues the same run bit for bit: weights, moments and random state
are stored as they are, all else is a function of (run seed, step). Rollouts of versions that no
longer exist are stored too; a run with other options generates them anew. A run that goes back
moves the later checkpoints to DIR/abandoned.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rollmesh as rm
from rollmesh.grpo.rollout import Rollout, decode
from rollmesh.grpo.trainer import Trainer
from rollmesh.run.config import Config, CorrectionTable
from rollmesh.run.data import Dataset
from rollmesh.run.files import expect_file, told_as, writing
from rollmesh.runtime.messages import listed, plain, shown

_log = logging.getLogger("rollmesh.grpo")
FORMAT = 1
STATE = "trainer/state.json"
ROLLOUTS = "trainer/rollouts.safetensors"
# Values of keys that older checkpoints lack.
LATER_KEYS: dict[str, Any] = {
    "model.ignore": [],
    "data.overlong": "raise",
    "data.dataset_train_split": "train",
    "data.dataset_test_split": "test",
    "train.device": "cpu",
    "train.kernels": "torch",
    "train.mismatch": "raise",
    "rollout.async_level": 0,
    "rollout.max_assistant_turns": 8,
    "rollout.filter_groups": False,
    "rollout.max_num_gen_batches": 10,
    "rollout.top_k": 0,
    "rollout.top_p": 1.0,
    "rollout.min_p": 0.0,
    "sync.inflight": "wait",
    **{f"correction.{f.name}": f.default for f in dataclasses.fields(CorrectionTable)},
}
# Keys that decide what the prompts are.
MAKE_DATA = ("data.", "tokenizer.", "model.path", "generator.max_model_len", "rollout.max_tokens")
# Keys that a resumed run may change.
MAY_DIFFER = (
    *("train.steps", "eval.", "checkpoint.", "generator.threads", "generator.engine"),
    "train.gradient_checkpointing",
    *("rollout.log_completions", "rollout.num_completions_to_print"),
)


def save(
    root: Path,
    trainer: Trainer,
    tokenizer: Any,
    config: Config,
    next_step: int,
    rollouts: Sequence[Rollout] = (),
    data: str | None = None,
) -> Path:
    """Writes root/checkpoints/step_N, then drops the oldest beyond [checkpoint] keep. rollouts: of
    next_step and the steps after it. data: Dataset.digest, which `check_data` compares.

    OSError (a full disk): the other checkpoints stay, and nothing of this one."""
    final = root / "checkpoints" / f"step_{next_step:06d}"
    for unfinished in final.parent.glob(".step_*.partial"):  # of a run that was killed
        shutil.rmtree(unfinished)
    partial = final.with_name(f".{final.name}.partial")
    try:
        with writing(final):
            _write(partial, trainer, tokenizer, config, next_step, rollouts, data)
            if final.exists():
                shutil.rmtree(final)
            os.replace(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    older = sorted(
        (p for p in filter(_step, final.parent.glob("step_*")) if _order(p) <= _order(final)),
        key=_order,
    )
    for old in older[: -config.checkpoint.keep]:
        try:
            shutil.rmtree(old)
        except OSError as error:  # a link, a file, no permission: the new one is there
            _log.warning("%s, an older checkpoint, was not removed: %s", old, plain(error))
    return final


def _write(
    folder: Path,
    trainer: Trainer,
    tokenizer: Any,
    config: Config,
    next_step: int,
    rollouts: Sequence[Rollout],
    data: str | None,
) -> None:
    import torch
    from safetensors.torch import save_file

    (folder / "trainer").mkdir(parents=True)
    trainer.model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    tensors = {
        f"{key}:{name}": torch.as_tensor(value).contiguous()
        for name, parameter in trainer.model.named_parameters()
        for key, value in trainer.optimizer.state[parameter].items()
    }
    save_file(
        {**tensors, "rng": torch.get_rng_state()}, str(folder / "trainer/optimizer.safetensors")
    )
    if rollouts:
        save_rollouts(rollouts, folder / ROLLOUTS)
    state = {
        "format": FORMAT,
        "next_step": next_step,
        "rollouts": len(rollouts),
        "data": data,
        "sha256": _digests(folder),
    }
    state["config"] = config.as_dict()
    (folder / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with path.open("rb") as file:
            found[path.relative_to(folder).as_posix()] = hashlib.file_digest(
                file, "sha256"
            ).hexdigest()
    return found


def verify(folder: Path) -> None:
    """FormatError: a safetensors file is not the one that was written. A bit that is another would
    make another run, and nothing would say so. Checkpoints of older versions do not tell."""
    wanted = _read(folder).get("sha256")
    if wanted is None:
        return
    if not isinstance(wanted, dict):
        raise rm.FormatError(f"{folder / STATE}: expected sha256, a table, got {shown(wanted)}")
    found = _digests(folder)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise rm.FormatError(
                f"{folder / name}: expected the file that was written, of SHA-256 "
                f"{shown(wanted.get(name))} in {STATE}, "
                f"got {shown(found.get(name))}; it was changed or damaged since{_before(folder)}"
            )


def _order(folder: Path) -> tuple[int, str]:
    """By step: from step 1,000,000 on names are longer."""
    return len(folder.name), folder.name


def _written(checkpoints: Path) -> list[Path]:
    """Those in a folder of checkpoints, in the order of their steps."""
    return sorted(
        filter(_step, (file.parent.parent for file in checkpoints.glob(f"step_*/{STATE}"))),
        key=_order,
    )


def _before(folder: Path) -> str:
    older = (
        [p for p in _written(folder.parent) if _order(p) < _order(folder)] if _step(folder) else []
    )
    return f". The checkpoint before: --resume {older[-1]}" if older else ""


def newest(root: Path) -> Path | None:
    """The checkpoint of the last step in the run folder `root`; None: there is none."""
    found = _written(root / "checkpoints")
    return found[-1] if found else None


def _step(folder: Path) -> re.Match[str] | None:
    """A name that `save` gives; None for a copy of the user's, as step_000120.bak."""
    return re.fullmatch(r"step_(\d{6,})", folder.name)


def set_aside(root: Path, next_step: int, resumed: Path | None) -> None:
    """Moves checkpoints of `next_step` and of later steps, but for the one that is resumed, from
    root/checkpoints to root/abandoned: they are of a run that this one leaves, and `newest` would
    take them."""
    folder, first = root / "checkpoints", f"step_{next_step:06d}"
    own = [resumed] if resumed is not None else []
    left = [
        p
        for p in folder.glob("step_*")
        if _order(p) >= _order(folder / first) and not any(p.samefile(r) for r in own)
    ]
    for old in sorted(left, key=_order):
        aside = root / "abandoned"
        names = (
            aside / f"{old.name}{suffix}" for suffix in ("", *(f"-{i}" for i in range(2, 10_000)))
        )
        new = next(name for name in names if not name.exists())
        with writing(new):
            aside.mkdir(exist_ok=True)
            old.rename(new)
        _log.warning("%s is of the run that was left: it is %s now", old, new)


def find(where: Path) -> Path:
    """`where` is a checkpoint, or a run folder: then its newest one. ConfigError: there is none, or
    one with a pipe among its files."""
    found = where if (where / STATE).is_file() else newest(where)
    if found is None:
        there = where if where.name == "checkpoints" else where.parent  # of one that is gone
        others = listed((path.name,) for path in _written(there))
        had = f"; {there} has {others}" if others else ""
        raise rm.ConfigError(
            f"--resume {where}: no checkpoint there (looked for {STATE} and "
            f"checkpoints/step_*/{STATE}){had}"
        )
    for path in found.rglob("*"):
        expect_file(path)
    return found


def read_state(folder: Path, config: Config, overridden: list[str]) -> int:
    """The next step. Raises rm.ConfigError where the configuration differs in what shapes the run
    and was not overridden, or in the model's shape, which the checkpoint has."""
    state = _read(folder)
    then, now, changed = _changed(state, config)
    of_model = [k for k in changed if k.startswith("model.") and k != "model.path"]
    refused = of_model or [k for k in changed if k not in overridden]
    if refused:
        first = refused[0]
        advice = "a run keeps its model" if of_model else "override with --set to resume anyway"
        raise rm.ConfigError(
            f"{folder} belongs to another run: {listed((key,) for key in refused)} differ "
            f"({plain(first)}: {shown(then.get(first))} there, "
            f"{shown(now.get(first))} here); {advice}"
        )
    return state["next_step"]  # type: ignore[no-any-return]


def check_data(folder: Path, data: Dataset, overridden: Sequence[str]) -> None:
    """ConfigError: the prompts are others than those of the run, and no option says so. Checkpoints
    of older versions do not tell."""
    wanted = _read(folder).get("data")
    if (
        wanted is not None
        and not any(key.startswith(MAKE_DATA) for key in overridden)
        and wanted != data.digest
    ):
        raise rm.ConfigError(
            f"{folder} belongs to a run with other prompts: expected those of SHA-256 "
            f"{shown(wanted)}, got {data.digest}; the files "
            "of [data] or the tokenizer changed since; --set data.train=… resumes with those that "
            "are there"
        )


def _read(folder: Path) -> dict[str, Any]:
    file = folder / STATE
    with told_as(f"{file}: expected the state of a run"):
        state = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(state, dict):
        raise rm.FormatError(f"{file}: expected the state of a run, got a {type(state).__name__}")
    if state.get("format") != FORMAT:
        raise rm.FormatError(
            f"{folder}: checkpoint format {shown(state.get('format'))}, expected {FORMAT}"
        )
    step = state.get("next_step")
    if type(step) is not int or step < 0 or not isinstance(state.get("config"), dict):
        raise rm.FormatError(
            f"{file}: expected next_step, an integer from 0, and config, a table, got "
            f"next_step={shown(step)}"
        )
    if (name := _step(folder)) and int(name[1]) != step:
        raise rm.FormatError(
            f"{file}: expected next_step={int(name[1])}, as the folder is named, got {step}"
        )
    return state


def load_optimizer(folder: Path, trainer: Trainer) -> None:
    """AdamW's state and torch's random state; the weights were read when the trainer was built."""
    import torch
    from safetensors.torch import load_file

    file = folder / "trainer/optimizer.safetensors"
    with told_as(f"{file}: expected the optimizer's state"):
        tensors = load_file(str(file))
        torch.set_rng_state(tensors.pop("rng"))
    by_name: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(":")
        by_name.setdefault(name, {})[kind] = tensor
    expected = {name for name, _ in trainer.model.named_parameters()}
    if by_name.keys() != expected:
        raise rm.FormatError(f"{file}: {sorted(by_name.keys() ^ expected)[:4]} missing or unknown")
    for name, parameter in trainer.model.named_parameters():
        shapes = {"step": torch.Size([]), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
        found = {kind: x.shape for kind, x in by_name[name].items()}
        if (
            found != shapes
            or not all(x.is_floating_point() for x in by_name[name].values())
            or by_name[name]["step"] < 0
        ):
            raise rm.FormatError(
                f"{file}: {name}: expected {listed(shapes.items())} of floats, got "
                f"{listed(found.items())}"
            )
    state = {i: by_name[name] for i, (name, _) in enumerate(trainer.model.named_parameters())}
    trainer.optimizer.load_state_dict(
        {"state": state, "param_groups": trainer.optimizer.state_dict()["param_groups"]}
    )


def _changed(
    state: dict[str, Any], config: Config
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The options then and now, and the names of those that differ and shape the run."""
    then, now = LATER_KEYS | _flat(state["config"]), _flat(json.loads(json.dumps(config.as_dict())))
    changed = [
        k
        for k in sorted(then.keys() | now.keys())
        if then.get(k) != now.get(k) and not k.startswith(MAY_DIFFER)
    ]
    return then, now, changed


def save_rollouts(rollouts: Sequence[Rollout], path: Path) -> None:
    """Prompts and texts are left out: they follow from the step and the tokens."""
    from safetensors.numpy import save_file

    tensors: dict[str, NDArray[Any]] = {}
    for i, r in enumerate(rollouts):
        arrays = {
            "token_ids": np.concatenate([np.array(ids, np.int64) for ids in r.token_ids]),
            "logprobs": np.concatenate(r.logprobs),
            "versions": np.concatenate(r.versions),
            "lengths": np.array([len(ids) for ids in r.token_ids]),
            "stopped": np.array(r.stopped),
            "seconds": np.array([r.seconds]),
        }
        if r.kept_tokens is not None:
            arrays["kept_tokens"] = np.concatenate(r.kept_tokens)
        if r.routed_experts is not None:
            arrays["routed_experts"] = np.concatenate(r.routed_experts)
            arrays["positions"] = np.array([len(routed) for routed in r.routed_experts])
        tensors |= {f"{i}:{name}": np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(tensors, str(path))


def read_rollouts(folder: Path, config: Config, data: Dataset, tokenizer: Any) -> list[Rollout]:
    """Of the steps from the checkpoint's next one on; empty where there are none, or where an
    option that shapes the run was changed."""
    from safetensors.numpy import load_file

    state = _read(folder)
    if _changed(state, config)[2] or not state.get(
        "rollouts", (folder / ROLLOUTS).is_file()
    ):  # older ones do not say how many
        return []
    with told_as(f"{folder / ROLLOUTS}: expected rollouts"):
        tensors = load_file(str(folder / ROLLOUTS))
        return [
            _rollout(tensors, i, state["next_step"] + i, config, data, tokenizer)
            for i in range(config.rollout.async_level)
        ]


def _rollout(
    tensors: dict[str, NDArray[Any]],
    i: int,
    step: int,
    config: Config,
    data: Dataset,
    tokenizer: Any,
) -> Rollout:
    def split(name: str, lengths: str) -> list[NDArray[Any]]:
        return np.split(tensors[f"{i}:{name}"], np.cumsum(tensors[f"{i}:{lengths}"])[:-1])

    drawn = data.draw(config.seed, step, config.rollout.prompts)
    prompts = [p for p in drawn for _ in range(config.rollout.samples)]
    token_ids = [ids.tolist() for ids in split("token_ids", "lengths")]
    stopped = tensors[f"{i}:stopped"].tolist()
    completions = zip(prompts, token_ids, stopped, strict=True)
    return Rollout(
        prompts=prompts,
        token_ids=token_ids,
        logprobs=split("logprobs", "lengths"),
        texts=[decode(tokenizer, p.ids, *of) for p, *of in completions],
        stopped=stopped,
        kept_tokens=split("kept_tokens", "lengths") if f"{i}:kept_tokens" in tensors else None,
        routed_experts=split("routed_experts", "positions")
        if f"{i}:routed_experts" in tensors
        else None,
        versions=split("versions", "lengths"),
        seconds=float(tensors[f"{i}:seconds"][0]),
    )


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:  # an empty one is a value too
            out.update(_flat(value, f"{prefix}{key}."))
        else:
            out[prefix + key] = value
    return out
