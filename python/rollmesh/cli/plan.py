"""`rollmesh plan MODEL`: the sizes of a model, and the memory that it takes on each rank.

It computes from the configuration alone and allocates no memory, so it works for any model and
number of ranks on any machine. MODEL is a checkpoint folder, a config.json or a run's TOML.

Dense parameters are sharded over tp (whole heads, vocabulary in blocks of 128) and replicated over
dp; experts are spread over ep ranks, or sharded over tp if ep = 1. Matrices count as stored: packed
in tiles of 16 rows and 32 columns, on every device. The column "a rank" shows the rank with the
most memory; --ranks lists all ranks. The device need not exist on this machine. With cuda:N all
ranks share one device, and the sum is shown.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import rollmesh as rm
from rollmesh.cli.options import (
    add_ignore,
    add_mesh,
    add_options,
    checkpoint_of,
    read_model_config,
    read_spec,
    take_run_settings,
)
from rollmesh.distributed.mesh import EP_BACKENDS
from rollmesh.distributed.traffic import step_traffic
from rollmesh.model.placement import Placement, placements
from rollmesh.model.sizes import (
    count_parameters,
    kv_bytes_per_token,
    matrices,
    rank_bytes,
    state_bytes,
)
from rollmesh.options import MAX_GIB
from rollmesh.runtime.arguments import choice
from rollmesh.runtime.devices import device_name
from rollmesh.runtime.messages import byte_text, plain

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="checkpoint folder, config.json or a run's TOML"
    )
    add_options(parser, "dtype", "sequence_parallel")
    parser.add_argument(
        "--kv-cache-gib",
        type=float,
        help="how many tokens this holds is shown; default: of a run's TOML its own, else 1",
    )
    parser.add_argument("--ranks", action="store_true", help="also list what each rank holds")
    parser.add_argument(
        "--rows",
        type=int,
        default=32,
        help="sequences of each replica that decode together, for the traffic of a step",
    )
    add_ignore(parser)
    add_mesh(parser)


def run(args: argparse.Namespace) -> int:
    take_run_settings(args)
    spec = read_spec(args, read_model_config(checkpoint_of(args.model)))
    tp, dp, ep = (1 if given is None else given for given in (args.tp, args.dp, args.ep))
    device = device_name("cpu" if args.device is None else args.device)
    ranks = placements(spec, tp, dp, ep)
    args.ep_backend = choice(
        "--ep-backend", "alltoall" if args.ep_backend is None else args.ep_backend, EP_BACKENDS
    )
    if not 1 <= args.rows <= 2**20:
        raise rm.ConfigError(f"--rows {args.rows}: expected a number in [1, {2**20}]")
    if not 0 <= args.kv_cache_gib < MAX_GIB:
        raise rm.ConfigError(
            f"--kv-cache-gib {args.kv_cache_gib}: expected a number >= 0 and below {MAX_GIB}"
        )
    dtype = args.dtype or "bfloat16"
    bytes_each = 2 if dtype == "bfloat16" else 4
    parameters = count_parameters(spec)
    print(
        f"{plain(args.model)}: {spec.num_hidden_layers} layers, {parameters.total:,} parameters, "
        f"{parameters.active:,} used by a token"
    )
    print(f"\n{'parameter':<34}{'count':>8}{'shape':>18}{'parameters':>18}{'a rank':>12}")
    held = rank_bytes(spec, dtype, tp, dp, ep)
    for m in matrices(spec):
        shape, most = " x ".join(map(str, m.shape)), max(rank[m.kind] for rank in held)
        print(f"{m.name:<34}{m.count:>8,}{shape:>18}{m.elements:>18,}{byte_text(most):>12}")
    weights_of = [sum(rank.values()) for rank in held]
    weights = max(weights_of)
    token = kv_bytes_per_token(spec, max(len(rank.kv_heads) for rank in ranks), bytes_each)
    print(
        f"\non each of {len(ranks)} rank(s), {dtype} (tp={tp}, dp={dp}, ep={ep}), device {device}"
    )
    print(f"{'weights':<34}{byte_text(weights):>12}")
    print(f'{"staging of the next version":<34}{byte_text(weights):>12}   none with mode="inplace"')
    state = state_bytes(spec, max(len(rank.delta_heads) for rank in ranks), bytes_each)
    tokens = int(args.kv_cache_gib * GIB / token / (2 if state else 1))
    print(
        f"{'KV of a token':<34}{byte_text(token):>12}   {args.kv_cache_gib:g} GiB hold "
        f"{tokens:,} tokens{', and states' if state else ''}"
    )
    if state:
        print(f"{'state of a sequence':<34}{byte_text(state):>12}   half of the KV cache is states")
    print(
        f"{'weights + staging + KV cache':<34}"
        f"{byte_text(2 * weights + args.kv_cache_gib * GIB):>12}   and the engine's workspace"
    )
    if device.startswith("cuda:") and len(ranks) > 1:
        together = 2 * sum(weights_of) + len(ranks) * args.kv_cache_gib * GIB
        print(
            f"{f'of all {len(ranks)} ranks, on {device}':<34}{byte_text(together):>12}   and a "
            "workspace of each"
        )
    if len(ranks) > 1:
        print_traffic(spec, rm.Mesh(tp=tp, dp=dp, ep=ep), args, dtype)
    if args.ranks:
        print_ranks(spec, ranks, tp, weights_of)
    return 0


def print_traffic(spec: rm.ModelSpec, mesh: rm.Mesh, args: argparse.Namespace, dtype: str) -> None:
    sent = step_traffic(
        spec,
        mesh,
        args.rows,
        dtype=dtype,
        ep_backend=args.ep_backend,
        sequence_parallel=args.sequence_parallel,
    )
    print(f"\nsent by a rank in a decode step of {args.rows} sequences a replica")
    print(f"{'tp: activations, logits':<34}{byte_text(int(sent.tp / mesh.world)):>12}")
    how = args.ep_backend if mesh.ep > 1 else "experts are cut over tp"
    print(
        f"{'ep: tokens to experts and back':<34}{byte_text(int(sent.ep / mesh.world)):>12}   {how}"
    )


def print_ranks(spec: rm.ModelSpec, ranks: list[Placement], tp: int, weights: list[int]) -> None:
    """Prints a line for each rank: its coordinates and the parts that it holds, as first-last."""
    names = [
        "heads",
        "kv_heads",
        "vocab",
        "hidden",
        *(["inner"] if spec.intermediate_size else []),
        *(["experts"] if spec.num_experts else []),
    ]
    print(
        "\n"
        + f"{'rank':>5}{'dp':>5}{'tp':>4}"
        + "".join(f"{name:>15}" for name in names)
        + f"{'weights':>12}"
    )
    for number, (rank, size) in enumerate(zip(ranks, weights, strict=True)):
        held = "".join(f"{_span(getattr(rank, name)):>15}" for name in names)
        print(f"{number:>5}{number // tp:>5}{number % tp:>4}{held}{byte_text(size):>12}")


def _span(r: range) -> str:
    return f"{r.start}-{r.stop - 1}" if r else "-"
