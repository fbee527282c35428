#define _GNU_SOURCE
#include "work.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FL_SUMS 32 /* columns in a unit of sums: whole cache lines of words */
#define GRAIN_BYTES (48 << 10) /* of weights a worker takes at a time: long enough to stream, short enough to share */

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

static float from_bf16(uint16_t word) {
    uint32_t pattern = (uint32_t)word << 16;
    float value;
    memcpy(&value, &pattern, sizeof value);
    return value;
}

static uint16_t to_bf16(float value) {
    uint32_t pattern;
    memcpy(&pattern, &value, sizeof pattern);
    if (value != value) return (uint16_t)(pattern >> 16 | 64);
    return (uint16_t)((pattern + 0x7FFF + (pattern >> 16 & 1)) >> 16);
}

static size_t input_bytes(int kind, size_t k) {
    size_t n = round_up(k, FL_PAD);
    switch (kind) {
        case FL_X_MX_BF16: return 2 * n;
        case FL_X_I16: return 2 * n + 4 * (n / FL_BLOCK);
        default: return 4 * n;
    }
}

/* Where X_MX_BF16 holds element i: the even ones of two blocks of 32 before the odd ones. */
static size_t mx_place(size_t i) { return (i & ~(size_t)63) | (i & 1) << 5 | (i & 63) >> 1; }

/* Elements from .. from + n of an input row of k, held as `kind`; `from` is a multiple of FL_BLOCK for X_I16. */
static void put_inputs(int kind, uint8_t *row, size_t k, size_t from, size_t n, const float *values) {
    if (kind == FL_X_F32) {
        memcpy((float *)row + from, values, n * sizeof(float));
    } else if (kind == FL_X_MX) {
        for (size_t i = from; i < from + n; i++)
            ((float *)row)[(i & ~(size_t)31) | (i & 1) << 4 | (i & 31) >> 1] = values[i - from];
    } else if (kind == FL_X_MX_BF16) {
        for (size_t i = from; i < from + n; i++) ((uint16_t *)row)[mx_place(i)] = to_bf16(values[i - from]);
    } else {
        float *scales = (float *)(row + 2 * round_up(k, FL_PAD));
        for (size_t at = 0; at < n; at += FL_BLOCK) {
            size_t end = at + FL_BLOCK < n ? at + FL_BLOCK : n;
            float most = 0;
            for (size_t i = at; i < end; i++) most = fmaxf(most, fabsf(values[i]));
            float inverse = most > 0 ? 32767.0f / most : 0.0f;
            scales[(from + at) / FL_BLOCK] = most / 32767.0f;
            for (size_t i = at; i < end; i++) ((int16_t *)row)[from + i] = (int16_t)lrintf(values[i] * inverse);
        }
    }
}

static int valid(const fl_layout *l, const fl_work *w) {
    if (l->format < 0 || l->format >= FL_FORMATS || l->activation < FL_SILU || l->activation > FL_SWIGLU_OAI) return 0;
    if (l->hidden < 1 || l->width < 1 || w->experts < 1 || w->tokens < 1 || w->first[0] != 0) return 0;
    if (l->tile < 0 || (l->format == FL_FP8_TILE) != (l->tile > 0)) return 0;
    int scaled = l->format >= FL_INT8 && l->format != FL_BF12;
    if (scaled != (l->gate_up_scale >= 0 && l->down_scale >= 0)) return 0;
    for (int e = 0; e < w->experts; e++)
        if (w->first[e + 1] <= w->first[e] || !w->blocks[e]) return 0;
    if (w->weights && (!w->soon || w->out_bf16)) return 0;
    for (int p = 0; p < w->first[w->experts]; p++)
        if (w->x_rows[p] < 0 || w->x_rows[p] >= w->tokens || (!w->weights && w->out_rows[p] < 0)) return 0;
    return 1;
}

/* A zeroed or kept buffer of at least `bytes`. */
static int ensure(uint8_t **buffer, size_t *room, size_t bytes) {
    if (bytes <= *room) return 0;
    void *grown = NULL;
    if (posix_memalign(&grown, 64, bytes)) return -2;
    memset(grown, 0, bytes);
    free(*buffer);
    *buffer = grown;
    *room = bytes;
    return 0;
}

static void *carve(uint8_t **at, const void *source, size_t bytes) {
    void *target = *at;
    memcpy(target, source, bytes);
    *at += round_up(bytes, 8);
    return target;
}

