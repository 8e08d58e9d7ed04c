// Passes over a row of logits, for sampling. Compiled once for each instruction set (setup.py), as `scan_VARIANT`. Does
// not use the C++ library: see attend.cpp.

#include "scan.h"

#include <cmath>

#include "vector.h"

namespace {

constexpr int LANES = 16;  // in every variant, so that sums have the same order
constexpr int PARTS = LANES / W;

typedef double Doubles __attribute__((vector_size(4 * W)));  // holds half as many numbers as a Vec

inline void widen(Vec x, Doubles& low, Doubles& high) {
#if defined(__AVX512F__)
  low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
  high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
#elif defined(__AVX2__)
  low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
  high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
#else
  for (int i = 0; i < W / 2; i++) low[i] = x[i], high[i] = x[W / 2 + i];
#endif
}

inline void set_lowest(float& x) { x = -INFINITY; }
inline void set_lowest(Bf16& x) { x = 0xff80; }

// Calls take(COUNT numbers, position) for the numbers first .. end - 1, padded with -inf at the end.
template <int COUNT = LANES, class Cell, class Take>
inline void by_lanes(const Cell* row, int first, int end, Take take) {
  int i = first;
  for (; i + COUNT <= end; i += COUNT) take(row + i, i);
  if (i == end) return;
  Cell rest[COUNT];
  for (int k = 0; k < COUNT; k++) {
    if (i + k < end) rest[k] = row[i + k];
    else set_lowest(rest[k]);
  }
  take(rest, i);
}

template <class Cell>
inline Vec floats(const Cell* from) { return as_floats(load_floats(from, W)); }

inline int end_of(int group, int columns) { return (group + 1) * GROUP < columns ? (group + 1) * GROUP : columns; }

// Calls take(vector) for 2 * LANES numbers, in any order.
template <class Take>
inline void unordered(const float* from, Take take) {
  for (int k = 0; k < 2 * PARTS; k++) take(load<Vec>(from + k * W));
}
template <class Take>
inline void unordered(const Bf16* from, Take take) {
  for (int k = 0; k < PARTS; k++) {  // each 32 bits hold two numbers
    const Units both = load<Units>(from + 2 * k * W);
    take(as_floats(both << 16));
    take(as_floats(both & all(0xffff0000u)));
  }
}

template <class Cell>
void maxima_of(const Cell* row, int columns, int first, int last, float* maxima) {
  Vec spoilt{};  // becomes NaN if a number is NaN, and possibly if one is infinite
  for (int group = first; group < last; group++) {
    Vec highest = all(-INFINITY);
    by_lanes<2 * LANES>(row, group * GROUP, end_of(group, columns), [&](const Cell* from, int) {
      unordered(from, [&](Vec x) {
        highest = larger(x, highest);
        spoilt += x;
      });
    });
    maxima[group] = largest(highest);
  }
  bool any = false;
  for (int i = 0; i < W; i++) any |= spoilt[i] != spoilt[i];
  if (!any) return;
  for (int group = first; group < last; group++)
    for (int i = group * GROUP; i < end_of(group, columns); i++)
      if (widened(row[i]) != widened(row[i])) maxima[group] = NAN;
}

// Sums of 16 lanes.
struct Sum {
  Doubles parts[2 * PARTS] = {};

