"""Weights as differences (weights/transport/delta.py, delta_folder.py).

Oracle: the arrays that were published, and a generator that receives them whole. Bound: 0 differing
bits. A malformed message raises a typed error, keeps the previous version bit for bit, and the next
good message is applied."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
from paths import child_environment

import rollmesh as rm
from rollmesh.sources import BF16, DeltaDecoder, DeltaEncoder, DeltaReader, DeltaWriter

pytest.importorskip("zstandard")
Weights = dict[str, np.ndarray]
SHAPES = [(), (0,), (1,), (3, 0), (7,), (8, 9), (64, 64), (300, 41)]
DTYPES: list[Any] = [BF16, np.float32, np.float16, np.float64]


def weights(rng: np.random.Generator) -> Weights:
    made = {}
    for dtype in map(np.dtype, DTYPES):
        for shape in SHAPES:
            words = rng.integers(
                0, 2**16, size=int(np.prod(shape)) * dtype.itemsize // 2, dtype=np.uint16
            )
            made[f"{dtype}{dtype.metadata or ''}-{shape}"] = words.view(dtype).reshape(shape)
    return made


def stepped(old: Weights, rng: np.random.Generator, share: float) -> Weights:
    """Changes some words of each tensor, including NaN and infinities."""
    new = {name: array.copy() for name, array in old.items()}
    for array in new.values():
        words = array.reshape(-1).view(f"u{array.dtype.itemsize}")
        chosen = rng.random(words.size) < share
        words[chosen] += rng.integers(1, 3, size=int(chosen.sum())).astype(words.dtype)
    return new


def bits(source: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (str(array.dtype), array.shape, array.tobytes()) for name, array in source.items()
    }


def pair(rng: np.random.Generator) -> tuple[DeltaEncoder, DeltaDecoder, Weights]:
    encoder, decoder, first = DeltaEncoder(), DeltaDecoder(), weights(rng)
    assert decoder.apply(encoder.encode(first, 3)) == 3
    return encoder, decoder, first


# ------------------------------------------------------------------------------------------ ranks
RANK = """
    import atexit
    import sys
    import numpy as np
    import torch.distributed as dist
    import helpers
    import rollmesh as rm
    from rollmesh.sources import DeltaDecoder, DeltaEncoder

    rank, place = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=3)
    # else the threads of Gloo may end the process with SIGABRT
    atexit.register(dist.destroy_process_group)
    config, encoder, decoder = helpers.tiny_config(True), DeltaEncoder(), DeltaDecoder()
    generator = rm.Generator(rm.ModelSpec.from_hf(config), max_model_len=16, kv_cache_gib=0.001,
        threads=1)
    state, rng = helpers.numpy_state_dict(config, 0, "bfloat16"), np.random.default_rng(0)

    def exchange(encode, *arguments):
        message = [encode(*arguments)] if rank == 0 else [None]
        dist.broadcast_object_list(message, src=0)
        return message[0]

    for version in range(1, 7):
        for array in state.values():
            array.view(np.uint16)[rng.random(array.shape) < 0.01] ^= 1
        message = exchange(encoder.encode, state, version)
        lacks = [None] * 3
        if rank == 0:
            decoder = state
        elif (rank, version) != (2, 4):  # this rank does not hear of one version
            try:
                decoder.apply(message)
            except rm.BaseVersionError as error:
                lacks[0] = str(error)
        dist.all_gather_object(lacks, lacks[0])
        if any(lacks):
            message = exchange(encoder.whole)
            if rank and decoder.version != version:
                decoder.apply(message)
        if (rank, version) != (2, 4):
            report = generator.sync_weights(decoder, version=version)
        sys.stdout.write(f"{version} {report.digest} {report.version} {sum(map(bool, lacks))}\\n")
