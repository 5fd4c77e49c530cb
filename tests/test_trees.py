"""Trees: tiny tables by hand, draws, inputs, and the frequencies of what `verify_tree` emits."""

import copy
import dataclasses
import math
import pickle
from collections import Counter

import numpy as np
import pytest
from support.generators import Stub, plain_state, scripted
from support.pairs import KINDS, Pair, pairs
from support.statistics import FALSE_ALARM, law_refuted

from mtplx import reference, verification
from mtplx.decisions import TokenTree, TreeDecision
from mtplx.distributions import BatchedSparseDistributions, SparseDistribution
from mtplx.oracle import emitted_law, expected_accepted
from mtplx.reference import rules, trees
from mtplx.reference.one_row import token_at

RULES = ["recursive", "kseq", "traversal"]
CASES = [
    ("recursive", True),
    ("recursive", False),
    ("kseq", True),
    ("traversal", True),
    ("traversal", False),
]
UNEVEN = [-1, -1, 0, 0, 1, 2, 2]


FACES = {"reference": reference.verify_tree}
if verification.verify_tree is not reference.verify_tree:
    FACES["verification"] = verification.verify_tree


@pytest.fixture(params=FACES)
def verify_tree(request):
    return FACES[request.param]


def outcome(decision):
    return decision.tokens.tolist(), decision.path.tolist(), decision.bonus


def drawn(rng, row):
    return int(np.searchsorted(np.cumsum(row), rng.random() * row.sum(), side="right"))


def drafted_tree(rng, pair, parents, replacement):
    """A tree of that shape drawn from the draft, with the rows of both models."""
    tokens, prefixes = [], [()]
    left = {-1: pair.draft(()).copy()}
    for node, parent in enumerate(parents):
        tokens.append(drawn(rng, left[parent]))
        if not replacement:
            left[parent][tokens[node]] = 0.0
        prefixes.append((*prefixes[parent + 1], tokens[node]))
        left[node] = pair.draft(prefixes[-1]).copy()
    target = np.array([pair.target(prefix) for prefix in prefixes])
    draft = np.array([pair.draft(prefix) for prefix in prefixes])
    return TokenTree(tokens, parents), target, draft


# ---- by hand -------------------------------------------------------------------------------------


def test_recursive_by_hand(verify_tree):
    # First child: 0.125/0.5 = 0.25. After its rejection p = (0, 1/3, 1/3, 1/3), so that the second child
    # is kept with (1/3)/0.25 > 1, or with (1/3)/0.5 = 2/3 if the first token was taken out of q.
    tree = TokenTree([0, 1], [-1, -1])
    target = [[0.125, 0.375, 0.25, 0.25]] + [[0.0, 0.0, 0.0, 1.0]] * 2
    draft = [[0.5, 0.25, 0.125, 0.125]] * 3

    def verified(*uniforms, replacement):
        return outcome(verify_tree(target, draft, tree, scripted(*uniforms), replacement=replacement))

    for replacement in (True, False):
        assert verified(0.25, 0.5, replacement=replacement) == ([0, 3], [0], True)
    assert verified(0.2500001, 0.99, 0.5, replacement=True) == ([1, 3], [1], True)
    assert verified(0.2500001, 0.66, 0.5, replacement=False) == ([1, 3], [1], True)
    # Both rejected: what is left of p is (0, 0, 1/12, 1/12).
    assert verified(0.5, 0.67, 0.49, replacement=False) == ([2], [], False)
    assert verified(0.5, 0.67, 0.51, replacement=False) == ([3], [], False)


def test_recursive_tests_only_below_what_was_accepted(verify_tree):
    #   0 - 2        token 1 is certain, and so is token 0 after it
    #   1 - 3 - 4
    tree = TokenTree([0, 1, 0, 0, 1], [-1, -1, 0, 1, 3])
    certain = {0: [0.0, 1.0], 2: [1.0, 0.0], 4: [1.0, 0.0], 5: [0.5, 0.5]}
    never = [np.nan, np.nan]
    target = [certain.get(row, never) for row in range(6)]
    draft = [[0.5, 0.5] if row in (0, 2, 4) else never for row in range(6)]
    # Coins of nodes 0, 1, 3, 4, and the draw of a correction: node 4 holds 1, p there is (1, 0).
    rng = np.random.default_rng(1)
    assert outcome(verify_tree(target, draft, tree, rng)) == ([1, 0, 0], [1, 3], False)
    other = np.random.default_rng(1)
    other.random(5)
    assert plain_state(rng) == plain_state(other)


