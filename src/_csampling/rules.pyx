"""The acceptance rules of a block: what is kept, and what comes in its place.

Design: each rule is one function over a `Block`, whose rows it opens as it reaches them; none needs the
GIL. Two kinds of decision are taken by sums in another order than the definition's, with a proof or again:

- *The exact rule from logits* compares u with a ratio r of two probabilities whose sums are rough
  (`selection.rough_error`). With relative errors s and t, the true ratio is within (s + t)(1 + 2^-20) of
  r, and where u is not outside of that band the exact sums are taken, which give softmax's own bits.
- *The block rule* compares u with h = R/(R + 1 - P), R = sum (P p - q)+ by ascending id. Of n terms >= 0
  that sum is within (n - 1) 2^-53 of the true one, relatively; the sum by blocks of 256 (16 lanes, folded,
  then block by block) within (n/256 + 20) 2^-53. h grows with R, by at most the same relative amount, and
  rounds three times on either side. Where u is within (1.0625 n + 64) 2^-53 of h, R is summed one by one.
- *Typical acceptance* compares p(x) with min(eps, delta exp(-H)). Both entropies are within 1e-12 of the
  true one, so exp(-H) is known to 2.1e-12. Where that does not decide, H is computed as it is defined.

The cascade's deferred mass is reported (as part of an accept probability), so it is always summed by
ascending id, one by one.
"""

from cpython.ref cimport Py_INCREF
from libc.math cimport INFINITY, exp, isfinite
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from mtplx._csampling.acceptance cimport acceptance
from mtplx._csampling.arrays cimport F64, Row, element
from mtplx._csampling.blocks cimport (
    BLOCK_RULE,
    BY_DRAFT,
    BY_TARGET_RATIO,
    CASCADE,
    GREEDY,
    MATCH,
    TYPICAL,
    Block,
    Parameters,
    count_draft,
    discount_draft,
    open_draft,
    open_target,
    read_token,
)
from mtplx._csampling.dispatch cimport (
    ACCEPT_TEST,
    BLOCK,
    CHUNK,
    KEEP_TEST,
    TYPICAL_THRESHOLD,
    count_fallback,
    running,
    table,
)
from mtplx._csampling.distributions cimport Support, find
from mtplx._csampling.draws cimport Weights, draw, draw_place, weigh, weigh_scaled, weights_piece
from mtplx._csampling.laws cimport TINY_TOTAL, entropy_as_defined, entropy_of
from mtplx._csampling.mass cimport ROW_BAD, ROW_FINE, weigh_row, widen_into
from mtplx._csampling.softmax cimport exponentials
from mtplx._csampling.streams cimport BONUS_LANE, CORRECTION_LANE, next_uniform
from mtplx._csampling.views cimport (
    BAD_ID,
    BAD_LENGTH,
    BAD_ROW,
    DENSE,
    FINE,
    NO_ROOM,
    NOT_DRAWABLE,
    POINT,
    RAISED,
    SPARSE,
    STREAMED,
    WITHOUT_MASS,
    Failure,
    Prepared,
    View,
    Workspace,
    ascend,
    dense_room,
    draw_correction,
    draw_token,
    largest_token,
    make_exact,
    prepare_correction,
    probability,
    problem,
    sums_room,
    write_dense,
)

cdef double UNIT = 2.0 ** -53
cdef double ONE = 1.0


cdef problem run(Block *block, Workspace *space) noexcept nogil:
    if block.rule == GREEDY:
        return run_greedy(block, space)
    if block.rule == MATCH:
        return run_match(block, space)
    if block.rule == BLOCK_RULE:
        return run_block(block, space)
    if block.rule == TYPICAL:
        return run_typical(block, space)
    if block.rule == CASCADE:
        return run_cascade(block, space)
    return run_exact(block, space)


# ---- steps that rules share ------------------------------------------------------------------------


cdef problem reach_target(Block *block, Workspace *space, Py_ssize_t i, int64_t *token, View *target,
                          double *p) noexcept nogil:
    """The draft at position i, its row of the target, and p(x)."""
    cdef problem status = read_token(block, i, token)
    if status == FINE:
        status = open_target(block, space, i, target)
    if status != FINE:
        return status
    return probability(target, token[0], &block.failure, p)


