// How a rank waits for a word in shared memory: spin, then yield, then sleep on a futex.
//
// Ranks may outnumber cores, so a long spin would keep the awaited rank off its core; and a rank that has nothing to
// do for milliseconds must not burn a core. The publisher pays a system call only if somebody sleeps.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace pat {

constexpr int64_t kYieldNs = 2'000'000;   // after this long of yielding, sleep
constexpr int64_t kCheckNs = 50'000'000;  // how often a waiter looks for dead peers and its timeout

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);  // the same clock in every process of the machine
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, int64_t ns) {
  timespec t{ns / 1'000'000'000LL, ns % 1'000'000'000LL};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &t, nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// A word that one side advances and others wait on. A sleeper that is killed leaves `sleepers` too high, which costs
// the publisher one needless wake-up call each time and nothing else.
struct Signal {
  std::atomic<uint32_t> word{0};
  std::atomic<uint32_t> sleepers{0};

  void set(uint32_t value) {
    word.store(value, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(word);
  }
  void bump() {
    word.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(word);
  }
};

// Waits until ready() is true. `fault` non-zero, or kCheckNs passing, calls check(), which throws if waiting is vain.
template <class Ready, class Check>
void wait_on(Signal& signal, const std::atomic<uint64_t>& fault, int spins, Ready&& ready, Check&& check) {
  for (int i = 0; i < spins; ++i) {
    if (ready()) return;
    cpu_pause();
  }
  const int64_t start = now_ns();
  int64_t next_check = start + kCheckNs;
  for (;;) {
    if (ready()) return;
    const int64_t now = now_ns();
    if (fault.load(std::memory_order_acquire) != 0 || now >= next_check) {
      check();
      next_check = now + kCheckNs;
    }
    if (now - start < kYieldNs) {
      sched_yield();
      continue;
    }
    // Announce, then look once more, then sleep: a publisher either sees the announcement or was seen.
    signal.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = signal.word.load(std::memory_order_seq_cst);
    if (!ready()) futex_wait(signal.word, seen, kCheckNs);
    signal.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
}

}  // namespace pat
