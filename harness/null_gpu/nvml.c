/* NVML of the null GPU: the functions that torch and vLLM call from Python, with the numbers of nvml.h. */
#include <stdio.h>
#include <string.h>

#include "device.h"

enum { OK, NOT_FOUND = 6 };

typedef struct {
    unsigned long long total, free, used;
} Memory;
typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} Memory2;

static char device;

int nvmlInit_v2(void) { return OK; }
int nvmlInit(void) { return OK; }
int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlShutdown(void) { return OK; }
int nvmlDeviceGetCount_v2(unsigned *number) {
    *number = 1;
    return OK;
}
int nvmlDeviceGetCount(unsigned *number) { return nvmlDeviceGetCount_v2(number); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **found) {
    *found = &device;
    return index ? NOT_FOUND : OK;
}
int nvmlDeviceGetHandleByIndex(unsigned index, void **found) { return nvmlDeviceGetHandleByIndex_v2(index, found); }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **found) { return nvmlDeviceGetHandleByIndex_v2(0, found); }
int nvmlDeviceGetIndex(void *one, unsigned *index) {
    *index = 0;
    return OK;
}
int nvmlDeviceGetCudaComputeCapability(void *one, int *major, int *minor) {
    *major = 9;
    *minor = 0;
    return OK;
}
int nvmlDeviceGetName(void *one, char *text, unsigned size) {
    snprintf(text, size, NAME);
    return OK;
}
int nvmlDeviceGetUUID(void *one, char *text, unsigned size) {
    snprintf(text, size, "GPU-6e756c6c-0000-0000-0000-000000000000");
    return OK;
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "580.0");
    return OK;
}
int nvmlDeviceGetMemoryInfo(void *one, Memory *memory) {
    *memory = (Memory){MEMORY, MEMORY - ((size_t)1 << 30), (size_t)1 << 30};
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(void *one, Memory2 *memory) {
    *memory = (Memory2){memory->version, MEMORY, 0, MEMORY - ((size_t)1 << 30), (size_t)1 << 30};
    return OK;
}
int nvmlDeviceGetPciInfo_v3(void *one, void *information) {
    memset(information, 0, 68);
    return OK;
}
