// Gated DeltaNet between its projections: the convolution and the gated delta rule, in float32 and bfloat16. Compiled once
// for each instruction set, whose name ends the function (`gated_delta_rule_avx2`). kernels/delta_rule.py states the
// contract. Independent of torch.
//
// Rows of scratch memory are tokens to compute: those of each sequence after its accepted drafts.
//
// Threads divide rows, then pieces of heads. Every sum has a fixed order and reads one token after the other from the
// state, so a result does not depend on which tokens of a sequence one call computes.

#include <cmath>
#include <cstring>
#include <vector>

#include "cells.h"
#include "parallel.h"
#include "sigmoid.h"

#define KERNEL(name) extern "C" __attribute__((visibility("default"))) void JOIN(serve_llm_##name, VARIANT)

namespace {

constexpr int UNIT = 16;           // a row of the state is padded to a multiple of this
constexpr int VECTORS = 4;         // vectors of a piece: the columns of a head's state that a thread computes at a time
constexpr float NORM_EPS = 1e-6f;  // epsilon of the norms of queries and keys

struct Layer {
  const void* qkv;  // (tokens, channels), with `qkv_token` numbers from one token to the next
  int64_t qkv_token;
  const void* gates;  // (tokens, 2 * heads), likewise
  int64_t gates_token;
  const void* conv;  // (kernel, channels)
  const float* decay;
  const float* decay_bias;
  const int64_t* key_heads;  // (heads,)
  float* cache;
  int64_t cache_slot;
  const int64_t* slots;
  const int* starts;
  const int* contexts;
  const int* accepted;  // drafts that the cache keeps and that belong to the sequence now
  const int* drafts;    // the sequence's last tokens
  const int* rows;      // (sequences + 1,): where the rows of each sequence start
  float* mixed;         // (rows, 2 * key_heads * key_dim + heads * row): queries, keys, values
  float* factors;       // (rows, 2, heads): decay, beta
  void* output;    // (tokens, heads, value_dim)
  int sequences, heads, num_key_heads, key_dim, value_dim, row, kernel, channels;

