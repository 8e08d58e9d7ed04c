// Gated DeltaNet between its projections: the convolution and the gated delta rule, in float32 and bfloat16. Compiled once
// for each instruction set, whose name ends the function (`gated_delta_rule_avx2`). kernels/delta_rule.py states the
// contract. Independent of torch.
//
// Threads divide tokens, then pieces of heads. Every sum has a fixed order and reads one token after the other from the
// state, so a result does not depend on which tokens of a sequence one call computes.

#include <cmath>

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
  float* mixed;    // (tokens, 2 * key_heads * key_dim + heads * row): queries, keys, values
  float* factors;  // (tokens, 2, heads): decay, beta
  void* output;    // (tokens, heads, value_dim)
  int sequences, heads, num_key_heads, key_dim, value_dim, row, kernel, channels;

  int64_t mixed_width() const { return 2 * (int64_t)num_key_heads * key_dim + (int64_t)heads * row; }
  int64_t num_inputs() const { return (int64_t)(kernel - 1) * channels; }
  bool is_new(int sequence) const { return contexts[sequence] == starts[sequence + 1] - starts[sequence]; }
};

template <class Cell>
inline float rounded_number(float x) {
  if constexpr (sizeof(Cell) == sizeof(float)) return x;
  else return widened(rounded(x));
}

// Convolves `width` channels from `channel` on, for token `index` of its sequence in this call.
template <class Cell>
void convolve(const Layer& l, int sequence, int64_t token, int channel, int width, float* out) {
  const Cell* qkv = (const Cell*)l.qkv + channel;
  const Cell* conv = (const Cell*)l.conv + channel;
  const float* past = l.cache + l.slots[sequence] * l.cache_slot + channel;
  const int64_t first = l.starts[sequence];
  const bool is_new = l.is_new(sequence);
  by_vectors(0, width, [&](int i, int count) {
    Vec total = {};
    for (int tap = 0; tap < l.kernel; tap++) {
      const int64_t from = token + tap - (l.kernel - 1);
      Vec x = {};
      if (from >= first)
        x = load_cells(qkv + from * l.qkv_token + i, count);
      else if (!is_new)
        x = load_cells(past + (from - first + l.kernel - 1) * l.channels + i, count);
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

template <class Cell>
void prepare_token(const Layer& l, int sequence, int64_t token) {
  float* mixed = l.mixed + token * l.mixed_width();
  const int keys = l.num_key_heads * l.key_dim;
  convolve<Cell>(l, sequence, token, 0, 2 * keys, mixed);
  const float scale = 1.0f / sqrtf((float)l.key_dim);
  for (int head = 0; head < 2 * l.num_key_heads; head++)
    normalise(mixed + (int64_t)head * l.key_dim, l.key_dim, head < l.num_key_heads ? scale : 1.0f);
  for (int head = 0; head < l.heads; head++) {
    float* value = mixed + 2 * keys + (int64_t)head * l.row;
    convolve<Cell>(l, sequence, token, 2 * keys + head * l.value_dim, l.value_dim, value);
    for (int i = l.value_dim; i < l.row; i++) value[i] = 0;
  }
  const Cell* gates = (const Cell*)l.gates + token * l.gates_token;
  float* factors = l.factors + token * 2 * l.heads;
  for (int head = 0; head < l.heads; head++) {
    const float x = widened(gates[l.heads + head]) + l.decay_bias[head];
    const float softplus = x > 20.0f ? x : log1pf(expf(x));
    factors[head] = expf(-expf(l.decay[head]) * softplus);
    factors[l.heads + head] = rounded_number<Cell>(1.0f / (1.0f + expf(-widened(gates[head]))));
  }
}

// Updates N vectors of columns of one head's state by a sequence's tokens. While a row of the state is in registers, the
// next token's product with it is added up too, so that each token reads the state once.
template <class Cell, int N>
void advance(const Layer& l, int sequence, int head, int column) {
  const int first = l.starts[sequence], end = l.starts[sequence + 1];
  const int64_t width = l.mixed_width(), keys = (int64_t)l.num_key_heads * l.key_dim;
  float* state = l.cache + l.slots[sequence] * l.cache_slot + l.num_inputs() + (int64_t)head * l.key_dim * l.row + column;
  const float* query = l.mixed + first * width + l.key_heads[head] * l.key_dim;
  const float* value = l.mixed + first * width + 2 * keys + (int64_t)head * l.row + column;
  Vec known[N] = {};
  for (int i = 0; i < l.key_dim; i++)
    for (int n = 0; n < N; n++) {
      float* at = state + (int64_t)i * l.row + n * W;
      if (l.is_new(sequence)) store(at, Vec{});
      known[n] = fma(all(query[keys + i]), load<Vec>(at), known[n]);
    }
  for (int token = first; token < end; token++, query += width, value += width) {
    const float* factors = l.factors + (int64_t)token * 2 * l.heads + head;
    const Vec decay = all(factors[0]), beta = all(factors[l.heads]);
    Vec change[N], out[N] = {}, next[N] = {};
    for (int n = 0; n < N; n++) change[n] = (load<Vec>(value + n * W) - decay * known[n]) * beta;
    const float* next_key = query + keys + (token + 1 < end ? width : 0);
    for (int i = 0; i < l.key_dim; i++) {
      const Vec q = all(query[i]), k = all(query[keys + i]), later = all(next_key[i]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        float* at = state + (int64_t)i * l.row + n * W;
        const Vec x = fma(k, change[n], decay * load<Vec>(at));
        store(at, x);
        out[n] = fma(q, x, out[n]);
        next[n] = fma(later, x, next[n]);
      }
    }
    Cell* output = (Cell*)l.output + ((int64_t)token * l.heads + head) * l.value_dim + column;
    for (int n = 0; n < N; n++) {
      const int count = l.value_dim - column - n * W;
      if (count > 0) store_cells(output + n * W, out[n], count < W ? count : W);
      known[n] = next[n];
    }
  }
}

template <class Cell>
void advance_piece(const Layer& l, int sequence, int head, int column) {
  const int vectors = (l.row - column) / W;
  if (vectors >= VECTORS) return advance<Cell, VECTORS>(l, sequence, head, column);
  for (int n = 0; n < vectors; n++) advance<Cell, 1>(l, sequence, head, column + n * W);
}

// The last inputs of the convolution, for the next call.
template <class Cell>
void keep_inputs(const Layer& l, int sequence) {
  float* past = l.cache + l.slots[sequence] * l.cache_slot;
  const int64_t first = l.starts[sequence], end = l.starts[sequence + 1];
  for (int back = l.kernel - 1; back > 0; back--, past += l.channels) {
    const int64_t from = end - back;
    const float* older = past + (end - first) * l.channels;
    for (int channel = 0; channel < l.channels; channel++) {
      if (from >= first) past[channel] = widened(((const Cell*)l.qkv)[from * l.qkv_token + channel]);
      else past[channel] = l.is_new(sequence) ? 0 : older[channel];
    }
  }
}

template <class Cell>
void compute(const Layer& l, int threads) {
  parallel(l.starts[l.sequences], 1, threads, [=](int64_t first, int64_t last) {
    int sequence = 0;
    for (int64_t token = first; token < last; token++) {
      while (token >= l.starts[sequence + 1]) sequence++;
      prepare_token<Cell>(l, sequence, token);
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