cdef problem reach_pair(Block *block, Workspace *space, Py_ssize_t i, int64_t *token, View *target,
                        View *draft, double *p, double *q) noexcept nogil:
    """The draft at position i, both rows there, and p(x) and q(x), as exact as the rows are."""
    cdef problem status = read_token(block, i, token)
    if status == FINE:
        status = open_target(block, space, i, target)
    if status == FINE:
        status = open_draft(block, space, i, target, token[0], draft)
    if status != FINE:
        return status
    block.failure.of_draft = False
    status = probability(target, token[0], &block.failure, p)
    if status != FINE:
        return status
    block.failure.of_draft = True
    return probability(draft, token[0], &block.failure, q)


cdef problem require_same_length(const View *target, const View *draft, Failure *failure) noexcept nogil:
    if (target.mode == DENSE or draft.mode == DENSE or not (target.any_id and draft.any_id)) and (
            target.n != draft.n):
        failure.n = target.n
        failure.m = draft.n
        return BAD_LENGTH
    return FINE


cdef problem require_drawable(Block *block, int64_t token, double p, double q) noexcept nogil:
    if block.check_draft and q == 0.0 and p > 0.0:
        block.failure.token = token
        return NOT_DRAWABLE
    return FINE


cdef void settle(View *target, View *draft, int64_t token, Failure *failure, double *p,
                 double *q) noexcept nogil:
    """Both probabilities with softmax's own bits; the ids were checked before."""
    make_exact(target)
    make_exact(draft)
    probability(target, token, failure, p)
    probability(draft, token, failure, q)


cdef void keep(Block *block, Py_ssize_t i, int64_t token) noexcept nogil:
    block.out[i] = token
    block.accepted = i + 1
    block.emitted = i + 1
    count_draft(&block.penalties, token)


cdef problem emit_bonus(Block *block, Workspace *space) noexcept nogil:
    """After K accepted drafts: a draw from the row behind them, if there is one."""
    cdef View target
    cdef problem status
    block.bonus = block.target.count > block.drafts
    if not block.bonus:
        return FINE
    status = open_target(block, space, block.drafts, &target)
    if status == FINE:
        if block.rule == GREEDY:
            status = largest_token(&target, block.out + block.emitted)
        else:
            status = draw_token(&target, space, &block.stream, BONUS_LANE, block.out + block.emitted)
    block.emitted += 1
    return status


cdef problem as_row(View *view, Workspace *space, int slot) noexcept nogil:
    cdef double *dense
    if view.mode != STREAMED:
        return FINE if write_dense(view, space, slot) else NO_ROOM
    dense = dense_room(space, slot, view.n)
    if dense is NULL:
        return NO_ROOM
    view.total = exponentials(&view.row, &view.scaled, dense)
    table.divide_f64(dense, view.n, view.total, dense)
    view.mode = DENSE
    view.row.data = <const char *>dense
    view.row.kind = F64
    view.row.patches = 0
    view.tolerance = 0.0
    return FINE


cdef problem as_wide_row(View *view, Workspace *space, int slot) noexcept nogil:
    """As `as_row`, in float64."""
    cdef double *wide
    cdef problem status = as_row(view, space, slot)
    if status != FINE or view.row.kind == F64:
        return status
    wide = dense_room(space, slot, view.n)
    if wide is NULL:
        return NO_ROOM
    widen_into(&view.row, wide)
    view.row.data = <const char *>wide
    view.row.kind = F64
    return FINE


# ---- exact, match, greedy --------------------------------------------------------------------------


