"""Exactness: the emitted law integrated over every draft, its closed form, distance, entropy (contract 3)."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import rows

from mtplx.distributions import SamplerConfig, SparseDistribution

TARGET_TEMPERATURES = (0.3, 0.7, 1.2)
DRAFT_TEMPERATURES = (0.1, 0.3, 0.5, 0.7, 1.0, 1.2)
TRUNCATIONS = ((1.0, 0), (0.95, 20), (0.9, 0), (1.0, 5))
EXACT = 1e-12  # the contract's; sums of 60 products of numbers below 1 leave some 1e-15


def dense(distribution):
    return distribution.to_dense() if isinstance(distribution, SparseDistribution) else distribution


def emitted_law(p, q, acceptance, residual, drawn_from=None):
    """The law of the emitted token: coin integrated out, every draft counted with its probability."""
    drawn_from = dense(q if drawn_from is None else drawn_from)
    law = np.zeros(drawn_from.size)
    rejected = 0.0
    for token in range(drawn_from.size):
        if drawn_from[token] > 0:
            a = acceptance(p, q, token)
            law[token] += drawn_from[token] * a
            rejected += drawn_from[token] * (1.0 - a)
    return law + rejected * dense(residual(p, q)) if rejected else law


def logits_of_a_pair(V=60):
    """A target row and a draft row that leans the same way, as drafts do."""
    rng = np.random.default_rng(41)
    target = rng.normal(size=V) * 2.0
    return target, target + rng.normal(size=V)


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("draft_temperature", DRAFT_TEMPERATURES)
@pytest.mark.parametrize("target_temperature", TARGET_TEMPERATURES)
def test_the_integrated_law_is_the_target(face, target_temperature, draft_temperature, truncation):
    x, y = logits_of_a_pair()
    config, draft_config = (SamplerConfig(t, *truncation) for t in (target_temperature, draft_temperature))
    faces = (face.distribution_from_logits, face.sparse_distribution_from_logits)
    for of_target, of_draft in itertools.product(faces, faces):
        p, q = of_target(x, config), of_draft(y, draft_config)
        law = emitted_law(p, q, face.acceptance_probability, face.residual_distribution)
        assert np.abs(law - dense(p)).max() < EXACT


def p_over_q_upside_down(acceptance):
    return lambda p, q, token: acceptance(q, p, token)


def never_below_nine_tenths(acceptance):
    return lambda p, q, token: max(acceptance(p, q, token), 0.9)


ACCEPTANCE_FAULTS = (p_over_q_upside_down, never_below_nine_tenths)


@pytest.mark.parametrize("draft_temperature", DRAFT_TEMPERATURES)
def test_the_integrated_law_shows_planted_faults(face, draft_temperature):
    """Each fault must stand out by a million tolerances, or the test above would show nothing."""
    x, y = logits_of_a_pair()
    p = face.distribution_from_logits(x, SamplerConfig(0.8, 1.0, 0))
    q = face.distribution_from_logits(y, SamplerConfig(draft_temperature, 1.0, 0))
    untempered = face.distribution_from_logits(y, SamplerConfig(0.8, 1.0, 0))
    laws = {
        "draft temperature on one side only": emitted_law(
            p, untempered, face.acceptance_probability, face.residual_distribution, drawn_from=q
        ),
        "corrected from the target": emitted_law(p, q, face.acceptance_probability, lambda p, q: p),
        "corrected from |p - q|": emitted_law(
            p, q, face.acceptance_probability, lambda p, q: np.abs(p - q) / np.abs(p - q).sum()
        ),
        "corrected from p without x's share": emitted_law(
            p, q, face.acceptance_probability, lambda p, q: np.where(p > q, p, 0) / p[p > q].sum()
        ),
        "residual of swapped arguments": emitted_law(
            p, q, face.acceptance_probability, lambda p, q: face.residual_distribution(q, p)
        ),
    }
    for fault in ACCEPTANCE_FAULTS:
        faulty = fault(face.acceptance_probability)
        laws[fault.__name__] = emitted_law(p, q, faulty, face.residual_distribution)
    for name, law in laws.items():
        assert np.abs(law - p).max() > 1e6 * EXACT, name


@pytest.mark.parametrize("n", [1, 2, 3, 17, 200])
def test_the_integrated_law_of_worst_case_rows(face, n):
    named = {name: p for name, p in rows.probabilities(n).items() if name != "subnormal"}
    for (a, p), (b, q) in itertools.product(named.items(), named.items()):
        law = emitted_law(p, q, face.acceptance_probability, face.residual_distribution)
        assert np.abs(law - p).max() < EXACT, (a, b)


# ---- the closed form -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.5, 0.5], [1.0, 0.0]),
        ([1.0, 0.0], [0.0, 1.0]),  # nothing shared
        ([0.25, 0.75], [0.25, 0.75]),
        ([0.2, 0.3, 0.5], [0.5, 0.3, 0.2]),
        ([1.0], [1.0]),
    ],
    ids=str,
)
def test_marginal_by_hand_is_the_target(face, p, q):
    kinds = [lambda row: row, lambda row: SparseDistribution(np.arange(len(row)), row, len(row))]
    for of_p, of_q in itertools.product(kinds, kinds):
        got = face.speculative_output_marginal(of_p(p), of_q(q))
        assert type(got) is np.ndarray
        assert np.abs(got - p).max() < EXACT


def test_marginal_normalises_both_sides_first(face):
    got = face.speculative_output_marginal([3.0, 1.0], [10.0, 30.0])
    assert np.abs(got - [0.75, 0.25]).max() < EXACT
    got = face.speculative_output_marginal([1.7e308, 1.7e308], [5e-324, 5e-324])
    assert np.abs(got - [0.5, 0.5]).max() < EXACT


def test_marginal_of_sparse_pairs_with_vocabularies_of_their_own(face):
    p = SparseDistribution([0, 3], [0.5, 0.5], 4)
    q = SparseDistribution([3, 7], [0.25, 0.75], 8)  # id 7 is always rejected
    assert np.abs(face.speculative_output_marginal(p, q) - [0.5, 0, 0, 0.5]).max() < EXACT
    expected = np.zeros(8)
    expected[[3, 7]] = 0.25, 0.75
    assert np.abs(face.speculative_output_marginal(q, p) - expected).max() < EXACT


@pytest.mark.parametrize("n", [1, 2, 17, 600, 5000])
def test_marginal_of_worst_case_rows_is_the_target(face, n):
    named = rows.probabilities(n)
    for (a, p), (b, q) in itertools.product(named.items(), named.items()):
        got = face.speculative_output_marginal(p, q)
        target = p / 5e-324 / (p / 5e-324).sum() if a == "subnormal" else p
        assert np.abs(got - target).max() < EXACT, (a, b)
        assert (got >= 0).all()


# ---- distance --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        ([0.5, 0.5], [1.0, 0.0], 0.5),
        ([1.0, 0.0], [0.0, 1.0], 1.0),
        ([0.25, 0.75], [0.25, 0.75], 0.0),
        ([0.5, 0.25, 0.25], [0.25, 0.25, 0.5], 0.25),
        ([3.0, 1.0], [1.0, 2.0], 2.0),  # as given
    ],
    ids=str,
)
def test_distance_by_hand(face, p, q, expected):
    got = face.total_variation(p, q)
    assert got == expected
    assert type(got) is float


def test_distance_of_sparse_pairs(face):
    p = SparseDistribution([9, 2, 5], [0.5, 0.25, 0.25], 10)
    q = SparseDistribution([5, 2, 3], [0.5, 0.125, 0.375], 10)
    for target, draft in itertools.product((p, p.to_dense()), (q, q.to_dense())):
        assert face.total_variation(target, draft) == 0.625
        assert face.total_variation(draft, target) == 0.625
        assert face.total_variation(target, target) == 0.0
    wider = SparseDistribution([7, 12], [0.5, 0.5], 20)
    assert face.total_variation(p, wider) == 1.0


def test_distance_of_long_sparse_pairs(face):
    """A sum from left to right of so many equal terms errs by 1.7e-12."""
    p = SparseDistribution(np.arange(91070), np.full(91070, 1 / 91070), 151936)
    q = SparseDistribution(np.arange(0, 89340, 30), np.full(2978, 1 / 2978), 151936)
    expected = math.fsum(np.maximum(p.to_dense() - q.to_dense(), 0.0))
    assert face.total_variation(p, q) == pytest.approx(expected, rel=0, abs=1e-14)


@pytest.mark.parametrize("n", [1, 2, 17, 257, 5000])
def test_distance_of_worst_case_rows(face, n):
    named = rows.probabilities(n)
    for (a, p), (b, q) in itertools.product(named.items(), named.items()):
        expected = math.fsum(np.maximum(p - q, 0).tolist())
        assert abs(face.total_variation(p, q) - expected) < EXACT, (a, b)


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=1, max_size=40))
def test_distance_is_one_minus_what_is_shared(face, pairs):
    p, q = (np.array(column) / sum(column) for column in zip(*pairs, strict=True))
    distance = face.total_variation(p, q)
    assert abs(distance - (1.0 - np.minimum(p, q).sum())) < EXACT
    assert abs(distance - face.total_variation(q, p)) < EXACT
    # and the probability that a draft of q is rejected
    rejected = sum(q[x] * (1.0 - face.acceptance_probability(p, q, x)) for x in range(p.size))
    assert abs(distance - rejected) < EXACT


# ---- entropy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0], 0.0),
        ([0.0, 7.0, 0.0], 0.0),
        ([0.5, 0.5], math.log(2)),
        ([0.0, 2.0, 2.0], math.log(2)),  # renormalised
        ([1.0] * 8, math.log(8)),
        ([0.5, 0.25, 0.25], 1.5 * math.log(2)),
        ([1.7e308, 1.7e308], math.log(2)),
        ([5e-324, 5e-324], math.log(2)),
        ([1.0, 5e-324], 0.0),
        ([3.0, 1.0], 2 * math.log(2) - 0.75 * math.log(3)),
    ],
    ids=str,
)
def test_entropy_by_hand(face, row, expected):
    for distribution in (row, SparseDistribution(np.arange(len(row))[::-1], row, len(row))):
        got = face.distribution_entropy(distribution)
        assert abs(got - expected) < EXACT
        assert type(got) is float
        assert math.copysign(1.0, got) == 1.0  # never -0.0


@pytest.mark.parametrize("n", [1, 2, 17, 257, 5000])
def test_entropy_of_worst_case_rows(face, n):
    for name, w in rows.weights(n).items():
        total = math.fsum((w / w.max()).tolist())
        shares = [value / total for value in (w / w.max()).tolist()]
        expected = -math.fsum(s * math.log(s) for s in shares if s > 0)
        assert abs(face.distribution_entropy(w) - expected) < EXACT, name


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40).filter(any))
def test_entropy_is_between_that_of_one_token_and_that_of_all(face, row):
    entropy = face.distribution_entropy(row)
    assert -EXACT < entropy < math.log(np.count_nonzero(row)) + EXACT
    assert abs(face.distribution_entropy([*row, 0.0, *row]) - entropy - math.log(2)) < EXACT


# ---- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ([0.0, 0.0], "mass"),
        ([math.nan, 1.0], "nan"),
        ([math.inf, 1.0], "inf"),
        ([-0.25, 1.0], "-0.25"),
        ([[0.5, 0.5]], ""),
        ([], ""),
        (0.5, ""),
    ],
    ids=str,
)
def test_rows_that_are_no_distributions_are_refused(face, bad, named):
    good = [0.5, 0.5]
    for call in (
        lambda: face.speculative_output_marginal(bad, good),
        lambda: face.speculative_output_marginal(good, bad),
        lambda: face.total_variation(bad, good),
        lambda: face.total_variation(good, bad),
        lambda: face.distribution_entropy(bad),
    ):
        with pytest.raises(ValueError, match=named or None):
            call()


def test_lengths_that_differ_are_refused(face):
    one = SparseDistribution([0], [1.0], 3)
    for call in (face.speculative_output_marginal, face.total_variation):
        for p, q in (([0.5, 0.5], [1.0]), ([1.0], [0.5, 0.5]), ([0.5, 0.5], one), (one, [0.5, 0.5])):
            with pytest.raises(ValueError, match=r"\d"):
                call(p, q)
