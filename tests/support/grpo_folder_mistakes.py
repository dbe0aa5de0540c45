"""Mistakes in the folders that `rollmesh grpo` reads: the checkpoint of a model, and a run that is
resumed. Used by tests/support/grpo_fuzz.py."""

from __future__ import annotations

import json
import math
import random
import shutil
import struct
from pathlib import Path
from typing import Any

from grpo_mistakes import AKIN, TOML, Case, Failure, Table, damaged, is_number, junk, newest

FLIPS = [b"", b"\x00", b"\xff", b"\x7f", b"\x80", b"\xc0\x7f"]


def tensors_of(content: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """Reads the tensors by the safetensors format; returns None for a malformed file."""
    try:
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length].decode(), object_pairs_hook=once)
        body, found, end = content[8 + length :], {}, 0
        tensors = ((name, at_) for name, at_ in header.items() if name != "__metadata__")
        for name, at_ in sorted(tensors, key=lambda item: item[1].get("data_offsets", [0])):
            first, last = at_["data_offsets"]
            sizes = {
                "F32": 4,
                "BF16": 2,
                "F16": 2,
                "F64": 8,
                "U8": 1,
                "I8": 1,
                "BOOL": 1,
                "I16": 2,
                "I32": 4,
                "I64": 8,
            }
            if (
                first != end
                or last - first != math.prod(at_["shape"]) * sizes.get(at_["dtype"], last - first)
                or last > len(body)
            ):
                return None
            found[name], end = (at_["dtype"], tuple(at_["shape"]), body[first:last]), last
        return found if end == len(body) else None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        return None


def once(pairs: list[tuple[str, Any]]) -> Table:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)


def damaged_tensors(r: random.Random, file: Path) -> str:
    """Cuts a file, changes bytes of it, or a value of its header."""
    content = bytearray(file.read_bytes())
    (length,) = struct.unpack_from("<Q", content)
    how = r.choice(["cut", "header byte", "header", "length", "data", "data", "tail"])
    if how == "cut":
        del content[r.randrange(len(content)) :]
    elif how == "header byte":
        content[8 + r.randrange(length)] ^= 1 << r.randrange(8)
    elif how == "header":
        header = json.loads(content[8 : 8 + length])
        name = r.choice(list(header))
        key = r.choice(["dtype", "shape", "data_offsets", None])
        if key is None:
            change = r.choice(["drop", "rename", "add"])
            value = header.pop(name) if change != "add" else header[name]
            if change != "drop":
                header[r.choice(["x", name + "x", "", "\ud800", "model.norm.weight2"])] = value
        elif isinstance(header[name], dict):
            header[name][key] = r.choice(
                [
                    junk(r) if r.random() < 0.9 else 0,
                    "I32",
                    "BF16",
                    [0, 4],
                    [4, 0],
                    [2**63, 2**63],
                    [-1, 3],
                    [2**32, 2**32],
                ]
            )
        encoded = json.dumps(header).replace("Infinity", "1e999").encode()
        content[: 8 + length] = struct.pack("<Q", len(encoded)) + encoded
    elif how == "length":
        content[:8] = struct.pack(
            "<Q", r.choice([0, 1, length - 1, length + 1, 2**32, 2**63, 2**64 - 1])
        )
    elif how == "tail":
        content += bytes(r.choice([1, 8, 4096]))
    else:
        content[8 + length + r.randrange(len(content) - 8 - length)] ^= 1 << r.randrange(8)
    file.write_bytes(bytes(content))
    return how


def weights(r: random.Random, trial: Path) -> Case:
    """Mistakes in model.safetensors: a reader gets the stored contents, or an error."""
    file = trial / "model/model.safetensors"
    before = tensors_of(file.read_bytes())
    how = damaged_tensors(r, file)
    now = tensors_of(file.read_bytes())
    assert before is not None
    case = Case(
        f"model.safetensors: {how}",
        "either",
        ("model", "gradient", "non-finite", "finite"),
        ["folder.toml"],
    )
    if now is None or {k: v[:2] for k, v in now.items()} != {k: v[:2] for k, v in before.items()}:
        case.verdict = "refused"
    case.check = lambda where: same_weights(where, now or {})
    return case