cdef problem run_exact(Block *block, Workspace *space) noexcept nogil:
    cdef View target, draft
    cdef Prepared prepared
    cdef Failure *failure = &block.failure
    cdef problem status
    cdef Py_ssize_t i
    cdef int64_t token
    cdef double p, q, accept_probability, ratio, band, u
    cdef bint ready
    for i in range(block.drafts):
        status = reach_pair(block, space, i, &token, &target, &draft, &p, &q)
        if status == FINE:
            status = require_same_length(&target, &draft, failure)
        if status != FINE:
            return status
        band = (target.tolerance + draft.tolerance) * (1.0 + 2.0 ** -20)
        if band > 0.0 and (p < 1e-250 or q < 1e-250):
            # Too small to be compared relatively, or zero for one sum and not for another.
            settle(&target, &draft, token, failure, &p, &q)
            band = 0.0
        status = require_drawable(block, token, p, q)
        if status != FINE:
            return status
        accept_probability = acceptance(p, q)
        ready = accept_probability == 0.0
        if ready:
            # Rejected whatever the coin shows: what can fail, fails before the coin.
            status = prepare_correction(&target, &draft, space, &prepared)
            if status != FINE:
                return status
        u = next_uniform(&block.stream, i)
        if band > 0.0:
            ratio = p / q
            if not (u < ratio * (1.0 - band) or u > ratio * (1.0 + band)):
                count_fallback(ACCEPT_TEST)
                settle(&target, &draft, token, failure, &p, &q)
                accept_probability = acceptance(p, q)
        block.probabilities[i] = accept_probability
        block.tested = i + 1
        if u <= accept_probability and accept_probability > 0.0:
            keep(block, i, token)
            continue
        if not ready:
            status = prepare_correction(&target, &draft, space, &prepared)
            if status != FINE:
                return status
        block.out[i] = draw_correction(&prepared, next_uniform(&block.stream, CORRECTION_LANE))
        block.emitted = i + 1
        return FINE
    return emit_bonus(block, space)


cdef problem run_match(Block *block, Workspace *space) noexcept nogil:
    cdef View target
    cdef problem status
    cdef Py_ssize_t i
    cdef int64_t token, drawn
    cdef double p
    for i in range(block.drafts):
        status = reach_target(block, space, i, &token, &target, &p)
        if status == FINE:
            status = draw_token(&target, space, &block.stream, i, &drawn)
        if status != FINE:
            return status
        block.probabilities[i] = p
        if not test_by_token(block, i, token, drawn):
            return FINE
    return emit_bonus(block, space)


cdef problem run_greedy(Block *block, Workspace *space) noexcept nogil:
    cdef View target
    cdef problem status
    cdef Py_ssize_t i
    cdef int64_t token, best
    cdef double p
    for i in range(block.drafts):
        status = reach_target(block, space, i, &token, &target, &p)
        if status == FINE:
            status = largest_token(&target, &best)
        if status != FINE:
            return status
        block.probabilities[i] = 1.0 if best == token else 0.0
        if not test_by_token(block, i, token, best):
            return FINE
    return emit_bonus(block, space)


cdef bint test_by_token(Block *block, Py_ssize_t i, int64_t token, int64_t wanted) noexcept nogil:
    """Emit the token that is wanted at position i; was it the draft?"""
    block.tested = i + 1
    block.out[i] = wanted
    block.emitted = i + 1
    if wanted != token:
        return False
    keep(block, i, token)
    return True


# ---- block -----------------------------------------------------------------------------------------


cdef problem leave_over(View *target, View *draft, Workspace *space, double factor,
                        LeftOver *left) noexcept nogil:
    cdef Py_ssize_t i, place = 0
    cdef double difference
    cdef double *sums
    cdef problem status
    left.factor = factor
    left.sparse = (target.mode == SPARSE or target.mode == POINT) and (
        draft.mode == SPARSE or draft.mode == POINT)
    if left.sparse:
        if not (ascend(target, space, 0) and ascend(draft, space, 1)):
            return NO_ROOM
        left.p = target.support
        left.q = draft.support
        left.mass = 0.0
        left.positive = False
        for i in range(left.p.count):
            difference = scaled_difference(left, i, &place)
            if difference > 0.0:
                left.mass += difference
                left.positive = True
        return FINE
    status = as_row(target, space, 0)
    if status == FINE:
        status = as_row(draft, space, 1)
    if status != FINE:
        return status
    sums = sums_room(space, target.n)
    if sums is NULL:
        return NO_ROOM
    left.positive = weigh_scaled(&left.weights, &target.row, &draft.row, factor, 1.0, NULL, 0, sums)
    left.mass = left.weights.total if left.positive else 0.0
    return FINE


cdef double scaled_difference(const LeftOver *left, Py_ssize_t i, Py_ssize_t *place) noexcept nogil:
    cdef int64_t token = left.p.ids[i]
    cdef double q = 0.0
    while place[0] < left.q.count and left.q.ids[place[0]] < token:
        place[0] += 1
    if place[0] < left.q.count and left.q.ids[place[0]] == token:
        q = left.q.weights[place[0]]
    return left.factor * left.p.weights[i] - q


