"""The folders of the tests, and the environment of programs that tests start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = Path(__file__).resolve().parent


def child_environment(**changes: str) -> dict[str, str]:
    """Returns the environment of a Python program that can import what this process can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **changes}
