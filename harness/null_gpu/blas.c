/* cuBLAS and cuBLASLt of the null GPU: handles, and an algorithm for every product, which is not computed. */
#include <stdint.h>
#include <string.h>

#include "device.h"

enum { OK };

int cublasCreate_v2(void **handle) {
    *handle = new_handle();
    return OK;
}
int cublasGetVersion_v2(void *handle, int *version) {
    *version = 130100;
    return OK;
}
int cublasGetMathMode(void *handle, int *mode) {
    *mode = 0;
    return OK;
}
int cublasGetPointerMode_v2(void *handle, int *mode) {
    *mode = 0;
    return OK;
}

int cublasLtCreate(void **handle) {
    *handle = new_handle();
    return OK;
}
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) {
    *made = new_handle();
    return OK;
}
int cublasLtMatmulPreferenceCreate(void **made) {
    *made = new_handle();
    return OK;
}
int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    *made = new_handle();
    return OK;
}

typedef struct {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} Heuristic;

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, Heuristic *results, int *found) {
    memset(results, 0, sizeof *results);
    *found = 1;
    return OK;
}
