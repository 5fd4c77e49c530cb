/* The kernel table: one struct of function pointers per instruction set.
 *
 * Every build of kernels_body.h fills one `kernels`; dispatch.c says which of them may run here.
 * All pointers are set in every table.
 *
 * Contract shared by all kernels: any length, 0 included; no alignment; no allocation, no Python, no
 * libm; inputs and outputs overlap only where "in place" is said. Sums run over fixed lanes in
 * a fixed order counted from the start of the call, so a row may be handed over in pieces whose
 * lengths are multiples of CHUNK, and the sum is the same.
 *
 * A `running` sum takes 4 groups of 16 elements lane by lane and adds them to its lanes exactly
 * (Knuth's sum): its error is that of 3 additions per lane, whatever the length. Plain sums per BLOCK
 * serve draws, whose certificate knows their error.
 */
#ifndef MTPLX_KERNELS_H
#define MTPLX_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum {
    CHUNK = 512,    /* a row is handed over whole, or in pieces of this many elements */
    BLOCK = 256,    /* elements a partial sum of probabilities covers */
    SIDE_BY_SIDE = 8, /* maxima per CHUNK: number j covers the elements i with i % 8 == j */
    HIT_GROUP = 16,   /* elements that one of the hits of `split` speaks of */
    TABLES = 4        /* that a histogram is spread over */
};

/* A sum over LANES lanes and what rounding took from each: the value is all of them together. */
enum { LANES = 16 };
typedef struct running {
    double sum[LANES], lost[LANES];
} running;

/* z of exp(z): how a logit x becomes a number <= 0. */
enum { SCALE_NONE, SCALE_RECIPROCAL, SCALE_DIVIDE, SCALE_SHIFT };
typedef struct scaling {
    double temperature; /* T > 0, finite */
    double reciprocal;  /* 1/T */
    double largest;     /* max x */
    double top;         /* SCALE_SHIFT: max x; else max x/T as `scaled` gives it */
    int rule;           /* NONE: x - top (T = 1); RECIPROCAL, DIVIDE: x/T - top; SHIFT: (x - top)/T */
} scaling;

/* Running maximum and float32 sum of 2^((x - top) * per_unit). */
typedef struct streamed {
    double top, sum;
} streamed;

/* One bucket of a histogram of probabilities by their leading bits. */
typedef struct bucket {
    double mass, count;
} bucket;

