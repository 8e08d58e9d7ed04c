// Kernels that work on rows or on single numbers, in float32 and bfloat16: norms, activation functions, rope and the
// write to the KV cache, 8-bit activations, 4-bit weights. Compiled once for each instruction set, whose name ends every function
// (`rms_norm_avx2`). The functions of the same names in kernels/*.py state the contracts. Independent of torch.
//
// A result depends on its own row or number alone: sums over a row have a fixed order, and threads divide whole rows,
// or pieces of rows if each number is independent.

#include <cmath>
#include <vector>

#include "cache.h"
#include "cells.h"
#include "parallel.h"
#include "sigmoid.h"
#include "workspace.h"

#define KERNEL(name) extern "C" __attribute__((visibility("default"))) void JOIN(serve_llm_##name, VARIANT)

namespace {

constexpr int64_t MOST_ALONE = 8192;  // numbers that one thread computes before a second one has started
constexpr int ANGLE = 16;             // an angle takes as long as this many other numbers
constexpr int PIECE = 512;            // numbers of a row that a thread claims at once if rows may be cut

// Rows of `width` numbers that a thread claims at once.
inline int64_t alone(int64_t width) { return width < MOST_ALONE ? MOST_ALONE / width : 1; }

// ---- norms

// Calls add(i, count, sum) for each vector of a row and returns the sum of all, in a fixed order.
template <class Add>
inline float sum_row(int width, Add add) {
  constexpr int CHAINS = 4;  // independent sums, so that no addition waits for the one before
  Vec sums[CHAINS] = {};
  int i = 0;
  for (; i + CHAINS * W <= width; i += CHAINS * W)
#pragma GCC unroll 4
    for (int chain = 0; chain < CHAINS; chain++) add(i + chain * W, W, sums[chain]);
  by_vectors(i, width, [&](int i, int count) { add(i, count, sums[0]); });
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// A weight wider than Cell makes a product that is rounded once.
template <class Cell, class Weight>
void rms_norm_row(const Cell* x, const Cell* delta, const Weight* weight, float eps, Cell* total, Cell* normed,
                  int width) {
  const float squares = sum_row(width, [&](int i, int count, Vec& sum) {
    Vec y = load_cells(x + i, count);
    if (delta != nullptr) {
      y = rounded_to<Cell>(y + load_cells(delta + i, count));
      store_cells(total + i, y, count);
    }
    sum = fma(y, y, sum);
  });
  const Vec scale = all(1.0f / sqrtf(squares / width + eps));
  if (delta != nullptr) x = total;
  by_vectors(0, width, [&](int i, int count) {
    Vec scaled = load_cells(x + i, count) * scale;
    if constexpr (sizeof(Weight) == sizeof(Cell)) scaled = rounded_to<Cell>(scaled);
    store_cells(normed + i, scaled * load_cells(weight + i, count), count);
  });
}

template <class Cell, class Weight>
void rms_norm(const Cell* x, const Cell* delta, const Weight* weight, float eps, Cell* total, Cell* normed, int64_t rows,
              int width, int threads) {
  parallel(rows, alone(width), threads, [=](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      const int64_t at = row * width;
      rms_norm_row(x + at, delta == nullptr ? delta : delta + at, weight, eps, total == nullptr ? total : total + at,
                   normed + at, width);
    }
  });
}

// weight and bias may be null.
template <class Cell, class Weight>
void layer_norm_row(const Cell* x, const Cell* delta, const Weight* weight, const Weight* bias, float eps, Cell* total,
                    Cell* normed, int width) {
  const float mean = sum_row(width, [&](int i, int count, Vec& sum) {
    Vec y = load_cells(x + i, count);
    if (delta != nullptr) {
      y = rounded_to<Cell>(y + load_cells(delta + i, count));
      store_cells(total + i, y, count);
    }
    sum = sum + y;
  }) / width;
  if (delta != nullptr) x = total;
  const Vec centre = all(mean);
  const float squares = sum_row(width, [&](int i, int count, Vec& sum) {
    Vec y = load_cells(x + i, count) - centre;
    if (count < W) y = lanes() < count ? y : Vec{};
    sum = fma(y, y, sum);
  });
  const Vec scale = all(1.0f / sqrtf(squares / width + eps));
  by_vectors(0, width, [&](int i, int count) {
    Vec y = (load_cells(x + i, count) - centre) * scale;
    if (weight != nullptr) y = y * load_cells(weight + i, count);
    if (bias != nullptr) y = y + load_cells(bias + i, count);
    store_cells(normed + i, y, count);
  });
}

template <class Cell, class Weight>
void layer_norm(const Cell* x, const Cell* delta, const Weight* weight, const Weight* bias, float eps, Cell* total,
                Cell* normed, int64_t rows, int width, int threads) {
  parallel(rows, alone(width), threads, [=](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      const int64_t at = row * width;
      layer_norm_row(x + at, delta == nullptr ? delta : delta + at, weight, bias, eps,
                     total == nullptr ? total : total + at, normed + at, width);
    }
  });
}

