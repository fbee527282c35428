/* Drives the native library from C, for the sanitizers: every format and instruction set, threads that come and go,
 * idle workers that sleep and wake, plans that are refused. Prints one line; any difference is an error. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "native.h"

enum { HIDDEN = 96, WIDTH = 72, EXPERTS = 5, TOKENS = 9, PAIRS = 1 + 2 + 3 + 4 + 5 };

static uint8_t blocks[EXPERTS][1 << 20];
static float inputs[TOKENS][HIDDEN];

static int64_t row_bytes(int format, int k) {
    if (format == FL_BF12) return FL_HEAD + (k + 31) / 32 * 48;
    return format == FL_FP32 ? 4 * k : format == FL_BF16 ? 2 * k : format == FL_MXFP4 ? (k + 31) / 32 * 16 : k;
}

static fl_layout layout_of(int format) {
    int64_t gate_up = 2 * WIDTH * row_bytes(format, HIDDEN), down = HIDDEN * row_bytes(format, WIDTH);
    int64_t at = (gate_up + down + 63) / 64 * 64, scales = 4 * 2 * WIDTH * ((HIDDEN + 31) / 32);
    int scaled = format >= FL_INT8 && format != FL_BF12;
    fl_layout l = {format, format % 2, format % 2, 0, HIDDEN, WIDTH, format == FL_FP8_TILE ? 32 : 0,
                   1.702f, 7.0f, 0, gate_up, scaled ? at : -1,
                   scaled ? at + scales : -1, at + 2 * scales, at + 3 * scales};
    return l;
}

/* Heads with some outliers, one in the last column. */
static void fill_heads(uint8_t *rows, int n, int k, int top) {
    for (; n; n--, rows += row_bytes(FL_BF12, k)) {
        uint16_t head[FL_HEAD / 2] = {(uint16_t)(top | n % 12 << 8)};
        for (int i = 1; i <= n % 12; i++) head[2 * i] = (uint16_t)(k - i), head[2 * i + 1] = 0x3D80;
        memcpy(rows, head, sizeof head);
    }
}

/* Weights of any bits would hold NaN; these do not. */
static void fill(const fl_layout *l) {
    srand(7);
    for (int e = 0; e < EXPERTS; e++) {
        memset(blocks[e], 0, sizeof blocks[e]);
        size_t weights = (size_t)(l->down + HIDDEN * row_bytes(l->format, WIDTH));
        for (size_t i = 0; i < weights; i++) blocks[e][i] = (uint8_t)(rand() & 0x77);
        if (l->format == FL_FP32)
            for (size_t i = 0; i < weights / 4; i++) ((float *)blocks[e])[i] = (float)(rand() % 200 - 100) / 500.0f;
        if (l->format == FL_BF16)
            for (size_t i = 0; i < weights / 2; i++) ((uint16_t *)blocks[e])[i] = (uint16_t)(0x3C00 + rand() % 512);
        if (l->format == FL_BF12) {
            fill_heads(blocks[e], 2 * WIDTH, HIDDEN, 127);
            fill_heads(blocks[e] + l->down, HIDDEN, WIDTH, 127);
        }
        for (int i = 0; i < 2 * WIDTH * 3 && l->gate_up_scale >= 0; i++)
            if (l->format == FL_MXFP4)
                blocks[e][l->gate_up_scale + i] = blocks[e][l->down_scale + i] = 120;
            else if (i < 2 * WIDTH)
                ((float *)(blocks[e] + l->gate_up_scale))[i] = ((float *)(blocks[e] + l->down_scale))[i] = 0.01f;
    }
    for (int t = 0; t < TOKENS; t++)
        for (int i = 0; i < HIDDEN; i++) inputs[t][i] = (float)(rand() % 100 - 50) / 100.0f;
}

