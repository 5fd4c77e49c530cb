/* Vectors of doubles and floats of whatever width the instruction set has.
 *
 * Design: GNU vector extensions give arithmetic, comparisons (lanes of all ones or zeros) and bit
 * operations for every instruction set; what they lack is written out here per instruction set:
 * fused multiply-add, selection, lane masks as bits, half precision. Kernels are written once over
 * `f64v` and `f32v`, in groups of 16 doubles or 32 floats whatever the width, so that sums have the
 * same lanes and the same order everywhere.
 *
 * AVX2, AVX-512 and NEON fuse where `fma_*` is written and nowhere else (-ffp-contract=off), so they
 * give the same bits. The x86 baseline has no fused multiply-add: it rounds twice.
 */
#ifndef MTPLX_SIMD_H
#define MTPLX_SIMD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define F64_LANES 8
#elif defined(__AVX2__)
#define F64_LANES 4
#else
#define F64_LANES 2
#endif
#define F32_LANES (2 * F64_LANES)

#define INLINE static inline __attribute__((always_inline))
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

/* Without a fused multiply-add a remainder cannot be had exactly: divide instead. */
#if defined(__FMA__) || defined(__aarch64__)
#define HAS_FMA 1
#else
#define HAS_FMA 0
#endif

typedef double f64v __attribute__((vector_size(8 * F64_LANES)));
typedef int64_t i64v __attribute__((vector_size(8 * F64_LANES)));
typedef uint64_t u64v __attribute__((vector_size(8 * F64_LANES)));
typedef float f32v __attribute__((vector_size(4 * F32_LANES)));
typedef int32_t i32v __attribute__((vector_size(4 * F32_LANES)));
typedef uint32_t u32v __attribute__((vector_size(4 * F32_LANES)));
/* As many floats as a vector has doubles. */
typedef float f32h __attribute__((vector_size(4 * F64_LANES)));
typedef uint16_t u16v __attribute__((vector_size(2 * F32_LANES)));

/* ---- loads, stores, constants ---------------------------------------------------------------- */

INLINE f64v all_f64(double x)
{
    return x - (f64v){0};
}

INLINE f32v all_f32(float x)
{
    return x - (f32v){0};
}

INLINE f64v load_f64(const double *x)
{
    f64v v;
    memcpy(&v, x, sizeof v);
    return v;
}

/* The same, and the compiler may not load it again in place of keeping it. */
INLINE f64v held_f64(const double *x)
{
    f64v v = load_f64(x);
#if defined(__AVX2__) || defined(__SSE2__)
    __asm__("" : "+x"(v));
#endif
    return v;
}

INLINE void store_f64(double *x, f64v v)
{
    memcpy(x, &v, sizeof v);
}

INLINE f32v load_f32(const float *x)
{
    f32v v;
    memcpy(&v, x, sizeof v);
    return v;
}

INLINE void store_f32(float *x, f32v v)
{
    memcpy(x, &v, sizeof v);
}

/* F64_LANES floats, widened. GCC takes a detour through the stack for __builtin_convertvector. */
INLINE f64v load_f32_as_f64(const float *x)
{
#if defined(__AVX512F__)
    return (f64v)_mm512_cvtps_pd(_mm256_loadu_ps(x));
#elif defined(__AVX2__)
    return (f64v)_mm256_cvtps_pd(_mm_loadu_ps(x));
#else
    f32h v;
    memcpy(&v, x, sizeof v);
    return __builtin_convertvector(v, f64v);
#endif
}

/* Two vectors of doubles, rounded to one of floats. */
INLINE f32v narrow_f64(f64v low, f64v high)
{
#if defined(__AVX512F__)
    const __m512 l = _mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)low));
    return (f32v)_mm512_insertf32x8(l, _mm512_cvtpd_ps((__m512d)high), 1);
#elif defined(__AVX2__)
    return (f32v)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)high), _mm256_cvtpd_ps((__m256d)low));
#else
    const f32h l = __builtin_convertvector(low, f32h), h = __builtin_convertvector(high, f32h);
    return __builtin_shufflevector(l, h, 0, 1, 2, 3);
#endif
}

/* ---- what the vector extensions lack --------------------------------------------------------- */

