"""The object that vLLM and trainers find at `worker.model_runner.model`, instead of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollmesh.errors import ConfigError, StateError

if TYPE_CHECKING:
    from rollmesh.vllm.weight_updates import WeightUpdates


class ServedModel(torch.nn.Module):
    """The object that vLLM and trainers find at `worker.model_runner.model`. It has no parameters;
    the engine of each rank has the rank's shards.

    `compute_logits` may be replaced, as verl does, by a function that sets the logits of some
    tokens to -inf. These tokens are then never drawn."""

    never_drawn: NDArray[np.int32]  # ascending token ids

    def __init__(self, updates: WeightUpdates):
        super().__init__()
        self.updates = updates
        self._edit: Callable[[torch.Tensor], torch.Tensor] = torch.clone
        self.never_drawn = np.zeros(0, np.int32)

    @property
    def model(self) -> ServedModel:
        """Returns self. vLLM's models have their layers in this attribute, and verl reads it."""
        return self

    @property
    def compute_logits(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that takes logits [rows, vocab] and returns a copy. Replacing it by a function
        that does more than forbid tokens raises ConfigError."""
        return self._edit

    @compute_logits.setter
    def compute_logits(self, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.updates.forbid(edit)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Stages tensors by their Hugging Face names, one or more per call. The set is committed at
        the next step, at a repeated name or by process_weights_after_loading. If it is incomplete
        then, IncompleteSyncError is raised and the old version keeps serving."""
        return self.updates.load(weights)

    def process_weights_after_loading(self) -> None:
        """Commits the loaded set. vLLM's function of the same name calls this, and verl calls that
        function after each set."""
        self.updates.finish_load()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StateError("this module is for load_weights only; the engine runs the forward pass")


class TextDecoder(torch.nn.Module):
    """Describes a hybrid model to vLLM, which reads this class and creates no object of it. It
    replaces vLLM's own classes of hybrid models, because with these vLLM would manage the states,
    and because they import packages that neither the scheduler nor the engine needs."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        raise StateError("this class only describes a model; the engine runs it")

    forward = embed_input_ids = compute_logits = ServedModel.forward


def forbidden_by(
    edit: Callable[[torch.Tensor], torch.Tensor], vocab_size: int
) -> NDArray[np.int32]:
    """Returns the tokens that `edit` sets to -inf, found by calling it with two rows."""
    given = torch.stack([torch.zeros(vocab_size), torch.arange(float(vocab_size))])
    edited = edit(given.clone())
    out = torch.isneginf(edited)
    if (
        edited.shape != given.shape
        or not torch.equal(out[0], out[1])
        or not torch.equal(edited, given.masked_fill(out, -torch.inf))
    ):
        raise ConfigError(
            "compute_logits: expected a function that sets the logits of certain tokens to -inf, "
            "got one that does more"
        )
    if out.all():
        raise ConfigError(
            "compute_logits: expected a function that leaves some tokens, got one that sets all "
            f"{vocab_size} to -inf"
        )
    return out[0].nonzero()[:, 0].numpy().astype(np.int32)
