// The thread pool of the kernels. Linux only; independent of torch.
//
// A step of a model runs a few hundred tasks that take microseconds to milliseconds each, and other programs may want
// the cores. So a task is cut into chunks that threads claim one by one. The caller works too and never waits for a
// thread that has claimed nothing: if the other threads get no core, the caller computes everything itself. It waits
// only for chunks that other threads have begun. It spins first and then sleeps, so that a thread that lost its core
// can use the caller's.
//
// Each thread has a share of consecutive chunks. When its share is empty, it takes chunks from the shares of others.
//
// After a task, threads spin for a moment, because waking a thread takes longer than many tasks do. A thread that lost
// its core while it was spinning has a neighbour: another program that wants the core. For a while all threads then
// sleep instead of spinning, which also lets them preempt the neighbour as soon as there is work.

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

#include "parallel.h"
#include "wait.h"

namespace {

constexpr int MOST_THREADS = 256;
constexpr int64_t SPIN_NS = 150'000;          // a thread spins this long for the next task before it sleeps
constexpr int64_t WAIT_NS = 100'000;          // the caller spins this long for the last chunks before it sleeps
constexpr int64_t SHORT_WAIT_NS = 10'000;     // the same beside a neighbour
constexpr int64_t LOST_NS = 1'000'000;        // a shorter absence from the core does not count
constexpr int64_t NEIGHBOUR_NS = 30'000'000;  // how long threads do not spin after one noticed a neighbour
constexpr int POLLS_PER_CLOCK = 16;           // polls between two readings of the clock

void sleep_while(Word& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake(Word& word, int threads) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, threads, nullptr, nullptr, 0); }

// Consecutive chunks of a task. Chunks next .. end - 1 are unclaimed.
struct alignas(64) Share {
  Word next{0};
  uint32_t end = 0;
};

constexpr uint32_t OPEN = 1u << 31, CALLER_SLEEPS = 1u << 30;

// When this thread started to watch its core, and how much of the core it had used by then.
struct CoreTime {
  int64_t wall, cpu;  // ns
  long switches;      // how often the scheduler preempted the thread

  CoreTime() : wall(now_ns()) {
    rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    cpu = 1000 * (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) +
          INT64_C(1'000'000'000) * (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec);
    switches = usage.ru_nivcsw;
  }
  // Whether another thread of this system has used the core for longer than LOST_NS since then. Shorter absences are
  // the system's own work. Time stolen by a hypervisor does not count, since it comes without a switch.
  bool lost_core() const {
    if (now_ns() - wall < LOST_NS) return false;
    const CoreTime later;
    return later.switches != switches && later.wall - wall - (later.cpu - cpu) > LOST_NS;
  }
};

struct Pool {
  alignas(64) Word task{0};      // number of the current task, modulo 2^32
  alignas(64) Word sleepers{0};  // threads to wake for the next task
  // OPEN while threads may join the task, plus the number of threads besides the caller that are working on it.
  alignas(64) Word inside{0};
  alignas(64) std::atomic<int64_t> neighbour_until{0};
  std::atomic<bool> taken{false};  // a caller is using the threads

  void (*run)(const void*, int64_t, int64_t);
  const void* work;
  int64_t items, grain;
  int num_shares;
  Share shares[MOST_THREADS];
  int num_threads = 1;  // including the caller

  bool has_neighbour(int64_t time) const { return time < neighbour_until.load(std::memory_order_relaxed); }
  void notice_neighbour(int64_t time) { neighbour_until.store(time + NEIGHBOUR_NS, std::memory_order_relaxed); }

  // Spins until done() is true, for at most limit_ns. Returns whether it is.
  template <class Done>
  bool spin_until(Done done, int64_t limit_ns) {
    const int64_t began = now_ns();
    do {
      for (int i = 0; i < POLLS_PER_CLOCK; i++) {
        if (done()) return true;
        pause_core();
      }
    } while (now_ns() - began < limit_ns);
    return false;
  }

