// What a product with a stored weight is told (gnomon/compiler/kernels/stored.py); kernels of whole layers (gnomon/serve) call it too.
#pragma once
#include <stdint.h>

struct Product {                                       // as StoredProduct in stored_sparse.py has them
    int64_t m, n, k, padded, threads;                  // padded: k with what fills the last group
    int64_t wide, wide_out;                            // x and added are float32, out is; else bfloat16
    const void* x; int64_t x_row;                      // elements from one row to the next
    const uint8_t* codes;
    const void* scales;
    const float* zeros;
    const float* bias;
    float factor;                                      // out = (x w' + bias) factor + added
    const void* added; int64_t added_row;              // null, or of out's shape
    void* out; int64_t out_row;
    char* room;                                        // of x's rows as the kernel reads them: codes or numbers, scales, sums
    const int64_t* starts;                             // of sparse weights (stored_sparse.cpp), as the two that follow
    const void* places;
    const int32_t* sums;
};
