"""acceptance_probability and residual_distribution (contract 3)."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support import rows
from support.ulps import assert_ulps

from mtplx.distributions import SparseDistribution

NAN, INF = math.nan, math.inf


def sparse(row, vocab_size=None):
    """The support of a row, ids descending, so that nothing may rely on their order."""
    ids = np.flatnonzero(row)[::-1]
    return SparseDistribution(ids, np.asarray(row, dtype=np.float64)[ids], vocab_size or len(row))


def as_given(row):
    return row


def kinds(p, q):
    """The pair as dense, sparse and mixed arguments."""
    yield from ((f(p), g(q)) for f in (as_given, sparse) for g in (as_given, sparse))


def dense(distribution):
    return distribution.to_dense() if isinstance(distribution, SparseDistribution) else distribution


# ---- acceptance ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "q", "token", "expected"),
    [
        ([0.125, 0.875], [0.5, 0.5], 0, 0.25),
        ([0.125, 0.875], [0.5, 0.5], 1, 1.0),  # p > q: exactly 1
        ([0.5, 0.5], [0.5, 0.5], 0, 1.0),
        ([0.0, 1.0], [0.5, 0.5], 0, 0.0),
        ([0.5, 0.5], [0.0, 1.0], 0, 1.0),  # q(x) = 0, p(x) > 0
        ([0.0, 1.0], [0.0, 1.0], 0, 0.0),  # both 0: impossible
    ],
    ids=str,
)
def test_acceptance_by_hand(face, p, q, token, expected):
    for target, draft in kinds(p, q):
        got = face.acceptance_probability(target, draft, token)
        assert got == expected
        assert type(got) is float


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        (5e-324, 1e-323, 0.5),
        (1e-323, 5e-324, 1.0),
        (1e308, 5e-324, 1.0),  # the quotient overflows
        (5e-324, 1.0, 5e-324),
        (5e-324, 1e308, 0.0),  # and underflows
        (0.3, 0.7, 0.3 / 0.7),
        (np.nextafter(0.5, 0), 0.5, 1 - 2.0**-53),
        (7.0, 9.0, 7.0 / 9.0),  # as given, not normalised
    ],
    ids=str,
)
def test_acceptance_is_one_division(face, p, q, expected):
    assert face.acceptance_probability([p, 1.0], [q, 1.0], 0) == expected


def test_acceptance_touches_two_numbers_only(face):
    p, q = np.full(9, NAN), np.full(9, -1.0)
    p[4], q[4] = 0.25, 0.5
    assert face.acceptance_probability(p, q, 4) == 0.5
    p[0], q[0] = INF, -INF
    assert face.acceptance_probability(p, q, 4) == 0.5


@pytest.mark.parametrize("bad", [NAN, INF, -INF, -0.25, -5e-324])
def test_acceptance_refuses_what_is_no_probability(face, bad):
    for p, q in (([bad, 1.0], [0.5, 0.5]), ([0.5, 0.5], [bad, 1.0]), ([bad, 1.0], [bad, 1.0])):
        with pytest.raises(ValueError, match=str(bad)):
            face.acceptance_probability(p, q, 0)
    good = SparseDistribution([0], [1.0], 2)
    for p, q in (([bad, 1.0], good), (good, [bad, 1.0])):
        with pytest.raises(ValueError, match=str(bad)):
            face.acceptance_probability(p, q, 0)


@pytest.mark.parametrize("outside", [2, -1, -2, 2**31, 2**32, 2**40, 2**63, 2**64, -(2**70)])
def test_acceptance_of_an_id_outside_a_dense_row(face, outside):
    row, anything = [0.5, 0.5], SparseDistribution([0], [1.0], 2)
    for p, q in ((row, row), (row, anything), (anything, row)):
        with pytest.raises(IndexError, match=str(outside)):
            face.acceptance_probability(p, q, outside)
    # A sparse distribution has probability 0 there, and 0/0 is never accepted.
    assert face.acceptance_probability(anything, anything, outside) == 0.0


def test_acceptance_of_sparse_pairs_with_vocabularies_of_their_own(face):
    p, q = SparseDistribution([0, 3], [0.5, 0.5], 4), SparseDistribution([3, 7], [0.75, 0.25], 8)
    assert face.acceptance_probability(p, q, 7) == 0.0
    assert face.acceptance_probability(p, q, 3) == 0.5 / 0.75
    assert face.acceptance_probability(p, q, 0) == 1.0
    assert face.acceptance_probability(q, p, 7) == 1.0


@pytest.mark.parametrize("token", [np.int64(1), np.int32(1), np.uint8(1), True])
def test_acceptance_takes_integers_of_every_kind(face, token):
    assert face.acceptance_probability([0.5, 0.25], [0.5, 0.5], token) == 0.5


@pytest.mark.parametrize("token", [1.0, "1", None, [1]])
def test_acceptance_takes_integers_only(face, token):
    with pytest.raises(TypeError):
        face.acceptance_probability([0.5, 0.25], [0.5, 0.5], token)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, ">f4", ">f8", np.int32])
def test_acceptance_reads_any_real_dtype(face, dtype):
    p, q = np.array([1, 3, 2]).astype(dtype), np.array([2, 1, 1]).astype(dtype)
    assert face.acceptance_probability(p, q, 0) == 0.5
    assert face.acceptance_probability(p[::-1], q[::-1], 2) == 0.5


# ---- residual --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        ([0.625, 0.25, 0.125], [0.25, 0.5, 0.25], [1, 0, 0]),
        ([0.125, 0.5, 0.375], [0.75, 0.25, 0.0], [0, 0.25 / 0.625, 0.375 / 0.625]),
        ([0.5, 0.5], [0.5, 0.5], [0.5, 0.5]),  # no difference: the target
        ([0.0, 1.0], [0.0, 1.0], [0, 1]),
        ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 0, 0]),  # nothing shared
        ([0.25, 0.75], [0.75, 0.25], [0, 1]),
    ],
    ids=str,
)
def test_residual_by_hand(face, p, q, expected):
    for target, draft in kinds(p, q):
        got = face.residual_distribution(target, draft)
        assert_ulps(dense(got), expected, 1)


def test_residual_is_sparse_only_when_both_are(face):
    p, q = np.array([0.625, 0.25, 0.125]), np.array([0.25, 0.5, 0.25])
    assert isinstance(face.residual_distribution(sparse(p), sparse(q)), SparseDistribution)
    for target, draft in ((p, q), (sparse(p), q), (p, sparse(q))):
        got = face.residual_distribution(target, draft)
        assert type(got) is np.ndarray
        assert got.dtype == np.float64


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        ([5.0, 3.0], [1.0, 2.0], [0.8, 0.2]),  # as given: 4 and 1
        ([0.5, 0.5], [0.25, 0.25], [0.5, 0.5]),
        ([0.5 + 1e-12, 0.5 - 1e-12], [0.5, 0.5], [1, 0]),  # a small difference is a difference
        ([np.nextafter(0.5, 1), 0.5], [0.5, 0.5], [1, 0]),
        ([1e-323, 5e-324], [5e-324, 0.0], [0.5, 0.5]),
        ([1.7e308, 1.7e308, 0.0], [0.0, 0.0, 1.0], [0.5, 0.5, 0]),  # the sum overflows
        ([1.0, 1.0], [-1.0, 1.0], [1, 0]),
        ([-1.0, 0.5], [0.0, 0.25], [0, 1]),
        ([3.0, 1.0], [4.0, 2.0], [0.75, 0.25]),  # no positive difference: the target, normalised
        ([3.0, 0.0, 1.0], [INF, INF, INF], [0.75, 0, 0.25]),
        # entries whose difference is not finite count as 0
        ([NAN, 0.5, 0.5], [0.25, 0.25, 0.5], [0, 1, 0]),
        ([0.5, 0.5, 0.5], [NAN, 0.25, 0.5], [0, 1, 0]),
        ([INF, 0.5, 0.5], [0.25, 0.25, 0.5], [0, 1, 0]),
        ([INF, 0.5], [INF, 0.25], [0, 1]),
        ([0.5, 0.5, 0.0], [-INF, 0.25, 0.0], [0, 1, 0]),
        ([1.7e308, 0.5], [-1.7e308, 0.25], [0, 1]),
        # and so do the target's own, where it stands in
        ([NAN, 3.0, 1.0], [0.0, 4.0, 2.0], [0, 0.75, 0.25]),
        ([1.0, INF, 3.0, -2.0], [NAN, NAN, NAN, NAN], [0.25, 0, 0.75, 0]),
    ],
    ids=str,
)
def test_residual_of_rows_as_given(face, p, q, expected):
    got = face.residual_distribution(p, q)
    assert (got > 0).tolist() == [value > 0 for value in expected]
    assert_ulps(got, expected, 2)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.0, 0.0], [0.5, 0.5]),
        ([NAN, NAN], [0.5, 0.5]),
        ([INF, 0.0], [0.5, 0.5]),
        ([-1.0, 0.0], [0.5, 0.5]),
        ([0.0, 0.0], [0.0, 0.0]),
        ([NAN, -1.0, INF], [NAN, NAN, NAN]),
    ],
    ids=str,
)
def test_residual_without_any_mass_is_refused(face, p, q):
    with pytest.raises(ValueError, match="mass"):
        face.residual_distribution(p, q)


@pytest.mark.parametrize(("n", "m"), [(5, 3), (3, 5), (1, 4), (4, 1)])
def test_residual_never_broadcasts(face, n, m):
    p, q = np.full(n, 1.0 / n), np.full(m, 1.0 / m)
    one = SparseDistribution([0], [1.0], m)
    for target, draft in ((p, q), (p, one), (SparseDistribution([0], [1.0], n), q)):
        with pytest.raises(ValueError, match=f"{n}.*{m}"):
            face.residual_distribution(target, draft)


def test_residual_of_a_sparse_pair_without_difference_is_the_target_object(face):
    target = SparseDistribution([7, 2, 4], [0.5, 0.25, 0.25], 8)
    same = SparseDistribution([2, 4, 7], [0.25, 0.25, 0.5], 8)
    assert face.residual_distribution(target, same) is target
    assert face.residual_distribution(target, target) is target
    one = SparseDistribution.one_hot(3, 8)
    assert face.residual_distribution(one, SparseDistribution.one_hot(3, 5)) is one


def test_residual_of_dense_rows_without_difference_is_a_copy(face):
    p = np.array([0.5, 0.25, 0.25])
    got = face.residual_distribution(p, p)
    assert not np.shares_memory(got, p)
    assert got.tolist() == p.tolist()


def test_residual_of_sparse_pairs(face):
    p = SparseDistribution([9, 2, 5, 0], [0.5, 0.25, 0.25, 0.0], 10)
    q = SparseDistribution([5, 2, 3], [0.5, 0.125, 0.375], 10)
    got = face.residual_distribution(p, q)
    assert got.token_ids.tolist() == [2, 9]  # ascending; 5 has no difference left, 0 had none
    assert got.probs.tolist() == [0.2, 0.8]
    assert got.vocab_size == 10


def test_residual_of_sparse_pairs_with_vocabularies_of_their_own(face):
    p, q = SparseDistribution([0, 3], [0.5, 0.5], 4), SparseDistribution([3, 7], [0.5, 0.5], 8)
    got = face.residual_distribution(p, q)
    assert (got.token_ids.tolist(), got.vocab_size) == ([0], 4)
    got = face.residual_distribution(q, p)
    assert (got.token_ids.tolist(), got.vocab_size) == ([7], 8)
    got = face.residual_distribution(p, SparseDistribution([2**40], [1.0], 2**41))
    assert (got.token_ids.tolist(), got.probs.tolist()) == ([0, 3], [0.5, 0.5])


class Marked(SparseDistribution):
    """A user's subclass."""


