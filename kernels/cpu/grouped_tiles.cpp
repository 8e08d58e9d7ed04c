// Products of rows of bfloat16 with weights of 4 or 8 bits by AMX, the matrix units of Intel's processors.
//
// A panel is unpacked to pairs of bfloat16, in tiles of 16 steps along the inputs, a few tiles before they are multiplied
// by up to 64 rows at once. Each group begins with a tile of its own and is padded with zeros to whole tiles, so a group's
// sum takes the same instructions whatever the other rows. Products that bfloat16 cannot hold go to the AVX512-BF16
// variant.

#include "amx.h"
#include "grouped_parts.h"

namespace {

constexpr int TILE_STEPS = TILE_UNITS;  // pairs of numbers
constexpr int TILE_SUMS = TILE_ROWS * W;
constexpr int MOST_TILES = 4;  // tiles of rows that are multiplied at once
constexpr int RING = 4;        // unpacked tiles: the current one, RING - 2 ahead, and one that may still be read

// Registers 0 .. 3 hold sums, 4 rows, 5 those of the last tile, 6 a weight.
inline void configure_tiles(int rows) {
  const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  TileConfig config;
  config.rows[tiles - 1] = config.rows[5] = rows - (tiles - 1) * TILE_ROWS;
  _tile_loadconfig(&config);
}

struct alignas(64) Ring {
  Vec tiles[RING][TILE_STEPS];
};

// Unpacks a panel's tiles one after another.
template <class Codes>
class Unpacker {
 public:
  static constexpr int UNITS = TILE_STEPS / Codes::STEPS;  // units of codes in a tile

  Unpacker(const GroupedProduct& p, int panel, Ring& ring)
      : p_(p), from_(p.weight + (int64_t)panel * p.units * COLUMNS), ring_(ring), left_(end_unit(p, 0)) {
    for (int i = 0; i < RING; i++) steps_[i] = TILE_STEPS;
    for (int i = 0; i < RING - 2; i++) unpack();
  }
  // The next tile. It stays valid until the call after next.
  const Vec* next() {
    unpack();
    return ring_.tiles[taken_++ % RING];
  }

 private:
  void unpack() {
    if (group_ == p_.groups) return;
    const int slot = unpacked_++ % RING;
    Vec* to = ring_.tiles[slot];
    if (left_ >= UNITS) {
      unpack_units<UNITS>(to);
      steps_[slot] = TILE_STEPS;
    } else {
      const int steps = left_ * Codes::STEPS;
      for (int i = steps; i < steps_[slot]; i++) to[i] = Vec{};  // what follows is zero already
      steps_[slot] = steps;
      if (left_ >= UNITS / 2) {
        unpack_units<UNITS / 2>(to);
        to += TILE_STEPS / 2;
      }
      for (; left_ > 0; to += Codes::STEPS) unpack_units<1>(to);
    }
    if (left_ > 0) return;
    group_++;
    if (group_ < p_.groups) left_ = end_unit(p_, group_) - first_unit(p_, group_);
  }
  template <int COUNT>
  __attribute__((always_inline)) void unpack_units(Vec* to) {
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; i++) {
      __builtin_prefetch(from_ + (FETCH_AHEAD + i) * COLUMNS);
      unpack_unit(to + i * Codes::STEPS, typename Codes::Unit(p_, from_ + i * COLUMNS),
                  std::make_index_sequence<Codes::STEPS>());
    }
    from_ += COUNT * COLUMNS;
    left_ -= COUNT;
  }

  const GroupedProduct& p_;
  const uint32_t* from_;
  Ring& ring_;
  int left_, group_ = 0;             // units of the group
  int unpacked_ = 0, taken_ = 0;     // tiles
  int steps_[RING];                  // that are not padding
};

