"""Seeds as a pure function of (run seed, step, name): nothing about chance is carried from step to
step.

So a resumed run is the same run: step 200 draws the same prompts and the same samples whether or
not the process was restarted at step 150. A generator object saved in the checkpoint would do too,
but could drift with a change of code before it.
"""

from __future__ import annotations

import hashlib
import random


def seed_of(run_seed: int, step: int, name: str) -> int:
    """63 bits from a hash of the three; `name` says what is drawn: a purpose, or a purpose and a
    prompt."""
    text = f"{run_seed}\0{step}\0{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def rng_of(run_seed: int, step: int, name: str) -> random.Random:
    return random.Random(seed_of(run_seed, step, name))
