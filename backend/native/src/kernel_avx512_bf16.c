/* AVX-512-BF16: weights and inputs in bf16, 32 products an instruction. */
#if defined(__x86_64__)
#include <string.h>

#include "avx512.h"
#include "native.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define LINKAGE TARGET
#define VEC __m512
#define VEC_W __m512i
#define VECS 2
#define CHUNK 64
#define XTYPE uint16_t
#define MOST 6
#define ZERO _mm512_setzero_ps()
#define XLOAD(p) _mm512_loadu_si512(p)
#define FMA(w, x, a) _mm512_dpbf16_ps(a, (__m512bh)(w), (__m512bh)(x))
#define SUM4 fl_sum4

#define NAME fl_avx512_bf16_rows
#define BYTES 128
#define SCALED 0
#define LOAD(p, v, scale) _mm512_loadu_si512((p) + 64 * (v))
#include "rows.h"
#endif
