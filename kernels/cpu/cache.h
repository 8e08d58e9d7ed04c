// A row of the cache: one head's key or value of one token, as it is or in int8 (kernels/cache_int8.py). Included by what
// writes rows.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr float SMALLEST = 1e-30f;     // as in kernels/cache_int8.py
constexpr float INTEGERS = 12582912.0f;  // 1.5 x 2^23: with it added, a small number is rounded, half to even

inline uint32_t bits_of(float x) {
  uint32_t y;
  memcpy(&y, &x, 4);
  return y;
}
inline float number(uint32_t x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
template <class T>
inline T larger_of(T a, T b) {
  return a > b ? a : b;
}
inline float widened(float x) { return x; }
inline float widened(uint16_t x) { return number((uint32_t)x << 16); }

// One row in int8 with its scale behind it.
template <class Number>
void quantise(const Number* from, int head_dim, char* to) {
  uint32_t most = 0;  // magnitudes are ordered as their bits are, infinity and NaN above all
  for (int i = 0; i < head_dim; i++) most = larger_of(most, bits_of(widened(from[i])) & 0x7fffffffu);
  const float largest = number(most), scale = largest / 127.0f;
  if (most < 0x7f800000u) {
    const float inverse = 127.0f / larger_of(largest, SMALLEST);
    for (int i = 0; i < head_dim; i++) to[i] = (char)bits_of(widened(from[i]) * inverse + INTEGERS);
  } else {
    memset(to, 0, head_dim);
  }
  memcpy(to + head_dim, &scale, 4);
}

template <class Number>
void write_row(const Number* from, int head_dim, bool int8, char* to) {
  if (int8) {
    quantise(from, head_dim, to);
  } else {
    memcpy(to, from, head_dim * sizeof(Number));
  }
}

}  // namespace