def test_kseq_by_hand(verify_tree):
    # beta = 1/4 + 1/(4r), so 2 - beta = r gives r^2 - 7/4 r + 1/4 = 0.
    r = (1.75 + math.sqrt(1.75**2 - 1.0)) / 2.0
    keep = 0.25 / (r * 0.75)
    tree = TokenTree([1, 1], [-1, -1])
    target = [[0.75, 0.25]] + [[1.0, 0.0]] * 2
    draft = [[0.25, 0.75]] * 3

    def verified(*uniforms):
        return outcome(verify_tree(target, draft, tree, scripted(*uniforms), rule="kseq"))

    assert verified(keep - 1e-9, 0.5) == ([1, 0], [0], True)
    assert verified(keep + 1e-9, keep - 1e-9, 0.5) == ([1, 0], [1], True)
    assert verified(keep + 1e-9, keep + 1e-9, 0.9999) == ([0], [], False)  # 1 was used up exactly
    # Token 0 is always kept: 0.75/(0.25 r) > 1.
    other = TokenTree([0, 1], [-1, -1])
    assert outcome(verify_tree(target, draft, other, scripted(0.9999, 0.0), rule="kseq"))[1] == [0]


def test_traversal_by_hand(verify_tree):
    # Node 0 has P = 0.5. Its first child: P = 0.5 * 0.5/1 = 0.25. When that is rejected (P p - q)+ is
    # (0.25, 0): P = 0.25/(0.25 + 0.5) = 1/3, p = (1, 0). So its second child is impossible, and takes
    # nothing away: P = (1/3)/(1/3 + 2/3). When node 0 fails, the context draws from (p - q)+ = (0, 0.5).
    tree = TokenTree([0, 1, 1], [-1, 0, 0])
    target = [[0.5, 0.5], [0.5, 0.5], [0.0, 1.0], [1.0, 0.0]]
    draft = [[1.0, 0.0], [0.0, 1.0], [np.nan, np.nan], [np.nan, np.nan]]

    def verified(*uniforms):
        return outcome(verify_tree(target, draft, tree, scripted(*uniforms), rule="traversal"))

    assert verified(0.25, 0.0) == ([0, 1, 1], [0, 1], True)
    assert verified(0.2500001, 0.0, 0.333333, 0.99) == ([0, 0], [0], False)
    assert verified(0.2500001, 0.0, 0.333334, 0.0) == ([1], [], False)


