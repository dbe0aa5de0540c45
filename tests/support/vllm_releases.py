"""Differences between the releases of vLLM that rollmesh supports."""

from __future__ import annotations

# The version of torch that the release's wheel was built for.
TORCH = {"0.32.0": "2.13.0", "0.33.0": "2.14.0"}
# Releases whose front end refuses a call with token ids outside the vocabulary; in the others the
# engine ends the request.
REFUSE_UNKNOWN_IDS = ("0.33.0",)
