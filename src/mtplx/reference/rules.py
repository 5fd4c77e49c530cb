"""The acceptance rules of a drafted block, as functions of rows and coins. Nothing here draws.

Design
------
A block has K drafted tokens, K draft rows q, and target rows p. Row i, counted from 0, is the
distribution after i drafts, the one that judges ``tokens[i]``. Each rule is

- an *accept count*, ``accept_count_<rule>(...) -> (accepted, accept_probabilities)``: how many drafts
  are kept, given the coins. `coins` is anything that gives the uniform of position i as ``coins[i]``:
  with a list of numbers the function is pure, with an object that draws when it is indexed it samples
  (see `blocks`). Sequential rules ask for ``coins[i]`` when row i has passed its checks, and never
  look behind a rejection; the block rule asks for all K once it knows two probabilities of each draft;
- *weights*, from which the token after the accepted drafts is drawn if some draft was not accepted.

=========== ======================= ======================== ======================================
rule        accept count            weights after rejection  coin
=========== ======================= ======================== ======================================
"exact"     `accept_count_exact`    `exact_weights`          one a tested draft
"greedy"    `accept_count_greedy`   none: `best_token`       none
"match"     `accept_count_match`    none: the token drawn    none; a token from p a tested draft
"block"     `accept_count_block`    `block_weights`          all K before anything else
Typical     `accept_count_typical`  those of the target      none
Cascade     `accept_count_cascade`  `cascade_weights`        one a tested draft that is deferred
=========== ======================= ======================== ======================================

`accept_count` and `weights_after_rejection` choose by the rule.

To integrate the coins out: a draft of a sequential rule with a coin is kept with its accept probability
(`acceptance_probability`, `cascade_acceptance`), one without with probability 0 or 1; under "match"
with p(x) over the sum of p, and the token drawn otherwise is p without x. Under "block" prefixes are
tested from the longest on, each with a coin of its own: prefix i is kept with `block_keep_probability`
if no longer one was, the whole block with ``P_K``. The draw after a rejection is independent of coins.

Errors name the row. ``check_draft=True`` refuses a draft that its own row says was impossible,
``q(x) = 0 < p(x)``: it is accepted by definition, though it cannot have been drawn from q.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtplx.arguments import as_integer, as_real
from mtplx.decisions import CanonicalRule, Cascade, Typical
from mtplx.distributions import Distribution, SparseDistribution, errors_at
from mtplx.reference.one_row import (
    Float64,
    Weights,
    _positive_part,
    acceptance_probability,
    as_dense,
    as_probabilities,
    as_row,
    correction_weights,
    distribution_entropy,
    id_within,
    normalised,
    positive_differences,
    positive_weights,
    probability_of,
    require_same_length,
    total_variation,
    weights_of,
)
from mtplx.reference.rows import Indexed

AcceptCount = tuple[int, list[float]]


def accepted_by(coin: float, accept_probability: float) -> bool:
    """The test of every coin; an impossible token is not accepted at u = 0 either."""
    return coin <= accept_probability and accept_probability > 0.0


def _require_drawable(p: Any, q: Any, token: int) -> None:
    if probability_of(q, token, "draft_q") == 0.0 < probability_of(p, token, "target_p"):
        raise ValueError(f"token {token} cannot have been drafted from draft_q, where its probability is 0")


# ---- exact ---------------------------------------------------------------------------------------


def exact_weights(target_p: Any, draft_q: Any) -> Weights:
    """``(p - q)+`` by ascending id, undivided; p where none of it is positive."""
    return correction_weights(target_p, draft_q)[0]


def accept_count_exact(
    target: Indexed[Any],
    draft: Indexed[Any],
    tokens: Indexed[int],
    coins: Indexed[float],
    *,
    check_draft: bool = False,
) -> AcceptCount:
    """Keep drafts while ``u_i <= min(1, p(x)/q(x))``: `verify_one_token`, position by position.

    Parameters
    ----------
    target, draft : sequence of distributions
        At least K each.
    tokens : sequence of int
        The K drafts.
    coins : sequence of float
        ``coins[i]`` is asked for once row i has passed all checks.
    check_draft : bool
        Whether a draft with ``q(x) = 0 < p(x)`` is an error.

    Returns
    -------
    accepted : int
    accept_probabilities : list of float
        Of the tested drafts.

    References
    ----------
    Leviathan et al. (arXiv:2211.17192); Chen et al. (arXiv:2302.01318).

    Examples
    --------
    >>> accept_count_exact([[0.25, 0.75], [1.0, 0.0]], [[0.5, 0.5], [0.5, 0.5]], [0, 1], [0.5, 0.0])
    (1, [0.5, 0.0])
    """
    probabilities: list[float] = []
    for i in range(len(tokens)):
        with errors_at(f"row {i}"):
            token = tokens[i]
            p, q = target[i], draft[i]
            accept_probability = acceptance_probability(p, q, token)
            require_same_length(p, q)
            if check_draft:
                _require_drawable(p, q, token)
            if accept_probability == 0.0:
                exact_weights(p, q)  # sure to be asked for: what can fail, fails before the coin
            coin = coins[i]
        probabilities.append(accept_probability)
        if not accepted_by(coin, accept_probability):
            return i, probabilities
    return len(tokens), probabilities


# ---- greedy and match ----------------------------------------------------------------------------


def best_token(target_p: Any) -> int:
    """The most likely token, the lowest id among equals.

    Examples
    --------
    >>> best_token([0.25, 0.375, 0.375])
    1
    """
    ids, weights = weights_of(target_p, "target_p")
    best = np.flatnonzero(weights == weights.max())
    return int(best[0] if ids is None else ids[best].min())


def accept_count_greedy(target: Indexed[Any], tokens: Indexed[int]) -> AcceptCount:
    """Keep drafts while each is the most likely token of its row. No coin, no draft row.

    Examples
    --------
    >>> accept_count_greedy([[0.25, 0.75], [0.5, 0.5]], [1, 1])
    (1, [1.0, 0.0])
    """
    probabilities: list[float] = []
    for i in range(len(tokens)):
        with errors_at(f"row {i}"):
            token = tokens[i]
            probability_of(target[i], token, "target_p")  # for its checks of the id
            kept = token == best_token(target[i])
        probabilities.append(1.0 if kept else 0.0)
        if not kept:
            return i, probabilities
    return len(tokens), probabilities


def accept_count_match(target: Indexed[Any], tokens: Indexed[int], drawn: Indexed[int]) -> AcceptCount:
    """Keep drafts while each is the token that was drawn from its target row.

    Parameters
    ----------
    target : sequence of distributions
    tokens : sequence of int
    drawn : sequence of int
        ``drawn[i]`` is a token drawn from ``target[i]``; asked for once the draft's probability is
        known.

    Examples
    --------
    >>> accept_count_match([[0.25, 0.75], [0.5, 0.5]], [1, 1], [1, 0])
    (1, [0.75, 0.5])
    """
    probabilities: list[float] = []
    for i in range(len(tokens)):
        with errors_at(f"row {i}"):
            token = tokens[i]
            probabilities.append(probability_of(target[i], token, "target_p"))
            kept = token == drawn[i]
        if not kept:
            return i, probabilities
    return len(tokens), probabilities


# ---- block ---------------------------------------------------------------------------------------


def prefix_acceptance(before: float, p: float, q: float) -> float:
    """``P_i = min(1, P_{i-1} p(x_i)/q(x_i))``, where ``p(x)/0`` is infinite.

    A prefix that was impossible stays so, whatever the ratio.

    Examples
    --------
    >>> prefix_acceptance(0.5, 0.75, 0.5), prefix_acceptance(0.5, 0.1, 0.0), prefix_acceptance(0.0, 0.1, 0.0)
    (0.75, 1.0, 0.0)
    """
    if before == 0.0 or p == 0.0:
        return 0.0
    if q == 0.0:
        return 1.0
    with np.errstate(all="ignore"):
        return min(1.0, float(before * (np.float64(p) / q)))


def block_weights(target_p: Any, draft_q: Any, prefix: float) -> Weights:
    """``(P p - q)+`` by ascending id, undivided; p where none of it is positive.

    Examples
    --------
    >>> block_weights([0.5, 0.5], [0.0, 1.0], 0.5)
    (None, array([0.25, 0.  ]))
    """
    return correction_weights(target_p, draft_q, prefix)[0]


def block_keep_probability(target_p: Any, draft_q: Any, prefix: float) -> float:
    """``h = R/(R + 1 - P)`` with ``R = sum (P p - q)+``, taken by ascending id; ``0/0 = 1``.

    For distributions h is at most P. Rounding, and rows that do not sum to 1, are held to it: that is
    what allows a row to be read only when ``u <= P``.

    Parameters
    ----------
    target_p, draft_q : distribution
        The rows after the prefix.
    prefix : float
        P, the acceptance probability of the prefix.

    Examples
    --------
    >>> block_keep_probability([0.5, 0.5], [0.0, 1.0], 0.5)
    0.3333333333333333
    """
    (_, differences), positive = positive_differences(target_p, draft_q, prefix)
    with np.errstate(over="ignore"):
        mass = float(np.cumsum(differences)[-1]) if positive else 0.0
    return keep_probability(mass, prefix)


def keep_probability(mass: float, prefix: float) -> float:
    """``R/(R + 1 - P)`` of the mass R that is left over behind a prefix; at most P.

    Examples
    --------
    >>> keep_probability(0.25, 0.5), keep_probability(0.0, 1.0)
    (0.3333333333333333, 1.0)
    """
    if mass + (1.0 - prefix) == 0.0 or mass == np.inf:
        return prefix
    return min(prefix, mass / (mass + (1.0 - prefix)))


def prefix_acceptances(
    target: Indexed[Any], draft: Indexed[Any], tokens: Indexed[int], *, check_draft: bool = False
) -> list[float]:
    """``P_1..P_K``; no row behind an impossible prefix is looked at."""
    prefixes: list[float] = []
    before = 1.0
    for i in range(len(tokens)):
        with errors_at(f"row {i}"):
            token = tokens[i]
            p, q = target[i], draft[i]
            prefix = prefix_acceptance(
                before, probability_of(p, token, "target_p"), probability_of(q, token, "draft_q")
            )
            require_same_length(p, q)
            if check_draft:
                _require_drawable(p, q, token)
            if prefix == 0.0 and before == 1.0:
                block_weights(p, q, before)  # may be asked for and fail: before the coins, then
        prefixes.append(prefix)
        if prefix == 0.0:
            return prefixes + [0.0] * (len(tokens) - i - 1)
        before = prefix
    return prefixes


def accept_count_block(
    target: Indexed[Any],
    draft: Indexed[Any],
    tokens: Indexed[int],
    coins: Indexed[float],
    *,
    check_draft: bool = False,
) -> AcceptCount:
    """Keep the longest prefix i with ``u_i <= h_i`` and ``h_i > 0``.

    ``h_i`` is `block_keep_probability` at the prefix, ``h_K = P_K``. Prefixes are tested from the
    longest on, and the rows after prefix i < K are read only when ``u_i <= P_i``.

    Parameters
    ----------
    target, draft, tokens, check_draft
        As in `accept_count_exact`.
    coins : sequence of float
        ``u_{i+1}`` is ``coins[i]``; all K are asked for, in order, before any is used.

    Returns
    -------
    accepted : int
    accept_probabilities : list of float
        ``P_1..P_K``, all K.

    References
    ----------
    Z. Sun et al., "Block verification accelerates speculative decoding", arXiv:2403.10444.

    Examples
    --------
    >>> target, draft = [[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]]
    >>> accept_count_block(target, draft, [0, 1], [0.25, 0.5])
    (1, [0.5, 0.25])
    >>> accept_count_block(target, draft, [0, 1], [0.4, 0.5])
    (0, [0.5, 0.25])
    """
    prefixes = prefix_acceptances(target, draft, tokens, check_draft=check_draft)
    uniforms = [coins[i] for i in range(len(tokens))]
    for length in range(len(tokens), 0, -1):
        prefix, coin = prefixes[length - 1], uniforms[length - 1]
        if not accepted_by(coin, prefix):
            continue
        if length == len(tokens):
            return length, prefixes
        with errors_at(f"row {length}"):
            keep = block_keep_probability(target[length], draft[length], prefix)
        if accepted_by(coin, keep):
            return length, prefixes
    return 0, prefixes


# ---- typical -------------------------------------------------------------------------------------


def typical_acceptance_threshold(entropy_value: float, eps: float, delta: float) -> float:
    """``min(eps, delta * exp(-H))``: what typical acceptance asks of a token's probability.

    Parameters
    ----------
    entropy_value : float
        H, the entropy of the target's row in nats.
    eps, delta : float
        As in `Typical`.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        An argument is negative or NaN.

    References
    ----------
    T. Cai et al., "Medusa" (arXiv:2401.10774), section 2.3.

    Examples
    --------
    >>> typical_acceptance_threshold(0.0, 0.3, 0.09), typical_acceptance_threshold(0.0, 0.3, 0.9)
    (0.09, 0.3)
    """
    parameters = Typical(eps, delta)
    entropy = as_real(entropy_value, "entropy_value")
    if not entropy >= 0.0:
        raise ValueError(f"entropy_value must be at least 0; it is {entropy}")
    return min(float(parameters.eps), float(parameters.delta) * math.exp(-entropy))


def typical_accept_decision(
    target_p: Any, token_id: int, *, eps: float, delta: float, entropy_value: float | None = None
) -> tuple[bool, float, float]:
    """Whether typical acceptance keeps a token: ``p(x) > min(eps, delta * exp(-H(p)))``.

    Parameters
    ----------
    target_p : array_like of float, shape (V,), or SparseDistribution
        p(x) is taken as given, H after normalisation.
    token_id : int
    eps, delta : float
        As in `Typical`.
    entropy_value : float, optional
        H(p) where it is known already.

    Returns
    -------
    accepted : bool
    threshold : float
    entropy : float

    Raises
    ------
    ValueError, IndexError
        As in `distribution_entropy`, `acceptance_probability` and `typical_acceptance_threshold`.

    Examples
    --------
    >>> typical_accept_decision([1.0, 0.0], 0, eps=0.3, delta=0.09)
    (True, 0.09, 0.0)
    """
    p = probability_of(target_p, as_integer(token_id, "a token id"), "target_p")
    if entropy_value is None:
        entropy = distribution_entropy(target_p)
    else:
        entropy = as_real(entropy_value, "entropy_value")
    threshold = typical_acceptance_threshold(entropy, eps, delta)
    return p > threshold, threshold, entropy


def accept_count_typical(target: Indexed[Any], tokens: Indexed[int], rule: Typical) -> AcceptCount:
    """Keep drafts while `typical_accept_decision` does. No coin, no draft row.

    Examples
    --------
    >>> accept_count_typical([[0.5, 0.5], [0.99, 0.01]], [0, 1], Typical())
    (1, [1.0, 0.0])
    """
    probabilities: list[float] = []
    for i in range(len(tokens)):
        with errors_at(f"row {i}"):
            kept, _, _ = typical_accept_decision(target[i], tokens[i], eps=rule.eps, delta=rule.delta)
        probabilities.append(1.0 if kept else 0.0)
        if not kept:
            return i, probabilities
    return len(tokens), probabilities


# ---- cascade -------------------------------------------------------------------------------------


def _draft_weights(draft_q: Any) -> Distribution:
    """A draft row, finite and not negative; it need not have mass."""
    if isinstance(draft_q, SparseDistribution):
        return draft_q
    row = as_row(draft_q, "draft_q")
    bad = np.flatnonzero(~((row >= 0.0) & (row < np.inf)))
    if bad.size:
        raise ValueError(f"draft_q must be finite and not negative: entry {bad[0]} is {row[bad[0]]}")
    return row


def _side_by_side(target_p: Any, draft_q: Any) -> tuple[NDArray[np.int64] | None, Float64, Float64]:
    """Ids ascending (None for dense rows), p and q there; of a sparse pair, every id that either has."""
    if isinstance(target_p, SparseDistribution) and isinstance(draft_q, SparseDistribution):
        ids = np.union1d(target_p.token_ids, draft_q.token_ids)
        p, q = np.zeros(ids.size), np.zeros(ids.size)
        p[np.searchsorted(ids, target_p.token_ids)] = target_p.probs
        q[np.searchsorted(ids, draft_q.token_ids)] = draft_q.probs
        return ids, p, q
    require_same_length(target_p, draft_q)
    return None, as_dense(target_p, "target_p"), as_dense(draft_q, "draft_q")


def _deferred(p: Any, q: Any, top: float, rule: Cascade) -> Any:
    """r of the cascade, for one token or for all: whether it falls short of the target's best by too much."""
    alpha = float(rule.alpha)
    if rule.rule == "tokenv1":
        return q < top - alpha
    if rule.rule == "tokenv2":
        return p < top - alpha
    return p < top * (1.0 - alpha)


