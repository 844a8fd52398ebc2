/* What CUDA's own header of this name says to nvcc. For gcc the words mean nothing; torch does not install that header. */
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __host__
#define __device__
#define __global__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define __specialization_static static