cdef double sequential_mass(const LeftOver *left) noexcept nogil:
    cdef double buffer[CHUNK]
    cdef double other[CHUNK]
    cdef const double *piece
    cdef Weights weights
    cdef Py_ssize_t start = 0, length, i
    cdef double mass = 0.0
    if left.sparse or not left.positive:
        return left.mass
    weights = left.weights
    weights.scale = 1.0
    while start < weights.p.n:
        length = weights_piece(&weights, start, buffer, other, &piece)
        for i in range(length):
            mass += piece[i]
        start += length
    return mass


cdef bint keeps_prefix(const LeftOver *left, double prefix, double u) noexcept nogil:
    """Whether ``u <= h and h > 0``, h that of the prefix with these rows behind it."""
    cdef double error, h
    if not left.sparse and left.positive:
        if left.weights.p.n > BLOCK and left.mass < 1e300 and left.weights.scale == 1.0:
            error = (1.0625 * left.weights.p.n + 64.0) * UNIT
            h = keep_probability(left.mass, prefix)
            if u < h * (1.0 - error):
                return True
            if u > h * (1.0 + error):
                return False
            count_fallback(KEEP_TEST)
        h = keep_probability(sequential_mass(left), prefix)
    else:
        h = keep_probability(left.mass, prefix)
    return u <= h and h > 0.0


cdef problem draw_left_over(Block *block, View *target, Workspace *space, LeftOver *left,
                            int64_t *token) noexcept nogil:
    """A token from what is left over; from the target's own weights where that is nothing."""
    cdef Weights weights
    cdef double u, cumulative = 0.0, difference
    cdef Py_ssize_t i, place = 0
    if left.sparse:
        u = next_uniform(&block.stream, CORRECTION_LANE)
        if not left.positive:
            token[0] = left.p.ids[draw_place(left.p.weights, left.p.count, u)]
            return FINE
        for i in range(left.p.count):
            difference = scaled_difference(left, i, &place)
            if difference > 0.0:
                cumulative += difference
                if cumulative / left.mass > u:
                    token[0] = left.p.ids[i]
                    break
        return FINE
    if left.positive:
        token[0] = draw(&left.weights, next_uniform(&block.stream, CORRECTION_LANE))
        return FINE
    if not weigh(&weights, &target.row, NULL, True, space.sums):
        return WITHOUT_MASS
    token[0] = draw(&weights, next_uniform(&block.stream, CORRECTION_LANE))
    return FINE


cdef bint has_mass(const View *target) noexcept nogil:
    """Whether an entry is positive and finite, so that a correction has something to be drawn from."""
    cdef Py_ssize_t i
    if target.mode != DENSE:
        return True
    for i in range(target.n):
        if 0.0 < element(&target.row, i) < INFINITY:
            return True
    return False


cdef problem run_block(Block *block, Workspace *space) noexcept nogil:
    cdef View target, draft
    cdef LeftOver left
    cdef Prepared prepared
    cdef Failure *failure = &block.failure
    cdef Py_ssize_t K = block.drafts, i, length, counted = 0
    cdef double p, q, before = 1.0, prefix, u
    cdef problem status
    for i in range(K):
        block.probabilities[i] = 0.0
    for i in range(K):
        status = reach_pair(block, space, i, block.out + i, &target, &draft, &p, &q)
        if status != FINE:
            return status
        if target.tolerance > 0.0 or draft.tolerance > 0.0:
            # A prefix multiplies up to K ratios, and with them their errors.
            settle(&target, &draft, block.out[i], failure, &p, &q)
        status = require_same_length(&target, &draft, failure)
        if status == FINE:
            status = require_drawable(block, block.out[i], p, q)
        if status != FINE:
            return status
        prefix = prefix_acceptance(before, p, q)
        if prefix == 0.0 and before == 1.0 and not has_mass(&target):
            # The correction may be drawn from here: what can fail, fails before the coins.
            status = prepare_correction(&target, &draft, space, &prepared)
            if status != FINE:
                return status
        block.probabilities[i] = prefix
        if prefix == 0.0:
            break
        before = prefix
        count_draft(&block.penalties, block.out[i])
        counted = i + 1
    block.tested = K
    for i in range(K):
        block.coins[i] = next_uniform(&block.stream, i)
    for length in range(K, -1, -1):
        prefix = block.probabilities[length - 1] if length else 1.0
        u = block.coins[length - 1] if length else 0.0
        if not (u <= prefix and prefix > 0.0):
            continue
        if length == K:
            block.accepted = block.emitted = K
            return emit_bonus(block, space)
        while counted > length:
            # The rows behind this prefix see its drafts only.
            counted -= 1
            discount_draft(&block.penalties, block.out[counted])
        status = open_target(block, space, length, &target)
        if status == FINE:
            status = open_draft(block, space, length, &target, block.out[length], &draft)
        if status == FINE:
            status = leave_over(&target, &draft, space, prefix, &left)
        if status != FINE:
            return status
        if length and not keeps_prefix(&left, prefix, u):
            continue
        block.accepted = length
        block.emitted = length + 1
        return draw_left_over(block, &target, space, &left, block.out + length)
    return FINE  # not reached: the empty prefix is always kept


