"""top-k and top-p: from logits to sparse and to dense rows, and of given probabilities.

Run ``pytest benches/bench_truncation.py --benchmark-group-by=case``;
``-k "zipf and 151936"`` selects.
"""

from functools import partial

import others
import pytest

from mtplx import reference, sampling
from mtplx.bench import logits, probabilities
from mtplx.distributions import SamplerConfig

T, TOP_P, TOP_K = 0.8, 0.95, 20
BOTH = SamplerConfig(T, TOP_P, TOP_K)
RANKS = SamplerConfig(T, 1.0, TOP_K)
NUCLEUS = SamplerConfig(T, TOP_P, 0)


@pytest.mark.parametrize("implementation", ["reference", "compiled", "torch"])
def test_top_k_top_p_to_sparse(compare, kind, vocab):
    x = logits(kind, vocab)
    compare(
        reference=lambda: partial(reference.sparse_distribution_from_logits, x, BOTH),
        compiled=lambda: partial(sampling.sparse_distribution_from_logits, x, BOTH),
        torch=lambda: others.torch_top_k_top_p(x, T, TOP_K, TOP_P),
    )


@pytest.mark.parametrize("implementation", ["reference", "compiled", "torch", "onnxruntime"])
def test_top_k_to_sparse(compare, kind, vocab):
    x = logits(kind, vocab)
    compare(
        reference=lambda: partial(reference.sparse_distribution_from_logits, x, RANKS),
        compiled=lambda: partial(sampling.sparse_distribution_from_logits, x, RANKS),
        torch=lambda: others.torch_top_k_top_p(x, T, TOP_K, 1.0),
        onnxruntime=lambda: others.onnxruntime_top_k(x, T, TOP_K),
    )


@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_top_k_top_p_to_dense(compare, kind, vocab):
    x = logits(kind, vocab)
    compare(
        reference=lambda: partial(reference.distribution_from_logits, x, BOTH),
        compiled=lambda: partial(sampling.distribution_from_logits, x, BOTH),
    )


@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_top_p_to_dense(compare, kind, vocab):
    x = logits(kind, vocab)
    compare(
        reference=lambda: partial(reference.distribution_from_logits, x, NUCLEUS),
        compiled=lambda: partial(sampling.distribution_from_logits, x, NUCLEUS),
    )


@pytest.mark.parametrize("implementation", ["reference", "compiled", "torch", "numba"])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.8, 0.95), (1.0, 0.95), (1.0, 0.99)])
def test_top_p_of_probabilities(compare, temperature, top_p, kind, vocab):
    p = probabilities(kind, vocab, temperature)
    compare(
        reference=lambda: partial(reference.apply_top_p_top_k, p, top_p),
        compiled=lambda: partial(sampling.apply_top_p_top_k, p, top_p),
        torch=lambda: others.torch_top_p(p, top_p),
        numba=lambda: others.numba_call("top_p", p, top_p),
    )


@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_top_k_of_probabilities(compare, kind, vocab):
    p = probabilities(kind, vocab)
    compare(
        reference=lambda: partial(reference.apply_top_p_top_k, p, TOP_P, TOP_K),
        compiled=lambda: partial(sampling.apply_top_p_top_k, p, TOP_P, TOP_K),
    )


@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_top_k_order(compare, kind, vocab):
    p = probabilities(kind, vocab)
    compare(
        reference=lambda: partial(reference.deterministic_top_k_order, p, TOP_K),
        compiled=lambda: partial(sampling.deterministic_top_k_order, p, TOP_K),
    )
