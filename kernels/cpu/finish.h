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

template <class AnyProduct, class Sum>
Vec with_bias(const AnyProduct& p, int row, int column, Sum sum) {
  const Vec y = finished(p, row, column, sum);
  return p.bias == nullptr ? y : y + load<Vec>(p.bias + column);
}

// Stores the sums of one row and one vector of columns in y.
template <class AnyProduct, class Sum>
void finish(const AnyProduct& p, int row, int column, Sum sum) {
  const int count = p.outputs - column < W ? p.outputs - column : W;
  if (count <= 0) return;
  const Vec y = with_bias(p, row, column, sum);
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

// The same for two neighbouring vectors of columns. In bfloat16 they are one vector, stored without a mask, which takes longer.
template <class AnyProduct, class Sum>
void finish_two(const AnyProduct& p, int row, int column, Sum first, Sum second) {
#if defined(__AVX512BF16__)
  if (p.y_bf16 && column + 2 * W <= p.outputs) {
    const Vec low = with_bias(p, row, column, first), high = with_bias(p, row, column + W, second);
    store((Bf16*)p.y + row * p.y_row + column, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    return;
  }
#endif
  finish(p, row, column, first);
  finish(p, row, column + W, second);
}

}  // namespace