# ---- typical ---------------------------------------------------------------------------------------


cdef problem run_typical(Block *block, Workspace *space) noexcept nogil:
    cdef View target
    cdef problem status
    cdef Py_ssize_t i
    cdef int64_t token
    cdef double p
    cdef bint kept
    for i in range(block.drafts):
        status = read_token(block, i, &token)
        if status == FINE:
            status = open_target(block, space, i, &target)
        if status == FINE and target.mode == STREAMED:
            status = as_row(&target, space, 0)
        if status == FINE:
            status = probability(&target, token, &block.failure, &p)
        if status == FINE:
            status = keeps_typically(&target, p, &block.parameters, space, &block.failure, &kept)
        if status != FINE:
            return status
        block.probabilities[i] = 1.0 if kept else 0.0
        block.tested = i + 1
        if not kept:
            block.emitted = i + 1
            return draw_token(&target, space, &block.stream, CORRECTION_LANE, block.out + i)
        keep(block, i, token)
    return emit_bonus(block, space)


cdef inline double threshold_at(double entropy, const Parameters *parameters) noexcept nogil:
    cdef double threshold = parameters.delta * exp(-entropy)
    return threshold if threshold < parameters.eps else parameters.eps


cdef problem keeps_typically(View *target, double p, const Parameters *parameters, Workspace *space,
                             Failure *failure, bint *kept) noexcept nogil:
    cdef const double *weights = &ONE
    cdef Py_ssize_t count = 1, i
    cdef double total = 1.0, entropy
    cdef problem status
    if target.mode == SPARSE:
        weights = target.support.weights
        count = target.support.count
        total = 0.0
        for i in range(count):
            total += weights[i]
    elif target.mode != POINT:
        status = as_wide_row(target, space, 0)
        if status != FINE:
            return status
        if weigh_row(&target.row, &total) != ROW_FINE:
            return BAD_ROW
        weights = <const double *>target.row.data
        count = target.n
    if isfinite(total) and total >= TINY_TOTAL:
        entropy = entropy_of(weights, count, total)
        kept[0] = p > threshold_at(entropy - ENTROPY_ERROR, parameters) * (1.0 + 2.0 ** -50)
        if kept[0] == (p > threshold_at(entropy + ENTROPY_ERROR, parameters) * (1.0 - 2.0 ** -50)):
            return FINE
    count_fallback(TYPICAL_THRESHOLD)
    with gil:
        return keeps_as_defined(weights, count, p, parameters, failure, kept)


# Of an entropy and of the reference's together.
cdef double ENTROPY_ERROR = 2e-12


cdef problem keeps_as_defined(const double *weights, Py_ssize_t count, double p, const Parameters *parameters,
                              Failure *failure, bint *kept) noexcept:
    try:
        kept[0] = p > threshold_at(entropy_as_defined(weights, count), parameters)
        return FINE
    except BaseException as error:
        Py_INCREF(error)
        failure.error = <void *>error
        return RAISED


# ---- cascade ---------------------------------------------------------------------------------------


cdef inline bint defers(double p, double q, double top, const Parameters *parameters) noexcept nogil:
    """r of the cascade: whether a token falls short of the target's best by too much."""
    return (q if parameters.deferred == BY_DRAFT else p) < deferral_bound(top, parameters)


cdef inline double deferral_bound(double top, const Parameters *parameters) noexcept nogil:
    if parameters.deferred == BY_TARGET_RATIO:
        return top * (1.0 - parameters.alpha)
    return top - parameters.alpha


