// What grouped_linear.cpp (which thread computes what) and grouped.cpp (the inner loops, compiled once per instruction
// set) agree on: products with weights of 4 or 8 bits that share a scale by groups of inputs.
//
// A packed weight is cut into panels of `columns` outputs, each its part of the weight, transposed: (units, columns),
// where a unit is 32 bits: 8 or 4 neighbouring inputs, the first in the lowest bits. No unit belongs to two groups.
#pragma once

#include <cstdint>

constexpr int MOST_GROUPED_ROWS = 240;  // rows of one call of the inner loops: their inputs and sums stay in the cache

// Codes of 4 bits less 8; of 4 bits as indices of a table; of 8 bits less 128; of 8 bits as float8_e4m3fn.
enum Coding { FOUR_BITS, TABLE, EIGHT_BITS, FLOAT8 };

// How scales, zeros and minimums are stored. E8M0 and E4M3 are torch's float8_e8m0fnu and float8_e4m3fn.
enum ScaleType { SCALE_FLOAT32, SCALE_FLOAT16, SCALE_BFLOAT16, SCALE_E8M0, SCALE_E4M3 };

// y = x @ weight.T (+ bias), weight = (code - zero) * scale / divisor - minimum; never with divisor and minimum.
struct GroupedProduct {
  Coding coding;
  const void* x;  // (rows, inputs) bfloat16 or float32
  int64_t x_row;  // bytes from one row to the next
  bool x_bf16;
  int rows, inputs, outputs;
  const uint32_t* weight;  // packed
  const float* table;      // 16 numbers, or null
  const void* scale;       // (panels, groups, columns)
  const void* zero;        // the same, or null
  const void* minimum;     // the same, or null
  ScaleType scale_type;
  const float* divisor;    // (whole panels of outputs) or null
  const float* bias;       // the same
  void* y;                 // (rows, outputs) bfloat16 or float32
  int64_t y_row;           // numbers from one row to the next
  bool y_bf16;
  int units, groups;
  int first_units, group_units;  // units of the first group, and of the others but the last
};

// Rows of x as the inner loops want them.
struct GroupedInput {
  float* x;       // (rows, whole units of inputs)
  int64_t x_row;  // numbers from one row to the next
  float* sums;    // (rows, groups), of the inputs: what is to be subtracted for codes that stand for one more; for inputs in
                  // int8 (groups, rows)
  float* scales;  // (groups, rows), of inputs in int8
};

// Of one instruction set.
struct GroupedMultiply {
  int columns;    // columns of a panel
  // Row `row` of x: widened and scaled by what the place of a code in its unit multiplies it with, in pairs of bfloat16, or
  // rounded to int8 with a scale for each group; and its groups' sums where they are needed.
  void (*prepare)(const GroupedProduct&, int row, const GroupedInput&);
  // Panels first .. last - 1 of all rows.
  void (*panels)(const GroupedProduct&, const GroupedInput&, int first, int last);
};

// The same two for rows in int8 (grouped_bytes.cpp).
typedef void PrepareBytes(const GroupedProduct&, int, const GroupedInput&);
typedef void PanelsOfBytes(const GroupedProduct&, const GroupedInput&, int, int);
extern PrepareBytes prepare_bytes_avx2, prepare_bytes_avx512, prepare_bytes_avx512_bf16;
extern PanelsOfBytes panels_of_bytes_avx2, panels_of_bytes_avx512, panels_of_bytes_avx512_bf16;

// Those that are compiled.
extern const GroupedMultiply grouped_baseline, grouped_avx2, grouped_avx512, grouped_avx512_bf16, grouped_amx;
