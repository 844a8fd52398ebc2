/* libnvidia-ml.so.1: the part of NVML that torch looks up. No fabric, no links, no other processes. */
#include <stdlib.h>
#include <string.h>
#define EXPORT __attribute__((visibility("default")))
enum { NOT_SUPPORTED = 3 };
static int devices(void) { const char *s = getenv("NULLGPU_DEVICES"); return s ? atoi(s) : 1; }
EXPORT int nvmlInit(void) { return 0; }
EXPORT int nvmlInit_v2(void) { return 0; }
EXPORT int nvmlShutdown(void) { return 0; }
EXPORT int nvmlDeviceGetCount_v2(unsigned *n) { *n = devices(); return 0; }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(long)(i + 1); return 0; }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *s, void **h) { *h = (void *)1; return 0; }
EXPORT int nvmlDeviceGetUUID(void *h, char *s, unsigned n) { strncpy(s, "GPU-00000000-0000-0000-0000-000000000001", n); s[n - 1] = 0; s[4] = '0' + (long)h % 10; return 0; }
EXPORT int nvmlDeviceGetIndex(void *h, unsigned *n) { *n = (long)h - 1; return 0; }
EXPORT int nvmlDeviceGetMinorNumber(void *h, unsigned *n) { *n = (long)h - 1; return 0; }
EXPORT int nvmlDeviceGetName(void *h, char *s, unsigned n) { strncpy(s, "null device (H100)", n); return 0; }
EXPORT int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m) { m[0] = m[1] = 80ull << 30; m[2] = 0; return 0; }
EXPORT int nvmlDeviceGetCudaComputeCapability(void *h, int *a, int *b) { *a = 9; *b = 0; return 0; }
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *h, unsigned *n, void *p) { *n = 0; return 0; }
EXPORT int nvmlDeviceGetCpuAffinity(void *h, unsigned n, unsigned long *s) { memset(s, 255, n * sizeof *s); return 0; }
EXPORT int nvmlDeviceGetMemoryAffinity(void *h, unsigned n, unsigned long *s, int scope) { memset(s, 255, n * sizeof *s); return 0; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return 0; }
EXPORT int nvmlSystemGetDriverVersion(char *s, unsigned n) { strncpy(s, "580.00", n); return 0; }
EXPORT const char *nvmlErrorString(int e) { return "an error of the null NVML"; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void *h, void *p) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void *h, unsigned l, int *t) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, unsigned l, void *p) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkState(void *h, unsigned l, int *on) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetPciInfo_v3(void *h, void *p) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, int *l) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetP2PStatus(void *a, void *b, int i, int *s) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetFieldValues(void *h, int n, void *v) { return NOT_SUPPORTED; }
