"""The one line of a user's script that chooses rollmesh."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from torchtitan.experiments.rl import controller
from torchtitan.experiments.rl.actors.trainer import PolicyTrainer

from rollmesh.errors import ConfigError
from rollmesh.runtime.messages import shown
from rollmesh.titan.generator import RollmeshGenerator

C = TypeVar("C", bound=controller.Controller.Config)


def install(config: C, *, trainer: type[PolicyTrainer] | None = None, **options: Any) -> C:
    """A Controller.Config like `config` whose generators are rollmesh's:
    `controller = install(config, kv_cache_gib=4.0).build()`.

    config   a TitanRL Controller.Config. Its `generator` keeps its fields
    trainer  the class to spawn as trainer: RollmeshTrainer computes the generator's forward pass,
             so that logprobs are equal bit for bit. None: PolicyTrainer
    options  fields of RollmeshGenerator.Config, instead of the config's: mesh, device,
             kv_cache_gib, max_model_len, threads, and those of VLLMGenerator.Config

    The Controller spawns the classes that its module calls VLLMGenerator and PolicyTrainer: these
    names are rebound in this process, for every config.

    Raises ConfigError: a setting that rollmesh does not have, a model that it does not compute
    (ModelSpec.from_torchtitan). TypeError: an option that is not a field.
    """
    if not isinstance(config, controller.Controller.Config):
        raise ConfigError(f"config: expected a Controller.Config of TitanRL, got {shown(config)}")
    if trainer is not None and not (
        isinstance(trainer, type) and issubclass(trainer, PolicyTrainer)
    ):
        raise ConfigError(
            "trainer: expected PolicyTrainer, a class that derives from it, or None, got "
            f"{shown(trainer)}"
        )
    kept = {field.name: getattr(config.generator, field.name) for field in fields(config.generator)}
    generator = RollmeshGenerator.Config(**{**kept, **options})
    generator.spec_of(config.model_spec)
    made = replace(config, generator=generator)
    controller.VLLMGenerator = RollmeshGenerator
    controller.PolicyTrainer = PolicyTrainer if trainer is None else trainer
    return made
