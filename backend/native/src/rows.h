/* Template of the kernels of one format on one instruction set: dot products of up to FL_ROWS rows of weights with up to
 * FL_TOKENS tokens. Included once per format with these macros:
 *   NAME     of the function                TARGET   attribute that permits the instructions
 *   VEC      vector of floats               VECS     vectors in a chunk of CHUNK elements
 *   BYTES    bytes of a chunk of weights    LOAD     (chunk of a row, vector number, its context) -> weights as VEC_W
 *   SCALED   1 if a scale byte goes with every chunk (mxfp4)       MOST   tokens (1, 3 or 6) whose sums fit the registers
 *   XLOAD, FMA, SUM4, ZERO, XTYPE, CHUNK
 * and with these where rows begin with a head and are whole chunks (bf12):
 *   HEAD     bytes of it                    OPEN     (head) -> the row's context, a CONTEXT; else that is a scale
 *
 * Four rows at a time, whatever the number of tokens, and one running sum per (row, token): a weight is unpacked once per
 * MOST tokens, and a token's result does not depend on its company. While more tokens go over rows that are in the caches,
 * the rows read next are fetched. */

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define FN(part) JOIN(NAME, part)
#ifndef HEAD
#define HEAD 0
#define CONTEXT float
#define OPEN(head) 1.0f
#endif

TARGET static inline __attribute__((always_inline)) void FN(_chunk)(int T, const uint8_t *const *w, const CONTEXT *context,
                                                                    const XTYPE *const *x, size_t at,
                                                                    VEC acc[FL_ROWS][MOST]) {
    (void)context;
#if MOST == 3 /* few registers: one row's weights at a time */
#pragma GCC unroll 4
    for (int r = 0; r < FL_ROWS; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++) {
            VEC_W weight = LOAD(w[r], v, context[r]);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++)
                acc[r][t] = FMA(weight, XLOAD(x[t] + at + v * (CHUNK / VECS)), acc[r][t]);
        }
    }
#else
#pragma GCC unroll 8
    for (int v = 0; v < VECS; v++) {
        VEC_W weight[FL_ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < FL_ROWS; r++) weight[r] = LOAD(w[r], v, context[r]);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            VEC_W input = XLOAD(x[t] + at + v * (CHUNK / VECS));
#pragma GCC unroll 4
            for (int r = 0; r < FL_ROWS; r++) acc[r][t] = FMA(weight[r], input, acc[r][t]);
        }
    }
#endif
}

TARGET static inline __attribute__((always_inline)) void FN(_block)(int T, const uint8_t *const *w,
                                                                    const uint8_t *const *s, const XTYPE *const *x,
                                                                    size_t k, size_t jump, size_t far,
                                                                    float (*out)[FL_TOKENS]) {
    VEC acc[FL_ROWS][MOST];
    const uint8_t *row[FL_ROWS];
    CONTEXT context[FL_ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < FL_ROWS; r++) {
        row[r] = w[r] + HEAD;
        context[r] = OPEN(w[r]);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) acc[r][t] = ZERO;
    }
    int whole = SCALED || HEAD;
    size_t chunks = whole ? (k + CHUNK - 1) / CHUNK : k / CHUNK, left = whole ? 0 : k % CHUNK;
    size_t last = chunks > FL_AHEAD / BYTES ? chunks - FL_AHEAD / BYTES : 0;
    for (size_t c = 0; c < chunks; c++) {
        size_t ahead = far ? far : FL_AHEAD + (c < last ? 0 : jump);
#pragma GCC unroll 4
        for (int r = 0; r < FL_ROWS; r++) {
            __builtin_prefetch(row[r] + ahead);
#if SCALED
            context[r] = fl_e8m0(s[r][c]);
#endif
        }
        FN(_chunk)(T, row, context, x, c * CHUNK, acc);
#pragma GCC unroll 4
        for (int r = 0; r < FL_ROWS; r++) row[r] += BYTES;
    }
    if (left) {
        uint8_t tail[FL_ROWS][BYTES];
        memset(tail, 0, sizeof tail);
#pragma GCC unroll 4
        for (int r = 0; r < FL_ROWS; r++) {
            memcpy(tail[r], row[r], left * BYTES / CHUNK);
            row[r] = tail[r];
        }
        FN(_chunk)(T, row, context, x, chunks * CHUNK, acc);
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
        float sums[FL_ROWS];
        SUM4(acc[0][t], acc[1][t], acc[2][t], acc[3][t], sums);
#pragma GCC unroll 4
        for (int r = 0; r < FL_ROWS; r++) out[r][t] = sums[r];
    }
}

LINKAGE void NAME(const uint8_t *const *w, const uint8_t *const *s, const void *const *x, int tokens, size_t k,
                  size_t jump, float (*out)[FL_TOKENS]) {
    for (int t = 0; t < tokens;) {
        int left = tokens - t, blocks = (left + MOST - 1) / MOST, n = (left + blocks - 1) / blocks;
        const XTYPE *const *here = (const XTYPE *const *)(x + t);
        float(*there)[FL_TOKENS] = (float (*)[FL_TOKENS])(&out[0][t]);
        /* These rows are here: those read next are on their way. */
        size_t far = t ? HEAD + (k + CHUNK - 1) / CHUNK * BYTES + jump : 0;
        switch (n) {
            case 1: FN(_block)(1, w, s, here, k, jump, far, there); break;
#if MOST > 1
            case 2: FN(_block)(2, w, s, here, k, jump, far, there); break;
#endif
#if MOST > 2
            case 3: FN(_block)(3, w, s, here, k, jump, far, there); break;
#endif
#if MOST > 3
            case 4: FN(_block)(4, w, s, here, k, jump, far, there); break;
            case 5: FN(_block)(5, w, s, here, k, jump, far, there); break;
            default: FN(_block)(6, w, s, here, k, jump, far, there);
#endif
        }
        t += n;
    }
}

#undef JOIN_
#undef JOIN
#undef FN
#undef NAME
#undef LOAD
#undef BYTES
#undef SCALED
#undef HEAD
#undef CONTEXT
#undef OPEN
