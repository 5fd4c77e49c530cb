"""Chain rules by hand: tiny tables with the numbers beside them, and the helper functions."""

import inspect
import math

import numpy as np
import pytest
from support.blocks import RULES, as_sparse, every_face, fields_of, random_block
from support.generators import LAST, STEP, scripted

from mtplx import reference, sampling, verification
from mtplx.decisions import BlockDecision, Cascade, Typical
from mtplx.distributions import SparseDistribution
from mtplx.reference import rules

# ---- tables ------------------------------------------------------------------------------------------


def kept(face, rule, target, draft, tokens, *uniforms):
    decision = face.verify_block(target, draft, tokens, scripted(*uniforms), rule=rule)
    return decision.accepted, decision.tokens.tolist(), decision.accept_probabilities.tolist()


@every_face
def test_exact_by_hand(face):
    """a_0 = min(1, .25/.5) = 1/2, a_1 = min(1, .75/.5) = 1; residual at 0: (0, .25), at 1: (.25, 0)."""
    target, draft = [[0.25, 0.75], [0.75, 0.25], [0.25, 0.75]], [[0.5, 0.5], [0.5, 0.5]]
    assert kept(face, "exact", target, draft, [0, 0], 0.5, LAST, 0.25) == (2, [0, 0, 1], [0.5, 1.0])
    assert kept(face, "exact", target, draft, [0, 0], 0.5, LAST, 0.25 - STEP) == (2, [0, 0, 0], [0.5, 1.0])
    assert kept(face, "exact", target, draft, [0, 0], 0.5 + STEP, 0.0) == (0, [1], [0.5])
    # a_1 of token 1 is .25/.5
    assert kept(face, "exact", target, draft, [0, 1], 0.0, 0.75, 0.0) == (1, [0, 0], [0.5, 0.5])


@every_face
def test_point_masses_by_hand(face):
    """Acceptance p(x), residual p without x: (.25, 0, .5), of which .25/.75 lies below token 2."""
    target = [[0.25, 0.25, 0.5], [0.0, 1.0, 0.0]]
    for p in (target, [as_sparse(np.array(row)) for row in target]):
        assert kept(face, "exact", p, None, [1], 0.25, 0.5) == (1, [1, 1], [0.25])
        assert kept(face, "exact", p, None, [1], 0.25 + STEP, 0.25) == (0, [0], [0.25])
        assert kept(face, "exact", p, None, [1], 0.25 + STEP, 0.375) == (0, [2], [0.25])


@every_face
def test_greedy_by_hand(face):
    """Ties go to the lowest id, in sparse rows too, whatever the order they are stored in."""
    target = [[0.25, 0.375, 0.375], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]]
    unordered = [SparseDistribution([2, 1, 0], row[::-1], 3) for row in target]
    for p in (target, unordered):
        assert kept(face, "greedy", p, None, [1, 1]) == (2, [1, 1, 0], [1.0, 1.0])
        assert kept(face, "greedy", p, None, [1, 2]) == (1, [1, 1], [1.0, 0.0])
        assert kept(face, "greedy", p, None, [2, 1]) == (0, [1], [0.0])


@every_face
def test_match_by_hand(face):
    """The uniform of a position draws its token: below 1/4 token 0."""
    target = [[0.25, 0.75], [0.25, 0.75], [0.25, 0.75]]
    assert kept(face, "match", target, None, [0, 1], 0.0, 0.25, 0.0) == (2, [0, 1, 0], [0.25, 0.75])
    assert kept(face, "match", target, None, [0, 1], 0.0, 0.25 - STEP) == (1, [0, 0], [0.25, 0.75])
    assert kept(face, "match", target, None, [0, 1], 0.25) == (0, [1], [0.25])