def test_traversal_enters_the_next_sibling_with_what_the_first_left(verify_tree):
    #   0 - 1        0 is rejected with its child; then p at the context is (0, 1/3, 2/3)
    #   2 - 3        and token 1 is reached with (1/3)/0.5; its child doubles that to 1, capped
    tree = TokenTree([0, 0, 1, 2], [-1, 0, -1, 2])
    target = [[0.25, 0.25, 0.5], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    draft = [[0.5, 0.125, 0.375], [1.0, 0.0, 0.0], [0.0] * 3, [0.75, 0.0, 0.25], [0.0] * 3]
    # (p - q)+ = (0, 0.125, 0.125): p = (0, 1/2, 1/2), and P = (1/2)/(1/8) capped at 1.
    state = trees.TraversalNode.open(np.array(target[0]), np.array(draft[0]), True)
    assert state.child_probability(0) == 0.5
    assert state.rejected(0).reach == 1.0
    assert state.rejected(0).child_probability(1) == 1.0
    without = trees.TraversalNode.open(np.array(target[0]), np.array(draft[0]), False).rejected(0)
    assert [without.draft_probability(token) for token in range(3)] == [0.0, 0.25, 0.75]
    decision = verify_tree(target, draft, tree, scripted(0.51, 0.51, 0.9, 0.0), rule="traversal")
    assert outcome(decision) == ([1, 2, 0], [2, 3], True)


@pytest.mark.parametrize("rule", RULES)
def test_without_nodes_one_token_is_drawn_from_row_0(verify_tree, rule):
    tree, row = TokenTree([], []), np.array([0.25, 0.25, 0.5])
    for seed in range(20):
        decision = verify_tree([row], [row], tree, np.random.default_rng(seed), rule=rule)
        token = reference.sample_from_distribution(row, np.random.default_rng(seed))
        assert outcome(decision) == ([token], [], True)


@pytest.mark.parametrize(("rule", "replacement"), CASES)
def test_equal_models_accept_the_first_child(verify_tree, rule, replacement):
    rng = np.random.default_rng(0)
    for seed in range(20):
        tree, target, draft = drafted_tree(rng, Pair("equal", seed), [-1, -1, 0, 0], replacement)
        decision = verify_tree(target, draft, tree, rng, rule=rule, replacement=replacement)
        assert decision.path.tolist() == [0, 2]
        assert decision.bonus


def test_parents_that_were_never_checked_are_refused():
    """The core would follow them out of bounds."""
    for parents, node in (([-1, 2**40, 0], 1), ([-1, 0, 2], 2), ([-1, -2, 0], 1)):
        tree = TokenTree([1, 1, 1], [-1, 0, 1])
        object.__setattr__(tree, "parents", np.array(parents))
        with pytest.raises(ValueError, match=f"the parent of node {node} is {parents[node]}, not in"):
            verification.verify_tree([[0.5, 0.5]] * 4, [[0.5, 0.5]] * 4, tree)
    assert not hasattr(TokenTree, "adopt")


def test_an_impossible_token_is_not_accepted_at_u_0(verify_tree):
    tree = TokenTree([0, 0], [-1, 0])
    for rule in RULES:
        decision = verify_tree([[0.0, 1.0]] * 3, [[1.0, 0.0]] * 3, tree, scripted(0, 0, 0, 0), rule=rule)
        assert outcome(decision) == ([1], [], False)


# ---- what rejections leave ---------------------------------------------------------------------


def step_by_step(rule, p, q, tokens, replacement):
    """The rule as it is stated: every rejection divides a row by its sum. Thresholds, P, and the last p."""
    reach, thresholds, reaches = 1.0, [], []
    for token in tokens:
        ratio = p[token] / q[token] if q[token] else math.inf
        thresholds.append(min(1.0, reach * ratio) if p[token] > 0.0 else 0.0)
        left = np.maximum(reach * p - q, 0.0)
        mass = left.sum()
        if mass > 0.0:
            p = left / mass
        if rule == "traversal":
            reach = min(reach, mass / (mass + (1.0 - reach))) if mass + (1.0 - reach) > 0.0 else reach
        reaches.append(reach)
        if not replacement:
            q = np.where(np.arange(q.size) == token, 0.0, q)
            q = q / q.sum() if q.any() else q
    return thresholds, reaches, p


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(("rule", "replacement"), [case for case in CASES if case[0] != "kseq"])
def test_one_difference_of_the_given_rows_is_what_all_rejections_leave(rule, replacement, sparse):
    # Rounding of p is u = 2^-53 beside a remainder of mass R, so u/R of each quotient; as long as R is above
    # 1e-3 four rejections stay within 1e-12 by far.
    several = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        p, q = rng.dirichlet(np.full(8, 0.7), 2)
        tokens = rng.choice(8, 4, p=q, replace=replacement)
        rows = [SparseDistribution(np.arange(8)[::-1], row[::-1], 8) if sparse else row for row in (p, q)]
        made = trees.TraversalNode.open if rule == "traversal" else trees.RecursiveNode.open
        node = made(*rows, replacement)
        thresholds, reaches, last = step_by_step(rule, p, q, tokens, replacement)
        for token, threshold, reach in zip(tokens.tolist(), thresholds, reaches, strict=True):
            assert node.child_probability(token) == pytest.approx(threshold, abs=1e-12)
            node = node.rejected(token)
            if node.rest.mass < 1e-3:
                break
            if rule == "traversal":
                assert node.reach == pytest.approx(reach, abs=1e-12)
        else:
            several += 1
            ids, weights = node.weights()
            shares = np.zeros(8)
            shares[slice(None) if ids is None else ids] = weights / weights.sum()
            np.testing.assert_allclose(shares, last, atol=1e-12)
    assert several > 50


def test_a_removed_token_keeps_what_was_subtracted_of_it():
    # Subtracted on and on it would be as if q still held it. It shows where something of the token was
    # left: bottom up, where a child fails for what came below it.
    p, q = np.array([0.6, 0.2, 0.2]), np.array([0.2, 0.5, 0.3])
    once = trees.Remainder(p, q).less(1.0)[0]
    assert once.left[1].tolist() == pytest.approx([0.4, 0.0, 0.0])
    twice = once.without(0).less(0.5)[0]
    assert twice.left[1].tolist() == pytest.approx([0.4, 0.0, 0.0])
    again = once.less(0.5)[0]
    assert again.left[1].tolist() == pytest.approx([0.6 - 1.8 * 0.2, 0.0, 0.0])


# ---- kseq's division -----------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_the_division_of_kseq_is_the_smallest_that_leaves_no_debt(k):
    for pair in pairs(4 * len(KINDS)):
        p, q = pair.target(()), pair.draft(())
        division, rounds = trees.KSeqNode(p, q, k).solution
        assert 1.0 <= division <= k
        assert rounds <= division
        taken = np.minimum(p / division, q) * rounds
        assert (taken <= p * (1.0 + 1e-15)).all()
        if division > 1.0:
            r = math.nextafter(division, 0.0)
            beta = np.minimum(p / r, q).sum()
            assert 1.0 - (1.0 - beta) ** k >= r * beta - 1e-14
        if k == 1:
            assert (division, rounds) == (1.0, 1.0)


def test_the_division_of_kseq_at_its_ends():
    p = np.array([0.25, 0.75, 0.0, 0.0])
    equal = trees.KSeqNode(p, p, 3)
    assert equal.division == 1.0
    assert equal.child_probability(0) == equal.child_probability(1) == 1.0
    disjoint = trees.KSeqNode(p, p[::-1].copy(), 3)
    assert disjoint.solution == (3.0, 3.0)
    np.testing.assert_array_equal(disjoint.weights()[1], p)


# ---- draws ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["dense", "sparse", "mixed"])
def test_recursive_on_a_chain_is_the_exact_rule_draw_for_draw(verify_tree, rows):
    def sparse(row):
        ids = np.flatnonzero(row)[::-1]
        return SparseDistribution(ids, row[ids], row.size)

    for seed in range(100):
        pair = Pair(KINDS[seed % len(KINDS)], seed)
        rng = np.random.default_rng(seed)
        tree, target, draft = drafted_tree(rng, pair, [-1, 0, 1], True)
        target, draft = list(target), list(draft)
        if rows != "dense":
            target = [sparse(row) for row in target]
        if rows == "sparse":
            draft = [sparse(row) for row in draft]
        one, other = np.random.default_rng(seed), np.random.default_rng(seed)
        decision = verify_tree(target, draft, tree, one)
        block = reference.verify_block(target, draft[:3], tree.tokens, other)
        assert decision.tokens.tolist() == block.tokens.tolist()
        assert (decision.accepted, decision.bonus) == (block.accepted, block.bonus)
        assert plain_state(one) == plain_state(other)


@pytest.mark.parametrize(("rule", "replacement"), CASES)
def test_one_number_a_tested_node_and_one_for_the_last_token(verify_tree, rule, replacement):
    class Counting(Stub):
        def __init__(self, seed):
            super().__init__(*np.random.default_rng(seed).random(20))

    seen = set()
    for seed in range(40):
        tree, target, draft = drafted_tree(
            np.random.default_rng(seed), Pair("full support", seed, 4), UNEVEN, replacement
        )
        stub, rng = Counting(seed), np.random.default_rng(seed)
        by_stub = verify_tree(target, draft, tree, stub, rule=rule, replacement=replacement)
        by_generator = verify_tree(target, draft, tree, rng, rule=rule, replacement=replacement)
        # A stub draws the last token through its own `choice`: the same one but for rounding.
        assert by_stub == by_generator
        assert [call if isinstance(call, str) else call[0] for call in stub.calls] == [
            *["random"] * (len(stub.calls) - 1),
            "choice",
        ]
        other = np.random.default_rng(seed)
        other.random(len(stub.calls))
        assert plain_state(rng) == plain_state(other)
        seen.add(len(stub.calls))
        if rule != "traversal":
            # Tested are the children of accepted nodes, up to the accepted one.
            tested, at = 0, -1
            for node in by_stub.path:
                tested += tree.children(at).index(node) + 1
                at = int(node)
            tested += len(tree.children(at))
            assert len(stub.calls) == tested + 1
    assert len(seen) > 2


def lane(seed, position, number):
    key, counter = np.array([seed, position], np.uint64), np.array([0, number, 0, 0], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


@pytest.mark.parametrize(("rule", "chain"), [("recursive", "exact"), ("traversal", "block")])
def test_keyed_coins_belong_to_nodes(verify_tree, rule, chain):
    count = {"exact": rules.accept_count_exact, "block": rules.accept_count_block}[chain]
    for seed in range(60):
        pair = Pair(KINDS[seed % len(KINDS)], seed)
        tree, target, draft = drafted_tree(np.random.default_rng(seed), pair, [-1, 0, 1], True)
        key = (2**64 - 1 - seed, 5 * seed)
        decision = verify_tree(target, draft, tree, rule=rule, seed=key[0], position=key[1])
        coins = [lane(*key, 2**33 + node) for node in range(3)]
        accepted, probabilities = count(target, draft, tree.tokens.tolist(), coins)
        assert decision.accepted == accepted
        if accepted == 3:
            token = token_at((None, target[3]), lane(*key, 2**32 + 1))
        else:
            weights = rules.weights_after_rejection(chain, target, draft, accepted, probabilities)
            token = token_at(weights, lane(*key, 2**32))
        assert decision.tokens[-1] == token
        assert decision == verify_tree(target, draft, tree, rule=rule, seed=key[0], position=key[1])


def test_keyed_coins_do_not_depend_on_how_many_came_before(verify_tree):
    # Node 1 is a leaf below the certain node 0 and tested first, with 0.3/0.5; or it is the sibling of the
    # impossible node 0, of whose rejection p = (0, 6/7, 1/7, 0) is left, and tested second, with (1/7)/0.45.
    below = TokenTree([0, 1], [-1, 0]), [[1.0, 0.0], [0.7, 0.3], [1.0, 0.0]], [[0.5, 0.5]] * 3
    beside = TokenTree([0, 2], [-1, -1]), [[0.0, 0.4, 0.5, 0.1]] * 3, [[0.3, 0.1, 0.45, 0.15]] * 3
    for (tree, target, draft), threshold in ((below, 0.6), (beside, 1.0 / (7.0 * 0.45))):
        kept = set()
        for seed in range(20):
            decision = verify_tree(target, draft, tree, rule="traversal", seed=seed, position=4)
            kept.add(1 in decision.path)
            assert (1 in decision.path) == (lane(seed, 4, 2**33 + 1) <= threshold)
        assert kept == {True, False}


def test_rng_none_draws_fresh_numbers(verify_tree):
    tree = TokenTree([0, 1], [-1, -1])
    rows = [[0.5, 0.5]] * 3
    assert len({verify_tree(rows, rows, tree).tokens[-1] for _ in range(64)}) == 2


def test_legacy_generators_are_used_through_their_own_methods(verify_tree):
    tree, target, draft = drafted_tree(np.random.default_rng(0), Pair("full support", 0), UNEVEN, True)
    one = verify_tree(target, draft, tree, np.random.RandomState(3), rule="traversal")
    assert one == verify_tree(target, draft, tree, np.random.RandomState(3), rule="traversal")


# ---- frequencies ---------------------------------------------------------------------------------

SAMPLES = 3000


def frequencies(verify_tree, rule, pair, replacement, told=None):
    """What was emitted, by verifying freshly drafted trees, and the accepted drafts."""
    rng = np.random.default_rng(2024)
    told = replacement if told is None else told
    emitted, accepted = Counter(), []
    for _ in range(SAMPLES):
        tree, target, draft = drafted_tree(rng, pair, UNEVEN[:5], replacement)
        decision = verify_tree(target, draft, tree, rng, rule=rule, replacement=told)
        emitted[tuple(decision.tokens.tolist())] += 1
        accepted.append(decision.accepted)
    return emitted, accepted


def refuted(emitted, law):
    outcomes = sorted(law.keys() | emitted.keys())
    return law_refuted([emitted[key] for key in outcomes], [law.get(key, 0.0) for key in outcomes])


@pytest.mark.parametrize(("rule", "replacement"), CASES)
def test_verified_trees_have_the_law_that_the_oracle_gives(rule, replacement):
    pair = Pair("full support", 11)
    emitted, accepted = frequencies(reference.verify_tree, rule, pair, replacement)
    shape = {"tree": UNEVEN[:5], "replacement": replacement}
    assert not refuted(emitted, emitted_law(rule, pair.target, pair.draft, **shape))
    # Five standard errors: a false alarm has probability 6e-7, the same order as that of the test above.
    error = 5.0 * np.std(accepted) / SAMPLES**0.5
    assert FALSE_ALARM == 1e-6
    assert np.mean(accepted) == pytest.approx(
        expected_accepted(pair.target, pair.draft, rule, **shape), abs=error
    )


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_the_frequencies_show_when_siblings_were_drawn_otherwise_than_told(rule):
    pair = Pair("full support", 7)
    law = emitted_law(rule, pair.target, pair.draft, tree=UNEVEN[:5], replacement=False)
    honest, _ = frequencies(reference.verify_tree, rule, pair, replacement=False)
    assert not refuted(honest, law)
    emitted, _ = frequencies(reference.verify_tree, rule, pair, replacement=False, told=True)
    assert refuted(emitted, law)


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "replacement"), CASES)
def test_all_kinds_of_rows_decide_alike(verify_tree, rule, replacement):
    def sparse(row):
        return SparseDistribution(np.arange(row.size), row, row.size)

    for seed in range(40):
        pair = Pair("full support" if seed % 2 else "one token banned", seed, 5)
        rng = np.random.default_rng(seed)
        tree, target, draft = drafted_tree(rng, pair, UNEVEN, replacement)
        batch = [
            BatchedSparseDistributions(np.tile(np.arange(5), (len(rows), 1)), rows, vocab_size=5)
            for rows in (target, draft)
        ]
        kinds = [
            (target, draft),
            (target.tolist(), draft.tolist()),
            ([sparse(row) for row in target], [sparse(row) for row in draft]),
            ([sparse(row) for row in target], draft),
            (np.asfortranarray(target), draft[:, ::-1].copy()[:, ::-1]),
            batch,
        ]
        decisions = [
            verify_tree(*rows, tree, np.random.default_rng(seed), rule=rule, replacement=replacement)
            for rows in kinds
        ]
        assert all(decision == decisions[0] for decision in decisions)


