// Products of rows with a packed weight: the inner loops, compiled once for each instruction set (-DVARIANT=name).
//
// Each number of the result is one sum over the inputs in ascending order, whatever the other rows, the panel and the
// blocks of inputs: sums are kept unrounded between blocks. So a row's bits depend on that row and the weight alone.

#include <utility>

#include "finish.h"
#include "linear.h"
#include "vector.h"
#if defined(__AMX_TILE__)
#include "tiles.h"
#endif

namespace {

constexpr int COLUMNS = W;  // in a panel: one vector
#if defined(__AVX512F__)
constexpr int MOST_SUMS = 24;  // vectors of sums in registers; the other registers hold weights
#elif defined(__aarch64__)
constexpr int MOST_SUMS = 24;
#else
constexpr int MOST_SUMS = 12;
#endif
constexpr int MOST_ROWS = MOST_SUMS;  // rows of a call with one panel
#if defined(__AMX_TILE__)
constexpr int ROWS_AT_ONCE = MOST_TILE_ROWS;
#else
constexpr int ROWS_AT_ONCE = 252;  // their sums of one panel stay in the cache
#endif
constexpr int BLOCK = 512;            // units: a block of a panel stays in the cache for all rows
constexpr int BLOCK_OF_TWO = 192;     // of two panels, which together with the rows stays in the L1 cache
constexpr int FETCH_AHEAD = 64;       // units of a panel to prefetch

// How a unit of x and a unit of the weight are multiplied and added to a sum.
struct Floats {
  typedef float X;
  typedef Vec Sum;
  static constexpr int NUMBERS = 1;  // numbers of X in a unit
  // Whether many rows are multiplied with two panels at once, so that a number of x is read once for both. With one, there
  // is a read for each sum, and most processors read no more numbers per cycle than they compute sums. With vectors of 32
  // bytes and half as many registers, it was slower.
  static constexpr bool PAIRS_PANELS = COLUMNS == 16;
  struct Weight {
    Vec value;
    Weight(const uint32_t* from) : value(load<Vec>(from)) {}
  };
  static void add(Sum& sum, const Weight& w, const X* x) { sum = fma(w.value, all(*x), sum); }
};

struct WideBf16 {  // without a bfloat16 instruction: x is widened to float32
  typedef float X;
  typedef Vec Sum;
  static constexpr int NUMBERS = 2;
  static constexpr bool PAIRS_PANELS = false;
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

struct WholeUnits {  // for instructions that multiply whole units
  typedef uint32_t X;
  static constexpr int NUMBERS = 1;
  static constexpr bool PAIRS_PANELS = false;
  struct Weight {
    Units value;
    Weight(const uint32_t* from) : value(load<Units>(from)) {}
  };
};

#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
struct PairsOfBf16 : WholeUnits {
  static constexpr bool PAIRS_PANELS = true;
  typedef Vec Sum;
  static void add(Sum& sum, const Weight& w, const X* x) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)w.value, (__m512bh)_mm512_set1_epi32(*x));
  }
};
typedef PairsOfBf16 Bf16s;
#elif !defined(__AMX_TILE__)
typedef WideBf16 Bf16s;
#endif

#if defined(__AVX512VNNI__) && !defined(__AMX_TILE__)
struct Bytes : WholeUnits {
  typedef Ints Sum;
  static void add(Sum& sum, const Weight& w, const X* x) {
    sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(*x), (__m512i)w.value);
  }
};
#elif !defined(__AMX_TILE__)
struct Bytes {  // without an instruction for four bytes: x and the weight are widened to 16 bits, x beforehand
  typedef uint32_t X;
  typedef Ints Sum;
  static constexpr int NUMBERS = 2;
  static constexpr bool PAIRS_PANELS = false;
  struct Weight {
    Shorts even, odd;
    Weight(const uint32_t* from) {
      const Shorts both = load<Shorts>(from);
      even = both << 8 >> 8;
      odd = both >> 8;
    }
  };
  static void add(Sum& sum, const Weight& w, const X* x) {
    sum += multiply_pairs(w.even, (Shorts)all(x[0]));
    sum += multiply_pairs(w.odd, (Shorts)all(x[1]));
  }
};
#endif

// Rows are processed ROWS at a time. With few rows and narrow vectors, several panels are processed together, so that no
// sum waits for the one before it. A vector of 64 bytes takes longer to arrive from memory than its sum takes, and one
// panel after another is one stream for the processor's own prefetcher.
#if defined(__AVX512F__)
constexpr int MOST_PANELS = 1;
#else
constexpr int MOST_PANELS = 8;
#endif
constexpr int panels_of(int rows) { return MOST_SUMS / rows > MOST_PANELS ? MOST_PANELS : MOST_SUMS / rows; }

