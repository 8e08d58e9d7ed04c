// Repeats recorded calls of kernels (call_recorder.py), without an interpreter between them. Independent of torch.

#include <cstddef>
#include <cstdint>
#include <utility>

#define EXPORT __attribute__((visibility("default")))

namespace {

constexpr int INTEGERS = 24;  // most integers and addresses that a kernel takes
constexpr int FLOATS = 2;

// `RecordedCall` in call_recorder.py.
struct RecordedCall {
  void* kernel;
  int64_t integers[INTEGERS];  // all arguments of these types, in order; smaller ones widened
  float floats[FLOATS];        // the others
};

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
constexpr bool CAN_REPEAT = true;

// These processors' calling conventions on Linux number the registers for integers and those for floats apart, pass what
// is left in whole words of 64 bits, and let the caller remove it. So any kernel can be called like this one, with more
// arguments than it reads.
template <size_t... INDICES>
void repeat(const RecordedCall& call, std::index_sequence<INDICES...>) {
  typedef void Kernel(decltype((void)INDICES, int64_t())..., float, float);
  ((Kernel*)call.kernel)(call.integers[INDICES]..., call.floats[0], call.floats[1]);
}

void repeat(const RecordedCall& call) { repeat(call, std::make_index_sequence<INTEGERS>()); }
#else
constexpr bool CAN_REPEAT = false;
void repeat(const RecordedCall&) {}
#endif

}  // namespace

extern "C" {

EXPORT int serve_llm_recordedcall_bytes() { return sizeof(RecordedCall); }

// Whether `serve_llm_repeat` works on this processor.
EXPORT int serve_llm_can_repeat() { return CAN_REPEAT; }

EXPORT void serve_llm_repeat(const RecordedCall* calls, int count) {
  for (int i = 0; i < count; i++) repeat(calls[i]);
}

}  // extern "C"
