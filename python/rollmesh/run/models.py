"""The trainer's model: a random one, or a checkpoint folder.

A folder is checked by the rules of `rollmesh generate`: transformers gives missing tensors random
values, drops unknown ones, and only logs both.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

from rollmesh import ModelSpec
from rollmesh._core import usable_cores
from rollmesh.errors import (
    ConfigError,
    DTypeError,
    Error,
    FormatError,
    MissingKeyError,
    ShapeError,
    TiedWeightError,
    UnexpectedKeyError,
)
from rollmesh.model.adapters import refuse_adapter
from rollmesh.model.families import FAMILIES
from rollmesh.model.hf_config import text_config
from rollmesh.model.reader import without
from rollmesh.run.config import Config
from rollmesh.run.data import load_tokenizer
from rollmesh.run.files import expect_file, library_errors
from rollmesh.run.seeds import seed_of
from rollmesh.runtime.messages import MOST_SUGGESTED, listed, plain, shown
from rollmesh.weights.safetensors_folder import INDEX, SafetensorsFolder, is_ignored
from rollmesh.weights.sync import EMBEDDING, HEAD

STORED = {"BF16": "bfloat16", "F32": "float32", "F16": "float16", "F64": "float64"}
UNKNOWN = "no parameter of this model"
ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
MAX_LABELS = 65536


def set_up_torch(threads: int) -> None:
    """Makes torch's results deterministic for a number of threads; 0: all cores."""
    import torch

    torch.set_num_threads(threads or usable_cores())
    torch.use_deterministic_algorithms(True)
    # Deterministic mode would also fill every torch.empty().
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def read_tokenizer(config: Config) -> Any:
    """Returns the tokenizer of [tokenizer] path, or of the model's folder."""
    if config.model.path is not None:  # checked first, since the tokenizer reads config.json too
        folder_config(config.path(config.model.path), config.model.ignore)
    source = config.tokenizer.path or config.model.path
    if source is None:
        raise ConfigError(
            "[tokenizer] path: expected a folder or a tokenizer.json; a random model brings none"
        )
    return load_tokenizer(config.path(source))


def torch_device(config: Config) -> Any:
    """Returns [train] device as a torch.device. Raises ConfigError if torch does not find the
    GPU."""
    import torch

    device = torch.device(config.train.device)
    if device.type == "cuda":
        # Needed for deterministic algorithms, before cuBLAS is loaded.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(
                f"[train] device: expected one of torch's {count} CUDA devices, got "
                f"{config.train.device!r}"
            )
    return device


def checkpoint_layers(model: Any) -> None:
    """Enables gradient checkpointing. transformers checkpoints a decoder layer only in training
    mode, so the layer is put in that mode, without its parts."""
    # gradient_checkpointing_enable is deprecated in versions that have the other name.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.training = True


def build_model(config: Config, tokenizer: Any) -> Any:
    """Returns the model that a run starts from, the same at each call."""
    if config.model.path is not None:
        return load_model(config.path(config.model.path), config.train.dtype, config.model.ignore)
    import torch

    hf_config = model_config(config, tokenizer)
    ModelSpec.from_hf(hf_config)  # checks its limits before memory is allocated
    torch.manual_seed(seed_of(config.seed, 0, "weights"))
    return _new_model(hf_config, dtype=getattr(torch, config.train.dtype))


def model_config(config: Config, tokenizer: Any, checkpoint: Path | None = None) -> Any:
    """Returns the transformers config of the trainer's model, without building the model. For a
    random model, vocabulary size and eos are the tokenizer's, and pad_token_id is None, since the
    embedding of a padding token is not trained."""
    table = config.model
    if checkpoint is not None or table.path is not None:
        return folder_config(checkpoint or config.path(str(table.path)), table.ignore)
    from transformers import AutoConfig

    fields = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
        "attention_dropout": 0.0,
        **table.hf_fields(),
    }
    if table.architecture == "seed_oss":  # its config has dropout by default
        fields["residual_dropout"] = 0.0
    if fields["vocab_size"] < len(tokenizer):
        raise ConfigError(
            f"[model] vocab_size: expected at least the tokenizer's {len(tokenizer)}, got "
            f"{fields['vocab_size']}"
        )
    try:
        return AutoConfig.for_model(str(table.architecture), **fields)
    except (ValueError, TypeError) as e:
        raise ConfigError(f"[model]: {e}") from e


