/* CUDA's runtime, as torch imports it. */
#include "null.h"
#include <dlfcn.h>
#include <sys/mman.h>
#include <time.h>

static int devices(void) { const char *s = getenv("NULLGPU_DEVICES"); return s ? atoi(s) : 1; }
static size_t total(void) { const char *s = getenv("NULLGPU_GIB"); return (size_t)((s ? atof(s) : 80.0) * (1ull << 30)); }
static __thread int current;
static __thread cudaError_t last;
static cudaError_t fail(cudaError_t e) { if (e) last = e; return e; }

/* ---- devices ---- */
EXPORT cudaError_t cudaGetDeviceCount(int *n) { *n = devices(); return 0; }
EXPORT cudaError_t cudaGetDevice(int *d) { *d = current; return 0; }
EXPORT cudaError_t cudaSetDevice(int d) { current = d; return 0; }
EXPORT cudaError_t cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; return 0; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; return 0; }
EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "null device (H100)");
  memset(p->uuid.bytes, 1 + d, sizeof p->uuid.bytes);
  p->totalGlobalMem = total(); p->sharedMemPerBlock = 49152; p->regsPerBlock = 65536; p->warpSize = 32;
  p->maxThreadsPerBlock = 1024; p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536; p->major = 9; p->minor = 0; p->textureAlignment = 512; p->multiProcessorCount = 132;
  p->canMapHostMemory = 1; p->concurrentKernels = 1; p->asyncEngineCount = 3; p->unifiedAddressing = 1;
  p->memoryBusWidth = 5120; p->l2CacheSize = 52428800; p->maxThreadsPerMultiProcessor = 2048;
  p->streamPrioritiesSupported = 1; p->sharedMemPerMultiprocessor = 233472; p->regsPerMultiprocessor = 65536;
  p->managedMemory = 1; p->sharedMemPerBlockOptin = 232448; p->cooperativeLaunch = 1; p->memoryPoolsSupported = 1;
  p->pciBusID = d; p->maxBlocksPerMultiProcessor = 32;
  return 0;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
    case cudaDevAttrMultiProcessorCount: *v = 132; break;
    case cudaDevAttrComputeCapabilityMajor: *v = 9; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = 233472; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: *v = 65536; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    default: *v = 0;
  }
  return 0;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", d); return 0; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return 0; }
EXPORT const char *cudaGetErrorString(cudaError_t e) {
  switch (e) {
    case 0: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorLaunchTimeout: return deadlock;
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit: return "work on a stream outside of the capture that is under way: no replay has it";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    default: return "an error of the null device";
  }
}
EXPORT const char *cudaGetErrorName(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : e ? "cudaErrorNull" : "cudaSuccess"; }
EXPORT cudaError_t cudaGetLastError(void) { cudaError_t e = last; last = 0; return e; }
EXPORT cudaError_t cudaPeekAtLastError(void) { return last; }

/* ---- what a capture forbids ---- */
static enum cudaStreamCaptureMode capture_mode;
static pthread_t capture_thread;
static __thread enum cudaStreamCaptureMode thread_mode; /* cudaStreamCaptureModeGlobal is 0 */
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { enum cudaStreamCaptureMode was = thread_mode; thread_mode = *m; *m = was; return 0; }
static int forbidden(void) { /* whether calls that a capture forbids anywhere (the host waits, memory is allocated) are, here */
  if (!captures || thread_mode == cudaStreamCaptureModeRelaxed || capture_mode == cudaStreamCaptureModeRelaxed) return 0;
  if (pthread_equal(capture_thread, pthread_self())) return 1;
  return capture_mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
}

