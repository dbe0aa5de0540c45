"""Which variant runs and why: every instruction set works here or has a reason; RM_ISA sets an
upper limit; objects that every processor executes do not contain instructions that only some have;
and a variant with wrong arithmetic is refused."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import native_build
import pytest

from rollmesh import ops

ISAS = ("ref", "avx2", "avx512f", "avx512bf16", "amx")
CPU_FLAGS = {
    "avx2": {"avx2", "fma"},
    "avx512f": {"avx512f"},
    "avx512bf16": {"avx512_bf16", "avx512bw"},
    "amx": {"amx_tile", "amx_bf16"},
}


def processor_flags() -> set[str]:
    """Linux lists a feature when the processor has it and the kernel saves its registers."""
    text = Path("/proc/cpuinfo").read_text()
    return set(re.search(r"^flags\s*:(.*)$", text, re.M)[1].split())  # type: ignore[index]


def child(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return (done.stdout + done.stderr).strip()


def test_every_instruction_set_has_an_answer() -> None:
    assert tuple(ops.isa_states()) == ISAS
    works = tuple(isa for isa, (refused, *_) in ops.isa_states().items() if refused is None)
    assert works == ops.available_isas()
    assert ops.best_isa() in works


@pytest.mark.parametrize("isa", ISAS[1:])
def test_what_the_processor_has_is_used(isa: str) -> None:
    """A variant that this machine can run must not be refused; a variant that it cannot run has a
    reason."""
    refused, emulated, one_row, many_rows = ops.isa_states()[isa]
    refused_by_machine = refused in {
        "the operating system refuses tile registers to this process",  # a container may
        "one of its instructions traps",  # a virtual machine may
    }
    if CPU_FLAGS[isa] <= processor_flags() and not refused_by_machine:
        assert refused is None
        assert not emulated
        assert min(one_row, many_rows) > 0.1
    else:
        assert refused
        pytest.skip(f"not run here: {refused}")


@pytest.mark.parametrize("isa", ISAS)
def test_rm_isa_caps(isa: str) -> None:
    cap = ISAS.index(isa)
    best = child("from rollmesh import ops; print(ops.best_isa())", RM_ISA=isa)
    assert best in ops.available_isas()
    assert ISAS.index(best) <= cap


def test_an_unknown_rm_isa_is_an_error() -> None:
    assert "RM_ISA: expected ref, avx2" in child(
        "from rollmesh import ops; print(ops.best_isa())", RM_ISA="avx1024"
    )


def test_a_handler_of_sigill_is_left_as_it_was() -> None:
    """The check of the instructions replaces it for milliseconds."""
    code = """
import signal, ctypes
seen = []
signal.signal(signal.SIGILL, lambda *_: seen.append(1))
from rollmesh import ops
ops.best_isa()
signal.raise_signal(signal.SIGILL)
print(seen)
"""
    assert child(code) == "[1]"


# zmm registers, tiles, mask registers; EVEX forms of xmm16 and up.
ONLY_SOME_HAVE = re.compile(r"%(zmm\d+|[xy]mm(1[6-9]|2\d|3[01])|k[0-7]|tmm\d)\b")


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump (binutils)")
def test_common_objects_run_on_every_processor(native: Callable[..., Path]) -> None:
    """Dispatch must come before an illegal instruction: only the objects of a variant may contain
    its instructions. checksum.c tests the processor before it calls its one function with
    AVX-512."""
    found: dict[str, bool] = {}
    folder = native("checkops").parent
    for path in sorted(folder.rglob("*.o")):
        text = subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", str(path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        found[str(path.relative_to(folder))] = bool(ONLY_SOME_HAVE.search(text))
    wide = re.compile(r"\.(avx512f|avx512bf16|amx)\.o$|^csrc/base/checksum\.o$")
    assert [name for name, has in found.items() if has and not wide.search(name)] == []
    assert found["kernels/cpu/gemm.avx512f.o"]  # tests the search itself
    assert found["kernels/cpu/gemm.avx512bf16.o"]
    assert found["kernels/cpu/gemm.amx.o"]


WRONG = """
#include "tables.h"
#include <stdio.h>
static void wrong_gemm(const rm_ctx *ctx, const rm_gemm_args *a) {
  rm_table_ref.gemm(ctx, a);
  if (a->m > 1) ((float *)a->y)[a->n * a->m - 1] += 0x1p-20f * ((float *)a->y)[a->n * a->m - 1];
}
int main(void) {
  rm_kernels wrong = rm_table_ref;
  const uint32_t fp = rm_fp_enter();
  const char *right = rm_verify(&wrong);
  wrong.gemm = wrong_gemm;
  const char *said = rm_verify(&wrong);
  rm_fp_leave(fp);
  printf("%s %s\\n", right ? right : "-", said ? said : "-");
}
"""


def output_of(source: str, folder: Path, native: Callable[..., Path]) -> str:
    """Returns the output of a program that uses the library."""
    library = native("checkops").parent / "librollmesh.a"
    (folder / "main.c").write_text(source)
    flags = [
        "-std=gnu11",
        "-Ikernels",
        "-Ikernels/cpu",
        str(folder / "main.c"),
        str(library),
        "-lm",
        "-lpthread",
    ]
    native_build.run(
        [*native_build.compiler(), *flags, "-o", str(folder / "main")], dict(os.environ)
    )
    return subprocess.run([str(folder / "main")], capture_output=True, text=True, check=True).stdout


def test_a_variant_with_wrong_arithmetic_is_refused(
    tmp_path: Path, native: Callable[..., Path]
) -> None:
    """Input: ref's table, and the same with one gemm output changed in its last bits. rm_verify
    accepts the first and names the op of the second."""
    assert output_of(WRONG, tmp_path, native) == "- gemm\n"


TRAPPING = """
#define rm_verify trapping_verify
#include "select_isa.c"
#include <immintrin.h>
const char *trapping_verify(const rm_kernels *kernels) {
  if (kernels == &rm_table_avx2) __asm__ volatile("ud2");
  return NULL;
}
int main(void) {
  sigset_t blocked, after;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGILL);
  pthread_sigmask(SIG_SETMASK, &blocked, NULL);
  const rm_isa_state ref = rm_isa_ask(RM_ISA_REF), avx2 = rm_isa_ask(RM_ISA_AVX2);
  pthread_sigmask(SIG_SETMASK, NULL, &after);
  printf("%s, %s, %d\\n", ref.refused ? ref.refused : "-", avx2.refused ? avx2.refused : "-",
      sigismember(&after, SIGILL));
}
"""


def test_a_trap_is_caught_where_sigill_is_blocked(
    tmp_path: Path, native: Callable[..., Path]
) -> None:
    """The kernel ends a process that traps while it blocks SIGILL, with or without a handler.
    Input: select_isa.c with a check that traps for avx2, in a thread that blocks SIGILL, like a
    server's threads may. The signal mask is restored."""
    said = output_of(TRAPPING, tmp_path, native)
    if "lacks" in said:
        pytest.skip(f"not run here: {said}")
    assert said == "-, one of its instructions traps, 1\n"
