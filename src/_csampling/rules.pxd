from libc.stdint cimport int64_t

from mtplx._csampling.arrays cimport Row
from mtplx._csampling.blocks cimport Block
from mtplx._csampling.distributions cimport Support
from mtplx._csampling.draws cimport Weights
from mtplx._csampling.views cimport View, Workspace, problem

# Verify one block; what it emits, or what failed, is left in it.
cdef problem run(Block *block, Workspace *space) noexcept nogil

# Make any view a row of probabilities, in the caller's memory or in a slot of the workspace.
cdef problem as_row(View *view, Workspace *space, int slot) noexcept nogil

# (factor p - q)+ of a pair of views, undivided: what is left over when a prefix is rejected.
cdef struct LeftOver:
    bint sparse
    bint positive
    double factor
    Support p          # sparse: both ascend
    Support q
    Weights weights    # dense
    double mass        # sparse: the sum by ascending id; dense: a sum by blocks

cdef problem leave_over(View *target, View *draft, Workspace *space, double factor,
                        LeftOver *left) noexcept nogil

# The next difference of a sparse pair, at entry i of p; `place` walks along q.
cdef double scaled_difference(const LeftOver *left, Py_ssize_t i, Py_ssize_t *place) noexcept nogil

# The sum by ascending id, one by one.
cdef double sequential_mass(const LeftOver *left) noexcept nogil

# min(1, before * p/q), infinite for q = 0 < p; 0 where the prefix or the token is impossible.
cdef inline double prefix_acceptance(double before, double p, double q) noexcept nogil:
    cdef double product
    if before == 0.0 or p == 0.0:
        return 0.0
    if q == 0.0:
        return 1.0
    product = before * (p / q)
    return product if product < 1.0 else 1.0

# h of a prefix, from the mass of what is left over; at most the prefix.
cdef inline double keep_probability(double mass, double prefix) noexcept nogil:
    cdef double keep
    if mass + (1.0 - prefix) == 0.0 or mass > 1.7976931348623157e308:
        return prefix
    keep = mass / (mass + (1.0 - prefix))
    return keep if keep < prefix else prefix
