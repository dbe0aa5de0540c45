"""The table of planted faults (tests/faults): every text that a fault replaces stands exactly once
in its file, and every test file that should see one exists. `python tests/faults/run.py` plants
them; here one goes the whole way."""

from __future__ import annotations

from pathlib import Path

import pytest
import run

FAULTS = run.all_faults()


def test_names_are_unique() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) >= 200
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: run.Fault) -> None:
    """Each text stands once in its file. Where a line was moved or reworded, update file, old and
    new of the fault."""
    texts: dict[str, str] = {}
    for change in fault.changes:
        assert change.file.startswith(("kernels/", "csrc/", "ext/", "python/", "benchmarks/"))
        texts[change.file] = change.apply(
            texts.get(change.file) or (run.ROOT / change.file).read_text()
        )


def test_every_named_test_file_exists() -> None:
    named = {word for fault in FAULTS for word in fault.tests if word.startswith("tests/")}
    assert all(any(word.startswith("tests/") for word in fault.tests) for fault in FAULTS)
    assert [
        name for name in sorted(named) if not (run.ROOT / name.partition("::")[0]).is_file()
    ] == []


@pytest.mark.slow
def test_a_planted_fault_is_caught(tmp_path: Path) -> None:
    """Copy, build, baseline, plant, catch. Minutes, as it compiles the tree."""
    assert (
        run.run([fault for fault in FAULTS if fault.name == "nan-weights"], tmp_path, wide=False)
        == 0
    )
