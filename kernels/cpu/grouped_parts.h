// What the inner loops for weights of 4 or 8 bits share, with vectors (grouped.cpp) and with AMX (grouped_tiles.cpp).
#pragma once

#include <utility>

#include "finish.h"
#include "grouped.h"
#include "grouped_codes.h"
#include "vector.h"

namespace {

constexpr int COLUMNS = W;  // columns of a panel: one vector
constexpr int FETCH_AHEAD = 32;  // units of a panel that are asked for before they are needed

// The range of a group's units.
inline int first_unit(const GroupedProduct& p, int group) {
  return group == 0 ? 0 : p.first_units + (group - 1) * p.group_units;
}
inline int end_unit(const GroupedProduct& p, int group) {
  return group + 1 == p.groups ? p.units : first_unit(p, group + 1);
}

// Of a group and a panel's outputs.
struct GroupScales {
  Vec scale, zero, minimum;
  Vec offset;  // what a row's sum is multiplied with, for codes that stand for `middle` less
  GroupScales() {}
  __attribute__((always_inline)) GroupScales(const GroupedProduct& p, int panel, int group, float middle = 0) {
    const int64_t index = ((int64_t)panel * p.groups + group) * COLUMNS;
    scale = load_scale(p.scale, p.scale_type, index);
    if (p.zero != nullptr) zero = load_scale(p.zero, p.scale_type, index);
    if (p.minimum != nullptr) minimum = load_scale(p.minimum, p.scale_type, index);
    offset = -scale * (p.zero == nullptr ? all(middle) : zero + all(middle));
    if (p.minimum != nullptr) offset -= minimum;
  }
};

// Adds a group's sum to the total of a row. x_sum: of the row's inputs in the group.
__attribute__((always_inline)) inline void add_group(const GroupedProduct& p, const GroupScales& scales, float x_sum, Vec sum, Vec& total) {
  if (p.zero != nullptr) sum = fma(scales.zero, all(-x_sum), sum);
  total = fma(scales.scale, sum, total);
  if (p.minimum != nullptr) total = fma(scales.minimum, all(-x_sum), total);
}

__attribute__((noinline)) void finish_sum(const GroupedProduct& p, int row, int panel, Vec total) {
  if (p.divisor != nullptr) total /= load<Vec>(p.divisor + panel * COLUMNS);
  finish(p, row, panel * COLUMNS, total);
}

template <class Unit, size_t... PLACES>
inline void unpack_unit(Vec* to, const Unit& unit, std::index_sequence<PLACES...>) {
  ((to[PLACES] = unit.template number<PLACES>()), ...);
}

#if defined(__AVX2__)
// Whether codes are multiplied as integers.
inline bool takes_bytes(const GroupedProduct& p) {
#if defined(__AVX512VNNI__)
  return p.x_bf16 && (p.coding == FOUR_BITS || p.coding == EIGHT_BITS);
#else
  return p.x_bf16 && p.coding == FOUR_BITS;
#endif
}
#endif

#if defined(__AVX512BF16__)
// Whether bfloat16 holds all that is multiplied.
inline bool takes_pairs(const GroupedProduct& p) {
  if (!p.x_bf16 || p.coding == EIGHT_BITS) return false;
  if (p.coding != TABLE) return true;
  for (int i = 0; i < 16; i++)
    if (bits(p.table[i]) & 0xffff) return false;
  return true;
}

template <class Codes>
void prepare_pairs(const GroupedProduct& p, int row, float* x, float* sums) {
  const uint16_t* from = (const uint16_t*)((const char*)p.x + row * p.x_row);
  const auto number = [&](int i) -> uint32_t { return i < p.inputs ? from[i] : 0; };
  for (int unit = 0; unit < p.units; unit++)
    for (int i = 0; i < Codes::STEPS; i++) {
      const int first = unit * Codes::COUNT + i;
      const uint32_t pair = number(first) | number(first + Codes::COUNT / 2) << 16;
      memcpy(x + unit * Codes::STEPS + i, &pair, 4);
    }
  if (p.zero == nullptr && p.minimum == nullptr) return;  // no sum is used
  for (int group = 0; group < p.groups; group++) {
    float parts[Codes::COUNT] = {};
    for (int unit = first_unit(p, group); unit < end_unit(p, group); unit++)
      for (int i = 0; i < Codes::STEPS; i++) {
        const uint32_t pair = bits(x[unit * Codes::STEPS + i]);
        parts[i] += from_bits(pair << 16);
        parts[i + Codes::STEPS] += from_bits(pair & 0xffff0000u);
      }
    float sum = 0;
    for (int i = 0; i < Codes::COUNT; i++) sum += parts[i];
    sums[group] = sum;
  }
}
#endif

}  // namespace
