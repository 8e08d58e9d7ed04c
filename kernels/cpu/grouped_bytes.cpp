// Products of rows in int8 with weights whose codes are integers of 4 or 8 bits: the inner loops, compiled once for each
// instruction set (-DVARIANT=name) that has them.
//
// Codes are unpacked in registers, in the time of two products. For few rows, one panel after another is a single stream of
// memory. Many rows go through a part of two panels in blocks, with as many sums as suit the registers. A group's sum is an
// exact integer; totals follow in float32, group by group in ascending order, whatever the other rows and panels. So a row's
// bits depend on that row and the weight alone.

#include <utility>

#if defined(__AVX2__)
#include "grouped_parts.h"

namespace {

#if defined(__AVX512F__)
constexpr int MOST_PANELS = 2;  // for many rows: a number of x is read once for both
constexpr int FEW_ROWS = 12;    // whose sums and totals are in registers
constexpr int MOST_SUMS = 16;   // of a block of many rows; with more, compilers make a slower loop
#else
constexpr int MOST_PANELS = 1;
constexpr int FEW_ROWS = 4;
constexpr int MOST_SUMS = 8;
#endif
constexpr int ONE_PANEL = 24;  // rows up to which one panel at a time is faster: it is one stream of memory
template <int PANELS>
constexpr int MOST_ROWS = MOST_SUMS / PANELS;  // of a block of many
template <int PANELS>
constexpr int LEAST_ROWS = MOST_ROWS<PANELS> / 2;
constexpr int BLOCK = 128;  // steps of four inputs after which the next rows follow: with the codes they stay in the L1 cache
constexpr int AHEAD = 64;   // prefetch distance, in units of a panel
constexpr float LARGEST = 127;      // number of a row in int8
constexpr float SMALLEST = 1e-30f;  // a group whose largest magnitude is less becomes zeros; keeps its reciprocal finite

typedef int8_t Bytes __attribute__((vector_size(W)));

// Of each unit, the codes with even places come first.
struct FourBits {
  static constexpr int STEPS = 2;
  static constexpr float MIDDLE = 8;
  template <int STEP>
  static Units four(Units unit) {
    return (STEP == 0 ? unit : unit >> 4) & all(0x0f0f0f0fu);
  }
  // Brings a row's numbers into the order of the codes; what follows them may change.
  static void arrange(int8_t* numbers, int units) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    for (int unit = 0; unit < units; unit += 2) {
      __m128i* const two = (__m128i*)(numbers + unit * 8);
      _mm_storeu_si128(two, _mm_shuffle_epi8(_mm_loadu_si128(two), order));
    }
  }
};

struct EightBits {
  static constexpr int STEPS = 1;
  static constexpr float MIDDLE = 128;
  template <int STEP>
  static Units four(Units unit) {
    return unit;
  }
  static void arrange(int8_t*, int) {}
};

inline int largest_of(Ints x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)x);
#else
  int found = x[0];
  for (int i = 1; i < W; i++) found = x[i] > found ? x[i] : found;
  return found;
#endif
}

inline int sum_of(Ints x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int found = 0;
  for (int i = 0; i < W; i++) found += x[i];
  return found;
#endif
}

// Rounds a row to int8, to nearest, ties to even. NaN and infinity become any numbers, but the group's scale is not finite.
template <class Codes>
void round_row(const GroupedProduct& p, int row, const GroupedInput& input) {
  constexpr int COUNT = 4 * Codes::STEPS;  // codes of a unit
  const Bf16* from = (const Bf16*)((const char*)p.x + row * p.x_row);
  int8_t* to = (int8_t*)(input.x + row * input.x_row);
  for (int group = 0; group < p.groups; group++) {
    const int begin = first_unit(p, group) * COUNT, end = end_unit(p, group) * COUNT;
    const int last = end < p.inputs ? end : p.inputs, whole = begin + (last - begin) / W * W;
    Ints most{};  // as bits, whose order is that of the numbers
    for (int i = begin; i < whole; i += W) {
      const Ints magnitude = (Ints)(load_halves(from + i, W) & all(0x7fffu));
      most = most > magnitude ? most : magnitude;
    }
    int most_bits = largest_of(most);
    for (int i = whole; i < last; i++) most_bits = (from[i] & 0x7fff) > most_bits ? from[i] & 0x7fff : most_bits;
    const float largest = widened((Bf16)most_bits);
    const float factor = largest < SMALLEST ? 0 : LARGEST / largest;
    Ints sums{};
    for (int i = begin; i < whole; i += W) {
      const Vec shifted = as_floats(load_floats(from + i, W)) * all(factor) + all(12582912.0f);  // the integer, in the low bits
      const Ints number = (Ints)shifted << 24 >> 24;
      store(to + i, __builtin_convertvector(number, Bytes));
      sums += number;
    }
    int sum = sum_of(sums);
    for (int i = whole; i < last; i++) {
      to[i] = (int8_t)bits(widened(from[i]) * factor + 12582912.0f);
      sum += to[i];
    }
    for (int i = last; i < end; i++) to[i] = 0;
    const float scale = largest / LARGEST;
    input.scales[(int64_t)group * p.rows + row] = scale;
    input.sums[(int64_t)group * p.rows + row] = scale * (float)sum;
  }
  Codes::arrange(to, p.units);
}

