/* CUDA's runtime of a GPU that computes nothing: memory is the host's, copies copy at once, kernels do nothing.
   Other functions that torch calls get a stub that returns 0 (libraries.py). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <cuda_runtime_api.h>

#include "device.h"

/* Memory: all allocations and registered ranges, which tell the kind of a pointer. */

enum { MOST = 1 << 16, SPARE = 4096 };

typedef struct {
    char *begin;
    size_t size;
    enum cudaMemoryType kind;
} Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Range ranges[MOST];
static int count; /* used places of `ranges`, including freed ones */
static size_t used;

static void add(void *begin, size_t size, enum cudaMemoryType kind) {
    pthread_mutex_lock(&lock);
    int place = 0;
    while (place < count && ranges[place].begin)
        place++;
    if (place == MOST) {
        fputs("null GPU: more allocations than it has room for\n", stderr);
        abort();
    }
    if (place == count)
        count++;
    ranges[place] = (Range){begin, size, kind};
    if (kind == cudaMemoryTypeDevice)
        used += size;
    pthread_mutex_unlock(&lock);
}

static size_t take_out(const void *begin) {
    size_t size = 0;
    pthread_mutex_lock(&lock);
    for (int place = 0; place < count && !size; place++)
        if (begin && ranges[place].begin == begin) {
            size = ranges[place].size;
            if (ranges[place].kind == cudaMemoryTypeDevice)
                used -= size;
            ranges[place].begin = NULL;
        }
    pthread_mutex_unlock(&lock);
    return size;
}

static enum cudaMemoryType kind_of(const void *address) {
    enum cudaMemoryType kind = cudaMemoryTypeUnregistered;
    pthread_mutex_lock(&lock);
    for (int place = 0; place < count; place++)
        if (ranges[place].begin && (size_t)((const char *)address - ranges[place].begin) < ranges[place].size) {
            kind = ranges[place].kind;
            break;
        }
    pthread_mutex_unlock(&lock);
    return kind;
}

static cudaError_t allocate(void **begin, size_t size, enum cudaMemoryType kind) {
    size += !size;
    if (kind == cudaMemoryTypeDevice && used + size > MEMORY)
        return cudaErrorMemoryAllocation;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    *begin = mmap(NULL, size + SPARE, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (*begin == MAP_FAILED)
        return cudaErrorMemoryAllocation;
    add(*begin, size, kind);
    return cudaSuccess;
}

static cudaError_t release(void *begin) {
    size_t size = take_out(begin);
    if (size)
        munmap(begin, size + SPARE);
    return size || !begin ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaMalloc(void **begin, size_t size) { return allocate(begin, size, cudaMemoryTypeDevice); }
cudaError_t cudaMallocAsync(void **begin, size_t size, cudaStream_t stream) { return cudaMalloc(begin, size); }
cudaError_t cudaFree(void *begin) { return release(begin); }
cudaError_t cudaFreeAsync(void *begin, cudaStream_t stream) { return release(begin); }
cudaError_t cudaHostAlloc(void **begin, size_t size, unsigned flags) {
    return allocate(begin, size, cudaMemoryTypeHost);
}
cudaError_t cudaFreeHost(void *begin) { return release(begin); }

cudaError_t cudaHostRegister(void *begin, size_t size, unsigned flags) {
    if (kind_of(begin) != cudaMemoryTypeUnregistered)
        return cudaErrorHostMemoryAlreadyRegistered;
    add(begin, size, cudaMemoryTypeHost);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *begin) {
    return take_out(begin) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
    enum cudaMemoryType kind = kind_of(address);
    memset(found, 0, sizeof *found);
    found->type = kind;
    found->device = kind == cudaMemoryTypeUnregistered ? -2 : 0;
    if (kind != cudaMemoryTypeUnregistered)
        found->devicePointer = (void *)address;
    if (kind == cudaMemoryTypeHost)
        found->hostPointer = (void *)address;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_, size_t *total) {
    *total = MEMORY;
    *free_ = MEMORY - used - ((size_t)1 << 30);
    return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr which, void *value) {
    *(uint64_t *)value = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = new_handle();
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    static void *all;
    if (!all)
        cudaMalloc(&all, 1 << 20);
    *address = all;
    return cudaSuccess;
}

/* Copies are made at once, in any stream. */

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    memmove(to, from, size);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return cudaMemcpy(to, from, size, kind);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t size, cudaStream_t stream) {
    return cudaMemcpy(to, from, size, cudaMemcpyDefault);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++)
        memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *begin, int value, size_t size) {
    uintptr_t page = SPARE - 1, first = ((uintptr_t)begin + page) & ~page, last = ((uintptr_t)begin + size) & ~page;
    if (value || size < 1 << 20) {
        memset(begin, value, size);
        return cudaSuccess;
    }
    /* A large cache that is never written takes no memory. */
    memset(begin, 0, first - (uintptr_t)begin);
    madvise((void *)first, last - first, MADV_DONTNEED);
    memset((void *)last, 0, (uintptr_t)begin + size - last);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *begin, int value, size_t size, cudaStream_t stream) {
    return cudaMemset(begin, value, size);
}

