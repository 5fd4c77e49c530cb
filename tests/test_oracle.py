"""Every rule against its law. No test in this file is a frequency test unless it says so.

Three derivations of what a rule emits are compared: the oracle, from the functions that decide
(`mtplx.oracle`); those functions' callers run through all outcomes (`support.exhaustive`); and the
formulas (`support.rules`). The law that lossless rules are held to is the target's.
"""

import inspect
import itertools
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from scipy.optimize import linprog
from support import exhaustive
from support import rules as statements
from support.pairs import KINDS, ROUGHLY_WIDE, TWO_WIDE, WIDE, Pair, pairs, rational

from mtplx import reference
from mtplx.decisions import Cascade, TokenTree, Typical
from mtplx.distributions import SparseDistribution
from mtplx.oracle import (
    acceptance,
    best_depth,
    emitted_law,
    expected_accepted,
    law_distance,
    sequence_law,
    target_law,
)
from mtplx.reference import rules, trees

LOSSLESS = 1e-12

STATEMENTS = {
    "exact": statements.exact,
    "greedy": statements.greedy,
    "match": statements.match,
    "block": statements.block,
    "typical": statements.typical(0.3, 0.09),
    Typical(0.6, 0.9): statements.typical(0.6, 0.9),
    Cascade(0.2, "tokenv1"): statements.cascade(0.2, "tokenv1"),
    Cascade(0.2, "tokenv2"): statements.cascade(0.2, "tokenv2"),
    Cascade(0.2): statements.cascade(0.2, "tokenv3"),
}

# Trees as the parents of their nodes.
FAN2, FAN3, CHAIN3 = [-1, -1], [-1, -1, -1], [-1, 0, 1]
UNEVEN = [-1, -1, 0, 0, 1, 2, 2]  # a sibling with more behind it than the other, a path of three
SEVEN = [-1, -1, 0, 0, 1, 1, 2]
LATE = [-1, -1, -1, 2, 2, 3]  # all that is deep hangs below the last sibling
TERNARY = [-1, -1, -1, *(node for node in range(12) for _ in range(3))]  # three children, depth 3
SHAPES = {
    "two": FAN2,
    "three": FAN3,
    "chain": CHAIN3,
    "uneven": UNEVEN,
    "seven": SEVEN,
    "late": LATE,
}
TREE_CASES = [
    ("recursive", True),
    ("recursive", False),
    ("kseq", True),
    ("traversal", True),
    ("traversal", False),
]


def kinds_for(parents, replacement):
    """Kinds of pairs from whose draft rows that many siblings can be drawn."""
    if replacement:
        return KINDS
    return WIDE if max(parents.count(node) for node in parents) > 2 else TWO_WIDE


def tree_statement(rule, replacement):
    if rule == "kseq":
        return statements.kseq
    return {"recursive": statements.recursive, "traversal": statements.traversal}[rule](replacement)


def distance_to_target(rule, pair, depth=None, **tree):
    length = 4 if depth is None else depth + 1
    law = sequence_law(rule, pair.target, pair.draft, depth, length, **tree)
    return law_distance(law, target_law(pair.target, length))


def worst(rule, pairs, depth=None, **tree):
    return max(distance_to_target(rule, pair, depth, **tree) for pair in pairs)


# ---- lossless ------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", ["exact", "match", "block"])
def test_a_lossless_chain_rule_emits_the_target(rule, K):
    assert worst(rule, pairs(200), K) <= LOSSLESS


@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_greedy_emits_one_hot_targets(K):
    assert worst("greedy", pairs(200, kinds=("one-hot target",)), K) <= LOSSLESS


@pytest.mark.parametrize("shape", ["three", "uneven", "ternary"])
@pytest.mark.parametrize(("rule", "replacement"), TREE_CASES[:3])
def test_a_top_down_tree_rule_emits_the_target(rule, replacement, shape):
    parents = {**SHAPES, "ternary": TERNARY}[shape]
    some = pairs(200, kinds=kinds_for(parents, replacement))
    assert worst(rule, some, tree=parents, replacement=replacement) <= LOSSLESS


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("replacement", [True, False])
def test_traversal_emits_the_target(replacement, shape):
    parents = SHAPES[shape]
    some = pairs(30, kinds=kinds_for(parents, replacement))
    assert worst("traversal", some, tree=parents, replacement=replacement) <= LOSSLESS


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("rule", ["exact", "match", "block"])
def test_the_formulas_of_chain_rules_are_lossless_without_a_tolerance(rule, K):
    for pair in pairs(len(KINDS)):
        target, draft = rational(pair.target_list), rational(pair.draft_list)
        law = statements.chain_law(STATEMENTS[rule], target, draft, K, V=3)
        wanted = statements.continued({(): Fraction(1)}, target, K + 1)
        assert statements.continued(law, target, K + 1) == wanted


