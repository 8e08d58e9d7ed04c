// Shared by linear.cpp (division of work between threads) and multiply.cpp (the inner loops, compiled once per
// instruction set).
//
// All types are processed in units of 32 bits: one float32 number, two bfloat16 or four int8. A packed weight consists
// of panels of `columns` outputs; a panel is a transposed part of the weight: (units of a row, columns).
#pragma once

#include <cstdint>

enum Kind { FLOAT32, BFLOAT16, INT8 };

// y = x @ weight.T (+ bias); for INT8 (x - 128) @ weight.T, times the scales of rows and of columns.
struct Product {
  Kind kind;
  const void* x;       // (rows, inputs), of the weight's type, or uint8 for INT8; rows of whole units
  int64_t x_row;       // bytes from one row to the next
  int rows;
  const uint32_t* weight;      // packed
  // A compressed weight (compressed.h), BFLOAT16 only; otherwise null:
  const uint8_t* upper_bytes;   // (panels, 16) that the codes stand for; an even number of panels
  const int32_t* rare_starts;   // (panels + 1) of each panel in `rare`
  const uint32_t* rare;         // upper bytes without a code: (place among the panel's bytes) << 8 | byte
  const float* bias;           // (whole panels of outputs) or null
  const float* x_scale;        // (rows), INT8 only
  const float* weight_scale;   // (whole panels of outputs), INT8 only
  const int32_t* start;        // (whole panels of outputs), INT8 only: initial sums, -128 x the sum of the weights
  void* y;                     // (rows, outputs) bfloat16 or float32
  int64_t y_row;               // numbers from one row to the next
  bool y_bf16;
  int units, outputs;
};

// Compress a weight in two steps: see packing.h.
typedef void (*ChooseCodes)(const char* const* rows, int64_t row_bytes, int outputs, int first, int last,
                            uint8_t* upper_bytes, int32_t* counts);
typedef void (*PackCompressed)(const char* const* rows, int64_t row_bytes, int outputs, int first, int last,
                               const uint8_t* upper_bytes, const int32_t* starts, uint32_t* rare, uint32_t* packed);

// The inner loops of one instruction set.
struct Multiply {
  int columns;    // columns of a panel
  int most_rows;  // rows of one call
  // Whether the loops need x widened, in rows of 2 x units numbers of 32 bits, instead of as it is: bfloat16 to float32;
  // a unit of four bytes to two pairs of 16 bits, the first and the third, then the second and the fourth.
  bool (*widens)(Kind);
  // Panels first .. last - 1 of all rows; first is even. x: as in the product, or widened. sums: 2 x (rows, columns)
  // floats of scratch.
  void (*panels)(const Product&, const void* x, int64_t x_row, int first, int last, float* sums);
  // Panels first .. last - 1 of a weight of `outputs` rows, each of `row_bytes` anywhere in memory.
  void (*pack)(const char* const* rows, int64_t row_bytes, int outputs, int first, int last, uint32_t* packed);
  // The same for a compressed weight, or null.
  ChooseCodes choose_codes;
  PackCompressed pack_compressed;
};

// Those that are compiled.
extern const Multiply multiply_baseline, multiply_avx2, multiply_avx512, multiply_avx512_bf16, multiply_amx;
