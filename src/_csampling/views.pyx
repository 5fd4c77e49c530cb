"""One distribution at one position of a block, however it is given.

Design: a row of logits becomes as little as its use asks for. With top-k on it is a support of at most k
tokens. Without truncation it stays a row of logits: the accept test needs one exponential and the sum of
all, which is rough (float32) until a decision is closer than its error; a draw, of a token or of a
correction, needs one pass of float32 terms summed by blocks, of which one is walked, and float64
exponentials of the whole only where it is in doubt. Rules that need more than a sum take their exponentials
a CHUNK at a time, and again rather than from memory. With top-p alone it is a support where the nucleus is
narrow; else the row is written once, into memory that the worker keeps. All give the numbers that
`distributions_from_logits` gives, bit for bit.
"""

from cython cimport floating
from libc.math cimport INFINITY, exp, fabs, isfinite, log
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from mtplx._csampling.acceptance cimport next_difference
from mtplx._csampling.arrays cimport F64, Row, element, logit, logits_piece, probs_piece
from mtplx._csampling.dispatch cimport (
    BLOCK,
    CATEGORICAL_DRAW,
    CHUNK,
    CORRECTION_DRAW,
    ONE_PASS_DRAW,
    ROUGH_DRAW,
    SCALE_NONE,
    SCALE_RECIPROCAL,
    SIDE_BY_SIDE,
    count_fallback,
    running,
    scaling,
    streamed,
    table,
)
from mtplx._csampling.distributions cimport find, normalise
from mtplx._csampling.draws cimport Weights, draw, draw_place, weigh
from mtplx._csampling.mass cimport OVERFLOW_SCALE, ROW_FINE, weigh_row
from mtplx._csampling.selection cimport (
    BAD_LOGIT,
    LOG2_E,
    NO_MEMORY,
    ROUGH_HIGH,
    ROUGH_LOW,
    SAMPLE,
    SAMPLE_ROOM,
    SAMPLED_FROM,
    SELECTED,
    TOO_MANY,
    Candidate,
    Candidates,
    Cut,
    best_logits,
    block_pass,
    bound_of_sample,
    cut_above,
    few,
    keep_into,
    rough_error,
    selection_status,
    sort_candidates,
    weigh_one,
)
from mtplx._csampling.softmax cimport exponentials, first_at, largest_logit, set_scaling
from mtplx._csampling.streams cimport Stream, next_uniform
from mtplx._csampling.truncation cimport order_by_id, whole_row_into

cdef double UNIT = 2.0 ** -53
cdef double ONE = 1.0

# Shorter rows are not worth streaming; a nucleus of more than one in WIDE is not worth gathering.
cdef enum:
    STREAM_FROM = 2048
    WIDE = 8


# ---- memory --------------------------------------------------------------------------------------


cdef void free_workspace(Workspace *space) noexcept nogil:
    cdef int slot
    for slot in range(2):
        free(space.dense[slot])
        free(space.ids[slot])
        free(space.weights[slot])
    free(space.sums)
    memset(space, 0, sizeof(Workspace))


cdef double *dense_room(Workspace *space, int slot, Py_ssize_t n) noexcept nogil:
    if space.dense_room[slot] < n:
        free(space.dense[slot])
        space.dense[slot] = <double *>malloc(n * sizeof(double))
        space.dense_room[slot] = n if space.dense[slot] is not NULL else 0
    return space.dense[slot]


