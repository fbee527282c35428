/* Template of the fp32 kernels of one format on one instruction set: dot products of up to FL_ROWS rows of weights with
 * up to FL_TOKENS tokens. Included once per format with these macros:
 *   NAME     of the function                TARGET   attribute that permits the instructions
 *   VEC      vector of floats               VECS     vectors in a chunk of CHUNK elements
 *   BYTES    bytes of a chunk of weights    LOAD     (chunk of a row, vector number, its scale) -> weights as floats
 *   SCALED   1 if a scale byte goes with every chunk (mxfp4)       WIDE   1 if 16 sums fit the registers
 *   XLOAD, FMA, ADD, SUM, ZERO, XTYPE, CHUNK
 *
 * Two running sums per (row, token), whatever the blocking: a token's result does not depend on its company. */

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define FN(part) JOIN(NAME, part)
#define AHEAD 1024 /* bytes between what is used and what is fetched from memory */

TARGET static inline __attribute__((always_inline)) void FN(_chunk)(int R, int T, const uint8_t *const *w,
                                                                    const float *scale, const XTYPE *const *x,
                                                                    size_t at, VEC acc[4][4][2]) {
    (void)scale;
#pragma GCC unroll 8
    for (int v = 0; v < VECS; v++) {
        VEC_W weight[4];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) weight[r] = LOAD(w[r], v, scale[r]);
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) {
            VEC_W input = XLOAD(x[t] + at + v * (CHUNK / VECS));
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) acc[r][t][v & 1] = FMA(weight[r], input, acc[r][t][v & 1]);
        }
    }
}

TARGET static inline __attribute__((always_inline)) void FN(_block)(int R, int T, const uint8_t *const *w,
                                                                    const uint8_t *const *s, const XTYPE *const *x,
                                                                    size_t k, float (*out)[FL_TOKENS]) {
    VEC acc[4][4][2];
    const uint8_t *row[4];
    float scale[4] = {1, 1, 1, 1};
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        row[r] = w[r];
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) acc[r][t][0] = acc[r][t][1] = ZERO;
    }
    size_t chunks = SCALED ? (k + CHUNK - 1) / CHUNK : k / CHUNK;
    for (size_t c = 0; c < chunks; c++) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            __builtin_prefetch(row[r] + AHEAD);
            if (SCALED) scale[r] = fl_e8m0(s[r][c]);
        }
        FN(_chunk)(R, T, row, scale, x, c * CHUNK, acc);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) row[r] += BYTES;
    }
    size_t left = SCALED ? 0 : k % CHUNK;
    if (left) {
        uint8_t tail[4][BYTES];
        memset(tail, 0, sizeof tail);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            memcpy(tail[r], row[r], left * BYTES / CHUNK);
            row[r] = tail[r];
        }
        FN(_chunk)(R, T, row, scale, x, chunks * CHUNK, acc);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) out[r][t] = SUM(ADD(acc[r][t][0], acc[r][t][1]));
    }
}

TARGET static void FN(_tokens)(const uint8_t *const *w, const uint8_t *const *s, int rows, const XTYPE *const *x,
                               int tokens, size_t k, float (*out)[FL_TOKENS]) {
    int r = 0;
    if (rows == 4 && tokens == 1) {
        FN(_block)(4, 1, w, s, x, k, out);
        return;
    }
    for (; r + 2 <= rows && (WIDE || tokens <= 2); r += 2) switch (tokens) {
            case 1: FN(_block)(2, 1, w + r, s + r, x, k, out + r); break;
            case 2: FN(_block)(2, 2, w + r, s + r, x, k, out + r); break;
            case 3: FN(_block)(2, 3, w + r, s + r, x, k, out + r); break;
            default: FN(_block)(2, 4, w + r, s + r, x, k, out + r);
        }
    for (; r < rows; r++) switch (tokens) {
            case 1: FN(_block)(1, 1, w + r, s + r, x, k, out + r); break;
            case 2: FN(_block)(1, 2, w + r, s + r, x, k, out + r); break;
            case 3: FN(_block)(1, 3, w + r, s + r, x, k, out + r); break;
            default: FN(_block)(1, 4, w + r, s + r, x, k, out + r);
        }
}

LINKAGE void NAME(const uint8_t *const *w, const uint8_t *const *s, int rows, const void *const *x, int tokens,
                  size_t k, float (*out)[FL_TOKENS]) {
    for (int t = 0; t < tokens; t += 4) {
        int n = tokens - t < 4 ? tokens - t : 4;
        FN(_tokens)(w, s, rows, (const XTYPE *const *)(x + t), n, k, (float (*)[FL_TOKENS])(&out[0][t]));
    }
}

#undef JOIN_
#undef JOIN
#undef FN
#undef AHEAD
#undef NAME
#undef LOAD
#undef BYTES
#undef SCALED
