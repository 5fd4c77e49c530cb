/* exp, 2^x and log as straight-line arithmetic over vectors.
 *
 * exp(x) = 2^n exp(r), n = round(x log2 e), |r| <= ln(2)/2; exp(r) = 1 + r + r^2 q(r), q of degree 9.
 * Adding 1.5 * 2^52 rounds to the nearest integer and leaves it in the low bits; shifted to the
 * exponent's place it is added to exp(r) as an integer. exp_coefficients.py prints the numbers.
 *
 * Never to be compiled with -ffast-math or -fassociative-math: the rounding trick would cancel.
 */
#ifndef MTPLX_EXP_H
#define MTPLX_EXP_H

#include "simd.h"

/* Vectors worked on in lockstep: one alone would wait for its own fused multiply-adds. */
enum { LOCKSTEP = F64_LANES == 8 ? 2 : 4 };
#define IN_LOCKSTEP UNROLLED for (int j = 0; j < LOCKSTEP; ++j)

static const double EXP_Q[10] = {
    0x1.0000000000001p-1, 0x1.5555555555556p-3, 0x1.5555555553d63p-5, 0x1.11111111109b3p-7, 0x1.6c16c1788bd90p-10,
    0x1.a01a01a7c41d5p-13, 0x1.a019b90d2ae7ap-16, 0x1.71de0dae63bb3p-19, 0x1.289185613a3d6p-22, 0x1.af38a9b0ec855p-26};
#define LOG2_E 0x1.71547652b82fep+0
#define LN2_HIGH 0x1.62e42fefa3800p-1 /* 42 bits: n * LN2_HIGH is exact */
#define LN2_LOW 0x1.ef35793c76730p-45

/* Below this the result is not a normal number (exp(-708.4) = 2^-1022). */
#define EXP_NORMAL_F64 (-708.0)

/* The reduction: x = n ln 2 + r, n in the low bits of t; |x| <= 750. */
INLINE f64v exp_reduce_f64(f64v x, f64v *t)
{
    *t = fma_f64(x, all_f64(LOG2_E), all_f64(0x1.8p52));
    const f64v n = *t - all_f64(0x1.8p52);
    return fnma_f64(n, all_f64(LN2_LOW), fnma_f64(n, all_f64(LN2_HIGH), x));
}

/* exp(r) * 2^(n + raise), as long as n + raise stays a normal exponent. */
INLINE f64v exp_reduced_f64(f64v r, f64v t, int64_t raise)
{
    const f64v r2 = r * r;
    f64v a = fma_f64(all_f64(EXP_Q[9]), r, all_f64(EXP_Q[8]));
    a = fma_f64(a, r2, fma_f64(all_f64(EXP_Q[7]), r, all_f64(EXP_Q[6])));
    a = fma_f64(a, r2, fma_f64(all_f64(EXP_Q[5]), r, all_f64(EXP_Q[4])));
    a = fma_f64(a, r2, fma_f64(all_f64(EXP_Q[3]), r, all_f64(EXP_Q[2])));
    a = fma_f64(a, r2, fma_f64(all_f64(EXP_Q[1]), r, all_f64(EXP_Q[0])));
    a = fma_f64(a, r2, r) + all_f64(1.0);
    return (f64v)((i64v)a + (i64v)((u64v)t << 52) + (raise << 52));
}

/* x = exp(x) for any x <= 708, subnormal results, -inf and NaN included. Where the result is normal
 * it has the bits of the reduction and exp_reduced_f64(r, t, 0).
 *
 * A subnormal result is never the result of an arithmetic instruction, which would cost a microcode
 * assist on many CPUs: with y = exp(x) * 2^128, adding 2^-894 rounds y to a multiple of 2^-946, and the
 * difference of the bit patterns counts how many, which is the bit pattern of exp(x). */