  int64_t mixed_width() const { return 2 * (int64_t)num_key_heads * key_dim + (int64_t)heads * row; }
  int64_t num_inputs() const { return (int64_t)(kernel - 1) * channels; }
  int count(int sequence) const { return rows[sequence + 1] - rows[sequence]; }
  int num_stored(int sequence) const { return count(sequence) - drafts[sequence]; }  // rows that the state includes
  float* past(int sequence) const { return cache + slots[sequence] * cache_slot; }
  float* draft(int sequence, int64_t number) const {  // its qkv, then its gates
    return past(sequence) + num_inputs() + (int64_t)heads * key_dim * row + number * (channels + 2 * heads);
  }
  int64_t token(int sequence, int64_t index) const { return starts[sequence] + index - accepted[sequence]; }
  bool is_new(int sequence) const { return contexts[sequence] == starts[sequence + 1] - starts[sequence]; }
};

template <class Cell>
inline float rounded_number(float x) {
  if constexpr (sizeof(Cell) == sizeof(float)) return x;
  else return widened(rounded(x));
}

// Convolves `width` channels from `channel` on, for row `index` of a sequence.
template <class Cell>
void convolve(const Layer& l, int sequence, int64_t index, int channel, int width, float* out) {
  const Cell* conv = (const Cell*)l.conv + channel;
  const bool is_new = l.is_new(sequence);
  by_vectors(0, width, [&](int i, int count) {
    Vec total = {};
    for (int tap = 0; tap < l.kernel; tap++) {
      const int64_t from = index + tap - (l.kernel - 1);
      Vec x = {};
      if (from >= l.accepted[sequence])
        x = load_cells((const Cell*)l.qkv + l.token(sequence, from) * l.qkv_token + channel + i, count);
      else if (from >= 0)
        x = load_cells(l.draft(sequence, from) + channel + i, count);
      else if (!is_new)
        x = load_cells(l.past(sequence) + (from + l.kernel - 1) * l.channels + channel + i, count);
      total = fma(x, load_cells(conv + (int64_t)tap * l.channels + i, count), total);
    }
    total = rounded_to<Cell>(total);
    store_cells(out + i, rounded_to<Cell>(gated<Cell>(total, total)), count);
  });
}

// Scales a vector to length 1, times `scale`.
inline void normalise(float* x, int width, float scale) {
  Vec sums = {};
  by_vectors(0, width, [&](int i, int count) {
    const Vec y = load_cells(x + i, count);
    sums = fma(y, y, sums);
  });
  const Vec factor = all(scale / sqrtf(sum(sums) + NORM_EPS));
  by_vectors(0, width, [&](int i, int count) { store_cells(x + i, load_cells(x + i, count) * factor, count); });
}

// Computes the factors of row `index` of a sequence. gates: of its token, from the step or kept as floats.
template <class Cell, class Gate>
void compute_factors(const Layer& l, const Gate* gates, float* factors) {
  for (int head = 0; head < l.heads; head++) {
    const float x = widened(gates[l.heads + head]) + l.decay_bias[head];
    const float softplus = x > 20.0f ? x : log1pf(expf(x));
    factors[head] = expf(-expf(l.decay[head]) * softplus);
    factors[l.heads + head] = rounded_number<Cell>(1.0f / (1.0f + expf(-widened(gates[head]))));
  }
}

template <class Cell>
void prepare_row(const Layer& l, int sequence, int64_t index) {
  const int64_t row = l.rows[sequence] + index;
  float* mixed = l.mixed + row * l.mixed_width();
  const int keys = l.num_key_heads * l.key_dim;
  convolve<Cell>(l, sequence, index, 0, 2 * keys, mixed);
  const float scale = 1.0f / sqrtf((float)l.key_dim);
  for (int head = 0; head < 2 * l.num_key_heads; head++)
    normalise(mixed + (int64_t)head * l.key_dim, l.key_dim, head < l.num_key_heads ? scale : 1.0f);
  for (int head = 0; head < l.heads; head++) {
    float* value = mixed + 2 * keys + (int64_t)head * l.row;
    convolve<Cell>(l, sequence, index, 2 * keys + head * l.value_dim, l.value_dim, value);
    for (int i = l.value_dim; i < l.row; i++) value[i] = 0;
  }
  float* factors = l.factors + row * 2 * l.heads;
  if (index >= l.accepted[sequence])
    compute_factors<Cell>(l, (const Cell*)l.gates + l.token(sequence, index) * l.gates_token, factors);
  else
    compute_factors<Cell>(l, l.draft(sequence, index) + l.channels, factors);
}

// Updates N vectors of columns of one head's state by a sequence's rows. While a row of the state is in registers, the
// next token's product with it is added up too, so that each token reads the state once. Drafts update a copy.
template <class Cell, int N>
void advance(const Layer& l, int sequence, int head, int column) {
  const int first = l.rows[sequence], end = l.rows[sequence + 1];
  const int first_draft = end - l.drafts[sequence], first_token = first + l.accepted[sequence];
  const int64_t width = l.mixed_width(), keys = (int64_t)l.num_key_heads * l.key_dim;
  float* state = l.past(sequence) + l.num_inputs() + (int64_t)head * l.key_dim * l.row + column;
  int64_t state_row = l.row;
  std::vector<float> copy(first_draft < end ? (size_t)l.key_dim * N * W : 0);
  const float* query = l.mixed + first * width + l.key_heads[head] * l.key_dim;
  const float* value = l.mixed + first * width + 2 * keys + (int64_t)head * l.row + column;
  Vec known[N] = {};
  for (int i = 0; i < l.key_dim; i++)
    for (int n = 0; n < N; n++) {
      float* at = state + i * state_row + n * W;
      if (l.is_new(sequence)) store(at, Vec{});
      known[n] = fma(all(query[keys + i]), load<Vec>(at), known[n]);
    }
  for (int row = first; row < end; row++, query += width, value += width) {
    if (row == first_draft) {
      for (int i = 0; i < l.key_dim; i++)
        memcpy(copy.data() + (int64_t)i * N * W, state + i * state_row, N * W * sizeof *state);
      state = copy.data();
      state_row = N * W;
    }
    const float* factors = l.factors + (int64_t)row * 2 * l.heads + head;
    const Vec decay = all(factors[0]), beta = all(factors[l.heads]);
    Vec change[N], out[N] = {}, next[N] = {};
    for (int n = 0; n < N; n++) change[n] = (load<Vec>(value + n * W) - decay * known[n]) * beta;
    const float* next_key = query + keys + (row + 1 < end ? width : 0);
    for (int i = 0; i < l.key_dim; i++) {
      const Vec q = all(query[i]), k = all(query[keys + i]), later = all(next_key[i]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        float* at = state + i * state_row + n * W;
        const Vec x = fma(k, change[n], decay * load<Vec>(at));
        store(at, x);
        out[n] = fma(q, x, out[n]);
        next[n] = fma(later, x, next[n]);
      }
    }
    for (int n = 0; n < N; n++) known[n] = next[n];
    if (row < first_token) continue;
    const int64_t token = l.token(sequence, row - first);
    Cell* output = (Cell*)l.output + (token * l.heads + head) * l.value_dim + column;
    for (int n = 0; n < N; n++) {
      const int count = l.value_dim - column - n * W;
      if (count > 0) store_cells(output + n * W, out[n], count < W ? count : W);
    }
  }
}

template <class Cell>
void advance_piece(const Layer& l, int sequence, int head, int column) {
  const int vectors = (l.row - column) / W;
  if (vectors >= VECTORS) return advance<Cell, VECTORS>(l, sequence, head, column);
  for (int n = 0; n < vectors; n++) advance<Cell, 1>(l, sequence, head, column + n * W);
}

template <class Cell>
inline void widen_row(const void* cells, int64_t first, int count, float* to) {
  for (int i = 0; i < count; i++) to[i] = widened(((const Cell*)cells)[first + i]);
}

// Keeps what the next call reads: the last inputs of the convolution before the drafts, then the drafts.
template <class Cell>
void keep_inputs(const Layer& l, int sequence) {
  const int accepted = l.accepted[sequence], num_stored = l.num_stored(sequence);
  for (int number = 0; number < l.kernel - 1; number++) {
    float* to = l.past(sequence) + (int64_t)number * l.channels;
    const int64_t from = num_stored + number - (l.kernel - 1);
    if (from >= accepted)
      widen_row<Cell>(l.qkv, l.token(sequence, from) * l.qkv_token, l.channels, to);
    else if (from >= 0)
      memcpy(to, l.draft(sequence, from), l.channels * sizeof *to);
    else if (l.is_new(sequence))
      memset(to, 0, l.channels * sizeof *to);
    else
      memcpy(to, to + (int64_t)num_stored * l.channels, l.channels * sizeof *to);
  }
  for (int number = 0; number < l.drafts[sequence]; number++) {
    const int64_t token = l.token(sequence, num_stored + number);
    float* to = l.draft(sequence, number);
    widen_row<Cell>(l.qkv, token * l.qkv_token, l.channels, to);
    widen_row<Cell>(l.gates, token * l.gates_token, 2 * l.heads, to + l.channels);
  }
}

template <class Cell>
void compute(const Layer& l, int threads) {
  parallel(l.rows[l.sequences], 1, threads, [=](int64_t first, int64_t last) {
    int sequence = 0;
    for (int64_t row = first; row < last; row++) {
      while (row >= l.rows[sequence + 1]) sequence++;
      prepare_row<Cell>(l, sequence, row - l.rows[sequence]);
    }
  });
  const int columns = VECTORS * W, pieces = (l.row + columns - 1) / columns;
  parallel((int64_t)l.sequences * l.heads * pieces, 1, threads, [=](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; item++) {
      const int64_t head = item / pieces;
      advance_piece<Cell>(l, head / l.heads, head % l.heads, item % pieces * columns);
    }
  });
  parallel(l.sequences, 1, threads, [=](int64_t first, int64_t last) {
    for (int64_t sequence = first; sequence < last; sequence++) keep_inputs<Cell>(l, sequence);
  });
}

}  // namespace

KERNEL(gated_delta_rule)(int bf16, const void* layer, int threads) {
  if (bf16) compute<Bf16>(*(const Layer*)layer, threads);
  else compute<float>(*(const Layer*)layer, threads);
}
