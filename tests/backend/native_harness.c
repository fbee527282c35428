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
    return format == FL_FP32 ? 4 * k : format == FL_BF16 ? 2 * k : format == FL_MXFP4 ? (k + 31) / 32 * 16 : k;
}

static fl_layout layout_of(int format) {
    int64_t gate_up = 2 * WIDTH * row_bytes(format, HIDDEN), down = HIDDEN * row_bytes(format, WIDTH);
    int64_t at = (gate_up + down + 63) / 64 * 64, scales = 4 * 2 * WIDTH * ((HIDDEN + 31) / 32), scaled = format >= FL_INT8;
    fl_layout l = {format, format % 2, format % 2, 0, HIDDEN, WIDTH, format == FL_FP8_TILE ? 32 : 0,
                   1.702f, 7.0f, 0, gate_up, scaled ? at : -1,
                   scaled ? at + scales : -1, at + 2 * scales, at + 3 * scales};
    return l;
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
    if (fl_pool_new(0, 0, 0) || fl_pool_new(1, FL_ISAS, 0)) return 2;
    printf("%d runs, all the same bits\n", runs);
    return 0;
}
