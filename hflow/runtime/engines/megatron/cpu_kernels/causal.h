#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "lanes.h"
#include "numbers.h"
#include "products.h"

namespace hflow {

// Attention of every token of a row to those before it and itself. What a row sees is copied to memory of its
// own, in the orders in which products read it: of rows of one prompt the prompt once. Scores are made of a few
// queries at a time, with all heads that share a key; the backward pass makes them again (arXiv:2205.14135).

const long AT_ONCE = 48;  // queries, a head counting as one

// Where a row's tokens are: first those of its prompt, which other rows may share, then its own.
struct Row {
    int64_t prompt, prompt_tokens, own, own_tokens;
};

// Heads of tokens; those of a token are after each other.
template <class T> struct Heads {
    T *at;
    long of_token, width;

    T *of(long token, long head) const { return at + token * of_token + head * width; }
};

// Pairs of a key head and a value head, and the queries that share one; `window`: how many tokens one sees, 0:
// all before it.
struct Shape {
    long pairs, heads, width, window;

    long at_once() const { return std::max(1L, AT_ONCE / heads); }  // tokens
};

// Keys, or values, that a row sees by one head: dim by dim, or token by token, or both.
struct Context {
    long width, tokens, filled;  // `filled`: the width in whole registers, with zeros
    std::vector<float> columns, rows;

    Context(long width, long most, bool by_dim, bool by_token)
        : width(width), tokens(whole_lanes(most)), filled(whole_lanes(width)),
          columns(by_dim ? width * tokens : 0), rows(by_token ? most * filled : 0) {}

    template <class T> void bring(Heads<const T> given, long head, long first, long count, long at) {
        const T *from = given.of(first, head);
        for (long token = 0; token < count && !rows.empty(); token++)
            for (long dim = 0; dim < width; dim++)
                rows[(at + token) * filled + dim] = wide(from[token * given.of_token + dim]);
        for (long dim = 0; dim < width && !columns.empty(); dim++)
            for (long token = 0; token < count; token++)
                columns[dim * tokens + at + token] = wide(from[token * given.of_token + dim]);
    }
    Rows<const float> by_dim(long from) const { return {&columns[from], tokens}; }
    Rows<const float> by_token(long from) const { return {&rows[from * filled], filled}; }
};

// Tokens of a row whose queries are taken at once, of which the first has `before` tokens before it. Scores are
// made with those from `hidden` on, which is a multiple of LANES, to the last that any of them sees.
struct Turn {
    long token, count, before, hidden, window;

    long seen() const { return before + count; }
    long scores() const { return whole_lanes(seen()) - hidden; }
    long first(long i) const { return window ? std::max(0L, last(i) - window) : 0; }
    long last(long i) const { return before + i + 1; }

