#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "numbers.h"

namespace hflow {

const long PLACES = 64;  // whose keys, or values, stay in the nearest cache while all queries meet them

inline const float *widened(const float *from, float *, long) { return from; }

inline const float *widened(const bfloat16 *from, float *to, long count) {
#pragma omp simd
    for (long i = 0; i < count; i++) to[i] = wide(from[i]);
    return to;
}

template <long WIDTH> inline float product(const float *query, const float *key, long given) {
    const long width = WIDTH ? WIDTH : given;
    float found = 0;
#pragma omp simd reduction(+ : found)
    for (long i = 0; i < width; i++) found += query[i] * key[i];
    return found;
}

// With four keys, whose sums do not wait for each other.
template <long WIDTH> inline void four_products(const float *query, const float *keys, float *to, long given) {
    const long width = WIDTH ? WIDTH : given;
    float a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
    for (long i = 0; i < width; i++) {
        a += query[i] * keys[i];
        b += query[i] * keys[width + i];
        c += query[i] * keys[2 * width + i];
        d += query[i] * keys[3 * width + i];
    }
    to[0] = a, to[1] = b, to[2] = c, to[3] = d;
}

template <long WIDTH> void scores_of(const float *query, const float *keys, float *to, long count, long width) {
    long place = 0;
    for (; place + 4 <= count; place += 4)
        four_products<WIDTH>(query, keys + place * width, to + place, width);
    for (; place < count; place++) to[place] = product<WIDTH>(query, keys + place * width, width);
}

// The weights exp(score - greatest) by their sum, in the place of the scores. `sink`: one more score, whose
// weight nothing gets.
inline void softmax_in_place(float *scores, long places, float sink) {
    float top = sink, total = 0;
#pragma omp simd reduction(max : top)
    for (long place = 0; place < places; place++) top = scores[place] > top ? scores[place] : top;
#pragma omp simd reduction(+ : total)
    for (long place = 0; place < places; place++) {
        float weight = exp_(scores[place] - top);
        scores[place] = weight;
        total += weight;
    }
    total += exp_(sink - top);
    for (long place = 0; place < places; place++) scores[place] /= total;
}

// Adds values times their weights. So many of their dims, whose sums stay in registers.
template <int DIMS>
inline void add_weighed(const float *weights, const float *values, float *sums, long count, long width) {
    float found[DIMS];
    std::copy(sums, sums + DIMS, found);
    for (long place = 0; place < count; place++) {
        const float *value = values + place * width;
        float weight = weights[place];
#pragma omp simd
        for (int i = 0; i < DIMS; i++) found[i] += weight * value[i];
    }
    std::copy(found, found + DIMS, sums);
}

inline void add_all_weighed(const float *weights, const float *values, float *sums, long count, long width) {
    long dim = 0;
    for (; dim + 64 <= width; dim += 64) add_weighed<64>(weights, values + dim, sums + dim, count, width);
    for (; dim + 8 <= width; dim += 8) add_weighed<8>(weights, values + dim, sums + dim, count, width);
    for (; dim < width; dim++) add_weighed<1>(weights, values + dim, sums + dim, count, width);
}

// Keys and values, `width` numbers apart, of which those are seen that are `present`: all, where that is null.
template <class T> struct Seen {
    const T *keys, *values;
    const bool *present;
    long places;
};

// The queries of one row that share keys and values, with the memory that their attention takes.
template <class T, long WIDTH> struct Group {
    long heads, width, most;  // places
    float cap;
    std::vector<float> queries, sums, scores, block;

    Group(long heads, long width, long most, float cap)
        : heads(heads), width(width), most(most), cap(cap), queries(heads * width), sums(heads * width),
          scores(heads * most), block(PLACES * width) {}

    void attend(const T *query, const Seen<T> &before, const Seen<T> &own, const float *sinks, T *out) {
        float scale = 1.0f / std::sqrt(float(width));
        for (long i = 0; i < heads * width; i++) queries[i] = wide(query[i]) * scale;
        score(before, 0);
        score(own, before.places);
        for (long head = 0; head < heads; head++)
            softmax_in_place(&scores[head * most], before.places + own.places, sinks ? sinks[head] : -INFINITY);
        std::fill(sums.begin(), sums.end(), 0.0f);
        weigh(before, 0);
        weigh(own, before.places);
        for (long i = 0; i < heads * width; i++) put(out[i], sums[i]);
    }

    void score(const Seen<T> &seen, long at) {
        for (long first = 0; first < seen.places; first += PLACES) {
            long count = std::min(PLACES, seen.places - first);
            const float *keys = widened(seen.keys + first * width, block.data(), count * width);
            for (long head = 0; head < heads; head++)
                scores_of<WIDTH>(&queries[head * width], keys, &scores[head * most + at + first], count, width);
        }
        for (long head = 0; head < heads; head++) hide(&scores[head * most + at], seen);
    }

    void hide(float *own, const Seen<T> &seen) const {
        for (long place = 0; cap && place < seen.places; place++) own[place] = cap * std::tanh(own[place] / cap);
        for (long place = 0; seen.present && place < seen.places; place++)
            own[place] = seen.present[place] ? own[place] : -INFINITY;
    }

    void weigh(const Seen<T> &seen, long at) {
        for (long first = 0; first < seen.places; first += PLACES) {
            long count = std::min(PLACES, seen.places - first);
            const float *values = widened(seen.values + first * width, block.data(), count * width);
            for (long head = 0; head < heads; head++)
                add_all_weighed(&scores[head * most + at + first], values, &sums[head * width], count, width);
        }
    }
};

// Keys and values in memory, of which those of a row, and of a group, are so many numbers apart.
template <class T> struct Memory {
    const T *keys, *values;
    long places, of_row, of_group;

    Seen<T> of(long row, long group, const bool *present = nullptr, long first = 0, long width = 0) const {
        long at = row * of_row + group * of_group + first * width;
        return {keys + at, values + at, present ? present + first : nullptr, places - first};
    }
    // Without the first places, each of so many numbers.
    Memory from(long first, long width) const {
        return {keys + first * width, values + first * width, places - first, of_row, of_group};
    }
};

// Which places of prompts have no padding, those of one so many numbers after those of another; null: all.
struct Presence {
    const bool *at;
    long of_prompt;

