// Collectives and messages over one shared-memory segment, on raw bytes. backend.cpp puts torch tensors on top.
//
// A collective is a number of steps that all ranks count alike. In step s a rank may put bytes into its own staging
// buffer s % 2, then sets its flag to s, waits for the flags of the ranks whose bytes it wants, and reads them. Before
// it writes, all flags must have reached s - 1: then nobody still reads what the buffer held in step s - 2. So a small
// all-reduce costs one flag written and n-1 flags read, and no trailing barrier.
//
// Errors are DistBackendError and name the group, this rank and the rank at fault. After one, the group is unusable and
// every later call says why. Thread-safe: collectives of one group exclude each other, so do messages.
#pragma once

#include <c10/core/ScalarType.h>

#include <any>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "link.h"
#include "reduce.h"
#include "segment.h"

namespace pat {

enum class Op : uint8_t {
  barrier, broadcast, all_reduce, reduce, all_gather, reduce_scatter, all_to_all, gather, scatter
};

struct Span {
  char* data;
  size_t bytes;
};

struct GroupInfo {
  std::string id;
  int rank, size;
  std::vector<int64_t> global_ranks;  // empty: the same as the group ranks
  int node_ranks;                     // ranks that share this node's cores
  std::chrono::milliseconds timeout;
  Link link;
};

// A receive that has been posted; filled in the order of posting among receives of equal source and tag.
struct Receive {
  Span into;
  int tag;
  std::any keep;  // what owns `into`; a receive that nobody waits for must not write into freed memory
  bool started = false, done = false;
  int64_t sent_ns = 0;
};

class Group {
 public:
  Group(c10d::Store& store, GroupInfo info);
  ~Group();

  // Each returns the monotonic time in ns before which the operation must not appear complete (emulated link), else 0.
  int64_t barrier(int64_t link_bytes = 0);  // link_bytes: what a transfer outside the group's buffers would move
  int64_t broadcast(Span data, int root);
  int64_t all_reduce(void* data, size_t count, c10::ScalarType t, ReduceKind kind);
  int64_t reduce(void* data, size_t count, c10::ScalarType t, ReduceKind kind, int root);
  int64_t all_gather(const std::vector<char*>& out, Span in);
  int64_t reduce_scatter(void* out, const std::vector<char*>& in, size_t count, c10::ScalarType t, ReduceKind kind);
  int64_t all_to_all(const std::vector<Span>& out, const std::vector<Span>& in);
  int64_t gather(const std::vector<char*>& out, Span in, int root);    // `out` used on the root only
  int64_t scatter(Span out, const std::vector<char*>& in, int root);   // `in` used on the root only
  int64_t send(Span data, int to, int tag);
  std::shared_ptr<Receive> post_receive(Span into, int from, int tag, std::any keep);
  bool test_receive(const std::shared_ptr<Receive>& r, int from);
  int64_t finish_receive(const std::shared_ptr<Receive>& r, int from);  // blocks

  void abort();     // all ranks' present and later calls fail
  void shutdown();  // this rank leaves; it is an error for others to wait for it afterwards
  void set_timeout(std::chrono::milliseconds t) { timeout_ms_ = t.count(); }
  void set_description(const std::string& d);
  uint64_t operations() const { return operations_; }

 private:
  class Collective;  // one collective in progress, see group.cpp
  friend class Collective;

  struct Message {  // arrived before its receive was posted
    std::vector<char> data;
    size_t filled = 0;
    int tag = 0;
    int64_t sent_ns = 0;
    std::shared_ptr<Receive> claimed;  // posted after the message had begun to arrive
  };
  struct Inbox {
    std::deque<std::shared_ptr<Receive>> posted;
    std::deque<std::shared_ptr<Message>> unexpected;
    std::shared_ptr<Receive> current;          // the receive that the message now arriving goes to, or
    std::shared_ptr<Message> current_message;  // the buffer, if none was posted
    size_t filled = 0;                         // bytes of the message now arriving
  };

  std::string who() const;
  std::string rank_text(int r) const;
  void check_usable();
  [[noreturn]] void raise(Fault kind, int culprit, int reporter, const std::string& doing);
  [[noreturn]] void fail(Fault kind, int culprit, const std::string& doing);  // and tells the others
  void check_fault(const std::string& doing);
  void check_wait(int peer, int64_t entered_ns, const std::string& doing);
  void wake_all();
  void drain(int from);  // takes what has arrived from one rank; message_mutex_ is held
  void begin_message(int from, const Slot& slot);

  GroupInfo info_;
  std::atomic<int64_t> timeout_ms_;
  std::string description_;
  std::unique_ptr<Segment> segment_;
  int rank_, size_, spins_;
  uint32_t step_ = 0;
  uint64_t operations_ = 0;
  int64_t link_free_ns_ = 0;
  std::atomic<bool> left_{false};
  std::string broken_;  // why the group is unusable
  std::mutex collective_mutex_, message_mutex_;
  mutable std::mutex state_mutex_;               // broken_, description_
  std::unique_ptr<std::mutex[]> send_mutex_;     // one a destination: slots of two messages must not mix
  std::vector<Inbox> inbox_;                     // one a source
};

}  // namespace pat
