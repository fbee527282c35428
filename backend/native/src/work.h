/* One layer-step in phases: gate, up and activation of all experts, then their down projections, then, if they are
 * weighted, sums of them. */
#ifndef FORELOAD_WORK_H
#define FORELOAD_WORK_H

#include <stdatomic.h>

#include "native.h"

enum { FL_PHASES = 3 };

/* A job's plan and buffers. Units are small blocks of rows of one expert; those of sums are columns. */
typedef struct {
    fl_layout layout;
    fl_choice choice;
    int experts, pairs, tokens, out_bf16, tag, phases;
    const void **blocks;
    int32_t *first, *x_rows, *out_rows, *order, *soon; /* order: [experts] as they are computed */
    float *weights;
    void *out;
    uint64_t *sums;                      /* [tokens, hidden] of weighted outputs, which are in `out` */
    uint8_t *x, *middle;                 /* inputs of the first two phases, one padded row each */
    uint8_t *outputs;                    /* fp32 [pairs, hidden] */
    size_t x_stride, middle_stride;      /* bytes of such a row */
    int rows_per_unit[FL_PHASES];        /* rows of the phase's output that one unit computes */
    int64_t units_per_expert[FL_PHASES], units[FL_PHASES]; /* of sums: as if of one expert */
    int64_t grain[FL_PHASES];            /* units a worker takes at a time */
    size_t plan_room, x_room, middle_room, outputs_room;
    void *plan;
} fl_job;

/* Copy the plan and the inputs. 0; -1: not valid; -2: no memory, and the job is as before. */
int fl_job_fill(fl_job *job, int isa, int threads, const fl_layout *layout, const fl_work *work);
/* How many units worker `v` of `threads` has of its own: the same rows of every expert. */
int64_t fl_job_share(const fl_job *job, int phase, int v, int threads);
/* Units from .. to of those of worker v. */
void fl_job_run(const fl_job *job, int phase, int v, int threads, int64_t from, int64_t to);
/* Compute the expert at `block` before the others, if the job has it. */
void fl_job_first(fl_job *job, const void *block);
void fl_job_free(fl_job *job);

typedef struct {
    const uint8_t *from;
    size_t bytes;
} fl_part;

/* Where worker v's rows of an expert's gate and up matrices are; how many parts that are. */
int fl_share(int isa, const fl_layout *layout, const uint8_t *block, int v, int threads, fl_part parts[2]);

#endif