@every_face
def test_block_by_hand(face):
    """P = (1/2, 1/4). R_1 = (.25 - 0) + 0 = 1/4, h_1 = (1/4)/(1/4 + 1/2) = 1/3, h_2 = P_2 = 1/4.

    After 1 draft the correction is (.25, 0)+, after none (.5 - 1, .5)+.
    """
    target, draft = [[0.5, 0.5], [0.5, 0.5], [0.25, 0.75]], [[1.0, 0.0], [0.0, 1.0]]
    third = math.floor(2.0**53 / 3) * STEP
    P = [0.5, 0.25]
    assert kept(face, "block", target, draft, [0, 1], LAST, 0.25, 0.25) == (2, [0, 1, 1], P)
    assert kept(face, "block", target, draft, [0, 1], third, 0.25 + STEP, LAST) == (1, [0, 0], P)
    assert kept(face, "block", target, draft, [0, 1], third + STEP, 0.25 + STEP, 0.0) == (0, [1], P)


@every_face
def test_block_of_three_by_hand(face):
    """P = (1, 1/2, 3/4): the ratio 3/2 is capped at 1, and recovers from 1/2 to 3/4.

    h_1 = R_1/R_1 = 1 (P_1 = 1). R_2 = (.375 - .5)+ + (.125 - .5)+ = 0, so h_2 = 0: two are never kept.
    """
    target = [[0.75, 0.25]] * 4
    draft = [[0.5, 0.5]] * 3
    P = [1.0, 0.5, 0.75]
    assert kept(face, "block", target, draft, [0, 1, 0], LAST, LAST, 0.75, 0.0) == (3, [0, 1, 0, 0], P)
    for second in (0.0, 0.5, LAST):
        # (1 * .75 - .5, .25 - .5)+ leaves token 0.
        assert kept(face, "block", target, draft, [0, 1, 0], LAST, second, 0.75 + STEP, 0.5) == (1, [0, 0], P)


@every_face
def test_block_keeps_equal_rows(face):
    """p = q: P_i = 1 and R_i = 0, so h_i = 0/0 = 1; the draw behind a prefix would be from p itself."""
    rows = [[0.5, 0.25, 0.25]] * 4
    assert kept(face, "block", rows, rows[:3], [2, 0, 1], LAST, LAST, LAST, 0.5) == (
        3,
        [2, 0, 1, 1],
        [1.0] * 3,
    )
    # An impossible third draft: the prefix of 2 has h_2 = R_2/R_2 where R_2 comes from token 0.
    draft = [*rows[:2], [0.0, 0.5, 0.5]]
    target = [*rows[:2], [1.0, 0.0, 0.0], rows[0]]
    decision = kept(face, "block", target, draft, [2, 0, 1], LAST, LAST, 0.0, LAST)
    assert decision == (2, [2, 0, 0], [1.0, 1.0, 0.0])


@every_face
def test_block_draws_from_the_target_where_nothing_is_left(face):
    """Row 1 has p = q, but the draft itself is impossible in both: D_1 = 0, h_1 = 0/0 = 1, drawn from p."""
    target, draft = [[0.5, 0.5], [0.0, 1.0], [0.5, 0.5]], [[0.5, 0.5], [0.0, 1.0]]
    assert kept(face, "block", target, draft, [0, 0], LAST, 0.0, LAST) == (1, [0, 1], [1.0, 0.0])


@every_face
def test_block_accepts_what_the_draft_cannot_draw_unless_the_prefix_was_impossible(face):
    target, draft = [[0.5, 0.5], [0.5, 0.5], [1.0, 0.0]], [[0.5, 0.5], [0.0, 1.0]]
    assert kept(face, "block", target, draft, [0, 0], 0.0, LAST, 0.0) == (2, [0, 0, 0], [1.0, 1.0])
    target = [[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]]
    assert kept(face, "block", target, draft, [0, 0], 0.0, 0.0, 0.0) == (0, [1], [0.0, 0.0])


