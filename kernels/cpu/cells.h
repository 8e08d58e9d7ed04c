// Rows of float32 or bfloat16 numbers of any length, as vectors of float32. What is left at the end of a row goes through
// the same operations as all before it, with zeros behind. Included by the sources that are compiled once for each
// instruction set.
#pragma once

#include "vector.h"

namespace {

typedef uint16_t Halves __attribute__((vector_size(2 * W)));

// The first min(count, W) numbers, zeros behind.
template <class Cell>
inline Vec load_cells(const Cell* from, int count) {
  if (count >= W) return as_floats(load_floats(from, W));
  Cell part[W] = {};
  memcpy(part, from, count * sizeof(Cell));
  return as_floats(load_floats(part, W));
}

inline Halves upper_halves(Vec x) {  // to nearest, ties to even
  const Units y = (Units)x;
  return __builtin_convertvector((x == x ? y + all(0x7fffu) + (y >> 16 & 1) : all(0x7fc00000u)) >> 16, Halves);
}

// Stores the first min(count, W) numbers.
inline void store_cells(float* to, Vec x, int count) {
  if (count >= W) return store(to, x);
  memcpy(to, &x, count * sizeof *to);
}
inline void store_cells(Bf16* to, Vec x, int count) {
  const Halves y = upper_halves(x);
  if (count >= W) return store(to, y);
  memcpy(to, &y, count * sizeof *to);
}

// x as a Cell holds it.
template <class Cell>
inline Vec rounded_to(Vec x) {
  if constexpr (sizeof(Cell) == sizeof(float)) {
    return x;
  } else {
    return as_floats(__builtin_convertvector(upper_halves(x), Units) << 16);
  }
}

}  // namespace
