"""The definitions once more, in exact or many-digit arithmetic, independent of both faces.

Slow and literal on purpose: rational numbers, Python's own sort, no NumPy arithmetic.
"""

import math
from bisect import bisect_left
from fractions import Fraction
from itertools import accumulate

import mpmath


def ranking(values):
    """Ids by (value descending, id ascending)."""
    return sorted(range(len(values)), key=lambda i: (-Fraction(float(values[i])), i))


class Nucleus:
    """Kept sets of one row; the mass ranked before a token is summed without any rounding."""

    def __init__(self, probs):
        self.order = ranking(probs)
        self.before = list(accumulate((Fraction(float(probs[i])) for i in self.order), initial=Fraction(0)))

    def kept(self, top_p=1.0, top_k=0):
        """Kept ids, ascending."""
        count = len(self.order)
        if 0.0 < top_p < 1.0:
            count = max(bisect_left(self.before, Fraction(float(top_p)), hi=count), 1)
        if top_k and 0 < top_k < len(self.order):
            count = min(count, top_k)
        return sorted(self.order[:count])


def kept_sequentially(probs, top_p=1.0, top_k=0):
    """Kept ids, ascending, as the contract words it: float64 sums, one after the other, in rank order."""
    values = [float(p) for p in probs]
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    limit = top_k if top_k and 0 < top_k < len(values) else len(values)
    nucleus = 0.0 < top_p < 1.0
    before = 0.0
    survivors = []
    for rank, token in enumerate(order):
        if rank >= limit or (nucleus and rank and not before < top_p):
            break
        survivors.append(token)
        before += values[token]
    return sorted(survivors)


def share(probs, ids):
    """The row with only `ids` left, each divided by their correctly rounded sum."""
    total = math.fsum(float(probs[i]) for i in ids)
    row = [0.0] * len(probs)
    for i in ids:
        row[i] = float(probs[i]) / total
    return row


def softmax(logits, temperature=1.0):
    """exp(z)/sum exp(z), correctly rounded, for the float64 numbers z = x/T - max(x/T)."""
    scaled = [float(x) / temperature for x in logits]
    top = max(scaled)
    with mpmath.workdps(60):
        weights = [mpmath.exp(mpmath.mpf(s - top)) if s > -math.inf else mpmath.mpf(0) for s in scaled]
        total = mpmath.fsum(weights)
        return [to_float(w / total) for w in weights]


def to_float(value):
    """An mpmath number rounded once to float64, subnormal results included (`float` rounds those twice)."""
    if value == 0:
        return 0.0
    if value >= mpmath.mpf(2) ** -1022:
        return float(value)
    return float(int(mpmath.nint(mpmath.ldexp(value, 1074)))) * 5e-324


def draw(weights, u):
    """First place whose sequential cumulative weight, divided by the last one, exceeds u."""
    running, sums = 0.0, []
    for w in weights:
        running += float(w)
        sums.append(running)
    for place, value in enumerate(sums):
        if value / running > u:
            return place
    raise AssertionError("u must be below 1")


def correction(p, q):
    """(p - q)+, or p where no difference is positive; undivided."""
    differences = [max(float(a) - float(b), 0.0) for a, b in zip(p, q, strict=True)]
    return differences if any(differences) else [float(a) for a in p]


def verified(p, q, token, uniforms):
    """(accepted, token) of one verification of dense rows, from a list of uniforms that is used up."""
    a = (1.0 if p[token] > 0 else 0.0) if q[token] == 0 else min(1.0, float(p[token]) / float(q[token]))
    if uniforms.pop(0) <= a and a > 0.0:
        return True, token
    return False, draw(correction(p, q), uniforms.pop(0))
