/* Copies and launches of the decoding path on CUDA, issued without Python (declared in issue.h). */
#define _GNU_SOURCE
#include "issue.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#else
#define RELAX() __asm__ __volatile__("" ::: "memory")
#endif

enum { QUEUED = 1, IN_FLIGHT = 2, LANDED = 3 }; /* backend/policy/state.py */
enum { HOST_TO_DEVICE = 1, NO_TIMING = 2, NON_BLOCKING = 1 };
enum { FLYING = 8, MARKS = 256 };

typedef struct {
    int64_t key, purpose, issued_ns;
    void *event;
} flight;

struct fc_link {
    fc_runtime rt;
    fc_brain brain;
    fc_memory memory;
    pthread_mutex_t lock;
    pthread_cond_t work;
    pthread_t thread;
    int threaded, stopped, error, device, spins, driven;
#if defined(__linux__)
    cpu_set_t roamed; /* where the driving thread may be otherwise */
#endif
    int at_home;
    void *copies;
    int64_t phase, issued;
    flight flying[FLYING];
    int first, count;
    int64_t slots;
    void **copied;      /* [slots] event of the copy last issued into a slot */
    int64_t *order;     /* [slots] when that was, counted in copies */
    int32_t *used;      /* [slots] 1 + the mark behind the kernels that read a slot last; 0: no one has */
    void *marks[MARKS];
    int mark;
    void *const *delays;
    int n_delays;
    void *before, *after; /* what slows every copy, if anything */
    uint64_t random;
    int64_t *spans;
    int64_t n_spans, max_spans;
};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int failed(fc_link *link, int code) {
    if (code && !link->error) link->error = code;
    return code;
}

static void pause_a_little(const fc_link *link) {
    if (link->spins) {
        for (int i = 0; i < link->spins; i++) RELAX();
    } else {
        struct timespec t = {0, 20000};
        nanosleep(&t, NULL);
    }
}

/* Room for `slots` slots; what is known of the others stays. */
static int make_room(fc_link *link, int64_t slots) {
    if (slots <= link->slots) return 0;
    void **copied = realloc(link->copied, slots * sizeof *copied);
    if (copied) link->copied = copied;
    int64_t *order = realloc(link->order, slots * sizeof *order);
    if (order) link->order = order;
    int32_t *used = realloc(link->used, slots * sizeof *used);
    if (used) link->used = used;
    if (!copied || !order || !used) return failed(link, FC_NO_MEMORY);
    for (; link->slots < slots; link->slots++) {
        link->order[link->slots] = 0;
        link->used[link->slots] = 0;
        if (failed(link, link->rt.event_create(&link->copied[link->slots], NO_TIMING))) return link->error;
    }
    return 0;
}

/* Start the copy of `key` behind the last kernels that read its slot (lock held). */
static void issue(fc_link *link, int64_t key) {
    int64_t layer = key / link->brain.experts, slot = link->brain.slot[key];
    flight *f = &link->flying[(link->first + link->count) % FLYING];
    f->key = key;
    f->purpose = link->brain.purpose[key];
    f->issued_ns = link->max_spans ? now_ns() : 0;
    f->event = link->copied[slot];
    if (link->used[slot]) {
        failed(link, link->rt.stream_wait_event(link->copies, link->marks[link->used[slot] - 1], 0));
        link->used[slot] = 0;
    }
    if (link->n_delays) {
        link->random = link->random * 6364136223846793005ULL + 1442695040888963407ULL;
        failed(link, link->rt.graph_launch(link->delays[(link->random >> 33) % link->n_delays], link->copies));
    }
    if (link->before) failed(link, link->rt.graph_launch(link->before, link->copies));
    failed(link, link->rt.memcpy_async((void *)link->memory.targets[slot], (const void *)link->memory.sources[key],
                                       link->memory.bytes[layer], HOST_TO_DEVICE, link->copies));
    if (link->after) failed(link, link->rt.graph_launch(link->after, link->copies));
    failed(link, link->rt.event_record(f->event, link->copies));
    link->order[slot] = ++link->issued;
    link->count++;
}

