// Linear layers with weights of 4 or 8 bits: the C interface, and which thread computes what. Knows nothing of torch.

#include <cstring>
#include <vector>

#include "grouped.h"
#include "parallel.h"
#include "variants.h"
#include "workspace.h"

#define EXPORT __attribute__((visibility("default")))

namespace {

const GroupedMultiply* const VARIANTS[] = {IF_BASELINE(grouped_baseline), IF_AVX2(grouped_avx2), IF_AVX512(grouped_avx512),
                                  IF_AVX512_BF16(grouped_avx512_bf16), IF_AMX(grouped_amx)};

constexpr int LINE = 16;            // numbers of a cache line
constexpr int64_t MUCH = 1 << 16;   // numbers to be prepared by one thread
constexpr int64_t WORTH = 1 << 15;  // bytes of a weight that one thread reads before another has begun
constexpr int PANELS = 8;           // that the inner loops like to take at once

thread_local Workspace input_space;

int64_t numbers_of(const GroupedProduct& p) {
  return (int64_t)p.units * (p.coding == EIGHT_BITS || p.coding == FLOAT8 ? 4 : 8);
}

int64_t rows_at_once(const GroupedProduct& p) { return numbers_of(p) < MUCH ? MUCH / numbers_of(p) : 1; }

// Memory for all rows of x in the format of the inner loops.
GroupedInput allocated(const GroupedProduct& p) {
  const int64_t x_row = (numbers_of(p) + LINE - 1) / LINE * LINE + LINE;  // not a power of 2: rows do not share sets
  float* x = (float*)input_space.at_least(4 * (x_row + 2 * p.groups) * p.rows);
  float* sums = x + x_row * p.rows;
  return {x, x_row, sums, sums + (int64_t)p.groups * p.rows};
}

int panels_of(const GroupedProduct& p, const GroupedMultiply& variant) {
  return (p.outputs + variant.columns - 1) / variant.columns;
}

// Panels that a thread claims at once.
int64_t panels_at_once(const GroupedProduct& p, const GroupedMultiply& variant) {
  int64_t panels = PANELS;
  while (panels * p.units * 4 * variant.columns < WORTH) panels *= 2;
  return panels;
}

void multiply(const GroupedProduct& p, const GroupedMultiply& variant, int threads) {
  const GroupedInput input = allocated(p);
  parallel(p.rows, rows_at_once(p), threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) variant.prepare(p, (int)row, input);
  });
  parallel(panels_of(p, variant), panels_at_once(p, variant), threads,
           [&](int64_t first, int64_t last) { variant.panels(p, input, (int)first, (int)last); });
}

// Rows of one layer, as many as the inner loops take at once.
struct GroupedPiece {
  GroupedProduct product;
  GroupedInput input;
  int64_t first_row;
};

// Eight codes of 4 bits, a byte each, in 32 bits, the first in the lowest.
inline uint32_t packed_nibbles(uint64_t codes) {
  codes = (codes | codes >> 4) & 0x00ff00ff00ff00ff;
  codes = (codes | codes >> 8) & 0x0000ffff0000ffff;
  return (uint32_t)(codes | codes >> 16);
}

// A row of codes as one column of a panel. Codes: NUMBERS in a unit, a byte each.
template <int NUMBERS>
void pack_row(const uint8_t* codes, int inputs, int columns, uint32_t* words) {
  const auto pack = [](const uint8_t* from, int count) {
    uint64_t bytes = 0;  // the machine's order of bytes is the lowest first
    memcpy(&bytes, from, count);
    return NUMBERS == 8 ? packed_nibbles(bytes) : (uint32_t)bytes;
  };
  const int whole = inputs / NUMBERS;
  for (int unit = 0; unit < whole; unit++, words += columns) *words = pack(codes + unit * NUMBERS, NUMBERS);
  if (inputs % NUMBERS) *words = pack(codes + whole * NUMBERS, inputs % NUMBERS);
}

}  // namespace