@every_face
def test_block_accepts_more_than_exact(face):
    """P = (1/2, 1): a good second draft makes up for a bad first one. Exact rejects at the first coin."""
    target, draft = [[0.25, 0.75], [1.0, 0.0], [1.0, 0.0]], [[0.5, 0.5], [0.5, 0.5]]
    assert kept(face, "block", target, draft, [0, 0], 0.75, LAST, 0.0) == (2, [0, 0, 0], [0.5, 1.0])
    assert kept(face, "exact", target, draft, [0, 0], 0.75, LAST) == (0, [1], [0.5])


@every_face
def test_typical_by_hand(face):
    """Row 0: H = ln 2, .09/2 = .045. Row 1: H = .168, .09 exp(-H) = .0761 > .04: drawn anew from p."""
    target = [[0.5, 0.5], [0.96, 0.04], [0.5, 0.5]]
    for rule in ("typical", Typical(), Typical(0.3, 0.09)):
        assert kept(face, rule, target, None, [0, 0], 0.5) == (2, [0, 0, 1], [1.0, 1.0])
        assert kept(face, rule, target, None, [0, 1], 0.0) == (1, [0, 0], [1.0, 0.0])
        # From p, not from p without the draft: the draft can come again.
        assert kept(face, rule, target, None, [0, 1], LAST) == (1, [0, 1], [1.0, 0.0])
    assert kept(face, Typical(0.03), target, None, [0, 1], 0.5) == (2, [0, 1, 1], [1.0, 1.0])
    assert kept(face, Typical(0.5, 2.0), target, None, [0, 1], 0.5) == (0, [1], [0.0])  # .5 > .5 is false


@every_face
def test_cascade_by_hand(face):
    """p = (.5, .25, .25), q = (.25, .25, .5).

    tokenv1, alpha 1/8: q < .375 defers 0 and 1, sum r q = .5, pi = (.25, .125, .5 + .125).
    tokenv2, alpha 1/8: p < .375 defers 1 and 2, sum r q = .75, pi = (.25 + .375, .1875, .1875).
    tokenv3, alpha 1/2: p < .25 defers nothing, pi = q; alpha 1/4: p < .375 as tokenv2 above.
    """
    target, draft = [[0.5, 0.25, 0.25], [0.0, 0.0, 1.0]], [[0.25, 0.25, 0.5]]
    first, second = Cascade(0.125, "tokenv1"), Cascade(0.125, "tokenv2")
    assert kept(face, first, target, draft, [2], LAST) == (1, [2, 2], [1.0])  # one number: the bonus
    assert kept(face, first, target, draft, [0], LAST, 0.0) == (
        1,
        [0, 2],
        [1.0],
    )  # pi/q = 1, a coin all the same
    assert kept(face, first, target, draft, [1], 0.5, 0.0) == (1, [1, 2], [0.5])
    # (pi - q)+ = (0, 0, .125)
    assert kept(face, first, target, draft, [1], 0.5 + STEP, 0.0) == (0, [2], [0.5])
    assert kept(face, second, target, draft, [0], 0.0) == (1, [0, 2], [1.0])
    assert kept(face, second, target, draft, [1], 0.75, 0.0) == (1, [1, 2], [0.75])
    # (pi - q)+ = (.375, 0, 0)
    assert kept(face, second, target, draft, [2], 0.375 + STEP, LAST) == (0, [0], [0.375])
    assert kept(face, Cascade(0.5), target, draft, [1], LAST) == (1, [1, 2], [1.0])
    assert kept(face, Cascade(0.25), target, draft, [2], 0.375 + STEP, LAST) == (0, [0], [0.375])


@every_face
def test_cascade_of_sparse_rows_over_both_supports(face):
    """p = {3: 1}, q = {1: 1/4, 3: 3/4}, alpha 1/2, tokenv3: 1 is deferred (p = 0), pi(1) = 0, pi(3) = 1."""
    target = [SparseDistribution([3], [1.0], 8), SparseDistribution([7], [1.0], 8)]
    draft = [SparseDistribution([3, 1], [0.75, 0.25], 8)]
    assert kept(face, Cascade(0.5), target, draft, [1], 0.0, 0.5) == (0, [3], [0.0])
    assert kept(face, Cascade(0.5), target, draft, [3], 0.5) == (1, [3, 7], [1.0])
    # alpha 1: nothing is deferred, what the target cannot say is kept.
    assert kept(face, Cascade(1.0), target, draft, [1], 0.5) == (1, [1, 7], [1.0])