// Sums of products of four codes and four numbers of a row.
#if defined(__AVX512VNNI__)
constexpr int CHUNK = 1 << 30;  // steps
inline Ints add_four(Ints sums, Units codes, uint32_t numbers) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32((int)numbers));
}
inline Ints widened(Ints sums) { return sums; }
#else
// Eight sums of two products of a code below 16 and a number within 127 fit into 16 bits.
constexpr int CHUNK = 8;
#if defined(__AVX512F__)
inline Ints add_four(Ints sums, Units codes, uint32_t numbers) {
  return (Ints)((Shorts)sums + (Shorts)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32((int)numbers)));
}
#else
inline Ints add_four(Ints sums, Units codes, uint32_t numbers) {
  return (Ints)((Shorts)sums + (Shorts)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32((int)numbers)));
}
#endif
inline Ints widened(Ints sums) { return multiply_pairs((Shorts)sums, Shorts{} + (short)1); }
#endif

inline uint32_t four_of(const float* x) {
  uint32_t four;
  memcpy(&four, x, 4);
  return four;
}

// Rows next to each other: every third has a pointer, and the next two are reached by base and scaled index.
template <int ROWS>
struct Rows {
  const float* every_third[(ROWS + 2) / 3];
  int64_t row;
  Rows(const float* x, int64_t row) : row(row) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r += 3) every_third[r / 3] = x + r * row;
  }
  __attribute__((always_inline)) uint32_t four(int r, int step) const {
    return four_of(every_third[r / 3] + r % 3 * row + step);
  }
  __attribute__((always_inline)) void advance(int steps) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r += 3) every_third[r / 3] += steps;
  }
};

// Where panels that are multiplied together are read. Beyond their end follow those that are next.
template <int PANELS>
struct Panels {
  const uint32_t* from;
  int64_t size;   // from one panel to the next
  int64_t ahead;  // from what is read to what is prefetched
  Panels(const GroupedProduct& p, int panel, int unit)
      : from(p.weight + ((int64_t)panel * p.units + unit) * COLUMNS), size((int64_t)p.units * COLUMNS) {}
  // left: units of the panels
  void look_ahead(int left) { ahead = AHEAD * COLUMNS + (left < AHEAD ? (PANELS - 1) * size : 0); }
};

template <class Codes, int STEP, int ROWS, int PANELS>
__attribute__((always_inline)) inline void add_step(const Units (&unit)[PANELS], const Rows<ROWS>& x, Ints (&sum)[ROWS][PANELS]) {
  Units codes[PANELS];
#pragma GCC unroll 2
  for (int i = 0; i < PANELS; i++) codes[i] = Codes::template four<STEP>(unit[i]);
#pragma GCC unroll 24
  for (int r = 0; r < ROWS; r++) {
    const uint32_t four = x.four(r, STEP);
#pragma GCC unroll 2
    for (int i = 0; i < PANELS; i++) sum[r][i] = add_four(sum[r][i], codes[i], four);
  }
}