@pytest.mark.parametrize("rule", RULES)
def test_narrow_floats_are_widened(verify_tree, rule):
    tree, target, draft = drafted_tree(np.random.default_rng(4), Pair("full support", 4), UNEVEN, True)
    narrow = target.astype(np.float32), draft.astype(np.float16)
    wide = [rows.astype(np.float64) for rows in narrow]
    one, other = np.random.default_rng(4), np.random.default_rng(4)
    assert verify_tree(*narrow, tree, one, rule=rule) == verify_tree(*wide, tree, other, rule=rule)


def test_sparse_rows_may_differ_in_vocabulary(verify_tree):
    # The draft's padded vocabulary has a token that the target has not: it is never accepted.
    target = SparseDistribution([0, 1], [0.5, 0.5], 2)
    draft = SparseDistribution([0, 3], [0.5, 0.5], 4)
    for rule in RULES:
        decision = verify_tree(
            [target] * 3, [draft] * 3, TokenTree([3, 3], [-1, -1]), scripted(0, 0, 0), rule=rule
        )
        assert decision.accepted == 0
        assert decision.tokens[0] in (0, 1)


@pytest.mark.parametrize(("rule", "replacement"), CASES)
def test_inputs_are_left_alone(verify_tree, rule, replacement):
    tree, target, draft = drafted_tree(np.random.default_rng(9), Pair("zeros", 9), UNEVEN[:2], True)
    before = target.copy(), draft.copy()
    target.flags.writeable = draft.flags.writeable = False
    for seed in range(10):
        verify_tree(target, draft, tree, np.random.default_rng(seed), rule=rule, replacement=replacement)
    assert np.array_equal(target, before[0])
    assert np.array_equal(draft, before[1])


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_rows_that_are_not_reached_are_not_looked_at(verify_tree, rule):
    # The first child is certain and a leaf: everything about the second is junk.
    tree = TokenTree([1, 0, 0], [-1, -1, 1])
    target = [[0.0, 1.0], [1.0, 0.0], None, "junk"]
    draft = [[0.5, 0.5], None, [np.nan], {}]
    decision = verify_tree(target, draft, tree, rule=rule)
    assert outcome(decision) == ([1, 0], [0], True)