// `rows` rows from `row` on, in TILES tiles, and one panel.
template <class Codes, int TILES>
void panel_of_rows(const GroupedProduct& p, const GroupedInput& input, int row, int rows, int panel) {
  const int64_t row_bytes = 4 * input.x_row, tile_bytes = TILE_ROWS * row_bytes;
  Ring ring;
  Unpacker<Codes> weight(p, panel, ring);
  alignas(64) float sums[TILES * TILE_SUMS];
  Vec total[TILES * TILE_ROWS];
  for (int r = 0; r < rows; r++) total[r] = Vec{};
// The operands of these instructions must be literals.
#define EACH(DO) \
  DO(0);         \
  if constexpr (TILES > 1) { DO(1); } \
  if constexpr (TILES > 2) { DO(2); } \
  if constexpr (TILES > 3) { DO(3); }
#define ADD(i)                                       \
  if constexpr ((i) + 1 < TILES) {                   \
    _tile_loadd(4, x + (i) * tile_bytes, row_bytes); \
    _tile_dpbf16ps(i, 4, 6);                         \
  } else {                                           \
    _tile_loadd(5, x + (i) * tile_bytes, row_bytes); \
    _tile_dpbf16ps(i, 5, 6);                         \
  }
#define STORE(i) _tile_stored(i, sums + (i) * TILE_SUMS, TILE_BYTES)
  for (int group = 0; group < p.groups; group++) {
    EACH(_tile_zero)
    const int end = end_unit(p, group);
    for (int unit = first_unit(p, group); unit < end; unit += Unpacker<Codes>::UNITS) {
      const Vec* const tile = weight.next();
      asm volatile("" ::: "memory");  // what tiles read has been written
      const char* const x = (const char*)(input.x + row * input.x_row + unit * Codes::STEPS);
      _tile_loadd(6, tile, TILE_BYTES);
      EACH(ADD)
    }
    EACH(STORE)
    const GroupScales scales(p, panel, group);
    const float* x_sums = input.sums + (int64_t)row * p.groups + group;
    for (int r = 0; r < rows; r++)
      add_group(p, scales, x_sums[(int64_t)r * p.groups], load<Vec>(sums + r * W), total[r]);
  }
#undef EACH
#undef ADD
#undef STORE
  for (int r = 0; r < rows; r++) finish_sum(p, row + r, panel, total[r]);
}

template <class Codes>
void panels_of_codes(const GroupedProduct& p, const GroupedInput& input, int first, int last) {
  constexpr int MOST = MOST_TILES * TILE_ROWS;
  for (int row = 0; row < p.rows; row += MOST) {
    const int rows = p.rows - row < MOST ? p.rows - row : MOST;
    configure_tiles(rows);
    const auto multiply = rows > 3 * TILE_ROWS ? panel_of_rows<Codes, 4>
                          : rows > 2 * TILE_ROWS ? panel_of_rows<Codes, 3>
                          : rows > TILE_ROWS     ? panel_of_rows<Codes, 2>
                                                 : panel_of_rows<Codes, 1>;
    for (int panel = first; panel < last; panel++) multiply(p, input, row, rows, panel);
  }
  _tile_release();
}

void prepare(const GroupedProduct& p, int row, const GroupedInput& input) {
  if (!takes_pairs(p)) return grouped_avx512_bf16.prepare(p, row, input);
  float* const x = input.x + row * input.x_row;
  float* const sums = input.sums + (int64_t)row * p.groups;
  if (p.coding == FOUR_BITS) prepare_pairs<NumberPairs>(p, row, x, sums);
  if (p.coding == TABLE) prepare_pairs<IndexPairs>(p, row, x, sums);
  if (p.coding == FLOAT8) prepare_pairs<Float8Pairs>(p, row, x, sums);
  // The last tile may read past the row.
  const int steps = p.units * (p.coding == FLOAT8 ? Float8Pairs::STEPS : FourBitPairs::STEPS);
  store(x + steps, Vec{});
}

void panels(const GroupedProduct& p, const GroupedInput& input, int first, int last) {
  if (!takes_pairs(p)) return grouped_avx512_bf16.panels(p, input, first, last);
  if (p.coding == FOUR_BITS) panels_of_codes<NumberPairs>(p, input, first, last);
  if (p.coding == TABLE) panels_of_codes<IndexPairs>(p, input, first, last);
  if (p.coding == FLOAT8) panels_of_codes<Float8Pairs>(p, input, first, last);
}

}  // namespace

const GroupedMultiply JOIN(grouped, VARIANT) = {COLUMNS, prepare, panels};
