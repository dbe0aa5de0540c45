"""Rope tables of families whose configs store them in other forms than a Llama's. Each function
takes a config and returns configs that rope.from_config can read, each with its path in the given
config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.model.reader import Reader
from rollmesh.model.rope import KEYS as ROPE_KEYS
from rollmesh.model.rope import ROPE_TABLES, number, table_of
from rollmesh.runtime.arguments import choice
from rollmesh.runtime.messages import shown

Ropes = tuple[tuple[str, Mapping[str, Any]], ...]


def phi3_ropes(config: Mapping[str, Any]) -> Ropes:
    """Phi-3: "su" and "yarn" are older names of "longrope", the only type besides "default"."""
    name, table = table_of(config)
    given = table.get("rope_type", table.get("type", "default"))
    kind = choice("rope_type", given, ["default", "longrope", "su", "yarn"])
    table = {**table, "rope_type": "default" if kind == "default" else "longrope"}
    return (("", {"original_max_position_embeddings": 4096, **config, name: table}),)


def text_ropes(config: Mapping[str, Any]) -> Ropes:
    """Qwen3.5: a multimodal model divides the frequencies among three positions of a token. These
    are equal for a token of text, so the keys of the division have no effect."""
    name, table = table_of(config)
    kept = {k: v for k, v in table.items() if k not in ("mrope_section", "mrope_interleaved")}
    return (("", {**config, name: kept}),)


def gpt_oss_ropes(config: Mapping[str, Any]) -> Ropes:
    """gpt-oss: uses the table below if the config has none."""
    if any(config.get(name) is not None for name in ROPE_TABLES):
        return (("", config),)
    table = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    return (("", {**config, ROPE_TABLES[-1]: table}),)


def _two_ropes(config: Mapping[str, Any], base: Any) -> Ropes:
    """rope_parameters has a table for each kind of layer. rope_scaling, of transformers 4, is for
    layers without a window. base: the default of rope_theta in layers with a window."""
    table = config.get("rope_parameters") or {}
    if not isinstance(table, Mapping) or table.keys() - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            "rope_parameters: expected tables full_attention and sliding_attention, got "
            f"{shown(table)}"
        )
    full, local = (
        table_of({"rope_parameters": table.get(f"{kind}_attention")})[1]
        for kind in ("full", "sliding")
    )
    scaling = table_of({"rope_scaling": config.get("rope_scaling")})[1]
    unread = {*ROPE_TABLES, "original_max_position_embeddings"}  # the latter is read in tables only
    rest = {key: config[key] for key in config if key not in unread}
    name, path = ("rope_scaling", "") if scaling else ("rope_parameters", ".full_attention")
    return (
        (path, {**rest, name: {**full, **scaling}}),
        (".sliding_attention", {**rest, "rope_theta": base, "rope_parameters": local}),
    )


def gemma3_ropes(config: Mapping[str, Any]) -> Ropes:
    return _two_ropes(config, config.get("rope_local_base_freq", 10000.0))


def olmo3_ropes(config: Mapping[str, Any]) -> Ropes:
    return _two_ropes(config, 500000.0)


def hunyuan_ropes(config: Mapping[str, Any]) -> Ropes:
    """HunYuan: with `alpha`, the type "dynamic" is NTK scaling by alpha at every length."""
    name, table = table_of(config)
    alpha, kind = table.get("alpha"), table.get("rope_type", table.get("type"))
    if not alpha or kind != "dynamic":
        return (("", config),)
    dim = Reader(config).integer("head_dim", 4)
    theta = table.get("rope_theta", config.get("rope_theta", 10000.0))
    stretch = number(f"{name}.alpha", alpha, 0) ** (dim / (dim - 2))
    # The keys of the other types have no effect.
    kept = {key: value for key, value in table.items() if key not in ROPE_KEYS | {"alpha"}}
    kept |= {"rope_type": "default", "rope_theta": number("rope_theta", theta, 0) * stretch}
    return (("", {**config, name: kept}),)
