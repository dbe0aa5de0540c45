"""Checksums of stored and transmitted bytes. Oracle: checksum.h in Python's integers; bound: 0."""

import numpy as np
import pytest

from rollmesh import _core
from rollmesh.weights.transport import tensors

MASK = 2**64 - 1
PAGE = 4096
SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 127, 129, 4095, 4096, 4097, 8209]


def _finish(x: int) -> int:
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def _expected(data: bytes) -> int:
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    keyed = (word + (i + 1) * 0x9E3779B97F4A7C15 for i, word in enumerate(words))
    total = sum(_finish(word & MASK) for word in keyed)
    return _finish((total + len(data)) & MASK)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 5, 8])
def test_value(size: int, offset: int, rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, size + offset, dtype=np.uint8)[offset:]
    expected = _expected(data.tobytes())
    assert _core.checksum(data) == _core.checksum(data.tobytes()) == expected
    assert tensors.checksum(data) == f"{expected:016x}"


@pytest.mark.parametrize("size", SIZES)
def test_every_byte_counts(size: int, rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, size, dtype=np.uint8)
    sums = {tensors.checksum(data)}
    assert tensors.checksum(data.copy()) in sums
    places = range(size) if size < 100 else rng.integers(0, size, 50)
    for at in dict.fromkeys(int(p) for p in places):
        changed = data.copy()
        changed[at] ^= np.uint8(1 << int(rng.integers(8)))
        assert tensors.checksum(changed) not in sums
        sums.add(tensors.checksum(changed))
    for longer in (np.append(data, np.uint8(0)), np.append(data, np.zeros(PAGE, np.uint8))):
        assert tensors.checksum(longer) not in sums


@pytest.mark.parametrize("unit", [4, 8, 64, PAGE, 16 * PAGE])
def test_places_count(unit: int, rng: np.random.Generator) -> None:
    """Detects swaps, rotations, reversals and shifts by words, rows and pages, also of the signs
    alone."""
    blocks = rng.integers(0, 256, (32, unit), dtype=np.uint8)
    sums = {tensors.checksum(blocks)}
    orders = [np.roll(np.arange(32), shift) for shift in range(1, 32)] + [np.arange(32)[::-1]]
    for i, j in rng.integers(0, 32, (100, 2)):
        if i < j:
            swapped = np.arange(32)
            swapped[[i, j]] = j, i
            orders.append(swapped)
    seen = {tuple(order): tensors.checksum(blocks[order]) for order in orders}
    assert not sums & set(seen.values())
    assert len(set(seen.values())) == len(seen)


def test_pairs_of_signs_count(rng: np.random.Generator) -> None:
    """A sum with odd weights mod 2^64 would miss each pair of the highest bits."""
    values = rng.standard_normal(256)
    sums = {tensors.checksum(values.view(np.uint8))}
    for i in range(0, 256, 7):
        for j in range(i + 1, 256, 11):
            changed = values.copy()
            changed[[i, j]] *= -1
            sums.add(tensors.checksum(changed.view(np.uint8)))
    assert len(sums) == 1 + sum(len(range(i + 1, 256, 11)) for i in range(0, 256, 7))


def test_arguments() -> None:
    for data in (b"abc", bytearray(b"abc"), memoryview(b"abc"), np.arange(6, dtype=np.float64)):
        assert _core.checksum(data) == _expected(bytes(data))
    for bad in (None, "abc", 3):
        with pytest.raises(TypeError):
            _core.checksum(bad)  # type: ignore[arg-type]
    with pytest.raises((BufferError, ValueError)):
        _core.checksum(np.zeros((4, 4), np.uint8)[:, 1:])
