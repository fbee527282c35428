/* Worker threads that take jobs in order. Each worker has the same share of every expert's rows, whatever the job, so that
 * it can read ahead what it will compute; who has finished its own units takes from the others', so a worker the system
 * holds up holds up nobody. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "work.h"

#define RING 8
#define LINE 64
#define STRIDE 1024 /* bytes read ahead between two looks for work */

/* A worker's units of each phase, counted from 0: on one line, as whoever submits has to fetch it from the worker's core. */
typedef struct {
    _Alignas(LINE) _Atomic int64_t next[FL_PHASES];
    int64_t end[FL_PHASES];
} range;

/* The expert of which idle workers read their rows of the gate and up matrices; NULL: none. */
typedef struct {
    _Atomic int64_t told;                /* how often it has changed */
    _Atomic(const fl_layout *) layout;
    _Atomic(const uint8_t *) block;
} foreseen;

typedef struct {
    fl_job job;
    range *ranges;                       /* [threads] */
    _Alignas(LINE) _Atomic int64_t finished[FL_PHASES]; /* units */
    _Atomic int64_t begun_ns, ended_ns;
    _Atomic int64_t done;                /* ticket + 1 of the last finished job that was here */
    _Atomic int left;                    /* workers that will not look at the job again */
} slot;

struct fl_pool {
    int threads, isa;
    int64_t spin_ns, room;               /* room: bytes that a worker's cache keeps for it */
    foreseen ahead;
    pthread_t *workers;
    slot *ring;                          /* [RING] */
    _Alignas(LINE) _Atomic int64_t submitted;
    _Atomic int stop, sleepers, waiters;
    pthread_mutex_t mutex;
    pthread_cond_t work, idle;
};

typedef struct {
    fl_pool *pool;
    int number;
} start;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void pause_core(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Waits up to `ns` until `*value` is at least `least`; says whether it is. */
static int spin(const _Atomic int64_t *value, int64_t least, int64_t ns) {
    if (atomic_load_explicit(value, memory_order_acquire) >= least) return 1;
    if (ns <= 0) return 0;
    for (int64_t end = now_ns() + ns;;) {
        for (int i = 0; i < 32; i++) {
            pause_core();
            if (atomic_load_explicit(value, memory_order_acquire) >= least) return 1;
        }
        if (now_ns() >= end) return 0;
    }
}

/* Says whether the phase's last unit was done here. */
static int run_phase(slot *s, int phase, int number, int threads) {
    int64_t units = s->job.units[phase], all = 0;
    for (int v = 0; v < threads; v++) {
        int owner = (number + v) % threads;
        range *r = &s->ranges[owner];
        for (;;) {
            int64_t grain = s->job.grain[phase], end = r->end[phase];
            int64_t from = atomic_fetch_add_explicit(&r->next[phase], grain, memory_order_relaxed);
            if (from >= end) break;
            int64_t to = from + grain < end ? from + grain : end;
            fl_job_run(&s->job, phase, owner, threads, from, to);
            all = to - from + atomic_fetch_add_explicit(&s->finished[phase], to - from, memory_order_acq_rel);
        }
    }
    return all == units;
}

static void finish(fl_pool *pool, slot *s, int64_t ticket) {
    atomic_store(&s->ended_ns, now_ns());
    atomic_store(&s->done, ticket + 1);
    if (atomic_load(&pool->waiters) > 0) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->idle);
        pthread_mutex_unlock(&pool->mutex);
    }
}

static void run_job(fl_pool *pool, slot *s, int64_t ticket, int number) {
    int64_t none = 0;
    if (atomic_load(&s->begun_ns) == 0) atomic_compare_exchange_strong(&s->begun_ns, &none, now_ns());
    int last = s->job.phases - 1;
    for (int phase = 0; phase < last; phase++) {
        int told = phase == 1 && s->job.weights != NULL; /* a unit of its own: no job ends before that is done */
        if (run_phase(s, phase, number, pool->threads) && phase == 0 && s->job.weights) {
            __atomic_store_n(s->job.soon, s->job.tag, __ATOMIC_RELAXED);
            atomic_fetch_add_explicit(&s->finished[1], 1, memory_order_acq_rel);
        }
        while (!spin(&s->finished[phase], s->job.units[phase] + told, 20000)) sched_yield();
    }
    if (run_phase(s, last, number, pool->threads)) finish(pool, s, ticket);
    atomic_fetch_add_explicit(&s->left, 1, memory_order_release);
}

