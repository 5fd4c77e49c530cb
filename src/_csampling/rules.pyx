"""The acceptance rules of a block: what is kept, and what comes in its place.

Design: each rule is one function over a `Block`, whose rows it opens as it reaches them; none needs the
GIL. Three kinds of decision are taken by sums in another order than the definition's, with a proof or again:

- *The exact rule from logits* compares u with a ratio r of two probabilities whose sums are rough
  (`selection.rough_error`). With relative errors s and t, the true ratio is within (s + t)(1 + 2^-20) of
  r, and where u is not outside of that band the exact sums are taken, which give softmax's own bits.
- *The block rule* compares u with h = R/(R + 1 - P), R = sum (P p - q)+ by ascending id. Of n terms >= 0
  that sum is within (n - 1) 2^-53 of the true one, relatively; the sum by blocks of 256 (16 lanes, folded,
  then block by block) within (n/256 + 20) 2^-53. h grows with R, by at most the same relative amount, and
  rounds three times on either side. Where u is within (1.0625 n + 64) 2^-53 of h, R is summed one by one.
- *Typical acceptance* compares p(x) with min(eps, delta exp(-H)). Both entropies are within 1e-12 of the
  true one, so exp(-H) is known to 2.1e-12. Where that does not decide, H is computed as it is defined. A
  row of logits needs its entropy only for p(x) between the least threshold, that of H = log n, and eps.

Of rows of logits nothing is written down: what is summed up is computed a CHUNK at a time.

The cascade's deferred mass is reported (as part of an accept probability), so it is always summed by
ascending id, one by one.
"""

