// The shared-memory segment of one process group: its layout, its creation and its peers.
//
// Life: group rank 0 creates /sglang_pat_<16 hex> exclusively, hands name and token over through the c10d store, waits
// until all ranks have mapped it, and unlinks it. A name is never used twice, so flags of an earlier run cannot be seen.
// A rank 0 that is killed in between leaves a name behind; the next group created on the machine removes it.
#pragma once

#include <sched.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "link.h"
#include "wait.h"

namespace pat {

constexpr int kMaxRanks = 64;
// One of the two staging buffers of a rank. Larger and a chunk falls out of the cache between the rank that stages it
// and the ranks that read it; smaller and large transfers pay more meetings (measured: 512 KiB is best for 1 to 8 MB).
constexpr size_t kChunkBytes = size_t(1) << 19;
constexpr size_t kMinChunkBytes = size_t(1) << 16;  // what it may shrink to when /dev/shm is small
constexpr size_t kSlotBytes = size_t(32) << 10;     // payload of one slot of a send/recv channel
constexpr int kSlots = 4;

enum class Fault : uint8_t { none, aborted, died, left, timeout, mismatch };

// The collective state of one rank. A step's data sits in staging buffer step % 2 and its description in slot step % 4:
// a rank that does not write in a step may publish while a peer is still two steps behind, so two slots would not do.
struct alignas(128) RankLine {
  Signal flag;            // the last step that this rank has begun (and staged, if it writes in that step)
  uint64_t sig[4];        // what the rank believes the step's collective is, to catch mismatched calls
  int64_t entered_ns[4];  // when it entered that collective (emulated link only)
};

struct Process {
  int32_t pid;
  uint64_t start_ticks;  // its start time, so that a reused pid is not taken for it
  uint64_t pid_ns;       // inode of its pid namespace; a process in another one cannot be checked
};

struct alignas(128) Peer {
  Process process;
  int32_t global_rank;
  std::atomic<uint32_t> left;
  int64_t link_latency_ns;  // all ranks must emulate the same link
  double link_bytes_per_ns;
  cpu_set_t cpus;
};

struct alignas(128) Doorbell {
  Signal signal;  // rung by a peer that put a slot into, or took one out of, one of this rank's channels
};

struct alignas(64) Slot {
  int64_t total;    // bytes of the whole message
  int64_t sent_ns;  // when the sender entered send (emulated link only)
  int32_t tag;
  uint32_t bytes;  // payload in this slot
  char data[kSlotBytes];
};

struct Channel {  // from one rank to one other
  alignas(128) std::atomic<uint32_t> head;  // slots written
  alignas(128) std::atomic<uint32_t> tail;  // slots read
  Slot slots[kSlots];
};

struct Header {
  uint64_t magic;
  uint64_t token;
  uint64_t bytes;
  uint64_t chunk;
  uint32_t ranks;
  Process creator;
  alignas(128) std::atomic<uint32_t> mapped;
  std::atomic<uint32_t> ready;  // rank 0 has unlinked the name
  std::atomic<uint64_t> fault;  // 0, or Fault << 32 | culprit << 16 | reporter
};

class Segment {
 public:
  // Collective over the group. Errors: DistBackendError (timeout, ranks on different nodes, /dev/shm too small).
  Segment(c10d::Store& store, int rank, int size, int global_rank, const Link& link,
          std::chrono::milliseconds timeout, const std::string& who);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  RankLine& line(int r) const { return lines_[r]; }
  Peer& peer(int r) const { return peers_[r]; }
  Signal& bell(int r) const { return bells_[r].signal; }
  Channel& channel(int src, int dst) const { return channels_[src * size_ + dst]; }
  int64_t* counts(int r, uint32_t step) const { return counts_ + (2 * r + (step & 1)) * size_; }
  char* staging(int r, uint32_t step) const { return staging_ + (2 * r + (step & 1)) * chunk_; }
  size_t chunk() const { return chunk_; }
  int cores() const { return cores_; }  // usable by at least one rank of the group
  bool owned_by_this_process() const;

  // True if the process of rank r is gone: no such pid, a zombie, or another process under the same pid.
  bool is_dead(int r) const;

 private:
  void layout(size_t chunk);
  void create(c10d::Store& store, const std::string& who);
  void open(c10d::Store& store, const std::string& who);
  void map(int fd, const std::string& who);

  int rank_, size_;
  std::string name_;  // empty once unlinked
  size_t bytes_ = 0, chunk_ = 0;
  size_t off_peers_ = 0, off_lines_ = 0, off_bells_ = 0, off_counts_ = 0, off_channels_ = 0, off_staging_ = 0;
  char* base_ = nullptr;
  Peer* peers_ = nullptr;
  RankLine* lines_ = nullptr;
  Doorbell* bells_ = nullptr;
  int64_t* counts_ = nullptr;
  Channel* channels_ = nullptr;
  char* staging_ = nullptr;
  int cores_ = 1;
  uint64_t token_ = 0;
};

}  // namespace pat
