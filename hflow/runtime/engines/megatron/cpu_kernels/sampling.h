#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"

namespace hflow {

const long OF_BLOCK = 512;  // words whose weights are summed before they go to the sum of all

// exp of x <= 0, to about 1 unit in the last place; 0 below -708. By a quotient of polynomials (Moshier, Cephes).
inline double exp_(double given) {
    double x = given < -708.0 ? -708.0 : given;
    double n = std::nearbyint(x * 1.4426950408889634);
    double r = x - n * 6.93145751953125e-1 - n * 1.42860682030941723212e-6;  // ln 2 in two parts
    double square = r * r;
    double p = (1.26177193074810590878e-4 * square + 3.02994407707441961300e-2) * square + 1.0;
    double q = (3.00198505138664455042e-6 * square + 2.52448340349684104192e-3) * square;
    q = (q + 2.27265548208155028766e-1) * square + 2.0;
    double odd = r * p, found = 1.0 + 2.0 * odd / (q - odd);
    int64_t power = (int64_t(int32_t(n)) + 1023) << 52;
    double scale;
    std::memcpy(&scale, &power, sizeof scale);
    return given < -708.0 ? 0.0 : found * scale;
}

// The words' weights exp(z - greatest) of one row's z, its logits by the temperature.
template <class T> struct Weights {
    const T *logits;
    double inverse, greatest;  // of the temperature; z

    double of(long word) const { return exp_(double(wide(logits[word])) * inverse - greatest); }

    double sum(long first, long last) const {
        double found = 0;
#pragma omp simd reduction(+ : found)
        for (long word = first; word < last; word++) found += of(word);
        return found;
    }
};

// The first word up to which more than `target` of all weights lies. `sums`: of blocks.
template <class T> long word_at(Weights<T> weights, const double *sums, long words, double target) {
    double before = 0, last = 0;
    long block = 0, blocks = (words + OF_BLOCK - 1) / OF_BLOCK;
    while (block < blocks - 1 && before + sums[block] <= target) before += sums[block++];
    double own[OF_BLOCK];
    const long first = block * OF_BLOCK, count = std::min(OF_BLOCK, words - first);
#pragma omp simd
    for (long i = 0; i < count; i++) own[i] = weights.of(first + i);
    for (long i = 0; i < count; i++) own[i] = last = (i ? last : before) + own[i];
    target = std::min(target, std::nextafter(last, 0.0));  // rounding may carry it to the last sum itself
    return first + (std::upper_bound(own, own + count, target) - own);
}

// A word of each row, where a share u of all weights is reached, and the logarithm of its probability. At a
// temperature of 0 the first with the greatest logit, and its probability at 1.
template <class T>
void sample(const T *logits, const double *u, int64_t *words, float *log_probs, long rows, long width,
            double temperature, int threads) {
    const long blocks = (width + OF_BLOCK - 1) / OF_BLOCK;
#pragma omp parallel for num_threads(threads) if (rows * width > LEAST)
    for (long row = 0; row < rows; row++) {
        const T *from = logits + row * width;
        std::vector<double> sums(blocks);
        double total = 0;
        float top = -INFINITY;
#pragma omp simd reduction(max : top)
        for (long word = 0; word < width; word++) top = wide(from[word]) > top ? wide(from[word]) : top;
        const double inverse = temperature ? 1.0 / temperature : 1.0;
        const Weights<T> weights{from, inverse, double(top) * inverse};
        for (long block = 0; block < blocks; block++) {
            sums[block] = weights.sum(block * OF_BLOCK, std::min((block + 1) * OF_BLOCK, width));
            total += sums[block];
        }
        long word = 0;
        if (temperature)
            word = word_at(weights, sums.data(), width, u[row] * total);
        else
            while (wide(from[word]) < top) word++;
        words[row] = word;
        log_probs[row] = float(double(wide(from[word])) * inverse - weights.greatest - std::log(total));
    }
}

}  // namespace hflow
