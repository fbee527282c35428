/* Template of the kernels of one format on one instruction set: dot products of up to FL_ROWS rows of weights with up to
 * FL_TOKENS tokens. Included once per format with these macros:
 *   NAME     of the function                TARGET   attribute that permits the instructions
 *   VEC      vector of floats               VECS     vectors in a chunk of CHUNK elements
 *   BYTES    bytes of a chunk of weights    LOAD     (chunk of a row, vector number, its scale) -> weights as VEC_W
 *   SCALED   1 if a scale byte goes with every chunk (mxfp4)       MOST   tokens (1, 2, 3 or 6) whose sums fit the registers
 *   XLOAD, FMA, SUM4, ZERO, XTYPE, CHUNK
 *
 * Four rows at a time, whatever the number of tokens, and one running sum per (row, token): a weight is unpacked once per
 * MOST tokens, and a token's result does not depend on its company. While more tokens go over rows that are in the caches,
 * the rows read next are fetched. */

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define FN(part) JOIN(NAME, part)

TARGET static inline __attribute__((always_inline)) void FN(_chunk)(int T, const uint8_t *const *w, const float *scale,
                                                                    const XTYPE *const *x, size_t at,
                                                                    VEC acc[FL_ROWS][MOST]) {
    (void)scale;
#pragma GCC unroll 8
    for (int v = 0; v < VECS; v++) {
#if MOST < 5 /* few registers: one row's weights at a time */
#pragma GCC unroll 4
        for (int r = 0; r < FL_ROWS; r++) {
            VEC_W weight = LOAD(w[r], v, scale[r]);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++)
                acc[r][t] = FMA(weight, XLOAD(x[t] + at + v * (CHUNK / VECS)), acc[r][t]);
        }
#else
        VEC_W weight[FL_ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < FL_ROWS; r++) weight[r] = LOAD(w[r], v, scale[r]);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            VEC_W input = XLOAD(x[t] + at + v * (CHUNK / VECS));
#pragma GCC unroll 4
            for (int r = 0; r < FL_ROWS; r++) acc[r][t] = FMA(weight[r], input, acc[r][t]);
        }
#endif
    }
}

TARGET static inline __attribute__((always_inline)) void FN(_block)(int T, const uint8_t *const *w,
                                                                    const uint8_t *const *s, const XTYPE *const *x,
                                                                    size_t k, size_t jump, size_t far,
                                                                    float (*out)[FL_TOKENS]) {
    VEC acc[FL_ROWS][MOST];
    const uint8_t *row[FL_ROWS];
    float scale[FL_ROWS] = {1, 1, 1, 1};
#pragma GCC unroll 4
    for (int r = 0; r < FL_ROWS; r++) {
        row[r] = w[r];
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) acc[r][t] = ZERO;
    }
    size_t chunks = SCALED ? (k + CHUNK - 1) / CHUNK : k / CHUNK, left = SCALED ? 0 : k % CHUNK;
    size_t last = chunks > FL_AHEAD / BYTES ? chunks - FL_AHEAD / BYTES : 0;
    for (size_t c = 0; c < chunks; c++) {
        size_t ahead = far ? far : FL_AHEAD + (c < last ? 0 : jump);
#pragma GCC unroll 4
        for (int r = 0; r < FL_ROWS; r++) {
            __builtin_prefetch(row[r] + ahead);
            if (SCALED) scale[r] = fl_e8m0(s[r][c]);
        }
        FN(_chunk)(T, row, scale, x, c * CHUNK, acc);
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
        FN(_chunk)(T, row, scale, x, chunks * CHUNK, acc);
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
        size_t far = t ? (k + CHUNK - 1) / CHUNK * BYTES + jump : 0; /* these rows are here: those read next are on their way */
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