static int copy_plan(fl_job *job, const fl_work *work) {
    size_t experts = (size_t)work->experts, pairs = (size_t)work->first[experts];
    size_t bytes = 8 * experts + 4 * (experts + 1) + 12 * pairs + 4 * experts + 72;
    if (ensure((uint8_t **)&job->plan, &job->plan_room, bytes)) return -2;
    uint8_t *at = job->plan;
    job->blocks = carve(&at, work->blocks, 8 * experts);
    job->first = carve(&at, work->first, 4 * (experts + 1));
    job->x_rows = carve(&at, work->x_rows, 4 * pairs);
    job->out_rows = carve(&at, work->weights ? work->x_rows : work->out_rows, 4 * pairs);
    job->weights = work->weights ? carve(&at, work->weights, 4 * pairs) : NULL;
    job->order = (int32_t *)at;
    for (size_t e = 0; e < experts; e++) job->order[e] = (int32_t)e;
    for (size_t p = 0; work->weights && p < pairs; p++) job->out_rows[p] = (int32_t)p; /* of what is summed later */
    job->experts = work->experts;
    job->pairs = (int)pairs;
    job->tokens = work->tokens;
    return 0;
}

static int copy_inputs(fl_job *job, const fl_work *work) {
    size_t hidden = (size_t)job->layout.hidden;
    float *values = malloc(hidden * sizeof(float));
    if (!values) return -2;
    for (int t = 0; t < work->tokens; t++) {
        const uint16_t *words = (const uint16_t *)work->x + t * hidden;
        uint16_t *row = (uint16_t *)(job->x + t * job->x_stride);
        if (work->x_bf16 && job->choice.x_kind == FL_X_MX_BF16) {
            for (size_t i = 0; i < hidden; i++) row[mx_place(i)] = words[i];
            continue;
        }
        float *given = job->choice.x_kind == FL_X_F32 ? (float *)row : values;
        if (work->x_bf16)
            for (size_t i = 0; i < hidden; i++) given[i] = from_bf16(words[i]);
        else
            memcpy(given, (const float *)work->x + t * hidden, hidden * sizeof(float));
        if (given == values) put_inputs(job->choice.x_kind, (uint8_t *)row, hidden, 0, hidden, values);
    }
    free(values);
    return 0;
}

static size_t row_bytes(int format, size_t k) {
    switch (format) {
        case FL_FP32: return 4 * k;
        case FL_BF16: return 2 * k;
        case FL_MXFP4: return (k + 31) / 32 * 16;
        case FL_BF12: return FL_HEAD + (k + 31) / 32 * 48;
        default: return k;
    }
}

/* Rows of gate and up in a unit of the first phase. */
static int rows_of_a_unit(int x_kind) { return x_kind == FL_X_I16 ? FL_BLOCK : FL_ROWS / 2; }

static void cut(fl_job *job, int phase, int rows, int rows_per_unit, size_t unit_bytes, int threads) {
    job->rows_per_unit[phase] = rows_per_unit;
    job->units_per_expert[phase] = (rows + rows_per_unit - 1) / rows_per_unit;
    job->units[phase] = job->units_per_expert[phase] * job->experts;
    int64_t grain = (int64_t)(GRAIN_BYTES / unit_bytes), share = job->units[phase] / (4 * threads);
    if (grain > share) grain = share;
    job->grain[phase] = grain > 1 ? grain : 1;
}

