"""Seeds as a pure function of (run seed, step, name). No random state passes from step to step, so
step 200 of a run draws the same prompts and samples if the process was restarted at step 150.

Rejected: a random generator in the checkpoint, because its state depends on all code before it.
"""

from __future__ import annotations

import hashlib
import random


def seed_of(run_seed: int, step: int, name: str) -> int:
    """Returns 63 bits of a hash of the three. name: a purpose, or a purpose and a prompt."""
    text = f"{run_seed}\0{step}\0{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def rng_of(run_seed: int, step: int, name: str) -> random.Random:
    return random.Random(seed_of(run_seed, step, name))
