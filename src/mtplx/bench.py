"""Measuring the two faces against each other: what `mtplx bench` and ``benches/`` share.

Design
------
- A `Row` is one line of the table of goals: how to make its arguments, one call that both faces take, and
  what is asked of it. The arguments are made once and both faces get the same objects.
- Both sides alternate within one process, a round being one sample of the reference and several of the
  compiled core, so that a machine that slows down slows both. The figure is the minimum, which no other
  process can lower; the median tells how quiet the machine was.
- The clock is the thread's CPU time where the system counts it finely. No call here waits for anything, and
  on a busy machine wall-clock time flatters us: a reference of 18 ms is preempted in nearly every sample, a
  kernel of 20 us in few.
- A sample lasts at least `SAMPLE_US`: a call of half a microsecond is repeated within it, or the clock's own
  cost would be measured.
- A goal is a ratio against the reference, or the time that this ratio gives on the machine the goals were
  set on. Reaching either counts: NumPy is faster on some machines (AVX-512) and slower on others, and the
  kernels' own time is what a user waits for.
- The measuring process does nothing else: ``python -m mtplx.bench`` takes a request as JSON and writes what
  it finds as JSON, a line for each event. `mtplx.bench_report` starts it, in the environment it needs, and
  draws progress, tables and charts meanwhile.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from importlib import import_module
from itertools import repeat
from statistics import median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mtplx import reference, sampling, verification
from mtplx._csampling import dispatch

__all__ = [
    "DESIGN_VOCABULARY",
    "LLM_INPUTS",
    "ROWS",
    "SCALING_VOCABULARIES",
    "WORST_INPUTS",
    "BenchError",
    "Line",
    "PlainSparseDistribution",
    "Row",
    "Timing",
    "logits",
    "measure",
    "measure_alone",
    "measure_row",
    "pair",
    "probabilities",
    "rejected_pair",
    "scaling",
    "sparse_pair",
    "summarise_scaling",
    "summarise_worst",
    "table",
    "worst_cases",
]

DESIGN_VOCABULARY = 151_936
SCALING_VOCABULARIES = (32_000, 64_000, 128_256, 151_936, 262_144)

SAMPLE_US = 200.0
LEAST_ROUNDS = 3
COMPILED_SHARE = 0.5  # of the time of the reference's sample, spent on compiled samples in each round
LEAST_COMPILED_SAMPLES = 3
MOST_COMPILED_SAMPLES = 32
SLOW_REFERENCE = 1.15
WORST_SLOWDOWN = 3.0
SCALING_SPREAD = 1.6

Verdict = Literal["goal", "floor", "below"]
Measure = Literal["ratio", "time"]
Face = Any  # mtplx.reference or mtplx.sampling: the same names in both
Arguments = tuple[Any, ...]
Thunk = Callable[[], object]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


class BenchError(Exception):
    """Something asked for that cannot be measured; its text is one line."""


# ---- inputs --------------------------------------------------------------------------------------


def _zipf(vocab: int, rng: np.random.Generator) -> Float64:
    x = np.empty(vocab)
    x[rng.permutation(vocab)] = 10.0 - 1.2 * np.log(np.arange(1, vocab + 1))
    return x + rng.normal(size=vocab) * 0.3


def _normal(vocab: int, rng: np.random.Generator) -> Float64:
    return rng.normal(size=vocab) * 3.0


def _tied(vocab: int, rng: np.random.Generator) -> Float64:
    # What a smoothed n-gram model gives: few counts, most of them the same.
    counts = np.empty(vocab)
    counts[rng.permutation(vocab)] = rng.poisson(400.0 / np.arange(1, vocab + 1) ** 1.1)
    return np.log(counts + 0.02)


def _masked(vocab: int, rng: np.random.Generator) -> Float64:
    x = _normal(vocab, rng)
    x[rng.random(vocab) < 0.5] = -np.inf
    x[vocab // 2] = 0.0
    return x


def _few_allowed(vocab: int, rng: np.random.Generator) -> Float64:
    """What a grammar's mask leaves: one token in a thousand."""
    x = _normal(vocab, rng)
    x[rng.random(vocab) < 0.999] = -np.inf
    x[vocab // 2] = 0.0
    return x


def _ramp(vocab: int) -> Float64:
    return np.linspace(-8.0, 8.0, vocab)


def _lone(vocab: int, elsewhere: float, height: float) -> Float64:
    x = np.full(vocab, elsewhere)
    x[2 * vocab // 3] = height
    return x


def _subnormal(vocab: int, rng: np.random.Generator) -> Float64:
    # Every exponential but one lies below the normal numbers of float64 (exp(-708.4)) and above 0.
    x = rng.uniform(-744.0, -710.0, size=vocab)
    x[vocab // 3] = 0.0
    return x


LLM_INPUTS: dict[str, Callable[[int, np.random.Generator], Float64]] = {
    "zipf": _zipf,
    "normal": _normal,
    "tied": _tied,
    "masked": _masked,
}

WORST_INPUTS: dict[str, Callable[[int, np.random.Generator], Float64]] = {
    "all equal": lambda vocab, rng: np.zeros(vocab),
    "ascending": lambda vocab, rng: _ramp(vocab),
    "descending": lambda vocab, rng: _ramp(vocab)[::-1],
    "organ pipe": lambda vocab, rng: 8.0 - np.abs(_ramp(vocab)) * 2.0,
    "two values": lambda vocab, rng: rng.integers(2, size=vocab).astype(np.float64),
    "one huge": lambda vocab, rng: _lone(vocab, 0.0, 1e4),
    "all -inf but one": lambda vocab, rng: _lone(vocab, -np.inf, 0.0),
    "subnormal": _subnormal,
    "16-bit valued": lambda vocab, rng: _normal(vocab, rng).astype(np.float16).astype(np.float64),
    "tied": _tied,
    "masked": _masked,
    "few allowed": _few_allowed,
}


@lru_cache(maxsize=8)
def logits(kind: str, vocab: int, seed: int = 0) -> Float32:
    """A read-only float32 row of logits, by the name of its kind.

    Parameters
    ----------
    kind : str
        A key of `LLM_INPUTS` or of `WORST_INPUTS`.
    vocab : int
        V.
    seed : int

    Returns
    -------
    ndarray of float32, shape (V,)
    """
    make = LLM_INPUTS.get(kind) or WORST_INPUTS[kind]
    row = make(vocab, np.random.default_rng([seed, vocab])).astype(np.float32)
    row.flags.writeable = False
    return row


@lru_cache(maxsize=8)
def probabilities(kind: str, vocab: int, temperature: float = 1.0, seed: int = 0) -> Float64:
    """The distribution of `logits` at a temperature, read-only float64.

    "16-bit valued" are probabilities that float16 holds, so that many tie.
    """
    row = reference.softmax(logits(kind, vocab, seed), temperature)
    if kind == "16-bit valued":
        row = row.astype(np.float16).astype(np.float64)
    row.flags.writeable = False
    return row


@lru_cache(maxsize=8)
def pair(kind: str, vocab: int, seed: int = 0) -> tuple[Float64, Float64]:
    """A target row p and a draft row q that resembles it, as a small model resembles a large one."""
    noise = np.random.default_rng([seed, vocab, 1]).normal(size=vocab) * 0.7
    q = reference.softmax(logits(kind, vocab, seed) + noise)
    q.flags.writeable = False
    return probabilities(kind, vocab, 1.0, seed), q


# ---- rows of the table ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of the table of goals.

    Parameters
    ----------
    name : str
    make : callable (kind, vocab) -> tuple
        The arguments of `build`, for both faces the same objects.
    build : callable (face, *arguments) -> callable
        The call that is timed; gets its own fresh generator where it draws.
    goal, floor : float
        Ratios against the reference.
    column : float or None
        Microseconds of the reference on the machine that the goals were set on, at `DESIGN_VOCABULARY`;
        where that is a range, its lower end, so that the absolute goal is the stricter one.
    kinds : sequence of str
        Inputs it is measured on.
    vocab : int or None
        A fixed V, for rows whose cost does not grow with the vocabulary.
    kernel : str
        Rows of one kernel are one kernel to `worst`; the name where it is empty.
    worst : bool
        Whether the worst cases are measured on this row.
    """

    name: str
    make: Callable[[str, int], Arguments]
    build: Callable[..., Thunk]
    goal: float
    floor: float
    column: float | None = None
    kinds: tuple[str, ...] = ("zipf", "normal")
    vocab: int | None = None
    kernel: str = ""
    worst: bool = True


def _row_of(dtype: str) -> Callable[[str, int], Arguments]:
    def make(kind: str, vocab: int) -> Arguments:
        if dtype != "bfloat16":
            return (logits(kind, vocab).astype(dtype),)
        try:
            dtypes: Any = import_module("ml_dtypes")
        except ImportError as error:
            raise BenchError("ml_dtypes is not installed") from error
        return (logits(kind, vocab).astype(dtypes.bfloat16),)

    return make


def _softmax(face: Face, x: Any) -> Thunk:
    return partial(face.softmax, x, 0.8)


def _softmax_narrow(face: Face, x: Any) -> Thunk:
    return partial(face.softmax, x, 0.8, out=np.empty(x.size, np.float32))


def _sparse(config: sampling.SamplerConfig) -> Callable[..., Thunk]:
    return lambda face, x: partial(face.sparse_distribution_from_logits, x, config)


def _dense(config: sampling.SamplerConfig) -> Callable[..., Thunk]:
    return lambda face, x: partial(face.distribution_from_logits, x, config)


def _nucleus(top_p: float) -> Callable[..., Thunk]:
    return lambda face, p: partial(face.apply_top_p_top_k, p, top_p)


def _probabilities_at(temperature: float) -> Callable[[str, int], Arguments]:
    return lambda kind, vocab: (probabilities(kind, vocab, temperature),)


def _draw(face: Face, p: Any) -> Thunk:
    return partial(face.sample_from_distribution, p, np.random.default_rng(5))


def rejected_pair(kind: str, vocab: int) -> Arguments:
    """A pair and a token that is all but never accepted: its ratio is not 0, which the checks look at."""
    p, q = (row.copy() for row in pair(kind, vocab))
    token = int(q.argmax())
    p[token] = q[token] * 2.0**-60
    return p, q, token


def _verify(face: Face, p: Any, q: Any, token: int) -> Thunk:
    return partial(face.verify_one_token, p, q, token, np.random.default_rng(5))


def _residual(face: Face, p: Any, q: Any) -> Thunk:
    return partial(face.residual_distribution, p, q)


def sparse_pair(kind: str, vocab: int, rejected: bool) -> Arguments:
    """Twenty tokens each of target and draft, about half of them in both."""
    p, q = pair(kind, vocab)
    ids = [np.sort(reference.deterministic_top_k_order(row, 20)) for row in (p, q)]
    p_probs, q_probs = p[ids[0]].copy(), q[ids[1]]
    shared = np.intersect1d(ids[0], ids[1])
    ratio = p[shared] / q[shared]
    token = int(shared[ratio.argmax()])
    place = int(np.searchsorted(ids[0], token))
    p_probs[place] = q[token] * (2.0**-60 if rejected else 2.0)
    return (
        sampling.SparseDistribution(ids[0], p_probs, vocab),
        sampling.SparseDistribution(ids[1], q_probs, vocab),
        token,
    )


DRAFTS = 5


def block_logits(kind: str, vocab: int, rejected: bool) -> Arguments:
    """Rows of target and draft, and drafts that are all accepted, or of which the first is rejected."""
    target = np.stack([logits(kind, vocab, i) for i in range(DRAFTS + 1)])
    noise = np.random.default_rng([vocab, 2]).normal(size=(DRAFTS, vocab)) * 0.7
    draft = (target[:DRAFTS] + noise).astype(np.float32)
    tokens = target[:DRAFTS].argmax(axis=1)
    # A lower logit at the draft: more probable to the target, and still within every truncation.
    draft[range(DRAFTS), tokens] = target[range(DRAFTS), tokens] - 1.0
    if rejected:
        tokens[0] = draft[0].argmax()
        target[0, tokens[0]] = draft[0, tokens[0]] - 60.0
        if target[0].argmax() == tokens[0]:
            # Nothing else has mass: what is rejected needs a token that takes its place.
            target[0, tokens[0] - 1] = draft[0, tokens[0]]
    return target, draft, tokens


def block_rows(kind: str, vocab: int, rejected: bool) -> Arguments:
    """The same as probabilities."""
    target, draft, tokens = block_logits(kind, vocab, rejected)
    p, q = (np.stack([reference.softmax(row) for row in rows]) for rows in (target, draft))
    return p, q, tokens


def _blocks_of(face: Face) -> Any:
    # The drop-in knows one row; blocks are in a module of their own.
    return face if face is reference else verification


def _verify_block(face: Face, p: Any, q: Any, tokens: Any) -> Thunk:
    return partial(_blocks_of(face).verify_block, p, q, tokens, np.random.default_rng(5))


def _verify_block_from_logits(config: sampling.SamplerConfig) -> Callable[..., Thunk]:
    def build(face: Face, target: Any, draft: Any, tokens: Any) -> Thunk:
        call = _blocks_of(face).verify_block_from_logits
        return partial(call, target, draft, tokens, config, rng=np.random.default_rng(5))

    return build


def _block_rows() -> Iterator[Row]:
    whole = sampling.SamplerConfig(temperature=0.8, top_p=1.0, top_k=0)
    nucleus = sampling.SamplerConfig(temperature=0.8, top_p=0.95, top_k=0)
    logits_whole, logits_both, logits_nucleus = map(_verify_block_from_logits, (whole, _TOP_K_TOP_P, nucleus))
    for name, make, build, rejected, column, goal, floor in (
        ("dense", block_rows, _verify_block, False, 560, 25, 16),
        ("dense", block_rows, _verify_block, True, 820, 24, 14),
        ("logits", block_logits, logits_whole, False, 12_500, 15, 10),
        ("logits", block_logits, logits_whole, True, 3_000, 8, 5),
        # One pair of rows is reached, and the goal is one for each pair.
        ("logits, top-k 20 + top-p", block_logits, logits_both, True, 3_500, 28, 18),
        ("logits, top-p", block_logits, logits_nucleus, True, 36_000, 60, 35),
    ):
        outcome = "first rejected" if rejected else "all accepted"
        yield Row(
            f"block of {DRAFTS}, {name}, {outcome}",
            partial(make, rejected=rejected),
            build,
            goal,
            floor,
            column,
            worst=name == "logits",
        )


@dataclass(frozen=True)
class PlainSparseDistribution:
    """What `SparseDistribution` would be without the core: the same checks, in NumPy."""

    token_ids: NDArray[np.int64]
    probs: Float64
    vocab_size: int

    def __post_init__(self) -> None:
        ids = np.array(self.token_ids, dtype=np.int64)
        weights = np.array(self.probs, dtype=np.float64)
        if ids.ndim != 1 or weights.ndim != 1 or ids.size == 0 or ids.shape != weights.shape:
            raise ValueError(f"shapes {ids.shape} and {weights.shape}")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ValueError(f"a token id is outside [0, {self.vocab_size})")
        if np.unique(ids).size != ids.size:
            raise ValueError("a token id is given twice")
        finite = np.isfinite(weights)
        if not finite.all():
            weights[~finite] = 0.0
        if (weights < 0.0).any():
            raise ValueError("a probability is negative")
        total = weights.sum()
        if not total > 0.0:
            raise sampling.NonFiniteLogitsError("no positive finite mass")
        weights /= total
        ids.flags.writeable = weights.flags.writeable = False
        object.__setattr__(self, "token_ids", ids)
        object.__setattr__(self, "probs", weights)


def _construction(kind: str, vocab: int) -> Arguments:
    d = sparse_pair(kind, vocab, False)[0]
    return d.token_ids, d.probs, vocab


def _construct(face: Face, ids: Any, probs: Any, vocab: int) -> Thunk:
    cls = PlainSparseDistribution if face is reference else face.SparseDistribution
    return partial(cls, ids, probs, vocab)


def _truncate(face: Face, p: Any) -> Thunk:
    return partial(face.apply_top_p_top_k, p, 0.95, 20)


def _small_rows() -> Iterator[Row]:
    # The goals name ranges, 15x to 60x of 7 to 25 us: either end is about 0.45 us, the cost of a compiled
    # call, so the dearer function has the higher ratio to reach.
    for vocab in (3, 20, 100):
        for name, make, build, column, goal, floor in (
            ("softmax", _row_of("float64"), _softmax, 7, 15, 8),
            ("top-k 20 + top-p", _probabilities_at(1.0), _truncate, 25, 60, 20),
            ("categorical draw", _probabilities_at(1.0), _draw, 7, 15, 8),
        ):
            yield Row(
                f"{name}, V = {vocab}",
                make,
                build,
                goal,
                floor,
                column,
                kinds=("normal",),
                vocab=vocab,
                worst=False,
            )


_TOP_K_TOP_P = sampling.SamplerConfig(temperature=0.8, top_p=0.95, top_k=20)
_TOP_K = sampling.SamplerConfig(temperature=0.8, top_p=1.0, top_k=20)
_TOP_P = sampling.SamplerConfig(temperature=1.0, top_p=0.95, top_k=0)

ROWS: tuple[Row, ...] = (
    Row("softmax, float32", _row_of("float32"), _softmax, 5, 3.5, 1050),
    Row("softmax, float32 to float32", _row_of("float32"), _softmax_narrow, 11, 8, 1050),
    Row("softmax, float16", _row_of("float16"), _softmax, 4.7, 3.5, 1200),
    Row("softmax, bfloat16", _row_of("bfloat16"), _softmax, 4.7, 3.5, 1200),
    Row(
        "softmax, half the row -inf",
        _row_of("float32"),
        _softmax,
        5,
        3.5,
        1800,
        kinds=("masked",),
        worst=False,
    ),
    Row("top-k 20 + top-p, logits to sparse", _row_of("float32"), _sparse(_TOP_K_TOP_P), 36, 27, 2200),
    Row("top-k 20, logits to sparse", _row_of("float32"), _sparse(_TOP_K), 125, 85, 2150),
    Row("top-k 20 + top-p, logits to dense", _row_of("float32"), _dense(_TOP_K_TOP_P), 22, 15, 1700),
    # The kept sets of 208, 15k and 86k tokens that the goals name are these three of a Zipf-like row.
    Row(
        "top-p, probabilities, hundreds kept",
        _probabilities_at(0.8),
        _nucleus(0.95),
        370,
        150,
        17_500,
        kinds=("zipf",),
        kernel="top-p",
        worst=False,
    ),
    Row(
        "top-p, probabilities, a tenth kept",
        _probabilities_at(1.0),
        _nucleus(0.95),
        140,
        60,
        17_500,
        kinds=("zipf", "normal"),
        kernel="top-p",
    ),
    Row(
        "top-p, probabilities, half kept",
        _probabilities_at(1.0),
        _nucleus(0.99),
        90,
        40,
        17_500,
        kinds=("zipf",),
        kernel="top-p",
        worst=False,
    ),
    Row("softmax + top-p, logits to dense", _row_of("float32"), _dense(_TOP_P), 60, 40, 18_500),
    Row("categorical draw", _probabilities_at(1.0), _draw, 30, 18, 560),
    Row("residual + draw", rejected_pair, _verify, 24, 14, 790),
    # The goals give this one in time, 88 and 110 us, and its reference as anything from 200 to 870 us,
    # which was NumPy's allocator in its fast and in its slow state; in the fast one it is this column.
    Row("residual", pair, _residual, 580 / 88, 580 / 110, 580),
    Row(
        "verify, 20 tokens, accepted",
        partial(sparse_pair, rejected=False),
        _verify,
        22,
        15,
        10,
        kinds=("zipf",),
        vocab=DESIGN_VOCABULARY,
        worst=False,
    ),
    Row(
        "verify, 20 tokens, rejected",
        partial(sparse_pair, rejected=True),
        _verify,
        100,
        60,
        62,
        kinds=("zipf",),
        vocab=DESIGN_VOCABULARY,
        worst=False,
    ),
    Row(
        "SparseDistribution of 20 tokens",
        _construction,
        _construct,
        20,
        10,
        kinds=("zipf",),
        vocab=DESIGN_VOCABULARY,
        worst=False,
    ),
    *_small_rows(),
    *_block_rows(),
)


# ---- measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call."""

    minimum: float
    median: float


@dataclass(frozen=True)
class Line:
    """A row measured on one kind of input."""

    row: Row
    kind: str
    vocab: int
    reference: Timing
    compiled: Timing

    @property
    def ratio(self) -> float:
        return self.reference.minimum / self.compiled.minimum

    def absolute(self) -> tuple[float, float] | None:
        """Goal and floor in microseconds; None where they say nothing about this line."""
        if self.row.column is None or (self.row.vocab is None and self.vocab != DESIGN_VOCABULARY):
            return None
        return self.row.column / self.row.goal, self.row.column / self.row.floor

    def judgement(self) -> tuple[Verdict, Measure | None]:
        """Where the line stands, and whether it is its ratio or its time that says so."""
        goal_us, floor_us = self.absolute() or (0.0, 0.0)
        if self.ratio >= self.row.goal:
            return "goal", "ratio"
        if self.compiled.minimum <= goal_us:
            return "goal", "time"
        if self.ratio >= self.row.floor:
            return "floor", "ratio"
        if self.compiled.minimum <= floor_us:
            return "floor", "time"
        return "below", None

    def slow_reference(self) -> bool:
        """Whether the reference takes longer than the goals allow it, so that the ratio flatters."""
        # Of the small rows the goals give no more than a range.
        if self.row.column is None or self.row.vocab is not None or self.absolute() is None:
            return False
        return self.reference.minimum > SLOW_REFERENCE * self.row.column

    def as_dict(self) -> dict[str, Any]:
        """What `mtplx bench --json` prints of it."""
        verdict, measure_of = self.judgement()
        absolute = self.absolute()
        return {
            "name": self.row.name,
            "kernel": self.row.kernel or self.row.name,
            "input": self.kind,
            "vocab": self.vocab,
            "reference_us": asdict(self.reference),
            "compiled_us": asdict(self.compiled),
            "ratio": self.ratio,
            "goal": self.row.goal,
            "floor": self.row.floor,
            "goal_us": absolute and absolute[0],
            "floor_us": absolute and absolute[1],
            "column_us": self.row.column if absolute else None,
            "slow_reference": self.slow_reference(),
            "verdict": verdict,
            "by": measure_of,
        }


# Windows counts a thread's time in ticks of 15 ms.
_clock_ns = (
    time.thread_time_ns if time.get_clock_info("thread_time").resolution < 1e-6 else time.perf_counter_ns
)


def _sample(call: Thunk, number: int) -> float:
    """Microseconds per call, of `number` calls in a row."""
    calls = repeat(None, number)
    start = _clock_ns()
    for _ in calls:
        call()
    return (_clock_ns() - start) / (1e3 * number)


class _Side:
    """One of the calls that are measured in turns, and its samples so far."""

    def __init__(self, call: Thunk) -> None:
        self.call = call
        self.samples: list[float] = []
        call()  # the first one imports, allocates and warms the caches
        self.number = 1
        while (each := _sample(call, self.number)) * self.number < SAMPLE_US:
            self.number = max(2 * self.number, math.ceil(SAMPLE_US / max(each, 1e-3)))
        self.sample_us = each * self.number

    def sample(self, times: int = 1) -> None:
        for _ in range(times):
            self.samples.append(_sample(self.call, self.number))

    def timing(self) -> Timing:
        return Timing(min(self.samples), median(self.samples))


@contextmanager
def _no_collection() -> Iterator[None]:
    """A garbage collection would land on whichever side happens to be running."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def measure(reference_call: Thunk, compiled_call: Thunk, seconds: float) -> tuple[Timing, Timing]:
    """Time two calls in turns, for about `seconds` in all, and at least `LEAST_ROUNDS` rounds.

    Returns
    -------
    tuple of Timing
        Of the reference and of the compiled call.
    """
    with _no_collection():
        deadline = time.perf_counter() + seconds
        theirs, ours = _Side(reference_call), _Side(compiled_call)
        share = round(COMPILED_SHARE * theirs.sample_us / ours.sample_us)
        times = min(max(share, LEAST_COMPILED_SAMPLES), MOST_COMPILED_SAMPLES)
        while len(theirs.samples) < LEAST_ROUNDS or time.perf_counter() < deadline:
            theirs.sample()
            ours.sample(times)
    return theirs.timing(), ours.timing()


def measure_alone(call: Thunk, seconds: float) -> Timing:
    """Time one call for about `seconds`."""
    with _no_collection():
        deadline = time.perf_counter() + seconds
        side = _Side(call)
        while len(side.samples) < LEAST_ROUNDS or time.perf_counter() < deadline:
            side.sample()
    return side.timing()


def measure_row(row: Row, kind: str, vocab: int, seconds: float) -> Line:
    """One row on one kind of input.

    Raises
    ------
    BenchError
        The row needs a package that is not installed.
    """
    vocab = row.vocab or vocab
    arguments = row.make(kind, vocab)
    theirs, ours = (row.build(face, *arguments) for face in (reference, sampling))
    return Line(row, kind, vocab, *measure(theirs, ours, seconds))


# ---- what is asked for ---------------------------------------------------------------------------

Measurement = tuple[Row, str, int]  # row, kind of input, V


def table(vocab: int, only: str = "") -> list[Measurement]:
    """Every row on every kind of its inputs; `only` is part of its name."""
    return [(row, kind, row.vocab or vocab) for row in _named(only) for kind in row.kinds]


def worst_cases(vocab: int, only: str = "") -> list[Measurement]:
    """Every kernel on LLM-like inputs, which the others are compared with, and on all worst cases."""
    rows = _named(only)
    kernels = {row.kernel or row.name for row in rows if row.worst}
    return [
        (row, kind, vocab)
        for row in rows
        if (row.kernel or row.name) in kernels
        for kind in (*row.kinds, *(WORST_INPUTS if row.worst else ()))
    ]


def scaling(only: str = "") -> list[Measurement]:
    """Every kernel whose cost grows with V, on its first kind of input, at growing V."""
    return [
        (row, row.kinds[0], vocab)
        for row in _named(only)
        if row.vocab is None
        for vocab in SCALING_VOCABULARIES
    ]


def _named(part: str) -> list[Row]:
    rows = [row for row in ROWS if part.casefold() in row.name.casefold()]
    if not rows:
        raise BenchError(f"no row of the table has {part!r} in its name")
    return rows


def summarise_worst(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Each worst case beside the slowest LLM-like line of its kernel.

    It passes if it takes at most `WORST_SLOWDOWN` times as long, and no longer than the reference.
    """
    slowest: dict[str, float] = {}
    for line in lines:
        kernel = line.row.kernel or line.row.name
        if line.kind in line.row.kinds:
            slowest[kernel] = max(slowest.get(kernel, 0.0), line.compiled.minimum)
    found = []
    for line in lines:
        if line.kind not in line.row.kinds:
            slowdown = line.compiled.minimum / slowest[line.row.kernel or line.row.name]
            found.append(
                {
                    **line.as_dict(),
                    "slowdown": slowdown,
                    "passes": slowdown <= WORST_SLOWDOWN and line.ratio >= 1.0,
                }
            )
    return found


def summarise_scaling(timings: Sequence[tuple[Measurement, Timing]]) -> list[dict[str, Any]]:
    """Nanoseconds per element of each kernel at each V, and how far apart they are."""
    by_row: dict[tuple[str, str], dict[int, float]] = {}
    for (row, kind, vocab), timing in timings:
        by_row.setdefault((row.name, kind), {})[vocab] = timing.minimum * 1e3 / vocab
    return [
        {
            "name": name,
            "input": kind,
            "ns_per_element": {str(vocab): value for vocab, value in per_element.items()},
            "spread": (spread := max(per_element.values()) / min(per_element.values())),
            "passes": spread <= SCALING_SPREAD,
        }
        for (name, kind), per_element in by_row.items()
    ]


# ---- the measuring process -----------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    from importlib.metadata import version

    return {
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numpy_simd": numpy_simd(),
        "mtplx": version("mtplx-sampling"),
        "isa": dispatch.active_isa(),
        "available_isas": dispatch.available_isas(),
        "allocator": {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")},
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def numpy_simd() -> list[str]:
    """The instruction sets beyond its baseline that NumPy uses in this process."""
    config: Any = np.show_config(mode="dicts")
    found: list[str] = config["SIMD Extensions"].get("found", [])
    return found


def _emit(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def _work(mode: str, vocab: int, only: str, seconds: float, isa: str | None) -> None:
    if isa is not None:
        dispatch.use_isa(isa)
    if mode == "blocks":
        from mtplx import bench_blocks

        grid = bench_blocks.shapes(only)
        if not grid:
            raise BenchError(f"no line of the grid has {only!r} in its name")
        _emit(total=len(grid))
        found = list(bench_blocks.measure_shapes(grid, vocab, seconds, lambda name: _emit(at=name)))
        _emit(result={"machine": machine(), "rows": found, "skipped": {}})
        return
    plan = {
        "table": lambda: table(vocab, only),
        "worst": lambda: worst_cases(vocab, only),
        "scaling": lambda: scaling(only),
    }[mode]()
    _emit(total=len(plan))
    each = seconds / len(plan)
    lines: list[Line] = []
    timings: list[tuple[Measurement, Timing]] = []
    skipped: dict[str, str] = {}
    for row, kind, size in plan:
        _emit(at=f"{row.name}, {kind}")
        try:
            if mode == "scaling":
                call = row.build(sampling, *row.make(kind, size))
                timings.append(((row, kind, size), measure_alone(call, each)))
            else:
                lines.append(measure_row(row, kind, size, each))
        except BenchError as error:
            skipped[row.name] = str(error)
    if mode == "scaling":
        rows = summarise_scaling(timings)
    elif mode == "worst":
        rows = summarise_worst(lines)
    else:
        rows = [line.as_dict() for line in lines]
    _emit(result={"machine": machine(), "rows": rows, "skipped": skipped})


if __name__ == "__main__":
    try:
        _work(**json.loads(sys.argv[1]))
    except BenchError as error:
        _emit(error=str(error))
    except KeyboardInterrupt:
        sys.exit(130)
