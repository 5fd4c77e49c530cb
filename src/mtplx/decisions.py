"""What verification answers, and the acceptance rules that carry parameters.

Shared by :mod:`mtplx.reference` and the compiled face, which is why it imports neither.

Design
------
Decisions hold arrays, so they are compared by value, cannot be hashed, and store read-only copies. A
rule is named by a string; the two that have parameters are also objects, and `as_rule` turns
everything a caller may pass as ``rule=`` into one canonical form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mtplx.arguments import as_integer, as_real

__all__ = [
    "CHAIN_RULES",
    "BatchDecision",
    "BlockDecision",
    "Cascade",
    "Rule",
    "TokenTree",
    "TreeDecision",
    "TreeRule",
    "Typical",
    "as_rule",
    "as_tree_rule",
]


def _read_only(values: ArrayLike, dtype: Any, ndim: int, name: str) -> NDArray[Any]:
    """A copy in memory that no flag makes writable: the core trusts what was checked."""
    given = np.asarray(values)
    if given.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension(s), not the shape {given.shape}")
    if given.size and given.dtype.kind not in ("iu" if dtype is np.int64 else "iuf"):
        wanted = "integers" if dtype is np.int64 else "real numbers"
        raise TypeError(f"{name} must hold {wanted}, not {given.dtype}")
    return np.ndarray(given.shape, dtype, given.astype(dtype).tobytes())


class _ByValue:
    """`==` over arrays, and a pickle that goes through the constructor: NumPy's own loses read-only."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # as for list: compared by value, holds arrays
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return all(
            np.array_equal(mine, theirs, equal_nan=True) if isinstance(mine, np.ndarray) else mine == theirs
            for mine, theirs in zip(self._values(), other._values(), strict=True)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), self._values())

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


class _Decision(_ByValue):
    """Made by its constructor, which copies and checks, or of what verification has just made."""

    __slots__ = ()

    @classmethod
    def adopt(cls, *values: Any) -> Self:
        """A decision from values that are right already: arrays made for it, of its dtypes, not copied."""
        made = cls.__new__(cls)
        for name, value in zip(cls.__dataclass_fields__, values, strict=True):
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
            object.__setattr__(made, name, value)
        return made


@dataclass(frozen=True, eq=False)
class BlockDecision(_Decision):
    """Outcome of the verification of one block of K drafted tokens.

    Parameters
    ----------
    tokens : array_like of int, shape (accepted + 1,)
        The accepted drafts, then the correction or the bonus token; the accepted drafts alone where
        all were accepted and there was no row to draw a bonus token from. Stored as int64, read-only.
    accepted : int
        Number of drafts that were kept.
    accept_probabilities : array_like of float, shape (tested,)
        How likely each tested draft was to be kept. All rules but one test up to the first rejection,
        ``tested = min(accepted + 1, K)``; the block rule tests all K and tells how likely the prefix
        that ends with each draft was. Stored as float64, read-only.
    bonus : bool
        Whether the last token is a bonus token: drawn after K accepted drafts.

    Examples
    --------
    >>> BlockDecision([3, 1], 1, [0.5, 0.25], False)
    BlockDecision(tokens=array([3, 1]), accepted=1, accept_probabilities=array([0.5 , 0.25]), bonus=False)
    """

    tokens: NDArray[np.int64]
    accepted: int
    accept_probabilities: NDArray[np.float64]
    bonus: bool

    def __post_init__(self) -> None:
        store = object.__setattr__
        store(self, "tokens", _read_only(self.tokens, np.int64, 1, "tokens"))
        store(self, "accepted", as_integer(self.accepted, "accepted"))
        probabilities = _read_only(self.accept_probabilities, np.float64, 1, "accept_probabilities")
        store(self, "accept_probabilities", probabilities)
        store(self, "bonus", bool(self.bonus))


@dataclass(frozen=True, eq=False)
class BatchDecision(_Decision):
    """Outcome of the verification of B blocks of at most K drafted tokens.

    Parameters
    ----------
    tokens : array_like of int, shape (B, K + 1)
        Row b holds the ``num_tokens[b]`` tokens of sequence b, as in `BlockDecision`, then -1.
    num_tokens : array_like of int, shape (B,)
    accepted : array_like of int, shape (B,)
        Number of drafts that were kept.
    accept_probabilities : array_like of float, shape (B, K)
        As in `BlockDecision`, then NaN.

    Examples
    --------
    >>> decision = BatchDecision([[3, 1], [0, -1]], [2, 1], [1, 0], [[0.5], [0.0]])
    >>> decision.tokens[1, : decision.num_tokens[1]]
    array([0])
    """

    tokens: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    accepted: NDArray[np.int64]
    accept_probabilities: NDArray[np.float64]

    def __post_init__(self) -> None:
        store = object.__setattr__
        store(self, "tokens", _read_only(self.tokens, np.int64, 2, "tokens"))
        store(self, "num_tokens", _read_only(self.num_tokens, np.int64, 1, "num_tokens"))
        store(self, "accepted", _read_only(self.accepted, np.int64, 1, "accepted"))
        probabilities = _read_only(self.accept_probabilities, np.float64, 2, "accept_probabilities")
        store(self, "accept_probabilities", probabilities)