@pytest.mark.parametrize("rule", RULES)
def test_a_path_may_be_longer_than_the_stack(verify_tree, rule):
    n = 1500
    chain = TokenTree([0] * n, range(-1, n - 1))
    same = np.tile([0.5, 0.5], (n + 1, 1))
    assert verify_tree(same, same, chain, rule=rule).accepted == n
    # All the way down, and rejected all the way up: at the context only token 1 is possible.
    target, draft = same.copy(), same.copy()
    target[0], draft[0] = [0.0, 1.0], [1.0, 0.0]
    assert outcome(verify_tree(target, draft, chain, rule=rule)) == ([1], [], False)


# ---- drafts that were not drawn from q -----------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_q_says_is_impossible_is_accepted_unless_checked(verify_tree, rule):
    tree = TokenTree([0, 0], [-1, -1])
    target, draft = [[0.1, 0.9]] * 3, [[0.0, 1.0]] * 3
    assert verify_tree(target, draft, tree, scripted(0.99, 0.99), rule=rule).path.tolist() == [0]
    rng = np.random.default_rng(0)
    before = plain_state(rng)
    with pytest.raises(ValueError, match="row 0: token 0 cannot have been drafted"):
        verify_tree(target, draft, tree, rng, rule=rule, check_draft=True)
    assert plain_state(rng) == before
    # Impossible on both sides is no contradiction, and is rejected.
    decision = verify_tree([[0.0, 1.0]] * 3, draft, tree, rule=rule, check_draft=True)
    assert outcome(decision) == ([1], [], False)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_more_siblings_than_the_draft_had_tokens(verify_tree, rule, sparse):
    tree = TokenTree([0, 1, 2], [-1, -1, -1])
    target, draft = [[0.25, 0.25, 0.5]] * 4, [[1.0, 0.0, 0.0]] * 4
    if sparse:
        draft = [SparseDistribution([0], [1.0], 3)] * 4
        target = [SparseDistribution([0, 1, 2], row, 3) for row in target]
    # Once q is used up it is 0 everywhere, and the next child counts as any draft with q(x) = 0.
    decision = verify_tree(target, draft, tree, scripted(0.26, 0.99, 0.99), rule=rule, replacement=False)
    assert decision.path.tolist() == [1]
    with pytest.raises(ValueError, match="token 1 cannot have been drafted"):
        verify_tree(target, draft, tree, scripted(0.26, 0.99), rule=rule, replacement=False, check_draft=True)
    # Where p has nothing for them either, they are rejected, and p goes on unchanged.
    target = [[0.25, 0.0, 0.75]] * 4
    tree = TokenTree([0, 1, 1], [-1, -1, -1])
    decision = verify_tree(target, draft, tree, scripted(0.26, 0.0, 0.0, 0.5), rule=rule, replacement=False)
    assert outcome(decision) == ([2], [], False)