"""


@pytest.mark.full
def test_over_torch_distributed(tmp_path: Path) -> None:
    """One rank trains and two receive. One of them misses a version: it reports this at the next
    version and gets the whole set. The digests equal those of a generator that receives the state
    itself."""
    pytest.importorskip("torch")
    command = [sys.executable, "-c", textwrap.dedent(RANK)]
    # fmt: off
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], env=child_environment(),
        stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    # fmt: on
    told = [process.communicate(timeout=120)[0].splitlines() for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0]
    trainer, first, second = told
    assert first == trainer
    assert [line.split()[2:] for line in second] == [
        ["1", "0"],
        ["2", "0"],
        ["3", "0"],
        ["3", "0"],
        ["5", "1"],
        ["6", "0"],
    ]
    assert [line for line in second if not line.startswith("4 ")] == [
        line for line in trainer if not line.startswith("4 ")
    ]


# ----------------------------------------------------------------------------------- what arrives
@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.12, 0.13, 0.5, 1.0])
def test_versions_arrive_bit_for_bit(rng: np.random.Generator, share: float) -> None:
    encoder, decoder, now = pair(rng)
    assert bits(decoder) == bits(now)
    for version in (4, 5, 90, 91):
        now = stepped(now, rng, share)
        message = encoder.encode(iter(now.items()), version)
        assert encoder.base is not None
        assert decoder.apply(message) == version == encoder.version
        assert bits(decoder) == bits(now)


def test_what_the_trainer_keeps_is_a_copy(rng: np.random.Generator) -> None:
    encoder, decoder, now = pair(rng)
    for version in (4, 5):
        for array in now.values():
            array.reshape(-1).view(f"u{array.dtype.itemsize}")[:3] += 1
        decoder.apply(encoder.encode(now, version))
        assert bits(decoder) == bits(now)


def test_other_names_or_forms_are_a_whole_set(rng: np.random.Generator) -> None:
    encoder, decoder, now = pair(rng)
    for version, change in enumerate(
        (
            {"new": np.ones(3, np.float32)},
            {"new": np.ones((3, 1), np.float32)},
            {"new": np.ones((3, 1))},
        ),
        4,
    ):
        now = now | change
        message = encoder.encode(now, version)
        assert encoder.base is None
        decoder.apply(message)
        assert bits(decoder) == bits(now)


def test_a_whole_set_makes_missed_versions_good(rng: np.random.Generator) -> None:
    encoder, decoder, now = pair(rng)
    for version in range(4, 9):
        encoder.encode(now := stepped(now, rng, 0.02), version)
    decoder.apply(encoder.encode(now := stepped(now, rng, 0.02), 9, whole=True))
    assert bits(decoder) == bits(now)
    decoder.apply(encoder.encode(now := stepped(now, rng, 0.02), 10))
    assert bits(decoder) == bits(now)


def test_the_last_version_as_a_whole_set(rng: np.random.Generator) -> None:
    """The whole set is for a reader that comes late. Readers that have the version continue with
    deltas, and so does the late reader afterwards."""
    encoder, decoder, first = pair(rng)
    late, second = DeltaDecoder(), stepped(first, rng, 0.01)
    decoder.apply(encoder.encode(second, 4))
    assert late.apply(encoder.whole()) == 4
    assert bits(late) == bits(decoder) == bits(second)
    with pytest.raises(rm.VersionError, match="version 4 does not exceed 4"):
        decoder.apply(encoder.whole())
    third = stepped(second, rng, 0.01)
    message = encoder.encode(third, 5)
    for each in (decoder, late):
        assert each.apply(message) == 5
        assert bits(each) == bits(third)
    with pytest.raises(rm.NotSyncedError, match="call encode first"):
        DeltaEncoder().whole()


def test_torch_tensors_and_numpys_are_alike(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    tensors = {
        "a": torch.randn(40, 30).bfloat16(),
        "b": torch.randn(7).t(),
        "c": torch.randn(4, 6).t(),
    }
    decoder = DeltaDecoder()
    decoder.apply(DeltaEncoder().encode(tensors, 0))
    assert np.array_equal(decoder["a"], tensors["a"].view(torch.uint16).numpy())
    assert decoder["a"].dtype.metadata == BF16.metadata
    assert np.array_equal(decoder["c"], tensors["c"].numpy())


# -------------------------------------------------------------------------------- what goes wrong
def test_messages_that_do_not_fit(rng: np.random.Generator) -> None:
    """Messages that are lost, repeated, out of order, of another base, or of another run."""
    encoder, decoder, now = pair(rng)
    held: dict[int, tuple[bytes, Any]] = {}
    for version in (4, 5, 6):
        now = stepped(now, rng, 0.02)
        held[version] = (encoder.encode(now, version), bits(now))
    other = DeltaEncoder()
    other.encode(now, 3)
    strange = other.encode(stepped(now, rng, 0.1), 4)
    before = bits(decoder)
    for message, kind, words in (
        (
            held[5][0],
            rm.BaseVersionError,
            "expected a delta against version 3 .* got one against version 4",
        ),
        (strange, rm.BaseVersionError, "of run"),
        (DeltaEncoder().encode(now, 3), rm.VersionError, "version 3 does not exceed 3"),
    ):
        with pytest.raises(kind, match=words):
            decoder.apply(message)
        assert (bits(decoder), decoder.version) == (before, 3)
    decoder.apply(held[4][0])
    with pytest.raises(rm.VersionError, match="version 4 does not exceed 4"):
        decoder.apply(held[4][0])
    decoder.apply(held[5][0])
    assert bits(decoder) == held[5][1]
    late = DeltaDecoder()
    with pytest.raises(rm.BaseVersionError, match="expected a whole set first"):
        late.apply(held[6][0])
    with pytest.raises(rm.NotSyncedError):
        dict(late)
    decoder.apply(held[6][0])
    assert bits(decoder) == held[6][1]


def test_any_bit_that_changed_is_seen(rng: np.random.Generator) -> None:
    encoder, decoder, now = pair(rng)
    good = encoder.encode(stepped(now, rng, 0.02), 4)
    before = bits(decoder)
    for at in [*range(24), *rng.integers(24, len(good), 300)]:
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(8))
        with pytest.raises(rm.FormatError):
            decoder.apply(bytes(bad))
        assert decoder.version == 3
    for size in [0, 1, 7, 8, 23, 24, *rng.integers(25, len(good), 30), len(good) - 1]:
        with pytest.raises(rm.FormatError):
            decoder.apply(good[:size])
    with pytest.raises(rm.FormatError):
        decoder.apply(good + b"\0")
    assert bits(decoder) == before
    assert decoder.apply(good) == 4


def test_a_base_that_has_other_bits(rng: np.random.Generator) -> None:
    """Bytes that were changed before the error was detected are restored."""
    encoder, decoder, now = pair(rng)
    message = encoder.encode(stepped(now, rng, 0.3), 4)
    name = list(decoder)[-1]
    decoder[name].reshape(-1).view(np.uint8)[5] ^= 4
    before = bits(decoder)
    with pytest.raises(rm.FormatError, match="expected checksum"):
        decoder.apply(message)
    assert (bits(decoder), decoder.version) == (before, 3)


def with_header(message: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Replaces the header by a changed header with a valid checksum."""
    size = int.from_bytes(message[8:16], "little")
    values = json.loads(message[24 : 24 + size])
    change(values)
    header = json.dumps(values).encode()
    return (
        message[:8]
        + len(header).to_bytes(8, "little")
        + hashlib.blake2b(header, digest_size=8).digest()
        + header
        + message[24 + size :]
    )


