"""The division r of the tree rule kseq to the last bit, what is read for it, and draws of what it leaves."""

import numpy as np
import pytest
from mtplx._csampling import dispatch, kseq
from support.counting import counting
from support.generators import LAST, around, plain_state, scripted

from mtplx import reference, verification
from mtplx.decisions import TokenTree
from mtplx.distributions import SparseDistribution
from mtplx.reference import trees

# Within a block of the sums, at its ends, from where on a sample is taken.
SIZES = (1, 2, 16, 17, 255, 256, 257, 511, 513, 1000, 4095, 4096, 4097, 5000)


def same(p, q, k):
    expected = trees.KSeqNode(p, q, k).solution
    told = kseq.solved(p, q, k)
    assert told[:2] == expected, (p.size, k)
    return told


def one_hot(n, at):
    row = np.zeros(n)
    row[at] = 1.0
    return row


def pair(kind, n, rng):
    p, q = rng.dirichlet(np.full(n, 0.3), 2) if n > 1 else np.ones((2, 1))
    if kind == "equal":
        return p, p
    if kind == "near":
        return p, p * (1.0 + 10.0 ** rng.integers(-16, -1) * rng.standard_normal(n))
    if kind == "one-hot":
        return one_hot(n, rng.integers(n)), (p + one_hot(n, rng.integers(n))) / 2.0
    if kind == "disjoint":
        side = rng.random(n) < 0.5
        side[0] = True
        return np.where(side, p + 1e-9, 0.0), np.where(side, one_hot(n, n - 1) if n > 1 else 1.0, q + 1e-9)
    if kind == "dominated":
        return p * 0.25, p + q
    if kind == "scaled":
        return p * 10.0 ** rng.integers(-320, 308), q * 10.0 ** rng.integers(-320, 308)
    if kind == "dyadic":
        return tuple(rng.integers(0, 4, (2, n)) / 2.0 ** rng.integers(2, 12) + one_hot(n, 0))
    return p, q


KINDS = ("random", "equal", "near", "one-hot", "disjoint", "dominated", "scaled", "dyadic")


@pytest.mark.parametrize("kind", KINDS)
def test_the_division_has_the_bits_of_its_definition(isa, kind):
    for n in SIZES:
        for seed in range(2):
            rng = np.random.default_rng([60, n, seed])
            p, q = pair(kind, n, rng)
            if p.any() and q.any():
                for k in (2, int(rng.integers(3, 9)), 40):
                    same(p, q, k)


@pytest.mark.parametrize("kind", ["random", "equal", "near", "disjoint"])
def test_the_division_of_long_rows(isa, kind):
    n = 151_936
    rng = np.random.default_rng([61, len(kind)])
    p = rng.permutation(1.0 / (np.arange(n) + 2.7) ** 1.1)
    p /= p.sum()
    q = p * np.exp(0.7 * rng.standard_normal(n)) if kind == "random" else p
    if kind == "near":
        q = p * (1.0 + 1e-3 * rng.standard_normal(n))
    if kind == "disjoint":
        p, q = np.where(np.arange(n) % 2, p, 0.0), np.where(np.arange(n) % 2, 0.0, p)
    for k in (2, 3, 8):
        passes = same(p, q, k)[2]
        assert passes < 4.0 or kind == "near"


@pytest.mark.parametrize("n", [200, 257, 1030, 5000])
def test_ratios_at_the_division_and_its_neighbours(isa, n):
    """Elements change sides between the last numbers of the bisection: sums are taken there after all."""
    with counting("division_bracket") as counted:
        for seed in range(10):
            rng = np.random.default_rng([62, seed, n])
            p, q = rng.dirichlet(np.full(n, 0.5), 2)
            k = int(rng.integers(2, 9))
            for _ in range(4):
                division = trees.KSeqNode(p, q, k).division
                some = rng.random(n) < 0.3 if seed % 2 else np.arange(n) % 257 == 3
                near = [np.nextafter(division, 0.0), division, np.nextafter(division, 9.0)]
                p[some] = rng.choice(near, int(some.sum())) * q[some]
                same(p, q, k)
    assert counted[0] > 10


def test_far_from_a_double_root_nothing_is_in_doubt(isa):
    with counting("division_bracket") as counted:
        for seed in range(20):
            p, q = np.random.default_rng([63, seed]).dirichlet(np.full(5000, 0.5), 2)
            same(p, q, 3)
    assert counted == [0]


