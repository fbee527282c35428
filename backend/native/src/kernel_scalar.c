/* Any processor: plain C on vectors of 16 floats, which the compiler turns into what the build's baseline has. */
#include <string.h>

#include "native.h"

typedef float vec __attribute__((vector_size(64)));
typedef uint32_t bits __attribute__((vector_size(64)));

#define TARGET
#define INLINE static inline __attribute__((always_inline))
#define LINKAGE static
#define VEC vec
#define VEC_W vec
#define VECS 2
#define CHUNK 32
#define XTYPE float
#define MOST 1
#define ZERO ((vec){0})
#define XLOAD(p) load_floats(p)
#define FMA(w, x, a) ((w) * (x) + (a))
#define SUM4(a, b, c, d, out) ((out)[0] = sum(a), (out)[1] = sum(b), (out)[2] = sum(c), (out)[3] = sum(d))

INLINE float sum(vec a) {
    float part[16];
    memcpy(part, &a, sizeof part);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

INLINE vec load_floats(const void *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vec load_bf16(const uint8_t *p) {
    uint16_t words[16];
    bits wide;
    vec v;
    memcpy(words, p, sizeof words);
    for (int i = 0; i < 16; i++) wide[i] = (uint32_t)words[i] << 16;
    memcpy(&v, &wide, sizeof v);
    return v;
}

INLINE vec load_int8(const uint8_t *p) {
    vec v;
    for (int i = 0; i < 16; i++) v[i] = (float)(int8_t)p[i];
    return v;
}

/* e4m3 placed in a float is the value times 2^-120, subnormals included; the row's scale takes the last 2^8. */
INLINE vec load_fp8(const uint8_t *p) {
    bits wide;
    vec v;
    for (int i = 0; i < 16; i++) wide[i] = (uint32_t)(p[i] & 128) << 24 | (uint32_t)(p[i] & 127) << 20;
    memcpy(&v, &wide, sizeof v);
    return v * 0x1p112f;
}

INLINE vec load_mxfp4(const uint8_t *p, int v, float scale) {
    vec values;
    for (int i = 0; i < 16; i++) values[i] = fl_fp4_values[v ? p[i] >> 4 : p[i] & 15] * scale;
    return values;
}

/* Codes lie as in mxfp4; 0 is no exponent. */
INLINE vec load_bf12(const uint8_t *p, int v, uint32_t base) {
    bits wide;
    vec weights;
    for (int i = 0; i < 16; i++) {
        uint32_t code = v ? p[i] >> 4 : p[i] & 15, byte = p[16 + 16 * v + i];
        wide[i] = (byte & 128) << 24 | (byte & 127) << 16 | ((base + code) << 23 & -(uint32_t)(code != 0));
    }
    memcpy(&weights, &wide, sizeof weights);
    return weights;
}

#define NAME rows_fp32
#define BYTES 128
#define SCALED 0
#define LOAD(p, v, scale) load_floats((p) + 64 * (v))
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
#define CONTEXT uint32_t
#define OPEN(head) ((head)[0] - 15u)
#define LOAD(p, v, base) load_bf12(p, v, base)
#include "rows.h"

const fl_kernel fl_scalar_kernels[FL_FORMATS] = {rows_fp32,  rows_bf16, rows_int8, rows_fp8,
                                                 rows_mxfp4, rows_fp8,  rows_bf12};
