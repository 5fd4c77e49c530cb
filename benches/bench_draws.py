"""One categorical draw from a dense row.

Run ``pytest benches/bench_draws.py --benchmark-group-by=case``;
``-k "zipf and 151936"`` selects.
"""

from functools import partial

import numpy as np
import others
import pytest

from mtplx import reference, sampling
from mtplx.bench import probabilities


@pytest.mark.parametrize("implementation", ["reference", "compiled", "torch", "numba"])
def test_categorical_draw(compare, kind, vocab):
    p = probabilities(kind, vocab)
    compare(
        reference=lambda: partial(reference.sample_from_distribution, p, np.random.default_rng(1)),
        compiled=lambda: partial(sampling.sample_from_distribution, p, np.random.default_rng(1)),
        torch=lambda: others.torch_draw(p),
        numba=lambda: others.numba_call("draw", p),
    )