def folder_config(folder: Path, ignore: tuple[str, ...] = ()) -> Any:
    """Returns the transformers config of a checkpoint folder, checked as the generator checks it.
    It has all end tokens, also those of generation_config.json, and no key of `ignore`. So the
    generator and the checkpoints of the model have none of these keys either."""
    from transformers import CONFIG_MAPPING

    refuse_adapter(folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{plain(folder)}: expected a checkpoint folder with config.json and safetensors"
        )
    for path in folder.iterdir():
        expect_file(path)
    try:
        spec = ModelSpec.from_hf(folder, ignore=ignore)
    except ConfigError as error:
        names = getattr(error, "names", ())
        if 0 < sum(map(len, names)) <= MOST_SUGGESTED:
            option = f"model.ignore={json.dumps([*ignore, *names])}"
            error.add_note(f"if they do not change the numbers: --set {shlex.quote(option)}")
        raise
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values = without(text_config(values), ignore)
    labels = values.get("num_labels")
    if isinstance(labels, int) and labels > MAX_LABELS:  # transformers generates their names
        raise ConfigError(
            f"{plain(folder)}: num_labels: expected at most {MAX_LABELS}, got {shown(labels)}"
        )
    with library_errors(f"{folder}: expected a config.json"):
        config = CONFIG_MAPPING[spec.model_type].from_dict(values, name_or_path=str(folder))
    ends = list(spec.eos_token_ids)
    # One id is not a list, as in the config of a random model.
    config.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
    return config


def load_model(folder: Path, dtype: str, ignore: tuple[str, ...] = ()) -> Any:
    """Reads the model of a checkpoint folder. ignore: keys of the config, and names of tensors as
    SafetensorsFolder takes them.

    Raises MissingKeyError, UnexpectedKeyError, ShapeError, DTypeError, TiedWeightError or
    FormatError, which name the folder and the tensors, or ConfigError."""
    import torch
    from transformers import AutoModelForCausalLM

    hf_config = folder_config(folder, ignore)
    _check_files(folder, ModelSpec.from_hf(hf_config), ignore)
    with library_errors(f"{folder}: expected the weights of a checkpoint"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=hf_config,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported like the other problems
            **_experts_option(hf_config),
        )
    model, report = loaded
    with (
        library_errors(f"{folder}: expected a config.json that can be saved again"),
        tempfile.TemporaryDirectory() as scratch,
    ):
        model.config.save_pretrained(scratch)  # saving checks more than reading
    mismatched = sorted(name for name, *_ in report["mismatched_keys"])
    _refuse(ShapeError, folder, "wrong shape", mismatched)
    _refuse(MissingKeyError, folder, "missing", sorted(report["missing_keys"]))
    unknown = [name for name in report["unexpected_keys"] if not is_ignored(name, ignore)]
    _refuse(UnexpectedKeyError, folder, UNKNOWN, sorted(unknown))
    with torch.device("meta"):
        fresh = _new_model(hf_config)
    # Adapters and quantization add or replace modules, and freeze parameters.
    wanted, found = ({n: p.requires_grad for n, p in m.named_parameters()} for m in (fresh, model))
    if differ := sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n)):
        raise ConfigError(
            f"{plain(folder)}: expected the trainable parameters of its config.json alone, "
            f"got others or frozen ones: {listed((name,) for name in differ)}"
        )
    for parameter in model.parameters():
        # A safetensors header without padding leaves the tensors unaligned.
        if parameter.data_ptr() % parameter.element_size():
            parameter.data = parameter.data.clone()
    return model


def _new_model(hf_config: Any, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        hf_config, **options, **_experts_option(hf_config)
    )


def _experts_option(hf_config: Any) -> dict[str, str]:
    """Returns the option that selects grouped_mm for experts; other implementations train many
    times slower."""
    family = FAMILIES.get(hf_config.model_type)
    has_experts = family is not None and family.has_experts
    return {"experts_implementation": "grouped_mm"} if has_experts else {}


def _check_files(folder: Path, spec: ModelSpec, ignore: tuple[str, ...]) -> None:
    """Checks what transformers does not report: stored dtypes, the names of experts (it stacks all
    that it finds), and an lm_head that differs from the embedding to which the config ties it."""
    stored = SafetensorsFolder(folder)
    if (folder / INDEX).is_file() and (folder / "model.safetensors").is_file():
        raise FormatError(
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
    _refuse(DTypeError, folder, f"expected {', '.join(STORED.values())}", odd)
    _refuse(ShapeError, folder, "wrong shape", wrong)
    found, wanted = (set(filter(ONE_EXPERT.search, some)) for some in (names, shapes))
    if found:  # transformers reports experts that are stacked in the file
        _refuse(MissingKeyError, folder, "missing", sorted(wanted - found))
        _refuse(UnexpectedKeyError, folder, UNKNOWN, sorted(found - wanted))
    has_both = spec.tie_word_embeddings and HEAD in stored and EMBEDDING in stored
    if has_both and (stored[HEAD] != stored[EMBEDDING]).any():
        raise TiedWeightError(
            f"{folder}: {HEAD}: expected the values of {EMBEDDING}, to which the config ties it, "
            "got others"
        )


def _refuse(error: type[Error], folder: Path, what: str, names: list[str]) -> None:
    if not names:
        return
    text = f"{len(names)} of the weights: {what}: {listed((name,) for name in names)}"
    refused = error(f"{folder}: {text}")
    if error is UnexpectedKeyError:
        refused.add_note(
            "if they do not matter: [model] ignore takes their names, with * for any characters"
        )
    raise refused
