"""The changes of an optimizer step, sent as a delta, beside the whole set.

    python -m benchmarks.deltas

AdamW updates float32 weights (σ = 0.02) from normal random gradients, so that its steps are as
large as in training; a generator receives the weights rounded to bfloat16. For each learning rate
some steps warm the moments up. Then each step is published in a folder (DeltaWriter), read
(DeltaReader) and committed, and the same weights are pushed whole from this process and whole
through the folder.

    changed       share of bfloat16 weights that a step has changed
    bytes         of the message, as a share of the whole set in bfloat16
    encode        GB of whole set a second: compare, compress. `apply`: check, unpack, XOR, compare
                  checksums
    to serving    seconds from the optimizer's weights (as bfloat16) to the commit: encode, write,
                  read, apply, sync. The best of the steps
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

import rollmesh as rm
from benchmarks.generate import make_trainer
from benchmarks.options import THREADS, real, whole
from benchmarks.shapes import SHAPES
from rollmesh.sources import DeltaDecoder, DeltaEncoder, DeltaReader, DeltaWriter


@dataclass
class Row:
    """Best times of one learning rate."""

    changed: float = 0.0
    share: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    def took(self, what: str, begin: float) -> None:
        seconds = time.perf_counter() - begin
        self.seconds[what] = min(seconds, self.seconds.get(what, seconds))


class Trainer:
    def __init__(self, shape: str, layers: int, rate: float):
        model = make_trainer(SHAPES[shape].config(), torch.float32)
        self.names = [name for name in dict(model.named_parameters()) if _layer_of(name) < layers]
        self.weights = [
            parameter.detach()
            for name, parameter in model.named_parameters()
            if name in set(self.names)
        ]
        self.optimizer = torch.optim.AdamW(self.weights, lr=rate)
        for weight in self.weights:
            weight.grad = torch.empty_like(weight)

    def step(self) -> dict[str, torch.Tensor]:
        """The weights after a step, in bfloat16."""
        for weight in self.weights:
            assert weight.grad is not None
            weight.grad.normal_()
        self.optimizer.step()
        return {
            name: weight.bfloat16() for name, weight in zip(self.names, self.weights, strict=True)
        }


def _layer_of(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


def measure(rate: float, args: argparse.Namespace, folder: Path) -> tuple[Row, int]:
    trainer, row = Trainer(args.shape, args.layers, rate), Row()
    config = {**SHAPES[args.shape].config(), "num_hidden_layers": args.layers}
    writer, reader, version = DeltaWriter(folder, whole_every=2**30), DeltaReader(folder), 0
    with rm.Generator(
        rm.ModelSpec.from_hf(config), max_model_len=64, kv_cache_gib=0.05, threads=args.threads
    ) as generator:
        now = trainer.step()
        for step in range(1, args.warm + args.steps):
            before, now = now, trainer.step()
            if step < args.warm - 1:
                continue
            begin = time.perf_counter()
            writer.publish(now, version)
            if step >= args.warm:
                row.took("encode and write", begin)
            then = time.perf_counter()
            reader.refresh()
            if step >= args.warm:
                row.took("read and apply", then)
            digest = generator.sync_weights(reader, reader.version).digest
            if step >= args.warm:
                row.took("delta to serving", begin)
                path = max(folder.glob("*.delta"))
                row.share = path.stat().st_size / sum(tensor.nbytes for tensor in now.values())
                same = [
                    (now[n].view(torch.int16) != before[n].view(torch.int16)).sum().item()
                    for n in now
                ]
                row.changed = sum(same) / sum(tensor.numel() for tensor in now.values())
            version += 2
            begin = time.perf_counter()
            assert generator.sync_weights(now, version - 1).digest == digest, (
                "the delta's weights are not the trainer's"
            )
            if step >= args.warm:
                row.took("whole, in process", begin)
        total = sum(tensor.nbytes for tensor in now.values())
        begin = time.perf_counter()
        message = DeltaEncoder().encode(now, 0)
        (folder / "whole").write_bytes(message)
        decoder = DeltaDecoder()
        decoder.apply((folder / "whole").read_bytes())
        generator.sync_weights(decoder, version)
        row.took("whole, by a file", begin)
        row.seconds["whole bytes"] = len(message) / total
    return row, total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="dense-0.6b")
    parser.add_argument("--layers", type=whole(1, 28), default=28)
    parser.add_argument("--rates", type=real(0, 1), nargs="+", default=[1e-6, 1e-5, 1e-3])
    parser.add_argument(
        "--warm", type=whole(2, 100), default=3, help="steps before the first that is measured (3)"
    )
    parser.add_argument("--steps", type=whole(1, 100), default=3, help="steps measured (3)")
    parser.add_argument("--threads", type=whole(1, THREADS), default=2)
    parser.add_argument(
        "--folder", type=Path, help="where files are written (a new folder in /dev/shm)"
    )
    args = parser.parse_args()
    print(
        "| lr | changed | bytes | encode GB/s | apply GB/s | delta to serving | whole, by a file "
        "| its bytes | whole, in process |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for rate in args.rates:
        with tempfile.TemporaryDirectory(dir=args.folder or "/dev/shm") as folder:
            row, total = measure(rate, args, Path(folder))
        s, gb = row.seconds, total / 1e9
        speeds = f"{gb / s['encode and write']:.2f} | {gb / s['read and apply']:.2f}"
        wholes = (
            f"{s['whole, by a file']:.2f} s | {s['whole bytes']:.1%} | "
            f"{s['whole, in process']:.2f} s"
        )
        print(
            f"| {rate:g} | {row.changed:.2%} | {row.share:.2%} | {speeds} | "
            f"{s['delta to serving']:.2f} s | {wholes} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
