#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "numbers.h"

namespace hflow {

const long WORDS = 1024;     // of a vocabulary, summed in float32 before they go to the sum of all in float64

// Of z, a row of logits by the temperature: the greatest, the sum of exp z', and of z' exp z', where
// z' = z - greatest. A row with NaN or inf has a sum that is NaN.
template <class T, bool ENTROPY>
void softmax(const T *logits, float *greatest, float *totals, float *spreads, long rows, long width,
             float temperature, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > LEAST)
    for (long row = 0; row < rows; row++) {
        const T *from = logits + row * width;
        float top = -INFINITY;
        double total = 0, spread = 0;
#pragma omp simd reduction(max : top)
        for (long i = 0; i < width; i++) {
            float x = wide(from[i]);
            top = x > top ? x : top;
        }
        top /= temperature;
        float base = top == -INFINITY ? 0.0f : top;  // other words of the vocabulary may be elsewhere
        for (long first = 0; first < width; first += WORDS) {
            long last = std::min(first + WORDS, width);
            float added = 0, weighted = 0;
#pragma omp simd reduction(+ : added, weighted)
            for (long i = first; i < last; i++) {
                float z = wide(from[i]) / temperature - base, e = exp_(z);
                added += e;
                if (ENTROPY) weighted += z * e;
            }
            total += added;
            spread += weighted;
        }
        greatest[row] = top;
        totals[row] = float(total);
        spreads[row] = float(spread);
    }
}

// The gradient of the logits: (1[chosen] a - p (a + (log p + H) b)) / temperature, where a and b are those of
// log-prob and entropy H. `out` may be `logits`.
template <class T, bool ENTROPY>
void softmax_gradient(const T *logits, const float *log_totals, const float *to_log_prob,
                      const int64_t *columns, const bool *mine, const float *to_entropy, const float *entropy,
                      T *out, long rows, long width, float temperature, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > LEAST)
    for (long row = 0; row < rows; row++) {
        const T *from = logits + row * width;
        T *to = out + row * width;
        float log_total = log_totals[row], a = to_log_prob[row], inverse = 1.0f / temperature;
        float b = ENTROPY ? to_entropy[row] : 0.0f, uncertainty = ENTROPY ? entropy[row] : 0.0f;
        auto slope = [=](float x) {
            float log_p = x / temperature - log_total, p = exp_(log_p);
            return -p * (ENTROPY ? a + (log_p + uncertainty) * b : a) * inverse;
        };
        float chosen = mine[row] ? slope(wide(from[columns[row]])) + a * inverse : 0.0f;
#pragma omp simd
        for (long i = 0; i < width; i++) put(to[i], slope(wide(from[i])));
        if (mine[row]) put(to[columns[row]], chosen);
    }
}

}  // namespace hflow
