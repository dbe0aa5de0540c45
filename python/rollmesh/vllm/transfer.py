"""The weight transfer engine that vLLM's factory makes for the backend "rollmesh". It receives a
trainer's buckets and stages their tensors. weight_updates.py describes the order of the calls and
the commit.
"""

from __future__ import annotations

import re
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from rollmesh.errors import AuthError, ConfigError, FormatError, StateError, VersionError
from rollmesh.runtime.messages import shown
from rollmesh.vllm.update_info import InitInfo, UpdateInfo, info_of
from rollmesh.weights.transport import segment
from rollmesh.weights.transport.delta_folder import DeltaReader
from rollmesh.weights.transport.loans import ReceivedTensors
from rollmesh.weights.transport.manifest import parse
from rollmesh.weights.transport.segment import MappedSegment

SEGMENT = re.compile(segment.PREFIX + "[0-9a-f]{32}")
NONCE = re.compile("[0-9a-f]{32}")
REMEDY = "; lend=False at the sender copies through the host"


class TransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """The transfer engine of one worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any):
        super().__init__(config, vllm_config, device, model)
        self._updates = model.updates
        self._info: InitInfo | None = None
        self._segment: MappedSegment | None = None  # segment of the last bucket
        self._folder: DeltaReader | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        if init_info.folder is not None:
            self._folder = self._updates.on_all_ranks(
                "the folder of weights", DeltaReader, init_info.folder
            )
        self._info = init_info

    def parse_init_info(self, init_dict: Any) -> InitInfo:
        return info_of(InitInfo, init_dict, ConfigError)

    def parse_update_info(self, update_dict: Any) -> UpdateInfo:
        return info_of(UpdateInfo, update_dict, FormatError)

    def start_weight_update(self) -> None:
        self._required_info()

    def update_weights(self, update_info: UpdateInfo) -> None:
        """Receives weights. Overridden because vLLM's implementation synchronizes an accelerator
        afterwards."""
        self.receive_weights(update_info)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.abort is not None:
            self._updates.drop(f"the trainer gave up: {update_info.abort}")
            return
        if self._folder is not None:
            version = self._updates.on_all_ranks(
                "reading the folder of weights", self._refresh, update_info
            )
            self._updates.require_equal("a version of the folder", version)
            self._updates.stage(self._folder, version, self._options())
            return
        bucket = self._updates.on_all_ranks("the arrival of a bucket", self._tensors, update_info)
        self._updates.stage(bucket, update_info.version, self._options())

    def _refresh(self, info: UpdateInfo) -> int:
        assert self._folder is not None
        version = self._folder.refresh()
        if info.version not in (None, version):
            raise VersionError(
                f"version: expected the newest in the folder, {version}, got {info.version}"
            )
        return version

    def _tensors(self, info: UpdateInfo) -> ReceivedTensors:
        """Returns the tensors of a bucket. Lent tensors are opened later, since a rank must not
        wait for other ranks while it has them open."""
        mapped = self._mapped(info.segment, info.nonce)
        data = mapped.tensors(info.size)
        manifest = parse(info.description.encode(errors="surrogatepass"), data.size)
        what = "a bucket of weights"
        if manifest.loan is not None:
            if self._updates.device == "cpu":
                raise ConfigError(
                    f"lent tensors: expected a worker on a GPU, got one on the CPU{REMEDY}"
                )
            what = f"bucket {manifest.loan.number} of {mapped.path}"
        tensors = ReceivedTensors(remedy=REMEDY)
        tensors.receive(manifest, data, mapped, what)
        return tensors

    def require_sender(self, info: UpdateInfo) -> None:
        """Raises StateError unless the bucket's sender is the one that called
        init_weight_transfer_engine last."""
        if info.sender != (begun := self._required_info().sender):
            first = "call init_weight_transfer_engine first"
            raise StateError(
                f"a bucket of sender {shown(info.sender)} in the update of sender {shown(begun)}; "
                f"{first}"
            )

    def is_held(self, sender: str | None) -> bool:
        """Returns whether the open update belongs to another trainer that is still alive."""
        if self._info is None or (sender is not None and self._info.sender == sender):
            return False
        return self._segment is not None and self._segment.is_owned()

    def end_weight_update(self) -> None:
        """Closes the segment, after a commit or an abort."""
        mapped, self._segment = self._segment, None
        if mapped is not None:
            mapped.close()

    def _mapped(self, name: Any, nonce: Any) -> MappedSegment:
        """Returns the segment of this name. It stays mapped until a bucket has another name, since
        the trainer unlinks the file."""
        if (
            not isinstance(name, str)
            or not SEGMENT.fullmatch(name)
            or not isinstance(nonce, str)
            or not NONCE.fullmatch(nonce)
        ):
            raise FormatError(
                f"expected the segment and nonce of a WeightSender, got segment {shown(name)} and "
                f"nonce {shown(nonce)}"
            )
        if self._segment is None or self._segment.path.name != name:
            self.end_weight_update()
            path = segment.FOLDER / name
            try:
                self._segment = MappedSegment(path, nonce)
            except FileNotFoundError as error:
                raise AuthError(
                    f"{path} does not exist; with transport='shm' trainer and workers must be on "
                    "one machine"
                ) from error
        return self._segment

    def finish_weight_update(self) -> None:
        self._updates.commit(self._options())

    def shutdown(self) -> None:
        self._info = self._folder = None
        self.end_weight_update()

    def _required_info(self) -> InitInfo:
        if self._info is None:
            raise StateError("no trainer has begun: call init_weight_transfer_engine first")
        return self._info

    def _options(self) -> dict[str, Any]:
        info = self._required_info()
        return {"cast": info.cast, "allow_bias_removal": info.allow_bias_removal}
