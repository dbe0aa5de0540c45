"""Adapters of PEFT that lie in a model's folder."""

from __future__ import annotations

from pathlib import Path

from rollmesh.errors import ConfigError
from rollmesh.runtime.messages import plain

FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def refuse_adapter(folder: Path) -> None:
    """ConfigError: an adapter is in the folder. transformers adds it to the model where PEFT is
    installed, so the folder stands for two sets of weights."""
    for name in FILES:
        if (folder / name).is_file():
            raise ConfigError(
                f"{plain(folder)}: expected a folder with the weights of a whole model, got {name} "
                "of a PEFT adapter; save the merged model in another folder (merge_and_unload(), "
                "then save_pretrained), or remove the adapter's files to use the weights without it"
            )