def _largest(distribution: Any, name: str) -> float:
    return float(weights_of(distribution, name)[1].max())


def cascade_defer_decision(
    p: Any, q: Any, *, alpha: float, tv_value: float | None = None
) -> tuple[bool, float]:
    """Whether a whole row is deferred to the target: ``max q < max p - alpha * TV(p, q)``.

    Parameters
    ----------
    p, q : array_like of float, shape (V,), or SparseDistribution
        Target and draft.
    alpha : float
    tv_value : float, optional
        The total variation of p and q where it is known already.

    Returns
    -------
    defer : bool
    tv : float

    Raises
    ------
    ValueError
        `alpha` or `tv_value` is NaN; as in `total_variation`.

    References
    ----------
    H. Narasimhan et al. (arXiv:2405.19261).

    Examples
    --------
    >>> cascade_defer_decision([0.75, 0.25], [0.5, 0.5], alpha=0.5)
    (True, 0.25)
    """
    tolerance = float(Cascade(alpha).alpha)
    tv = total_variation(p, q) if tv_value is None else as_real(tv_value, "tv_value")
    if math.isnan(tv):
        raise ValueError(f"tv_value is {tv}")
    return _largest(q, "q") < _largest(p, "p") - tolerance * tv, tv


def cascade_token_deferral(p: Any, q: Any, token_id: int, *, alpha: float, rule: Any) -> bool:
    """r(x): whether a drafted token is left to the target, by one of the token rules of `Cascade`.

    Parameters
    ----------
    p, q : array_like of float, shape (V,), or SparseDistribution
        Target and draft. Of q only the token's own entry is read.
    token_id : int
    alpha : float
    rule : {"tokenv1", "tokenv2", "tokenv3"}

    Returns
    -------
    bool

    Raises
    ------
    ValueError, IndexError
        As in `Cascade` and `acceptance_probability`; p is no distribution.

    Examples
    --------
    >>> cascade_token_deferral([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], 2, alpha=0.5, rule="tokenv3")
    True
    """
    parameters = Cascade(alpha, rule)
    token = as_integer(token_id, "a token id")
    p_token, q_token = probability_of(p, token, "target_p"), probability_of(q, token, "draft_q")
    return bool(_deferred(p_token, q_token, _largest(p, "target_p"), parameters))


