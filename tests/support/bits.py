"""All results of the compiled face on fixed inputs, as one SHA-256 per kind.

The inputs are made of integers, divisions and one correctly rounded sum, so every machine has the same
ones; `numpy.exp` and the like differ by a bit between builds. Every table with fused multiply-add (AVX2,
AVX-512, NEON) must give one digest; without `exp` and `log` in it, the x86 baseline must give it too.
"""

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from mtplx import sampling
from mtplx.distributions import SamplerConfig, SparseDistribution

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 255, 257, 511, 513, 1000, 1025, 5000, 20_000)
DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
SETTINGS = ((1.0, 0), (0.9, 0), (1.0, 20), (0.95, 20), (0.999, 3), (0.5, 700))


def integers(n: int, multiplier: int, modulus: int, start: int = 0) -> Any:
    return (np.arange(start, start + n, dtype=np.int64) * multiplier) % modulus


def logits(n: int, kind: str) -> Any:
    """Multiples of 2^-12 in [-16, 16), exact in float32."""
    x = (integers(n, 40_503, 131_071) - 65_536) / 4096.0
    if kind == "masked":
        x[integers(n, 7_919, 5) > 1] = -np.inf
        x[n // 2] = 1.0
    elif kind == "tied":
        x = np.floor(x * 4.0) / 4.0
    elif kind == "deep":  # down to where exp is subnormal, and below
        x = x * 24.0
    return x


def weights(n: int, start: int = 0) -> Any:
    """A row that sums to 1 within rounding: reciprocals of integers over their correctly rounded sum."""
    w = 1.0 / (1.0 + integers(n, 48_271, 65_537, start + 1))
    return w / math.fsum(w.tolist())


def results_with_exp() -> Iterator[Any]:
    """Whatever goes through an exponential or a logarithm."""
    for n in LENGTHS:
        for kind in ("plain", "masked", "tied", "deep"):
            for dtype in DTYPES:
                x = logits(n, kind).astype(dtype)
                for temperature in (0.0, 0.7, 1.0, 3.0, math.inf):
                    yield sampling.softmax(x, temperature)
                    yield sampling.softmax(x, temperature, out=np.empty(n, dtype=np.float32))
                for top_p, top_k in SETTINGS:
                    config = SamplerConfig(0.8, top_p, top_k, 0.5, 0.25)
                    counts = {0: 2, n // 2: 1} if top_k == 20 else None
                    yield sampling.distribution_from_logits(x, config, token_counts=counts)
                    sparse = sampling.sparse_distribution_from_logits(x, config, token_counts=counts)
                    yield sparse.token_ids
                    yield sparse.probs
        yield [sampling.distribution_entropy(row) for row in (weights(n), weights(n, 77))]


def results_without_exp() -> Iterator[Any]:
    """Whatever is made of given probabilities by sums, quotients and comparisons."""
    rng = np.random.Generator(np.random.PCG64(11))
    for n in LENGTHS:
        for dtype in DTYPES:
            p, q = weights(n).astype(dtype), weights(n, 77).astype(dtype)
            yield sampling.deterministic_top_k_order(p, 20)
            yield sampling.deterministic_top_k_order(p, n)
            for top_p, top_k in SETTINGS:
                yield sampling.apply_top_p_top_k(p, top_p, top_k)
            yield sampling.residual_distribution(p, q)
            yield sampling.speculative_output_marginal(p, q)
            yield [sampling.total_variation(p, q)]
            yield [sampling.acceptance_probability(p, q, token) for token in {0, n // 2, n - 1}]
            yield [sampling.sample_from_distribution(p, rng) for _ in range(5)]
            for token in sorted({0, n // 3, n // 2, n - 1}):
                decision = sampling.verify_one_token(p, q, token, rng)
                yield [decision.accepted, decision.token_id, decision.accept_probability]
            yield sampling.apply_penalties(p, {0: 3, n - 1: 1}, 0.3, 0.7, {n // 2: 0.1})
        p, q = weights(n), weights(n, 77)
        ids = integers(n, 31, 3 * n + 1)
        ids = np.unique(ids)[::-1]
        a, b = (SparseDistribution(ids, row[: ids.size], 3 * n + 2) for row in (p, q))
        yield a.probs
        residual = sampling.residual_distribution(a, b)
        yield residual.token_ids
        yield residual.probs
        yield [sampling.verify_one_token(a, b, int(ids[0]), rng).token_id for _ in range(5)]
        yield [sampling.sample_from_distribution(a, rng) for _ in range(5)]
        yield [rng.random()]


def digest(with_exp: bool) -> str:
    """SHA-256 over every number of the results, little-endian."""
    found = hashlib.sha256()
    for result in results_with_exp() if with_exp else results_without_exp():
        array = np.asarray(result)
        if array.dtype.kind in "bi":
            array = array.astype("<i8")
        found.update(str(array.shape).encode())
        found.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return found.hexdigest()
