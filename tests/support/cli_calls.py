"""The command line as the tests call it, and its tiny shapes."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from paths import ROOT

MOE = ROOT / "configs/qwen3_moe_debug.toml"
SMALL = ["--kv-cache-gib", "0.01", "--threads", "1"]


def program(*args: object, cwd: Path | None = None) -> str:
    """Returns the standard output of `python -m rollmesh args`."""
    command = [sys.executable, "-m", "rollmesh", *map(str, args)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, cwd=cwd
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def rollmesh(*args: object, status: int = 0) -> str:
    """Returns the standard output of `rollmesh args`, run in this process; standard error if a
    failure is expected."""
    from rollmesh.cli import main

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            got: object = main([str(arg) for arg in args])
        except SystemExit as ended:  # of argparse
            got = ended.code
    assert got == status, f"exit status {got}\n{out.getvalue()}\n{err.getvalue()}"
    return err.getvalue() if status else out.getvalue()


def refused(*args: object) -> str:
    """Returns the one line of `rollmesh args`."""
    text = rollmesh(*args, status=2)
    assert re.match(f"rollmesh {args[0]}: (Config|Format|Request)Error: ", text), text
    assert text.count("\n") == 1
    return text