    const bool *of(long prompt) const { return at ? at + prompt * of_prompt : nullptr; }
    Presence from(long first) const { return {at ? at + first : nullptr, of_prompt}; }
};

// Attention of one token of each row to its prompt, `prompt_of`, and to its own tokens: softmax(q k' /
// sqrt(width)) v. `order`: of rows, those of a prompt after each other, so that the cache has what they share.
// Padding on the left of prompts is not looked at.
template <class T, long WIDTH>
void attend_newest(const T *queries, Memory<T> prompts, Presence present, const int64_t *prompt_of,
                   const int64_t *order, Memory<T> own, const float *sinks, T *out, long rows, long groups,
                   long heads, long width, float cap, int threads) {
    long size = heads * width, most = prompts.places + own.places;
#pragma omp parallel num_threads(threads) if (rows * groups * most * size > LEAST)
    {
        Group<T, WIDTH> of(heads, width, most, cap);
#pragma omp for nowait
        for (long pair = 0; pair < rows * groups; pair++) {
            long group = pair / rows, row = order[pair % rows], prompt = prompt_of[row], first = 0;
            long at = (row * groups + group) * size;
            const bool *seen = present.of(prompt);
            while (seen && first < prompts.places && !seen[first]) first++;
            of.attend(queries + at, prompts.of(prompt, group, seen, first, width), own.of(row, group),
                      sinks ? sinks + group * heads : nullptr, out + at);
        }
    }
}

// By loops of a known length, if it is a usual one.
template <class T, class... Given> void attend_newest_of(long width, Given... given) {
    auto attend = width == 64    ? attend_newest<T, 64>
                  : width == 128 ? attend_newest<T, 128>
                                 : attend_newest<T, 0>;
    attend(given...);
}

}  // namespace hflow
