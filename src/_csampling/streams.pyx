"""Keyed uniforms: Philox 4x64 with 10 rounds.

A number depends on its key and lane alone, so that what a sequence draws does not depend on the order of
a batch, on its neighbours, or on threads.

J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from libc.stdint cimport uint64_t

cdef extern from *:
    """
    #include <stdint.h>
    #if defined(__SIZEOF_INT128__)
    __extension__ typedef unsigned __int128 mtplx_uint128;
    static inline uint64_t mtplx_multiply_high(uint64_t a, uint64_t b)
    {
        return (uint64_t)(((mtplx_uint128)a * b) >> 64);
    }
    #else
    static inline uint64_t mtplx_multiply_high(uint64_t a, uint64_t b)
    {
        const uint64_t a0 = a & 0xffffffffu, a1 = a >> 32, b0 = b & 0xffffffffu, b1 = b >> 32;
        const uint64_t low = a0 * b0, left = a1 * b0, right = a0 * b1;
        const uint64_t middle = (low >> 32) + (left & 0xffffffffu) + (right & 0xffffffffu);
        return a1 * b1 + (left >> 32) + (right >> 32) + (middle >> 32);
    }
    #endif
    """
    uint64_t mtplx_multiply_high(uint64_t a, uint64_t b) noexcept nogil

CORRECTION_LANE = 2 ** 32
BONUS_LANE = 2 ** 32 + 1

cdef uint64_t MULTIPLIER_0 = 0xD2E7470EE14C6C93
cdef uint64_t MULTIPLIER_1 = 0xCA5A826395121157
cdef uint64_t WEYL_0 = 0x9E3779B97F4A7C15
cdef uint64_t WEYL_1 = 0xBB67AE8584CAA73B


cdef double keyed_uniform(uint64_t seed, uint64_t position, uint64_t lane) noexcept nogil:
    # NumPy increments the counter before it draws.
    cdef uint64_t c0 = 1, c1 = lane, c2 = 0, c3 = 0
    cdef uint64_t k0 = seed, k1 = position
    cdef uint64_t high_0, high_1, low_0, low_1
    cdef int rounds
    for rounds in range(10):
        if rounds:
            k0 += WEYL_0
            k1 += WEYL_1
        high_0 = mtplx_multiply_high(MULTIPLIER_0, c0)
        low_0 = MULTIPLIER_0 * c0
        high_1 = mtplx_multiply_high(MULTIPLIER_1, c2)
        low_1 = MULTIPLIER_1 * c2
        c0 = high_1 ^ c1 ^ k0
        c1 = low_1
        c2 = high_0 ^ c3 ^ k1
        c3 = low_0
    return (c0 >> 11) * (1.0 / 9007199254740992.0)
