// All-reduce and all-gather over the ranks of one host, through shared memory. Linux only. Independent of torch and of
// how the memory was created.
//
// Every rank has a window with two slots of data. Only that rank writes it; all others read it. In an exchange, a rank
// writes its next slot, publishes the number of the exchange, waits until all others have published theirs, and reads.
// Slots are used alternately, and no message says that a slot has been read: a rank that publishes an exchange has read
// the previous one, so the ranks that have seen it may overwrite what they wrote two exchanges ago.

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "wait.h"

#define EXPORT __attribute__((visibility("default")))

// Created by the caller; see collectives.py.
struct Group {
  char* const* windows;  // by rank, each aligned to LINE and zero at first
  int64_t slot_bytes;    // a multiple of LINE
  double seconds;        // how long a rank may be silent
  int ranks, rank;
};

namespace {

constexpr int LINE = 64;          // bytes; what different ranks write lies in different cache lines
constexpr int64_t DATA = 3 * LINE;  // bytes in front of the slots
constexpr int POLLS = 100;        // before a core is yielded: a microsecond or two
constexpr int64_t YIELD_NS = 50'000;      // yield this long before sleeping: being woken takes 30 us or more
constexpr int64_t NAP_NS = 100'000'000;   // how often a sleeping rank checks whether the window was closed
constexpr int64_t SPLIT_BYTES = 1 << 13;  // from this size on, each rank adds only its share
constexpr int TILE = 256;         // numbers added at a time, which stay in registers and the nearest cache
constexpr int OK = 0, CLOSED = -1;  // results; above 0: 1 + the rank that was silent

Word& closed(char* window) { return *(Word*)window; }               // not 0: all waits end
Word& published(char* window) { return *(Word*)(window + LINE); }   // number of the exchange, modulo 2**32
Word& sleepers(char* window) { return *(Word*)(window + 2 * LINE); }  // ranks to wake

char* slot(const Group& g, int rank, uint32_t exchange) {
  return g.windows[rank] + DATA + (exchange & 1) * g.slot_bytes;
}

void publish(const Group& g, uint32_t exchange) {
  char* const window = g.windows[g.rank];
  // Sequentially consistent here and in `sleep_until`: either this rank sees the sleeper, or the sleeper the number.
  published(window).store(exchange, std::memory_order_seq_cst);
  if (sleepers(window).load(std::memory_order_seq_cst) != 0)
    syscall(SYS_futex, &published(window), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

bool reached(char* window, uint32_t exchange) {
  return (int32_t)(published(window).load(std::memory_order_acquire) - exchange) >= 0;
}

int sleep_until(const Group& g, int rank, uint32_t exchange, int64_t began) {
  char* const window = g.windows[rank];
  const int64_t deadline = began + (int64_t)(g.seconds * 1e9);
  while (!reached(window, exchange)) {
    if (closed(window).load(std::memory_order_relaxed) != 0) return CLOSED;
    const int64_t left = deadline - now_ns();
    if (left <= 0) return 1 + rank;
    const timespec nap = {0, (long)std::min(left, NAP_NS)};
    sleepers(window).fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = published(window).load(std::memory_order_seq_cst);
    if ((int32_t)(seen - exchange) < 0) syscall(SYS_futex, &published(window), FUTEX_WAIT, seen, &nap, nullptr, 0);
    sleepers(window).fetch_sub(1, std::memory_order_relaxed);
  }
  return OK;
}

// Waits until a rank has published an exchange: spins for a moment, then polls and yields its core, then sleeps.
int wait_for(const Group& g, int rank, uint32_t exchange) {
  char* const window = g.windows[rank];
  for (int poll = 0; poll < POLLS; poll++) {
    if (reached(window, exchange)) return OK;
    pause_core();
  }
  const int64_t began = now_ns();
  do {
    if (reached(window, exchange)) return OK;
    sched_yield();
  } while (now_ns() < began + YIELD_NS);
  return sleep_until(g, rank, exchange, began);
}

int wait_for_others(const Group& g, uint32_t exchange) {
  for (int rank = 0; rank < g.ranks; rank++) {
    if (rank == g.rank) continue;
    if (const int result = wait_for(g, rank, exchange)) return result;
  }
  return OK;
}

float widened(float x) { return x; }
float widened(uint16_t bf16) {
  const uint32_t bits = (uint32_t)bf16 << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

void round_to(float x, float* to) { *to = x; }
void round_to(float x, uint16_t* to) {  // bfloat16, to the nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  *to = x == x ? rounded : 0x7fc0;
}

// x[i] = the sum of x[i] and the others' numbers begin + i, in rank order, in float32, rounded once.
template <class T>
void add(const Group& g, uint32_t exchange, int64_t begin, T* x, int64_t count) {
  float total[TILE];
  for (int64_t done = 0; done < count; done += TILE) {
    const int n = (int)std::min<int64_t>(TILE, count - done);
    for (int rank = 0; rank < g.ranks; rank++) {
      const T* part = rank == g.rank ? x + done : (const T*)slot(g, rank, exchange) + begin + done;
      if (rank == 0)
        for (int i = 0; i < n; i++) total[i] = widened(part[i]);
      else
        for (int i = 0; i < n; i++) total[i] += widened(part[i]);
    }
    for (int i = 0; i < n; i++) round_to(total[i], x + done + i);
  }
}

// The first number that a rank adds; shares are whole cache lines.
template <class T>
int64_t share_begin(const Group& g, int rank, int64_t count) {
  const int64_t line = LINE / sizeof(T), lines = (count + line - 1) / line;
  return std::min(count, lines * rank / g.ranks * line);
}

// Sums numbers that fit in a slot. Every rank adds all of them.
template <class T>
int sum_whole(const Group& g, T* x, int64_t count, uint32_t exchange) {
  std::memcpy(slot(g, g.rank, exchange), x, count * sizeof(T));
  publish(g, exchange);
  if (const int result = wait_for_others(g, exchange)) return result;
  add(g, exchange, 0, x, count);
  return OK;
}

// The same in two exchanges: every rank adds its share, then reads the sums of the others.
template <class T>
int sum_shares(const Group& g, T* x, int64_t count, uint32_t exchange) {
  const int64_t begin = share_begin<T>(g, g.rank, count), end = share_begin<T>(g, g.rank + 1, count);
  T* own = (T*)slot(g, g.rank, exchange);
  std::memcpy(own, x, begin * sizeof(T));
  std::memcpy(own + end, x + end, (count - end) * sizeof(T));
  publish(g, exchange);
  if (const int result = wait_for_others(g, exchange)) return result;
  add(g, exchange, begin, x + begin, end - begin);
  exchange++;
  std::memcpy(slot(g, g.rank, exchange), x + begin, (end - begin) * sizeof(T));
  publish(g, exchange);
  for (int rank = 0; rank < g.ranks; rank++) {
    if (rank == g.rank) continue;
    if (const int result = wait_for(g, rank, exchange)) return result;
    const int64_t first = share_begin<T>(g, rank, count), next = share_begin<T>(g, rank + 1, count);
    std::memcpy(x + first, slot(g, rank, exchange), (next - first) * sizeof(T));
  }
  return OK;
}

uint32_t next_exchange(const Group& g) { return published(g.windows[g.rank]).load(std::memory_order_relaxed) + 1; }

template <class T>
int all_reduce(const Group& g, T* x, int64_t count) {
  const int64_t most = g.slot_bytes / sizeof(T);
  for (int64_t begin = 0; begin < count; begin += most) {
    const int64_t size = std::min(most, count - begin);
    const bool split = size * (int64_t)sizeof(T) >= SPLIT_BYTES;
    const int result = (split ? sum_shares<T> : sum_whole<T>)(g, x + begin, size, next_exchange(g));
    if (result != OK) return result;
  }
  return OK;
}

}  // namespace

extern "C" {

// Lets the caller check that both sides use the same structure.
EXPORT int serve_llm_group_bytes() { return sizeof(Group); }

// Bytes of a window in front of its two slots.
EXPORT int serve_llm_window_header() { return DATA; }

// x[i] = the sum of all ranks' x[i]. bf16: bfloat16, else float32. Returns 0; -1 if a window was closed; 1 + the rank
// that was silent for too long.
EXPORT int serve_llm_all_reduce(const Group* group, void* x, int64_t count, int bf16) {
  return bf16 ? all_reduce(*group, (uint16_t*)x, count) : all_reduce(*group, (float*)x, count);
}

// Copies every rank's x to `parts`, one after the other. Returns the same.
EXPORT int serve_llm_all_gather(const Group* group, const char* x, char* parts, int64_t bytes) {
  const Group& g = *group;
  for (int64_t begin = 0; begin < bytes; begin += g.slot_bytes) {
    const int64_t size = std::min(g.slot_bytes, bytes - begin);
    const uint32_t exchange = next_exchange(g);
    std::memcpy(slot(g, g.rank, exchange), x + begin, size);
    publish(g, exchange);
    for (int rank = 0; rank < g.ranks; rank++) {
      if (rank != g.rank)
        if (const int result = wait_for(g, rank, exchange)) return result;
      std::memcpy(parts + rank * bytes + begin, slot(g, rank, exchange), size);
    }
  }
  return OK;
}

}  // extern "C"