def of_row(column: int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Returns a change of the header of a tensor whose changes are stored as places."""

    def change(values: dict[str, Any]) -> None:
        row = next(row for row in values["tensors"] if row[3] == "places")
        row[column] = value(row[column]) if callable(value) else value

    return change


HEADERS: list[Callable[[dict[str, Any]], None]] = [
    lambda values: values.pop("tensors"),
    lambda values: values.update(tensors=3),
    lambda values: values.update(version=-1),
    lambda values: values.update(version=2**63),
    lambda values: values.update(version="4"),
    lambda values: values.update(base=True),
    lambda values: values.update(bytes=3),
    lambda values: values.update(sum="00"),
    lambda values: values.update(base=None),
    lambda values: values["tensors"].append(values["tensors"][0]),
    lambda values: values["tensors"].pop(),
    of_row(0, "another"),
    of_row(0, 7),
    of_row(1, "int8"),
    of_row(2, [2**40, 2**40]),
    of_row(2, [-1]),
    of_row(2, [1, 2, 3]),
    of_row(2, [10**400, 1.5]),
    of_row(2, [10**1000] * 1000),
    of_row(3, "same"),
    of_row(3, "words"),
    of_row(3, "zeros"),
    of_row(4, lambda count: count + 1),
    of_row(4, lambda count: count - 1),
    of_row(4, 2**60),
    of_row(4, 0),
    of_row(4, -1),
    of_row(4, True),
    of_row(5, lambda sizes: [sizes[0] + 1, sizes[1] - 1]),
    of_row(5, lambda sizes: [2**60, sizes[1]]),
    of_row(5, lambda sizes: [-1, sum(sizes) + 1]),
    of_row(5, lambda sizes: sizes[:1]),
    of_row(6, "0000000000000000"),
    of_row(6, None),
]


def test_a_header_that_no_decoder_takes_is_not_made() -> None:
    # 12 bytes of JSON per character.
    names = (f"{i:07d}" + "\U0001f600" * 1000 for i in range(23_000))
    empty = np.empty(0, np.float32)
    with pytest.raises(rm.LimitError, match="a delta's header: expected at most 268435456 bytes"):
        DeltaEncoder(threads=1).encode(((name, empty) for name in names), 1)


@pytest.mark.parametrize("change", HEADERS, ids=lambda change: "")
def test_headers_that_lie(
    rng: np.random.Generator, change: Callable[[dict[str, Any]], None]
) -> None:
    encoder, decoder, now = pair(rng)
    good = encoder.encode(stepped(now, rng, 0.02), 4)
    before = bits(decoder)
    with pytest.raises((rm.FormatError, rm.LimitError, rm.DuplicateKeyError)):
        decoder.apply(with_header(good, change))
    assert (bits(decoder), decoder.version) == (before, 3)
    assert decoder.apply(good) == 4


def test_parts_of_two_messages(rng: np.random.Generator) -> None:
    """The header of one message and the payload of another, of one run or of two, also with equal
    sizes."""
    encoder, decoder, now = pair(rng)
    one = encoder.encode(stepped(now, rng, 0.02), 4)
    other = DeltaEncoder()
    other.encode(now, 3)
    others = [
        encoder.encode(stepped(now, rng, 0.02), 5),
        encoder.whole(),
        other.encode(stepped(now, rng, 0.02), 4),
    ]
    flipped = bytearray(one)
    flipped[-16:-8], flipped[-8:] = flipped[-8:], flipped[-16:-8]
    size = 24 + int.from_bytes(one[8:16], "little")
    mixed = [one[:size] + m[24 + int.from_bytes(m[8:16], "little") :] for m in others]
    for message in (*mixed, bytes(flipped)):
        with pytest.raises(rm.FormatError):
            decoder.apply(message)
    assert (bits(decoder), decoder.version) == (bits(now), 3)
    assert decoder.apply(one) == 4


def test_permuted_rows_are_a_change(rng: np.random.Generator) -> None:
    """Experts that change places start a new base, so that an unchanged version needs no data."""
    first = {"experts": rng.standard_normal((8, 64, 32)).astype(np.float32), "other": np.zeros(3)}
    second = {**first, "experts": first["experts"][[1, 0, *range(2, 8)]].copy()}
    encoder, decoder, late = DeltaEncoder(), DeltaDecoder(), DeltaDecoder()
    for version, state in enumerate([first, second, second, first, first]):
        decoder.apply(encoder.encode(state, version))
        assert bits(decoder) == bits(state), version
    late.apply(encoder.whole())
    assert bits(late) == bits(first)


def test_a_stream_that_unpacks_to_more_than_it_says(rng: np.random.Generator) -> None:
    """A few bytes contain 16 GiB of zeros: refused by the frame's size."""
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 24))
    message = DeltaEncoder().encode({"w": np.zeros(4, np.float32)}, 0)

    def change(values: dict[str, Any]) -> None:
        from rollmesh.weights.transport.tensors import checksum

        values["tensors"][0][5], values["bytes"] = [len(bomb)], len(bomb)
        values["sum"] = checksum(np.frombuffer(bomb, np.uint8))

    size = int.from_bytes(message[8:16], "little")
    with pytest.raises(rm.FormatError, match=r"w: expected a stream of 16 bytes, got 16777216"):
        DeltaDecoder().apply(with_header(message[: 24 + size] + bomb, change))


