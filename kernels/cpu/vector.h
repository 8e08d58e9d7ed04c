// The vector operations that the kernels need, for each instruction set. The bits of a lane depend on that lane's
// inputs alone. Included by the files that are compiled once for each instruction set; the compiler's flags choose the
// part.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Names that belong to one instruction set: JOIN(scan, VARIANT) is scan_avx2.
#ifndef VARIANT
#define VARIANT baseline
#endif
#define JOIN_(name, variant) name##_##variant
#define JOIN(name, variant) JOIN_(name, variant)

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
typedef int16_t Shorts __attribute__((vector_size(4 * W)));

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

inline Vec all(float x) { return x - Vec{}; }  // x + 0 would be an instruction, because it turns -0 into 0
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

// The sum of the products of each two neighbours.
inline Ints multiply_pairs(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const Ints x = (Ints)a, y = (Ints)b;
  return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

// The larger of two; b where either is NaN.
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline float sum(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(x);
#else
  float parts[W];
  store(parts, x);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) parts[i] += parts[i + half];
  return parts[0];
#endif
}

inline float largest(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(x);
#else
  float parts[W];
  store(parts, x);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) parts[i] = parts[i] > parts[i + half] ? parts[i] : parts[i + half];
  return parts[0];
#endif
}

// 2^x for |x| <= 1/2, by a near-minimax polynomial. Relative error: 1e-7 for degree 6, 3e-6 for degree 4.
template <int DEGREE>
inline Vec fraction_power_of_2(Vec x) {
  Vec y;
  if constexpr (DEGREE == 6) {
    y = fma(all(1.535336181e-4f), x, all(1.339887445e-3f));
    y = fma(y, x, all(9.618437358e-3f));
    y = fma(y, x, all(5.550332471e-2f));
    y = fma(y, x, all(2.402264791e-1f));
    y = fma(y, x, all(6.931472029e-1f));
  } else {
    y = fma(all(9.582852867e-3f), x, all(5.590642492e-2f));
    y = fma(y, x, all(2.402409862e-1f));
    y = fma(y, x, all(6.931241934e-1f));
  }
  return fma(y, x, all(1.0f));
}

// 2^x for -127 <= x <= 128, whose ends give 0 and infinity, and NaN for NaN. The degree decides the relative error.
template <int DEGREE>
inline Vec power_of_2_in_range(Vec x) {
  const Vec shifted = x + all(12582912.0f);  // 1.5 x 2^23: the nearest integer, in the low bits
  const Units power = ((Units)shifted << 23) + all(0x3f800000u);
  return fraction_power_of_2<DEGREE>(x - (shifted - all(12582912.0f))) * as_floats(power);
}

// 2^x for x <= 0, exactly 0 below -125, NaN for NaN.
template <int DEGREE>
inline Vec power_of_2(Vec x) {
  const Vec power = power_of_2_in_range<DEGREE>(larger(all(-125.0f), x));
  return x < all(-125.0f) ? Vec{} : power;
}

// The same in fewer instructions where there are some for it.
template <int DEGREE>
inline Vec quick_power_of_2(Vec x) {
#if defined(__AVX512DQ__)
  const __mmask16 kept = _mm512_cmp_ps_mask(x, all(-125.0f), _CMP_NLT_UQ);  // NaN too
  return _mm512_maskz_scalef_ps(kept, fraction_power_of_2<DEGREE>(_mm512_reduce_ps(x, 0)), _mm512_roundscale_ps(x, 0));
#else
  return power_of_2<DEGREE>(x);
#endif
}

// 2^x for any x with a relative error of 3e-6, NaN for NaN. 0 and infinity may start one power of 2 too early.
inline Vec rough_power_of_2(Vec x) {
#if defined(__AVX512DQ__)
  return _mm512_scalef_ps(fraction_power_of_2<4>(_mm512_reduce_ps(x, 0)), _mm512_roundscale_ps(x, 0));
#else
  const Vec above = larger(all(-127.0f), x);
  return power_of_2_in_range<4>(above > all(128.0f) ? all(128.0f) : above);
#endif
}

// bfloat16 is the upper half of a float32.
typedef uint16_t Bf16;

inline uint32_t bits(float x) {
  uint32_t y;
  memcpy(&y, &x, 4);
  return y;
}
inline float from_bits(uint32_t x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}

inline float widened(float x) { return x; }
inline float widened(Bf16 x) { return from_bits((uint32_t)x << 16); }

