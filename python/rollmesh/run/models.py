"""A checkpoint folder as the trainer's model, refused by the rules of `rollmesh generate`: what is
missing would be random, what is unknown would be left out, and transformers only logs either.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

import rollmesh as rm
from rollmesh.model.adapters import refuse_adapter
from rollmesh.model.families import FAMILIES
from rollmesh.model.reader import without
from rollmesh.run.files import expect_file, told_as
from rollmesh.runtime.messages import MOST_SUGGESTED, listed, plain, shown
from rollmesh.weights.safetensors_folder import INDEX, SafetensorsFolder, is_ignored
from rollmesh.weights.sync import EMBEDDING, HEAD

STORED = {
    "BF16": "bfloat16",
    "F32": "float32",
    "F16": "float16",
    "F64": "float64",
}  # names in safetensors
ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
MOST_LABELS = 65536


def folder_config(folder: Path, ignore: tuple[str, ...] = ()) -> Any:
    """Its transformers config, checked as the generator's, whose ends it gets: those of
    generation_config.json too. It has none of the keys in `ignore`, so the generator and the
    checkpoints of this model have none either."""
    from transformers import CONFIG_MAPPING

    refuse_adapter(folder)
    if not (folder / "config.json").is_file():
        raise rm.ConfigError(
            f"{plain(folder)}: expected a checkpoint folder with config.json and safetensors"
        )
    for path in folder.iterdir():
        expect_file(path)
    try:
        spec = rm.ModelSpec.from_hf(folder, ignore=ignore)
    except rm.ConfigError as error:
        names = getattr(error, "names", ())
        if 0 < sum(map(len, names)) <= MOST_SUGGESTED:
            option = f"model.ignore={json.dumps([*ignore, *names])}"
            error.add_note(f"if they do not change the numbers: --set {shlex.quote(option)}")
        raise
    values = without(json.loads((folder / "config.json").read_text(encoding="utf-8")), ignore)
    labels = values.get("num_labels")
    if isinstance(labels, int) and labels > MOST_LABELS:  # transformers makes the name of each
        raise rm.ConfigError(
            f"{plain(folder)}: num_labels: expected at most {MOST_LABELS}, got {shown(labels)}"
        )
    with told_as(f"{folder}: expected a config.json"):
        config = CONFIG_MAPPING[spec.model_type].from_dict(values, name_or_path=str(folder))
    ends = list(spec.eos_token_ids)
    config.eos_token_id = (
        ends if len(ends) > 1 else next(iter(ends), None)
    )  # a checkpoint of it has the file of a random model
    return config


def load_model(folder: Path, dtype: str, ignore: tuple[str, ...] = ()) -> Any:
    """ignore: keys of the config, and names of tensors as SafetensorsFolder takes them.

    Errors name the folder and, of each kind, the tensors: MissingKeyError, UnexpectedKeyError,
    ShapeError, DTypeError, TiedWeightError, FormatError; ConfigError for a config that is not
    supported."""
    import torch
    from transformers import AutoModelForCausalLM

    hf_config = folder_config(folder, ignore)
    _check_files(folder, rm.ModelSpec.from_hf(hf_config), ignore)
    with told_as(f"{folder}: expected the weights of a checkpoint"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=hf_config,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, as the others are
            **experts_option(hf_config),
        )
    model, report = loaded
    with (
        told_as(f"{folder}: expected a config.json that can be saved again"),
        tempfile.TemporaryDirectory() as scratch,
    ):
        model.config.save_pretrained(scratch)  # which checks more than the reading does
    _refuse(
        rm.ShapeError, folder, "wrong shape", sorted(name for name, *_ in report["mismatched_keys"])
    )
    _refuse(rm.MissingKeyError, folder, "missing", sorted(report["missing_keys"]))
    unknown = [name for name in report["unexpected_keys"] if not is_ignored(name, ignore)]
    _refuse(rm.UnexpectedKeyError, folder, "no parameter of this model", sorted(unknown))
    _check_loaded(folder, model, hf_config)
    for parameter in model.parameters():
        if parameter.data_ptr() % parameter.element_size():  # of a file whose header is not padded
            parameter.data = parameter.data.clone()
    return model


def _check_loaded(folder: Path, model: Any, hf_config: Any) -> None:
    """ConfigError: loading did more than fill the parameters of the config's model. Adapters and
    quantization add or replace modules, and freeze parameters."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        fresh = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            hf_config, **experts_option(hf_config)
        )
    wanted, loaded = ({n: p.requires_grad for n, p in m.named_parameters()} for m in (fresh, model))
    if differ := sorted(n for n in wanted.keys() | loaded.keys() if wanted.get(n) != loaded.get(n)):
        raise rm.ConfigError(
            f"{plain(folder)}: expected the trainable parameters of its config.json alone, "
            f"got others or frozen ones: {listed((name,) for name in differ)}"
        )


def experts_option(hf_config: Any) -> dict[str, str]:
    """`grouped_mm` where there are experts: the other implementations are many times slower to
    train."""
    family = FAMILIES.get(hf_config.model_type)
    return (
        {"experts_implementation": "grouped_mm"}
        if family is not None and family.has_experts
        else {}
    )


def _check_files(folder: Path, spec: rm.ModelSpec, ignore: tuple[str, ...]) -> None:
    """What transformers does not report: how tensors are stored, which experts there are (it stacks
    those that it finds), and an lm_head beside the embedding that it is tied to."""
    stored = SafetensorsFolder(folder)
    if (folder / INDEX).is_file() and (folder / "model.safetensors").is_file():
        raise rm.FormatError(
            f"{folder}: expected model.safetensors or {INDEX}, got both: transformers reads the "
            "first, rollmesh the second; remove the older one"
        )
    shapes = {p.name: tuple(p.shape) for p in spec.parameters()}
    odd, wrong = [], []
    names = [name for name in stored if not is_ignored(name, ignore)]
    for name in names:
        dtype, shape = stored.header(name)
        if dtype not in STORED:
            odd.append(f"{name} ({dtype})")
        if shape != shapes.get(name, shape):
            wrong.append(f"{name} (expected {list(shapes[name])}, got {list(shape)})")
    _refuse(rm.DTypeError, folder, f"expected {', '.join(STORED.values())}", odd)
    _refuse(rm.ShapeError, folder, "wrong shape", wrong)
    if any(map(ONE_EXPERT.search, names)):  # else they are stacked, and reported
        there, wanted = (
            {name for name in some if ONE_EXPERT.search(name)} for some in (names, shapes)
        )
        _refuse(rm.MissingKeyError, folder, "missing", sorted(wanted - there))
        _refuse(rm.UnexpectedKeyError, folder, "no parameter of this model", sorted(there - wanted))
    if (
        spec.tie_word_embeddings
        and HEAD in stored
        and EMBEDDING in stored
        and (stored[HEAD] != stored[EMBEDDING]).any()
    ):
        raise rm.TiedWeightError(
            f"{folder}: {HEAD}: expected the values of {EMBEDDING}, to which the config ties it, "
            "got others"
        )


def _refuse(error: type[rm.Error], folder: Path, what: str, names: list[str]) -> None:
    if not names:
        return
    refused = error(
        f"{folder}: {len(names)} of the weights: {what}: {listed((name,) for name in names)}"
    )
    if error is rm.UnexpectedKeyError:
        refused.add_note(
            "if they do not matter: [model] ignore takes their names, with * for any characters"
        )
    raise refused
