"""Generator.from_hf: a folder or a config object gives the same generator as ModelSpec and
Generator by hand, without reading weights.

Input: folders written by transformers (tiny random configs, the tokenizer of data/chars), and
malformed ones. Oracle: a generator made by hand, with the same weights, bit for bit; the path or
value that an error must name."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
from paths import ROOT

import rollmesh as rm

CHARS = ROOT / "data/chars"
CONFIG = {**helpers.tiny_config(), "vocab_size": 128}
SMALL: dict[str, Any] = {"max_model_len": 64, "kv_cache_gib": 0.01, "threads": 1}
PARAMS = rm.SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)


def folder_of(path: Path, *files: str, config: Any = CONFIG) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (path / "model.safetensors").write_bytes(b"not weights")  # must not be read
    for name in files:
        shutil.copy(CHARS / name, path / name)
    return path


def sampled(gen: rm.Generator, prompt: Any) -> list[Any]:
    gen.sync_weights(helpers.numpy_state_dict(CONFIG), cast=True)
    sample = gen.generate([prompt], PARAMS)[0].outputs[0]
    return [sample.token_ids.tolist(), sample.logprobs.tobytes()]


def test_a_folder_a_config_and_a_spec_give_the_same_bits(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    folder = folder_of(tmp_path / "model")
    made = [
        rm.Generator(rm.ModelSpec.from_hf(CONFIG), **SMALL),
        *(
            rm.Generator.from_hf(source, **SMALL)
            for source in (folder, str(folder), folder / "config.json", CONFIG)
        ),
        rm.Generator.from_hf(Qwen3Config(**CONFIG), **SMALL),
    ]
    outcomes = []
    for gen in made:
        with gen:
            assert gen.tokenizer is None
            assert gen.version is None
            outcomes.append(sampled(gen, np.arange(5)))
    assert outcomes == [outcomes[0]] * len(made)


@pytest.mark.parametrize(
    "files", [("tokenizer.json",), ("tokenizer.json", "tokenizer_config.json")]
)
def test_the_folders_tokenizer_is_taken(tmp_path: Path, files: tuple[str, ...]) -> None:
    folder = folder_of(tmp_path / "model", *files)
    with (
        rm.Generator.from_hf(folder, **SMALL) as gen,
        rm.Generator.from_hf(folder, tokenizer=None, **SMALL) as plain,
    ):
        assert plain.tokenizer is None
        encoded = gen.tokenizer.encode("abc")
        ids = getattr(encoded, "ids", encoded)
        assert sampled(gen, "abc") == sampled(plain, ids)
        own = getattr(gen.tokenizer, "eos_token_id", None)
        assert gen.eos_token_ids == plain.eos_token_ids + (() if own is None else (own,))


def test_without_transformers_tokenizer_json_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.request.text.find_spec", lambda name: None)
    folder = folder_of(tmp_path / "model", "tokenizer.json", "tokenizer_config.json")
    with rm.Generator.from_hf(folder, **SMALL) as gen:
        assert type(gen.tokenizer).__module__.startswith("tokenizers")
    (folder / "tokenizer.json").unlink()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        rm.ConfigError,
        match=r"model: reading its tokenizer needs transformers, .*; tokenizer=None ",
    ):
        rm.Generator.from_hf(folder, **SMALL)


def test_options_and_ignored_keys_pass(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", config={**CONFIG, "new_key": 3})
    with pytest.raises(rm.ConfigError, match="new_key=3"):
        rm.Generator.from_hf(folder, **SMALL)
    with rm.Generator.from_hf(folder, ignore=("new_key",), dtype="float32", **SMALL) as gen:
        assert gen.dtype == "float32"
        assert gen.max_model_len == 64
    with pytest.raises(TypeError, match="no_option"):
        rm.Generator.from_hf(folder, ignore=("new_key",), no_option=1)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope, default, most",
    [
        ({}, 4096, 128),
        ({"rope_type": "linear", "factor": 2.0}, 4096, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 128, 256),
        (YARN, 4096, 256),
        (YARN | {"factor": 1.5}, 4096, 128),
        (LONGROPE, 128, 128),
    ],
)
def test_the_length_of_a_generator(
    rope: dict[str, Any], default: int, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Without max_model_len the length is a constant, or the config's if frequencies depend on it.
    A length beyond the positions of the rope settings is logged once."""
    config = {k: v for k, v in CONFIG.items() if k != "rope_parameters"}
    config |= {"head_dim": 16, "max_position_embeddings": 128, "rope_theta": 1e4}
    config |= {"rope_scaling": rope} if rope else {}
    sizes = {"kv_cache_gib": 0.01, "threads": 1}
    for length, warned in ((None, False), (most, False), (most + 1, True)):
        caplog.clear()
        with rm.Generator.from_hf(config, max_model_len=length, **sizes) as gen:
            assert gen.max_model_len == (default if length is None else length)
        said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        wanted = f"max_model_len: expected at most {most}, the positions that the model's config is"
        assert [text.startswith(wanted) for text in said] == [True] * warned


@pytest.mark.parametrize(
    "source, error, said",
    [
        (
            "Qwen/Qwen3-0.6B",
            rm.ConfigError,
            r"Qwen/Qwen3-0\.6B: No such file or directory; expected a local folder with "
            r"config\.json",
        ),
        (
            "a" * 5000,
            rm.ConfigError,
            r"^a{200}…: File name too long; expected a local folder with config\.json, or that "
            r"file$",
        ),
        (
            3,
            rm.ConfigError,
            "config: expected a config object, a dict or a folder with config.json, got a int",
        ),
        ({**CONFIG, "model_type": "gpt2"}, rm.ConfigError, "model_type: expected .*got 'gpt2'"),
        ({**CONFIG, "hidden_size": -1}, rm.ConfigError, "hidden_size: .*got -1"),
        ("empty", rm.ConfigError, r"empty/config\.json: No such file or directory"),
        ("broken", rm.FormatError, r"broken/config\.json: expected JSON"),
        ("list", rm.FormatError, r"list/config\.json: expected a JSON object, got a list"),
        ("tokenizer", rm.ConfigError, r"tokenizer/tokenizer\.json: expected a tokenizer\.json"),
        ("settings", rm.ConfigError, "settings: expected the files of a tokenizer"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any, error: type[Exception], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    folder_of(Path("broken"), config="{")
    folder_of(Path("list"), config="[1]")
    (folder_of(Path("tokenizer")) / "tokenizer.json").write_text("{}")
    (folder_of(Path("settings")) / "tokenizer_config.json").write_text("{")
    with pytest.raises(error, match=said):
        rm.Generator.from_hf(source, **SMALL)