def test_residual_of_subclasses(face):
    p, q = Marked([0, 3], [0.5, 0.5], 4), Marked([3, 1], [0.5, 0.5], 4)
    assert face.residual_distribution(p, q).token_ids.tolist() == [0]
    assert face.residual_distribution(p, p) is p


def pairs(n):
    """Target and draft rows of n entries that share none, some or all of their support."""
    for name, p in rows.probabilities(n).items():
        yield name, p, np.roll(p, 1)
        yield f"{name}, reversed", p, p[::-1].copy()
        yield f"{name}, scaled", p, np.minimum(p * 1.5, 1e300)
    rng = np.random.default_rng(n)
    p, q = rng.dirichlet(np.full(n, 0.2), 2) if n > 1 else np.ones((2, 1))
    p, q = np.where(rng.random(n) < 0.3, 0.0, p), np.where(rng.random(n) < 0.3, 0.0, q)
    p[n // 2], q[n - 1] = 0.5, 0.5
    yield "with zeros", p, q


@pytest.mark.parametrize("n", rows.LENGTHS)
def test_residual_of_worst_case_rows(face, n):
    for name, p, q in pairs(n):
        differences = [max(a - b, 0.0) for a, b in zip(p.tolist(), q.tolist(), strict=True)]
        weights = differences if any(differences) else p.tolist()
        total = math.fsum(weights)
        got = face.residual_distribution(p, q)
        assert (got > 0).tolist() == [w / total > 0 for w in weights], name
        # 4 units against the reference, whose pairwise sum is within 2 of the exact one here.
        assert_ulps(got, [w / total for w in weights], 6, name)


@pytest.mark.parametrize("n", [1, 2, 20, 33, 300])
def test_residual_of_sparse_pairs_is_that_of_their_dense_rows(face, n):
    rng = np.random.default_rng(n)
    for trial in range(20):
        V = 3 * n + 2
        p, q = (SparseDistribution(rng.permutation(V)[:n], rng.random(n) + 1e-3, V) for _ in range(2))
        if trial % 4 == 0:
            q = SparseDistribution(p.token_ids[::-1], rng.random(n) + 1e-3, V)
        got = face.residual_distribution(p, q)
        expected = face.residual_distribution(p.to_dense(), q.to_dense())
        assert np.array_equal(np.sort(got.token_ids), np.flatnonzero(expected))
        if got is not p:
            assert (np.diff(got.token_ids) > 0).all()
        assert_ulps(got.to_dense(), expected, 4)
        for mixed in (
            face.residual_distribution(p, q.to_dense()),
            face.residual_distribution(p.to_dense(), q),
        ):
            assert_ulps(mixed, expected, 4)


WEIGHTS = st.lists(
    st.tuples(st.floats(0, 1) | st.sampled_from([0.0, 0.25]), st.floats(0, 1) | st.sampled_from([0.0, 0.25])),
    min_size=1,
    max_size=50,
)


@given(WEIGHTS)
def test_residual_properties(face, pairs):
    p, q = [a for a, _ in pairs], [b for _, b in pairs]
    assume(any(p))
    got = face.residual_distribution(p, q)
    assert (got >= 0).all()
    assert abs(sum(map(Fraction, got.tolist())) - 1) < Fraction(1, 10**14)
    if any(a > b for a, b in pairs):
        assert all(value == 0 for value, (a, b) in zip(got, pairs, strict=True) if a <= b)
        assert all(a > b for value, (a, b) in zip(got, pairs, strict=True) if value > 0)


@given(WEIGHTS, st.randoms(use_true_random=False))
def test_residual_permutes_with_its_inputs(face, pairs, random):
    p, q = (np.array(column) for column in zip(*pairs, strict=True))
    assume(p.any())
    order = list(range(len(pairs)))
    random.shuffle(order)
    # Only the order of the sum differs.
    assert_ulps(face.residual_distribution(p[order], q[order]), face.residual_distribution(p, q)[order], 6)


@given(WEIGHTS)
def test_acceptance_is_a_probability_and_follows_the_ratio(face, pairs):
    p, q = [a for a, _ in pairs], [b for _, b in pairs]
    for token, (a, b) in enumerate(pairs):
        got = face.acceptance_probability(p, q, token)
        assert 0.0 <= got <= 1.0
        assert got == ((1.0 if a > 0 else 0.0) if b == 0 else min(1.0, a / b if a / b < INF else 1.0))
        assert face.acceptance_probability(p, p, token) == (1.0 if a > 0 else 0.0)


@pytest.mark.parametrize("n", [2, 25, 700])
def test_the_order_of_a_support_changes_nothing(face, n):
    rng = np.random.default_rng(n)
    kept = set()
    for seed in range(40):
        ids, other = rng.permutation(2 * n)[:n], rng.permutation(2 * n)[:n]
        weights, others = rng.random(n), rng.random(n)
        token = int(rng.choice(other))
        found = []
        for order in (np.argsort, lambda ids: np.arange(n)):
            p = SparseDistribution(ids[order(ids)], weights[order(ids)], 2 * n)
            q = SparseDistribution(other[order(other)], others[order(other)], 2 * n)
            generator = np.random.default_rng(seed)
            decision = face.verify_one_token(p, q, token, generator)
            found.append((decision.accepted, decision.token_id, generator.random()))
        assert found[0] == found[1]
        kept.add(found[0][0])
    assert kept == {True, False}
