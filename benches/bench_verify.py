"""One verification of sparse rows of 20 tokens, and what it is made of.

Run ``pytest benches/bench_verify.py --benchmark-group-by=case``;
``-k "zipf and 151936"`` selects.
"""

from functools import partial

import numpy as np
import pytest

from mtplx import reference, sampling
from mtplx.bench import PlainSparseDistribution, pair, sparse_pair

V = 151_936


@pytest.mark.parametrize("rejected", [False, True], ids=["accepted", "rejected"])
@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_verify_sparse(compare, rejected, kind):
    p, q, token = sparse_pair(kind, V, rejected)
    compare(
        reference=lambda: partial(reference.verify_one_token, p, q, token, np.random.default_rng(1)),
        compiled=lambda: partial(sampling.verify_one_token, p, q, token, np.random.default_rng(1)),
    )


@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_verify_dense_accepted(compare, kind):
    p, q = pair(kind, V)
    token = int((p - q).argmax())
    compare(
        reference=lambda: partial(reference.verify_one_token, p, q, token, np.random.default_rng(1)),
        compiled=lambda: partial(sampling.verify_one_token, p, q, token, np.random.default_rng(1)),
    )


@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_acceptance_probability_sparse(compare, kind):
    arguments = sparse_pair(kind, V, True)
    compare(
        reference=lambda: partial(reference.acceptance_probability, *arguments),
        compiled=lambda: partial(sampling.acceptance_probability, *arguments),
    )


@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_residual_sparse(compare, kind):
    p, q, _ = sparse_pair(kind, V, True)
    compare(
        reference=lambda: partial(reference.residual_distribution, p, q),
        compiled=lambda: partial(sampling.residual_distribution, p, q),
    )


@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_sparse_distribution(compare, kind):
    """Against a frozen dataclass that makes the same checks in NumPy."""
    p, _, _ = sparse_pair(kind, V, False)
    arguments = p.token_ids, p.probs, V
    compare(
        reference=lambda: partial(PlainSparseDistribution, *arguments),
        compiled=lambda: partial(sampling.SparseDistribution, *arguments),
    )
