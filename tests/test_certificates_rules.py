"""Coins and thresholds of the acceptance rules so close that the core has to sum as the definition does."""

import math

import numpy as np
import pytest
from support.counting import counting
from support.generators import around, scripted

from mtplx import reference, sampling, verification
from mtplx.decisions import Cascade, Typical
from mtplx.distributions import SparseDistribution
from mtplx.reference import rules

SIZES = (3, 20, 256, 257, 513, 1100, 5000)


def point(n, token):
    row = np.zeros(n)
    row[token] = 1.0
    return row


def both(*args, rule, uniforms):
    decisions = [
        face.verify_block(*args, scripted(*uniforms), rule=rule) for face in (reference, verification)
    ]
    assert decisions[0] == decisions[1], (rule, uniforms)
    return decisions[1]


# ---- keep_test: a coin against h of the block rule ---------------------------------------------------


def two_drafts(n, seed, dtype=np.float64):
    """A prefix of one draft with P_1 = 0.4/0.5, and a second draft that is impossible."""
    rng = np.random.default_rng([seed, n])
    rows = rng.dirichlet(np.ones(n), 4)
    target, draft = rows[:2].copy(), rows[2:].copy()
    first, second = 1, int(np.argmin(target[1]))
    target[0], draft[0] = 0.4 * point(n, 1) + 0.6 * point(n, 2), 0.5 * point(n, 1) + 0.5 * point(n, 0)
    target[1, second] = 0.0
    return target.astype(dtype), draft.astype(dtype), [first, second]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("n", SIZES)
def test_coins_next_to_the_threshold_of_a_prefix(isa, n, dtype):
    with counting("keep_test") as counted:
        kept = []
        for seed in range(40):
            target, draft, tokens = two_drafts(n, seed, dtype)
            (prefix, _) = rules.prefix_acceptances(target, draft, tokens)
            h = rules.block_keep_probability(target[1], draft[1], prefix)
            if h == 0.0:
                continue
            assert h < prefix < 1.0
            for u in around(h):
                decision = both(target, draft, tokens, rule="block", uniforms=(u, 0.0, 0.5))
                assert decision.accepted == (u <= h)
                kept.append(decision.accepted)
    assert set(kept) == {0, 1}
    # Rows within one block of sums are summed one by one, and nothing is in doubt.
    assert counted[0] == (len(kept) if n > 256 else 0)


@pytest.mark.parametrize("n", [300, 5000])
def test_the_sum_by_blocks_alone_would_decide_otherwise(isa, n):
    """What the certificate is for: h by another order of summation is on the other side of some coins."""
    other = 0
    for seed in range(100):
        target, draft, tokens = two_drafts(n, seed)
        prefix, _ = rules.prefix_acceptances(target, draft, tokens)
        exactly = rules.block_keep_probability(target[1], draft[1], prefix)
        mass = math.fsum(np.maximum(prefix * target[1] - draft[1], 0.0))
        nearly = mass / (mass + (1.0 - prefix))
        other += any((u <= exactly) != (u <= nearly) for u in around(exactly))
    assert other > 5


@pytest.mark.parametrize("n", [300, 5000])
def test_prefixes_that_are_certain_themselves(isa, n):
    """P = 1: h is 1 where anything is left over, 1 by definition where nothing is."""
    for seed in range(20):
        target, draft, tokens = two_drafts(n, seed)
        target[0] = draft[0] = point(n, tokens[0])
        for u in (0.0, 0.5, 1.0 - 2.0**-53):
            assert both(target, draft, tokens, rule="block", uniforms=(u, 0.0, 0.5)).accepted == 1
        draft[1] = target[1]
        assert both(target, draft, tokens, rule="block", uniforms=(u, 0.0, 0.5)).accepted == 1


def test_ordinary_prefixes_are_certain(isa):
    with counting("keep_test") as counted:
        for n in SIZES:
            for seed in range(30):
                target, draft, tokens = two_drafts(n, seed)
                both(target, draft, tokens, rule="block", uniforms=(0.3, 0.0, 0.5))
    assert counted[0] == 0


def test_sums_beyond_float64_and_below_its_normal_range(isa):
    for scale in (1e308, 1e305, 5e-324, 1e-310):
        for seed in range(20):
            target, draft, tokens = two_drafts(300, seed)
            for factor in (0.3, 1.0):
                rows = target.copy(), draft.copy()
                rows[0][1] *= scale
                rows[1][1] *= scale * factor
                for u in (0.0, 2.0**-53, 0.2, 0.9):
                    both(*rows, tokens, rule="block", uniforms=(u, 0.0, 0.5))


# ---- typical_threshold: p(x) against min(eps, delta exp(-H)) -----------------------------------------