/* Read what a worker will compute, until it has something to compute or its cache is full. */
static void read_ahead(fl_pool *pool, int number, int64_t ticket) {
    foreseen *f = &pool->ahead;
    int64_t told = atomic_load_explicit(&f->told, memory_order_acquire), room = pool->room;
    const uint8_t *block = atomic_load_explicit(&f->block, memory_order_relaxed);
    fl_part parts[2];
    if (!block) return;
    int n = fl_share(pool->isa, atomic_load_explicit(&f->layout, memory_order_relaxed), block, number, pool->threads, parts);
    for (size_t at = 0; n && at < parts[0].bytes && room >= n * STRIDE; at += STRIDE, room -= n * STRIDE) {
        for (int p = 0; p < n; p++)
            for (size_t line = at; line < at + STRIDE && line < parts[p].bytes; line += LINE)
                (void)*(const volatile uint8_t *)(parts[p].from + line); /* prefetches may be dropped */
        if (atomic_load_explicit(&pool->submitted, memory_order_relaxed) > ticket ||
            atomic_load_explicit(&f->told, memory_order_relaxed) != told)
            return;
    }
}

/* `spin` for the next job; what is told to be read ahead is read meanwhile, once. */
static int rest(fl_pool *pool, int number, int64_t ticket, int64_t *read) {
    if (atomic_load_explicit(&pool->submitted, memory_order_acquire) > ticket) return 1;
    for (int64_t end = now_ns() + pool->spin_ns; pool->spin_ns > 0;) {
        int64_t told = atomic_load_explicit(&pool->ahead.told, memory_order_relaxed);
        if (told != *read) {
            read_ahead(pool, number, ticket);
            *read = told;
        }
        if (spin(&pool->submitted, ticket + 1, 500)) return 1;
        if (now_ns() >= end) return 0;
    }
    return 0;
}

static void *worker(void *argument) {
    start begin = *(start *)argument;
    fl_pool *pool = begin.pool;
    int64_t read = 0;
    free(argument);
    for (int64_t ticket = 0;; ticket++) {
        if (!rest(pool, begin.number, ticket, &read)) {
            pthread_mutex_lock(&pool->mutex);
            atomic_fetch_add(&pool->sleepers, 1);
            while (atomic_load(&pool->submitted) <= ticket && !atomic_load(&pool->stop))
                pthread_cond_wait(&pool->work, &pool->mutex);
            atomic_fetch_sub(&pool->sleepers, 1);
            pthread_mutex_unlock(&pool->mutex);
        }
        if (atomic_load(&pool->submitted) <= ticket) return NULL;
        run_job(pool, &pool->ring[ticket % RING], ticket, begin.number);
    }
}

static void release(fl_pool *pool) {
    for (int i = 0; pool->ring && i < RING; i++) {
        fl_job_free(&pool->ring[i].job);
        free(pool->ring[i].ranges);
    }
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->idle);
    free(pool->ring);
    free(pool->workers);
    free(pool);
}

/* Zeroed memory on a cache line of its own; `calloc` does not align so far. */
static void *lines(size_t bytes) {
    void *found = NULL;
    if (posix_memalign(&found, LINE, bytes)) return NULL;
    return memset(found, 0, bytes);
}

static void stop_workers(fl_pool *pool, int started) {
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->stop, 1);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 0; i < started; i++) pthread_join(pool->workers[i], NULL);
}

/* Most of a core's second-level cache. */
static int64_t cache_room(void) {
    int64_t bytes = 0;
#if defined(_SC_LEVEL2_CACHE_SIZE)
    bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    return (bytes > 0 ? bytes : 512 << 10) / 4 * 3;
}

