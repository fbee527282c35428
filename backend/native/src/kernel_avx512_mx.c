/* AVX-512-BF16 on mxfp4: weights become bf16 by a permutation, exactly; two blocks of 32 share an instruction. */
#if defined(__x86_64__)
#include <string.h>

#include "avx512.h"
#include "native.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define INLINE TARGET static inline __attribute__((always_inline))
#define MOST 5
#define PAIR 64 /* weights, 32 bytes: two blocks */

/* The 16 values in bf16, twice: a permutation looks at five bits. */
static const uint16_t values[32] = {
    0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040,
    0xC080, 0xC0C0, 0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0,
    0xC000, 0xC040, 0xC080, 0xC0C0,
};

/* 32 bytes of each row: the low nibbles' products with the first 32 inputs, the high ones' with the others. */
INLINE void pair(int T, const uint8_t *const *row, const uint8_t *const *s, const uint16_t *const *x, __m512i table,
                 __m512 acc[FL_ROWS][MOST]) {
#pragma GCC unroll 4
    for (int r = 0; r < FL_ROWS; r++) {
        __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)row[r]));
        __m512bh low = (__m512bh)_mm512_permutexvar_epi16(words, table);
        __m512bh high = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
        __m512 scale = _mm512_set1_ps(fl_e8m0_values[s[r][0]]);
        scale = _mm512_mask_mov_ps(scale, 0xFF00, _mm512_set1_ps(fl_e8m0_values[s[r][1]]));
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            __m512 sum = _mm512_dpbf16_ps(_mm512_setzero_ps(), low, (__m512bh)_mm512_loadu_si512(x[t]));
            sum = _mm512_dpbf16_ps(sum, high, (__m512bh)_mm512_loadu_si512(x[t] + 32));
            acc[r][t] = _mm512_fmadd_ps(sum, scale, acc[r][t]);
        }
    }
}

INLINE void block(int T, const uint8_t *const *w, const uint8_t *const *s, const uint16_t *const *x, size_t k,
                  size_t jump, float (*out)[FL_TOKENS]) {
    const __m512i table = _mm512_loadu_si512(values);
    size_t blocks = (k + 31) / 32, pairs = blocks / 2;
    size_t last = pairs > FL_AHEAD / 32 ? pairs - FL_AHEAD / 32 : 0;
    __m512 acc[FL_ROWS][MOST];
    const uint8_t *row[FL_ROWS], *scale[FL_ROWS];
    const uint16_t *input[MOST];
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) input[t] = x[t];
#pragma GCC unroll 4
    for (int r = 0; r < FL_ROWS; r++) {
        row[r] = w[r], scale[r] = s[r];
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) acc[r][t] = _mm512_setzero_ps();
    }
    for (size_t p = 0; p < pairs; p++) {
        size_t ahead = FL_AHEAD + (p < last ? 0 : jump);
#pragma GCC unroll 4
        for (int r = 0; r < FL_ROWS; r++) __builtin_prefetch(row[r] + ahead);
        pair(T, row, scale, input, table, acc);
#pragma GCC unroll 4
        for (int r = 0; r < FL_ROWS; r++) row[r] += PAIR / 2, scale[r] += 2;
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) input[t] += PAIR;
    }
    if (blocks % 2) {
        uint8_t tail[FL_ROWS][PAIR / 2] = {{0}}, ones[FL_ROWS][2];
#pragma GCC unroll 4
        for (int r = 0; r < FL_ROWS; r++) {
            memcpy(tail[r], row[r], PAIR / 4);
            ones[r][0] = scale[r][0], ones[r][1] = 127;
            row[r] = tail[r], scale[r] = ones[r];
        }
        pair(T, row, scale, input, table, acc);
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
        float sums[FL_ROWS];
        fl_sum4(acc[0][t], acc[1][t], acc[2][t], acc[3][t], sums);
#pragma GCC unroll 4
        for (int r = 0; r < FL_ROWS; r++) out[r][t] = sums[r];
    }
}

TARGET void fl_avx512_mx_rows(const uint8_t *const *w, const uint8_t *const *s, const void *const *x, int tokens,
                              size_t k, size_t jump, float (*out)[FL_TOKENS]) {
    for (int t = 0; t < tokens;) {
        int left = tokens - t, blocks = (left + MOST - 1) / MOST, n = (left + blocks - 1) / blocks;
        const uint16_t *const *here = (const uint16_t *const *)(x + t);
        float(*there)[FL_TOKENS] = (float (*)[FL_TOKENS])(&out[0][t]);
        switch (n) {
            case 1: block(1, w, s, here, k, jump, there); break;
            case 2: block(2, w, s, here, k, jump, there); break;
            case 3: block(3, w, s, here, k, jump, there); break;
            case 4: block(4, w, s, here, k, jump, there); break;
            default: block(5, w, s, here, k, jump, there);
        }
        t += n;
    }
}
#endif
