// The call's own ids and router weights, in any of their dtypes.
#pragma once
#include <cuda_fp16.h>

#include <climits>

#include "layout.cuh"

namespace mokfx {

__device__ __forceinline__ int load_own_id(const Params& p, int slot) {
    if (!p.wide_ids) return static_cast<const int*>(p.ids)[slot];
    const long long id = static_cast<const long long*>(p.ids)[slot];
    return id == static_cast<int>(id) ? static_cast<int>(id) : INT_MIN;  // never a valid id
}

__device__ __forceinline__ float load_weight(const Params& p, int slot) {
    switch (p.weight_kind) {
        case 0: return static_cast<const float*>(p.weights)[slot];
        case 1: return __bfloat162float(static_cast<const __nv_bfloat16*>(p.weights)[slot]);
        case 2: return __half2float(static_cast<const __half*>(p.weights)[slot]);
        default: return static_cast<float>(static_cast<const double*>(p.weights)[slot]);
    }
}

}  // namespace mokfx
