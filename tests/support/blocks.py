"""Blocks for tests: the faces that verify them, random ones, and every chain rule stated once more.

`plain_block` is written from the formulas, for dense rows, in Python floats and in the order of the
contract (sums and draws by ascending id). It asks a *source* for coins and tokens, and there are two: a
generator in order, and the lanes of keyed streams, built on `numpy.random.Philox` and nothing else.
"""

import functools
import inspect
import math

import numpy as np
import pytest
from mtplx._csampling import dispatch

from mtplx import batch, reference, verification
from mtplx.decisions import Cascade, Typical
from mtplx.distributions import BatchedSparseDistributions, SparseDistribution

RULES = (
    "exact",
    "greedy",
    "match",
    "block",
    "typical",
    Typical(0.5, 0.4),
    Cascade(0.1),
    Cascade(0.2, "tokenv1"),
    Cascade(0.3, "tokenv2"),
)
COINS = "exact", "block", Cascade(0.1)  # rules that compare a coin with a ratio of p and q

CORRECTION, BONUS = 2**32, 2**32 + 1


# ---- faces -----------------------------------------------------------------------------------------


class Face:
    """The functions of blocks and rows of one face, each run on one instruction set."""

    def __init__(self, name, modules, isa=None):
        self.name, self.modules, self.isa = name, modules, isa

    def __getattr__(self, name):
        for module in self.modules:
            if hasattr(module, name):
                function = getattr(module, name)
                return self._on_isa(function) if self.isa and inspect.isroutine(function) else function
        raise AttributeError(f"the {self.name} face has no {name}")

    def _on_isa(self, function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            before = dispatch.active_isa()
            dispatch.use_isa(self.isa)
            try:
                return function(*args, **kwargs)
            finally:
                dispatch.use_isa(before)

        return run

    def __repr__(self):
        return self.name


FACES = [Face("reference", [reference])]
if verification.verify_block is not reference.verify_block:
    FACES += [Face(f"compiled-{isa}", [verification, batch], isa) for isa in dispatch.available_isas()]

every_face = pytest.mark.parametrize("face", FACES, ids=repr)


# ---- random blocks ---------------------------------------------------------------------------------


def random_rows(rng, V, count):
    """Rows of one kind: flat or peaked, dyadic, truncated, not summing to 1, or one-hot."""
    rows = rng.dirichlet(np.full(V, rng.choice([0.2, 1.0, 5.0])), count) if count else np.empty((0, V))
    kind = rng.integers(6)
    if kind == 0:
        rows = np.array([rng.multinomial(8, row) for row in rows]).reshape(count, V) / 8.0
    elif kind == 1:
        rows = np.where(rows < np.median(rows, axis=1, keepdims=True), 0.0, rows)
    elif kind == 2:
        rows = rows * 10.0 ** rng.uniform(-2, 2)
    elif kind == 3:
        rows = (rng.integers(0, V, (count, 1)) == np.arange(V)).astype(np.float64)
    return rows


def random_block(rng, V=None, K=None, bonus=True):
    """Target rows [K + 1, V], draft rows [K, V], K drafts."""
    V = int(rng.integers(2, 9)) if V is None else V
    K = int(rng.integers(0, 9)) if K is None else K
    target, draft = random_rows(rng, V, K + bonus), random_rows(rng, V, K)
    if K and rng.random() < 0.3:  # alike: blocks that are accepted to the end
        draft = target[:K] if rng.random() < 0.5 else 0.9 * target[:K] + 0.1 * draft
    tokens = [int(rng.choice(V, p=row / row.sum())) for row in draft]
    if K and rng.random() < 0.2:  # a draft that was not drawn from its row
        tokens[int(rng.integers(K))] = int(rng.integers(V))
    return target, draft, tokens


def as_sparse(row, rng=None):
    """The support of a dense row, in random order where a generator is given."""
    ids = np.flatnonzero(row)
    if rng is not None:
        ids = rng.permutation(ids)
    return SparseDistribution(ids, row[ids], row.size)


def as_batch(distributions):
    """Sparse distributions, at least one, as a batch."""
    size = distributions[0].vocab_size
    return BatchedSparseDistributions.from_distributions(distributions, vocab_size=size)


def in_some_form(rows, rng):
    """The same rows as an array of some kind, a list, a batch, or a mix of kinds; numbers may be rounded."""
    form = rng.integers(7)
    if form == 0:
        return np.asfortranarray(rows)
    if form == 1:
        return [row.tolist() for row in rows]
    if form == 2:
        return np.repeat(rows, 2, axis=1)[:, ::2]
    if form == 3:
        return rows.astype(rng.choice(["<f4", ">f8"]))
    if form == 4 and len(rows):
        return as_batch([as_sparse(row, rng) for row in rows])
    if form == 5:
        return tuple(as_sparse(row) if rng.random() < 0.5 else row for row in rows)
    return rows


def entries(rows):
    """The rows of any of these forms, one by one."""
    if isinstance(rows, BatchedSparseDistributions):
        return [rows.to_distribution(i) for i in range(len(rows))]
    return list(rows)


# ---- sources of coins and tokens -------------------------------------------------------------------


def first_above(weights, u):
    """The categorical draw of contract 4."""
    total = 0.0
    for weight in weights:
        total += weight
    cumulative = 0.0
    for token, weight in enumerate(weights):
        cumulative += weight
        if cumulative / total > u:
            return token
    raise AssertionError("the last cumulative sum is the total")


class InOrder:
    """A generator, asked in the order of the calls."""

    def __init__(self, rng):
        self.rng = rng

    def coin(self, i):
        return self.rng.random()

    def token(self, lane, weights):
        return first_above(weights, self.rng.random())


class ByLane:
    """The uniforms of a keyed stream."""

    def __init__(self, seed, position):
        self.key = np.array([seed, position], dtype=np.uint64)

    def coin(self, lane):
        philox = np.random.Philox(key=self.key, counter=[0, lane, 0, 0])
        return np.random.Generator(philox).random()

    def token(self, lane, weights):
        return first_above(weights, self.coin(lane))


# ---- the rules, stated once more -------------------------------------------------------------------


def plain_block(rule, target, draft, tokens, source):
    """(tokens, accepted, accept probabilities, bonus) of a block of dense rows, from the formulas."""
    target = [list(map(float, row)) for row in target]
    tokens = list(map(int, tokens))
    K = len(tokens)
    if draft is None:
        draft = [[float(v == x) for v in range(len(target[i]))] for i, x in enumerate(tokens)]
    draft = [list(map(float, row)) for row in draft]
    rule = Typical() if rule == "typical" else rule
    if rule == "block":
        accepted, probabilities, last = _plain_block_rule(target, draft, tokens, source)
    else:
        accepted, probabilities, last = K, [], None
        for i, x in enumerate(tokens):
            kept, probability, last = _plain_step(rule, i, target[i], draft[i], x, source)
            probabilities.append(probability)
            if not kept:
                accepted = i
                break
    emitted = tokens[:accepted]
    bonus = accepted == K and len(target) > K
    if accepted < K:
        emitted.append(last())
    elif bonus:
        row = target[K]
        emitted.append(row.index(max(row)) if rule == "greedy" else source.token(BONUS, row))
    return emitted, accepted, probabilities, bonus


def _ratio(p, q):
    if q == 0.0:
        return 1.0 if p > 0.0 else 0.0
    return min(1.0, p / q)


def _positive(weights, *otherwise):
    weights = [max(weight, 0.0) for weight in weights]
    return weights if any(weights) else _positive(*otherwise)


def _total(weights):
    total = 0.0
    for weight in weights:
        total += weight
    return total


def _plain_step(rule, i, p, q, x, source):
    """(kept, accept probability, how the token comes about if it was not kept) of one position."""
    if rule == "greedy":
        best = p.index(max(p))
        return x == best, float(x == best), lambda: best
    if rule == "match":
        drawn = source.token(i, p)
        return x == drawn, p[x], lambda: drawn
    if isinstance(rule, Typical):
        total = _total(p)
        entropy = -_total([w / total * math.log(w / total) for w in p if w > 0.0])
        kept = p[x] > min(rule.eps, rule.delta * math.exp(-entropy))
        return kept, float(kept), lambda: source.token(CORRECTION, p)
    if isinstance(rule, Cascade):
        top = max(p)
        short = {
            "tokenv1": lambda v: q[v] < top - rule.alpha,
            "tokenv2": lambda v: p[v] < top - rule.alpha,
            "tokenv3": lambda v: p[v] < top * (1.0 - rule.alpha),
        }[rule.rule]
        deferred = [short(v) for v in range(len(p))]
        if not deferred[x]:
            return True, 1.0, None
        mass = _total([w for w, r in zip(q, deferred, strict=True) if r])
        kept_mass = [0.0 if r else w for w, r in zip(q, deferred, strict=True)]
        probability = _ratio(p[x] * mass, q[x])
        left = [a * mass - b * r for a, b, r in zip(p, q, deferred, strict=True)]
        pi = [a + b * mass for a, b in zip(kept_mass, p, strict=True)]
        return (
            source.coin(i) <= probability and probability > 0.0,
            probability,
            lambda: source.token(CORRECTION, _positive(left, pi, p)),
        )
    probability = _ratio(p[x], q[x])
    left = [a - b for a, b in zip(p, q, strict=True)]
    return (
        source.coin(i) <= probability and probability > 0.0,
        probability,
        lambda: source.token(CORRECTION, _positive(left, p)),
    )


def _plain_block_rule(target, draft, tokens, source):
    K = len(tokens)
    prefixes = [1.0]
    for p, q, x in zip(target, draft, tokens, strict=False):
        before = prefixes[-1]
        if before == 0.0 or p[x] == 0.0:
            prefixes.append(0.0)
        else:
            prefixes.append(1.0 if q[x] == 0.0 else min(1.0, before * (p[x] / q[x])))
    coins = [source.coin(i) for i in range(K)]

    def left(i):
        return [prefixes[i] * a - b for a, b in zip(target[i], draft[i], strict=True)]

    def keeping(i):
        if i == K:
            return prefixes[K]
        mass = _total([max(weight, 0.0) for weight in left(i)])
        slack = mass + (1.0 - prefixes[i])
        return min(prefixes[i], mass / slack if slack else 1.0)

    accepted = max([0, *(i for i in range(1, K + 1) if coins[i - 1] <= keeping(i) and keeping(i) > 0.0)])
    return (
        accepted,
        prefixes[1:],
        lambda: source.token(CORRECTION, _positive(left(accepted), target[accepted])),
    )


def by_the_loop(target, draft, tokens, rng):
    """The exact rule as the loop over `reference.verify_one_token` that it has to be equal to."""
    emitted, probabilities = [], []
    target = entries(target)
    draft = None if draft is None else entries(draft)
    for i, token in enumerate(tokens):
        p = target[i]
        size = p.vocab_size if isinstance(p, SparseDistribution) else len(p)
        q = SparseDistribution.one_hot(token, size) if draft is None else draft[i]
        decision = reference.verify_one_token(p, q, token, rng)
        emitted.append(decision.token_id)
        probabilities.append(decision.accept_probability)
        if not decision.accepted:
            return emitted, i, probabilities, False
    if len(target) == len(tokens):
        return emitted, len(tokens), probabilities, False
    emitted.append(reference.sample_from_distribution(target[-1], rng))
    return emitted, len(tokens), probabilities, True


def fields_of(decision):
    """A `BlockDecision` as plain values, to be compared with those of `plain_block`."""
    return (
        decision.tokens.tolist(),
        decision.accepted,
        decision.accept_probabilities.tolist(),
        decision.bonus,
    )


# ---- rows that must not be looked at ---------------------------------------------------------------


class Untouchable:
    """A row, or an id, that fails whoever looks at it."""

    def __array__(self, dtype=None, copy=None):
        raise AssertionError("a row behind the rejection was converted")

    def __index__(self):
        raise AssertionError("an id behind the rejection was read")

    def __float__(self):
        raise AssertionError("an entry behind the rejection was read")


class Touched(list):
    """A list that remembers which entries were asked for."""

    def __init__(self, values):
        super().__init__(values)
        self.touched = set()

    def __getitem__(self, i):
        self.touched.add(i)
        return super().__getitem__(i)
