#pragma once

#include <algorithm>

#include "numbers.h"

namespace hflow {

// Of one head: dim i turns with dim i + half. What does not turn is copied.
template <class T>
inline void turn(const T *from, const T *cos, const T *sin, T *to, long half, long width, float sign) {
#pragma omp simd
    for (long i = 0; i < half; i++) {
        float a = wide(from[i]), b = wide(from[half + i]), c = wide(cos[i]), s = wide(sin[i]) * sign;
        put(to[i], a * c - b * s);
        put(to[half + i], b * c + a * s);
    }
    for (long i = 2 * half; i < width; i++) to[i] = from[i];
}

template <class T>
void turned(const T *x, const T *cos, const T *sin, T *out, long tokens, long heads, long half, long width,
            long of_token, long of_head, float sign, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * heads * width > LEAST)
    for (long token = 0; token < tokens; token++)
        for (long head = 0; head < heads; head++)
            turn(x + token * of_token + head * of_head, cos + token * half, sin + token * half,
                 out + (token * heads + head) * width, half, width, sign);
}

// One token of each row: of a group its queries and their key turn, and key and value go to the cache.
template <class T>
void place(const T *x, const T *value, const T *cos, const T *sin, T *queries, T *keys, T *values, long rows,
           long groups, long heads, long half, long width, long of_row, long of_group, long of_head,
           long value_of_row, long value_of_group, long cache_of_row, long cache_of_group, float factor,
           int threads) {
#pragma omp parallel for num_threads(threads) if (rows * groups * heads * width > LEAST)
    for (long pair = 0; pair < rows * groups; pair++) {
        long row = pair / groups, group = pair % groups;
        const T *from = x + row * of_row + group * of_group;
        const T *given = value + row * value_of_row + group * value_of_group;
        long at = row * cache_of_row + group * cache_of_group;
        for (long head = 0; head < heads; head++) {
            T *to = queries + (pair * heads + head) * width;
            turn(from + head * of_head, cos, sin, to, half, width, 1.0f);
            for (long i = 0; i < width && factor != 1; i++) put(to[i], wide(to[i]) * factor);
        }
        turn(from + heads * of_head, cos, sin, keys + at, half, width, 1.0f);
        std::copy(given, given + width, values + at);
    }
}

}  // namespace hflow
