// Runs work on several threads. Also included by the sources that are compiled once for each instruction set.
#pragma once

#include <cstdint>

// Calls run(work, first, last) for ranges that together cover 0 .. items - 1 and start at multiples of `grain`, on up
// to `threads` threads including the caller's. Returns when all are done. See pool.cpp.
void share_out(int64_t items, int64_t grain, int threads, void (*run)(const void* work, int64_t first, int64_t last),
               const void* work);

namespace {

// The same with work(first, last).
template <class Work>
inline void parallel(int64_t items, int64_t grain, int threads, const Work& work) {
  share_out(items, grain, threads, [](const void* work, int64_t first, int64_t last) {
    (*(const Work*)work)(first, last);
  }, &work);
}

}  // namespace