int fl_job_fill(fl_job *job, int isa, int threads, const fl_layout *layout, const fl_work *work) {
    if (!valid(layout, work)) return -1;
    size_t hidden = (size_t)layout->hidden, width = (size_t)layout->width;
    fl_choice choice = fl_choose(isa, layout->format, layout->bf16_inputs);
    size_t beyond = layout->tile ? FL_PAD : 0; /* the last tile may end anywhere: its chunks reach into zeros */
    size_t x_stride = round_up(input_bytes(choice.x_kind, hidden + beyond), 64);
    size_t middle_stride = round_up(input_bytes(choice.x_kind, width + beyond), 64);
    if (copy_plan(job, work)) return -2;
    if (ensure(&job->x, &job->x_room, x_stride * (size_t)work->tokens)) return -2;
    if (ensure(&job->middle, &job->middle_room, middle_stride * (size_t)job->pairs)) return -2;
    if (work->weights && ensure(&job->outputs, &job->outputs_room, 4 * hidden * (size_t)job->pairs)) return -2;
    /* Rows without padding are written whole, and their lines are in the workers' caches: not twice from there. */
    if (hidden % FL_PAD || beyond) memset(job->x, 0, x_stride * (size_t)work->tokens);
    if (width % FL_PAD || beyond) memset(job->middle, 0, middle_stride * (size_t)job->pairs);
    job->layout = *layout;
    job->choice = choice;
    job->x_stride = x_stride;
    job->middle_stride = middle_stride;
    job->out = work->weights ? job->outputs : work->out;
    job->sums = work->weights ? work->out : NULL;
    job->out_bf16 = work->out_bf16;
    job->tag = work->tag;
    job->soon = work->soon;
    job->phases = work->weights ? 3 : 2;
    if (copy_inputs(job, work)) return -2;
    int pairs_per_unit = rows_of_a_unit(choice.x_kind);
    cut(job, 0, layout->width, pairs_per_unit, 2 * (size_t)pairs_per_unit * row_bytes(layout->format, hidden), threads);
    cut(job, 1, layout->hidden, FL_ROWS, FL_ROWS * row_bytes(layout->format, width), threads);
    job->units[2] = job->units_per_expert[2] = (layout->hidden + FL_SUMS - 1) / FL_SUMS;
    job->grain[2] = 1;
    return 0;
}

void fl_job_free(fl_job *job) {
    free(job->plan);
    free(job->x);
    free(job->middle);
    free(job->outputs);
}

/* One matrix of an expert's block. */
typedef struct {
    const uint8_t *weights, *scales, *biases;
    size_t k, stride, scale_stride, jump;
} matrix;

static matrix part(const fl_job *job, int expert, int down) {
    const fl_layout *l = &job->layout;
    const uint8_t *block = job->blocks[expert];
    int64_t scale = down ? l->down_scale : l->gate_up_scale, bias = down ? l->down_bias : l->gate_up_bias;
    size_t k = (size_t)(down ? l->width : l->hidden), stride = row_bytes(l->format, k);
    size_t tile = (size_t)l->tile, tiles = tile ? (k + tile - 1) / tile : 0;
    size_t scales = l->format == FL_MXFP4 ? (k + 31) / 32 : 4 * tiles;
    size_t rows_on = down || l->interleaved ? FL_ROWS : FL_ROWS / 2; /* from a row to the one that is read after it */
    return (matrix){block + (down ? l->down : l->gate_up), scale < 0 ? block : block + scale,
                    bias < 0 ? NULL : block + bias, k, stride, scales, (rows_on - 1) * stride};
}

/* Dot products over one tile of columns after the other, each scaled. */
static void tiled(const fl_job *job, const matrix *m, const uint8_t *const *weights, const uint8_t *const *scales,
                  const void *const *x, int tokens, float out[FL_ROWS][FL_TOKENS]) {
    size_t tile = (size_t)job->layout.tile;
    memset(out, 0, sizeof(float) * FL_ROWS * FL_TOKENS);
    for (size_t at = 0; at < m->k; at += tile) {
        const uint8_t *part[FL_ROWS] = {0};
        const void *inputs[FL_TOKENS] = {0};
        float found[FL_ROWS][FL_TOKENS];
        for (int r = 0; r < FL_ROWS; r++) part[r] = weights[r] + at;
        for (int t = 0; t < tokens; t++) inputs[t] = (const float *)x[t] + at;
        job->choice.run(part, scales, inputs, tokens, m->k - at < tile ? m->k - at : tile, 0, found);
        for (int r = 0; r < FL_ROWS; r++)
            for (int t = 0; t < tokens; t++) out[r][t] += found[r][t] * ((const float *)scales[r])[at / tile];
    }
}

/* Add what bf12 rows of k columns have in their heads: kernels take it for zeros. In a poisoned block nothing fits. */
static void heads(const uint8_t *const *weights, int rows, size_t k, const void *const *x, int tokens,
                  float out[FL_ROWS][FL_TOKENS]) {
    for (int r = 0; r < rows; r++)
        for (int i = 1; i <= weights[r][1] && i <= FL_OUTLIERS; i++) {
            uint16_t entry[2]; /* column, bits */
            memcpy(entry, weights[r] + 4 * i, sizeof entry);
            if (entry[0] >= k) break;
            float value = from_bf16(entry[1]);
            for (int t = 0; t < tokens; t++) out[r][t] += value * ((const float *)x[t])[entry[0]];
        }
}

