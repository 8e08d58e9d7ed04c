// Memory of one thread, kept for the next call, so that its pages are not allocated again in each layer.
#pragma once

#include <cstdint>
#include <cstdlib>

class Workspace {
 public:
  void* at_least(int64_t bytes) {
    if (bytes > size_) {
      std::free(memory_);
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_ = std::aligned_alloc(64, size_);
      if (memory_ == nullptr) std::abort();
    }
    return memory_;
  }
  ~Workspace() { std::free(memory_); }

 private:
  void* memory_ = nullptr;
  int64_t size_ = 0;
};
