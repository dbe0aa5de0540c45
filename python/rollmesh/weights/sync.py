"""The options and the report of a sync."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rollmesh.distributed.wire import sendable
from rollmesh.errors import ConfigError, VersionError
from rollmesh.runtime.arguments import boolean, choice, integer_of
from rollmesh.runtime.messages import shown
from rollmesh.weights.transport.loans import LentSource
from rollmesh.weights.transport.tensors import check_source

if TYPE_CHECKING:
    from rollmesh.distributed.rank_engine import RankEngine

MODES = ("staged", "inplace")
INFLIGHT = ("wait", "restart", "abort", "keep")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@sendable
@dataclass(frozen=True, slots=True, repr=False)
class SyncOptions:
    """The options of a sync; Generator.sync_weights describes them."""

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
        if self.version is not None:
            version = integer_of(VersionError, "version", self.version, 0, 2**63 - 1)
            object.__setattr__(self, "version", version)

    def __repr__(self) -> str:
        """Returns the text that ranks compare. dataclass's own repr is not used: if a Ctrl-C
        interrupts it, it later shows `...` for another object at the same address."""
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
        """The engine's name for `inflight` at the commit. With "wait" all requests have finished by
        then; the engine refuses the commit if one still runs."""
        return {"wait": "refuse", "keep": "keep_kv" if self.keep_kv else "keep"}.get(
            self.inflight, self.inflight
        )


def source_of_follower(source: Callable[[int | None], Any], version: int | None) -> Any:
    """Returns the source that a follower gives to a sync. If the function raises, every rank gets
    the error at the first entry."""
    try:
        made = source(version)
        if made is not None:
            check_source(made)
        return made
    except Exception as error:  # noqa: BLE001 (raised when the ranks exchange entries)
        return map(raises, [error])


def raises(error: Exception) -> tuple[str, Any]:
    raise error


def lent(source: Any) -> AbstractContextManager[Callable[[], None]]:
    """Keeps the loan of a source open while its tensors are read (weights/transport/loans.py)."""
    return source.lent() if isinstance(source, LentSource) else nullcontext(lambda: None)
