"""sample_from_distribution and verify_one_token: streams, draws, decisions (contract 4)."""

import math
import threading
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import exact, rows
from support.generators import (
    BIT_GENERATORS,
    LAST,
    STEP,
    Falsy,
    Recorder,
    Stub,
    around,
    plain_state,
    scripted,
)
from support.statistics import law_refuted

from mtplx.distributions import SparseDistribution, SpeculativeDecision

NAN, INF = math.nan, math.inf


def generator(name, seed):
    return np.random.Generator(BIT_GENERATORS[name](seed))


def test_the_scripted_generator_returns_its_script():
    script = (0.0, 0.5, LAST, 12345 * STEP)
    rng = scripted(*script)
    assert type(rng) is np.random.Generator
    assert tuple(rng.random() for _ in script) == script


# ---- one categorical draw --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "u", "expected"),
    [
        ([0.25, 0.5, 0.25], 0.0, 0),
        ([0.25, 0.5, 0.25], 0.25 - STEP, 0),
        ([0.25, 0.5, 0.25], 0.25, 1),  # the sum has to exceed u
        ([0.25, 0.5, 0.25], 0.75 - STEP, 1),
        ([0.25, 0.5, 0.25], 0.75, 2),
        ([0.25, 0.5, 0.25], LAST, 2),
        ([0.0, 0.5, 0.5], 0.0, 1),  # never an entry of probability 0
        ([0.5, 0.0, 0.5], 0.5, 2),
        ([0.5, 0.5, 0.0], LAST, 1),
        ([0.0, 0.0, 5e-324], 0.0, 2),
        ([0.7, 0.2, 0.1, 0.0], LAST, 2),  # sums to 0.9999999999999999 one by one
        ([1.0], LAST, 0),
        ([2.0, 3.0, 5.0], 0.2 - STEP, 0),  # as given, divided by the last sum
        ([2.0, 3.0, 5.0], 0.5, 2),
        ([1.7e308, 1.7e308], 0.5 - STEP, 0),  # a sum beyond float64
        ([1.7e308, 1.7e308], 0.5, 1),
        ([5e-324, 5e-324], 0.5 - STEP, 0),
        ([5e-324, 5e-324], 0.5, 1),
        ([5e-324, 1e308], 0.0, 1),  # 5e-324/1e308 is 0, which does not exceed 0
        ([-0.0, 1.0], 0.0, 1),
    ],
    ids=str,
)
def test_draw_by_hand(face, weights, u, expected):
    got = face.sample_from_distribution(weights, scripted(u))
    assert got == expected
    assert type(got) is int


def test_sparse_draws_run_in_storage_order(face):
    d = SparseDistribution([7, 30, 11], [0.25, 0.25, 0.5], 40)
    for u, expected in ((0.0, 7), (0.25, 30), (0.5, 11), (LAST, 11)):
        got = face.sample_from_distribution(d, scripted(u))
        assert got == expected
        assert type(got) is int
    edge = SparseDistribution([7, 11, 30, 2], [0.0, 0.75, 0.25, 0.0], 40)
    assert face.sample_from_distribution(edge, scripted(0.0)) == 11
    assert face.sample_from_distribution(edge, scripted(LAST)) == 30
    far = SparseDistribution([2**40], [1.0], 2**41)
    assert face.sample_from_distribution(far, scripted(0.5)) == 2**40


