"""One distribution at one position of a block, however it is given.

Design: a row of logits becomes as little as its use asks for. With top-k on it is a support of at most k
tokens. Without truncation it stays a row of logits: the accept test needs one exponential and the sum of
all, which is rough (float32) until a decision is closer than its error; a draw, of a token or of a
correction, needs one pass of float32 terms summed by blocks, of which one is walked, and float64
exponentials of the whole only where it is in doubt. With top-p alone it is a support where the nucleus is
narrow; else the row is written once, into memory that the worker keeps. All give the numbers that
`distributions_from_logits` gives, bit for bit.
"""

from libc.math cimport INFINITY, exp, fabs, isfinite, log
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from mtplx._csampling.acceptance cimport draw_difference, weigh_correction
from mtplx._csampling.arrays cimport F64, Row, element, logit, logits_piece
from mtplx._csampling.dispatch cimport (
    BLOCK,
    CATEGORICAL_DRAW,
    CHUNK,
    CORRECTION_DRAW,
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
from mtplx._csampling.mass cimport ROW_FINE, weigh_row
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
            status = stream(logits, settings.temperature, view)
            if status != TOO_MANY:
                return FINE if status == SELECTED else (BAD_LOGITS if status == BAD_LOGIT else NO_ROOM)
        elif settings.k == 0 and settings.top_p < 1.0 and settings.gather and logits.n >= SAMPLED_FROM:
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


cdef selection_status stream(const Row *logits, double temperature, View *view) noexcept nogil:
    """The largest logit and the rough sum; TOO_MANY where the row must be written after all."""
    cdef streamed run
    cdef Py_ssize_t blocks = (logits.n + CHUNK - 1) // CHUNK * SIDE_BY_SIDE
    cdef selection_status status
    cdef double *maxima = <double *>malloc(blocks * sizeof(double))
    if maxima is NULL:
        return NO_MEMORY
    status = block_pass(logits, temperature, True, maxima, &run)
    free(maxima)
    if status != SELECTED:
        return status
    set_scaling(&view.scaled, temperature, run.top)
    if view.scaled.rule != SCALE_NONE and view.scaled.rule != SCALE_RECIPROCAL:
        return TOO_MANY
    view.mode = STREAMED
    view.row = logits[0]
    view.total = run.sum
    view.tolerance = rough_error(logits.n, &view.scaled)
    if not isfinite(run.sum):
        make_exact(view)  # no sum that float32 terms can give, and rules report what they divide by it
    return SELECTED


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
            token[0] = draw_streamed(view, NULL, space, next_uniform(stream, lane))
        else:
            if not weigh(&weights, &view.row, NULL, False, sums):
                return BAD_ROW
            token[0] = draw(&weights, next_uniform(stream, lane))
    return FINE


cdef Py_ssize_t draw_streamed(View *p, View *q, Workspace *space, double u) noexcept nogil:
    """The first id whose sequential sum of (p - q)+, over the whole sum, exceeds u; of p where q is NULL.

    At least one is a row of logits, and nothing of it is written down: float32 terms and rough sums find
    the block of the token and mostly the token itself, else float64 exponentials do.
    `space.sums` has room for the row; p is in slot 0 of the workspace if it is in one, q in slot 1.
    """
    cdef View exact_p, exact_q
    cdef Py_ssize_t place = draw_roughly(p, q, space.sums, u)
    if place < 0:
        exact_p = whole_weights(p, space, 0)
        if q is not NULL:
            exact_q = whole_weights(q, space, 1)
        place = draw_by_blocks(&exact_p, &exact_q if q is not NULL else NULL, space.sums, u)
    return place


cdef View whole_weights(View *view, Workspace *space, int slot) noexcept nogil:
    """A view with an exact sum; as a support where most exponentials are 0, as those of a masked row are.

    exp(z) is 0 at z <= -746, and z is off by less than (|x/T| + |top| + 2) 2^-50: no entry below the level
    has a weight. Where memory is short the row stays a row of logits, which gives the same numbers.
    """
    cdef View found
    cdef running ignored
    cdef double level
    cdef double *weights
    cdef Py_ssize_t count
    make_exact(view)
    found = view[0]
    if view.mode == STREAMED:
        level = (view.scaled.top - 747.0 - 2.0 ** -30 * fabs(view.scaled.top)) * view.scaled.temperature
        count = collect_from(&view.row, level, view.n // WIDE, space, slot)
        if 0 <= count <= view.n // WIDE:
            weights = space.weights[slot]
            memset(&ignored, 0, sizeof(ignored))
            table.exp_f64(weights, count, &view.scaled, weights, &ignored)
            table.divide_f64(weights, count, view.total, weights)
            found.mode = SPARSE
            found.support.ids = space.ids[slot]
            found.support.weights = weights
            found.support.count = count
    return found


cdef Py_ssize_t draw_roughly(const View *p, const View *q, double *sums, double u) noexcept nogil:
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
    cdef Py_ssize_t n = p.n, start = 0, length, block
    cdef double total = 0.0, tolerance = 2.0 ** -19
    if not rough_unit(p, &p_unit, &tolerance) or (q is not NULL and not rough_unit(q, &q_unit, &tolerance)):
        return -1
    if q is NULL:
        memset(q_terms, 0, sizeof(q_terms))
    while start < n:
        length = rough_terms(p, start, p_terms)
        if q is not NULL:
            rough_terms(q, start, q_terms)
        table.block_sums_rough(p_terms, q_terms, length, p_unit, q_unit, sums + start // BLOCK)
        start += length
    for block in range((n + BLOCK - 1) // BLOCK):
        total += sums[block]
    start = walk(p, q, sums, u, total, tolerance, False)
    if start < 0:
        count_fallback(ROUGH_DRAW)
    return start


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
    cdef Py_ssize_t length = min(view.n - start, <Py_ssize_t>CHUNK), i
    cdef double per_unit
    if view.mode == STREAMED:
        per_unit = LOG2_E / view.scaled.temperature
        logits_chunk(view, start, buffer, &piece, &single)
        if single:
            table.rough_exp_f32(<const float *>piece, length, view.scaled.largest, per_unit, out)
        else:
            table.rough_exp_f64(<const double *>piece, length, view.scaled.largest, per_unit, out)
        return length
    memset(out, 0, length * sizeof(float))
    if view.mode == POINT:
        if start <= view.point < start + length:
            out[view.point - start] = 1.0
        return length
    i = first_in(&view.support, start)
    while i < view.support.count and view.support.ids[i] < start + length:
        out[view.support.ids[i] - start] = view.support.weights[i]
        i += 1
    return length


cdef Py_ssize_t draw_by_blocks(View *p, View *q, double *sums, double u) noexcept nogil:
    """The same draw by the weights themselves."""
    cdef double buffer[CHUNK]
    cdef double other[CHUNK]
    cdef const double *weights
    cdef Py_ssize_t n = p.n, start = 0, length, block
    cdef double total = 0.0
    while start < n:
        length = weights_of(p, q, start, buffer, other, &weights)
        table.block_sums(weights, length, sums + start // BLOCK)
        start += length
    for block in range((n + BLOCK - 1) // BLOCK):
        total += sums[block]
    if total == 0.0:
        # Nowhere is p larger: from p itself.
        return draw_by_blocks(p, NULL, sums, u)
    start = walk(p, q, sums, u, total, (2.0 * n + 16.0) * UNIT * total, True)
    if start < 0:
        count_fallback(CATEGORICAL_DRAW if q is NULL else CORRECTION_DRAW)
        start = replay_streamed(p, q, u)
    return start


cdef Py_ssize_t walk(const View *p, const View *q, const double *sums, double u, double total,
                     double tolerance, bint exact) noexcept nogil:
    """The entry whose steps lie on both sides of u times the total, or -1 if one is within the tolerance."""
    cdef double buffer[CHUNK]
    cdef double other[CHUNK]
    cdef const double *weights
    cdef Py_ssize_t n = p.n, block = 0, last = (n - 1) // BLOCK, at, chunk, length, i
    cdef double target = u * total, before = 0.0, cumulative
    while block < last and before + sums[block] <= target - tolerance:
        before += sums[block]
        block += 1
    at = block * BLOCK
    cumulative = before
    while at < n:
        chunk = at // CHUNK * CHUNK
        length = weights_of(p, q, chunk, buffer, other, &weights)
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


cdef Py_ssize_t weights_of(const View *p, const View *q, Py_ssize_t start, double *buffer, double *other,
                           const double **weights) noexcept nogil:
    """(p - q)+ of one CHUNK, or p where q is NULL, with the sums that the views have; returns its length."""
    cdef const double *from_p
    cdef const double *from_q
    cdef running ignored
    cdef Py_ssize_t length = probabilities_of(p, start, buffer, &from_p)
    weights[0] = from_p
    if q is not NULL:
        probabilities_of(q, start, other, &from_q)
        memset(&ignored, 0, sizeof(ignored))
        table.residual(from_p, from_q, length, buffer, &ignored)
        weights[0] = buffer
    return length


cdef Py_ssize_t probabilities_of(const View *view, Py_ssize_t start, double *buffer,
                                 const double **piece) noexcept nogil:
    """One CHUNK of a view made from logits; returns its length."""
    cdef const void *logits
    cdef bint single
    cdef running ignored
    cdef Py_ssize_t length = min(view.n - start, <Py_ssize_t>CHUNK), i
    piece[0] = buffer
    if view.mode == DENSE:
        piece[0] = <const double *>view.row.data + start
    elif view.mode == STREAMED:
        memset(&ignored, 0, sizeof(ignored))
        logits_chunk(view, start, buffer, &logits, &single)
        if single:
            # Not in place: the piece may be the buffer.
            exp_singles(<const float *>logits, length, &view.scaled, buffer)
        else:
            table.exp_f64(<const double *>logits, length, &view.scaled, buffer, &ignored)
        table.divide_f64(buffer, length, view.total, buffer)
    else:
        memset(buffer, 0, length * sizeof(double))
        if view.mode == POINT:
            if start <= view.point < start + length:
                buffer[view.point - start] = 1.0
            return length
        i = first_in(&view.support, start)
        while i < view.support.count and view.support.ids[i] < start + length:
            buffer[view.support.ids[i] - start] = view.support.weights[i]
            i += 1
    return length


cdef void exp_singles(const float *logits, Py_ssize_t length, const scaling *s, double *out) noexcept nogil:
    cdef double room[CHUNK]
    cdef running ignored
    memset(&ignored, 0, sizeof(ignored))
    table.exp_f32(logits, length, s, room, &ignored)
    memcpy(out, room, length * sizeof(double))


cdef void logits_chunk(const View *view, Py_ssize_t start, double *buffer, const void **piece,
                       bint *single) noexcept nogil:
    """One CHUNK of a row of logits, or its last elements."""
    cdef Row part = view.row
    part.n = min(view.n, start + CHUNK)
    logits_piece(&part, start, buffer, piece, single)


cdef Py_ssize_t first_in(const Support *support, int64_t id) noexcept nogil:
    """Place of the first entry at or behind an id; ids ascend."""
    cdef Py_ssize_t low = 0, high = support.count, middle
    while low < high:
        middle = (low + high) >> 1
        if support.ids[middle] < id:
            low = middle + 1
        else:
            high = middle
    return low


cdef Py_ssize_t replay_streamed(const View *p, const View *q, double u) noexcept nogil:
    """The draw by its definition: sequential sums of weights that are never all in memory."""
    cdef double buffer[CHUNK]
    cdef double other[CHUNK]
    cdef const double *weights
    cdef Py_ssize_t n = p.n, start = 0, length, i
    cdef double total = 0.0, cumulative = 0.0
    while start < n:
        length = weights_of(p, q, start, buffer, other, &weights)
        for i in range(length):
            total += weights[i]
        start += length
    start = 0
    while start < n:
        length = weights_of(p, q, start, buffer, other, &weights)
        for i in range(length):
            cumulative += weights[i]
            if cumulative / total > u:
                return start + i
        start += length
    return n - 1  # not reached: the last cumulative sum is the total, and u < 1


# ---- corrections ---------------------------------------------------------------------------------


cdef bint write_dense(View *view, Workspace *space, int slot) noexcept nogil:
    cdef double *dense
    cdef Py_ssize_t i
    if view.mode == DENSE:
        return True
    dense = dense_room(space, slot, view.n)
    if dense is NULL:
        return False
    memset(dense, 0, view.n * sizeof(double))
    if view.mode == POINT:
        if 0 <= view.point < view.n:
            dense[view.point] = 1.0
    else:
        for i in range(view.support.count):
            dense[view.support.ids[i]] = view.support.weights[i]
    dense_view(view, dense)
    return True


cdef bint ascend(View *view, Workspace *space, int slot) noexcept nogil:
    cdef Candidate *items
    cdef Py_ssize_t i
    if view.mode == POINT:
        view.support.ids = &view.point
        view.support.weights = &ONE
        view.support.count = 1
        return True
    if view.ascending:
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


cdef inline bint is_support(const View *view) noexcept nogil:
    return view.mode == SPARSE or view.mode == POINT


cdef problem prepare_correction(View *target, View *draft, Workspace *space,
                                Prepared *prepared) noexcept nogil:
    cdef Weights weights
    prepared.streamed = target.mode == STREAMED or draft.mode == STREAMED
    if prepared.streamed or not (is_support(target) and is_support(draft)):
        prepared.space = space
        prepared.sums = sums_room(space, target.n)
        if prepared.sums is NULL:
            return NO_ROOM
        if not prepared.streamed:
            if not (write_dense(target, space, 0) and write_dense(draft, space, 1)):
                return NO_ROOM
            if not weigh_correction(&weights, &target.row, &draft.row, prepared.sums):
                return WITHOUT_MASS
            prepared.residual = weights.q is not NULL
            prepared.positive_part = weights.positive_part
            prepared.scale = weights.scale
            prepared.total = weights.total
    elif not (ascend(target, space, 0) and ascend(draft, space, 1)):
        return NO_ROOM
    prepared.target = target[0]
    prepared.draft = draft[0]
    return FINE


cdef int64_t draw_correction(Prepared *prepared, double u) noexcept nogil:
    cdef Weights weights
    if prepared.streamed:
        return draw_streamed(&prepared.target, &prepared.draft, prepared.space, u)
    if prepared.target.mode != DENSE:
        return draw_difference(&prepared.target.support, &prepared.draft.support, u)
    weights.p = &prepared.target.row
    weights.q = &prepared.draft.row if prepared.residual else NULL
    weights.factor = weights.multiple = 1.0
    weights.removed_count = 0
    weights.positive_part = prepared.positive_part
    weights.scale = prepared.scale
    weights.total = prepared.total
    weights.sums = prepared.sums
    return draw(&weights, u)
