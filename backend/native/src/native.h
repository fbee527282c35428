/* The native library: experts on the CPU. What Python sees is declared here with FL_API; `library.py` mirrors it.
 *
 * Every output is one fixed sequence of operations on one row of weights and one token, whichever thread runs it and
 * however many tokens share the call: results depend on the instruction set alone. */
#ifndef FORELOAD_NATIVE_H
#define FORELOAD_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define FL_API __attribute__((visibility("default")))
#define FL_ABI 5

enum { FL_FP32, FL_BF16, FL_INT8, FL_FP8, FL_MXFP4, FL_FP8_TILE, FL_BF12, FL_FORMATS };
enum { FL_SCALAR, FL_AVX2, FL_AVX512, FL_AVX512_BF16, FL_AVX512_VNNI, FL_AVX512_ALL, FL_ISAS };
enum { FL_SILU, FL_SWIGLU_OAI };

/* A row of bf12, bf16 in 12 bits without loss: FL_HEAD bytes, then 48 for every 32 weights. 16 of these hold codes, that of
 * weight j below that of j + 16, and 32 a sign and mantissa each; code 15 is the exponent that the head begins with, the
 * others are next to it, and code 0 is 0. Weights that no code fits are +0 there and in the head: their number, two zeros,
 * then column and bf16 bits of each, two bytes both. */
#define FL_HEAD 48
#define FL_OUTLIERS 11

/* How inputs of a dot product are held: rows padded with zeros to whole chunks. X_MX: in blocks of 32, the even
 * elements before the odd ones, as the nibbles come apart. X_MX_BF16: two such blocks together, in bf16. X_I16: 16 bits,
 * with one scale per 64 after the row. */
enum { FL_X_F32, FL_X_MX, FL_X_MX_BF16, FL_X_I16 };

#define FL_ROWS 4    /* rows of weights in one call of a kernel */
#define FL_AHEAD 1024 /* bytes between what is used and what is fetched from memory */
#define FL_TOKENS 16 /* most tokens in one call of a kernel */
#define FL_PAD 64    /* elements to whose multiple inputs are padded */
#define FL_BLOCK 64  /* elements that share a scale in X_I16 */

/* out[r][t] = sum over k of w[r][k] x[t][k]; scale[r]: the e8m0 bytes of row r (mxfp4 alone). Row scales come later.
 * `jump`: from the end of a row to where the row that is read after it begins. */
typedef void (*fl_kernel)(const uint8_t *const w[FL_ROWS], const uint8_t *const scale[FL_ROWS], const void *const *x,
                          int tokens, size_t k, size_t jump, float out[FL_ROWS][FL_TOKENS]);

typedef struct {
    fl_kernel run;
    int x_kind;
} fl_choice;

/* The kernel for weights in `format` on an instruction set; `bf16_inputs`: activations hold no more than bf16. */
fl_choice fl_choose(int isa, int format, int bf16_inputs);

extern const fl_kernel fl_scalar_kernels[FL_FORMATS];
#if defined(__x86_64__)
extern const fl_kernel fl_avx2_kernels[FL_FORMATS];
extern const fl_kernel fl_avx512_kernels[FL_FORMATS];
void fl_avx512_mx_rows(const uint8_t *const *, const uint8_t *const *, const void *const *, int, size_t, size_t,
                       float (*)[FL_TOKENS]);
void fl_avx512_vnni_rows(const uint8_t *const *, const uint8_t *const *, const void *const *, int, size_t, size_t,
                         float (*)[FL_TOKENS]);
#endif

extern const float fl_fp4_values[16];
extern const float fl_e8m0_values[256];

/* 2^(e - 127); 255 is not a number. */
static inline float fl_e8m0(uint8_t exponent) { return fl_e8m0_values[exponent]; }

/* Where the parts of one expert's block lie, in bytes from its start; -1: the part is not there.
 * gate_up [2 width, hidden]: gate rows before up rows, or by turns if `interleaved`; down [hidden, width].
 * Scales: fp32 per row (int8, fp8) and tile of `tile` columns (fp8_tile), e8m0 bytes per 32 weights (mxfp4).
 * Biases: per row, in bf16 beside bf16 weights, else in fp32. */
typedef struct {
    int32_t format, activation, interleaved, bf16_inputs;
    int32_t hidden, width, tile;
    float alpha, limit;
    int64_t gate_up, down, gate_up_scale, down_scale, gate_up_bias, down_bias;
} fl_layout;

/* One layer-step's work: expert e has the (token, output row) pairs first[e] .. first[e + 1].
 *
 * With `weights` the outputs of a token are summed, weighted, in the order of its pairs: `out` is uint64 [tokens, hidden],
 * each word `tag` over the sum's fp32, so that who reads it needs no other word; rows of tokens without a pair stay.
 * `soon` becomes `tag` when a part of the work is left that takes much longer than a look at it. */
typedef struct {
    int32_t experts, tokens, x_bf16, out_bf16, tag;
    const void *const *blocks; /* [experts] */
    const int32_t *first;      /* [experts + 1] */
    const int32_t *x_rows;     /* [pairs] */
    const int32_t *out_rows;   /* [pairs], not read with weights */
    const float *weights;      /* [pairs] or NULL */
    int32_t *soon;             /* [1], with weights */
    const void *x;             /* [tokens, hidden], copied by fl_submit */
    void *out;                 /* [.., hidden], written until the ticket is done */
} fl_work;

typedef struct fl_pool fl_pool;

FL_API int fl_abi(void);
FL_API int fl_isa_supported(int isa);
FL_API int64_t fl_layout_size(void);
FL_API int64_t fl_work_size(void);
/* NULL if threads cannot be started. `spin_us`: how long an idle worker stays awake. */
FL_API fl_pool *fl_pool_new(int threads, int isa, int spin_us);
FL_API void fl_pool_free(fl_pool *pool); /* finishes what was submitted */
/* Bind the workers to the cores `cpus`, one each if there are enough, else all to all of them. 0, or an errno. */
FL_API int fl_pool_place(fl_pool *pool, const int32_t *cpus, int n);
/* A ticket from 0; -1 for a plan that is not valid, -2 without memory. */
FL_API int64_t fl_submit(fl_pool *pool, const fl_layout *layout, const fl_work *work);
/* An expert that the next job likely has (NULL: none): idle workers bring their rows of it into their caches, and the job
 * begins with it. `layout` must stay as long as the pool. How often it was called. */
FL_API int64_t fl_ahead(fl_pool *pool, const fl_layout *layout, const void *block);
FL_API int fl_done(fl_pool *pool, int64_t ticket);
/* Waits; span: CLOCK_MONOTONIC nanoseconds when the first worker began and the last ended. */
FL_API void fl_wait(fl_pool *pool, int64_t ticket, int64_t span[2]);

#endif