typedef struct kernels {
    const char *isa;
    int fused; /* has a fused multiply-add; exp_narrow is accurate only then */

    /* The value of a running sum. */
    double (*total)(const running *sum);

    /* ---- conversion ---- */
    void (*widen_f16)(const uint16_t *x, float *out, size_t n);
    void (*widen_bf16)(const uint16_t *x, float *out, size_t n);
    void (*widen_f32)(const float *x, double *out, size_t n);

    /* ---- logits ---- */
    /* Largest element; NaN if there is one, -inf when there is none. */
    double (*max_f32)(const float *x, size_t n);
    double (*max_f64)(const double *x, size_t n);
    /* x/T as the exponentials below see it. */
    double (*scaled)(double x, const scaling *s);
    /* out = exp(z), added to *total. -inf gives 0, NaN gives NaN; in place allowed for float64. */
    void (*exp_f32)(const float *x, size_t n, const scaling *s, double *out, running *total);
    void (*exp_f64)(const double *x, size_t n, const scaling *s, double *out, running *total);
    /* The same total, bit for bit, without storing. */
    void (*exp_sum_f32)(const float *x, size_t n, const scaling *s, running *total);
    void (*exp_sum_f64)(const double *x, size_t n, const scaling *s, running *total);
    /* out = exp(z) times a common factor near 1, within 2 float32 ulp, for |top| < 2^16 and T within
     * 2^-60..2^60; the total is summed in float64. */
    void (*exp_narrow)(const float *x, size_t n, const scaling *s, float *out, running *total);
    /* SIDE_BY_SIDE maxima per CHUNK; nonzero if a NaN was met. */
    int (*block_maxima_f32)(const float *x, size_t n, double *maxima);
    int (*block_maxima_f64)(const double *x, size_t n, double *maxima);
    /* The same, and the running float32 sum; per_unit = log2(e)/T. */
    int (*block_maxima_sum_f32)(const float *x, size_t n, double per_unit, double *maxima, streamed *run);
    int (*block_maxima_sum_f64)(const double *x, size_t n, double per_unit, double *maxima, streamed *run);
    /* The terms of that sum one by one, at 2^((x - top) * per_unit); below 2^-100 they count as that. */
    void (*rough_exp_f32)(const float *x, size_t n, float top, double per_unit, float *out);
    void (*rough_exp_f64)(const double *x, size_t n, float top, double per_unit, float *out);
    /* Elements >= threshold in order, with base + place as their ids; returns how many. */
    size_t (*collect_f32)(const float *x, size_t n, double threshold, int64_t base, int64_t *ids, double *values);
    size_t (*collect_f64)(const double *x, size_t n, double threshold, int64_t base, int64_t *ids, double *values);

    /* ---- probabilities ---- */
    /* out = x / divisor, both sides finite; in place allowed. */
    void (*divide_f64)(const double *x, size_t n, double divisor, double *out);
    void (*divide_f32)(const float *x, size_t n, double divisor, float *out);
    /* As block_maxima_f64; nonzero if an element is negative or NaN. */
    int (*block_maxima_checked)(const double *p, size_t n, double *maxima);
    /* One sum per BLOCK; nonzero if an element is negative or NaN. */
    int (*block_sums)(const double *p, size_t n, double *sums);
    /* One sum of (p - q)+ per BLOCK, NaN counted as 0. */
    void (*block_sums_residual)(const double *p, const double *q, size_t n, double *sums);
    /* One sum of (p * p_unit - q * q_unit)+ per BLOCK, within 13 float32 roundings. */
    void (*block_sums_rough)(const float *p, const float *q, size_t n, float p_unit, float q_unit, double *sums);
    /* The same of (factor * p - multiple * q)+; both products are rounded. */
    void (*block_sums_scaled)(const double *p, const double *q, size_t n, double factor, double multiple,
                              double *sums);
    /* Per BLOCK the sum of p where p <= ratio * q, the sum of q elsewhere, and a number that grows with how
     * many elements the first has, whatever the ratio. */
    void (*block_sums_parted)(const double *p, const double *q, size_t n, double ratio, double *p_sums,
                              double *q_sums, int64_t *counts);
    /* The same; and per BLOCK the sum of all p, of the whole the largest q (NaN passed over, 0 if there is none).
     * Nonzero if an element has a sign, as -0.0 has. */
    int (*block_sums_checked)(const double *p, const double *q, size_t n, double ratio, double *p_sums,
                              double *q_sums, int64_t *counts, double *totals, double *largest);
    /* block_sums_parted at high, and the counts that it has at low. */
    void (*block_sums_between)(const double *p, const double *q, size_t n, double low, double high,
                               double *p_sums, double *q_sums, int64_t *low_counts, int64_t *counts);
    /* out = (p - q)+, NaN and inf counted as 0, added to *total. */
    void (*residual)(const double *p, const double *q, size_t n, double *out, running *total);
    /* Adds p to *total; nonzero if an element is negative or NaN. */
    int (*weigh)(const double *p, size_t n, running *total);
    /* Elements >= bound, packed in order into values (room for n); hits[i], unless NULL, is nonzero
     * where one of the HIT_GROUP elements from HIT_GROUP * i on is among them (whole groups only); *bad is set
     * nonzero if an element is negative or NaN. Returns how many. */
    size_t (*split)(const double *p, size_t n, double bound, double *values, uint8_t *hits, int *bad);
    /* Smallest and largest element, n >= 1, no NaN. */
    void (*range)(const double *values, size_t n, double *low, double *high);
    /* The elements within [low, high), packed in order into inside, which has room for `most` and 16 more; it
     * stops there. Returns how many. */
    size_t (*between)(const double *values, size_t n, double low, double high, size_t most, double *inside);
    /* Adds element v to bucket (bits of v >> shift) - (low >> shift) of one of TABLES tables, which lie one
     * behind the other, for bits within [low, high); others are passed over. */
    void (*histogram)(const double *values, size_t n, uint64_t low, uint64_t high, int shift, bucket *tables,
                      size_t buckets);
    /* The place behind the first `wanted` elements that equal value; n if there are fewer. */
    size_t (*past_equal)(const double *p, size_t n, double value, size_t wanted);
    /* Sum of the elements >= threshold, added to *total. */
    void (*sum_at_least)(const double *values, size_t n, double threshold, running *total);
    /* out = p >= threshold ? p / divisor : 0; in place allowed. Where hits (of `split`, or NULL) are 0 nothing
     * is read, and nothing kept. */
    void (*keep)(const double *p, size_t n, double threshold, double divisor, const uint8_t *hits, double *out);

    /* ---- laws ---- */
    /* Sum of min(p, q), added to *total. */
    void (*overlap)(const double *p, const double *q, size_t n, running *total);
    /* out = min(p, q) + rate * (p - q)+. */
    void (*marginal)(const double *p, const double *q, size_t n, double rate, double *out);
    /* Sum of v log v for v = p * scale > 0, added to *total. */
    void (*sum_p_log_p)(const double *p, size_t n, double scale, running *total);
} kernels;

/* Best table for this CPU, or the named one; NULL when it is unknown or cannot run here. */
const kernels *select_kernels(const char *isa);

/* Name of table number i in the order of preference, NULL past the last; built, not necessarily able to run. */
const char *built_kernels(int i);

#endif