def _cascade_parts(
    target_p: Any, draft_q: Any, rule: Cascade
) -> tuple[NDArray[np.int64] | None, Float64, Float64, NDArray[np.bool_], float]:
    """Ids, p, q, r, and the deferred mass ``sum r q``, which is taken by ascending id."""
    top = _largest(target_p, "target_p")
    ids, p, q = _side_by_side(target_p, _draft_weights(draft_q))
    deferred = np.asarray(_deferred(p, q, top, rule))
    with np.errstate(over="ignore"):
        mass = float(np.cumsum(np.where(deferred, q, 0.0))[-1])
    return ids, p, q, deferred, mass


def _cascade_target(target_p: Any, draft_q: Any, rule: Cascade) -> tuple[Weights, bool]:
    """``pi(v) = q(v) (1 - r(v)) + p(v) sum r q``, undivided, and whether it has mass."""
    ids, p, q, deferred, mass = _cascade_parts(target_p, draft_q, rule)
    with np.errstate(all="ignore"):
        weights, positive = _positive_part(np.where(deferred, 0.0, q) + p * mass)
    return (ids, weights), positive


def cascade_token_target_distribution(p: Any, q: Any, *, alpha: float, rule: Any) -> Distribution:
    """``pi(v) = q(v) (1 - r(v)) + p(v) sum_w r(w) q(w)``: the law of what a cascade emits.

    Parameters
    ----------
    p, q : array_like of float, shape (V,), or SparseDistribution
        Target and draft.
    alpha : float
    rule : {"tokenv1", "tokenv2", "tokenv3"}

    Returns
    -------
    ndarray of float64, shape (V,), or SparseDistribution
        Normalised. Sparse if both are: ids ascending, no zero entries. If pi has no mass, the target: a
        normalised copy, or **the target object itself** for a sparse pair.

    Raises
    ------
    ValueError
        As in `Cascade`; p is no distribution, an entry of q is negative or not finite, lengths differ.

    References
    ----------
    H. Narasimhan et al. (arXiv:2405.19261).

    Examples
    --------
    >>> cascade_token_target_distribution([0.5, 0.25, 0.25], [0.0, 0.5, 0.5], alpha=0.25, rule="tokenv1")
    array([0. , 0.5, 0.5])
    >>> cascade_token_target_distribution([0.5, 0.25, 0.25], [0.0, 0.5, 0.5], alpha=0.125, rule="tokenv2")
    array([0.5 , 0.25, 0.25])
    """
    (ids, weights), positive = _cascade_target(p, q, Cascade(alpha, rule))
    if ids is None:
        return normalised(weights if positive else as_probabilities(as_dense(p, "target_p"), "target_p"))
    if not positive:
        target: SparseDistribution = p
        return target
    support = weights > 0.0
    return SparseDistribution(ids[support], weights[support], max(p.vocab_size, q.vocab_size))


