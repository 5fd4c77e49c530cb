/* Kernel bodies, compiled once per instruction set.
 *
 * The including .c file defines ISA (a bare word) and is built with that instruction set's flags.
 * Everything is static, so that the linker can never merge code of one instruction set into another.
 *
 * Every body works on SIXTEEN doubles (or 32 floats) at a time, held in as many vectors as that
 * takes. What is left at the end of a row is padded to a full group on the stack, so there is no
 * scalar tail that could round differently.
 */
#include "exp.h"
#include "kernels.h"
#include "simd.h"

#include <float.h>
#include <math.h>

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#define STR_(a) #a
#define STR(a) STR_(a)

enum {
    SIXTEEN = 16,
    SPAN = 4 * SIXTEEN, /* what a running sum takes at a time */
    GROUP = SIXTEEN / F64_LANES, /* vectors in a group of 16 doubles, and in one of 32 floats */
    /* Vectors that hold SIDE_BY_SIDE lanes. */
    SIDE_F64 = SIDE_BY_SIDE / F64_LANES,
    SIDE_F32 = SIDE_BY_SIDE > F32_LANES ? SIDE_BY_SIDE / F32_LANES : 1
};
#define IN_GROUP UNROLLED for (int j = 0; j < GROUP; ++j)

/* ---- sums ------------------------------------------------------------------------------------ */

/* Sum of 16 lanes, halves onto halves: the order does not depend on the width of a vector. */
INLINE double fold(f64v *acc)
{
    UNROLLED for (int half = GROUP / 2; half >= 1; half /= 2)
        UNROLLED for (int j = 0; j < half; ++j) acc[j] += acc[j + half];
    double lane[F64_LANES];
    store_f64(lane, acc[0]);
    UNROLLED for (int half = F64_LANES / 2; half >= 1; half /= 2)
        UNROLLED for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
    return lane[0];
}

/* acc += the lanes, exactly (Knuth): what rounding takes is kept apart. */
INLINE void add_lanes(f64v *sum, f64v *lost, const f64v *acc)
{
    IN_GROUP
    {
        const f64v t = sum[j] + acc[j];
        const f64v part = t - sum[j];
        lost[j] += (sum[j] - (t - part)) + (acc[j] - part);
        sum[j] = t;
    }
}

INLINE void load_running(const running *total, f64v *sum, f64v *lost)
{
    IN_GROUP sum[j] = load_f64(total->sum + j * F64_LANES);
    IN_GROUP lost[j] = load_f64(total->lost + j * F64_LANES);
}

INLINE void store_running(running *total, const f64v *sum, const f64v *lost)
{
    IN_GROUP store_f64(total->sum + j * F64_LANES, sum[j]);
    IN_GROUP store_f64(total->lost + j * F64_LANES, lost[j]);
}

static double total(const running *sum)
{
    double value = 0.0, lost = 0.0;
    for (int lane = 0; lane < LANES; ++lane) {
        const double t = value + sum->sum[lane];
        const double part = t - value;
        lost += (value - (t - part)) + (sum->sum[lane] - part) + sum->lost[lane];
        value = t;
    }
    /* Where the sum overflowed, what was lost is NaN. */
    return value <= DBL_MAX ? value + lost : value;
}

/* The last, incomplete group of 16 doubles of a row, padded. */
#define PADDED_F64(name, x, i, n, pad)                        \
    double name[SIXTEEN];                                     \
    for (int lane = 0; lane < SIXTEEN; ++lane) name[lane] = (pad); \
    memcpy(name, (x) + (i), ((n) - (i)) * sizeof(double))

/* ---- conversion ------------------------------------------------------------------------------ */

