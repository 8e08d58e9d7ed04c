// Looks up rows of packed and plain matrices, as an embedding does, and adds rows. Independent of torch.

#include <cstring>

#include "grouped.h"
#include "grouped_codes.h"
#include "linear.h"
#include "parallel.h"
#include "vector.h"

#define EXPORT __attribute__((visibility("default")))

namespace {

constexpr int64_t ALONE = 4096;  // numbers that one thread looks up before another one has started

float stored_number(const void* numbers, ScaleType type, int64_t i) {
  return load_scale(numbers, type, i - i % W)[i % W];  // whole panels are whole vectors
}

// The rows that are looked up.
struct Output {
  void* rows;  // (count, inputs) bfloat16 or float32
  bool bf16;
  int inputs;
  void put(int64_t row, int input, float x) const {
    const int64_t at = row * inputs + input;
    if (bf16)
      ((Bf16*)rows)[at] = rounded(x);
    else
      ((float*)rows)[at] = x;
  }
};

int64_t rows_alone(int64_t width) { return width < ALONE ? ALONE / width : 1; }

// Each number as (value - zero) * (scale / divisor) - minimum.
void look_up_grouped(const GroupedProduct& p, int columns, const float* values, int64_t id, const Output& output,
                     int64_t row) {
  const int bits = p.coding == EIGHT_BITS || p.coding == FLOAT8 ? 8 : 4, numbers = 32 / bits;
  const int64_t panel = id / columns, column = id % columns;
  int unit = 0;
  for (int group = 0; group < p.groups; group++) {
    const int64_t at = (panel * p.groups + group) * columns + column;
    float scale = stored_number(p.scale, p.scale_type, at);
    if (p.divisor != nullptr) scale /= p.divisor[id];
    const float zero = p.zero == nullptr ? 0 : stored_number(p.zero, p.scale_type, at);
    const float minimum = p.minimum == nullptr ? 0 : stored_number(p.minimum, p.scale_type, at);
    const int end = group == p.groups - 1 ? p.units : p.first_units + group * p.group_units;
    for (; unit < end; unit++) {
      const uint32_t word = p.weight[(panel * p.units + unit) * columns + column];
      for (int i = 0, input = unit * numbers; i < numbers && input < p.inputs; i++, input++) {
        float x = values[word >> (i * bits) & ((1u << bits) - 1)];
        if (p.zero != nullptr) x -= zero;
        x *= scale;
        if (p.minimum != nullptr) x -= minimum;
        output.put(row, input, x);
      }
    }
  }
}

}  // namespace

extern "C" {

// table: rows of `row_bytes` each. ids: (count), negative ones from the end. output: (count) rows.
EXPORT void serve_llm_gather_rows(const char* table, int64_t rows, int64_t row_bytes, const int64_t* ids, int64_t count,
                                  char* output, int threads) {
  parallel(count, rows_alone(row_bytes), threads, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const int64_t row = ids[i] < 0 ? ids[i] + rows : ids[i];
      memcpy(output + i * row_bytes, table + row * row_bytes, row_bytes);
    }
  });
}

// x + y, rounded once. x, sum: (rows, width) bfloat16 or float32. y: the same, with `y_row` numbers from one row to the
// next, which may be 0.
EXPORT void serve_llm_add_rows(int bf16, const void* x, const void* y, int64_t y_row, void* sum, int64_t rows,
                               int64_t width, int threads) {
  parallel(rows, rows_alone(width), threads, [=](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
      for (int64_t i = 0; i < width; i++) {
        const int64_t at = row * width + i, y_at = row * y_row + i;
        if (bf16)
          ((Bf16*)sum)[at] = rounded(widened(((const Bf16*)x)[at]) + widened(((const Bf16*)y)[y_at]));
        else
          ((float*)sum)[at] = ((const float*)x)[at] + ((const float*)y)[y_at];
      }
  });
}

// ids: (count). columns: of a panel. values: of the codes. output: (count, inputs).
EXPORT void serve_llm_look_up_grouped(const GroupedProduct* product, int columns, const float* values, const int64_t* ids,
                                      int64_t count, void* output, int bf16, int threads) {
  const Output rows = {output, bf16 != 0, product->inputs};
  parallel(count, rows_alone(product->inputs), threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) look_up_grouped(*product, columns, values, ids[row], rows, row);
  });
}

// The same for a weight in int8.
EXPORT void serve_llm_look_up_int8(const Product* product, int columns, int inputs, const int64_t* ids, int64_t count,
                                   void* output, int bf16, int threads) {
  const Product& p = *product;
  const Output rows = {output, bf16 != 0, inputs};
  parallel(count, rows_alone(inputs), threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      const int64_t panel = ids[row] / columns, column = ids[row] % columns;
      const float scale = p.weight_scale[ids[row]];
      for (int input = 0; input < inputs; input++) {
        const uint32_t word = p.weight[(panel * p.units + input / 4) * columns + column];
        rows.put(row, input, (float)(int8_t)(word >> (input % 4 * 8)) * scale);
      }
    }
  });
}

}  // extern "C"
