"""Penalties of tokens seen before: a row penalised, and a distribution from penalised logits.

Run ``pytest benches/bench_penalties.py --benchmark-group-by=case``;
``-k "zipf and 151936"`` selects.
"""

from functools import partial

import numpy as np
import pytest

from mtplx import reference, sampling
from mtplx.bench import logits
from mtplx.distributions import SamplerConfig

CONFIG = SamplerConfig(0.8, 0.95, 20, presence_penalty=0.5, frequency_penalty=0.1)
SEEN = pytest.mark.parametrize("seen", [10, 1000])
FACES = pytest.mark.parametrize("implementation", ["reference", "compiled"])


def counts(seen, vocab):
    ids = np.random.default_rng(2).choice(vocab, seen, replace=False)
    return {int(token): 1 + i % 3 for i, token in enumerate(ids)}


@SEEN
@FACES
def test_apply_penalties(compare, seen, kind, vocab):
    x, occurrences = logits(kind, vocab), counts(seen, vocab)
    compare(
        reference=lambda: partial(reference.apply_penalties, x, occurrences, 0.5, 0.1),
        compiled=lambda: partial(sampling.apply_penalties, x, occurrences, 0.5, 0.1),
    )


@SEEN
@FACES
def test_sparse_distribution_from_penalised_logits(compare, seen, kind, vocab):
    x, occurrences = logits(kind, vocab), counts(seen, vocab)
    compare(
        reference=lambda: partial(
            reference.sparse_distribution_from_logits, x, CONFIG, token_counts=occurrences
        ),
        compiled=lambda: partial(
            sampling.sparse_distribution_from_logits, x, CONFIG, token_counts=occurrences
        ),
    )