@dataclass(frozen=True)
class Typical:
    """Typical acceptance: a draft is kept iff ``p(x) > min(eps, delta * exp(-H(p)))``, without a coin.

    Not lossless: likely tokens are always kept, so the emitted law leans towards the draft.

    Parameters
    ----------
    eps : float
        Probability above which every token is kept.
    delta : float
        Factor of ``exp(-H(p))``: the more the target is undecided, the less is asked of a token.

    Raises
    ------
    ValueError
        `eps` or `delta` is negative or NaN. (A negative threshold would keep impossible tokens.)

    References
    ----------
    T. Cai et al., "Medusa", arXiv:2401.10774, section 2.3.

    Examples
    --------
    >>> Typical()
    Typical(eps=0.3, delta=0.09)
    """

    eps: float = 0.3
    delta: float = 0.09

    def __post_init__(self) -> None:
        for name in ("eps", "delta"):
            value = getattr(self, name)
            if not as_real(value, name) >= 0.0:
                raise ValueError(f"{name} must not be negative; it is {value!r}")


CascadeRule = Literal["tokenv1", "tokenv2", "tokenv3"]
CASCADE_RULES = ("tokenv1", "tokenv2", "tokenv3")


@dataclass(frozen=True)
class Cascade:
    """Speculative cascade: where a token of the draft is good enough, the target is not asked.

    A token v is deferred to the target iff

    ========== ================================
    ``tokenv1``  ``q(v) < max p - alpha``
    ``tokenv2``  ``p(v) < max p - alpha``
    ``tokenv3``  ``p(v) < max p * (1 - alpha)``
    ========== ================================

    and what is emitted has exactly the law ``pi(v) = q(v) (1 - r(v)) + p(v) sum_w r(w) q(w)`` with r
    the deferral. Not lossless: pi is not p.

    Parameters
    ----------
    alpha : float
        Tolerance; the larger, the less is deferred.
    rule : {"tokenv1", "tokenv2", "tokenv3"}

    Raises
    ------
    ValueError
        `alpha` is NaN, `rule` unknown.

    References
    ----------
    H. Narasimhan et al., "Faster cascades via speculative decoding", arXiv:2405.19261.

    Examples
    --------
    >>> Cascade(0.1)
    Cascade(alpha=0.1, rule='tokenv3')
    """

    alpha: float
    rule: CascadeRule = "tokenv3"

    def __post_init__(self) -> None:
        if math.isnan(as_real(self.alpha, "alpha")):
            raise ValueError(f"alpha is {self.alpha!r}")
        if self.rule not in CASCADE_RULES:
            raise ValueError(f"unknown cascade rule {self.rule!r}; known are {_listed(CASCADE_RULES)}")


Rule = Literal["exact", "greedy", "match", "block", "typical"] | Typical | Cascade
"""What ``rule=`` of the verification of chains may be."""

CanonicalRule = Literal["exact", "greedy", "match", "block"] | Typical | Cascade
"""What `as_rule` makes of it."""

CHAIN_RULES = ("exact", "greedy", "match", "block", "typical")


def as_rule(rule: Any) -> CanonicalRule:
    """The canonical form of ``rule=``: a name without parameters, or an object that carries them.

    Raises
    ------
    ValueError
        A name that is not known.
    TypeError
        Neither a string nor a rule object.

    Examples
    --------
    >>> as_rule("exact"), as_rule("typical")
    ('exact', Typical(eps=0.3, delta=0.09))
    """
    if isinstance(rule, str):
        for known in ("exact", "greedy", "match", "block"):
            if rule == known:
                return known
    elif isinstance(rule, (Typical, Cascade)):
        return rule
    else:
        raise TypeError(f"rule must be a name, a Typical or a Cascade, not {type(rule).__name__}")
    if rule == "typical":
        return Typical()
    hint = "; give Cascade(alpha) itself, which has no default" if rule == "cascade" else ""
    raise ValueError(f"unknown rule {rule!r}; known are {_listed(CHAIN_RULES)}, Typical and Cascade{hint}")


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))


# ---- trees ---------------------------------------------------------------------------------------


