"""Checkpoint folders that `rollmesh grpo` starts from: missing, unknown or differently stored
contents are refused, and every end token counts.

Oracle of the refusals: the class of the error with which a generator, and so `rollmesh generate`,
refuses the same folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import TINY_RUN
from paths import ROOT

import rollmesh as rm
from rollmesh.cli import main

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from rollmesh.grpo import loop  # noqa: E402
from rollmesh.run import config, data  # noqa: E402
from rollmesh.run import models as pretrained  # noqa: E402

DENSE, MOE = ROOT / "configs/qwen3_debug.toml", ROOT / "configs/qwen3_moe_debug.toml"
NORM, EXPERT = "model.norm.weight", "model.layers.0.mlp.experts.{}.up_proj.weight"
pytestmark = pytest.mark.usefixtures("torch_as_it_was")

Tensors = dict[str, Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dense and moe: folders of random models, with the tokenizer of data/chars."""
    root = tmp_path_factory.mktemp("folders")
    tokenizer = data.load_tokenizer(ROOT / "data/chars")
    for name, file in (("dense", DENSE), ("moe", MOE)):
        pretrained.build_model(config.load(file, TINY_RUN), tokenizer).save_pretrained(
            str(root / name)
        )
        tokenizer.save_pretrained(str(root / name))
    return root


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(whole / name, tmp_path / name))


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_key(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refused_by_a_generator(folder: Path) -> type[Exception]:
    with (
        pytest.raises(rm.Error) as caught,
        rm.Generator.from_hf(folder, max_model_len=16, kv_cache_gib=0.001, threads=1) as gen,
    ):
        gen.sync_weights(rm.sources.SafetensorsFolder(folder), cast=True)
    return caught.type


EDITS: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "missing": ("dense", lambda t: t.pop(NORM), rf"1 of the weights: missing: {NORM}$"),
    "unknown": (
        "dense",
        lambda t: t.update(extra=torch.ones(2)),
        r"1 of the weights: no parameter of this model: extra\nif they do not matter: ",
    ),
    "int8": (
        "dense",
        lambda t: t.update({NORM: t[NORM].to(torch.int8)}),
        rf"expected bfloat16, .*: {NORM} \(I8\)$",
    ),
    "fp8": (
        "dense",
        lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)}),
        rf"expected bfloat16, .*: {NORM} \(F8_E4M3\)$",
    ),
    "shape": (
        "dense",
        lambda t: t.update({NORM: t[NORM][:-1].clone()}),
        rf"{NORM} \(expected \[32\], got \[31\]\)$",
    ),
    "expert missing": (
        "moe",
        lambda t: t.pop(EXPERT.format(1)),
        r"1 of the weights: missing: .*experts\.1\.up_proj\.weight$",
    ),
    "expert unknown": (
        "moe",
        lambda t: t.update({EXPERT.format(99): t[EXPERT.format(1)].clone()}),
        r"no parameter .*experts\.99\.",
    ),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", EDITS)
