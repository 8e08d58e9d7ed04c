// Products of rows with a packed weight: the inner loops, compiled once for each instruction set (-DVARIANT=name).
//
// Each number of the result is one sum over the inputs in ascending order, whatever the other rows, the panel and the
// blocks of inputs: sums are kept unrounded between blocks. So a row's bits depend on that row and the weight alone.

#include <type_traits>
#include <utility>

#include "compressed.h"
#include "finish.h"
#include "linear.h"
#include "packing.h"
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
constexpr int SMALL_BLOCK_ROWS = 32;
constexpr int SMALL_BLOCK_OF_TWO = 64;   // of two compressed panels, for few rows
constexpr int LARGE_BLOCK_OF_TWO = 256;  // for many

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
  // Rows up to which compressed panels are decompressed in registers. With more, that would be done too often.
  static constexpr int MOST_DIRECT = 8;
  struct Weight {
    Vec even, odd;
    Weight(const uint32_t* from) : Weight(load<Units>(from)) {}
    Weight(Units both) {
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
    Weight(Units units) : value(units) {}
  };
};

#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
struct PairsOfBf16 : WholeUnits {
  static constexpr bool PAIRS_PANELS = true;
  static constexpr int MOST_DIRECT = 12;
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

// What `add_block` does for the next block besides its own: it prefetches plain units, or it calls PairDecoder::advance
// after every `interval` units.
struct Prefetch {
  static constexpr int interval = 0;
  const uint32_t* panel = nullptr;  // with two panels: one of the next block, into the L2 cache
};

// Adds `units` units of ROWS rows and PANELS panels to the sums, (ROWS, PANELS) vectors.
template <class Type, int ROWS, int PANELS, class Next>
void add_block(const typename Type::X* x, int64_t x_row, const uint32_t* panel, int64_t panel_size, int units,
               typename Type::Sum* sums, bool first, Next& next) {
  constexpr bool PREFETCHES = std::is_same_v<Next, Prefetch>;
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
  [[maybe_unused]] int until_next = next.interval;
  for (int unit = 0; unit < units; unit++) {
    const uint32_t* from = panel + (int64_t)unit * COLUMNS;
    if constexpr (PANELS == 2 && (Type::PAIRS_PANELS || !PREFETCHES)) {
      if constexpr (PREFETCHES) {
        __builtin_prefetch(next.panel + (int64_t)unit * COLUMNS, 0, 2);
      } else if (--until_next == 0) {
        until_next = next.interval;
        next.advance();
      }
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

// Writes the results of ROWS rows and PANELS panels from their sums, (ROWS, PANELS) vectors.
template <class Type, int ROWS, int PANELS>
void finish_rows(const Product& p, int row, int panel, const typename Type::Sum* sums) {
  for (int r = 0; r < ROWS; r++, sums += PANELS) {
    if constexpr (PANELS == 2)
      finish_two(p, row + r, panel * COLUMNS, sums[0], sums[1]);
    else
      for (int i = 0; i < PANELS; i++) finish(p, row + r, (panel + i) * COLUMNS, sums[i]);
  }
}

template <class Type, int ROWS, int PANELS, class Next>
void block_of_rows(const Product& p, const void* x, int64_t x_row, int row, int panel, int from, int units,
                   const uint32_t* weight, int64_t panel_size, float* sums, Next& next) {
  typedef typename Type::X X;
  typedef typename Type::Sum Sum;
  Sum* const place = (Sum*)sums + (int64_t)row * PANELS;
  add_block<Type, ROWS, PANELS>((const X*)((const char*)x + row * x_row) + (int64_t)from * Type::NUMBERS,
                                x_row / sizeof(X), weight, panel_size, units, place, from == 0, next);
  if (from + units == p.units) finish_rows<Type, ROWS, PANELS>(p, row, panel, place);
}

template <class Next>
using BlockOfRows = void (*)(const Product&, const void*, int64_t, int, int, int, int, const uint32_t*, int64_t, float*,
                             Next&);

// For 1, 2, ... rows: with PANELS panels; 0 means as many as suit the number of rows.
template <class Type, int PANELS, class Next, class Rows>
struct Blocks;
template <class Type, int PANELS, class Next, size_t... ROWS>
struct Blocks<Type, PANELS, Next, std::index_sequence<ROWS...>> {
  static constexpr BlockOfRows<Next> of_rows[] = {
      block_of_rows<Type, ROWS + 1, PANELS == 0 ? panels_of(ROWS + 1) : PANELS, Next>...};
};
template <class Type, int PANELS, int MOST = MOST_ROWS, class Next = Prefetch>
constexpr const BlockOfRows<Next>* blocks_of = Blocks<Type, PANELS, Next, std::make_index_sequence<MOST>>::of_rows;

// Multiplies all rows with the panels that the blocks take, from `panel` on: at most ROWS rows and `most_units` units at a
// time. With two panels, the first two groups of rows prefetch those of the next block, so that a weight arrives from
// memory while all rows are multiplied.
template <int ROWS>
void multiply_panels(const BlockOfRows<Prefetch>* blocks, const Product& p, const void* x, int64_t x_row, int panel,
                     int most_units, float* sums) {
  Prefetch next;
  const int64_t panel_size = (int64_t)p.units * COLUMNS;
  const int groups = (p.rows + ROWS - 1) / ROWS, rows_at_once = (p.rows + groups - 1) / groups;
  for (int from = 0; from < p.units; from += most_units) {
    const int units = p.units - from < most_units ? p.units - from : most_units;
    const uint32_t* const weight = p.weight + panel * panel_size + (int64_t)from * COLUMNS;
    const bool is_last = from + units == p.units;
    next.panel = weight + (int64_t)units * COLUMNS + (is_last ? panel_size : 0);
    for (int row = 0; row < p.rows; row += rows_at_once) {
      const int rows = p.rows - row < rows_at_once ? p.rows - row : rows_at_once;
      blocks[rows - 1](p, x, x_row, row, panel, from, units, weight, panel_size, sums, next);
      if (row == 0) next.panel += panel_size;
    }
  }
}

template <class Type>
void panels(const Product& p, const void* x, int64_t x_row, int first, int last, float* sums) {
  int panel = first;
  if (p.rows <= (Type::PAIRS_PANELS ? MOST_ROWS / 2 : MOST_ROWS)) {  // the sums stay in registers
    const int count = panels_of(p.rows);
    for (; panel + count <= last; panel += count)
      multiply_panels<MOST_ROWS>(blocks_of<Type, 0>, p, x, x_row, panel, p.units, sums);
    for (; panel < last; panel++)
      multiply_panels<MOST_ROWS>(blocks_of<Type, 1>, p, x, x_row, panel, p.units, sums);
    return;
  }
  if constexpr (Type::PAIRS_PANELS) {
    constexpr int most = MOST_ROWS / 2;
    for (; panel + 2 <= last; panel += 2)
      multiply_panels<most>(blocks_of<Type, 2, most>, p, x, x_row, panel, BLOCK_OF_TWO, sums);
  }
  for (; panel < last; panel++) multiply_panels<MOST_ROWS>(blocks_of<Type, 1>, p, x, x_row, panel, BLOCK, sums);
}

#if defined(COMPRESSES)
// Multiplies ROWS rows with two compressed panels, which are decompressed in registers.
template <class Type, int ROWS>
void compressed_pair(const Product& p, const void* x, int64_t x_row, int panel) {
  typedef typename Type::X X;
  const X* every_third[(ROWS + 2) / 3];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r += 3) every_third[r / 3] = (const X*)((const char*)x + r * x_row);
  x_row /= sizeof(X);
  typename Type::Sum sum[ROWS][2] = {};
  const uint32_t* quad = p.weight + pair_start(p.units, panel);
  RareBytes rare[2] = {{p, panel}, {p, panel + 1}};
  const UpperBytes upper[2] = {p.upper_bytes + panel * CODES, p.upper_bytes + (panel + 1) * CODES};
  for (int unit = 0; unit < p.units; unit += QUAD) {
    const int units = p.units - unit;
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      Units pairs[QUAD];
      decompress_quad(quad, upper[i], pairs);
      quad += QUAD_WORDS;
      if (__builtin_expect(rare[i].any_before(unit + QUAD), false))
        rare[i].write_before(unit + QUAD, unit, (uint8_t*)pairs);
#pragma GCC unroll 4
      for (int u = 0; u < QUAD; u++) {
        if (u > 0 && u >= units) break;  // the first unit of a quad always exists
        const typename Type::Weight weight(pairs[u]);
#pragma GCC unroll 24
        for (int r = 0; r < ROWS; r++)
          Type::add(sum[r][i], weight, every_third[r / 3] + r % 3 * x_row + u * Type::NUMBERS);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r += 3) every_third[r / 3] += QUAD * Type::NUMBERS;
  }
  finish_rows<Type, ROWS, 2>(p, 0, panel, sum[0]);
}

typedef void (*CompressedPair)(const Product&, const void*, int64_t, int);

// For 1, 2, ... rows.
template <class Type, class Rows>
struct CompressedPairs;
template <class Type, size_t... ROWS>
struct CompressedPairs<Type, std::index_sequence<ROWS...>> {
  static constexpr CompressedPair of_rows[] = {compressed_pair<Type, ROWS + 1>...};
};

// Multiplies all rows with pairs of compressed panels. While a block is multiplied, the next is decompressed.
template <class Type>
void multiply_compressed(const Product& p, const void* x, int64_t x_row, int first, int last, float* sums) {
  constexpr int MOST = MOST_ROWS / 2;
  alignas(64) uint32_t scratch[2][2 * LARGE_BLOCK_OF_TWO * COLUMNS];
  const int block = p.rows > SMALL_BLOCK_ROWS ? LARGE_BLOCK_OF_TWO : SMALL_BLOCK_OF_TWO;
  const int groups = (p.rows + MOST - 1) / MOST, rows_at_once = (p.rows + groups - 1) / groups;
  const auto units_from = [&](int from) { return p.units - from < block ? p.units - from : block; };
  PairDecoder decoder(p, groups * QUAD);
  decoder.begin(first, 0, units_from(0), scratch[0]);
  int turn = 0;
  for (int panel = first; panel < last; panel += 2)
    for (int from = 0; from < p.units; from += block) {
      decoder.finish();
      const int units = units_from(from);
      const int64_t panel_size = decoder.panel_size();
      const uint32_t* const weight = scratch[turn];
      turn ^= 1;
      if (from + units < p.units)
        decoder.begin(panel, from + units, units_from(from + units), scratch[turn]);
      else if (panel + 2 < last)
        decoder.begin(panel + 2, 0, units_from(0), scratch[turn]);
      for (int row = 0; row < p.rows; row += rows_at_once) {
        const int rows = p.rows - row < rows_at_once ? p.rows - row : rows_at_once;
        blocks_of<Type, 2, MOST, PairDecoder>[rows - 1](p, x, x_row, row, panel, from, units, weight, panel_size, sums,
                                                        decoder);
      }
    }
}

// Panels first .. last - 1 of a compressed weight, and the next if their number is odd. first: even.
template <class Type>
void compressed_panels(const Product& p, const void* x, int64_t x_row, int first, int last, float* sums) {
  if (p.rows > Type::MOST_DIRECT) return multiply_compressed<Type>(p, x, x_row, first, last, sums);
  constexpr auto of_rows = CompressedPairs<Type, std::make_index_sequence<Type::MOST_DIRECT>>::of_rows;
  for (int panel = first; panel < last; panel += 2) of_rows[p.rows - 1](p, x, x_row, panel);
}
#endif

bool widens(Kind kind) {
#if defined(__AVX512BF16__)
  return false;
#else
  return kind != FLOAT32;
#endif
}

void panels_of_kind(const Product& p, const void* x, int64_t x_row, int first, int last, float* sums) {
#if defined(COMPRESSES)
  if (p.upper_bytes != nullptr) return compressed_panels<Bf16s>(p, x, x_row, first, last, sums);
#endif
  if (p.kind == FLOAT32) panels<Floats>(p, x, x_row, first, last, sums);
#if defined(__AMX_TILE__)
  if (p.kind == BFLOAT16) tiles<PairTiles>(p, x, x_row, first, last, sums);
  if (p.kind == INT8) tiles<ByteTiles>(p, x, x_row, first, last, sums);
#else
  if (p.kind == BFLOAT16) panels<Bf16s>(p, x, x_row, first, last, sums);
  if (p.kind == INT8) panels<Bytes>(p, x, x_row, first, last, sums);
#endif
}

}  // namespace

const Multiply JOIN(multiply, VARIANT) = {COLUMNS, ROWS_AT_ONCE, widens, panels_of_kind,
                                          pack, choose_codes, pack_compressed};