@pytest.mark.parametrize("n", rows.LENGTHS)
def test_draws_at_every_kind_of_step(face, n):
    for name, p in rows.probabilities(n).items():
        sums = np.cumsum(p)
        spots = {0, n // 3, n // 2, n - 1}
        steps = [u for i in spots for u in around(min(sums[i] / sums[-1], 1.0))]
        for u in [0.0, LAST, 0.5, *steps]:
            assert face.sample_from_distribution(p, scripted(u)) == exact.draw(p, u), (name, u)


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_a_draw_is_one_random_of_the_stream(face, name):
    rng, twin = generator(name, 3), generator(name, 3)
    for n in (1, 2, 40, 1000, 5000):
        p = np.random.default_rng(n).dirichlet(np.ones(n))
        d = SparseDistribution(np.arange(n)[::-1], p, n)
        for _ in range(5):
            assert face.sample_from_distribution(p, rng) == exact.draw(p, twin.random())
            assert face.sample_from_distribution(d, rng) == n - 1 - exact.draw(d.probs, twin.random())
            assert plain_state(rng) == plain_state(twin)


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_half_used_words_of_other_calls_stay(face, name):
    """`integers` leaves half a word behind in the bit generator; `random` must not touch it."""
    rng, twin = generator(name, 5), generator(name, 5)
    for each in (rng, twin):
        each.integers(0, 100, dtype=np.uint32)
    face.sample_from_distribution([0.5, 0.5], rng)
    twin.random()
    assert plain_state(rng) == plain_state(twin)


# Seed 7, ten draws each from the integer weights below (dense, then sparse), and five verifications
# of each kind; hard-coded once from NumPy's streams and Python integers.
WEIGHTS = [3.0, 0.0, 1.0, 5.0, 2.0, 8.0, 1.0, 0.0, 4.0, 8.0]
OTHERS = [1.0, 6.0, 4.0, 0.0, 2.0, 4.0, 5.0, 8.0, 1.0, 1.0]
GOLDEN = {
    "PCG64": (
        [8, 9, 9, 3, 4, 9, 0, 9, 9, 5],
        [9, 9, 9, 5, 5, 5, 8, 5, 5, 8],
        [3, 0, 6, 5, 5, 0, 5, 0, 9, 5],
    ),
    "MT19937": (
        [4, 8, 3, 5, 9, 8, 9, 8, 3, 9],
        [9, 9, 9, 9, 9, 5, 8, 9, 5, 9],
        [9, 5, 6, 3, 5, 0, 9, 9, 5, 9],
    ),
    "Philox": (
        [5, 5, 5, 3, 3, 5, 4, 9, 2, 9],
        [5, 5, 9, 9, 9, 9, 8, 5, 5, 5],
        [9, 9, 9, 5, 5, 0, 9, 9, 9, 9],
    ),
    "SFC64": (
        [0, 5, 5, 8, 8, 2, 8, 3, 6, 0],
        [9, 9, 9, 5, 8, 5, 9, 5, 8, 8],
        [8, 2, 6, 8, 5, 0, 8, 3, 3, 5],
    ),
}


def golden_stream(face, name):
    rng = generator(name, 7)
    p, q = np.array(WEIGHTS) / 32, np.array(OTHERS) / 32
    support = [9, 2, 5, 8]
    sparse = SparseDistribution(support, p[support], 10)
    dense_tokens = [face.sample_from_distribution(p, rng) for _ in range(10)]
    sparse_tokens = [face.sample_from_distribution(sparse, rng) for _ in range(10)]
    emitted = [face.verify_one_token(p, q, x, rng).token_id for x in (1, 2, 6, 7, 5, 0, 2, 6, 1, 7)]
    return dense_tokens, sparse_tokens, emitted


def literal_stream(name):
    """The same stream in rational arithmetic, from the uniforms alone."""
    uniforms = generator(name, 7).random(100).tolist()
    p, q = [Fraction(int(w), 32) for w in WEIGHTS], [Fraction(int(w), 32) for w in OTHERS]

    def draw(weights, ids):
        u, running = Fraction(uniforms.pop(0)), Fraction(0)
        for token, weight in zip(ids, weights, strict=True):
            running += weight
            if running / sum(weights) > u:
                return token
        raise AssertionError

    support = [9, 2, 5, 8]
    dense_tokens = [draw(p, range(10)) for _ in range(10)]
    sparse_tokens = [draw([p[i] for i in support], support) for _ in range(10)]
    emitted = []
    for x in (1, 2, 6, 7, 5, 0, 2, 6, 1, 7):
        accepted = Fraction(uniforms.pop(0)) <= min(p[x] / q[x], 1) and p[x] > 0
        emitted.append(x if accepted else draw([max(a - b, 0) for a, b in zip(p, q, strict=True)], range(10)))
    return dense_tokens, sparse_tokens, emitted


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_golden_streams(face, name):
    assert golden_stream(face, name) == GOLDEN[name]
    assert literal_stream(name) == GOLDEN[name]


# ---- what may be a generator -----------------------------------------------------------------------


def test_no_generator_means_a_fresh_one(face):
    flat = np.full(1000, 0.001)
    # 20 equal draws of 1000 by chance: (1/1000)^19.
    assert len({face.sample_from_distribution(flat) for _ in range(20)}) > 1
    assert len({face.verify_one_token(flat, np.eye(1, 1000)[0], 0).token_id for _ in range(20)}) > 1


def test_falsy_generators_are_used_as_given(face):
    for make in (Stub, Falsy):
        rng = make(0.6)
        assert face.sample_from_distribution([0.25, 0.5, 0.25], rng) == 1
        assert rng.uniforms == []
        rng = make(0.9, 0.6)
        decision = face.verify_one_token([0.0, 0.5, 0.5], [1.0, 0.0, 0.0], 0, rng)
        assert (decision.accepted, decision.token_id) == (False, 2)
        assert rng.uniforms == []


def test_other_objects_draw_through_choice(face):
    rng = Stub(0.6)
    assert face.sample_from_distribution([2.0, 4.0, 2.0], rng) == 1
    ((called, ids, p),) = rng.calls
    assert called == "choice"
    assert ids.tolist() == [0, 1, 2]
    assert p.tolist() == [0.25, 0.5, 0.25]  # divided by their sum
    rng = Stub(0.6)
    got = face.sample_from_distribution(SparseDistribution([7, 3], [0.25, 0.75], 9), rng)
    assert got == 3
    assert type(got) is int
    assert rng.calls[0][1].tolist() == [7, 3]


def test_other_objects_verify_through_random_and_choice(face):
    p, q = np.array([0.25, 0.5, 0.25]), np.array([0.75, 0.25, 0.0])
    sparse_p, sparse_q = SparseDistribution([2, 1, 0], p[::-1], 3), SparseDistribution([0, 1], q[:2], 3)
    for target, draft in ((p, q), (sparse_p, q), (p, sparse_q), (sparse_p, sparse_q)):
        rng = Stub(0.2, 0.9)
        assert face.verify_one_token(target, draft, 0, rng) == SpeculativeDecision(True, 0, 0.25 / 0.75)
        assert rng.calls == ["random"]
        rng = Stub(0.9, 0.6)
        decision = face.verify_one_token(target, draft, 0, rng)
        assert (decision.accepted, decision.token_id) == (False, 2)
        assert rng.calls[0] == "random"
        _, ids, weights = rng.calls[1]
        assert dict(zip(ids.tolist(), weights.tolist(), strict=True)) in (
            {0: 0.0, 1: 0.5, 2: 0.5},
            {1: 0.5, 2: 0.5},
        )
        assert (np.diff(ids) > 0).all()


def test_legacy_random_state(face):
    p, q = np.array([0.2, 0.3, 0.5]), np.array([0.7, 0.2, 0.1])
    rng, twin = np.random.RandomState(11), np.random.RandomState(11)
    for _ in range(20):
        assert face.sample_from_distribution(p, rng) == twin.choice(np.arange(3), p=p)
        decision = face.verify_one_token(p, q, 0, rng)
        accepted = twin.random() <= p[0] / q[0]
        r = np.maximum(p - q, 0)
        assert decision.accepted == accepted
        assert decision.token_id == (0 if accepted else twin.choice(np.arange(3), p=r / r.sum()))
        assert type(decision.token_id) is int
        assert plain_state(rng) == plain_state(twin)


def test_subclasses_are_used_through_their_own_methods(face):
    rng = Recorder(np.random.PCG64(5))
    face.sample_from_distribution([0.5, 0.5], rng)
    assert rng.calls[0] == "choice"  # which asks for numbers of its own
    rng.calls.clear()
    face.verify_one_token([0.0, 1.0], [1.0, 0.0], 0, rng)
    assert rng.calls[:2] == ["random", "choice"]


class OneMethod:
    def __init__(self, name):
        setattr(self, name, lambda *args, **kwargs: pytest.fail("drawn from before it was checked"))


@pytest.mark.parametrize(
    "rng",
    [
        7,
        "seed",
        object(),
        np.random.PCG64(3),
        np.random.SeedSequence(3),
        OneMethod("random"),
        OneMethod("choice"),
        [],
        0,
        False,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_draw_is_refused(face, rng):
    with pytest.raises(TypeError):
        face.sample_from_distribution([0.5, 0.5], rng)
    with pytest.raises(TypeError):
        face.sample_from_distribution(SparseDistribution([0], [1.0], 2), rng)
    for token in (0, 1):
        with pytest.raises(TypeError):
            face.verify_one_token([0.5, 0.5], [1.0, 0.0], token, rng)


def test_the_numpy_random_module_is_an_object_with_the_methods(face):
    np.random.seed(4)  # noqa: NPY002  (the legacy module is the subject)
    expected = np.random.choice(np.arange(3), p=[0.25, 0.5, 0.25])  # noqa: NPY002  (as above)
    np.random.seed(4)  # noqa: NPY002  (the legacy module is the subject)
    assert face.sample_from_distribution([0.25, 0.5, 0.25], np.random) == expected


# ---- errors come before the draw -------------------------------------------------------------------

BAD_ROWS = [
    [0.0, 0.0, 0.0],
    [-0.0, 0.0, -0.0],
    [0.5, NAN, 0.5],
    [NAN, NAN, NAN],
    [0.5, INF, 0.5],
    [0.5, -INF, 0.5],
    [0.5, -0.1, 0.6],
    [-5e-324, 0.5, 0.5],
    [],
    [[0.5, 0.5]],
    0.5,
]


@pytest.mark.parametrize("row", BAD_ROWS, ids=str)
def test_bad_rows_are_refused_before_the_draw(face, row):
    rng, stub = np.random.default_rng(1), Stub(0.5)
    before = plain_state(rng)
    for each in (rng, stub):
        with pytest.raises(ValueError):  # noqa: PT011 - the table above holds several messages
            face.sample_from_distribution(row, each)
    assert plain_state(rng) == before
    assert stub.calls == []


@pytest.mark.parametrize("n", [1, 2, 16, 17, 257, 600, 5000])
@pytest.mark.parametrize("bad", [NAN, INF, -INF, -1e-9])
def test_a_bad_entry_is_found_at_every_place(face, n, bad):
    rng = np.random.default_rng(1)
    before = plain_state(rng)
    for place in {0, n // 3, n // 2, n - 1}:
        p = np.full(n, 1.0 / n)
        p[place] = bad
        with pytest.raises(ValueError, match=str(bad)):
            face.sample_from_distribution(p, rng)
    assert plain_state(rng) == before


S = SparseDistribution


@pytest.mark.parametrize(
    ("p", "q", "token", "error"),
    [
        ([0.5, 0.5], [0.5, 0.5], 2, IndexError),
        ([0.5, 0.5], [0.5, 0.5], -1, IndexError),
        ([0.5, 0.5], S([0], [1.0], 2), 2, IndexError),
        (S([0], [1.0], 2), [0.5, 0.5], 2**40, IndexError),
        ([0.5, 0.5], [0.5, 0.5], 0.0, TypeError),
        ([0.5, 0.5], [0.5, 0.5], None, TypeError),
        ([NAN, 0.5], [0.5, 0.5], 0, ValueError),
        ([-0.5, 0.5], [0.5, 0.5], 0, ValueError),
        ([0.5, 0.5], [INF, 0.5], 0, ValueError),
        ([0.5, 0.5], [-0.5, 0.5], 0, ValueError),
        ([0.5, 0.5], [0.5, 0.25, 0.25], 0, ValueError),
        ([0.5, 0.25, 0.25], [0.5, 0.5], 0, ValueError),
        ([1.0], [0.5, 0.5], 0, ValueError),
        ([0.5, 0.5], S([0], [1.0], 3), 0, ValueError),
        (S([0], [1.0], 3), [0.5, 0.5], 0, ValueError),
        ([0.0, 0.0], [0.5, 0.5], 0, ValueError),  # rejected for certain, and nothing to emit instead
        ([0.0, NAN], [0.5, 0.5], 0, ValueError),
        ([[0.5, 0.5]], [0.5, 0.5], 0, ValueError),
        ([0.5, 0.5], 0.5, 0, ValueError),
        ([], [], 0, ValueError),
        (["a", "b"], [0.5, 0.5], 0, TypeError),
        ([0.5, 0.5], [1j, 0.5], 0, TypeError),
        (None, [0.5, 0.5], 0, TypeError),
    ],
    ids=str,
)
def test_verification_is_refused_before_the_coin(face, p, q, token, error):
    rng, stub = np.random.default_rng(1), Stub(0.5, 0.5)
    before = plain_state(rng)
    for each in (rng, stub):
        with pytest.raises(error):
            face.verify_one_token(p, q, token, each)
    assert plain_state(rng) == before
    assert stub.calls == []


# ---- one verification ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "q", "token", "script", "expected"),
    [
        # u <= a accepts, equality included
        ([0.25, 0.75], [0.5, 0.5], 0, (0.5,), (True, 0, 0.5)),
        ([0.25, 0.75], [0.5, 0.5], 0, (0.5 + STEP, 0.0), (False, 1, 0.5)),
        ([0.25, 0.75], [0.5, 0.5], 0, (0.0,), (True, 0, 0.5)),
        ([0.5, 0.5], [0.5, 0.5], 0, (LAST,), (True, 0, 1.0)),
        ([0.75, 0.25], [0.5, 0.5], 0, (LAST,), (True, 0, 1.0)),
        # an impossible token is never accepted, even at u = 0
        ([0.0, 1.0], [0.5, 0.5], 0, (0.0, 0.0), (False, 1, 0.0)),
        ([0.0, 1.0], [0.0, 1.0], 0, (0.0, 0.0), (False, 1, 0.0)),
        # q(x) = 0 < p(x): accepted for certain
        ([0.5, 0.5], [0.0, 1.0], 0, (LAST,), (True, 0, 1.0)),
        # the correction has its own number, and runs over the differences in ascending id
        ([0.25, 0.25, 0.5], [1.0, 0.0, 0.0], 0, (0.5, 0.0), (False, 1, 0.25)),
        ([0.25, 0.25, 0.5], [1.0, 0.0, 0.0], 0, (0.5, 1 / 4), (False, 1, 0.25)),
        ([0.25, 0.25, 0.5], [1.0, 0.0, 0.0], 0, (0.5, 3 / 8), (False, 2, 0.25)),
        ([0.25, 0.25, 0.5], [1.0, 0.0, 0.0], 0, (0.5, LAST), (False, 2, 0.25)),
        # no positive difference (rows that do not sum to 1): from the target
        ([0.25, 0.75], [0.5, 1.0], 0, (LAST, 0.0), (False, 0, 0.5)),
        ([0.25, 0.75], [0.5, 1.0], 0, (LAST, 0.25), (False, 1, 0.5)),
    ],
    ids=str,
)
def test_verify_by_hand(face, p, q, token, script, expected):
    rng = scripted(*script)
    decision = face.verify_one_token(p, q, token, rng)
    assert decision == SpeculativeDecision(*expected)
    assert (type(decision.accepted), type(decision.token_id)) == (bool, int)
    assert type(decision.accept_probability) is float
    twin = scripted(*script)
    twin.random(1 if decision.accepted else 2)
    assert plain_state(rng) == plain_state(twin)


def test_verify_of_sparse_pairs_by_hand(face):
    p = S([9, 2, 5], [0.5, 0.25, 0.25], 10)
    q = S([5, 2, 3], [0.5, 0.125, 0.375], 10)
    # Differences: 1/8 at id 2, 1/2 at id 9; ascending ids, whatever the storage order.
    for script, expected in [
        ((0.5,), (True, 5, 0.5)),
        ((LAST, 0.0), (False, 2, 0.5)),
        ((LAST, 0.2 - STEP), (False, 2, 0.5)),
        ((LAST, 0.25), (False, 9, 0.5)),
    ]:
        assert face.verify_one_token(p, q, 5, scripted(*script)) == SpeculativeDecision(*expected)
    assert face.verify_one_token(p, q, 3, scripted(0.0, 0.9)) == SpeculativeDecision(False, 9, 0.0)
    assert face.verify_one_token(p, q, 9, scripted(LAST)) == SpeculativeDecision(True, 9, 1.0)
    # An id that neither vocabulary has: 0/0, rejected.
    assert face.verify_one_token(p, q, 2**40, scripted(0.0, 0.9)) == SpeculativeDecision(False, 9, 0.0)


def test_verify_of_sparse_pairs_without_difference_draws_from_the_target_by_id(face):
    p = S([9, 2], [0.5, 0.5], 10)
    assert face.verify_one_token(p, p, 4, scripted(0.5, 0.25)) == SpeculativeDecision(False, 2, 0.0)
    assert face.verify_one_token(p, p, 4, scripted(0.5, 0.75)) == SpeculativeDecision(False, 9, 0.0)


@pytest.mark.parametrize("name", BIT_GENERATORS)
@pytest.mark.parametrize("n", [2, 3, 17, 40, 257, 1000])
def test_verify_follows_the_definition_over_a_stream(face, n, name):
    setup = np.random.default_rng(n)
    rng, twin = generator(name, 9), generator(name, 9)
    for trial in range(25):
        p, q = setup.dirichlet(np.full(n, 0.5), 2)
        if trial % 5 == 0:
            p[setup.random(n) < 0.5] = 0.0
            p[0] += 0.25
        token = int(setup.choice(n, p=q))
        start = rng.bit_generator.state
        accepted, emitted = exact.verified(p, q, token, twin.random(2).tolist())
        decision = face.verify_one_token(p, q, token, rng)
        assert (decision.accepted, decision.token_id) == (accepted, emitted)
        twin.bit_generator.state = start
        twin.random(1 if accepted else 2)
        assert plain_state(rng) == plain_state(twin)


@pytest.mark.parametrize("n", [1, 20, 33, 300])
def test_sparse_mixed_and_dense_verifications_agree(face, n):
    setup = np.random.default_rng(n)
    for trial in range(30):
        V = 2 * n + 1
        p, q = (S(setup.permutation(V)[:n], setup.random(n) + 1e-3, V) for _ in range(2))
        if trial % 3 == 0:
            q = S(p.token_ids, setup.random(n) + 1e-3, V)
        token = int(setup.choice(q.token_ids, p=q.probs))
        pairs = [(p, q), (p.to_dense(), q), (p, q.to_dense()), (p.to_dense(), q.to_dense())]
        rngs = [np.random.default_rng(trial) for _ in pairs]
        decisions = {face.verify_one_token(a, b, token, rng) for (a, b), rng in zip(pairs, rngs, strict=True)}
        assert len(decisions) == 1
        assert len({plain_state(rng) for rng in rngs}) == 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40).filter(any), st.integers(0, 2**53 - 1), st.data())
def test_verify_of_equal_rows_accepts_every_possible_token(face, p, k, data):
    token = data.draw(st.integers(0, len(p) - 1))
    decision = face.verify_one_token(p, p, token, scripted(k * STEP, 0.5))
    assert decision.accepted == (p[token] > 0)
    assert decision.accept_probability == (1.0 if p[token] > 0 else 0.0)
    assert p[decision.token_id] > 0


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=40),
    st.integers(0, 2**53 - 1),
    st.integers(0, 2**53 - 1),
    st.data(),
)
def test_verify_emits_only_what_the_target_allows(face, pairs, k, m, data):
    p, q = [a for a, _ in pairs], [b for _, b in pairs]
    if not any(p):
        p[0] = 0.5
    token = data.draw(st.integers(0, len(p) - 1))
    decision = face.verify_one_token(p, q, token, scripted(k * STEP, m * STEP))
    assert p[decision.token_id] > 0
    assert (decision.accepted, decision.token_id) == exact.verified(p, q, token, [k * STEP, m * STEP])


