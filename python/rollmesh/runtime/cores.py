"""How many cores this process may use: csrc/base/control_groups.h."""

from __future__ import annotations

from rollmesh import _core


def usable_cores() -> int:
    """The cores of its affinity mask, at most the CPU quota of its control groups, rounded down. At
    least 1."""
    return _core.usable_cores()