@every_face
def test_cascade_without_draft_mass_goes_by_the_target(face):
    """q = 0 everywhere: sum r q = 0, pi has no mass; the correction comes from p."""
    target, draft = [[0.25, 0.75], [1.0, 0.0]], [[0.0, 0.0]]
    assert kept(face, Cascade(0.0), target, draft, [0], 0.0, 0.25) == (0, [1], [0.0])


def test_probabilities_of_the_block_rule():
    """The pieces that coins are compared with, where the way to them has an edge."""
    keep, prefix = rules.block_keep_probability, rules.prefix_acceptance
    assert prefix(0.5, 0.75, 0.5) == 0.75
    assert prefix(0.5, 0.5, 0.0) == 1.0  # p/0 is infinite
    assert prefix(0.0, 0.5, 0.0) == prefix(0.5, 0.0, 0.0) == prefix(0.5, 0.0, 0.5) == 0.0
    assert prefix(1e-200, 1e-200, 1e-200) == 1e-200  # the ratio first: P p alone would be 0
    assert keep([0.5, 0.5], [0.0, 1.0], 0.5) == 0.25 / 0.75
    assert keep([0.5, 0.5], [0.5, 0.5], 1.0) == 1.0  # 0/0
    assert keep([0.5, 0.5], [0.5, 0.5], 0.5) == 0.0
    assert keep([1e-18, 0.0], [0.0, 0.0], 1.0) == 1.0  # 1 + R would be 1, and R/(1 + R - 1) R/0
    # Never above the prefix: rows that do not sum to 1, sums without end, products that round up.
    assert keep([50.0, 50.0], [0.5, 0.5], 0.25) == 0.25
    assert keep([1e308, 1e308], [0.0, 0.0], 0.75) == 0.75
    for seed in range(200):
        p = np.random.default_rng([12, seed]).dirichlet([1.0] * 7)
        for P in (0.1, 0.3, 0.7):
            assert keep(np.append(p, 0.0), np.append(0.0 * p, 1.0), P) <= P


# ---- helpers -----------------------------------------------------------------------------------------


@every_face
def test_typical_helpers(face):
    p = [0.5, 0.25, 0.25]
    entropy = 1.5 * math.log(2.0)
    accepted, threshold, found = face.typical_accept_decision(p, 1, eps=0.3, delta=0.09)
    assert accepted is True
    assert threshold == pytest.approx(0.09 * 2.0**-1.5, rel=1e-14)
    assert found == pytest.approx(entropy, abs=1e-12)
    assert isinstance(found, float)
    assert isinstance(threshold, float)
    # A given entropy is used as it is.
    assert face.typical_accept_decision(p, 1, eps=0.3, delta=0.5, entropy_value=0.0) == (False, 0.3, 0.0)
    assert face.typical_accept_decision(p, 0, eps=0.3, delta=0.5, entropy_value=0.0)[0] is True
    assert face.typical_accept_decision(p, 1, eps=0.25, delta=1.0, entropy_value=0.0)[0] is False  # not >
    assert face.typical_acceptance_threshold(0.0, 0.3, 0.09) == 0.09
    assert face.typical_acceptance_threshold(math.inf, 0.3, 0.09) == 0.0
    sparse = SparseDistribution([2, 0, 1], [0.25, 0.5, 0.25], 9)
    assert face.typical_accept_decision(sparse, 1, eps=0.3, delta=0.09)[0] is True
    assert face.typical_accept_decision(sparse, 5, eps=0.3, delta=0.09)[0] is False
    for bad in ({"eps": -0.1, "delta": 0.1}, {"eps": 0.1, "delta": math.nan}):
        with pytest.raises(ValueError, match=r"eps|delta"):
            face.typical_accept_decision(p, 1, **bad)
    for bad in (math.nan, -1e9, -math.inf, -5e-324):
        with pytest.raises(ValueError, match=f"entropy_value .*{bad}"):
            face.typical_acceptance_threshold(bad, 0.3, 0.09)
        with pytest.raises(ValueError, match=f"entropy_value .*{bad}"):
            face.typical_accept_decision(p, 1, eps=0.3, delta=0.09, entropy_value=bad)
    # Where the entropy is 0, its error reaches below.
    assert face.typical_accept_decision([1.0, 0.0], 0, eps=1.0, delta=1.0) == (False, 1.0, 0.0)
    with pytest.raises(IndexError):
        face.typical_accept_decision(p, 3, eps=0.3, delta=0.09)
    with pytest.raises(ValueError, match=r"target_p|distribution"):
        face.typical_accept_decision([0.5, math.nan, 0.5], 0, eps=0.3, delta=0.09)