INLINE void exp_any_f64(f64v *x)
{
    f64v y[LOCKSTEP], t[LOCKSTEP];
    IN_LOCKSTEP y[j] = exp_reduce_f64(at_least_f64(-746.0, x[j]), &t[j]); /* exp(-746) rounds to 0 */
    IN_LOCKSTEP y[j] = exp_reduced_f64(y[j], t[j], 128);
    IN_LOCKSTEP
    {
        const f64v normal = (f64v)((i64v)y[j] - ((int64_t)128 << 52));
        const f64v small = (f64v)((i64v)(y[j] + all_f64(0x1p-894)) - (i64v)all_f64(0x1p-894));
        y[j] = select_f64(y[j] >= all_f64(0x1p-894), normal, small);
        x[j] = select_f64(x[j] == x[j], y[j], x[j]);
    }
}

/* 2^f on |f| <= 1/2 */
static const float EXP2_SHORT[6] = {0x1.00000144773ffp+0f, 0x1.62e4302fd9e16p-1f, 0x1.ebf9064cd6bc8p-3f,
                                    0x1.c6af6ca08d189p-5f, 0x1.3d10a22f72de0p-7f, 0x1.5f08b78b59e8ep-10f};
static const float EXP2_LONG[7] = {0x1.0000000000000p+0f, 0x1.62e430d07986cp-1f, 0x1.ebfbe0460cc0bp-3f,
                                   0x1.c6aecc0a7de9fp-5f, 0x1.3b2a1b516ca7fp-7f, 0x1.5f48ee5d03a91p-10f,
                                   0x1.44401fae30efep-13f};

/* x = 2^x for x in [-126, 127], within 2^-21 relative: for sums that a certificate stands behind.
 * NaN does not survive. */
INLINE void exp2_rough_f32(f32v *x)
{
    f32v t[LOCKSTEP], a[LOCKSTEP];
    IN_LOCKSTEP t[j] = x[j] + all_f32(0x1.8p23f);
    IN_LOCKSTEP x[j] = x[j] - (t[j] - all_f32(0x1.8p23f));
    IN_LOCKSTEP a[j] = fma_f32(all_f32(EXP2_SHORT[5]), x[j], all_f32(EXP2_SHORT[4]));
    IN_LOCKSTEP a[j] = fma_f32(a[j], x[j], all_f32(EXP2_SHORT[3]));
    IN_LOCKSTEP a[j] = fma_f32(a[j], x[j], all_f32(EXP2_SHORT[2]));
    IN_LOCKSTEP a[j] = fma_f32(a[j], x[j], all_f32(EXP2_SHORT[1]));
    IN_LOCKSTEP a[j] = fma_f32(a[j], x[j], all_f32(EXP2_SHORT[0]));
    IN_LOCKSTEP x[j] = (f32v)((i32v)a[j] + (i32v)((u32v)t[j] << 23));
}

/* log(m 2^e) = e ln 2 + 2 s + 2 s^3 a(s^2), s = (m - 1)/(m + 1), m in [sqrt(1/2), sqrt(2)]. */
static const double LOG_A[9] = {0x1.5555555555555p-2, 0x1.9999999999998p-3, 0x1.2492492492959p-3,
                                0x1.c71c71c64c8ccp-4, 0x1.745d17d35328cp-4, 0x1.3b137b347f3c2p-4,
                                0x1.111d273ca8a70p-4, 0x1.debedbffa1d9ep-5, 0x1.e6afc55fa9490p-5};

/* log of a positive normal number, absolute error below 2^-51 times the larger of 1 and the result. */
INLINE f64v log_f64(f64v x)
{
    const u64v bits = (u64v)x;
    const f64v biased = (f64v)((bits >> 52) | 0x4330000000000000ull) - all_f64(0x1p52);
    f64v m = (f64v)((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull);
    const i64v high = m > all_f64(0x1.6a09e667f3bcdp+0);
    m = select_f64(high, m * all_f64(0.5), m);
    const f64v e = biased - select_f64(high, all_f64(1022.0), all_f64(1023.0));
    const f64v s = (m - all_f64(1.0)) / (m + all_f64(1.0));
    const f64v s2 = s * s;
    f64v a = all_f64(LOG_A[8]);
    UNROLLED for (int k = 7; k >= 0; --k) a = fma_f64(a, s2, all_f64(LOG_A[k]));
    const f64v twice = s + s;
    return fma_f64(e, all_f64(LN2_HIGH), fma_f64(e, all_f64(LN2_LOW), fma_f64(twice * s2, a, twice)));
}

#endif