def shards(r: random.Random, trial: Path) -> Case:
    """The same weights in two files with an index, with or without a mistake."""
    folder = trial / "model"
    tensors = tensors_of((folder / "model.safetensors").read_bytes())
    assert tensors is not None
    (folder / "model.safetensors").unlink()
    names, files = (
        list(tensors),
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
    )
    half = r.randrange(1, len(names))
    for file, part in zip(files, (names[:half], names[half:]), strict=True):
        write_tensors(folder / file, {name: tensors[name] for name in part})
    places: dict[str, Any] = {name: files[i >= half] for i, name in enumerate(names)}
    table: Table = {
        "metadata": {"total_size": sum(len(x) for _, _, x in tensors.values())},
        "weight_map": places,
    }
    how = r.choice(
        [
            "right",
            "right",
            "metadata",
            "left out",
            "unknown",
            "other file",
            "no file",
            "one file more",
            "junk",
            "no map",
            "path",
            "bytes",
        ]
    )
    verdict, name = "either", r.choice(names)
    if how == "metadata":
        table["metadata"] = r.choice([{}, {"total_size": r.choice([0, 2**40])}])
    elif how == "left out":
        del places[name]
    elif how == "unknown":
        places["unheard_of"], verdict = r.choice(files), "refused"
    elif how == "other file":
        places[name] = files[places[name] == files[0]]
    elif how == "no file":
        (folder / r.choice(files)).unlink()
        verdict = "refused"
    elif how == "one file more":
        write_tensors(folder / "model-00003-of-00002.safetensors", {name: tensors[name]})
    elif how == "junk":
        places[name], verdict = (
            r.choice([None, 1, [], {}, "", "nowhere.safetensors", "x" * 1000, "\x00"]),
            "refused",
        )
    elif how == "no map":
        table, verdict = r.choice([{}, {"weight_map": r.choice([None, [], 1, "x", {}])}]), "refused"
    elif how == "path":
        places[name] = r.choice(
            ["../model/" + places[name], str(folder / places[name]), "./" + places[name]]
        )
    text = bytearray(json.dumps(table).encode())
    if how == "bytes":
        damaged(r, text, [b"", b"\xff", b"\x00", b"{", b"}", b"[" * 100_000, b"9" * 5000, b'"'])
    elif how == "right":
        verdict = "accepted"
    (folder / "model.safetensors.index.json").write_bytes(bytes(text))
    return Case(
        f"index: {how}",
        verdict,
        ("model",),
        ["folder.toml"],
        check=lambda where: same_weights(where, tensors),
    )


def write_tensors(file: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    header, end = {}, 0
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [end, end + len(content)],
        }
        end += len(content)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write_bytes(
        struct.pack("<Q", len(encoded))
        + encoded
        + b"".join(content for *_, content in tensors.values())
    )