def test_the_last_bits_hang_on_the_order_of_the_sum(monkeypatch):
    """What equality of bits is good for: with sums one by one other divisions come out."""
    rows = [np.random.default_rng([64, seed]).dirichlet(np.full(5000, 0.5), 2) for seed in range(40)]
    monkeypatch.setattr(trees, "mass", lambda weights: float(np.cumsum(weights)[-1]))
    told = [kseq.solved(p, q, 3)[:2] for p, q in rows]
    assert sum(told[i] != trees.KSeqNode(*rows[i], 3).solution for i in range(40)) > 10


@pytest.mark.parametrize("k", [0, 1, -3])
def test_what_has_no_division(k):
    with pytest.raises(ValueError, match="siblings"):
        kseq.solved(np.ones(3), np.ones(3), k)
    with pytest.raises(TypeError, match="float64"):
        kseq.solved(np.ones(3), np.ones(4), 2)
    with pytest.raises(TypeError, match="float64"):
        kseq.solved(np.ones(3, np.float32), np.ones(3), 2)


# ---- tests of children ---------------------------------------------------------------------------


def told(target, draft, tree, *uniforms, **options):
    """What both faces emit or refuse, and how many numbers they draw."""
    answers = []
    for face in (reference, verification):
        source = scripted(*uniforms)
        try:
            decision = face.verify_tree(target, draft, tree, source, rule="kseq", **options)
        except (ValueError, IndexError) as error:
            answers.append((type(error), str(error), plain_state(source)))
        else:
            answers.append((decision.tokens.tolist(), decision.path.tolist(), plain_state(source)))
    assert answers[0] == answers[1]
    return answers[0]


def test_coins_around_the_bounds_and_the_threshold(isa):
    for seed in range(24):
        rng = np.random.default_rng([65, seed])
        n = int(rng.choice([3, 256, 300, 5000]))
        p, q = rng.dirichlet(np.full(n, 0.5), 2)
        k = int(rng.integers(2, 4))
        node = trees.KSeqNode(p, q, k)
        token = int(np.argmin(np.abs(p / q - 0.9)))
        tree = TokenTree([token] * k, [-1] * k)
        for threshold in (*node.acceptance_bounds(token), node.child_probability(token)):
            for u in around(min(threshold, LAST)):
                path = told([p] * (k + 1), [q] * (k + 1), tree, u, *[LAST] * k)[1]
                assert (path == [0]) == (u <= node.child_probability(token))


