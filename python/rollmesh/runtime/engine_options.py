"""The options of an engine, as the extension reads them."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.runtime.engine_views import Ids


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options as ext/engine/options.c reads them; the fields are rm_engine_options'."""

    dtype: str
    isa: str | None
    threads: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_bytes: int
    seed: int
    enable_prefix_caching: bool
    eos_token_ids: Ids
    tp: int
    dp: int
    ep: int
    ep_backend: str
    sequence_parallel: bool
    external_pages: int = 0  # > 0: an external scheduler (vLLM's) hands out so many KV pages
    enforce_eager: bool = False  # no CUDA graphs
    profile: bool = False  # time every op; on the CPU
    memory_fraction: float = (
        0.0  # > 0, with kv_bytes = 0: share of the device's free memory for weights and KV cache
    )
    cuda_library: str | None = None  # None: the CPU. This and the next: devices.Device
    cuda_ordinal: int = -1
    cuda_family: str | None = None
    nccl_library: str | None = None  # this and the next: comm.Nccl
    nccl_gpu: str | None = None
    cublas_library: str | None = (
        None  # path (cublas.py); not None: cuBLASLt computes the dense gemms
    )
    cublas_version: str | None = None  # compared among ranks
