/* Copies and launches of the decoding path on CUDA, issued without Python. `backend/cuda/issue.py` mirrors this.
 *
 * The brain decides: its compiled queue functions are called here, under the lock, by whichever thread is at hand. A
 * thread of the link's own reports copies that have landed and issues the next ones; the decoding thread does the same
 * at once whenever it lets go of the lock, and while it drives the link (`fc_drive`) it alone: wherever it waits here.
 * At most the brain's window of copies is in the copy stream.
 *
 * A copy into a slot waits (on the device) for a mark in the compute stream behind the last kernels that read the slot;
 * kernels wait for the event of the copy. Errors are CUDA's codes, or FC_ codes; the first stays. */
#ifndef FORELOAD_ISSUE_H
#define FORELOAD_ISSUE_H

#include <stddef.h>
#include <stdint.h>

#include "native.h"

#define FC_API __attribute__((visibility("default")))

enum { FC_NOT_READY = 600, FC_NO_MEMORY = 100001, FC_TOO_MANY = 100002 };
enum { FC_ENTRY = 4, FC_MOST_LATE = 1024 };

/* The CUDA runtime's functions, in the order of `RUNTIME` in issue.py. */
typedef struct {
    int (*set_device)(int);
    int (*stream_create)(void **, unsigned);
    int (*stream_destroy)(void *);
    int (*stream_synchronize)(void *);
    int (*stream_wait_event)(void *, void *, unsigned);
    int (*event_create)(void **, unsigned);
    int (*event_destroy)(void *);
    int (*event_record)(void *, void *);
    int (*event_query)(void *);
    int (*memcpy_async)(void *, const void *, size_t, int, void *);
    int (*graph_instantiate)(void **, void *, unsigned long long);
    int (*graph_destroy)(void *);
    int (*graph_launch)(void *, void *);
    int (*last_error)(void);
} fc_runtime;

/* The policy: key = layer * experts + expert. `table` is handed to the two functions. */
typedef struct {
    int64_t (*next)(void *table, int64_t phase);
    void (*complete)(void *table, int64_t key);
    void *table;
    const int8_t *status, *purpose; /* [layers * experts] */
    const int32_t *slot;            /* [layers * experts] */
    int64_t experts;
} fc_brain;

typedef struct {
    const int64_t *sources; /* [layers * experts] host addresses of the blocks */
    const int64_t *bytes;   /* [layers] of a block */
    const int64_t *targets; /* [slots] device addresses */
    int64_t slots;
} fc_memory;

/* One layer-step's experts: those on the device in one launch, then one launch for each late one as it is issued. */
typedef struct {
    void *compute, *resident;
    void *const *waves; /* [late] graphs that run the plan entry of their number */
    int64_t *plan;      /* [late, FC_ENTRY], written before it is brought */
    const int64_t *keys, *firsts, *counts; /* [late] */
    int64_t late;
    const int32_t *used; /* slots the resident launch reads */
    int64_t n_used;
    void *next; /* what to launch behind the experts; NULL: nothing */
    void *bring; /* the graph that brings the plan to the device, before anything waits for a copy */
} fc_step;

typedef struct fc_link fc_link;

/* `spins`: length of a pause between two looks at the link; 0: sleep instead. NULL if CUDA refuses. Without a thread
 * (`threaded` 0) copies advance only when someone lets go of the lock or waits. */
FC_API fc_link *fc_open(const fc_runtime *rt, int device, int spins, int threaded);
FC_API void fc_close(fc_link *link); /* copies in flight are waited for */
FC_API int64_t fc_lock(fc_link *link);
FC_API int64_t fc_unlock(fc_link *link, int64_t kicked); /* kicked: first issue what may be issued */

/* With the lock held. fc_bind: nothing may be in flight; what is given must stay until the next call. */
FC_API int fc_bind(fc_link *link, const fc_brain *brain, const fc_memory *memory);
FC_API void fc_phase(fc_link *link, int64_t phase);
FC_API void fc_delays(fc_link *link, void *const *graphs, int n, uint64_t seed); /* one of them before every copy */
FC_API void fc_throttle(fc_link *link, void *before, void *after); /* graphs around every copy; NULL: none */
FC_API int64_t fc_record_spans(fc_link *link, int64_t most);                     /* 0: no more; forgets the old */
FC_API int64_t fc_spans(const fc_link *link, const int64_t **spans); /* [n, 4]: key, purpose, issued, landed (ns) */
FC_API int fc_settle(fc_link *link); /* waits until nothing is in flight */

/* Without the lock. */
FC_API int64_t fc_take_ready(fc_link *link, const int64_t *keys, int64_t n); /* index, first in link order; -1: error */
FC_API int64_t fc_wait_landed(fc_link *link, const int64_t *keys, int64_t n);
FC_API int fc_when_landed(fc_link *link, int64_t slot, void *compute);
FC_API int fc_slot_used(fc_link *link, const int32_t *slots, int64_t n, void *compute); /* lock held */
FC_API int fc_instantiate(fc_link *link, void *graph, void **exec);
FC_API void fc_drop_graph(fc_link *link, void *exec);
FC_API int fc_launch(fc_link *link, void *exec, void *compute);
FC_API int64_t fc_run(fc_link *link, const fc_step *step);

/* For the decoding thread's compiled loop. It calls these and what gives int64_t above by address: all numbers are. */
FC_API int64_t fc_now(void); /* nanoseconds of the monotonic clock */
/* The calling thread serves the link (on), or its own thread does again; `home` >= 0: it stays on that core meanwhile. */
FC_API int64_t fc_drive(fc_link *link, int64_t on, int64_t home);
FC_API int64_t fc_serve(fc_link *link); /* reports what has landed, issues what may be issued; the error */
/* Waits until the upper 16 bits of all words are `tag` (1), or the time is over (0). */
FC_API int64_t fc_told(fc_link *link, const int32_t *words, int64_t n, int64_t tag, int64_t timeout_ns);
FC_API int64_t fc_computed(fc_link *link, fl_pool *pool, int64_t ticket, int64_t span[2]); /* waits as `fl_wait` does */

#endif