fl_pool *fl_pool_new(int threads, int isa, int spin_us) {
    if (threads < 1 || !fl_isa_supported(isa)) return NULL;
    fl_pool *pool = lines(sizeof *pool);
    if (!pool) return NULL;
    pool->threads = threads;
    pool->isa = isa;
    pool->spin_ns = (int64_t)spin_us * 1000;
    pool->room = cache_room();
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->idle, NULL);
    pool->workers = calloc((size_t)threads, sizeof *pool->workers);
    pool->ring = lines(RING * sizeof *pool->ring);
    int ready = pool->workers && pool->ring, started = 0;
    for (int i = 0; ready && i < RING; i++) {
        pool->ring[i].ranges = lines((size_t)threads * sizeof(range));
        ready = pool->ring[i].ranges != NULL;
    }
    for (; ready && started < threads; started++) {
        start *begin = malloc(sizeof *begin);
        if (!begin) break;
        *begin = (start){pool, started};
        if (pthread_create(&pool->workers[started], NULL, worker, begin)) {
            free(begin);
            break;
        }
    }
    if (started == threads) return pool;
    stop_workers(pool, started);
    release(pool);
    return NULL;
}

void fl_pool_free(fl_pool *pool) {
    if (!pool) return;
    stop_workers(pool, pool->threads);
    release(pool);
}

int fl_pool_place(fl_pool *pool, const int32_t *cpus, int n) {
#if defined(__linux__)
    if (n < 1) return EINVAL;
    for (int i = 0; i < pool->threads; i++) {
        cpu_set_t set;
        CPU_ZERO(&set);
        for (int c = 0; c < n; c++)
            if (n < pool->threads || c == i) CPU_SET(cpus[c], &set);
        int error = pthread_setaffinity_np(pool->workers[i], sizeof set, &set);
        if (error) return error;
    }
    return 0;
#else
    (void)pool, (void)cpus, (void)n;
    return ENOTSUP;
#endif
}

int64_t fl_submit(fl_pool *pool, const fl_layout *layout, const fl_work *work) {
    int64_t ticket = atomic_load(&pool->submitted);
    slot *s = &pool->ring[ticket % RING];
    if (ticket >= RING)
        while (atomic_load_explicit(&s->left, memory_order_acquire) < pool->threads) sched_yield();
    int error = fl_job_fill(&s->job, pool->isa, pool->threads, layout, work);
    if (error) return error;
    fl_job_first(&s->job, atomic_load_explicit(&pool->ahead.block, memory_order_relaxed));
    for (int v = 0; v < pool->threads; v++)
        for (int phase = 0; phase < s->job.phases; phase++) {
            atomic_store_explicit(&s->ranges[v].next[phase], 0, memory_order_relaxed);
            s->ranges[v].end[phase] = fl_job_share(&s->job, phase, v, pool->threads);
        }
    for (int phase = 0; phase < FL_PHASES; phase++) atomic_store(&s->finished[phase], 0);
    atomic_store(&s->begun_ns, 0);
    atomic_store(&s->ended_ns, 0);
    atomic_store(&s->left, 0);
    atomic_store(&pool->submitted, ticket + 1);
    if (atomic_load(&pool->sleepers) > 0) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->work);
        pthread_mutex_unlock(&pool->mutex);
    }
    return ticket;
}

int64_t fl_ahead(fl_pool *pool, const fl_layout *layout, const void *block) {
    atomic_store_explicit(&pool->ahead.layout, layout, memory_order_relaxed);
    atomic_store_explicit(&pool->ahead.block, (const uint8_t *)block, memory_order_relaxed);
    return 1 + atomic_fetch_add_explicit(&pool->ahead.told, 1, memory_order_release);
}

int fl_done(fl_pool *pool, int64_t ticket) {
    return atomic_load_explicit(&pool->ring[ticket % RING].done, memory_order_acquire) > ticket;
}

void fl_wait(fl_pool *pool, int64_t ticket, int64_t span[2]) {
    slot *s = &pool->ring[ticket % RING];
    if (!spin(&s->done, ticket + 1, pool->spin_ns)) {
        pthread_mutex_lock(&pool->mutex);
        atomic_fetch_add(&pool->waiters, 1);
        while (!fl_done(pool, ticket)) pthread_cond_wait(&pool->idle, &pool->mutex);
        atomic_fetch_sub(&pool->waiters, 1);
        pthread_mutex_unlock(&pool->mutex);
    }
    span[0] = atomic_load(&s->begun_ns);
    span[1] = atomic_load(&s->ended_ns);
}

int64_t fl_layout_size(void) { return (int64_t)sizeof(fl_layout); }

int64_t fl_work_size(void) { return (int64_t)sizeof(fl_work); }
