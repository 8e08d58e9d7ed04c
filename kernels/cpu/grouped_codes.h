// How the inner loops of grouped.cpp turn codes of 4 or 8 bits into what they multiply, and scales into float32. Included by
// that file for each instruction set, and by tables.cpp.
#pragma once

#include "grouped.h"
#include "vector.h"

namespace {

// float16 numbers as float32; not infinity and NaN.
inline Vec load_half(const uint16_t* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
  const Units bits = load_halves(from, W);
  const Vec magnitude = as_floats((bits & all(0x7fffu)) << 13) * all(0x1p112f);
  return as_floats((Units)magnitude | (bits & all(0x8000u)) << 16);
#endif
}

// float8_e4m3fn numbers in the upper 8 bits of each lane as float32; not NaN.
inline Vec from_e4m3(Units upper) {
  return as_floats((Units)((Ints)upper >> 4) & all(0x87f00000u)) * all(0x1p120f);
}

// float8_e8m0fnu numbers in the lowest 8 bits of each lane as float32.
inline Vec from_e8m0(Units exponent) {
  const Units number = exponent == all(0u) ? all(0x00400000u) : exponent << 23;  // 2^-127 has no leading one
  return as_floats(exponent == all(255u) ? all(0x7fc00000u) : number);
}

// One byte in each lane.
inline Units load_bytes_apart(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Units)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Units)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  Units x;
  for (int i = 0; i < W; i++) x[i] = from[i];
  return x;
#endif
}

inline Vec load_scale(const void* from, ScaleType type, int64_t index) {
  switch (type) {
    case SCALE_FLOAT16: return load_half((const uint16_t*)from + index);
    case SCALE_BFLOAT16: return as_floats(load_floats((const Bf16*)from + index, W));
    case SCALE_E8M0: return from_e8m0(load_bytes_apart((const uint8_t*)from + index));
    case SCALE_E4M3: return from_e4m3(load_bytes_apart((const uint8_t*)from + index) << 24);
    default: return load<Vec>((const float*)from + index);
  }
}

inline Vec whole_as_floats(Units x) { return __builtin_convertvector((Ints)x, Vec); }

// Codes whose numbers are multiplied one by one, as float32.
struct OneByOne {
  static Vec multiply(Vec weight, const float* x, Vec sum) { return fma(weight, all(*x), sum); }
};

// Codes that are numbers. All but the last of a unit keep their place, which multiplies them with a power of 2; the input
// has been divided by it.
template <int BITS>
struct Numbers : OneByOne {
  static constexpr int COUNT = 32 / BITS, STEPS = COUNT;
  static constexpr float MIDDLE = 1 << (BITS - 1);
  struct Unit {
    Units value;
    Unit(const GroupedProduct&, const uint32_t* from) : value(load<Units>(from)) {}
    template <int PLACE>
    Vec number() const {
      if constexpr (PLACE == COUNT - 1) return whole_as_floats(value >> (32 - BITS));
      return whole_as_floats(value & all(((1u << BITS) - 1) << (BITS * PLACE)));
    }
  };
  static float scale(int place) { return place == COUNT - 1 ? 1.0f : 1.0f / (float)(1u << (BITS * place)); }
};

// Codes that are indices.
struct Indices : OneByOne {
  static constexpr int COUNT = 8, STEPS = COUNT;
  static constexpr float MIDDLE = 0;
  struct Unit {
    Units value;
#if defined(__AVX512F__)
    Vec table;
    Unit(const GroupedProduct& p, const uint32_t* from) : value(load<Units>(from)), table(load<Vec>(p.table)) {}
#elif defined(__AVX2__)
    Vec low, high;
    Unit(const GroupedProduct& p, const uint32_t* from)
        : value(load<Units>(from)), low(load<Vec>(p.table)), high(load<Vec>(p.table + 8)) {}
#else
    const float* table;
    Unit(const GroupedProduct& p, const uint32_t* from) : value(load<Units>(from)), table(p.table) {}
#endif
    template <int PLACE>
    Vec number() const {
#if defined(__AVX512F__)
      return _mm512_permutexvar_ps((__m512i)(value >> (4 * PLACE)), table);
#elif defined(__AVX2__)
      const __m256i index = (__m256i)(value >> (4 * PLACE));
      const __m256 in_low = _mm256_permutevar8x32_ps(low, index), in_high = _mm256_permutevar8x32_ps(high, index);
      return _mm256_blendv_ps(in_low, in_high, (__m256)(value << (28 - 4 * PLACE)));
#else
      Vec found;
      for (int i = 0; i < W; i++) found[i] = table[value[i] >> (4 * PLACE) & 15];
      return found;
#endif
    }
  };
  static float scale(int) { return 1.0f; }
};