def same_weights(where: Path, wanted: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    import numpy as np

    found = tensors_of((newest(where / "out") / "model.safetensors").read_bytes())
    if found is None or found.keys() != wanted.keys():
        raise Failure("the checkpoint has other weights than the folder")
    for name, (_, _, content) in wanted.items():
        a, b = np.frombuffer(content, np.float32), np.frombuffer(found[name][2], np.float32)
        if not np.isfinite(a).all() or (np.abs(a.astype(np.float64) - b) > 1e-20).any():
            raise Failure(f"{name}: the checkpoint has other values than the folder")


ODD_KEYS = [
    "architectures",
    "dtype",
    "torch_dtype",
    "_attn_implementation",
    "transformers_version",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "id2label",
]
ODD_KEYS += [
    "tie_word_embeddings",
    "rope_parameters",
    "rope_scaling",
    "layer_types",
    "sliding_window",
    "quantization_config",
    "auto_map",
    "num_labels",
]
ODD_KEYS += [
    "attention_dropout",
    "problem_type",
    "output_attentions",
    "return_dict",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "_name_or_path",
]
ENDS = [
    "eos_token_id",
    "temperature",
    "top_k",
    "do_sample",
    "max_length",
    "num_beams",
    "pad_token_id",
    "unheard_of",
    "transformers_version",
    "cache_implementation",
]


def json_file(r: random.Random, trial: Path) -> Case:
    """Mistakes in config.json and generation_config.json: a key, or bytes."""
    import rollmesh as rm

    name = r.choice(["config.json", "config.json", "generation_config.json"])
    file = trial / "model" / name
    if r.random() < 0.7:
        table = json.loads(file.read_text())
        keys = [*table, *ODD_KEYS] if name == "config.json" else ENDS
        key = r.choice(keys)
        value = junk(r)
        if r.random() < 0.15:
            table.pop(key, None)
        elif is_number(table.get(key)) and r.random() < 0.4:
            table[key] = r.choice(
                [table[key] + 1, table[key] * 2, -table[key], str(table[key]), [table[key]]]
            )
        elif not (is_number(value) and abs(value) >= 10**400):
            table[key] = value
        file.write_text(json.dumps(table))
        what, names = f"{key}: {table.get(key)!r:.80}", (key, *AKIN.get(key, "").split())
    else:
        text = bytearray(file.read_bytes())
        damaged(
            r,
            text,
            [
                b"",
                b"\xff",
                b"\x00",
                b"{",
                b"}",
                b"[" * 100_000,
                b"9" * 5000,
                b'"',
                b"null",
                b"NaN",
                b"\xef\xbb\xbf",
                b"-",
            ],
        )
        file.write_bytes(bytes(text))
        what, names = "bytes", ("",)
    names = ("model", name, "layer_types", *names)
    try:
        spec = rm.ModelSpec.from_hf(trial / "model")
    except (rm.Error, OSError):
        return Case(f"{name}: {what}", "refused", names, ["folder.toml"])

    def check(where: Path) -> None:
        if (kept := rm.ModelSpec.from_hf(newest(where / "out"))) != spec:
            raise Failure(f"another model is kept: {kept} of {spec}")

    return Case(f"{name}: {what}", "either", names, ["folder.toml"], check=check)


def tokenizer(r: random.Random, trial: Path) -> Case:
    name = r.choice(["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
    file = trial / "model" / name
    if not file.exists():
        file = trial / "model/tokenizer.json"
    if r.random() < 0.15:
        file.unlink()
        return Case(f"no {file.name}", "either", ("model", "token"), ["folder.toml"])
    if r.random() < 0.5 and file.suffix == ".json":
        table = json.loads(file.read_text())
        place, key = table, r.choice(list(table))
        while isinstance(place[key], dict) and place[key] and r.random() < 0.7:
            place = place[key]
            key = r.choice(list(place))
        value = junk(r)
        if r.random() < 0.2:
            del place[key]
        elif not (is_number(value) and abs(value) >= 10**400):
            place[key] = value
        file.write_text(json.dumps(table))
        return Case(
            f"{file.name}: {key} {place.get(key)!r:.80}",
            "either",
            ("model", "token", "vocab", "train.jsonl", "heldout"),
            ["folder.toml"],
        )
    text = bytearray(file.read_bytes())
    damaged(
        r,
        text,
        [b"", b"\xff", b"\x00", b"{", b"}", b"[" * 5000, b"9" * 5000, b'"', b"null", b"{{", b"{%"],
    )
    file.write_bytes(bytes(text))
    return Case(
        f"{file.name}: bytes",
        "either",
        ("model", "token", "vocab", "train.jsonl", "heldout"),
        ["folder.toml"],
    )


# ------------------------------------------------------------------------------------ run folders
def run_folder(r: random.Random, trial: Path) -> Case:
    """Mistakes in a run folder that has one step left: in a file of its last checkpoint, in its
    logs, or in other folders beside it."""
    name = r.choice(["run", "ahead"])
    out = trial / "out"
    shutil.copytree(trial / f"{name}-left", out)
    folder = out / "checkpoints/step_000001"
    case = r.choice(
        [
            state,
            optimizer,
            optimizer,
            checkpoint_weights,
            logs,
            logs,
            beside,
            *([ready] if name == "ahead" else []),
        ]
    )(r, out, folder)
    case.options, case.resumes = [f"{name}.toml", *case.options], True
    case.what = f"{name}: {case.what}"
    return case


MAY_CHANGE = {
    "train.steps",
    "train.gradient_checkpointing",
    "generator.threads",
    "generator.engine",
}
MAY_CHANGE |= {"rollout.log_completions", "rollout.num_completions_to_print"}


def state(r: random.Random, out: Path, folder: Path) -> Case:
    file = folder / "trainer/state.json"
    table = json.loads(file.read_text())
    how = r.choice(["next_step", "format", "config", "drop", "bytes", "missing"])
    names = ("state.json", "step_000001", "--resume")
    if how == "missing":
        file.unlink()
        return Case("no state.json", "refused", names)
    if how == "bytes":
        text = bytearray(file.read_bytes())
        damaged(r, text, [b"", b"\xff", b"\x00", b"[" * 100_000, b"9" * 5000, b'"', b"null", b"{"])
        file.write_bytes(bytes(text))
        try:
            same = json.loads(text.decode()) == table
        except (ValueError, RecursionError):
            same = False
        return Case(
            "state.json: bytes",
            "same" if same else "refused" if b"{" not in text[:1] else "either",
            (*names, "[train] steps"),
        )
    if how == "config":
        section = r.choice([n for n in TOML if n not in ("seed", "eval", "checkpoint")])
        key = r.choice([k for k in table["config"][section] if f"{section}.{k}" not in MAY_CHANGE])
        if table["config"][section][key] == (value := junk(r)):
            value = "another"
        table["config"][section][key] = 0.5 if is_number(value) and abs(value) >= 10**400 else value
        file.write_text(json.dumps(table))
        return Case(f"state.json: {section}.{key} {value!r:.50}", "refused", names)
    if how == "drop":
        del table[r.choice(["next_step", "format", "config"])]
    else:
        key = "next_step" if how == "next_step" else "format"
        value = r.choice([0, 2, 3, -1, 1.5, "1", None, [], 2**70, math.nan])
        table[key] = value
    file.write_text(json.dumps(table))
    return Case(f"state.json: {how} {table.get(how)!r:.50}", "refused", (*names, "[train] steps"))


def of_tensors(r: random.Random, file: Path, *names: str) -> Case:
    """Mistakes in a safetensors file of a checkpoint whose digest is in state.json."""
    before = file.read_bytes()
    how = damaged_tensors(r, file)
    same = file.read_bytes() == before
    return Case(
        f"{file.name}: {how}", "same" if same else "refused", (*names, file.name), keeps=not same
    )


def optimizer(r: random.Random, out: Path, folder: Path) -> Case:
    file = folder / "trainer/optimizer.safetensors"
    if r.random() < 0.1:
        file.unlink()
        return Case("no optimizer.safetensors", "refused", (file.name,))
    return of_tensors(r, file, file.name)


def ready(r: random.Random, out: Path, folder: Path) -> Case:
    file = folder / "trainer/rollouts.safetensors"
    if r.random() < 0.2:
        file.unlink()
        return Case("no rollouts.safetensors", "refused", (file.name,))
    return of_tensors(r, file, file.name, "input_ids")


def checkpoint_weights(r: random.Random, out: Path, folder: Path) -> Case:
    file = folder / r.choice(
        [
            "model.safetensors",
            "model.safetensors",
            "config.json",
            "tokenizer.json",
            "generation_config.json",
        ]
    )
    if file.suffix != ".json":
        return of_tensors(r, file, "step_000001")
    file.unlink()
    if file.name == "tokenizer.json":  # the run's own tokenizer is read
        return Case("no tokenizer.json", "same")
    return Case(
        f"no {file.name}",
        "same" if file.name.startswith("gen") else "refused",
        ("step_000001",),
        apart_from=file.name,
    )


def logs(r: random.Random, out: Path, folder: Path) -> Case:
    """Lines before the resumed step are kept unchanged. A line that is not valid metrics is
    refused."""
    name = r.choice(["metrics.jsonl", "completions.jsonl"])
    file = out / name
    lines = file.read_bytes().splitlines(keepends=True)
    how = r.choice(["half", "missing", "later", "junk", "folder", "bytes", "deep", "events"])
    if how == "missing":
        file.unlink()
        return Case(f"no {name}", "either")
    if how == "half":
        half = r.randrange(1, len(lines[-1]))
        file.write_bytes(b"".join(lines[:-1]) + lines[-1][:half])
        return Case(f"{name}: half a line", "same")
    if how == "later":
        file.write_bytes(
            b"".join(lines[:-1])
            + json.dumps({"step": r.choice([1, 2, 7, 10**30])}).encode()
            + b"\n"
            + lines[-1]
        )
        return Case(f"{name}: a later step", "same")
    if how == "events":
        shutil.rmtree(out / "events")
        if r.random() < 0.5:
            (out / "events").touch()
            # Lines of later steps are dropped before the error.
            return Case("events is a file", "refused", ("events",), keeps=False)
        return Case("no events", "same")
    if how == "folder":
        file.unlink()
        file.mkdir()
        return Case(f"{name} is a folder", "refused", (name,))
    if how == "bytes":
        text = bytearray(file.read_bytes())
        damaged(r, text, [b"", b"\xff", b"\x00", b'"', b"null", b"\n", b"9" * 5000])
        file.write_bytes(bytes(text))
        return Case(f"{name}: bytes", "either", (name,))
    bad = (
        b"[" * 100_000
        if how == "deep"
        else r.choice(
            [
                b"garbage",
                b"[1]",
                b"{}",
                b'{"step": "0"}',
                b"\xff",
                b'{"step": true}',
                b'{"step": NaN}',
                b'{"step": 1.0}',
            ]
        )
    )
    file.write_bytes(lines[0] + bad + b"\n" + b"".join(lines[1:]))
    if name == "completions.jsonl":
        return Case(f"{name}: {bad!r:.30}", "same")  # dropped
    return Case(f"{name}: {bad!r:.30}", "refused", (name,))


def beside(r: random.Random, out: Path, folder: Path) -> Case:
    how = r.choice(
        [
            "partial",
            "empty",
            "copy",
            "backup",
            "file",
            "renamed",
            "lock",
            "lock folder",
            "gone",
            "picture",
            "none",
            "inside",
            "part files",
        ]
    )
    if how == "partial":
        shutil.copytree(folder, folder.with_name(".step_000002.partial"))
    elif how == "part files":
        for name in (".metrics.jsonl.partial", ".completions.jsonl.partial"):
            (out / name).write_text("half")
    elif how == "empty":
        folder.with_name("step_000009").mkdir()
    elif how == "copy":
        shutil.copytree(folder, folder.with_name("best"))
    elif how == "backup":  # of a step that is older than the last
        shutil.copytree(
            folder,
            folder.with_name(
                r.choice(["step_000000.bak", "step_000000_before", "step_000000 (copy)"])
            ),
        )
        state_file = next(folder.parent.glob("step_000000*")) / "trainer/state.json"
        state_file.write_text(json.dumps(json.loads(state_file.read_text()) | {"next_step": 0}))
    elif how == "file":
        folder.with_name("step_000009").write_text("no folder")
    elif how == "renamed":
        folder.rename(folder.with_name(r.choice(["step_000000", "step_000002", "step_000007"])))
        return Case("a checkpoint of another step's name", "refused", ("step_0000",))
    elif how == "lock":
        (out / ".lock").write_bytes(r.choice([b"", b"process 1 on nowhere\n", b"\xff" * 1000]))
    elif how == "lock folder":
        (out / ".lock").mkdir()
        return Case("a folder .lock", "refused", (".lock",))
    elif how in ("gone", "none"):
        shutil.rmtree(folder if how == "gone" else out / "checkpoints")
        return Case("no checkpoint", "refused", ("--resume",))
    elif how == "picture":
        (out / "curves.png").unlink()
        (out / "curves.png").mkdir()
        return Case("curves.png is a folder", "same")
    elif how == "inside":
        return Case(
            "a checkpoint's own path", "same", (), ["--resume", "out/checkpoints/step_000001"]
        )
    return Case(f"beside: {how}", "same")
