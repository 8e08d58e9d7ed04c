// Sigmoids of float32 vectors. Included by the sources that are compiled once for each instruction set.
#pragma once

#include "cells.h"

namespace {

// e^x for x <= 0, exactly 0 below -87, NaN for NaN; relative error 1e-7.
inline Vec exp_negative(Vec x) {
  const Vec clamped = larger(all(-87.0f), x), magic = all(12582912.0f);  // 1.5 x 2^23: see power_of_2
  const Vec shifted = fma(clamped, all(1.44269504f), magic);
  const Vec whole = shifted - magic;
  Vec rest = fma(whole, all(-0.693359375f), clamped);  // log 2 in two parts, the first with few bits
  rest = fma(whole, all(2.12194440e-4f), rest);
  Vec y = fma(all(1.0f / 5040), rest, all(1.0f / 720));  // Taylor's series; |rest| <= log(2) / 2
  y = fma(y, rest, all(1.0f / 120));
  y = fma(y, rest, all(1.0f / 24));
  y = fma(y, rest, all(1.0f / 6));
  y = fma(y, rest, all(0.5f));
  y = fma(y, rest, all(1.0f));
  y = fma(y, rest, all(1.0f));
  const Units power = ((Units)shifted << 23) + all(0x3f800000u);
  return x < all(-87.0f) ? Vec{} : y * as_floats(power);
}

// x / (1 + e^-y); with a relative error of 1e-5 if Cell has no more precision.
template <class Cell>
inline Vec gated(Vec x, Vec y) {
  if constexpr (sizeof(Cell) < sizeof(float)) return x / (all(1.0f) + rough_power_of_2(y * all(-1.44269504f)));
  const Vec power = exp_negative(y < -y ? y : -y), one = all(1.0f);
  return x * (y < Vec{} ? power : one) / (one + power);
}

}  // namespace
