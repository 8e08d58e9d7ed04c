// Products of rows with weights of 4 or 8 bits: the inner loops, compiled once for each instruction set (-DVARIANT=name).
//
// Codes that are integers and rows of bfloat16 are multiplied by grouped_bytes.cpp, if the instruction set suits. Others are
// multiplied as float32, or by processors that multiply bfloat16 as that, where it holds the codes' numbers and the rows;
// for few rows they are unpacked in registers; for many, a block of a panel is unpacked once for all. Each number of the
// result is the sum over groups, in ascending order, of a group's scale times the sum over its inputs, in ascending order,
// whatever the other rows and panels. So a row's bits depend on that row and the weight alone.

#include <utility>

#include "grouped_parts.h"

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MOST_SUMS = 24;  // vectors of sums in registers; the rest is for the weight
#else
constexpr int MOST_SUMS = 12;
#endif
constexpr int FEW_ROWS = 12;
constexpr int MOST_ROWS = MOST_SUMS / 2;  // rows of a block of many: each has a sum and a total in registers
constexpr int BLOCK = 256;                // vectors that are unpacked at once for many rows: they stay in the cache

template <class Codes>
void prepare_codes(const GroupedProduct& p, int row, float* x, float* sums) {
  const char* from = (const char*)p.x + row * p.x_row;
  const int count = p.units * Codes::COUNT;
  if (p.x_bf16) {
    const uint16_t* numbers = (const uint16_t*)from;
    for (int i = 0; i < p.inputs; i++) {
      const uint32_t bits = (uint32_t)numbers[i] << 16;
      memcpy(x + i, &bits, 4);
    }
  } else {
    memcpy(x, from, 4 * (int64_t)p.inputs);
  }
  for (int i = p.inputs; i < count; i++) x[i] = 0;
  float scales[Codes::COUNT];
  for (int i = 0; i < Codes::COUNT; i++) scales[i] = Codes::scale(i);
  for (int group = 0; group < p.groups; group++) {
    float parts[Codes::COUNT] = {};
    for (int unit = first_unit(p, group); unit < end_unit(p, group); unit++)
      for (int i = 0; i < Codes::COUNT; i++) parts[i] += x[unit * Codes::COUNT + i];
    float sum = 0;
    for (int i = 0; i < Codes::COUNT; i++) sum += parts[i];
    sums[group] = sum;
  }
  for (int unit = 0; unit < p.units; unit++)
    for (int i = 0; i < Codes::COUNT; i++) x[unit * Codes::COUNT + i] *= scales[i];
}

// What is subtracted for codes that stand for one more. x_sum: of a row's inputs in a group.
template <class Codes>
inline Vec first_sum(float x_sum) {
  return Codes::MIDDLE == 0 ? Vec{} : all(-Codes::MIDDLE * x_sum);
}

// One unit of PANELS panels, the numbers in ascending order.
template <class Codes, int ROWS, int PANELS, size_t... PLACES>
inline void add_unit(const GroupedProduct& p, const uint32_t* from, int64_t panel_size, const float* x, int64_t x_row,
                     Vec (&sum)[ROWS][PANELS], std::index_sequence<PLACES...>) {
#pragma GCC unroll 12
  for (int panel = 0; panel < PANELS; panel++) {
    const uint32_t* here = from + panel * panel_size;
    __builtin_prefetch(here + FETCH_AHEAD * COLUMNS);
    const typename Codes::Unit unit(p, here);
    const auto add = [&](auto place) {
      const Vec weight = unit.template number<decltype(place)::value>();
#pragma GCC unroll 24
      for (int r = 0; r < ROWS; r++)
        sum[r][panel] = Codes::multiply(weight, x + r * x_row + decltype(place)::value, sum[r][panel]);
    };
    (add(std::integral_constant<int, PLACES>()), ...);
  }
}

