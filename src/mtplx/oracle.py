"""The exact law of what an acceptance rule emits, by enumeration.

Design
------
A verification draws drafts, tosses coins and draws a token. Each coin is compared with a threshold that
rows and tokens determine, so the law of what is emitted is a finite sum: over the drafted tokens, over
"kept" and "rejected" with the threshold and its complement for weights, and over the tokens of the last
draw. Thresholds and weights come from the functions that decide in production (`mtplx.reference.rules`,
`mtplx.reference.trees`). No formula is written a second time in this module, so none can be right here
and wrong there; the derivation that is independent of both is ``tests/support/rules.py``.

How the coins go:

- *one after the other* (the sequential chain rules): a draft is kept with its threshold, whatever came
  before;
- *from the longest prefix down* (``"block"``): every prefix has a coin of its own, so a prefix is
  emitted with its threshold times the probability that all longer ones fail, which is a sum over the
  drafts behind it;
- *top down through a tree*: siblings one after the other, each against the state that the rejections
  before it left; below an accepted one the same again. Subtrees of one shape below one prefix have one law;
- *bottom up*: what happens in the subtree of a child matters to its parent only through the
  probability that all of it is rejected.

Rows are functions of the prefix, as a language model's are. A rule can be exact for rows that do not
depend on it and wrong otherwise; a public implementation of the block rule was wrong from the third
draft on. Work grows as ``V**depth``: the oracle is for V of 2 to 5 and a handful of drafts, where a
mistake in a rule shows already.

Examples
--------
The exact rule emits the target's law, typical acceptance does not:

>>> target, draft = [[0.5, 0.5], [0.5, 0.5]], [[0.9, 0.1]]
>>> wanted = target_law(target, 2)
>>> round(law_distance(sequence_law("exact", target, draft, 1, 2), wanted), 12)
0.0
>>> round(law_distance(sequence_law("typical", target, draft, 1, 2), wanted), 12)
0.4
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from numbers import Real
from typing import Any, cast

import numpy as np

from mtplx.arguments import as_count, as_integer
from mtplx.decisions import (
    TREE_RULES,
    CanonicalRule,
    Rule,
    TokenTree,
    TreeRule,
    as_rule,
    as_tree_rule,
)
from mtplx.distributions import BatchedSparseDistributions, Distribution, SparseDistribution
from mtplx.reference import rules, trees
from mtplx.reference.one_row import (
    Weights,
    as_dense,
    as_probabilities,
    probability_of,
    require_same_length,
    weights_of,
)
from mtplx.reference.rows import as_distribution, as_distributions, vocabulary

__all__ = [
    "Law",
    "Model",
    "acceptance",
    "best_depth",
    "emitted_law",
    "expected_accepted",
    "law_distance",
    "sequence_law",
    "target_law",
]

Tokens = tuple[int, ...]

Law = dict[Tokens, float]
"""Probabilities by emitted tokens; what cannot be emitted is not in it."""

Model = Callable[[Tokens], Any] | Sequence[Any] | np.ndarray | BatchedSparseDistributions
"""A function from a prefix to the distribution of the next token, or rows: row i after i tokens."""

Shape = tuple["Shape", ...]
"""The shape of a tree below a node: the shapes below its children."""

Shares = list[tuple[int, float]]
"""Tokens of positive probability, each with it."""


# ---- rows ----------------------------------------------------------------------------------------


def _shares(weights: Weights) -> Shares:
    """A categorical draw: each token it can give, and how likely."""
    ids, values = weights
    total = float(values.sum())
    tokens = range(values.size) if ids is None else ids.tolist()
    return [(token, value / total) for token, value in zip(tokens, values.tolist(), strict=True) if value]


class _Lengths:
    """V of the rows of target and draft, which must be one. Sparse rows among themselves may differ in it."""

    def __init__(self) -> None:
        self._places: dict[bool, dict[int, str]] = {True: {}, False: {}}

    def add(self, row: Distribution, place: str) -> None:
        size = vocabulary(row)
        self._places[isinstance(row, SparseDistribution)].setdefault(size, place)
        if not self._places[False]:
            return
        for other, first in (self._places[True] | self._places[False]).items():
            if other != size:
                raise ValueError(f"{place} has {size} entries, {first} {other}")


class _Rows:
    """Rows by prefix, each made once and checked."""

    def __init__(self, model: Any, name: str, lengths: _Lengths) -> None:
        if callable(model):
            self._row: Callable[[Tokens], Any] = model
            self.count: int | None = None
        else:
            rows = as_distributions(model, name)
            self._row = lambda prefix: rows[len(prefix)]
            self.count = len(rows)
        self._name = name
        self._lengths = lengths
        self._made: dict[Tokens, tuple[Distribution, Shares]] = {}

    def _at(self, prefix: Tokens) -> tuple[Distribution, Shares]:
        made = self._made.get(prefix)
        if made is None:
            if self.count is not None and len(prefix) >= self.count:
                raise IndexError(f"{self._name} has {self.count} rows: none for what follows {prefix}")
            place = f"{self._name} after {prefix}"
            row = as_distribution(self._row(prefix), place)
            self._lengths.add(row, place)
            made = self._made[prefix] = row, _shares(weights_of(row, place))
        return made

    def __getitem__(self, prefix: Tokens) -> Distribution:
        return self._at(prefix)[0]

    def shares(self, prefix: Tokens) -> Shares:
        return self._at(prefix)[1]


class _Outcomes:
    """What was emitted with which probability, and how many drafts of it were accepted."""

    def __init__(self) -> None:
        self.mass: dict[tuple[Tokens, int], float] = {}

    def add(self, kept: Tokens, mass: float, shares: Shares | None) -> None:
        """The accepted drafts `kept`, then one token out of `shares` (None: no token)."""
        if mass <= 0.0:
            return
        accepted = len(kept)
        if shares is None:
            self.mass[kept, accepted] = self.mass.get((kept, accepted), 0.0) + mass
            return
        for token, share in shares:
            key = ((*kept, token), accepted)
            self.mass[key] = self.mass.get(key, 0.0) + mass * share


def _chance(threshold: float) -> float:
    """How likely a coin, uniform in [0, 1), is accepted by a threshold."""
    return min(1.0, max(0.0, threshold))


# ---- chains --------------------------------------------------------------------------------------


def _kept(rule: CanonicalRule, p: Distribution, q: Distribution, token: int) -> float:
    """How likely a sequential rule keeps a draft: what it reports of a block of one."""
    _, (keep,) = rules.accept_count(rule, [p], [q], [token], [0.0], [token])
    return keep / float(weights_of(p, "target_p")[1].sum()) if rule == "match" else keep


def _after_rejection(rule: CanonicalRule, p: Distribution, q: Distribution, token: int) -> Shares:
    """What the rejected draft `token` is replaced from."""
    if rule == "greedy":
        return [(rules.best_token(p), 1.0)]
    if rule == "match":  # the token drawn, given that it is another one
        ids, values = weights_of(p, "target_p")
        others = (np.arange(values.size) if ids is None else ids) != token
        return _shares((ids, np.where(others, values, 0.0)))
    return _shares(rules.weights_after_rejection(rule, [p], [q], 0, []))


def _sequential(rule: CanonicalRule, target: _Rows, draft: _Rows, depth: int) -> _Outcomes:
    outcomes = _Outcomes()
    reached: dict[Tokens, float] = {(): 1.0}
    for _ in range(depth):
        kept: dict[Tokens, float] = {}
        for prefix, mass in reached.items():
            p, q = target[prefix], draft[prefix]
            for token, drafted in draft.shares(prefix):
                keep = _chance(_kept(rule, p, q, token))
                if keep > 0.0:
                    kept[*prefix, token] = mass * drafted * keep
                if keep < 1.0:
                    outcomes.add(prefix, mass * drafted * (1.0 - keep), _after_rejection(rule, p, q, token))
        reached = kept
    for prefix, mass in reached.items():
        outcomes.add(prefix, mass, _bonus(rule, target, prefix))
    return outcomes


def _bonus(rule: CanonicalRule, target: _Rows, prefix: Tokens) -> Shares | None:
    if target.count == len(prefix):
        return None
    return [(rules.best_token(target[prefix]), 1.0)] if rule == "greedy" else target.shares(prefix)


def _longest_first(target: _Rows, draft: _Rows, depth: int) -> _Outcomes:
    outcomes = _Outcomes()

    def visit(prefix: Tokens, mass: float, accept: float) -> float:
        """Take note of all that keeps `prefix` or more; how likely is it that this does not happen?"""
        if len(prefix) == depth:
            keep = _chance(accept)
            outcomes.add(prefix, mass * keep, _bonus("block", target, prefix))
            return 1.0 - keep
        p, q = target[prefix], draft[prefix]
        longer_fail = 0.0
        for token, drafted in draft.shares(prefix):
            longer = rules.prefix_acceptance(
                accept, probability_of(p, token, "target_p"), probability_of(q, token, "draft_q")
            )
            longer_fail += drafted * visit((*prefix, token), mass * drafted, longer)
        keep = _chance(rules.block_keep_probability(p, q, accept)) if prefix else 1.0
        if keep * longer_fail > 0.0:
            outcomes.add(prefix, mass * longer_fail * keep, _shares(rules.block_weights(p, q, accept)))
        return longer_fail * (1.0 - keep)

    visit((), 1.0, 1.0)
    return outcomes


# ---- trees ---------------------------------------------------------------------------------------


def _shape_of(tree: Any) -> Shape:
    given = tree.parents.tolist() if isinstance(tree, TokenTree) else tree
    parents = [as_integer(parent, "a parent") for parent in given]
    TokenTree([0] * len(parents), parents)  # for its checks
    below: list[list[Shape]] = [[] for _ in range(len(parents) + 1)]
    for node in range(len(parents) - 1, -1, -1):
        below[parents[node] + 1].insert(0, tuple(below[node + 1]))
    return tuple(below[0])


def _chain(depth: int) -> Shape:
    shape: Shape = ()
    for _ in range(depth):
        shape = (shape,)
    return shape


def _drawable(draft: _Rows, prefix: Tokens, siblings: int, replacement: bool) -> Shares:
    shares = draft.shares(prefix)
    if not replacement and len(shares) < siblings:
        raise ValueError(
            f"the draft row after {prefix} has {len(shares)} tokens: "
            f"{siblings} siblings cannot be drawn from it without replacement"
        )
    return shares


def _siblings(left: Shares, replacement: bool) -> Iterator[tuple[int, float, Shares]]:
    """Each token that the next sibling can be, how likely, and what the one after it is drawn from."""
    for token, drafted in left:
        if replacement:
            yield token, drafted, left
        else:
            others = [(other, share) for other, share in left if other != token]
            rest = sum(share for _, share in others)
            yield token, drafted, [(other, share / rest) for other, share in others]


def _top_down(rule: TreeRule, target: _Rows, draft: _Rows, shape: Shape, replacement: bool) -> _Outcomes:
    @cache
    def law_below(prefix: Tokens, shape: Shape) -> Law:
        if not shape:
            return {(token,): share for token, share in target.shares(prefix)}
        law: Law = {}
        start = trees.open_node(rule, target[prefix], draft[prefix], len(shape), replacement)
        drawable = _drawable(draft, prefix, len(shape), replacement)
        pending: list[tuple[trees.TreeNode, Shares, float]] = [(start, drawable, 1.0)]
        for child in shape:
            rejected = []
            for node, left, mass in pending:
                for token, drafted, then_left in _siblings(left, replacement):
                    keep = _chance(node.child_probability(token))
                    if keep > 0.0:
                        for tail, share in law_below((*prefix, token), child).items():
                            tokens = (token, *tail)
                            law[tokens] = law.get(tokens, 0.0) + mass * drafted * keep * share
                    if keep < 1.0:
                        rejected.append((node.rejected(token), then_left, mass * drafted * (1.0 - keep)))
            pending = rejected
        for node, _, mass in pending:
            for token, share in _shares(node.weights()):
                law[token,] = law.get((token,), 0.0) + mass * share
        return law

    outcomes = _Outcomes()
    outcomes.mass = {(tokens, len(tokens) - 1): mass for tokens, mass in law_below((), shape).items()}
    return outcomes


def _bottom_up(target: _Rows, draft: _Rows, shape: Shape, replacement: bool) -> _Outcomes:
    outcomes = _Outcomes()

    def visit(prefix: Tokens, mass: float, reach: float, shape: Shape) -> float:
        """Take note of all that ends in this subtree; how likely is it that nothing does?"""
        if not shape:
            keep = _chance(reach) if prefix else 1.0
            outcomes.add(prefix, mass * keep, target.shares(prefix))
            return 1.0 - keep
        start = trees.TraversalNode.open(target[prefix], draft[prefix], replacement, reach)
        pending = [(start, _drawable(draft, prefix, len(shape), replacement), 1.0)]
        for child in shape:
            rejected = []
            for node, left, part in pending:
                for token, drafted, then_left in _siblings(left, replacement):
                    there = (*prefix, token)
                    fail = visit(there, mass * part * drafted, node.child_probability(token), child)
                    if fail > 0.0:
                        rejected.append((node.rejected(token), then_left, part * drafted * fail))
            pending = rejected
        all_fail = 0.0
        for node, _, part in pending:
            keep = _chance(node.reach) if prefix else 1.0
            if part * keep > 0.0:
                outcomes.add(prefix, mass * part * keep, _shares(node.weights()))
            all_fail += part * (1.0 - keep)
        return all_fail

    visit((), 1.0, 1.0, shape)
    return outcomes


# ---- what is asked -------------------------------------------------------------------------------


def _depth(depth: int | None, draft: _Rows) -> int:
    if depth is None:
        if draft.count is None:
            raise ValueError("depth is needed: a draft that is a function does not tell it")
        return draft.count
    return as_count(depth, "depth", 0)


def _pair(target: Any, draft: Any) -> tuple[_Rows, _Rows]:
    lengths = _Lengths()
    return _Rows(target, "target", lengths), _Rows(draft, "draft", lengths)


def _outcomes(
    rule: Any, target: _Rows, draft: _Rows, depth: int | None, tree: Any, replacement: bool
) -> _Outcomes:
    if isinstance(rule, str) and rule in TREE_RULES:
        name = as_tree_rule(rule, replacement)
        if tree is not None and depth is not None:
            raise ValueError("either depth or tree is given, not both")
        shape = _chain(_depth(depth, draft)) if tree is None else _shape_of(tree)
        if name == "traversal":
            return _bottom_up(target, draft, shape, replacement)
        return _top_down(name, target, draft, shape, replacement)
    chosen = as_rule(rule)
    if tree is not None:
        raise ValueError(f"rule {rule!r} is for chains; those for trees are {', '.join(TREE_RULES)}")
    count = _depth(depth, draft)
    if chosen == "block":
        return _longest_first(target, draft, count)
    return _sequential(chosen, target, draft, count)


def emitted_law(
    rule: Rule | TreeRule,
    target: Model,
    draft: Model,
    depth: int | None = None,
    *,
    tree: TokenTree | Sequence[int] | None = None,
    replacement: bool = True,
) -> Law:
    """The exact law of the tokens that one verification emits.

    Parameters
    ----------
    rule : str, Typical or Cascade
        A rule of `verify_block` or of `verify_tree`.
    target, draft : callable or rows
        The distribution of the next token as a function of the tokens since the context (a tuple), or
        rows where it does not depend on them. Drafts are drawn from `draft`. With as many target rows
        as drafts, a chain has no bonus token.
    depth : int, optional
        K; default the number of draft rows. For a rule for trees: a chain of K nodes.
    tree : TokenTree or sequence of int, optional
        The shape of the drafted trees, as a tree (its tokens do not matter) or as its parents.
    replacement : bool
        How siblings are drawn, and what the rule is told.

    Returns
    -------
    dict
        Probabilities by tuples of tokens.

    Raises
    ------
    ValueError
        Unknown rule; a chain rule with a tree, or a tree rule with a tree and a depth; no way to tell the
        depth, or a negative one; more siblings without replacement than a draft row has tokens; a row that
        is reached is negative or not finite somewhere, has no mass, or another length than one before it.
    IndexError
        Fewer rows than are reached.

    Examples
    --------
    >>> emitted_law("exact", [[0.5, 0.5], [1.0, 0.0]], [[1.0, 0.0]])
    {(1,): 0.5, (0, 0): 0.5}
    """
    outcomes = _outcomes(rule, *_pair(target, draft), depth, tree, replacement)
    law: Law = {}
    for (tokens, _), mass in outcomes.mass.items():
        law[tokens] = law.get(tokens, 0.0) + mass
    return law


def _continued(law: Mapping[Tokens, float], target: _Rows, length: int) -> Law:
    if length < 0:
        raise ValueError(f"length is {length}")
    whole: Law = {}
    # The longest first, so that what a shorter one is continued to is met when its turn comes.
    by_length: list[Law] = [{} for _ in range(length + 1)]
    for tokens, mass in law.items():
        cut = tokens[:length]
        by_length[len(cut)][cut] = by_length[len(cut)].get(cut, 0.0) + mass
    for at in range(length):
        for prefix, mass in by_length[at].items():
            for token, share in target.shares(prefix):
                longer = (*prefix, token)
                by_length[at + 1][longer] = by_length[at + 1].get(longer, 0.0) + mass * share
    whole.update(by_length[length])
    return whole


def sequence_law(
    rule: Rule | TreeRule,
    target: Model,
    draft: Model,
    depth: int | None,
    length: int,
    *,
    tree: TokenTree | Sequence[int] | None = None,
    replacement: bool = True,
) -> Law:
    """The law of the first `length` tokens when one verification is followed by plain decoding.

    What `emitted_law` gives, cut or continued with the target. A lossless rule gives `target_law`.

    Parameters
    ----------
    rule, target, draft, depth, tree, replacement
        As in `emitted_law`. Target rows must be at least `length`.
    length : int

    Returns
    -------
    dict

    Raises
    ------
    ValueError, IndexError
        As in `emitted_law`; `length` is negative.

    Examples
    --------
    >>> sequence_law("greedy", [[0.0, 1.0], [1.0, 0.0]], [[0.5, 0.5]], 1, 2)
    {(1, 0): 1.0}
    """
    rows, drafts = _pair(target, draft)
    outcomes = _outcomes(rule, rows, drafts, depth, tree, replacement)
    law: Law = {}
    for (tokens, _), mass in outcomes.mass.items():
        law[tokens] = law.get(tokens, 0.0) + mass
    return _continued(law, rows, as_integer(length, "length"))


def target_law(target: Model, length: int) -> Law:
    """The law of `length` tokens decoded plainly from the target.

    Parameters
    ----------
    target
        As in `emitted_law`.
    length : int

    Returns
    -------
    dict

    Raises
    ------
    ValueError, IndexError
        As in `emitted_law`; `length` is negative.

    Examples
    --------
    >>> target_law([[0.5, 0.5], [1.0, 0.0]], 2)
    {(0, 0): 0.5, (1, 0): 0.5}
    """
    return _continued({(): 1.0}, _Rows(target, "target", _Lengths()), as_integer(length, "length"))


def law_distance(a: Mapping[Tokens, float], b: Mapping[Tokens, float]) -> float:
    """Distance in total variation, ``sum |a - b| / 2``.

    Examples
    --------
    >>> law_distance({(0,): 1.0}, {(0,): 0.75, (1,): 0.25})
    0.25
    """
    return 0.5 * sum(abs(a.get(tokens, 0.0) - b.get(tokens, 0.0)) for tokens in {**a, **b})


def expected_accepted(
    target: Model,
    draft: Model,
    rule: Rule | TreeRule,
    depth: int | None = None,
    *,
    tree: TokenTree | Sequence[int] | None = None,
    replacement: bool = True,
) -> float:
    """The expected number of drafts that one verification accepts.

    Parameters
    ----------
    target, draft, rule, depth, tree, replacement
        As in `emitted_law`; mind the order.

    Returns
    -------
    float

    Raises
    ------
    ValueError, IndexError
        As in `emitted_law`.

    Examples
    --------
    >>> expected_accepted([[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0]], "exact")
    0.5
    """
    outcomes = _outcomes(rule, *_pair(target, draft), depth, tree, replacement)
    return sum(accepted * mass for (_, accepted), mass in outcomes.mass.items())


def acceptance(p: Any, q: Any) -> float:
    """``sum min(p, q)``: how likely a single draft from q is accepted.

    Parameters
    ----------
    p, q : array_like of float, shape (V,), or SparseDistribution

    Returns
    -------
    float

    Raises
    ------
    ValueError
        A probability is negative or not finite, a row has no mass, dense lengths differ.

    Examples
    --------
    >>> acceptance([0.5, 0.5], [1.0, 0.0])
    0.5
    """
    rows = [as_distribution(row, name) for row, name in ((p, "p"), (q, "q"))]
    require_same_length(*rows)
    size = max(map(vocabulary, rows))
    dense = [as_probabilities(as_dense(row, name), name) for row, name in zip(rows, "pq", strict=True)]
    return float(np.minimum(*(np.pad(row, (0, size - row.size)) for row in dense)).sum())


def best_depth(acceptance: float | Sequence[float], cost_ratio: float, *, max_depth: int = 64) -> int:
    """The number of drafts that gives the most tokens for the time.

    With `a_i` the probability that draft i is accepted, given that those before it were, a block of K
    drafts emits ``1 + a_1 + a_1 a_2 + ... + a_1..a_K`` tokens in ``1 + K cost_ratio`` target calls.

    Parameters
    ----------
    acceptance : float, or sequence of float
        The same at every depth, or by depth; a sequence is as deep as it is long.
    cost_ratio : float
        Time of one draft over the time of one call of the target.
    max_depth : int
        No depth above is considered: where drafts are always accepted or cost nothing, more is always
        better.

    Returns
    -------
    int
        0: drafting does not pay. The smallest among equals.

    Raises
    ------
    ValueError
        A probability outside [0, 1], a cost that is negative or NaN, no number; `max_depth` is negative.

    References
    ----------
    Leviathan et al. (arXiv:2211.17192), section 3.3.

    Examples
    --------
    >>> best_depth(0.8, 0.05), best_depth(0.8, 0.9), best_depth([0.9, 0.1, 0.1], 0.2)
    (8, 0, 1)
    """
    if not isinstance(cost_ratio, Real) or not cost_ratio >= 0.0:
        raise ValueError(f"cost_ratio must be a number of at least 0; it is {cost_ratio!r}")
    deepest = as_count(max_depth, "max_depth", 0)
    try:
        given = [acceptance] if isinstance(acceptance, Real) else list(cast(Sequence[float], acceptance))
    except TypeError:
        raise ValueError(f"acceptance must be a number or a sequence of them; it is {acceptance!r}") from None
    for depth, chance in enumerate(given, start=1):
        if not isinstance(chance, Real) or not 0.0 <= chance <= 1.0:
            raise ValueError(f"the acceptance of draft {depth} must be in [0, 1]; it is {chance!r}")
    chances = given * deepest if isinstance(acceptance, Real) else given[:deepest]
    best, best_rate = 0, 1.0
    tokens, reached = 1.0, 1.0
    for depth, chance in enumerate(map(float, chances), start=1):
        reached *= chance
        tokens += reached
        rate = tokens / (1.0 + depth * cost_ratio)
        if rate > best_rate:
            best, best_rate = depth, rate
    return best