@pytest.mark.parametrize("shape", ["three", "chain", "uneven"])
@pytest.mark.parametrize("rule", ["recursive", "traversal"])
@pytest.mark.parametrize("replacement", [True, False])
def test_the_formulas_of_tree_rules_are_lossless_without_a_tolerance(rule, replacement, shape):
    # Two tokens where the tree is large: that is 2**7 drafted trees, each in fractions.
    V = 2 if shape == "uneven" else 3
    parents = SHAPES[shape]
    for pair in pairs(len(ROUGHLY_WIDE), V=V, kinds=ROUGHLY_WIDE):
        target, draft = rational(pair.target_list), rational(pair.draft_list)
        law = statements.tree_law(tree_statement(rule, replacement), target, draft, parents, replacement, V)
        wanted = statements.continued({(): Fraction(1)}, target, 4)
        assert statements.continued(law, target, 4) == wanted


# ---- three derivations ---------------------------------------------------------------------------


@pytest.mark.parametrize("K", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("rule", STATEMENTS)
def test_the_oracle_agrees_with_the_formulas_of_chains(rule, K):
    for pair in pairs(2 * len(KINDS) if K < 4 else len(KINDS)):
        stated = statements.chain_law(STATEMENTS[rule], pair.target_list, pair.draft_list, K, V=3)
        assert law_distance(emitted_law(rule, pair.target, pair.draft, K), stated) < 1e-14


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rule", "replacement"), TREE_CASES)
def test_the_oracle_agrees_with_the_formulas_of_trees(rule, replacement, shape):
    parents = SHAPES[shape]
    small = len(parents) < 6
    # Two tokens where the tree is large: the formulas are summed over all V**n drafted trees.
    V = 3 if small else 2 if replacement else max(parents.count(node) for node in parents)
    kinds = KINDS if replacement else WIDE
    for pair in pairs(len(kinds), V=V, kinds=kinds):
        stated = statements.tree_law(
            tree_statement(rule, replacement),
            pair.target_list,
            pair.draft_list,
            parents,
            replacement,
            pair.V,
        )
        law = emitted_law(rule, pair.target, pair.draft, tree=parents, replacement=replacement)
        # Near p = q the equation of kseq has a double root, and r is known to half of its digits.
        assert law_distance(law, stated) < (1e-7 if rule == "kseq" else 1e-14)


@pytest.mark.parametrize("K", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", STATEMENTS)
def test_the_oracle_agrees_with_the_block_that_is_verified(rule, K):
    for pair in pairs(len(KINDS)):
        run = exhaustive.block_law(rule, pair.target, pair.draft, K)
        assert (
            law_distance(exhaustive.tokens_alone(run), emitted_law(rule, pair.target, pair.draft, K)) < 1e-14
        )
        accepted = sum(count * probability for (_, count), probability in run.items())
        assert accepted == pytest.approx(expected_accepted(pair.target, pair.draft, rule, K), abs=1e-14)


@pytest.mark.parametrize("parents", [FAN2, FAN3, CHAIN3, [-1, -1, 0, 0, 1]], ids=str)
@pytest.mark.parametrize(("rule", "replacement"), TREE_CASES)
def test_the_oracle_agrees_with_the_tree_that_is_verified(rule, replacement, parents):
    kinds = kinds_for(parents, replacement)
    for pair in pairs(len(kinds), kinds=kinds):
        run = exhaustive.tree_law(rule, pair.target, pair.draft, parents, replacement)
        law = emitted_law(rule, pair.target, pair.draft, tree=parents, replacement=replacement)
        assert law_distance(exhaustive.tokens_alone(run), law) < 1e-14
        accepted = sum(count * probability for (_, count), probability in run.items())
        told = expected_accepted(pair.target, pair.draft, rule, tree=parents, replacement=replacement)
        assert accepted == pytest.approx(told, abs=1e-14)


# ---- trees whose shape is no constant ------------------------------------------------------------


@pytest.fixture
def known_divisions(monkeypatch):
    """r of kseq by the rows, or it would be looked for once for every way the coins can fall."""
    solve, known = trees.KSeqNode.solution.func, {}

    def solution(node):
        key = (node.siblings, *(row.tobytes() for row in node.rows))
        if key not in known:
            known[key] = solve(node)
        return known[key]

    monkeypatch.setattr(trees.KSeqNode, "solution", property(solution))


def more_below_liked_tokens(draw, tokens):
    for node in [draw(-1), draw(-1)]:
        if tokens[node] == 0:
            first = draw(node)
            draw(node)
            if tokens[first] == 1:
                draw(first)


def another_candidate_after_a_bad_one(draw, tokens):
    if tokens[draw(-1)] != 0 and tokens[draw(-1)] != 0:
        draw(-1)


def wherever_something_else_says(draw, tokens):
    first, second = draw(-1), draw(-1)
    below = draw(first)
    if tokens[second] == 0:
        draw(first)
    if tokens[below] == 1:
        draw(-1)


def drop_bad_tokens(draw, tokens):
    drawn = [draw(-1), draw(-1), draw(-1)]
    return [node for node in drawn if tokens[node] != 0]


def best_first(draw, tokens):
    return sorted([draw(-1), draw(-1)], key=lambda node: tokens[node])


@pytest.mark.parametrize(
    ("grow", "lossless"),
    [
        (more_below_liked_tokens, {"recursive", "kseq", "traversal"}),
        (another_candidate_after_a_bad_one, {"recursive", "traversal"}),
        (wherever_something_else_says, {"recursive", "traversal"}),
        (drop_bad_tokens, set()),
        (best_first, set()),
    ],
)
@pytest.mark.parametrize("rule", ["recursive", "kseq", "traversal"])
def test_whether_a_node_is_there_may_hang_on_tokens_drawn_before_it_but_not_on_its_own(
    rule, grow, lossless, known_divisions
):
    # For kseq the number of siblings has to be known before the first one, too: r depends on it.
    distances = []
    for pair in pairs(2 if rule in lossless else 3, kinds=("full support", "zeros")):
        law = statements.continued(
            exhaustive.grown_tree_law(rule, pair.target, pair.draft, grow), pair.target_list, 4
        )
        distances.append(law_distance(law, target_law(pair.target, 4)))
    if rule in lossless:
        assert max(distances) <= LOSSLESS
    else:
        assert max(distances) > 1e-3


# ---- how much is accepted ------------------------------------------------------------------------


@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_block_accepts_at_least_as_much_as_exact(K):
    for pair in pairs(100):
        gain = expected_accepted(pair.target, pair.draft, "block", K) - expected_accepted(
            pair.target, pair.draft, "exact", K
        )
        assert gain >= -1e-12
        if K == 1:
            assert gain <= 1e-12


@pytest.mark.parametrize("K", [2, 3, 4])
def test_block_accepts_more_than_exact_on_most_pairs(K):
    some = pairs(60, kinds=("full support",))
    more = [
        expected_accepted(pair.target, pair.draft, "block", K)
        > expected_accepted(pair.target, pair.draft, "exact", K) + 1e-9
        for pair in some
    ]
    assert sum(more) > 0.9 * len(some)


@pytest.mark.parametrize("siblings", [1, 2, 3])
@pytest.mark.parametrize(("rule", "replacement"), TREE_CASES)
def test_several_candidates_are_accepted_at_least_as_often_as_one(rule, replacement, siblings):
    parents = [-1] * siblings
    for pair in pairs(100, kinds=kinds_for(parents, replacement)):
        single = acceptance(pair.target(()), pair.draft(()))
        several = expected_accepted(pair.target, pair.draft, rule, tree=parents, replacement=replacement)
        assert several >= single - 1e-12
        if siblings == 1:
            assert several == pytest.approx(single, abs=1e-12)


def first_children(parents):
    """Length of the path of first children."""
    length, node = 0, -1
    while node in parents:
        node = parents.index(node)
        length += 1
    return length


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize(("rule", "chain_rule"), [("recursive", "exact"), ("traversal", "block")])
def test_a_tree_accepts_at_least_as_much_as_its_first_children(rule, chain_rule, replacement, shape):
    parents = SHAPES[shape]
    for pair in pairs(40, kinds=kinds_for(parents, replacement)):
        chain = expected_accepted(pair.target, pair.draft, chain_rule, first_children(parents))
        tree = expected_accepted(pair.target, pair.draft, rule, tree=parents, replacement=replacement)
        assert tree >= chain - 1e-12


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize(("tree_rule", "chain_rule"), [("recursive", "exact"), ("traversal", "block")])
def test_a_tree_that_is_a_chain_has_the_law_of_the_chain(tree_rule, chain_rule, K):
    for pair in pairs(2 * len(KINDS)):
        chain = emitted_law(chain_rule, pair.target, pair.draft, K)
        assert law_distance(emitted_law(tree_rule, pair.target, pair.draft, K), chain) < 1e-15


def best_of_two(p, q):
    """The largest acceptance that two independent drafts from q allow, by linear programming.

    Unknown is the joint law of (draft, draft, emitted token); given are its margins.
    """
    V = len(p)
    cells = list(product(range(V), repeat=3))
    value = [-1.0 if z in (x, y) else 0.0 for x, y, z in cells]
    margins, given = [], []
    for x, y in product(range(V), repeat=2):
        margins.append([float(cell[:2] == (x, y)) for cell in cells])
        given.append(q[x] * q[y])
    for z in range(V):
        margins.append([float(cell[2] == z) for cell in cells])
        given.append(p[z])
    result = linprog(value, A_eq=margins, b_eq=given, bounds=(0.0, None), method="highs")
    assert result.status == 0
    return -result.fun


@pytest.mark.parametrize("V", [2, 3, 4])
def test_kseq_accepts_its_share_of_the_optimum(V):
    shares = []
    for pair in pairs(33, V=V):
        optimum = best_of_two(pair.target(()), pair.draft(()))
        told = expected_accepted(pair.target, pair.draft, "kseq", tree=FAN2)
        assert (1.0 - 0.5**2) * optimum - 1e-7 <= told <= optimum + 1e-7  # the solver's tolerance
        shares.append(told / optimum if optimum > 1e-7 else 1.0)
    assert min(shares) < 0.99  # no rule that is optimal hides behind the name


# ---- simulation ----------------------------------------------------------------------------------

SIMULATED = 4000
SIGMAS = 5.0  # a correct sampler fails one of these tests with probability 6e-7


def drawn(rng, row):
    return int(np.searchsorted(np.cumsum(row), rng.random() * row.sum(), side="right"))


@pytest.mark.parametrize("rule", ["exact", "block", "match", "typical", Cascade(0.2)])
def test_simulated_blocks_accept_what_is_expected(rule):
    pair, K = Pair("full support", 5), 3
    rng = np.random.default_rng(1)
    accepted = []
    for _ in range(SIMULATED):
        tokens = []
        for _ in range(K):
            tokens.append(drawn(rng, pair.draft(tokens)))
        target = [pair.target(tokens[:i]) for i in range(K + 1)]
        draft = [pair.draft(tokens[:i]) for i in range(K)]
        accepted.append(reference.verify_block(target, draft, tokens, rng, rule=rule).accepted)
    error = SIGMAS * np.std(accepted) / SIMULATED**0.5
    assert np.mean(accepted) == pytest.approx(expected_accepted(pair.target, pair.draft, rule, K), abs=error)
    assert 0.0 < error < 0.15


# ---- lossy rules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("deferral", ["tokenv1", "tokenv2", "tokenv3"])
@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_a_cascade_emits_exactly_what_it_says(alpha, deferral):
    def pi(pair):
        return lambda prefix: reference.cascade_token_target_distribution(
            pair.target(prefix), pair.draft(prefix), alpha=alpha, rule=deferral
        )

    rule = Cascade(alpha, deferral)
    for pair in pairs(2 * len(KINDS)):
        # One step; after a rejection the target goes on, and not the cascade.
        law = sequence_law(rule, pair.target, pair.draft, 3, 1)
        assert law_distance(law, target_law(pi(pair), 1)) < LOSSLESS
        # Two steps, where all first drafts are kept because none is deferred.
        if emitted_law(rule, pair.target, pair.draft, 1).keys() <= set(product(range(3), repeat=2)):
            law = sequence_law(rule, pair.target, pair.draft, 3, 2)
            assert law_distance(law, target_law(pi(pair), 2)) < LOSSLESS


@pytest.mark.parametrize("rule", ["typical", Cascade(0.3), Cascade(0.3, "tokenv1"), Cascade(0.3, "tokenv2")])
def test_lossy_rules_tell_how_far_they_are_from_the_target(rule):
    per_step = []
    for pair in pairs(20, kinds=("full support", "truncated")):
        by_length = []
        for length in (1, 2, 3, 4):
            law = sequence_law(rule, pair.target, pair.draft, 3, length)
            by_length.append(law_distance(law, target_law(pair.target, length)))
        # More of the same text can only tell the laws better apart.
        assert all(a <= b + 1e-12 for a, b in itertools.pairwise(by_length))
        per_step.append(by_length[0])
    assert max(per_step) > 0.1


def test_no_default_is_lossy():
    lossless = {"exact", "recursive"}
    for name in reference.__all__:
        function = getattr(reference, name)
        if inspect.isfunction(function) and name.startswith("verify"):
            rule = inspect.signature(function).parameters.get("rule")
            assert rule is None or rule.default in lossless


# ---- planted faults ------------------------------------------------------------------------------

CAUGHT = 1e-6


def test_catches_a_prefix_ratio_that_is_not_capped(monkeypatch):
    def uncapped(before, p, q):
        return before * p / q if q else float(before * p > 0.0)

    some = pairs(20, kinds=("full support",))
    assert worst("block", some, 2) <= LOSSLESS
    monkeypatch.setattr(rules, "prefix_acceptance", uncapped)
    assert worst("block", some, 2) > CAUGHT
    assert worst("block", some, 1) <= LOSSLESS  # K = 1 would not have shown it


def worst_run(rule, K):
    """Largest distance between what the verified block emits and what the oracle says."""
    return max(
        law_distance(
            exhaustive.tokens_alone(exhaustive.block_law(rule, pair.target, pair.draft, K)),
            emitted_law(rule, pair.target, pair.draft, K),
        )
        for pair in pairs(10, kinds=("full support",))
    )


def test_catches_a_correction_from_the_residual_of_another_prefix(monkeypatch):
    correct = rules.accept_count_block

    def shifted(*args, **options):
        accepted, prefixes = correct(*args, **options)
        return accepted, [1.0, *prefixes[:-1]]

    assert worst_run("block", 2) < 1e-14
    monkeypatch.setattr(rules, "accept_count_block", shifted)
    assert worst_run("block", 2) > CAUGHT
    assert worst_run("block", 1) < 1e-14  # K = 1 would not have shown it


def test_catches_a_threshold_from_the_rows_before_the_draft(monkeypatch):
    def one_row_early(target, draft, tokens, coins, *, check_draft=False):
        prefixes = rules.prefix_acceptances(target, draft, tokens)
        uniforms = [coins[i] for i in range(len(tokens))]
        for length in range(len(tokens), 0, -1):
            keep = prefixes[length - 1]
            if length < len(tokens):
                keep = rules.block_keep_probability(target[length - 1], draft[length - 1], keep)
            if rules.accepted_by(uniforms[length - 1], keep):
                return length, prefixes
        return 0, prefixes

    monkeypatch.setattr(rules, "accept_count_block", one_row_early)
    assert worst_run("block", 2) > CAUGHT
    assert worst_run("block", 1) < 1e-14


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_catches_siblings_verified_as_if_drawn_with_replacement(monkeypatch, rule):
    some = pairs(20, kinds=("full support",))
    assert worst(rule, some, tree=FAN2, replacement=False) <= LOSSLESS
    monkeypatch.setattr(trees.Remainder, "without", lambda rest, token: rest)
    assert worst(rule, some, tree=FAN2, replacement=False) > CAUGHT


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_catches_a_rejection_that_forgets_to_renormalise(monkeypatch, rule):
    some = pairs(20, kinds=("full support",))
    assert worst(rule, some, tree=FAN2) <= LOSSLESS
    monkeypatch.setattr(trees, "mass", lambda weights: 1.0)
    assert worst(rule, some, tree=FAN2) > CAUGHT


def test_catches_a_division_that_lets_kseq_take_more_than_there_is(monkeypatch):
    some = pairs(20, kinds=("full support",))
    monkeypatch.setattr(trees.KSeqNode, "solution", property(lambda node: (1.0, float(node.siblings))))
    assert worst("kseq", some, tree=FAN2) > CAUGHT


def test_catches_a_traversal_that_forgets_what_failed_below(monkeypatch):
    some = pairs(20, kinds=("full support",))
    monkeypatch.setattr(trees, "keep_probability", lambda mass, reach: reach)
    assert worst("traversal", some, tree=[-1, 0]) > CAUGHT
    assert worst("traversal", some, tree=FAN3) <= LOSSLESS  # below the context alone it would not show


def test_catches_typical_acceptance_that_draws_from_the_residual(monkeypatch):
    pair = Pair("full support", 3)
    rule = Typical(0.5, 0.9)

    def from_residual(rule, target, draft, accepted, accept_probabilities):
        return rules.exact_weights(target[accepted], draft[accepted])

    stated = statements.chain_law(statements.typical(0.5, 0.9), pair.target_list, pair.draft_list, 2, V=3)

    def distances():
        run = exhaustive.tokens_alone(exhaustive.block_law(rule, pair.target, pair.draft, 2))
        return [law_distance(law, stated) for law in (run, emitted_law(rule, pair.target, pair.draft, 2))]

    assert max(distances()) < 1e-14
    monkeypatch.setattr(rules, "weights_after_rejection", from_residual)
    assert min(distances()) > CAUGHT


def test_catches_a_cascade_that_mixes_q_into_pi_in_place_of_p(monkeypatch):
    pair, rule = Pair("full support", 3), Cascade(0.1)
    stated = statements.chain_law(
        statements.cascade(0.1, "tokenv3"), pair.target_list, pair.draft_list, 1, V=3
    )
    assert law_distance(emitted_law(rule, pair.target, pair.draft, 1), stated) < 1e-14
    correct = rules._cascade_parts

    def mixed(target_p, draft_q, rule):
        ids, _, q, deferred, mass = correct(target_p, draft_q, rule)
        return ids, q, q, deferred, mass

    monkeypatch.setattr(rules, "_cascade_parts", mixed)
    assert law_distance(emitted_law(rule, pair.target, pair.draft, 1), stated) > CAUGHT


# ---- the functions themselves --------------------------------------------------------------------


def test_rows_by_position_are_models_that_forget_their_prefix():
    target = np.array([[0.5, 0.25, 0.25], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    draft = np.array([[0.2, 0.3, 0.5], [0.4, 0.4, 0.2]])
    by_rows = emitted_law("block", target, draft)
    assert by_rows == emitted_law("block", lambda s: target[len(s)], lambda s: draft[len(s)], 2)
    sparse = [SparseDistribution(np.arange(3), row, 3) for row in target]
    assert law_distance(by_rows, emitted_law("block", sparse, draft)) < 1e-15
    assert sum(by_rows.values()) == pytest.approx(1.0)


def test_without_a_bonus_row_accepted_drafts_stand_alone():
    target, draft = [[0.5, 0.5], [0.25, 0.75]], [[1.0, 0.0], [0.0, 1.0]]
    law = emitted_law("exact", target, draft)
    assert law == {(1,): 0.5, (0, 0): 0.125, (0, 1): 0.375}
    assert expected_accepted(target, draft, "exact") == 0.5 + 0.375
    assert expected_accepted([*target, [1.0, 0.0]], draft, "exact") == 0.5 + 0.375


def test_a_tree_is_known_by_its_shape():
    pair = Pair("full support", 1)
    tree = TokenTree([2, 2, 0], [-1, -1, 0])
    law = emitted_law("recursive", pair.target, pair.draft, tree=tree)
    assert law == emitted_law("recursive", pair.target, pair.draft, tree=[-1, -1, 0])
    # Siblings are told apart by what hangs below them.
    other = emitted_law("recursive", pair.target, pair.draft, tree=[-1, -1, 1])
    assert law_distance(law, other) > 0.01
    # An empty tree is one draw.
    assert emitted_law("traversal", pair.target, pair.draft, tree=[]) == target_law(pair.target, 1)


def test_a_law_is_cut_or_continued_to_its_length():
    pair = Pair("full support", 2)
    assert sequence_law("exact", pair.target, pair.draft, 3, 0) == {(): pytest.approx(1.0)}
    cut = sequence_law("typical", pair.target, pair.draft, 3, 2)
    whole = sequence_law("typical", pair.target, pair.draft, 3, 6)
    marginal = {}
    for tokens, probability in whole.items():
        marginal[tokens[:2]] = marginal.get(tokens[:2], 0.0) + probability
    assert law_distance(cut, marginal) < 1e-14
    assert {len(tokens) for tokens in whole} == {6}


def test_distances():
    assert law_distance({(0,): 1.0}, {(1,): 1.0}) == 1.0
    assert law_distance({}, {}) == 0.0
    a, b = target_law([[0.5, 0.5]], 1), target_law([[0.25, 0.75]], 1)
    assert law_distance(a, b) == law_distance(b, a) == reference.total_variation([0.5, 0.5], [0.25, 0.75])


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda t, d: emitted_law("exact", t, d), ValueError),  # depth
        (lambda t, d: emitted_law("exact", t, d, -1), ValueError),
        (lambda t, d: emitted_law("no such rule", t, d, 1), ValueError),
        (lambda t, d: emitted_law(7, t, d, 1), TypeError),
        (lambda t, d: emitted_law("block", t, d, tree=FAN2), ValueError),
        (lambda t, d: emitted_law("recursive", t, d, 2, tree=FAN2), ValueError),
        (lambda t, d: emitted_law("kseq", t, d, tree=FAN2, replacement=False), ValueError),
        (lambda t, d: emitted_law("recursive", t, d, tree=[0]), ValueError),
        (lambda t, d: emitted_law("recursive", t, d, tree=[-1] * 4, replacement=False), ValueError),
        (lambda t, d: emitted_law("traversal", t, d, tree=[-1] * 4, replacement=False), ValueError),
        (lambda t, d: emitted_law("exact", lambda s: [0.5, -0.5], d, 1), ValueError),
        (lambda t, d: emitted_law("exact", t, lambda s: [[0.5, 0.5]], 1), ValueError),
        (lambda t, d: sequence_law("exact", t, d, 1, -1), ValueError),
        (lambda t, d: target_law([[0.5, 0.5]], 2), IndexError),
        (lambda t, d: acceptance([0.5, 0.5], [1.0]), ValueError),
        (lambda t, d: acceptance([0.5, np.nan], [1.0, 0.0]), ValueError),
    ],
)
def test_bad_questions(call, error):
    pair = Pair("full support", 0)
    with pytest.raises(error):
        call(pair.target, pair.draft)


BAD_ROWS = {
    "negative": ([-0.5, 1.5], r"entry 0 is -0\.5"),
    "NaN": ([0.5, np.nan], "entry 1 is nan"),
    "infinite": ([np.inf, 0.5], "entry 0 is inf"),
    "without mass": ([0.0, 0.0], "has no positive mass"),
    "short": ([1.0], "has [12] entries, .* [12]$"),
    "long": ([0.25, 0.25, 0.5], "has [23] entries, .* [23]$"),
    "sparse, of another length": (SparseDistribution([0], [1.0], 3), "has [23] entries, .* [23]$"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize(
    "rule",
    ["exact", "greedy", "match", "block", "typical", Cascade(0.2), "recursive", "kseq", "traversal"],
    ids=str,
)
def test_rows_that_are_no_distributions(rule, kind):
    """Whichever row it is: of the target at a draft, behind the drafts, or of the draft."""
    bad, message = BAD_ROWS[kind]
    good = [0.5, 0.5]
    for target, draft in (([bad, good], [good]), ([good, bad], [good]), ([good, good], [bad])):
        with pytest.raises(ValueError, match=f"(target|draft) after .*{message}"):
            emitted_law(rule, target, draft)
        with pytest.raises(ValueError, match=message):
            expected_accepted(target, draft, rule)
        with pytest.raises(ValueError, match=message):
            sequence_law(rule, [*target, good], draft, 1, 3)
    with pytest.raises(ValueError, match=message):
        sequence_law(rule, [good, good, bad], [good], 1, 3)


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_rows_that_are_no_distributions_without_a_rule(kind):
    bad, message = BAD_ROWS[kind]
    with pytest.raises(ValueError, match=message):
        target_law([[0.5, 0.5], bad], 2)
    for pair in (([0.5, 0.5], bad), (bad, [0.5, 0.5])):
        with pytest.raises(ValueError, match=message):
            acceptance(*pair)


def test_sparse_rows_may_differ_in_length():
    target = [SparseDistribution([0, 2], [0.5, 0.5], 3), SparseDistribution([1], [1.0], 2)]
    assert emitted_law("exact", target, [SparseDistribution([0], [1.0], 2)]) == {(2,): 0.5, (0, 1): 0.5}
    assert acceptance(*target) == 0.0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda rows: emitted_law("exact", rows, rows, -1), ValueError, "depth must be at least 0; got -1"),
        (lambda rows: emitted_law("kseq", rows, rows, -1), ValueError, "depth must be at least 0; got -1"),
        (
            lambda rows: expected_accepted(rows, rows, "block", -3),
            ValueError,
            "depth must be at least 0; got -3",
        ),
        (
            lambda rows: sequence_law("exact", rows, rows, -2, 1),
            ValueError,
            "depth must be at least 0; got -2",
        ),
        (lambda rows: sequence_law("exact", rows, rows, 1, -2), ValueError, "length is -2"),
        (lambda rows: target_law(rows, -1), ValueError, "length is -1"),
        (
            lambda rows: target_law(rows, 3),
            IndexError,
            r"target has 2 rows: none for what follows \(\d, \d\)",
        ),
        (lambda rows: emitted_law("exact", rows, rows[:1], 2), IndexError, "draft has 1 rows: none"),
        (lambda rows: emitted_law("block", rows[:1], rows, 2), IndexError, "target has 1 rows: none"),
    ],
)
def test_depths_and_lengths_that_cannot_be(call, error, message):
    with pytest.raises(error, match=message):
        call([[0.5, 0.5], [0.25, 0.75]])