cdef problem run_cascade(Block *block, Workspace *space) noexcept nogil:
    cdef View target, draft
    cdef Failure *failure = &block.failure
    cdef problem status
    cdef Py_ssize_t i
    cdef int64_t token
    cdef double p, q, top, mass, accept_probability
    cdef bint deferred
    for i in range(block.drafts):
        status = reach_pair(block, space, i, &token, &target, &draft, &p, &q)
        if status != FINE:
            return status
        settle(&target, &draft, token, failure, &p, &q)
        failure.of_draft = False
        status = largest_probability(&target, space, &top)
        if status != FINE:
            return status
        deferred = defers(p, q, top, &block.parameters)
        status = require_same_length(&target, &draft, failure)
        if status == FINE:
            status = require_drawable(block, token, p, q)
        if status != FINE:
            return status
        if not deferred and not 0 <= token < target.n:
            # Of a support any id may be asked for; kept without a look at p, it would become a token.
            failure.n = target.n
            return BAD_ID
        block.tested = i + 1
        block.probabilities[i] = 1.0
        if not deferred:
            keep(block, i, token)
            continue
        failure.of_draft = True
        status = deferred_mass(&target, &draft, space, top, block, &mass)
        if status != FINE:
            return status
        accept_probability = acceptance(p * mass, q)
        block.probabilities[i] = accept_probability
        if next_uniform(&block.stream, i) <= accept_probability and accept_probability > 0.0:
            keep(block, i, token)
            continue
        block.emitted = i + 1
        return draw_deferred(block, &target, &draft, space, top, mass, block.out + i)
    return emit_bonus(block, space)


cdef problem largest_probability(View *target, Workspace *space, double *top) noexcept nogil:
    """max p of a row that is a distribution."""
    cdef Py_ssize_t i
    cdef double total
    cdef problem status
    top[0] = 0.0
    if target.mode == POINT:
        top[0] = 1.0
        return FINE
    if target.mode == SPARSE:
        for i in range(target.support.count):
            top[0] = max(top[0], target.support.weights[i])
        return FINE
    status = as_wide_row(target, space, 0)
    if status != FINE:
        return status
    if weigh_row(&target.row, &total) != ROW_FINE:
        return BAD_ROW
    top[0] = table.max_f64(<const double *>target.row.data, target.n)
    return FINE


cdef problem deferred_mass(View *target, View *draft, Workspace *space, double top, Block *block,
                           double *mass) noexcept nogil:
    """sum r q, by ascending id; afterwards both are supports that ascend, or both rows of float64."""
    cdef const Parameters *parameters = &block.parameters
    cdef const double *p
    cdef const double *q
    cdef const double *compared
    cdef double bound = deferral_bound(top, parameters), total
    cdef Py_ssize_t i
    cdef problem status
    mass[0] = 0.0
    if (target.mode == SPARSE or target.mode == POINT) and (draft.mode == SPARSE or draft.mode == POINT):
        if not (ascend(target, space, 0) and ascend(draft, space, 1)):
            return NO_ROOM
        for i in range(draft.support.count):
            if defers(find(&target.support, True, draft.support.ids[i]), draft.support.weights[i], top,
                      parameters):
                mass[0] += draft.support.weights[i]
        return FINE
    status = as_wide_row(target, space, 0)
    if status == FINE:
        status = as_wide_row(draft, space, 1)
    if status != FINE:
        return status
    p = <const double *>target.row.data
    q = <const double *>draft.row.data
    if weigh_row(&draft.row, &total) == ROW_BAD:
        for i in range(target.n):
            if not (q[i] >= 0.0 and q[i] < INFINITY):
                block.failure.token = i
                block.failure.value = q[i]
                return BAD_ROW
    compared = q if parameters.deferred == BY_DRAFT else p
    total = 0.0
    for i in range(target.n):
        # Without a branch: which tokens are deferred cannot be foretold.
        total += q[i] if compared[i] < bound else 0.0
    mass[0] = total
    return FINE


cdef enum cascade_part:
    LEFT      # (pi - q)+ = (p sum r q - r q)+, in which no digits are lost in q
    EMITTED   # pi
    TARGET    # p


cdef inline double cascade_weight(cascade_part part, double p, double q, bint deferred,
                                  double mass) noexcept nogil:
    cdef double weight = p
    if part == LEFT:
        weight = p * mass - (q if deferred else 0.0)
    elif part == EMITTED:
        weight = (0.0 if deferred else q) + p * mass
    return weight if weight > 0.0 and weight < INFINITY else 0.0


