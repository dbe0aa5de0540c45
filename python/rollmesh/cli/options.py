"""Options that several commands share, and the objects made from them."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rollmesh as rm
from rollmesh.model.adapters import refuse_adapter
from rollmesh.options import ROWS, kind_of
from rollmesh.request.text import load_tokenizer, tokenizer_of_folder
from rollmesh.runtime.messages import MOST_SUGGESTED, plain

# Packages of the extra `train`.
TRAIN = (
    "torch",
    "transformers",
    "safetensors",
    "tokenizers",
    "jinja2",
    "rich",
    "matplotlib",
    "tensorboard",
)
INSTALL_TRAIN = "pip install '.[train]' in rollmesh's checkout"
# Rows of rollmesh.options that are options of commands.
PLACE, ENGINE = (
    tuple(name for name, row in ROWS.items() if row.metadata["command"] == group)
    for group in ("mesh", "engine")
)
GENERATOR_KEYS = (*PLACE, "tp", "dp", "ep", "dtype", "threads")


def add_options(group: Any, *names: str, **docs: str) -> None:
    """Adds rows of rollmesh.options: --kv-cache-gib for kv_cache_gib. docs replace a row's own."""
    for name in names:
        row, kind = ROWS[name], kind_of(name)
        words = row.metadata["check"]
        doc = row.metadata["doc"]
        doc = doc.replace("None:", "default:") if row.default is None else doc.split("; None:")[0]
        group.add_argument(
            f"--{name.replace('_', '-')}",
            **({"action": "store_true"} if kind is bool else {"type": kind}),
            **({"choices": words} if isinstance(words, tuple) else {}),
            help=docs.get(name, doc),
        )


def add_mesh(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "mesh", "where the generator runs; default: the run's, for a run's TOML, else one rank"
    )
    add_options(group, *PLACE)
    group.add_argument("--tp", type=int, help="tensor-parallel ranks")
    group.add_argument("--dp", type=int, help="data-parallel ranks")
    group.add_argument("--ep", type=int, help="ranks that the experts span: 1, tp or dp*tp")


def add_ignore(parser: argparse.ArgumentParser, *, tensors: bool = False) -> None:
    text = "a key of the config that does not matter, such as rope_scaling.attn_factor"
    more = "; or tensors of the checkpoint, such as *.rotary_emb.inv_freq" if tensors else ""
    parser.add_argument(
        "--ignore",
        action="append",
        metavar="NAME",
        help=f"{text}{more}; may be given several times",
    )


def read_spec(args: argparse.Namespace, config: Path | Mapping[str, Any]) -> rm.ModelSpec:
    """Returns the spec of the model of a config or folder, without the keys of --ignore."""
    try:
        return rm.ModelSpec.from_hf(config, ignore=tuple(args.ignore or ()))
    except rm.ConfigError as error:
        names = getattr(error, "names", ())
        if 0 < sum(map(len, names)) <= MOST_SUGGESTED:
            error.add_note(
                "if they do not change the numbers: "
                + " ".join(f"--ignore {shlex.quote(name)}" for name in names)
            )
        raise


def add_engine(parser: argparse.ArgumentParser, max_model_len: str) -> None:
    group = parser.add_argument_group(
        "engine", "default: the run's, for a run's TOML, else the model's dtype and Generator's"
    )
    add_options(group, *ENGINE, max_model_len=max_model_len)
    add_mesh(parser)


def make_generator(
    args: argparse.Namespace, spec: rm.ModelSpec, dtype: str, max_model_len: int, **more: Any
) -> rm.Generator:
    """Makes a generator from the engine and mesh options. Raises rm.ConfigError for a part that
    this build does not have."""

    def given(*names: str) -> dict[str, Any]:
        return {name: v for name in names if (v := getattr(args, name, None)) is not None}

    options = given(*PLACE, *ENGINE, "sequence_parallel")
    options |= {"dtype": dtype, "max_model_len": max_model_len, **more}
    return rm.Generator(spec, mesh=rm.Mesh(**given("tp", "dp", "ep")), **options)