/* ---- memory: reserved address space, which nothing touches but small copies ---- */
enum { MAX_BLOCKS = 65536, TWO_MIB = 2 << 20 };
static struct span { char *p, *mapped; size_t n; } blocks[MAX_BLOCKS], pinned[MAX_BLOCKS];
static int nblocks, npinned;
static size_t used;
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static void put(struct span *all, int *n, struct span s) {
  int i = 0;
  while (i < *n && all[i].p) i++;
  if (i == MAX_BLOCKS) { fprintf(stderr, "nullgpu: too many allocations\n"); abort(); }
  if (i == *n) ++*n;
  all[i] = s;
}
static struct span *find(struct span *all, int n, const char *p) {
  for (int i = 0; i < n; i++) if (all[i].p && p >= all[i].p && p < all[i].p + all[i].n) return all + i;
  return 0;
}
cudaError_t take_memory(i64 n) { if (used + n > total()) return cudaErrorMemoryAllocation; used += n; return 0; }
void give_memory(i64 n) { used -= n; }
EXPORT cudaError_t cudaMalloc(void **p, size_t n) {
  *p = 0;
  if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
  count(MALLOCS, 1);
  pthread_mutex_lock(&memory_lock);
  cudaError_t error = take_memory(n);
  char *q = error ? MAP_FAILED : mmap(0, n + TWO_MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (q == MAP_FAILED) { if (!error) give_memory(n); pthread_mutex_unlock(&memory_lock); return fail(cudaErrorMemoryAllocation); }
  *p = (void *)(((uintptr_t)q + TWO_MIB - 1) & ~(uintptr_t)(TWO_MIB - 1));
  put(blocks, &nblocks, (struct span){*p, q, n});
  pthread_mutex_unlock(&memory_lock);
  return 0;
}
EXPORT cudaError_t cudaFree(void *p) {
  if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
  count(FREES, 1); note(L_SYNC_DEVICE, 0, 0, 0, 0, 0);
  struct clock all = all_work();
  cudaError_t error = wait_for(&all); /* what is queued may still use the memory, as what ranks send each other */
  if (error) return fail(error);
  pthread_mutex_lock(&memory_lock);
  struct span *s = p ? find(blocks, nblocks, p) : 0;
  if (s) { munmap(s->mapped, s->n + TWO_MIB); give_memory(s->n); s->p = 0; }
  pthread_mutex_unlock(&memory_lock);
  return 0;
}
EXPORT cudaError_t cudaMemGetInfo(size_t *f, size_t *t) { *t = total(); *f = *t - used; return 0; }
static void pin(void *p, size_t n) { pthread_mutex_lock(&memory_lock); put(pinned, &npinned, (struct span){p, p, n}); pthread_mutex_unlock(&memory_lock); }
static void unpin(void *p) { pthread_mutex_lock(&memory_lock); struct span *s = find(pinned, npinned, p); if (s) s->p = 0; pthread_mutex_unlock(&memory_lock); }
EXPORT cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) {
  if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
  count(HOST_ALLOCS, 1);
  if (posix_memalign(p, 4096, n)) return fail(cudaErrorMemoryAllocation);
  pin(*p, n); return 0;
}
EXPORT cudaError_t cudaFreeHost(void *p) { unpin(p); free(p); return 0; }
EXPORT cudaError_t cudaHostRegister(void *p, size_t n, unsigned f) { pin(p, n); return 0; }
EXPORT cudaError_t cudaHostUnregister(void *p) { unpin(p); return 0; }
static enum cudaMemoryType kind_of(const void *p) {
  pthread_mutex_lock(&memory_lock);
  enum cudaMemoryType k = find(blocks, nblocks, p) ? cudaMemoryTypeDevice : find(pinned, npinned, p) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  pthread_mutex_unlock(&memory_lock);
  return k;
}
EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a);
  a->type = kind_of(p); a->device = current; a->devicePointer = (void *)p; a->hostPointer = (void *)p;
  return 0;
}
static cudaError_t touch(cudaStream_t t, int what, const void *from, void *to, size_t n, int value) {
  int paged_from = from && kind_of(from) == cudaMemoryTypeUnregistered, paged_to = kind_of(to) == cudaMemoryTypeUnregistered;
  if ((paged_from || paged_to) && stream_of(t)->capture) return fail(cudaErrorStreamCaptureUnsupported);
  cudaError_t error = work(t);
  if (error) return fail(error);
  count(what, 1);
  if (paged_from) note(L_HOST_READ, t, from, n, 0, 0); /* staged: the host may write there as soon as the call returns */
  note(L_READ_WRITE, t, from, from && !paged_from ? n : 0, to, n);
  enqueue_copy(t, to, from, n, value);
  if (!paged_to) return 0;
  error = wait_for(&stream_of(t)->clock); /* a copy to memory that is not page-locked returns when it is done */
  note(L_SYNC_STREAM, t, 0, 0, 0, 0);
  return fail(error);
}
EXPORT cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t t) { return touch(t, MEMCPYS, s, d, n, 0); }
EXPORT cudaError_t cudaMemcpyPeerAsync(void *d, int dd, const void *s, int sd, size_t n, cudaStream_t t) { return touch(t, MEMCPYS, s, d, n, 0); }
EXPORT cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, enum cudaMemcpyKind k, cudaStream_t t) {
  cudaError_t error = 0;
  for (size_t i = 0; i < h && !error; i++) error = touch(t, MEMCPYS, (const char *)s + i * sp, (char *)d + i * dp, w, 0);
  return error;
}
EXPORT cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t t) { return touch(t, MEMSETS, 0, d, n, v); }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t s);
EXPORT cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) { cudaError_t e = touch(0, MEMCPYS, s, d, n, 0); return e ? e : cudaStreamSynchronize(0); }
EXPORT cudaError_t cudaMemset(void *d, int v, size_t n) { return touch(0, MEMSETS, 0, d, n, v); }
EXPORT cudaError_t cudaGetSymbolAddress(void **p, const void *s) { static char zero[1 << 16]; *p = zero; return 0; }

