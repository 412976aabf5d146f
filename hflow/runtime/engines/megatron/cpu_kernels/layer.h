#pragma once

#include <algorithm>

#include "newest.h"
#include "gated.h"
#include "linear.h"
#include "norm.h"
#include "rotary.h"

namespace hflow {

// The two blocks of a layer, each with the norm before it and without its sum with what went in. With few rows
// calls of single operations, and memory between them, are a tenth of a token's time or more.

template <class T> struct Norm {
    const T *weight;
    float eps, offset;
};

// Memory that holds one matrix after the other.
template <class T> struct Space {
    T *next;

    T *take(long numbers) {
        T *found = next;
        next += numbers;
        return found;
    }
};

// Every query and every key by itself, of `pairs` times `heads` queries, a key, and a value.
template <class T>
void norm_heads(T *qkv, const T *query, const T *key, long pairs, long heads, long width, Norm<T> given) {
    for (long pair = 0; pair < pairs; pair++) {
        T *of = qkv + pair * (heads + 2) * width, *keys = of + heads * width;
        norm(of, query, of, heads, width, given.eps, given.offset, 1);
        norm(keys, key, keys, 1, width, given.eps, given.offset, 1);
    }
}

// `query_norm`: null, where heads are not normed. The newest of its `own` places are written.
template <class T>
void attention_block(const T *x, Norm<T> before, const T *qkv_weight, const T *qkv_bias, const T *query_norm,
                     const T *key_norm, const T *out_weight, const T *cos, const T *sin, Memory<T> prompts,
                     Presence present, const int64_t *prompt_of, const int64_t *order, T *own_keys,
                     T *own_values, Memory<T> own, const float *sinks, T *out, T *memory, long rows, long hidden,
                     long groups, long heads, long width, long half, float factor, float cap, int threads) {
    const long of_group = (heads + 2) * width, queries_of_row = groups * heads * width;
    Space<T> space{memory};
    T *normed = space.take(rows * hidden), *qkv = space.take(rows * groups * of_group);
    T *queries = space.take(rows * queries_of_row), *attended = space.take(rows * queries_of_row);
    float *lanes = reinterpret_cast<float *>(space.next);
    norm(x, before.weight, normed, rows, hidden, before.eps, before.offset, threads);
    linear(normed, qkv_weight, qkv_bias, qkv, lanes, rows, hidden, groups * of_group, threads);
    if (query_norm) norm_heads(qkv, query_norm, key_norm, rows * groups, heads, width, before);
    const long newest = (own.places - 1) * width, of_row = groups * of_group;
    place(qkv, qkv + (heads + 1) * width, cos, sin, queries, own_keys + newest, own_values + newest, rows, groups,
          heads, half, width, of_row, of_group, width, of_row, of_group, own.of_row, own.of_group, factor, threads);
    attend_newest_of<T>(width, queries, prompts, present, prompt_of, order, own, sinks, attended, rows, groups,
                        heads, width, cap, threads);
    linear(attended, out_weight, static_cast<const T *>(nullptr), out, lanes, rows, queries_of_row, hidden,
           threads);
}

// `up`: of the gate, and of what it multiplies.
template <class T, bool GELU>
void mlp_block(const T *x, Norm<T> before, const T *up, const T *down, T *out, T *memory, long rows, long hidden,
               long ffn, int threads) {
    const T *none = nullptr;
    Space<T> space{memory};
    T *normed = space.take(rows * hidden), *both = space.take(rows * 2 * ffn), *inside = space.take(rows * ffn);
    float *lanes = reinterpret_cast<float *>(space.next);
    norm(x, before.weight, normed, rows, hidden, before.eps, before.offset, threads);
    linear(normed, up, none, both, lanes, rows, hidden, 2 * ffn, threads);
    gated<T, GELU>(both, inside, rows, ffn, threads);
    linear(inside, down, none, out, lanes, rows, ffn, hidden, threads);
}

}  // namespace hflow
