"""Blocks under every rule and trees, of dense rows.

Run ``pytest benches/bench_rules.py --benchmark-group-by=case``; ``-k "tree and kseq"`` selects.
What they cost beside single verifications: ``python benches/rules.py``.
"""

from functools import partial

import numpy as np
import pytest
from rules import PARENTS, drafted, model_rows

from mtplx import reference, verification
from mtplx.decisions import Cascade

V = 151_936
K = 5
BLOCK_RULES = ["exact", "greedy", "match", "block", "typical", Cascade(0.3)]
TREES = {
    "recursive": ("recursive", True),
    "recursive_without_replacement": ("recursive", False),
    "kseq": ("kseq", True),
    "traversal": ("traversal", True),
    "traversal_without_replacement": ("traversal", False),
}


@pytest.mark.parametrize("rule", BLOCK_RULES, ids=lambda rule: rule if isinstance(rule, str) else "cascade")
@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_block(compare, rule):
    rng = np.random.default_rng(1)
    target, draft = model_rows(rng, K + 1, V)
    tokens = [int(rng.choice(V, p=row)) for row in draft[:K]]
    arguments = target, draft[:K], tokens, np.random.default_rng(2)
    compare(
        reference=lambda: partial(reference.verify_block, *arguments, rule=rule),
        compiled=lambda: partial(verification.verify_block, *arguments, rule=rule),
    )


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_tree(compare, tree):
    rule, replacement = TREES[tree]
    rng = np.random.default_rng(3)
    target, draft = model_rows(rng, len(PARENTS) + 1, V)
    arguments = target, draft, drafted(rng, draft, replacement), np.random.default_rng(4)
    compare(
        reference=lambda: partial(reference.verify_tree, *arguments, rule=rule, replacement=replacement),
        compiled=lambda: partial(verification.verify_tree, *arguments, rule=rule, replacement=replacement),
    )
