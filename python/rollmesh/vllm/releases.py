"""The releases of vLLM that rollmesh serves: the newest and the one before. What differs between
them, in one table.

A release is let in once the tests have run on it: tests/vllm/test_vllm_*.py, in an environment that
`VLLM=… .ci/vllm` makes.
"""

from __future__ import annotations

from typing import NamedTuple


class Release(NamedTuple):
    torch: str  # that its wheel was built for
    # token ids outside the vocabulary, in the front end, for the whole call; else the engine ends
    # the request
    refuses_unknown_ids: bool


RELEASES = {
    "0.32.0": Release(torch="2.13.0", refuses_unknown_ids=False),
    "0.33.0": Release(torch="2.14.0", refuses_unknown_ids=True),
}