# ---- the lock --------------------------------------------------------------------------------------

CELLS = 1 << 12


def interleaved(verify):
    """Whether any correction of four threads on one generator used another number than its coin's next."""
    target, draft = np.full(CELLS, 1.0), np.zeros(CELLS)
    target[0], draft[0] = 0.0, CELLS
    calls = 150
    rng, found = np.random.default_rng(21), []

    def work():
        for _ in range(calls):
            found.append(verify(target, draft, 0, rng).token_id)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = np.random.default_rng(21).random(8 * calls)
    expected = 1 + np.floor(numbers[1::2] * (CELLS - 1)).astype(int)  # always rejected: every second number
    return sorted(found) != sorted(expected.tolist())


def test_coin_and_correction_are_neighbours_in_the_stream_of_a_shared_generator(face):
    assert not interleaved(face.verify_one_token)


def test_the_lock_test_catches_a_verification_without_a_lock():
    def careless(p, q, token, rng):
        rng.random()
        time.sleep(0)  # another thread may draw here
        cumulative = np.cumsum(np.maximum(p - q, 0))
        place = int(np.searchsorted(cumulative / cumulative[-1], rng.random()))
        return SpeculativeDecision(False, place, 0.0)

    assert interleaved(careless)


@pytest.mark.parametrize("call", ["sample_from_distribution", "verify_one_token"])
def test_a_draw_waits_for_the_lock_of_the_bit_generator(face, call):
    rng = np.random.default_rng(3)
    arguments = ([0.5, 0.5], rng) if call == "sample_from_distribution" else ([0.5, 0.5], [0.5, 0.5], 0, rng)
    before = plain_state(rng)
    with rng.bit_generator.lock:
        thread = threading.Thread(target=getattr(face, call), args=arguments)
        thread.start()
        thread.join(0.05)  # a correct draw is still waiting, however slow the machine
        assert thread.is_alive()
        assert plain_state(rng) == before
    thread.join()
    assert plain_state(rng) != before