def test_weights_that_do_not_fit_are_refused_as_a_generator_does(
    case: str, folder: Callable[[str], Path]
) -> None:
    name, change, message = EDITS[case]
    where = folder(name)
    assert pretrained.load_model(where, "float32") is not None
    edit(where, change)
    with pytest.raises(refused_by_a_generator(where), match=message):
        pretrained.load_model(where, "float32")


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            {"attention_bias": True},
            r"8 of the weights: missing: model\.layers\.0\.self_attn\.k_proj\.bias, ",
        ),
        (
            {"tie_word_embeddings": True},
            r"lm_head\.weight: expected the values of model\.embed_tokens\.weight, .* got others$",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantized weights are not supported"),
        ({"model_type": "gpt9"}, r"model_type: expected one of llama, .* got 'gpt9'$"),
        (
            {"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}},
            r"rope_type: expected one of default, .* got 'nope'$",
        ),
        (
            {"num_hidden_layers": 0},
            r"num_hidden_layers: expected an integer in \[1, 1024\], got 0$",
        ),
        ({"eos_token_id": "</s>"}, r"eos_token_id='</s>' is not in "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_does_not_fit_is_refused_as_a_generator_does(
    keys: dict[str, Any], message: str, folder: Callable[[str], Path]
) -> None:
    where = folder("dense")
    set_key(where, **keys)
    with pytest.raises(refused_by_a_generator(where), match=message):
        pretrained.load_model(where, "float32")


def test_ignore_passes_over_keys_and_tensors_of_the_folder(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Ignores keys in the rope table and beside it, and buffers. The trainer's model and its
    checkpoints have none of them, so that the generator, patch and later readers need no `ignore`.
    Oracle: the folder without them."""
    where, rope = (
        folder("dense"),
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 1e6,
        },
    )
    set_key(where, rope_parameters=rope)
    want = pretrained.load_model(where, "float32")
    set_key(where, rope_parameters=rope | {"attn_factor": 0.5}, team="b")
    edit(
        where,
        lambda t: t.update(
            {"model.layers.0.self_attn.rope.sin": torch.ones(2), "extra": torch.ones(2)}
        ),
    )
    ignore = ("rope_scaling.attn_factor", "team", "*.rope.sin", "extra")
    with pytest.raises(
        rm.ConfigError,
        match=r"""--set 'model\.ignore=\["team", "rope_parameters\.attn_factor"\]'""",
    ):
        pretrained.load_model(where, "float32")
    with pytest.raises(rm.UnexpectedKeyError, match="no parameter of this model: extra"):
        pretrained.load_model(where, "float32", ignore[:3])
    for some, refused in (
        (("team",), "attn_factor=0.5"),
        (("rope_scaling.attn_factor",), "team='b'"),
    ):
        with pytest.raises(rm.ConfigError, match=refused):
            pretrained.folder_config(where, some)
    found = pretrained.load_model(where, "float32", ignore)
    assert found.state_dict().keys() == want.state_dict().keys()
    assert all(torch.equal(x, want.state_dict()[name]) for name, x in found.state_dict().items())
    ids = torch.arange(20)[None]
    assert torch.equal(found(ids).logits, want(ids).logits)
    assert (
        rm.ModelSpec.from_hf(found.config)
        == rm.ModelSpec.from_hf(want.config)
        == rm.ModelSpec.from_hf(where, ignore=ignore)
    )
    found.save_pretrained(tmp_path / "saved")
    assert rm.ModelSpec.from_hf(tmp_path / "saved") == rm.ModelSpec.from_hf(want.config)
    with pytest.raises(rm.ConfigError, match=r"\[model\] ignore: expected path beside it"):
        config.load(DENSE, ['model.ignore=["team"]'])
    assert config.from_dict(
        {"model": {"path": "x", "ignore": ["team"]}, "sync": {"cast": True}}
    ).model.ignore == ("team",)


def test_a_tied_matrix_stored_as_lm_head_alone(folder: Callable[[str], Path]) -> None:
    """The trainer reads the matrix like the generator. Oracle: the same values under the other
    name."""
    where = folder("dense")
    set_key(where, tie_word_embeddings=True)
    edit(where, lambda t: t.pop("lm_head.weight"))
    want = pretrained.load_model(where, "float32").state_dict()
    with rm.Generator.from_hf(
        where, dtype="float32", max_model_len=16, kv_cache_gib=0.001, threads=1
    ) as gen:
        digest = gen.sync_weights(rm.sources.SafetensorsFolder(where)).digest
        edit(where, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
        assert gen.sync_weights(rm.sources.SafetensorsFolder(where)).digest == digest
    found = pretrained.load_model(where, "float32").state_dict()
    assert found.keys() == want.keys()
    assert all(torch.equal(x, want[name]) for name, x in found.items())


def test_weights_that_are_not_aligned_are_copied(folder: Callable[[str], Path]) -> None:
    """A safetensors header need not be padded, but the kernels refuse unaligned arrays."""
    where = folder("dense")
    before = {name: x.clone() for name, x in load_file(where / "model.safetensors").items()}
    content = (where / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little") + 1
    (where / "model.safetensors").write_bytes(
        length.to_bytes(8, "little") + content[8 : 7 + length] + b" " + content[7 + length :]
    )
    found = pretrained.load_model(where, "float32").state_dict()
    assert all(x.data_ptr() % 4 == 0 and torch.equal(x, before[name]) for name, x in found.items())


def test_more_labels_than_there_is_memory_for_are_refused(folder: Callable[[str], Path]) -> None:
    """transformers makes a name for each label, whatever the model; the generator does not read the
    key."""
    where = folder("dense")
    set_key(where, num_labels=2**17)
    with pytest.raises(
        rm.ConfigError, match=r"dense: num_labels: expected at most 65536, got 131072$"
    ):
        pretrained.load_model(where, "float32")


def test_a_config_that_could_not_be_saved_is_refused_at_once(folder: Callable[[str], Path]) -> None:
    """transformers reads the config but refuses to write it; without this check the run would fail
    after the first step."""
    where = folder("dense")
    set_key(where, output_attentions=True)
    with pytest.raises(
        rm.ConfigError,
        match=r"dense: expected a config.json that can be saved again, got \w+Error: "
        r".*`output_attentions`",
    ):
        pretrained.load_model(where, "float32")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("model.safetensors", b"", r"model\.safetensors: .*header too small$"),
        ("model.safetensors", None, r"expected \*\.safetensors files, got none$"),
        (
            "model.safetensors.index.json",
            b"{",
            r"expected an index of safetensors: JSONDecodeError",
        ),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "\\u0000"}}',
            r"/\\x00: expected a safetensors file, got none$",
        ),
        (
            "model.safetensors.index.json",
            b"[" * 10**5,
            r"expected an index of safetensors: RecursionError: .{1,200}$",
        ),
        (
            "model.safetensors.index.json",
            b'{"weight_map": ' + b"9" * 5000,
            r"expected an index of safetensors: ValueError: .{1,200}$",
        ),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "b"}}',
            r"/b: expected a safetensors file, got none$",
        ),
        (
            "generation_config.json",
            b"[1]",
            r"generation_config\.json: expected a JSON object, got a list$",
        ),
        (
            "generation_config.json",
            b'{"eos_token_id": "x"}',
            r"eos_token_id='x' is not in \[0, vocab_size=",
        ),
    ],
)
def test_broken_files_of_a_checkpoint_are_named(
    name: str, content: bytes | None, message: str, folder: Callable[[str], Path]
) -> None:
    where = folder("dense")
    (where / name).unlink(missing_ok=True)
    if content is not None:
        (where / name).write_bytes(content)
    with pytest.raises(refused_by_a_generator(where), match=message):
        pretrained.load_model(where, "float32")


def test_a_folder_of_which_there_are_two_readings_is_refused(folder: Callable[[str], Path]) -> None:
    """transformers prefers model.safetensors, SafetensorsFolder prefers the index."""
    where = folder("dense")
    shutil.copy(where / "model.safetensors", where / "shard.safetensors")
    names = dict.fromkeys(load_file(where / "model.safetensors"), "shard.safetensors")
    (where / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": names})
    )
    with pytest.raises(
        rm.FormatError, match=r"dense: expected model\.safetensors or .*index\.json, got both: "
    ):
        pretrained.load_model(where, "float32")
    (where / "model.safetensors").unlink()
    assert pretrained.load_model(where, "float32") is not None


# --------------------------------------------------------------------------------------- adapters
def read_by_api(where: Path) -> None:
    rm.Generator.from_hf(where, max_model_len=16, kv_cache_gib=0.001, threads=1)


def read_as_config(where: Path) -> None:
    rm.ModelSpec.from_hf(str(where))


def read_as_source(where: Path) -> None:
    rm.sources.SafetensorsFolder(str(where))


def read_by_trainer(where: Path) -> None:
    pretrained.load_model(where, "float32")


def read_by_run(where: Path) -> None:
    loop.prepare(config.load(DENSE, [*TINY_RUN[4:], f'model={{path="{where}"}}', "tokenizer={}"]))


READERS = [read_by_api, read_as_config, read_as_source, read_by_trainer, read_by_run]


@pytest.mark.parametrize("whole_model", [True, False], ids=["beside a model", "alone"])
@pytest.mark.parametrize("read", READERS)
def test_an_adapter_in_the_folder_is_refused(
    read: Callable[[Path], None],
    whole_model: bool,
    folder: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each file of an adapter is refused, whichever way the folder is read, with and without
    PEFT."""
    where = folder("dense")
    if not whole_model:
        for name in ("config.json", "model.safetensors"):
            (where / name).unlink()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (where / name).write_text("{}")
        with pytest.raises(
            rm.ConfigError,
            match=rf"dense: expected .* of a whole model, got {name} of a PEFT adapter; save the ",
        ):
            read(where)
        for words in (["generate", str(where), "ab"], ["plan", str(where)]):
            assert main(words) == 2
            assert f"got {name} of a PEFT adapter" in capsys.readouterr().err
        (where / name).unlink()


def test_the_model_s_own_files_beside_an_adapter_can_be_read(folder: Callable[[str], Path]) -> None:
    where = folder("dense")
    (where / "adapter_config.json").write_text("{}")
    with rm.Generator.from_hf(
        where / "config.json", max_model_len=16, kv_cache_gib=0.001, threads=1
    ) as gen:
        assert (
            gen.sync_weights(
                rm.sources.SafetensorsFolder(where / "model.safetensors"), cast=True
            ).version
            == 0
        )


def test_loading_that_adds_or_freezes_parameters_is_refused(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers does this for an adapter; here a replaced from_pretrained does it."""
    from transformers import AutoModelForCausalLM

    where, load = folder("dense"), AutoModelForCausalLM.from_pretrained

    def freeze(model: Any) -> None:
        model.get_parameter(NORM).requires_grad_(False)

    def add(model: Any) -> None:
        model.model.register_parameter("more", torch.nn.Parameter(torch.ones(2)))

    for change, name in ((freeze, "model.norm.weight"), (add, "model.more")):

        def changed(*args: Any, **options: Any) -> Any:
            model, report = load(*args, **options)
            change(model)  # noqa: B023 (called in this turn of the loop)
            return model, report

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", changed)
        with pytest.raises(
            rm.ConfigError,
            match=rf"dense: expected the trainable parameters .*others or frozen ones: {name}$",
        ):
            pretrained.load_model(where, "float32")


# ------------------------------------------------------------------------------------------- ends
def test_every_end_of_a_folder_ends_a_completion(folder: Callable[[str], Path]) -> None:
    """The end tokens of config.json, of the tokenizer and of generation_config.json end a
    completion in a run, in a resumed run, and in a generator of the folder."""
    where = folder("dense")
    eos = data.load_tokenizer(where).eos_token_id
    set_key(where, eos_token_id=7)
    (where / "generation_config.json").write_text('{"eos_token_id": [11, 5]}')
    for _ in range(2):
        this = loop.prepare(
            config.load(DENSE, [*TINY_RUN[4:], f'model={{path="{where}"}}', "tokenizer={}"])
        )
        this.close()
        assert isinstance(this.generator, rm.Generator)
        assert this.generator.eos_token_ids == tuple(sorted({eos, 5, 7, 11}))
        this.trainer.model.save_pretrained(str(where))
    assert {5, 7, 11} <= set(rm.ModelSpec.from_hf(where).eos_token_ids)
    with rm.Generator.from_hf(where, max_model_len=16, kv_cache_gib=0.001, threads=1) as gen:
        assert set(gen.eos_token_ids) >= {5, 7, 11}


def test_weights_of_another_kind_say_what_to_do(
    folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """float16, in the tensors and in the config, and the state dict of a model with adapters."""
    where = folder("dense")
    edit(where, lambda tensors: tensors.update({name: x.half() for name, x in tensors.items()}))
    for said in (
        "--dtype bfloat16 and --dtype float32 convert weights",
        "got float16; --dtype bfloat16 converts",
    ):
        assert main(["generate", str(where), "ab", "--max-tokens", "1"]) == 2
        assert said in capsys.readouterr().err
        set_key(where, dtype="float16")
    assert main(["generate", str(where), "ab", "--max-tokens", "1", "--dtype", "bfloat16"]) == 0
    with rm.Generator.from_hf(where, max_model_len=16, kv_cache_gib=0.001, threads=1) as gen:
        for name in (
            "base_model.model.model.norm.weight",
            "model.layers.0.self_attn.q_proj.base_layer.weight",
        ):
            with pytest.raises(rm.UnexpectedKeyError) as caught:
                gen.sync_weights({name: torch.ones(2)})
            assert caught.value.__notes__[0].startswith(
                "these are adapters of PEFT: merge them first"
            )
