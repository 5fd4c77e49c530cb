"""The grid of blocks and batches that `mtplx bench --blocks` measures.

Design
------
- A pool holds more rows than the caches do. A sequence of a batch takes K + 1 neighbours of it, those
  behind the rows of the sequence before it, so that a batch reads memory as the rows of an engine do. Where
  a batch needs more rows than the pool has, it is begun again, and sequences share rows.
- Every pair of rows in the pool has one token that is certainly accepted and one that is all but certainly
  rejected; a block that is rejected at j drafts the second kind at j.
- The reference is timed on one sequence. For a batch it is the loop over them, so its time is B times that.
- What memory allows is one read of the rows that a call has to look at: `numpy.max` over the same rows, as
  far as they lie in one piece. Dense probabilities are read at the drafted tokens alone, until one is
  rejected: then that pair of rows is read; else the bonus row. From logits each pair that is reached is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtplx import reference, verification
from mtplx.bench import Thunk, Timing, logits, measure, measure_alone
from mtplx.distributions import BatchedSparseDistributions, SamplerConfig, SparseDistribution

__all__ = [
    "FORMS",
    "OUTCOMES",
    "Shape",
    "batch_call",
    "compiled_call",
    "measure_shapes",
    "reference_call",
    "shapes",
]

DRAFTS = (1, 3, 5, 8)
SEQUENCES = (1, 8, 32)
FORMS = ("dense", "sparse", "logits", "logits, top-k 20 + top-p", "logits, top-p")
OUTCOMES = ("at 0", "at K/2", "never")
PAIRS = 40  # of rows in the pool: 97 MB as float64 at V = 151,936

_CONFIGS = {
    "logits": SamplerConfig(0.8, 1.0, 0),
    "logits, top-k 20 + top-p": SamplerConfig(0.8, 0.95, 20),
    "logits, top-p": SamplerConfig(0.8, 0.95, 0),
}


@dataclass(frozen=True)
class Shape:
    """One line of the grid: B sequences of K drafts, rejected at `rejected` (K: never)."""

    form: str
    drafts: int
    sequences: int
    outcome: str

    @property
    def rejected(self) -> int:
        return {"at 0": 0, "at K/2": self.drafts // 2, "never": self.drafts}[self.outcome]

    @property
    def name(self) -> str:
        return f"{self.form}, K = {self.drafts}, B = {self.sequences}, rejected {self.outcome}"


def shapes(only: str = "") -> list[Shape]:
    """The grid, block by block; `only` is part of a line's name."""
    return [
        shape
        for form in FORMS
        for outcome in OUTCOMES
        for K in DRAFTS
        for B in SEQUENCES
        if only.casefold() in (shape := Shape(form, K, B, outcome)).name.casefold()
        and not (outcome == "at K/2" and K == 1)  # that is at 0
    ]


# ---- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """Rows of target and draft, and of each pair an accepted and a rejected token."""

    target: NDArray[Any]
    draft: NDArray[Any]
    accepted: NDArray[np.int64]
    rejected: NDArray[np.int64]


@lru_cache(maxsize=1)
def _logits_pool(vocab: int) -> Pool:
    rng = np.random.default_rng([vocab, 7])
    seeds = [logits("zipf", vocab, seed) for seed in range(4)]
    target = np.empty((PAIRS + 1, vocab), np.float32)
    for i in range(PAIRS + 1):
        target[i] = np.roll(seeds[i % len(seeds)], 997 * i)
    draft = target[:PAIRS] + rng.normal(size=(PAIRS, vocab)).astype(np.float32) * np.float32(0.7)
    each = np.arange(PAIRS)
    accepted = target[:PAIRS].argmax(axis=1)
    # A lower logit at the draft: more probable to the target, and still within every truncation.
    draft[each, accepted] = target[each, accepted] - 1.0
    draft[each, accepted - 1] = target[each, accepted]
    rejected = (accepted - 1) % vocab
    target[each, rejected] = draft[each, rejected] - 60.0
    return Pool(target, draft, accepted, rejected)


@lru_cache(maxsize=1)
def _dense_pool(vocab: int) -> Pool:
    given = _logits_pool(vocab)
    target, draft = (
        np.stack([reference.softmax(row) for row in rows]) for rows in (given.target, given.draft)
    )
    return Pool(target, draft, given.accepted, given.rejected)


@dataclass(frozen=True)
class _Block:
    target: Any
    draft: Any
    tokens: list[int]


def _support(row: NDArray[np.float64], *ids: int) -> SparseDistribution:
    best = np.union1d(np.argpartition(row, -20)[-20:], np.array(ids, dtype=np.int64))
    return SparseDistribution(best, row[best], row.size)


@lru_cache(maxsize=2)
def _sparse_pool(vocab: int) -> tuple[BatchedSparseDistributions, BatchedSparseDistributions]:
    pool = _dense_pool(vocab)
    rows: list[list[SparseDistribution]] = [[], []]
    for i in range(PAIRS):
        for side, row in enumerate((pool.target[i], pool.draft[i])):
            rows[side].append(_support(row, int(pool.accepted[i]), int(pool.rejected[i])))
    rows[0].append(_support(pool.target[PAIRS]))
    target, draft = (
        BatchedSparseDistributions.from_distributions(side, vocab_size=vocab, width=22) for side in rows
    )
    return target, draft