// Adds `units` units of ROWS rows and PANELS panels to the sums, (ROWS, PANELS) vectors.
template <class Type, int ROWS, int PANELS>
void add_block(const typename Type::X* x, int64_t x_row, const uint32_t* panel, int64_t panel_size, int units,
               typename Type::Sum* sums, bool first) {
  typedef typename Type::Sum Sum;
  // Every third row has a pointer; the next two are reached by base and scaled index.
  const typename Type::X* every_third[(ROWS + 2) / 3];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r += 3) every_third[r / 3] = x + r * x_row;
  Sum sum[ROWS][PANELS];
#pragma GCC unroll 24
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++) sum[r][p] = first ? Sum{} : sums[r * PANELS + p];
  for (int unit = 0; unit < units; unit++) {
    const uint32_t* from = panel + (int64_t)unit * COLUMNS;
    if constexpr (PANELS == 2 && Type::PAIRS_PANELS) {
      __builtin_prefetch(from + FETCH_AHEAD * COLUMNS);
      __builtin_prefetch(from + panel_size + FETCH_AHEAD * COLUMNS);
      const typename Type::Weight weights[] = {from, from + panel_size};
#pragma GCC unroll 24
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++) Type::add(sum[r][p], weights[p], every_third[r / 3] + r % 3 * x_row);
    } else {
#pragma GCC unroll 8
      for (int p = 0; p < PANELS; p++) {
        __builtin_prefetch(from + p * panel_size + FETCH_AHEAD * COLUMNS);
        const typename Type::Weight weight(from + p * panel_size);
#pragma GCC unroll 24
        for (int r = 0; r < ROWS; r++) Type::add(sum[r][p], weight, every_third[r / 3] + r % 3 * x_row);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r += 3) every_third[r / 3] += Type::NUMBERS;
  }
#pragma GCC unroll 24
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++) sums[r * PANELS + p] = sum[r][p];
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

// For 1, 2, ... rows: with PANELS panels; 0 means as many as suit the number of rows.
template <class Type, int PANELS, class Rows>
struct Blocks;
template <class Type, int PANELS, size_t... ROWS>
struct Blocks<Type, PANELS, std::index_sequence<ROWS...>> {
  static constexpr BlockOfRows of_rows[] = {
      block_of_rows<Type, ROWS + 1, PANELS == 0 ? panels_of(ROWS + 1) : PANELS>...};
};
template <class Type, int PANELS, int MOST = MOST_ROWS>
constexpr const BlockOfRows* blocks_of = Blocks<Type, PANELS, std::make_index_sequence<MOST>>::of_rows;

// Multiplies all rows with the panels that the blocks take, from `panel` on: ROWS rows and UNITS units at a time.
template <int ROWS, int UNITS>
void many_rows(const BlockOfRows* blocks, const Product& p, const void* x, int64_t x_row, int panel, float* sums) {
  for (int from = 0; from < p.units; from += UNITS) {
    const int units = p.units - from < UNITS ? p.units - from : UNITS;
    for (int row = 0; row < p.rows; row += ROWS) {
      const int rows = p.rows - row < ROWS ? p.rows - row : ROWS;
      blocks[rows - 1](p, x, x_row, row, panel, from, units, sums);
    }
  }
}

template <class Type>
void panels(const Product& p, const void* x, int64_t x_row, int first, int last, float* sums) {
  int panel = first;
  if (p.rows <= MOST_ROWS) {  // the sums stay in registers
    const int count = panels_of(p.rows);
    for (; panel + count <= last; panel += count)
      blocks_of<Type, 0>[p.rows - 1](p, x, x_row, 0, panel, 0, p.units, sums);
    for (; panel < last; panel++) blocks_of<Type, 1>[p.rows - 1](p, x, x_row, 0, panel, 0, p.units, sums);
    return;
  }
  if constexpr (Type::PAIRS_PANELS) {
    constexpr int most = MOST_ROWS / 2;
    for (; panel + 2 <= last; panel += 2)
      many_rows<most, BLOCK_OF_TWO>(blocks_of<Type, 2, most>, p, x, x_row, panel, sums);
  }
  for (; panel < last; panel++) many_rows<MOST_ROWS, BLOCK>(blocks_of<Type, 1>, p, x, x_row, panel, sums);
}

bool widens(Kind kind) {
#if defined(__AVX512BF16__)
  return false;
#else
  return kind != FLOAT32;
#endif
}

void panels_of_kind(const Product& p, const void* x, int64_t x_row, int first, int last, float* sums) {
  if (p.kind == FLOAT32) panels<Floats>(p, x, x_row, first, last, sums);
#if defined(__AMX_TILE__)
  if (p.kind == BFLOAT16) tiles<PairTiles>(p, x, x_row, first, last, sums);
  if (p.kind == INT8) tiles<ByteTiles>(p, x, x_row, first, last, sums);
#else
  if (p.kind == BFLOAT16) panels<Bf16s>(p, x, x_row, first, last, sums);
  if (p.kind == INT8) panels<Bytes>(p, x, x_row, first, last, sums);
#endif
}

// Four units from `unit` on of an output's weights, zeros after the row's end.
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

const Multiply JOIN(multiply, VARIANT) = {COLUMNS, ROWS_AT_ONCE, widens, panels_of_kind, pack};
