/* AVX-512 (F, BW, VL): 16 floats at a time; bf16 pairs and VNNI in files of their own. */
#if defined(__x86_64__)
#include <string.h>

#include "avx512.h"
#include "native.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma,f16c")))
#define INLINE TARGET static inline __attribute__((always_inline))
#define LINKAGE TARGET static
#define VEC __m512
#define VEC_W __m512
#define VECS 2
#define CHUNK 32
#define XTYPE float
#define MOST 6
#define ZERO _mm512_setzero_ps()
#define XLOAD(p) _mm512_loadu_ps(p)
#define FMA(w, x, a) _mm512_fmadd_ps(w, x, a)
#define SUM4 fl_sum4

INLINE __m512 load_bf16(const uint8_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

INLINE __m512 load_int8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* As in kernel_avx2.c: the value times 2^-8. */
INLINE __m512 load_fp8(const uint8_t *p) {
    __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16((short)0xBF80)));
}

/* Vector 0 is the low nibbles, 1 the high ones; the permutation looks at the lowest four bits alone. */
INLINE __m512 load_mxfp4(const uint8_t *p, int v, float scale) {
    const __m512 values = _mm512_loadu_ps(fl_fp4_values);
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    if (v) wide = _mm512_srli_epi32(wide, 4);
    return _mm512_mul_ps(_mm512_permutexvar_ps(wide, values), _mm512_set1_ps(scale));
}

/* Every code's exponent, where a float has it; code 0: none. */
INLINE __m512i open_bf12(const uint8_t *head) {
    const __m512i codes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_maskz_slli_epi32(0xFFFE, _mm512_add_epi32(codes, _mm512_set1_epi32(head[0] - 15)), 23);
}

/* Codes lie as in mxfp4. A byte of sign and mantissa goes to both of a float's upper bytes, and its half of each stays. */
INLINE __m512 load_bf12(const uint8_t *p, int v, __m512i exponents) {
    const __m512i top = _mm512_setr_epi32(0x00008080, 0x01018080, 0x02028080, 0x03038080, 0x04048080, 0x05058080,
                                          0x06068080, 0x07078080, 0x08088080, 0x09098080, 0x0A0A8080, 0x0B0B8080,
                                          0x0C0C8080, 0x0D0D8080, 0x0E0E8080, 0x0F0F8080);
    __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    if (v) codes = _mm512_srli_epi32(codes, 4);
    __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(p + 16 + 16 * v)));
    bytes = _mm512_shuffle_epi8(bytes, top);
    __m512i exponent = _mm512_permutexvar_epi32(codes, exponents);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bytes, _mm512_set1_epi32((int)0x807F0000), exponent, 0xEA));
}

#define NAME rows_fp32
#define BYTES 128
#define SCALED 0
#define LOAD(p, v, scale) _mm512_loadu_ps((const float *)((p) + 64 * (v)))
#include "rows.h"

#define NAME rows_bf16
#define BYTES 64
#define SCALED 0
#define LOAD(p, v, scale) load_bf16((p) + 32 * (v))
#include "rows.h"

#define NAME rows_int8
#define BYTES 32
#define SCALED 0
#define LOAD(p, v, scale) load_int8((p) + 16 * (v))
#include "rows.h"

#define NAME rows_fp8
#define BYTES 32
#define SCALED 0
#define LOAD(p, v, scale) load_fp8((p) + 16 * (v))
#include "rows.h"

#define NAME rows_mxfp4
#define BYTES 16
#define SCALED 1
#define LOAD(p, v, scale) load_mxfp4(p, v, scale)
#include "rows.h"

#define NAME rows_bf12
#define BYTES 48
#define SCALED 0
#define HEAD FL_HEAD
#define CONTEXT __m512i
#define OPEN(head) open_bf12(head)
#define LOAD(p, v, exponents) load_bf12(p, v, exponents)
#include "rows.h"

const fl_kernel fl_avx512_kernels[FL_FORMATS] = {rows_fp32,  rows_bf16, rows_int8, rows_fp8,
                                                 rows_mxfp4, rows_fp8,  rows_bf12};
#endif
