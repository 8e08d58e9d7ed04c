// The few vector operations that attention needs, for each instruction set. Each is written so that the bits of a lane
// depend on that lane's inputs alone. Included by attend.cpp only; the compiler's flags decide which part is taken.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;  // float32 lanes of a vector
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Units __attribute__((vector_size(4 * W)));  // float32 numbers or pairs of bfloat16, as bits

template <class Vector, class Pointer>
inline Vector load(const Pointer* from) {
  Vector x;
  memcpy(&x, from, sizeof x);
  return x;
}

template <class Vector, class Pointer>
inline void store(Pointer* to, Vector x) {
  memcpy(to, &x, sizeof x);
}

inline Vec all(float x) { return Vec{} + x; }
inline Units all(uint32_t x) { return Units{} + x; }
inline Vec as_floats(Units x) { return (Vec)x; }

// Lanes 0, 1, 2, ...
inline Ints lanes() {
  Ints x;
  for (int i = 0; i < W; i++) x[i] = i;
  return x;
}

// a * b + c; rounded once wherever the instruction exists.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_FEATURE_FMA)
  for (int i = 0; i < W; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

// The larger of two; b where either is NaN.
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline float sum(Vec x) {
  float parts[W];
  store(parts, x);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) parts[i] += parts[i + half];
  return parts[0];
}

inline float largest(Vec x) {
  float parts[W];
  store(parts, x);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) parts[i] = parts[i] > parts[i + half] ? parts[i] : parts[i + half];
  return parts[0];
}

// e^x for x <= 0, exactly 0 below -87, NaN for NaN. Cephes' expf: the error is below 2 units in the last place.
inline Vec exp_of(Vec x) {
  const Vec clamped = larger(all(-87.0f), x);
  const Vec shifted = fma(clamped, all(1.44269504088896341f), all(12582912.0f));  // the integer in the low bits
  const Vec whole = shifted - all(12582912.0f);
  Vec rest = fma(whole, all(-0.693359375f), clamped);
  rest = fma(whole, all(2.12194440e-4f), rest);
  Vec y = all(1.9875691500e-4f);
  y = fma(y, rest, all(1.3981999507e-3f));
  y = fma(y, rest, all(8.3334519073e-3f));
  y = fma(y, rest, all(4.1665795894e-2f));
  y = fma(y, rest, all(1.6666665459e-1f));
  y = fma(y, rest, all(5.0000001201e-1f));
  y = fma(y, rest * rest, rest + all(1.0f));
  const Units power = ((Units)shifted << 23) + all(0x3f800000u);
  return x < all(-87.0f) ? Vec{} : y * as_floats(power);
}

// Interleaves two vectors: low = a0 b0 a1 b1 ..., high = the rest.
inline void zip(Units a, Units b, Units& low, Units& high) {
#if defined(__AVX512F__)
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  low = (Units)_mm512_permutex2var_epi32((__m512i)a, first, (__m512i)b);
  high = (Units)_mm512_permutex2var_epi32((__m512i)a, second, (__m512i)b);
#elif defined(__AVX2__)
  const __m256i even = _mm256_unpacklo_epi32((__m256i)a, (__m256i)b);
  const __m256i odd = _mm256_unpackhi_epi32((__m256i)a, (__m256i)b);
  low = (Units)_mm256_permute2x128_si256(even, odd, 0x20);
  high = (Units)_mm256_permute2x128_si256(even, odd, 0x31);
#else
  low = Units{a[0], b[0], a[1], b[1]};
  high = Units{a[2], b[2], a[3], b[3]};
#endif
}

// Turns a square of W x W units: afterwards lane j of vector i is what lane i of vector j was.
inline void transpose(Units (&square)[W]) {
  for (int stage = 1; stage < W; stage *= 2) {
    Units next[W];
    for (int i = 0; i < W / 2; i++) zip(square[i], square[i + W / 2], next[2 * i], next[2 * i + 1]);
    for (int i = 0; i < W; i++) square[i] = next[i];
  }
}

// bfloat16 is the upper half of a float32.
typedef uint16_t Bf16;

inline uint32_t bits(float x) {
  uint32_t y;
  memcpy(&y, &x, 4);
  return y;
}

inline Bf16 rounded(float x) {  // to nearest, ties to even
  const uint32_t y = bits(x);
  return x != x ? 0x7fc0 : (y + 0x7fff + ((y >> 16) & 1)) >> 16;
}

// `count` (at most W) numbers as float32 bits, zeros behind.
inline Units load_floats(const float* from, int count) {
#if defined(__AVX512F__)
  return (Units)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#else
  if (count >= W) return load<Units>(from);
  Units x = {};
  memcpy(&x, from, 4 * count);
  return x;
#endif
}

// The same, of bfloat16 numbers, in the lower halves.
inline Units load_halves(const Bf16* from, int count) {
#if defined(__AVX512F__)
  return (Units)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), from));
#else
  uint16_t parts[W] = {};
  memcpy(parts, from, 2 * (count < W ? count : W));
#if defined(__AVX2__)
  return (Units)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)parts));
#else
  Units x;
  for (int i = 0; i < W; i++) x[i] = parts[i];
  return x;
#endif
#endif
}

inline Units load_floats(const Bf16* from, int count) { return load_halves(from, count) << 16; }

}  // namespace
