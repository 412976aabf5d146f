// What `library.py` compiles: one pass over the memory for each operation, or two where the second finds it in
// the cache; torch makes one for every multiplication. Numbers are float32 (type 0) or bfloat16 (type 1) in
// memory and float32 in between. Nothing depends on the number of threads: the gradient of a norm's weight is
// summed over parts of the rows that are always the same.
//
// Products of few rows, as in decoding, are here too.

#include "causal.h"
#include "causal_gradient.h"
#include "gated.h"
#include "layer.h"
#include "layer_stack.h"
#include "linear.h"
#include "newest.h"
#include "norm.h"
#include "rotary.h"
#include "sampling.h"
#include "softmax.h"

using namespace hflow;

// `type` tells which of the two the untyped pointers are of.
#define OF_TYPE(call)       \
    if (type) {             \
        using T = bfloat16; \
        call;               \
    } else {                \
        using T = float;    \
        call;               \
    }
#define IN(x) static_cast<const T *>(x)
#define OUT(x) static_cast<T *>(x)

extern "C" {

void hflow_norm(int type, const void *x, const void *weight, void *out, long rows, long width, float eps,
                float offset, int threads) {
    OF_TYPE(norm(IN(x), IN(weight), OUT(out), rows, width, eps, offset, threads))
}

void hflow_norm_gradient(int type, const void *upstream, const void *x, const void *weight, void *to_x,
                         float *to_weight, long rows, long width, float eps, float offset, int threads) {
    OF_TYPE(norm_gradient(IN(upstream), IN(x), IN(weight), OUT(to_x), to_weight, rows, width, eps, offset,
                          threads))
}

void hflow_gated(int type, int gelu, const void *x, void *out, long rows, long width, int threads) {
    if (gelu) {
        OF_TYPE((gated<T, true>(IN(x), OUT(out), rows, width, threads)))
    } else {
        OF_TYPE((gated<T, false>(IN(x), OUT(out), rows, width, threads)))
    }
}

void hflow_gated_gradient(int type, int gelu, const void *upstream, const void *x, void *out, long rows,
                          long width, int threads) {
    if (gelu) {
        OF_TYPE((gated_gradient<T, true>(IN(upstream), IN(x), OUT(out), rows, width, threads)))
    } else {
        OF_TYPE((gated_gradient<T, false>(IN(upstream), IN(x), OUT(out), rows, width, threads)))
    }
}

void hflow_turned(int type, const void *x, const void *cos, const void *sin, void *out, long tokens, long heads,
                  long half, long width, long of_token, long of_head, float sign, int threads) {
    OF_TYPE(turned(IN(x), IN(cos), IN(sin), OUT(out), tokens, heads, half, width, of_token, of_head, sign,
                   threads))
}

void hflow_place(int type, const void *x, const void *value, const void *cos, const void *sin, void *queries,
                 void *keys, void *values, long rows, long groups, long heads, long half, long width, long of_row,
                 long of_group, long of_head, long value_of_row, long value_of_group, long cache_of_row,
                 long cache_of_group, float factor, int threads) {
    OF_TYPE(place(IN(x), IN(value), IN(cos), IN(sin), OUT(queries), OUT(keys), OUT(values), rows, groups, heads,
                  half, width, of_row, of_group, of_head, value_of_row, value_of_group, cache_of_row,
                  cache_of_group, factor, threads))
}

void hflow_attend_newest(int type, const void *queries, const void *prompt_keys, const void *prompt_values,
                         const bool *present, const int64_t *prompt_of, const int64_t *order, const void *keys,
                         const void *values, const float *sinks, void *out, long rows, long groups, long heads,
                         long width, long prompt_places, long of_prompt, long prompt_group, long places,
                         long of_row, long of_group, float cap, int threads) {
    OF_TYPE((attend_newest_of<T>(
        width, IN(queries), Memory<T>{IN(prompt_keys), IN(prompt_values), prompt_places, of_prompt, prompt_group},
        Presence{present, prompt_places}, prompt_of, order,
        Memory<T>{IN(keys), IN(values), places, of_row, of_group}, sinks, OUT(out), rows, groups, heads, width, cap, threads)))
}

void hflow_causal(int type, const void *query, const void *key, const void *value, void *out, float *log_sums,
                  const void *rows, const int64_t *of, long prompts, long longest, long pairs, long heads,
                  long width, long window, int threads) {
    const long of_query = pairs * heads * width, of_key = pairs * width;
    OF_TYPE((attend_causally<T>(
        {{IN(query), of_query, width}, {IN(key), of_key, width}, {IN(value), of_key, width}},
        {OUT(out), of_query, width}, log_sums, {static_cast<const Row *>(rows), of, prompts, longest},
        {pairs, heads, width, window}, threads)))
}

void hflow_causal_gradient(int type, const void *upstream, const void *query, const void *key, const void *value,
                           const void *out, const float *log_sums, void *to_query, void *to_key, void *to_value,
                           const void *rows, const int64_t *of, long prompts, long longest, long pairs,
                           long heads, long width, long window, int threads) {
    const long of_query = pairs * heads * width, of_key = pairs * width;
    OF_TYPE((attend_causally_gradient<T>(
        {{IN(query), of_query, width}, {IN(key), of_key, width}, {IN(value), of_key, width}},
        {{IN(upstream), of_query, width}, {IN(out), of_query, width}, log_sums},
        {{OUT(to_query), of_query, width}, {OUT(to_key), of_key, width}, {OUT(to_value), of_key, width}},
        {static_cast<const Row *>(rows), of, prompts, longest}, {pairs, heads, width, window}, threads)))
}

void hflow_softmax(int type, int entropy, const void *logits, float *greatest, float *totals, float *spreads,
                   long rows, long width, float temperature, int threads) {
    if (entropy) {
        OF_TYPE((softmax<T, true>(IN(logits), greatest, totals, spreads, rows, width, temperature, threads)))
    } else {
        OF_TYPE((softmax<T, false>(IN(logits), greatest, totals, spreads, rows, width, temperature, threads)))
    }
}

void hflow_softmax_gradient(int type, const void *logits, const float *log_totals, const float *to_log_prob,
                            const int64_t *columns, const bool *mine, const float *to_entropy,
                            const float *entropy, void *out, long rows, long width, float temperature,
                            int threads) {
    if (to_entropy) {
        OF_TYPE((softmax_gradient<T, true>(IN(logits), log_totals, to_log_prob, columns, mine, to_entropy,
                                           entropy, OUT(out), rows, width, temperature, threads)))
    } else {
        OF_TYPE((softmax_gradient<T, false>(IN(logits), log_totals, to_log_prob, columns, mine, to_entropy,
                                            entropy, OUT(out), rows, width, temperature, threads)))
    }
}

void hflow_sample(int type, const void *logits, const double *u, int64_t *words, float *log_probs,
                  long rows, long width, double temperature, int threads) {
    OF_TYPE(sample(IN(logits), u, words, log_probs, rows, width, temperature, threads))
}

void hflow_linear(int type, const void *x, const void *weight, const void *bias, void *out, void *space,
                  long rows, long width, long outputs, int threads) {
    OF_TYPE(linear(IN(x), IN(weight), IN(bias), OUT(out), static_cast<float *>(space), rows, width, outputs,
                   threads))
}

void hflow_attention_block(int type, const void *x, const void *norm, const void *qkv, const void *bias,
                           const void *query_norm, const void *key_norm, const void *projection, const void *cos,
                           const void *sin, const void *prompt_keys, const void *prompt_values,
                           const bool *present, const int64_t *prompt_of, const int64_t *order, void *keys,
                           void *values, const float *sinks, void *out, void *space, long rows, long hidden,
                           long groups, long heads, long width, long half, long prompt_places, long of_prompt,
                           long prompt_group, long places, long of_row, long of_group, float eps, float offset,
                           float factor, float cap, int threads) {
    OF_TYPE(attention_block(
        IN(x), Norm<T>{IN(norm), eps, offset}, IN(qkv), IN(bias), IN(query_norm), IN(key_norm), IN(projection),
        IN(cos), IN(sin),
        Memory<T>{IN(prompt_keys), IN(prompt_values), prompt_places, of_prompt, prompt_group},
        Presence{present, prompt_places}, prompt_of, order, OUT(keys), OUT(values),
        Memory<T>{IN(keys), IN(values), places, of_row, of_group}, sinks, OUT(out), OUT(space), rows, hidden, groups, heads, width, half, factor, cap, threads))
}

void hflow_mlp_block(int type, int gelu, const void *x, const void *norm, const void *up, const void *down,
                     void *out, void *space, long rows, long hidden, long ffn, float eps, float offset,
                     int threads) {
    if (gelu) {
        OF_TYPE((mlp_block<T, true>(IN(x), Norm<T>{IN(norm), eps, offset}, IN(up), IN(down), OUT(out),
                                    OUT(space), rows, hidden, ffn, threads)))
    } else {
        OF_TYPE((mlp_block<T, false>(IN(x), Norm<T>{IN(norm), eps, offset}, IN(up), IN(down), OUT(out),
                                     OUT(space), rows, hidden, ffn, threads)))
    }
}

void hflow_layers(int type, int gelu, void *x, const void *all, const bool *present, const int64_t *prompt_of,
                  const int64_t *order, void *space, long count, long rows, long hidden, long groups, long heads,
                  long width, long half, long ffn, long prompt_places, long of_prompt, long prompt_group,
                  long places, long of_row, long of_group, long turn, float eps, float offset, float factor,
                  float cap, int threads) {
    const Sizes sizes{rows, hidden, groups, heads, width, half, ffn};
    const Places prompts{prompt_places, of_prompt, prompt_group}, own{places, of_row, of_group};
    if (gelu) {
        OF_TYPE((layers<T, true>(OUT(x), static_cast<const Layer<T> *>(all), count, prompts, present,
                                 prompt_of, order, own, OUT(space), sizes, turn, eps, offset, factor, cap,
                                 threads)))
    } else {
        OF_TYPE((layers<T, false>(OUT(x), static_cast<const Layer<T> *>(all), count, prompts, present,
                                  prompt_of, order, own, OUT(space), sizes, turn, eps, offset, factor, cap,
                                  threads)))
    }
}
}