/* Dot products of some rows with some tokens, row scales and biases applied. */
static void dots(const fl_job *job, const matrix *m, const int *row, int rows, const void *const *x, int tokens,
                 float out[FL_ROWS][FL_TOKENS]) {
    const uint8_t *weights[FL_ROWS] = {0}, *scales[FL_ROWS] = {0};
    for (int r = 0; r < FL_ROWS; r++) { /* kernels take four: where there are fewer, the first again */
        weights[r] = m->weights + (size_t)row[r < rows ? r : 0] * m->stride;
        scales[r] = m->scales + (size_t)row[r < rows ? r : 0] * m->scale_stride;
    }
    int format = job->layout.format, scaled = format == FL_INT8 || format == FL_FP8;
    if (format == FL_FP8_TILE)
        tiled(job, m, weights, scales, x, tokens, out);
    else
        job->choice.run(weights, scales, x, tokens, m->k, m->jump, out);
    if (format == FL_BF12) heads(weights, rows, m->k, x, tokens, out);
    float unit = format == FL_FP8 || format == FL_FP8_TILE ? 256.0f : 1.0f; /* what load_fp8 leaves out */
    if (unit == 1.0f && !scaled && !m->biases) return;
    for (int r = 0; r < rows; r++) {
        float scale = unit * (scaled ? ((const float *)m->scales)[row[r]] : 1.0f);
        float bias = !m->biases            ? 0.0f
                     : format == FL_BF16 ? from_bf16(((const uint16_t *)m->biases)[row[r]])
                                         : ((const float *)m->biases)[row[r]];
        for (int t = 0; t < tokens; t++) out[r][t] = out[r][t] * scale + bias;
    }
}

/* e^x: a polynomial on [-ln 2 / 2, ln 2 / 2] times a power of two, within 2 units in the last place; the C library's takes
 * one number at a time. */
static inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f; /* 1.5 * 2^23: rounds to a whole number */
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t power;
    memcpy(&power, &shifted, sizeof power);
    power = (power << 23) + 0x3F800000u;
    float scale;
    memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

/* What gate and up rows of some tokens give. */
static void activate(const fl_layout *l, const float *gates, const float *ups, int tokens, float *out) {
    if (l->activation == FL_SILU) {
        for (int t = 0; t < tokens; t++) out[t] = gates[t] / (1.0f + exponential(-gates[t])) * ups[t];
        return;
    }
    float alpha = l->alpha, limit = l->limit;
    for (int t = 0; t < tokens; t++) {
        float gate = gates[t] > limit ? limit : gates[t];
        float up = ups[t] > limit ? limit : ups[t] < -limit ? -limit : ups[t];
        out[t] = (up + 1.0f) * gate / (1.0f + exponential(-alpha * gate));
    }
}

/* Gate and up rows from .. to of one expert for up to FL_TOKENS of its pairs, activated into the middle rows. */
static void gate_up(const fl_job *job, int expert, int pair, int tokens, int from, int to) {
    const fl_layout *l = &job->layout;
    matrix m = part(job, expert, 0);
    const void *x[FL_TOKENS] = {0};
    float found[FL_ROWS][FL_TOKENS], active[FL_TOKENS], middle[FL_TOKENS][FL_BLOCK];
    for (int t = 0; t < tokens; t++) x[t] = job->x + (size_t)job->x_rows[pair + t] * job->x_stride;
    for (int i = from; i < to; i += 2) {
        int n = to - i < 2 ? to - i : 2, row[FL_ROWS];
        for (int j = 0; j < n; j++) {
            row[j] = l->interleaved ? 2 * (i + j) : i + j;
            row[n + j] = l->interleaved ? 2 * (i + j) + 1 : l->width + i + j;
        }
        dots(job, &m, row, 2 * n, x, tokens, found);
        for (int j = 0; j < n; j++) {
            activate(l, found[j], found[n + j], tokens, active);
            for (int t = 0; t < tokens; t++) middle[t][i - from + j] = active[t];
        }
    }
    for (int t = 0; t < tokens; t++)
        put_inputs(job->choice.x_kind, job->middle + (size_t)(pair + t) * job->middle_stride, (size_t)l->width,
                   (size_t)from, (size_t)(to - from), middle[t]);
}

