"""The generator: rollouts from weights that a trainer pushes in. A token's way is generate → Requests.add → engine step …
step → RequestOutput; a weight's way is sync_weights → check → push → commit.

Threads: every method may be called from any thread. Calls take turns (ext/fair_lock.c): generate holds the turn for one engine step at
a time, so another thread's sync_weights, submit or metrics comes in between two steps; a sync holds it whole. A call from
inside another one (a weights iterator that generates) is a StateError, and so is every call in a forked child.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.distributed.comm import Comm, Nccl, check_surroundings
from rollmesh.distributed.mesh import Mesh
from rollmesh.distributed.rank_engine import PUSHES
from rollmesh.distributed.spmd import join
from rollmesh.errors import ConfigError, Error, RequestError, StateError
from rollmesh.model.spec import ModelSpec
from rollmesh.request.arguments import check_vocabulary, eos_ids, param_list
from rollmesh.request.driver import Driver, Prompt, sequences_of
from rollmesh.request.outputs import RequestOutput, SelfTestReport, SyncReport
from rollmesh.request.requests import Requests
from rollmesh.request.sampling import SamplingParams
from rollmesh.request.text import TextCodec, tokenizer_of_folder
from rollmesh.runtime import cublas
from rollmesh.runtime.arguments import (
    PARTS,
    boolean,
    choice,
    deadline_of,
    gib_bytes,
    integer,
    page_positions,
    part_mask,
    part_names,
    share_of_memory,
)
from rollmesh.runtime.devices import device_of
from rollmesh.runtime.engine_options import EngineOptions
from rollmesh.runtime.messages import shown
from rollmesh.runtime.turn import Turn
from rollmesh.weights.self_test import Scorer, run_self_test
from rollmesh.weights.sync import SyncOptions, check_source
from rollmesh.weights.updates import BEGINNING, SLEEP, WAKE, Sync, Weights


class ParameterInfo(NamedTuple):
    """One entry of Generator.manifest()."""

    shape: tuple[int, ...]
    dtype: str  # "bfloat16" or "float32"
    required: bool


class Generator:
    """Generates with a model whose weights come from its trainer only. Nothing is loaded at creation.

    spec                    what the model is
    mesh                    ranks: threads of this process that share `threads` out, or with comm processes; no bit depends on it
    comm                    None: all ranks are threads of this process; rm.comm.shm or rm.comm.torch: this process is one of them;
                            rm.comm.nccl over any of these: activations travel between GPUs by NCCL, else by way of the host
    device                  "cpu"; "cuda": rank r of the mesh on GPU r, counted round; "cuda:N": all ranks of this process on that one
    dtype                   of weights, activations and KV: "bfloat16", or "float32" to debug
    ep_backend              how tokens travel where mesh.ep > 1: "alltoall", "allgather_reducescatter", "local_allreduce" (ep = tp);
                            on GPUs the first two are one in short steps, and by NCCL in all
    sequence_parallel       norms and residuals on token shards; no effect where mesh.tp = 1
    tokenizer               a transformers tokenizer or a tokenizers.Tokenizer, for text prompts, texts and stop strings
    eos_token_ids           ids that end a sample; None: the tokenizer's and the model config's
    max_model_len           positions of prompt and completion together; also fixes the rope table
    max_num_seqs            samples that run at once
    max_num_batched_tokens  rows of one engine step; longer prompts are prefilled in chunks of it
    block_size              positions of a KV page, a multiple of 16
    kv_cache_gib            2^30 bytes of KV cache, of each rank; None: what memory_fraction leaves
    memory_fraction         with kv_cache_gib=None: of what the device has free once all is made but the KV cache, this share is for two
                            copies of the weights and the KV cache; the rest is for what comes later: CUDA's graphs and kernels, NCCL,
                            tensors of the trainer. On a mesh all ranks get as many pages: as many as fit where there is least room.
                            Ranks that have one card, or on the CPU one machine, share what is free there
    enable_prefix_caching   reuse KV of equal prompt beginnings; no bit depends on it
    threads                 None: as many as this process may use cores
    enforce_eager           on a GPU: enqueue every step op by op, where else decode steps are recorded as CUDA graphs and replayed; for
                            debugging and profiling. No bit depends on it, and the CPU has nothing to record
    seed                    0 <= seed < 2^64; gives seeds to requests that bring none, by how many generations were accepted before
    fast                    with device="cuda" and bfloat16: the matrix products of attention and dense layers by NVIDIA's cuBLASLt, whose
                            sums may depend on what else is in the batch. No sample has a contract then, metrics() says "invariant": False
                            and which library it is, and score() gives what generate() recorded but for rounding. Experts, router and
                            lm_head stay rollmesh's own, and with isa=None these are the tensor cores'
    isa                     of the CPU: None: the fastest; "ref", "avx2", … exactly that one; no bit depends on it. Of a GPU: None or
                            "cuda_fma": the contract's own arithmetic, whose bits are the CPU's; "cuda_mma": tensor cores for bfloat16,
                            a family of bits of its own, the same whatever the batch and the mesh

    Raises ConfigError for a setting that breaks a rule or a device that is not here, MemoryError where memory is short, CapacityError
    where a GPU's is or memory_fraction leaves no page, DeviceError where CUDA fails.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        mesh: Mesh | None = None,
        comm: Comm | None = None,
        device: str = "cpu",
        dtype: str = "bfloat16",
        ep_backend: str = "alltoall",
        sequence_parallel: bool = False,
        tokenizer: Any = None,
        eos_token_ids: int | Sequence[int] | None = None,
        max_model_len: int = 4096,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        kv_cache_gib: float | None = 1.0,
        memory_fraction: float = 0.9,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        threads: int | None = None,
        seed: int = 0,
        isa: str | None = None,
        fast: bool = False,
    ):
        if not isinstance(spec, ModelSpec):
            raise ConfigError(f"spec: expected a ModelSpec (ModelSpec.from_hf makes one), got a {type(spec).__name__}")
        check_surroundings(mesh, comm, ep_backend, sequence_parallel)
        where = device_of(device)
        self.spec = spec
        self.mesh = mesh or Mesh()
        nccl = comm if isinstance(comm, Nccl) else None
        if nccl is not None:
            where = nccl.place(where, self.mesh)
        self._nccl = None if nccl is None else str(nccl.library)
        blas = self._cublas = cublas.for_generator(where, dtype) if boolean("fast", fast) else None
        self.tokenizer = tokenizer
        self._codec = None if tokenizer is None else TextCodec(tokenizer)
        check_vocabulary(tokenizer, spec)
        self.dtype = choice("dtype", dtype, ("bfloat16", "float32"))
        self.max_model_len = integer("max_model_len", max_model_len, 1, 2**31 - 1)
        self.eos_token_ids = eos_ids(eos_token_ids, tokenizer, spec)
        options = EngineOptions(
            dtype=dtype,
            isa=None if isa is None or where.cuda_library else choice("isa", isa, _core.available_isas()),
            threads=integer("threads", len(os.sched_getaffinity(0)) if threads is None else threads, 1, 256),
            max_model_len=self.max_model_len,
            max_num_seqs=integer("max_num_seqs", max_num_seqs, 1, 2**20),
            max_num_batched_tokens=integer("max_num_batched_tokens", max_num_batched_tokens, 1, 2**24),
            block_size=page_positions("block_size", block_size),
            kv_bytes=0 if kv_cache_gib is None else gib_bytes("kv_cache_gib", kv_cache_gib),
            memory_fraction=share_of_memory(memory_fraction, kv_cache_gib),
            seed=integer("seed", seed, 0, 2**64 - 1),
            enable_prefix_caching=boolean("enable_prefix_caching", enable_prefix_caching),
            enforce_eager=boolean("enforce_eager", enforce_eager),
            eos_token_ids=np.asarray(self.eos_token_ids, dtype=np.int32),
            tp=self.mesh.tp,
            dp=self.mesh.dp,
            ep=self.mesh.ep,
            ep_backend=ep_backend,
            sequence_parallel=sequence_parallel,
            cuda_library=where.cuda_library,
            cuda_ordinal=where.cuda_ordinal,
            cuda_family=cublas.family(isa, where, fast),
            cublas_library=None if blas is None else blas.path,
            cublas_version=None if blas is None else ".".join(map(str, blas.version)),
            nccl_library=None if nccl is None else nccl.library.path,
            nccl_gpu=None if nccl is None else nccl.gpu,
        )
        values = spec.engine_values(self.max_model_len)
        self._engine = join(values, options, None if nccl is not None and nccl.group is None else comm, self.mesh)
        self._requests = Requests(self._engine, self._codec, self.eos_token_ids, dtype, is_invariant=blas is None)
        self._weights = Weights(self._engine, self._requests)
        self._turn = Turn()
        self._driver = Driver(self._engine, self._requests, self._codec, self._turn, self._weights.close_unscoped)

    @classmethod
    def from_hf(cls, folder_or_config: Any, *, ignore: tuple[str, ...] = (), **options: Any) -> Generator:
        """A generator for the model of a Hugging Face folder or config. Weights are not read: sync_weights brings them.

        folder_or_config  a local folder with config.json, whose tokenizer is taken too if it has one; or a transformers config object,
                          its dict, or the path of a config.json
        ignore            keys of the config that are known not to matter, as in ModelSpec.from_hf
        options           of Generator; `tokenizer` replaces the folder's, None: no tokenizer

        Raises ConfigError naming the path, or the key and value, for what cannot be read or is not supported; FormatError for a
        config.json that is not a JSON object; and what Generator raises.
        """
        spec = ModelSpec.from_hf(folder_or_config, ignore=ignore)
        if "tokenizer" not in options and isinstance(folder_or_config, (str, os.PathLike)) and os.path.isdir(folder_or_config):
            options["tokenizer"] = tokenizer_of_folder(Path(folder_or_config))
        return cls(spec, **options)

    # ---------------------------------------------------------------------------------------- state
    @property
    def version(self) -> int | None:
        """Version of the serving weights; None before the first sync and while they are asleep."""
        return self._weights.version

    def manifest(self) -> dict[str, ParameterInfo]:
        """The Hugging Face names, shapes and dtypes that a sync must bring. Packed and torchtitan spellings are taken too."""
        self._turn.check_alive()
        return {name: ParameterInfo(shape, dtype, required) for name, shape, dtype, required in self._weights.manifest}

    def metrics(self) -> dict[str, Any]:
        """Counters since creation, sizes in bytes, times in seconds, "device", "isa" and "family", kv_usage in [0, 1], "nccl" and
        "cublas": which one was loaded and where it was found, or None; and "invariant": whether a logprob depends on the weights and
        the tokens before it alone, which fast=True gives up."""
        with self._turn.take():
            stats = self._engine.stats()
        pages = stats["kv_pages"]
        usage = (pages - stats["kv_pages_free"]) / pages if pages else 0.0
        asleep = [part for part, bit in PARTS.items() if stats["asleep"] & bit]
        own = {"version": self._weights.version, "asleep": asleep, "paused": self._engine.paused, "kv_usage": usage}
        return {**stats, **own, "nccl": self._nccl, "cublas": self._cublas and str(self._cublas), "invariant": self._cublas is None}

    # ---------------------------------------------------------------------------------------- generation
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        on_error: Literal["raise", "return"] = "raise",
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts and returns one RequestOutput each, in their order.

        prompts: text or token ids, one or a list; params: one for all or one per prompt, SamplingParams() by default.
        on_error "raise" lets the others finish, then raises the first error with all outputs in its attribute `outputs`;
        "return" puts each error into its output's `error`. After `timeout` seconds what still runs is aborted and has a
        DeadlineError. Errors of one request: RequestError, CapacityError, NumericsError, DeadlineError. Of the call:
        NotSyncedError, StateError (closed, paused, asleep). Ctrl-C and any other exception abort what was added.
        """
        return self._driver.generate(prompts, params, use_tqdm, on_error, timeout)

    def submit(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None) -> list[int]:
        """Queues prompts and returns their request ids; poll() does the work. All are taken, or none and an error raised.

        Where ranks are processes, all make the same calls of submit and poll in the same order; at any time, as in one process."""
        return self._driver.submit(prompts, params)

    def poll(self, min_outputs: int = 0, timeout: float | None = None) -> list[RequestOutput]:
        """Runs one engine step, or as many as it takes to finish min_outputs submitted requests (fewer when no more are
        left, the timeout comes or the generator is paused), and returns the finished ones, oldest first, errors inside: also
        that of a tokenizer. When poll raises (asleep, Ctrl-C), the next one returns what was finished.

        Where ranks are processes they meet after each step, and each returns the same: what one process with this mesh would; the
        timeout is that of the first rank to see it pass. With min_outputs the steps of all go at the pace of the slowest replica:
        to run everything to its end, generate is faster."""
        return self._driver.poll(min_outputs, timeout)

    def abort(self, ids: int | Sequence[int] | None = None) -> None:
        """Ends requests; None: all. They come out of poll (or generate) with what they have and finish_reason "abort";
        a score or logits that is under way raises StateError."""
        self._driver.abort(ids)

    # ---------------------------------------------------------------------------------------- scoring
    def logits(self, ids_list: Sequence[Prompt]) -> list[NDArray[np.float32]]:
        """float32 [len, vocab] per sequence: row i holds the logits of the token after 0..i."""
        sequences = sequences_of(ids_list)
        arrays = [np.zeros((len(ids), self.spec.vocab_size), np.float32) for ids in sequences]
        self._driver.score(sequences, [None] * len(sequences), arrays)
        return arrays

    def score(
        self, ids_list: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[NDArray[np.float32]]:
        """float32 [len − 1] per sequence: logprob of token i+1 given 0..i, bit for bit what generate recorded as .logprobs.

        With params (one, or one per sequence) it is .sampling_logprobs: under temperature and filters, -inf for a token that
        they exclude. min_tokens must be 0: where a completion begins is not known here, so what it bans is not either.
        """
        sequences = sequences_of(ids_list)
        chosen: list[SamplingParams | None] = [None] * len(sequences)
        if params is not None:
            chosen = [*param_list(params, len(sequences))]
            for param in chosen:
                if param is not None and param.min_tokens > 0:
                    raise RequestError(f"min_tokens: expected 0 in score, got {param.min_tokens}")
        return self._driver.score(sequences, chosen, None)

    # ---------------------------------------------------------------------------------------- weights
    def sync_weights(
        self,
        source: Any,
        version: int | None = None,
        cast: bool = False,
        strict: bool = True,
        mode: Literal["staged", "inplace"] = "staged",
        inflight: Literal["wait", "restart", "abort", "keep"] = "wait",
        keep_kv: bool = False,
        allow_nonfinite: bool = False,
        allow_bias_removal: bool = False,
        timeout: float | None = None,
    ) -> SyncReport:
        """Takes a whole set of weights: all of it serves afterwards, or the old version does.

        source      a state dict, or an iterator of (name, tensor): torch, NumPy, DLPack, on a GPU (any that this process sees) where the
                    generator runs on GPUs; or rollmesh.sources. DTensors (FSDP2, any mesh) and rm.Piece, where
                    ranks are processes, go to the ranks that want them and are never whole; in one process a DTensor is gathered.
                    Where ranks are processes: None on those that have none; what several give has to be the same
        version     must exceed the serving one; None: the next number
        cast        convert other float dtypes as torch's .to() does; else DTypeError
        strict      False: unknown names are skipped, missing parameters keep their values
        mode        "inplace" needs no second copy; if it fails half way the generator is unsynced
        inflight    running requests: "wait" finishes them first, "restart" begins them again, "abort" ends them, "keep" keeps
                    their tokens and recomputes their KV under the new version; in place nothing may run, so only "wait" does
        keep_kv     with "keep": stale KV serves on; tokens computed from it carry no contract
        allow_nonfinite  take NaN and infinities
        allow_bias_removal  a router bias that the serving version has may be absent (then zero)
        timeout     seconds until DeadlineError, the wait for other calls included; None: none

        bytes of the report are those that this process has read.

        Raises MissingKeyError, UnexpectedKeyError, DuplicateKeyError, TiedWeightError, ShapeError, DTypeError, LayoutError,
        UnsupportedTensorError, NonFiniteError, LimitError, VersionError, CapacityError, IncompleteSyncError, StateError, DeadlineError;
        for a mapping each lists all offenders. An exception of the source passes on. In all cases the old version serves.
        Where ranks are processes, those on which nothing was wrong raise SyncAbortedError with what was wrong on another, and all
        MeshMismatchError where they were given different weights; RankLostError, CollectiveMismatchError and CollectiveTimeoutError
        end the mesh.
        """
        with self._refusing(BEGINNING):
            options = SyncOptions(version, cast, strict, mode, inflight, keep_kv, allow_nonfinite, allow_bias_removal)
            if source is not None or not self._engine.has_peers:  # another process may have it
                check_source(source)
            deadline = deadline_of(timeout)
        with self._turn.take(deadline):
            return self._weights.sync(source, options, deadline)

    @contextmanager
    def _refusing(self, where: str) -> Iterator[None]:
        """Other processes learn of arguments that this one refuses."""
        try:
            yield
        except Error as error:
            self._engine.refuse(where, error, self._turn.take)
            raise

    def begin_sync(
        self,
        version: int | None = None,
        cast: bool = False,
        strict: bool = True,
        mode: Literal["staged", "inplace"] = "staged",
        inflight: Literal["wait", "restart", "abort", "keep"] = "wait",
        keep_kv: bool = False,
        allow_nonfinite: bool = False,
        allow_bias_removal: bool = False,
    ) -> Sync:
        """Opens a set that is pushed tensor by tensor, in any order; see Sync. One that is open already is reset.

        Where ranks are processes, each pushes what it has, all tensors of a set: they meet at every push."""
        with self._refusing(PUSHES):
            options = SyncOptions(version, cast, strict, mode, inflight, keep_kv, allow_nonfinite, allow_bias_removal)
        sync = Sync(self._weights, self._turn.take, options)
        try:
            with self._turn.take():
                self._weights.begin(sync)
            return sync
        except BaseException as error:
            if self._weights.is_open(sync):
                with self._turn.take():
                    self._weights.abort(sync, error)
            raise

    def self_test(
        self,
        scorer: Scorer,
        prompts: Sequence[Prompt] | None = None,
        threshold: float | None = None,
        max_tokens: int = 32,
        seed: int = 0,
    ) -> SelfTestReport:
        """Generates tokens and holds their logprobs against the trainer's.

        scorer: a function from a list of int32 arrays to a list of [len − 1] logprobs, or a transformers model. prompts: token
        ids or text; None: eight random ones. threshold: largest |Δ logprob| allowed; None: 1e-3 in float32, 0.1 in bfloat16.
        Raises NumericsError (threshold, largest difference, where) above it.
        """
        return run_self_test(self, scorer, prompts, threshold, max_tokens, seed)

    # ---------------------------------------------------------------------------------------- pause, sleep, close
    def pause(self, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Stops scheduling. Running requests: "abort" ends them, "wait" finishes them first, "keep" freezes them until
        resume(). submit() goes on queueing; generate, score and logits are refused."""
        choice("pause mode", mode, ("abort", "wait", "keep"))
        with self._turn.take():
            if mode == "abort":
                self._requests.abort(self._requests.live())
            while mode == "wait" and not self._engine.paused and self._engine.unfinished():
                if self._requests.step() == 0 and (left := self._engine.unfinished()):
                    raise StateError(f"{left} requests cannot finish while a part is asleep")
            self._engine.pause(True)

    def resume(self) -> None:
        """Schedules again."""
        with self._turn.take():
            self._engine.pause(False)

    def sleep(self, parts: str | Sequence[str] = ("weights", "kv"), keep_weights: bool = False) -> None:
        """Gives memory of "weights" and/or "kv" back to the system. Weights are unsynced after wake(), unless they are kept; running
        requests lose their KV and recompute it after wake().

        keep_weights: the host keeps the weights, packed as they are, and the same version serves again after wake(), without a sync. It
        frees a GPU's memory and takes as much of the host's; on the CPU they stay where they are, and nothing is freed. A later
        sleep("weights") without it drops them. CapacityError or MemoryError where the host has no room: then nothing sleeps, on no rank.
        """
        with self._refusing(SLEEP):
            mask = part_mask(parts)
            keep = boolean("keep_weights", keep_weights)
            if keep and not mask & PARTS["weights"]:
                raise ConfigError(f"parts: expected 'weights' among them with keep_weights=True, got {shown(parts)}")
        with self._turn.take():
            try:
                self._weights.alike(SLEEP, f"{part_names(mask)}, keep_weights={keep}")
                self._weights.reset("a part was put to sleep")
                self._weights.sleep(mask, keep)
            except BaseException as error:
                self._driver.leave(error)
                raise

    def wake(self, parts: str | Sequence[str] = ("weights", "kv")) -> None:
        """Takes the memory again. Weights that were not kept need a sync before they serve. CapacityError where a GPU has no room: then
        all parts sleep on, what was kept stays kept, and a later call may succeed."""
        with self._refusing(WAKE):
            mask = part_mask(parts)
        with self._turn.take():
            try:
                self._weights.alike(WAKE, part_names(mask))
                self._weights.wake(mask)
            except BaseException as error:
                self._driver.leave(error)
                raise

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        with self._turn.take():
            self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Gives memory and threads back. Every later call but close() is a StateError. Unfinished requests are lost."""
        if self._turn.is_gone():
            return
        with self._turn.take_to_close():
            self._engine.close()  # idempotent, for a second close after a Ctrl-C
            self._weights.forget()
            self._turn.closed = True

    def __enter__(self) -> Generator:
        self._turn.check_alive()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

