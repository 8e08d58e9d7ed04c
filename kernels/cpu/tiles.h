// Products with a packed weight by AMX, the matrix units of Intel's processors: bfloat16 and int8.
//
// A panel is 16 outputs wide, so 16 of its units are one contiguous tile of 1 KB in the processor's format. The same
// instructions multiply any number of rows up to 16: a tile has as many rows as there are, and each row has its own
// sums. Inputs are processed 16 units at a time in ascending order, padded with zeros at the end; sums are kept
// unrounded between them. So a row's bits depend on that row and the weight alone.
#pragma once

#include "amx.h"
#include "finish.h"
#include "linear.h"
#include "vector.h"

namespace {

constexpr int TILE_SUMS = TILE_ROWS * W;
constexpr int TILE_BLOCK = 16;             // tiles of two panels that stay in the L1 cache for all rows
constexpr int SMALL_BLOCK = 8;             // the same with so many rows that theirs do not stay in the L2 cache
constexpr int MANY_ROWS = 128;
constexpr int TILES_AHEAD = 4;             // tiles of a panel to prefetch
constexpr int MOST_TILE_ROWS = 256;
constexpr int MOST_TILE_PANELS = 4;        // whose sums of all rows are kept at once

struct PairTiles {
  typedef Vec Sum;
  static constexpr bool BYTES = false;
};
struct ByteTiles {
  typedef Ints Sum;
  static constexpr bool BYTES = true;
};

// Registers 0 .. 3 hold sums, 4 and 5 rows of x, 6 and 7 weights. The sums belong to up to four panels with one tile of
// rows, and to two panels with two tiles.
inline void configure_tiles(int first_rows, int second_rows) {
  TileConfig config;
  for (int i = 0; i < 4; i++) config.rows[i] = second_rows > 0 && i >= 2 ? second_rows : first_rows;
  config.rows[4] = first_rows;
  config.rows[5] = second_rows > 0 ? second_rows : first_rows;
  _tile_loadconfig(&config);
}

// The operands of these instructions must be literals.
#define TILE_MULTIPLY(sum, x, weight)     \
  if constexpr (Type::BYTES) {            \
    _tile_dpbusd(sum, x, weight);         \
  } else {                                \
    _tile_dpbf16ps(sum, x, weight);       \
  }

inline void ask_for_tile(const char* tile) {
#pragma GCC unroll 16
  for (int i = 0; i < TILE_UNITS; i++) __builtin_prefetch(tile + i * TILE_BYTES);
}

// Adds `steps` tiles along the inputs to the sums of at most 16 rows, (PANELS, 16, 16).
template <class Type, int PANELS>
void add_few(const char* x, int64_t x_row, const char* weight, int64_t panel_bytes, int steps, float* sums, bool first) {
#define START(panel) \
  if (first) _tile_zero(panel); else _tile_loadd(panel, sums + (panel) * TILE_SUMS, TILE_BYTES)
#define ADD(panel, into)                                                \
  _tile_loadd(into, from + (panel) * panel_bytes, TILE_BYTES);          \
  ask_for_tile(from + (panel) * panel_bytes + TILES_AHEAD * TILE_UNITS * TILE_BYTES); \
  TILE_MULTIPLY(panel, 4, into)
  START(0);
  if constexpr (PANELS > 1) { START(1); }
  if constexpr (PANELS > 2) { START(2); }
  if constexpr (PANELS > 3) { START(3); }
  for (int step = 0; step < steps; step++) {
    const char* from = weight + (int64_t)step * TILE_UNITS * TILE_BYTES;
    _tile_loadd(4, x + (int64_t)step * TILE_BYTES, x_row);
    ADD(0, 6);
    if constexpr (PANELS > 1) { ADD(1, 7); }
    if constexpr (PANELS > 2) { ADD(2, 6); }
    if constexpr (PANELS > 3) { ADD(3, 7); }
  }
  _tile_stored(0, sums, TILE_BYTES);
  if constexpr (PANELS > 1) _tile_stored(1, sums + TILE_SUMS, TILE_BYTES);
  if constexpr (PANELS > 2) _tile_stored(2, sums + 2 * TILE_SUMS, TILE_BYTES);
  if constexpr (PANELS > 3) _tile_stored(3, sums + 3 * TILE_SUMS, TILE_BYTES);
#undef START
#undef ADD
}

// The same for 17 to 32 rows, (2, PANELS, 16, 16).
template <class Type, int PANELS>
void add_two(const char* x, int64_t x_row, const char* weight, int64_t panel_bytes, int steps, float* sums, bool first) {
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, TILE_BYTES);
    _tile_loadd(2, sums + PANELS * TILE_SUMS, TILE_BYTES);
    if constexpr (PANELS > 1) {
      _tile_loadd(1, sums + TILE_SUMS, TILE_BYTES);
      _tile_loadd(3, sums + 3 * TILE_SUMS, TILE_BYTES);
    }
  }
  for (int step = 0; step < steps; step++) {
    const char* from = weight + (int64_t)step * TILE_UNITS * TILE_BYTES;
    const char* rows = x + (int64_t)step * TILE_BYTES;
    _tile_loadd(6, from, TILE_BYTES);
    _tile_loadd(4, rows, x_row);
    TILE_MULTIPLY(0, 4, 6);
    _tile_loadd(5, rows + TILE_ROWS * x_row, x_row);
    TILE_MULTIPLY(2, 5, 6);
    if constexpr (PANELS > 1) {
      _tile_loadd(7, from + panel_bytes, TILE_BYTES);
      TILE_MULTIPLY(1, 4, 7);
      TILE_MULTIPLY(3, 5, 7);
    }
    ask_for_tile(from + TILES_AHEAD * TILE_UNITS * TILE_BYTES);
    if constexpr (PANELS > 1) ask_for_tile(from + panel_bytes + TILES_AHEAD * TILE_UNITS * TILE_BYTES);
  }
  _tile_stored(0, sums, TILE_BYTES);
  _tile_stored(2, sums + PANELS * TILE_SUMS, TILE_BYTES);
  if constexpr (PANELS > 1) {
    _tile_stored(1, sums + TILE_SUMS, TILE_BYTES);
    _tile_stored(3, sums + 3 * TILE_SUMS, TILE_BYTES);
  }
}

