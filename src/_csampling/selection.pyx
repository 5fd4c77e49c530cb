"""Which tokens a truncation keeps, without sorting the row.

Design
------
*Few ranks* (`best_probabilities`, `best_logits`). One pass leaves a maximum for every block of 64
strided elements. The k-th largest of these is a lower bound for the k-th largest element, so the
elements not below it are candidates: k and some, whatever the row. Where equal values make them many,
the list is cut back to what can still win, and the bound rises.

*Many ranks, or mass alone* (`cut_row`). A sample of the row proposes a bound that the cut cannot lie
below; the elements above it are packed, and a histogram over the leading bits of the floats finds the
bucket where the cut lies. That bucket alone is refined, down to one value or a handful that is sorted.
The cut is a value and, where that value stands several times, a number of lowest ids.

*Certificates.* The reference decides by sums taken one by one in rank order. Sums by buckets differ from
them by rounding only, at most (number of additions) * 2^-53 of the sum on either side. Where a partial
sum comes closer to top_p than that, the sums are taken again in the reference's order.

*Ranks from logits* are ranks by probability: exp is monotone up to its error, and two logits whose
probabilities round to the same number tie. `best_logits` collects with slack for both, and where a cut
falls between weights too close to tell, it takes the float64 sum and ranks the probabilities themselves.
"""

from libc.math cimport INFINITY, ceil, fabs, isfinite, isnan, log, nextafter, sqrt
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from mtplx._csampling.arrays cimport F64, Row, element, logits_piece, probs_piece
from mtplx._csampling.dispatch cimport (
    CHUNK,
    HIT_GROUP,
    NUCLEUS_AGAINST_SUM,
    NUCLEUS_BOUNDARY,
    RANK_TIE,
    SCALE_NONE,
    SCALE_RECIPROCAL,
    SIDE_BY_SIDE,
    TABLES,
    bucket,
    count_fallback,
    running,
    scaling,
    streamed,
    table,
)
from mtplx._csampling.mass cimport OVERFLOW_SCALE, UNIT
from mtplx._csampling.softmax cimport exponentials, set_scaling

cdef extern from "Python.h":
    Py_ssize_t PY_SSIZE_T_MAX

cdef double SMALLEST = 5e-324        # 2^-1074
cdef double LOG2_E = 1.4426950408889634
# Temperatures at which log2(e)/T and its products are ordinary float32 numbers.
cdef double ROUGH_LOW = 2.0 ** -60, ROUGH_HIGH = 2.0 ** 60


# ---- ranking -------------------------------------------------------------------------------------


ctypedef fused Ranked:
    double
    Candidate


cdef inline bint outranks(Ranked *a, Ranked *b) noexcept nogil:
    if Ranked is Candidate:
        return a.weight > b.weight or (a.weight == b.weight and a.id < b.id)
    else:
        return a[0] > b[0]


cdef inline Ranked middle(Ranked *a, Ranked *b, Ranked *c) noexcept nogil:
    if outranks(a, b):
        return b[0] if outranks(b, c) else c[0] if outranks(a, c) else a[0]
    return a[0] if outranks(a, c) else c[0] if outranks(b, c) else b[0]


cdef void rank_first(Ranked *items, Py_ssize_t count, Py_ssize_t wanted) noexcept nogil:
    """The `wanted` first of the items by rank, in order; the others follow in any.

    Quicksort, insertion below 24. The pivot is the median of the quartiles' places, so that neither rows in
    order nor those that rise and fall split unevenly.
    """
    cdef Ranked pivot, held
    cdef Py_ssize_t i, j
    while count > 24 and wanted > 0:
        pivot = middle(&items[count >> 2], &items[count >> 1], &items[count - 1 - (count >> 2)])
        i = 0
        j = count - 1
        while i <= j:
            while outranks(&items[i], &pivot):
                i += 1
            while outranks(&pivot, &items[j]):
                j -= 1
            if i <= j:
                held = items[i]
                items[i] = items[j]
                items[j] = held
                i += 1
                j -= 1
        if i >= wanted:
            count = j + 1
        elif j + 1 < count - i:
            rank_first(items, j + 1, j + 1)
            items += i
            count -= i
            wanted -= i
        else:
            rank_first(items + i, count - i, wanted - i)
            count = j + 1
    if wanted > 0:
        for i in range(1, count):
            held = items[i]
            j = i
            while j > 0 and outranks(&held, &items[j - 1]):
                items[j] = items[j - 1]
                j -= 1
            items[j] = held


cdef void sort_candidates(Candidate *items, Py_ssize_t count) noexcept nogil:
    rank_first(items, count, count)


cdef double kth_largest(const double *values, Py_ssize_t n, Py_ssize_t k, double *room) noexcept nogil:
    """The k-th largest of n values without NaN, -inf if k > n; `room` holds n + k values."""
    cdef int ignored = 0
    cdef Py_ssize_t groups = 4 * k, start, i
    cdef double *maxima = room + k
    cdef double bound
    if k > n:
        return -INFINITY
    if k > 64:
        return heap_kth_largest(values, n, k, room)
    if n >= 2 * groups:
        # The k-th largest maximum of 4 k groups is a lower bound, which hardly more than k values reach.
        memcpy(maxima, values, groups * sizeof(double))
        start = groups
        while start < n:
            for i in range(min(groups, n - start)):
                maxima[i] = values[start + i] if values[start + i] > maxima[i] else maxima[i]
            start += groups
        bound = reached_by_some(maxima, groups, k, room)
        n = table.split(values, n, bound, room + k, NULL, &ignored)
        values = room + k
    return best_kth_largest(values, n, k, room)


