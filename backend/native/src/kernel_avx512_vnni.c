/* AVX-512-VNNI: int8 weights with inputs of 16 bits and one scale per 64 of them; sums within a block are exact. */
#if defined(__x86_64__)
#include <string.h>

#include "avx512.h"
#include "native.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define INLINE TARGET static inline __attribute__((always_inline))
#define MOST 5

INLINE void one_block(int T, const uint8_t *const *w, const int16_t *const *x, const float *const *scale, size_t b,
                      __m512 acc[FL_ROWS][MOST]) {
#pragma GCC unroll 4
    for (int r = 0; r < FL_ROWS; r++) {
        __m512i low = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)w[r]));
        __m512i high = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(w[r] + 32)));
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            const int16_t *input = x[t] + b * FL_BLOCK;
            __m512i sum = _mm512_dpwssd_epi32(_mm512_setzero_si512(), low, _mm512_loadu_si512(input));
            sum = _mm512_dpwssd_epi32(sum, high, _mm512_loadu_si512(input + 32));
            acc[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scale[t][b]), acc[r][t]);
        }
    }
}

INLINE void block(int T, const uint8_t *const *w, const int16_t *const *x, size_t k, size_t jump,
                  float (*out)[FL_TOKENS]) {
    size_t blocks = k / FL_BLOCK, left = k % FL_BLOCK, padded = (k + FL_PAD - 1) / FL_PAD * FL_PAD;
    size_t last = blocks > FL_AHEAD / FL_BLOCK ? blocks - FL_AHEAD / FL_BLOCK : 0;
    __m512 acc[FL_ROWS][MOST];
    const uint8_t *row[FL_ROWS];
    const float *scale[MOST];
    uint8_t tail[FL_ROWS][FL_BLOCK];
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) scale[t] = (const float *)(x[t] + padded);
#pragma GCC unroll 4
    for (int r = 0; r < FL_ROWS; r++) {
        row[r] = w[r];
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) acc[r][t] = _mm512_setzero_ps();
    }
    for (size_t b = 0; b < blocks; b++) {
        size_t ahead = FL_AHEAD + (b < last ? 0 : jump);
#pragma GCC unroll 4
        for (int r = 0; r < FL_ROWS; r++) __builtin_prefetch(row[r] + ahead);
        one_block(T, row, x, scale, b, acc);
#pragma GCC unroll 4
        for (int r = 0; r < FL_ROWS; r++) row[r] += FL_BLOCK;
    }
    if (left) {
        memset(tail, 0, sizeof tail);
#pragma GCC unroll 4
        for (int r = 0; r < FL_ROWS; r++) {
            memcpy(tail[r], row[r], left);
            row[r] = tail[r];
        }
        one_block(T, row, x, scale, blocks, acc);
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
        float sums[FL_ROWS];
        fl_sum4(acc[0][t], acc[1][t], acc[2][t], acc[3][t], sums);
#pragma GCC unroll 4
        for (int r = 0; r < FL_ROWS; r++) out[r][t] = sums[r];
    }
}

TARGET void fl_avx512_vnni_rows(const uint8_t *const *w, const uint8_t *const *s, const void *const *x, int tokens,
                                size_t k, size_t jump, float (*out)[FL_TOKENS]) {
    (void)s;
    for (int t = 0; t < tokens;) {
        int left = tokens - t, blocks = (left + MOST - 1) / MOST, n = (left + blocks - 1) / blocks;
        const int16_t *const *here = (const int16_t *const *)(x + t);
        float(*there)[FL_TOKENS] = (float (*)[FL_TOKENS])(&out[0][t]);
        switch (n) {
            case 1: block(1, w, here, k, jump, there); break;
            case 2: block(2, w, here, k, jump, there); break;
            case 3: block(3, w, here, k, jump, there); break;
            case 4: block(4, w, here, k, jump, there); break;
            default: block(5, w, here, k, jump, there);
        }
        t += n;
    }
}
#endif
