"""Rules that need more than a ratio, from rows of logits that are never written.

Each decision is compared with the one on the rows that `distributions_from_logits` writes, with coins on,
next to and at many distances from what decides.
"""

import math

import numpy as np
import pytest
from support import rows
from support.counting import counting
from support.generators import LAST, around, scripted

from mtplx import reference, sampling, verification
from mtplx.batch import distributions_from_logits
from mtplx.decisions import Cascade, Typical
from mtplx.distributions import SamplerConfig
from mtplx.reference import rules
from mtplx.reference.one_row import as_dense

CONFIGS = {
    "whole": SamplerConfig(0.8, 1.0, 0),
    "nucleus": SamplerConfig(0.8, 0.9, 0),
    "wide nucleus": SamplerConfig(3.0, 0.9, 0),
    "top-k": SamplerConfig(0.8, 0.9, 20),
    "one-hot": SamplerConfig(0.0, 0.9, 0),
}
PAIRS = [(name, name) for name in CONFIGS] + [
    ("whole", "nucleus"),
    ("nucleus", "whole"),
    ("whole", "wide nucleus"),
    ("wide nucleus", "nucleus"),
    ("whole", "top-k"),
    ("top-k", "whole"),
    ("one-hot", "whole"),
]
SIZES = (2048, 9001)  # from 2048 on a row is streamed, from 8192 on a nucleus is gathered
CASCADES = [Cascade(0.02, "tokenv1"), Cascade(0.02, "tokenv2"), Cascade(0.3, "tokenv3")]


def block_of(n, seed, dtype=np.float32, K=3):
    rng = np.random.default_rng([n, seed])
    target = rng.normal(size=(K + 1, n)) * 3
    draft = target[:K] + rng.normal(size=(K, n)) * 0.7
    return target.astype(dtype), draft.astype(dtype)


def rows_of(logits, config):
    found = distributions_from_logits(logits, config)
    return found if isinstance(found, np.ndarray) else [found.to_distribution(i) for i in range(len(found))]


def both(target, draft, tokens, configs, rule, uniforms):
    """The decision, which is that on the written rows by either face."""
    found = verification.verify_block_from_logits(
        target, draft, tokens, *configs, scripted(*uniforms), rule=rule
    )
    written = [rows_of(target, configs[0]), None if draft is None else rows_of(draft, configs[1])]
    for face in (reference, verification):
        expected = face.verify_block(*written, tokens, scripted(*uniforms), rule=rule)
        assert found.tokens.tolist() == expected.tokens.tolist(), (rule, uniforms)
        assert (found.accepted, found.bonus) == (expected.accepted, expected.bonus)
        np.testing.assert_allclose(found.accept_probabilities, expected.accept_probabilities, rtol=1e-5)
    return found


def distances(value):
    yield from around(value)
    for apart in (1e-15, 1e-13, 1e-10, 1e-7, 1e-6, 1e-5, 1e-3):
        yield from (u for u in (value * (1 - apart), value * (1 + apart)) if 0.0 <= u < 1.0)


@pytest.mark.parametrize(("target_form", "draft_form"), PAIRS)
@pytest.mark.parametrize("n", SIZES)
def test_the_block_rule_next_to_what_decides(isa, n, target_form, draft_form):
    configs = CONFIGS[target_form], CONFIGS[draft_form]
    target, draft = block_of(n, 1)
    p, q = rows_of(target, configs[0]), rows_of(draft, configs[1])
    dense_p, dense_q = (np.array([as_dense(row, "row") for row in side]) for side in (p, q))
    tokens = dense_q.argmax(axis=1).tolist()
    tokens[2] = int((dense_q[2] - dense_p[2]).argmax())
    prefixes = rules.prefix_acceptances(p, q, tokens)
    keep = rules.block_keep_probability(p[1], q[1], prefixes[0])
    for u in distances(keep):
        both(target, draft, tokens, configs, "block", (u, LAST, LAST, 0.4))
    for u in distances(prefixes[0]):
        both(target, draft, tokens, configs, "block", (u, LAST, LAST, 0.4))
    for kept, factor in ((0, 1.0), (1, prefixes[0])):
        left = np.maximum(factor * dense_p[kept] - dense_q[kept], 0.0)
        sums = np.cumsum(left if left.any() else dense_p[kept])
        for place in (*np.flatnonzero(left)[[0, -1]], int(left.argmax())) if left.any() else (0,):
            for u in distances(sums[place] / sums[-1]):
                both(target, draft, tokens, configs, "block", (0.0 if kept else LAST, LAST, LAST, u))


@pytest.mark.parametrize(("target_form", "draft_form"), PAIRS)
@pytest.mark.parametrize("n", SIZES)
def test_cascades_next_to_what_decides(isa, n, target_form, draft_form):
    configs = CONFIGS[target_form], CONFIGS[draft_form]
    target, draft = block_of(n, 2)
    p, q = rows_of(target, configs[0]), rows_of(draft, configs[1])
    for rule in CASCADES:
        dense_p, dense_q = as_dense(p[0], "p"), as_dense(q[0], "q")
        tokens = [int(np.where(dense_p < dense_p.max() * 0.5, dense_q, 0.0).argmax()), 5, 7]
        accept_probability = rules.cascade_acceptance(p[0], q[0], tokens[0], rule)
        for u in distances(min(accept_probability, LAST)):
            both(target, draft, tokens, configs, rule, (u, 0.3, 0.3, 0.3))
        for u in (0.0, 1e-9, 0.2, 0.5, 0.9, LAST):
            both(target, draft, tokens, configs, rule, (LAST, u, u, u))


