from libc.stdint cimport int64_t

from mtplx._csampling.arrays cimport Row

# What beta(r) is made of: the sums of p where p <= r q and of q elsewhere.
cdef struct Parts:
    double ratio          # r
    double p_mass
    double q_mass
    int64_t count         # grows with how many elements the first part has
    double *p_sums        # by block, as the next two; of rows longer than one
    double *q_sums
    int64_t *counts

cdef enum:
    HINTS = 8

# The division r of a node with that many children, as far as it was asked for.
cdef struct Division:
    Py_ssize_t siblings
    double least          # r lies within [least, most]
    double most
    double hint_p[HINTS]  # entries that are known before the rows are read
    double hint_q[HINTS]
    int hints
    bint opened           # the rows were read
    bint solved
    double division       # r and its rounds, once solved
    double rounds
    const double *p
    const double *q
    Py_ssize_t n
    double p_total
    double tolerance      # rounds - r is known within it
    double *totals        # of p, by block
    Parts low             # of a ratio below r: its counts alone are looked at
    Parts high            # of one that is not; once solved, of r
    Parts spare
    Parts seen            # what was summed last; its masses and ratio
    double root           # of the equation with its masses
    bint low_known
    bint high_known
    Py_ssize_t summed     # elements of both rows that were looked at
    double *memory
    Py_ssize_t room

cdef enum opening:
    OPENED
    BAD_TARGET
    BAD_DRAFT
    WITHOUT_ROOM

# Forget what was asked for another node; two children or more.
cdef void begin(Division *division, Py_ssize_t siblings) noexcept nogil

# Tell two entries of the rows, which helps to guess r; those of drafts are likely to be large.
cdef void hint(Division *division, double p, double q) noexcept nogil

# Check both rows of float64 and find bounds of r, in one pass.
cdef opening open_rows(Division *division, const Row *p, const Row *q) noexcept nogil

# r itself.
cdef void solve(Division *division) noexcept nogil

# A token of what is left when all children were rejected; -1 if in doubt.
cdef Py_ssize_t draw_left(const Division *division, double u) noexcept nogil

# One weight of that.
cdef inline double weight_left(const Division *division, Py_ssize_t i) noexcept nogil:
    cdef double part = division.p[i] / division.division
    part = division.p[i] - (part if part < division.q[i] else division.q[i]) * division.rounds
    return part if part > 0.0 else 0.0

cdef void free_division(Division *division) noexcept nogil
