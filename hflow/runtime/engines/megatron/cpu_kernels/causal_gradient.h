#pragma once

#include "causal.h"

namespace hflow {

// Of scores the weights, and of the gradients of weights, whose mean by the weights is `mean`, those of scores.
inline void score_gradients(float *scores, float *gradients, long count, float log_sum, float mean) {
    for (long at = 0; at < count; at += LANES)
#pragma omp simd
        for (long i = at; i < at + LANES; i++) {
            scores[i] = exp_(scores[i] - log_sum);
            gradients[i] = scores[i] * (gradients[i] - mean);
        }
}

// What came of the forward pass, and the gradient of what it gave.
template <class T> struct Found {
    Heads<const T> upstream, out;
    const float *log_sums;
};

template <class T> struct Gradients {
    Heads<T> query, key, value;
};

template <class T> struct AttentionGradient {
    Attention<T> attention;
    std::vector<float> upstream, to_scores, to_keys, to_values;

    AttentionGradient(Shape shape, long most)
        : attention(shape, most, true), upstream(attention.rows() * attention.filled),
          to_scores(attention.rows() * attention.tokens), to_keys(most * attention.filled),
          to_values(most * attention.filled) {}

    // Weights in the place of scores, and the gradients of these.
    void weigh(Heads<const T> query, Found<T> found, long pair, Turn turn) {
        const long width = attention.shape.width, filled = attention.filled, tokens = attention.tokens;
        attention.score(query, pair, turn);
        attention.bring(found.upstream, pair, turn, 1.0f, upstream);
        multiply<false>({upstream.data(), filled, 1}, attention.values.by_dim(turn.hidden),
                        {to_scores.data(), tokens}, turn.count * attention.shape.heads, turn.scores(), width);
        attention.each(turn, pair, [&](long row, long i, long head) {
            const T *out = found.out.of(turn.token + i, head);
            float mean = 0;
#pragma omp simd reduction(+ : mean)
            for (long dim = 0; dim < width; dim++) mean += upstream[row * filled + dim] * wide(out[dim]);
            float log_sum = found.log_sums[attention.of_log_sum(turn.token + i, head)];
            score_gradients(&attention.scores[row * tokens], &to_scores[row * tokens], turn.scores(), log_sum,
                            mean);
        });
    }
    void add(Heads<const T> query, Found<T> found, long pair, Turn turn, Heads<T> to_query) {
        weigh(query, found, pair, turn);
        const long rows = turn.count * attention.shape.heads, seen = turn.seen() - turn.hidden;
        const long filled = attention.filled, tokens = attention.tokens, from = turn.hidden * filled;
        float *weights = attention.scores.data(), *queries = attention.queries.data();
        float *sums = attention.sums.data();
        multiply<false>({to_scores.data(), tokens, 1}, attention.keys.by_token(turn.hidden), {sums, filled}, rows,
                        filled, seen);
        attention.each(turn, pair, [&](long row, long i, long head) {
            T *to = to_query.of(turn.token + i, head);
            for (long dim = 0; dim < attention.shape.width; dim++)
                put(to[dim], sums[row * filled + dim] * attention.scale);
        });
        multiply<true>({to_scores.data(), 1, tokens}, {queries, filled}, {&to_keys[from], filled}, seen, filled, rows);
        multiply<true>({weights, 1, tokens}, {upstream.data(), filled}, {&to_values[from], filled}, seen, filled, rows);
    }
    void clear(long at, long count) {
        const long filled = attention.filled;
        std::fill_n(to_keys.begin() + at * filled, count * filled, 0.0f);
        std::fill_n(to_values.begin() + at * filled, count * filled, 0.0f);
    }
    void hand_over(long at, long count, long token, long pair, Gradients<T> to) const {
        for (long i = 0; i < count; i++) {
            const long from = (at + i) * attention.filled;
            T *key = to.key.of(token + i, pair), *value = to.value.of(token + i, pair);
            for (long dim = 0; dim < attention.shape.width; dim++) {
                put(key[dim], to_keys[from + dim]);
                put(value[dim], to_values[from + dim]);
            }
        }
    }
};

// Gradients of a prompt's keys and values are summed over its rows, one after the other.
template <class T>
void attend_causally_gradient(Inputs<T> in, Found<T> found, Gradients<T> to, Prompts prompts, Shape shape,
                              int threads) {
#pragma omp parallel num_threads(threads)
    {
        AttentionGradient<T> gradient(shape, prompts.longest);
#pragma omp for schedule(dynamic) nowait
        for (long number = 0; number < prompts.count * shape.pairs; number++) {
            long prompt = number / shape.pairs, pair = number % shape.pairs;
            auto add = [&](Turn turn) { gradient.add(in.query, found, pair, turn, to.query); };
            const Row *row = prompts.rows + prompts.of[prompt], *end = prompts.rows + prompts.of[prompt + 1];
            const Row first = *row;
            gradient.attention.see(in.key, in.value, pair, first.prompt, first.prompt_tokens, 0);
            gradient.clear(0, first.prompt_tokens);
            in_turns(first.prompt, first.prompt_tokens, 0, shape, add);
            for (; row < end; row++) {
                gradient.attention.see(in.key, in.value, pair, row->own, row->own_tokens, row->prompt_tokens);
                gradient.clear(row->prompt_tokens, row->own_tokens);
                in_turns(row->own, row->own_tokens, row->prompt_tokens, shape, add);
                gradient.hand_over(row->prompt_tokens, row->own_tokens, row->own, pair, to);
            }
            gradient.hand_over(0, first.prompt_tokens, first.prompt, pair, to);
        }
    }
}

}  // namespace hflow
