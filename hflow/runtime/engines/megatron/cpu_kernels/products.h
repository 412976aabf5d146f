#pragma once

#include <algorithm>

#include "lanes.h"

namespace hflow {

// Products of matrices that are in the nearer caches: of some rows with some terms each, and of terms with
// columns that are whole registers.

const long TILE_ROWS = 6, TILE_LANES = LANES == 16 ? 4 : 2;  // whose sums fill the registers

// The left factor: its rows and its terms are so many numbers apart.
struct Left {
    const float *at;
    long of_row, of_term;
};

// Numbers whose rows are so far apart.
template <class T> struct Rows {
    T *at;
    long of_row;

    Rows from(long row, long column = 0) const { return {at + row * of_row + column, of_row}; }
};

template <bool ADD, long ROWS, long VECTORS>
inline void product_tile(Left a, Rows<const float> b, Rows<float> to, long terms) {
    Lanes sums[ROWS][VECTORS] = {};
    for (long term = 0; term < terms; term++) {
        Lanes some[VECTORS];
        for (long v = 0; v < VECTORS; v++) some[v] = load(b.at + term * b.of_row + v * LANES);
        for (long row = 0; row < ROWS; row++) {
            Lanes of_row = everywhere(a.at[row * a.of_row + term * a.of_term]);
            for (long v = 0; v < VECTORS; v++) sums[row][v] += of_row * some[v];
        }
    }
    for (long row = 0; row < ROWS; row++)
        for (long v = 0; v < VECTORS; v++) {
            float *at = to.at + row * to.of_row + v * LANES;
            store(at, ADD ? load(at) + sums[row][v] : sums[row][v]);
        }
}

template <bool ADD, long VECTORS>
inline void product_of_columns(Left a, Rows<const float> b, Rows<float> to, long rows, long terms) {
    long row = 0;
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS)
        product_tile<ADD, TILE_ROWS, VECTORS>({a.at + row * a.of_row, a.of_row, a.of_term}, b, to.from(row),
                                              terms);
    a.at += row * a.of_row, to = to.from(row);
    switch (rows - row) {
    case 5: return product_tile<ADD, 5, VECTORS>(a, b, to, terms);
    case 4: return product_tile<ADD, 4, VECTORS>(a, b, to, terms);
    case 3: return product_tile<ADD, 3, VECTORS>(a, b, to, terms);
    case 2: return product_tile<ADD, 2, VECTORS>(a, b, to, terms);
    case 1: return product_tile<ADD, 1, VECTORS>(a, b, to, terms);
    }
}

// a b, or what was there and a b. `columns`: a multiple of LANES.
template <bool ADD>
void multiply(Left a, Rows<const float> b, Rows<float> to, long rows, long columns, long terms) {
    long column = 0;
    for (; column + TILE_LANES * LANES <= columns; column += TILE_LANES * LANES)
        product_of_columns<ADD, TILE_LANES>(a, b.from(0, column), to.from(0, column), rows, terms);
    b = b.from(0, column), to = to.from(0, column);
    switch ((columns - column) / LANES) {
    case 3: return product_of_columns<ADD, 3>(a, b, to, rows, terms);
    case 2: return product_of_columns<ADD, 2>(a, b, to, rows, terms);
    case 1: return product_of_columns<ADD, 1>(a, b, to, rows, terms);
    }
}

}  // namespace hflow