static void run(fl_pool *pool, const fl_layout *l, float out[PAIRS][HIDDEN]) {
    const void *where[EXPERTS];
    int32_t first[EXPERTS + 1] = {0}, x_rows[PAIRS], out_rows[PAIRS];
    for (int e = 0; e < EXPERTS; e++) {
        where[e] = blocks[e];
        first[e + 1] = first[e] + e + 1;
    }
    for (int p = 0; p < PAIRS; p++) {
        x_rows[p] = p * 4 % TOKENS;
        out_rows[p] = p;
    }
    fl_work work = {EXPERTS, TOKENS, 0, 0, 0, where, first, x_rows, out_rows, NULL, NULL, inputs, out};
    int64_t span[2], ticket = fl_submit(pool, l, &work);
    fl_wait(pool, ticket, span);
    float weights[PAIRS];
    int32_t soon = 0;
    static uint64_t sums[TOKENS][HIDDEN], same[TOKENS][HIDDEN];
    for (int p = 0; p < PAIRS; p++) weights[p] = (float)(p + 1) / PAIRS;
    fl_work summed = {EXPERTS, TOKENS, 0, 0, 77, where, first, x_rows, NULL, weights, &soon, inputs, sums};
    fl_wait(pool, fl_submit(pool, l, &summed), span);
    summed.out = same;
    fl_wait(pool, fl_submit(pool, l, &summed), span);
    if (soon != 77 || sums[0][0] >> 32 != 77 || memcmp(sums, same, sizeof sums)) exit(2);
    x_rows[PAIRS - 1] = TOKENS;
    if (ticket < 0 || !fl_done(pool, ticket) || span[1] < span[0] || fl_submit(pool, l, &work) != -1) exit(2);
}

/* Every column of bf12 rows of any bits, by inputs that are 1 there alone. */
static int decodes(int isa) {
    enum { K = 100 };
    static uint8_t rows[FL_ROWS][FL_HEAD + (K + 31) / 32 * 48];
    static float x[FL_TOKENS][(K + FL_PAD - 1) / FL_PAD * FL_PAD];
    const uint8_t *w[FL_ROWS];
    const void *inputs[FL_TOKENS];
    float out[FL_ROWS][FL_TOKENS];
    for (int base = 0; base < 240; base++) {
        for (size_t i = 0; i < sizeof rows; i++) ((uint8_t *)rows)[i] = (uint8_t)rand();
        for (int r = 0; r < FL_ROWS; r++) w[r] = rows[r], rows[r][0] = (uint8_t)(base + 15);
        for (int t = 0; t < FL_TOKENS; t++) inputs[t] = x[t];
        for (int at = 0; at < K; at += FL_TOKENS) {
            int n = K - at < FL_TOKENS ? K - at : FL_TOKENS;
            memset(x, 0, sizeof x);
            for (int t = 0; t < n; t++) x[t][at + t] = 1;
            fl_choose(isa, FL_BF12, 0).run(w, w, inputs, n, K, 0, out);
            for (int i = 0; i < n * FL_ROWS; i++) {
                int r = i / n, j = (at + i % n) % 32;
                const uint8_t *chunk = w[r] + FL_HEAD + (at + i % n) / 32 * 48;
                uint32_t code = j < 16 ? chunk[j] & 15 : chunk[j - 16] >> 4, byte = chunk[16 + j];
                uint32_t bits = (byte & 128) << 24 | (code ? base + code : 0) << 23 | (byte & 127) << 16;
                float weight;
                memcpy(&weight, &bits, sizeof weight);
                if (out[r][i % n] != weight) return 0;
            }
        }
    }
    return 1;
}

int main(void) {
    static float one[PAIRS][HIDDEN], many[20][PAIRS][HIDDEN];
    int runs = 0;
    for (int isa = 0; isa < FL_ISAS; isa++)
        for (int format = 0; fl_isa_supported(isa) && format < FL_FORMATS; format++) {
            fl_layout l = layout_of(format);
            fill(&l);
            fl_pool *alone = fl_pool_new(1, isa, 0), *pool = fl_pool_new(3, isa, format % 2 ? 50 : 0);
            int32_t cpus[] = {0};
            if (!alone || !pool || fl_pool_place(pool, cpus, 0) == 0) return 2;
            run(alone, &l, one);
            for (int i = 0; i < 20; i++, runs++) {
                run(pool, &l, many[i]);
                if (i % 7 == 0) usleep(300); /* so that workers fall asleep */
                if (memcmp(one, many[i], sizeof one)) return 1;
            }
            fl_pool_free(pool);
            fl_pool_free(alone);
        }
    for (int isa = 0; isa < FL_ISAS; isa++)
        if (fl_isa_supported(isa) && !decodes(isa)) return 3;
    if (fl_pool_new(0, 0, 0) || fl_pool_new(1, FL_ISAS, 0)) return 2;
    printf("%d runs, all the same bits\n", runs);
    return 0;
}