// ---- activation functions

template <class Cell>
struct Silu {
  Vec operator()(Vec x) const { return gated<Cell>(x, x); }
};

template <class Cell>
struct Gelu {  // x times the normal distribution function
  Vec operator()(Vec x) const {
    const Vec size = x < -x ? -x : x;
#if defined(__AVX512F__)
    if constexpr (sizeof(Cell) < sizeof(float)) return rough(x, size);
#endif
    // At -a it is e^(-a^2 / 2) times a polynomial in 1 / (1 + 0.35 a), minimax with a relative error of 3e-8
    const Vec t = all(1.0f) / fma(size, all(0.35f), all(1.0f));
    Vec tail = fma(all(-0.0291461478f), t, all(0.14397274f));
    tail = fma(tail, t, all(-0.25571636f));
    tail = fma(tail, t, all(0.159176494f));
    tail = fma(tail, t, all(-0.0231113782f));
    tail = fma(tail, t, all(0.105508624f));
    tail = fma(tail, t, all(0.119832721f));
    tail = fma(tail, t, all(0.139861888f));
    tail = fma(tail, t, all(0.139621403f));
    tail = tail * t * exp_negative(size * size * all(-0.5f));
    return x * (x < Vec{} ? tail : all(1.0f) - tail);
  }

 private:
#if defined(__AVX512F__)
  // The same with a relative error of 1e-4, for numbers of less precision.
  static Vec rough(Vec x, Vec size) {
    const Vec t = _mm512_rcp14_ps(fma(size, all(0.25f), all(1.0f)));
    Vec tail = fma(all(0.241726582f), t, all(-0.104193198f));
    tail = fma(tail, t, all(0.180666569f));
    tail = fma(tail, t, all(0.0804196796f));
    tail = fma(tail, t, all(0.101361169f));
    tail = tail * t * rough_power_of_2(size * size * all(-0.72134752f));  // e^(-x^2 / 2)
    return x * (x < Vec{} ? tail : all(1.0f) - tail);
  }
#endif
};

template <class Cell>
struct GeluTanh {  // (1 + tanh(y)) / 2 = 1 / (1 + e^(-2 y))
  Vec operator()(Vec x) const {
    return gated<Cell>(x, all(1.5957691216f) * fma(x * x * x, all(0.044715f), x));  // 2 sqrt(2 / pi)
  }
};

template <class Work>
inline void pieces(int64_t rows, int width, int threads, Work work) {
  const int in_row = (width + PIECE - 1) / PIECE;
  parallel(rows * in_row, alone(PIECE), threads, [=](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; piece++) {
      const int start = piece % in_row * PIECE;
      work(piece / in_row, start, width - start < PIECE ? width : start + PIECE);
    }
  });
}