#define WIDEN_16(NAME)                                                          \
    static void widen_##NAME(const uint16_t *x, float *out, size_t n)           \
    {                                                                           \
        size_t i = 0;                                                           \
        for (; i + F32_LANES <= n; i += F32_LANES)                              \
            store_f32(out + i, load_##NAME##_as_f32(x + i));                    \
        if (i < n) {                                                            \
            uint16_t rest[F32_LANES] = {0};                                     \
            float wide[F32_LANES];                                              \
            memcpy(rest, x + i, (n - i) * sizeof *x);                           \
            store_f32(wide, load_##NAME##_as_f32(rest));                        \
            memcpy(out + i, wide, (n - i) * sizeof *out);                       \
        }                                                                       \
    }
WIDEN_16(f16)
WIDEN_16(bf16)

static void widen_f32(const float *x, double *out, size_t n)
{
    for (size_t i = 0; i < n; ++i)
        out[i] = x[i];
}

/* ---- logits: maxima -------------------------------------------------------------------------- */

#define LARGEST(NAME, TYPE, VECTOR, MASK, STEP, LOAD, ALL, LARGER, EITHER_NAN, BITS)           \
    static double NAME(const TYPE *x, size_t n)                                               \
    {                                                                                         \
        VECTOR top[GROUP], v[GROUP];                                                          \
        MASK nan = {0};                                                                       \
        size_t i = 0;                                                                         \
        IN_GROUP top[j] = ALL(-INFINITY);                                                     \
        for (; i + (STEP)*GROUP <= n; i += (STEP)*GROUP) {                                    \
            IN_GROUP v[j] = LOAD(x + i + j * (STEP));                                         \
            UNROLLED for (int j = 0; j < GROUP; j += 2) nan |= EITHER_NAN(v[j], v[j + 1]);    \
            IN_GROUP top[j] = LARGER(v[j], top[j]);                                           \
        }                                                                                     \
        TYPE best = -INFINITY;                                                                \
        int rest_nan = 0;                                                                     \
        IN_GROUP for (int lane = 0; lane < (STEP); ++lane)                                    \
            best = top[j][lane] > best ? top[j][lane] : best;                                 \
        for (; i < n; ++i) {                                                                  \
            rest_nan |= x[i] != x[i];                                                         \
            best = x[i] > best ? x[i] : best;                                                 \
        }                                                                                     \
        return rest_nan || BITS(nan) ? (double)NAN : (double)best;                            \
    }
LARGEST(max_f32, float, f32v, i32v, F32_LANES, load_f32, all_f32, larger_f32, either_nan_f32, bits_f32)
LARGEST(max_f64, double, f64v, i64v, F64_LANES, load_f64, all_f64, larger_f64, either_nan_f64, bits_f64)

/* ---- logits: exponentials -------------------------------------------------------------------- */

/* x/T correctly rounded by Markstein's correction of x * (1/T), at half the cost of a division. It
 * makes NaN of what overflows; then, and where there is no fused multiply-add, divide. */
INLINE f64v quotient(f64v x, f64v divisor, f64v reciprocal)
{
#if HAS_FMA
    const f64v q = x * reciprocal;
    return fma_f64(fnma_f64(q, divisor, x), reciprocal, q);
#else
    (void)reciprocal;
    return x / divisor;
#endif
}

/* Divisors whose reciprocal is a normal number, with room for the remainder of the correction. */
INLINE int has_reciprocal(double divisor)
{
    return divisor > 0x1p-960 && divisor < 0x1p960;
}

INLINE f64v scale(f64v x, const scaling *s, int rule)
{
    if (rule == SCALE_NONE)
        return x - all_f64(s->top);
    if (rule == SCALE_RECIPROCAL)
        return quotient(x, all_f64(s->temperature), all_f64(s->reciprocal)) - all_f64(s->top);
    if (rule == SCALE_DIVIDE)
        return x / all_f64(s->temperature) - all_f64(s->top);
    return (x - all_f64(s->top)) / all_f64(s->temperature);
}

static double scaled(double x, const scaling *s)
{
    scaling bare = *s;
    bare.top = 0.0;
    const f64v z = scale(all_f64(x), &bare, s->rule);
    return z[0] == z[0] ? z[0] : x / s->temperature;
}

INLINE f64v load_logits(const void *x, size_t i, int single)
{
    return single ? load_f32_as_f64((const float *)x + i) : load_f64((const double *)x + i);
}

/* exp of `count` logits at x + i, a multiple of SIXTEEN, whatever they are; see exp_span. */
INLINE void exp_any_span(const void *x, size_t i, size_t count, int single, const scaling *s, int rule, int store,
                         double *out, f64v *acc)
{
    for (size_t at = 0; at < count; at += SIXTEEN)
        UNROLLED for (int first = 0; first < GROUP; first += LOCKSTEP) {
            const size_t place = at + first * F64_LANES;
            f64v logit[LOCKSTEP], z[LOCKSTEP];
            IN_LOCKSTEP logit[j] = load_logits(x, i + place + j * F64_LANES, single);
            IN_LOCKSTEP z[j] = scale(logit[j], s, rule);
            if (rule == SCALE_RECIPROCAL) {
                const f64v lowest = all_f64(-INFINITY);
                i64v fine = ~(i64v){0};
                IN_LOCKSTEP fine &= (z[j] == z[j]) | (logit[j] == lowest);
                if (all_set_f64(fine))
                    IN_LOCKSTEP z[j] = select_f64(z[j] == z[j], z[j], lowest);
                else
                    IN_LOCKSTEP z[j] = select_f64(z[j] == z[j], z[j], scale(logit[j], s, SCALE_DIVIDE));
            }
            /* Masked logits stand side by side; NaN compares as false. */
            i64v nothing = ~(i64v){0};
            IN_LOCKSTEP nothing &= z[j] <= all_f64(-746.0); /* exp(-746) rounds to 0 */
            if (all_set_f64(nothing)) {
                if (store)
                    IN_LOCKSTEP store_f64(out + place + j * F64_LANES, all_f64(0.0));
                continue;
            }
            exp_any_f64(z);
            if (store)
                IN_LOCKSTEP store_f64(out + place + j * F64_LANES, z[j]);
            IN_LOCKSTEP acc[first + j] += z[j];
        }
}

/* exp of `SPAN` logits at x + i; the results go to out, if they are to be stored, and group by group onto acc.
 *
 * Two passes over a buffer in the L1 cache: from the logit to the exp of a quotient it is a chain of twenty
 * operations, and no scheduler holds enough groups of them to fill the multipliers; half the chain, it does. */
INLINE void exp_span(const void *x, size_t i, int single, const scaling *s, int rule, int store, double *out,
                     f64v *acc)
{
    double r[SPAN], t[SPAN];
    i64v normal = ~(i64v){0};
    for (size_t at = 0; at < SPAN; at += SIXTEEN)
        IN_GROUP
        {
            const size_t place = at + j * F64_LANES;
            const f64v z = scale(load_logits(x, i + place, single), s, rule);
            f64v shifted;
            normal &= z >= all_f64(EXP_NORMAL_F64);
            store_f64(r + place, exp_reduce_f64(z, &shifted));
            store_f64(t + place, shifted);
        }
    if (UNLIKELY(!all_set_f64(normal))) {
        exp_any_span(x, i, SPAN, single, s, rule, store, out, acc);
        return;
    }
    for (size_t at = 0; at < SPAN; at += SIXTEEN)
        IN_GROUP
        {
            const size_t place = at + j * F64_LANES;
            const f64v y = exp_reduced_f64(load_f64(r + place), load_f64(t + place), 0);
            if (store)
                store_f64(out + place, y);
            acc[j] += y;
        }
}

INLINE void exp_row(const void *x, size_t n, int single, const scaling *given, int rule, int store, double *out,
                    running *total)
{
    const scaling own = *given, *const s = &own; /* out may not change it */
    f64v sum[GROUP], lost[GROUP], acc[GROUP];
    size_t i = 0;
    load_running(total, sum, lost);
    for (; i + SPAN <= n; i += SPAN) {
        IN_GROUP acc[j] = all_f64(0.0);
        exp_span(x, i, single, s, rule, store, store ? out + i : NULL, acc);
        add_lanes(sum, lost, acc);
    }
    if (i < n) {
        const size_t groups = (n - i + SIXTEEN - 1) / SIXTEEN * SIXTEEN;
        double wide[SPAN], results[SPAN];
        float narrow[SPAN];
        for (size_t lane = 0; lane < groups; ++lane)
            if (single)
                narrow[lane] = i + lane < n ? ((const float *)x)[i + lane] : -INFINITY;
            else
                wide[lane] = i + lane < n ? ((const double *)x)[i + lane] : -INFINITY;
        IN_GROUP acc[j] = all_f64(0.0);
        exp_any_span(single ? (const void *)narrow : (const void *)wide, 0, groups, single, s, rule, 1,
                     results, acc);
        if (store)
            memcpy(out + i, results, (n - i) * sizeof(double));
        add_lanes(sum, lost, acc);
    }
    store_running(total, sum, lost);
}

/* The common rules with their constants known to the compiler; the rare ones share one loop. */
#define EXP_BY_RULE(x, n, single, s, store, out, total)                                                         \
    do {                                                                                                        \
        if ((s)->rule == SCALE_NONE)                                                                            \
            exp_row(x, n, single, s, SCALE_NONE, store, out, total);                                            \
        else if (HAS_FMA && (s)->rule == SCALE_RECIPROCAL)                                                      \
            exp_row(x, n, single, s, SCALE_RECIPROCAL, store, out, total);                                      \
        else                                                                                                    \
            exp_row(x, n, single, s, (s)->rule == SCALE_SHIFT ? SCALE_SHIFT : SCALE_DIVIDE, store, out, total); \
    } while (0)

static void exp_f32(const float *x, size_t n, const scaling *s, double *out, running *total)
{
    EXP_BY_RULE(x, n, 1, s, 1, out, total);
}

static void exp_f64(const double *x, size_t n, const scaling *s, double *out, running *total)
{
    EXP_BY_RULE(x, n, 0, s, 1, out, total);
}

static void exp_sum_f32(const float *x, size_t n, const scaling *s, running *total)
{
    EXP_BY_RULE(x, n, 1, s, 0, NULL, total);
}

static void exp_sum_f64(const double *x, size_t n, const scaling *s, running *total)
{
    EXP_BY_RULE(x, n, 0, s, 0, NULL, total);
}

/* ---- logits: float32 result ------------------------------------------------------------------ */

/* 2^(x c - base) of 32 floats, c = log2(e)/T as a pair of floats, base a whole number near the largest x c.
 *
 * Which base is taken does not matter to a softmax, and a whole one costs nothing: shift = 1.5 * 2^23 - base makes
 * t = x c + shift the rounded exponent, and shift - t, which is exact, takes x c to f in about [-1/2, 1/2] in a
 * single fused multiply-add, rounded once, at the size of f. */
INLINE void exp_narrow_group(const float *x, float c, float c_low, float shift, float *out, f64v *acc)
{
    UNROLLED for (int first = 0; first < GROUP; first += LOCKSTEP) {
        f32v v[LOCKSTEP], t[LOCKSTEP], f[LOCKSTEP], y[LOCKSTEP];
        i32v normal = ~(i32v){0};
        IN_LOCKSTEP v[j] = load_f32(x + (first + j) * F32_LANES);
        IN_LOCKSTEP t[j] = fma_f32(v[j], all_f32(c), all_f32(shift));
        IN_LOCKSTEP normal &= t[j] >= all_f32(0x1.8p23f - 125.0f);
        const int plain = all_set_f32(normal);
        if (UNLIKELY(!plain))
            IN_LOCKSTEP
            {
                /* Below 2^-150 all is 0. */
                v[j] = at_least_f32((0x1.8p23f - shift - 152.0f) / c, v[j]);
                t[j] = fma_f32(v[j], all_f32(c), all_f32(shift));
            }
        IN_LOCKSTEP f[j] = fma_f32(v[j], all_f32(c), all_f32(shift) - t[j]);
        IN_LOCKSTEP f[j] = fma_f32(v[j], all_f32(c_low), f[j]);
        IN_LOCKSTEP y[j] = fma_f32(all_f32(EXP2_LONG[6]), f[j], all_f32(EXP2_LONG[5]));
        UNROLLED for (int k = 4; k >= 0; --k)
            IN_LOCKSTEP y[j] = fma_f32(y[j], f[j], all_f32(EXP2_LONG[k]));
        if (UNLIKELY(!plain)) {
            IN_LOCKSTEP
            {
                /* No arithmetic makes a subnormal number: see exp_any_f64. */
                const f32v raised = (f32v)((i32v)y[j] + (i32v)(((u32v)t[j] + 64) << 23));
                const f32v usual = (f32v)((i32v)raised - (64 << 23));
                const f32v small = (f32v)((i32v)(raised + all_f32(0x1p-62f)) - (i32v)all_f32(0x1p-62f));
                y[j] = select_f32(raised >= all_f32(0x1p-62f), usual, small);
                y[j] = select_f32(v[j] == v[j], y[j], v[j]);
            }
        } else {
            IN_LOCKSTEP y[j] = (f32v)((i32v)y[j] + (i32v)((u32v)t[j] << 23));
        }
        IN_LOCKSTEP store_f32(out + (first + j) * F32_LANES, y[j]);
    }
    UNROLLED for (int half = 0; half < 2; ++half)
        IN_GROUP acc[j] += load_f32_as_f64(out + half * SIXTEEN + j * F64_LANES);
}

static void exp_narrow(const float *x, size_t n, const scaling *s, float *out, running *total)
{
    const double per_unit = LOG2_E / s->temperature;
    const double base = (s->largest * per_unit + 0x1.8p52) - 0x1.8p52;
    const float c = (float)per_unit, c_low = (float)(per_unit - (double)c), shift = (float)(0x1.8p23 - base);
    f64v sum[GROUP], lost[GROUP], acc[GROUP];
    size_t i = 0;
    load_running(total, sum, lost);
    while (i < n) {
        const size_t end = n - i > SPAN ? i + SPAN : n;
        IN_GROUP acc[j] = all_f64(0.0);
        for (; i + 2 * SIXTEEN <= end; i += 2 * SIXTEEN)
            exp_narrow_group(x + i, c, c_low, shift, out + i, acc);
        if (i < end) {
            float padded[2 * SIXTEEN], results[2 * SIXTEEN];
            for (int lane = 0; lane < 2 * SIXTEEN; ++lane) padded[lane] = -INFINITY;
            memcpy(padded, x + i, (end - i) * sizeof *x);
            exp_narrow_group(padded, c, c_low, shift, results, acc);
            memcpy(out + i, results, (end - i) * sizeof *out);
            i = end;
        }
        add_lanes(sum, lost, acc);
    }
    store_running(total, sum, lost);
}

/* ---- logits: block maxima, and the rough sum ------------------------------------------------- */

/* Maxima of one CHUNK (or what is left of a row) by place modulo SIDE_BY_SIDE; nonzero at a NaN. */
INLINE int chunk_maxima_f32(const float *x, size_t n, double *maxima)
{
    f32v top[GROUP];
    i32v nan = {0};
    size_t i = 0;
    IN_GROUP top[j] = all_f32(-INFINITY);
    for (; i < n; i += 2 * SIXTEEN) {
        float padded[2 * SIXTEEN];
        const float *from = x + i;
        if (UNLIKELY(n - i < 2 * SIXTEEN)) {
            for (int lane = 0; lane < 2 * SIXTEEN; ++lane) padded[lane] = -INFINITY;
            memcpy(padded, from, (n - i) * sizeof *x);
            from = padded;
        }
        f32v v[GROUP];
        IN_GROUP v[j] = load_f32(from + j * F32_LANES);
        UNROLLED for (int j = 0; j < GROUP; j += 2) nan |= either_nan_f32(v[j], v[j + 1]);
        IN_GROUP top[j] = larger_f32(v[j], top[j]);
    }
    float lane[2 * SIXTEEN];
    UNROLLED for (int half = GROUP / 2; half >= SIDE_F32; half /= 2)
        UNROLLED for (int j = 0; j < half; ++j) top[j] = larger_f32(top[j], top[j + half]);
    store_f32(lane, top[0]);
    if (F32_LANES < SIDE_BY_SIDE)
        store_f32(lane + F32_LANES, top[1]);
    for (int j = 0; j < SIDE_BY_SIDE; ++j) {
        float best = lane[j];
        if (F32_LANES > SIDE_BY_SIDE)
            best = lane[j + SIDE_BY_SIDE] > best ? lane[j + SIDE_BY_SIDE] : best;
        maxima[j] = best;
    }
    return bits_f32(nan) != 0;
}

/* The same for doubles; with `checked`, nonzero at a negative element too. */
INLINE int chunk_maxima_f64(const double *x, size_t n, double *maxima, int checked)
{
    f64v top[GROUP];
    i64v bad = {0}, fine = ~(i64v){0};
    size_t i = 0;
    IN_GROUP top[j] = all_f64(-INFINITY);
    for (; i < n; i += SIXTEEN) {
        double padded[SIXTEEN];
        const double *from = x + i;
        if (UNLIKELY(n - i < SIXTEEN)) {
            for (int lane = 0; lane < SIXTEEN; ++lane) padded[lane] = checked ? 0.0 : -INFINITY;
            memcpy(padded, from, (n - i) * sizeof *x);
            from = padded;
        }
        f64v v[GROUP];
        IN_GROUP v[j] = load_f64(from + j * F64_LANES);
        if (checked)
            IN_GROUP fine &= v[j] >= all_f64(0.0);
        else
            UNROLLED for (int j = 0; j < GROUP; j += 2) bad |= either_nan_f64(v[j], v[j + 1]);
        IN_GROUP top[j] = larger_f64(v[j], top[j]);
    }
    UNROLLED for (int half = GROUP / 2; half >= SIDE_F64; half /= 2)
        UNROLLED for (int j = 0; j < half; ++j) top[j] = larger_f64(top[j], top[j + half]);
    UNROLLED for (int j = 0; j < SIDE_F64; ++j) store_f64(maxima + j * F64_LANES, top[j]);
    return checked ? bits_f64(~fine) != 0 : bits_f64(bad) != 0;
}

static int block_maxima_f32(const float *x, size_t n, double *maxima)
{
    int nan = 0;
    for (size_t i = 0; i < n; i += CHUNK, maxima += SIDE_BY_SIDE)
        nan |= chunk_maxima_f32(x + i, n - i < CHUNK ? n - i : CHUNK, maxima);
    return nan;
}

static int block_maxima_f64(const double *x, size_t n, double *maxima)
{
    int nan = 0;
    for (size_t i = 0; i < n; i += CHUNK, maxima += SIDE_BY_SIDE)
        nan |= chunk_maxima_f64(x + i, n - i < CHUNK ? n - i : CHUNK, maxima, 0);
    return nan;
}

static int block_maxima_checked(const double *p, size_t n, double *maxima)
{
    int bad = 0;
    for (size_t i = 0; i < n; i += CHUNK, maxima += SIDE_BY_SIDE)
        bad |= chunk_maxima_f64(p + i, n - i < CHUNK ? n - i : CHUNK, maxima, 1);
    return bad;
}

/* Raises run->top to the largest of the maxima and brings the sum to it. */
INLINE void raise_top(const double *maxima, double per_unit, streamed *run)
{
    double best = run->top;
    for (int j = 0; j < SIDE_BY_SIDE; ++j)
        best = maxima[j] > best ? maxima[j] : best;
    if (best > run->top) {
        if (run->sum > 0.0) {
            f64v shift[LOCKSTEP];
            IN_LOCKSTEP shift[j] = all_f64((run->top - best) * (per_unit / LOG2_E));
            exp_any_f64(shift);
            run->sum *= shift[0][0];
        }
        run->top = best;
    }
}

INLINE double rough_sum(f32v *acc)
{
    float lane[2 * SIXTEEN];
    f64v wide[GROUP];
    IN_GROUP store_f32(lane + j * F32_LANES, acc[j]);
    IN_GROUP wide[j] = load_f32_as_f64(lane + j * F64_LANES) + load_f32_as_f64(lane + SIXTEEN + j * F64_LANES);
    return fold(wide);
}

/* Adds 2^(d * per_unit) of the group's 32 differences to acc. Below 2^-126 they count as 2^-126. */
INLINE void rough_exp_group(f32v *d, f32v per_unit, f32v *acc)
{
    UNROLLED for (int first = 0; first < GROUP; first += LOCKSTEP) {
        IN_LOCKSTEP d[first + j] = at_least_f32(-126.0f, d[first + j] * per_unit);
        exp2_rough_f32(d + first);
        IN_LOCKSTEP acc[first + j] += d[first + j];
    }
}

static int block_maxima_sum_f32(const float *x, size_t n, double per_unit, double *maxima, streamed *run)
{
    int nan = 0;
    for (size_t start = 0; start < n; start += CHUNK, maxima += SIDE_BY_SIDE) {
        const size_t length = n - start < CHUNK ? n - start : CHUNK;
        const float *chunk = x + start;
        nan |= chunk_maxima_f32(chunk, length, maxima);
        raise_top(maxima, per_unit, run);
        /* With nothing above -inf so far, -inf - (-inf) would be NaN. */
        const float top = (float)(run->top > -FLT_MAX ? run->top : -FLT_MAX);
        f32v acc[GROUP], d[GROUP];
        size_t i = 0;
        IN_GROUP acc[j] = all_f32(0.0f);
        for (; i + 2 * SIXTEEN <= length; i += 2 * SIXTEEN) {
            IN_GROUP d[j] = load_f32(chunk + i + j * F32_LANES) - all_f32(top);
            rough_exp_group(d, all_f32((float)per_unit), acc);
        }
        if (i < length) {
            float padded[2 * SIXTEEN];
            for (int lane = 0; lane < 2 * SIXTEEN; ++lane) padded[lane] = -INFINITY;
            memcpy(padded, chunk + i, (length - i) * sizeof *x);
            IN_GROUP d[j] = load_f32(padded + j * F32_LANES) - all_f32(top);
            rough_exp_group(d, all_f32((float)per_unit), acc);
        }
        double sum = rough_sum(acc);
        if (UNLIKELY((double)top != run->top && run->top > -FLT_MAX)) {
            /* The largest so far came from a piece of doubles (a penalised logit) and is no float. */
            f64v shift[LOCKSTEP];
            IN_LOCKSTEP shift[j] = all_f64(((double)top - run->top) * (per_unit / LOG2_E));
            exp_any_f64(shift);
            sum *= shift[0][0];
        }
        run->sum += sum;
    }
    return nan;
}

static int block_maxima_sum_f64(const double *x, size_t n, double per_unit, double *maxima, streamed *run)
{
    int nan = 0;
    for (size_t start = 0; start < n; start += CHUNK, maxima += SIDE_BY_SIDE) {
        const size_t length = n - start < CHUNK ? n - start : CHUNK;
        const double *chunk = x + start;
        nan |= chunk_maxima_f64(chunk, length, maxima, 0);
        raise_top(maxima, per_unit, run);
        const double top = run->top > -DBL_MAX ? run->top : -DBL_MAX;
        f32v acc[GROUP], d[GROUP];
        IN_GROUP acc[j] = all_f32(0.0f);
        for (size_t i = 0; i < length; i += 2 * SIXTEEN) {
            double padded[2 * SIXTEEN];
            const double *from = chunk + i;
            if (UNLIKELY(length - i < 2 * SIXTEEN)) {
                for (int lane = 0; lane < 2 * SIXTEEN; ++lane) padded[lane] = -INFINITY;
                memcpy(padded, from, (length - i) * sizeof *x);
                from = padded;
            }
            IN_GROUP d[j] = narrow_f64(load_f64(from + 2 * j * F64_LANES) - all_f64(top),
                                       load_f64(from + (2 * j + 1) * F64_LANES) - all_f64(top));
            rough_exp_group(d, all_f32((float)per_unit), acc);
        }
        run->sum += rough_sum(acc);
    }
    return nan;
}

/* One by one. Far above the subnormal numbers, so that none arises where they are scaled. */
INLINE void rough_terms(f32v *d, float per_unit, float *out)
{
    UNROLLED for (int first = 0; first < GROUP; first += LOCKSTEP) {
        IN_LOCKSTEP d[first + j] = at_least_f32(-100.0f, d[first + j] * all_f32(per_unit));
        exp2_rough_f32(d + first);
        IN_LOCKSTEP store_f32(out + (first + j) * F32_LANES, d[first + j]);
    }
}

#define ROUGH_EXP(NAME, TYPE, DIFFERENCES)                                                            \
    static void NAME(const TYPE *x, size_t n, float top, double per_unit, float *out)                 \
    {                                                                                                 \
        f32v d[GROUP];                                                                                \
        size_t i = 0;                                                                                 \
        for (; i + 2 * SIXTEEN <= n; i += 2 * SIXTEEN) {                                              \
            const TYPE *from = x + i;                                                                 \
            IN_GROUP d[j] = DIFFERENCES;                                                              \
            rough_terms(d, (float)per_unit, out + i);                                                 \
        }                                                                                             \
        if (i < n) {                                                                                  \
            TYPE from[2 * SIXTEEN];                                                                   \
            float rest[2 * SIXTEEN];                                                                  \
            for (int lane = 0; lane < 2 * SIXTEEN; ++lane) from[lane] = -INFINITY;                    \
            memcpy(from, x + i, (n - i) * sizeof *x);                                                 \
            IN_GROUP d[j] = DIFFERENCES;                                                              \
            rough_terms(d, (float)per_unit, rest);                                                    \
            memcpy(out + i, rest, (n - i) * sizeof *out);                                             \
        }                                                                                             \
    }
ROUGH_EXP(rough_exp_f32, float, load_f32(from + j * F32_LANES) - all_f32(top))
ROUGH_EXP(rough_exp_f64, double,
          narrow_f64(load_f64(from + 2 * j * F64_LANES) - all_f64(top),
                     load_f64(from + (2 * j + 1) * F64_LANES) - all_f64(top)))

/* ---- logits: collection ---------------------------------------------------------------------- */

#define COLLECT(NAME, TYPE, MASK, STEP, LOAD, ALL, BITS)                                                \
    INLINE size_t NAME(const TYPE *x, size_t n, TYPE bound, int64_t base, int64_t *ids, double *values) \
    {                                                                                                   \
        size_t count = 0, i = 0;                                                                        \
        for (; i + (STEP)*GROUP <= n; i += (STEP)*GROUP) {                                              \
            MASK above[GROUP], any = {0};                                                               \
            IN_GROUP above[j] = LOAD(x + i + j * (STEP)) >= ALL(bound);                                 \
            IN_GROUP any |= above[j];                                                                   \
            if (BITS(any))                                                                              \
                IN_GROUP for (unsigned hits = BITS(above[j]); hits; hits &= hits - 1) {                 \
                    const size_t place = i + (size_t)(j * (STEP)) + (size_t)__builtin_ctz(hits);        \
                    ids[count] = base + (int64_t)place;                                                 \
                    values[count++] = x[place];                                                         \
                }                                                                                       \
        }                                                                                               \
        for (; i < n; ++i)                                                                              \
            if (x[i] >= bound) {                                                                        \
                ids[count] = base + (int64_t)i;                                                         \
                values[count++] = x[i];                                                                 \
            }                                                                                           \
        return count;                                                                                   \
    }
COLLECT(collect_floats, float, i32v, F32_LANES, load_f32, all_f32, bits_f32)
COLLECT(collect_doubles, double, i64v, F64_LANES, load_f64, all_f64, bits_f64)

static size_t collect_f32(const float *x, size_t n, double threshold, int64_t base, int64_t *ids, double *values)
{
    /* The smallest float that is not below the threshold: then comparing floats is comparing doubles. */
    float bound = (float)threshold;
    if ((double)bound < threshold)
        bound = nextafterf(bound, INFINITY);
    return collect_floats(x, n, bound, base, ids, values);
}

static size_t collect_f64(const double *x, size_t n, double threshold, int64_t base, int64_t *ids, double *values)
{
    return collect_doubles(x, n, threshold, base, ids, values);
}

/* ---- probabilities: element by element ------------------------------------------------------- */

/* A loop over groups of 16 whose last one is padded: EACH sees `i`, `from` and the vectors' places. */
#define MAP_F64(n, EACH)                                                  \
    do {                                                                  \
        size_t i = 0;                                                     \
        for (; i + F64_LANES <= (n); i += F64_LANES)                      \
            store_f64(out + i, EACH(load_f64));                           \
        if (i < (n)) {                                                    \
            double result[F64_LANES];                                     \
            store_f64(result, EACH(load_rest));                           \
            memcpy(out + i, result, ((n) - i) * sizeof(double));          \
        }                                                                 \
    } while (0)

/* The last, incomplete vector of a row, zeros behind it. */
INLINE f64v load_part(const double *x, size_t count)
{
    double padded[F64_LANES] = {0};
    memcpy(padded, x, count * sizeof *x);
    return load_f64(padded);
}

/* Quotients that may be subnormal, or are of subnormal numbers, by a divisor in [1, 2^60] or so: scaled up
 * by integer operations, divided, rounded by an addition (see exp_any_f64). Arithmetic on subnormal
 * numbers would cost a microcode assist. Where the result is normal it has the bits of `quotient`. */
INLINE f64v tiny_quotient(f64v x, f64v divisor, f64v reciprocal)
{
    const i64v subnormal = x < all_f64(0x1p-1022);
    /* The bit pattern of a subnormal number counts multiples of 2^-1074. */
    const f64v count = (f64v)((u64v)x | 0x4330000000000000ull) - all_f64(0x1p52);
    const f64v raised = (f64v)((i64v)x + ((int64_t)128 << 52));
    const f64v q = quotient(select_f64(subnormal, count, raised), divisor, reciprocal);
    const f64v counted = (f64v)((i64v)(q + all_f64(0x1p52)) - (i64v)all_f64(0x1p52));
    const f64v lowered = (f64v)((i64v)q - ((int64_t)128 << 52));
    const f64v small = (f64v)((i64v)(q + all_f64(0x1p-894)) - (i64v)all_f64(0x1p-894));
    return select_f64(subnormal, counted, select_f64(q >= all_f64(0x1p-894), lowered, small));
}

INLINE void divide_group(const double *x, f64v divisor, f64v reciprocal, int at_least_one, double *out)
{
    const f64v lowest = all_f64(0x1p-960), zero = all_f64(0.0);
    f64v v[GROUP];
    i64v tiny = {0};
    IN_GROUP v[j] = load_f64(x + j * F64_LANES);
    IN_GROUP tiny |= (v[j] < lowest) & (v[j] > zero);
    if (!bits_f64(tiny))
        IN_GROUP v[j] = quotient(v[j], divisor, reciprocal);
    else if (at_least_one)
        IN_GROUP
        {
            const i64v small = (v[j] < lowest) & (v[j] > zero);
            const f64v large = (f64v)((i64v)v[j] & (v[j] >= lowest));
            v[j] = select_f64(small, tiny_quotient(v[j], divisor, reciprocal), quotient(large, divisor, reciprocal));
        }
    else
        IN_GROUP v[j] /= divisor;
    IN_GROUP store_f64(out + j * F64_LANES, v[j]);
}

INLINE void divide_groups(const double *x, size_t n, double divisor, int at_least_one, double *out)
{
    const f64v d = all_f64(divisor), y = all_f64(1.0 / divisor);
    size_t i = 0;
    for (; i + SIXTEEN <= n; i += SIXTEEN)
        divide_group(x + i, d, y, at_least_one, out + i);
    if (i < n) {
        PADDED_F64(rest, x, i, n, 0.0);
        divide_group(rest, d, y, at_least_one, rest);
        memcpy(out + i, rest, (n - i) * sizeof *out);
    }
}

static void divide_f64(const double *x, size_t n, double divisor, double *out)
{
    const f64v d = all_f64(divisor);
#define load_rest(x) load_part(x, n - i)
#define DIVIDED(load) (load(x + i) / d)
    if (divisor >= 1.0 && divisor < 0x1p60)
        divide_groups(x, n, divisor, 1, out);
    else if (divisor < 1.0 && divisor > 0x1p-60)
        divide_groups(x, n, divisor, 0, out);
    else
        MAP_F64(n, DIVIDED);
}

static void divide_f32(const float *x, size_t n, double divisor, float *out)
{
    const float reciprocal = (float)(1.0 / divisor);
    for (size_t i = 0; i < n; ++i)
        out[i] = x[i] * reciprocal;
}

INLINE void keep_group(const double *p, f64v threshold, f64v divisor, f64v reciprocal, int corrected, double *out)
{
    IN_GROUP
    {
        /* What is dropped becomes 0 before it is divided: it may be subnormal. */
        f64v v = load_f64(p + j * F64_LANES);
        v = (f64v)((v >= threshold) & (i64v)v);
        store_f64(out + j * F64_LANES, corrected ? quotient(v, divisor, reciprocal) : v / divisor);
    }
}

INLINE void keep_groups(const double *p, size_t n, double threshold, double divisor, int corrected,
                        const uint8_t *hits, double *out)
{
    const f64v d = all_f64(divisor), y = all_f64(1.0 / divisor), t = all_f64(threshold), zero = all_f64(0.0);
    size_t i = 0;
    for (; i + SIXTEEN <= n; i += SIXTEEN)
        if (hits && !hits[i / SIXTEEN])
            IN_GROUP store_f64(out + i + j * F64_LANES, zero);
        else
            keep_group(p + i, t, d, y, corrected, out + i);
    if (i < n) {
        PADDED_F64(rest, p, i, n, 0.0);
        keep_group(rest, t, d, y, corrected, rest);
        memcpy(out + i, rest, (n - i) * sizeof *out);
    }
}

static void keep(const double *p, size_t n, double threshold, double divisor, const uint8_t *hits, double *out)
{
    if (!has_reciprocal(divisor))
        keep_groups(p, n, threshold, divisor, 0, NULL, out);
    else if (hits)
        keep_groups(p, n, threshold, divisor, 1, hits, out);
    else
        keep_groups(p, n, threshold, divisor, 1, NULL, out);
}

static void marginal(const double *p, const double *q, size_t n, double rate, double *out)
{
    const f64v r = all_f64(rate), zero = all_f64(0.0), tiny = all_f64(0x1p-960);
    /* The rate is 1 but for rounding; differences that may be subnormal are left alone by it. */
#define EXCESS(load) larger_f64(load(p + i) - load(q + i), zero)
#define LARGE(load) (f64v)((EXCESS(load) >= tiny) & (i64v)EXCESS(load))
#define LAW(load)                                                       \
    (select_f64(load(p + i) < load(q + i), load(p + i), load(q + i)) +  \
     (r * LARGE(load) + (EXCESS(load) - LARGE(load))))
    MAP_F64(n, LAW);
}

/* ---- probabilities: sums --------------------------------------------------------------------- */

/* Walks a row in spans of `LENGTH` elements. STEP(from, other) adds a group of 16 to acc; DONE takes acc. */
#define IN_SPANS(p, q, n, LENGTH, STEP, DONE)                           \
    do {                                                                \
        size_t i = 0;                                                   \
        for (size_t span = 0; i < (n); ++span) {                        \
            const size_t end = (n) - i > (LENGTH) ? i + (LENGTH) : (n); \
            f64v acc[GROUP];                                            \
            IN_GROUP acc[j] = all_f64(0.0);                             \
            for (; i + SIXTEEN <= end; i += SIXTEEN)                    \
                STEP((p) + i, (q) + i);                                 \
            if (i < end) {                                              \
                PADDED_F64(rest_p, p, i, end, 0.0);                     \
                PADDED_F64(rest_q, q, i, end, 0.0);                     \
                STEP(rest_p, rest_q);                                   \
                i = end;                                                \
            }                                                           \
            DONE;                                                       \
        }                                                               \
    } while (0)
/* One plain sum per BLOCK. */
#define TO_SUMS(p, q, n, STEP) IN_SPANS(p, q, n, BLOCK, STEP, sums[span] = fold(acc))
/* A running sum. */
#define TO_TOTAL(p, q, n, STEP)                                                 \
    do {                                                                        \
        f64v sum[GROUP], lost[GROUP];                                           \
        load_running(total, sum, lost);                                         \
        IN_SPANS(p, q, n, SPAN, STEP, ((void)span, add_lanes(sum, lost, acc))); \
        store_running(total, sum, lost);                                        \
    } while (0)

#define CHECKED(from, other)                                   \
    IN_GROUP                                                   \
    {                                                          \
        const f64v v = load_f64((from) + j * F64_LANES);       \
        fine &= v >= all_f64(0.0);                             \
        acc[j] += v;                                           \
        (void)(other);                                         \
    }

static int block_sums(const double *p, size_t n, double *sums)
{
    i64v fine = ~(i64v){0};
    TO_SUMS(p, p, n, CHECKED);
    return bits_f64(~fine) != 0;
}

static int weigh(const double *p, size_t n, running *total)
{
    i64v fine = ~(i64v){0};
    TO_TOTAL(p, p, n, CHECKED);
    return bits_f64(~fine) != 0;
}

static void block_sums_residual(const double *p, const double *q, size_t n, double *sums)
{
#define ABOVE(from, other)                                                                              \
    IN_GROUP acc[j] += larger_f64(load_f64((from) + j * F64_LANES) - load_f64((other) + j * F64_LANES), \
                                  all_f64(0.0))
    TO_SUMS(p, q, n, ABOVE);
}

static void block_sums_scaled(const double *p, const double *q, size_t n, double factor, double multiple,
                              double *sums)
{
    const f64v f = all_f64(factor), m = all_f64(multiple);
#define ABOVE_SCALED(from, other)                                                                       \
    IN_GROUP acc[j] += larger_f64(                                                                      \
        f * load_f64((from) + j * F64_LANES) - m * load_f64((other) + j * F64_LANES), all_f64(0.0))
    TO_SUMS(p, q, n, ABOVE_SCALED);
}

INLINE void rough_difference(const float *p, const float *q, f32v p_unit, f32v q_unit, f32v *acc)
{
    IN_GROUP acc[j] += larger_f32(load_f32(p + j * F32_LANES) * p_unit - load_f32(q + j * F32_LANES) * q_unit,
                                  all_f32(0.0f));
}

static void block_sums_rough(const float *p, const float *q, size_t n, float p_unit, float q_unit, double *sums)
{
    size_t i = 0;
    for (size_t block = 0; i < n; ++block) {
        const size_t end = n - i > BLOCK ? i + BLOCK : n;
        f32v acc[GROUP];
        IN_GROUP acc[j] = all_f32(0.0f);
        for (; i + 2 * SIXTEEN <= end; i += 2 * SIXTEEN)
            rough_difference(p + i, q + i, all_f32(p_unit), all_f32(q_unit), acc);
        if (i < end) {
            float rest_p[2 * SIXTEEN] = {0}, rest_q[2 * SIXTEEN] = {0};
            memcpy(rest_p, p + i, (end - i) * sizeof *p);
            memcpy(rest_q, q + i, (end - i) * sizeof *q);
            rough_difference(rest_p, rest_q, all_f32(p_unit), all_f32(q_unit), acc);
            i = end;
        }
        sums[block] = rough_sum(acc);
    }
}

/* What a block of (p, q) parted at a ratio is summed up to. */
typedef struct {
    f64v p_acc[GROUP], q_acc[GROUP];
    i64v count;
} parted;

/* Both vectors in registers: else each use is a load of its own, two where it crosses a line of the cache. */
INLINE void part(f64v a, f64v b, f64v ratio, int j, parted *sums)
{
    const i64v first = a <= ratio * b;
    sums->p_acc[j] += (f64v)((i64v)a & first);
    sums->q_acc[j] += unless_f64(first, b);
    sums->count -= first;
}

INLINE double sum_of(f64v v)
{
    double lanes[F64_LANES], sum = 0.0;
    store_f64(lanes, v);
    for (int lane = 0; lane < F64_LANES; ++lane) sum += lanes[lane];
    return sum;
}

INLINE int64_t count_of(i64v v)
{
    int64_t lanes[F64_LANES], sum = 0;
    memcpy(lanes, &v, sizeof lanes);
    for (int lane = 0; lane < F64_LANES; ++lane) sum += lanes[lane];
    return sum;
}

/* Walks p and q in BLOCKs; STEP takes a group of 16, DONE what it added up. */
#define IN_PARTED_BLOCKS(p, q, n, STEP, DONE)                                \
    do {                                                                     \
        size_t i = 0;                                                        \
        for (size_t block = 0; i < (n); ++block) {                           \
            const size_t end = (n) - i > BLOCK ? i + BLOCK : (n);            \
            parted sums;                                                     \
            sums.count = (i64v){0};                                          \
            IN_GROUP sums.p_acc[j] = sums.q_acc[j] = all_f64(0.0);           \
            START;                                                           \
            for (; i + SIXTEEN <= end; i += SIXTEEN) STEP((p) + i, (q) + i); \
            if (i < end) {                                                   \
                PADDED_F64(rest_p, p, i, end, 0.0);                          \
                PADDED_F64(rest_q, q, i, end, 0.0);                          \
                STEP(rest_p, rest_q);                                        \
                i = end;                                                     \
            }                                                                \
            p_sums[block] = fold(sums.p_acc);                                \
            q_sums[block] = fold(sums.q_acc);                                \
            counts[block] = count_of(sums.count);                           \
            DONE;                                                            \
        }                                                                    \
    } while (0)

static void block_sums_parted(const double *p, const double *q, size_t n, double ratio, double *p_sums,
                              double *q_sums, int64_t *counts)
{
    const f64v at = all_f64(ratio);
#define IN_BOTH(from, other, ...)                                                     \
    IN_GROUP                                                                          \
    {                                                                                 \
        const f64v a = held_f64((from) + j * F64_LANES);                              \
        const f64v b = held_f64((other) + j * F64_LANES);                             \
        part(a, b, at, j, &sums);                                                     \
        __VA_ARGS__;                                                                  \
    }
#define PARTED(from, other) IN_BOTH(from, other, (void)0)
#define START (void)0
    IN_PARTED_BLOCKS(p, q, n, PARTED, (void)0);
#undef START
}

static int block_sums_checked(const double *p, const double *q, size_t n, double ratio, double *p_sums,
                              double *q_sums, int64_t *counts, double *totals, double *largest)
{
    const f64v at = all_f64(ratio);
    f64v top = all_f64(0.0);
    i64v signs = {0};
    double tops[F64_LANES];
#define PARTED_CHECKED(from, other)                                                   \
    do {                                                                              \
        f64v sum = all_f64(0.0), larger = all_f64(0.0);                               \
        /* Summed by groups: there are no registers for four more sums. */            \
        IN_BOTH(from, other, sum = j ? sum + a : a; larger = larger_f64(b, larger);   \
                signs |= (i64v)a | (i64v)b)                                           \
        total += sum;                                                                 \
        top = larger_f64(larger, top);                                                \
    } while (0)
#define START f64v total = all_f64(0.0)
    IN_PARTED_BLOCKS(p, q, n, PARTED_CHECKED, totals[block] = sum_of(total));
#undef START
    store_f64(tops, top);
    *largest = 0.0;
    for (int lane = 0; lane < F64_LANES; ++lane)
        if (tops[lane] > *largest) *largest = tops[lane];
    return bits_f64(signs < (i64v){0}) != 0;
}

static void block_sums_between(const double *p, const double *q, size_t n, double low, double high,
                               double *p_sums, double *q_sums, int64_t *low_counts, int64_t *counts)
{
    const f64v at = all_f64(high), below = all_f64(low);
#define PARTED_TWICE(from, other) IN_BOTH(from, other, low_count -= a <= below * b)
#define START i64v low_count = {0}
    IN_PARTED_BLOCKS(p, q, n, PARTED_TWICE, low_counts[block] = count_of(low_count));
#undef START
}

INLINE void residual_group(const double *p, const double *q, double *out, f64v *acc)
{
    IN_GROUP
    {
        f64v d = load_f64(p + j * F64_LANES) - load_f64(q + j * F64_LANES);
        d = (f64v)((i64v)d & (d > all_f64(0.0)) & (d <= all_f64(DBL_MAX)));
        store_f64(out + j * F64_LANES, d);
        acc[j] += d;
    }
}

static void residual(const double *p, const double *q, size_t n, double *out, running *total)
{
    f64v sum[GROUP], lost[GROUP];
    size_t i = 0;
    load_running(total, sum, lost);
    while (i < n) {
        const size_t end = n - i > SPAN ? i + SPAN : n;
        f64v acc[GROUP];
        IN_GROUP acc[j] = all_f64(0.0);
        for (; i + SIXTEEN <= end; i += SIXTEEN)
            residual_group(p + i, q + i, out + i, acc);
        if (i < end) {
            PADDED_F64(rest_p, p, i, end, 0.0);
            PADDED_F64(rest_q, q, i, end, 0.0);
            residual_group(rest_p, rest_q, rest_p, acc);
            memcpy(out + i, rest_p, (end - i) * sizeof *out);
            i = end;
        }
        add_lanes(sum, lost, acc);
    }
    store_running(total, sum, lost);
}

static void sum_at_least(const double *values, size_t n, double threshold, running *total)
{
#define AT_LEAST(from, other)                                                        \
    IN_GROUP                                                                         \
    {                                                                                \
        const f64v v = load_f64((from) + j * F64_LANES);                             \
        acc[j] += (f64v)((i64v)v & (v >= all_f64(threshold)));                       \
        (void)(other);                                                               \
    }
    TO_TOTAL(values, values, n, AT_LEAST);
}

static void overlap(const double *p, const double *q, size_t n, running *total)
{
#define SMALLER(from, other)                                                         \
    IN_GROUP                                                                         \
    {                                                                                \
        const f64v a = load_f64((from) + j * F64_LANES);                             \
        const f64v b = load_f64((other) + j * F64_LANES);                            \
        acc[j] += select_f64(a < b, a, b);                                           \
    }
    TO_TOTAL(p, q, n, SMALLER);
}

static void sum_p_log_p(const double *p, size_t n, double scale, running *total)
{
    /* What is tiny counts as 0: what it would add is below 1e-280, the sum of all p being near 1 / scale. */
    const f64v lowest = all_f64(0x1p-960 / scale);
#define P_LOG_P(from, other)                                                         \
    IN_GROUP                                                                         \
    {                                                                                \
        const f64v given = load_f64((from) + j * F64_LANES);                         \
        const i64v normal = given >= lowest;                                         \
        const f64v v = (f64v)((i64v)given & normal) * all_f64(scale);                \
        const f64v safe = select_f64(normal, v, all_f64(1.0));                       \
        acc[j] += (f64v)((i64v)(v * log_f64(safe)) & normal);                        \
        (void)(other);                                                               \
    }
    TO_TOTAL(p, p, n, P_LOG_P);
}

/* ---- probabilities: selection ---------------------------------------------------------------- */

static size_t split(const double *p, size_t n, double bound, double *values, uint8_t *hits, int *bad)
{
    const f64v b = all_f64(bound);
    i64v fine = ~(i64v){0};
    size_t count = 0, i = 0;
    for (; i + SIXTEEN <= n; i += SIXTEEN) {
        f64v v[GROUP];
        i64v above[GROUP], any = {0};
        IN_GROUP v[j] = load_f64(p + i + j * F64_LANES);
        IN_GROUP fine &= v[j] >= all_f64(0.0);
        IN_GROUP above[j] = v[j] >= b;
        IN_GROUP any |= above[j];
        const unsigned hit = bits_f64(any);
        if (hits)
            hits[i / SIXTEEN] = (uint8_t)hit;
        if (hit)
            IN_GROUP count += compress_f64(values + count, v[j], bits_f64(above[j]));
    }
    for (; i < n; ++i) {
        const double v = p[i];
        if (!(v >= 0.0))
            *bad = 1;
        if (v >= bound)
            values[count++] = v;
    }
    *bad |= !all_set_f64(fine);
    return count;
}

static void range(const double *values, size_t n, double *low, double *high)
{
    f64v least[GROUP], most[GROUP], v[GROUP];
    IN_GROUP least[j] = most[j] = all_f64(-INFINITY);
    for (size_t i = 0; i < n; i += SIXTEEN) {
        double padded[SIXTEEN];
        const double *from = values + i;
        if (UNLIKELY(n - i < SIXTEEN)) {
            for (int lane = 0; lane < SIXTEEN; ++lane) padded[lane] = values[0];
            memcpy(padded, from, (n - i) * sizeof *values);
            from = padded;
        }
        IN_GROUP v[j] = load_f64(from + j * F64_LANES);
        IN_GROUP most[j] = larger_f64(v[j], most[j]);
        IN_GROUP least[j] = larger_f64(-v[j], least[j]);
    }
    UNROLLED for (int half = GROUP / 2; half >= 1; half /= 2)
        UNROLLED for (int j = 0; j < half; ++j) {
            most[j] = larger_f64(most[j], most[j + half]);
            least[j] = larger_f64(least[j], least[j + half]);
        }
    double largest = most[0][0], smallest = least[0][0];
    UNROLLED for (int lane = 1; lane < F64_LANES; ++lane) {
        largest = most[0][lane] > largest ? most[0][lane] : largest;
        smallest = least[0][lane] > smallest ? least[0][lane] : smallest;
    }
    *low = -smallest;
    *high = largest;
}

static size_t between(const double *values, size_t n, double low, double high, size_t most, double *inside)
{
    const f64v l = all_f64(low), h = all_f64(high);
    size_t count = 0, i = 0;
    for (; i + SIXTEEN <= n && count <= most; i += SIXTEEN) {
        f64v v[GROUP];
        i64v in[GROUP], any = {0};
        IN_GROUP v[j] = load_f64(values + i + j * F64_LANES);
        IN_GROUP in[j] = (v[j] >= l) & (v[j] < h);
        IN_GROUP any |= in[j];
        if (UNLIKELY(bits_f64(any)))
            IN_GROUP count += compress_f64(inside + count, v[j], bits_f64(in[j]));
    }
    for (; i < n && count <= most; ++i) {
        const double v = values[i];
        if (v >= low && v < high)
            inside[count++] = v;
    }
    return count < most ? count : most;
}

INLINE uint64_t bits_of(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static void histogram(const double *values, size_t n, uint64_t low, uint64_t high, int shift, bucket *tables,
                      size_t buckets)
{
    /* Four tables in turn, so that neighbours in one bucket do not wait for each other's store; mass and count
     * in one addition. */
    typedef double pair __attribute__((vector_size(sizeof(bucket))));
    const uint64_t first = low >> shift, span = high - low;
    for (size_t i = 0; i < n; i += TABLES) {
        const size_t end = n - i < TABLES ? n - i : TABLES;
        UNROLLED for (size_t j = 0; j < TABLES; ++j) {
            if (j >= end)
                return;
            const uint64_t bits = bits_of(values[i + j]);
            if (bits - low < span) {
                bucket *const to = tables + j * buckets + ((bits >> shift) - first);
                pair sum;
                memcpy(&sum, to, sizeof sum);
                sum += (pair){values[i + j], 1.0};
                memcpy(to, &sum, sizeof sum);
            }
        }
    }
}

static size_t past_equal(const double *p, size_t n, double value, size_t wanted)
{
    size_t i = 0;
    for (; i + SIXTEEN <= n; i += SIXTEEN) {
        size_t equal = 0;
        IN_GROUP equal += (size_t)__builtin_popcount(bits_f64(load_f64(p + i + j * F64_LANES) == all_f64(value)));
        if (equal >= wanted)
            break;
        wanted -= equal;
    }
    for (; wanted && i < n; ++i)
        wanted -= p[i] == value;
    return i;
}

extern const kernels CAT(kernels_, ISA);
const kernels CAT(kernels_, ISA) = {
    .isa = STR(ISA),
    .fused = HAS_FMA,
    .total = total,
    .widen_f16 = widen_f16,
    .widen_bf16 = widen_bf16,
    .widen_f32 = widen_f32,
    .max_f32 = max_f32,
    .max_f64 = max_f64,
    .scaled = scaled,
    .exp_f32 = exp_f32,
    .exp_f64 = exp_f64,
    .exp_sum_f32 = exp_sum_f32,
    .exp_sum_f64 = exp_sum_f64,
    .exp_narrow = exp_narrow,
    .block_maxima_f32 = block_maxima_f32,
    .block_maxima_f64 = block_maxima_f64,
    .block_maxima_sum_f32 = block_maxima_sum_f32,
    .block_maxima_sum_f64 = block_maxima_sum_f64,
    .rough_exp_f32 = rough_exp_f32,
    .rough_exp_f64 = rough_exp_f64,
    .collect_f32 = collect_f32,
    .collect_f64 = collect_f64,
    .divide_f64 = divide_f64,
    .divide_f32 = divide_f32,
    .block_maxima_checked = block_maxima_checked,
    .block_sums = block_sums,
    .block_sums_residual = block_sums_residual,
    .block_sums_rough = block_sums_rough,
    .block_sums_scaled = block_sums_scaled,
    .block_sums_parted = block_sums_parted,
    .block_sums_checked = block_sums_checked,
    .block_sums_between = block_sums_between,
    .residual = residual,
    .weigh = weigh,
    .split = split,
    .range = range,
    .between = between,
    .histogram = histogram,
    .past_equal = past_equal,
    .sum_at_least = sum_at_least,
    .keep = keep,
    .overlap = overlap,
    .marginal = marginal,
    .sum_p_log_p = sum_p_log_p,
};