@every_face
def test_cascade_row_deferral(face):
    """max q < max p - alpha TV: TV = 1/4, so .5 < .75 - alpha/4 iff alpha < 1."""
    p, q = [0.75, 0.25], [0.5, 0.5]
    assert face.cascade_defer_decision(p, q, alpha=0.99) == (True, 0.25)
    assert face.cascade_defer_decision(p, q, alpha=1.0) == (False, 0.25)
    assert face.cascade_defer_decision(p, q, alpha=1.0, tv_value=0.125) == (True, 0.125)
    sparse = [as_sparse(np.array(row)) for row in (p, q)]
    assert face.cascade_defer_decision(*sparse, alpha=0.99) == (True, 0.25)
    defer, tv = face.cascade_defer_decision(p, q, alpha=0.5)
    assert isinstance(defer, bool)
    assert isinstance(tv, float)
    for bad in ({"alpha": math.nan}, {"alpha": 0.1, "tv_value": math.nan}):
        with pytest.raises(ValueError, match="nan"):
            face.cascade_defer_decision(p, q, **bad)


@every_face
def test_cascade_row_deferral_of_rows_whose_sum_overflows(face):
    flat = SparseDistribution(range(17), np.ones(17), 17)
    assert face.cascade_defer_decision([5e307] * 17, flat, alpha=0.1) == (False, np.inf)


@every_face
def test_cascade_token_deferral(face):
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    deferred = {
        ("tokenv1", 0.125): [True, True, False],
        ("tokenv1", 0.25): [False, False, False],  # .25 < .25 is false
        ("tokenv2", 0.125): [False, True, True],
        ("tokenv2", 0.25): [False, False, False],
        ("tokenv3", 0.25): [False, True, True],
        ("tokenv3", 0.5): [False, False, False],
        ("tokenv3", -1.0): [True, True, True],
    }
    for (rule, alpha), expected in deferred.items():
        for one, other in ((p, q), (as_sparse(np.array(p)), as_sparse(np.array(q)))):
            found = [face.cascade_token_deferral(one, other, x, alpha=alpha, rule=rule) for x in range(3)]
            assert found == expected, (rule, alpha)
            assert all(isinstance(value, bool) for value in found)
    with pytest.raises(ValueError, match="tokenv4"):
        face.cascade_token_deferral(p, q, 0, alpha=0.1, rule="tokenv4")
    with pytest.raises(IndexError):
        face.cascade_token_deferral(p, q, 3, alpha=0.1, rule="tokenv1")


