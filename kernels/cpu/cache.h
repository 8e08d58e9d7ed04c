// Rows of the cache: one head's key or value of one token, unchanged or in int8 (kernels/cache_int8.py). Included by
// rows.cpp, which writes them.
#pragma once

#include "vector.h"

namespace {

constexpr float SMALLEST = 1e-30f;     // as in kernels/cache_int8.py
constexpr float INTEGERS = 12582912.0f;  // 1.5 x 2^23: adding it rounds a small number, half to even

template <class T>
inline T larger_of(T a, T b) {
  return a > b ? a : b;
}

// One row in int8, followed by its scale.
template <class Number>
void quantise(const Number* from, int head_dim, char* to) {
  uint32_t most = 0;  // magnitudes have the order of their bits, infinity and NaN last
  for (int i = 0; i < head_dim; i++) most = larger_of(most, bits(widened(from[i])) & 0x7fffffffu);
  const float largest = from_bits(most), scale = largest / 127.0f;
  if (most < 0x7f800000u) {
    const float inverse = 127.0f / larger_of(largest, SMALLEST);
    for (int i = 0; i < head_dim; i++) to[i] = (char)bits(widened(from[i]) * inverse + INTEGERS);
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
