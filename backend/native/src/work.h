/* One layer-step in two phases: gate, up and activation of all experts, then their down projections. */
#ifndef FORELOAD_WORK_H
#define FORELOAD_WORK_H

#include <stdatomic.h>

#include "native.h"

/* A job's plan and buffers. Units are small blocks of rows of one expert, numbered over all experts of the job. */
typedef struct {
    fl_layout layout;
    fl_choice choice;
    int experts, pairs, out_bf16;
    const void **blocks;
    int32_t *first, *x_rows, *out_rows;
    void *out;
    uint8_t *x, *middle;                 /* inputs of the two phases, one padded row each */
    size_t x_stride, middle_stride;      /* bytes of such a row */
    int rows_per_unit[2];                /* rows of the phase's output that one unit computes */
    int64_t units_per_expert[2], units[2];
    int64_t grain[2];                    /* units a worker takes at a time */
    size_t plan_room, x_room, middle_room;
    void *plan;
} fl_job;

/* Copy the plan and the inputs. 0; -1: not valid; -2: no memory, and the job is as before. */
int fl_job_fill(fl_job *job, int isa, int threads, const fl_layout *layout, const fl_work *work);
void fl_job_run(const fl_job *job, int phase, int64_t from, int64_t to);
void fl_job_free(fl_job *job);

#endif
