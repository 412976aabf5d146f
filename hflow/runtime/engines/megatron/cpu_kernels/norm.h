#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "numbers.h"

namespace hflow {

const long BLOCK = 32;       // rows whose gradients of a weight are summed before they go to that of a part
const long PART = 512;       // rows of a part

// The root mean square's inverse.
template <class T> inline float inverse_rms(const T *x, long width, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < width; i++) squares += wide(x[i]) * wide(x[i]);
    return 1.0f / std::sqrt(squares / width + eps);
}

template <class T>
void norm(const T *x, const T *weight, T *out, long rows, long width, float eps, float offset, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > LEAST)
    for (long row = 0; row < rows; row++) {
        const T *from = x + row * width;
        T *to = out + row * width;
        float inverse = inverse_rms(from, width, eps);
#pragma omp simd
        for (long i = 0; i < width; i++) put(to[i], wide(from[i]) * inverse * (offset + wide(weight[i])));
    }
}

// With n = x / rms(x) and y = w n: dw = sum(dy n), dx = (w dy - n mean(w dy n)) / rms(x).
template <class T>
void norm_gradient(const T *upstream, const T *x, const T *weight, T *to_x, float *to_weight, long rows,
                   long width, float eps, float offset, int threads) {
    long parts = (rows + PART - 1) / PART;
    std::vector<float> totals(parts * width, 0.0f);
#pragma omp parallel for num_threads(threads) if (rows * width > LEAST)
    for (long part = 0; part < parts; part++) {
        float *total = totals.data() + part * width;
        std::vector<float> block(width);
        long last = std::min((part + 1) * PART, rows);
        for (long first = part * PART; first < last; first += BLOCK) {
            std::fill(block.begin(), block.end(), 0.0f);
            float *sums = block.data();
            for (long row = first; row < std::min(first + BLOCK, last); row++) {
                const T *from = x + row * width, *above = upstream + row * width;
                T *to = to_x + row * width;
                float inverse = inverse_rms(from, width, eps), product = 0;
#pragma omp simd reduction(+ : product)
                for (long i = 0; i < width; i++)
                    product += wide(above[i]) * (offset + wide(weight[i])) * wide(from[i]);
                float mean = product * inverse / width;  // of w dy n
#pragma omp simd
                for (long i = 0; i < width; i++) {
                    float normed = wide(from[i]) * inverse, up = wide(above[i]);
                    put(to[i], (up * (offset + wide(weight[i])) - normed * mean) * inverse);
                    sums[i] += up * normed;
                }
            }
            for (long i = 0; i < width; i++) total[i] += sums[i];
        }
    }
    for (long i = 0; i < width; i++) {
        to_weight[i] = 0;
        for (long part = 0; part < parts; part++) to_weight[i] += totals[part * width + i];
    }
}

}  // namespace hflow