@every_face
def test_cascade_target(face):
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    target = face.cascade_token_target_distribution
    np.testing.assert_array_equal(target(p, q, alpha=0.125, rule="tokenv1"), [0.25, 0.125, 0.625])
    np.testing.assert_array_equal(target(p, q, alpha=0.125, rule="tokenv2"), [0.625, 0.1875, 0.1875])
    np.testing.assert_array_equal(target(p, q, alpha=0.5, rule="tokenv3"), q)
    np.testing.assert_array_equal(target(p, q, alpha=-1.0, rule="tokenv3"), p)
    one, other = SparseDistribution([3], [1.0], 8), SparseDistribution([3, 1], [0.75, 0.25], 8)
    assert target(one, other, alpha=0.5, rule="tokenv3") == SparseDistribution([3], [1.0], 8)
    assert target(one, other, alpha=1.0, rule="tokenv3") == SparseDistribution([1, 3], [0.25, 0.75], 8)
    # Of two vocabularies the larger: the cascade emits what either can say.
    small = SparseDistribution([1, 3], [0.5, 0.5], 4)
    assert target(small, SparseDistribution([6], [1.0], 8), alpha=1.0, rule="tokenv3").vocab_size == 8
    assert target(SparseDistribution([6], [1.0], 8), small, alpha=1.0, rule="tokenv3").vocab_size == 8
    np.testing.assert_array_equal(
        target(one.to_dense(), other, alpha=1.0, rule="tokenv3"), [0, 0.25, 0, 0.75, 0, 0, 0, 0]
    )


@every_face
def test_cascade_target_of_a_draft_without_mass_is_the_target(face):
    p = np.array([1.0, 3.0])
    result = face.cascade_token_target_distribution(p, [0.0, 0.0], alpha=0.1, rule="tokenv3")
    np.testing.assert_array_equal(result, [0.25, 0.75])
    assert result is not p
    for bad in ([-0.5, 1.5], [math.nan, 1.0], [math.inf, 0.0]):
        with pytest.raises(ValueError, match="draft_q"):
            face.cascade_token_target_distribution(p, bad, alpha=0.1, rule="tokenv3")
    with pytest.raises(ValueError, match="target_p"):
        face.cascade_token_target_distribution([0.0, 0.0], [0.5, 0.5], alpha=0.1, rule="tokenv3")
    with pytest.raises(ValueError, match="2 entries"):
        face.cascade_token_target_distribution(p, [0.5, 0.25, 0.25], alpha=0.1, rule="tokenv3")


HELPERS = (
    "typical_acceptance_threshold",
    "typical_accept_decision",
    "cascade_defer_decision",
    "cascade_token_deferral",
    "cascade_token_target_distribution",
)


def answer(function, *args, **options):
    try:
        return function(*args, **options)
    except (ValueError, IndexError, TypeError) as error:
        return type(error), str(error)


def test_the_helpers_of_both_faces_are_one_contract():
    for name in HELPERS:
        assert getattr(verification, name) is getattr(sampling, name)
        assert name in sampling.__all__
        assert name in reference.__all__
        one, other = getattr(reference, name), getattr(sampling, name)
        assert inspect.signature(one).parameters.keys() == inspect.signature(other).parameters.keys()
        # The core's begins with the signature.
        assert inspect.getdoc(other).endswith(inspect.getdoc(one))