cdef double *sums_room(Workspace *space, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t blocks = (n + BLOCK - 1) // BLOCK
    if space.sums_room < blocks:
        free(space.sums)
        space.sums = <double *>malloc(blocks * sizeof(double))
        space.sums_room = blocks if space.sums is not NULL else 0
    return space.sums


cdef bint support_room(Workspace *space, int slot, Py_ssize_t count) noexcept nogil:
    if space.support_room[slot] < count:
        free(space.ids[slot])
        free(space.weights[slot])
        space.ids[slot] = <int64_t *>malloc(count * sizeof(int64_t))
        space.weights[slot] = <double *>malloc(count * sizeof(double))
        if space.ids[slot] is NULL or space.weights[slot] is NULL:
            space.support_room[slot] = 0
            return False
        space.support_room[slot] = count
    return True


cdef bint keep_support_room(Workspace *space, int slot, Py_ssize_t filled, Py_ssize_t count) noexcept nogil:
    """Room for `count` entries, of which the first `filled` are kept."""
    cdef int64_t *ids
    cdef double *weights
    if space.support_room[slot] >= count:
        return True
    count = max(count, 2 * space.support_room[slot])
    ids = <int64_t *>realloc(space.ids[slot], count * sizeof(int64_t))
    if ids is not NULL:
        space.ids[slot] = ids
    weights = <double *>realloc(space.weights[slot], count * sizeof(double))
    if weights is not NULL:
        space.weights[slot] = weights
    if ids is NULL or weights is NULL:
        return False
    space.support_room[slot] = count
    return True


# ---- from logits ---------------------------------------------------------------------------------


cdef problem resolve(const Row *logits, const Settings *settings, Workspace *space, int slot,
                     View *view) noexcept nogil:
    cdef Candidates best
    cdef selection_status status
    cdef double largest
    cdef double *dense
    view.n = logits.n
    view.any_id = settings.k > 0
    view.ascending = True
    view.tolerance = 0.0
    if settings.temperature <= 0.0:
        largest = largest_logit(logits)
        if not isfinite(largest):
            return BAD_LOGITS
        view.mode = POINT
        view.point = first_at(logits, largest)
        return FINE
    if settings.temperature < INFINITY:
        if settings.k and few(settings.k, logits.n):
            status = best_logits(logits, settings.temperature, settings.top_p, settings.k, &best)
            if status == SELECTED:
                if support_room(space, slot, best.count):
                    take_support(&best, space, slot, view)
                else:
                    status = NO_MEMORY
            free(best.items)
            if status != TOO_MANY:
                return FINE if status == SELECTED else (BAD_LOGITS if status == BAD_LOGIT else NO_ROOM)
        elif settings.k == 0 and settings.top_p >= 1.0 and logits.n >= STREAM_FROM:
            status = stream(logits, settings, view)
            if status != TOO_MANY:
                return FINE if status == SELECTED else (BAD_LOGITS if status == BAD_LOGIT else NO_ROOM)
        elif settings.k == 0 and settings.top_p < 1.0 and logits.n >= SAMPLED_FROM:
            status = gather_nucleus(logits, settings, space, slot, view)
            if status != TOO_MANY:
                return FINE if status == SELECTED else (BAD_LOGITS if status == BAD_LOGIT else NO_ROOM)
    dense = dense_room(space, slot, logits.n)
    if dense is NULL:
        return NO_ROOM
    status = whole_row_into(logits, settings.temperature, settings.top_p, settings.k, dense)
    if status != SELECTED:
        return BAD_LOGITS if status == BAD_LOGIT else NO_ROOM
    if settings.k:
        return gather_support(dense, space, slot, view)
    dense_view(view, dense)
    return FINE


cdef problem gather_support(const double *dense, Workspace *space, int slot, View *view) noexcept nogil:
    """The support of a written row: with top-k on a row is sparse, however it was found."""
    cdef Py_ssize_t i, count = 0
    for i in range(view.n):
        count += dense[i] != 0.0
    if not support_room(space, slot, count):
        return NO_ROOM
    view.mode = SPARSE
    view.support.ids = space.ids[slot]
    view.support.weights = space.weights[slot]
    view.support.count = count
    count = 0
    for i in range(view.n):
        if dense[i] != 0.0:
            space.ids[slot][count] = i
            space.weights[slot][count] = dense[i]
            count += 1
    return FINE


cdef selection_status gather_nucleus(const Row *logits, const Settings *settings, Workspace *space,
                                     int slot, View *view) noexcept nogil:
    """The nucleus of top-p alone as a support; TOO_MANY where it is wide, and the row is written after all.

    The numbers are those of the written row: the sum of the exponentials has its bits without the row, a
    sample of it proposes the same bound, and the probabilities above the bound, in their order, are all
    that the cut is found from. What is gathered is every logit that may reach the bound: z and exp are
    off by less than (|x/T| + |top| + 2) 2^-50, and 2^-30 in place of 2^-50 is allowed for.
    """
    cdef double sampled[SAMPLE_ROOM]
    cdef running ignored
    cdef scaling s
    cdef Cut cut
    cdef selection_status status
    cdef Py_ssize_t n = logits.n, stride = n // SAMPLE, i, taken = 0, count, kept = 0
    cdef double largest = largest_logit(logits), total, bound, level
    cdef double *values
    cdef double *weights
    if not isfinite(largest):
        return BAD_LOGIT
    set_scaling(&s, settings.temperature, largest)
    if s.rule != SCALE_NONE and s.rule != SCALE_RECIPROCAL:
        return TOO_MANY
    i = stride >> 1
    while i < n:
        sampled[taken] = logit(logits, i)
        taken += 1
        i += stride
    memset(&ignored, 0, sizeof(ignored))
    table.exp_f64(sampled, taken, &s, sampled, &ignored)
    if wide(sampled, taken, n, settings.top_p):
        return TOO_MANY
    total = exponentials(logits, &s, NULL)
    table.divide_f64(sampled, taken, total, sampled)
    bound = bound_of_sample(sampled, taken, n, settings.top_p, 0)
    if bound <= 0.0:
        return TOO_MANY
    level = log(bound * total)
    level = (level + s.top - 2.0 ** -30 * (1.0 + fabs(level) + 2.0 * fabs(s.top))) * s.temperature
    count = collect_from(logits, level, n, space, slot)
    if count < 0:
        return NO_MEMORY
    weights = space.weights[slot]
    table.exp_f64(weights, count, &s, weights, &ignored)
    table.divide_f64(weights, count, total, weights)
    values = <double *>malloc(count * (sizeof(double) + 1) + sizeof(double))
    if values is NULL:
        return NO_MEMORY
    status = cut_above(weights, count, settings.top_p, 0, bound, values, <uint8_t *>(values + count), &cut)
    if status == SELECTED:
        keep_into(weights, count, &cut, <uint8_t *>(values + count), weights)
        for i in range(count):
            space.ids[slot][kept] = space.ids[slot][i]
            weights[kept] = weights[i]
            kept += weights[i] != 0.0
        view.mode = SPARSE
        view.support.ids = space.ids[slot]
        view.support.weights = weights
        view.support.count = kept
    free(values)
    return status


cdef bint wide(const double *sampled, Py_ssize_t taken, Py_ssize_t n, double top_p) noexcept nogil:
    """Whether a nucleus is so wide that its row is better written, by a sample of exponentials.

    The sample may miss the heaviest entries, so the nucleus may be narrower than it seems: speed alone
    depends on it.
    """
    cdef double shares[SAMPLE_ROOM]
    cdef double total = 0.0, bound
    cdef Py_ssize_t i, above = 0
    for i in range(taken):
        total += sampled[i]
    # The largest, whose exponential is 1, is hardly ever in the sample.
    total = total / taken * n + 1.0
    for i in range(taken):
        shares[i] = sampled[i] / total
    bound = bound_of_sample(shares, taken, n, top_p, 0)
    for i in range(taken):
        above += shares[i] >= bound
    return above > taken // WIDE


cdef Py_ssize_t collect_from(const Row *logits, double level, Py_ssize_t most, Workspace *space,
                             int slot) noexcept nogil:
    """Ids and logits of all that reach a level, into the slot; how many, or -1 if memory is short.

    It stops once there are more than `most`.
    """
    cdef double buffer[CHUNK]
    cdef const void *piece
    cdef bint single
    cdef Row part = logits[0]
    cdef Py_ssize_t start = 0, length, count = 0
    while start < logits.n and count <= most:
        part.n = min(logits.n, start + CHUNK)
        length = logits_piece(&part, start, buffer, &piece, &single)
        if not keep_support_room(space, slot, count, count + CHUNK):
            return -1
        if single:
            count += table.collect_f32(<const float *>piece, length, level, start, space.ids[slot] + count,
                                       space.weights[slot] + count)
        else:
            count += table.collect_f64(<const double *>piece, length, level, start, space.ids[slot] + count,
                                       space.weights[slot] + count)
        start += length
    return count


cdef void dense_view(View *view, const double *dense) noexcept nogil:
    view.mode = DENSE
    view.row.data = <const char *>dense
    view.row.n = view.n
    view.row.kind = F64
    view.row.patches = 0


cdef void take_support(Candidates *best, Workspace *space, int slot, View *view) noexcept nogil:
    cdef Py_ssize_t i
    order_by_id(best)
    for i in range(best.count):
        space.ids[slot][i] = best.items[i].id
        space.weights[slot][i] = best.items[i].value
    normalise(space.weights[slot], best.count)
    view.mode = SPARSE
    view.support.ids = space.ids[slot]
    view.support.weights = space.weights[slot]
    view.support.count = best.count


cdef selection_status stream(const Row *logits, const Settings *settings, View *view) noexcept nogil:
    """The largest logit and a sum; TOO_MANY where the row must be written after all."""
    cdef streamed run
    cdef Py_ssize_t blocks = (logits.n + CHUNK - 1) // CHUNK * SIDE_BY_SIDE
    cdef selection_status status
    cdef double *maxima
    if settings.exact:
        run.top = largest_logit(logits)
        if not isfinite(run.top):
            return BAD_LOGIT
    else:
        maxima = <double *>malloc(blocks * sizeof(double))
        if maxima is NULL:
            return NO_MEMORY
        status = block_pass(logits, settings.temperature, True, maxima, &run)
        free(maxima)
        if status != SELECTED:
            return status
    set_scaling(&view.scaled, settings.temperature, run.top)
    if view.scaled.rule != SCALE_NONE and view.scaled.rule != SCALE_RECIPROCAL:
        return TOO_MANY
    view.mode = STREAMED
    view.row = logits[0]
    view.total = run.sum
    view.tolerance = rough_error(logits.n, &view.scaled)
    if settings.exact or not isfinite(run.sum):
        make_exact(view)  # no sum that float32 terms can give, and rules report what they divide by it
    return SELECTED


cdef void stream_again(const Row *logits, const scaling *scaled, double total, View *view) noexcept nogil:
    view.mode = STREAMED
    view.n = logits.n
    view.any_id = False
    view.ascending = True
    view.row = logits[0]
    view.scaled = scaled[0]
    view.total = total
    view.tolerance = 0.0


cdef void make_exact(View *view) noexcept nogil:
    if view.mode == STREAMED and view.tolerance > 0.0:
        view.total = exponentials(&view.row, &view.scaled, NULL)
        view.tolerance = 0.0


# ---- one probability -----------------------------------------------------------------------------


cdef problem probability(const View *view, int64_t token, Failure *failure, double *value) noexcept nogil:
    failure.token = token
    failure.n = view.n
    if (view.mode == DENSE or view.mode == STREAMED or not view.any_id) and not 0 <= token < view.n:
        return BAD_ID
    if view.mode == POINT:
        value[0] = 1.0 if token == view.point else 0.0
    elif view.mode == SPARSE:
        value[0] = find(&view.support, view.ascending, token)
    elif view.mode == STREAMED:
        value[0] = weigh_one(logit(&view.row, token), &view.scaled)
        table.divide_f64(value, 1, view.total, value)
    else:
        value[0] = element(&view.row, token)
        if not (value[0] >= 0.0 and isfinite(value[0])):
            failure.value = value[0]
            return BAD_VALUE
    return FINE


cdef problem largest_token(View *view, int64_t *token) noexcept nogil:
    cdef Py_ssize_t i
    cdef double best = -1.0, value, total
    if view.mode == POINT:
        token[0] = view.point
        return FINE
    if view.mode == SPARSE:
        for i in range(view.support.count):
            value = view.support.weights[i]
            if value > best or (value == best and view.support.ids[i] < token[0]):
                best = value
                token[0] = view.support.ids[i]
        return FINE
    if view.mode == STREAMED:
        return largest_streamed(view, token)
    if weigh_row(&view.row, &total) != ROW_FINE:
        return BAD_ROW
    token[0] = first_at(&view.row, largest_logit(&view.row))
    return FINE


cdef problem largest_streamed(View *view, int64_t *token) noexcept nogil:
    """The first rank under the softmax: logits whose probabilities round to the same number tie."""
    cdef Candidates best
    cdef selection_status status = best_logits(&view.row, view.scaled.temperature, INFINITY, 1, &best)
    cdef Py_ssize_t i
    cdef double value
    if status == SELECTED:
        token[0] = best.items[0].id
    free(best.items)
    if status != TOO_MANY:
        return FINE if status == SELECTED else NO_ROOM
    # Ties beyond counting: the first whose probability is the largest logit's.
    make_exact(view)
    for i in range(view.n):
        value = weigh_one(logit(&view.row, i), &view.scaled)
        table.divide_f64(&value, 1, view.total, &value)
        if value == 1.0 / view.total:
            token[0] = i
            return FINE
    return NO_ROOM


# ---- draws ---------------------------------------------------------------------------------------


cdef problem draw_token(View *view, Workspace *space, const Stream *stream, uint64_t lane,
                        int64_t *token) noexcept nogil:
    cdef Weights weights
    cdef Correction whole
    cdef double *sums
    cdef double u
    if view.mode == POINT:
        next_uniform(stream, lane)
        token[0] = view.point
    elif view.mode == SPARSE:
        u = next_uniform(stream, lane)
        token[0] = view.support.ids[draw_place(view.support.weights, view.support.count, u)]
    else:
        sums = sums_room(space, view.n)
        if sums is NULL:
            return NO_ROOM
        if view.mode == STREAMED:
            whole.p = view[0]
            whole.part = WHOLE
            whole.scale = 1.0
            whole.sums = sums
            token[0] = draw_streamed(&whole, next_uniform(stream, lane))
        else:
            if not weigh(&weights, &view.row, NULL, False, sums):
                return BAD_ROW
            token[0] = draw(&weights, next_uniform(stream, lane))
    return FINE


cdef Py_ssize_t draw_streamed(Correction *left, double u) noexcept nogil:
    """The first id whose sequential weight, over the whole of it, exceeds u; the row itself if it has none.

    At least one of the rows is one of logits, and nothing of it is written down: float32 terms find the
    block of the token and mostly the token itself; else one pass of float64 exponentials does, else a
    second one, in which their sums are known; else sums are taken one by one.
    """
    cdef Py_ssize_t place = draw_roughly(left, u)
    if place < 0 and (left.p.tolerance > 0.0 or (left.part == ABOVE and left.q.tolerance > 0.0)):
        place = draw_in_one_pass(left, u)
    if place >= 0:
        return place
    if not sum_up(left):
        left.part = WHOLE
        sum_up(left)
    return draw_by_blocks(left, u)


cdef Py_ssize_t draw_by_blocks(const Correction *left, double u) noexcept nogil:
    """A draw from weights whose sums by blocks are known."""
    cdef Py_ssize_t place = walk(left, u, left.total, (2.0 * left.p.n + 16.0) * UNIT * left.total, True)
    if place >= 0:
        return place
    count_fallback(CATEGORICAL_DRAW if left.part == WHOLE else CORRECTION_DRAW)
    return replay(left, u)


cdef Py_ssize_t draw_roughly(const Correction *left, double u) noexcept nogil:
    """The draw from rough weights, or -1 where the exact ones might give another token.

    Relative to the sum, the float32 terms of a row are off by less than `rough_error` in all, and so is
    their sum; so the rough probabilities are off by less than twice that, added up over any entries, and
    the differences (p - q)+ by less than the errors of p and q together. Products, differences and sums
    of one block round 13 times in float32, which is below 2^-20 of p and q. A step c_i farther than
    twice all this from u c_n is on the side it seems to be: once for the step, once for u c_n.
    """
    cdef float p_terms[CHUNK]
    cdef float q_terms[CHUNK]
    cdef float p_unit, q_unit = 0.0
    cdef Py_ssize_t n = left.p.n, start = 0, length
    cdef double tolerance = 2.0 ** -19
    cdef bint alone = left.part == WHOLE
    if not rough_unit(&left.p, &p_unit, &tolerance):
        return -1
    if not (alone or rough_unit(&left.q, &q_unit, &tolerance)):
        return -1
    if left.p.mode == STREAMED and 2.0 * tolerance * left.p.total > 1.125:
        # No weight, the largest being 1 over the sum, has steps so far apart.
        count_fallback(ROUGH_DRAW)
        return -1
    if alone:
        memset(q_terms, 0, sizeof(q_terms))
    while start < n:
        length = rough_terms(&left.p, start, p_terms)
        if not alone:
            rough_terms(&left.q, start, q_terms)
        table.block_sums_rough(p_terms, q_terms, length, p_unit, q_unit, left.sums + start // BLOCK)
        start += length
    start = walk(left, u, added(left.sums, n), tolerance, False)
    if start < 0:
        count_fallback(ROUGH_DRAW)
    return start


cdef double added(const double *sums, Py_ssize_t n) noexcept nogil:
    """All of n elements, by the sums of their blocks."""
    cdef double total = 0.0
    cdef Py_ssize_t block
    for block in range((n + BLOCK - 1) // BLOCK):
        total += sums[block]
    return total

cdef bint rough_unit(const View *view, float *unit, double *tolerance) noexcept nogil:
    """What the rough terms of a view are multiplied by; False where they say nothing."""
    cdef double top, shift
    if view.mode == DENSE:
        return False
    unit[0] = 1.0
    if view.mode == STREAMED:
        # The terms are relative to the largest logit as a float.
        top = <float>view.scaled.largest
        shift = fabs(top - view.scaled.largest) * view.scaled.reciprocal
        if not (ROUGH_LOW < view.scaled.temperature < ROUGH_HIGH and shift < 1.0):
            return False
        unit[0] = <float>(exp((top - view.scaled.largest) * view.scaled.reciprocal) / view.total)
        tolerance[0] += 4.0 * rough_error(view.n, &view.scaled)
    return True


cdef Py_ssize_t rough_terms(const View *view, Py_ssize_t start, float *out) noexcept nogil:
    """One CHUNK of a view, up to the factor of `rough_unit`; returns its length."""
    cdef double buffer[CHUNK]
    cdef const void *piece
    cdef bint single
    cdef Py_ssize_t length = min(view.n - start, <Py_ssize_t>CHUNK)
    cdef double per_unit
    if view.mode == STREAMED:
        per_unit = LOG2_E / view.scaled.temperature
        logits_chunk(view, start, buffer, &piece, &single)
        if single:
            table.rough_exp_f32(<const float *>piece, length, view.scaled.largest, per_unit, out)
        else:
            table.rough_exp_f64(<const double *>piece, length, view.scaled.largest, per_unit, out)
        return length
    spread(view, start, length, out)
    return length


cdef Py_ssize_t draw_in_one_pass(Correction *left, double u) noexcept nogil:
    """The draw from float64 exponentials over rough sums, or -1; afterwards the sums are exact.

    Over their rough sums the exponentials of p and q are a p and b q, with a and b known in the end: the
    exact sums over the rough ones. (a p - b q)+ / a is (p - (b/a) q)+, which added up over any entries
    is within |b/a - 1| of what (p - q)+ is. Rounding (of products, differences, p and q themselves) is
    below 2^-50 in all, and sums are taken as well as those of `draw_by_blocks`.
    """
    cdef double p_terms[CHUNK]
    cdef double q_terms[CHUNK]
    cdef const double *p
    cdef const double *q
    cdef running p_total, q_total
    cdef Py_ssize_t n = left.p.n, start = 0, length, block
    cdef double p_share = 1.0, q_share = 1.0, shift, total, tolerance
    cdef bint alone = left.part == WHOLE
    memset(&p_total, 0, sizeof(running))
    memset(&q_total, 0, sizeof(running))
    if left.p.mode == STREAMED:
        p_share = 1.0 / left.p.total
    if not alone and left.q.mode == STREAMED:
        q_share = 1.0 / left.q.total
    while start < n:
        length = terms_of(&left.p, start, p_terms, &p, &p_total)
        if alone:
            table.block_sums(p, length, left.sums + start // BLOCK)
        else:
            terms_of(&left.q, start, q_terms, &q, &q_total)
            table.block_sums_scaled(p, q, length, p_share, q_share, left.sums + start // BLOCK)
        start += length
    shift = settle_sum(&left.p, &p_total)
    if alone:
        p_share = left.p.total
        tolerance = 2.0 ** -48
    else:
        p_share = shift
        tolerance = 2.0 * fabs(settle_sum(&left.q, &q_total) / shift - 1.0) + 2.0 ** -48
    for block in range((n + BLOCK - 1) // BLOCK):
        left.sums[block] /= p_share
    total = added(left.sums, n)
    start = walk(left, u, total, tolerance + (2.0 * n + 64.0) * UNIT * total, False)
    if start < 0:
        count_fallback(ONE_PASS_DRAW)
    return start


cdef double settle_sum(View *view, const running *total) noexcept nogil:
    """Give a row of logits its exact sum; returns that over the one it had."""
    cdef double before = view.total
    if view.mode != STREAMED:
        return 1.0
    view.total = table.total(total)
    view.tolerance = 0.0
    return view.total / before


cdef bint is_plain(const View *view) noexcept nogil:
    return view.mode == DENSE and view.row.kind == F64


cdef bint sum_up(Correction *left) noexcept nogil:
    cdef double buffer[CHUNK]
    cdef double other[CHUNK]
    cdef const double *weights
    cdef Py_ssize_t n = left.p.n, start = 0, length
    cdef bint whole = left.part == ABOVE and is_plain(&left.p) and is_plain(&left.q)
    left.scale = 1.0
    if whole and left.factor == 1.0:
        table.block_sums_residual(<const double *>left.p.row.data, <const double *>left.q.row.data, n,
                                  left.sums)
    elif whole:
        table.block_sums_scaled(<const double *>left.p.row.data, <const double *>left.q.row.data, n,
                                left.factor, 1.0, left.sums)
    while True:
        if not whole:
            start = 0
            while start < n:
                length = weights_of(left, start, buffer, other, &weights)
                table.block_sums(weights, length, left.sums + start // BLOCK)
                start += length
        left.total = added(left.sums, n)
        if isfinite(left.total) or left.scale != 1.0:
            return left.total > 0.0
        if whole:
            whole = False  # a difference that is infinite counts as 0 in a piece
        else:
            left.scale = OVERFLOW_SCALE


cdef Py_ssize_t walk(const Correction *left, double u, double total, double tolerance,
                     bint exact) noexcept nogil:
    """The entry whose steps lie on both sides of u times the total, or -1 if one is within the tolerance."""
    cdef double buffer[CHUNK]
    cdef double other[CHUNK]
    cdef const double *weights
    cdef Py_ssize_t n = left.p.n, block = 0, last = (n - 1) // BLOCK, at, chunk, length, i
    cdef double target = u * total, before = 0.0, cumulative
    while block < last and before + left.sums[block] <= target - tolerance:
        before += left.sums[block]
        block += 1
    at = block * BLOCK
    cumulative = before
    while at < n:
        chunk = at // CHUNK * CHUNK
        length = weights_of(left, chunk, buffer, other, &weights)
        for i in range(at - chunk, length):
            before = cumulative
            cumulative += weights[i]
            if cumulative > target:
                # A sum of exact weights that is 0 is exact.
                if cumulative - target > tolerance and (
                        target - before > tolerance or (exact and before == 0.0)):
                    return chunk + i
                return -1
        at = chunk + length
    return -1


cdef Py_ssize_t weights_of(const Correction *left, Py_ssize_t start, double *buffer, double *other,
                           const double **weights) noexcept nogil:
    """The weights of one CHUNK, with the sums that the views have; returns its length."""
    cdef const double *p
    cdef const double *q
    cdef const double *compared
    cdef running ignored
    cdef Py_ssize_t length = probabilities_of(&left.p, start, buffer, &p), i
    if left.part == WHOLE:
        if left.p.mode != DENSE:
            weights[0] = p
            return length
        memset(other, 0, length * sizeof(double))  # what is negative or not finite counts as 0
        q = other
    else:
        probabilities_of(&left.q, start, other, &q)
        if left.part != ABOVE:
            compared = q if left.by_draft else p
            # Without branches: which tokens are deferred cannot be foretold.
            if left.part == ABOVE_DEFERRED:
                for i in range(length):
                    other[i] = q[i] if compared[i] < left.bound else 0.0
            else:
                for i in range(length):
                    other[i] = 0.0 if compared[i] < left.bound else q[i]
            q = other
        if left.factor != 1.0:
            for i in range(length):
                buffer[i] = left.factor * p[i]
            p = buffer
        if left.part == EMITTED:
            for i in range(length):
                buffer[i] = p[i] + q[i]
                other[i] = 0.0
            p = buffer
    memset(&ignored, 0, sizeof(ignored))
    table.residual(p, q, length, buffer, &ignored)
    if left.scale != 1.0:
        for i in range(length):
            buffer[i] *= left.scale
    weights[0] = buffer
    return length


cdef Py_ssize_t probabilities_of(const View *view, Py_ssize_t start, double *buffer,
                                 const double **piece) noexcept nogil:
    cdef running ignored
    cdef Py_ssize_t length = min(view.n - start, <Py_ssize_t>CHUNK)
    if view.mode == STREAMED:
        memset(&ignored, 0, sizeof(ignored))
        terms_of(view, start, buffer, piece, &ignored)
        table.divide_f64(buffer, length, view.total, buffer)
        return length
    if view.mode == DENSE:
        return probs_piece(&view.row, start, CHUNK, buffer, piece)
    piece[0] = buffer
    spread(view, start, length, buffer)
    return length


cdef void spread(const View *view, Py_ssize_t start, Py_ssize_t length, floating *out) noexcept nogil:
    """Some elements of a view that has few above 0."""
    cdef Py_ssize_t i
    memset(out, 0, length * sizeof(floating))
    if view.mode == POINT:
        if start <= view.point < start + length:
            out[view.point - start] = 1.0
        return
    i = first_in(&view.support, start)
    while i < view.support.count and view.support.ids[i] < start + length:
        out[view.support.ids[i] - start] = <floating>view.support.weights[i]
        i += 1


cdef Py_ssize_t terms_of(const View *view, Py_ssize_t start, double *buffer, const double **piece,
                         running *total) noexcept nogil:
    cdef double room[CHUNK]
    cdef const void *logits
    cdef bint single
    cdef Py_ssize_t length = min(view.n - start, <Py_ssize_t>CHUNK)
    if view.mode != STREAMED:
        return probabilities_of(view, start, buffer, piece)
    piece[0] = buffer
    logits_chunk(view, start, buffer, &logits, &single)
    if not single:
        table.exp_f64(<const double *>logits, length, &view.scaled, buffer, total)
    elif logits is buffer:
        # Not in place.
        table.exp_f32(<const float *>logits, length, &view.scaled, room, total)
        memcpy(buffer, room, length * sizeof(double))
    else:
        table.exp_f32(<const float *>logits, length, &view.scaled, buffer, total)
    return length


cdef void logits_chunk(const View *view, Py_ssize_t start, double *buffer, const void **piece,
                       bint *single) noexcept nogil:
    """One CHUNK of a row of logits, or its last elements."""
    cdef Row part = view.row
    part.n = min(view.n, start + CHUNK)
    logits_piece(&part, start, buffer, piece, single)


cdef Py_ssize_t first_in(const Support *support, int64_t id) noexcept nogil:
    cdef Py_ssize_t low = 0, high = support.count, middle
    while low < high:
        middle = (low + high) >> 1
        if support.ids[middle] < id:
            low = middle + 1
        else:
            high = middle
    return low


cdef Py_ssize_t replay(const Correction *left, double u) noexcept nogil:
    """The draw by its definition: sequential sums of weights that are never all in memory."""
    cdef double buffer[CHUNK]
    cdef double other[CHUNK]
    cdef const double *weights
    cdef Py_ssize_t n = left.p.n, start = 0, length, i
    cdef double total = sequential_sum(left), cumulative = 0.0
    while start < n:
        length = weights_of(left, start, buffer, other, &weights)
        for i in range(length):
            cumulative += weights[i]
            if cumulative / total > u:
                return start + i
        start += length
    return n - 1  # not reached: the last cumulative sum is the total, and u < 1


cdef double sequential_sum(const Correction *left) noexcept nogil:
    cdef double buffer[CHUNK]
    cdef double other[CHUNK]
    cdef const double *weights
    cdef Py_ssize_t start = 0, length, i
    cdef double total = 0.0
    while start < left.p.n:
        length = weights_of(left, start, buffer, other, &weights)
        for i in range(length):
            total += weights[i]
        start += length
    return total


# ---- corrections ---------------------------------------------------------------------------------


cdef bint ascend(View *view, Workspace *space, int slot) noexcept nogil:
    cdef Candidate *items
    cdef Py_ssize_t i
    if view.mode == POINT:
        view.support.ids = &view.point
        view.support.weights = &ONE
        view.support.count = 1
        return True
    if view.mode != SPARSE or view.ascending:
        return True
    items = <Candidate *>malloc(view.support.count * sizeof(Candidate))
    if items is NULL or not support_room(space, slot, view.support.count):
        free(items)
        return False
    for i in range(view.support.count):
        items[i].id = view.support.ids[i]
        items[i].value = view.support.weights[i]
        items[i].weight = -<double>items[i].id
    sort_candidates(items, view.support.count)
    for i in range(view.support.count):
        space.ids[slot][i] = items[i].id
        space.weights[slot][i] = items[i].value
    free(items)
    view.support.ids = space.ids[slot]
    view.support.weights = space.weights[slot]
    view.ascending = True
    return True


cdef problem open_correction(View *target, View *draft, double factor, Workspace *space,
                             Correction *left) noexcept nogil:
    cdef Py_ssize_t i, place = 0
    left.sparse = is_support(target) and is_support(draft)
    left.part = ABOVE
    left.factor = factor
    left.scale = 1.0
    left.total = 0.0
    left.summed = left.sparse
    if not (ascend(target, space, 0) and ascend(draft, space, 1)):
        return NO_ROOM
    if not left.sparse:
        left.sums = sums_room(space, target.n)
        if left.sums is NULL:
            return NO_ROOM
    left.p = target[0]
    left.q = draft[0]
    if left.sparse:
        for i in range(left.p.support.count):
            left.total += max(next_difference(&left.p.support, &left.q.support, factor, i, &place), 0.0)
        if left.total == 0.0:
            left.part = WHOLE
    return FINE


cdef problem prepare_correction(View *target, View *draft, Workspace *space,
                                Correction *left) noexcept nogil:
    cdef problem status = open_correction(target, draft, 1.0, space, left)
    if status != FINE or left.summed or target.mode == STREAMED or draft.mode == STREAMED:
        return status
    left.summed = True
    if sum_up(left):
        return FINE
    left.part = WHOLE
    return FINE if sum_up(left) else WITHOUT_MASS


cdef int64_t draw_correction(Correction *left, double u) noexcept nogil:
    cdef const Support *p = &left.p.support
    cdef double cumulative = 0.0, difference
    cdef Py_ssize_t i, place = 0
    if not left.summed:
        return draw_streamed(left, u)
    if not left.sparse:
        return draw_by_blocks(left, u)
    if left.part == WHOLE:
        return p.ids[draw_place(p.weights, p.count, u)]
    for i in range(p.count):
        difference = next_difference(p, &left.q.support, left.factor, i, &place)
        if difference > 0.0:
            cumulative += difference
            if cumulative / left.total > u:
                return p.ids[i]
    return p.ids[p.count - 1]  # not reached: the last sum is the total, and u < 1
