// Writes the keys and values of new tokens to a paged cache; kernels/attention.py and kernels/cache_int8.py say what.

#include <cstdint>

#include "cache.h"

#define EXPORT __attribute__((visibility("default")))

namespace {

constexpr int64_t FEW = 1 << 18;       // bytes that one thread writes as fast as several
}  // namespace

// key, value: (tokens, kv_heads, head_dim), element_bytes 2 (bfloat16) or 4 (float32). int8: whether the cache is.
// Strides in bytes.
extern "C" EXPORT void serve_llm_write_cache(const char* key, const char* value, int64_t key_token, int64_t key_head,
                                             int64_t value_token, int64_t value_head, char* cache, int64_t cache_block,
                                             int64_t cache_part, int64_t cache_head, int64_t cache_token,
                                             const int64_t* slots, int tokens, int kv_heads, int block_size,
                                             int head_dim, int element_bytes, int int8, int threads) {
  const int64_t moved = (int64_t)2 * head_dim * element_bytes * kv_heads * tokens;
  const auto write = [=](const char* from, char* to) {
    if (element_bytes == 2) {
      write_row((const uint16_t*)from, head_dim, int8, to);
    } else {
      write_row((const float*)from, head_dim, int8, to);
    }
  };
#pragma omp parallel for schedule(static) num_threads(threads) if (moved > FEW)
  for (int token = 0; token < tokens; token++) {
    char* place = cache + slots[token] / block_size * cache_block + slots[token] % block_size * cache_token;
    for (int head = 0; head < kv_heads; head++) {
      write(key + token * key_token + head * key_head, place + head * cache_head);
      write(value + token * value_token + head * value_head, place + cache_part + head * cache_head);
    }
  }
}
