"""The sources and options of a sync. The engine checks and copies the tensors
(csrc/weights/sync.h).

mapping      is read twice: all names, shapes and dtypes are checked, then every entry is copied;
             then one swap
iterator     checked and copied entry by entry; missing parameters show at the commit
begin_sync   the same, tensor by tensor (weights/updates.py)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rollmesh.errors import (
    ConfigError,
    DeadlineError,
    DTypeError,
    DuplicateKeyError,
    Error,
    LimitError,
    MissingKeyError,
    NonFiniteError,
    TiedWeightError,
    UnexpectedKeyError,
    VersionError,
)
from rollmesh.request.outputs import SyncReport
from rollmesh.runtime.arguments import boolean, choice
from rollmesh.runtime.engine_views import ManifestEntry, SyncValues
from rollmesh.runtime.messages import shown
from rollmesh.weights.pieces import is_sharded, local_tensor
from rollmesh.weights.transport.loans import LentSource
from rollmesh.weights.transport.tensors import check_source, entries_of, holds_tensors

if TYPE_CHECKING:
    from rollmesh.distributed.rank_engine import RankEngine

MODES = ("staged", "inplace")
INFLIGHT = ("wait", "restart", "abort", "keep")
ROUTER_BIAS = ".mlp.gate.e_score_correction_bias"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MAX_LISTED = 50  # faults listed in one message
MAX_NAME = 120  # characters of a name in a message
BATCH_BYTES = 2 << 30  # of tensors in one call of the engine; a signal is seen between two calls
MADE_BYTES = 256 << 20  # of gathered ones; with a deadline, which is checked between calls, of all


@dataclass(frozen=True, slots=True, repr=False)
class SyncOptions:
    """The options of Generator.sync_weights and begin_sync, described there."""

    version: int | None = None
    cast: bool = False
    strict: bool = True
    mode: str = "staged"
    inflight: str = "wait"
    keep_kv: bool = False
    allow_nonfinite: bool = False
    allow_bias_removal: bool = False

    def __post_init__(self) -> None:
        for name in ("cast", "strict", "keep_kv", "allow_nonfinite", "allow_bias_removal"):
            object.__setattr__(self, name, boolean(name, getattr(self, name)))
        object.__setattr__(self, "mode", choice("mode", self.mode, MODES))
        object.__setattr__(self, "inflight", choice("inflight", self.inflight, INFLIGHT))
        if self.mode == "inplace" and self.inflight != "wait":
            raise ConfigError(
                f"mode='inplace': expected inflight='wait', got {shown(self.inflight)}"
            )
        if self.keep_kv and self.inflight != "keep":
            raise ConfigError(f"keep_kv=True: expected inflight='keep', got {shown(self.inflight)}")
        if self.version is None:
            return
        version: object = self.version
        if (
            isinstance(version, bool)
            or not isinstance(version, (int, np.integer))
            or not 0 <= int(version) < 2**63
        ):
            raise VersionError(f"version: expected an integer in [0, 2^63), got {shown(version)}")
        object.__setattr__(self, "version", int(version))

    def __repr__(self) -> str:
        """What ranks compare. The repr that dataclass makes, once cut short by a Ctrl-C, takes a
        later object at the same address for one that contains itself, and shows `...`."""
        return (
            f"SyncOptions({', '.join(f'{name}={value!r}' for name, value in asdict(self).items())})"
        )

    def begin(self, engine: RankEngine) -> None:
        engine.sync_begin(
            -1 if self.version is None else self.version,
            cast=self.cast,
            allow_nonfinite=self.allow_nonfinite,
            allow_partial=not self.strict,
            allow_bias_removal=self.allow_bias_removal,
            in_place=self.mode == "inplace",
        )

    @property
    def at_commit(self) -> str:
        """What the engine does with running requests at the commit; with "wait" there are none by
        then."""
        return {"wait": "refuse", "keep": "keep_kv" if self.keep_kv else "keep"}.get(
            self.inflight, self.inflight
        )


def report_of(values: SyncValues) -> SyncReport:
    return SyncReport(
        version=values["version"],
        num_tensors=values["num_tensors"],
        num_parameters=values["num_parameters"],
        num_skipped=values["num_skipped"],
        bytes=values["bytes"],
        seconds=values["seconds"],
        copy_seconds=values["copy_seconds"],
        digest=f"{values['digest']:016x}",
    )


# ---------------------------------------------------------------------------------------- entries
def short(name: object) -> str:
    text = name if isinstance(name, str) else repr(name)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_NAME else f"{text[:MAX_NAME]}… ({len(text)} characters)"


def listed(things: list[str], most: int = MAX_LISTED) -> str:
    rest = len(things) - most
    return "; ".join(things[:most]) + (f"; and {rest} more" if rest > 0 else "")


def raise_faults(faults: dict[type[Error], list[str]]) -> None:
    """Raises one error that lists all faults of one class, names before tensors, and counts those
    of other classes."""
    for kind in (UnexpectedKeyError, DuplicateKeyError, MissingKeyError, *faults):
        if kind in faults:
            others = ", ".join(
                f"{len(rest)} {other.__name__}"
                for other, rest in faults.items()
                if other is not kind
            )
            head, tail = (
                "missing: " if kind is MissingKeyError else "",
                f" (besides: {others})" if others else "",
            )
            if kind is MissingKeyError and all(name.endswith(ROUTER_BIAS) for name in faults[kind]):
                tail += (
                    "; it is a buffer, which parameters() and torchtitan's to_hf leave out: "
                    "push the module's own state_dict()"
                )
            most = (
                3 if kind is DTypeError else MAX_LISTED
            )  # a missing cast=True is a fault of every tensor
            raise kind(
                f"{len(faults[kind])} of the weights: {head}{listed(faults[kind], most)}{tail}"
            )


def most_entries(manifest: list[ManifestEntry]) -> int:
    return 8 * len(manifest) + 1024


def check_mapping(
    engine: RankEngine,
    manifest: list[ManifestEntry],
    source: Mapping[str, Any],
    options: SyncOptions,
) -> None:
    """Checks all entries before a byte is copied. A tensor that has to be gathered first is checked
    at its push."""
    limit = most_entries(manifest)
    if len(source) > limit:
        raise LimitError(
            f"source: expected at most {limit} weights for a model of {len(manifest)} parameters, "
            f"got {len(source)}"
        )
    faults: dict[type[Error], list[str]] = {}
    spelled: dict[int, str] = {}  # parameter → its name in the source
    for name, tensor in entries_of(source):
        try:
            for index in engine.sync_resolve(name):
                if index in spelled:
                    faults.setdefault(DuplicateKeyError, []).append(
                        f"{manifest[index][0]} as {short(spelled[index])} and as {short(name)}"
                    )
                    break
                spelled[index] = name
            if not is_sharded(tensor):
                engine.sync_check(name, local_tensor(tensor))
        except UnexpectedKeyError as error:
            if options.strict or not isinstance(name, str):
                faults.setdefault(UnexpectedKeyError, []).append(str(error))
        except Error as error:
            faults.setdefault(type(error), []).append(str(error))
    if options.strict:
        missing = [
            name
            for index, (name, _, _, required) in enumerate(manifest)
            if required and index not in spelled
        ]
        if any(manifest[index][0] == HEAD and not manifest[index][3] for index in spelled):
            missing = [
                name for name in missing if name != EMBEDDING
            ]  # tied: one matrix, which has come as lm_head
        if missing:
            faults[MissingKeyError] = missing
    raise_faults(faults)


def push_mapping(engine: RankEngine, source: Mapping[str, Any], deadline: float | None) -> None:
    """Copies every entry. NonFiniteError and TiedWeightError are only known after reading the
    values; all of them are listed."""
    faults: dict[type[Error], list[str]] = {}
    for batch in batches(source, deadline):
        try:
            engine.sync_push_all(batch)
            continue
        except (NonFiniteError, TiedWeightError):
            pass  # the batch was refused whole; pushing one by one names each tensor
        for name, tensor in batch:
            try:
                engine.sync_push(name, tensor)
            except (NonFiniteError, TiedWeightError) as error:
                faults.setdefault(type(error), []).append(str(error))
    raise_faults(faults)


def batches(source: Mapping[str, Any], deadline: float | None) -> Iterator[list[tuple[str, Any]]]:
    """The entries in batches, or one by one unless the source holds its tensors."""
    batch: list[tuple[str, Any]] = []
    holds = holds_tensors(source)
    held = made = 0
    for name, tensor in entries_of(source):
        check_deadline(deadline, name)
        local = local_tensor(tensor)
        size = getattr(local, "nbytes", None)
        size = size if isinstance(size, int) else MADE_BYTES
        batch.append((name, local))
        held += size
        made += size if deadline is not None or is_sharded(tensor) else 0
        if not holds or held >= BATCH_BYTES or made >= MADE_BYTES:
            yield batch
            batch, held, made = [], 0, 0
    if batch:
        yield batch


def push_all(
    engine: RankEngine, entries: Iterable[tuple[str, Any]], listing: bool, deadline: float | None
) -> Exception | None:
    """Iterates over all entries even after an error, so that all ranks take part in the exchanges
    behind them; all stop at the same number of an iterator that does not end. Returns the error.
    listing: list all non-finite and tied values, as push_mapping does."""
    fault: Exception | None = None
    faults: dict[type[Error], list[str]] = {}
    limit = most_entries(engine.manifest())
    for count, entry in enumerate(entries):
        if count == limit:
            fault = fault or LimitError(f"source: expected at most {limit} weights, got more")
            break
        try:
            if fault is None:
                push_entries(engine, [entry], deadline)
        except (NonFiniteError, TiedWeightError) as error:
            if listing:
                faults.setdefault(type(error), []).append(str(error))
            else:
                fault = error
        except Exception as error:  # noqa: BLE001 (raised once all ranks know)
            fault = error
    try:
        raise_faults(faults if fault is None else {})
    except Error as error:
        fault = error
    return fault


def made_by(source: Callable[[int | None], Any], version: int | None) -> Any:
    """What a rank that follows gives to a sync. An exception of the function is met as the source's
    first entry, for all ranks to know."""
    try:
        made = source(version)
        if made is not None:
            check_source(made)
        return made
    except Exception as error:  # noqa: BLE001 (raised where ranks exchange)
        return map(_raise, [error])


def _raise(error: Exception) -> tuple[str, Any]:
    raise error


def lent(source: Any) -> AbstractContextManager[Callable[[], None]]:
    """Holds a source's loan open while its tensors are read (weights/transport/loans.py)."""
    return source.lent() if isinstance(source, LentSource) else nullcontext(lambda: None)


def check_deadline(deadline: float | None, name: object) -> None:
    if deadline is not None and time.monotonic() > deadline:
        raise DeadlineError(
            f"the sync did not finish within its timeout; it had reached {short(name)}"
        )


def push_entries(
    engine: RankEngine, entries: Iterable[tuple[str, Any]], deadline: float | None
) -> None:
    """Copies the entries of an iterator one by one."""
    for name, tensor in entries_of(entries):
        check_deadline(deadline, name)
        engine.sync_push(name, local_tensor(tensor))
