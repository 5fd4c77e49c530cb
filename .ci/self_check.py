"""A quick check of the compiled core against the reference, for emulated processors.

usage: python self_check.py ISA     (the kernel table that must have been chosen)

On two dozen rows: kept sets, tokens and generator states equal, softmax within 8 ulp.
"""

import sys

import numpy as np
from mtplx._csampling.dispatch import active_isa, available_isas

from mtplx import reference, sampling
from mtplx.distributions import SamplerConfig

SIZES = (1, 3, 16, 33, 257, 5000)
KINDS = ("peaked", "flat", "tied", "masked")
CONFIGS = (SamplerConfig(0.6, 0.95, 20), SamplerConfig(1.0, 0.9, 0), SamplerConfig(1.3, 1.0, 5))


def logits(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    row = rng.normal(0, 3, size).astype(np.float32)
    if kind == "flat":
        row *= np.float32(0.01)
    elif kind == "tied":
        row = np.round(row)
    elif kind == "masked":
        row[1::2] = -np.inf
    return row


def ulps(a: np.ndarray, b: np.ndarray) -> int:
    """Largest distance between non-negative float64 numbers, in units of the last place."""
    return int(np.abs(a.view(np.int64) - b.view(np.int64)).max())


def check_row(row: np.ndarray, draft_row: np.ndarray, config: SamplerConfig, seed: int) -> int:
    p = sampling.softmax(row, config.temperature)
    distance = ulps(p, reference.softmax(row, config.temperature))
    assert distance <= 8, f"softmax is off by {distance} ulp"

    kept = reference.apply_top_p_top_k(p, config.top_p, config.top_k)
    dense = sampling.distribution_from_logits(row, config)
    sparse = sampling.sparse_distribution_from_logits(row, config)
    for other in (sampling.apply_top_p_top_k(p, config.top_p, config.top_k), dense, sparse.to_dense()):
        assert np.array_equal(kept > 0, other > 0), "the kept sets differ"
        assert ulps(kept, other) <= 8

    q = reference.distribution_from_logits(draft_row, config)
    x = int(q.argmax())
    for function, arguments in (("sample_from_distribution", (kept,)), ("verify_one_token", (kept, q, x))):
        rngs = [np.random.default_rng(seed) for _ in range(2)]
        results = [
            getattr(m, function)(*arguments, rng) for m, rng in zip((reference, sampling), rngs, strict=True)
        ]
        assert results[0] == results[1], f"{function}: {results}"
        assert rngs[0].bit_generator.state == rngs[1].bit_generator.state
    return distance


def main(isa: str) -> None:
    assert active_isa() == isa, f"the table in use is {active_isa()}, not {isa}"
    rng = np.random.default_rng(2026)
    worst = rows = 0
    for size in SIZES:
        for kind in KINDS:
            row = logits(kind, size, rng)
            for seed, config in enumerate(CONFIGS):
                worst = max(worst, check_row(row, logits("peaked", size, rng), config, seed))
            rows += 1
    chosen = f"{active_isa()} of {', '.join(available_isas())}"
    print(f"{chosen}: {rows} rows agree with the reference, softmax within {worst} ulp")


if __name__ == "__main__":
    main(sys.argv[1])
