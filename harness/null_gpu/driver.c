/* CUDA's driver of the null GPU, as Triton and torch call it; see runtime.c. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <cuda.h>

#include "device.h"

static char context;
static __thread CUcontext current = (CUcontext)&context;

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) {
    *version = VERSION;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int number) {
    *device = number;
    return number ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int *number) {
    *number = 1;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    snprintf(name, size, NAME);
    return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem(size_t *size, CUdevice device) {
    *size = MEMORY;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
    *value = attribute_of((int)which);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *made, CUdevice device) {
    *made = (CUcontext)&context;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *found) {
    *found = current;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext given) {
    current = given;
    return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext given) { return cuCtxSetCurrent(given); }
CUresult cuCtxPopCurrent(CUcontext *found) { return cuCtxGetCurrent(found); }
CUresult cuCtxGetDevice(CUdevice *device) {
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = "null GPU: an error";
    return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

/* Kernels, including Triton's, are loaded, queried and launched, but not run. */

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = new_handle();
    return CUDA_SUCCESS;
}
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned number, CUjit_option *options,
                            void **values) {
    return cuModuleLoadData(module, image);
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = new_handle();
    return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
    *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache which) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    *clusters = 16;
    return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
    *blocks = 2;
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    memset(map, 0, sizeof *map);
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr address) {
    switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)value = (CUcontext)&context;
        break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)value = address;
        break;
    default:
        *(int *)value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *result) {
    *function = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
    if (result)
        *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