@pytest.mark.parametrize(
    ("sparse", "scale"), [(False, s) for s in (1e-280, 1.0, 1e280, 1e305, 2.0**901)] + [(True, 1.0)]
)
@pytest.mark.parametrize("n", SIZES)
def test_probabilities_next_to_the_typical_threshold(isa, n, sparse, scale):
    """Every decision is in doubt, so that entropies and thresholds have the reference's bits, of any sum."""
    with counting("typical_threshold") as counted:
        kept = []
        for seed in range(20):
            p = np.random.default_rng([seed, n]).dirichlet(np.ones(n)) * scale
            row = SparseDistribution(np.arange(n), p, n) if sparse else p
            token = seed % n
            probability = row.probability(token) if sparse else p[token]
            delta = probability * math.exp(reference.distribution_entropy(row))
            for step in range(-3, 4):
                rule = Typical(scale, delta * (1.0 + step * 2.0**-52))
                decision = both([row], None, [token], rule=rule, uniforms=(0.5,))
                kept.append(decision.accepted)
                expected = reference.typical_accept_decision(row, token, eps=scale, delta=rule.delta)
                answer = verification.typical_accept_decision(row, token, eps=scale, delta=rule.delta)
                assert answer == expected
                assert answer[0] == bool(decision.accepted) == (answer[1] < probability)
    assert set(kept) == {0, 1}
    assert counted[0] >= len(kept)


def test_ordinary_typical_thresholds_are_certain(isa):
    with counting("typical_threshold") as counted:
        for n in SIZES:
            for seed in range(20):
                p = np.random.default_rng([seed, n]).dirichlet(np.ones(n))
                both([p], None, [seed % n], rule=Typical(), uniforms=(0.5,))
        # Above eps and below any threshold nothing hangs on the entropy.
        both([[0.5, 0.5]], None, [0], rule=Typical(0.25, 0.5), uniforms=(0.5,))
    assert counted[0] == 0


@pytest.mark.parametrize("scale", [1e308, 1e-20, 1e-300, 5e-324])
def test_typical_rows_far_from_a_sum_of_1(isa, scale):
    for seed in range(20):
        p = np.random.default_rng(seed).integers(0, 9, 300) / 8.0 * scale
        p[0] = scale
        both([p], None, [0], rule=Typical(scale * 0.5, 0.3), uniforms=(0.5,))
        both([p], None, [0], rule=Typical(scale * 2.0, 300.0 * scale), uniforms=(0.5,))


# ---- cascade: nothing is in doubt, sums are those of the definition ----------------------------------


@pytest.mark.parametrize("deferral", ["tokenv1", "tokenv2", "tokenv3"])
@pytest.mark.parametrize("n", SIZES)
def test_coins_next_to_the_acceptance_of_a_deferred_draft(isa, n, deferral):
    accepted = []
    for seed in range(20):
        rng = np.random.default_rng([seed, n])
        p, q = rng.dirichlet(np.ones(n), 2)
        rule = Cascade(p.max() * 0.05 if deferral != "tokenv3" else 0.05, deferral)
        token = int(np.argmax(np.where(p < p.max() * 0.9, q, 0.0)))
        if not reference.cascade_token_deferral(p, q, token, alpha=rule.alpha, rule=deferral):
            continue
        for u in around(rules.cascade_acceptance(p, q, token, rule)):
            for v in (0.0, 0.5, 1.0 - 2.0**-53):
                accepted.append(both([p], [q], [token], rule=rule, uniforms=(u, v)).accepted)
    assert set(accepted) == {0, 1}


# ---- cascade_distance: max q against max p - alpha TV ------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("n", SIZES)
def test_rows_next_to_the_deferral_of_a_cascade(isa, n, sparse):
    deferred = []
    with counting("cascade_distance") as counted:
        for seed in range(20):
            p, q = np.random.default_rng([seed, n]).dirichlet(np.ones(n), 2)
            pair = [SparseDistribution(np.arange(n), row, n) for row in (p, q)] if sparse else (p, q)
            edge = (p.max() - q.max()) / reference.total_variation(*pair)
            for step in range(-3, 4):
                alpha = edge * (1.0 + step * 2.0**-52)
                expected = reference.cascade_defer_decision(*pair, alpha=alpha)
                assert sampling.cascade_defer_decision(*pair, alpha=alpha) == expected
                deferred.append(expected[0])
    assert set(deferred) == {True, False}
    assert counted[0] == len(deferred)


def test_ordinary_deferrals_are_certain(isa):
    with counting("cascade_distance") as counted:
        for n in SIZES:
            for seed in range(20):
                p, q = np.random.default_rng([seed, n]).dirichlet(np.ones(n), 2)
                told = sampling.cascade_defer_decision(p, q, alpha=0.5)
                expected = reference.cascade_defer_decision(p, q, alpha=0.5)
                assert told[0] == expected[0]
                assert told[1] == pytest.approx(expected[1], abs=1e-12)
    assert counted[0] == 0
