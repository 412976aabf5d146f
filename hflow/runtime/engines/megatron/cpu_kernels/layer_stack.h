#pragma once

#include <algorithm>

#include "layer.h"

namespace hflow {

// A layer's weights, and its keys and values. Null is what it does not have. `cos`, `sin`: of all places.
template <class T> struct Layer {
    const T *norm, *qkv, *bias, *query_norm, *key_norm, *projection;
    const float *sinks;
    const T *mlp_norm, *up, *down, *cos, *sin, *prompt_keys, *prompt_values;
    T *keys, *values;
    int64_t window;  // how many tokens, with itself, one sees; 0: all
};

struct Sizes {
    long rows, hidden, groups, heads, width, half, ffn;
};

// How many places there are, and how far apart those of rows and of groups.
struct Places {
    long count, of_row, of_group;
};

template <class T> inline void add(const T *branch, T *x, long numbers) {
#pragma omp simd
    for (long i = 0; i < numbers; i++) put(x[i], wide(x[i]) + wide(branch[i]));
}

// One token of each row through all layers, in its place. Every layer has its own keys and values in memory of
// the same form. `turn`: where cosines and sines of the token's place are. The newest of `own` places are written.
template <class T, bool GELU>
void layers(T *x, const Layer<T> *all, long count, Places prompts, const bool *present, const int64_t *prompt_of,
            const int64_t *order, Places own, T *space, Sizes sizes, long turn, float eps, float offset,
            float factor, float cap, int threads) {
    const long numbers = sizes.rows * sizes.hidden, width = sizes.width;
    T *branch = space, *rest = space + numbers;
    for (const Layer<T> *layer = all; layer < all + count; layer++) {
        const long seen = layer->window ? layer->window : prompts.count + own.count;
        const long hidden = std::max(0L, prompts.count + own.count - seen);
        const long of_prompt = std::min(hidden, prompts.count), of_own = hidden - of_prompt;
        const Memory<T> before{layer->prompt_keys, layer->prompt_values, prompts.count, prompts.of_row,
                               prompts.of_group};
        const Memory<T> after{layer->keys, layer->values, own.count, own.of_row, own.of_group};
        attention_block(x, Norm<T>{layer->norm, eps, offset}, layer->qkv, layer->bias, layer->query_norm,
                        layer->key_norm, layer->projection, layer->cos + turn, layer->sin + turn,
                        before.from(of_prompt, width), Presence{present, prompts.count}.from(of_prompt), prompt_of,
                        order, layer->keys + of_own * width, layer->values + of_own * width,
                        after.from(of_own, width), layer->sinks, branch, rest, sizes.rows, sizes.hidden,
                        sizes.groups, sizes.heads, width, sizes.half, factor, cap, threads);
        add(branch, x, numbers);
        mlp_block<T, GELU>(x, Norm<T>{layer->mlp_norm, eps, offset}, layer->up, layer->down, branch, rest,
                           sizes.rows, sizes.hidden, sizes.ffn, threads);
        add(branch, x, numbers);
    }
}

}  // namespace hflow