// Codes that are float8_e4m3fn.
struct Float8s : OneByOne {
  static constexpr int COUNT = 4, STEPS = COUNT;
  static constexpr float MIDDLE = 0;
  struct Unit {
    Units value;
    Unit(const GroupedProduct&, const uint32_t* from) : value(load<Units>(from)) {}
    template <int PLACE>
    Vec number() const {
      return from_e4m3(value << (24 - 8 * PLACE));
    }
  };
  static float scale(int) { return 1.0f; }
};

#if defined(__AVX512BF16__)
// Codes whose numbers bfloat16 holds exactly, multiplied in pairs by rows of bfloat16. A pair is that of two codes half a
// unit apart, which are in the two halves of the same lane.
struct InPairs {
  static constexpr float MIDDLE = 0;
  static Vec multiply(Vec weight, const float* x, Vec sum) {
    uint32_t pair;
    memcpy(&pair, x, 4);
    return _mm512_dpbf16_ps(sum, (__m512bh)weight, (__m512bh)_mm512_set1_epi32((int)pair));
  }
};

// Codes of 4 bits. table: their 16 numbers.
struct FourBitPairs : InPairs {
  static constexpr int COUNT = 8, STEPS = 4;
  struct Unit {
    Units value;
    __m512i table;  // twice, because an index has five bits
    Unit(Vec numbers, const uint32_t* from) : value(load<Units>(from)) {
      table = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(numbers));
    }
    template <int PLACE>
    Vec number() const {
      return (Vec)_mm512_permutexvar_epi16((__m512i)(value >> (4 * PLACE)), table);
    }
  };
};

struct IndexPairs : FourBitPairs {
  struct Unit : FourBitPairs::Unit {
    Unit(const GroupedProduct& p, const uint32_t* from) : FourBitPairs::Unit(load<Vec>(p.table), from) {}
  };
};

struct NumberPairs : FourBitPairs {
  struct Unit : FourBitPairs::Unit {
    Unit(const GroupedProduct&, const uint32_t* from)
        : FourBitPairs::Unit(__builtin_convertvector(lanes() - 8, Vec), from) {}
  };
};

struct Float8Pairs : InPairs {
  static constexpr int COUNT = 4, STEPS = 2;
  struct Unit {
    __m512i value;
    Unit(const GroupedProduct&, const uint32_t* from) : value((__m512i)load<Units>(from)) {}
    template <int PLACE>
    Vec number() const {
      const __m512i upper = PLACE == 0 ? _mm512_slli_epi16(value, 8) : value;
      const __m512i sign = _mm512_and_si512(upper, _mm512_set1_epi16((short)0x8000));
      const __m512i moved = _mm512_and_si512(_mm512_srli_epi16(upper, 4), _mm512_set1_epi16(0x07f0));
      const __m512i number = _mm512_add_epi16(moved, _mm512_set1_epi16(120 << 7));
      // Numbers without a leading one: 0, 1, ... 7 times 2^-9.
      const __m512i small = _mm512_set4_epi64(0, 0, 0x3c603c403c203c00, 0x3bc03b803b000000);
      const __mmask32 is_small = _mm512_testn_epi16_mask(upper, _mm512_set1_epi16(0x7800));
      const __m512i magnitude = _mm512_mask_permutexvar_epi16(number, is_small, _mm512_srli_epi16(upper, 8), small);
      return (Vec)_mm512_or_si512(magnitude, sign);
    }
  };
};
#endif

}  // namespace
