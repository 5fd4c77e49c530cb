"""Random pairs of a target and a draft whose rows depend on the prefix, degenerate ones included."""

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from mtplx.reference import apply_top_p_top_k

KINDS = (
    "full support",
    "equal",
    "disjoint",
    "one-hot draft",
    "one-hot target",
    "zeros",
    "truncated",
    "nearly equal",
    "steep",
    "equal here and there",
    "one token banned",
)


def _simplex(rng, V, steepness=1.0):
    weights = rng.exponential(size=V) ** steepness
    return weights / weights.sum()


def _with_zeros(rng, row):
    kept = rng.random(row.size) < 0.6
    kept[rng.integers(row.size)] = True
    return row * kept / (row * kept).sum()


def _one_hot(rng, V):
    row = np.zeros(V)
    row[rng.integers(V)] = 1.0
    return row


def _truncated(rng, row):
    return apply_top_p_top_k(row, rng.uniform(0.3, 0.95), int(rng.integers(1, row.size + 1)))


def rows_of(kind, rng, V):
    """One row of each model."""
    p, q = _simplex(rng, V), _simplex(rng, V)
    if kind == "equal" or (kind == "equal here and there" and rng.random() < 0.5):
        return p, p.copy()
    if kind == "disjoint":
        side = rng.permutation(V) < rng.integers(1, V)
        return p * side / (p * side).sum(), q * ~side / (q * ~side).sum()
    if kind == "one-hot draft":
        return p, _one_hot(rng, V)
    if kind == "one-hot target":
        return _one_hot(rng, V), q
    if kind == "zeros":
        return _with_zeros(rng, p), _with_zeros(rng, q)
    if kind == "one token banned":
        p[rng.integers(V)] = q[rng.integers(V)] = 0.0
        return p / p.sum(), q / q.sum()
    if kind == "truncated":
        return _truncated(rng, p), _truncated(rng, q)
    if kind == "nearly equal":
        q = p * (1.0 + 1e-9 * rng.standard_normal(V))
        return p, q / q.sum()
    if kind == "steep":
        return _simplex(rng, V, 8.0), _simplex(rng, V, 8.0)
    return p, q


@dataclass
class Pair:
    """Two models over V tokens. A row is drawn when it is first asked for, from a seed of its own."""

    kind: str
    seed: int
    V: int = 3
    _rows: dict = field(default_factory=dict, repr=False)

    def _at(self, prefix):
        prefix = tuple(map(int, prefix))
        if prefix not in self._rows:
            code = sum((token + 1) * (self.V + 1) ** i for i, token in enumerate(prefix))
            rng = np.random.default_rng([self.seed, KINDS.index(self.kind), code])
            self._rows[prefix] = rows_of(self.kind, rng, self.V)
        return self._rows[prefix]

    def target(self, prefix):
        return self._at(prefix)[0]

    def draft(self, prefix):
        return self._at(prefix)[1]

    # For `support.rules`, which asks for lists.
    def target_list(self, prefix):
        return self.target(prefix).tolist()

    def draft_list(self, prefix):
        return self.draft(prefix).tolist()


def pairs(n, V=3, kinds=KINDS, seed=0):
    """`n` pairs, all kinds in turn."""
    return [Pair(kinds[i % len(kinds)], 1000 * seed + i, V) for i in range(n)]


WIDE = ("full support", "equal", "one-hot target", "nearly equal", "steep", "equal here and there")
"""Kinds whose draft rows hold all V tokens, so that V siblings can be drawn without replacement."""

ROUGHLY_WIDE = tuple(kind for kind in WIDE if kind != "steep")
"""Of those, the kinds that keep V tokens when probabilities are rounded to fractions."""

TWO_WIDE = (*WIDE, "one token banned")
"""Kinds whose draft rows hold at least two of three tokens."""


def rational(model, denominator=1 << 12):
    """A model of lists as one of fractions that sum to 1 exactly."""
    made = {}

    def row(prefix):
        if prefix not in made:
            numerators = [round(entry * denominator) for entry in model(prefix)]
            numerators[numerators.index(max(numerators))] += denominator - sum(numerators)
            made[prefix] = [Fraction(n, denominator) for n in numerators]
        return made[prefix]

    return row