/* Streams, events and graphs: all work is done when it is queued, so each is a handle. */

static __thread enum cudaStreamCaptureStatus capturing;

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    *stream = new_handle();
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return cudaStreamCreate(stream);
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = capturing;
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    capturing = cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    capturing = cudaStreamCaptureStatusNone;
    *graph = new_handle();
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *number) {
    static char one_graph;
    *status = capturing;
    if (id)
        *id = 1;
    if (graph)
        *graph = (cudaGraph_t)&one_graph;
    if (nodes)
        *nodes = NULL;
    if (edges)
        *edges = NULL;
    if (number)
        *number = 0;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    *made = new_handle();
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *number) {
    if (!nodes)
        *number = 1; /* torch warns if a graph has no nodes */
    return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) {
    call(stream, cudaSuccess, data);
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) {
    call(data);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    *event = calloc(1, sizeof(struct timespec));
    return *event ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    clock_gettime(CLOCK_MONOTONIC, (struct timespec *)event);
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t first, cudaEvent_t last) {
    struct timespec *from = (struct timespec *)first, *to = (struct timespec *)last;
    *ms = (to->tv_sec - from->tv_sec) * 1e3f + (to->tv_nsec - from->tv_nsec) / 1e6f;
    return cudaSuccess;
}

/* The only device, with an H100's figures. */

cudaError_t cudaGetDeviceCount(int *number) {
    *number = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) {
    *version = VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int other) {
    *can = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *name, int size, int device) {
    snprintf(name, size, "0000:00:00.0");
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    *value = attribute_of((int)which);
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, NAME);
    memcpy(found->uuid.bytes, "null-gpu-0000000", sizeof found->uuid.bytes);
    found->major = attribute_of(cudaDevAttrComputeCapabilityMajor);
    found->minor = attribute_of(cudaDevAttrComputeCapabilityMinor);
    found->totalGlobalMem = MEMORY;
    found->multiProcessorCount = attribute_of(cudaDevAttrMultiProcessorCount);
    found->warpSize = attribute_of(cudaDevAttrWarpSize);
    found->l2CacheSize = attribute_of(cudaDevAttrL2CacheSize);
    found->memoryBusWidth = attribute_of(cudaDevAttrGlobalMemoryBusWidth);
    found->totalConstMem = attribute_of(cudaDevAttrTotalConstantMemory);
    found->textureAlignment = 512;
    found->regsPerBlock = attribute_of(cudaDevAttrMaxRegistersPerBlock);
    found->regsPerMultiprocessor = attribute_of(cudaDevAttrMaxRegistersPerMultiprocessor);
    found->sharedMemPerBlock = attribute_of(cudaDevAttrMaxSharedMemoryPerBlock);
    found->sharedMemPerBlockOptin = attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    found->sharedMemPerMultiprocessor = attribute_of(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    found->maxBlocksPerMultiProcessor = attribute_of(cudaDevAttrMaxBlocksPerMultiprocessor);
    found->maxThreadsPerMultiProcessor = attribute_of(cudaDevAttrMaxThreadsPerMultiProcessor);
    found->maxThreadsPerBlock = attribute_of(cudaDevAttrMaxThreadsPerBlock);
    for (int axis = 0; axis < 3; axis++) {
        found->maxThreadsDim[axis] = attribute_of(cudaDevAttrMaxBlockDimX + axis);
        found->maxGridSize[axis] = attribute_of(cudaDevAttrMaxGridDimX + axis);
    }
    found->asyncEngineCount = attribute_of(cudaDevAttrAsyncEngineCount);
    found->concurrentKernels = found->cooperativeLaunch = found->unifiedAddressing = found->managedMemory = 1;
    found->canMapHostMemory = found->hostRegisterSupported = found->streamPrioritiesSupported = 1;
    return cudaSuccess;
}

/* Kernels are known by their handles, and not run. */

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = attribute_of(cudaDevAttrMaxThreadsPerBlock);
    found->maxDynamicSharedSizeBytes = attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    found->numRegs = 32;
    found->ptxVersion = found->binaryVersion = 90;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) {
    *blocks = 2;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                                   size_t shared, unsigned flags) {
    *blocks = 2;
    return cudaSuccess;
}

/* A launch: the compiler's code stores the grid here, and the kernel's own function reads it. */
static __thread struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} launch;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    launch.grid = grid;
    launch.block = block;
    launch.shared = shared;
    launch.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = launch.grid;
    *block = launch.block;
    *shared = launch.shared;
    *(cudaStream_t *)stream = launch.stream;
    return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *binary) { return new_handle(); }
char __cudaInitModule(void **module) { return 1; }
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error) {
    static __thread char text[32];
    snprintf(text, sizeof text, "null GPU: error %d", error);
    return text;
}
const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    *function = driver ? dlsym(driver, name) : NULL;
    if (result)
        *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function ? cudaSuccess : cudaErrorSymbolNotFound;
}
