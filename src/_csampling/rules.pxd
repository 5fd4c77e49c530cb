from mtplx._csampling.blocks cimport Block
from mtplx._csampling.views cimport Workspace, problem

# Verify one block; what it emits, or what failed, is left in it.
cdef problem run(Block *block, Workspace *space) noexcept nogil

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