cdef double reached_by_some(const double *values, Py_ssize_t n, Py_ssize_t k, double *room) noexcept nogil:
    """A bound that k of the values reach and hardly more.

    By halves, whose counts have no branch that depends on a value; the k-th largest where the values are too
    alike for that, or not finite.
    """
    cdef double low = values[0], high = table.max_f64(values, n), middle
    cdef Py_ssize_t i, reached
    cdef int _round
    for i in range(k):
        low = min(low, values[i])
    if isfinite(high - low):
        for _round in range(10):
            middle = low + 0.5 * (high - low)
            reached = 0
            for i in range(n):
                reached += values[i] >= middle
            if reached < k:
                high = middle
            elif reached <= k + (k >> 2):
                return middle
            else:
                low = middle
    return best_kth_largest(values, n, k, room)


cdef double best_kth_largest(const double *values, Py_ssize_t n, Py_ssize_t k, double *best) noexcept nogil:
    """The same by a list of the k best, descending: most values fail the first comparison.

    Or of the n - k + 1 worst, ascending, where these are fewer.
    """
    cdef Py_ssize_t i, j, held = 0, worst = n - k + 1
    cdef double value, lowest = -INFINITY, highest = INFINITY
    if worst < k:
        for i in range(n):
            value = values[i]
            if value < highest or held < worst:
                j = held if held < worst else worst - 1
                while j > 0 and best[j - 1] > value:
                    best[j] = best[j - 1]
                    j -= 1
                best[j] = value
                if held < worst:
                    held += 1
                if held == worst:
                    highest = best[worst - 1]
        return highest
    for i in range(n):
        value = values[i]
        if value > lowest or held < k:
            j = held if held < k else k - 1
            while j > 0 and best[j - 1] < value:
                best[j] = best[j - 1]
                j -= 1
            best[j] = value
            if held < k:
                held += 1
            if held == k:
                lowest = best[k - 1]
    return lowest


cdef double heap_kth_largest(const double *values, Py_ssize_t n, Py_ssize_t k, double *heap) noexcept nogil:
    """The same by a heap of the k best, the smallest on top."""
    cdef Py_ssize_t i, j, child
    cdef double value
    for i in range(n):
        value = values[i]
        if i < k:
            j = i
            while j > 0 and heap[(j - 1) >> 1] > value:
                heap[j] = heap[(j - 1) >> 1]
                j = (j - 1) >> 1
            heap[j] = value
        elif value > heap[0]:
            j = 0
            child = 1
            while child < k:
                if child + 1 < k and heap[child + 1] < heap[child]:
                    child += 1
                if heap[child] >= value:
                    break
                heap[j] = heap[child]
                j = child
                child = 2 * j + 1
            heap[j] = value
    return heap[0]


cdef Py_ssize_t nucleus_size(const Candidate *items, Py_ssize_t count, double top_p) noexcept nogil:
    cdef double before = 0.0
    cdef Py_ssize_t i
    for i in range(count):
        if i > 0 and not before < top_p:
            return i
        before += items[i].weight
    return count


# ---- few ranks of given probabilities ------------------------------------------------------------


