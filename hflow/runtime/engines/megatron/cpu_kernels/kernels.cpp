// What `library.py` compiles: one pass over the memory for each operation, or two where the second finds it in
// the cache; torch makes one for every multiplication. Numbers are float32 (type 0) or bfloat16 (type 1) in
// memory and float32 in between. Nothing depends on the number of threads: the gradient of a norm's weight is
// summed over parts of the rows that are always the same.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct bfloat16 { uint16_t bits; };

inline float wide(float x) { return x; }

inline float wide(bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
}

inline void put(float &to, float x) { to = x; }

inline void put(bfloat16 &to, float x) {  // to the nearest, of two equally near ones to the even; NaN stays
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// exp, to about 2 units in the last place; 0 below -87.3, next to where it would lose digits, and infinite
// above 88. Written out so that compilers make vectors of it.
inline float exp_(float given) {
    float x = given < -87.3f ? -87.3f : given;  // NaN stays NaN: it is on neither side
    x = x > 88.0f ? 88.0f : x;
    float n = std::nearbyint(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts, of which the first is exact
    float p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    int32_t power = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &power, sizeof scale);
    float found = given > 88.0f ? INFINITY : p * scale;
    return given < -87.3f ? 0.0f : found;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_(-x)); }

const long LEAST = 1 << 16;  // numbers that are worth a second thread, which has to be woken
const long BLOCK = 32;       // rows whose gradients of a weight are summed before they go to that of a part
const long PART = 512;       // rows of a part
const long WORDS = 1024;     // of a vocabulary, summed in float32 before they go to the sum of all in float64

// The root mean square's inverse.
template <class T> inline float inverse_rms(const T *x, long width, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < width; i++) squares += wide(x[i]) * wide(x[i]);
    return 1.0f / std::sqrt(squares / width + eps);
}

template <class T>
void norm(const T *x, const T *weight, T *out, long rows, long width, float eps, float offset, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > LEAST)
    for (long row = 0; row < rows; row++) {
        const T *from = x + row * width;
        T *to = out + row * width;
        float inverse = inverse_rms(from, width, eps);
#pragma omp simd
        for (long i = 0; i < width; i++) put(to[i], wide(from[i]) * inverse * (offset + wide(weight[i])));
    }
}

// With n = x / rms(x) and y = w n: dw = sum(dy n), dx = (w dy - n mean(w dy n)) / rms(x).
template <class T>
void norm_gradient(const T *upstream, const T *x, const T *weight, T *to_x, float *to_weight, long rows,
                   long width, float eps, float offset, int threads) {
    long parts = (rows + PART - 1) / PART;
    std::vector<float> totals(parts * width, 0.0f);
#pragma omp parallel for num_threads(threads) if (rows * width > LEAST)
    for (long part = 0; part < parts; part++) {
        float *total = totals.data() + part * width;
        std::vector<float> block(width);
        long last = std::min((part + 1) * PART, rows);
        for (long first = part * PART; first < last; first += BLOCK) {
            std::fill(block.begin(), block.end(), 0.0f);
            float *sums = block.data();
            for (long row = first; row < std::min(first + BLOCK, last); row++) {
                const T *from = x + row * width, *above = upstream + row * width;
                T *to = to_x + row * width;
                float inverse = inverse_rms(from, width, eps), product = 0;
#pragma omp simd reduction(+ : product)
                for (long i = 0; i < width; i++)
                    product += wide(above[i]) * (offset + wide(weight[i])) * wide(from[i]);
                float mean = product * inverse / width;  // of w dy n
#pragma omp simd
                for (long i = 0; i < width; i++) {
                    float normed = wide(from[i]) * inverse, up = wide(above[i]);
                    put(to[i], (up * (offset + wide(weight[i])) - normed * mean) * inverse);
                    sums[i] += up * normed;
                }
            }
            for (long i = 0; i < width; i++) total[i] += sums[i];
        }
    }
    for (long i = 0; i < width; i++) {
        to_weight[i] = 0;
        for (long part = 0; part < parts; part++) to_weight[i] += totals[part * width + i];
    }
}