def cascade_acceptance(target_p: Any, draft_q: Any, token: int, rule: Cascade) -> float:
    """``min(1, pi(x)/q(x))`` of a deferred draft, where ``pi(x) = p(x) sum r q``.

    Examples
    --------
    >>> cascade_acceptance([0.75, 0.25], [0.5, 0.5], 1, Cascade(0.0))
    0.25
    """
    p = probability_of(target_p, token, "target_p")
    q = probability_of(draft_q, token, "draft_q")
    mass = _cascade_parts(target_p, draft_q, rule)[-1]
    with np.errstate(all="ignore"):
        emitted = float(np.float64(p) * mass)
        if q == 0.0:
            return 1.0 if emitted > 0.0 else 0.0
        return min(1.0, float(np.float64(emitted) / q))


def cascade_weights(target_p: Any, draft_q: Any, rule: Cascade) -> Weights:
    """``(pi - q)+ = (p sum r q - r q)+`` by ascending id, undivided.

    Where none of it is positive, pi; where pi has no mass, p.

    Examples
    --------
    >>> cascade_weights([0.75, 0.25], [0.5, 0.5], Cascade(0.0))
    (None, array([0.375, 0.   ]))
    """
    ids, p, q, deferred, mass = _cascade_parts(target_p, draft_q, rule)
    with np.errstate(all="ignore"):
        # Not pi - q as it stands: a token that is not deferred would lose the digits of p sum r q in q.
        weights, positive = _positive_part(p * mass - np.where(deferred, q, 0.0))
    if positive:
        return ids, weights
    emitted, any_mass = _cascade_target(target_p, draft_q, rule)
    return emitted if any_mass else positive_weights(target_p)