@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("n", SIZES)
def test_typical_next_to_its_threshold(isa, n, form):
    """Entropies in doubt are taken as they are defined: of the whole row where that is dense."""
    config = CONFIGS[form]
    outcomes = set()
    with counting("typical_threshold") as counted:
        for seed in range(6):
            target, _ = block_of(n, seed, K=1)
            row = rows_of(target, config)[0]
            dense = as_dense(row, "row")
            token = int(np.argsort(dense)[-2]) if form != "one-hot" else int(dense.argmax())
            delta = dense[token] * math.exp(reference.distribution_entropy(row))
            for step in range(-3, 4):
                for eps in (1.0, dense[token], np.nextafter(dense[token], 0.0)):
                    rule = Typical(eps, delta * (1.0 + step * 2.0**-52))
                    outcomes.add(both(target, None, [token], (config, None), rule, (0.5, 0.5)).accepted)
    assert outcomes == {0, 1}
    assert counted[0] > 0


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
def test_typical_without_an_entropy(isa, dtype):
    """Above eps, and below what delta makes of the largest entropy, a rough p(x) is enough."""
    n = 5000
    config = CONFIGS["whole"]
    target, _ = block_of(n, 4, dtype, K=1)
    p = sampling.softmax(target[0], config.temperature)
    order = np.argsort(p)
    for token in (int(order[-1]), int(order[-40]), int(order[0])):
        for eps in (0.0, 0.3, 1.0, *(p[token] * (1.0 + step) for step in (-1e-5, -1e-6, 0.0, 1e-6, 1e-5))):
            for delta in (0.0, 0.09, math.inf, *(p[token] * n * (1.0 + s) for s in (-1e-5, 0.0, 1e-9, 1e-5))):
                both(target, None, [token], (config, None), Typical(eps, delta), (0.5, 0.5))


@pytest.mark.parametrize("rule", ["block", Typical(), *CASCADES], ids=str)
def test_masked_and_flat_rows(isa, rule):
    for n in SIZES:
        target, draft = block_of(n, 3)
        mask = np.random.default_rng(n).random(n) < 0.7
        masked = [np.where(mask, -np.inf, side).astype(np.float32) for side in (target, draft)]
        flat = np.zeros_like(target), draft
        equal = target, target[:3].copy()
        for given in (masked, flat, equal):
            for u in (0.0, 0.3, LAST):
                for tokens in ([int(np.argmin(mask)), 4, 4], [int(np.argmax(mask)), 4, 4]):
                    both(*given, tokens, (CONFIGS["whole"],) * 2, rule, (u, 0.6, u, 0.2))


@pytest.mark.parametrize("rule", ["block", Cascade(0.3)], ids=str)
def test_penalties_on_rows_that_are_opened_again(isa, rule):
    """A row behind a shorter prefix sees the drafts of that prefix alone."""
    n = 2500
    config = SamplerConfig(0.8, 1.0, 0, 1.5, 0.5)
    target, draft = block_of(n, 6)
    tokens = draft.argmax(axis=1).tolist()
    overlay = [{tokens[0]: 1.0}, {3: -9.0}, {}, {n - 1: 2.0}]
    penalised = np.array(
        [
            reference.apply_penalties(target[i], {3: 2, **dict.fromkeys(tokens[:i], 1)}, 1.5, 0.5, overlay[i])
            for i in range(4)
        ]
    )
    for coins in ((LAST, LAST, LAST), (0.0, LAST, LAST), (0.0, 0.0, LAST), (0.0, 0.0, 0.0)):
        uniforms = (*coins, 0.37)
        found = verification.verify_block_from_logits(
            target,
            draft,
            tokens,
            config,
            config,
            scripted(*uniforms, 0.8),
            rule=rule,
            token_counts={3: 2},
            penalty_overlay=overlay,
        )
        plain = SamplerConfig(0.8, 1.0, 0)
        expected = verification.verify_block(
            rows_of(penalised, plain), rows_of(draft, plain), tokens, scripted(*uniforms, 0.8), rule=rule
        )
        assert found.tokens.tolist() == expected.tokens.tolist()


def test_rows_that_would_change_when_they_are_asked_for_again_are_not():
    class Rows(list):
        asked = 0

        def __getitem__(self, i):
            Rows.asked += 1
            return super().__getitem__(i)[: 3000 if Rows.asked < 4 else 2500]

    target, draft = block_of(3000, 7)
    tokens = draft.argmax(axis=1).tolist()
    target[2, tokens[2]] = -50.0
    found, expected = (
        verification.verify_block_from_logits(
            rows, list(draft), tokens, CONFIGS["whole"], rng=scripted(0.0, 0.0, 0.5, 0.5), rule="block"
        )
        for rows in (Rows(list(target)), list(target))
    )
    assert Rows.asked == 3
    assert found.tokens.tolist() == expected.tokens.tolist()