def test_rows_are_read_when_a_coin_asks_for_it_and_not_before(isa):
    # The child is kept up to 0.4/(3 * 0.5) whatever r is, and from 0.4/0.5 on it is not.
    tree = TokenTree([0, 0, 0], [-1] * 3)
    good = [[0.4, 0.6], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
    for bad in (np.nan, np.inf, -1.0):
        for of_draft in (False, True):
            rows = [np.array([[0.4, 0.6]] + [[1.0, 0.0]] * 3), np.full((4, 2), 0.5)]
            rows[of_draft][0, 1] = bad
            assert told(*rows, tree, 0.266, 0.5)[:2] == ([0, 0], [0])
            assert told(*rows, tree, 0.801, 0.9, 0.2, 0.5)[:2] == ([0, 0], [2])
            name = "draft_q" if of_draft else "target_p"
            for uniforms in ((0.267,), (0.799,), (0.9, 0.5), (0.9, 0.9, 0.9)):
                error, message, state = told(*rows, tree, *uniforms)
                assert error is ValueError
                assert message.startswith(f"row 0: {name}")
                # The coins were drawn: what failed was looked for because of them.
                source = scripted(*uniforms)
                source.random(len(uniforms))
                assert state == plain_state(source)
    assert told(good, [[0.5, 0.5]] * 4, tree, 0.9, 0.9, 0.9, 0.5)[1] == []


def test_a_child_sure_to_be_rejected_has_its_rows_checked_before_the_coin(isa):
    tree = TokenTree([0, 1], [-1, -1])
    error, message, state = told([[0.0, 1.0]] * 3, [[0.5, np.nan]] * 3, tree, 0.5)
    assert (error, state) == (ValueError, plain_state(scripted(0.5)))
    assert message.startswith("row 0: draft_q")


@pytest.mark.parametrize("n", [5, 256, 257, 2000])
@pytest.mark.parametrize("of_draft", [False, True])
def test_bad_entries_are_found_wherever_they_are(isa, n, of_draft):
    tree = TokenTree([0, 0], [-1, -1])
    for at in {1, 2, n // 2, n - 1}:
        for bad in (np.nan, np.inf, -np.inf, -1e-300, -0.0):
            rng = np.random.default_rng([66, n])
            rows = [rng.dirichlet(np.ones(n), 3), rng.dirichlet(np.ones(n), 3)]
            rows[0][:, 0] = rows[1][:, 0] = 0.5
            rows[of_draft][0, at] = bad
            answer = told(*rows, tree, 0.9, 0.5)
            assert (answer[0] is ValueError) == (bad != 0.0), (at, bad)


def test_rows_without_mass(isa):
    tree = TokenTree([0, 0], [-1, -1])
    for n in (3, 300):
        full, none = np.ones((3, n)), np.zeros((3, n))
        assert told(none, full, tree, 0.5)[0] is ValueError
        # Of a draft without mass anything is accepted.
        assert told(full, none, tree, 0.5, 0.5)[1] == [0]
        half = np.where(np.arange(n) % 2, 1.0, 0.0) * full
        assert told(half, none, tree, 0.5)[0] is ValueError


def test_a_single_child_is_tested_as_by_the_recursive_rule(isa):
    for seed in range(40):
        rng = np.random.default_rng([67, seed])
        n = int(rng.choice([2, 3, 300]))
        target, draft = rng.dirichlet(np.full(n, 0.5), (2, 5))
        if seed % 3 == 0:
            target, draft = (
                [SparseDistribution(rng.permutation(n), row, n) for row in rows] for rows in (target, draft)
            )
        chain = TokenTree(rng.integers(0, n, 4), [-1, 0, 1, 2])
        for face in (reference, verification):
            one, other = (
                face.verify_tree(target, draft, chain, np.random.default_rng(seed), rule=rule)
                for rule in ("kseq", "recursive")
            )
            assert one == other


# ---- what is left --------------------------------------------------------------------------------


def test_draws_on_the_steps_of_what_is_left(isa):
    """Coins on cumulative sums and next to them: there the row is written out and drawn from as any other."""
    with counting("division_draw") as counted:
        for seed in range(12):
            rng = np.random.default_rng([68, seed])
            n = int(rng.choice([257, 1000, 5000]))
            p, q = rng.dirichlet(np.full(n, 0.3), 2)
            if seed % 2:
                p, q = (rng.integers(0, 4, (2, n)) / 1024.0) + one_hot(n, 5)
            tree = TokenTree([int(np.argmin(np.where(p > 0.0, p / (q + 1e-300), 9.0)))] * 3, [-1] * 3)
            weights = trees.KSeqNode(p, q, 3).weights()[1]
            steps = np.cumsum(weights) / np.cumsum(weights)[-1]
            for step in (*rng.choice(steps[steps < 1.0], 3), 0.0, LAST):
                for u in around(step) if 0.0 < step < LAST else (step,):
                    answer = told([p] * 4, [q] * 4, tree, LAST, LAST, LAST, u)
                    assert answer[1] == []
                    assert answer[0] == [int(np.argmax(steps > u))]
    assert counted[0] > 100


def test_draws_between_the_steps_are_certain(isa):
    before = dispatch.fallback_counts()["division_draw"]
    for seed in range(40):
        p, q = np.random.default_rng([69, seed]).dirichlet(np.full(3000, 0.3), 2)
        token = int(np.argmin(np.where(q > 1e-9, p / q, 9.0)))
        tree = TokenTree([token] * 3, [-1] * 3)
        answer = told([p] * 4, [q] * 4, tree, LAST, LAST, LAST, seed / 100 + 0.005)
        assert answer[1] == []
    assert dispatch.fallback_counts()["division_draw"] == before


@pytest.mark.parametrize("size", [1e-320, 1e-300, 1.0, 1e300, 1.7e308])
def test_rows_of_any_mass_leave_what_the_definition_says(isa, size):
    for seed in range(20):
        rng = np.random.default_rng([70, seed])
        n = int(rng.choice([100, 257, 1000]))
        p, q = rng.random((2, n)) * size
        p[0], q[0] = 0.5 * size, size
        tree = TokenTree([0, 0, 0], [-1] * 3)
        assert told([p] * 4, [q] * 4, tree, LAST, LAST, LAST, rng.random())[1] == []
