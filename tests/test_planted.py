"""The planted faults of tests/planted: every patch fits the tree as it is and touches nothing that tests, and one of them, built
in a copy of the tree, is seen by the test that its header names. `python tests/planted/run.py` does so for all."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "planted"))

import run

FAULTS = run.all_faults()
NEEDS_PATCH = pytest.mark.skipif(shutil.which("patch") is None, reason="patch is not installed; no planted fault was tried")


def test_the_list_is_long_and_its_names_are_unique() -> None:
    names = [fault.name.partition("-")[2] for fault in FAULTS]
    assert len(names) >= 50
    assert len(set(names)) == len(names)


@NEEDS_PATCH
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_patch_fits_the_tree(fault: run.Fault) -> None:
    """Oracle: patch itself, without fuzz and without writing; the files touched are product code."""
    files = run.touched(fault)
    assert files
    assert all(name.startswith(("kernels/", "csrc/", "ext/", "python/")) for name in files)
    assert run.apply(run.ROOT, fault, "--dry-run"), f"{fault.path.name} does not apply: make it again"


def test_every_named_test_file_exists() -> None:
    named = {word for fault in FAULTS for word in fault.tests if word.startswith("tests/")}
    assert [name for name in sorted(named) if not (run.ROOT / name.partition("::")[0]).is_file()] == []


@NEEDS_PATCH
@pytest.mark.slow
def test_a_planted_fault_is_caught(tmp_path: Path) -> None:
    """The whole way once: copy, build, baseline, plant, catch. Minutes, as it compiles the tree."""
    chosen = [fault for fault in FAULTS if fault.name.endswith("-nan-weights")]
    assert len(chosen) == 1
    assert run.run(chosen, tmp_path, wide=False) == 0
