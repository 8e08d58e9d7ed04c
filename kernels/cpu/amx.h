// What products by AMX, the matrix units of Intel's processors, share.
#pragma once

#include <cstdint>

namespace {

constexpr int TILE_ROWS = 16;   // rows of a tile register
constexpr int TILE_UNITS = 16;  // units of 32 bits in a row of a tile
constexpr int TILE_BYTES = 4 * TILE_UNITS;

// The shapes of the tile registers. All are whole tiles until they are changed.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  TileConfig() {
    for (int i = 0; i < 8; i++) row_bytes[i] = TILE_BYTES, rows[i] = TILE_ROWS;
  }
};

}  // namespace