def test_the_lock_is_free_after_an_error(face):
    rng = np.random.default_rng(3)
    for call in (
        lambda: face.sample_from_distribution([0.0, 0.0], rng),
        lambda: face.verify_one_token([0.0, 0.0], [0.5, 0.5], 0, rng),
    ):
        with pytest.raises(ValueError, match="mass"):
            call()
    free = []
    thread = threading.Thread(target=lambda: free.append(rng.bit_generator.lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    assert free == [True]


# ---- frequencies -----------------------------------------------------------------------------------

P = np.array([0.05, 0.15, 0.3, 0.5, 0.0])
Q = np.array([0.5, 0.25, 0.1, 0.05, 0.1])
DRAWS = 8000


def emitted_counts(verify, draw_draft=Q):
    rng = np.random.default_rng(32)
    drafts = rng.choice(5, DRAWS, p=draw_draft)
    return np.bincount([verify(P, Q, int(x), rng).token_id for x in drafts], minlength=5)


def test_frequencies_of_draws(face):
    """False alarm: one in a million; off by one in the id, or an extra rounding to 2^-4, is refuted."""
    rng = np.random.default_rng(31)
    counts = np.bincount([face.sample_from_distribution(P, rng) for _ in range(DRAWS)], minlength=5)
    assert not law_refuted(counts, P)
    assert law_refuted(np.roll(counts, 1), P)
    assert law_refuted(counts, np.maximum(np.round(P * 16), P > 0) / 16)


def test_frequencies_of_emitted_tokens(face):
    """False alarm: one in a million, whatever the draft; the planted faults below are refuted."""
    assert not law_refuted(emitted_counts(face.verify_one_token), P)


def one_number_twice(p, q, token, rng):
    u = rng.random()
    if u <= min(1.0, p[token] / q[token]):
        return SpeculativeDecision(True, token, 0.0)
    cumulative = np.cumsum(np.maximum(p - q, 0))
    return SpeculativeDecision(False, int(np.searchsorted(cumulative / cumulative[-1], u, "right")), 0.0)


def corrects_from_the_target(p, q, token, rng):
    if rng.random() <= min(1.0, p[token] / q[token]):
        return SpeculativeDecision(True, token, 0.0)
    return SpeculativeDecision(False, int(rng.choice(5, p=p)), 0.0)


def always_accepts(p, q, token, rng):
    return SpeculativeDecision(True, token, 1.0)


@pytest.mark.parametrize("fault", [one_number_twice, corrects_from_the_target, always_accepts])
def test_the_frequency_test_catches_planted_faults(fault):
    assert law_refuted(emitted_counts(fault), P)


def test_the_frequency_test_catches_a_draft_drawn_from_another_law(face):
    assert law_refuted(emitted_counts(face.verify_one_token, draw_draft=np.full(5, 0.2)), P)