template <template <class> class Function, class Cell>
void elementwise(const Cell* x, Cell* y, int64_t count, int threads) {
  pieces((count + PIECE - 1) / PIECE, PIECE, threads, [=](int64_t piece, int, int) {
    const int64_t at = piece * PIECE;
    const int size = count - at < PIECE ? count - at : PIECE;
    by_vectors(0, size, [=](int i, int count) {
      store_cells(y + at + i, Function<Cell>()(load_cells(x + at + i, count)), count);
    });
  });
}

template <template <class> class Function, class Cell>
void and_mul(const Cell* gate_up, int64_t stride, Cell* y, int64_t rows, int width, int threads) {
  pieces(rows, width, threads, [=](int64_t row, int start, int end) {
    const Cell *gate = gate_up + row * stride, *up = gate + width;
    Cell* to = y + row * width;
    by_vectors(start, end, [=](int i, int count) {
      const Vec y = Function<Cell>()(load_cells(gate + i, count));
      store_cells(to + i, rounded_to<Cell>(y) * load_cells(up + i, count), count);
    });
  });
}

// ---- heads

// The arguments of rope_and_cache; strides in elements.
struct Heads {
  const void* qkv;  // (tokens, (heads + 2 kv_heads) x head_dim)
  int64_t qkv_token;
  const float *cos, *sin;               // (tokens, head_dim / 2), or null: no rope
  const void *query_norm, *key_norm;  // (head_dim), or null
  int wide_norms;                     // the norms' weights are float32, whatever Cell is
  float eps;
  void* query;  // (tokens, heads, head_dim), dense
  void* cache;  // (blocks, 2, kv_heads, block_size, head_dim), or int8 rows with their scales
  int64_t cache_block, cache_part, cache_head, cache_token;
  const int64_t* slots;
  int int8;
  int tokens, heads, kv_heads, head_dim, block_size;
};

constexpr int MAX_HEAD = 256;

template <class Cell>
void turn_head(const Cell* from, const void* norm, const Heads& h, const float* cos, const float* sin, Cell* to) {
  const int size = h.head_dim;
  Cell normed[MAX_HEAD];
  if (norm != nullptr) {
    if (h.wide_norms)
      rms_norm_row<Cell>(from, nullptr, (const float*)norm, h.eps, nullptr, normed, size);
    else
      rms_norm_row<Cell>(from, nullptr, (const Cell*)norm, h.eps, nullptr, normed, size);
    from = normed;
  }
  if (cos == nullptr) {
    memcpy(to, from, size * sizeof(Cell));
    return;
  }
  const int half = size / 2;
  by_vectors(0, half, [=](int i, int count) {
    const Vec a = load_cells(from + i, count), b = load_cells(from + half + i, count);
    const Vec c = load_cells(cos + i, count), s = load_cells(sin + i, count);
    store_cells(to + i, a * c - b * s, count);
    store_cells(to + half + i, b * c + a * s, count);
  });
}

template <class Cell>
void rope_and_cache(const Heads& h, int threads) {
  const int size = h.head_dim, angles = size / 2;
  parallel(h.tokens, alone((h.heads + 2 * h.kv_heads) * size), threads, [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; token++) {
      const Cell* from = (const Cell*)h.qkv + token * h.qkv_token;
      Cell* query = (Cell*)h.query + (int64_t)token * h.heads * size;
      const int64_t slot = h.slots[token], block = slot / h.block_size;
      const int64_t element = h.int8 ? 1 : sizeof(Cell);
      char* key = (char*)h.cache + (block * h.cache_block + (slot - block * h.block_size) * h.cache_token) * element;
      char* value = key + h.cache_part * element;
      const float* cos = h.cos == nullptr ? nullptr : h.cos + (int64_t)token * angles;
      const float* sin = h.sin == nullptr ? nullptr : h.sin + (int64_t)token * angles;
      for (int head = 0; head < h.heads; head++, from += size)
        turn_head(from, h.query_norm, h, cos, sin, query + head * size);
      for (int head = 0; head < h.kv_heads; head++, from += size) {
        Cell turned[MAX_HEAD];
        turn_head(from, h.key_norm, h, cos, sin, turned);
        write_row(turned, size, h.int8, key + head * h.cache_head * element);
      }
      for (int head = 0; head < h.kv_heads; head++, from += size)
        write_row(from, size, h.int8, value + head * h.cache_head * element);
    }
  });
}

