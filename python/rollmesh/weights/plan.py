"""The plan of one sync: the entries to which its names were resolved (`_core.SyncEntry`), each name
once. Entries take their tensors (by DLPack or as NumPy arrays) and are then checked and copied. A
failed push is undone entry by entry.

A source that holds all its tensors (weights/transport/tensors.py) is checked as a whole first, and
the entries keep its tensors until they are copied. Every other mapping is read twice.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rollmesh import _core
from rollmesh.distributed.rank_engine import ALONE, RankEngine
from rollmesh.errors import (
    DeadlineError,
    DTypeError,
    DuplicateKeyError,
    Error,
    LimitError,
    MissingKeyError,
    NonFiniteError,
    TiedWeightError,
    UnexpectedKeyError,
)
from rollmesh.runtime.arguments import exportable
from rollmesh.runtime.messages import plain
from rollmesh.weights.pieces import is_sharded, local_tensor
from rollmesh.weights.sync import EMBEDDING, HEAD, SyncOptions
from rollmesh.weights.transport.tensors import entries_of, holds_tensors

# Names of buffers, in all families that have them.
ROUTER_BIAS = (".gate.e_score_correction_bias", ".block_sparse_moe.e_score_correction_bias")
MAX_LISTED = 50  # faults listed in one message
# Bytes of tensors in one call of the engine. Ctrl-C takes effect between two calls.
BATCH_BYTES = 2 << 30
# Bytes of gathered tensors in one call, and of all tensors if there is a deadline, which is checked
# between two calls.
GATHERED_BYTES = 256 << 20
# Requests take a step once checks and copies have taken this time. Their pause is this time and
# that of one part.
STEP_AFTER_S = 0.004
PART_BYTES = 8 << 20
# Most time for steps at once, also after a source that took long: a deadline and Ctrl-C wait.
MOST_STEPS_S = 0.05
Faults = defaultdict[type[Error], list[str]]
# Lets requests take steps for some seconds; None: they wait.
LetStep = Callable[[float], None] | None


class Plan:
    """The entries of one sync."""

    def __init__(self, engine: RankEngine, options: SyncOptions, let_step: LetStep = None):
        self._engine, self._strict = engine, options.strict
        self._let_step, self._since = let_step, time.monotonic()
        self.entries: dict[str, _core.SyncEntry] = {}

    def entry(self, name: Any) -> _core.SyncEntry:
        """Returns the entry of a name; an entry without parameters is skipped later. Raises
        UnexpectedKeyError or LimitError for a name that the model does not have."""
        found = self.entries.get(name) if isinstance(name, str) else None
        if found is None:
            found = self.entries[name] = self._engine.sync_resolve(name, not self._strict)
        return found

    def _take(self, name: Any, tensor: Any) -> _core.SyncEntry:
        entry = self.entry(name)
        if entry.params and not entry.taken:
            tensor = exportable(entry.name, local_tensor(tensor))
            self._engine.sync_take(entry, tensor)
        return entry

    def push(self, name: Any, tensor: Any) -> None:
        """Copies one tensor. After an error the entry keeps no reference to it."""
        entry = self._take(name, tensor)
        try:
            self._copy([entry])
        except BaseException:
            entry.release()
            raise

    def _copy(self, entries: list[_core.SyncEntry]) -> None:
        self._maybe_step()
        parts = (PART_BYTES, self._maybe_step) if self._let_step else ()
        self._engine.sync_push(entries, *parts)

    def _maybe_step(self) -> None:
        """Gives requests as much time as checks and copies have taken since the last steps, at most
        MOST_STEPS_S, if that is STEP_AFTER_S or more."""
        seconds = time.monotonic() - self._since
        if self._let_step is not None and seconds >= STEP_AFTER_S:
            self._let_step(min(seconds, MOST_STEPS_S))
            self._since = time.monotonic()

    def check(self, source: Mapping[str, Any]) -> None:
        """Checks all entries of a mapping before a byte is copied. A tensor that has to be gathered
        first is checked when it is copied."""
        manifest, limit = self._engine.manifest(), self._most_entries()
        if len(source) > limit:
            raise LimitError(
                f"source: expected at most {limit} weights for a model of {len(manifest)} "
                f"parameters, got {len(source)}"
            )
        keeps = holds_tensors(source)
        faults: Faults = defaultdict(list)
        spelled: dict[int, str] = {}  # index of a parameter → its name in the source
        for name, tensor in entries_of(source):
            self._maybe_step()
            try:
                for index in self.entry(name).params:
                    if index in spelled:
                        faults[DuplicateKeyError].append(
                            f"{manifest[index][0]} as {plain(spelled[index])} and as {plain(name)}"
                        )
                        break
                    spelled[index] = name
                if not is_sharded(tensor):
                    entry = self._take(name, tensor)
                    if not keeps:
                        entry.release()
            except Error as error:
                faults[type(error)].append(str(error))
        if self._strict:
            missing = [
                name
                for index, (name, _, _, required) in enumerate(manifest)
                if required and index not in spelled
            ]
            if any(manifest[index][0] == HEAD and not manifest[index][3] for index in spelled):
                # The matrices are tied, and the source has the shared matrix as lm_head.
                missing = [name for name in missing if name != EMBEDDING]
            if missing:
                faults[MissingKeyError] = missing
        _raise_faults(faults)

    def push_mapping(self, source: Mapping[str, Any], deadline: float | None) -> None:
        """Copies every entry. Raises NonFiniteError or TiedWeightError, which list all offending
        tensors; these errors are found only when the values are read."""
        faults: Faults = defaultdict(list)
        for batch in self._batches(source, deadline):
            try:
                self._copy(batch)
                continue
            except (NonFiniteError, TiedWeightError):
                pass  # the whole batch was undone; the loop below finds each offending tensor
            for entry in batch:
                try:
                    self._copy([entry])
                except (NonFiniteError, TiedWeightError) as error:
                    faults[type(error)].append(str(error))
                    entry.release()
        _raise_faults(faults)

    def _batches(
        self, source: Mapping[str, Any], deadline: float | None
    ) -> Iterator[list[_core.SyncEntry]]:
        """Yields lists of entries with their tensors: single entries unless the source holds all
        its tensors."""
        holds = holds_tensors(source)
        batch: list[_core.SyncEntry] = []
        held = gathered = 0
        for name, tensor in entries_of(source):
            check_deadline(deadline, name)
            entry = self._take(name, tensor)
            batch.append(entry)
            held += entry.nbytes
            gathered += entry.nbytes if deadline is not None or is_sharded(tensor) else 0
            if not holds or held >= BATCH_BYTES or gathered >= GATHERED_BYTES:
                yield batch
                batch, held, gathered = [], 0, 0
        if batch:
            yield batch

    def push_entries(self, entries: Iterable[Any], deadline: float | None) -> None:
        """Copies the entries of an iterator one by one."""
        for name, tensor in entries_of(entries):
            check_deadline(deadline, name)
            self.push(name, tensor)

    def push_all(self, entries: Iterable[Any], deadline: float | None) -> Exception | None:
        """Like push_entries, for ranks that are processes. Returns the error instead of raising it.
        Iterates over all entries even after an error, so that all ranks take part in the exchanges
        of the iterator; if the iterator does not end, all ranks stop at the same entry. Lists all
        tensors with non-finite or wrong tied values, as push_mapping does."""
        fault: Exception | None = None
        faults: Faults = defaultdict(list)
        limit = self._most_entries()
        try:
            for count, entry in enumerate(entries):
                if count == limit:
                    fault = fault or LimitError(
                        f"source: expected at most {limit} weights, got more"
                    )
                    break
                try:
                    if fault is None:
                        self.push_entries([entry], deadline)
                except (NonFiniteError, TiedWeightError) as error:
                    faults[type(error)].append(str(error))
                except Exception as error:  # noqa: BLE001 (raised once all ranks know)
                    fault = error
        except ALONE:
            raise
        except Exception as error:  # noqa: BLE001 (of the iterator, raised once all ranks know)
            fault = fault or error
        return fault or error_of(_raise_faults, faults)

    def _most_entries(self) -> int:
        return 8 * len(self._engine.manifest()) + 1024


def error_of(call: Callable[..., None], *args: Any) -> Exception | None:
    """Makes a call and returns the exception that it raises, or None. The caller raises it after
    sending it to all ranks."""
    try:
        call(*args)
    except Exception as error:  # noqa: BLE001
        return error
    return None


def check_deadline(deadline: float | None, name: object) -> None:
    if deadline is not None and time.monotonic() > deadline:
        raise DeadlineError(
            f"the sync did not finish within its timeout; it had reached {plain(name)}"
        )


def _raise_faults(faults: Faults) -> None:
    """Raises one error that lists all faults of one class and counts those of the other classes.
    Faults of names come before faults of tensors."""
    kinds: list[type[Error]] = [UnexpectedKeyError, DuplicateKeyError, MissingKeyError, *faults]
    for kind in kinds:
        if kind not in faults:
            continue
        names = faults[kind]
        head, tail = "missing: " if kind is MissingKeyError else "", ""
        if others := [
            f"{len(rest)} {other.__name__}" for other, rest in faults.items() if other is not kind
        ]:
            tail = f" (besides: {', '.join(others)})"
        if kind is MissingKeyError and all(name.endswith(ROUTER_BIAS) for name in names):
            tail += (
                "; it is a buffer, which parameters() and torchtitan's to_hf leave out: push the "
                "module's own state_dict()"
            )
        # Without cast=True every tensor may have this fault, so only a few are listed.
        most = 3 if kind is DTypeError else MAX_LISTED
        rest = f"; and {len(names) - most} more" if len(names) > most else ""
        raise kind(f"{len(names)} of the weights: {head}{'; '.join(names[:most])}{rest}{tail}")
