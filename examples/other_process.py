"""Trainer and generator are two processes of one machine and share weights through shared memory.

    python examples/other_process.py

The trainer writes each version to a file under /dev/shm; the generator maps the file and reads it
in place. The address contains a nonce: a file of another writer is refused (AuthError)."""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing.connection import Connection

import rollmesh as rm
from rollmesh.sources import SharedReader, SharedWriter

CONFIG = {
    "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
VERSIONS = 3


def train(pipe: Connection) -> None:
    """The trainer's process. A real trainer sends tensors of its GPU without a copy: publish(…,
    lend_to=1), see docs/gpu.md."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG))
    with SharedWriter() as writer:
        pipe.send(writer.address)
        for version in range(VERSIONS):
            writer.publish(model.state_dict(), version)
            pipe.send(version)  # tells the generator that there is a new version
            print(f"trainer: the generator answered {pipe.recv()}", flush=True)
            for parameter in model.parameters():
                parameter.data.mul_(1.01)  # a stand-in for an optimizer step
        pipe.recv()  # the writer stays open until the generator has read the last version


def main() -> None:
    here, there = mp.Pipe()
    (trainer := mp.get_context("spawn").Process(target=train, args=(there,))).start()
    there.close()  # an open copy would keep recv() waiting after the trainer has died
    with (
        here,  # an error here closes the pipe and so ends the trainer
        rm.Generator.from_hf(CONFIG, max_model_len=256, kv_cache_gib=0.1) as generator,
        SharedReader(here.recv()) as reader,
    ):
        for _ in range(VERSIONS):
            here.recv()
            report = generator.sync_weights(reader, version=reader.refresh(), cast=True)
            output = generator.generate(
                [[1, 2, 3]], rm.SamplingParams(max_tokens=8, seed=7), use_tqdm=False
            )[0]
            print(
                f"generator: version {report.version}, {report.bytes:,} bytes, digest "
                f"{report.digest}",
                flush=True,
            )
            here.send(output.outputs[0].token_ids.tolist())
        here.send("done")
    trainer.join()


if __name__ == "__main__":
    main()