// ---- experts

// rows: (tokens, top_k, width). Sums each token's rows by its weights, in order.
template <class Cell>
void weighted_sum(const Cell* rows, const float* weights, Cell* y, int64_t tokens, int top_k, int width, int threads) {
  parallel(tokens, alone((int64_t)top_k * width), threads, [=](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; token++) {
      const Cell* own = rows + token * top_k * width;
      const float* factors = weights + token * top_k;
      by_vectors(0, width, [=](int i, int count) {
        Vec total = load_cells(own + i, count) * all(factors[0]);
        for (int choice = 1; choice < top_k; choice++)
          total = total + load_cells(own + (int64_t)choice * width + i, count) * all(factors[choice]);
        store_cells(y + token * width + i, total, count);
      });
    }
  });
}

// ---- 8-bit activations

// NaN if there is one.
template <class Cell>
float largest_magnitude(const Cell* x, int width) {
  Ints most = {};  // as bits, with NaN above infinity
  by_vectors(0, width, [&](int i, int count) {
    const Ints size = (Ints)load_cells(x + i, count) & 0x7fffffff;
    most = size > most ? size : most;
  });
  int32_t lanes[W], highest = 0;
  store(lanes, most);
  for (int i = 0; i < W; i++) highest = lanes[i] > highest ? lanes[i] : highest;
  return from_bits(highest);
}

template <class Cell>
void quantise_row(const Cell* x, uint8_t* numbers, float* scale, int width) {
  typedef uint8_t Bytes __attribute__((vector_size(W)));
  float largest = largest_magnitude(x, width);
  if (largest < 1e-30f) largest = 1e-30f;
  *scale = largest / 127.0f;
  const Vec factor = all(1.0f / largest * 127.0f);  // in torch's order of operations
  by_vectors(0, width, [=](int i, int count) {
    const Vec scaled = load_cells(x + i, count) * factor + all(128.5f);
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(scaled, Ints), Bytes);
    memcpy(numbers + i, &bytes, count);
  });
}

template <class Cell>
void quantise_rows(const Cell* x, int64_t stride, uint8_t* numbers, float* scales, int64_t rows, int width, int threads) {
  parallel(rows, alone(width), threads, [=](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
      quantise_row(x + row * stride, numbers + row * width, scales + row, width);
  });
}

// ---- 8-bit weights

template <class Cell>
void quantise_weights(const Cell* x, int8_t* numbers, float* scale, int width) {
  typedef int8_t Bytes __attribute__((vector_size(W)));
  *scale = largest_magnitude(x, width) / 127.0f;
  if (!(*scale <= 3e38f)) {
    memset(numbers, 0, width);
    return;
  }
  const Vec divisor = all(*scale > 0 ? *scale : 1.0f);
  by_vectors(0, width, [=](int i, int count) {
    const Vec shifted = load_cells(x + i, count) / divisor + all(12582912.0f);  // rounded to nearest, ties to even
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(shifted - all(12582912.0f), Ints), Bytes);
    memcpy(numbers + i, &bytes, count);
  });
}

template <class Cell>
void quantise_int8(const Cell* weight, int64_t stride, int64_t rows, int width, int8_t* numbers, float* scales,
                   int threads) {
  parallel(rows, alone(width), threads, [=](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
      quantise_weights(weight + row * stride, numbers + row * width, scales + row, width);
  });
}

