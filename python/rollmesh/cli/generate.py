"""`rollmesh generate MODEL PROMPT …`: completes prompts with the weights of a checkpoint folder.

The generator itself does not read checkpoints. This command takes the role of the trainer: it reads
the folder's safetensors and pushes them. `--random` uses random weights of the same shapes instead,
to check that everything runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import rollmesh as rm
from rollmesh.cli import warnings_shown
from rollmesh.cli.options import (
    add_engine,
    add_ignore,
    checkpoint_of,
    make_generator,
    read_model_config,
    read_spec,
    read_tokenizer,
    take_run_settings,
)
from rollmesh.cli.weights import random_weights
from rollmesh.request.text import Chat
from rollmesh.runtime.messages import plain, shown

KEYS = ("prompt", "messages", "prompt_token_ids")
SAMPLING = {  # fields of SamplingParams → default, help
    "n": (1, "completions of each prompt"),
    "max_tokens": (64, None),
    "temperature": (1.0, None),
    "top_p": (1.0, None),
    "top_k": (-1, None),
    "min_p": (0.0, None),
}
NOTES = {
    rm.DTypeError: "--dtype bfloat16 and --dtype float32 convert weights of other float types",
    rm.UnexpectedKeyError: "--ignore NAME skips one, with * for any characters; --skip-unknown "
    "skips all",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="checkpoint folder, or a run folder: its newest checkpoint; with --random also a "
        "config.json or TOML",
    )
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="text; with --ids token ids such as 5,17,3"
    )
    parser.add_argument("--random", action="store_true", help="random weights of this shape")
    parser.add_argument(
        "--skip-unknown",
        action="store_true",
        help="skip tensors of the checkpoint that are no parameters, and count them",
    )
    add_ignore(parser, tensors=True)
    parser.add_argument(
        "--file",
        type=Path,
        help="prompts as JSONL: objects with prompt, messages or prompt_token_ids",
    )
    parser.add_argument(
        "--ids",
        action="store_true",
        help="prompts are token ids, and so is the output where there is no tokenizer",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="wrap each prompt in the tokenizer's chat template (needs transformers)",
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="folder or tokenizer.json (default: MODEL's)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object a completion, with token ids and logprobs",
    )
    group = parser.add_argument_group("sampling")
    for name, (default, text) in SAMPLING.items():
        flag = f"--{name.replace('_', '-')}" if len(name) > 1 else f"-{name}"
        group.add_argument(flag, type=type(default), default=default, help=text)
    stop = "stop string; may be given several times"
    group.add_argument("--stop", action="append", default=[], help=stop)
    group.add_argument("--ignore-eos", action="store_true")
    group.add_argument("--seed", type=int, default=0)
    add_engine(
        parser,
        "positions of prompt and completion together; default: the model's max_position_embeddings",
    )


def run(args: argparse.Namespace) -> int:
    args.model = checkpoint_of(args.model)
    take_run_settings(args)
    config = read_model_config(args.model)
    spec = read_spec(args, args.model if args.model.is_dir() else config)
    is_unreadable = args.ids and importlib.util.find_spec("tokenizers") is None
    tokenizer = None if is_unreadable else read_tokenizer(args.tokenizer or args.model)
    if args.tokenizer and tokenizer is None:
        raise rm.ConfigError(
            f"--tokenizer {plain(args.tokenizer)}: expected a folder with a tokenizer or a "
            "tokenizer.json, got none"
        )
    rows = _rows(args)
    prompts = [_prompt(where, row, args.chat, tokenizer) for where, row in rows]
    given = {name: getattr(args, name) for name in SAMPLING}
    params = rm.SamplingParams(stop=args.stop, ignore_eos=args.ignore_eos, **given)
    stored = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    dtype = args.dtype or str(stored).removeprefix("torch.")
    if dtype not in ("bfloat16", "float32"):
        raise rm.ConfigError(
            f"dtype of {plain(args.model)}: expected bfloat16 or float32, got {plain(dtype)}; "
            "--dtype bfloat16 converts"
        )
    # Rope's frequencies may depend on the length, so the length must not depend on the prompts.
    length = spec.max_position_embeddings if args.max_model_len is None else args.max_model_len
    with (
        warnings_shown("generate"),
        make_generator(
            args,
            spec,
            dtype,
            length,
            tokenizer=tokenizer,
            seed=args.seed,
        ) as generator,
    ):
        if args.random:
            generator.sync_weights(random_weights(generator, args.seed), cast=True)
        else:
            try:
                report = generator.sync_weights(
                    rm.sources.SafetensorsFolder(args.model, args.ignore or ()),
                    cast=args.dtype is not None,
                    strict=not args.skip_unknown,
                )
            except tuple(NOTES) as refused:
                refused.add_note(NOTES[type(refused)])
                raise
            if report.num_skipped:
                print(
                    f"rollmesh generate: {report.num_skipped} tensors skipped that are no "
                    "parameters of this model",
                    file=sys.stderr,
                )
        outputs = generator.generate(
            prompts, params, use_tqdm=sys.stderr.isatty(), on_error="return"
        )
    for output in outputs:
        _print(output, args.json, tokenizer)
    failed = False
    for (where, _), output in zip(rows, outputs, strict=True):
        if (error := output.error) is not None:
            failed = True
            print(f"rollmesh generate: {type(error).__name__}: {where}{error}", file=sys.stderr)
    return 2 if failed else 0


def _rows(args: argparse.Namespace) -> list[tuple[str, Any]]:
    """Returns the prompts of the command line, then those of --file, as pairs of a place for error
    messages and a prompt."""
    rows: list[tuple[str, Any]] = [
        ("", {"prompt_token_ids": _ids(text)} if args.ids else {"prompt": text})
        for text in args.prompts
    ]
    if args.file is not None:
        from rollmesh.run.data import json_lines

        rows += [(f"{where}: ", row) for where, row in json_lines(args.file)]
    if not rows:
        raise rm.ConfigError("no prompts: expected PROMPT arguments or --file")
    return rows


def _prompt(where: str, row: Any, chat: bool, tokenizer: Any) -> str | Chat | list[int]:
    """Returns a prompt for Generator.generate, which encodes it. Rows do not depend on each
    other."""
    if not isinstance(row, dict) or len(row.keys() & set(KEYS)) != 1:
        raise rm.ConfigError(
            f"{where}expected an object with one of {', '.join(KEYS)}, got {shown(row)}"
        )
    if "prompt_token_ids" in row:
        ids = row["prompt_token_ids"]
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise rm.ConfigError(
                f"{where}prompt_token_ids: expected a list of integers, got {shown(ids)}"
            )
        return ids
    if "prompt" in row and not isinstance(row["prompt"], str):
        raise rm.ConfigError(f"{where}prompt: expected text, got {shown(row['prompt'])}")
    if tokenizer is None:
        raise rm.ConfigError(
            "text prompts need a tokenizer in MODEL or --tokenizer; or give token ids with --ids"
        )
    if "prompt" in row and not chat:
        return str(row["prompt"])
    messages = row.get("messages", [{"role": "user", "content": row.get("prompt")}])
    return Chat(messages, {"add_generation_prompt": True})


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as e:
        raise rm.ConfigError(f"--ids: expected token ids such as 5,17,3, got {shown(text)}") from e


def _print(output: rm.RequestOutput, as_json: bool, tokenizer: Any) -> None:
    for c in output.outputs:
        if as_json:
            row = {
                "prompt_token_ids": output.prompt_token_ids.tolist(),
                "index": c.index,
                "text": c.text,
                "token_ids": c.token_ids.tolist(),
                "logprobs": c.logprobs.tolist(),
                "finish_reason": c.finish_reason,
            }
            print(json.dumps(row, ensure_ascii=False))
        else:
            print(c.text if tokenizer is not None else ",".join(map(str, c.token_ids.tolist())))
