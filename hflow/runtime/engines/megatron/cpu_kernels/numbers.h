#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace hflow {

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

}  // namespace hflow