@dataclass(frozen=True, init=False, eq=False)
class TokenTree(_ByValue):
    """Drafted tokens, each hanging below another one or below the context.

    Parameters
    ----------
    tokens : array_like of int, shape (n,)
        The token of each node. Stored as int64, read-only.
    parents : array_like of int, shape (n,)
        The node that each one continues: a lower index, or -1 for the context. Siblings are tested in
        index order, which has to be the order they were drawn in. Stored as int64, read-only.

    Raises
    ------
    ValueError
        Not one-dimensional, of different lengths; ``parents[i]`` outside [-1, i); a negative token.
    TypeError
        Not integers.

    Notes
    -----
    Whether a node is there, and where, may depend on tokens that were drawn before its own: more candidates
    below a token that the drafter likes, another sibling after one that it does not. (Rule ``"kseq"`` needs
    the number of siblings before the first is drawn.) It must not depend on the node's own token: dropping,
    sorting or choosing among candidates that were drawn makes a verified text differ from the target's law.

    Examples
    --------
    Two candidates for the next token, and one for the token that follows the first of them:

    >>> tree = TokenTree([5, 2, 7], [-1, -1, 0])
    >>> len(tree), tree.children(-1), tree.children(0)
    (3, (0, 1), (2,))
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]

    def __init__(self, tokens: ArrayLike, parents: ArrayLike) -> None:
        for name, given in (("tokens", tokens), ("parents", parents)):
            object.__setattr__(self, name, _read_only(given, np.int64, 1, name))
        if self.tokens.size != self.parents.size:
            raise ValueError(f"{self.tokens.size} tokens, but {self.parents.size} parents")
        misplaced = np.flatnonzero((self.parents < -1) | (self.parents >= np.arange(self.parents.size)))
        if misplaced.size:
            node = int(misplaced[0])
            raise ValueError(f"the parent of node {node} is {self.parents[node]}, not in [-1, {node})")
        if self.tokens.size and self.tokens.min() < 0:
            raise ValueError(f"node {self.tokens.argmin()} has the token {self.tokens.min()}")

    def __len__(self) -> int:
        """Number of drafted tokens; the context is none."""
        return int(self.tokens.size)

    def children(self, node: int) -> tuple[int, ...]:
        """The nodes that continue `node` (-1: the context), in index order."""
        return tuple(np.flatnonzero(self.parents == node).tolist())


@dataclass(frozen=True, eq=False)
class TreeDecision(_Decision):
    """Outcome of the verification of one tree.

    Parameters
    ----------
    tokens : array_like of int, shape (accepted + 1,)
        The drafts along the accepted path, then one token that was drawn. Stored as int64, read-only.
    path : array_like of int, shape (accepted,)
        The nodes of the accepted drafts from the top down; what a model has cached for all others is to
        be dropped. Stored as int64, read-only.
    accepted : int
        Number of drafts that were kept.
    bonus : bool
        Whether the last token is a bonus token: the path ended at a node without children, and the
        token was drawn from the target's row there. Else it corrects for the children that were rejected.

    Examples
    --------
    >>> TreeDecision([5, 7, 1], [0, 2], 2, True)
    TreeDecision(tokens=array([5, 7, 1]), path=array([0, 2]), accepted=2, bonus=True)
    """

    tokens: NDArray[np.int64]
    path: NDArray[np.int64]
    accepted: int
    bonus: bool

    def __post_init__(self) -> None:
        store = object.__setattr__
        store(self, "tokens", _read_only(self.tokens, np.int64, 1, "tokens"))
        store(self, "path", _read_only(self.path, np.int64, 1, "path"))
        store(self, "accepted", as_integer(self.accepted, "accepted"))
        store(self, "bonus", bool(self.bonus))


TreeRule = Literal["recursive", "kseq", "traversal"]
"""What ``rule=`` of the verification of trees may be."""

TREE_RULES: tuple[TreeRule, ...] = ("recursive", "kseq", "traversal")


def as_tree_rule(rule: Any, replacement: bool) -> TreeRule:
    """The name of a tree rule, checked against how siblings were drawn.

    Raises
    ------
    ValueError
        A name that is not known; ``"kseq"`` without replacement.
    TypeError
        Not a string.

    Examples
    --------
    >>> as_tree_rule("traversal", False)
    'traversal'
    """
    if not isinstance(rule, str):
        raise TypeError(f"the rule of a tree must be a name, not {type(rule).__name__}")
    if rule == "kseq" and not replacement:
        raise ValueError("rule 'kseq' is for siblings drawn independently; replacement=False are not")
    for known in TREE_RULES:
        if rule == known:
            return known
    raise ValueError(f"unknown rule {rule!r} for trees; known are {_listed(TREE_RULES)}")
