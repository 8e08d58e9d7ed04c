// What threads and ranks use to wait for each other. Linux only; independent of torch.
#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>

namespace {

typedef std::atomic<uint32_t> Word;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4, "a futex is a 32-bit word");

inline int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * INT64_C(1'000'000'000) + time.tv_nsec;
}

// Tells the core that the thread is polling.
inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

}  // namespace