def accept_count_cascade(
    target: Indexed[Any],
    draft: Indexed[Any],
    tokens: Indexed[int],
    coins: Indexed[float],
    rule: Cascade,
    *,
    check_draft: bool = False,
) -> AcceptCount:
    """Keep drafts that are not deferred, and deferred ones while ``u_i <= min(1, pi(x)/q(x))``.

    Parameters
    ----------
    target, draft, tokens, check_draft
        As in `accept_count_exact`.
    coins : sequence of float
        ``coins[i]`` is asked for only where the draft at position i is deferred.
    rule : Cascade

    Returns
    -------
    accepted : int
    accept_probabilities : list of float
        Of the tested drafts; 1.0 of those that were not deferred.

    Examples
    --------
    >>> target, draft = [[0.75, 0.25], [0.75, 0.25]], [[0.5, 0.5], [0.5, 0.5]]
    >>> accept_count_cascade(target, draft, [0, 1], [None, 0.5], Cascade(0.0))
    (1, [1.0, 0.25])
    """
    probabilities: list[float] = []
    for i in range(len(tokens)):
        with errors_at(f"row {i}"):
            token = tokens[i]
            p, q = target[i], draft[i]
            deferred = cascade_token_deferral(p, q, token, alpha=rule.alpha, rule=rule.rule)
            require_same_length(p, q)
            if check_draft:
                _require_drawable(p, q, token)
            if not deferred and isinstance(p, SparseDistribution):
                # Of a support any id may be asked for; kept without a look at p, it would become a token.
                id_within(token, p.vocab_size)
            accept_probability = cascade_acceptance(p, q, token, rule) if deferred else 1.0
            probabilities.append(accept_probability)
            if deferred and not accepted_by(coins[i], accept_probability):
                return i, probabilities
    return len(tokens), probabilities


