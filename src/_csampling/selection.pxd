from libc.stdint cimport int64_t, uint8_t

from mtplx._csampling.arrays cimport Row
from mtplx._csampling.dispatch cimport scaling, streamed

# How a selection ended.
cdef enum selection_status:
    SELECTED
    NO_MEMORY
    BAD_PROBABILITY  # negative, NaN or infinite
    NO_MASS          # nothing positive
    BAD_LOGIT        # NaN, +inf, or nothing above -inf
    TOO_MANY         # candidates that the cut cannot tell apart outgrew their room: take the whole row

# Where float32 sums and terms of exponentials are what `rough_error` says: temperatures in between.
cdef double ROUGH_LOW, ROUGH_HIGH, LOG2_E

cdef struct Candidate:
    double weight   # what ranks are by: a probability, or the exponential of a logit
    double value    # as it stands in the row
    int64_t id

# The best of a row, by rank: (weight descending, id ascending).
cdef struct Candidates:
    Candidate *items
    Py_ssize_t count

# Where a truncation cuts a row of probabilities: all above the threshold stay, and the first
# `level_kept` of the `level_count` that equal it.
cdef struct Cut:
    double threshold
    Py_ssize_t level_count
    Py_ssize_t level_kept
    Py_ssize_t count  # elements that were searched: all that may be kept, and some
    double scale      # 1, or what keeps the sum from overflowing
    double total      # sum of what is kept, scaled
# Elements that the first bound of a cut is estimated from: every n // SAMPLE of them, from half of that
# on, where there are enough.
cdef enum:
    SAMPLE = 2048
    SAMPLED_FROM = 8192
    SAMPLE_ROOM = 2564

cdef double bound_of_sample(const double *sampled, Py_ssize_t taken, Py_ssize_t n, double top_p,
                            Py_ssize_t k) noexcept nogil

# The cut through the probabilities >= bound, TOO_MANY if it may lie below; `values` has room for n.
cdef selection_status cut_above(const double *p, Py_ssize_t n, double top_p, Py_ssize_t k, double bound,
                                double *values, uint8_t *hits, Cut *cut) noexcept nogil

# out = the kept entries divided by their sum; in place allowed.
cdef void keep_into(const double *p, Py_ssize_t n, const Cut *cut, const uint8_t *hits,
                    double *out) noexcept nogil

cdef void sort_candidates(Candidate *items, Py_ssize_t count) noexcept nogil

# The k best of a row of probabilities, for k small against n. The items are the caller's to free,
# whatever the status.
cdef selection_status best_probabilities(const Row *row, Py_ssize_t k, Candidates *best) noexcept nogil

# The same of any row of numbers and any k; BAD_LOGIT or TOO_MANY where NaN, an infinite maximum or chance
# leave it to `rank_all`.
cdef selection_status best_values(const Row *row, Py_ssize_t k, Candidates *best) noexcept nogil

# How many of the ranked candidates top_p keeps, by sequential sums.
cdef Py_ssize_t nucleus_size(const Candidate *items, Py_ssize_t count, double top_p) noexcept nogil

# out = n probabilities cut by top_p (>= 1: off) and top_k (0: off), divided by the sum of what is kept; in
# place allowed. `room` holds n numbers; it may be out where that is not p.
cdef selection_status cut_row(const double *p, Py_ssize_t n, double top_p, Py_ssize_t k, double *room,
                              double *out) noexcept nogil

# Ids and weights of the best k of a row of logits under the softmax at 0 < T < inf, cut by top_p
# (>= 1: off), for k small against n. Weights are proportional to the probabilities.
cdef selection_status best_logits(const Row *row, double temperature, double top_p, Py_ssize_t k,
                                  Candidates *best) noexcept nogil

# Block maxima (SIDE_BY_SIDE per CHUNK) of a row of logits, the largest of all, and a rough sum of the
# exponentials if asked for; BAD_LOGIT where there is a NaN or the largest is infinite.
cdef selection_status block_pass(const Row *row, double temperature, bint with_sum, double *maxima,
                                 streamed *run) noexcept nogil

# Relative error of the rough sum of n exponentials against softmax's own.
cdef double rough_error(Py_ssize_t n, const scaling *s) noexcept nogil

# The exponential of one logit, with the bits that softmax gives it.
cdef double weigh_one(double value, const scaling *s) noexcept nogil

# Whether k of n is few enough for best_probabilities and best_logits.
cdef inline bint few(Py_ssize_t k, Py_ssize_t n) noexcept nogil:
    return n >= 1024 and k <= n // 256

# Ids by value descending, equal values by id, NaN last.
cdef int rank_all(const Row *row, int64_t *ids) noexcept nogil
