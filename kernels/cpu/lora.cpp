// What LoRA adapters (arXiv:2106.09685) add to the outputs of a linear layer, in float32 and bfloat16: y += up @ (down @ x),
// where each row of a step has its own adapter. Compiled once for each instruction set. kernels/lora.py states the contract.
// Independent of torch.
//
// A number of a product is a sum in a fixed order, whatever the other rows are and however threads divide the work.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "cells.h"
#include "parallel.h"
#include "workspace.h"

namespace {

constexpr int TILE = 4;               // rows, and columns of the first product, that are multiplied together
constexpr int MOST_ROWS = 16;         // that a thread claims at once
constexpr int PANEL = 32;             // outputs whose weights lie together
constexpr int BLOCK = 8 * PANEL;      // outputs that a thread claims at once
constexpr int64_t CLAIM = 1 << 16;    // multiplications that are worth claiming
constexpr int64_t ALONE = 1 << 17;    // multiplications that one thread does before a second one has started

// The second product of an adapter for one part of the layer's outputs.
struct Expansion {
  const void* up;  // (panels, columns, PANEL): of PANEL outputs each, the last one filled up with zeros
  int64_t first_column, columns, first_output, outputs;
  const float* factor;  // (outputs,), by which the layer's own outputs are multiplied first, or null
  const float* offset;  // (outputs,), which is then added, or null
};

struct Product {
  const void* down;  // (columns, inputs)
  int64_t columns, num_expansions;
  const Expansion* expansions;
};

// The rows of a step with the same adapter.
struct Group {
  const Product* product;
  const int64_t* rows;  // null: the first `count`
  int64_t count;

  int64_t row(int64_t index) const { return rows == nullptr ? index : rows[index]; }
  int64_t row_blocks() const { return (count + MOST_ROWS - 1) / MOST_ROWS; }
};

template <class Cell>
struct Matrix {
  Cell* data;
  int64_t stride;  // between rows

