// What sampling.cpp (which row is drawn how) and scan.cpp (passes over one row, compiled once per instruction set) agree on.
#pragma once

#include <cfloat>
#include <cstdint>

constexpr int GROUP = 256;  // columns that are summed up by one maximum and one sum of weights; from a multiple of GROUP on

inline int groups_of(int columns) { return (columns + GROUP - 1) / GROUP; }

// One row of logits: float32, or bfloat16, which is the upper half of a float32.
struct Row {
  const void* logits;
  int columns;
  bool bf16;
};

constexpr float NO_FLOOR = -FLT_MAX;  // only -inf lies below, and weighs nothing

// The weight of a logit x is 2 ^ ((x - highest) * scale), and 0 if x < floor: highest is finite and the row's largest.
struct Weighing {
  float highest, scale, floor;
};

// One instruction set's code. All of it gives the same bits for a row, whatever the instruction set, as long as that has
// multiply-add: sums run over 16 lanes, and the lanes are added in one order.
struct Scan {
  // The largest of each group first .. last - 1; NaN where the group has one.
  void (*maxima)(Row, int first, int last, float* maxima);
  // The sum of weights of each group first .. last - 1. Groups whose maximum is below the floor are not read.
  void (*sums)(Row, int first, int last, Weighing, const float* maxima, double* sums);
  // The same for numbers that were gathered; keeps the weights too, of which there is room for 15 more.
  void (*weigh)(const float* values, int count, Weighing, float* weights, double* sums);
  // The sums alone, of weights that are there already.
  void (*add)(const float* weights, int count, double* sums);
  // For each value, which of `bins` equal steps below `high` it lies in; values further down count to the last one.
  // There is room for 15 numbers more.
  void (*spread)(const float* values, int count, float high, float per_value, int bins, int32_t* found);
  // Columns whose logits are at least `threshold`, ascending, and the logits; returns their number. Groups whose maximum
  // is below are not read.
  int (*gather)(Row, const float* maxima, float threshold, int32_t* ids, float* values);
  // The number of logits above `value`.
  int (*count_above)(Row, const float* maxima, float value);
};

extern const Scan scan_baseline;
#if defined(__x86_64__)
extern const Scan scan_avx2, scan_avx512, scan_avx512_bf16;
#endif
