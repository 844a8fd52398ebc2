/* libcuda.so.1: the part of CUDA's driver that torch and Triton look up by themselves. Modules and kernels are names. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#define EXPORT __attribute__((visibility("default")))
typedef unsigned long long u64;
/* in the library that is loaded before everything else */
int nullgpu_launch(const void *stream, const void *kernel);
int nullgpu_take(long long n);
void nullgpu_give(long long n);
void nullgpu_map(void *p, size_t n);

static int x;
static int devices(void) { const char *s = getenv("NULLGPU_DEVICES"); return s ? atoi(s) : 1; }
EXPORT int cuInit(unsigned f) { return 0; }
EXPORT int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
EXPORT int cuDeviceGetCount(int *n) { *n = devices(); return 0; }
EXPORT int cuDeviceGet(int *d, int i) { *d = i; return 0; }
EXPORT int cuDeviceGetName(char *s, int n, int d) { strncpy(s, "null device (H100)", n); return 0; }
EXPORT int cuDeviceGetUuid(char *u, int d) { memset(u, 1 + d, 16); return 0; }
EXPORT int cuDeviceGetAttribute(int *v, int a, int d) {
  static const int values[][2] = {{16, 132}, {75, 9}, {76, 0}, {97, 232448}, {10, 32}, {1, 1024}, {12, 65536}, {81, 233472}, {39, 2048}, {13, 1980000}, {36, 2619000}, {37, 5120}, {8, 49152}};
  *v = 0;
  for (unsigned i = 0; i < sizeof values / sizeof *values; i++) if (values[i][0] == a) *v = values[i][1];
  return 0;
}
EXPORT int cuCtxGetCurrent(void **c) { *c = &x; return 0; }
EXPORT int cuCtxSetCurrent(void *c) { return 0; }
EXPORT int cuCtxPushCurrent(void *c) { return 0; }
EXPORT int cuCtxPopCurrent(void **c) { *c = &x; return 0; }
EXPORT int cuCtxGetDevice(int *d) { *d = 0; return 0; }
EXPORT int cuCtxSynchronize(void) { return 0; }
EXPORT int cuCtxGetLimit(size_t *v, int l) { *v = 1 << 20; return 0; }
EXPORT int cuCtxSetLimit(int l, size_t v) { return 0; }
EXPORT int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { if (f) *f = 0; *a = 1; return 0; }
EXPORT int cuDevicePrimaryCtxRetain(void **c, int d) { *c = &x; return 0; }
EXPORT int cuDevicePrimaryCtxRelease(int d) { return 0; }
EXPORT int cuGetErrorString(int e, const char **s) { *s = "an error of the null driver"; return 0; }
EXPORT int cuGetErrorName(int e, const char **s) { *s = "cudaErrorNull"; return 0; }
EXPORT int cuModuleLoadData(void **m, const void *i) { *m = malloc(8); return 0; }
EXPORT int cuModuleLoadDataEx(void **m, const void *i, unsigned n, void *o, void *v) { *m = malloc(8); return 0; }
EXPORT int cuModuleLoad(void **m, const char *f) { *m = malloc(8); return 0; }
EXPORT int cuModuleUnload(void *m) { free(m); return 0; }
EXPORT int cuModuleGetFunction(void **f, void *m, const char *n) { *f = malloc(8); return 0; }
EXPORT int cuModuleGetGlobal_v2(void **p, size_t *n, void *m, const char *s) { static char z[4096]; *p = z; if (n) *n = 4096; return 0; }
EXPORT int cuFuncGetAttribute(int *v, int a, void *f) { *v = a == 0 ? 1024 : a == 4 ? 32 : 0; return 0; }
EXPORT int cuFuncSetAttribute(void *f, int a, int v) { return 0; }
EXPORT int cuFuncSetCacheConfig(void *f, int c) { return 0; }
EXPORT int cuFuncGetModule(void **m, void *f) { *m = &x; return 0; }
EXPORT int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **args, void **extra) { return nullgpu_launch(stream, f); }
EXPORT int cuLaunchCooperativeKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **args) { return nullgpu_launch(stream, f); }
struct configuration { unsigned grid[3], block[3], shared; void *stream; };
EXPORT int cuLaunchKernelEx(const struct configuration *c, void *f, void **args, void **extra) { return nullgpu_launch(c->stream, f); }
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, size_t s) { *n = 8; return 0; }
EXPORT int cuOccupancyMaxActiveClusters(int *n, void *f, void *c) { *n = 8; return 0; }
EXPORT int cuPointerGetAttribute(void *d, int a, u64 p) { if (a == 1) *(int *)d = 1; else if (a == 2) *(int *)d = 2; else if (a == 3) *(u64 *)d = p; else *(void **)d = (void *)p; return 0; }
EXPORT int cuGetProcAddress_v2(const char *n, void **f, int v, u64 fl, int *st) { *f = dlsym(RTLD_DEFAULT, n); if (st) *st = *f ? 0 : 1; return 0; }

