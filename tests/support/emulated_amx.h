// AMX's instructions in plain C++, included before multiply.cpp, so that its tile loops run on any processor with AVX-512.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

namespace emulated {

inline thread_local uint8_t tiles[8][16][64];
inline thread_local int rows[8];

inline void load_config(const void* config) {
  for (int i = 0; i < 8; i++) rows[i] = ((const uint8_t*)config)[48 + i];
}

inline void load(int tile, const void* from, int64_t stride) {
  for (int row = 0; row < rows[tile]; row++) memcpy(tiles[tile][row], (const char*)from + row * stride, 64);
}

inline void store(int tile, void* to, int64_t stride) {
  for (int row = 0; row < rows[tile]; row++) memcpy((char*)to + row * stride, tiles[tile][row], 64);
}

inline float widen(const uint8_t* from) {
  const uint8_t bytes[4] = {0, 0, from[0], from[1]};
  float x;
  memcpy(&x, bytes, 4);
  return x;
}

inline void multiply_bf16(int sum, int a, int b) {
  for (int row = 0; row < rows[sum]; row++)
    for (int column = 0; column < 16; column++) {
      float total;
      memcpy(&total, &tiles[sum][row][4 * column], 4);
      for (int i = 0; i < 32; i++)
        total += widen(&tiles[a][row][2 * i]) * widen(&tiles[b][i / 2][4 * column + 2 * (i % 2)]);
      memcpy(&tiles[sum][row][4 * column], &total, 4);
    }
}

inline void multiply_int8(int sum, int a, int b) {
  for (int row = 0; row < rows[sum]; row++)
    for (int column = 0; column < 16; column++) {
      int32_t total;
      memcpy(&total, &tiles[sum][row][4 * column], 4);
      for (int i = 0; i < 64; i++) total += tiles[a][row][i] * (int8_t)tiles[b][i / 4][4 * column + i % 4];
      memcpy(&tiles[sum][row][4 * column], &total, 4);
    }
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#undef _tile_release
#define _tile_loadconfig(config) emulated::load_config(config)
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_zero(tile) memset(emulated::tiles[tile], 0, 1024)
#define _tile_dpbf16ps(sum, a, b) emulated::multiply_bf16(sum, a, b)
#define _tile_dpbusd(sum, a, b) emulated::multiply_int8(sum, a, b)
#define _tile_release() (void)0
