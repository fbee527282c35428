/* AVX-512-VNNI: int8 weights with inputs of 16 bits and one scale per 64 of them; sums within a block are exact. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "native.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define INLINE TARGET static inline __attribute__((always_inline))
#define AHEAD 1024

INLINE void one_block(int R, int T, const uint8_t *const *w, const int16_t *const *x, const float *const *scale,
                      size_t b, __m512 acc[4][4]) {
    __m512i low[4], high[4];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        low[r] = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)w[r]));
        high[r] = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(w[r] + 32)));
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) {
        __m512i first = _mm512_loadu_si512(x[t] + b * FL_BLOCK), second = _mm512_loadu_si512(x[t] + b * FL_BLOCK + 32);
        __m512 factor = _mm512_set1_ps(scale[t][b]);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            __m512i sum = _mm512_dpwssd_epi32(_mm512_setzero_si512(), low[r], first);
            sum = _mm512_dpwssd_epi32(sum, high[r], second);
            acc[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), factor, acc[r][t]);
        }
    }
}

INLINE void block(int R, int T, const uint8_t *const *w, const int16_t *const *x, size_t k, float (*out)[FL_TOKENS]) {
    size_t blocks = k / FL_BLOCK, left = k % FL_BLOCK, padded = (k + FL_PAD - 1) / FL_PAD * FL_PAD;
    __m512 acc[4][4];
    const uint8_t *row[4];
    const float *scale[4];
    uint8_t tail[4][FL_BLOCK];
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) scale[t] = (const float *)(x[t] + padded);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        row[r] = w[r];
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) acc[r][t] = _mm512_setzero_ps();
    }
    for (size_t b = 0; b < blocks; b++) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) __builtin_prefetch(row[r] + AHEAD);
        one_block(R, T, row, x, scale, b, acc);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) row[r] += FL_BLOCK;
    }
    if (left) {
        memset(tail, 0, sizeof tail);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            memcpy(tail[r], row[r], left);
            row[r] = tail[r];
        }
        one_block(R, T, row, x, scale, blocks, acc);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) out[r][t] = _mm512_reduce_add_ps(acc[r][t]);
    }
}

TARGET static void some_tokens(const uint8_t *const *w, int rows, const int16_t *const *x, int tokens, size_t k,
                               float (*out)[FL_TOKENS]) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) switch (tokens) {
            case 1: block(4, 1, w + r, x, k, out + r); break;
            case 2: block(4, 2, w + r, x, k, out + r); break;
            case 3: block(4, 3, w + r, x, k, out + r); break;
            default: block(4, 4, w + r, x, k, out + r);
        }
    for (; r < rows; r++) switch (tokens) {
            case 1: block(1, 1, w + r, x, k, out + r); break;
            case 2: block(1, 2, w + r, x, k, out + r); break;
            case 3: block(1, 3, w + r, x, k, out + r); break;
            default: block(1, 4, w + r, x, k, out + r);
        }
}

TARGET void fl_avx512_vnni_rows(const uint8_t *const *w, const uint8_t *const *s, int rows, const void *const *x,
                                int tokens, size_t k, float (*out)[FL_TOKENS]) {
    (void)s;
    for (int t = 0; t < tokens; t += 4) {
        int n = tokens - t < 4 ? tokens - t : 4;
        some_tokens(w, rows, (const int16_t *const *)(x + t), n, k, (float (*)[FL_TOKENS])(&out[0][t]));
    }
}
#endif