static void note_span(fc_link *link, const flight *f) {
    if (link->n_spans >= link->max_spans) return;
    int64_t *span = link->spans + 4 * link->n_spans++;
    span[0] = f->key;
    span[1] = f->purpose;
    span[2] = f->issued_ns;
    span[3] = now_ns();
}

/* Report what has landed and issue what may be issued (lock held). */
static void pump(fc_link *link) {
    if (link->error) return;
    while (link->count) {
        flight *f = &link->flying[link->first];
        int code = link->rt.event_query(f->event);
        if (code == FC_NOT_READY) {
            link->rt.last_error(); /* else the caller's next check would find it */
            break;
        }
        if (failed(link, code)) return;
        link->brain.complete(link->brain.table, f->key);
        note_span(link, f);
        link->first = (link->first + 1) % FLYING;
        link->count--;
    }
    int64_t key;
    while (link->count < FLYING && !link->error && (key = link->brain.next(link->brain.table, link->phase)) >= 0)
        issue(link, key);
}

static void *serve(void *given) {
    fc_link *link = given;
    link->rt.set_device(link->device);
    pthread_mutex_lock(&link->lock);
    for (;;) {
        if (link->brain.next && !link->driven) pump(link);
        if (link->stopped && (!link->count || link->error)) break;
        if (!link->count || link->error || link->driven) {
            pthread_cond_wait(&link->work, &link->lock);
        } else {
            pthread_mutex_unlock(&link->lock);
            pause_a_little(link);
            pthread_mutex_lock(&link->lock);
        }
    }
    pthread_mutex_unlock(&link->lock);
    return NULL;
}

fc_link *fc_open(const fc_runtime *rt, int device, int spins, int threaded) {
    fc_link *link = calloc(1, sizeof *link);
    if (!link) return NULL;
    link->rt = *rt;
    link->device = device;
    link->spins = spins;
    pthread_mutex_init(&link->lock, NULL);
    pthread_cond_init(&link->work, NULL);
    if (failed(link, rt->set_device(device)) || failed(link, rt->stream_create(&link->copies, NON_BLOCKING))) {
        free(link);
        return NULL;
    }
    for (int i = 0; i < MARKS; i++) failed(link, rt->event_create(&link->marks[i], NO_TIMING));
    link->threaded = threaded && pthread_create(&link->thread, NULL, serve, link) == 0;
    return link;
}

void fc_close(fc_link *link) {
    pthread_mutex_lock(&link->lock);
    link->stopped = 1;
    pthread_cond_signal(&link->work);
    pthread_mutex_unlock(&link->lock);
    if (link->threaded) pthread_join(link->thread, NULL);
    link->rt.stream_synchronize(link->copies);
    for (int i = 0; i < MARKS; i++) link->rt.event_destroy(link->marks[i]);
    for (int64_t i = 0; i < link->slots; i++) link->rt.event_destroy(link->copied[i]);
    link->rt.stream_destroy(link->copies);
    free(link->copied);
    free(link->order);
    free(link->used);
    free(link->spans);
    pthread_cond_destroy(&link->work);
    pthread_mutex_destroy(&link->lock);
    free(link);
}

int64_t fc_lock(fc_link *link) { return pthread_mutex_lock(&link->lock); }

/* Issue what may be issued, and wake the thread to watch over it (lock held). */
static void kick(fc_link *link) {
    pump(link);
    if (link->count && !link->driven) pthread_cond_signal(&link->work);
}

int64_t fc_unlock(fc_link *link, int64_t kicked) {
    if (kicked && link->brain.next) kick(link);
    int error = link->error;
    pthread_mutex_unlock(&link->lock);
    return error;
}

int fc_bind(fc_link *link, const fc_brain *brain, const fc_memory *memory) {
    link->brain = *brain;
    link->memory = *memory;
    return make_room(link, memory->slots);
}

void fc_phase(fc_link *link, int64_t phase) { link->phase = phase; }

