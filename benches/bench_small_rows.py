"""Rows of 3 to 100 entries, where a call's own cost is most of it.

Run ``pytest benches/bench_small_rows.py --benchmark-group-by=case``.
"""

from functools import partial

import numpy as np
import pytest

from mtplx import reference, sampling
from mtplx.bench import logits, probabilities

SIZES = pytest.mark.parametrize("size", [3, 20, 100])
FACES = pytest.mark.parametrize("implementation", ["reference", "compiled"])


@SIZES
@FACES
def test_softmax(compare, size):
    x = logits("normal", size).astype(np.float64)
    compare(
        reference=lambda: partial(reference.softmax, x, 0.8),
        compiled=lambda: partial(sampling.softmax, x, 0.8),
    )


@SIZES
@FACES
def test_truncation(compare, size):
    p = probabilities("normal", size)
    compare(
        reference=lambda: partial(reference.apply_top_p_top_k, p, 0.95, 20),
        compiled=lambda: partial(sampling.apply_top_p_top_k, p, 0.95, 20),
    )


@SIZES
@FACES
def test_draw(compare, size):
    p = probabilities("normal", size)
    compare(
        reference=lambda: partial(reference.sample_from_distribution, p, np.random.default_rng(1)),
        compiled=lambda: partial(sampling.sample_from_distribution, p, np.random.default_rng(1)),
    )