// An activation and its slope: silu, or gelu with tanh(z) = 2 sigmoid(2 z) - 1 in the place of the normal
// distribution.
template <bool GELU> inline void activation(float x, float &active, float &slope) {
    float inner = GELU ? 1.5957691216f * (x + 0.044715f * x * x * x) : x;
    float share = sigmoid(inner);
    float of_inner = GELU ? 1.5957691216f * (1.0f + 0.134145f * x * x) : 1.0f;
    active = x * share;
    slope = share + active * (1.0f - share) * of_inner;
}

template <class T, bool GELU> void gated(const T *x, T *out, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > LEAST)
    for (long row = 0; row < rows; row++) {
        const T *gate = x + row * 2 * width, *up = gate + width;
        T *to = out + row * width;
#pragma omp simd
        for (long i = 0; i < width; i++) {
            float active, slope;
            activation<GELU>(wide(gate[i]), active, slope);
            put(to[i], active * wide(up[i]));
        }
    }
}

template <class T, bool GELU>
void gated_gradient(const T *upstream, const T *x, T *out, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > LEAST)
    for (long row = 0; row < rows; row++) {
        const T *gate = x + row * 2 * width, *up = gate + width, *above = upstream + row * width;
        T *to_gate = out + row * 2 * width, *to_up = to_gate + width;
#pragma omp simd
        for (long i = 0; i < width; i++) {
            float active, slope;
            activation<GELU>(wide(gate[i]), active, slope);
            put(to_gate[i], wide(above[i]) * wide(up[i]) * slope);
            put(to_up[i], wide(above[i]) * active);
        }
    }
}

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

// Of z, a row of logits by the temperature: the greatest, the sum of exp z', and of z' exp z', where
// z' = z - greatest. A row with NaN or inf has a sum that is NaN.
template <class T, bool ENTROPY>
void softmax(const T *logits, float *greatest, float *totals, float *spreads, long rows, long width,
             float temperature, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > LEAST)
    for (long row = 0; row < rows; row++) {
        const T *from = logits + row * width;
        float top = -INFINITY;
        double total = 0, spread = 0;
#pragma omp simd reduction(max : top)
        for (long i = 0; i < width; i++) {
            float x = wide(from[i]);
            top = x > top ? x : top;
        }
        top /= temperature;
        float base = top == -INFINITY ? 0.0f : top;  // other words of the vocabulary may be elsewhere
        for (long first = 0; first < width; first += WORDS) {
            long last = std::min(first + WORDS, width);
            float added = 0, weighted = 0;
#pragma omp simd reduction(+ : added, weighted)
            for (long i = first; i < last; i++) {
                float z = wide(from[i]) / temperature - base, e = exp_(z);
                added += e;
                if (ENTROPY) weighted += z * e;
            }
            total += added;
            spread += weighted;
        }
        greatest[row] = top;
        totals[row] = float(total);
        spreads[row] = float(spread);
    }
}

// The gradient of the logits: (1[chosen] a - p (a + (log p + H) b)) / temperature, where a and b are those of
// log-prob and entropy H. `out` may be `logits`.
template <class T, bool ENTROPY>
void softmax_gradient(const T *logits, const float *log_totals, const float *to_log_prob,
                      const int64_t *columns, const bool *mine, const float *to_entropy, const float *entropy,
                      T *out, long rows, long width, float temperature, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > LEAST)
    for (long row = 0; row < rows; row++) {
        const T *from = logits + row * width;
        T *to = out + row * width;
        float log_total = log_totals[row], a = to_log_prob[row], inverse = 1.0f / temperature;
        float b = ENTROPY ? to_entropy[row] : 0.0f, uncertainty = ENTROPY ? entropy[row] : 0.0f;
        auto slope = [=](float x) {
            float log_p = x / temperature - log_total, p = exp_(log_p);
            return -p * (ENTROPY ? a + (log_p + uncertainty) * b : a) * inverse;
        };
        float chosen = mine[row] ? slope(wide(from[columns[row]])) + a * inverse : 0.0f;
#pragma omp simd
        for (long i = 0; i < width; i++) put(to[i], slope(wide(from[i])));
        if (mine[row]) put(to[columns[row]], chosen);
    }
}

}  // namespace

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
}