void fc_delays(fc_link *link, void *const *graphs, int n, uint64_t seed) {
    link->delays = graphs;
    link->n_delays = n;
    link->random = seed;
}

void fc_throttle(fc_link *link, void *before, void *after) {
    link->before = before;
    link->after = after;
}

int64_t fc_record_spans(fc_link *link, int64_t most) {
    int64_t *spans = most ? malloc(most * 4 * sizeof *spans) : NULL;
    if (most && !spans) return FC_NO_MEMORY;
    free(link->spans);
    link->spans = spans;
    link->n_spans = 0;
    link->max_spans = most;
    return 0;
}

int64_t fc_spans(const fc_link *link, const int64_t **spans) {
    *spans = link->spans;
    return link->n_spans;
}

int fc_settle(fc_link *link) {
    while (link->count && !link->error) {
        pump(link);
        if (link->count) pause_a_little(link);
    }
    return link->error;
}

/* Among `keys` the one that is on the link or on the device and was issued first, or -1 (lock held). */
static int64_t first_issued(const fc_link *link, const int64_t *keys, int64_t n, const uint8_t *taken) {
    int64_t best = -1, order = 0;
    for (int64_t i = 0; i < n; i++) {
        if (taken && taken[i]) continue;
        int status = link->brain.status[keys[i]];
        if (status != IN_FLIGHT && status != LANDED) continue;
        int64_t when = link->order[link->brain.slot[keys[i]]];
        if (best < 0 || when < order) best = i, order = when;
    }
    return best;
}

int64_t fc_take_ready(fc_link *link, const int64_t *keys, int64_t n) {
    for (;;) {
        pthread_mutex_lock(&link->lock);
        kick(link);
        int64_t found = first_issued(link, keys, n, NULL);
        int error = link->error;
        pthread_mutex_unlock(&link->lock);
        if (error) return -1;
        if (found >= 0) return found;
        pause_a_little(link);
    }
}

int64_t fc_wait_landed(fc_link *link, const int64_t *keys, int64_t n) {
    for (;;) {
        pthread_mutex_lock(&link->lock);
        kick(link);
        int open = 0, error = link->error;
        for (int64_t i = 0; i < n; i++) {
            int status = link->brain.status[keys[i]];
            open |= status == QUEUED || status == IN_FLIGHT;
        }
        pthread_mutex_unlock(&link->lock);
        if (error || !open) return error;
        pause_a_little(link);
    }
}

int fc_when_landed(fc_link *link, int64_t slot, void *compute) {
    return failed(link, link->rt.stream_wait_event(compute, link->copied[slot], 0));
}

/* Mark the compute stream here (lock held); the number goes into `used`. */
static int32_t new_mark(fc_link *link, void *compute) {
    link->mark = (link->mark + 1) % MARKS;
    failed(link, link->rt.event_record(link->marks[link->mark], compute));
    return 1 + link->mark;
}

int fc_slot_used(fc_link *link, const int32_t *slots, int64_t n, void *compute) {
    if (!n) return link->error;
    int32_t mark = new_mark(link, compute);
    for (int64_t i = 0; i < n; i++) link->used[slots[i]] = mark;
    return link->error;
}

int fc_instantiate(fc_link *link, void *graph, void **exec) {
    return failed(link, link->rt.graph_instantiate(exec, graph, 0));
}

void fc_drop_graph(fc_link *link, void *exec) { link->rt.graph_destroy(exec); }

int fc_launch(fc_link *link, void *exec, void *compute) {
    return failed(link, link->rt.graph_launch(exec, compute));
}

int64_t fc_now(void) { return now_ns(); }

/* Keep the calling thread on a core, or let it go again (lock held). Where the system refuses it roams. */
static void stay(fc_link *link, int64_t home) {
#if defined(__linux__)
    if (home >= 0 && !link->at_home) {
        cpu_set_t here;
        CPU_ZERO(&here);
        CPU_SET((int)home, &here);
        if (sched_getaffinity(0, sizeof link->roamed, &link->roamed)) return;
        link->at_home = sched_setaffinity(0, sizeof here, &here) == 0;
    } else if (home < 0 && link->at_home) {
        sched_setaffinity(0, sizeof link->roamed, &link->roamed);
        link->at_home = 0;
    }
#else
    (void)link, (void)home;
#endif
}