// Adds `units` units of ROWS rows to the sums.
template <class Codes, int ROWS, int PANELS>
__attribute__((always_inline)) inline void add_units(Panels<PANELS>& panels, Rows<ROWS>& x, int units,
                                                     Ints (&sum)[ROWS][PANELS]) {
  constexpr bool WHOLE = CHUNK > BLOCK;
  // Few sums would wait for each other, so they are computed in two parts.
  constexpr int PARTS = WHOLE && Codes::STEPS == 2 && ROWS * PANELS <= 6 ? 2 : 1;
  Ints part[PARTS][ROWS][PANELS];
  for (int done = 0; done < units;) {
    const int end = WHOLE || units - done <= CHUNK / Codes::STEPS ? units : done + CHUNK / Codes::STEPS;
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int i = 0; i < PANELS; i++) {
        part[0][r][i] = WHOLE ? sum[r][i] : Ints{};
        if constexpr (PARTS == 2) part[1][r][i] = Ints{};
      }
    for (; done < end; done++, panels.from += COLUMNS) {
      Units unit[PANELS];
#pragma GCC unroll 2
      for (int i = 0; i < PANELS; i++) {
        __builtin_prefetch(panels.from + i * panels.size + panels.ahead);
        unit[i] = load<Units>(panels.from + i * panels.size);
      }
      add_step<Codes, 0>(unit, x, part[0]);
      if constexpr (Codes::STEPS == 2) add_step<Codes, 1>(unit, x, part[PARTS - 1]);
      x.advance(Codes::STEPS);
    }
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int i = 0; i < PANELS; i++) {
        Ints found = widened(part[0][r][i]);
        if constexpr (PARTS == 2) found += widened(part[1][r][i]);
        sum[r][i] = WHOLE ? found : sum[r][i] + found;
      }
  }
}

// Adds a group's products to a total. row_scale and row_sum: of a row and the group.
__attribute__((always_inline)) inline Vec add_products(Vec scale, Vec offset, float row_scale, float row_sum, Ints sum, Vec total) {
  const Vec products = __builtin_convertvector(sum, Vec) * all(row_scale);
  return fma(offset, all(row_sum), fma(products, scale, total));
}

template <class Codes, int ROWS>
void few_rows(const GroupedProduct& p, const GroupedInput& input, int panel) {
  Panels<1> panels(p, panel, 0);
  Rows<ROWS> x(input.x, input.x_row);
  Vec total[ROWS] = {};
  for (int group = 0; group < p.groups; group++) {
    Ints sum[ROWS][1] = {};
    panels.look_ahead(p.units);
    add_units<Codes, ROWS, 1>(panels, x, end_unit(p, group) - first_unit(p, group), sum);
    const GroupScales scales(p, panel, group, Codes::MIDDLE);
    const float* const row_scales = input.scales + group * ROWS;
    const float* const row_sums = input.sums + group * ROWS;
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++)
      total[r] = add_products(scales.scale, scales.offset, row_scales[r], row_sums[r], sum[r][0], total[r]);
  }
  for (int r = 0; r < ROWS; r++) finish_sum(p, r, panel, total[r]);
}

// The sums of many rows for the panels, over what precedes a block.
struct RowSums {
  Vec total[MOST_GROUPED_ROWS * MOST_PANELS];   // whole groups
  Ints begun[MOST_GROUPED_ROWS * MOST_PANELS];  // the part of a group
};

// Adds the units from `begin`, which is in group `group`, to `end`, to the sums of ROWS rows from `row` on.
template <class Codes, int ROWS, int PANELS>
void add_block(const GroupedProduct& p, const GroupedInput& input, int panel, int row, int group, int begin, int end,
               RowSums& kept) {
  Panels<PANELS> panels(p, panel, begin);
  Rows<ROWS> x(input.x + row * input.x_row + (int64_t)begin * Codes::STEPS, input.x_row);
  Vec* const total = kept.total + row * PANELS;
  Ints* const begun = kept.begun + row * PANELS;
  for (int unit = begin; unit < end; group++) {
    panels.look_ahead(p.units - unit);
    const int end_of_group = end_unit(p, group), stop = end_of_group < end ? end_of_group : end;
    Ints sum[ROWS][PANELS] = {};
    if (unit != first_unit(p, group)) {
#pragma GCC unroll 24
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int i = 0; i < PANELS; i++) sum[r][i] = begun[r * PANELS + i];
    }
    add_units<Codes, ROWS, PANELS>(panels, x, stop - unit, sum);
    unit = stop;
    if (stop < end_of_group) {
#pragma GCC unroll 24
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int i = 0; i < PANELS; i++) begun[r * PANELS + i] = sum[r][i];
      return;
    }
    const float* const row_scales = input.scales + (int64_t)group * p.rows + row;
    const float* const row_sums = input.sums + (int64_t)group * p.rows + row;
    GroupScales scales[PANELS];