inline void sum_int8(const int8_t* numbers, int64_t stride, int64_t rows, int width, int32_t* sums, int threads) {
  parallel(rows, alone(width), threads, [=](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      const int8_t* const x = numbers + row * stride;
      int32_t sum = 0;
      for (int i = 0; i < width; i++) sum += x[i];
      sums[row] = sum;
    }
  });
}

// ---- 4-bit weights

// A float32 number rounded to float16, to nearest, ties to even.
inline float rounded_to_half(float x) {
  const float magnitude = fabsf(x);
  if (!(magnitude >= 0x1p-14f)) return rintf(x * 0x1p24f) * 0x1p-24f;  // no leading one, or NaN
  const uint32_t y = bits(x);
  const float found = from_bits((y + 0xfff + ((y >> 13) & 1)) & ~0x1fffu);
  return fabsf(found) > 65504.0f ? copysignf(INFINITY, x) : found;
}

// What a group becomes: codes 0 .. 15 (as float32), scale and zero point.
struct FourBits {
  float* codes;
  float scale, zero, error;
};

// x: whole vectors, zeros at the end. span, low: of the numbers and 0. part: of the span that 15 codes cover.
inline void quantise_range(const float* x, int vectors, float span, float low, float part, FourBits& found) {
  const float scale = rounded_to_half(span * (part / 15.0f));
  const float divisor = scale > 0 ? scale : 1.0f;
  const float nearest = rintf(-low * part / divisor);
  const float zero = nearest < 0 ? 0 : nearest > 15 ? 15 : nearest;
  Vec products{}, squares{};
  for (int i = 0; i < vectors; i++) {
    const Vec number = load<Vec>(x + i * W), shifted = number / all(divisor) + all(12582912.0f);
    Vec code = shifted - all(12582912.0f) + all(zero);  // rounded to nearest, ties to even
    code = larger(code, Vec{});
    code = code > all(15.0f) ? all(15.0f) : code;
    store(found.codes + i * W, code);
    const Vec centred = code - all(zero);
    products = fma(number, centred, products);
    squares = fma(centred, centred, squares);
  }
  const float square = sum(squares);
  float fitted = sum(products) / (square < 1e-30f ? 1e-30f : square);  // with these codes, it has the least error
  fitted = rounded_to_half(scale > 0 ? fitted : scale);
  Vec errors{};
  for (int i = 0; i < vectors; i++) {
    const Vec error = (load<Vec>(found.codes + i * W) - all(zero)) * all(fitted) - load<Vec>(x + i * W);
    errors = fma(error, error, errors);
  }
  found.scale = fitted;
  found.zero = zero;
  found.error = sum(errors);
}

// numbers: a group, zeros up to whole vectors. spare: as many numbers. Writes the codes of the first `count`.
inline void quantise_group(const float* numbers, int count, const float* parts, int ranges, float* spare, uint8_t* codes,
                           float* scale, float* zero) {
  const int vectors = (count + W - 1) / W;
  Vec least{}, most{}, nothing{};
  for (int i = 0; i < vectors; i++) {
    const Vec x = load<Vec>(numbers + i * W);
    least = least < x ? least : x;
    most = larger(most, x);
    nothing += x * all(0.0f);  // NaN for what is not finite
  }
  float low = 0;
  for (int i = 0; i < W; i++) low = least[i] < low ? least[i] : low;
  const float span = largest(most) - low;
  *scale = span / 15.0f + sum(nothing);
  *zero = 8;
  memset(codes, 0, count);
  float best = INFINITY;
  for (int i = 0; i < ranges; i++) {
    FourBits found{spare, 0, 0, 0};
    quantise_range(numbers, vectors, span, low, parts[i], found);
    if (!(found.error < best)) continue;
    best = found.error;
    *scale = found.scale + sum(nothing);
    *zero = found.zero;
    for (int k = 0; k < count; k++) codes[k] = (uint8_t)spare[k];
  }
}

