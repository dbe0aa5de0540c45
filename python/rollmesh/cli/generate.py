"""`rollmesh generate MODEL PROMPT …`: complete prompts with the weights of a checkpoint folder.

The generator itself reads no checkpoint. This command plays the trainer: it reads the folder's safetensors and pushes them.
`--random` fills the shape with random weights instead, which shows that everything runs and nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import rollmesh as rm
from rollmesh.cli.options import (
    add_engine,
    checkpoint_of,
    make_generator,
    read_model_config,
    take_run_settings,
    tokenizer_file,
)
from rollmesh.cli.weights import random_weights
from rollmesh.request.text import load_tokenizer
from rollmesh.runtime.messages import plain, shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="checkpoint folder, or a run folder: its newest checkpoint; with --random also a config.json or TOML",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text; with --ids token ids such as 5,17,3")
    parser.add_argument("--random", action="store_true", help="random weights of this shape")
    parser.add_argument("--skip-unknown", action="store_true", help="skip tensors of the checkpoint that are no parameters, and count them")
    parser.add_argument("--file", type=Path, help="prompts as JSONL: objects with prompt, messages or prompt_token_ids")
    parser.add_argument("--ids", action="store_true", help="prompts are token ids, and so is the output where there is no tokenizer")
    parser.add_argument("--chat", action="store_true", help="wrap each prompt in the tokenizer's chat template (needs transformers)")
    parser.add_argument("--tokenizer", type=Path, help="folder or tokenizer.json (default: MODEL's)")
    parser.add_argument("--json", action="store_true", help="one JSON object a completion, with token ids and logprobs")
    group = parser.add_argument_group("sampling")
    group.add_argument("-n", type=int, default=1, help="completions of each prompt")
    group.add_argument("--max-tokens", type=int, default=64)
    group.add_argument("--temperature", type=float, default=1.0)
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=-1)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--stop", action="append", default=[], help="stop string; may be given several times")
    group.add_argument("--ignore-eos", action="store_true")
    group.add_argument("--seed", type=int, default=0)
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    args.model = checkpoint_of(args.model)
    take_run_settings(args)
    config = read_model_config(args.model)
    spec = rm.ModelSpec.from_hf(args.model if args.model.is_dir() else config)
    file = tokenizer_file(args.tokenizer or args.model)
    if args.tokenizer and file is None:
        raise rm.ConfigError(f"--tokenizer {args.tokenizer}: there is no tokenizer.json")
    unreadable = args.ids and importlib.util.find_spec("tokenizers") is None
    tokenizer = None if file is None or unreadable else load_tokenizer(file)
    prompts = _prompts(args, tokenizer, file)
    params = rm.SamplingParams(
        n=args.n,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )
    stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    dtype = args.dtype or stored
    if dtype not in ("bfloat16", "float32"):
        raise rm.ConfigError(f"dtype of {plain(args.model)}: expected bfloat16 or float32, got {plain(dtype)}; --dtype bfloat16 converts")
    longest = max(len(ids) for ids in prompts)
    with make_generator(
        args,
        spec,
        dtype,
        longest + args.max_tokens if args.max_model_len is None else args.max_model_len,
        tokenizer=tokenizer,
        eos_token_ids=spec.eos_token_ids,
        seed=args.seed,
    ) as generator:
        if args.random:
            generator.sync_weights(random_weights(generator, args.seed), cast=True)
        else:
            try:
                report = generator.sync_weights(
                    rm.sources.SafetensorsFolder(args.model),
                    cast=args.dtype is not None,
                    strict=not args.skip_unknown,
                )
            except rm.errors.DTypeError as refused:
                refused.add_note("--dtype bfloat16 and --dtype float32 convert weights of other float types")
                raise
            except rm.UnexpectedKeyError as refused:
                refused.add_note("--skip-unknown skips them")
                raise
            if report.num_skipped:
                print(f"rollmesh generate: {report.num_skipped} tensors skipped that are no parameters of this model", file=sys.stderr)
        outputs = generator.generate(prompts, params, use_tqdm=sys.stderr.isatty(), on_error="return")
    for output in outputs:
        _print(output, args.json, tokenizer)
    failed = [output.error for output in outputs if output.error is not None]
    for error in failed:
        print(f"rollmesh generate: {type(error).__name__}: {error}", file=sys.stderr)
    return 2 if failed else 0


def _prompts(args: argparse.Namespace, tokenizer: Any, file: Path | None) -> list[list[int]]:
    rows: list[Any] = [{"prompt_token_ids": _ids(text)} if args.ids else {"prompt": text} for text in args.prompts]
    if args.file is not None:
        rows += _read_rows(args.file)
    if not rows:
        raise rm.ConfigError("no prompts: expected PROMPT arguments or --file")
    if any("messages" in row or (args.chat and "prompt" in row) for row in rows):
        return _chat_prompts(rows, file)
    return [_encode(row, tokenizer) for row in rows]


def _read_rows(file: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            row = json.loads(line)
            if not isinstance(row, dict) or not row.keys() & {"prompt", "messages", "prompt_token_ids"}:
                raise rm.ConfigError(f"line {number}: expected an object with prompt, messages or prompt_token_ids, got {line:.80}")
            rows.append(row)
    except OSError as e:
        raise rm.ConfigError(f"--file {plain(file)}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise rm.ConfigError(f"--file {plain(file)}: {e}") from e
    return rows


def _encode(row: dict[str, Any], tokenizer: Any) -> list[int]:
    if "prompt_token_ids" in row:
        ids = row["prompt_token_ids"]
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise rm.ConfigError(f"prompt_token_ids: expected a list of integers, got {ids!r:.80}")
        return ids
    if not isinstance(row.get("prompt"), str):
        raise rm.ConfigError(f"prompt: expected text, got {row.get('prompt')!r:.80}")
    if tokenizer is None:
        raise rm.ConfigError("text prompts need a tokenizer.json in MODEL or --tokenizer; or give token ids with --ids")
    return list(tokenizer.encode(row["prompt"]).ids)


def _chat_prompts(rows: list[Any], file: Path | None) -> list[list[int]]:
    from rollmesh.grpo.data import load_tokenizer as load_chat_tokenizer
    from rollmesh.grpo.data import make_prompt

    if file is None:
        raise rm.ConfigError("a chat needs a tokenizer with a chat template in MODEL or --tokenizer")
    try:
        tokenizer = load_chat_tokenizer(file.parent)
    except (ImportError, OSError, TypeError, ValueError, KeyError, AttributeError) as e:
        raise rm.ConfigError(f"--chat: {file.parent} has no tokenizer that transformers reads: {e}") from e
    return [_encode(row, None) if "prompt_token_ids" in row else list(make_prompt(row, tokenizer, True, 0, "prompt").ids) for row in rows]


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