  void add(int k, Vec x) {
    Doubles low, high;
    widen(x, low, high);
    parts[2 * k] += low;
    parts[2 * k + 1] += high;
  }
  double total() const {
    double lanes[LANES];
    memcpy(lanes, parts, sizeof lanes);
    for (int half = LANES / 2; half > 0; half /= 2)
      for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
  }
};

// keep(place, weights): called for each vector.
template <class Cell, class Keep>
inline double sum_weights(const Cell* row, int first, int end, Weighing by, Keep keep) {
  Sum sum;
  by_lanes(row, first, end, [&](const Cell* from, int place) {
    for (int k = 0; k < PARTS; k++) {
      const Vec x = floats(from + k * W), power = power_of_2<6>((x - all(by.highest)) * all(by.scale));
      const Vec weights = x >= all(by.floor) ? power : Vec{};
      sum.add(k, weights);
      keep(place + k * W, weights);
    }
  });
  return sum.total();
}

template <class Cell>
void sums_of(const Cell* row, int columns, int first, int last, Weighing by, const float* maxima, double* sums) {
  for (int group = first; group < last; group++)
    sums[group] = maxima[group] < by.floor
                      ? 0.0
                      : sum_weights(row, group * GROUP, end_of(group, columns), by, [](int, Vec) {});
}

template <class Cell>
int gather_of(const Cell* row, int columns, const float* maxima, float threshold, int32_t* ids, float* values) {
  int count = 0;
  for (int group = 0; group < groups_of(columns); group++) {
    if (!(maxima[group] >= threshold)) continue;
    for (int i = group * GROUP; i < end_of(group, columns); i++) {
      const float x = widened(row[i]);
      ids[count] = i;
      values[count] = x;
      count += x >= threshold;
    }
  }
  return count;
}

template <class Cell>
int count_of(const Cell* row, int columns, const float* maxima, float value) {
  int count = 0;
  for (int group = 0; group < groups_of(columns); group++)
    if (maxima[group] > value)
      for (int i = group * GROUP; i < end_of(group, columns); i++) count += widened(row[i]) > value;
  return count;
}

// Sets the numbers to -inf whose bits are 0: 32 of them, or fewer at the end of a row.
template <class Cell>
inline void ban(Cell* cells, int count, uint32_t bits) {
  if (bits == 0) {
    for (int i = 0; i < count; i++) set_lowest(cells[i]);
    return;
  }
  const uint32_t inside = count == 32 ? ~0u : (1u << count) - 1;
  for (uint32_t left = ~bits & inside; left != 0; left &= left - 1) set_lowest(cells[__builtin_ctz(left)]);
}

#if defined(__AVX512BW__)
inline void ban_word(float* cells, uint32_t bits) {
  const __m512 lowest = _mm512_set1_ps(-INFINITY);
  _mm512_mask_storeu_ps(cells, (__mmask16)~bits, lowest);
  _mm512_mask_storeu_ps(cells + 16, (__mmask16)(~bits >> 16), lowest);
}
inline void ban_word(Bf16* cells, uint32_t bits) {
  _mm512_mask_storeu_epi16(cells, ~bits, _mm512_set1_epi16((short)0xff80));
}
#elif defined(__AVX2__)
template <class Cell>
inline void ban_word(Cell* cells, uint32_t bits) {  // shifts by different numbers, which the compiler vectorises
  Cell lowest;
  set_lowest(lowest);
  for (int i = 0; i < 32; i++) cells[i] = bits >> i & 1 ? cells[i] : lowest;
}
#else
template <class Cell>
inline void ban_word(Cell* cells, uint32_t bits) { ban(cells, 32, bits); }
#endif

template <class Cell>
void apply_mask_to(Cell* row, int columns, const uint32_t* words) {
  int first = 0;
  for (; first + 32 <= columns; first += 32)
    if (words[first / 32] != ~0u) ban_word(row + first, words[first / 32]);
  if (first < columns) ban(row + first, columns - first, words[first / 32]);
}

// Calls of(cells) with a pointer to the row's numbers of their type.
template <class Of>
inline auto typed(const Row& row, Of of) {
  return row.bf16 ? of((const Bf16*)row.logits) : of((const float*)row.logits);
}

void maxima(Row row, int first, int last, float* maxima) {
  typed(row, [&](auto cells) { maxima_of(cells, row.columns, first, last, maxima); });
}

void sums(Row row, int first, int last, Weighing by, const float* maxima, double* sums) {
  typed(row, [&](auto cells) { sums_of(cells, row.columns, first, last, by, maxima, sums); });
}

void weigh(const float* values, int count, Weighing by, float* weights, double* sums) {
  for (int group = 0; group < groups_of(count); group++)
    sums[group] = sum_weights(values, group * GROUP, end_of(group, count), by,
                              [&](int place, Vec found) { store(weights + place, found); });
}

void add(const float* weights, int count, double* sums) {
  for (int group = 0; group < groups_of(count); group++) {
    Sum sum;
    by_lanes(weights, group * GROUP, end_of(group, count), [&](const float* from, int) {
      for (int k = 0; k < PARTS; k++) sum.add(k, larger(floats(from + k * W), Vec{}));  // padding counts as 0
    });
    sums[group] = sum.total();
  }
}

void spread(const float* values, int count, float high, float per_value, int bins, int32_t* found) {
  const Vec last = all((float)(bins - 1));
  by_lanes(values, 0, count, [&](const float* from, int place) {
    for (int k = 0; k < PARTS; k++) {
      const Vec bin = (all(high) - floats(from + k * W)) * all(per_value);
      store(found + place + k * W, __builtin_convertvector(bin < last ? bin : last, Ints));
    }
  });
}

int gather(Row row, const float* maxima, float threshold, int32_t* ids, float* values) {
  return typed(row, [&](auto cells) { return gather_of(cells, row.columns, maxima, threshold, ids, values); });
}

int count_above(Row row, const float* maxima, float value) {
  return typed(row, [&](auto cells) { return count_of(cells, row.columns, maxima, value); });
}

void apply_mask(Row row, const uint32_t* words) {
  if (row.bf16) apply_mask_to((Bf16*)row.logits, row.columns, words);
  else apply_mask_to((float*)row.logits, row.columns, words);
}

}  // namespace

const Scan JOIN(scan, VARIANT) = {maxima, sums, weigh, add, spread, gather, count_above, apply_mask};
