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

const fl_kernel fl_avx512_kernels[FL_FORMATS] = {rows_fp32, rows_bf16, rows_int8, rows_fp8, rows_mxfp4, rows_fp8};
#endif