int64_t fc_drive(fc_link *link, int64_t on, int64_t home) {
    pthread_mutex_lock(&link->lock);
    link->driven = on != 0;
    stay(link, on ? home : -1);
    return fc_unlock(link, !on);
}

int64_t fc_serve(fc_link *link) {
    fc_lock(link);
    return fc_unlock(link, 1);
}

/* One look at the link and a short rest, for who waits for something else. */
static void meanwhile(fc_link *link) {
    if (link->count) fc_serve(link);
    if (link->spins)
        for (int i = 0; i < 16; i++) RELAX();
    else
        sched_yield();
}

int64_t fc_told(fc_link *link, const int32_t *words, int64_t n, int64_t tag, int64_t timeout_ns) {
    int64_t until = now_ns() + timeout_ns, at = 0;
    for (int spin = 0;; spin++) {
        while (at < n && __atomic_load_n(words + at, __ATOMIC_ACQUIRE) >> 16 == tag) at++;
        if (at == n) return 1;
        if (spin % 256 == 255 && now_ns() > until) return 0;
        meanwhile(link);
    }
}

int64_t fc_computed(fc_link *link, fl_pool *pool, int64_t ticket, int64_t span[2]) {
    while (link->spins && !fl_done(pool, ticket)) meanwhile(link);
    fl_wait(pool, ticket, span);
    return link->error;
}

/* Wait until late experts beyond the first `found` are issued; enter all that are, in link order, into the plan and their
 * slots into `late`. How many there are now; `found` if the link has met an error. */
static int64_t more_late(fc_link *link, const fc_step *step, uint8_t *taken, int32_t *late, int64_t found) {
    for (int64_t before = found;;) {
        pthread_mutex_lock(&link->lock);
        kick(link);
        int64_t i;
        while (!link->error && (i = first_issued(link, step->keys, step->late, taken)) >= 0) {
            int64_t *entry = step->plan + found * FC_ENTRY;
            taken[i] = 1;
            late[found] = link->brain.slot[step->keys[i]];
            entry[0] = link->memory.targets[late[found++]];
            entry[1] = step->firsts[i];
            entry[2] = step->counts[i];
        }
        pthread_mutex_unlock(&link->lock);
        if (found > before || link->error) return link->error ? before : found;
        pause_a_little(link);
    }
}

int64_t fc_run(fc_link *link, const fc_step *step) {
    uint8_t taken[FC_MOST_LATE];
    int32_t late[FC_MOST_LATE]; /* their slots */
    if (step->late > FC_MOST_LATE) return FC_TOO_MANY;
    memset(taken, 0, sizeof taken);
    if (step->resident) failed(link, link->rt.graph_launch(step->resident, step->compute));
    for (int64_t wave = 0, found = 0; wave < step->late && !link->error; wave++) {
        if (wave == found) {
            found = more_late(link, step, taken, late, found);
            if (wave == found) break;
            failed(link, link->rt.graph_launch(step->bring, step->compute));
        }
        failed(link, link->rt.stream_wait_event(step->compute, link->copied[late[wave]], 0));
        failed(link, link->rt.graph_launch(step->waves[wave], step->compute));
    }
    if (!link->error && step->n_used + step->late) {
        pthread_mutex_lock(&link->lock);
        int32_t mark = new_mark(link, step->compute);
        for (int64_t i = 0; i < step->n_used; i++) link->used[step->used[i]] = mark;
        for (int64_t i = 0; i < step->late; i++) link->used[late[i]] = mark;
        pthread_mutex_unlock(&link->lock);
    }
    if (step->next && !link->error) failed(link, link->rt.graph_launch(step->next, step->compute));
    return link->error;
}