typedef void (*AddTiles)(const char*, int64_t, const char*, int64_t, int, float*, bool);

// The inputs after the last whole tile, padded with zeros to a tile.
struct Tail {
  int units;
  alignas(64) char x[MOST_TILE_ROWS * TILE_BYTES];
  alignas(64) char weight[4 * TILE_UNITS * TILE_BYTES];

  Tail(const Product& p, const char* rows, int64_t x_row) : units(p.units % TILE_UNITS) {
    if (units == 0) return;
    memset(x, 0, (int64_t)p.rows * TILE_BYTES);
    for (int row = 0; row < p.rows; row++)
      memcpy(x + row * TILE_BYTES, rows + row * x_row + 4 * (int64_t)(p.units - units), 4 * units);
    memset(weight, 0, sizeof weight);
  }
  void take_weight(const char* panel, int64_t panel_bytes, int panels) {
    for (int i = 0; i < panels; i++)
      memcpy(weight + i * TILE_UNITS * TILE_BYTES, panel + (i + 1) * panel_bytes - units * TILE_BYTES, units * TILE_BYTES);
  }
};

// Writes the results of `rows` rows and PANELS panels from their sums, (tiles of rows, PANELS, 16, 16).
template <class Type, int PANELS>
void finish_tiles(const Product& p, const float* sums, int row, int rows, int panel) {
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < PANELS; i++) {
      const float* sum = sums + (r / TILE_ROWS * PANELS + i) * TILE_SUMS + r % TILE_ROWS * W;
      finish(p, row + r, (panel + i) * W, load<typename Type::Sum>(sum));
    }
}

// A group of panels for at most 32 rows.
template <class Type, int PANELS>
void group_for_few_rows(const Product& p, const char* x, int64_t x_row, Tail& tail, int panel, float* sums) {
  const int64_t panel_bytes = (int64_t)p.units * 4 * W;
  const char* weight = (const char*)p.weight + panel * panel_bytes;
  constexpr int PAIR = PANELS > 2 ? 2 : PANELS;  // more panels are used with 16 rows only
  const AddTiles add = p.rows > TILE_ROWS ? add_two<Type, PAIR> : add_few<Type, PANELS>;
  add(x, x_row, weight, panel_bytes, p.units / TILE_UNITS, sums, true);
  if (tail.units > 0) {
    tail.take_weight(weight, panel_bytes, PANELS);
    add(tail.x, TILE_BYTES, tail.weight, TILE_UNITS * TILE_BYTES, 1, sums, false);
  }
  finish_tiles<Type, PANELS>(p, sums, 0, p.rows, panel);
}