template <class Cell>
void quantise_int4(const Cell* weight, int64_t stride, int64_t rows, int width, int group_size, const float* parts,
                   int ranges, uint8_t* codes, float* scales, float* zeros, int threads) {
  const int64_t groups = (width + group_size - 1) / group_size;
  parallel(rows, alone(width), threads, [=](int64_t first, int64_t last) {
    const int64_t padded = (group_size + W - 1) / W * W;
    thread_local Workspace space;
    float* const numbers = (float*)space.at_least(8 * padded);
    for (int64_t row = first; row < last; row++)
      for (int64_t group = 0; group < groups; group++) {
        const int from = (int)group * group_size, count = width - from < group_size ? width - from : group_size;
        for (int i = 0; i < count; i++) numbers[i] = widened(weight[row * stride + from + i]);
        for (int i = count; i < padded; i++) numbers[i] = 0;
        const int64_t at = row * groups + group;
        quantise_group(numbers, count, parts, ranges, numbers + padded, codes + row * width + from, scales + at, zeros + at);
      }
  });
}

}  // namespace

// Calls `function` for the type of its numbers, which the arguments can name as `Cell`.
#define BY_TYPE(...)                \
  if (bf16) {                       \
    using Cell = Bf16;              \
    __VA_ARGS__;                    \
  } else {                          \
    using Cell = float;             \
    __VA_ARGS__;                    \
  }

// Dense rows of `width`. delta and total may be the same memory; both are null for a norm without an addition. wide:
// the weight is float32, whatever Cell is.
KERNEL(rms_norm)(int bf16, const void* x, const void* delta, int wide, const void* weight, float eps, void* total,
                 void* normed, int64_t rows, int width, int threads) {
  BY_TYPE(auto run = [=](auto* weight) {
    rms_norm((const Cell*)x, (const Cell*)delta, weight, eps, (Cell*)total, (Cell*)normed, rows, width, threads);
  }; wide ? run((const float*)weight) : run((const Cell*)weight))
}

// As rms_norm. weight and bias, of one type, may be null.
KERNEL(layer_norm)(int bf16, const void* x, const void* delta, int wide, const void* weight, const void* bias, float eps,
                   void* total, void* normed, int64_t rows, int width, int threads) {
  BY_TYPE(auto run = [=](auto* weight) {
    layer_norm((const Cell*)x, (const Cell*)delta, weight, (decltype(weight))bias, eps, (Cell*)total, (Cell*)normed, rows,
               width, threads);
  }; wide ? run((const float*)weight) : run((const Cell*)weight))
}

// stride: between rows of gate_up, in elements; width: of y.
KERNEL(silu_and_mul)(int bf16, const void* gate_up, int64_t stride, void* y, int64_t rows, int width, int threads) {
  BY_TYPE(and_mul<Silu>((const Cell*)gate_up, stride, (Cell*)y, rows, width, threads))
}

KERNEL(gelu_tanh_and_mul)(int bf16, const void* gate_up, int64_t stride, void* y, int64_t rows, int width, int threads) {
  BY_TYPE(and_mul<GeluTanh>((const Cell*)gate_up, stride, (Cell*)y, rows, width, threads))
}

KERNEL(gelu)(int bf16, const void* x, void* y, int64_t count, int threads) {
  BY_TYPE(elementwise<Gelu>((const Cell*)x, (Cell*)y, count, threads))
}

KERNEL(gelu_tanh)(int bf16, const void* x, void* y, int64_t count, int threads) {
  BY_TYPE(elementwise<GeluTanh>((const Cell*)x, (Cell*)y, count, threads))
}