# ---- any rule ------------------------------------------------------------------------------------


def accept_count(
    rule: CanonicalRule,
    target: Indexed[Any],
    draft: Indexed[Any],
    tokens: Indexed[int],
    coins: Indexed[float],
    drawn: Indexed[int],
    *,
    check_draft: bool = False,
) -> AcceptCount:
    """The accept count of a rule in its canonical form (`mtplx.decisions.as_rule`).

    `coins` and `drawn` are asked for what the rule needs, and for nothing else; so are the rows.
    """
    if rule == "greedy":
        return accept_count_greedy(target, tokens)
    if rule == "match":
        return accept_count_match(target, tokens, drawn)
    if rule == "block":
        return accept_count_block(target, draft, tokens, coins, check_draft=check_draft)
    if isinstance(rule, Typical):
        return accept_count_typical(target, tokens, rule)
    if isinstance(rule, Cascade):
        return accept_count_cascade(target, draft, tokens, coins, rule, check_draft=check_draft)
    return accept_count_exact(target, draft, tokens, coins, check_draft=check_draft)


def weights_after_rejection(
    rule: CanonicalRule,
    target: Indexed[Any],
    draft: Indexed[Any],
    accepted: int,
    accept_probabilities: Sequence[float],
) -> Weights:
    """What the token behind `accepted` < K drafts is drawn from, under the rules that draw it then.

    Parameters
    ----------
    rule : "exact", "block", Typical or Cascade
    target, draft : sequence of distributions
    accepted : int
    accept_probabilities : sequence of float
        What `accept_count` gave.
    """
    p = target[accepted]
    if isinstance(rule, Typical):
        return weights_of(p, "target_p")
    if isinstance(rule, Cascade):
        return cascade_weights(p, draft[accepted], rule)
    if rule == "block":
        return block_weights(p, draft[accepted], accept_probabilities[accepted - 1] if accepted else 1.0)
    return exact_weights(p, draft[accepted])
