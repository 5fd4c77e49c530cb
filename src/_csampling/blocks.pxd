from cpython.ref cimport PyObject
from libc.stdint cimport int64_t

from mtplx._csampling.arrays cimport Row
from mtplx._csampling.dispatch cimport scaling
from mtplx._csampling.streams cimport Stream
from mtplx._csampling.views cimport Failure, Settings, View, Workspace, problem

# How drafts are judged.
cdef enum rule_code:
    EXACT
    GREEDY
    MATCH
    BLOCK_RULE
    TYPICAL
    CASCADE

cdef enum side_kind:
    MATRIX
    BATCH
    SEQUENCE
    POINTS

# One side of a block.
cdef struct Side:
    side_kind kind
    Py_ssize_t count       # rows
    Row first              # MATRIX
    Py_ssize_t stride      # bytes from row to row
    const int64_t *ids     # BATCH: first row of ids and probabilities
    const double *probs
    Py_ssize_t width
    int64_t vocab_size
    PyObject *rows         # SEQUENCE: kept alive by the caller
    PyObject *opened       # SEQUENCE: a dict of the rows that were opened, by number

# Penalties inside a block: the counts before it, then one more for every draft that was passed.
cdef struct Penalties:
    double presence
    double frequency
    int64_t *ids           # ascending
    double *counts
    Py_ssize_t filled
    Py_ssize_t *overlay_starts   # one more than target rows; NULL without overlays
    int64_t *overlay_ids
    double *overlays
    bint overlay_each      # an overlay for every row, not one for all
    int64_t *patch_ids
    double *patches

# What TYPICAL and CASCADE carry.
cdef enum deferral:
    BY_DRAFT          # q(x) < max p - alpha
    BY_TARGET         # p(x) < max p - alpha
    BY_TARGET_RATIO   # p(x) < max p (1 - alpha)

cdef struct Parameters:
    double eps
    double delta
    double alpha
    deferral deferred

cdef dict DEFERRALS   # by their names

# r of the cascade: a token is deferred where the probability that is asked about is below this bound.
cdef inline double deferral_bound(deferral by, double top, double alpha) noexcept nogil:
    return top * (1.0 - alpha) if by == BY_TARGET_RATIO else top - alpha

# The sum of a streamed row, kept where a rule comes back to it.
cdef struct KeptSum:
    scaling scaled
    double total           # 0: none

cdef struct Block:
    rule_code rule
    Parameters parameters
    bint check_draft
    Py_ssize_t drafts
    const int64_t *tokens
    const char *unreadable       # flags of ids that have to be read from the object, or NULL
    PyObject *given_tokens
    Side target
    Side draft
    bint from_logits
    Settings target_settings
    Settings draft_settings
    Penalties penalties
    Stream stream
    int64_t *out                 # drafts + 1
    double *probabilities        # drafts
    double *coins                # drafts; under BLOCK_RULE, else NULL
    KeptSum *sums                # drafts of either side, under BLOCK_RULE from logits, else NULL
    Py_ssize_t emitted
    Py_ssize_t accepted
    Py_ssize_t tested
    bint bonus
    problem status
    Failure failure

# Rows and ids, as they are reached. What is wrong with one is noted in the block.
cdef problem open_given(Block *block, const Side *side, Py_ssize_t i, View *view) noexcept nogil
cdef problem open_target(Block *block, Workspace *space, Py_ssize_t i, View *view) noexcept nogil
cdef problem open_draft(Block *block, Workspace *space, Py_ssize_t i, const View *target, int64_t token,
                        View *view) noexcept nogil
cdef problem read_token(Block *block, Py_ssize_t i, int64_t *token) noexcept nogil

# What penalties make of single logits of this row.
cdef void patch(const Penalties *penalties, Py_ssize_t row, Row *logits) noexcept nogil

# One more occurrence of a token, for the rows behind it; one less.
cdef void count_draft(Penalties *penalties, int64_t token) noexcept nogil
cdef void discount_draft(Penalties *penalties, int64_t token) noexcept nogil
