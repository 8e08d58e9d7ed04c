// Attention of a few rows of queries over one sequence's cached keys, tile by tile. Compiled once for each instruction
// set (setup.py), as `attend_VARIANT`. Does not use the C++ library: the linker would merge its inline functions across
// instruction sets.
//
// `multiply` computes both products (scores = query x keys, result = weights x values). Each number of a result is one
// chain of multiply-adds over k = 0, 1, 2, ..., whatever the number of rows and columns around it. Because of that, of
// tiles at fixed positions, and of merging tiles in order, a row's bits do not depend on its batch. A unit of k is 32
// bits: one float32 number, or a pair of bfloat16 numbers if the processor multiplies pairs. AMX adds 16 units at a time
// to the chain, also in the same order for any number of rows (attend_tiles.h).

#include "attend.h"

#include <cmath>

#include "vector.h"
#if defined(__AMX_TILE__)
#include "attend_tiles.h"
#endif

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
#define FULL_STRIP 6     // rows whose sums of a whole panel, four vectors, fit into the registers
#define VECTOR_STRIP 12  // rows whose sums of half a panel do
#else
#define FULL_STRIP 3
#define VECTOR_STRIP 3
#endif
constexpr float LOG2_E = 1.44269504088896341f;
constexpr int PANEL = 4 * W;  // columns whose sums stay in registers

// How numbers are multiplied. Cell: the type of the cache or the query. Numbers of an int8 cache are multiplied without
// their scales, which is exact in any type: the keys' scales multiply the scores, and the values' scales the weights.
struct Floats {
  static constexpr bool TILES = false;          // whether AMX multiplies
  static constexpr int STRIP = VECTOR_STRIP;  // rows that are multiplied at once
  static constexpr int PACK = 1;              // numbers in a unit
  static constexpr int DEGREE = 6;  // degree of the polynomial for powers of 2
  static Vec multiply_add(Units a, Units b, Vec sum) { return fma(as_floats(a), as_floats(b), sum); }
  template <class Cell>
  static Units load_units(const Cell* from, int count) {
    return load_floats(from, count);
  }
  template <class Cell>
  static Four load_four(const Cell* from) {
    return ::load_four(from);
  }
  // Stores W weights as the product reads them; returns their rounded values.
  static Vec put(Vec weights, void* to, int index) {
    store((float*)to + index, weights);
    return weights;
  }
  // One vector of units of the value matrix, built from the rows of the unit's tokens.
  template <class Cell>
  static Units value_units(const Cell* const* rows, int column, int count) {
    return load_floats(rows[0] + column, count);
  }
  // Four int8 numbers in each lane -> four lines of units.
  static void put_four(Units numbers, uint32_t* to) {
    for (int i = 0; i < 4; i++) store(to + i * PANEL, number_of_four(numbers, i));
  }
};