#pragma GCC unroll 2
    for (int i = 0; i < PANELS; i++) scales[i] = GroupScales(p, panel + i, group, Codes::MIDDLE);
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int i = 0; i < PANELS; i++) {
        Vec& place = total[r * PANELS + i];
        place = add_products(scales[i].scale, scales[i].offset, row_scales[r], row_sums[r], sum[r][i], place);
      }
  }
}

typedef void (*FewRows)(const GroupedProduct&, const GroupedInput&, int);
typedef void (*AddBlock)(const GroupedProduct&, const GroupedInput&, int, int, int, int, int, RowSums&);

// For 1, 2, ... rows.
template <class Codes, class Counts>
struct AllFewRows;
template <class Codes, size_t... COUNTS>
struct AllFewRows<Codes, std::index_sequence<COUNTS...>> {
  static constexpr FewRows all[] = {few_rows<Codes, COUNTS + 1>...};
};
template <class Codes>
constexpr const auto& FEW = AllFewRows<Codes, std::make_index_sequence<FEW_ROWS>>::all;

// For the least number of rows of a block and more.
template <class Codes, int PANELS, class Counts>
struct AllBlocks;
template <class Codes, int PANELS, size_t... COUNTS>
struct AllBlocks<Codes, PANELS, std::index_sequence<COUNTS...>> {
  static constexpr AddBlock all[] = {add_block<Codes, COUNTS + LEAST_ROWS<PANELS>, PANELS>...};
};
template <class Codes, int PANELS>
constexpr const auto& MANY =
    AllBlocks<Codes, PANELS, std::make_index_sequence<MOST_ROWS<PANELS> - LEAST_ROWS<PANELS> + 1>>::all;

template <class Codes, int PANELS>
void many_rows(const GroupedProduct& p, const GroupedInput& input, int panel) {
  const int blocks = (p.rows + MOST_ROWS<PANELS> - 1) / MOST_ROWS<PANELS>;
  const int most = blocks == 1 ? p.units : BLOCK / Codes::STEPS;  // units of a block
  RowSums kept;
  for (int i = 0; i < p.rows * PANELS; i++) kept.total[i] = Vec{};
  for (int unit = 0, group = 0; unit < p.units;) {
    int end = unit, next = group;
    for (; next < p.groups && end_unit(p, next) - unit <= most; next++) end = end_unit(p, next);
    if (end == unit) end = unit + most;  // a piece of a group
    for (int i = 0, row = 0; i < blocks; i++) {
      const int end_row = (i + 1) * p.rows / blocks;
      MANY<Codes, PANELS>[end_row - row - LEAST_ROWS<PANELS>](p, input, panel, row, group, unit, end, kept);
      row = end_row;
    }
    unit = end;
    group = next;
  }
  for (int i = 0; i < PANELS; i++)
    for (int row = 0; row < p.rows; row++) finish_sum(p, row, panel + i, kept.total[row * PANELS + i]);
}

template <class Codes>
void panels_of_codes(const GroupedProduct& p, const GroupedInput& input, int first, int last) {
  int panel = first;
  if (p.rows <= FEW_ROWS) {
    for (; panel < last; panel++) FEW<Codes>[p.rows - 1](p, input, panel);
    return;
  }
  if (p.rows > ONE_PANEL)
    for (; panel + MOST_PANELS <= last; panel += MOST_PANELS) many_rows<Codes, MOST_PANELS>(p, input, panel);
  for (; panel < last; panel++) many_rows<Codes, 1>(p, input, panel);
}

}  // namespace

void JOIN(prepare_bytes, VARIANT)(const GroupedProduct& p, int row, const GroupedInput& input) {
  if (p.coding == FOUR_BITS) round_row<FourBits>(p, row, input);
  if (p.coding == EIGHT_BITS) round_row<EightBits>(p, row, input);
}

void JOIN(panels_of_bytes, VARIANT)(const GroupedProduct& p, const GroupedInput& input, int first, int last) {
  if (p.coding == FOUR_BITS) panels_of_codes<FourBits>(p, input, first, last);
#if defined(__AVX512VNNI__)
  if (p.coding == EIGHT_BITS) panels_of_codes<EightBits>(p, input, first, last);
#endif
}

#endif