@pytest.mark.parametrize("message", [None, 3, "text", [b"rmdelta2"]], ids=str)
def test_what_is_no_message(message: Any) -> None:
    with pytest.raises(rm.FormatError):
        DeltaDecoder().apply(message)


def test_a_trainer_whose_source_fails(rng: np.random.Generator) -> None:
    encoder, decoder, now = pair(rng)

    def broken() -> Any:
        yield from list(now.items())[:5]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        encoder.encode(broken(), 4)
    with pytest.raises(rm.DuplicateKeyError):
        encoder.encode([*now.items(), *now.items()], 4)
    with pytest.raises(rm.UnsupportedTensorError):
        encoder.encode({**now, "x": "text"}, 4)
    for version in (3, -1, True, "4", 2**63):
        with pytest.raises(rm.VersionError):
            encoder.encode(now, version)
    now = stepped(now, rng, 0.02)
    decoder.apply(encoder.encode(now, 4))
    assert bits(decoder) == bits(now)


# --------------------------------------------------------------------------------------- a folder
def test_readers_of_a_folder_that_come_when_they_like(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    writer, now = DeltaWriter(tmp_path, whole_every=4), weights(rng)
    always, seldom = DeltaReader(tmp_path), DeltaReader(tmp_path)
    with pytest.raises(rm.NotSyncedError):
        always.refresh()
    for version in range(30):
        now = stepped(now, rng, 0.02)
        assert writer.publish(now) == version
        late = DeltaReader(tmp_path)
        for reader in (always, late, *([seldom] if version % 7 == 5 else [])):
            assert reader.refresh() == version
            assert bits(reader) == bits(now)
        assert always.refresh() == version
        wholes = sorted(path.name for path in tmp_path.glob("*.whole"))
        assert len(wholes) == min(2, 1 + version // 4)
        assert min(path.name for path in tmp_path.glob("[0-9]*")) == wholes[0], (
            "files older than the whole set before the newest are left"
        )


def test_a_file_that_is_damaged(tmp_path: Path, rng: np.random.Generator) -> None:
    writer, now, reader = DeltaWriter(tmp_path, whole_every=4), weights(rng), DeltaReader(tmp_path)
    held = []
    for _ in range(3):
        writer.publish(now := stepped(now, rng, 0.02))
        held.append(bits(now))
    damaged = tmp_path / f"{2:019d}.after.1.delta"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(rm.FormatError, match=damaged.name):
            reader.refresh()
        assert (bits(reader), reader.version) == (held[1], 1)
    writer.publish(now := stepped(now, rng, 0.02))
    with pytest.raises(rm.FormatError, match=damaged.name):
        reader.refresh()
    writer.publish(now := stepped(now, rng, 0.02))  # whole
    assert reader.refresh() == 4
    assert bits(reader) == bits(now)


def test_a_trainer_that_is_started_again(tmp_path: Path, rng: np.random.Generator) -> None:
    reader, now = DeltaReader(tmp_path), weights(rng)
    for first in (0, 3, 6):
        (tmp_path / f"{first:019d}.whole.being-written").write_bytes(b"half of it")
        writer = DeltaWriter(tmp_path)
        assert writer.version == (first - 1 if first else None)
        for version in range(first, first + 3):
            now = stepped(now, rng, 0.02)
            assert writer.publish(now) == version
            assert reader.refresh() == version
            assert bits(reader) == bits(now)
        writer.close()
    assert not list(tmp_path.glob("*.being-written"))
    with pytest.raises(rm.VersionError, match="version 8 does not exceed 8"):
        DeltaWriter(tmp_path).publish(now, 8)


def test_a_full_disk(tmp_path: Path) -> None:
    """A limit on the file size acts as a full disk: the write fails half way, the folder is
    unchanged, and the call can be repeated."""
    script = """
        import resource, signal, sys
        import numpy as np
        from pathlib import Path
        from rollmesh.sources import DeltaReader, DeltaWriter

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        folder = Path(sys.argv[1])
        writer, reader = DeltaWriter(folder), DeltaReader(folder)
        weights = {"w": np.random.default_rng(0).standard_normal(100_000).astype(np.float32)}
        writer.publish(weights)
        reader.refresh()
        weights["w"] += 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            writer.publish(weights)
        except OSError as error:
            assert error.errno == 27, error
        else:
            raise AssertionError("the write did not fail")
        assert [path.suffix for path in folder.glob("[!.]*")] == [".whole"]
        assert reader.refresh() == 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert writer.publish(weights, 1) == reader.refresh() == 1
        assert (reader["w"] == weights["w"]).all()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_reader_beside_a_writer(tmp_path: Path) -> None:
    """Reader and writer are processes, and writing takes a while: the reader sees only whole
    versions, and reaches the last one."""
    script = """
        import sys
        import numpy as np
        from rollmesh.sources import DeltaWriter

        writer = DeltaWriter(sys.argv[1], whole_every=3)
        for version in range(40):
            writer.publish({"w": np.random.default_rng(version).integers(0, 2**32, 2_000_000,
                np.uint32).view(np.float32)}, version)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    ) as process:
        reader, seen = DeltaReader(tmp_path), set()
        while process.poll() is None or reader.refresh() < 39:
            try:
                version = reader.refresh()
            except rm.NotSyncedError:
                continue
            if version not in seen:
                seen.add(version)
                expected = np.random.default_rng(version).integers(0, 2**32, 2_000_000, np.uint32)
                assert np.array_equal(reader["w"].view(np.uint32), expected), version
    assert process.returncode == 0
    assert reader.version == 39
    assert len(seen) > 3


@pytest.mark.parametrize("folder", ["/no/such/folder", "\ud800", "\0", 3, None, b"/tmp"], ids=ascii)
def test_what_is_no_folder(folder: Any) -> None:
    for make in (DeltaReader, DeltaWriter, rm.sources.SharedWriter):
        with pytest.raises(rm.ConfigError, match="folder: expected a folder that exists"):
            make(folder)
    with pytest.raises(rm.ConfigError, match="whole_every"):
        DeltaWriter("/tmp", whole_every=0)


def test_a_folder_that_goes_away(tmp_path: Path, rng: np.random.Generator) -> None:
    (tmp_path / "it").mkdir()
    writer, reader, now = DeltaWriter(tmp_path / "it"), DeltaReader(tmp_path / "it"), weights(rng)
    writer.publish(now)
    reader.refresh()
    (tmp_path / "it").rename(tmp_path / "other")
    with pytest.raises(rm.NotSyncedError, match="expected a folder, got none"):
        reader.refresh()
    with pytest.raises(rm.StateError, match="another or none"):
        writer.publish(now)
    assert bits(reader) == bits(now)


# ------------------------------------------------------------------------------------ a generator
@pytest.mark.full
def test_two_hundred_steps_by_deltas_are_those_of_whole_pushes(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Takes an optimizer's steps in bfloat16. One generator receives every version whole, one, a
    mesh, follows the folder, one joins at every tenth version: equal digests, and at the end equal
    logits."""
    torch = pytest.importorskip("torch")
    case = helpers.Case("moe", helpers.tiny_config(True), router_bias=False)
    state = {
        k: torch.from_numpy(v).requires_grad_()
        for k, v in helpers.numpy_state_dict(case.config, 0, "float32", False).items()
    }
    optimizer = torch.optim.AdamW(state.values(), lr=1e-5)
    generator = torch.Generator().manual_seed(0)
    spec, options = (
        rm.ModelSpec.from_hf(case.config),
        {"max_model_len": 64, "kv_cache_gib": 0.01, "threads": 1},
    )
    writer, reader, rare = DeltaWriter(tmp_path), DeltaReader(tmp_path), DeltaReader(tmp_path)
    sent = 0

    def made(**more: Any) -> rm.Generator:
        return rm.Generator(spec, **options, **more)

    with made() as whole, made(mesh=rm.Mesh(tp=2, ep=2)) as followed, made() as seldom:
        for version in range(200):
            for tensor in state.values():
                tensor.grad = torch.randn(tensor.shape, generator=generator)
            optimizer.step()
            pushed = {name: tensor.detach().bfloat16() for name, tensor in state.items()}
            writer.publish(pushed, version)
            digest = whole.sync_weights(pushed, version).digest
            assert followed.sync_weights(reader, reader.refresh()).digest == digest
            if version % 10 == 9:
                assert seldom.sync_weights(rare, rare.refresh()).digest == digest
            sent = max((path.stat().st_size for path in tmp_path.glob("*.delta")), default=0)
        logits = [g.logits([[1, 2, 3, 4]])[0].tobytes() for g in (whole, followed, seldom)]
    assert len(set(logits)) == 1
    assert sent < sum(tensor.nbytes for tensor in pushed.values()) / 3


def test_a_delta_that_is_refused_leaves_the_old_version_serving(rng: np.random.Generator) -> None:
    case = helpers.Case("dense", helpers.tiny_config(False))
    first = helpers.numpy_state_dict(case.config, 0, "float32")
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    decoder.apply(encoder.encode(first, 0))
    spec = rm.ModelSpec.from_hf(case.config)
    with rm.Generator(
        spec, dtype="float32", max_model_len=64, kv_cache_gib=0.01, threads=1
    ) as generator:
        generator.sync_weights(decoder, decoder.version)
        before = generator.logits([[1, 2, 3]])[0].tobytes()
        second = {name: value * np.float32(1.01) for name, value in first.items()}
        message = encoder.encode(second, 1)
        with pytest.raises(rm.FormatError):
            generator.sync_weights(decoder, decoder.apply(message[:-3]))
        assert generator.version == 0
        assert generator.logits([[1, 2, 3]])[0].tobytes() == before
        report = generator.sync_weights(decoder, decoder.apply(message))
        assert report.digest == generator.sync_weights(second).digest
