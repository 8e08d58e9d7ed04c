// Shared by attention.cpp (which task runs where) and attend.cpp (one task, compiled once per instruction set).
#pragma once

#include <cstdint>

constexpr int TILE = 256;       // keys processed together, starting at a multiple of TILE
constexpr int MAX_ROWS = 128;        // rows of one task, if no more are allowed: (query, head) pairs that read the same KV head
constexpr int MOST_NUMBERS = 16384;  // of the queries of a task of more rows
constexpr int MAX_HEAD = 1024;

// The arguments of paged_attention; strides in elements.
struct Problem {
  const void* query;  // (tokens, heads, head_dim)
  int64_t query_token, query_head;
  const void* cache;  // (blocks, 2 or 1, kv_heads, block_size, head_dim, or head_dim + 4 bytes of an int8 cache)
  int64_t cache_block, cache_part, cache_head, cache_token;  // part: keys to values, 0 if values begin keys' rows
  int64_t value_dim;  // numbers in a value
  const int32_t* table;  // (sequences, max_blocks)
  int64_t table_row;
  const int32_t* starts;    // (sequences + 1)
  const int32_t* contexts;  // (sequences)
  const float* sinks;       // (heads) or null
  const float* alibi_slopes;  // (heads) or null
  void* output;             // (tokens, heads, value_dim), dense
  int sequences, heads, kv_heads, head_dim, block_shift;
  int window;  // 0: none; a query sees the keys less than `window` positions before it, or after it
  float scale;
  float softcap;  // 0: none
  bool bf16;      // query and output; false: float32
  bool int8;      // the cache; false: the query's type
  bool causal;    // no query sees keys after it
};

// One past the last key that a query of a sequence sees.
inline int keys_end(const Problem& p, int sequence, int query) {
  const int context = p.contexts[sequence];
  const int position = context - (p.starts[sequence + 1] - p.starts[sequence]) + query;
  if (p.causal) return position + 1;
  return p.window == 0 || position + p.window > context ? context : position + p.window;
}

// The most rows of one task. Rows of encoders all read the same keys, so more of them share the work of packing these.
inline int most_rows(const Problem& p) {
  return p.causal || p.head_dim * MAX_ROWS > MOST_NUMBERS ? MAX_ROWS : MOST_NUMBERS / p.head_dim / MAX_ROWS * MAX_ROWS;
}

// Rows first .. first + count - 1 of one sequence and KV head; row r is query r / group, head r % group of the group.
struct Rows {
  int sequence, kv_head, first, count;
  int first_tile, last_tile;  // the first and last tile that any of the rows sees
};

// What a thread prefetches during a task: the first tile of its next task (null: not known). Also whether the task's
// own first tile was prefetched.
struct Next {
  const Rows* rows;
  int tile;
  bool fetched;
};

// Softmax-weighted sums so far, for each row: highest score, sum of weights, weighted values (value_dim padded to 16).
struct Sums {
  float* highest;
  float* total;
  float* values;
};

inline int padded_dim(int value_dim) { return (value_dim + 15) / 16 * 16; }

// One instruction set's code. Scratch: bytes of working memory that `attend` needs, aligned to 64.
struct Variant {
  int64_t (*scratch)(const Problem&);
  // Clears the sums and adds the tiles first .. last to them, in order.
  void (*attend)(const Problem&, const Rows&, int first, int last, const Next&, Sums, void* scratch);
  // Adds sums of `rows` rows to others, as `attend` adds each tile.
  void (*merge)(Sums into, Sums from, int rows, int width);
  void (*finish)(const Problem&, const Rows&, Sums);  // writes the output
};

// Those that are compiled.
extern const Variant attend_baseline, attend_avx2, attend_avx512, attend_avx512_bf16, attend_amx;