template <class Codes, int ROWS, int PANELS>
void block_of_rows(const GroupedProduct& p, const GroupedInput& input, int row, int panel) {
  const int64_t panel_size = (int64_t)p.units * COLUMNS;
  const uint32_t* weight = p.weight + panel * panel_size;
  const float* x = input.x + row * input.x_row;
  const float* sums = input.sums + (int64_t)row * p.groups;
  Vec total[ROWS][PANELS] = {};
  for (int group = 0; group < p.groups; group++) {
    Vec sum[ROWS][PANELS];
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 12
      for (int i = 0; i < PANELS; i++) sum[r][i] = first_sum<Codes>(sums[r * p.groups + group]);
    const int end = end_unit(p, group);
    for (int unit = first_unit(p, group); unit < end; unit++)
      add_unit<Codes, ROWS, PANELS>(p, weight + (int64_t)unit * COLUMNS, panel_size, x + unit * Codes::STEPS, input.x_row,
                                    sum, std::make_index_sequence<Codes::STEPS>());
#pragma GCC unroll 12
    for (int i = 0; i < PANELS; i++) {
      const GroupScales scales(p, panel + i, group);
#pragma GCC unroll 24
      for (int r = 0; r < ROWS; r++) add_group(p, scales, sums[r * p.groups + group], sum[r][i], total[r][i]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < PANELS; i++)
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++) finish_sum(p, row + r, panel + i, total[r][i]);
}

typedef void (*BlockOfRows)(const GroupedProduct&, const GroupedInput&, int, int);

constexpr int panels_of(int rows) {
  const int panels = MOST_SUMS / rows;
  return panels > 8 ? 8 : panels < 1 ? 1 : panels;
}

// The loops for `rows` rows: with the number of panels that suits them, and with one panel.
struct Block {
  int rows, panels;
  BlockOfRows fitting, one;
};

template <class Codes, int... ROWS>
struct Blocks {
  static constexpr Block all[] = {
      {ROWS, panels_of(ROWS), block_of_rows<Codes, ROWS, panels_of(ROWS)>, block_of_rows<Codes, ROWS, 1>}...};
};
template <class Codes>
struct AllBlocks : Blocks<Codes, 1, 2, 3, 4, 6, 8, 12> {};

template <class Codes>
const Block& largest_block(int rows) {
  const Block* found = AllBlocks<Codes>::all;
  for (const Block& block : AllBlocks<Codes>::all)
    if (block.rows <= rows) found = &block;
  return *found;
}

// A part of a panel, unpacked for many rows: whole groups, or a piece of one that is larger than a block.
struct UnpackedBlock {
  Vec numbers[BLOCK];
  GroupScales scales[BLOCK];
  int begin, end;   // units
  int first_group;  // the group that `scales` begins with
};

// The block that begins with unit `unit`, which is in group `group`.
template <class Codes>
void unpack(const GroupedProduct& p, int panel, int unit, int group, UnpackedBlock& block) {
  constexpr int MOST_UNITS = BLOCK / Codes::STEPS;
  block.begin = block.end = unit;
  block.first_group = group;
  for (; group < p.groups && end_unit(p, group) - unit <= MOST_UNITS; group++) {
    block.scales[group - block.first_group] = GroupScales(p, panel, group);
    block.end = end_unit(p, group);
  }
  if (block.end == unit) {
    block.scales[0] = GroupScales(p, panel, group);
    block.end = unit + MOST_UNITS;
  }
  const uint32_t* from = p.weight + ((int64_t)panel * p.units + unit) * COLUMNS;
  for (Vec* to = block.numbers; unit < block.end; unit++, from += COLUMNS, to += Codes::STEPS) {
    __builtin_prefetch(from + FETCH_AHEAD * COLUMNS);
    unpack_unit(to, typename Codes::Unit(p, from), std::make_index_sequence<Codes::STEPS>());
  }
}

// The sums of many rows for one panel, over what precedes a block.
struct RowSums {
  Vec total[MOST_GROUPED_ROWS];  // whole groups
  Vec begun[MOST_GROUPED_ROWS];  // the part of a group
};

// Adds a block to the sums of ROWS rows.
template <class Codes, int ROWS>
void add_block(const GroupedProduct& p, const GroupedInput& input, const UnpackedBlock& block, int row, RowSums& kept) {
  // Every third row has a pointer; the next two are reached by base and scaled index.
  const float* every_third[(ROWS + 2) / 3];
  const int64_t x_row = input.x_row;
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r += 3)
    every_third[r / 3] = input.x + (row + r) * x_row + (int64_t)block.begin * Codes::STEPS;
  const float* sums = input.sums + (int64_t)row * p.groups;
  Vec total[ROWS];
#pragma GCC unroll 24
  for (int r = 0; r < ROWS; r++) total[r] = block.begin == 0 ? Vec{} : kept.total[row + r];
  const Vec* number = block.numbers;
  for (int unit = block.begin, group = block.first_group; unit < block.end; group++) {
    const int end_of_group = end_unit(p, group), end = end_of_group < block.end ? end_of_group : block.end;
    Vec sum[ROWS];
    if (unit == first_unit(p, group)) {
#pragma GCC unroll 24
      for (int r = 0; r < ROWS; r++) sum[r] = first_sum<Codes>(sums[r * p.groups + group]);
    } else {
#pragma GCC unroll 24
      for (int r = 0; r < ROWS; r++) sum[r] = kept.begun[row + r];
    }
    for (const Vec* end_number = number + (end - unit) * Codes::STEPS; number < end_number; number++) {
      const Vec weight = *number;
#pragma GCC unroll 24
      for (int r = 0; r < ROWS; r++) sum[r] = Codes::multiply(weight, every_third[r / 3] + r % 3 * x_row, sum[r]);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r += 3) every_third[r / 3]++;
    }
    if (end == end_of_group) {
      const GroupScales& scales = block.scales[group - block.first_group];
#pragma GCC unroll 24
      for (int r = 0; r < ROWS; r++) add_group(p, scales, sums[r * p.groups + group], sum[r], total[r]);
    } else {
#pragma GCC unroll 24
      for (int r = 0; r < ROWS; r++) kept.begun[row + r] = sum[r];
    }
    unit = end;
  }
