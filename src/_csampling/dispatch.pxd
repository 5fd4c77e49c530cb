from libc.stdint cimport int64_t, uint8_t, uint16_t, uint64_t


cdef extern from "kernels.h" nogil:
    enum:
        CHUNK
        BLOCK
        SIDE_BY_SIDE
        HIT_GROUP
        TABLES
        SCALE_NONE
        SCALE_RECIPROCAL
        SCALE_DIVIDE
        SCALE_SHIFT
        LANES
    ctypedef struct running:
        double sum[16]   # LANES
        double lost[16]
    ctypedef struct scaling:
        double temperature
        double reciprocal
        double largest
        double top
        int rule
    ctypedef struct streamed:
        double top
        double sum
    ctypedef struct bucket:
        double mass
        double count
    ctypedef struct kernels:
        const char *isa
        bint fused
        double (*total)(const running *sum) noexcept nogil
        void (*widen_f16)(const uint16_t *x, float *out, size_t n) noexcept nogil
        void (*widen_bf16)(const uint16_t *x, float *out, size_t n) noexcept nogil
        void (*widen_f32)(const float *x, double *out, size_t n) noexcept nogil
        double (*max_f32)(const float *x, size_t n) noexcept nogil
        double (*max_f64)(const double *x, size_t n) noexcept nogil
        double (*scaled)(double x, const scaling *s) noexcept nogil
        void (*exp_f32)(const float *x, size_t n, const scaling *s, double *out,
                        running *total) noexcept nogil
        void (*exp_f64)(const double *x, size_t n, const scaling *s, double *out,
                        running *total) noexcept nogil
        void (*exp_sum_f32)(const float *x, size_t n, const scaling *s, running *total) noexcept nogil
        void (*exp_sum_f64)(const double *x, size_t n, const scaling *s, running *total) noexcept nogil
        void (*exp_narrow)(const float *x, size_t n, const scaling *s, float *out,
                           running *total) noexcept nogil
        int (*block_maxima_f32)(const float *x, size_t n, double *maxima) noexcept nogil
        int (*block_maxima_f64)(const double *x, size_t n, double *maxima) noexcept nogil
        int (*block_maxima_sum_f32)(const float *x, size_t n, double per_unit, double *maxima,
                                    streamed *run) noexcept nogil
        int (*block_maxima_sum_f64)(const double *x, size_t n, double per_unit, double *maxima,
                                    streamed *run) noexcept nogil
        void (*rough_exp_f32)(const float *x, size_t n, float top, double per_unit,
                              float *out) noexcept nogil
        void (*rough_exp_f64)(const double *x, size_t n, float top, double per_unit,
                              float *out) noexcept nogil
        size_t (*collect_f32)(const float *x, size_t n, double threshold, int64_t base, int64_t *ids,
                              double *values) noexcept nogil
        size_t (*collect_f64)(const double *x, size_t n, double threshold, int64_t base, int64_t *ids,
                              double *values) noexcept nogil
        void (*divide_f64)(const double *x, size_t n, double divisor, double *out) noexcept nogil
        void (*divide_f32)(const float *x, size_t n, double divisor, float *out) noexcept nogil
        int (*block_maxima_checked)(const double *p, size_t n, double *maxima) noexcept nogil
        int (*block_sums)(const double *p, size_t n, double *sums) noexcept nogil
        void (*block_sums_residual)(const double *p, const double *q, size_t n, double *sums) noexcept nogil
        void (*block_sums_rough)(const float *p, const float *q, size_t n, float p_unit, float q_unit,
                                 double *sums) noexcept nogil
        void (*block_sums_scaled)(const double *p, const double *q, size_t n, double factor,
                                  double multiple, double *sums) noexcept nogil
        void (*block_sums_parted)(const double *p, const double *q, size_t n, double ratio, double *p_sums,
                                  double *q_sums, int64_t *counts) noexcept nogil
        int (*block_sums_checked)(const double *p, const double *q, size_t n, double ratio, double *p_sums,
                                  double *q_sums, int64_t *counts, double *totals,
                                  double *largest) noexcept nogil
        void (*block_sums_between)(const double *p, const double *q, size_t n, double low, double high,
                                   double *p_sums, double *q_sums, int64_t *low_counts,
                                   int64_t *counts) noexcept nogil
        void (*residual)(const double *p, const double *q, size_t n, double *out,
                         running *total) noexcept nogil
        int (*weigh)(const double *p, size_t n, running *total) noexcept nogil
        size_t (*split)(const double *p, size_t n, double bound, double *values, uint8_t *hits,
                        int *bad) noexcept nogil
        void (*range)(const double *values, size_t n, double *low, double *high) noexcept nogil
        size_t (*between)(const double *values, size_t n, double low, double high, size_t most,
                          double *inside) noexcept nogil
        void (*histogram)(const double *values, size_t n, uint64_t low, uint64_t high, int shift,
                          bucket *tables, size_t buckets) noexcept nogil
        size_t (*past_equal)(const double *p, size_t n, double value, size_t wanted) noexcept nogil
        void (*sum_at_least)(const double *values, size_t n, double threshold, running *total) noexcept nogil
        void (*keep)(const double *p, size_t n, double threshold, double divisor, const uint8_t *hits,
                     double *out) noexcept nogil
        void (*overlap)(const double *p, const double *q, size_t n, running *total) noexcept nogil
        void (*marginal)(const double *p, const double *q, size_t n, double rate, double *out) noexcept nogil
        void (*sum_p_log_p)(const double *p, size_t n, double scale, running *total) noexcept nogil
    const kernels *select_kernels(const char *isa) noexcept
    const char *built_kernels(int i) noexcept

# The table in use. Every module reads this one variable, so a switch reaches all of them.
cdef const kernels *table

# Certificates: a decision taken by a fast quantity is certain when it is farther from the threshold
# than the error bound. Each place that may have to fall back to the reference's own order counts it.
cdef enum certificate:
    NUCLEUS_BOUNDARY      # top-p over given probabilities: sums replayed in rank order
    NUCLEUS_AGAINST_SUM   # top-p among the top-k of logits: float64 sum of all exponentials taken
    RANK_TIE              # probabilities at a cut too close to rank by their exponentials
    CATEGORICAL_DRAW      # a draw: cumulative sums replayed sequentially
    CORRECTION_DRAW       # a draw from the residual: the same
    ACCEPT_TEST           # a coin against a ratio of rough probabilities: exact sums taken
    ROUGH_DRAW            # a draw from softmaxes by float32 terms: float64 exponentials taken
    ONE_PASS_DRAW         # a draw from softmaxes over rough sums: exponentials taken again over exact ones
    KEEP_TEST             # a coin against h of the block rule: the residual's mass summed by ascending id
    TYPICAL_THRESHOLD     # p(x) against the threshold of typical acceptance: the entropy as it is defined
    CASCADE_DISTANCE      # max q against max p - alpha TV: the distance as it is defined
    DIVISION_BRACKET      # r of kseq: no certified ends close to it
    DIVISION_DRAW         # a draw from what kseq leaves: written out, and drawn from as any row
    CERTIFICATES

cdef extern from *:
    """
    #include <stdint.h>
    #define MTPLX_COUNT(counter) ((void)__atomic_fetch_add(&(counter), 1, __ATOMIC_RELAXED))
    """
    void MTPLX_COUNT(uint64_t counter) noexcept nogil

cdef uint64_t *fallbacks

cdef inline void count_fallback(certificate which) noexcept nogil:
    MTPLX_COUNT(fallbacks[<int>which])
