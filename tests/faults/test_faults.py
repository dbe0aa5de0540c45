"""The injected faults and the mutations (tests/faults) still fit the product.

`python tests/faults/run.py` and `mutate.py` run the tests against them; here each pattern is found,
and one fault goes the whole way.
"""

from __future__ import annotations

from pathlib import Path

import mutate
import places
import pytest
import run

FAULTS = run.all_faults()
PRODUCT = ("kernels", "csrc", "ext", "python")


def test_names_are_unique() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) >= 100
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_place(fault: run.Fault) -> None:
    """If you moved or changed such a line, update `function`, `old` and `new` of the fault."""
    texts: dict[str, str] = {}
    for change in fault.changes:
        assert change.file.startswith((*PRODUCT, "benchmarks/"))
        before = texts.get(change.file) or (run.ROOT / change.file).read_text()
        texts[change.file] = change.apply(before)
        assert texts[change.file] != before


def test_every_named_test_file_exists() -> None:
    named = {word for fault in FAULTS for word in fault.tests if word.startswith("tests/")}
    assert all(any(word.startswith("tests/") for word in fault.tests) for fault in FAULTS)
    assert [
        name for name in sorted(named) if not (run.ROOT / name.partition("::")[0]).is_file()
    ] == []


def test_functions_of_c() -> None:
    text = (
        "static int one(int a, int (*f)(int)) {\n  return f(a);\n}\n\n"
        "template <int N>\n__global__ void __launch_bounds__(64) two(int *a) {\n  a[0] = N;\n}\n"
    )
    found = places.functions(text, "a.cu")
    assert list(found) == ["one", "two"]
    assert [text[begin:end].splitlines()[-2] for [(begin, end)] in found.values()] == [
        "  return f(a);",
        "  a[0] = N;",
    ]


def test_a_pattern_is_of_one_function() -> None:
    """Line breaks do not count. A pattern that occurs twice, or in another function, is refused."""
    text = (
        "def f(a):\n    return a < 1\n\n\n"
        "class C:\n    def f(self, a):\n"
        "        return (\n            a <\n            1\n        )\n"
    )
    changed = places.replace(text, "a.py", "C.f", "a < 1", "a <= 1")
    assert changed == text.replace("a <\n            1", "a <= 1")
    for function, old in ((None, "a < 1"), ("f", "a < 2"), ("g", "a < 1")):
        with pytest.raises(ValueError, match="expected"):
            places.replace(text, "a.py", function, old, "")


def test_every_product_file_has_a_folder_of_tests() -> None:
    """mutate.FOLDERS answers where the tests of a file are."""
    files = [
        path.relative_to(run.ROOT).as_posix()
        for folder in PRODUCT
        for path in (run.ROOT / folder).rglob("*")
        if path.suffix in {".py", ".c", ".h", ".cu", ".cuh"}
    ]
    for file in files:
        assert (run.ROOT / mutate.tests_of(file)).is_dir(), file


@pytest.mark.parametrize(
    "before, after",
    [
        ("x = a < b", {"x = a <= b", "x = a >= b"}),
        ("x = a is not None", {"x = a is None"}),
        ("x = [1]", {"x = [2]", "x = [0]"}),
        ("x = a and b", {"x = a or b"}),
        ("x = not a", {"x = a"}),
        ("print(a)", {"pass"}),
        ('"""A docstring."""', set()),
        ('x = f"{a < 1}"', set()),
    ],
)
def test_mutations_of_python(before: str, after: set[str]) -> None:
    head = '"""Doc."""\ndef f(a, b):\n    '
    mutants = {each.apply(head + before) for each in mutate.of_python("a.py", head + before)}
    assert mutants == {head + each for each in after}


@pytest.mark.parametrize(
    "before, after",
    [
        ("if (a < b) return;", {"if (a <= b) return;", "if (a >= b) return;"}),
        ("if (a && b) return;", {"if (a || b) return;"}),
        ("x = a[2];", {"x = a[1];", "x = a[3];", ";"}),
        ("free(a);", {";"}),
        ("int x = 0x10; // 3 < 4", set()),
        ('f("1 < 2", c->b);', {";"}),
    ],
)
def test_mutations_of_c(before: str, after: set[str]) -> None:
    head, tail = "static void f(int a, int b) {\n  ", "\n}\n"
    text = head + before + tail
    mutants = {each.apply(text) for each in mutate.of_c("a.c", text)}
    assert mutants == {head + each + tail for each in after}


@pytest.mark.slow
def test_a_fault_is_caught(tmp_path: Path) -> None:
    """Copy, build, run the tests, inject, catch. Minutes, as it compiles the tree."""
    assert run.run([fault for fault in FAULTS if fault.name == "nan-weights"], tmp_path) == 0


@pytest.mark.slow
def test_mutants_of_a_module(tmp_path: Path) -> None:
    """A test that cannot fail kills no mutant, and the product's tests kill most."""
    file = "python/rollmesh/grpo/advantages.py"
    result = mutate.run([file], 8, 1, ["tests/grpo/test_grpo_by_hand.py"], tmp_path)
    assert result.killed >= 5
    result = mutate.run([file], 2, 1, ["tests/mesh/test_wire.py"], tmp_path)
    assert result.killed == 0
