"""Trees of drafts: several candidates for a position, verified in one call.

Design
------
A rule is a class whose objects stand for *one node of the tree, some of whose children were rejected*.
The methods are functions of rows and tokens alone and none of them draws: the threshold that a coin is
compared with, the node after one more rejection, the weights that the next token is drawn from.
`verify_tree` walks over such nodes with a stream of uniforms; `mtplx.oracle` walks over the very same
ones and multiplies by the threshold where `verify_tree` tosses a coin.

=============== ================= ========= =======================================================
rule            node              order     a tested child is kept with probability
=============== ================= ========= =======================================================
``"recursive"`` `RecursiveNode`   top down  ``min(1, p(x)/q(x))``, p what earlier siblings left over
``"kseq"``      `KSeqNode`        top down  ``min(1, p(x)/(r q(x)))``, one r for all siblings
``"traversal"`` `TraversalNode`   bottom up ``min(1, P p(x)/q(x))``, P the same of the path above it
=============== ================= ========= =======================================================

*Top down*: the children of the context are tested in index order; the first that is kept becomes the
node whose children are tested next. *Bottom up*: first children are followed to a leaf, which is tested
first; a leaf that fails is removed, its parent accounts for the failure in its own row and goes on with
its next child, or is tested itself when none is left. The context is kept without a test.

*Sums* over V that a rule divides by (after a rejection, in the equation of ``"kseq"``) are taken in one
fixed order, `mass`, whose result later tests depend on to the last bit. No quotient is taken but of single
entries: what is left of a row stays a difference of the two rows as given, `Remainder`.

On a tree that is a chain, ``"recursive"`` is ``verify_block`` with the rule ``"exact"``, draw for draw,
and ``"traversal"`` has the thresholds of ``"block"`` (it draws its coins one by one, from the end).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from mtplx.arguments import as_integer
from mtplx.decisions import TokenTree, TreeDecision, TreeRule, as_tree_rule
from mtplx.distributions import Distribution, SparseDistribution, errors_at
from mtplx.reference.one_row import (
    Float64,
    Weights,
    _positive_part,
    aligned,
    as_dense,
    as_probabilities,
    positive_weights,
    probability_of,
    require_same_length,
    weights_of,
)
from mtplx.reference.rows import Indexed, as_distributions, vocabulary
from mtplx.reference.rules import accepted_by, keep_probability, prefix_acceptance
from mtplx.reference.streams import (
    BONUS_LANE,
    CORRECTION_LANE,
    NODE_LANE,
    GeneratorStream,
    KeyedStream,
    Stream,
)

# ---- the rules, one node at a time ---------------------------------------------------------------

ONE_BY_ONE = 256
LANES = 16


def mass(weights: Float64) -> float:
    """The sum of a row by ascending id, in an order that vectors can keep.

    Up to 256 entries one by one. A longer row is cut into blocks of 256: in each, entry i belongs to lane
    ``i % 16``, lanes are summed one by one and then folded in halves (lane j with lane j + 8, then j + 4,
    j + 2, j + 1); the sums of the blocks are added one by one. No entry passes through more than
    ``V/256 + 20`` additions.

    Examples
    --------
    >>> mass(np.array([0.25, 0.5])), mass(np.full(1000, 0.125))
    (0.75, 125.0)
    """
    with np.errstate(all="ignore"):
        if weights.size <= ONE_BY_ONE:
            return float(np.cumsum(weights)[-1]) if weights.size else 0.0
        blocks = np.pad(weights, (0, -weights.size % ONE_BY_ONE)).reshape(-1, ONE_BY_ONE // LANES, LANES)
        lanes = blocks[:, 0].copy()
        for group in range(1, ONE_BY_ONE // LANES):
            lanes += blocks[:, group]
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        return float(np.cumsum(lanes[:, 0])[-1])


class TreeNode(Protocol):
    """A node with children, the first few of which were rejected."""

    def target_probability(self, token: int) -> float:
        """p(x) of the next test."""

    def draft_probability(self, token: int) -> float:
        """q(x) of the next child."""

    def acceptance_bounds(self, token: int) -> tuple[float, float]:
        """Between which `child_probability` lies, as far as the entries of one token tell."""

    def child_probability(self, token: int) -> float:
        """What the coin of the next child is compared with (bottom up: unless its own children fail)."""

    def rejected(self, token: int) -> TreeNode:
        """The node once its next child, which holds `token`, is rejected too."""

    def weights(self) -> Weights:
        """What the next token is drawn from if the path ends here, undivided."""


@dataclass(frozen=True, slots=True)
class Remainder:
    """What rejections left of the two rows of a node, told by the rows as they were given.

    The first rejection leaves ``(P p - q)+``. From D of mass R the next one leaves ``(P D/R - q)+``, which
    is ``(D - c q)+`` times ``P/R``, with ``c = R/P``; and as D itself is ``(s p - b q)+``, that is
    ``(s p - (b + c) q)+``. So however many children failed, what is left is one difference of the given
    rows, `scale` s and `multiple` b being all that changes. Without replacement the q that is subtracted
    is what the given row has without the removed tokens, divided by its mass m: ``c = R/(P m)``, and b of
    a removed token grows no further.

    Parameters
    ----------
    target, draft : Distribution
        The rows as given.
    scale, multiple : float
        s and b.
    left : Weights or None
        D. None as long as nothing was taken from p.
    mass : float
        R.
    removed : tuple of (int, float)
        Tokens taken out of q, each with its own b.
    draft_mass : float
        m.
    used_up : bool
        Whether nothing is left of q.

    Examples
    --------
    >>> start = Remainder(np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.75, 0.25]))
    >>> rest, mass = start.less(1.0)
    >>> rest.left, mass, rest.target_probability(0), rest.without(1).draft_probability(2)
    ((None, array([0.5, 0. , 0. ])), 0.5, 1.0, 1.0)
    """

    target: Distribution
    draft: Distribution
    scale: float = 1.0
    multiple: float = 0.0
    left: Weights | None = None
    mass: float = 1.0
    removed: tuple[tuple[int, float], ...] = ()
    draft_mass: float = 1.0
    used_up: bool = False

    def target_probability(self, token: int) -> float:
        if self.left is None:
            return probability_of(self.target, token, "target_p")
        ids, weights = self.left
        if ids is None:
            return probability_of(weights, token, "target_p") / self.mass
        place = int(np.searchsorted(ids, token))
        return float(weights[place]) / self.mass if place < ids.size and ids[place] == token else 0.0

    def draft_probability(self, token: int) -> float:
        if self.used_up or any(token == gone for gone, _ in self.removed):
            return 0.0
        q = probability_of(self.draft, token, "draft_q")
        if not self.removed:
            return q
        with np.errstate(all="ignore"):
            q = float(np.divide(q, self.draft_mass))
        if not 0.0 <= q < math.inf:
            raise ValueError(f"draft_q must be finite and not negative: entry {token} is {q}")
        return q

    def less(self, reach: float) -> tuple[Remainder, float]:
        """What the next rejection leaves, and ``sum (reach p - q)+``; the same object where that is 0."""
        if reach == 0.0:
            return self, 0.0
        scale, multiple = (reach, 0.0) if self.left is None else (self.scale, self.multiple)
        part = 1.0 if self.left is None else reach
        with np.errstate(all="ignore"):
            multiple = min(multiple + float(np.divide(self.mass, part * self.draft_mass)), sys.float_info.max)
        left, positive = self._difference(scale, multiple)
        if not positive:
            return self, 0.0
        total = mass(left[1])
        if math.isinf(total):
            # By a power of two, which rounds nothing that counts.
            left = left[0], left[1] * 2.0**-64
            rest = replace(
                self, scale=scale * 2.0**-64, multiple=multiple * 2.0**-64, left=left, mass=mass(left[1])
            )
            return rest, math.inf
        rest = replace(self, scale=scale, multiple=multiple, left=left, mass=total)
        return rest, total if self.left is None else total * (reach / self.mass)

    def _difference(self, scale: float, multiple: float) -> tuple[Weights, bool]:
        ids, p, q = aligned(self.target, self.draft)
        with np.errstate(all="ignore"):
            taken = multiple * q
            for token, its_own in self.removed:
                at = token if ids is None else np.flatnonzero(ids == token)
                taken[at] = its_own * q[at]
            weights, positive = _positive_part(scale * p - taken)
        if ids is None:
            return (None, weights), positive
        support = weights > 0.0
        return (ids[support], weights[support]), positive

    def without(self, token: int) -> Remainder:
        """The same for the next of siblings drawn without replacement, one of which was `token`."""
        removed = self.removed
        if all(token != gone for gone, _ in removed):
            removed = (*removed, (token, self.multiple))
        gone = [other for other, _ in removed]
        if isinstance(self.draft, SparseDistribution):
            rest = self.draft.probs[~np.isin(self.draft.token_ids, gone)]
        else:
            rest = np.array(as_dense(self.draft, "draft_q"))
            rest[gone] = 0.0
        return replace(self, removed=removed, draft_mass=mass(rest), used_up=not rest.any())


@dataclass(frozen=True, slots=True)
class RecursiveNode:
    """Every child is one round of speculative sampling, against what the rounds before left of p.

    Parameters
    ----------
    rest : Remainder
        p: the target's row, then ``norm((p - q)+)`` after each rejection; and q of the next child.
    replacement : bool
        Whether siblings were drawn independently; if not, a rejected token is taken out of q.
    whole : Weights or None
        The target's own weights, once a rejection left nothing of them: what corrections are drawn from.

    Examples
    --------
    >>> node = RecursiveNode.open(np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.75, 0.25]), True)
    >>> node.child_probability(1)
    0.6666666666666666
    >>> node.rejected(1).child_probability(1)
    0.0
    """

    rest: Remainder
    replacement: bool
    whole: Weights | None = None

    @classmethod
    def open(cls, target: Distribution, draft: Distribution, replacement: bool) -> RecursiveNode:
        return cls(Remainder(target, draft), replacement)

    def target_probability(self, token: int) -> float:
        return self.rest.target_probability(token)

    def draft_probability(self, token: int) -> float:
        return self.rest.draft_probability(token)

    def child_probability(self, token: int) -> float:
        return prefix_acceptance(1.0, self.target_probability(token), self.draft_probability(token))

    def acceptance_bounds(self, token: int) -> tuple[float, float]:
        return (self.child_probability(token),) * 2

    def rejected(self, token: int) -> RecursiveNode:
        if self.rest.used_up:  # p - 0 is p
            return self
        rest, _ = self.rest.less(1.0)
        whole = None
        if rest.left is None:
            target = rest.target
            # Dense where the differences are.
            whole = positive_weights(
                target if isinstance(rest.draft, SparseDistribution) else as_dense(target, "target_p")
            )
        return replace(self, rest=rest if self.replacement else rest.without(token), whole=whole)

    def weights(self) -> Weights:
        if self.rest.left is not None:
            return self.rest.left
        return weights_of(self.rest.target, "target_p") if self.whole is None else self.whole


@dataclass(frozen=True)
class KSeqNode:
    """Every child is kept with ``min(1, p(x)/(r q(x)))``: k equal rounds that never take more than p.

    r lies in [1, k]. It takes all of both rows to find it, so that they are read (and checked) only when a
    coin falls between ``p(x)/(k q(x))`` and ``p(x)/q(x)``, when a child is sure to be rejected, or when all
    of them were.

    Parameters
    ----------
    target, draft : Distribution
        p and q. They stay what they are: siblings are independent and tested against the same rows.
    siblings : int
        k.

    Examples
    --------
    >>> node = KSeqNode(np.array([1.0, 0.0]), np.array([0.5, 0.5]), 2)
    >>> node.acceptance_bounds(0), node.child_probability(0)
    ((1.0, 1.0), 1.0)
    >>> node.division, node.weights()
    (1.5, (None, array([0.25, 0.  ])))
    """

    target: Distribution
    draft: Distribution
    siblings: int

    @cached_property
    def rows(self) -> tuple[Float64, Float64]:
        """p and q as arrays, checked."""
        return _dense_pair(self.target, self.draft)

    @cached_property
    def solution(self) -> tuple[float, float]:
        """r and ``rounds = (1 - (1 - beta)^k)/beta`` with ``beta = sum min(p/r, q)``.

        r is the upper end of a bisection of [1, k] down to adjacent numbers, which solves
        ``1 - (1 - beta)^k = r beta`` with both sides divided by beta. The left one is then
        ``sum_{j < k} (1 - beta)^j``, without a difference of nearly equal numbers, and defined where
        beta is 0. It is the expected number of tested children.
        """
        p, q = self.rows

        def rounds(r: float) -> float:
            # min(p/r, q) in two parts, so that only one quotient is taken.
            with np.errstate(all="ignore"):
                first = p <= r * q
            beta = mass(np.where(first, p, 0.0)) / r + mass(np.where(first, 0.0, q))
            failure = max(0.0, 1.0 - beta)
            total = 1.0
            for _ in range(self.siblings - 1):
                total = total * failure + 1.0
            return total

        low, high = 1.0, float(self.siblings)
        if rounds(low) <= low:
            high = low
        while math.nextafter(low, math.inf) < high:
            middle = low + 0.5 * (high - low)
            if rounds(middle) > middle:
                low = middle
            else:
                high = middle
        # At the upper end rounds <= r, so that min(p/r, q) * rounds nowhere takes more than p.
        return high, rounds(high)

    @property
    def division(self) -> float:
        """r."""
        return self.solution[0]

    def target_probability(self, token: int) -> float:
        return probability_of(self.target, token, "target_p")

    def draft_probability(self, token: int) -> float:
        return probability_of(self.draft, token, "draft_q")

    def acceptance_bounds(self, token: int) -> tuple[float, float]:
        return self._probability(token, self.siblings), self._probability(token, 1.0)

    def child_probability(self, token: int) -> float:
        return self._probability(token, self.division)

    def _probability(self, token: int, division: float) -> float:
        p = self.target_probability(token)
        return prefix_acceptance(1.0, p, division * self.draft_probability(token))

    def rejected(self, token: int) -> KSeqNode:
        if self.acceptance_bounds(token)[1] == 0.0:
            _ = self.rows  # sure to be rejected: they are checked before its coin
        return self

    def weights(self) -> Weights:
        (p, q), (division, rounds) = self.rows, self.solution
        left, positive = _positive_part(p - np.minimum(p / division, q) * rounds)
        return None, left if positive else p


@dataclass(frozen=True, slots=True)
class TraversalNode:
    """A node that carries how likely the whole path to it is kept, and tests its children before itself.

    Parameters
    ----------
    rest : Remainder
        p: the target's row, then ``norm((P p - q)+)`` after each rejection that left something; and q of
        the next child.
    replacement : bool
        As in `RecursiveNode`.
    reach : float
        P of the path to this node: 1 at the context, ``min(1, P(parent) p(x)/q(x))`` when it is entered,
        ``R/(R + 1 - P)`` with ``R = sum (P p - q)+`` after each rejection.

    Examples
    --------
    >>> node = TraversalNode.open(np.array([0.5, 0.5]), np.array([0.0, 1.0]), True, 0.5)
    >>> node.child_probability(1), node.rejected(1).reach
    (0.25, 0.3333333333333333)
    """

    rest: Remainder
    replacement: bool
    reach: float = 1.0

    @classmethod
    def open(
        cls, target: Distribution, draft: Distribution, replacement: bool, reach: float = 1.0
    ) -> TraversalNode:
        return cls(Remainder(target, draft), replacement, reach)

    def target_probability(self, token: int) -> float:
        return self.rest.target_probability(token)

    def draft_probability(self, token: int) -> float:
        return self.rest.draft_probability(token)

    def child_probability(self, token: int) -> float:
        return prefix_acceptance(self.reach, self.target_probability(token), self.draft_probability(token))

    def acceptance_bounds(self, token: int) -> tuple[float, float]:
        return (self.child_probability(token),) * 2

    def rejected(self, token: int) -> TraversalNode:
        if self.rest.used_up:  # R = P: nothing changes
            return self
        rest, left_over = self.rest.less(self.reach)
        return replace(
            self,
            rest=rest if self.replacement else rest.without(token),
            reach=keep_probability(left_over, self.reach),
        )

    def weights(self) -> Weights:
        return weights_of(self.rest.target, "target_p") if self.rest.left is None else self.rest.left


def open_node(
    rule: TreeRule,
    target: Distribution,
    draft: Distribution,
    siblings: int,
    replacement: bool,
) -> RecursiveNode | KSeqNode:
    """A node of a top-down rule with `siblings` children, none of which was tested yet.

    With a single child ``"kseq"`` is ``"recursive"``: r = 1.
    """
    if rule == "kseq" and siblings > 1:
        return KSeqNode(target, draft, siblings)
    return RecursiveNode.open(target, draft, replacement)


def _dense_pair(target: Distribution, draft: Distribution) -> tuple[Float64, Float64]:
    """Both rows as arrays of one length; sparse ones may differ in it."""
    size = max(vocabulary(target), vocabulary(draft))
    p, q = (
        np.pad(as_probabilities(as_dense(row, name), name), (0, size - vocabulary(row)))
        for row, name in ((target, "target_p"), (draft, "draft_q"))
    )
    return p, q


def _require_drawable(node: TreeNode, token: int) -> None:
    if node.draft_probability(token) == 0.0 < node.target_probability(token):
        raise ValueError(f"token {token} cannot have been drafted from draft_q, where its probability is 0")


# ---- the walk ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drafted:
    """A tree with its rows: what a walk reads. Row 0 belongs to the context, row i + 1 to node i."""

    tokens: Indexed[int]
    children: list[list[int]]
    target: Indexed[Distribution]
    draft: Indexed[Distribution]
    check_draft: bool

    def rows(self, node: int) -> tuple[Distribution, Distribution]:
        with errors_at(f"row {node + 1}"):
            p, q = self.target[node + 1], self.draft[node + 1]
            require_same_length(p, q)
        return p, q

    def bounds(self, node: int, state: TreeNode, child: int) -> tuple[float, float]:
        token = self.tokens[child]
        with errors_at(f"row {node + 1}"):
            if self.check_draft:
                _require_drawable(state, token)
            return state.acceptance_bounds(token)

    def weights(self, node: int, state: TreeNode | None) -> Weights:
        with errors_at(f"row {node + 1}"):
            return weights_of(self.target[node + 1], "target_p") if state is None else state.weights()


Walk = tuple[list[int], TreeNode | None]
"""The accepted path, and the node where it ends after its children were rejected (None: it has none)."""


def _top_down(drafted: Drafted, rule: TreeRule, replacement: bool, stream: Stream) -> Walk:
    path: list[int] = []
    node = -1
    while children := drafted.children[node + 1]:
        p, q = drafted.rows(node)
        with errors_at(f"row {node + 1}"):
            state: TreeNode = open_node(rule, p, q, len(children), replacement)
        for child in children:
            token = drafted.tokens[child]
            threshold, most = drafted.bounds(node, state, child)
            with errors_at(f"row {node + 1}"):
                # A child sure to be rejected: what can fail then, fails before the coin.
                after = state.rejected(token) if most == 0.0 else None
                coin = stream.coin(NODE_LANE + child)
                if threshold < most and accepted_by(coin, most) and not accepted_by(coin, threshold):
                    threshold = state.child_probability(token)
                if accepted_by(coin, threshold):
                    path.append(child)
                    break
                state = state.rejected(token) if after is None else after
        else:
            return path, state
        node = path[-1]
    return path, None


@dataclass
class _Step:
    """A node on the path that is followed, and how likely the path to it is kept by now."""

    node: int
    reach: float
    state: TraversalNode | None
    tested_children: int = 0


def _bottom_up(drafted: Drafted, replacement: bool, stream: Stream) -> Walk:
    # A list of steps in place of recursion: a path may be longer than Python's stack.
    def entered(node: int, reach: float) -> _Step:
        if not drafted.children[node + 1]:
            return _Step(node, reach, None)
        p, q = drafted.rows(node)
        return _Step(node, reach, TraversalNode.open(p, q, replacement, reach))

    steps = [entered(-1, 1.0)]
    while True:
        here = steps[-1]
        children = drafted.children[here.node + 1]
        if here.state is not None and here.tested_children < len(children):
            child = children[here.tested_children]
            reach, _ = drafted.bounds(here.node, here.state, child)
            steps.append(entered(child, reach))
        elif here.node == -1 or accepted_by(stream.coin(NODE_LANE + here.node), here.reach):
            return [step.node for step in steps[1:]], here.state
        else:
            steps.pop()
            above = steps[-1]
            assert above.state is not None  # it has a child
            with errors_at(f"row {above.node + 1}"):
                above.state = above.state.rejected(drafted.tokens[here.node])
            above.reach = above.state.reach
            above.tested_children += 1


def decide(drafted: Drafted, rule: TreeRule, replacement: bool, stream: Stream) -> TreeDecision:
    """Verify one tree: a path, then one token."""
    with stream.held():
        if rule == "traversal":
            path, state = _bottom_up(drafted, replacement, stream)
        else:
            path, state = _top_down(drafted, rule, replacement, stream)
        weights = drafted.weights(path[-1] if path else -1, state)
        last = stream.token(BONUS_LANE if state is None else CORRECTION_LANE, weights)
    tokens = [drafted.tokens[node] for node in path] + [last]
    return TreeDecision(
        np.array(tokens, dtype=np.int64), np.array(path, dtype=np.int64), len(path), state is None
    )


# ---- what comes in -------------------------------------------------------------------------------


def as_key(rng: Any, seed: int | None, position: int | None) -> tuple[int, int]:
    """The key of a stream in place of a generator, checked."""
    if seed is None or position is None:
        raise ValueError("seed and position are given together or not at all")
    if rng is not None:
        raise ValueError("either rng or seed and position are given, not both")
    keys = as_integer(seed, "seed"), as_integer(position, "position")
    for key, name, bound in zip(keys, ("seed", "position"), (1 << 64, 1 << 63), strict=True):
        if not 0 <= key < bound:
            raise ValueError(f"{name} must be in [0, {bound}), not {key}")
    return keys


def _stream(rng: Any, seed: int | None, position: int | None) -> Stream:
    if seed is None and position is None:
        return GeneratorStream(rng)
    return KeyedStream(*as_key(rng, seed, position))


def _opened(target: Any, draft: Any, tree: Any, check_draft: bool) -> Drafted:
    """Check all that can be checked without reading a row, and the ids against V."""
    if not isinstance(tree, TokenTree):
        raise TypeError(f"tree must be a TokenTree, not {type(tree).__name__}")
    n = len(tree)
    targets, drafts = as_distributions(target, "target"), as_distributions(draft, "draft")
    for rows, name in ((targets, "target"), (drafts, "draft")):
        if len(rows) != n + 1:
            raise ValueError(f"{name} has {len(rows)} rows for {n} drafts; expected {n + 1}")
    with errors_at("row 0"):
        first = targets[0]
    # A sparse row has probability 0 for ids that it does not know, also for those beyond V.
    if n and not isinstance(first, SparseDistribution) and tree.tokens.max() >= first.size:
        node = int(tree.tokens.argmax())
        raise IndexError(f"node {node} has the token {tree.tokens[node]}, outside [0, {first.size})")
    children: list[list[int]] = [[] for _ in range(n + 1)]
    for node, parent in enumerate(tree.parents.tolist()):
        children[parent + 1].append(node)
    return Drafted(tree.tokens.tolist(), children, targets, drafts, check_draft)


def verify_tree(
    target: Any,
    draft: Any,
    tree: TokenTree,
    rng: Any = None,
    *,
    rule: TreeRule = "recursive",
    replacement: bool = True,
    check_draft: bool = False,
    seed: int | None = None,
    position: int | None = None,
) -> TreeDecision:
    """Keep a path of drafted tokens from the context downwards and draw the token that follows it.

    Parameters
    ----------
    target : array_like of float, shape (n + 1, V), BatchedSparseDistributions, or sequence of n + 1
        The target's rows: row 0 after the context, row i + 1 after node i. Entries of a sequence may be
        dense or sparse, mixed freely.
    draft : like `target`
        The rows that the children were drawn from: those of the context from row 0, those of node i
        from row i + 1. Rows of nodes without children are not looked at.
    tree : TokenTree
        n drafted tokens; none: one draw from row 0.
    rng : numpy.random.Generator, or any object with ``random()`` and ``choice(ids, p=...)``, optional
        As in `verify_one_token`.
        Rows of a caller's own sequence may not draw from it: the compiled face has it locked while they
        are read.
    rule : {"recursive", "kseq", "traversal"}
        See `mtplx.reference.trees`.
    replacement : bool
        How siblings were drawn: independently from one row, or without replacement, each from what the
        ones before it left of the row. The wrong answer gives a wrong law.
    check_draft : bool
        Whether a tested draft with ``q(x) = 0 < p(x)`` is an error. It is accepted otherwise, though it
        cannot have been drawn from q.
    seed, position : int, optional
        Instead of `rng`: a keyed stream, as in `verify_batch`. The coin of node i is lane 2**33 + i, the
        correction lane 2**32, the bonus token lane 2**32 + 1.

    Returns
    -------
    TreeDecision

    Raises
    ------
    ValueError
        Another number of rows; an unknown rule; ``"kseq"`` without replacement; `seed` without
        `position`, or beside `rng`; `check_draft`.
    IndexError
        A token outside [0, V).
    TypeError
        `tree` is no `TokenTree`; `rng` has not the two methods.
    ValueError, TypeError
        As in `verify_one_token` and `sample_from_distribution`, for rows that are reached, before the
        draw that needs them. The message names the row. All other errors come before the first draw.

    Notes
    -----
    Draws: one number a tested node, in the order of the tests, then one for the last token. ``"recursive"``
    and ``"kseq"`` test the children of the context in index order up to the first that is accepted, then
    its children, and so on. ``"traversal"`` tests the node at the end of the path of first children, then
    follows the next sibling of a node that failed down its own first children, and tests a parent after
    its last child; the context is not tested.

    A draft row that children without replacement have used up (more siblings than tokens with positive
    probability) counts as 0 everywhere: such a child cannot have been drawn, and is accepted by
    definition if its p(x) is positive.

    References
    ----------
    ``"recursive"``: X. Miao et al., "SpecInfer" (arXiv:2305.09781). ``"kseq"``: Z. Sun et al., "SpecTr"
    (arXiv:2310.15141). ``"traversal"``: Y. Weng et al., "Traversal verification" (arXiv:2505.12398).

    Examples
    --------
    Of the two candidates for the next token, the target holds the second for impossible and the first
    for certain; after it, there is one draft, which cannot be:

    >>> tree = TokenTree([1, 0, 0], [-1, -1, 0])
    >>> target = [[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]
    >>> draft = [[0.5, 0.5]] * 4
    >>> verify_tree(target, draft, tree)
    TreeDecision(tokens=array([1, 1]), path=array([0]), accepted=1, bonus=False)
    """
    chosen = as_tree_rule(rule, replacement)
    drafted = _opened(target, draft, tree, check_draft)
    return decide(drafted, chosen, bool(replacement), _stream(rng, seed, position))
