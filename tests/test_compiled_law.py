"""The compiled rules have the laws that the oracle gives, their coins and draws measured from outside.

`support.compiled` knows the calls alone and halves every uniform down to its last bit, so a law is found to
2**-53 a threshold: some 1e-15 in all, far below the 1e-12 that lossless rules are held to.
"""

import numpy as np
import pytest
from support import compiled
from support import rules as statements
from support.pairs import KINDS, TWO_WIDE, WIDE, pairs

from mtplx import verification
from mtplx.decisions import Cascade, Typical
from mtplx.oracle import emitted_law, law_distance, target_law

LOSSLESS = 1e-12
CHAIN_RULES = [
    "exact",
    "greedy",
    "match",
    "block",
    Typical(),
    Typical(0.6, 0.9),
    Cascade(0.2, "tokenv1"),
    Cascade(0.2, "tokenv2"),
    Cascade(0.2),
]
TREES = {"two": [-1, -1], "three": [-1, -1, -1], "chain": [-1, 0, 1], "uneven": [-1, -1, 0, 0, 1]}
TREE_CASES = [
    ("recursive", True),
    ("recursive", False),
    ("kseq", True),
    ("traversal", True),
    ("traversal", False),
]


def rows(model):
    return lambda prefix: np.asarray(model(prefix), dtype=np.float64)


@pytest.mark.parametrize(("K", "count"), [(1, 100), (2, 30), (3, 8), (4, 1)])
@pytest.mark.parametrize("rule", CHAIN_RULES, ids=str)
def test_compiled_blocks_have_the_law_of_the_oracle(isa, rule, K, count):
    for pair in pairs(max(count // (1 if isa == "avx2" else 4), 1)):
        law = compiled.block_law(rule, rows(pair.target), rows(pair.draft), K, 3)
        assert sum(law.values()) == pytest.approx(1.0, abs=LOSSLESS)
        assert law_distance(law, emitted_law(rule, pair.target, pair.draft, K)) <= LOSSLESS
        if rule in ("exact", "match", "block"):
            whole = statements.continued(law, pair.target_list, K + 1)
            assert law_distance(whole, target_law(pair.target, K + 1)) <= LOSSLESS


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize(("rule", "replacement"), TREE_CASES)
def test_compiled_trees_have_the_law_of_the_oracle(isa, rule, replacement, shape):
    parents = TREES[shape]
    siblings = max(parents.count(node) for node in parents)
    kinds = KINDS if replacement else (WIDE if siblings > 2 else TWO_WIDE)
    for pair in pairs(1 if len(parents) > 4 else 2 if isa == "baseline" else len(kinds), kinds=kinds):
        drafted = statements.drafted_trees(pair.draft_list, parents, replacement, 3)
        law = compiled.tree_law(rule, rows(pair.target), rows(pair.draft), parents, replacement, 3, drafted)
        assert sum(law.values()) == pytest.approx(1.0, abs=LOSSLESS)
        told = emitted_law(rule, pair.target, pair.draft, tree=parents, replacement=replacement)
        assert law_distance(law, told) <= LOSSLESS
        length = 4
        whole = statements.continued(law, pair.target_list, length)
        assert law_distance(whole, target_law(pair.target, length)) <= LOSSLESS


# ---- what the measurement sees -----------------------------------------------------------------------


def distances(monkeypatch, fault, rule, K):
    """How far the measured law is from the oracle's when the rows handed over are not those drawn from."""
    correct = verification.verify_block

    def wrong(target, draft, tokens, rng, *, rule):
        return correct(*fault(target, draft), tokens, rng, rule=rule)

    monkeypatch.setattr(verification, "verify_block", wrong)
    return [
        law_distance(
            compiled.block_law(rule, rows(pair.target), rows(pair.draft), K, 3),
            emitted_law(rule, pair.target, pair.draft, K),
        )
        for pair in pairs(3, kinds=("full support",))
    ]


@pytest.mark.parametrize("rule", ["exact", "block", Cascade(0.2)], ids=str)
def test_it_sees_an_error_of_a_millionth(monkeypatch, rule):
    def nudged(target, draft):
        target = target.copy()
        target[0, 0] += 1e-6
        return target, draft

    assert min(distances(monkeypatch, nudged, rule, 2)) > 1e-8


def test_it_sees_siblings_verified_as_if_drawn_otherwise():
    parents = TREES["two"]
    for rule in ("recursive", "traversal"):
        distances = []
        for pair in pairs(5, kinds=("full support",)):
            drafted = list(statements.drafted_trees(pair.draft_list, parents, False, 3))
            law = compiled.tree_law(rule, rows(pair.target), rows(pair.draft), parents, True, 3, drafted)
            told = emitted_law(rule, pair.target, pair.draft, tree=parents, replacement=False)
            distances.append(law_distance(law, told))
        assert max(distances) > 1e-3
