"""The simulated device is slow, so only the first quick case of each test here stays quick."""

from __future__ import annotations

from pathlib import Path

import pytest
from marks import first_case_is_quick

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first_case_is_quick(item for item in items if HERE in item.path.parents)
