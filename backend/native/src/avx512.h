/* What the AVX-512 kernels share. */
#ifndef FORELOAD_AVX512_H
#define FORELOAD_AVX512_H

#include <immintrin.h>

/* out[i] = the sum of the i-th vector, each by the same tree of additions. */
__attribute__((target("avx512f"))) static inline __attribute__((always_inline)) void fl_sum4(__m512 a, __m512 b,
                                                                                             __m512 c, __m512 d,
                                                                                             float *out) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), high);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

#endif
