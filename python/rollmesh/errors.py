"""The exceptions of rollmesh. Each status code of the C core (csrc/base/status.h) has the class of
the same name here.

Everything derives from `Error`; what a caller can cause derives from `ValueError` too, so that code
which knows nothing of rollmesh still catches bad input. Failed allocations raise the built-in
`MemoryError`.

Attributes beyond the message are set where they are known: `request_id`, `tensor`, `index`,
`names`.
"""

from __future__ import annotations


class Error(Exception):
    """Base of every exception that rollmesh raises itself."""


class ConfigError(Error, ValueError):
    """A setting of the model, the mesh, the engine or a run breaks a rule; the message names the
    rule and the value."""


class RequestError(Error, ValueError):
    """A request is malformed. Only that request is refused."""


class StateError(Error, ValueError):
    """The call does not fit the state: closed, asleep, a sync open or not open, requests
    running."""


class NotSyncedError(StateError):
    """The generator has no weights yet: it was never synced, or an in-place sync failed."""


class VersionError(Error, ValueError):
    """A weight version that does not exceed the one committed last."""


class BaseVersionError(VersionError):
    """A delta against a version that the receiver does not have: it needs the deltas between, or a
    whole set."""


class MissingKeyError(Error, ValueError):
    """Required parameters are missing; the message lists them."""


class UnexpectedKeyError(Error, ValueError):
    """A name does not belong to a parameter of this model."""


class DuplicateKeyError(Error, ValueError):
    """A parameter came twice, under one name or under two spellings of it."""


class TiedWeightError(Error, ValueError):
    """lm_head was sent, differs from the embedding, and is tied to it."""


class ShapeError(Error, ValueError):
    """A tensor's shape is not the parameter's. Tensors are never broadcast,
    reshaped or transposed to fit."""


class DTypeError(Error, ValueError):
    """An element type that is refused, or one that would need `cast=True`."""


class LayoutError(Error, ValueError):
    """Strides or extents that reach outside the tensor's buffer, or cannot be addressed."""


class UnsupportedTensorError(Error, ValueError):
    """An object is not a dense tensor on a supported device: it is sparse, quantized, meta, fake,
    on another device, or another type."""


class NonFiniteError(Error, ValueError):
    """A weight is NaN or infinite; the message names the tensor and the index."""


class LimitError(Error, ValueError):
    """A count or a size beyond what any model needs."""


class IncompleteSyncError(MissingKeyError):
    """A set of weights was closed before every required parameter had come."""


class CapacityError(Error, ValueError):
    """Something that can never fit: a request longer than the cache, a second copy of the weights
    beyond the memory."""


class DeadlineError(Error, TimeoutError):
    """A call did not finish within the `timeout` it was given."""


class NumericsError(Error):
    """A row of logits, K or V is not finite."""


class FormatError(Error, ValueError):
    """A file or a stream of weights is malformed: header, offsets, length or checksum."""


class AuthError(Error):
    """Shared memory of another owner, mode or nonce than expected."""


class SyncAbortedError(Error):
    """The other side of a weight stream, or another rank, gave up or went away before the set was
    complete."""


class MeshMismatchError(Error, ValueError):
    """Ranks that do not fit together: other sizes, options or members; the message names them."""


class CollectiveMismatchError(Error):
    """Ranks disagree on a collective's operation, size or weight epoch. Later calls of
    the group raise the error again."""


class CollectiveTimeoutError(Error, TimeoutError):
    """Ranks did not arrive at a collective within its deadline; the message names them. Later
    calls of the group raise the error again."""


class RankLostError(Error):
    """A rank's process has ended or the rank has aborted; the message names it. The group is
    dead."""


class DeviceError(Error):
    """A GPU failed; the message has CUDA's. The engine, and this process's context on that GPU,
    cannot be used any more."""


class PluginError(Error):
    """vLLM cannot run on rollmesh: its version was not tried, or settings contradict each other."""


__all__ = [
    name for name, value in list(globals().items()) if isinstance(value, type) and name[0] != "_"
]
