// Linear layers with packed weights: the C interface, and which thread computes what. Knows nothing of torch.

#include "linear.h"

#include <omp.h>

#include <cstring>

#include "workspace.h"

#define EXPORT __attribute__((visibility("default")))

namespace {

const Multiply* const VARIANTS[] = {
    &multiply_baseline,
#if defined(__x86_64__)
    &multiply_avx2,
    &multiply_avx512,
    &multiply_avx512_bf16,
#endif
};

constexpr int ROWS_AT_ONCE = 252;  // their sums of one panel stay in the cache
constexpr int LINE = 64;           // bytes of a cache line
constexpr int64_t MUCH = 1 << 16;  // to be copied by one thread

thread_local Workspace sums_space, input_space;

// The rows as the inner loops want them.
struct Input {
  const void* x;
  int64_t row;
};

Input widened(const Product& p, int threads) {
  const int64_t numbers = 2 * (int64_t)p.units, row_numbers = numbers + LINE / 4;
  float* wide = (float*)input_space.at_least(4 * row_numbers * p.rows);
#pragma omp parallel for schedule(static) num_threads(threads) if (numbers * p.rows > MUCH)
  for (int row = 0; row < p.rows; row++) {
    const uint16_t* x = (const uint16_t*)((const char*)p.x + row * p.x_row);
    for (int64_t i = 0; i < numbers; i++) {
      const uint32_t bits = (uint32_t)x[i] << 16;
      memcpy(wide + row * row_numbers + i, &bits, 4);
    }
  }
  return {wide, 4 * row_numbers};
}

// Rows whose distance is a multiple of so many bytes share few sets of the L1 cache and drive each other out of it.
constexpr int ALIKE = 1024, FEW_ROWS = 4;

Input spread(const Product& p, int threads) {
  const int64_t bytes = 4 * (int64_t)p.units, row_bytes = bytes + LINE;
  char* apart = (char*)input_space.at_least(row_bytes * p.rows);
#pragma omp parallel for schedule(static) num_threads(threads) if (bytes * p.rows > MUCH)
  for (int row = 0; row < p.rows; row++) memcpy(apart + row * row_bytes, (const char*)p.x + row * p.x_row, bytes);
  return {apart, row_bytes};
}

Input input_of(const Product& p, const Multiply& variant, int threads) {
  if (variant.widens(p.kind)) return widened(p, threads);
  if (p.rows > FEW_ROWS && p.x_row % ALIKE == 0) return spread(p, threads);
  return {p.x, p.x_row};
}

int panels_of(const Multiply& variant, int outputs) { return (outputs + variant.columns - 1) / variant.columns; }

void multiply(const Product& p, const Multiply& variant, int threads) {
  const Input input = input_of(p, variant, threads);
  const int panels = panels_of(variant, p.outputs);
#pragma omp parallel num_threads(threads) if (threads > 1 && panels > 1)
  {
    const int team = omp_get_num_threads(), thread = omp_get_thread_num();
    float* sums = (float*)sums_space.at_least(4 * (int64_t)variant.columns * ROWS_AT_ONCE);
    variant.panels(p, input.x, input.row, (int)((int64_t)panels * thread / team),
                   (int)((int64_t)panels * (thread + 1) / team), sums);
  }
}

}  // namespace

extern "C" {

EXPORT int serve_llm_product_bytes() { return sizeof(Product); }

// Outputs of a panel in a variant; 0 if it does not have that kind of product.
EXPORT int serve_llm_panel_columns(int variant, int kind) {
  return VARIANTS[variant]->has((Kind)kind) ? VARIANTS[variant]->columns : 0;
}

// rows: (outputs) addresses of `row_bytes` of weights. packed: (panels, units, columns) units of 32 bits.
EXPORT void serve_llm_pack(int variant, const char* const* rows, int64_t row_bytes, int outputs, uint32_t* packed,
                           int threads) {
  const Multiply& multiply = *VARIANTS[variant];
  const int panels = panels_of(multiply, outputs);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int panel = 0; panel < panels; panel++)
    multiply.pack(rows, row_bytes, outputs, panel, panel + 1, packed);
}

EXPORT void serve_llm_linear(const Product* product, int variant, int threads) {
  Product piece = *product;
  for (int row = 0; row < product->rows; row += ROWS_AT_ONCE) {
    piece.rows = product->rows - row < ROWS_AT_ONCE ? product->rows - row : ROWS_AT_ONCE;
    multiply(piece, *VARIANTS[variant], threads);
    piece.x = (const char*)piece.x + ROWS_AT_ONCE * piece.x_row;
    piece.y = (char*)piece.y + ROWS_AT_ONCE * piece.y_row * (piece.y_bf16 ? 2 : 4);
    if (piece.x_scale != nullptr) piece.x_scale += ROWS_AT_ONCE;
  }
}

}  // extern "C"