// Adds `steps` tiles along the inputs, beginning with tile `from`, to the sums of PANELS panels and all rows.
template <class Type, int PANELS>
void add_for_many_rows(const Product& p, const char* x, int64_t x_row, Tail& tail, int panel, int from, int steps,
                       float* sums) {
  const int64_t panel_bytes = (int64_t)p.units * 4 * W;
  const char* weight = (const char*)p.weight + panel * panel_bytes;
  const bool last = from + steps == p.units / TILE_UNITS;
  if (last && tail.units > 0) tail.take_weight(weight, panel_bytes, PANELS);
  for (int row = 0; row < p.rows; row += 2 * TILE_ROWS) {
    const int rows = p.rows - row < 2 * TILE_ROWS ? p.rows - row : 2 * TILE_ROWS;
    if (row == 0 || rows < 2 * TILE_ROWS) {
      configure_tiles(rows < TILE_ROWS ? rows : TILE_ROWS, rows > TILE_ROWS ? rows - TILE_ROWS : 0);
    }
    const AddTiles add = rows > TILE_ROWS ? add_two<Type, PANELS> : add_few<Type, PANELS>;
    float* const place = sums + row / TILE_ROWS * PANELS * TILE_SUMS;
    add(x + row * x_row + (int64_t)from * TILE_BYTES, x_row, weight + (int64_t)from * TILE_UNITS * TILE_BYTES, panel_bytes,
        steps, place, from == 0);
    if (!last) continue;
    if (tail.units > 0)
      add(tail.x + row * TILE_BYTES, TILE_BYTES, tail.weight, TILE_UNITS * TILE_BYTES, 1, place, false);
    finish_tiles<Type, PANELS>(p, place, row, rows, panel);
  }
}

// Panels first .. last - 1 for more than 32 rows. A block of the rows' inputs stays in the cache for several panels.
template <class Type>
void panels_for_many_rows(const Product& p, const char* x, int64_t x_row, Tail& tail, int first, int last, float* sums) {
  const int steps = p.units / TILE_UNITS, block = p.rows > MANY_ROWS ? SMALL_BLOCK : TILE_BLOCK;
  const int64_t panel_sums = (int64_t)(p.rows + TILE_ROWS - 1) / TILE_ROWS * TILE_SUMS;
  int from = 0;
  do {
    const int count = steps - from < block ? steps - from : block;
    float* place = sums;
    for (int panel = first; panel < last; panel += 2) {
      const auto add = panel + 1 < last ? add_for_many_rows<Type, 2> : add_for_many_rows<Type, 1>;
      add(p, x, x_row, tail, panel, from, count, place);
      place += 2 * panel_sums;
    }
    from += count;
  } while (from < steps);
}

template <class Type>
void tiles(const Product& p, const void* x, int64_t x_row, int first, int last, float* sums) {
  const char* rows = (const char*)x;
  Tail tail(p, rows, x_row);
  if (p.rows > 2 * TILE_ROWS) {
    for (int panel = first; panel < last; panel += MOST_TILE_PANELS)
      panels_for_many_rows<Type>(p, rows, x_row, tail, panel,
                                 last - panel < MOST_TILE_PANELS ? last : panel + MOST_TILE_PANELS, sums);
  } else {
    configure_tiles(p.rows < TILE_ROWS ? p.rows : TILE_ROWS, p.rows > TILE_ROWS ? p.rows - TILE_ROWS : 0);
    int panel = first;
    if (p.rows <= TILE_ROWS)
      for (; panel + 4 <= last; panel += 4) group_for_few_rows<Type, 4>(p, rows, x_row, tail, panel, sums);
    for (; panel + 2 <= last; panel += 2) group_for_few_rows<Type, 2>(p, rows, x_row, tail, panel, sums);
    for (; panel < last; panel++) group_for_few_rows<Type, 1>(p, rows, x_row, tail, panel, sums);
  }
  _tile_release();
}

#undef TILE_MULTIPLY

}  // namespace