    // Of scores from `hidden` on of token `i`, those that it does not see.
    void hide(float *scores_of, long i) const {
        std::fill(scores_of, scores_of + first(i) - hidden, -INFINITY);
        std::fill(scores_of + last(i) - hidden, scores_of + scores(), -INFINITY);
    }
};

template <class Do> void in_turns(long token, long count, long before, Shape shape, Do go) {
    for (long start = 0; start < count; start += shape.at_once()) {
        long at = before + start, hidden = shape.window ? std::max(0L, at + 1 - shape.window) : 0;
        go(Turn{token + start, std::min(shape.at_once(), count - start), at, hidden / LANES * LANES, shape.window});
    }
}

// The exponentials of scores by the greatest, in their place; gives their sum, and the logarithm of that of the
// scores' own. `count`: a multiple of LANES.
inline float exponentials(float *scores, long count, float &log_sum) {
    float tops[LANES], sums[LANES] = {}, top = -INFINITY, sum = 0;
    std::fill(tops, tops + LANES, top);
    for (long at = 0; at < count; at += LANES)
#pragma omp simd
        for (long lane = 0; lane < LANES; lane++)
            tops[lane] = scores[at + lane] > tops[lane] ? scores[at + lane] : tops[lane];
    for (long lane = 0; lane < LANES; lane++) top = std::max(top, tops[lane]);
    for (long at = 0; at < count; at += LANES)
#pragma omp simd
        for (long lane = 0; lane < LANES; lane++) {
            scores[at + lane] = exp_(scores[at + lane] - top);
            sums[lane] += scores[at + lane];
        }
    for (long lane = 0; lane < LANES; lane++) sum += sums[lane];
    log_sum = top + std::log(sum);
    return sum;
}

// Attention by one pair of a key head and a value head, with the memory that it takes.
template <class T> struct Attention {
    Shape shape;
    long filled, tokens;
    float scale;
    Context keys, values;
    std::vector<float> queries, scores, sums, totals;

    Attention(Shape shape, long most, bool backward)
        : shape(shape), filled(whole_lanes(shape.width)), tokens(whole_lanes(most)),
          scale(1.0f / std::sqrt(float(shape.width))), keys(shape.width, most, true, backward),
          values(shape.width, most, backward, true), queries(rows() * filled), scores(rows() * tokens),
          sums(rows() * filled), totals(rows()) {}

    long rows() const { return shape.at_once() * shape.heads; }

    // For each row of a turn, which is a head of a token.
    template <class Do> void each(Turn turn, long pair, Do go) const {
        for (long i = 0, row = 0; i < turn.count; i++)
            for (long head = 0; head < shape.heads; head++, row++) go(row, i, pair * shape.heads + head);
    }
    long of_log_sum(long token, long head) const { return token * shape.pairs * shape.heads + head; }

    void see(Heads<const T> key, Heads<const T> value, long pair, long first, long count, long at) {
        keys.bring(key, pair, first, count, at);
        values.bring(value, pair, first, count, at);
    }
    void bring(Heads<const T> given, long pair, Turn turn, float factor, std::vector<float> &to) const {
        each(turn, pair, [&](long row, long i, long head) {
            const T *from = given.of(turn.token + i, head);
            for (long dim = 0; dim < shape.width; dim++) to[row * filled + dim] = wide(from[dim]) * factor;
        });
    }
    // Scores of a turn, from what is hidden on, of all rows.
    void score(Heads<const T> query, long pair, Turn turn) {
        bring(query, pair, turn, scale, queries);
        multiply<false>({queries.data(), filled, 1}, keys.by_dim(turn.hidden), {scores.data(), tokens},
                        turn.count * shape.heads, turn.scores(), shape.width);
        each(turn, pair, [&](long row, long i, long) { turn.hide(&scores[row * tokens], i); });
    }
    void attend(Heads<const T> query, long pair, Turn turn, Heads<T> out, float *log_sums) {
        score(query, pair, turn);
        each(turn, pair, [&](long row, long i, long head) {
            float &log_sum = log_sums[of_log_sum(turn.token + i, head)];
            totals[row] = exponentials(&scores[row * tokens], turn.scores(), log_sum);
        });
        multiply<false>({scores.data(), tokens, 1}, values.by_token(turn.hidden), {sums.data(), filled},
                        turn.count * shape.heads, filled, turn.seen() - turn.hidden);
        each(turn, pair, [&](long row, long i, long head) {
            T *to = out.of(turn.token + i, head);
            for (long dim = 0; dim < shape.width; dim++) put(to[dim], sums[row * filled + dim] / totals[row]);
        });
    }
};

// The rows of each prompt, of which number p has those from `of[p]` to `of[p + 1]`; `longest`: tokens of a row.
struct Prompts {
    const Row *rows;
    const int64_t *of;
    long count, longest;
};

template <class T> struct Inputs {
    Heads<const T> query, key, value;
};

template <class T>
void attend_causally(Inputs<T> in, Heads<T> out, float *log_sums, Prompts prompts, Shape shape, int threads) {
#pragma omp parallel num_threads(threads)
    {
        Attention<T> attention(shape, prompts.longest, false);
#pragma omp for schedule(dynamic) nowait
        for (long number = 0; number < prompts.count * shape.pairs; number++) {
            long prompt = number / shape.pairs, pair = number % shape.pairs;
            auto attend = [&](Turn turn) { attention.attend(in.query, pair, turn, out, log_sums); };
            const Row *row = prompts.rows + prompts.of[prompt], *end = prompts.rows + prompts.of[prompt + 1];
            attention.see(in.key, in.value, pair, row->prompt, row->prompt_tokens, 0);
            in_turns(row->prompt, row->prompt_tokens, 0, shape, attend);
            for (; row < end; row++) {
                attention.see(in.key, in.value, pair, row->own, row->own_tokens, row->prompt_tokens);
                in_turns(row->own, row->own_tokens, row->prompt_tokens, shape, attend);
            }
        }
    }
}

}  // namespace hflow
