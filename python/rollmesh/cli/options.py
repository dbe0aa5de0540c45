"""Options that several commands share, and what they stand for."""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

import rollmesh as rm

TRAIN = ("torch", "transformers", "safetensors", "tokenizers", "jinja2", "rich", "matplotlib", "tensorboard")  # of the extra `train`
GENERATOR_KEYS = ("device", "tp", "dp", "ep", "ep_backend", "dtype", "threads")


def add_mesh(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mesh", "where the generator runs; what is not built is refused with the reason")
    group.add_argument("--device", help="cpu (default)")
    group.add_argument("--tp", type=int, help="tensor-parallel ranks")
    group.add_argument("--dp", type=int, help="data-parallel ranks")
    group.add_argument("--ep", type=int, help="ranks that the experts span: 1, tp or dp*tp")
    group.add_argument("--ep-backend", help="token dispatcher: alltoall (default), allgather_reducescatter, …")


def add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--dtype", choices=("bfloat16", "float32"), help="of weights, activations and KV; default: the model's")
    group.add_argument("--threads", type=int, help="default: one per core this process may use")
    group.add_argument("--kv-cache-gib", type=float, default=1.0)
    group.add_argument("--max-model-len", type=int, help="positions of prompt and completion together; default: what is needed")
    add_mesh(parser)


def make_generator(args: argparse.Namespace, spec: rm.ModelSpec, dtype: str, max_model_len: int, **more: Any) -> rm.Generator:
    """A generator as the engine and mesh options say. Raises rm.ConfigError for what is not built."""
    given = {k: v for k, v in {"device": args.device, "ep_backend": args.ep_backend}.items() if v is not None}
    return rm.Generator(
        spec,
        mesh=rm.Mesh(tp=args.tp or 1, dp=args.dp or 1, ep=args.ep or 1),
        dtype=dtype,
        threads=args.threads,
        kv_cache_gib=args.kv_cache_gib,
        max_model_len=max_model_len,
        **given,
        **more,
    )


def read_model_config(where: Path) -> dict[str, Any]:
    """A Hugging Face config as a dict, from a folder with config.json, a JSON file, or the [model] table of a run's TOML."""
    try:
        if where.is_dir():
            return _read_json(where / "config.json")
        if where.suffix == ".toml":
            return _from_toml(where)
        return _read_json(where)
    except OSError as e:
        raise rm.ConfigError(f"{e.filename}: {e.strerror}; expected a checkpoint folder, a config.json or a run's TOML") from e


def _read_json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise rm.ConfigError(f"{file}: {e}") from e
    if not isinstance(config, dict):
        raise rm.ConfigError(f"{file}: expected an object, got {type(config).__name__}")
    return config


def _from_toml(file: Path) -> dict[str, Any]:
    from rollmesh.grpo import config as run_config

    config = run_config.load(file)
    if config.model.path is not None:
        return _read_json(config.path(config.model.path) / "config.json")
    fields = {"model_type": config.model.architecture, **config.model.hf_fields()}
    if "vocab_size" not in fields:
        fields["vocab_size"] = tokenizer_size(config.path(config.tokenizer.path or ""))
    return {**fields, "dtype": config.generator.dtype}


def tokenizer_file(where: Path) -> Path | None:
    """tokenizer.json of a folder, or the file itself; for a run's TOML its [tokenizer] path."""
    if where.suffix == ".toml":
        table = tomllib.loads(where.read_text(encoding="utf-8")).get("tokenizer", {})
        where = where.parent / table["path"] if "path" in table else where.parent
    file = where / "tokenizer.json" if where.is_dir() else where
    return file if file.name.endswith("tokenizer.json") and file.is_file() else None


def tokenizer_size(where: Path) -> int:
    file = tokenizer_file(where)
    if file is None:
        raise rm.ConfigError(f"[model] vocab_size: not given, and there is no tokenizer at {where}")
    return int(load_tokenizer(file).get_vocab_size())


def load_tokenizer(file: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        raise rm.ConfigError("reading tokenizer.json needs the package tokenizers: pip install 'rollmesh[train]'") from e
    return Tokenizer.from_file(str(file))
