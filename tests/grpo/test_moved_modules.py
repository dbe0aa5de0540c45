"""Former names of modules that moved from rollmesh.grpo to rollmesh.run."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    "old, new",
    [
        ("config", "rollmesh.run.config"),
        ("checkpoint", "rollmesh.run.checkpoint"),
        ("metrics", "rollmesh.run.metrics"),
        ("user_code", "rollmesh.run.user_code"),
        ("interrupts", "rollmesh.run.signals"),
        ("pretrained", "rollmesh.run.models"),
        ("mismatch", "rollmesh.grpo.loss"),
        ("multi_turn", "rollmesh.grpo.environment"),
        ("dynamic_sampling", "rollmesh.grpo.rollout"),
    ],
)
def test_a_former_name_gives_the_module_with_a_warning(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"^rollmesh\.grpo\.{old} is now {new}$"):
        module = importlib.import_module(f"rollmesh.grpo.{old}")
    assert module is importlib.import_module(new)
    assert module.__spec__ is not None
    assert module.__spec__.name == new


def test_a_name_that_never_was_is_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rollmesh.grpo.never")