def take_run_settings(args: argparse.Namespace) -> None:
    """Fills options that were not given: from the [generator] table if MODEL is a run's TOML, then
    with their defaults."""
    if args.model.suffix == ".toml" and args.model.is_file():
        config = _run_config(args.model)
        table = config.generator
        args.ignore = args.ignore or list(config.model.ignore)
        own = "" if args.device is None else "isa"  # the isa belongs to the device
        for name in {*PLACE, *ENGINE} - {"max_model_len", own}:
            if getattr(args, name, None) is None:
                setattr(args, name, getattr(table, name) or None)  # 0 threads: the default
        if args.tp is args.dp is args.ep is None:
            args.tp, args.dp, args.ep = table.tp, table.dp, table.ep
        given = getattr(args, "sequence_parallel", False)
        args.sequence_parallel = given or table.sequence_parallel
    if args.kv_cache_gib is None:
        args.kv_cache_gib = 1.0


def checkpoint_of(where: Path) -> Path:
    """Returns the newest checkpoint of a run folder, and any other path unchanged."""
    if not where.is_dir() or (where / "config.json").is_file():
        return where
    found = [file.parent for file in where.glob("checkpoints/step_*/config.json")]
    return max(found, key=lambda folder: (len(folder.name), folder.name), default=where)


def read_model_config(where: Path) -> dict[str, Any]:
    """Returns a Hugging Face config as a dict, from a folder with config.json, a JSON file, or the
    [model] table of a run's TOML."""
    try:
        if where.is_dir():
            refuse_adapter(where)
            return read_json(where / "config.json")
        if where.suffix == ".toml":
            return _from_toml(where)
        return read_json(where)
    except OSError as e:
        raise rm.ConfigError(
            f"{plain(e.filename or where)}: {e.strerror}; expected a checkpoint or run folder, a "
            "config.json or a run's TOML"
        ) from e


def read_json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise rm.ConfigError(f"{plain(file)}: {plain(e)}") from e
    if not isinstance(config, dict):
        raise rm.ConfigError(f"{plain(file)}: expected an object, got {type(config).__name__}")
    return config


def _run_config(file: Path) -> Any:
    from rollmesh.run import config  # only here: it needs more packages

    return config.load(file)


def _from_toml(file: Path) -> dict[str, Any]:
    config = _run_config(file)
    if config.model.path is not None:
        return read_json(config.path(config.model.path) / "config.json")
    fields = {"model_type": config.model.architecture, **config.model.hf_fields()}
    if "vocab_size" not in fields:
        fields["vocab_size"] = tokenizer_size(config.path(config.tokenizer.path or ""))
    return {**fields, "dtype": config.generator.dtype}


def read_tokenizer(where: Path) -> Any:
    """Returns the tokenizer of a folder (as Generator.from_hf reads it), of a tokenizer.json, or of
    the [tokenizer] path of a run's TOML. Returns None if there is no tokenizer."""
    if where.suffix == ".toml":
        config = _run_config(where)
        where = config.path(config.tokenizer.path or config.model.path or "")
    if where.is_dir():
        return tokenizer_of_folder(where)
    return (
        load_tokenizer(where) if where.name.endswith("tokenizer.json") and where.is_file() else None
    )


def tokenizer_size(where: Path) -> int:
    file = where / "tokenizer.json" if where.is_dir() else where
    if not file.is_file():
        raise rm.ConfigError(
            f"[model] vocab_size: expected a size or a tokenizer at {plain(where)}, got neither"
        )
    content = read_json(file)  # the package tokenizers is not needed for a shape
    try:
        entries = content["model"]["vocab"]  # {token: id}, or a list of [token, score]
        tokens = set(entries) if isinstance(entries, dict) else {entry[0] for entry in entries}
        return len(tokens | {added["content"] for added in content.get("added_tokens") or ()})
    except (KeyError, TypeError, IndexError) as e:
        raise rm.ConfigError(
            f"{plain(file)}: expected a tokenizer.json, got one without a vocabulary"
        ) from e
