/* What the parts of the device share: counts, the log, streams with clocks, and the queue of what is not done yet. */
#pragma once
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo
#undef cudaEventRecordWithFlags

#define EXPORT __attribute__((visibility("default")))
typedef long long i64;

/* ---- counts: what tests read as nullgpu_counts, in this order (tests/nullgpu/device.py) ---- */
enum { KERNELS, MEMCPYS, MEMSETS, EVENT_RECORDS, STREAM_WAITS, NCCL_CALLS, NCCL_GROUPS, MALLOCS, FREES, GEMMS, HOST_WAITS,
       NCCL_BYTES, EVENT_QUERIES, STREAMS, EVENTS, HOST_ALLOCS, GRAPH_NODES, GRAPH_LAUNCHES };
extern i64 nullgpu_counts[32];
void count(int what, i64 n);

/* ---- the log: what was put on which stream, in the order of the host (tests/nullgpu/ordering.py) ---- */
enum { L_RECORD = 1, L_WAIT, L_READ_WRITE, L_KERNEL, L_SYNC_STREAM, L_SYNC_EVENT, L_SYNC_DEVICE, L_HOST_READ };
void note(i64 kind, const void *stream, const void *read, i64 nread, const void *written, i64 nwritten);

/* ---- streams: a stream's clock says which work of every stream comes before what it gets next ---- */
enum { MAX_STREAMS = 512 };
struct clock { int at[MAX_STREAMS]; };
struct stream { int index, capture, before; /* the capture: what was put on it */ struct clock clock; };
struct event { struct timespec recorded; int capture; struct clock clock; };
struct stream *stream_of(const void *handle);          /* the default stream is 0, 1 or 2 */
struct stream *new_stream(void);
struct clock all_work(void);                           /* everything that was ever put on a stream */
void join(struct clock *a, const struct clock *b);
cudaError_t work(const void *stream);                  /* a kernel: 0, or the rule of capture that it breaks */
extern int captures;                                   /* how many are under way */

/* ---- the queue: NCCL's calls that other ranks have not come to, and copies behind them ---- */
extern pthread_mutex_t queue_lock;
struct call;                                           /* nccl.c */
int call_done(struct call *c);                         /* try again, with what its stream did before done */
void call_explain(struct call *c, char *text, size_t room);
int call_is_hopeless(struct call *c);                  /* the rank that it waits for has ended, or did something else */
void enqueue_call(const void *stream, struct call *c); /* with the lock; its stream has counted it */
void enqueue_copy(const void *stream, void *to, const void *from, size_t n, int value); /* a copy, or a fill with value */
int clock_done(const struct clock *c);                 /* whether all of it is done now */
int known_done(const struct clock *c);                 /* the same, as a query tells it */
cudaError_t wait_for(const struct clock *c);           /* let the host wait; an error after NULLGPU_LIMIT seconds */
void drop_calls(void *communicator);
extern char deadlock[4096];                            /* what the last wait in vain was for */

size_t copied_up_to(void);                             /* NULLGPU_COPY: larger copies are not done */
cudaError_t take_memory(i64 n);                        /* of the device's NULLGPU_GIB */
void give_memory(i64 n);
double now(void);