// positions: (tokens). frequencies: (pairs) radians per position. cos, sin: (tokens, pairs), multiplied by `magnitude`.
KERNEL(compute_angles)(const int64_t* positions, int64_t tokens, const float* frequencies, int pairs, float magnitude,
                       float* cos, float* sin, int threads) {
  parallel(tokens, alone(ANGLE * pairs), threads, [=](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; token++)
      for (int pair = 0; pair < pairs; pair++) {
        const float angle = (float)positions[token] * frequencies[pair];
        cos[token * pairs + pair] = std::cos(angle) * magnitude;
        sin[token * pairs + pair] = std::sin(angle) * magnitude;
      }
  });
}

KERNEL(rope_and_cache)(int bf16, const void* qkv, int64_t qkv_token, const float* cos, const float* sin,
                       const void* query_norm, const void* key_norm, int wide_norms, float eps, void* query,
                       void* cache, int64_t cache_block, int64_t cache_part, int64_t cache_head, int64_t cache_token,
                       const int64_t* slots, int int8, int tokens, int heads, int kv_heads, int head_dim, int block_size,
                       int threads) {
  const Heads h = {qkv,   qkv_token,   cos,        sin,        query_norm,  key_norm, wide_norms, eps,   query,
                   cache, cache_block, cache_part, cache_head, cache_token, slots,    int8,       tokens, heads,
                   kv_heads, head_dim, block_size};
  BY_TYPE(rope_and_cache<Cell>(h, threads))
}

KERNEL(weighted_sum)(int bf16, const void* rows, const float* weights, void* y, int64_t tokens, int top_k, int width,
                     int threads) {
  BY_TYPE(weighted_sum((const Cell*)rows, weights, (Cell*)y, tokens, top_k, width, threads))
}

// experts: of `pairs` pairs of a token and one of its experts. order: the pairs by expert, without changing the order of
// an expert's pairs. tokens: those of `order`. bounds: where experts begin .. end - 1 begin in it, and where the last ends.
KERNEL(sort_by_expert)(const int64_t* experts, int64_t pairs, int top_k, int begin, int end, int64_t* order,
                       int64_t* tokens, int64_t* bounds) {
  int64_t most = end;
  for (int64_t i = 0; i < pairs; i++) most = experts[i] < most ? most : experts[i] + 1;
  std::vector<int64_t> places(most + 1);
  for (int64_t i = 0; i < pairs; i++) places[experts[i] + 1]++;
  for (int64_t expert = 0; expert < most; expert++) places[expert + 1] += places[expert];
  memcpy(bounds, &places[begin], (end - begin + 1) * sizeof *bounds);
  for (int64_t i = 0; i < pairs; i++) {
    const int64_t place = places[experts[i]]++;
    order[place] = i;
    tokens[place] = i / top_k;
  }
}

KERNEL(quantise_rows)(int bf16, const void* x, int64_t stride, uint8_t* numbers, float* scales, int64_t rows, int width,
                      int threads) {
  BY_TYPE(quantise_rows((const Cell*)x, stride, numbers, scales, rows, width, threads))
}

// As quantise_rows, see `kernels.quantise_int8`.
KERNEL(quantise_int8)(int bf16, const void* weight, int64_t stride, int64_t rows, int width, int8_t* numbers,
                      float* scales, int threads) {
  BY_TYPE(quantise_int8((const Cell*)weight, stride, rows, width, numbers, scales, threads))
}

// The sum of each row. stride: between rows, in bytes.
KERNEL(sum_int8)(const int8_t* numbers, int64_t stride, int64_t rows, int width, int32_t* sums, int threads) {
  sum_int8(numbers, stride, rows, width, sums, threads);
}

// stride: between rows of the weight, in elements. parts: `ranges` shares of a group's range that are tried.
KERNEL(quantise_int4)(int bf16, const void* weight, int64_t stride, int64_t rows, int width, int group_size,
                      const float* parts, int ranges, uint8_t* codes, float* scales, float* zeros, int threads) {
  BY_TYPE(quantise_int4((const Cell*)weight, stride, rows, width, group_size, parts, ranges, codes, scales, zeros, threads))
}
