/* AVX2 with FMA and F16C: 8 floats at a time. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "native.h"

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE TARGET static inline __attribute__((always_inline))
#define LINKAGE TARGET static
#define VEC __m256
#define VEC_W __m256
#define VECS 4
#define CHUNK 32
#define XTYPE float
#define MOST 3
#define ZERO _mm256_setzero_ps()
#define XLOAD(p) _mm256_loadu_ps(p)
#define FMA(w, x, a) _mm256_fmadd_ps(w, x, a)
#define SUM4(a, b, c, d, out) ((out)[0] = sum(a), (out)[1] = sum(b), (out)[2] = sum(c), (out)[3] = sum(d))

INLINE float sum(__m256 a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

INLINE __m128i eight_bytes(const uint8_t *p) { return _mm_loadl_epi64((const __m128i *)p); }

INLINE __m256 load_bf16(const uint8_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

INLINE __m256 load_int8(const uint8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight_bytes(p))); }

/* e4m3 placed in a half float is the value times 2^-8, subnormals included; the row's scale takes the 2^8. */
INLINE __m256 load_fp8(const uint8_t *p) {
    __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(eight_bytes(p)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16((short)0xBF80)));
}

/* Vectors 0 and 1 are the low nibbles of bytes 0-7 and 8-15, 2 and 3 the high ones; the table holds twice the value. */
INLINE __m256 load_mxfp4(const uint8_t *p, int v, float scale) {
    const __m128i twice = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    __m128i bytes = eight_bytes(p + 8 * (v & 1));
    if (v >= 2) bytes = _mm_srli_epi16(bytes, 4);
    __m128i values = _mm_shuffle_epi8(twice, _mm_and_si128(bytes, _mm_set1_epi8(15)));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(values)), _mm256_set1_ps(0.5f * scale));
}

/* The exponent of every code, in both halves; code 0: none. */
INLINE __m256i open_bf12(const uint8_t *head) {
    const __m128i codes = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m128i exponents = _mm_add_epi8(codes, _mm_set1_epi8((char)(head[0] - 15)));
    return _mm256_broadcastsi128_si256(_mm_andnot_si128(_mm_cmpeq_epi8(codes, _mm_setzero_si128()), exponents));
}

/* Codes lie as in mxfp4. Sixteen weights become words of bf16 first, placed so that unpacking those gives floats in
 * order. */
INLINE __m256 load_bf12(const uint8_t *p, int v, __m256i exponents) {
    const __m256i twice = _mm256_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 8, 8, 9, 9, 10, 10, 11, 11, 4, 4, 5, 5, 6, 6, 7, 7,
                                           12, 12, 13, 13, 14, 14, 15, 15);
    const __m256i once = _mm256_or_si256(twice, _mm256_set1_epi16(0x0080));
    __m256i codes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(p + 16 + 8 * (v & 2))));
    if (v >= 2) codes = _mm256_srli_epi16(codes, 4);
    __m256i found = _mm256_shuffle_epi8(exponents, _mm256_and_si256(codes, _mm256_set1_epi8(15)));
    found = _mm256_srli_epi16(_mm256_shuffle_epi8(found, once), 1);
    bytes = _mm256_and_si256(_mm256_shuffle_epi8(bytes, twice), _mm256_set1_epi16((short)0x807F));
    __m256i words = _mm256_or_si256(bytes, found), zero = _mm256_setzero_si256();
    return _mm256_castsi256_ps(v & 1 ? _mm256_unpackhi_epi16(zero, words) : _mm256_unpacklo_epi16(zero, words));
}

#define NAME rows_fp32
#define BYTES 128
#define SCALED 0
#define LOAD(p, v, scale) _mm256_loadu_ps((const float *)((p) + 32 * (v)))
#include "rows.h"

#define NAME rows_bf16
#define BYTES 64
#define SCALED 0
#define LOAD(p, v, scale) load_bf16((p) + 16 * (v))
#include "rows.h"

#define NAME rows_int8
#define BYTES 32
#define SCALED 0
#define LOAD(p, v, scale) load_int8((p) + 8 * (v))
#include "rows.h"

#define NAME rows_fp8
#define BYTES 32
#define SCALED 0
#define LOAD(p, v, scale) load_fp8((p) + 8 * (v))
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
#define CONTEXT __m256i
#define OPEN(head) open_bf12(head)
#define LOAD(p, v, exponents) load_bf12(p, v, exponents)
#include "rows.h"

const fl_kernel fl_avx2_kernels[FL_FORMATS] = {rows_fp32,  rows_bf16, rows_int8, rows_fp8,
                                               rows_mxfp4, rows_fp8,  rows_bf12};
#endif
