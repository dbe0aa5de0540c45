"""The weight transfer engine that vLLM's factory makes for backend "rollmesh": it receives a trainer's blocks and stages their tensors.
weight_updates.py has the order of the calls and the commit.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from rollmesh.errors import AuthError, ConfigError, FormatError, StateError
from rollmesh.runtime.messages import shown
from rollmesh.vllm.update_info import InitInfo, UpdateInfo, info_of
from rollmesh.weights.transport import segment
from rollmesh.weights.transport.gloo_group import Group
from rollmesh.weights.transport.loans import ReceivedTensors
from rollmesh.weights.transport.manifest import parse
from rollmesh.weights.transport.segment import Bytes, MappedSegment

SEGMENT = re.compile(segment.PREFIX + "[0-9a-f]{32}")
NONCE = re.compile("[0-9a-f]{32}")
REMEDY = "; the sender's lend=False copies by way of the host"


class TransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Of one worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any):
        super().__init__(config, vllm_config, device, model)
        self._updates = model.updates
        self._info: InitInfo | None = None
        self._segment: MappedSegment | None = None  # that the last block was in
        self._group: Group | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Over "distributed" it returns when the trainer and all workers have met."""
        self.shutdown()
        if init_info.transport == "distributed":
            self._group = self._updates.together("joining the trainer", self._join, init_info)
        self._info = init_info

    def _join(self, info: InitInfo) -> Group:
        rank = info.rank_offset + self._updates.number
        assert info.master_address is not None
        assert info.master_port is not None
        assert info.world_size is not None
        if rank >= info.world_size:
            raise ConfigError(f"world_size = {info.world_size}, wanted the trainer and all workers: this one is rank {rank}")
        return Group.joining(info.master_address, info.master_port, rank, info.world_size, info.timeout)

    def parse_init_info(self, init_dict: Any) -> InitInfo:
        return info_of(InitInfo, init_dict, ConfigError)

    def parse_update_info(self, update_dict: Any) -> UpdateInfo:
        return info_of(UpdateInfo, update_dict, FormatError)

    def start_weight_update(self) -> None:
        self._initialised()

    def update_weights(self, update_info: UpdateInfo) -> None:
        """vLLM's own waits for an accelerator at the end; these are on the CPU."""
        self.receive_weights(update_info)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.abort is not None:
            self._updates.drop(f"the trainer gave it up: {update_info.abort}")
            return
        block = self._updates.together("a block's coming", self._tensors, update_info)
        self._updates.stage(block, update_info.version, self._options())

    def _tensors(self, info: UpdateInfo) -> ReceivedTensors:
        """Those of a block. What is lent is not opened here: no rank waits for others while it has it open."""
        block = self._block(info)
        manifest = parse(info.description.encode(errors="surrogatepass"), block.size)
        what = "a block of weights"
        if manifest.loan is not None:
            if self._segment is None:
                raise FormatError("a block that is lent over transport='distributed', wanted 'shm'")
            if self._updates.device == "cpu":
                raise ConfigError(f"weights that a GPU lends for a worker on the CPU, wanted one on a GPU{REMEDY}")
            what = f"block {manifest.loan.number} of {self._segment.path}"
        tensors = ReceivedTensors(remedy=REMEDY)
        tensors.receive(manifest, block, self._segment, what)
        return tensors

    def require_sender(self, info: UpdateInfo) -> None:
        """StateError for a block of a trainer that another has followed."""
        if info.sender != (begun := self._initialised().sender):
            raise StateError(f"a block of sender {shown(info.sender)} in the update of sender {shown(begun)}, wanted init_… first")

    def is_held(self, sender: str | None) -> bool:
        """Whether what is open is of another trainer, which lives."""
        if self._info is None or (sender is not None and self._info.sender == sender):
            return False
        if self._group is not None:
            return self._group.is_held()
        return self._segment is not None and self._segment.is_owned()

    def end_weight_update(self) -> None:
        """After its commit, or without one: shared memory is the trainer's again."""
        mapped, self._segment = self._segment, None
        if mapped is not None:
            mapped.close()

    def _block(self, info: UpdateInfo) -> Bytes:
        if self._initialised().transport == "shm":
            return self._mapped(info.segment, info.nonce).block(info.size)
        if self._group is None:
            raise StateError("the group of trainer and workers is closed: init_weight_transfer_engine again")
        block = np.empty(info.size, np.uint8)
        self._group.broadcast(block)
        return block

    def _mapped(self, name: Any, nonce: Any) -> MappedSegment:
        """Stays mapped until another is named: the trainer removes the name."""
        if not isinstance(name, str) or not SEGMENT.fullmatch(name) or not isinstance(nonce, str) or not NONCE.fullmatch(nonce):
            raise FormatError(f"a block of weights with segment {shown(name)} and nonce {shown(nonce)}, wanted those of a WeightSender")
        if self._segment is None or self._segment.path.name != name:
            self.end_weight_update()
            path = segment.FOLDER / name
            try:
                self._segment = MappedSegment(path, nonce)
            except FileNotFoundError as error:
                raise AuthError(f"{path} is not there; over shm the trainer and the workers must be on one machine") from error
        return self._segment

    def finish_weight_update(self) -> None:
        self._updates.commit(self._options())

    def shutdown(self) -> None:
        self._info = None
        self.end_weight_update()
        if self._group is not None:
            self._group.close()
            self._group = None

    def _initialised(self) -> InitInfo:
        if self._info is None:
            raise StateError("no trainer has begun: init_weight_transfer_engine first")
        return self._info

    def _options(self) -> dict[str, Any]:
        info = self._initialised()
        return {"cast": info.cast, "allow_bias_removal": info.allow_bias_removal}
