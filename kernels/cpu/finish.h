// Turns the sums of a product into its results: scales, bias, rounding. Included by the inner loops of each instruction
// set.
#pragma once

#include "grouped.h"
#include "linear.h"
#include "vector.h"

namespace {

inline Vec finished(const GroupedProduct&, int, int, Vec sum) { return sum; }
inline Vec finished(const Product&, int, int, Vec sum) { return sum; }
inline Vec finished(const Product& p, int row, int column, Ints sum) {
  const Ints whole = sum + load<Ints>(p.start + column);
  return __builtin_convertvector(whole, Vec) * load<Vec>(p.weight_scale + column) * all(p.x_scale[row]);
}

inline void store_rounded(Bf16* to, Vec x, int count) {
#if defined(__AVX512BF16__)
  _mm256_mask_storeu_epi16(to, (__mmask16)((1u << count) - 1), (__m256i)_mm512_cvtneps_pbh(x));
#else
  for (int i = 0; i < count; i++) to[i] = rounded(x[i]);
#endif
}

// Stores the sums of one row and one vector of columns in y.
template <class AnyProduct, class Sum>
void finish(const AnyProduct& p, int row, int column, Sum sum) {
  const int count = p.outputs - column < W ? p.outputs - column : W;
  if (count <= 0) return;
  Vec y = finished(p, row, column, sum);
  if (p.bias != nullptr) y += load<Vec>(p.bias + column);
  if (p.y_bf16) {
    store_rounded((Bf16*)p.y + row * p.y_row + column, y, count);
  } else {
    float* const to = (float*)p.y + row * p.y_row + column;
    if (count == W)
      store(to, y);
    else
      memcpy(to, &y, 4 * count);  // calls a function, because its size is not constant
  }
}

}  // namespace
