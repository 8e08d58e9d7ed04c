// Attention of a few rows of queries over one sequence's cached keys, tile by tile. Compiled once for each instruction
// set (setup.py), as `attend_VARIANT`; uses nothing of the C++ library, whose inline functions the linker would merge
// across instruction sets.
//
// Both products (scores = query x keys, result = weights x values) are one routine, `multiply`: each number is one chain
// of multiply-adds over k = 0, 1, 2, ..., whatever the number of rows and columns around it. That, tiles at fixed
// positions, and merging tile by tile in order is what makes a row's bits independent of its batch. A unit of k is 32
// bits: a float32 number, or a pair of bfloat16 numbers where the processor multiplies those.

#include "attend.h"

#include <cmath>

#include "vector.h"

#ifndef VARIANT
#define VARIANT baseline
#endif
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

namespace {

#if defined(__AVX512F__)
constexpr int STRIP = 6;  // rows whose sums stay in registers
#elif defined(__aarch64__)
constexpr int STRIP = 5;
#else
constexpr int STRIP = 3;
#endif
constexpr int PANEL = 4 * W;  // columns whose sums stay in registers

// How numbers are multiplied. Cell: of the cache and the query. A unit holds `Number::PACK` numbers.
struct Floats {
  static constexpr int PACK = 1;
  static Vec multiply_add(Units a, Units b, Vec sum) { return fma(as_floats(a), as_floats(b), sum); }
  template <class Cell>
  static Units load_units(const Cell* from, int count) {
    return load_floats(from, count);
  }
  // Weights as they enter the product, W of them; returns their value.
  static Vec put(Vec weights, void* to, int index) {
    store((float*)to + index, weights);
    return weights;
  }
  // Row `unit` of the value matrix, columns from `column` on. Rows past `seen` hold anything and count as 0.
  template <class Cell, class Find>
  static Units value_units(Find row, int unit, int from, int to, int column, int count) {
    return unit < from || unit >= to ? Units{} : load_floats((const Cell*)row(unit) + column, count);
  }
};

#if defined(__AVX512BF16__)
struct Pairs {
  static constexpr int PACK = 2;
  static Vec multiply_add(Units a, Units b, Vec sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  static Units load_units(const Bf16* from, int count) { return load_floats((const float*)from, count); }
  static Vec put(Vec weights, void* to, int index) {
    const __m256i halves = (__m256i)_mm512_cvtneps_pbh(weights);
    store((Bf16*)to + index, halves);
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
  }
  template <class Cell, class Find>
  static Units value_units(Find row, int unit, int from, int to, int column, int count) {
    const int t = 2 * unit;
    Units low = {}, high = {};
    if (t >= from && t < to) low = load_halves((const Bf16*)row(t) + column, count);
    if (t + 1 >= from && t + 1 < to) high = load_halves((const Bf16*)row(t + 1) + column, count);
    return low | high << 16;
  }
};
using HalfNumber = Pairs;
#else
using HalfNumber = Floats;
#endif

// c[r][0 .. PANEL) = sum over k of a[r][k] * b[k], for R rows.
template <class Number, int R>
inline void strip(const uint32_t* a, int64_t a_row, const uint32_t* b, int steps, float* c, int64_t c_row) {
  Vec sums[R][4] = {};
  for (int k = 0; k < steps; k++) {
    const uint32_t* line = b + (int64_t)k * PANEL;
    const Units b0 = load<Units>(line), b1 = load<Units>(line + W);
    const Units b2 = load<Units>(line + 2 * W), b3 = load<Units>(line + 3 * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Units x = all(a[r * a_row + k]);
      sums[r][0] = Number::multiply_add(x, b0, sums[r][0]);
      sums[r][1] = Number::multiply_add(x, b1, sums[r][1]);
      sums[r][2] = Number::multiply_add(x, b2, sums[r][2]);
      sums[r][3] = Number::multiply_add(x, b3, sums[r][3]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) store(c + r * c_row + v * W, sums[r][v]);
}

// c = a x b for at most STRIP rows; b is stored in panels of PANEL columns, `panel` units apart.
template <class Number>
void multiply(int rows, const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t panel, int steps, int columns,
              float* c, int64_t c_row) {
  for (int column = 0; column < columns; column += PANEL, b += panel, c += PANEL) {
    switch (rows) {
      case 1: strip<Number, 1>(a, a_row, b, steps, c, c_row); break;
      case 2: strip<Number, 2>(a, a_row, b, steps, c, c_row); break;
      case 3: strip<Number, 3>(a, a_row, b, steps, c, c_row); break;
#if !defined(__x86_64__) || defined(__AVX512F__)
      case 4: strip<Number, 4>(a, a_row, b, steps, c, c_row); break;
      case 5: strip<Number, 5>(a, a_row, b, steps, c, c_row); break;
      case 6: strip<Number, 6>(a, a_row, b, steps, c, c_row); break;
#endif
    }
  }
}

// Working memory of one task.
struct Scratch {
  uint32_t* query;    // (MAX_ROWS, units of head_dim)
  uint32_t* keys;     // panels of (units of head_dim, PANEL tokens)
  uint32_t* values;   // panels of (units of TILE, PANEL of head_dim)
  float* scores;      // (STRIP, TILE)
  uint32_t* weights;  // (STRIP, TILE)
  float* result;      // (STRIP, width)
  float* highest;     // (STRIP), and
  float* total;       // (STRIP)
  int64_t bytes;

  Scratch(const Problem& p, void* memory) {
    const int64_t width = (p.head_dim + PANEL - 1) / PANEL * PANEL;
    char* next = (char*)memory;
    auto take = [&next](int64_t units) {
      char* found = next;
      next += (units * 4 + 63) / 64 * 64;
      return (uint32_t*)found;
    };
    query = take(MAX_ROWS * p.head_dim);
    keys = take(TILE * p.head_dim);
    values = take(TILE * width);
    scores = (float*)take(STRIP * TILE);
    weights = take(STRIP * TILE);
    result = (float*)take(STRIP * width);
    highest = (float*)take(STRIP);
    total = (float*)take(STRIP);
    bytes = next - (char*)memory;
  }
};

int64_t scratch_bytes(const Problem& p) { return Scratch(p, nullptr).bytes; }

// One task's geometry: which keys a row sees.
struct View {
  const Problem& p;
  const Rows& rows;
  int group, position;  // query heads of a KV head; position of query 0

  View(const Problem& p, const Rows& rows) : p(p), rows(rows), group(p.heads / p.kv_heads) {
    position = p.contexts[rows.sequence] - (p.starts[rows.sequence + 1] - p.starts[rows.sequence]);
  }
  // Of the tile at `start`, row r (counted in the task) sees keys from(r) .. to(r) - 1.
  int to(int r, int start) const {
    const int end = position + (rows.first + r) / group + 1 - start;
    return end < TILE ? end : TILE;
  }
  int from(int r, int start) const {
    if (p.window == 0) return 0;
    const int first = position + (rows.first + r) / group - p.window + 1 - start;
    return first > 0 ? first : 0;
  }
  int64_t element(int r) const {  // of the row's query
    const int token = p.starts[rows.sequence] + (rows.first + r) / group;
    return token * p.query_token + (rows.kv_head * group + (rows.first + r) % group) * p.query_head;
  }
};

// Where the keys (part 0) or values (part 1) of the tile's tokens lie.
template <class Cell>
struct Tokens {
  const Cell* base;
  const int32_t* table;
  const Problem& p;
  int start;

  Tokens(const Problem& p, const Rows& rows, int part, int start)
      : base((const Cell*)p.cache + part * p.cache_part + rows.kv_head * p.cache_head),
        table(p.table + rows.sequence * p.table_row), p(p), start(start) {}
  const Cell* operator()(int t) const {
    const int position = start + t;
    const int offset = position & ((1 << p.block_shift) - 1);
    return base + table[position >> p.block_shift] * p.cache_block + offset * p.cache_token;
  }
  void prefetch(int t) const {
    const char* row = (const char*)(*this)(t);
    for (unsigned line = 0; line < p.head_dim * sizeof(Cell); line += 64) __builtin_prefetch(row + line);
  }
};

template <class Number, class Cell>
void pack_query(const View& view, uint32_t* to) {
  const Problem& p = view.p;
  const int units = p.head_dim / Number::PACK;
  for (int r = 0; r < view.rows.count; r++) {
    const Cell* from = (const Cell*)p.query + view.element(r);
    uint32_t* row = to + (int64_t)r * units;
    for (int i = 0; i < units; i += W) {
      const Units x = Number::load_units(from + i * Number::PACK, units - i < W ? units - i : W);
      const int count = units - i < W ? units - i : W;
      memcpy(row + i, &x, 4 * count);
    }
  }
}

// Keys from .. to - 1 turned to panels of (unit, token); the others of these panels are 0.
template <class Number, class Cell>
void pack_keys(const Tokens<Cell>& keys, const Tokens<Cell>& next, int head_dim, int from, int to, uint32_t* out) {
  const int units = head_dim / Number::PACK;
  for (int t = from / W * W; t < (to + PANEL - 1) / PANEL * PANEL; t += W) {
    const Cell* rows[W];
    for (int i = 0; i < W; i++) {
      const bool seen = t + i >= from && t + i < to;
      rows[i] = seen ? keys(t + i) : nullptr;
      if (seen) next.prefetch(t + i);
    }
    uint32_t* panel = out + (int64_t)(t / PANEL) * units * PANEL + t % PANEL;
    for (int unit = 0; unit < units; unit += W) {
      const int count = units - unit < W ? units - unit : W;
      Units square[W];
      for (int i = 0; i < W; i++)
        square[i] = rows[i] ? Number::load_units(rows[i] + unit * Number::PACK, count) : Units{};
      transpose(square);
      for (int i = 0; i < count; i++) store(panel + (int64_t)(unit + i) * PANEL, square[i]);
    }
  }
}

// Values from .. to - 1 in panels of (unit of tokens, PANEL of head_dim); the others are 0.
template <class Number, class Cell>
void pack_values(const Tokens<Cell>& values, const Tokens<Cell>* next, int head_dim, int from, int to, uint32_t* out) {
  constexpr int units = TILE / Number::PACK;
  const int width = (head_dim + PANEL - 1) / PANEL * PANEL;
  for (int unit = 0; unit * Number::PACK < to; unit++) {
    if (next)
      for (int i = 0; i < Number::PACK; i++) next->prefetch(unit * Number::PACK + i);
    for (int column = 0; column < width; column += W) {
      const int left = head_dim - column;
      const int count = left < 0 ? 0 : left < W ? left : W;
      const Units x = Number::template value_units<Cell>(values, unit, from, to, column, count);
      store(out + ((int64_t)(column / PANEL) * units + unit) * PANEL + column % PANEL, x);
    }
  }
}

// Scores of one row -> weights; 0 where the row sees nothing, up to `columns`. Returns whether it sees anything.
template <class Number>
bool soften(float* scores, float scale, int from, int to, int columns, void* weights, float& highest, float& total) {
  Vec most = all(-INFINITY);
  for (int t = 0; t < columns; t += W) {
    Vec x = load<Vec>(scores + t) * all(scale);
    if (t < from || t + W > to) {
      const Ints index = lanes() + t;
      x = (index >= from) & (index < to) ? x : all(-INFINITY);
    }
    store(scores + t, x);
    most = larger(x, most);
  }
  highest = largest(most);
  const bool sees = from < to && highest != -INFINITY;
  const Vec base = all(sees ? highest : 0.0f);
  Vec sums = {};
  for (int t = 0; t < columns; t += W) sums = sums + Number::put(exp_of(load<Vec>(scores + t) - base), weights, t);
  total = sum(sums);
  return sees;
}

// One row's sums of one tile (or of several, merged before) join those of the tiles before it.
inline void merge_row(float& highest, float& total, float* values, float tile_highest, float tile_total,
                      const float* tile_values, int width) {
  float kept = 1.0f, added = 1.0f;
  if (highest > tile_highest) {
    added = expf(tile_highest - highest);
  } else {
    kept = expf(highest - tile_highest);
    highest = tile_highest;
  }
  total = total * kept + tile_total * added;
  const Vec old = all(kept), fresh = all(added);
  for (int i = 0; i < width; i += W)
    store(values + i, fma(load<Vec>(tile_values + i), fresh, load<Vec>(values + i) * old));
}

template <class Number, class Cell>
void attend_tiles(const Problem& p, const Rows& rows, int first, int last, Sums sums, void* memory) {
  const View view(p, rows);
  const Scratch s(p, memory);
  const int width = padded_dim(p.head_dim), units = p.head_dim / Number::PACK;
  const int64_t result_row = (p.head_dim + PANEL - 1) / PANEL * PANEL;
  for (int r = 0; r < rows.count; r++) sums.highest[r] = -INFINITY, sums.total[r] = 0.0f;
  memset(sums.values, 0, 4 * (int64_t)width * rows.count);
  pack_query<Number, Cell>(view, s.query);
  for (int tile = first; tile <= last; tile++) {
    const int start = tile * TILE;
    const int from = view.from(0, start), to = view.to(rows.count - 1, start);
    const Tokens<Cell> keys(p, rows, 0, start), values(p, rows, 1, start), next(p, rows, 0, start + TILE);
    const bool more = view.to(rows.count - 1, start + TILE) >= TILE;
    pack_keys<Number>(keys, values, p.head_dim, from, to, s.keys);
    pack_values<Number>(values, more ? &next : nullptr, p.head_dim, from, to, s.values);
    for (int r = 0; r < rows.count; r += STRIP) {
      const int count = rows.count - r < STRIP ? rows.count - r : STRIP;
      const int seen = view.to(r + count - 1, start);
      if (seen <= 0 || view.from(r, start) >= TILE) continue;
      const int columns = (seen + PANEL - 1) / PANEL * PANEL;
      multiply<Number>(count, s.query + (int64_t)r * units, units, s.keys, (int64_t)units * PANEL, units, columns,
                       s.scores, TILE);
      bool sees[STRIP];
      for (int i = 0; i < count; i++)
        sees[i] = soften<Number>(s.scores + i * TILE, p.scale, view.from(r + i, start), view.to(r + i, start), columns,
                                 s.weights + i * TILE / Number::PACK, s.highest[i], s.total[i]);
      multiply<Number>(count, s.weights, TILE / Number::PACK, s.values, (int64_t)TILE / Number::PACK * PANEL,
                       (seen + Number::PACK - 1) / Number::PACK, p.head_dim, s.result, result_row);
      for (int i = 0; i < count; i++)
        if (sees[i])
          merge_row(sums.highest[r + i], sums.total[r + i], sums.values + (int64_t)(r + i) * width, s.highest[i],
                    s.total[i], s.result + i * result_row, width);
    }
  }
}

void attend(const Problem& p, const Rows& rows, int first, int last, Sums sums, void* memory) {
  if (p.bf16) {
    attend_tiles<HalfNumber, Bf16>(p, rows, first, last, sums, memory);
  } else {
    attend_tiles<Floats, float>(p, rows, first, last, sums, memory);
  }
}

void merge(Sums into, Sums from, int rows, int width) {
  for (int r = 0; r < rows; r++) {
    if (from.highest[r] == -INFINITY) continue;  // sees nothing there
    const int64_t at = (int64_t)r * width;
    merge_row(into.highest[r], into.total[r], into.values + at, from.highest[r], from.total[r], from.values + at, width);
  }
}

void finish(const Problem& p, const Rows& rows, Sums sums) {
  const int group = p.heads / p.kv_heads, width = padded_dim(p.head_dim);
  for (int r = 0; r < rows.count; r++) {
    const int64_t token = p.starts[rows.sequence] + (rows.first + r) / group;
    const int64_t head = rows.kv_head * group + (rows.first + r) % group;
    const int64_t at = (token * p.heads + head) * p.head_dim;
    const float* values = sums.values + (int64_t)r * width;
    const float share = 1.0f / sums.total[r];
    if (p.bf16) {
      Bf16* out = (Bf16*)p.output + at;
      for (int i = 0; i < p.head_dim; i++) out[i] = rounded(values[i] * share);
    } else {
      float* out = (float*)p.output + at;
      for (int i = 0; i < p.head_dim; i++) out[i] = values[i] * share;
    }
  }
}

}  // namespace

const Variant JOIN(attend_, VARIANT) = {scratch_bytes, attend, merge, finish};