def test_acceptance_is_what_one_draft_expects():
    for pair in pairs(len(KINDS)):
        p, q = pair.target(()), pair.draft(())
        told = expected_accepted(pair.target, pair.draft, "exact", 1)
        assert acceptance(p, q) == pytest.approx(told, abs=1e-15)
        sparse = [SparseDistribution(np.flatnonzero(row), row[row > 0.0], 3) for row in (p, q)]
        assert acceptance(*sparse) == pytest.approx(told, abs=1e-15)


@pytest.mark.parametrize("cost", [0.01, 0.1, 0.3, 0.7, 1.5])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.8, 0.95])
def test_the_best_depth_is_the_best(chance, cost):
    def tokens_for_the_time(depth):
        return sum(chance**i for i in range(depth + 1)) / (1.0 + depth * cost)

    chosen = best_depth(chance, cost)
    assert all(tokens_for_the_time(chosen) >= tokens_for_the_time(other) - 1e-15 for other in range(65))
    assert chosen == best_depth([chance] * 64, cost)


def test_the_best_depth_at_its_ends():
    assert best_depth(1.0, 0.0) == 64
    assert best_depth(1.0, 0.0, max_depth=3) == 3
    assert best_depth(1.0, 1.0) == 0  # drafting costs what it brings: the smallest of equals
    assert best_depth([], 0.1) == 0
    assert best_depth(np.float32(0.5), 0.1) == best_depth(0.5, 0.1)
    assert best_depth(1.0, 0.0, max_depth=0) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.5, 0.1), "acceptance of draft 1 .* is 1.5"),
        ((-0.1, 0.1), "draft 1 .* is -0.1"),
        ((float("nan"), 0.1), "draft 1 .* is nan"),
        (([0.5, "0.5"], 0.1), "draft 2 .* is '0.5'"),
        (([0.5] * 64 + [2.0], 0.1), "draft 65 .* is 2.0"),  # also behind max_depth
        ((None, 0.1), "acceptance must be a number or a sequence of them; it is None"),
        ((0.5, -0.1), "cost_ratio .* is -0.1"),
        ((0.5, float("nan")), "cost_ratio .* is nan"),
        ((0.5, None), "cost_ratio .* is None"),
    ],
)
def test_no_depth_is_best_of_nonsense(arguments, message):
    with pytest.raises(ValueError, match=message):
        best_depth(*arguments)
    with pytest.raises(ValueError, match="max_depth must be at least 0; got -1"):
        best_depth(0.5, 0.1, max_depth=-1)