  Cell* row(int64_t index) const { return data + index * stride; }
};

template <class Cell>
constexpr int LINE = 64 / sizeof(Cell);  // numbers in a cache line

// hidden[row * stride + column] = x[row] . down[column]. Fetches the next COLUMNS columns, or what follows the last one:
// the processor itself does not foresee that a tile goes on where the next one begins.
template <int ROWS, int COLUMNS, class Cell>
void multiply_tile(const Cell* const* x, const Cell* down, int inputs, float* hidden, int64_t stride) {
  Vec sums[ROWS][COLUMNS] = {};
  by_vectors(0, inputs, [&](int i, int count) {
    Vec weights[COLUMNS];
    for (int column = 0; column < COLUMNS; column++) {
      const Cell* from = down + (int64_t)column * inputs + i;
      if (i % LINE<Cell> == 0) __builtin_prefetch(from + COLUMNS * inputs);
      weights[column] = load_cells(from, count);
    }
    for (int row = 0; row < ROWS; row++) {
      const Vec numbers = load_cells(x[row] + i, count);
      for (int column = 0; column < COLUMNS; column++)
        sums[row][column] = fma(numbers, weights[column], sums[row][column]);
    }
  });
  for (int row = 0; row < ROWS; row++)
    for (int column = 0; column < COLUMNS; column++) hidden[row * stride + column] = sum(sums[row][column]);
}

// The first product of ROWS rows with the columns `column` to `last_column`, at most TILE.
template <int ROWS, class Cell>
void shrink_tile(const Cell* const* x, const Product& product, int64_t column, int64_t last_column, int inputs,
                 float* hidden) {
  const Cell* down = (const Cell*)product.down;
  if (column + TILE <= last_column) {
    multiply_tile<ROWS, TILE>(x, down + column * inputs, inputs, hidden + column, product.columns);
    return;
  }
  for (; column < last_column; column++)
    multiply_tile<ROWS, 1>(x, down + column * inputs, inputs, hidden + column, product.columns);
}

// Calls work with the number of rows, 1 to TILE, as a constant.
template <class Work>
void with_rows(int64_t count, const Work& work) {
  static_assert(TILE == 4);
  if (count == 4) work(std::integral_constant<int, 4>());
  else if (count == 3) work(std::integral_constant<int, 3>());
  else if (count == 2) work(std::integral_constant<int, 2>());
  else work(std::integral_constant<int, 1>());
}

// The first product of some rows of a group with up to TILE columns from `column` on.
template <class Cell>
void shrink(const Matrix<const Cell>& x, const Group& group, int64_t first, int64_t column, int inputs, float* hidden) {
  const int64_t stride = group.product->columns;
  const int64_t last = std::min(first + MOST_ROWS, group.count), last_column = std::min(column + TILE, stride);
  for (int64_t row = first; row < last; row += TILE) {
    const int64_t count = std::min<int64_t>(TILE, last - row);
    const Cell* rows[TILE];
    for (int i = 0; i < count; i++) rows[i] = x.row(group.row(row + i));
    with_rows(count, [&](auto number) {
      shrink_tile<number()>(rows, *group.product, column, last_column, inputs, hidden + row * stride);
    });
  }
}

// Adds the second product of ROWS rows to their outputs first .. last - 1. first is a multiple of PANEL.
template <int ROWS, class Cell>
void expand_tile(Cell* const* y, const float* const* hidden, const Expansion& expansion, int first, int last) {
  constexpr int VECTORS = PANEL / W;
  for (int begin = first; begin < last; begin += PANEL) {
    const Cell* up = (const Cell*)expansion.up + begin * expansion.columns;
    Vec sums[ROWS][VECTORS] = {};
    for (int64_t column = 0; column < expansion.columns; column++, up += PANEL) {
      Vec weights[VECTORS];
      for (int vector = 0; vector < VECTORS; vector++) weights[vector] = load_cells(up + vector * W, W);
      for (int row = 0; row < ROWS; row++) {
        const Vec number = all(hidden[row][column]);
        for (int vector = 0; vector < VECTORS; vector++)
          sums[row][vector] = fma(number, weights[vector], sums[row][vector]);
      }
    }
    for (int vector = 0; vector < VECTORS; vector++) {
      const int i = begin + vector * W, count = std::min(W, last - i);
      if (count <= 0) break;
      for (int row = 0; row < ROWS; row++) {
        Vec own = load_cells(y[row] + i, count);
        if (expansion.factor != nullptr) own = own * load_cells(expansion.factor + i, count);
        if (expansion.offset != nullptr) own = own + load_cells(expansion.offset + i, count);
        store_cells(y[row] + i, own + sums[row][vector], count);
      }
    }
  }
}

// The second product of some rows of a group, for up to BLOCK outputs of an expansion.
template <class Cell>
void expand(const Matrix<Cell>& y, const Group& group, const Expansion& expansion, int64_t first, int64_t output,
            const float* hidden) {
  const int64_t last = std::min(first + MOST_ROWS, group.count);
  const int last_output = (int)std::min(output + BLOCK, expansion.outputs);
  for (int64_t row = first; row < last; row += TILE) {
    const int64_t count = std::min<int64_t>(TILE, last - row);
    Cell* rows[TILE];
    const float* numbers[TILE];
    for (int i = 0; i < count; i++) {
      rows[i] = y.row(group.row(row + i)) + expansion.first_output;
      numbers[i] = hidden + (row + i) * group.product->columns + expansion.first_column;
    }
    with_rows(count, [&](auto number) {
      expand_tile<number()>(rows, numbers, expansion, (int)output, last_output);
    });
  }
}

// A part of the work: blocks of `rows` of a group times blocks of columns or outputs.
struct Span {
  const Group* group;
  const Expansion* expansion;  // null: the first product
  float* hidden;
  int64_t begin, blocks;  // the number of its first task, and of its blocks of columns or outputs
};

// Calls work(span, block of rows, block of columns or outputs) for all, on several threads.
template <class Work>
void each_task(const std::vector<Span>& spans, int64_t tasks, int64_t multiplications, int threads, const Work& work) {
  const int64_t grain = std::max<int64_t>(1, CLAIM * tasks / std::max<int64_t>(1, multiplications));
  parallel(tasks, grain, multiplications < ALONE ? 1 : threads, [&](int64_t first, int64_t last) {
    size_t at = 0;
    for (int64_t task = first; task < last; task++) {
      while (at + 1 < spans.size() && spans[at + 1].begin <= task) at++;
      const int64_t index = task - spans[at].begin;
      work(spans[at], index / spans[at].blocks, index % spans[at].blocks);
    }
  });
}

template <class Cell>
void add_lora(const Matrix<Cell>& y, const Matrix<const Cell>& x, int inputs, const Group* groups, int num_groups,
              int threads) {
  static thread_local Workspace workspace;
  static thread_local std::vector<Span> shrinks, expands;
  shrinks.clear(), expands.clear();
  int64_t numbers = 0, shrink_tasks = 0, expand_tasks = 0, shrink_work = 0, expand_work = 0;
  for (int index = 0; index < num_groups; index++) numbers += groups[index].count * groups[index].product->columns;
  float* hidden = (float*)workspace.at_least(numbers * sizeof(float));
  for (int index = 0; index < num_groups; index++) {
    const Group& group = groups[index];
    const Product& product = *group.product;
    const int64_t column_blocks = (product.columns + TILE - 1) / TILE;
    shrinks.push_back({&group, nullptr, hidden, shrink_tasks, column_blocks});
    shrink_tasks += group.row_blocks() * column_blocks;
    shrink_work += group.count * product.columns * inputs;
    for (int64_t number = 0; number < product.num_expansions; number++) {
      const Expansion& expansion = product.expansions[number];
      const int64_t output_blocks = (expansion.outputs + BLOCK - 1) / BLOCK;
      expands.push_back({&group, &expansion, hidden, expand_tasks, output_blocks});
      expand_tasks += group.row_blocks() * output_blocks;
      expand_work += group.count * expansion.columns * expansion.outputs;
    }
    hidden += group.count * product.columns;
  }
  each_task(shrinks, shrink_tasks, shrink_work, threads, [&](const Span& span, int64_t rows, int64_t block) {
    shrink(x, *span.group, rows * MOST_ROWS, block * TILE, inputs, span.hidden);
  });
  each_task(expands, expand_tasks, expand_work, threads, [&](const Span& span, int64_t rows, int64_t block) {
    expand(y, *span.group, *span.expansion, rows * MOST_ROWS, block * BLOCK, span.hidden);
  });
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void JOIN(serve_llm_add_lora, VARIANT)(
    int bf16, void* y, int64_t y_stride, const void* x, int64_t x_stride, int inputs, const Group* groups, int num_groups,
    int threads) {
  if (bf16)
    add_lora<Bf16>({(Bf16*)y, y_stride}, {(const Bf16*)x, x_stride}, inputs, groups, num_groups, threads);
  else
    add_lora<float>({(float*)y, y_stride}, {(const float*)x, x_stride}, inputs, groups, num_groups, threads);
}
