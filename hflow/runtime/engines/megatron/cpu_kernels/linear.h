#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "amx.h"
#include "lanes.h"
#include "numbers.h"

namespace hflow {

// Products of few rows with a matrix of weights, which are used in the order in which they are in memory.
// General products first copy them into an order of their own, which pays with hundreds of rows.
//
// Numbers go through registers as words of 32 bits: one float, or two neighbours of a bfloat16 row.

const long COLUMNS = 8, OF_DOTS = 4;  // outputs whose sums are in registers at once
const long LINE = 16;                 // words that memory brings together
const long TILES_AT_ONCE = LANES == 16 ? 2 : 1;  // whose sums are in registers: AVX-512 has twice as many
const long FLOATS_PAY = 4;            // rows, for which products of floats are worth turning weights to them
const long AMX_PAYS = 3;              // rows, as many as are worth being filled up to a tile
#ifdef __AVX512BF16__
const bool HAS_BF16_PRODUCTS = true;
#else
const bool HAS_BF16_PRODUCTS = false;
#endif

template <class T> struct Words;

template <> struct Words<float> {
    static Lanes add(Lanes sum, Lanes a, Lanes b) { return sum + a * b; }
    static Lanes everywhere(const float *word) { return hflow::everywhere(*word); }
};

typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));