# ---- errors --------------------------------------------------------------------------------------

ROWS = [[0.5, 0.5]] * 3
TREE = TokenTree([0, 1], [-1, -1])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((ROWS[:2], ROWS, TREE), {}, ValueError, "target has 2 rows for 2 drafts"),
        ((ROWS, [*ROWS, ROWS[0]], TREE), {}, ValueError, "draft has 4 rows"),
        ((ROWS, ROWS, ([0, 1], [-1, -1])), {}, TypeError, "TokenTree"),
        ((ROWS, ROWS, TokenTree([0, 2], [-1, -1])), {}, IndexError, "node 1 has the token 2"),
        ((ROWS, [[0.5, 0.25, 0.25]] * 3, TREE), {}, ValueError, "row 0"),
        ((ROWS, [[0.5, np.nan]] * 3, TokenTree([1, 0], [-1, -1])), {}, ValueError, "row 0"),
        (([[-0.5, 0.5]] * 3, ROWS, TREE), {}, ValueError, "row 0"),
        (([[0.0, 0.0]] * 3, ROWS, TREE), {}, ValueError, "row 0"),
        (([[0.0, 1.0]] * 3, [[0.5, np.inf]] * 3, TREE), {"rule": "kseq"}, ValueError, "row 0"),
        (([[0.0, 0.0]] * 3, ROWS, TREE), {"rule": "kseq"}, ValueError, "row 0"),
        (([[0.5, 0.5j]] * 3, ROWS, TREE), {}, TypeError, "row 0"),
        ((np.ones((3, 2, 1)), ROWS, TREE), {}, ValueError, "target"),
        ((None, ROWS, TREE), {}, TypeError, "target"),
        ((ROWS, None, TREE), {}, TypeError, "draft"),
        ((ROWS, ROWS, TREE), {"rule": "exact"}, ValueError, "unknown rule 'exact'"),
        ((ROWS, ROWS, TREE), {"rule": None}, TypeError, "rule"),
        ((ROWS, ROWS, TREE), {"rule": "kseq", "replacement": False}, ValueError, "kseq"),
    ],
)
def test_errors_come_before_the_first_number(verify_tree, arguments, options, error, match):
    rng = np.random.default_rng(0)
    before = plain_state(rng)
    with pytest.raises(error, match=match):
        verify_tree(*arguments, rng, **options)
    assert plain_state(rng) == before


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rng": object()}, TypeError),
        ({"seed": 1}, ValueError),
        ({"position": 1}, ValueError),
        ({"seed": 1, "position": 1, "rng": np.random.default_rng(0)}, ValueError),
        ({"seed": -1, "position": 0}, ValueError),
        ({"seed": 2**64, "position": 0}, ValueError),
        ({"seed": 0, "position": -1}, ValueError),
        ({"seed": 0, "position": 2**63}, ValueError),
        ({"seed": 0.5, "position": 0}, TypeError),
    ],
)
def test_bad_sources_of_numbers(verify_tree, options, error):
    with pytest.raises(error):
        verify_tree(ROWS, ROWS, TREE, **options)


