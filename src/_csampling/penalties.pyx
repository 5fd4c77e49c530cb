"""Presence and frequency penalties, and overlays, as sparse updates of a row of logits."""

from collections.abc import Mapping

cimport numpy as cnp
from libc.math cimport isnan
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

from mtplx._csampling.arrays cimport Row, doubles, element, id_within, integer, new_doubles, open_row, real
from mtplx._csampling.mass cimport widen_into
from mtplx._csampling.selection cimport Candidate, sort_candidates

cnp.import_array()

# Range that penalties are clamped to.
cdef double LEAST = -2.0, MOST = 2.0
PENALTY_MIN = LEAST
PENALTY_MAX = MOST


cdef double clamped(object penalty, str name) except? -3.0:
    cdef double value = real(penalty, name)
    if isnan(value):
        raise ValueError(f"{name} is nan")
    return min(max(value, LEAST), MOST)


cdef object require_mapping(object mapping, str name):
    # One class at a time: Cython drops the errors of isinstance with a tuple, and Mapping's runs Python code.
    if mapping is not None and not isinstance(mapping, dict) and not isinstance(mapping, Mapping):
        raise TypeError(f"{name} must be a mapping of token ids, not {type(mapping).__name__}")


cdef class Patches:

    def __cinit__(self, Py_ssize_t most):
        self.ids = <int64_t *>malloc(max(most, 1) * sizeof(int64_t))
        self.values = <double *>malloc(max(most, 1) * sizeof(double))
        if self.ids is NULL or self.values is NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.ids)
        free(self.values)

    cdef void attach(self, Row *row) noexcept nogil:
        row.patch_ids = self.ids
        row.patch_values = self.values
        row.patches = self.count


cdef object plain_numbers(object mapping, str name):
    """What is left to read of it runs no code of the caller's: a dict of numbers itself, else pairs."""
    cdef bint plain = type(mapping) is dict
    if mapping is None:
        return None
    if plain:
        for token, value in (<dict>mapping).items():
            if not (type(token) is int and (type(value) is int or type(value) is float)):
                plain = False
                break
    if plain:
        return mapping
    pairs = []
    for token, value in mapping.items():
        token = integer(token, "a token id")
        pairs.append((token, real(value, f"{name} of token {token}")))
    return pairs


cdef tuple read_mappings(object token_counts, object overlay, double presence, double frequency):
    require_mapping(token_counts, "token_counts")
    require_mapping(overlay, "penalty_overlay")
    return (plain_numbers(token_counts, "token_counts") if presence != 0.0 or frequency != 0.0 else None,
            plain_numbers(overlay, "penalty_overlay"))


cdef Patches open_patches(const Row *row, object token_counts, double presence, double frequency,
                          object overlay):
    cdef bint counted = token_counts is not None and (presence != 0.0 or frequency != 0.0)
    cdef Py_ssize_t from_counts = len(token_counts) if counted else 0
    cdef Py_ssize_t from_overlay = len(overlay) if overlay is not None else 0
    cdef Py_ssize_t most = from_counts + from_overlay, filled = 0, i
    cdef double occurrences, amount
    cdef Candidate *updates
    cdef Patches patches
    if most == 0:
        return None
    patches = Patches(most)
    updates = <Candidate *>malloc(most * sizeof(Candidate))
    if updates is NULL:
        raise MemoryError
    try:
        if counted:
            for token, count in token_counts.items() if type(token_counts) is dict else token_counts:
                occurrences = count
                if not occurrences >= 0.0:
                    raise ValueError(f"token {token} has the count {count}")
                updates[filled].id = id_within(token, row.n)
                updates[filled].value = frequency * occurrences + presence * (occurrences > 0.0)
                filled += 1
                if filled == from_counts:
                    break
        from_counts = filled
        if from_overlay:
            for token, value in overlay.items() if type(overlay) is dict else overlay:
                amount = value
                if isnan(amount):
                    raise ValueError(f"penalty_overlay of token {token} is {value}")
                updates[filled].id = id_within(token, row.n)
                updates[filled].value = amount
                filled += 1
                if filled == most:
                    break
        # By id, the penalty of a token before its overlay.
        for i in range(filled):
            updates[i].weight = -2.0 * updates[i].id - (i >= from_counts)
            updates[i].id = 2 * updates[i].id + (i >= from_counts)
        sort_candidates(updates, filled)
        for i in range(filled):
            updates[i].id >>= 1
            if patches.count and patches.ids[patches.count - 1] == updates[i].id:
                patches.values[patches.count - 1] -= updates[i].value
            else:
                patches.ids[patches.count] = updates[i].id
                patches.values[patches.count] = element(row, updates[i].id) - updates[i].value
                patches.count += 1
    finally:
        free(updates)
    return patches


def apply_penalties(logits, token_counts, presence_penalty=0.0, frequency_penalty=0.0,
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
    cdef Patches patches
    cdef cnp.ndarray penalised
    cdef double *to
    cdef Py_ssize_t i
    cdef double presence = clamped(presence_penalty, "presence_penalty")
    cdef double frequency = clamped(frequency_penalty, "frequency_penalty")
    require_mapping(token_counts, "token_counts")
    require_mapping(penalty_overlay, "penalty_overlay")
    if nothing_to_do(token_counts, presence, frequency, penalty_overlay):
        return logits
    token_counts, penalty_overlay = read_mappings(token_counts, penalty_overlay, presence, frequency)
    _owner = open_row(logits, "logits", &row)
    patches = open_patches(&row, token_counts, presence, frequency, penalty_overlay)
    penalised = new_doubles(row.n)
    to = doubles(penalised)
    with nogil:
        widen_into(&row, to)
        for i in range(patches.count):
            to[patches.ids[i]] = patches.values[i]
    return penalised


cdef bint nothing_to_do(object token_counts, double presence, double frequency, object overlay) except -1:
    return (not token_counts or (presence == 0.0 and frequency == 0.0)) and not overlay