static void down(const fl_job *job, int expert, int pair, int tokens, int from, int to) {
    size_t hidden = (size_t)job->layout.hidden;
    matrix m = part(job, expert, 1);
    const void *x[FL_TOKENS] = {0};
    float found[FL_ROWS][FL_TOKENS];
    int row[FL_ROWS] = {0};
    for (int t = 0; t < tokens; t++) x[t] = job->middle + (size_t)(pair + t) * job->middle_stride;
    for (int r = from; r < to; r++) row[r - from] = r;
    dots(job, &m, row, to - from, x, tokens, found);
    for (int t = 0; t < tokens; t++) {
        size_t at = (size_t)job->out_rows[pair + t] * hidden + (size_t)from;
        if (job->out_bf16)
            for (int r = 0; r < to - from; r++) ((uint16_t *)job->out)[at + (size_t)r] = to_bf16(found[r][t]);
        else
            for (int r = 0; r < to - from; r++) ((float *)job->out)[at + (size_t)r] = found[r][t];
    }
}

/* Columns from .. to of every token's weighted sum, as words that carry the tag. */
static void sum(const fl_job *job, size_t from, size_t to) {
    size_t hidden = (size_t)job->layout.hidden;
    for (int t = 0; t < job->tokens; t++) {
        float total[FL_SUMS] = {0};
        int pairs = 0;
        for (int p = 0; p < job->pairs; p++) {
            if (job->x_rows[p] != t) continue;
            const float *row = (const float *)job->outputs + (size_t)p * hidden + from;
            float weight = job->weights[p];
            for (size_t i = 0; i < to - from; i++) total[i] += weight * row[i];
            pairs++;
        }
        uint64_t *out = job->sums + (size_t)t * hidden + from;
        for (size_t i = 0; pairs && i < to - from; i++) {
            uint32_t pattern;
            memcpy(&pattern, &total[i], sizeof pattern);
            __atomic_store_n(out + i, (uint64_t)(uint32_t)job->tag << 32 | pattern, __ATOMIC_RELAXED);
        }
    }
}

int64_t fl_job_share(const fl_job *job, int phase, int v, int threads) {
    int64_t units = job->units_per_expert[phase];
    return (units * (v + 1) / threads - units * v / threads) * (phase < 2 ? job->experts : 1);
}

void fl_job_first(fl_job *job, const void *block) {
    for (int at = 1; at < job->experts; at++) {
        int32_t expert = job->order[at];
        if (job->blocks[expert] != block) continue;
        memmove(job->order + 1, job->order, (size_t)at * sizeof *job->order);
        job->order[0] = expert;
        return;
    }
}

int fl_share(int isa, const fl_layout *l, const uint8_t *block, int v, int threads, fl_part parts[2]) {
    fl_choice choice = fl_choose(isa, l->format, l->bf16_inputs);
    int64_t step = rows_of_a_unit(choice.x_kind), units = (l->width + step - 1) / step;
    int64_t from = units * v / threads * step, to = units * (v + 1) / threads * step;
    size_t stride = row_bytes(l->format, (size_t)l->hidden);
    if (to > l->width) to = l->width;
    if (to <= from) return 0;
    const uint8_t *start = block + l->gate_up;
    if (l->interleaved) {
        parts[0] = (fl_part){start + 2 * (size_t)from * stride, 2 * (size_t)(to - from) * stride};
        return 1;
    }
    parts[0] = (fl_part){start + (size_t)from * stride, (size_t)(to - from) * stride};
    parts[1] = (fl_part){start + (size_t)(l->width + from) * stride, (size_t)(to - from) * stride};
    return 2;
}

void fl_job_run(const fl_job *job, int phase, int v, int threads, int64_t from, int64_t to) {
    int64_t units = job->units_per_expert[phase], first = units * v / threads, mine = units * (v + 1) / threads - first;
    if (phase == 2) {
        size_t end = (size_t)(first + to) * FL_SUMS, hidden = (size_t)job->layout.hidden;
        for (size_t at = (size_t)(first + from) * FL_SUMS; at < end && at < hidden; at += FL_SUMS)
            sum(job, at, at + FL_SUMS < hidden ? at + FL_SUMS : hidden);
        return;
    }
    int rows = phase ? job->layout.hidden : job->layout.width, step = job->rows_per_unit[phase];
    for (int64_t i = from; i < to; i++) {
        int expert = job->order[i / mine], row = (int)(first + i % mine) * step;
        int end = row + step < rows ? row + step : rows;
        for (int pair = job->first[expert]; pair < job->first[expert + 1]; pair += FL_TOKENS) {
            int tokens = job->first[expert + 1] - pair;
            (phase ? down : gate_up)(job, expert, pair, tokens < FL_TOKENS ? tokens : FL_TOKENS, row, end);
        }
    }
}