cimport numpy as cnp
from cpython.ref cimport Py_INCREF
from libc.math cimport INFINITY, exp, isfinite, log
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from mtplx._csampling.acceptance cimport acceptance
from mtplx._csampling.arrays cimport F64, Row, doubles, element, logit, new_doubles
from mtplx._csampling.blocks cimport (
    BLOCK_RULE,
    BY_DRAFT,
    CASCADE,
    GREEDY,
    MATCH,
    TYPICAL,
    Block,
    Parameters,
    count_draft,
    deferral_bound,
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
from mtplx._csampling.draws cimport draw_place
from mtplx._csampling.laws cimport ENTROPY_ERROR, TINY_TOTAL, entropy_as_defined, entropy_of
from mtplx._csampling.mass cimport ROW_BAD, ROW_FINE, weigh_row
from mtplx._csampling.selection cimport weigh_one
from mtplx._csampling.softmax cimport largest_logit
from mtplx._csampling.streams cimport BONUS_LANE, CORRECTION_LANE, next_uniform
from mtplx._csampling.views cimport (
    ABOVE_DEFERRED,
    BAD_ID,
    BAD_LENGTH,
    BAD_ROW,
    DENSE,
    EMITTED,
    FINE,
    NO_ROOM,
    NOT_DRAWABLE,
    POINT,
    RAISED,
    SPARSE,
    STREAMED,
    WHOLE,
    WITHOUT_MASS,
    Correction,
    Failure,
    View,
    Workspace,
    ascend,
    correction_part,
    draw_correction,
    draw_token,
    is_support,
    largest_token,
    make_exact,
    open_correction,
    prepare_correction,
    probabilities_of,
    probability,
    problem,
    sequential_sum,
    sum_up,
    terms_of,
)

cdef double UNIT = 2.0 ** -53
cdef double ONE = 1.0


cdef problem run(Block *block, Workspace *space) noexcept nogil:
    if block.rule == GREEDY or block.rule == MATCH:
        return run_by_token(block, space)
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
        status = token_of(block, space, &target, BONUS_LANE, block.out + block.emitted)
    block.emitted += 1
    return status


cdef problem token_of(Block *block, Workspace *space, View *target, uint64_t lane,
                      int64_t *token) noexcept nogil:
    """A draw from a row of the target, or under GREEDY its most likely token."""
    if block.rule == GREEDY:
        return largest_token(target, token)
    return draw_token(target, space, &block.stream, lane, token)


cdef bint surely_zero(const View *view, int64_t token, double value) noexcept nogil:
    """Whether a probability is 0 by any sum."""
    return value == 0.0 and (view.mode != STREAMED or weigh_one(logit(&view.row, token), &view.scaled) == 0.0)


# ---- exact, match, greedy --------------------------------------------------------------------------


cdef problem run_exact(Block *block, Workspace *space) noexcept nogil:
    cdef View target, draft
    cdef Correction left
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
            if not surely_zero(&target, token, p):
                settle(&target, &draft, token, failure, &p, &q)
            band = 0.0
        status = require_drawable(block, token, p, q)
        if status != FINE:
            return status
        accept_probability = acceptance(p, q)
        ready = accept_probability == 0.0
        if ready:
            # Rejected whatever the coin shows: what can fail, fails before the coin.
            status = prepare_correction(&target, &draft, space, &left)
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
            status = prepare_correction(&target, &draft, space, &left)
            if status != FINE:
                return status
        block.out[i] = draw_correction(&left, next_uniform(&block.stream, CORRECTION_LANE))
        block.emitted = i + 1
        return FINE
    return emit_bonus(block, space)


cdef problem run_by_token(Block *block, Workspace *space) noexcept nogil:
    """Drafts are kept while each is the token that its row gives: drawn, or the most likely one."""
    cdef View target
    cdef problem status
    cdef Py_ssize_t i
    cdef int64_t token, wanted
    cdef double p
    for i in range(block.drafts):
        status = reach_target(block, space, i, &token, &target, &p)
        if status == FINE:
            status = token_of(block, space, &target, i, &wanted)
        if status != FINE:
            return status
        block.probabilities[i] = p if block.rule == MATCH else 1.0 if wanted == token else 0.0
        if not test_by_token(block, i, token, wanted):
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


cdef bint keeps_prefix(const Correction *left, double prefix, double u) noexcept nogil:
    """Whether ``u <= h and h > 0``, h that of the prefix with these rows behind it."""
    cdef double error, h, mass = left.total
    if not left.sparse and mass > 0.0:
        if left.p.n > BLOCK and mass < 1e300 and left.scale == 1.0:
            error = (1.0625 * left.p.n + 64.0) * UNIT
            h = keep_probability(mass, prefix)
            if u < h * (1.0 - error):
                return True
            if u > h * (1.0 + error):
                return False
            count_fallback(KEEP_TEST)
        mass = unscaled_mass(left[0])
    h = keep_probability(mass, prefix)
    return u <= h and h > 0.0


cdef double unscaled_mass(Correction left) noexcept nogil:
    left.scale = 1.0
    return sequential_sum(&left)


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
    cdef Correction left
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
            status = prepare_correction(&target, &draft, space, &left)
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
            status = require_same_length(&target, &draft, failure)
        if status == FINE:
            status = open_correction(&target, &draft, prefix, space, &left)
        if status != FINE:
            return status
        if not left.summed and not sum_up(&left):
            left.total = 0.0
        if length and not keeps_prefix(&left, prefix, u):
            continue
        block.accepted = length
        block.emitted = length + 1
        return draw_left_over(block, &left, block.out + length)
    return FINE  # not reached: the empty prefix is always kept


cdef problem draw_left_over(Block *block, Correction *left, int64_t *token) noexcept nogil:
    """A token from what is left over; from the target's own weights where that is nothing."""
    if left.total == 0.0 and not left.sparse:
        left.part = WHOLE
        if not sum_up(left):
            return WITHOUT_MASS
    left.summed = True
    token[0] = draw_correction(left, next_uniform(&block.stream, CORRECTION_LANE))
    return FINE


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
        if status == FINE:
            status = probability(&target, token, &block.failure, &p)
        if status == FINE:
            status = keeps_typically(&target, p, block, &kept)
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


cdef problem keeps_typically(View *target, double p, Block *block, bint *kept) noexcept nogil:
    cdef const Parameters *parameters = &block.parameters
    cdef double total = 1.0, entropy = 0.0, least
    cdef Row row
    cdef Py_ssize_t i
    cdef bint known = True
    if target.mode == STREAMED:
        if target.tolerance > 0.0 and p >= 1e-250:
            if p > parameters.eps * (1.0 + 2.0 * target.tolerance):
                kept[0] = True
                return FINE
            least = parameters.delta / target.n
            if p < (1.0 - 2.0 ** -30 - 2.0 * target.tolerance) * min(least, parameters.eps):
                kept[0] = False
                return FINE
        entropy = streamed_entropy(target)
        probability(target, block.failure.token, &block.failure, &p)
    elif target.mode != POINT:
        if target.mode == SPARSE:
            row.data = <const char *>target.support.weights
            row.n = target.support.count
            row.kind = F64
            row.patches = 0
            total = 0.0
            for i in range(row.n):
                total += target.support.weights[i]
        else:
            row = target.row
            if weigh_row(&row, &total) != ROW_FINE:
                return BAD_ROW
        known = isfinite(total) and total >= TINY_TOTAL
        if known:
            entropy = entropy_of(&row, total)
    if known:
        kept[0] = p > threshold_at(entropy - ENTROPY_ERROR, parameters) * (1.0 + 2.0 ** -50)
        if kept[0] == (p > threshold_at(entropy + ENTROPY_ERROR, parameters) * (1.0 - 2.0 ** -50)):
            return FINE
    count_fallback(TYPICAL_THRESHOLD)
    with gil:
        return keeps_as_defined(target, p, parameters, &block.failure, kept)


cdef double streamed_entropy(View *target) noexcept nogil:
    """log S - (sum e log e) / S of the exponentials, whose sum S becomes exact; all of it adds up."""
    cdef double buffer[CHUNK]
    cdef const double *terms
    cdef running total, sum
    cdef Py_ssize_t start = 0, length
    memset(&total, 0, sizeof(running))
    memset(&sum, 0, sizeof(running))
    while start < target.n:
        length = terms_of(target, start, buffer, &terms, &total)
        table.sum_p_log_p(terms, length, 1.0, &sum)
        start += length
    target.total = table.total(&total)
    target.tolerance = 0.0
    return log(target.total) - table.total(&sum) / target.total


cdef problem keeps_as_defined(const View *target, double p, const Parameters *parameters, Failure *failure,
                              bint *kept) noexcept:
    """By the entropy as it is defined: of a support where any id may be asked for, else of the whole row."""
    cdef double buffer[CHUNK]
    cdef const double *piece
    cdef cnp.ndarray weights
    cdef Py_ssize_t start = 0, length
    try:
        if target.mode == SPARSE and target.any_id:
            kept[0] = p > threshold_at(entropy_as_defined(target.support.weights, target.support.count),
                                       parameters)
            return FINE
        weights = new_doubles(target.n)
        while start < target.n:
            length = probabilities_of(target, start, buffer, &piece)
            memcpy(doubles(weights) + start, piece, length * sizeof(double))
            start += length
        kept[0] = p > threshold_at(entropy_as_defined(doubles(weights), target.n), parameters)
        return FINE
    except BaseException as error:
        Py_INCREF(error)
        failure.error = <void *>error
        return RAISED


# ---- cascade ---------------------------------------------------------------------------------------


cdef problem run_cascade(Block *block, Workspace *space) noexcept nogil:
    cdef View target, draft
    cdef Failure *failure = &block.failure
    cdef problem status
    cdef Py_ssize_t i
    cdef int64_t token
    cdef double p, q, top, bound, mass, accept_probability
    cdef bint deferred, by_draft = block.parameters.deferred == BY_DRAFT
    for i in range(block.drafts):
        status = reach_pair(block, space, i, &token, &target, &draft, &p, &q)
        if status != FINE:
            return status
        failure.of_draft = False
        status = largest_probability(&target, &top)
        if status != FINE:
            return status
        bound = deferral_bound(block.parameters.deferred, top, block.parameters.alpha)
        deferred = (q if by_draft else p) < bound
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
        status = deferred_mass(&target, &draft, space, bound, block, &mass)
        if status != FINE:
            return status
        accept_probability = acceptance(p * mass, q)
        block.probabilities[i] = accept_probability
        if next_uniform(&block.stream, i) <= accept_probability and accept_probability > 0.0:
            keep(block, i, token)
            continue
        block.emitted = i + 1
        return draw_deferred(block, &target, &draft, space, bound, mass, block.out + i)
    return emit_bonus(block, space)


cdef problem largest_probability(View *target, double *top) noexcept nogil:
    """max p of a row that is a distribution."""
    cdef Py_ssize_t i
    cdef double total
    if target.mode == STREAMED:
        top[0] = 1.0 / target.total
        return FINE
    top[0] = 0.0
    if target.mode == POINT:
        top[0] = 1.0
    elif target.mode == SPARSE:
        for i in range(target.support.count):
            top[0] = max(top[0], target.support.weights[i])
    elif weigh_row(&target.row, &total) != ROW_FINE:
        return BAD_ROW
    else:
        top[0] = largest_logit(&target.row)
    return FINE


cdef problem deferred_mass(View *target, View *draft, Workspace *space, double bound, Block *block,
                           double *mass) noexcept nogil:
    """sum r q, by ascending id; afterwards both supports ascend, where they are such."""
    cdef double p_buffer[CHUNK]
    cdef double q_buffer[CHUNK]
    cdef const double *p
    cdef const double *q
    cdef const double *compared
    cdef const Support *support
    cdef double total = 0.0
    cdef Py_ssize_t start = 0, length, i
    cdef bint by_draft = block.parameters.deferred == BY_DRAFT
    if not (ascend(target, space, 0) and ascend(draft, space, 1)):
        return NO_ROOM
    if is_support(target) and is_support(draft):
        support = &draft.support
        for i in range(support.count):
            if (support.weights[i] if by_draft else find(&target.support, True, support.ids[i])) < bound:
                total += support.weights[i]
        mass[0] = total
        return FINE
    if draft.mode == DENSE and weigh_row(&draft.row, &total) == ROW_BAD:
        for i in range(draft.n):
            total = element(&draft.row, i)
            if not (total >= 0.0 and total < INFINITY):
                block.failure.token = i
                block.failure.value = total
                return BAD_ROW
    total = 0.0
    while start < target.n:
        length = probabilities_of(target, start, p_buffer, &p)
        probabilities_of(draft, start, q_buffer, &q)
        compared = q if by_draft else p
        for i in range(length):
            # Without a branch: which tokens are deferred cannot be foretold.
            total += q[i] if compared[i] < bound else 0.0
        start += length
    mass[0] = total
    return FINE


cdef inline double cascade_weight(correction_part part, double p, double q, bint deferred,
                                  double mass) noexcept nogil:
    cdef double weight = p
    if part == ABOVE_DEFERRED:
        weight = p * mass - (q if deferred else 0.0)
    elif part == EMITTED:
        weight = (0.0 if deferred else q) + p * mass
    return weight if weight > 0.0 and weight < INFINITY else 0.0


cdef inline correction_part next_part(correction_part part) noexcept nogil:
    return EMITTED if part == ABOVE_DEFERRED else WHOLE


cdef problem draw_deferred(Block *block, View *target, View *draft, Workspace *space, double bound,
                           double mass, int64_t *token) noexcept nogil:
    """A token in place of a deferred draft, from the first part that has mass.

    These are (pi - q)+, in the form (p sum r q - r q)+ in which no digits are lost in q, then pi, then p.
    """
    cdef int64_t *ids = NULL
    cdef double *out
    cdef double u
    cdef Correction left
    cdef correction_part part = ABOVE_DEFERRED
    cdef Py_ssize_t count
    cdef bint by_draft = block.parameters.deferred == BY_DRAFT
    cdef problem status
    if is_support(target) and is_support(draft):
        count = target.support.count + draft.support.count
        ids = <int64_t *>malloc(count * sizeof(int64_t))
        out = <double *>malloc(count * sizeof(double))
        if ids is NULL or out is NULL:
            free(ids)
            free(out)
            return NO_ROOM
        count = merge_deferred(part, target, draft, bound, by_draft, mass, ids, out)
        while count == 0 and part != WHOLE:
            part = next_part(part)
            count = merge_deferred(part, target, draft, bound, by_draft, mass, ids, out)
        u = next_uniform(&block.stream, CORRECTION_LANE)
        token[0] = ids[draw_place(out, count, u)]
        free(ids)
        free(out)
        return FINE
    status = open_correction(target, draft, mass, space, &left)
    if status != FINE:
        return status
    left.bound = bound
    left.by_draft = by_draft
    left.part = part
    while not sum_up(&left):
        if left.part == WHOLE:
            return WITHOUT_MASS
        left.part = next_part(left.part)
    left.summed = True
    token[0] = draw_correction(&left, next_uniform(&block.stream, CORRECTION_LANE))
    return FINE


cdef Py_ssize_t merge_deferred(correction_part part, const View *target, const View *draft, double bound,
                               bint by_draft, double mass, int64_t *ids, double *out) noexcept nogil:
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
        out[count] = cascade_weight(part, p, q, (q if by_draft else p) < bound, mass)
        ids[count] = token
        count += out[count] > 0.0
    return count