def _sparse_rows(rows: BatchedSparseDistributions, first: int, last: int) -> BatchedSparseDistributions:
    return BatchedSparseDistributions(
        rows.token_ids[first:last], rows.probs[first:last], vocab_size=rows.vocab_size
    )


def _first_row(sequence: int, drafts: int) -> int:
    return sequence * (drafts + 1) % (PAIRS - drafts)


def _block(shape: Shape, vocab: int, sequence: int) -> _Block:
    K, first = shape.drafts, _first_row(sequence, shape.drafts)
    pool = _logits_pool(vocab) if shape.form in _CONFIGS else _dense_pool(vocab)
    tokens = pool.accepted[first : first + K].tolist()
    if shape.rejected < K:
        tokens[shape.rejected] = int(pool.rejected[first + shape.rejected])
    if shape.form == "sparse":
        target, draft = _sparse_pool(vocab)
        return _Block(
            _sparse_rows(target, first, first + K + 1), _sparse_rows(draft, first, first + K), tokens
        )
    return _Block(pool.target[first : first + K + 1], pool.draft[first : first + K], tokens)


# ---- calls -----------------------------------------------------------------------------------------


def reference_call(shape: Shape, vocab: int) -> Thunk:
    """The reference's call on one block of that shape."""
    block, rng = _block(shape, vocab, 0), np.random.default_rng(5)
    if shape.form in _CONFIGS:
        config = _CONFIGS[shape.form]
        return partial(
            reference.verify_block_from_logits, block.target, block.draft, block.tokens, config, rng=rng
        )
    return partial(reference.verify_block, block.target, block.draft, block.tokens, rng)


def compiled_call(shape: Shape, vocab: int) -> Thunk:
    """The call that a line of the grid times: of one block alone, or of a batch."""
    if shape.sequences > 1:
        return batch_call(shape, vocab)
    block, rng = _block(shape, vocab, 0), np.random.default_rng(5)
    if shape.form in _CONFIGS:
        config = _CONFIGS[shape.form]
        return partial(
            verification.verify_block_from_logits, block.target, block.draft, block.tokens, config, rng=rng
        )
    return partial(verification.verify_block, block.target, block.draft, block.tokens, rng)


def batch_call(shape: Shape, vocab: int, executor: Any = None) -> Thunk:
    """The same as a batch, of one sequence too."""
    blocks = [_block(shape, vocab, b) for b in range(shape.sequences)]
    sides = [block.target for block in blocks], [block.draft for block in blocks]
    tokens = [block.tokens for block in blocks]
    rngs = [np.random.default_rng([5, b]) for b in range(shape.sequences)]
    if shape.form in _CONFIGS:
        return partial(
            verification.verify_batch_from_logits,
            *sides,
            tokens,
            _CONFIGS[shape.form],
            rngs=rngs,
            executor=executor,
        )
    return partial(verification.verify_batch, *sides, tokens, rngs, executor=executor)


def _read_call(shape: Shape, vocab: int) -> Thunk | None:
    """One read of the rows that are looked at; None where they are a few numbers."""
    if shape.form == "sparse":
        return None
    pieces: list[NDArray[Any]] = []
    for b in range(shape.sequences):
        block, j = _block(shape, vocab, b), shape.rejected
        reached = j < shape.drafts
        if shape.form == "dense":
            pieces += [block.target[j], block.draft[j]] if reached else [block.target[j]]
        else:
            pieces += [block.target[: j + 1], block.draft[: j + reached]]

    def read() -> None:
        for piece in pieces:
            piece.max()

    return read


# ---- measuring -------------------------------------------------------------------------------------


def measure_shapes(
    plan: list[Shape], vocab: int, seconds: float, tell: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Each line as `mtplx bench --blocks --json` prints it; `tell` hears what is being measured."""
    each = seconds / max(len(plan), 1)
    of_one: dict[Shape, Timing] = {}
    for shape in plan:
        tell(shape.name)
        single = Shape(shape.form, shape.drafts, 1, shape.outcome)
        ours = compiled_call(shape, vocab)
        if single not in of_one:
            # Where the whole batch is not the block, the two are not timed in turns.
            both = measure(reference_call(single, vocab), compiled_call(single, vocab), each / 2)
            of_one[single] = both[0]
        read = _read_call(shape, vocab)
        if read is None:
            touched, compiled = None, measure_alone(ours, each / 2)
        else:
            touched, compiled = measure(read, ours, each / 2)
        theirs = of_one[single].minimum * shape.sequences
        yield {
            **asdict(shape),
            "name": shape.name,
            "vocab": vocab,
            "reference_us": theirs,
            "compiled_us": asdict(compiled),
            "ratio": theirs / compiled.minimum,
            "read_us": touched and touched.minimum,
            "reads": touched and compiled.minimum / touched.minimum,
        }
