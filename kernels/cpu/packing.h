// Packs weights into panels: the layouts that the inner loops of multiply.cpp read.
#pragma once

#include <algorithm>

#include "compressed.h"
#include "linear.h"
#include "vector.h"

namespace {

// Four units from `unit` on of an output's weights, zeros after the row's end.
inline Four four_of(const char* row, int64_t row_bytes, int unit) {
  const int64_t left = row_bytes - 4 * (int64_t)unit;
  if (left >= 16) return load<Four>(row + 4 * (int64_t)unit);
  Four found{};
  if (left > 0) memcpy(&found, row + 4 * (int64_t)unit, left);
  return found;
}

// Transposes units `unit` to unit + 3 of a panel: turned[i] is unit + i of all its outputs, zeros after the last one.
inline void turn_panel(const char* const* rows, int64_t row_bytes, int outputs, int panel, int unit, Units (&turned)[4]) {
  turn([&](int i) {
    return panel * W + i < outputs ? four_of(rows[panel * W + i], row_bytes, unit) : Four{};
  }, turned);
}

void pack(const char* const* rows, int64_t row_bytes, int outputs, int first, int last, uint32_t* packed) {
  const int units = (int)((row_bytes + 3) / 4);
  for (int panel = first; panel < last; panel++)
    for (int unit = 0; unit < units; unit += 4) {
      Units turned[4];
      turn_panel(rows, row_bytes, outputs, panel, unit, turned);
      for (int i = 0; i < 4 && unit + i < units; i++)
        store(packed + ((int64_t)panel * units + unit + i) * W, turned[i]);
    }
}

#if defined(COMPRESSES)
// Chooses the codes of panels first .. last - 1 of a weight in bfloat16. upper_bytes: (panels, 16) that the codes stand for.
// counts: (panels) weights without a code.
void choose_codes(const char* const* rows, int64_t row_bytes, int outputs, int first, int last, uint8_t* upper_bytes,
                  int32_t* counts) {
  for (int panel = first; panel < last; panel++) {
    int32_t found[4][128] = {};  // four, so that equal neighbours do not wait for each other
    for (int row = panel * W; row < outputs && row < (panel + 1) * W; row++)
      for (int64_t i = 0; i < row_bytes / 2; i++) found[i % 4][(uint8_t)rows[row][2 * i + 1] & 127]++;
    for (int value = 0; value < 128; value++)
      for (int i = 1; i < 4; i++) found[0][value] += found[i][value];
    for (int code = 0; code < NUM_CODES; code++) {
      const int value = (int)(std::max_element(found[0], found[0] + 128) - found[0]);
      upper_bytes[panel * CODES + code] = (uint8_t)value;
      upper_bytes[panel * CODES + NUM_CODES + code] = (uint8_t)(value | 128);
      found[0][value] = -1;
    }
    counts[panel] = 0;
    for (int value = 0; value < 128; value++) counts[panel] += std::max(found[0][value], 0);
  }
}

// The codes of upper bytes, and 0 for those without one, whose places `without` tells.
inline __m512i codes_of(__m512i upper, const uint8_t* upper_bytes, __mmask64& without) {
  const __m512i size = _mm512_and_si512(upper, _mm512_set1_epi8(127));
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi16(upper, 4), _mm512_set1_epi8(NUM_CODES));
  __m512i codes = sign;
  without = ~(__mmask64)0;
  for (int code = 0; code < NUM_CODES; code++) {
    const __mmask64 same = _mm512_cmpeq_epi8_mask(size, _mm512_set1_epi8((char)upper_bytes[code]));
    codes = _mm512_mask_blend_epi8(same, codes, _mm512_or_si512(sign, _mm512_set1_epi8((char)code)));
    without &= ~same;
  }
  return codes;
}

// Packs panels first .. last - 1, with the codes that choose_codes found. starts: (panels + 1) of each panel's part of
// `rare`, which is filled.
void pack_compressed(const char* const* rows, int64_t row_bytes, int outputs, int first, int last,
                     const uint8_t* upper_bytes, const int32_t* starts, uint32_t* rare, uint32_t* packed) {
  const int units = (int)((row_bytes + 3) / 4);
  const __m512i lower = _mm512_set1_epi16(255);
  for (int panel = first; panel < last; panel++) {
    const int column = panel * W;
    const uint8_t* upper = upper_bytes + panel * CODES;
    uint32_t* next = rare + starts[panel];
    uint32_t* to = packed + pair_start(units, panel & ~1) + panel % 2 * QUAD_WORDS;
    for (int unit = 0; unit < units; unit += QUAD) {
      Units turned[QUAD];
      turn_panel(rows, row_bytes, outputs, panel, unit, turned);
      __m512i codes[2];
      __mmask64 without[2];
      for (int i = 0; i < 2; i++) {
        const __m512i a = (__m512i)turned[2 * i], b = (__m512i)turned[2 * i + 1];
        store(to + i * W, _mm512_packus_epi16(_mm512_and_si512(a, lower), _mm512_and_si512(b, lower)));
        codes[i] = codes_of(_mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)), upper, without[i]);
      }
      store(to + 2 * W, _mm512_or_si512(codes[0], _mm512_slli_epi16(codes[1], 4)));
      to += 2 * QUAD_WORDS;
      if ((without[0] | without[1]) == 0) continue;
      const uint8_t* const bytes = (const uint8_t*)turned;
      for (int i = 1; i < QUAD * VECTOR_BYTES; i += 2) {
        const bool is_weight = column + i % VECTOR_BYTES / 4 < outputs && (unit + i / VECTOR_BYTES) * 4 + i % 4 < row_bytes;
        if (is_weight && std::find(upper, upper + NUM_CODES, bytes[i] & 127) == upper + NUM_CODES)
          *next++ = (uint32_t)(unit * VECTOR_BYTES + i) << 8 | bytes[i];
      }
    }
  }
}
#else
constexpr ChooseCodes choose_codes = nullptr;
constexpr PackCompressed pack_compressed = nullptr;
#endif

}  // namespace
