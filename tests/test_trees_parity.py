"""`verify_tree` on the core decides, draws and refuses as the reference does, on every instruction set."""

import numpy as np
import pytest
from support.blocks import as_batch, as_sparse, random_rows
from support.generators import LAST, around, long_script, plain_state, scripted

from mtplx import reference, verification
from mtplx.decisions import TokenTree
from mtplx.distributions import SparseDistribution
from mtplx.reference import trees

CASES = [
    ("recursive", True),
    ("recursive", False),
    ("kseq", True),
    ("traversal", True),
    ("traversal", False),
]


def answer(face, target, draft, tree, rng, **options):
    """What a face emits or refuses, and the state that it leaves its generator in."""
    try:
        decision = face.verify_tree(target, draft, tree, rng, **options)
    except (ValueError, IndexError, TypeError) as error:
        return type(error), str(error), rng and plain_state(rng)
    return (
        decision.tokens.tolist(),
        decision.path.tolist(),
        decision.accepted,
        decision.bonus,
        rng and plain_state(rng),
    )


def random_tree(rng, V, n):
    """Rows of one tree of n nodes, its tokens drawn from their rows, mostly."""
    parents = [int(rng.integers(-1, min(i, 1 + 2 * i // 3))) if i else -1 for i in range(n)]
    target, draft = random_rows(rng, V, n + 1), random_rows(rng, V, n + 1)
    alike = rng.random()
    if alike < 0.3:
        draft = target.copy() if alike < 0.1 else 0.9 * target + 0.1 * draft
    tokens = []
    for parent in parents:
        row = draft[parent + 1].copy()
        if rng.random() < 0.5:
            row[[tokens[i] for i in range(len(tokens)) if parents[i] == parent]] = 0.0
        drawn = row.sum() > 0.0 and rng.random() < 0.9
        tokens.append(int(rng.choice(V, p=row / row.sum()) if drawn else rng.integers(V)))
    return TokenTree(tokens, parents), target, draft


def in_some_form(rows, rng):
    form = rng.integers(7)
    if form == 0:
        return rows.astype(rng.choice(["<f4", "<f2"])) if rows.max() < 1000.0 else rows
    if form == 1:
        return [row.tolist() for row in rows]
    if form == 2:
        return [as_sparse(row, rng) for row in rows]
    if form == 3:
        return as_batch([as_sparse(row, rng) for row in rows])
    if form == 4:
        return [as_sparse(row, rng) if rng.random() < 0.5 else row for row in rows]
    return rows


def both(target, draft, tree, seed, **options):
    expected = answer(reference, target, draft, tree, np.random.default_rng(seed), **options)
    told = answer(verification, target, draft, tree, np.random.default_rng(seed), **options)
    assert told == expected, (seed, options)
    return told


def opened(rule, p, q, count, replacement):
    """A node with that many children, as the walk opens it."""
    if rule == "traversal":
        return trees.TraversalNode.open(p, q, replacement)
    return trees.open_node(rule, p, q, count, replacement)


def siblings(rng, q, count, seed):
    """Drafts from anywhere; or all from one block of the sums, or the last one; or the same token again."""
    drawn = rng.choice(q.size, count, p=q)
    if seed % 3 == 1:
        ends = q.size if seed % 2 else min(q.size, 256)
        drawn = np.arange(max(ends - count, 0), ends)[rng.permutation(min(count, ends))]
    if seed % 3 == 2:
        drawn[-1] = drawn[0]
    return drawn


@pytest.mark.parametrize(("rule", "replacement"), CASES)
def test_random_trees(isa, rule, replacement):
    outcomes = set()
    for seed in range(600):
        rng = np.random.default_rng([40, seed])
        V = int(rng.integers(1, 9)) if seed % 4 else int(rng.integers(200, 1200))
        tree, target, draft = random_tree(rng, V, int(rng.integers(0, 12)))
        if seed % 3:
            target, draft = in_some_form(target, rng), in_some_form(draft, rng)
        found = both(
            target, draft, tree, seed, rule=rule, replacement=replacement, check_draft=seed % 10 == 0
        )
        outcomes.add((found[2:4], len(tree)) if len(found) == 5 else found[0])
    assert len(outcomes) > 20
    assert ValueError in outcomes


@pytest.mark.parametrize(("rule", "replacement"), CASES)
def test_wide_trees_of_long_rows(isa, rule, replacement):
    """Many siblings, so that every threshold hangs on all sums before it, over several blocks of sums."""
    depths = set()
    for seed in range(60):
        rng = np.random.default_rng([41, seed])
        V = int(rng.choice([256, 257, 511, 1000, 5000]))
        n = 12
        parents = [-1] * 8 + [7, 7, 7, 0]
        p, q = rng.dirichlet(np.full(V, 0.05), 2)
        target, draft = np.tile(p, (n + 1, 1)), np.tile(q, (n + 1, 1))
        tokens = rng.choice(V, n, p=q, replace=replacement or bool(seed % 2))
        for _ in range(3):
            found = both(
                target,
                draft,
                TokenTree(tokens, parents),
                int(rng.integers(2**32)),
                rule=rule,
                replacement=replacement,
            )
            depths.add(found[1][0] if found[1] else -1)
    assert len(depths) > 4


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(("rule", "replacement"), CASES)
@pytest.mark.parametrize("V", [3, 20, 256, 257, 1000])
def test_coins_next_to_the_threshold_of_every_sibling(isa, rule, replacement, V, sparse):
    """The threshold of sibling j to the last bit: the uniforms around it decide alike."""
    forced = 0
    for seed in range(5):
        rng = np.random.default_rng([42, seed, V])
        p, q = rng.dirichlet(np.full(V, 0.5), 2)
        tokens = siblings(rng, q, 3, seed)
        tree = TokenTree(tokens, [-1, -1, -1])
        rows = [as_sparse(row) if sparse else row for row in (p, q)]
        node = opened(rule, *rows, 3, replacement)
        for before in range(3):
            threshold = node.child_probability(int(tokens[before]))
            if threshold < 1.0:
                for u in around(threshold):
                    uniforms = [*[LAST] * before, u, 0.3, 0.6]
                    told = [
                        face.verify_tree(
                            [rows[0]] * 4,
                            [rows[1]] * 4,
                            tree,
                            scripted(*uniforms[:4]),
                            rule=rule,
                            replacement=replacement,
                        )
                        for face in (reference, verification)
                    ]
                    assert told[0] == told[1]
                    assert (told[1].path.tolist() == [before]) == (threshold > 0.0 and u <= threshold)
                    forced += 1
            else:
                break
            node = node.rejected(int(tokens[before]))
    assert forced > 20 or V == 3


@pytest.mark.parametrize(("rule", "replacement"), CASES)
def test_draws_next_to_the_steps_of_what_is_left(isa, rule, replacement):
    """The last token from what two rejections left, at uniforms around every step of its sums."""
    for seed in range(20):
        rng = np.random.default_rng([43, seed])
        V = [5, 300, 1100][seed % 3]
        p, q = rng.dirichlet(np.full(V, 0.5), 2)
        tokens = [int(np.argmax(q - p))] * 2 if replacement else np.argsort(p - q)[:2].tolist()
        node = opened(rule, p, q, 2, replacement)
        for token in tokens:
            node = node.rejected(token)
        sums = np.cumsum(node.weights()[1])
        for place in rng.choice(V, 5):
            for u in around(sums[place] / sums[-1]):
                told = [
                    face.verify_tree(
                        [p] * 3,
                        [q] * 3,
                        TokenTree(tokens, [-1, -1]),
                        scripted(LAST, LAST, u),
                        rule=rule,
                        replacement=replacement,
                    )
                    for face in (reference, verification)
                ]
                assert told[0] == told[1]


@pytest.mark.parametrize(("rule", "replacement"), CASES)
def test_keyed_trees(isa, rule, replacement):
    for seed in range(100):
        rng = np.random.default_rng([44, seed])
        tree, target, draft = random_tree(rng, 5, 8)
        options = {"rule": rule, "replacement": replacement, "seed": 2**64 - 1 - seed, "position": 3 * seed}
        expected = answer(reference, target, draft, tree, None, **options)
        assert answer(verification, target, draft, tree, None, **options) == expected


@pytest.mark.parametrize(("rule", "replacement"), CASES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.5, 1e308, 5e-324, 0.0])
def test_rows_with_bad_and_extreme_entries(isa, rule, replacement, bad):
    refused = 0
    for seed in range(80):
        rng = np.random.default_rng([45, seed])
        V = int(rng.integers(2, 6)) if seed % 3 else 300
        tree, target, draft = random_tree(rng, V, 6)
        for rows in (target, draft):
            for _ in range(int(rng.integers(0, 3))):
                where = int(rng.integers(7))
                if rng.random() < 0.3:
                    rows[where] = bad
                else:
                    rows[where, int(rng.integers(V))] = bad
        if len(both(target, draft, tree, seed, rule=rule, replacement=replacement)) == 3:
            refused += 1
    assert refused > 0 or bad in (1e308, 5e-324, 0.0)


@pytest.mark.parametrize(("rule", "replacement"), CASES)
def test_lengths_and_ids_that_do_not_fit(isa, rule, replacement):
    refused = 0
    for seed in range(200):
        rng = np.random.default_rng([46, seed])
        tree, target, draft = random_tree(rng, 4, 6)
        target = [row[: int(rng.choice([3, 4, 4, 4]))] for row in target]
        draft = [row[: int(rng.choice([3, 4, 4, 4]))] for row in draft]
        if seed % 2:
            target = [as_sparse(row, rng) if row.any() and rng.random() < 0.6 else row for row in target]
            draft = [as_sparse(row, rng) if row.any() and rng.random() < 0.6 else row for row in draft]
        tree = TokenTree(np.where(rng.random(6) < 0.1, 7, tree.tokens), tree.parents)
        refused += len(both(target, draft, tree, seed, rule=rule, replacement=replacement)) == 3
    assert refused > 20


def test_more_siblings_than_the_draft_has_tokens(isa):
    for rule in ("recursive", "traversal"):
        for seed in range(200):
            rng = np.random.default_rng([47, seed])
            p = rng.dirichlet(np.ones(4))
            q = np.zeros(4)
            q[rng.choice(4, 2, replace=False)] = rng.dirichlet(np.ones(2))
            tree = TokenTree(rng.integers(0, 4, 5), [-1] * 5)
            forms = (p, q), (as_sparse(p), as_sparse(q)), (p, as_sparse(q)), (as_sparse(p), q)
            for one, other in forms:
                both([one] * 6, [other] * 6, tree, seed, rule=rule, replacement=False)


@pytest.mark.parametrize("V", [200, 256, 257, 1030])
def test_kseq_where_many_ratios_lie_at_the_division(isa, V):
    """Parts that change at the very end of the bisection, in some blocks or in all."""
    forced = 0
    for seed in range(12):
        rng = np.random.default_rng([51, seed, V])
        p, q = rng.dirichlet(np.full(V, 0.5), 2)
        for _ in range(4):
            division = trees.KSeqNode(p, q, 3).division
            some = rng.random(V) < 0.3 if seed % 2 else np.arange(V) % 257 == 3
            near = [np.nextafter(division, 0.0), division, np.nextafter(division, 9.0)]
            p[some] = rng.choice(near, int(some.sum())) * q[some]
        node = trees.KSeqNode(p, q, 3)
        token = int(np.argmin(np.abs(p / (node.division * q) - 0.7)))
        for u in around(node.child_probability(token)):
            given = [p] * 4, [q] * 4, TokenTree([token] * 3, [-1] * 3)
            told = [
                face.verify_tree(*given, scripted(LAST, u, LAST, 0.6), rule="kseq")
                for face in (reference, verification)
            ]
            assert told[0] == told[1]
            forced += 1
    assert forced > 24


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_removed_tokens_leave_little_or_nothing_of_long_draft_rows(isa, rule):
    """All of q on a few tokens of one block, of two, or at the end of a row; all of them drafted."""
    used_up = 0
    for seed in range(60):
        rng = np.random.default_rng([50, seed])
        V = int(rng.choice([200, 256, 300, 1030]))
        count = int(rng.integers(1, 5))
        first = int(rng.choice([0, min(254, V - count), V - count]))
        held = np.arange(first, first + count)
        p, q = rng.dirichlet(np.full(V, 0.5)), np.zeros(V)
        q[held] = rng.dirichlet(np.full(count, 0.3)) if seed % 4 else 5e-324
        p[held] *= 1e-3
        tokens = [*rng.permutation(held), *rng.integers(0, V, 2), int(held[0])]
        rows = [p] * (len(tokens) + 1), [q] * (len(tokens) + 1)
        tree = TokenTree(tokens, [-1] * len(tokens))
        for narrow in (False, True):
            given = [np.array(row, np.float32) for row in rows] if narrow else rows
            both(*given, tree, seed, rule=rule, replacement=False)
        node = opened(rule, p, q, len(tokens), False)
        for token in tokens[:count]:
            node = node.rejected(int(token))
        used_up += node.rest.used_up
    assert used_up == 60


def test_large_supports(isa):
    for seed in range(30):
        rng = np.random.default_rng([48, seed])
        ids = [rng.choice(5000, 400, replace=False) for _ in range(2)]
        ids[1][:300] = rng.permutation(ids[0])[:300]
        ids[1] = np.unique(ids[1]) if seed % 2 else np.array(list(dict.fromkeys(ids[1].tolist())))
        p, q = (SparseDistribution(i, rng.dirichlet(np.full(len(i), 0.3)), 5000) for i in ids)
        tokens = rng.choice(q.token_ids, 6, p=q.probs)
        for rule, replacement in CASES:
            both([p] * 7, [q] * 7, TokenTree(tokens, [-1] * 6), seed, rule=rule, replacement=replacement)


@pytest.mark.parametrize("form", ["dense", "sparse", "mixed"])
@pytest.mark.parametrize(("rule", "replacement"), [case for case in CASES if case[0] != "kseq"])
def test_hundreds_of_siblings(isa, rule, replacement, form):
    """All are rejected but the last, whose coin lies next to its threshold; supports in any order."""
    count, forced, with_mass = 100, 0, 0
    for seed, V in enumerate([120, 250, 700, 1600]):
        rng = np.random.default_rng([52, seed])
        p, q = rng.dirichlet(np.ones(V), 2)
        order = rng.permutation(V)
        if seed % 2:
            # Little of q where p is, so that something of p is left to the end.
            first, order = np.split(order, [V // 2])
            p[order] = 0.0
            q[first] *= 0.3 / count
        else:
            # Where q sums to 2 the first rejection leaves nothing; its token, once taken out, has mass again,
            # and is the last sibling's too.
            order = np.array([V - 1, *rng.permutation(V - 1)])
            first = order[:1]
            p = q * rng.uniform(0.5, 1.0, V)
        for _ in range(6):
            given = [row / row.sum() for row in (p, q)]
            if form != "dense":
                given[1] = as_sparse(given[1], rng)
            elif seed % 2 == 0:
                given[1] *= 2.0
            if form == "sparse":
                given[0] = as_sparse(given[0], rng)
            tokens, node = [], opened(rule, *given, count + 1, replacement)
            for token in order.tolist() * 2:
                if len(tokens) < count and node.child_probability(token) < 1.0:
                    tokens.append(token)
                    node = node.rejected(token)
            threshold = node.child_probability(int(first[0]))
            if not seed % 2 or 0.2 < threshold < 0.8:
                break
            rest, x = node.rest, first[0]
            ratio = (rest.multiple + 0.5 * rest.mass / rest.draft_mass) / rest.scale
            q[x] = p[x] / p.sum() * q.sum() / ratio
        with_mass += any(node.target_probability(token) > 0.0 for token in tokens)
        tree = TokenTree([*tokens, first[0]], [-1] * (len(tokens) + 1))
        rows = [[row] * (len(tokens) + 2) for row in given]
        for u in around(threshold):
            coins = [*[LAST] * len(tokens), u, rng.random()]
            told = [
                face.verify_tree(*rows, tree, long_script(*coins), rule=rule, replacement=replacement)
                for face in (reference, verification)
            ]
            assert told[0] == told[1]
            assert told[1].path.tolist() == ([len(tokens)] if u <= threshold and threshold > 0.0 else [])
            forced += len(tokens) == count and 0.2 < threshold < 0.8
    assert forced >= 8
    assert with_mass or replacement or form != "dense"


def test_another_order_of_the_sum_would_show(isa, monkeypatch):
    """What the coins around a threshold are good for: with the plain sequential sum some fall otherwise."""

    def differences():
        count = 0
        for seed in range(40):
            p, q = np.random.default_rng([49, seed]).dirichlet(np.full(5000, 0.5), 2)
            node = trees.RecursiveNode.open(p, q, True).rejected(0)
            second = int(np.argmin(np.abs(node.rest.left[1] / node.rest.mass / q - 0.6)))
            for u in around(node.child_probability(second)):
                arguments = [p] * 3, [q] * 3, TokenTree([int(np.argmax(q - p)), second], [-1, -1])
                told = [
                    face.verify_tree(*arguments, scripted(LAST, u, 0.3)) for face in (reference, verification)
                ]
                count += told[0] != told[1]
        return count

    assert differences() == 0
    monkeypatch.setattr(trees, "mass", lambda weights: float(np.cumsum(weights)[-1]))
    assert differences() > 5


@pytest.mark.parametrize("n", [1, 16, 255, 256, 257, 272, 511, 512, 513, 4096, 5001])
def test_the_order_of_the_sum(n):
    """The definition in Python floats: blocks of 256, sixteen lanes folded in halves."""
    weights = np.random.default_rng(n).dirichlet(np.full(n, 0.1))
    total = 0.0
    if n <= 256:
        for weight in weights.tolist():
            total += weight
    for start in range(0, n if n > 256 else 0, 256):
        lanes = [0.0] * 16
        for i, weight in enumerate(weights[start : start + 256].tolist()):
            lanes[i % 16] += weight
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [lanes[i] + lanes[i + half] for i in range(half)]
        total += lanes[0]
    assert trees.mass(weights) == total
