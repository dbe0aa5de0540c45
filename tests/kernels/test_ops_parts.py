"""A rank's part of an op: a run of a model's query heads, some blocks of its vocabulary. Side by
side, the parts of all ranks are bit-identical to one rank.

Input: heads that begin and end inside groups; parts of a vocabulary without a block, in every
variant, with one thread and two. Oracle: the whole, computed by the reference, which
test_ops_reference.py compares with float64; checkops compares variants of a part of the heads.
Bound: zero."""

# ruff: noqa: B023 - closures over loop variables are called in the same turn of the loop
from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from ops_cases import DTYPES, Array, assert_same_bits, attention_case, bits, normal, packed, stored

from rollmesh import ops

DEGREES = (1, 2, 3, 4, 6, 8)


def cuts_of(n: int, parts: int) -> list[int]:
    return [n * i // parts for i in range(parts + 1)]


# -------------------------------------------------------------------------------------- attention


def test_attention_of_a_part_of_the_heads(rng: np.random.Generator) -> None:
    """Query heads 2 to 5 of two groups of three: these inputs give a different result if head0 or
    the group is ignored."""
    case = attention_case(rng, "float32", [40], 5, 6, 2, 16, 16)
    part = {**case, "q": np.ascontiguousarray(case["q"][:, 2:])}
    whole, right, wrong = (
        ops.attention(**args, page_size=16, scale=0.25, isa="ref", **at)
        for args, at in ((case, {}), (part, {"group": 3, "head0": 2}), (part, {}))
    )
    assert right.tobytes() == whole[:, 2:].tobytes()
    assert (right[:, 1] != wrong[:, 1]).any()


# --------------------------------------------------------------------------------------- the head
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 128, 300, 1000, 1409])
def test_the_head_of_all_ranks_is_that_of_one(
    vocab: int, dtype: str, rng: np.random.Generator
) -> None:
    """Parts of whole blocks, in order; the part with a row's target returns its logit."""
    n_blocks = -(-vocab // 128)
    for rows, hidden in ((0, 8), (1, 33), (5, 64), (33, 20), (100, 16)):
        x, w = normal(rng, (rows, hidden), dtype), normal(rng, (vocab, hidden), dtype)
        if rows > 3:
            x[1, 0], x[3, 2] = stored(np.array([np.nan, np.inf], np.float32), dtype)
        targets = rng.integers(-1, vocab, rows).astype(np.int32)
        whole = ops.lm_head(x, packed(w, dtype), vocab, targets=targets, isa="ref")
        assert whole.logits is not None
        assert whole.target_logprobs is not None
        for tp in DEGREES:
            cuts = [min(vocab, 128 * cut) for cut in cuts_of(n_blocks, tp)]
            parts = [
                (begin, end - begin, packed(w[begin:end], dtype)) for begin, end in pairwise(cuts)
            ]

            def run(isa: str, threads: int) -> tuple[Array, ...]:
                heads = []
                target_logits, flags = np.zeros(rows, np.float32), np.zeros(rows, np.uint8)
                for begin, size, matrix in parts:
                    here = (targets >= begin) & (targets < begin + size)
                    head = ops.lm_head_pairs(
                        x,
                        matrix,
                        size,
                        targets=np.where(here, targets - begin, -1).astype(np.int32),
                        isa=isa,
                        threads=threads,
                    )
                    assert head.target_logits is not None
                    assert (bits(head.target_logits[~here]) == 0).all()
                    target_logits[here] = head.target_logits[here]
                    flags |= head.row_flags
                    heads.append(head)
                merged = ops.merge_pairs(
                    np.concatenate([head.pairs for head in heads]),
                    targets=targets,
                    target_logits=target_logits,
                    isa=isa,
                    threads=threads,
                )
                assert merged.target_logprobs is not None
                assert (merged.row_flags == flags).all()
                logits = np.concatenate(
                    [head.logits for head in heads if head.logits is not None], 1
                )
                return logits, merged.stats, merged.target_logprobs, flags

            got = assert_same_bits(run)
            for mine, one in zip(
                got,
                (whole.logits, whole.stats, whole.target_logprobs, whole.row_flags),
                strict=True,
            ):
                assert (bits(mine) == bits(one)).all(), f"{vocab=} {rows=} {tp=}"
