// Attention over a paged KV cache for CPUs: the C interface, and the division of work between threads. Independent of
// torch.
//
// The work is cut into tasks of at most MAX_ROWS rows, or more for encoders (one sequence, one KV head). If there are too
// few tasks for the threads, each task is cut at every tile of keys, and the sums of its tiles are merged in order
// afterwards. An uncut task adds them in the same order, so the cut does not change the bits of a result.

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <vector>

#include "attend.h"
#include "parallel.h"
#include "variants.h"
#include "workspace.h"

#define EXPORT __attribute__((visibility("default")))

namespace {

constexpr int TASKS_PER_THREAD = 4;            // with fewer, threads wait for the last one
constexpr int FEW_ROWS = 32;                   // up to here, reading the keys takes longer than computing
constexpr int64_t MOST_SPLIT = int64_t{64} << 20;  // bytes of sums that may wait to be merged

const Variant* const VARIANTS[] = {IF_BASELINE(attend_baseline), IF_AVX2(attend_avx2), IF_AVX512(attend_avx512),
                                  IF_AVX512_BF16(attend_avx512_bf16), IF_AMX(attend_amx)};

#if defined(__x86_64__) && defined(__linux__)
// Whether the processor has matrix units and Linux lets this process use them. A process must ask once, because their
// registers are large.
bool may_use_amx() {
  unsigned a = 7, b, c = 0, d, low, high;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25;
  if ((d & (BF16 | TILE | INT8)) != (BF16 | TILE | INT8)) return false;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned TILE_STATES = 3u << 17;
  if ((low & TILE_STATES) != TILE_STATES) return false;
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

thread_local Workspace scratch_space, sums_space, split_space;

Sums sums_at(float* memory, int rows) { return {memory, memory + rows, memory + 2 * rows}; }
int64_t sums_size(int rows, int width) { return (int64_t)rows * (width + 2); }  // floats

// The tasks of a step, of at most `most` rows, those with the most keys of each sequence first.
std::vector<Rows> cut(const Problem& p, int most) {
  const int group = p.heads / p.kv_heads;
  std::vector<Rows> tasks;
  for (int sequence = 0; sequence < p.sequences; sequence++) {
    const int queries = p.starts[sequence + 1] - p.starts[sequence];
    const int position = p.contexts[sequence] - queries;
    const int parts = (queries * group + most - 1) / most;
    for (int part = parts - 1; part >= 0; part--) {
      const int first = part * most;
      const int count = queries * group - first < most ? queries * group - first : most;
      const int lowest = p.window == 0 ? 0 : position + first / group - p.window + 1;
      const int last_tile = (keys_end(p, sequence, (first + count - 1) / group) - 1) / TILE;
      for (int head = 0; head < p.kv_heads; head++)
        tasks.push_back({sequence, head, first, count, lowest > 0 ? lowest / TILE : 0, last_tile});
    }
  }
  return tasks;
}

// Tiles first .. last of a task. Sums that will be merged have memory of their own.
struct Part {
  int task, first, last;
  int64_t place;
};

// Calls attend(part, next part of the same thread) for each part. A thread claims its next part before it computes a
// part of few rows, so that it can prefetch.
template <class Attend>
void share(const std::vector<Rows>& tasks, const std::vector<Part>& parts, int threads, const Attend& attend) {
  std::atomic<size_t> taken{0};
  parallel(std::min<int64_t>(threads, parts.size()), 1, threads, [&](int64_t, int64_t) {
    bool fetched = false;
    for (size_t i = taken++, next; i < parts.size(); i = next) {
      const bool early = tasks[parts[i].task].count <= FEW_ROWS;
      if (early) next = taken++;
      const bool known = early && next < parts.size();
      const Rows* rows = known ? &tasks[parts[next].task] : nullptr;
      attend(parts[i], Next{rows, known ? parts[next].first : 0, fetched});
      if (!early) next = taken++;
      fetched = known;
    }
  });
}

void run_whole(const Problem& p, const Variant& variant, const std::vector<Rows>& tasks, int threads) {
  const int64_t scratch = variant.scratch(p);
  const int width = padded_dim(p.value_dim);
  std::vector<Part> parts;
  for (const Rows& rows : tasks) parts.push_back({(int)parts.size(), rows.first_tile, rows.last_tile, 0});
  share(tasks, parts, threads, [&](const Part& part, const Next& next) {
    const Rows& rows = tasks[part.task];
    const Sums sums = sums_at((float*)sums_space.at_least(4 * sums_size(rows.count, width)), rows.count);
    variant.attend(p, rows, part.first, part.last, next, sums, scratch_space.at_least(scratch));
    variant.finish(p, rows, sums);
  });
}

void run_split(const Problem& p, const Variant& variant, const std::vector<Rows>& tasks, const std::vector<Part>& parts,
               float* memory, int threads) {
  const int64_t scratch = variant.scratch(p);
  const int width = padded_dim(p.value_dim);
  share(tasks, parts, threads, [&](const Part& part, const Next& next) {
    const Rows& rows = tasks[part.task];
    variant.attend(p, rows, part.first, part.last, next, sums_at(memory + part.place, rows.count),
                   scratch_space.at_least(scratch));
  });
  parallel(parts.size(), 1, tasks.size() > 1 ? threads : 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const Rows& rows = tasks[parts[i].task];
      if (parts[i].first != rows.first_tile) continue;
      const Sums sums = sums_at(memory + parts[i].place, rows.count);
      for (int64_t next = 1; next <= rows.last_tile - rows.first_tile; next++)
        variant.merge(sums, sums_at(memory + parts[i + next].place, rows.count), rows.count, width);
      variant.finish(p, rows, sums);
    }
  });
}

}  // namespace

extern "C" {

// Lets the caller check that both sides use the same structure.
EXPORT int serve_llm_problem_bytes() { return sizeof(Problem); }

// Whether a variant was compiled.
EXPORT int serve_llm_compiled(int variant) { return VARIANTS[variant] != nullptr; }

// Whether this processor can run a variant, compiled or not.
EXPORT int serve_llm_supported(int variant) {
  if (variant == 0) return 1;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (variant == 1) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (variant == 2) return wide;
  const bool bf16 = wide && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (variant == 3) return bf16;
#if defined(__linux__)
  if (variant == 4) return bf16 && may_use_amx();
#endif
#endif
  return 0;
}

EXPORT void serve_llm_attention(const Problem* problem, int variant_number, int threads) {
  const Problem& p = *problem;
  const Variant& variant = *VARIANTS[variant_number];
  std::vector<Rows> tasks = cut(p, most_rows(p));
  if (threads > 1 && most_rows(p) > MAX_ROWS && tasks.size() < (size_t)threads * TASKS_PER_THREAD) tasks = cut(p, MAX_ROWS);
  std::vector<Part> parts;
  int64_t floats = 0;
  if (threads > 1 && tasks.size() < (size_t)threads * TASKS_PER_THREAD) {
    for (size_t task = 0; task < tasks.size(); task++)
      for (int tile = tasks[task].first_tile; tile <= tasks[task].last_tile; tile++) {
        parts.push_back({(int)task, tile, tile, floats});
        floats += (sums_size(tasks[task].count, padded_dim(p.value_dim)) + 15) / 16 * 16;
      }
  }
  if (parts.size() > tasks.size() && 4 * floats <= MOST_SPLIT) {
    run_split(p, variant, tasks, parts, (float*)split_space.at_least(4 * floats), threads);
  } else {
    run_whole(p, variant, tasks, threads);
  }
}

}  // extern "C"
