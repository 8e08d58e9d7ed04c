// Products of rows with a packed weight: the inner loops, compiled once for each instruction set (-DVARIANT=name).
//
// Each number of the result is one sum over the inputs in ascending order, whatever the other rows, the panel and the
// cut of the inputs into blocks: sums that wait for the next block do so unrounded. So a row's bits depend on that row
// and the weight alone.

#include <utility>

#include "linear.h"
#include "vector.h"

namespace {

constexpr int COLUMNS = W;  // of a panel: one vector
#if defined(__AVX512F__)
constexpr int MOST_SUMS = 24;  // vectors of sums in registers; the rest is for the weight
#elif defined(__aarch64__)
constexpr int MOST_SUMS = 24;
#else
constexpr int MOST_SUMS = 12;
#endif
constexpr int MOST_ROWS = MOST_SUMS;  // at once, with one panel
constexpr int BLOCK = 512;            // units: a block of a panel stays in the cache for all rows
constexpr int FETCH_AHEAD = 64;       // units of a panel that are asked for before they are needed

// How a unit of x and a unit of the weight are multiplied and added to a sum.
struct Floats {
  typedef float X;
  typedef Vec Sum;
  static constexpr int NUMBERS = 1;  // of X in a unit
  struct Weight {
    Vec value;
    Weight(const uint32_t* from) : value(load<Vec>(from)) {}
  };
  static void add(Sum& sum, const Weight& w, const X* x) { sum = fma(w.value, all(*x), sum); }
};

struct WideBf16 {  // without an instruction for it: x comes as float32
  typedef float X;
  typedef Vec Sum;
  static constexpr int NUMBERS = 2;
  struct Weight {
    Vec even, odd;
    Weight(const uint32_t* from) {
      const Units both = load<Units>(from);
      even = as_floats(both << 16);
      odd = as_floats(both & all(0xffff0000u));
    }
  };
  static void add(Sum& sum, const Weight& w, const X* x) { sum = fma(w.odd, all(x[1]), fma(w.even, all(x[0]), sum)); }
};

struct WholeUnits {  // for instructions that take a unit's numbers together
  typedef uint32_t X;
  static constexpr int NUMBERS = 1;
  struct Weight {
    Units value;
    Weight(const uint32_t* from) : value(load<Units>(from)) {}
  };
};

#if defined(__AVX512BF16__)
struct PairsOfBf16 : WholeUnits {
  typedef Vec Sum;
  static void add(Sum& sum, const Weight& w, const X* x) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)w.value, (__m512bh)_mm512_set1_epi32(*x));
  }
};
typedef PairsOfBf16 Bf16s;
#else
typedef WideBf16 Bf16s;
#endif

#if defined(__AVX512VNNI__)
struct Bytes : WholeUnits {
  typedef Ints Sum;
  static void add(Sum& sum, const Weight& w, const X* x) {
    sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(*x), (__m512i)w.value);
  }
};
#endif

// Rows are taken ROWS at a time, and of few rows several panels at once, so that no sum waits for the one before it.
constexpr int panels_of(int rows) { return MOST_SUMS / rows > 8 ? 8 : MOST_SUMS / rows; }

// Adds `units` units of ROWS rows and PANELS panels to the sums, (ROWS, PANELS) vectors.
template <class Type, int ROWS, int PANELS>
void add_block(const typename Type::X* x, int64_t x_row, const uint32_t* panel, int64_t panel_size, int units,
               typename Type::Sum* sums, bool first) {
  typedef typename Type::Sum Sum;
  // Every third row has a pointer; the two behind it are reached by an address' base and scaled index.
  const typename Type::X* every_third[(ROWS + 2) / 3];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r += 3) every_third[r / 3] = x + r * x_row;
  Sum sum[ROWS][PANELS];
#pragma GCC unroll 24
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++) sum[r][p] = first ? Sum{} : sums[r * PANELS + p];
  for (int unit = 0; unit < units; unit++) {
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++) {
      const uint32_t* from = panel + p * panel_size + (int64_t)unit * COLUMNS;
      __builtin_prefetch(from + FETCH_AHEAD * COLUMNS);
      const typename Type::Weight weight(from);
#pragma GCC unroll 24
      for (int r = 0; r < ROWS; r++) Type::add(sum[r][p], weight, every_third[r / 3] + r % 3 * x_row);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r += 3) every_third[r / 3] += Type::NUMBERS;
  }
#pragma GCC unroll 24
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++) sums[r * PANELS + p] = sum[r][p];
}

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

// The sums of one row and vector of columns, as numbers of y.
template <class Sum>
void finish(const Product& p, int row, int column, Sum sum) {
  const int count = p.outputs - column < W ? p.outputs - column : W;
  if (count <= 0) return;
  Vec y = finished(p, row, column, sum);
  if (p.bias != nullptr) y += load<Vec>(p.bias + column);
  if (p.y_bf16) {
    store_rounded((Bf16*)p.y + row * p.y_row + column, y, count);
  } else {
    memcpy((float*)p.y + row * p.y_row + column, &y, 4 * count);
  }
}

