#pragma once

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HFLOW_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace hflow {

// Products of bfloat16 by a processor's matrix unit, AMX: a tile of 16 weights' rows by one of 16 rows of x, 32
// numbers of each, in one instruction. The unit has eight tiles: four of sums, two of weights, two of x.

const long AMX_SIDE = 16;  // rows of a tile, and words of 32 bits in each: pairs of numbers, or sums

#ifdef HFLOW_AMX

// Whether Linux lets this process use the tiles, which make what it keeps of a thread 8 KiB larger.
inline bool has_amx() {
    const long REQUEST = 0x1023, TILES = 18;
    static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
    return granted;
}

// Compilers do not know that instructions for tiles read what pointers point to: here all of it is written.
inline void settle(const void *memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

// All tiles of this thread are 16 rows of 64 bytes, for as long as this lives.
struct AmxTiles {
    AmxTiles() {
        struct {
            uint8_t palette = 1, first_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } form;
        settle(&form);
        _tile_loadconfig(&form);
    }
    ~AmxTiles() { _tile_release(); }
    AmxTiles(const AmxTiles &) = delete;
};

inline long whole_tiles(long count) { return (count + AMX_SIDE - 1) / AMX_SIDE * AMX_SIDE; }

// Of each 16 rows one word after the other of all of them, filled up with zeros to whole tiles.
inline void words_of_rows(const float *x, float *to, long rows, long words) {
    const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i places = _mm512_mullo_epi32(numbers, _mm512_set1_epi32(int(words)));
    for (long first = 0; first < rows; first += AMX_SIDE) {
        const __mmask16 there = __mmask16((1 << std::min(AMX_SIDE, rows - first)) - 1);
        const float *some = x + first * words;
        for (long i = 0; i < words; i++, to += AMX_SIDE)
            _mm512_storeu_ps(to, _mm512_mask_i32gather_ps(_mm512_setzero_ps(), there, places, some + i, 4));
        const long filling = AMX_SIDE * (whole_tiles(words) - words);
        std::fill(to, to + filling, 0.0f);
        to += filling;
    }
}

// Sums of one tile, ``[output][row]``, to `rows` rows of `out`, ``[row][outputs]``.
inline void put_tile(const float *sums, const bfloat16 *bias, bfloat16 *out, long rows, long outputs) {
    __m512i pairs[8], fours[8];  // of neighbouring outputs, for all rows
    uint32_t made[8][AMX_SIDE];
    for (long p = 0; p < 8; p++) {
        __m512 first = _mm512_loadu_ps(sums + 2 * p * AMX_SIDE);
        __m512 second = _mm512_loadu_ps(sums + (2 * p + 1) * AMX_SIDE);
        if (bias) {
            first = _mm512_add_ps(first, _mm512_set1_ps(wide(bias[2 * p])));
            second = _mm512_add_ps(second, _mm512_set1_ps(wide(bias[2 * p + 1])));
        }
        const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
        const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second));
        pairs[p] = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
    for (long p = 0; p < 8; p += 2) {
        fours[p] = _mm512_unpacklo_epi32(pairs[p], pairs[p + 1]);
        fours[p + 1] = _mm512_unpackhi_epi32(pairs[p], pairs[p + 1]);
    }
    // made[half * 4 + row % 4]: eight outputs of each fourth row, one row after the other
    for (long half = 0; half < 8; half += 4)
        for (long p = half; p < half + 2; p++) {
            _mm512_storeu_si512(made[2 * p - half], _mm512_unpacklo_epi64(fours[p], fours[p + 2]));
            _mm512_storeu_si512(made[2 * p - half + 1], _mm512_unpackhi_epi64(fours[p], fours[p + 2]));
        }
    for (long row = 0; row < rows; row++)
        for (long half = 0; half < 2; half++)
            std::memcpy(out + row * outputs + 8 * half, &made[4 * half + row % 4][row / 4 * 4], 16);
}

// A tile of `count` words of 16 rows, which are `apart`: `from`, or where rows end before a tile does a copy in
// `filled` with zeros behind them.
inline const float *whole_tile(const float *from, long apart, long count, float *filled) {
    if (count == AMX_SIDE) return from;
    for (long row = 0; row < AMX_SIDE; row++)
        for (long i = 0; i < AMX_SIDE; i++) filled[row * AMX_SIDE + i] = i < count ? from[row * apart + i] : 0;
    settle(filled);
    return filled;
}

// One or two tiles of weights by one or two of x, which is as `words_of_rows` puts it.
template <bool TWO_OF_WEIGHTS, bool TWO_OF_X>
inline void multiply_tiles(const float *weights, const float *x, const bfloat16 *bias, bfloat16 *out, long rows,
                           long words, long outputs) {
    const float *more_weights = weights + AMX_SIDE * words, *more_x = x + AMX_SIDE * whole_tiles(words);
    float filled[2][AMX_SIDE * AMX_SIDE];
    settle(x);
    _tile_zero(0);
    if (TWO_OF_X) _tile_zero(1);
    if (TWO_OF_WEIGHTS) _tile_zero(2);
    if (TWO_OF_WEIGHTS && TWO_OF_X) _tile_zero(3);
    for (long i = 0; i < words; i += AMX_SIDE) {
        const long count = std::min(AMX_SIDE, words - i), apart = 4 * (count < AMX_SIDE ? AMX_SIDE : words);
        _tile_loadd(4, whole_tile(weights + i, words, count, filled[0]), apart);
        _tile_loadd(6, x + i * AMX_SIDE, 4 * AMX_SIDE);
        _tile_dpbf16ps(0, 4, 6);
        if (TWO_OF_X) _tile_loadd(7, more_x + i * AMX_SIDE, 4 * AMX_SIDE);
        if (TWO_OF_X) _tile_dpbf16ps(1, 4, 7);
        if (TWO_OF_WEIGHTS) _tile_loadd(5, whole_tile(more_weights + i, words, count, filled[1]), apart);
        if (TWO_OF_WEIGHTS) _tile_dpbf16ps(2, 5, 6);
        if (TWO_OF_WEIGHTS && TWO_OF_X) _tile_dpbf16ps(3, 5, 7);
    }
    float sums[4][AMX_SIDE * AMX_SIDE];
    _tile_stored(0, sums[0], 4 * AMX_SIDE);
    if (TWO_OF_X) _tile_stored(1, sums[1], 4 * AMX_SIDE);
    if (TWO_OF_WEIGHTS) _tile_stored(2, sums[2], 4 * AMX_SIDE);
    if (TWO_OF_WEIGHTS && TWO_OF_X) _tile_stored(3, sums[3], 4 * AMX_SIDE);
    for (long w = 0; w <= TWO_OF_WEIGHTS; w++)
        for (long t = 0; t <= TWO_OF_X; t++)
            put_tile(sums[2 * w + t], bias ? bias + w * AMX_SIDE : nullptr,
                     out + t * AMX_SIDE * outputs + w * AMX_SIDE, std::min(AMX_SIDE, rows - t * AMX_SIDE), outputs);
}

// One or two tiles of weights by all rows of x.
template <bool TWO_OF_WEIGHTS>
inline void multiply_rows(const float *weights, const float *x, const bfloat16 *bias, bfloat16 *out, long rows,
                          long words, long outputs) {
    for (long row = 0; row < rows; row += 2 * AMX_SIDE) {
        const long left = std::min(2 * AMX_SIDE, rows - row);
        (left > AMX_SIDE ? multiply_tiles<TWO_OF_WEIGHTS, true> : multiply_tiles<TWO_OF_WEIGHTS, false>)(
            weights, x + row * whole_tiles(words), bias, out + row * outputs, left, words, outputs);
    }
}

#endif

}  // namespace hflow