inline Bf16 rounded(float x) {  // to nearest, ties to even
  const uint32_t y = bits(x);
  return x != x ? 0x7fc0 : (y + 0x7fff + ((y >> 16) & 1)) >> 16;
}

// The first `count` numbers as float32 bits, then zeros. head_dim is a multiple of 8, so only vectors of 16 lanes can
// be partial.
inline Units load_floats(const float* from, [[maybe_unused]] int count) {
#if defined(__AVX512F__)
  return (Units)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#else
  return load<Units>(from);
#endif
}

// The same for bfloat16 numbers, in the lower halves.
inline Units load_halves(const Bf16* from, [[maybe_unused]] int count) {
#if defined(__AVX512F__)
  return (Units)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), from));
#elif defined(__AVX2__)
  return (Units)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
  Units x;
  for (int i = 0; i < W; i++) x[i] = from[i];
  return x;
#endif
}

inline Units load_floats(const Bf16* from, int count) { return load_halves(from, count) << 16; }

// The same for int8 numbers, which bfloat16 holds exactly: the lower halves are 0.
inline Units load_floats(const int8_t* from, [[maybe_unused]] int count) {
#if defined(__AVX512F__)
  const __m128i numbers = _mm_maskz_loadu_epi8((__mmask16)((1u << count) - 1), from);
  return (Units)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(numbers));
#elif defined(__AVX2__)
  return (Units)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  Vec x;
  for (int i = 0; i < W; i++) x[i] = from[i];
  return (Units)x;
#endif
}

// The int8 number at `index` of the four in each lane, as float32.
inline Units number_of_four(Units x, int index) {
  return (Units)__builtin_convertvector((Ints)(x << (24 - 8 * index)) >> 24, Vec);
}

// Four units: float32 numbers, bfloat16 numbers widened to float32, or pairs of bfloat16 numbers.
typedef uint32_t Four __attribute__((vector_size(16)));

inline Four load_four(const float* from) { return load<Four>(from); }
inline Four load_four(const Bf16* from) {
#if defined(__AVX2__)
  return (Four)_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)from)) << 16;
#else
  return Four{from[0], from[1], from[2], from[3]} << 16;
#endif
}

// 16 int8 numbers of a row, or 8 and zeros.
template <int COUNT>
inline Four load_bytes(const int8_t* from) {
  Four x = {};
  memcpy(&x, from, COUNT);
  return x;
}

// Low and high halves of each 128 bits, interleaved by 32 or 64 bits.
inline void interleave_32(Units a, Units b, Units& low, Units& high) {
#if defined(__AVX512F__)
  low = (Units)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b);
  high = (Units)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  low = (Units)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b);
  high = (Units)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b);
#else
  low = Units{a[0], b[0], a[1], b[1]};
  high = Units{a[2], b[2], a[3], b[3]};
#endif
}
inline void interleave_64(Units a, Units b, Units& low, Units& high) {
#if defined(__AVX512F__)
  low = (Units)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b);
  high = (Units)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  low = (Units)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b);
  high = (Units)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
#else
  low = Units{a[0], a[1], b[0], b[1]};
  high = Units{a[2], a[3], b[2], b[3]};
#endif
}

// Transposes four units of each of W rows: lane i of turned[k] is unit k of row i. four(i): the units of row i.
template <class Find>
inline void turn(Find four, Units (&turned)[4]) {
  Units mixed[4], half[4];  // mixed[i]: rows i, i + 4, i + 8, ...
  for (int i = 0; i < 4; i++) {
#if defined(__AVX512F__)
    __m512i x = _mm512_zextsi128_si512((__m128i)four(i));
    x = _mm512_mask_broadcast_i32x4(x, 0x00f0, (__m128i)four(i + 4));
    x = _mm512_mask_broadcast_i32x4(x, 0x0f00, (__m128i)four(i + 8));
    mixed[i] = (Units)_mm512_mask_broadcast_i32x4(x, 0xf000, (__m128i)four(i + 12));
#elif defined(__AVX2__)
    mixed[i] = (Units)_mm256_set_m128i((__m128i)four(i + 4), (__m128i)four(i));
#else
    mixed[i] = four(i);
#endif
  }
  interleave_32(mixed[0], mixed[1], half[0], half[1]);
  interleave_32(mixed[2], mixed[3], half[2], half[3]);
  interleave_64(half[0], half[2], turned[0], turned[1]);
  interleave_64(half[1], half[3], turned[2], turned[3]);
}

}  // namespace