def test_the_helpers_decide_and_refuse_alike(isa):
    """Random rows of every form, some of them bad: the same decisions, the same error with the same text."""
    refused = 0
    for seed in range(1500):
        rng = np.random.default_rng([13, seed])
        target, draft, _ = random_block(rng, K=1, V=int(rng.integers(1, 40)))
        rows = [target[0], draft[0]]
        if seed % 5 == 0:
            rows[seed % 2][rng.integers(rows[0].size)] = rng.choice([np.nan, -0.5, np.inf])
        if seed % 31 == 0:
            rows[seed % 2][:] = 0.0
        if seed % 17 == 0:
            rows[1] = rows[1][:-1]
        if seed % 3 == 0:
            forms = [as_sparse(row, rng) if (row > 0.0).any() and (row >= 0.0).all() else row for row in rows]
            rows = [forms[0], rows[1]] if seed % 4 == 0 else forms
        p, q = rows
        token = int(rng.integers(-1, 40)) if seed % 7 == 0 else int(rng.integers(0, target.shape[1]))
        alpha = float(rng.choice([-1.0, 0.0, 0.1, 0.25, 0.5, 1.0, np.nan]))
        deferral = ("tokenv1", "tokenv2", "tokenv3", "tokenv4")[int(rng.integers(16)) % 4]
        eps, delta = float(rng.choice([0.0, 0.3, 1.0, -0.1])), float(rng.choice([0.09, 0.5, 2.0, np.nan]))
        for name, args, options in (
            ("typical_accept_decision", (p, token), {"eps": eps, "delta": delta}),
            ("typical_acceptance_threshold", (float(rng.choice([0.0, 1.0, -1.0, np.nan])), eps, delta), {}),
            ("cascade_defer_decision", (p, q), {"alpha": alpha}),
            ("cascade_defer_decision", (p, q), {"alpha": alpha, "tv_value": 0.25}),
            ("cascade_token_deferral", (p, q, token), {"alpha": alpha, "rule": deferral}),
            ("cascade_token_target_distribution", (p, q), {"alpha": alpha, "rule": deferral}),
        ):
            expected = answer(getattr(reference, name), *args, **options)
            told = answer(getattr(sampling, name), *args, **options)
            if isinstance(expected, SparseDistribution):
                assert told.token_ids.tolist() == expected.token_ids.tolist()
                assert told.vocab_size == expected.vocab_size
                expected, told = expected.probs, told.probs
            if isinstance(expected, np.ndarray):
                np.testing.assert_allclose(told, expected, rtol=4 * 2.0**-52, atol=0.0)
            elif isinstance(expected, tuple) and isinstance(expected[0], bool):
                assert told[0] == expected[0]
                assert type(told[0]) is bool
                np.testing.assert_allclose(told[1:], expected[1:], rtol=1e-12, atol=1e-12)
            else:
                if name == "cascade_defer_decision" and "entries" in str(expected):
                    expected, told = expected[0], told[0]  # as in total_variation
                assert told == expected, (seed, name, args, options)
                refused += isinstance(expected, tuple)
    assert refused > 500


@every_face
@pytest.mark.parametrize("rule", [rule for rule in RULES if isinstance(rule, Cascade)], ids=str)
def test_cascade_emits_its_target_in_one_step(face, rule):
    """Sum over drafts x of q(x) times what becomes of x, the coin taken out: pi, to 1e-15."""
    for seed in range(40):
        rng = np.random.default_rng([8, seed])
        p, q = rng.dirichlet([0.5] * 4, 2)
        law = np.zeros(4)
        for x in range(4):
            u = 1.0 - STEP
            decision = face.verify_block([p], [q], [x], scripted(u, 0.0), rule=rule)
            keep = decision.accept_probabilities[0]
            law[x] += q[x] * keep
            if decision.accepted:
                continue
            # The weights of the correction, read off the steps of its uniform, are normalised by hand here.
            pi = face.cascade_token_target_distribution(p, q, alpha=rule.alpha, rule=rule.rule)
            left = np.maximum(pi - q, 0.0)
            law += q[x] * (1.0 - keep) * left / left.sum()
        np.testing.assert_allclose(
            law, face.cascade_token_target_distribution(p, q, alpha=rule.alpha, rule=rule.rule), atol=1e-12
        )


# ---- between the rules -------------------------------------------------------------------------------


@every_face
def test_block_of_one_is_exact(face):
    """With K = 1 both keep with min(1, p/q) and correct from (p - q)+; only the coin's place is the same."""
    for seed in range(200):
        rng = np.random.default_rng([9, seed])
        target, draft = rng.dirichlet([0.5] * 3, 2), rng.dirichlet([0.5] * 3, 1)
        token = int(rng.choice(3, p=draft[0]))
        one, other = (
            face.verify_block(target, draft, [token], np.random.default_rng(seed), rule=rule)
            for rule in ("exact", "block")
        )
        assert one == other


