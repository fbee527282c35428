/* AMX: bf16 weights times up to FL_TOKENS tokens at once, in tiles of 32 products each (Intel, Sapphire Rapids on).
 *
 * Inputs are X_PAIRS: pair p of elements of token t is word p * tokens + t, so that 16 pairs of all tokens are one tile. A
 * token's result does not depend on its company: its column is computed by itself. With FL_AMX_EMULATED the tiles are plain C,
 * for tests on other processors. */
#define _GNU_SOURCE
#include "native.h"

/* How the instructions want the shapes of tiles. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t columns[16]; /* in bytes */
    uint8_t rows[16];
} tiles;

#if defined(FL_AMX_EMULATED)
#include <string.h>

#define TARGET

static _Thread_local tiles shape;
static _Thread_local uint8_t tile[8][16][64];

static void configure(const tiles *to) {
    shape = *to;
    memset(tile, 0, sizeof tile);
}

#define LOAD(t, from, stride)                \
    for (int r_ = 0; r_ < shape.rows[t]; r_++) \
    memcpy(tile[t][r_], (const uint8_t *)(from) + (size_t)r_ * (size_t)(stride), shape.columns[t])
#define STORE(t, to, stride)                 \
    for (int r_ = 0; r_ < shape.rows[t]; r_++) \
    memcpy((uint8_t *)(to) + (size_t)r_ * (size_t)(stride), tile[t][r_], shape.columns[t])

static float widened(const uint8_t *word) {
    uint32_t pattern = (uint32_t)(word[0] | word[1] << 8) << 16;
    float value;
    memcpy(&value, &pattern, sizeof value);
    return value;
}

static void multiply(int c, int a, int b) {
    for (int r = 0; r < shape.rows[c]; r++)
        for (int p = 0; p < shape.columns[a] / 4; p++)
            for (int n = 0; n < shape.columns[c] / 4; n++) {
                float sum;
                memcpy(&sum, &tile[c][r][4 * n], sizeof sum);
                sum += widened(&tile[a][r][4 * p]) * widened(&tile[b][p][4 * n]);
                sum += widened(&tile[a][r][4 * p + 2]) * widened(&tile[b][p][4 * n + 2]);
                memcpy(&tile[c][r][4 * n], &sum, sizeof sum);
            }
}
#define MULTIPLY(c, a, b) multiply(c, a, b)

int fl_amx_ready(void) { return 1; }
void fl_amx_end(void) {}

#elif defined(FL_AMX)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TARGET __attribute__((target("amx-tile,amx-bf16")))
#define XFEATURE_XTILEDATA 18
#define ARCH_REQ_XCOMP_PERM 0x1023

#define configure(to) _tile_loadconfig(to)
#define LOAD(t, from, stride) _tile_loadd(t, from, stride)
#define STORE(t, to, stride) _tile_stored(t, to, stride)
#define MULTIPLY(c, a, b) _tile_dpbf16ps(c, a, b)

/* Whether the processor has it and the kernel lets this process use it. */
int fl_amx_ready(void) {
    uint32_t a = 7, b, c = 0, d;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    if (!(d >> 22 & 1) || !(d >> 24 & 1)) return 0; /* amx-bf16, amx-tile */
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

TARGET void fl_amx_end(void) { _tile_release(); }
#endif

#if defined(FL_AMX) || defined(FL_AMX_EMULATED)
/* Rows 0 and 1, and 2 and 3, are a tile each; even and odd tiles of columns add up apart, as products follow each other
 * more quickly than sums. */
#define EVEN_LOW 0
#define EVEN_HIGH 1
#define ODD_LOW 2
#define ODD_HIGH 3
#define LOW 4
#define HIGH 5
#define INPUTS 6
#define OTHERS 7

TARGET void fl_amx_rows(const uint8_t *const *w, const uint8_t *const *s, const void *const *x, int tokens, size_t k,
                        size_t jump, float (*out)[FL_TOKENS]) {
    (void)s;
    tiles shapes = {.palette = 1};
    for (int t = EVEN_LOW; t <= OTHERS; t++) {
        shapes.rows[t] = t < INPUTS ? 2 : 16;
        shapes.columns[t] = (uint16_t)(t == LOW || t == HIGH ? 64 : 4 * tokens);
    }
    configure(&shapes);
    size_t low = (size_t)(w[1] - w[0]), high = (size_t)(w[3] - w[2]), width = 4 * (size_t)tokens, steps = k / 32;
    size_t last = steps > FL_AHEAD / 64 ? steps - FL_AHEAD / 64 : 0;
    const uint8_t *inputs = x[0];
    for (size_t at = 0; at < steps; at++, inputs += 16 * width) {
        size_t ahead = 64 * at + FL_AHEAD + (at < last ? 0 : jump);
        for (int r = 0; r < FL_ROWS; r++) __builtin_prefetch(w[r] + ahead);
        LOAD(LOW, w[0] + 64 * at, low);
        LOAD(HIGH, w[2] + 64 * at, high);
        if (at & 1) {
            LOAD(OTHERS, inputs, width);
            MULTIPLY(ODD_LOW, LOW, OTHERS);
            MULTIPLY(ODD_HIGH, HIGH, OTHERS);
        } else {
            LOAD(INPUTS, inputs, width);
            MULTIPLY(EVEN_LOW, LOW, INPUTS);
            MULTIPLY(EVEN_HIGH, HIGH, INPUTS);
        }
    }
    float found[2][FL_ROWS][FL_TOKENS];
    STORE(EVEN_LOW, found[0][0], sizeof found[0][0]);
    STORE(EVEN_HIGH, found[0][2], sizeof found[0][0]);
    STORE(ODD_LOW, found[1][0], sizeof found[0][0]);
    STORE(ODD_HIGH, found[1][2], sizeof found[0][0]);
    for (int r = 0; r < FL_ROWS; r++)
        for (int t = 0; t < tokens; t++) out[r][t] = found[0][r][t] + found[1][r][t];
}
#else
int fl_amx_ready(void) { return 0; }
void fl_amx_end(void) {}
#endif
