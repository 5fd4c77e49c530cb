"""Presence and frequency penalties, and overlays, as sparse updates of a row of logits."""

import operator
from collections.abc import Mapping

cimport numpy as cnp
from libc.math cimport isnan

from mtplx._csampling.arrays cimport Row, doubles, id_within, new_doubles, open_row
from mtplx._csampling.mass cimport widen_into

cnp.import_array()

# Range that penalties are clamped to.
PENALTY_MIN = -2.0
PENALTY_MAX = 2.0


cdef double clamped(double penalty, str name) except? -3.0:
    if isnan(penalty):
        raise ValueError(f"{name} is nan")
    return min(max(penalty, <double>PENALTY_MIN), <double>PENALTY_MAX)


cdef object require_mapping(object mapping, str name):
    if mapping is not None and not isinstance(mapping, (dict, Mapping)):
        raise TypeError(f"{name} must be a mapping of token ids, not {type(mapping).__name__}")


def apply_penalties(logits, token_counts, double presence_penalty=0.0, double frequency_penalty=0.0,
                    penalty_overlay=None):
    """Lower the logits of tokens that were seen, then subtract an overlay.

    ``logit[j] -= frequency * count[j] + presence * (count[j] > 0)``, both penalties clamped to
    [-2, 2]; then ``logit[j] -= overlay[j]``, unclamped: a negative entry raises, +inf bans.

    Parameters
    ----------
    logits : array_like of float, shape (V,)
    token_counts : mapping of int to int, or None
        Occurrences by token id.
    presence_penalty, frequency_penalty : float
    penalty_overlay : mapping of int to float, or None

    Returns
    -------
    ndarray of float64, shape (V,)
        A fresh copy; where there is nothing to do (no counts or both penalties 0, and no overlay),
        the very object passed in.

    Raises
    ------
    IndexError
        An id outside [0, V).
    ValueError
        A penalty or an overlay is NaN; a count is negative or NaN.
    TypeError
        `token_counts` or `penalty_overlay` is not a mapping, or an id is not an integer.

    Examples
    --------
    >>> apply_penalties([2.0, 2.0, 2.0], {0: 3, 1: 1}, 0.5, 0.25)
    array([0.75, 1.25, 2.  ])
    """
    cdef Row row
    cdef cnp.ndarray penalised
    cdef double *to
    cdef double occurrences, amount
    cdef double presence = clamped(presence_penalty, "presence_penalty")
    cdef double frequency = clamped(frequency_penalty, "frequency_penalty")
    cdef bint counted, overlaid
    require_mapping(token_counts, "token_counts")
    require_mapping(penalty_overlay, "penalty_overlay")
    counted = (presence != 0.0 or frequency != 0.0) and token_counts is not None and len(token_counts) > 0
    overlaid = penalty_overlay is not None and len(penalty_overlay) > 0
    if not counted and not overlaid:
        return logits
    owner = open_row(logits, "logits", &row)
    penalised = new_doubles(row.n)
    to = doubles(penalised)
    with nogil:
        widen_into(&row, to)
    if counted:
        for token, count in token_counts.items():
            occurrences = count
            if not occurrences >= 0.0:
                raise ValueError(f"token {token} has the count {count}")
            to[id_within(token, row.n)] -= frequency * occurrences + presence * (occurrences > 0.0)
    if overlaid:
        for token, value in penalty_overlay.items():
            amount = value
            if isnan(amount):
                raise ValueError(f"penalty_overlay of token {token} is {value}")
            to[id_within(token, row.n)] -= amount
    return penalised