#if defined(__AVX512BF16__)
struct Pairs {
#if defined(__AMX_TILE__)
  static constexpr bool TILES = true;
  static constexpr int STRIP = 16;
#else
  static constexpr bool TILES = false;
  static constexpr int STRIP = VECTOR_STRIP;
#endif
  static constexpr int PACK = 2;
  static constexpr int DEGREE = 4;
  static Vec multiply_add(Units a, Units b, Vec sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  static Units load_units(const Bf16* from, int count) { return load_floats((const float*)from, count); }
  static Four load_four(const Bf16* from) { return load<Four>(from); }
  static Vec put(Vec weights, void* to, int index) {
    const __m256i halves = (__m256i)_mm512_cvtneps_pbh(weights);
    store((Bf16*)to + index, halves);
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
  }
  static Units value_units(const Bf16* const* rows, int column, int count) {
    return load_halves(rows[0] + column, count) | load_halves(rows[1] + column, count) << 16;
  }
  static Units value_units(const int8_t* const* rows, int column, int count) {
    return load_floats(rows[0] + column, count) >> 16 | load_floats(rows[1] + column, count);
  }
  static void put_four(Units numbers, uint32_t* to) {
    for (int i = 0; i < 4; i += 2)
      store(to + i / 2 * PANEL, number_of_four(numbers, i) >> 16 | number_of_four(numbers, i + 1));
  }
};
using HalfNumber = Pairs;
#else
using HalfNumber = Floats;
#endif

// c[r][0 .. V vectors) = sum over k of a[r][k] * b[k], for R rows; a line of b is PANEL wide.
template <class Number, int R, int V>
inline void strip(const uint32_t* a, int64_t a_row, const uint32_t* b, int steps, float* c, int64_t c_row) {
  Vec sums[R][V] = {};
  for (int k = 0; k < steps; k++) {
    Units line[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) line[v] = load<Units>(b + (int64_t)k * PANEL + v * W);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Units x = all(a[r * a_row + k]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[r][v] = Number::multiply_add(x, line[v], sums[r][v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store(c + r * c_row + v * W, sums[r][v]);
}

template <class Number, int V>
inline void strips(int rows, const uint32_t* a, int64_t a_row, const uint32_t* b, int steps, float* c, int64_t c_row) {
  switch (rows) {
    case 1: return strip<Number, 1, V>(a, a_row, b, steps, c, c_row);
    case 2: return strip<Number, 2, V>(a, a_row, b, steps, c, c_row);
    case 3: return strip<Number, 3, V>(a, a_row, b, steps, c, c_row);
#if FULL_STRIP > 3
    case 4: return strip<Number, 4, V>(a, a_row, b, steps, c, c_row);
    case 5: return strip<Number, 5, V>(a, a_row, b, steps, c, c_row);
    case 6: return strip<Number, 6, V>(a, a_row, b, steps, c, c_row);
#endif
  }
#if VECTOR_STRIP > FULL_STRIP
  if constexpr (V <= 2) switch (rows) {
    case 7: return strip<Number, 7, V>(a, a_row, b, steps, c, c_row);
    case 8: return strip<Number, 8, V>(a, a_row, b, steps, c, c_row);
    case 9: return strip<Number, 9, V>(a, a_row, b, steps, c, c_row);
    case 10: return strip<Number, 10, V>(a, a_row, b, steps, c, c_row);
    case 11: return strip<Number, 11, V>(a, a_row, b, steps, c, c_row);
    case 12: return strip<Number, 12, V>(a, a_row, b, steps, c, c_row);
  } else {
    strips<Number, 2>(rows, a, a_row, b, steps, c, c_row);
    strips<Number, V - 2>(rows, a, a_row, b + 2 * W, steps, c + 2 * W, c_row);
  }
#endif
}

// The product with one panel, V vectors wide.
template <class Number, int V>
inline void panel_product(int rows, const uint32_t* a, int64_t a_row, const uint32_t* b, int steps, float* c,
                          int64_t c_row) {
#if defined(__AMX_TILE__)
  if constexpr (Number::TILES)
    multiply_tiles<V>(a, a_row, b, PANEL, steps, c, c_row);
  else
#endif
    strips<Number, V>(rows, a, a_row, b, steps, c, c_row);
}

// c = a x b for at most STRIP rows; b is stored in panels of PANEL columns, `panel` units apart. AMX also multiplies the
// rows after them, up to the number for which `begin_tiles` was called.
template <class Number, class Ahead>
void multiply(int rows, const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t panel, int steps, int columns,
              float* c, int64_t c_row, Ahead& ahead) {
  if constexpr (Number::TILES) asm volatile("" ::: "memory");  // what is read by tiles has been written
  for (int column = 0; column < columns; column += PANEL, b += panel, c += PANEL) {
    ahead.step();
    const int vectors = (columns - column + W - 1) / W;
    if (vectors >= 4) {
      panel_product<Number, 4>(rows, a, a_row, b, steps, c, c_row);
    } else if (vectors == 3) {
      panel_product<Number, 3>(rows, a, a_row, b, steps, c, c_row);
    } else if (vectors == 2) {
      panel_product<Number, 2>(rows, a, a_row, b, steps, c, c_row);
    } else {
      panel_product<Number, 1>(rows, a, a_row, b, steps, c, c_row);
    }
  }
}

// Before and after a task's products of `rows` rows at once.
template <class Number>
inline void begin_tiles(int rows, int units) {
#if defined(__AMX_TILE__)
  if constexpr (Number::TILES) configure_tiles(rows, units % TILE_UNITS);
#endif
}
template <class Number>
inline void end_tiles() {
#if defined(__AMX_TILE__)
  if constexpr (Number::TILES) _tile_release();
#endif
}

// Working memory of one task.
struct Scratch {
  uint32_t* query;    // (most rows, units of head_dim)
  uint32_t* keys;     // panels of (units of head_dim, PANEL tokens)
  uint32_t* values;   // panels of (units of TILE, PANEL of value_dim)
  float* scores;      // (strip, TILE)
  uint32_t* weights;  // (strip, TILE)
  float* result;      // (strip, width)
  float* highest;     // (strip), and
  float* total;       // (strip)
  float* key_scales;    // (TILE), and
  float* value_scales;  // (TILE), of an int8 cache
  int64_t bytes;

  Scratch(const Problem& p, int strip, void* memory) {
    const int64_t width = (p.value_dim + PANEL - 1) / PANEL * PANEL;
    char* next = (char*)memory;
    auto take = [&next](int64_t units) {
      char* found = next;
      next += (units * 4 + 63) / 64 * 64;
      return (uint32_t*)found;
    };
    query = take(most_rows(p) * p.head_dim);
    keys = take(TILE * p.head_dim);
    values = take(TILE * width);
    scores = (float*)take(strip * TILE);
    weights = take(strip * TILE);
    result = (float*)take(strip * width);
    highest = (float*)take(strip);
    total = (float*)take(strip);
    key_scales = (float*)take(TILE);
    value_scales = (float*)take(TILE);
    bytes = next - (char*)memory;
  }
};

int64_t scratch_bytes(const Problem& p) { return Scratch(p, p.bf16 ? HalfNumber::STRIP : Floats::STRIP, nullptr).bytes; }

// One task's geometry: which keys a row sees.
struct View {
  const Problem& p;
  const Rows& rows;
  int group, position;  // query heads of a KV head; position of query 0

  View(const Problem& p, const Rows& rows) : p(p), rows(rows), group(p.heads / p.kv_heads) {
    position = p.contexts[rows.sequence] - (p.starts[rows.sequence + 1] - p.starts[rows.sequence]);
  }
  // The query of row r, which is counted in the task, its position and its head. A division takes long.
  int index(int r) const { return group == 1 ? rows.first + r : (rows.first + r) / group; }
  int query(int r) const { return position + index(r); }
  int head(int r) const { return rows.kv_head * group + rows.first + r - index(r) * group; }
  // Of the tile at `start`, row r sees keys from(r) .. to(r) - 1.
  int to(int r, int start) const {
    const int end = keys_end(p, rows.sequence, index(r)) - start;
    return end < TILE ? end : TILE;
  }
  int from(int r, int start) const {
    if (p.window == 0) return 0;
    const int first = query(r) - p.window + 1 - start;
    return first > 0 ? first : 0;
  }
  int64_t element(int r) const {  // the first number of the query of row r
    const int token = p.starts[rows.sequence] + index(r);
    return token * p.query_token + head(r) * p.query_head;
  }
};

alignas(64) const float ZEROS[MAX_HEAD + 1] = {};

// Where the keys (part 0) or values (part 1) of a tile's tokens lie.
template <class Cell>
struct Tokens {
  const Problem& p;
  const int start;
  const Cell* base;
  const int32_t* table;

  Tokens(const Problem& p, const Rows& rows, int part, int start)
      : p(p), start(start), base((const Cell*)p.cache + part * p.cache_part + rows.kv_head * p.cache_head),
        table(p.table + rows.sequence * p.table_row) {}
  const Cell* operator()(int t) const {
    const int position = start + t, offset = position & ((1 << p.block_shift) - 1);
    return base + table[position >> p.block_shift] * p.cache_block + offset * p.cache_token;
  }
  // The rows of all tokens; a row of zeros for tokens that no query sees.
  void find(int from, int to, const Cell** found) const {
    for (int t = 0; t < TILE; t++) found[t] = (const Cell*)ZEROS;
    const int block_size = 1 << p.block_shift;
    for (int t = from; t < to;) {
      const Cell* row = (*this)(t);
      const int end = t + block_size - ((start + t) & (block_size - 1));
      for (; t < end && t < to; t++, row += p.cache_token) found[t] = row;
    }
  }
};

template <class Number, class Cell>
void pack_query(const View& view, uint32_t* to) {
  const Problem& p = view.p;
  const int units = p.head_dim / Number::PACK;
  for (int r = 0; r < view.rows.count; r++) {
    const Cell* from = (const Cell*)p.query + view.element(r);
    uint32_t* row = to + (int64_t)r * units;
    int i = 0;
    for (; i + W <= units; i += W) store(row + i, Number::load_units(from + i * Number::PACK, W));
    if (i == units) continue;
    const Units x = Number::load_units(from + i * Number::PACK, units - i);
    memcpy(row + i, &x, 4 * (units - i));  // calls a function, because its size is not constant
  }
}

// Prefetches keys and values in reading order, a few tokens at a time, during the work on earlier ones: the pieces of a
// cache are too short and too scattered for the hardware prefetcher. Stays at most one tile ahead of the current one;
// the tile after a task's last one is the first of the thread's next task.
template <class Cell>
class Ahead {
 public:
  Ahead(const Problem& p, const Rows& rows, int first, int last, const Next& next)
      : p_(p), rows_(&rows), last_(last), next_(next) {
    enter(first);
    if (next.fetched) {
      leave();
    } else {
      for (int i = 0; i < FIRST_STEPS; i++) step();
    }
  }
  void step() {
    if (tiles_ <= 0 || rows_ == nullptr) return;
    const Cell* row = Tokens<Cell>(p_, *rows_, part_, tile_ * TILE)(token_);
    const int block_size = 1 << p_.block_shift;
    int end = token_ + block_size - (token_ & (block_size - 1));  // a tile starts with a block, or inside a larger one
    if (end > token_ + STEP_TOKENS) end = token_ + STEP_TOKENS;
    if (end > to_) end = to_;
    for (; token_ < end; token_++, row += p_.cache_token)
      for (int column = 0; column < p_.head_dim; column += 64 / sizeof(Cell)) __builtin_prefetch(row + column, 0, 2);
    if (token_ < to_) return;
    token_ = from_;
    if (++part_ == 2) leave();
  }
  // The work moves on to the next tile.
  void next_tile() { tiles_++; }
  // Prefetches the rest, before the thread takes its next task.
  void finish() {
    while (tiles_ > 0 && rows_ != nullptr) step();
  }

 private:
  static constexpr int STEP_TOKENS = 16, FIRST_STEPS = 8;

  void enter(int tile) {
    const View view(p_, *rows_);
    tile_ = tile, part_ = 0;
    from_ = view.from(0, tile * TILE), to_ = view.to(rows_->count - 1, tile * TILE);
    token_ = from_;
  }
  void leave() {
    tiles_--;
    if (tile_ < last_) return enter(tile_ + 1);
    rows_ = next_.rows;
    next_.rows = nullptr;
    if (rows_ != nullptr) enter(last_ = next_.tile);
  }

  const Problem& p_;
  const Rows* rows_;  // null when everything is prefetched
  int last_;
  Next next_;
  int tiles_ = 2;  // that may still be prefetched, including the current one
  int tile_, part_, token_, from_, to_;
};

// Transposes a tile's keys to panels of (unit, token), up to the panel of token `to`.
template <class Number, class Cell>
void pack_keys(const Cell* const* rows, int head_dim, int from, int to, uint32_t* out, Ahead<Cell>& ahead) {
  const int units = head_dim / Number::PACK;
  for (int t = from / PANEL * PANEL; t < to; t += W) {
    uint32_t* panel = out + (int64_t)(t / PANEL) * units * PANEL + t % PANEL;
    ahead.step();
    for (int unit = 0; unit < units; unit += 4) {  // head_dim is a multiple of 8
      Units turned[4];
      turn([&](int i) { return Number::load_four(rows[t + i] + unit * Number::PACK); }, turned);
      for (int i = 0; i < 4; i++) store(panel + (int64_t)(unit + i) * PANEL, turned[i]);
    }
  }
}

// Transposes COUNT int8 numbers of each of W rows, from `column` on, four at a time.
template <class Number, int COUNT>
inline void pack_numbers(const int8_t* const* rows, int column, uint32_t* panel) {
  Units turned[4];
  turn([&](int i) { return load_bytes<COUNT>(rows[i] + column); }, turned);
#pragma GCC unroll 4
  for (int i = 0; i < COUNT / 4; i++)
    Number::put_four(turned[i], panel + (int64_t)(column + 4 * i) / Number::PACK * PANEL);
}

template <class Number>
void pack_keys(const int8_t* const* rows, int head_dim, int from, int to, uint32_t* out, Ahead<int8_t>& ahead) {
  const int units = head_dim / Number::PACK;
  for (int t = from / PANEL * PANEL; t < to; t += W) {
    uint32_t* panel = out + (int64_t)(t / PANEL) * units * PANEL + t % PANEL;
    ahead.step();
    int column = 0;
    for (; column + 16 <= head_dim; column += 16) pack_numbers<Number, 16>(rows + t, column, panel);
    if (column < head_dim) pack_numbers<Number, 8>(rows + t, column, panel);
  }
}

// The scales that follow the rows of a tile's tokens.
void gather_scales(const int8_t* const* rows, int head_dim, float* scales) {
  for (int t = 0; t < TILE; t++) memcpy(scales + t, rows[t] + head_dim, 4);
}

// Packs a tile's values in panels of (unit of tokens, PANEL of value_dim), up to the unit of token `to`. Columns past
// value_dim are undefined: they only reach columns of the result that are not read.
template <class Number, class Cell>
void pack_values(const Cell* const* rows, int value_dim, int to, uint32_t* out, Ahead<Cell>& ahead) {
  constexpr int units = TILE / Number::PACK;
  for (int column = 0; column < value_dim; column += PANEL, out += (int64_t)units * PANEL) {
    const int left = value_dim - column;
    for (int unit = 0; unit * Number::PACK < to; unit++) {
      const Cell* const* pair = rows + unit * Number::PACK;
      uint32_t* line = out + (int64_t)unit * PANEL;
      if (unit % 8 == 0) ahead.step();
      if (left >= PANEL) {
        for (int i = 0; i < PANEL; i += W) store(line + i, Number::value_units(pair, column + i, W));
      } else {
        for (int i = 0; i < left; i += W)
          store(line + i, Number::value_units(pair, column + i, left - i < W ? left - i : W));
      }
    }
  }
}

// Multiplies one row's products by the keys' scales, if any, caps them if cap > 0: cap * tanh(product / cap), and adds
// -slope * |distance + t| to that of key t. distance: from the row's query to the first key, negative before the query.
template <int DEGREE>
void adjust(float* products, int columns, const float* scales, float cap, float slope, int distance) {
  const Vec doubled = all(-2.0f * LOG2_E / cap), most = all(cap);
  for (int t = 0; t < columns; t += W) {
    Vec x = load<Vec>(products + t);
    if (scales != nullptr) x = x * load<Vec>(scales + t);
    if (cap > 0.0f) {
      const Units sign = (Units)x & all(0x80000000u);
      const Vec e = power_of_2<DEGREE>(as_floats((Units)x ^ sign) * doubled);  // e^(-2 |product| / cap)
      x = as_floats((Units)((all(1.0f) - e) / (all(1.0f) + e) * most) | sign);
    }
    if (slope != 0.0f) {
      const Units away = (Units)__builtin_convertvector(lanes() + (distance + t), Vec) | all(0x80000000u);  // -|...|
      x = fma(as_floats(away), all(slope), x);
    }
    store(products + t, x);
  }
}

// Turns the products of one row into weights, 2^(scale * product - highest), and 0 for keys that the row does not see,
// up to `columns`. The values' scales of an int8 cache multiply the weights, but not their sum. Returns whether the row
// sees any key. Products may be NaN, which `larger` drops and `total` keeps.
// WHOLE: it sees all keys up to `columns`.
template <class Number, bool SCALED, bool WHOLE>
bool soften(const float* products, float scale, int from, int to, int columns, const float* value_scales, void* weights,
            float& highest, float& total) {
  const Vec nothing = all(-INFINITY);
  const int inner = (from + W - 1) / W * W, outer = to / W * W;  // all lanes of the vectors between them are visible
  auto product = [=](int t) {
    const Vec x = load<Vec>(products + t);
    if (WHOLE || (t >= inner && t < outer)) return x;
    const Ints index = lanes() + t;
    return (index >= from) & (index < to) ? x : nothing;
  };
  Vec most[2] = {nothing, nothing};
  for (int t = 0; t < columns; t += 2 * W)
    for (int i = 0; i < 2; i++) most[i] = larger(product(t + i * W), most[i]);
  highest = largest(larger(most[0], most[1])) * scale;
  const bool sees = from < to && highest != -INFINITY;
  const Vec factor = all(scale), base = all(sees ? -highest : 0.0f);
  Vec sums[2] = {};
  for (int t = 0; t < columns; t += 2 * W)
    for (int i = 0; i < 2; i++) {
      const Vec x = quick_power_of_2<Number::DEGREE>(fma(product(t + i * W), factor, base));
      if constexpr (SCALED) {
        Number::put(x * load<Vec>(value_scales + t + i * W), weights, t + i * W);
        sums[i] = sums[i] + x;
      } else {
        sums[i] = sums[i] + Number::put(x, weights, t + i * W);
      }
    }
  total = sum(sums[0] + sums[1]);
  return from < to && (sees || total != total);
}

// Adds one row's sums of a tile, or of several merged tiles, to those of the tiles before it.
inline void merge_row(float& highest, float& total, float* values, float tile_highest, float tile_total,
                      const float* tile_values, int width) {
  float kept = 1.0f, added = 1.0f;
  if (highest > tile_highest) {
    added = exp2f(tile_highest - highest);
  } else {
    kept = exp2f(highest - tile_highest);
    highest = tile_highest;
  }
  total = total * kept + tile_total * added;
  const Vec old = all(kept), fresh = all(added);
  for (int i = 0; i < width; i += W)
    store(values + i, fma(load<Vec>(tile_values + i), fresh, load<Vec>(values + i) * old));
}

// Keys whose weights `soften` writes if `seen` are seen: whole tiles of AMX.
inline int whole_columns(int seen) { return (seen + 2 * W - 1) / (2 * W) * (2 * W); }

// Asked: the type of the query. Cell: the type of the cache.
template <class Number, class Asked, class Cell>
void attend_tiles(const Problem& p, const Rows& rows, int first, int last, const Next& next, Sums sums, void* memory) {
  constexpr bool SCALED = sizeof(Cell) == 1;
  constexpr int STRIP = Number::STRIP;
  const View view(p, rows);
  const Scratch s(p, STRIP, memory);
  const float cap = p.softcap / p.scale;
  const int width = padded_dim(p.value_dim), units = p.head_dim / Number::PACK;
  const int strips = (rows.count + STRIP - 1) / STRIP, strip_rows = (rows.count + strips - 1) / strips;
  const int64_t result_row = (p.value_dim + PANEL - 1) / PANEL * PANEL;
  Ahead<Cell> ahead(p, rows, first, last, next);
  for (int r = 0; r < rows.count; r++) sums.highest[r] = -INFINITY, sums.total[r] = 0.0f;
  memset(sums.values, 0, 4 * (int64_t)width * rows.count);
  pack_query<Number, Asked>(view, s.query);
  begin_tiles<Number>(strip_rows, units);
  for (int tile = first; tile <= last; tile++) {
    const int start = tile * TILE;
    const int from = view.from(0, start), to = view.to(rows.count - 1, start);
    if (tile > first) ahead.next_tile();
    const Cell* tokens[TILE];
    Tokens<Cell>(p, rows, 0, start).find(from, to, tokens);
    pack_keys<Number>(tokens, p.head_dim, from, to, s.keys, ahead);
    if constexpr (SCALED) gather_scales(tokens, p.head_dim, s.key_scales);
    Tokens<Cell>(p, rows, 1, start).find(from, to, tokens);
    pack_values<Number>(tokens, p.value_dim, Number::TILES ? whole_columns(to) : to, s.values, ahead);
    if constexpr (SCALED) gather_scales(tokens, p.head_dim, s.value_scales);
    for (int r = 0; r < rows.count; r += strip_rows) {
      const int count = rows.count - r < strip_rows ? rows.count - r : strip_rows;
      const int seen = view.to(r + count - 1, start);
      if (seen <= 0 || view.from(r, start) >= TILE) continue;
      const int columns = whole_columns(seen);
      multiply<Number>(count, s.query + (int64_t)r * units, units, s.keys, (int64_t)units * PANEL, units, columns,
                       s.scores, TILE, ahead);
      bool sees[STRIP];
      for (int i = 0; i < count; i++) {
        const float slope = p.alibi_slopes == nullptr ? 0.0f : p.alibi_slopes[view.head(r + i)] / p.scale;
        if (SCALED || cap > 0.0f || slope != 0.0f)
          adjust<Number::DEGREE>(s.scores + i * TILE, columns, SCALED ? s.key_scales : nullptr, cap, slope,
                                 start - view.query(r + i));
        const int row_from = view.from(r + i, start), row_to = view.to(r + i, start);
        const auto soften_row =
            row_from == 0 && row_to >= columns ? soften<Number, SCALED, true> : soften<Number, SCALED, false>;
        sees[i] = soften_row(s.scores + i * TILE, p.scale * LOG2_E, row_from, row_to, columns, s.value_scales,
                             s.weights + i * TILE / Number::PACK, s.highest[i], s.total[i]);
      }
      multiply<Number>(count, s.weights, TILE / Number::PACK, s.values, (int64_t)TILE / Number::PACK * PANEL,
                       ((Number::TILES ? columns : seen) + Number::PACK - 1) / Number::PACK, p.value_dim, s.result,
                       result_row, ahead);
      for (int i = 0; i < count; i++)
        if (sees[i])
          merge_row(sums.highest[r + i], sums.total[r + i], sums.values + (int64_t)(r + i) * width, s.highest[i],
                    s.total[i], s.result + i * result_row, width);
    }
  }
  end_tiles<Number>();
  ahead.finish();
}

void attend(const Problem& p, const Rows& rows, int first, int last, const Next& next, Sums sums, void* memory) {
  if (p.bf16) {
    const auto run = p.int8 ? attend_tiles<HalfNumber, Bf16, int8_t> : attend_tiles<HalfNumber, Bf16, Bf16>;
    run(p, rows, first, last, next, sums, memory);
  } else {
    const auto run = p.int8 ? attend_tiles<Floats, float, int8_t> : attend_tiles<Floats, float, float>;
    run(p, rows, first, last, next, sums, memory);
  }
}

void merge(Sums into, Sums from, int rows, int width) {
  for (int r = 0; r < rows; r++) {
    if (from.highest[r] == -INFINITY && from.total[r] == 0.0f) continue;  // the row sees no key there
    const int64_t at = (int64_t)r * width;
    merge_row(into.highest[r], into.total[r], into.values + at, from.highest[r], from.total[r], from.values + at, width);
  }
}

void finish(const Problem& p, const Rows& rows, Sums sums) {
  const View view(p, rows);
  const int width = padded_dim(p.value_dim);
  for (int r = 0; r < rows.count; r++) {
    const int64_t token = p.starts[rows.sequence] + view.index(r);
    const int64_t head = view.head(r);
    const int64_t at = (token * p.heads + head) * p.value_dim;
    const float* values = sums.values + (int64_t)r * width;
    float share = 1.0f / sums.total[r];
    if (p.sinks != nullptr) {
      const float sink = p.sinks[head] * LOG2_E, highest = sums.highest[r];
      // 2^highest / (2^highest * total + 2^sink), divided by the larger of the two powers
      share = highest > sink ? 1.0f / (sums.total[r] + exp2f(sink - highest))
                             : exp2f(highest - sink) / (exp2f(highest - sink) * sums.total[r] + 1.0f);
    }
    if (p.bf16) {
      Bf16* out = (Bf16*)p.output + at;
      for (int i = 0; i < p.value_dim; i++) out[i] = rounded(values[i] * share);
    } else {
      float* out = (float*)p.output + at;
      for (int i = 0; i < p.value_dim; i++) out[i] = values[i] * share;
    }
  }
}

}  // namespace

const Variant JOIN(attend, VARIANT) = {scratch_bytes, attend, merge, finish};