template <class Type, int ROWS, int PANELS>
void block_of_rows(const Product& p, const void* x, int64_t x_row, int row, int panel, int from, int units, float* sums) {
  typedef typename Type::X X;
  typedef typename Type::Sum Sum;
  const int64_t panel_size = (int64_t)p.units * COLUMNS;
  Sum* const place = (Sum*)sums + (int64_t)row * PANELS;
  add_block<Type, ROWS, PANELS>((const X*)((const char*)x + row * x_row) + (int64_t)from * Type::NUMBERS,
                                x_row / sizeof(X), p.weight + panel * panel_size + (int64_t)from * COLUMNS, panel_size,
                                units, place, from == 0);
  if (from + units < p.units) return;
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < PANELS; i++) finish(p, row + r, (panel + i) * COLUMNS, place[r * PANELS + i]);
}

typedef void (*BlockOfRows)(const Product&, const void*, int64_t, int, int, int, int, float*);

// For 1, 2, ... rows: with as many panels as suit the number of rows, and with one.
template <class Type, class Rows>
struct Blocks;
template <class Type, size_t... ROWS>
struct Blocks<Type, std::index_sequence<ROWS...>> {
  static constexpr BlockOfRows fitting[] = {block_of_rows<Type, ROWS + 1, panels_of(ROWS + 1)>...};
  static constexpr BlockOfRows one[] = {block_of_rows<Type, ROWS + 1, 1>...};
};
template <class Type>
struct AllBlocks : Blocks<Type, std::make_index_sequence<MOST_ROWS>> {};

template <class Type>
void panels(const Product& p, const void* x, int64_t x_row, int first, int last, float* sums) {
  typedef AllBlocks<Type> Block;
  if (p.rows <= MOST_ROWS) {  // the sums stay in registers
    const int count = panels_of(p.rows);
    int panel = first;
    for (; panel + count <= last; panel += count) Block::fitting[p.rows - 1](p, x, x_row, 0, panel, 0, p.units, sums);
    for (; panel < last; panel++) Block::one[p.rows - 1](p, x, x_row, 0, panel, 0, p.units, sums);
    return;
  }
  for (int panel = first; panel < last; panel++)
    for (int from = 0; from < p.units; from += BLOCK) {
      const int units = p.units - from < BLOCK ? p.units - from : BLOCK;
      for (int row = 0; row < p.rows; row += MOST_ROWS) {
        const int rows = p.rows - row < MOST_ROWS ? p.rows - row : MOST_ROWS;
        Block::one[rows - 1](p, x, x_row, row, panel, from, units, sums);
      }
    }
}

bool has([[maybe_unused]] Kind kind) {
#if defined(__AVX512VNNI__)
  return true;
#else
  return kind != INT8;
#endif
}

bool widens(Kind kind) { return kind == BFLOAT16 && Bf16s::NUMBERS == 2; }

void panels_of_kind(const Product& p, const void* x, int64_t x_row, int first, int last, float* sums) {
  if (p.kind == FLOAT32) panels<Floats>(p, x, x_row, first, last, sums);
  if (p.kind == BFLOAT16) panels<Bf16s>(p, x, x_row, first, last, sums);
#if defined(__AVX512VNNI__)
  if (p.kind == INT8) panels<Bytes>(p, x, x_row, first, last, sums);
#endif
}

// Four units from `unit` on of an output's weights, zeros behind the row's end.
inline Four four_of(const char* row, int64_t row_bytes, int unit) {
  const int64_t left = row_bytes - 4 * (int64_t)unit;
  if (left >= 16) return load<Four>(row + 4 * (int64_t)unit);
  Four found{};
  if (left > 0) memcpy(&found, row + 4 * (int64_t)unit, left);
  return found;
}

void pack(const char* const* rows, int64_t row_bytes, int outputs, int first, int last, uint32_t* packed) {
  const int units = (int)((row_bytes + 3) / 4);
  for (int panel = first; panel < last; panel++)
    for (int unit = 0; unit < units; unit += 4) {
      const int column = panel * COLUMNS;
      Units turned[4];
      turn([&](int i) {
        return column + i < outputs ? four_of(rows[column + i], row_bytes, unit) : Four{};
      }, turned);
      for (int i = 0; i < 4 && unit + i < units; i++)
        store(packed + ((int64_t)panel * units + unit + i) * COLUMNS, turned[i]);
    }
}

}  // namespace

const Multiply JOIN(multiply, VARIANT) = {COLUMNS, MOST_ROWS, has, widens, panels_of_kind, pack};
