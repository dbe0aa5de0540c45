"""The releases of vLLM that rollmesh supports, the newest and the one before, and a table of their
differences.

A release is added after the tests have run on it: tests/vllm/test_vllm_*.py, in an environment that
`VLLM=… .ci/vllm` creates.
"""

from __future__ import annotations

from typing import NamedTuple


class Release(NamedTuple):
    torch: str  # version of torch that its wheel was built for
    # Whether the front end refuses a call with token ids outside the vocabulary; otherwise the
    # engine ends the request.
    refuses_unknown_ids: bool


RELEASES = {
    "0.32.0": Release(torch="2.13.0", refuses_unknown_ids=False),
    "0.33.0": Release(torch="2.14.0", refuses_unknown_ids=True),
}