cdef selection_status best_probabilities(const Row *row, Py_ssize_t k, Candidates *best) noexcept nogil:
    cdef double buffer[CHUNK]
    cdef const double *piece
    cdef Py_ssize_t blocks = (row.n + CHUNK - 1) // CHUNK * SIDE_BY_SIDE
    cdef Py_ssize_t start = 0, length
    cdef bint bad = False
    cdef double largest
    cdef selection_status status = SELECTED
    cdef double *maxima = open_candidates(k, blocks, best)
    if maxima is NULL:
        return NO_MEMORY
    while start < row.n:
        length = probs_piece(row, start, row.n, buffer, &piece)
        bad |= table.block_maxima_checked(piece, length, maxima + start // CHUNK * SIDE_BY_SIDE)
        start += length
    largest = table.max_f64(maxima, blocks)
    if bad or largest == INFINITY:
        status = BAD_PROBABILITY
    elif largest == 0.0:
        status = NO_MASS
    else:
        collect_values(row, k, maxima, blocks, best)
        if best.count == 0:
            status = NO_MASS  # the row was written over meanwhile
    return status


cdef selection_status best_values(const Row *row, Py_ssize_t k, Candidates *best) noexcept nogil:
    cdef Py_ssize_t blocks = (row.n + CHUNK - 1) // CHUNK * SIDE_BY_SIDE
    cdef streamed run
    cdef selection_status status
    cdef double *maxima
    if not few(k, row.n):
        if open_candidates(k, 0, best) is NULL:
            return NO_MEMORY
        collect_above(row, k, bound_of_values(row, k), NULL, best)
        return SELECTED if best.count == k else TOO_MANY
    maxima = open_candidates(k, blocks, best)
    if maxima is NULL:
        return NO_MEMORY
    status = block_pass(row, 1.0, False, maxima, &run)
    if status == SELECTED:
        collect_values(row, k, maxima, blocks, best)
        if best.count < k:
            status = TOO_MANY  # the row was written over meanwhile
    return status


cdef double bound_of_values(const Row *row, Py_ssize_t k) noexcept nogil:
    """A value that k of the row are probably not below: of a sample, with a margin of four deviations."""
    cdef double sampled[SAMPLE_ROOM]
    cdef Py_ssize_t stride = row.n // SAMPLE, i = stride >> 1, taken = 0, rank
    cdef double share, value
    if stride < 2:
        return -INFINITY
    while i < row.n and taken < SAMPLE_ROOM:
        value = element(row, i)
        sampled[taken] = -INFINITY if isnan(value) else value
        taken += 1
        i += stride
    share = <double>k * taken / row.n
    rank = <Py_ssize_t>(share + 4.0 * sqrt(share)) + 4
    if rank > taken:
        return -INFINITY
    rank_first(sampled, taken, rank)
    return sampled[rank - 1]


cdef double *open_candidates(Py_ssize_t k, Py_ssize_t blocks, Candidates *best) noexcept nogil:
    """Room for the candidates of k ranks; returns room for the block maxima, twice, and k more, or NULL.

    One piece of memory: freeing the items frees the maxima.
    """
    cdef Py_ssize_t room = 2 * k + 2 * CHUNK
    best.items = <Candidate *>malloc(room * sizeof(Candidate) + (2 * blocks + k) * sizeof(double))
    best.count = 0
    return <double *>(best.items + room) if best.items is not NULL else NULL


cdef void collect_values(const Row *row, Py_ssize_t k, double *maxima, Py_ssize_t blocks,
                         Candidates *best) noexcept nogil:
    """The k best values, ranked."""
    collect_above(row, k, kth_largest(maxima, blocks, k, maxima + blocks), maxima, best)


cdef void collect_above(const Row *row, Py_ssize_t k, double bound, const double *maxima,
                        Candidates *best) noexcept nogil:
    """The k best of the values that are not below a bound, ranked; block maxima, if any, save reading."""
    cdef double buffer[CHUNK]
    cdef int64_t ids[CHUNK]
    cdef double values[CHUNK]
    cdef const double *piece
    cdef Py_ssize_t chunk, length
    cdef size_t hits, h
    for chunk in range((row.n + CHUNK - 1) // CHUNK):
        if maxima is not NULL and not any_at_least(maxima + chunk * SIDE_BY_SIDE, bound):
            continue
        length = probs_piece(row, chunk * CHUNK, CHUNK, buffer, &piece)
        hits = table.collect_f64(piece, length, bound, chunk * CHUNK, ids, values)
        for h in range(hits):
            best.items[best.count].weight = values[h]
            best.items[best.count].value = values[h]
            best.items[best.count].id = ids[h]
            best.count += 1
        if best.count > 2 * k + CHUNK:
            # Ties with the k-th have higher ids from here on: only what is larger can still win.
            rank_first(best.items, best.count, k)
            best.count = k
            bound = nextafter(best.items[k - 1].weight, INFINITY)
    rank_first(best.items, best.count, k)
    best.count = min(best.count, k)


cdef inline bint any_at_least(const double *maxima, double bound) noexcept nogil:
    cdef Py_ssize_t j
    cdef bint found = False
    for j in range(SIDE_BY_SIDE):
        found |= maxima[j] >= bound
    return found


# ---- few ranks of logits -------------------------------------------------------------------------


cdef void weigh(Candidate *items, Py_ssize_t count, const scaling *s) noexcept nogil:
    """Exponentials of the candidates' logits, with the bits that softmax gives them."""
    cdef double logits[CHUNK]
    cdef running ignored
    cdef Py_ssize_t start = 0, length, i
    memset(&ignored, 0, sizeof(ignored))
    while start < count:
        length = min(count - start, <Py_ssize_t>CHUNK)
        for i in range(length):
            logits[i] = items[start + i].value
        table.exp_f64(logits, length, s, logits, &ignored)
        for i in range(length):
            items[start + i].weight = logits[i]
        start += length


cdef double weigh_one(double value, const scaling *s) noexcept nogil:
    cdef Candidate one
    one.value = value
    weigh(&one, 1, s)
    return one.weight


cdef void divide_weights(Candidate *items, Py_ssize_t count, double total) noexcept nogil:
    """Exponentials become probabilities, with the bits that softmax gives them."""
    cdef double weights[CHUNK]
    cdef Py_ssize_t start = 0, length, i
    while start < count:
        length = min(count - start, <Py_ssize_t>CHUNK)
        for i in range(length):
            weights[i] = items[start + i].weight
        table.divide_f64(weights, length, total, weights)
        for i in range(length):
            items[start + i].weight = weights[i]
        start += length


# Weights closer than this, relatively, may belong to equal probabilities: dividing by the sum rounds
# once, so quotients of normal numbers can only meet within 2 * 2^-52.
cdef double CLOSE = 2.0 ** -50
# Below this, probabilities may be subnormal, where many weights meet: rank the probabilities themselves.
cdef double TINY_WEIGHT = 2.0 ** -900
cdef double SURELY_ORDINARY = -600.0  # no exponential of this or more is tiny: exp(-600) > 2^-866


cdef double slack_of_exp(const scaling *s, double bound) noexcept nogil:
    """By how much, over T, a logit must lie below `bound` for its exponential not to be larger.

    Derived in `slack_below`. It may be equal: subnormal results are rounded once more, which keeps order.
    """
    return 2.0 ** -48 * (1.0 + fabs(table.scaled(bound, s)) + fabs(s.top))


cdef double slack_below(const scaling *s, double bound, Py_ssize_t n) noexcept nogil:
    """The logit below which no probability can tie with that of `bound` or exceed it.

    With A = |bound/T| + |top|, z is computed with an error below A 2^-53 for either logit and exp with
    one below 2^-52, so exponentials of logits whose z differ by more than A 2^-51 + 2^-50 are in order
    and more than 2^-51 apart, hence so are the quotients. Four times that is taken. Where quotients are
    subnormal they are multiples of 2^-1074: weights apart by more than n 2^-1073 >= sum 2^-1073 differ.
    Below z = -746 every weight is 0; the slack there keeps what is rounded on the way to that logit below it.
    """
    cdef double slack, lowest = (s.top - 747.0 - 2.0 ** -48 * (1.0 + fabs(s.top))) * s.temperature
    cdef double z = table.scaled(bound, s) - s.top
    cdef double weight
    if z > -745.0:
        slack = slack_of_exp(s, bound)
        if z < SURELY_ORDINARY:
            weight = weigh_one(bound, s)
            if weight < TINY_WEIGHT:
                slack += n * (2.0 * SMALLEST) / weight
        if bound - slack * s.temperature > lowest:
            return bound - slack * s.temperature
    return lowest


cdef selection_status best_logits(const Row *row, double temperature, double top_p, Py_ssize_t k,
                                  Candidates *best) noexcept nogil:
    cdef Py_ssize_t blocks = (row.n + CHUNK - 1) // CHUNK * SIDE_BY_SIDE
    cdef scaling s
    cdef streamed run
    cdef selection_status status
    cdef double *maxima = open_candidates(k, blocks, best)
    if maxima is NULL:
        return NO_MEMORY
    status = block_pass(row, temperature, top_p < 1.0, maxima, &run)
    if status == SELECTED:
        set_scaling(&s, temperature, run.top)
        if s.rule == SCALE_NONE or s.rule == SCALE_RECIPROCAL:
            status = collect_logits(row, &s, k, maxima, blocks, best)
        else:
            status = TOO_MANY
    if status == SELECTED:
        decide(row, &s, top_p, k, run.sum, best)
    return status


cdef selection_status block_pass(const Row *row, double temperature, bint with_sum, double *maxima,
                                 streamed *run) noexcept nogil:
    """Block maxima of a row of logits, the largest of all, and a rough sum of exponentials if asked for."""
    cdef double buffer[CHUNK]
    cdef const void *piece
    cdef bint single, nan = False
    cdef Py_ssize_t start = 0, length
    cdef double per_unit = LOG2_E / temperature
    cdef double *to = maxima
    run.top = -INFINITY
    run.sum = 0.0
    while start < row.n:
        length = logits_piece(row, start, buffer, &piece, &single)
        if with_sum and single:
            nan |= table.block_maxima_sum_f32(<const float *>piece, length, per_unit, to, run)
        elif with_sum:
            nan |= table.block_maxima_sum_f64(<const double *>piece, length, per_unit, to, run)
        elif single:
            nan |= table.block_maxima_f32(<const float *>piece, length, to)
        else:
            nan |= table.block_maxima_f64(<const double *>piece, length, to)
        to += (length + CHUNK - 1) // CHUNK * SIDE_BY_SIDE
        start += length
    if not with_sum:
        run.top = table.max_f64(maxima, to - maxima)
    if with_sum and not (ROUGH_LOW < temperature < ROUGH_HIGH
                         and fabs(run.top - <float>run.top) * per_unit < 64.0):
        # Not a sum that float32 terms can give: whoever compares with it is in doubt.
        run.sum = INFINITY
    return BAD_LOGIT if nan or not isfinite(run.top) else SELECTED


cdef selection_status collect_logits(const Row *row, const scaling *s, Py_ssize_t k, double *maxima,
                                     Py_ssize_t blocks, Candidates *best) noexcept nogil:
    """Everything that can be among the k best, with weights, the first k of them ranked."""
    cdef double buffer[CHUNK]
    cdef int64_t ids[CHUNK]
    cdef double values[CHUNK]
    cdef const void *piece
    cdef bint single
    cdef Row part = row[0]
    cdef Py_ssize_t chunk, length
    cdef size_t hits, h
    cdef double level = INFINITY  # logits equal to this one tie with the k-th and come too late
    cdef double bound = slack_below(s, kth_largest(maxima, blocks, k, maxima + blocks), row.n)
    for chunk in range(blocks // SIDE_BY_SIDE):
        if not any_at_least(maxima + chunk * SIDE_BY_SIDE, bound):
            continue
        # One CHUNK of the row, whatever its type.
        part.n = min(row.n, (chunk + 1) * CHUNK)
        length = logits_piece(&part, chunk * CHUNK, buffer, &piece, &single)
        if single:
            hits = table.collect_f32(<const float *>piece, length, bound, chunk * CHUNK, ids, values)
        elif not (any_at_least(maxima + chunk * SIDE_BY_SIDE, nextafter(level, INFINITY))
                  or table.between(<const double *>piece, length, bound, level, 1, values)):
            continue  # nothing but what equals the level
        else:
            hits = table.collect_f64(<const double *>piece, length, bound, chunk * CHUNK, ids, values)
        for h in range(hits):
            if values[h] != level:
                best.items[best.count].value = values[h]
                best.items[best.count].id = ids[h]
                best.count += 1
        if best.count > 2 * k + CHUNK:
            weigh(best.items, best.count, s)
            rank_first(best.items, best.count, k)
            if best.items[k - 1].weight == 1.0 and none_close_to_one(best, k):
                # No weight exceeds exp(0) = 1, and later ones have higher ids.
                best.count = k
                return SELECTED
            if not cut_back(k, best, row.n):
                return TOO_MANY
            level = best.items[k - 1].value
            # What follows has higher ids: it has to exceed the k-th weight, a tie is not enough.
            bound = level - slack_of_exp(s, level) * s.temperature
            if row.kind != F64 and row.patches == 0 and <float>bound == <float>level:
                # No float32 lies between: what ties is equal.
                bound = nextafter(level, INFINITY)
    if best.count == 0:
        return TOO_MANY  # the row was written over meanwhile
    weigh(best.items, best.count, s)
    rank_first(best.items, best.count, k)
    return SELECTED


cdef bint none_close_to_one(const Candidates *best, Py_ssize_t k) noexcept nogil:
    """Whether every weight behind rank k is 1 or certainly belongs to a smaller probability."""
    cdef Py_ssize_t i
    for i in range(k, best.count):
        if best.items[i].weight != 1.0 and best.items[i].weight >= 1.0 - CLOSE:
            return False
    return True


cdef bint cut_back(Py_ssize_t k, Candidates *best, Py_ssize_t n) noexcept nogil:
    """Drop what cannot be among the k best any more: the list is cut after rank k, unless weights too close
    to the k-th to tell stand on both sides of it.

    Where quotients may be subnormal, weights farther apart than n 2^-1073 differ (`slack_below`).
    """
    cdef double kth = best.items[k - 1].weight
    cdef double apart = kth * CLOSE + (n * (2.0 * SMALLEST) if kth < TINY_WEIGHT else 0.0)
    cdef Py_ssize_t i = k - 1
    while i > 0 and best.items[i - 1].weight <= kth + apart:
        i -= 1
    if best.items[i].weight != kth:
        return False
    for i in range(k, best.count):
        if best.items[i].weight >= kth - apart and (
                best.items[i].weight != kth or best.items[i].value != best.items[k - 1].value):
            return False
    best.count = k
    return True


cdef double rough_error(Py_ssize_t n, const scaling *s) noexcept nogil:
    """The terms are 2^t with t = d c in float32: relative error 3 * 2^-24 of t, from rounding d, c and the
    product, which moves a term by |z| 3 * 2^-24 of itself; `exp2_rough_f32` adds 2^-21 at most; 16 float32
    additions per lane add 16 * 2^-24. By Gibbs' inequality the mean of |z| under the weights is at most
    log n, so the sum is within (log n + 8) 2^-22 of the true one. What it is compared with is the sum of
    softmax, whose z = x/T - max x/T rounds at the size of its terms: where exp(z) is not 0, |z| < 746 and
    |x/T| < |top| + 746, so the two quotients and the difference round by less than (2 |top| + 1492) 2^-53.
    """
    return (log(<double>n) + 8.0) * 2.0 ** -22 + (2.0 * fabs(s.top) + 1024.0) * 2.0 ** -52


cdef void decide(const Row *row, const scaling *s, double top_p, Py_ssize_t k, double rough_total,
                 Candidates *best) noexcept nogil:
    """Cut the ranked candidates by top_p and k; exactly, where the rough sum or the weights leave doubt."""
    cdef Py_ssize_t kept = min(k, best.count), i = 1
    cdef double before, limit, tolerance
    cdef bint doubt = False
    if top_p < 1.0:
        limit = top_p * rough_total
        tolerance = rough_error(row.n, s) * rough_total
        before = best.items[0].weight
        while i < kept and before < limit - tolerance:
            before += best.items[i].weight
            i += 1
        if i < kept and before < limit + tolerance:
            doubt = True
            count_fallback(NUCLEUS_AGAINST_SUM)
        kept = i
    if not doubt and uncertain_cut(best, kept):
        doubt = True
        count_fallback(RANK_TIE)
    if doubt:
        divide_weights(best.items, best.count, exponentials(row, s, NULL))
        sort_candidates(best.items, best.count)
        kept = min(k, best.count)
        if top_p < 1.0:
            kept = nucleus_size(best.items, kept, top_p)
    while kept > 1 and best.items[kept - 1].weight == 0.0:
        kept -= 1
    best.count = kept


cdef bint uncertain_cut(const Candidates *best, Py_ssize_t kept) noexcept nogil:
    """Whether the probabilities at the cut may rank differently from the weights."""
    cdef double last = best.items[kept - 1].weight
    cdef Py_ssize_t i
    cdef bint tied = False
    if last < TINY_WEIGHT and last > 0.0 and best.items[1].weight >= TINY_WEIGHT:
        # With one weight of 1 and none but tiny ones the sum is 1, and the weights are the probabilities.
        return True
    for i in range(kept, best.count):
        if best.items[i].weight >= last * (1.0 - CLOSE):
            # A tie across the cut: fine where all that are close are equal, for then the ids decide.
            if best.items[i].weight != last:
                return True
            tied = True
    if not tied:
        return False
    i = kept - 1
    while i > 0 and best.items[i - 1].weight <= last * (1.0 + CLOSE):
        i -= 1
    return best.items[i].weight != last


# ---- many ranks, or mass alone -------------------------------------------------------------------


cdef enum:
    SAMPLE_BUCKETS = 1024  # 8 an octave, from 2^-112 to 2^16
    SAMPLE_FIRST = (1023 - 112) * 8
    BUCKETS = 1024         # of one histogram, at most
    HANDFUL = 128          # values that are sorted rather than refined further
    SPILL = 16             # what `between` may write behind its room
    FEW_HITS = 64          # where one element in so many can be kept, the rest is not read again

# What is left to search: the values whose bit patterns lie in [low, high), with what lies above them.
cdef struct Search:
    const double *values   # everything above a bound, packed in id order
    Py_ssize_t count
    double top_p           # >= 1: off
    Py_ssize_t k           # PY_SSIZE_T_MAX: off
    double tolerance       # of a sum against top_p
    const double *found    # those among which the cut lies, or all
    Py_ssize_t found_count
    uint64_t low
    uint64_t high
    Py_ssize_t inside      # values in [low, high)
    double above           # mass of the values >= high
    Py_ssize_t above_count

cdef enum walk_result:
    CROSSED       # the cut is found
    NOT_CROSSED   # all of these are kept
    IN_DOUBT      # a sum is too close to top_p


cdef inline uint64_t bits_of(double value) noexcept nogil:
    cdef uint64_t bits
    memcpy(&bits, &value, sizeof(bits))
    return bits


cdef inline double value_of(uint64_t bits) noexcept nogil:
    cdef double value
    memcpy(&value, &bits, sizeof(value))
    return value


cdef double propose_bound(const double *p, Py_ssize_t n, double top_p, Py_ssize_t k) noexcept nogil:
    """A value that the cut probably lies above, from a strided sample; 0 where nothing can be said.

    Only speed depends on it: cut_row starts again from 0 where too little lies above.
    """
    cdef double sampled[SAMPLE_ROOM]
    cdef Py_ssize_t stride = n // SAMPLE, i = stride >> 1, taken = 0
    if n < SAMPLED_FROM:
        return 0.0
    while i < n:
        sampled[taken] = p[i]
        taken += 1
        i += stride
    return bound_of_sample(sampled, taken, n, top_p, k)


cdef double bound_of_sample(const double *sampled, Py_ssize_t taken, Py_ssize_t n, double top_p,
                            Py_ssize_t k) noexcept nogil:
    """The same from the entries of every n // SAMPLE."""
    cdef double mass[SAMPLE_BUCKETS]
    cdef Py_ssize_t counts[SAMPLE_BUCKETS]
    cdef Py_ssize_t i, b, most, above
    cdef double scale, below, wanted
    memset(mass, 0, sizeof(mass))
    memset(counts, 0, sizeof(counts))
    for i in range(taken):
        if sampled[i] > 0.0:
            b = <Py_ssize_t>(bits_of(sampled[i]) >> 49) - SAMPLE_FIRST
            b = min(max(b, 0), SAMPLE_BUCKETS - 1)
            mass[b] += sampled[i]
            counts[b] += 1
    scale = <double>n / taken
    if top_p < 1.0:
        # A row that sums to 1: from below, up to 0.7 of the mass that the nucleus leaves out. What is
        # small is many, hence sampled well; the heavy head need not be in the sample at all.
        # Not above a handful of the sample either: what that says of the few largest is mostly noise.
        most = SAMPLE_BUCKETS - 1
        above = 16 - counts[most]
        while most > 0 and above > 0:
            most -= 1
            above -= counts[most]
        below = 0.0
        for b in range(most):
            below += mass[b] * scale
            if below > 0.7 * (1.0 - top_p):
                return value_of(<uint64_t>(b + SAMPLE_FIRST) << 49) if b else 0.0
        return value_of(<uint64_t>(most + SAMPLE_FIRST) << 49) if most else 0.0
    # k of n: from above, with a margin of four standard deviations of the sampled count.
    wanted = k / scale + 4.0 * sqrt(k / scale) + 4.0
    b = SAMPLE_BUCKETS - 1
    while b > 0:
        wanted -= counts[b]
        if wanted < 0.0:
            return value_of(<uint64_t>(b + SAMPLE_FIRST) << 49)
        b -= 1
    return 0.0


cdef selection_status cut_row(const double *p, Py_ssize_t n, double top_p, Py_ssize_t k, double *room,
                              double *out) noexcept nogil:
    cdef Cut cut
    cdef uint8_t small[HANDFUL]
    cdef uint8_t *hits = small
    cdef selection_status status
    if n >= HANDFUL:
        hits = <uint8_t *>malloc(n // HIT_GROUP)
    if hits is NULL:
        return NO_MEMORY
    status = cut_above(p, n, top_p, k, propose_bound(p, n, top_p, k), room, hits, &cut)
    if status == TOO_MANY:
        status = cut_above(p, n, top_p, k, 0.0, room, hits, &cut)
    if status == SELECTED:
        keep_into(p, n, &cut, hits, out)
    if hits is not small:
        free(hits)
    return status


cdef selection_status cut_above(const double *p, Py_ssize_t n, double top_p, Py_ssize_t k, double bound,
                                double *values, uint8_t *hits, Cut *cut) noexcept nogil:
    """The cut through the values >= bound; TOO_MANY if it may lie below the bound."""
    cdef Search search
    cdef int bad = 0
    cdef double smallest, largest
    cdef double *packed = NULL
    cdef Py_ssize_t room = 0
    cdef double handful[HANDFUL + SPILL]
    cdef walk_result result
    cdef bucket *tables
    bound = max(bound, SMALLEST)
    search.values = values
    search.count = table.split(p, n, bound, values, hits, &bad)
    if bad:
        return BAD_PROBABILITY
    if search.count == 0:
        return NO_MASS if bound == SMALLEST else TOO_MANY
    table.range(values, search.count, &smallest, &largest)
    if largest == INFINITY:
        return BAD_PROBABILITY
    cut.count = search.count
    search.top_p = top_p
    search.k = k if k else PY_SSIZE_T_MAX
    # A rounding for each addition: of one value to its bucket, of the tables, of a bucket (at most seven
    # rounds of BUCKETS, each leaving ten bits fewer), and in the reference's sum.
    search.tolerance = (2.0 * search.count + 8.0 * BUCKETS + 8.0) * UNIT * min(top_p, 1.0)
    search.low = bits_of(smallest)
    search.high = bits_of(largest) + 1
    search.inside = search.count
    search.found = values
    search.found_count = search.count
    search.above = 0.0
    search.above_count = 0
    result = CROSSED
    if search.inside > HANDFUL:
        tables = <bucket *>malloc(TABLES * BUCKETS * sizeof(bucket))
        if tables is NULL:
            return NO_MEMORY
        while search.inside > HANDFUL and search.low < search.high - 1 and result == CROSSED:
            result = refine(&search, tables)
            if result == CROSSED and search.inside > HANDFUL:
                # Go on with the bucket alone, and within what its values span: ties end here.
                if packed is NULL:
                    room = search.inside
                    packed = <double *>malloc((room + SPILL) * sizeof(double))
                    if packed is NULL:
                        free(tables)
                        return NO_MEMORY
                # In place from the second time on: what is packed never overtakes what is read.
                search.found_count = table.between(search.found, search.found_count, value_of(search.low),
                                                   value_of(search.high), room, packed)
                search.found = packed
                table.range(packed, search.found_count, &smallest, &largest)
                search.low = bits_of(smallest)
                search.high = bits_of(largest) + 1
        free(tables)
    if result == CROSSED:
        if search.inside <= HANDFUL:
            if search.inside == search.found_count:
                memcpy(handful, search.found, search.inside * sizeof(double))
            else:
                search.inside = table.between(search.found, search.found_count, value_of(search.low),
                                              value_of(search.high), HANDFUL, handful)
            if search.inside:
                search.inside = rank_levels(handful, search.inside, search.k - search.above_count)
            result = walk(&search, handful, cut)
        else:
            result = level(&search, value_of(search.low), search.inside, cut)
    free(packed)
    if result == IN_DOUBT:
        count_fallback(NUCLEUS_BOUNDARY)
        result = replay(&search, cut)
        if result == IN_DOUBT:
            return NO_MEMORY
    if result == NOT_CROSSED:
        if bound > SMALLEST:
            return TOO_MANY
        cut.threshold = SMALLEST
        cut.level_count = cut.level_kept = 0
    finish(&search, values, cut)
    return SELECTED


cdef Py_ssize_t rank_levels(double *values, Py_ssize_t count, Py_ssize_t wanted) noexcept nogil:
    """Bring the `wanted` largest to the front, in order, and all that equal the last; returns how many."""
    cdef Py_ssize_t ranked = min(count, wanted), i
    cdef double last
    rank_first(values, count, wanted)
    last = values[ranked - 1]
    for i in range(ranked, count):
        if values[i] == last:
            values[i] = values[ranked]
            values[ranked] = last
            ranked += 1
    return ranked


cdef walk_result refine(Search *search, bucket *tables) noexcept nogil:
    """Narrow the search to one bucket of a histogram over the leading bits that still differ."""
    cdef int shift = 0
    cdef Py_ssize_t buckets, b
    # Some values to a bucket: clearing and walking the buckets is not to take longer than filling them.
    cdef uint64_t most = min(max(search.found_count >> 4, <Py_ssize_t>HANDFUL), <Py_ssize_t>BUCKETS)
    cdef uint64_t first
    cdef double mass, counted
    cdef Py_ssize_t count, each
    while ((search.high - 1) >> shift) - (search.low >> shift) >= most:
        shift += 1
    first = search.low >> shift
    buckets = <Py_ssize_t>(((search.high - 1) >> shift) - first) + 1
    memset(tables, 0, TABLES * buckets * sizeof(bucket))
    table.histogram(search.found, search.found_count, search.low, search.high, shift, tables, buckets)
    b = buckets - 1
    while b >= 0:
        mass = counted = 0.0
        for each in range(TABLES):
            mass += tables[each * buckets + b].mass
            counted += tables[each * buckets + b].count
        count = <Py_ssize_t>counted
        if (search.above + mass >= search.top_p - search.tolerance and search.top_p < 1.0
                or count >= search.k - search.above_count):
            search.low = max(search.low, (first + b) << shift)
            search.high = min(search.high, (first + b + 1) << shift)
            search.inside = count
            return CROSSED
        search.above += mass
        search.above_count += count
        b -= 1
    return NOT_CROSSED


cdef walk_result walk(Search *search, const double *ranked, Cut *cut) noexcept nogil:
    """Cut through the values in question, level by level (equal values are one level)."""
    cdef Py_ssize_t i = 0, j
    cdef walk_result result
    while i < search.inside:
        j = i + 1
        while j < search.inside and ranked[j] == ranked[i]:
            j += 1
        result = level(search, ranked[i], j - i, cut)
        if result != NOT_CROSSED:
            return result
        i = j
    return NOT_CROSSED


cdef walk_result level(Search *search, double value, Py_ssize_t count, Cut *cut) noexcept nogil:
    """Whether the cut lies within `count` entries of one value, all that is larger being above.

    The entry with j others of its level before it is kept iff above + j * value < top_p, and j < k.
    """
    cdef Py_ssize_t allowed = min(count, search.k - search.above_count)
    cdef double low = search.top_p - search.tolerance, high = search.top_p + search.tolerance
    cdef double kept
    cut.threshold = value
    cut.level_count = count
    cut.level_kept = allowed
    if search.top_p < 1.0:
        if search.above + (allowed - 1) * value < low:
            # All that k allows is kept.
            if allowed == count and search.above_count + count < search.k:
                if search.above + count * value > high:
                    return CROSSED
                if search.above + count * value >= low:
                    return IN_DOUBT
        else:
            kept = ceil((search.top_p - search.above) / value)
            if not (1.0 <= kept <= allowed and search.above + kept * value > high
                    and search.above + (kept - 1.0) * value < low):
                return IN_DOUBT
            cut.level_kept = <Py_ssize_t>kept
            return CROSSED
    search.above += count * value
    search.above_count += count
    return CROSSED if search.above_count >= search.k else NOT_CROSSED


cdef walk_result replay(const Search *search, Cut *cut) noexcept nogil:
    """The cut by the reference's own sums: one by one in rank order. IN_DOUBT if memory is short.

    Equal values are taken together, as long as the largest ones are many of what is left; then it is sorted.
    """
    cdef Py_ssize_t left = search.count, above = 0, level, i
    cdef double before = 0.0, value, smallest
    cdef double *room = <double *>malloc((2 * left + SPILL) * sizeof(double))
    cdef const double *source = search.values
    cdef bint ranked = False
    cdef walk_result result = NOT_CROSSED
    if room is NULL:
        return IN_DOUBT
    while left > 0 and result == NOT_CROSSED:
        if ranked:
            value = source[0]
            level = 1
            while level < left and source[level] == value:
                level += 1
        else:
            table.range(source, left, &smallest, &value)
            level = left
            if smallest < value:
                level -= table.between(source, left, 0.0, value, left, room)
        i = 0
        while i < min(level, search.k - above) and (above + i == 0 or before < search.top_p):
            before += value
            i += 1
        above += i
        if i < level or above == search.k or not before < search.top_p:
            cut.threshold = value
            cut.level_count = level
            cut.level_kept = i
            result = CROSSED
        left -= level
        if ranked:
            source += level
        elif level > left >> 3:
            source = room
        elif result == NOT_CROSSED:
            source = sort_descending(room, room + left, left)
            ranked = True
    free(room)
    return result


cdef void finish(const Search *search, double *values, Cut *cut) noexcept nogil:
    """The kept sum, compensated; scaled where it overflows."""
    cdef running total
    cdef Py_ssize_t i
    # Where the cut divides a level, what is above it and a multiple of it: taking the rest of the level
    # away from a sum would cancel.
    cdef bint divided = cut.level_kept < cut.level_count
    cdef double lowest = nextafter(cut.threshold, INFINITY) if divided else cut.threshold
    cdef int attempt
    cut.scale = 1.0
    for attempt in range(2):
        memset(&total, 0, sizeof(total))
        table.sum_at_least(values, search.count, lowest * cut.scale, &total)
        cut.total = table.total(&total)
        if divided:
            cut.total += cut.level_kept * (cut.threshold * cut.scale)
        if isfinite(cut.total) or attempt == 1:
            return
        cut.scale = OVERFLOW_SCALE
        for i in range(search.count):
            values[i] *= OVERFLOW_SCALE


cdef void keep_into(const double *p, Py_ssize_t n, const Cut *cut, const uint8_t *hits,
                    double *out) noexcept nogil:
    """out = the kept entries divided by their sum; in place allowed."""
    cdef Py_ssize_t i = 0, seen = 0
    if cut.scale != 1.0:
        for i in range(n):
            seen += p[i] == cut.threshold
            out[i] = p[i] * cut.scale / cut.total if p[i] >= cut.threshold and (
                p[i] > cut.threshold or seen <= cut.level_kept or cut.level_count == cut.level_kept) else 0.0
        return
    if cut.level_kept == cut.level_count:
        table.keep(p, n, cut.threshold, cut.total, hits if cut.count < n // FEW_HITS else NULL, out)
        return
    # The level that the cut divides: its first entries by id stay.
    i = table.past_equal(p, n, cut.threshold, cut.level_kept)
    table.keep(p, i, cut.threshold, cut.total, NULL, out)
    table.keep(p + i, n - i, nextafter(cut.threshold, INFINITY), cut.total, NULL, out + i)


# ---- sorting -------------------------------------------------------------------------------------


cdef enum:
    DIGIT = 11           # bits of a radix digit
    DIGITS = 6
    RADIX = 2048


cdef const double *sort_descending(double *values, double *room, Py_ssize_t count) noexcept nogil:
    """The positive doubles in order, in their own memory or in `room`, which is as large.

    Least significant digit first over the distances of their bit patterns from the largest: values that are
    close differ in few digits.
    """
    cdef Py_ssize_t places[RADIX]
    cdef Py_ssize_t i, d = 0, place, held
    cdef double *swap
    cdef uint64_t digit, top
    cdef double smallest, largest
    table.range(values, count, &smallest, &largest)
    top = bits_of(largest)
    while d < DIGITS and (top - bits_of(smallest)) >> (d * DIGIT):
        memset(places, 0, sizeof(places))
        for i in range(count):
            places[((top - bits_of(values[i])) >> (d * DIGIT)) & (RADIX - 1)] += 1
        place = 0
        for i in range(RADIX):
            held = places[i]
            places[i] = place
            place += held
        for i in range(count):
            digit = ((top - bits_of(values[i])) >> (d * DIGIT)) & (RADIX - 1)
            room[places[digit]] = values[i]
            places[digit] += 1
        swap = values
        values = room
        room = swap
        d += 1
    return values


cdef int rank_all(const Row *row, int64_t *ids) noexcept nogil:
    """The same sort, over keys that order any double, carrying ids; 0 if memory is short."""
    cdef uint64_t *keys = <uint64_t *>malloc(2 * row.n * sizeof(uint64_t))
    cdef int64_t *other_ids = <int64_t *>malloc(row.n * sizeof(int64_t))
    cdef Py_ssize_t places[RADIX]
    cdef Py_ssize_t i, d, place, held
    cdef uint64_t *source = keys
    cdef uint64_t *target = keys + row.n
    cdef uint64_t *swap
    cdef int64_t *source_ids = ids
    cdef int64_t *target_ids = other_ids
    cdef int64_t *swap_ids
    cdef uint64_t digit
    cdef double value
    cdef bint ordered = True, reversed = True
    if keys is NULL or other_ids is NULL:
        free(keys)
        free(other_ids)
        return 0
    for i in range(row.n):
        value = element(row, i) + 0.0  # -0.0 ties with 0.0
        source[i] = bits_of(value)
        # Descending: a positive number by its complement, a negative one as it is; NaN behind all.
        source[i] = ~<uint64_t>0 if isnan(value) else (
            source[i] if source[i] >> 63 else ~source[i] & ~(<uint64_t>1 << 63))
        ids[i] = i
        if i:
            ordered &= source[i - 1] <= source[i]
            reversed &= source[i - 1] > source[i]
    if ordered or reversed:
        if not ordered:
            for i in range(row.n):
                ids[i] = row.n - 1 - i
        free(keys)
        free(other_ids)
        return 1
    for d in range(DIGITS):
        memset(places, 0, sizeof(places))
        for i in range(row.n):
            places[(source[i] >> (d * DIGIT)) & (RADIX - 1)] += 1
        if places[(source[0] >> (d * DIGIT)) & (RADIX - 1)] == row.n:
            continue
        place = 0
        for i in range(RADIX):
            held = places[i]
            places[i] = place
            place += held
        for i in range(row.n):
            digit = (source[i] >> (d * DIGIT)) & (RADIX - 1)
            target[places[digit]] = source[i]
            target_ids[places[digit]] = source_ids[i]
            places[digit] += 1
        swap = source
        source = target
        target = swap
        swap_ids = source_ids
        source_ids = target_ids
        target_ids = swap_ids
    if source_ids is not ids:
        memcpy(ids, source_ids, row.n * sizeof(int64_t))
    free(keys)
    free(other_ids)
    return 1
