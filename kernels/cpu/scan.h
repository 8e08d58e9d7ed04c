// Shared by sampling.cpp (how rows are sampled) and scan.cpp (passes over one row, compiled once per instruction set).
#pragma once

#include <cfloat>
#include <cstdint>

constexpr int GROUP = 256;  // columns that share one maximum and one sum of weights, starting at a multiple of GROUP

inline int groups_of(int columns) { return (columns + GROUP - 1) / GROUP; }

// One row of logits: float32, or bfloat16, which is the upper half of a float32.
struct Row {
  const void* logits;
  int columns;
  bool bf16;
};

constexpr float NO_FLOOR = -FLT_MAX;  // only -inf is smaller, and its weight is 0

// The weight of a logit x is 2 ^ ((x - highest) * scale), and 0 if x < floor: highest is finite and the row's largest.
struct Weighing {
  float highest, scale, floor;
};

// The code of one instruction set. Every instruction set with multiply-add gives a row the same bits: sums run over 16
// lanes, and the lanes are added in a fixed order.
struct Scan {
  // The maximum of each group first .. last - 1; NaN if the group has one.
  void (*maxima)(Row, int first, int last, float* maxima);
  // The sum of weights of each group first .. last - 1. Groups whose maximum is below the floor are not read.
  void (*sums)(Row, int first, int last, Weighing, const float* maxima, double* sums);
  // The same for gathered numbers. Also keeps the weights, which need room for 15 more.
  void (*weigh)(const float* values, int count, Weighing, float* weights, double* sums);
  // Only the sums, from weights that exist already.
  void (*add)(const float* weights, int count, double* sums);
  // For each value, its bin among `bins` equal steps below `high`; lower values fall into the last bin. The result
  // needs room for 15 more numbers.
  void (*spread)(const float* values, int count, float high, float per_value, int bins, int32_t* found);
  // Columns whose logits are at least `threshold`, ascending, and the logits; returns their number. Groups whose
  // maximum is lower are not read.
  int (*gather)(Row, const float* maxima, float threshold, int32_t* ids, float* values);
  // The number of logits above `value`.
  int (*count_above)(Row, const float* maxima, float value);
  // Sets to -inf what packed bits, 32 columns to a word, do not allow. The row is not const.
  void (*apply_mask)(Row, const uint32_t* words);
};

// Those that are compiled.
extern const Scan scan_baseline, scan_avx2, scan_avx512, scan_avx512_bf16;