extern "C" {

EXPORT int serve_llm_groupedproduct_bytes() { return sizeof(GroupedProduct); }

// Outputs of a panel in a variant.
EXPORT int serve_llm_grouped_columns(int variant) { return VARIANTS[variant]->columns; }

// codes: (outputs, inputs), rows of `stride` bytes. words: (panels, units, columns); outputs missing to whole panels and
// inputs missing to whole units become codes of 0.
EXPORT void serve_llm_pack_codes(int bits, const uint8_t* codes, int64_t stride, int outputs, int inputs, int columns,
                                 uint32_t* words, int threads) {
  const int numbers = 32 / bits, units = (inputs + numbers - 1) / numbers;
  parallel((outputs + columns - 1) / columns, PANELS, threads, [=](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; panel++) {
      uint32_t* const to = words + panel * units * columns;
      const int64_t row = panel * columns;
      const int filled = outputs - row < columns ? (int)(outputs - row) : columns;
      if (filled < columns) memset(to, 0, sizeof(uint32_t) * units * columns);
      for (int column = 0; column < filled; column++) {
        const uint8_t* const from = codes + (row + column) * stride;
        if (bits == 4)
          pack_row<8>(from, inputs, columns, to + column);
        else
          pack_row<4>(from, inputs, columns, to + column);
      }
    }
  });
}

EXPORT void serve_llm_grouped_linear(const GroupedProduct* product, int variant, int threads) {
  GroupedProduct piece = *product;
  for (int row = 0; row < product->rows; row += MOST_GROUPED_ROWS) {
    piece.rows = product->rows - row < MOST_GROUPED_ROWS ? product->rows - row : MOST_GROUPED_ROWS;
    multiply(piece, *VARIANTS[variant], threads);
    piece.x = (const char*)piece.x + MOST_GROUPED_ROWS * piece.x_row;
    piece.y = (char*)piece.y + MOST_GROUPED_ROWS * piece.y_row * (piece.y_bf16 ? 2 : 4);
  }
}

// Multiplies each row with the weight of one of `count` layers that differ only in the contents of their weights: rows
// bounds[i] .. bounds[i + 1] - 1 with layer i. all: the rows and the results, and what the layers have in common.
EXPORT void serve_llm_grouped_linear_batch(const GroupedProduct* all, const GroupedProduct* layers, const int64_t* bounds,
                                           int count, int variant, int threads) {
  const GroupedMultiply& loops = *VARIANTS[variant];
  const GroupedInput input = allocated(*all);
  std::vector<GroupedPiece> pieces;
  std::vector<int> piece_of;  // of each row from bounds[0] on
  int64_t row = bounds[0];
  for (int layer = 0; layer < count; layer++)
    while (row < bounds[layer + 1]) {
      GroupedPiece piece = {layers[layer],
                            {input.x + row * input.x_row, input.x_row, input.sums + row * all->groups,
                             input.scales + row * all->groups},
                            row};
      GroupedProduct& p = piece.product;
      p.rows = bounds[layer + 1] - row < MOST_GROUPED_ROWS ? (int)(bounds[layer + 1] - row) : MOST_GROUPED_ROWS;
      p.x = (const char*)all->x + row * all->x_row;
      p.x_row = all->x_row;
      p.x_bf16 = all->x_bf16;
      p.y = (char*)all->y + row * all->y_row * (all->y_bf16 ? 2 : 4);
      p.y_bf16 = all->y_bf16;
      row += p.rows;
      piece_of.resize(row - bounds[0], (int)pieces.size());
      pieces.push_back(piece);
    }
  parallel(row - bounds[0], rows_at_once(*all), threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const GroupedPiece& piece = pieces[piece_of[i]];
      loops.prepare(piece.product, (int)(bounds[0] + i - piece.first_row), piece.input);
    }
  });
  const int panels = panels_of(*all, loops);
  const int64_t at_once = panels_at_once(*all, loops), chunks = (panels + at_once - 1) / at_once;
  parallel(pieces.size() * chunks, 1, threads, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; chunk++) {
      const GroupedPiece& piece = pieces[chunk / chunks];
      const int64_t panel = chunk % chunks * at_once, end = panel + at_once < panels ? panel + at_once : panels;
      loops.panels(piece.product, piece.input, (int)panel, (int)end);
    }
  });
}

}  // extern "C"