#pragma GCC unroll 24
  for (int r = 0; r < ROWS; r++) kept.total[row + r] = total[r];
}

typedef void (*AddBlock)(const GroupedProduct&, const GroupedInput&, const UnpackedBlock&, int, RowSums&);

// For 1, 2, ... rows.
template <class Codes, class Rows>
struct AddBlocks;
template <class Codes, size_t... ROWS>
struct AddBlocks<Codes, std::index_sequence<ROWS...>> {
  static constexpr AddBlock all[] = {add_block<Codes, ROWS + 1>...};
};

template <class Codes>
void panel_of_many_rows(const GroupedProduct& p, const GroupedInput& input, int panel) {
  const int blocks = (p.rows + MOST_ROWS - 1) / MOST_ROWS;
  const int at_once = (p.rows + blocks - 1) / blocks;  // no few rows at the end, whose sums would wait for each other
  UnpackedBlock block;
  RowSums kept;
  for (int unit = 0, group = 0; unit < p.units; unit = block.end) {
    while (end_unit(p, group) <= unit) group++;
    unpack<Codes>(p, panel, unit, group, block);
    for (int row = 0; row < p.rows; row += at_once) {
      const int rows = p.rows - row < at_once ? p.rows - row : at_once;
      AddBlocks<Codes, std::make_index_sequence<MOST_ROWS>>::all[rows - 1](p, input, block, row, kept);
    }
  }
  for (int row = 0; row < p.rows; row++) finish_sum(p, row, panel, kept.total[row]);
}

template <class Codes>
void panels_of_codes(const GroupedProduct& p, const GroupedInput& input, int first, int last) {
  if (p.rows > FEW_ROWS) {
    for (int panel = first; panel < last; panel++) panel_of_many_rows<Codes>(p, input, panel);
    return;
  }
  for (int row = 0; row < p.rows;) {
    const Block& block = largest_block<Codes>(p.rows - row);
    int panel = first;
    for (; panel + block.panels <= last; panel += block.panels) block.fitting(p, input, row, panel);
    for (; panel < last; panel++) block.one(p, input, row, panel);
    row += block.rows;
  }
}

void prepare(const GroupedProduct& p, int row, const GroupedInput& input) {
#if defined(__AVX2__)
  if (takes_bytes(p)) return JOIN(prepare_bytes, VARIANT)(p, row, input);
#endif
  float* const x = input.x + row * input.x_row;
  float* const sums = input.sums + (int64_t)row * p.groups;
#if defined(__AVX512BF16__)
  if (takes_pairs(p)) {
    if (p.coding == TABLE) prepare_pairs<IndexPairs>(p, row, x, sums);
    if (p.coding == FLOAT8) prepare_pairs<Float8Pairs>(p, row, x, sums);
    return;
  }
#endif
  if (p.coding == FOUR_BITS) prepare_codes<Numbers<4>>(p, row, x, sums);
  if (p.coding == TABLE) prepare_codes<Indices>(p, row, x, sums);
  if (p.coding == EIGHT_BITS) prepare_codes<Numbers<8>>(p, row, x, sums);
  if (p.coding == FLOAT8) prepare_codes<Float8s>(p, row, x, sums);
}

void panels(const GroupedProduct& p, const GroupedInput& input, int first, int last) {
#if defined(__AVX2__)
  if (takes_bytes(p)) return JOIN(panels_of_bytes, VARIANT)(p, input, first, last);
#endif
#if defined(__AVX512BF16__)
  if (takes_pairs(p)) {
    if (p.coding == TABLE) panels_of_codes<IndexPairs>(p, input, first, last);
    if (p.coding == FLOAT8) panels_of_codes<Float8Pairs>(p, input, first, last);
    return;
  }
#endif
  if (p.coding == FOUR_BITS) panels_of_codes<Numbers<4>>(p, input, first, last);
  if (p.coding == TABLE) panels_of_codes<Indices>(p, input, first, last);
  if (p.coding == EIGHT_BITS) panels_of_codes<Numbers<8>>(p, input, first, last);
  if (p.coding == FLOAT8) panels_of_codes<Float8s>(p, input, first, last);
}

}  // namespace

const GroupedMultiply JOIN(grouped, VARIANT) = {COLUMNS, prepare, panels};
