// Rows of float32 or bfloat16 numbers of any length, as vectors of float32. The rest of a row is filled up with zeros
// and goes through the same operations. Included by the sources that are compiled once for each instruction set.
#pragma once

#include "vector.h"

namespace {

typedef uint16_t Halves __attribute__((vector_size(2 * W)));

// Calls work(i, count) for each whole vector, then for the rest.
template <class Work>
inline void by_vectors(int first, int end, Work work) {
  int i = first;
  for (; i + W <= end; i += W) work(i, W);
  if (i < end) work(i, end - i);
}

// The first `count` numbers, 1 .. W, then zeros.
template <class Cell>
inline Vec load_cells(const Cell* from, int count) {
#if defined(__AVX512F__)
  return as_floats(load_floats(from, count));
#else
  if (count == W) return as_floats(load_floats(from, W));
  Cell part[W] = {};
  memcpy(part, from, count * sizeof(Cell));
  return as_floats(load_floats(part, W));
#endif
}

// Rounds to nearest, ties to even. A NaN must come from bfloat16 numbers, so that rounding does not overflow it.
// Numbers below 2^-126 may become 0, as in AVX-512's instruction.
inline Halves upper_halves(Vec x) {
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh(x);
#else
  const Units y = (Units)x;
  return __builtin_convertvector((y + all(0x7fffu) + (y >> 16 & 1)) >> 16, Halves);
#endif
}

// Stores the first `count` numbers, 1 .. W.
inline void store_cells(float* to, Vec x, int count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), x);
#else
  if (count == W) return store(to, x);
  memcpy(to, &x, count * sizeof *to);
#endif
}
inline void store_cells(Bf16* to, Vec x, int count) {
  const Halves y = upper_halves(x);
#if defined(__AVX512F__)
  _mm256_mask_storeu_epi16(to, (__mmask16)((1u << count) - 1), (__m256i)y);
#else
  if (count == W) return store(to, y);
  memcpy(to, &y, count * sizeof *to);
#endif
}

// x rounded to a Cell.
template <class Cell>
inline Vec rounded_to(Vec x) {
  if constexpr (sizeof(Cell) == sizeof(float)) {
    return x;
  } else {
#if defined(__AVX512F__)
    return as_floats((Units)_mm512_cvtepu16_epi32((__m256i)upper_halves(x)) << 16);
#else
    const Units y = (Units)x;
    return as_floats((y + all(0x7fffu) + (y >> 16 & 1)) & all(0xffff0000u));
#endif
  }
}

}  // namespace