#if defined(__AVX512F__)
INLINE f64v fma_f64(f64v a, f64v b, f64v c) { return (f64v)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
INLINE f64v fnma_f64(f64v a, f64v b, f64v c) { return (f64v)_mm512_fnmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
INLINE f32v fma_f32(f32v a, f32v b, f32v c) { return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE f64v select_f64(i64v m, f64v a, f64v b)
{
    return (f64v)_mm512_mask_blend_pd(_mm512_movepi64_mask((__m512i)m), (__m512d)b, (__m512d)a);
}
INLINE f32v select_f32(i32v m, f32v a, f32v b)
{
    return (f32v)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)m), (__m512)b, (__m512)a);
}
INLINE unsigned bits_f64(i64v m) { return _mm512_movepi64_mask((__m512i)m); }
INLINE unsigned bits_f32(i32v m) { return _mm512_movepi32_mask((__m512i)m); }
/* a > b ? a : b, hence b where either is NaN: the operand order decides whether NaN survives. */
INLINE f64v larger_f64(f64v a, f64v b) { return (f64v)_mm512_max_pd((__m512d)a, (__m512d)b); }
INLINE f32v larger_f32(f32v a, f32v b) { return (f32v)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
INLINE f64v fma_f64(f64v a, f64v b, f64v c) { return (f64v)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
INLINE f64v fnma_f64(f64v a, f64v b, f64v c) { return (f64v)_mm256_fnmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
INLINE f32v fma_f32(f32v a, f32v b, f32v c) { return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE f64v select_f64(i64v m, f64v a, f64v b)
{
    return (f64v)_mm256_blendv_pd((__m256d)b, (__m256d)a, (__m256d)m);
}
INLINE f32v select_f32(i32v m, f32v a, f32v b)
{
    return (f32v)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)m);
}
INLINE unsigned bits_f64(i64v m) { return (unsigned)_mm256_movemask_pd((__m256d)m); }
INLINE unsigned bits_f32(i32v m) { return (unsigned)_mm256_movemask_ps((__m256)m); }
INLINE f64v larger_f64(f64v a, f64v b) { return (f64v)_mm256_max_pd((__m256d)a, (__m256d)b); }
INLINE f32v larger_f32(f32v a, f32v b) { return (f32v)_mm256_max_ps((__m256)a, (__m256)b); }
#elif defined(__ARM_NEON) && defined(__aarch64__)
INLINE f64v fma_f64(f64v a, f64v b, f64v c) { return (f64v)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b); }
INLINE f64v fnma_f64(f64v a, f64v b, f64v c) { return (f64v)vfmsq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b); }
INLINE f32v fma_f32(f32v a, f32v b, f32v c) { return (f32v)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE f64v select_f64(i64v m, f64v a, f64v b)
{
    return (f64v)vbslq_f64((uint64x2_t)m, (float64x2_t)a, (float64x2_t)b);
}
INLINE f32v select_f32(i32v m, f32v a, f32v b)
{
    return (f32v)vbslq_f32((uint32x4_t)m, (float32x4_t)a, (float32x4_t)b);
}
INLINE unsigned bits_f64(i64v m) { return (unsigned)((m[0] & 1) | (m[1] & 2)); }
INLINE unsigned bits_f32(i32v m)
{
    const uint32x4_t weight = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32((uint32x4_t)m, weight));
}
INLINE f64v larger_f64(f64v a, f64v b) { return select_f64(a > b, a, b); }
INLINE f32v larger_f32(f32v a, f32v b) { return select_f32(a > b, a, b); }
#else
INLINE f64v fma_f64(f64v a, f64v b, f64v c) { return a * b + c; }
INLINE f64v fnma_f64(f64v a, f64v b, f64v c) { return c - a * b; }
INLINE f32v fma_f32(f32v a, f32v b, f32v c) { return a * b + c; }
INLINE f64v select_f64(i64v m, f64v a, f64v b) { return (f64v)((m & (i64v)a) | (~m & (i64v)b)); }
INLINE f32v select_f32(i32v m, f32v a, f32v b) { return (f32v)((m & (i32v)a) | (~m & (i32v)b)); }
#if defined(__SSE2__)
INLINE unsigned bits_f64(i64v m) { return (unsigned)_mm_movemask_pd((__m128d)m); }
INLINE unsigned bits_f32(i32v m) { return (unsigned)_mm_movemask_ps((__m128)m); }
INLINE f64v larger_f64(f64v a, f64v b) { return (f64v)_mm_max_pd((__m128d)a, (__m128d)b); }
INLINE f32v larger_f32(f32v a, f32v b) { return (f32v)_mm_max_ps((__m128)a, (__m128)b); }
#else
INLINE unsigned bits_f64(i64v m) { return (unsigned)((m[0] & 1) | (m[1] & 2)); }
INLINE unsigned bits_f32(i32v m) { return (unsigned)((m[0] & 1) | (m[1] & 2) | (m[2] & 4) | (m[3] & 8)); }
INLINE f64v larger_f64(f64v a, f64v b) { return select_f64(a > b, a, b); }
INLINE f32v larger_f32(f32v a, f32v b) { return select_f32(a > b, a, b); }
#endif
#endif

/* a where the mask is not set, 0 elsewhere. GCC makes a slower blend of a & ~m. */
INLINE f64v unless_f64(i64v m, f64v a)
{
#if defined(__AVX512F__)
    return (f64v)_mm512_andnot_pd((__m512d)m, (__m512d)a);
#elif defined(__AVX2__)
    return (f64v)_mm256_andnot_pd((__m256d)m, (__m256d)a);
#else
    return (f64v)(~m & (i64v)a);
#endif
}