# ---- data types ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "parents", "error"),
    [
        ([0, 1], [-1], ValueError),
        ([0], [0], ValueError),
        ([0, 1], [-1, 1], ValueError),
        ([0, 1], [-1, -2], ValueError),
        ([-1], [-1], ValueError),
        ([[0]], [[-1]], ValueError),
        (0, -1, ValueError),
        ([0.0], [-1], TypeError),
        ([0], [-1.0], TypeError),
        (["0"], [-1], TypeError),
        ([True], [-1], TypeError),
    ],
)
def test_what_is_no_tree(tokens, parents, error):
    with pytest.raises(error):
        TokenTree(tokens, parents)


def test_trees_and_decisions_are_values():
    tokens = np.array([3, 4], dtype=np.int32)
    tree = TokenTree(tokens, (-1, 0))
    tokens[0] = 9
    assert tree == TokenTree([3, 4], [-1, 0])
    assert tree != TokenTree([3, 4], [-1, -1])
    assert tree != (tree.tokens, tree.parents)
    assert (tree.tokens.dtype, tree.parents.dtype) == (np.int64, np.int64)
    assert dataclasses.replace(tree, tokens=[3, 5]) == TokenTree([3, 5], [-1, 0])
    decision = TreeDecision([3, 1], [0], 1, False)
    assert decision != TreeDecision([3, 1], [1], 1, False)
    for value in (tree, decision):
        with pytest.raises(TypeError, match="unhashable"):
            hash(value)
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.tokens = tree.parents
        for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
            assert other == value
            assert not other.tokens.flags.writeable


def test_children_are_in_index_order():
    tree = TokenTree(range(7), UNEVEN)
    assert [tree.children(node) for node in range(-1, 7)] == [(0, 1), (2, 3), (4,), (5, 6), (), (), (), ()]
    assert len(tree) == 7
    assert len(TokenTree([], [])) == 0
