#pragma once

#include "numbers.h"

namespace hflow {

// An activation and its slope: silu, or gelu with tanh(z) = 2 sigmoid(2 z) - 1 in the place of the normal
// distribution.
template <bool GELU> inline void activation(float x, float &active, float &slope) {
    float inner = GELU ? 1.5957691216f * (x + 0.044715f * x * x * x) : x;
    float share = sigmoid(inner);
    float of_inner = GELU ? 1.5957691216f * (1.0f + 0.134145f * x * x) : 1.0f;
    active = x * share;
    slope = share + active * (1.0f - share) * of_inner;
}

template <class T, bool GELU> void gated(const T *x, T *out, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > LEAST)
    for (long row = 0; row < rows; row++) {
        const T *gate = x + row * 2 * width, *up = gate + width;
        T *to = out + row * width;
#pragma omp simd
        for (long i = 0; i < width; i++) {
            float active, slope;
            activation<GELU>(wide(gate[i]), active, slope);
            put(to[i], active * wide(up[i]));
        }
    }
}

template <class T, bool GELU>
void gated_gradient(const T *upstream, const T *x, T *out, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > LEAST)
    for (long row = 0; row < rows; row++) {
        const T *gate = x + row * 2 * width, *up = gate + width, *above = upstream + row * width;
        T *to_gate = out + row * 2 * width, *to_up = to_gate + width;
#pragma omp simd
        for (long i = 0; i < width; i++) {
            float active, slope;
            activation<GELU>(wide(gate[i]), active, slope);
            put(to_gate[i], wide(above[i]) * wide(up[i]) * slope);
            put(to_up[i], wide(above[i]) * active);
        }
    }
}

}  // namespace hflow