cdef problem draw_deferred(Block *block, View *target, View *draft, Workspace *space, double top, double mass,
                           int64_t *token) noexcept nogil:
    """A token in place of a deferred draft: from the first part that has mass."""
    cdef int64_t *ids = NULL
    cdef double *out
    cdef double u
    cdef Row row
    cdef Weights weights
    cdef double *sums
    cdef int part
    cdef Py_ssize_t i, count
    if target.mode != DENSE:
        count = target.support.count + draft.support.count
        ids = <int64_t *>malloc(count * sizeof(int64_t))
        out = <double *>malloc(count * sizeof(double))
        if ids is NULL or out is NULL:
            free(ids)
            free(out)
            return NO_ROOM
        for part in range(3):
            count = merge_deferred(<cascade_part>part, block, target, draft, top, mass, ids, out)
            if count:
                break
        u = next_uniform(&block.stream, CORRECTION_LANE)
        token[0] = ids[draw_place(out, count, u)]
        free(ids)
        free(out)
        return FINE
    sums = sums_room(space, target.n)
    out = dense_room(space, 1, target.n)  # the draft's own place where it has one: overwritten one by one
    if sums is NULL or out is NULL:
        return NO_ROOM
    part = dense_part(block, target, draft, top, mass)
    if part == LEFT:
        write_left(block, target, draft, top, mass, out)
    else:
        for i in range(target.n):
            out[i] = dense_weight(<cascade_part>part, block, target, draft, i, top, mass)
    row.data = <const char *>out
    row.n = target.n
    row.kind = F64
    row.patches = 0
    if not weigh(&weights, &row, NULL, False, sums):
        return WITHOUT_MASS
    token[0] = draw(&weights, next_uniform(&block.stream, CORRECTION_LANE))
    return FINE


cdef void write_left(Block *block, const View *target, const View *draft, double top, double mass,
                     double *out) noexcept nogil:
    """The part LEFT, without branches; in place of q allowed."""
    cdef const double *p = <const double *>target.row.data
    cdef const double *q = <const double *>draft.row.data
    cdef const double *compared = q if block.parameters.deferred == BY_DRAFT else p
    cdef double bound = deferral_bound(top, &block.parameters)
    cdef double given[CHUNK]
    cdef double taken[CHUNK]
    cdef double q_here
    cdef running ignored
    cdef Py_ssize_t start = 0, length, i
    memset(&ignored, 0, sizeof(ignored))
    while start < target.n:
        length = min(<Py_ssize_t>CHUNK, target.n - start)
        for i in range(length):
            q_here = q[start + i]
            given[i] = p[start + i] * mass
            taken[i] = q_here if compared[start + i] < bound else 0.0
        table.residual(given, taken, length, out + start, &ignored)
        start += length


cdef double dense_weight(cascade_part part, Block *block, const View *target, const View *draft, Py_ssize_t i,
                         double top, double mass) noexcept nogil:
    cdef double p = (<const double *>target.row.data)[i], q = (<const double *>draft.row.data)[i]
    return cascade_weight(part, p, q, defers(p, q, top, &block.parameters), mass)


cdef int dense_part(Block *block, const View *target, const View *draft, double top,
                    double mass) noexcept nogil:
    cdef Py_ssize_t i
    cdef int part
    for part in range(2):
        for i in range(target.n):
            if dense_weight(<cascade_part>part, block, target, draft, i, top, mass) > 0.0:
                return part
    return TARGET


cdef Py_ssize_t merge_deferred(cascade_part part, Block *block, const View *target, const View *draft,
                               double top, double mass, int64_t *ids, double *out) noexcept nogil:
    """The positive weights of a sparse pair, over both supports by ascending id; returns how many."""
    cdef const Support *one = &target.support
    cdef const Support *other = &draft.support
    cdef Py_ssize_t i = 0, j = 0, count = 0
    cdef int64_t token
    cdef double p, q
    while i < one.count or j < other.count:
        p = q = 0.0
        if j == other.count or (i < one.count and one.ids[i] <= other.ids[j]):
            token = one.ids[i]
        else:
            token = other.ids[j]
        if i < one.count and one.ids[i] == token:
            p = one.weights[i]
            i += 1
        if j < other.count and other.ids[j] == token:
            q = other.weights[j]
            j += 1
        out[count] = cascade_weight(part, p, q, defers(p, q, top, &block.parameters), mass)
        ids[count] = token
        count += out[count] > 0.0
    return count
