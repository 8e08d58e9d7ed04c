// Linear layers with packed weights: the C interface, and the division of work between threads. Independent of torch.

#include "linear.h"

#include <cstring>
#include <vector>

#include "parallel.h"
#include "variants.h"
#include "workspace.h"

#define EXPORT __attribute__((visibility("default")))

namespace {

const Multiply* const VARIANTS[] = {IF_BASELINE(multiply_baseline), IF_AVX2(multiply_avx2), IF_AVX512(multiply_avx512),
                                  IF_AVX512_BF16(multiply_avx512_bf16), IF_AMX(multiply_amx)};

constexpr int LINE = 64;           // bytes of a cache line
constexpr int64_t MUCH = 1 << 16;  // bytes up to which one thread copies alone
constexpr int64_t WORTH = 1 << 16;  // bytes of a weight that one thread reads before another has started
constexpr int EQUAL_ROWS = 8;        // multiplying so many rows takes at least as long as reading the weight
constexpr int PANELS = 4;           // that the inner loops take at once, at most
static_assert(PANELS % 2 == 0, "compressed panels are multiplied in pairs, so a thread's first panel must be even");

thread_local Workspace sums_space, input_space;

int64_t rows_at_once(int64_t row_size) { return row_size < MUCH ? MUCH / row_size : 1; }

// The rows in the format of the inner loops.
struct Input {
  const void* x;
  int64_t row;
};

void widen_bfloat16(const char* x, int units, uint32_t* wide) {
  for (int i = 0; i < units; i++) {
    uint32_t pair;
    memcpy(&pair, x + 4 * (int64_t)i, 4);
    wide[2 * i] = pair << 16;
    wide[2 * i + 1] = pair & 0xffff0000u;
  }
}

void widen_bytes(const char* x, int units, uint32_t* wide) {
  for (int i = 0; i < units; i++) {
    uint32_t four;
    memcpy(&four, x + 4 * (int64_t)i, 4);
    wide[2 * i] = four & 0x00ff00ffu;
    wide[2 * i + 1] = four >> 8 & 0x00ff00ffu;
  }
}

Input widened(const Product& p, int threads) {
  const int64_t numbers = 2 * (int64_t)p.units, row_numbers = numbers + LINE / 4;
  uint32_t* wide = (uint32_t*)input_space.at_least(4 * row_numbers * p.rows);
  const auto widen = p.kind == INT8 ? widen_bytes : widen_bfloat16;
  parallel(p.rows, rows_at_once(numbers), threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
      widen((const char*)p.x + row * p.x_row, p.units, wide + row * row_numbers);
  });
  return {wide, 4 * row_numbers};
}

// Rows at multiples of this distance in bytes share few sets of the L1 cache and evict each other.
constexpr int ALIKE = 1024, FEW_ROWS = 4;

Input spread(const Product& p, int threads) {
  const int64_t bytes = 4 * (int64_t)p.units, row_bytes = bytes + LINE;
  char* apart = (char*)input_space.at_least(row_bytes * p.rows);
  parallel(p.rows, rows_at_once(bytes), threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
      memcpy(apart + row * row_bytes, (const char*)p.x + row * p.x_row, bytes);
  });
  return {apart, row_bytes};
}

Input input_of(const Product& p, const Multiply& variant, int threads) {
  if (variant.widens(p.kind)) return widened(p, threads);
  if (p.rows > FEW_ROWS && p.x_row % ALIKE == 0) return spread(p, threads);
  return {p.x, p.x_row};
}

// Panels that a thread claims at once: enough to be worth it, but not so many that other threads wait.
int64_t panels_at_once(const Product& p, const Multiply& variant) {
  const int64_t panel_bytes = (int64_t)p.units * 4 * variant.columns;
  const int64_t panel_work = panel_bytes * (1 + p.rows / EQUAL_ROWS);
  int64_t panels = PANELS;
  while (panels * panel_work < WORTH) panels *= 2;
  return panels;
}

int panels_of(const Multiply& variant, int outputs) { return (outputs + variant.columns - 1) / variant.columns; }

void multiply(const Product& p, const Multiply& variant, int threads) {
  const Input input = input_of(p, variant, threads);
  parallel(panels_of(variant, p.outputs), panels_at_once(p, variant), threads, [&](int64_t first, int64_t last) {
    float* sums = (float*)sums_space.at_least(PANELS * 4 * (int64_t)variant.columns * variant.most_rows);
    variant.panels(p, input.x, input.row, (int)first, (int)last, sums);
  });
}

// Rows of one layer, as many as the inner loops take at once.
struct Piece {
  Product product;
  const void* x;
};

}  // namespace