/* expandable segments: a handle is its size; the address range is memory that is there from the start */
enum { TWO_MIB = 2 << 20 };
EXPORT int cuMemGetAllocationGranularity(size_t *g, void *p, int o) { *g = TWO_MIB; return 0; }
EXPORT int cuMemAddressReserve(u64 *p, size_t n, size_t align, u64 at, u64 f) {
  size_t a = align > TWO_MIB ? align : TWO_MIB;
  char *q = mmap(0, n + a, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (q == MAP_FAILED) return 2;
  *p = ((u64)q + a - 1) / a * a;
  nullgpu_map((void *)*p, n);
  return 0;
}
EXPORT int cuMemAddressFree(u64 p, size_t n) { return 0; }
EXPORT int cuMemCreate(u64 *h, size_t n, void *prop, u64 f) { if (nullgpu_take(n)) return 2; *h = n; return 0; }
EXPORT int cuMemRelease(u64 h) { nullgpu_give(h); return 0; }
EXPORT int cuMemMap(u64 p, size_t n, size_t o, u64 h, u64 f) { return 0; }
EXPORT int cuMemUnmap(u64 p, size_t n) { madvise((void *)p, n, MADV_DONTNEED); return 0; }
EXPORT int cuMemSetAccess(u64 p, size_t n, void *d, size_t k) { return 0; }

#define NOTHING(name) EXPORT int name(void) { return 0; }
NOTHING(cuLinkCreate_v2) NOTHING(cuLinkAddData_v2) NOTHING(cuLinkComplete) NOTHING(cuLinkDestroy)
NOTHING(cuCtxFromGreenCtx) NOTHING(cuDevResourceGenerateDesc) NOTHING(cuDevSmResourceSplitByCount) NOTHING(cuDeviceGetDevResource)
NOTHING(cuGreenCtxCreate) NOTHING(cuGreenCtxDestroy) NOTHING(cuGreenCtxStreamCreate) NOTHING(cuLogsRegisterCallback) NOTHING(cuLogsUnregisterCallback)
NOTHING(cuMemExportToShareableHandle) NOTHING(cuMemGetAddressRange) NOTHING(cuMemGetAddressRange_v2) NOTHING(cuMemGetAllocationPropertiesFromHandle)
NOTHING(cuMemImportFromShareableHandle) NOTHING(cuMemRetainAllocationHandle) NOTHING(cuMemsetD32Async) NOTHING(cuMemcpyHtoDAsync_v2)
NOTHING(cuMulticastAddDevice) NOTHING(cuMulticastBindMem) NOTHING(cuMulticastCreate) NOTHING(cuMulticastUnbind) NOTHING(cuTensorMapEncodeTiled)
NOTHING(cuStreamWriteValue32) NOTHING(cuStreamSynchronize) NOTHING(cuStreamGetCaptureInfo_v2) NOTHING(cuEventRecord) NOTHING(cuGetExportTable)
