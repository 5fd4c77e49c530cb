"""The residual of two dense rows: written out, drawn from, and the distances that sum it.

Run ``pytest benches/bench_residual.py --benchmark-group-by=case``;
``-k "zipf and 151936"`` selects.
"""

from functools import partial

import numpy as np
import others
import pytest

from mtplx import reference, sampling
from mtplx.bench import pair, rejected_pair


@pytest.mark.parametrize("implementation", ["reference", "compiled", "torch", "numba"])
def test_residual(compare, kind, vocab):
    p, q = pair(kind, vocab)
    compare(
        reference=lambda: partial(reference.residual_distribution, p, q),
        compiled=lambda: partial(sampling.residual_distribution, p, q),
        torch=lambda: others.torch_residual(p, q),
        numba=lambda: others.numba_call("residual", p, q),
    )


@pytest.mark.parametrize("implementation", ["reference", "compiled", "torch", "numba"])
def test_residual_and_draw(compare, kind, vocab):
    """A verification that rejects; the others get the residual and its draw without coin and checks."""
    p, q, token = rejected_pair(kind, vocab)
    compare(
        reference=lambda: partial(reference.verify_one_token, p, q, token, np.random.default_rng(1)),
        compiled=lambda: partial(sampling.verify_one_token, p, q, token, np.random.default_rng(1)),
        torch=lambda: others.torch_residual(p, q, draw=True),
        numba=lambda: others.numba_call("residual_draw", p, q),
    )


@pytest.mark.parametrize("name", ["total_variation", "speculative_output_marginal"])
@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_laws_of_a_pair(compare, name, kind, vocab):
    p, q = pair(kind, vocab)
    compare(
        reference=lambda: partial(getattr(reference, name), p, q),
        compiled=lambda: partial(getattr(sampling, name), p, q),
    )


@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_entropy(compare, kind, vocab):
    p, _ = pair(kind, vocab)
    compare(
        reference=lambda: partial(reference.distribution_entropy, p),
        compiled=lambda: partial(sampling.distribution_entropy, p),
    )