extern "C" {

EXPORT int serve_llm_product_bytes() { return sizeof(Product); }

// Outputs in a panel of a variant.
EXPORT int serve_llm_panel_columns(int variant) { return VARIANTS[variant]->columns; }

// Whether a variant can compress weights in bfloat16.
EXPORT int serve_llm_compresses(int variant) { return VARIANTS[variant]->choose_codes != nullptr; }

// rows: (outputs) addresses of `row_bytes` of weights. packed: (panels, units, columns) units of 32 bits.
EXPORT void serve_llm_pack(int variant, const char* const* rows, int64_t row_bytes, int outputs, uint32_t* packed,
                           int threads) {
  const Multiply& multiply = *VARIANTS[variant];
  const int panels = panels_of(multiply, outputs);
  parallel(panels, PANELS, threads, [&](int64_t first, int64_t last) {
    multiply.pack(rows, row_bytes, outputs, (int)first, (int)last, packed);
  });
}

// The codes of a compressed weight. rows, row_bytes, outputs: as above. upper_bytes, counts: see packing.h.
EXPORT void serve_llm_choose_codes(int variant, const char* const* rows, int64_t row_bytes, int outputs,
                                   uint8_t* upper_bytes, int32_t* counts, int threads) {
  const Multiply& multiply = *VARIANTS[variant];
  parallel(panels_of(multiply, outputs), PANELS, threads, [&](int64_t first, int64_t last) {
    multiply.choose_codes(rows, row_bytes, outputs, (int)first, (int)last, upper_bytes, counts);
  });
}

// packed: (pairs of panels, quads of units, 2, 3, columns) units of 32 bits.
EXPORT void serve_llm_pack_compressed(int variant, const char* const* rows, int64_t row_bytes, int outputs,
                                      const uint8_t* upper_bytes, const int32_t* starts, uint32_t* rare, uint32_t* packed,
                                      int threads) {
  const Multiply& multiply = *VARIANTS[variant];
  const int panels = panels_of(multiply, outputs), even = panels + panels % 2;
  parallel(even, PANELS, threads, [&](int64_t first, int64_t last) {
    multiply.pack_compressed(rows, row_bytes, outputs, (int)first, (int)last, upper_bytes, starts, rare, packed);
  });
}

EXPORT void serve_llm_linear(const Product* product, int variant, int threads) {
  Product piece = *product;
  const int most = VARIANTS[variant]->most_rows;
  for (int row = 0; row < product->rows; row += most) {
    piece.rows = product->rows - row < most ? product->rows - row : most;
    multiply(piece, *VARIANTS[variant], threads);
    piece.x = (const char*)piece.x + most * piece.x_row;
    piece.y = (char*)piece.y + most * piece.y_row * (piece.y_bf16 ? 2 : 4);
    if (piece.x_scale != nullptr) piece.x_scale += most;
  }
}

// Multiplies each row with the weight of one of `count` layers that differ only in weight, bias, weight_scale and start:
// rows bounds[i] .. bounds[i + 1] - 1 with layer i. all: the rows and the results, and what the layers have in common.
EXPORT void serve_llm_linear_batch(const Product* all, const Product* layers, const int64_t* bounds, int count,
                                   int variant, int threads) {
  const Multiply& loops = *VARIANTS[variant];
  const Input input = input_of(*all, loops, threads);
  std::vector<Piece> pieces;
  int64_t row = bounds[0];
  for (int layer = 0; layer < count; layer++)
    while (row < bounds[layer + 1]) {
      Piece piece = {layers[layer], (const char*)input.x + row * input.row};
      Product& p = piece.product;
      p.rows = bounds[layer + 1] - row < loops.most_rows ? (int)(bounds[layer + 1] - row) : loops.most_rows;
      if (all->x_scale != nullptr) p.x_scale = all->x_scale + row;
      p.y = (char*)all->y + row * all->y_row * (all->y_bf16 ? 2 : 4);
      p.y_bf16 = all->y_bf16;
      row += p.rows;
      pieces.push_back(piece);
    }
  const int panels = panels_of(loops, all->outputs);
  const int64_t at_once = panels_at_once(*all, loops), chunks = (panels + at_once - 1) / at_once;
  parallel(pieces.size() * chunks, 1, threads, [&](int64_t first, int64_t last) {
    float* sums = (float*)sums_space.at_least(PANELS * 4 * (int64_t)loops.columns * loops.most_rows);
    for (int64_t chunk = first; chunk < last; chunk++) {
      const Piece& piece = pieces[chunk / chunks];
      const int64_t panel = chunk % chunks * at_once, end = panel + at_once < panels ? panel + at_once : panels;
      loops.panels(piece.product, piece.x, input.row, (int)panel, (int)end, sums);
    }
  });
}

}  // extern "C"
