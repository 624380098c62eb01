// An emulated link between ranks: a latency and a bandwidth that every operation must at least take.
//
// Time of one operation = latency + bytes / bandwidth, counted from the moment the last rank that it depends on has
// entered it, and after the previous operation of the group has left the link. `bytes` is what the busiest rank must
// send or receive, with S the bytes of the tensor (for all_gather and gather: of one rank's input; for reduce_scatter
// and scatter: of one rank's output) and n the ranks:
//   all_reduce 2(n-1)/n S · all_gather, reduce_scatter, gather, scatter (n-1) S · broadcast, reduce, send/recv S ·
//   all_to_all the largest row or column sum of the split matrix without its diagonal · barrier 0
// A group of one rank has no link.
#pragma once

#include <cstdint>

#include "wait.h"

namespace pat {

struct Link {
  int64_t latency_ns = 0;
  double bytes_per_ns = 0;  // 0: no emulation

  bool on() const { return bytes_per_ns > 0; }
  int64_t duration_ns(double bytes) const { return latency_ns + int64_t(bytes / bytes_per_ns); }
};

// Sleeps for most of the time, then yields, and spins at the end: on the wire the core is free for others, but a yield
// on a busy machine may cost a time slice.
inline void wait_until_ns(int64_t deadline) {
  constexpr int64_t kOversleepNs = 150'000, kSpinNs = 15'000;
  for (int64_t left = deadline - now_ns(); left > 0; left = deadline - now_ns()) {
    if (left > 2 * kOversleepNs) {
      timespec t{0, 0};
      const int64_t ns = left - kOversleepNs;
      t.tv_sec = ns / 1'000'000'000LL;
      t.tv_nsec = ns % 1'000'000'000LL;
      nanosleep(&t, nullptr);
    } else if (left > kSpinNs) {
      sched_yield();
    } else {
      cpu_pause();
    }
  }
}

}  // namespace pat