template <> struct Words<bfloat16> {
#ifdef __AVX512BF16__
    static Lanes add(Lanes sum, Lanes a, Lanes b) {
        return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
#else
    // A bfloat16 is the upper half of a float.
    static Lanes first(Lanes word) { return (Lanes)((Bits)word << 16); }
    static Lanes second(Lanes word) { return (Lanes)((Bits)word & 0xffff0000u); }
    static Lanes add(Lanes sum, Lanes a, Lanes b) { return sum + first(a) * first(b) + second(a) * second(b); }
#endif
    static Lanes everywhere(const float *word) {
        uint32_t bits;
        std::memcpy(&bits, word, sizeof bits);
        return (Lanes)(bits - Bits{});
    }
};

// Where a sum goes, with its column's bias, if there is one. Its type T may be another than that of factors, W.
template <class T> struct Out {
    T *out;
    const T *bias;
    long outputs;

    Out from(long row, long column) const {
        return {out + row * outputs + column, bias ? bias + column : nullptr, outputs};
    }
    void put_sum(long row, long column, float sum) const {
        put(out[row * outputs + column], bias ? sum + wide(bias[column]) : sum);
    }
};

// ROWS rows by OF_DOTS weights: lanes have parts of each sum. `next`: weights that come after these.
template <class W, class T, long ROWS>
inline void dots(const float *x, const float *weights, Out<T> out, long words, const float *next) {
    Lanes sums[ROWS][OF_DOTS] = {};
    for (long i = 0; i < words; i += LANES) {
        Lanes some[OF_DOTS];
        for (long c = 0; c < OF_DOTS; c++) {
            some[c] = load(weights + c * words + i);
            if (next) __builtin_prefetch(next + c * words + i);
        }
        for (long row = 0; row < ROWS; row++) {
            Lanes of_row = load(x + row * words + i);
            for (long c = 0; c < OF_DOTS; c++) sums[row][c] = Words<W>::add(sums[row][c], of_row, some[c]);
        }
    }
    for (long row = 0; row < ROWS; row++)
        for (long c = 0; c < OF_DOTS; c++) out.put_sum(row, c, total(sums[row][c]));
}

template <class W, class T>
inline void dots_of(long rows, const float *x, const float *weights, Out<T> out, long words,
                    const float *next) {
    long row = 0;
    for (; row + 4 <= rows; row += 4) {
        dots<W, T, 4>(x + row * words, weights, out.from(row, 0), words, next);
        next = nullptr;
    }
    x += row * words, out = out.from(row, 0);
    switch (rows - row) {
    case 3: return dots<W, T, 3>(x, weights, out, words, next);
    case 2: return dots<W, T, 2>(x, weights, out, words, next);
    case 1: return dots<W, T, 1>(x, weights, out, words, next);
    }
}

// Weights that come after those in use: a tile fetches so many columns, all of them line by line. All
// tiles fetch some: memory brings only so many lines at once, for which the first tile alone would wait.
struct Ahead {
    const float *weights;
    long columns;
};

// TILES of LANES rows, of which `rows` are there, by COLUMNS weights: each lane has the sums of one row. `x`: of
// each tile word by word. A weight that two tiles share is loaded once for both.
template <class W, class T, long TILES>
inline void tile(const float *x, const float *weights, Out<T> out, long rows, long words, Ahead ahead) {
    Lanes sums[TILES][COLUMNS] = {};
    for (long line = 0; line < words; line += LINE) {
        for (long c = 0; c < ahead.columns; c++) __builtin_prefetch(ahead.weights + c * words + line);
        for (long i = line; i < line + LINE; i++) {
            Lanes of_rows[TILES];
            for (long t = 0; t < TILES; t++) of_rows[t] = load(x + (t * words + i) * LANES);
            for (long c = 0; c < COLUMNS; c++) {
                const Lanes weight = Words<W>::everywhere(weights + c * words + i);
                for (long t = 0; t < TILES; t++) sums[t][c] = Words<W>::add(sums[t][c], of_rows[t], weight);
            }
        }
    }
    float found[TILES][COLUMNS][LANES];
    std::memcpy(found, sums, sizeof found);
    for (long row = 0; row < rows; row++)
        for (long c = 0; c < COLUMNS; c++) out.put_sum(row, c, found[row / LANES][c][row % LANES]);
}

// Of LANES rows, of which `rows` are there, one word after the other of all of them.
inline void word_by_word(const float *x, float *to, long rows, long words) {
    for (long line = 0; line < words; line += LINE)
        for (long row = 0; row < LANES; row++)
            for (long i = line; i < line + LINE; i++) to[i * LANES + row] = row < rows ? x[row * words + i] : 0;
}

// Rows in whole tiles, the last of which may be filled up, and those that are left.
struct Split {
    long tiles, left;

    explicit Split(long rows) : tiles(rows / LANES), left(rows % LANES) {
        if (left >= LANES / 2) tiles++, left = 0;  // beside which as many dots take as long
    }
    void arrange(const float *x, float *to, long rows, long words) const {
        for (long t = 0; t < tiles; t++)
            word_by_word(x + t * LANES * words, to + t * LANES * words, rows - t * LANES, words);
    }
};

// COLUMNS of weights by all rows: `arranged` those in tiles, `x` as they were. `next`: weights that come later.
template <class W, class T>
void some_columns(const float *x, const float *arranged, const float *weights, Out<T> out, Split split, long rows,
                  long words, const float *next) {
    for (long t = 0, tiles; t < split.tiles; t += tiles) {
        tiles = std::min(TILES_AT_ONCE, split.tiles - t);
        long there = std::min(tiles * LANES, rows - t * LANES);
        long begun = COLUMNS * t / split.tiles, ended = COLUMNS * (t + tiles) / split.tiles;
        Ahead ahead{next ? next + begun * words : nullptr, next ? ended - begun : 0};
        (tiles == 1 ? tile<W, T, 1> : tile<W, T, TILES_AT_ONCE>)(arranged + t * LANES * words, weights,
                                                                 out.from(t * LANES, 0), there, words, ahead);
    }
    const long first = rows - split.left;
    for (long half = 0; split.left && half < COLUMNS; half += OF_DOTS) {
        const float *later = next && !split.tiles ? next + half * words : nullptr;
        dots_of<W>(split.left, x + first * words, weights + half * words, out.from(first, half), words, later);
    }
}

template <class T>
void linear_as_it_is(const T *given, const T *weight, const T *bias, T *to, float *space, long rows, long width,
                     long outputs, int threads) {
    const long words = width * long(sizeof(T)) / 4;
    const float *x = reinterpret_cast<const float *>(given), *w = reinterpret_cast<const float *>(weight);
    const Out<T> out{to, bias, outputs};
    const Split split(rows);
    split.arrange(x, space, rows, words);
#pragma omp parallel for num_threads(threads) if (rows * words * outputs > 16 * LEAST)
    for (long c = 0; c < outputs; c += COLUMNS) {
        const float *some = w + c * words, *next = c + COLUMNS < outputs ? some + COLUMNS * words : nullptr;
        some_columns<T>(x, space, some, out.from(0, c), split, rows, words, next);
    }
}

inline void widen(const bfloat16 *from, float *to, long count) {
#pragma omp simd
    for (long i = 0; i < count; i++) to[i] = wide(from[i]);
}

// With floats, to which some columns of weights are turned at a time.
inline void linear_in_floats(const bfloat16 *given, const bfloat16 *weight, const bfloat16 *bias, bfloat16 *to,
                             float *space, long rows, long width, long outputs, int threads) {
    const Out<bfloat16> out{to, bias, outputs};
    const Split split(rows);
    std::vector<float> x(rows * width);
    widen(given, x.data(), rows * width);
    split.arrange(x.data(), space, rows, width);
#pragma omp parallel num_threads(threads) if (rows * width * outputs > 32 * LEAST)
    {
        std::vector<float> some(COLUMNS * width);
#pragma omp for
        for (long c = 0; c < outputs; c += COLUMNS) {
            widen(weight + c * width, some.data(), COLUMNS * width);
            some_columns<float>(x.data(), space, some.data(), out.from(0, c), split, rows, width, nullptr);
        }
    }
}

#ifdef HFLOW_AMX
// By AMX: as many as 64 rows while weights are read once from memory, and from the cache for each 32.
inline void linear_by_amx(const bfloat16 *given, const bfloat16 *weight, const bfloat16 *bias, bfloat16 *to,
                          float *space, long rows, long width, long outputs, int threads) {
    const long words = width / 2, at_once = 2 * AMX_SIDE;
    const float *x = reinterpret_cast<const float *>(given), *w = reinterpret_cast<const float *>(weight);
    words_of_rows(x, space, rows, words);
#pragma omp parallel num_threads(threads) if (rows * words * outputs > 64 * LEAST)
    {
        const AmxTiles configured;
#pragma omp for
        for (long c = 0; c < outputs; c += at_once) {
            if (c + AMX_SIDE > outputs) continue;
            (c + at_once <= outputs ? multiply_rows<true> : multiply_rows<false>)(
                w + c * words, space, bias ? bias + c : nullptr, to + c, rows, words, outputs);
        }
    }
    if (outputs % AMX_SIDE == 0) return;
    const long last = outputs - AMX_SIDE;  // whose first outputs are made again
    const AmxTiles configured;
    multiply_rows<false>(w + last * words, space, bias ? bias + last : nullptr, to + last, rows, words, outputs);
}
#endif

// x weightᵀ + bias of x `[rows, width]` and a weight `[outputs, width]`: multiples of LINE and of COLUMNS.
// `space`: room for the rows once more as floats, filled up to whole tiles.
inline void linear(const float *x, const float *weight, const float *bias, float *to, float *space, long rows,
                   long width, long outputs, int threads) {
    linear_as_it_is(x, weight, bias, to, space, rows, width, outputs, threads);
}

inline void linear(const bfloat16 *x, const bfloat16 *weight, const bfloat16 *bias, bfloat16 *to, float *space,
                   long rows, long width, long outputs, int threads) {
#ifdef HFLOW_AMX
    if (rows >= AMX_PAYS && outputs >= AMX_SIDE && has_amx())
        return linear_by_amx(x, weight, bias, to, space, rows, width, outputs, threads);
#endif
    const bool is_direct = (HAS_BF16_PRODUCTS || rows < FLOATS_PAY) && width % (2 * LINE) == 0;
    (is_direct ? linear_as_it_is<bfloat16> : linear_in_floats)(x, weight, bias, to, space, rows, width, outputs,
                                                               threads);
}

}  // namespace hflow