/* ---- streams and events ---- */
static struct stream *captured[MAX_STREAMS];
static int ncaptured, ids, nodes_before;
static void capture(struct stream *s, int id) { s->capture = id; s->before = s->clock.at[s->index]; captured[ncaptured++] = s; }
static cudaError_t make(cudaStream_t *s) { count(STREAMS, 1); *s = (cudaStream_t)new_stream(); return 0; }
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *s) { return make(s); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return make(s); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { return make(s); }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; return 0; }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t s) {
  if (stream_of(s)->capture || forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
  return known_done(&stream_of(s)->clock) ? 0 : cudaErrorNotReady;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  count(HOST_WAITS, 1);
  if (stream_of(s)->capture || forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
  cudaError_t error = wait_for(&stream_of(s)->clock);
  note(L_SYNC_STREAM, s, 0, 0, 0, 0);
  return fail(error);
}
EXPORT cudaError_t cudaDeviceSynchronize(void) {
  struct clock all;
  count(HOST_WAITS, 1);
  if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
  all = all_work();
  cudaError_t error = wait_for(&all);
  note(L_SYNC_DEVICE, 0, 0, 0, 0, 0);
  return fail(error);
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) {
  struct event *v = (struct event *)e; struct stream *t = stream_of(s);
  count(STREAM_WAITS, 1); note(L_WAIT, s, e, 0, 0, 0);
  if (v->capture && !t->capture) capture(t, v->capture);
  else if (t->capture && !v->capture && !(f & cudaEventWaitExternal)) return fail(cudaErrorStreamCaptureIsolation);
  join(&t->clock, &v->clock);
  return 0;
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { count(EVENTS, 1); *e = (cudaEvent_t)calloc(1, sizeof(struct event)); return 0; }
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return 0; }
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) {
  struct event *v = (struct event *)e;
  count(EVENT_RECORDS, 1); note(L_RECORD, s, e, 0, 0, 0);
  clock_gettime(CLOCK_MONOTONIC, &v->recorded); v->capture = stream_of(s)->capture; v->clock = stream_of(s)->clock;
  return 0;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
static int under_capture(const struct event *v) { for (int i = 0; i < ncaptured; i++) if (v->capture && captured[i]->capture == v->capture) return 1; return 0; }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t e) {
  count(EVENT_QUERIES, 1);
  if (under_capture((struct event *)e)) return fail(cudaErrorCapturedEvent);
  if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
  return known_done(&((struct event *)e)->clock) ? 0 : cudaErrorNotReady;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  count(HOST_WAITS, 1);
  if (under_capture((struct event *)e)) return fail(cudaErrorCapturedEvent);
  if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
  cudaError_t error = wait_for(&((struct event *)e)->clock);
  note(L_SYNC_EVENT, 0, e, 0, 0, 0);
  return fail(error);
}
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { /* of the host's records */
  struct timespec *x = &((struct event *)a)->recorded, *y = &((struct event *)b)->recorded;
  *ms = (y->tv_sec - x->tv_sec) * 1e3f + (y->tv_nsec - x->tv_nsec) * 1e-6f;
  return 0;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *u) { f(u); return 0; }
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *u, unsigned fl) { f(s, 0, u); return 0; }

/* ---- graphs: how many nodes, and whether the rules were kept ---- */
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *st) { *st = stream_of(s)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone; return 0; }
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) {
  if (stream_of(s) == stream_of(0) || stream_of(s)->capture) return fail(cudaErrorStreamCaptureUnsupported);
  captures++; capture_mode = m; capture_thread = pthread_self(); nodes_before = nullgpu_counts[GRAPH_NODES];
  capture(stream_of(s), ++ids);
  return 0;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
  int unjoined = 0;
  struct stream *origin = stream_of(s);
  for (int i = 0; i < ncaptured; i++) {
    struct stream *t = captured[i];
    if (t->clock.at[t->index] > t->before && t->clock.at[t->index] > origin->clock.at[t->index]) unjoined = 1;
    captured[i]->capture = 0;
  }
  ncaptured = 0; captures--;
  note(L_SYNC_DEVICE, 0, 0, 0, 0, 0); /* what was captured has not run: it is ordered with nothing outside */
  *g = (cudaGraph_t)calloc(1, sizeof(i64)); *(i64 *)*g = nullgpu_counts[GRAPH_NODES] - nodes_before;
  return fail(unjoined ? cudaErrorStreamCaptureUnjoined : 0);
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *n, size_t *k) { *k = *(i64 *)g; return 0; }
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long f) { *x = (cudaGraphExec_t)g; return 0; }
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s) { count(GRAPH_LAUNCHES, 1); return fail(work(s)); }
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *st, unsigned long long *id, cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **ed, size_t *n) {
  cudaStreamIsCapturing(s, st); if (id) *id = stream_of(s)->capture; if (n) *n = 0; return 0;
}

