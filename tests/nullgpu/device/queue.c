/* Counts, the log, streams and their clocks, and what the device has not done yet. */
#include "null.h"
#include <sys/syscall.h>
#include <time.h>

EXPORT i64 nullgpu_counts[32];
void count(int what, i64 n) { __atomic_fetch_add(&nullgpu_counts[what], n, __ATOMIC_RELAXED); }
static double number(const char *name, double otherwise) { const char *s = getenv(name); return s && *s ? atof(s) : otherwise; }
size_t copied_up_to(void) { static i64 n = -1; if (n < 0) n = (i64)number("NULLGPU_COPY", 65536); return n; }
double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }

/* ---- log ---- */
struct entry { i64 kind; const void *stream, *read; i64 nread; const void *written; i64 nwritten, thread; };
EXPORT struct entry *nullgpu_log;
EXPORT i64 nullgpu_logged, nullgpu_log_room; /* NULLGPU_LOG entries */
__attribute__((constructor)) static void make_log(void) {
  nullgpu_log_room = (i64)number("NULLGPU_LOG", 0);
  if (nullgpu_log_room) nullgpu_log = calloc(nullgpu_log_room, sizeof *nullgpu_log);
}
void note(i64 kind, const void *stream, const void *read, i64 nread, const void *written, i64 nwritten) {
  if (!nullgpu_log) return;
  i64 i = __atomic_fetch_add(&nullgpu_logged, 1, __ATOMIC_RELAXED);
  if (i >= nullgpu_log_room) return; /* the reader sees that it is full */
  nullgpu_log[i] = (struct entry){kind, stream, read, nread, written, nwritten, syscall(SYS_gettid)};
}

/* ---- streams ---- */
static struct stream default_stream, *every[MAX_STREAMS] = {&default_stream};
static int streams = 1;
struct stream *stream_of(const void *handle) { return (uintptr_t)handle < 4096 ? &default_stream : (struct stream *)handle; }
struct stream *new_stream(void) {
  struct stream *s = calloc(1, sizeof *s);
  s->index = __atomic_fetch_add(&streams, 1, __ATOMIC_RELAXED);
  if (s->index >= MAX_STREAMS) { fprintf(stderr, "nullgpu: more than %d streams\n", MAX_STREAMS); abort(); }
  every[s->index] = s;
  return s;
}
struct clock all_work(void) {
  struct clock c = {{0}};
  for (int i = 0, n = streams; i < n; i++) if (every[i]) c.at[i] = every[i]->clock.at[i];
  return c;
}
void join(struct clock *a, const struct clock *b) {
  for (int i = 0, n = streams; i < n; i++) if (a->at[i] < b->at[i]) a->at[i] = b->at[i];
}
int captures;
cudaError_t work(const void *stream) {
  struct stream *s = stream_of(stream);
  s->clock.at[s->index]++;
  if (captures && !s->capture) return cudaErrorStreamCaptureImplicit; /* would run now, and never in a replay */
  if (s->capture) count(GRAPH_NODES, 1);
  return 0;
}

/* ---- queue ---- */
pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;
struct item { struct call *call; void *to; const void *from; size_t n; int value, stream, tick; struct clock clock; };
static struct item *queue[65536];
static int queued;
char deadlock[4096];

