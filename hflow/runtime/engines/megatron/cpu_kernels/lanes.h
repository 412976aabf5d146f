#pragma once

#include <cstring>

namespace hflow {

// So many floats a register has.
#if defined(__AVX512F__)
const long LANES = 16;
#elif defined(__AVX__)
const long LANES = 8;
#else
const long LANES = 4;
#endif

typedef float Lanes __attribute__((vector_size(4 * LANES)));

inline Lanes load(const float *from) {
    Lanes found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

inline void store(float *to, Lanes x) { std::memcpy(to, &x, sizeof x); }

inline Lanes everywhere(float x) { return x - Lanes{}; }

// Of all lanes: halves are added, so that additions do not wait for each other.
inline float total(Lanes x) {
    float sums[LANES];
    std::memcpy(sums, &x, sizeof x);
    for (long half = LANES / 2; half; half /= 2)
        for (long lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    return sums[0];
}

inline long whole_lanes(long count) { return (count + LANES - 1) / LANES * LANES; }

}  // namespace hflow