/* ---- kernels ---- */
struct configuration { dim3 grid, block; size_t shared; void *stream; };
static __thread struct configuration configurations[16];
static __thread int depth;
EXPORT unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t sh, void *s) { configurations[depth++ & 15] = (struct configuration){g, b, sh, s}; return 0; }
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *sh, void *s) {
  struct configuration *c = &configurations[--depth & 15];
  *g = c->grid; *b = c->block; *sh = c->shared; *(void **)s = c->stream;
  return 0;
}
EXPORT void **__cudaRegisterFatBinary(void *f) { static void *h[4]; return h; }
EXPORT cudaError_t __cudaGetKernel(void **k, const void *f) { *k = (void *)f; return 0; }
EXPORT cudaError_t nullgpu_launch(const void *stream, const void *kernel) { count(KERNELS, 1); note(L_KERNEL, stream, kernel, 0, 0, 0); return fail(work(stream)); }
EXPORT cudaError_t __cudaLaunchKernel(void *k, dim3 g, dim3 b, void **a, size_t sh, cudaStream_t s) { return nullgpu_launch(s, k); }
EXPORT cudaError_t cudaLaunchKernel(const void *k, dim3 g, dim3 b, void **a, size_t sh, cudaStream_t s) { return nullgpu_launch(s, k); }
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *k, void **a) { return nullgpu_launch(c->stream, k); }
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a); a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->binaryVersion = 90; a->ptxVersion = 90; return 0;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned fl) { *n = 8; return 0; }

/* ---- cuBLAS: a handle is the stream that it was given ---- */
static int handle(void **h) { *h = calloc(1, 1024); return 0; }
EXPORT int cublasCreate_v2(void **h) { return handle(h); }
EXPORT int cublasSetStream_v2(void **h, void *stream) { *h = stream; return 0; }
EXPORT int cublasGetMathMode(void *h, int *mode) { *mode = 0; return 0; }
EXPORT int cublasGetPointerMode_v2(void *h, int *mode) { *mode = 0; return 0; }
EXPORT size_t cublasLtGetVersion(void) { return 130100; }
EXPORT int cublasLtMatmulDescCreate(void **h) { return handle(h); }
EXPORT int cublasLtMatrixLayoutCreate(void **h) { return handle(h); }
EXPORT int cublasLtMatmulPreferenceCreate(void **h) { return handle(h); }
EXPORT int cublasLtMatmulDescDestroy(void *h) { free(h); return 0; }
EXPORT int cublasLtMatrixLayoutDestroy(void *h) { free(h); return 0; }
EXPORT int cublasLtMatmulPreferenceDestroy(void *h) { free(h); return 0; }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *dd, void *p, int n, char *r, int *got) { memset(r, 0, 96); *got = 1; return 0; }
EXPORT int cublasLtMatmul(void *h, void *desc, void *alpha, void *A, void *Ad, void *B, void *Bd, void *beta, void *C, void *Cd, void *D, void *Dd,
                          void *algorithm, void *workspace, size_t bytes, void *stream) { count(GEMMS, 1); return nullgpu_launch(stream, 0) ? 14 : 0; }
#define PRODUCT(name) EXPORT int name(void **h) { count(GEMMS, 1); return nullgpu_launch(*h, 0) ? 14 : 0; }
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDotEx)

/* ---- the driver: torch looks its functions up by name; driver.c has them ---- */
static int nothing(void) { return 0; }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long long fl, enum cudaDriverEntryPointQueryResult *r) {
  static void *driver;
  char longer[128];
  if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *f = driver ? dlsym(driver, name) : 0;
  snprintf(longer, sizeof longer, "%s_v2", name);
  if (!*f && driver) *f = dlsym(driver, longer);
  if (!*f) *f = (void *)nothing;
  if (r) *r = cudaDriverEntryPointSuccess;
  return 0;
}
EXPORT int nullgpu_take(i64 n) { count(MALLOCS, 1); pthread_mutex_lock(&memory_lock); int e = take_memory(n); pthread_mutex_unlock(&memory_lock); return e; }
EXPORT void nullgpu_give(i64 n) { count(FREES, 1); pthread_mutex_lock(&memory_lock); give_memory(n); pthread_mutex_unlock(&memory_lock); }
EXPORT void nullgpu_map(void *p, size_t n) { pthread_mutex_lock(&memory_lock); put(blocks, &nblocks, (struct span){p, p, n}); pthread_mutex_unlock(&memory_lock); }
