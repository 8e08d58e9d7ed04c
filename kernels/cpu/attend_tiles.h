// The products of attention by AMX, the matrix units of Intel's processors: pairs of bfloat16, up to 16 rows at once.
//
// 16 units of 16 columns of a panel are one tile, read where they lie. Whatever the number of rows, a row's sums take the
// same instructions: units are added 16 at a time in ascending order, the rest with a tile of its own size.
#pragma once

#include "amx.h"
#include "vector.h"

namespace {

// Registers 0 .. 3 hold sums, 4 rows, 5 columns, 6 and 7 the rest of rows and columns after whole tiles.
inline void configure_tiles(int rows, int rest) {
  TileConfig config;
  for (int i = 0; i < 5; i++) config.rows[i] = rows;
  config.rows[6] = rows;
  if (rest > 0) {
    config.rows[7] = rest;
    config.row_bytes[6] = 4 * rest;
  }
  _tile_loadconfig(&config);
}

// c[r][0 .. V vectors) = sum over k of a[r][k] * b[k], for as many rows as are configured; a line of b is `line` units.
template <int V>
inline void multiply_tiles(const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t line, int steps, float* c,
                           int64_t c_row) {
// The operands of these instructions must be literals.
#define EACH(DO) \
  DO(0);         \
  if constexpr (V > 1) { DO(1); } \
  if constexpr (V > 2) { DO(2); } \
  if constexpr (V > 3) { DO(3); }
#define ADD(v)                                  \
  _tile_loadd(5, b + k * line + (v) * W, 4 * line); \
  _tile_dpbf16ps(v, 4, 5)
#define ADD_REST(v)                             \
  _tile_loadd(7, b + k * line + (v) * W, 4 * line); \
  _tile_dpbf16ps(v, 6, 7)
#define STORE(v) _tile_stored(v, c + (v) * W, 4 * c_row)
  EACH(_tile_zero)
  int64_t k = 0;
  for (; k + TILE_UNITS <= steps; k += TILE_UNITS) {
    _tile_loadd(4, a + k, 4 * a_row);
    EACH(ADD)
  }
  if (k < steps) {
    _tile_loadd(6, a + k, 4 * a_row);
    EACH(ADD_REST)
  }
  EACH(STORE)
#undef EACH
#undef ADD
#undef ADD_REST
#undef STORE
}

}  // namespace