INLINE int all_set_f64(i64v m) { return bits_f64(m) == (1u << F64_LANES) - 1; }
INLINE int all_set_f32(i32v m) { return bits_f32(m) == (1u << F32_LANES) - 1; }

/* Lanes where a or b is NaN. */
INLINE i32v either_nan_f32(f32v a, f32v b)
{
#if defined(__AVX512F__)
    return (i32v)_mm512_movm_epi32(_mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q));
#elif defined(__AVX2__)
    return (i32v)_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q);
#elif defined(__SSE2__)
    return (i32v)_mm_cmpunord_ps((__m128)a, (__m128)b);
#else
    return (a != a) | (b != b);
#endif
}

INLINE i64v either_nan_f64(f64v a, f64v b)
{
#if defined(__AVX512F__)
    return (i64v)_mm512_movm_epi64(_mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_UNORD_Q));
#elif defined(__AVX2__)
    return (i64v)_mm256_cmp_pd((__m256d)a, (__m256d)b, _CMP_UNORD_Q);
#elif defined(__SSE2__)
    return (i64v)_mm_cmpunord_pd((__m128d)a, (__m128d)b);
#else
    return (a != a) | (b != b);
#endif
}

/* Stores the lanes of v whose bit is set, packed; writes a whole vector, so `to` needs room for one.
 * Returns how many were set. */
INLINE size_t compress_f64(double *to, f64v v, unsigned bits)
{
#if defined(__AVX512F__)
    store_f64(to, (f64v)_mm512_maskz_compress_pd((__mmask8)bits, (__m512d)v));
#elif defined(__AVX2__)
    /* Lane j as its two halves; 0 stands in the places that nobody reads. */
#define PAIR(j) 2 * (j), 2 * (j) + 1
    static const int32_t places[16][8] = {
        {PAIR(0), PAIR(0), PAIR(0), PAIR(0)}, {PAIR(0), PAIR(0), PAIR(0), PAIR(0)},
        {PAIR(1), PAIR(0), PAIR(0), PAIR(0)}, {PAIR(0), PAIR(1), PAIR(0), PAIR(0)},
        {PAIR(2), PAIR(0), PAIR(0), PAIR(0)}, {PAIR(0), PAIR(2), PAIR(0), PAIR(0)},
        {PAIR(1), PAIR(2), PAIR(0), PAIR(0)}, {PAIR(0), PAIR(1), PAIR(2), PAIR(0)},
        {PAIR(3), PAIR(0), PAIR(0), PAIR(0)}, {PAIR(0), PAIR(3), PAIR(0), PAIR(0)},
        {PAIR(1), PAIR(3), PAIR(0), PAIR(0)}, {PAIR(0), PAIR(1), PAIR(3), PAIR(0)},
        {PAIR(2), PAIR(3), PAIR(0), PAIR(0)}, {PAIR(0), PAIR(2), PAIR(3), PAIR(0)},
        {PAIR(1), PAIR(2), PAIR(3), PAIR(0)}, {PAIR(0), PAIR(1), PAIR(2), PAIR(3)},
    };
#undef PAIR
    const __m256i order = _mm256_loadu_si256((const __m256i *)places[bits]);
    store_f64(to, (f64v)_mm256_permutevar8x32_epi32((__m256i)v, order));
#else
    size_t count = 0;
    for (int j = 0; j < F64_LANES; ++j) {
        to[count] = v[j];
        count += bits >> j & 1;
    }
#endif
    return (size_t)__builtin_popcount(bits);
}

/* a where it is larger than the floor or NaN, else the floor. */
INLINE f64v at_least_f64(double floor, f64v a)
{
    return larger_f64(all_f64(floor), a);
}

INLINE f32v at_least_f32(float floor, f32v a)
{
    return larger_f32(all_f32(floor), a);
}

/* IEEE half precision, F32_LANES at a time. */
INLINE f32v load_f16_as_f32(const uint16_t *x)
{
#if defined(__AVX512F__)
    return (f32v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
#elif defined(__F16C__)
    return (f32v)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (f32v)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x)));
#else
    u16v half;
    memcpy(&half, x, sizeof half);
    const u32v bits = __builtin_convertvector(half, u32v);
    /* Shifted into place the exponent is 112 too small; the product also normalises subnormals. */
    const f32v magnitude = (f32v)((bits & 0x7fff) << 13) * 0x1p112f;
    const u32v special = (u32v)((bits & 0x7c00) == 0x7c00) & 0x7f800000u;
    return (f32v)(((u32v)magnitude | special) | ((bits & 0x8000) << 16));
#endif
}

INLINE f32v load_bf16_as_f32(const uint16_t *x)
{
    u16v half;
    memcpy(&half, x, sizeof half);
    return (f32v)(__builtin_convertvector(half, u32v) << 16);
}

#endif