  // Computes unclaimed chunks, those of the thread's own share first.
  void run_chunks(int own) {
    for (int i = 0; i < num_shares; i++) {
      Share& share = shares[(own + i) % num_shares];
      if (share.next.load(std::memory_order_relaxed) >= share.end) continue;
      for (uint32_t chunk; (chunk = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) {
        const int64_t first = chunk * grain;
        run(work, first, first + grain < items ? first + grain : items);
      }
    }
  }

  // Works on the task if it is still open.
  void join_task(int own) {
    uint32_t seen = inside.load(std::memory_order_relaxed);
    do {
      if (!(seen & OPEN)) return;
    } while (!inside.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire, std::memory_order_relaxed));
    if (own < num_shares) run_chunks(own);
    if (inside.fetch_sub(1, std::memory_order_acq_rel) == (CALLER_SLEEPS | 1)) wake(inside, 1);
  }

  // The loop of a thread.
  void serve(int own) {
    for (uint32_t seen = 0;;) {
      CoreTime before;
      const auto has_next = [&] { return task.load(std::memory_order_acquire) != seen; };
      if (has_neighbour(before.wall) || !spin_until(has_next, SPIN_NS)) {
        // Sequentially consistent here and in `run_task`: either the caller sees this sleeper, or this thread sees the
        // next task.
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        while (task.load(std::memory_order_seq_cst) == seen) sleep_while(task, seen);
        sleepers.fetch_sub(1, std::memory_order_relaxed);
        before = CoreTime();
      }
      seen = task.load(std::memory_order_acquire);
      join_task(own);
      if (before.lost_core()) notice_neighbour(now_ns());
    }
  }

  void wait_for_others() {
    uint32_t seen = inside.fetch_and(~OPEN, std::memory_order_acq_rel) & ~OPEN;
    if (seen == 0) return;
    const auto all_left = [&] { return inside.load(std::memory_order_acquire) == 0; };
    if (spin_until(all_left, has_neighbour(now_ns()) ? SHORT_WAIT_NS : WAIT_NS)) return;
    seen = inside.fetch_or(CALLER_SLEEPS, std::memory_order_acq_rel) | CALLER_SLEEPS;
    while (seen != CALLER_SLEEPS) {
      sleep_while(inside, seen);
      seen = inside.load(std::memory_order_acquire);
    }
    inside.store(0, std::memory_order_relaxed);
  }

  void run_task(int64_t chunks, int threads) {
    num_shares = chunks < threads ? (int)chunks : threads;
    for (int i = 0; i < num_shares; i++) {
      shares[i].next.store((uint32_t)(chunks * i / num_shares), std::memory_order_relaxed);
      shares[i].end = (uint32_t)(chunks * (i + 1) / num_shares);
    }
    inside.store(OPEN, std::memory_order_release);
    task.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) wake(task, num_shares - 1);
    run_chunks(0);
    wait_for_others();
  }

  void grow(int threads);
};

struct Start {
  Pool* pool;
  int own;
};

void* serve_pool(void* start) {
  const Start from = *(Start*)start;
  delete (Start*)start;
  from.pool->serve(from.own);
  return nullptr;
}

// New threads block all signals, which Python handles in its main thread.
void Pool::grow(int threads) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (; num_threads < threads; num_threads++) {
    pthread_t thread;
    Start* start = new Start{this, num_threads};
    if (pthread_create(&thread, nullptr, serve_pool, start) != 0) {
      delete start;
      break;
    }
    pthread_setname_np(thread, "kernels");
    pthread_detach(thread);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// Never destroyed: threads use it until the process ends.
Pool* pool = new Pool;

// A forked child has none of the threads.
void forget_threads() { pool = new Pool; }
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, forget_threads);

}  // namespace

void share_out(int64_t items, int64_t grain, int threads, void (*run)(const void*, int64_t, int64_t), const void* work) {
  if (items <= 0) return;
  if (threads > MOST_THREADS) threads = MOST_THREADS;
  const int64_t least = (items + INT_MAX / 2 - 1) / (INT_MAX / 2);  // chunks are counted in 32 bits
  if (grain < least) grain = least;
  const int64_t chunks = (items + grain - 1) / grain;
  Pool& p = *pool;
  // If another caller is using the threads, this one computes everything on its own core.
  if (threads <= 1 || chunks <= 1 || p.taken.exchange(true, std::memory_order_acquire)) {
    run(work, 0, items);
    return;
  }
  if (p.num_threads < threads) p.grow(threads);
  p.run = run;
  p.work = work;
  p.items = items;
  p.grain = grain;
  p.run_task(chunks, threads);
  p.taken.store(false, std::memory_order_release);
}