static int behind_calls(const struct item *it) { /* calls of one group have one tick, and begin together */
  for (int i = 0; i < queued; i++)
    if (queue[i]->call && queue[i]->tick <= it->clock.at[queue[i]->stream] && (queue[i]->stream != it->stream || queue[i]->tick != it->tick)) return 1;
  return 0;
}
static void poll_queue(void) { /* with the lock */
  for (int again = 1; again;) {
    again = 0;
    for (int i = 0; i < queued; i++) {
      struct item *it = queue[i];
      if (behind_calls(it)) continue;
      if (it->call) { if (!call_done(it->call)) continue; }
      else if (it->from) memmove(it->to, it->from, it->n);
      else memset(it->to, it->value, it->n);
      memmove(queue + i, queue + i + 1, (--queued - i) * sizeof *queue);
      free(it); i--; again = 1;
    }
  }
}
static void *progress(void *unused) { /* other ranks wait for what this one's stream comes to while its host is elsewhere */
  for (;;) {
    usleep(queued ? 500 : 5000);
    if (!queued) continue;
    pthread_mutex_lock(&queue_lock); poll_queue(); pthread_mutex_unlock(&queue_lock);
  }
  return 0;
}
static void push(const void *stream, struct item it) {
  static int started;
  struct stream *s = stream_of(stream);
  it.stream = s->index; it.tick = s->clock.at[s->index]; it.clock = s->clock;
  if (queued == sizeof queue / sizeof *queue) { fprintf(stderr, "nullgpu: the queue is full\n"); abort(); }
  queue[queued] = malloc(sizeof it); *queue[queued++] = it;
  if (!started) { pthread_t t; started = 1; pthread_create(&t, 0, progress, 0); pthread_detach(t); }
}
void enqueue_call(const void *stream, struct call *c) { push(stream, (struct item){.call = c}); poll_queue(); }
void enqueue_copy(const void *stream, void *to, const void *from, size_t n, int value) {
  if (n > copied_up_to()) return;
  pthread_mutex_lock(&queue_lock);
  if (queued) { push(stream, (struct item){.to = to, .from = from, .n = n, .value = value}); poll_queue(); }
  else if (from) memmove(to, from, n);
  else memset(to, value, n);
  pthread_mutex_unlock(&queue_lock);
}
static int still(const struct clock *c) {
  for (int i = 0; i < queued; i++) if (queue[i]->tick <= c->at[queue[i]->stream]) return 1;
  return 0;
}
int clock_done(const struct clock *c) {
  if (!queued) return 1;
  pthread_mutex_lock(&queue_lock); poll_queue(); int done = !still(c); pthread_mutex_unlock(&queue_lock);
  return done;
}
static struct clock host; /* what the host has waited for */
int known_done(const struct clock *c) { /* what a query says: with a log the device is slow, as the order may not depend on luck */
  char name[16] = "";
  if (!clock_done(c)) return 0;
  if (!nullgpu_log || (pthread_getname_np(pthread_self(), name, sizeof name) == 0 && strncmp(name, "pt_nccl", 7) == 0)) return 1;
  for (int i = 0, n = streams; i < n; i++) if (c->at[i] > host.at[i]) return 0;
  return 1;
}
cudaError_t wait_for(const struct clock *c) {
  double until = now() + number("NULLGPU_LIMIT", 20), hangs_until = now() + number("NULLGPU_HANGS", 0);
  while (!clock_done(c)) {
    pthread_mutex_lock(&queue_lock);
    int hopeless = 0; char *text = deadlock; char *end = deadlock + sizeof deadlock;
    for (int i = 0; i < queued; i++) if (queue[i]->call && queue[i]->tick <= c->at[queue[i]->stream] && call_is_hopeless(queue[i]->call)) hopeless = 1;
    if ((hopeless && now() > hangs_until) || now() > until) {
      for (int i = 0; i < queued && text < end - 512; i++)
        if (queue[i]->call && queue[i]->tick <= c->at[queue[i]->stream]) { call_explain(queue[i]->call, text, end - text); text += strlen(text); }
      pthread_mutex_unlock(&queue_lock);
      fprintf(stderr, "nullgpu: the host waits for ever: %s\n", deadlock);
      return cudaErrorLaunchTimeout;
    }
    pthread_mutex_unlock(&queue_lock);
    usleep(200);
  }
  join(&host, c);
  return 0;
}
void call_forget(struct call *c, void *communicator, int *drop); /* nccl.c */
void drop_calls(void *communicator) {
  pthread_mutex_lock(&queue_lock);
  for (int i = 0; i < queued; i++) {
    int drop = 0;
    if (queue[i]->call) call_forget(queue[i]->call, communicator, &drop);
    if (drop) { free(queue[i]); memmove(queue + i, queue + i + 1, (--queued - i) * sizeof *queue); i--; }
  }
  poll_queue();
  pthread_mutex_unlock(&queue_lock);
}