@every_face
def test_cascade_that_defers_everything_is_exact(face):
    """alpha < 0 under tokenv3 defers every token: pi = p sum q."""
    for seed in range(200):
        rng = np.random.default_rng([10, seed])
        K = int(rng.integers(1, 4))
        target, draft = rng.multinomial(64, [0.25] * 4, K + 1) / 64, rng.multinomial(64, [0.25] * 4, K) / 64
        tokens = [int(rng.choice(4, p=row)) for row in draft]
        one, other = (
            face.verify_block(target, draft, tokens, np.random.default_rng(seed), rule=rule)
            for rule in ("exact", Cascade(-1.0))
        )
        assert one == other  # the sums of dyadic rows are exact, so the bits agree too


@every_face
def test_greedy_rows_under_every_lossless_rule(face):
    """One-hot rows: all rules keep the same drafts and emit the same tokens, whatever the coins."""
    for seed in range(100):
        rng = np.random.default_rng([11, seed])
        best = rng.integers(0, 3, 4)
        tokens = np.where(rng.random(3) < 0.7, best[:3], rng.integers(0, 3, 3))
        target = np.eye(3)[best]
        expected = face.verify_block(target, None, tokens, rule="greedy")
        for rule in ("exact", "match", "block"):
            for draft in (None, np.eye(3)[tokens]):
                decision = face.verify_block(target, draft, tokens, np.random.default_rng(seed), rule=rule)
                assert fields_of(decision)[:2] == fields_of(expected)[:2]
                assert decision.bonus == expected.bonus


@every_face
def test_a_whole_block_by_name_and_by_object(face):
    target, draft = [[0.5, 0.5], [0.96, 0.04]], [[0.5, 0.5]]
    assert face.verify_block(target, draft, [1], scripted(0.5), rule="typical") == BlockDecision(
        [1, 0], 1, [1.0], True
    )
    assert face.verify_block(target, draft, [1], scripted(0.5), rule=Typical()) == face.verify_block(
        target, draft, [1], scripted(0.5), rule="typical"
    )


@pytest.mark.parametrize("blocks", [reference, verification])
@pytest.mark.parametrize("token", [3, -1, 2**61, 2**70])
def test_a_cascade_keeps_no_id_outside_of_the_vocabulary(blocks, token):
    # Not deferred, since q(x) = 0 is not below max p - 1: kept without a look at p, were it an id.
    row = SparseDistribution([0, 1, 2], [0.25, 0.25, 0.5], 3)
    with pytest.raises(IndexError, match=f"token id {token} is outside"):
        blocks.verify_block([row] * 2, [row], [token], np.random.default_rng(0), rule=Cascade(1.0, "tokenv1"))


@pytest.mark.parametrize("rule", ["exact", "block", Cascade(0.3), Cascade(0.05, "tokenv1")], ids=str)
@pytest.mark.parametrize("n", [50, 700, 3000])
def test_supports_in_any_order_beside_whole_rows(rule, n):
    """A row and a support of descending or shuffled ids are a pair like any other, on either side."""
    rng = np.random.default_rng(n)
    kept = min(n, 600)
    for order in ("descending", "shuffled"):
        for seed in range(10):
            ids = np.sort(rng.permutation(n)[:kept])[::-1]
            ids = rng.permutation(ids) if order == "shuffled" else ids
            support = SparseDistribution(ids, rng.dirichlet(np.ones(kept)), n)
            row = rng.dirichlet(np.ones(n))
            token = int(ids[seed])
            for target, draft in (([support, row], [row]), ([row, support], [support])):
                found, expected = (
                    face.verify_block(target, draft, [token], np.random.default_rng(seed), rule=rule)
                    for face in (verification, reference)
                )
                assert found == expected
