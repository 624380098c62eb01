// The collectives of Group, see group.h for the step protocol.
// One file because they are variations of one scheme, and are checked against each other when that changes.
#include <algorithm>
#include <cstring>

#include "group.h"

namespace pat {
namespace {

// An all-reduce in which each rank reads no more than this from the others is done in one step, every rank reducing
// everything itself; above, each reduces its slice and all collect the slices (two steps, n times less to read). Where
// ranks outnumber cores a step costs context switches, which is why the limit is not lower.
constexpr size_t kFlatReadBytes = size_t(64) << 10;

const char* name(Op op) {
  static const char* const names[] = {"barrier",        "broadcast",  "all_reduce", "reduce", "all_gather",
                                      "reduce_scatter", "all_to_all", "gather",     "scatter"};
  return names[int(op)];
}

// What a rank believes a collective is: op 5 bits, root 6, dtype 6, reduction 4, bytes 43.
uint64_t signature(Op op, int root, c10::ScalarType t, ReduceKind kind, size_t bytes) {
  const uint64_t head = uint64_t(op) << 16 | uint64_t(root) << 10 | (uint64_t(t) & 63) << 4 | uint64_t(kind);
  return head << 43 | (uint64_t(bytes) & ((uint64_t(1) << 43) - 1));
}

std::string describe(uint64_t sig) {
  const auto op = Op(sig >> 59);
  std::string text = std::string(name(op)) + " of " + std::to_string(sig & ((uint64_t(1) << 43) - 1)) + " bytes";
  if (op == Op::all_reduce || op == Op::reduce || op == Op::reduce_scatter) {
    text += std::string(" of ") + c10::toString(c10::ScalarType(sig >> 47 & 63)) + ", reduction " +
            std::to_string(sig >> 43 & 15);
  }
  if (op == Op::broadcast || op == Op::reduce || op == Op::gather || op == Op::scatter) {
    text += ", root " + std::to_string(sig >> 53 & 63);
  }
  return text;
}

size_t floor64(size_t n) { return n / 64 * 64; }

}  // namespace

class Group::Collective {
 public:
  Collective(Group& g, uint64_t sig) : g_(g), seg_(*g.segment_), sig_(sig), lock_(g.collective_mutex_) {
    g.check_usable();
    ++g.operations_;
    entered_ = start_ = now_ns();
  }

  // Begins the next step. `writes`: this rank puts bytes into mine(); returns when it may.
  void begin(bool writes) {
    step_ = ++g_.step_;
    if (writes) {
      for (int p = 0; p < g_.size_; ++p) wait_flag(p, step_ - 1);
    } else {
      publish();
    }
  }

  // Makes what this rank has put into mine() visible.
  void publish() {
    RankLine& line = seg_.line(g_.rank_);
    line.sig[step_ & 3] = sig_;
    line.entered_ns[step_ & 3] = entered_;
    line.flag.set(step_);
  }

  void wait(int p) {
    if (p == g_.rank_) return;
    wait_flag(p, step_);
    const RankLine& line = seg_.line(p);
    const uint64_t theirs = line.sig[step_ & 3];
    if (theirs != sig_) {
      g_.fail(Fault::mismatch, p, "this rank is in " + describe(sig_) + ", " + g_.rank_text(p) + " in " +
                                      describe(theirs));
    }
    start_ = std::max(start_, line.entered_ns[step_ & 3]);
  }

  void wait_all() {
    for (int p = 0; p < g_.size_; ++p) wait(p);
  }

  char* mine() const { return seg_.staging(g_.rank_, step_); }
  const char* theirs(int p) const { return seg_.staging(p, step_); }
  int64_t* counts(int p) const { return seg_.counts(p, step_); }
  uint32_t step() const { return step_; }

  int64_t finish(double link_bytes) {
    const Link& link = g_.info_.link;
    if (!link.on() || g_.size_ == 1) return 0;
    g_.link_free_ns_ = std::max(start_, g_.link_free_ns_) + int64_t(link_bytes / link.bytes_per_ns);
    return g_.link_free_ns_ + link.latency_ns;
  }

  [[noreturn]] void mismatch(int p, const std::string& what) { g_.fail(Fault::mismatch, p, what); }

 private:
  void wait_flag(int p, uint32_t step) {
    Signal& flag = seg_.line(p).flag;
    // Steps are compared by difference, so the 32-bit counter may wrap.
    auto reached = [&flag](uint32_t s) { return int32_t(flag.word.load(std::memory_order_acquire) - s) >= 0; };
    if (reached(step)) return;
    wait_on(flag, seg_.header().fault, g_.spins_, [&] { return reached(step); },
            [&] {
              g_.check_wait(p, entered_, describe(sig_));
              // Any rank that is gone and has not begun this step ends the collective, not only the awaited one.
              for (int q = 0; q < g_.size_; ++q) {
                if (q == g_.rank_) continue;
                const bool left = seg_.peer(q).left.load(std::memory_order_acquire) != 0;
                if (!left && !seg_.is_dead(q)) continue;
                const uint32_t at = seg_.line(q).flag.word.load(std::memory_order_acquire);
                if (int32_t(at - step_) < 0) g_.fail(left ? Fault::left : Fault::died, q, describe(sig_));
              }
            });
  }

  Group& g_;
  Segment& seg_;
  const uint64_t sig_;
  std::lock_guard<std::mutex> lock_;
  uint32_t step_ = 0;
  int64_t entered_, start_;
};

int64_t Group::barrier(int64_t link_bytes) {
  if (size_ == 1) return 0;
  Collective c(*this, signature(Op::barrier, 0, c10::kByte, ReduceKind::sum, size_t(link_bytes)));
  c.begin(false);
  c.wait_all();
  return c.finish(double(link_bytes));
}

int64_t Group::broadcast(Span data, int root) {
  if (size_ == 1) return 0;
  Collective c(*this, signature(Op::broadcast, root, c10::kByte, ReduceKind::sum, data.bytes));
  const size_t piece = segment_->chunk();
  size_t at = 0;
  do {
    const size_t len = std::min(piece, data.bytes - at);
    c.begin(rank_ == root);
    if (rank_ == root) {
      if (len) memcpy(c.mine(), data.data + at, len);
      c.publish();
    } else {
      c.wait(root);
      if (len) memcpy(data.data + at, c.theirs(root), len);
    }
    at += len;
  } while (at < data.bytes);
  return c.finish(double(data.bytes));
}

int64_t Group::all_reduce(void* data, size_t count, c10::ScalarType t, ReduceKind kind) {
  if (size_ == 1) return 0;
  const size_t item = c10::elementSize(t), bytes = count * item;
  Collective c(*this, signature(Op::all_reduce, 0, t, kind, bytes));
  char* const base = static_cast<char*>(data);
  const void* in[kMaxRanks];
  if (bytes * size_t(size_ - 1) <= kFlatReadBytes) {
    c.begin(true);
    if (bytes) memcpy(c.mine(), base, bytes);
    c.publish();
    c.wait_all();
    for (int p = 0; p < size_; ++p) in[p] = p == rank_ ? base : c.theirs(p);
    pat::reduce(base, in, size_, count, t, kind);
  } else {
    const size_t piece = segment_->chunk();
    for (size_t at = 0; at < bytes;) {
      const size_t len = std::min(piece, bytes - at);
      const size_t slice = (len / item + size_ - 1) / size_ * item;
      auto slice_at = [&](int r) { return std::min(len, slice * r); };
      c.begin(true);
      memcpy(c.mine(), base + at, len);
      c.publish();
      c.wait_all();
      const size_t lo = slice_at(rank_), hi = slice_at(rank_ + 1);
      for (int p = 0; p < size_; ++p) in[p] = c.theirs(p) + lo;
      c.begin(true);
      pat::reduce(c.mine() + lo, in, size_, (hi - lo) / item, t, kind);
      c.publish();
      for (int k = 0; k < size_; ++k) {
        const int p = (rank_ + k) % size_;
        c.wait(p);
        memcpy(base + at + slice_at(p), c.theirs(p) + slice_at(p), slice_at(p + 1) - slice_at(p));
      }
      at += len;
    }
  }
  return c.finish(2.0 * (size_ - 1) / size_ * double(bytes));
}

int64_t Group::reduce(void* data, size_t count, c10::ScalarType t, ReduceKind kind, int root) {
  if (size_ == 1) return 0;
  const size_t item = c10::elementSize(t), bytes = count * item;
  Collective c(*this, signature(Op::reduce, root, t, kind, bytes));
  char* const base = static_cast<char*>(data);
  const void* in[kMaxRanks];
  const size_t piece = segment_->chunk();
  size_t at = 0;
  do {
    const size_t len = std::min(piece, bytes - at);
    c.begin(rank_ != root);
    if (rank_ == root) {
      c.wait_all();
      for (int p = 0; p < size_; ++p) in[p] = p == rank_ ? base + at : c.theirs(p);
      pat::reduce(base + at, in, size_, len / item, t, kind);
    } else {
      if (len) memcpy(c.mine(), base + at, len);
      c.publish();
    }
    at += len;
  } while (at < bytes);
  return c.finish(double(bytes));
}

int64_t Group::all_gather(const std::vector<char*>& out, Span in) {
  if (out[rank_] != in.data && in.bytes) memmove(out[rank_], in.data, in.bytes);
  if (size_ == 1) return 0;
  Collective c(*this, signature(Op::all_gather, 0, c10::kByte, ReduceKind::sum, in.bytes));
  const size_t piece = segment_->chunk();
  size_t at = 0;
  do {
    const size_t len = std::min(piece, in.bytes - at);
    c.begin(true);
    if (len) memcpy(c.mine(), out[rank_] + at, len);
    c.publish();
    for (int k = 1; k < size_; ++k) {
      const int p = (rank_ + k) % size_;
      c.wait(p);
      if (len) memcpy(out[p] + at, c.theirs(p), len);
    }
    at += len;
  } while (at < in.bytes);
  return c.finish(double(size_ - 1) * double(in.bytes));
}

int64_t Group::reduce_scatter(void* out, const std::vector<char*>& in, size_t count, c10::ScalarType t,
                              ReduceKind kind) {
  const size_t item = c10::elementSize(t), bytes = count * item;
  if (size_ == 1) {
    if (out != in[0] && bytes) memmove(out, in[0], bytes);
    return 0;
  }
  Collective c(*this, signature(Op::reduce_scatter, 0, t, kind, bytes));
  const size_t piece = floor64(segment_->chunk() / size_);
  const void* from[kMaxRanks];
  size_t at = 0;
  do {
    const size_t len = std::min(piece, bytes - at);
    c.begin(true);
    for (int p = 0; p < size_; ++p) {
      if (p != rank_ && len) memcpy(c.mine() + p * piece, in[p] + at, len);
    }
    c.publish();
    c.wait_all();
    for (int p = 0; p < size_; ++p) from[p] = p == rank_ ? in[rank_] + at : c.theirs(p) + rank_ * piece;
    pat::reduce(static_cast<char*>(out) + at, from, size_, len / item, t, kind);
    at += len;
  } while (at < bytes);
  return c.finish(double(size_ - 1) * double(bytes));
}

// Each rank's sends to the others, in rank order and without its own, form one stream that passes through its staging
// buffer piece by piece; a reader knows from the counts where in a peer's stream its own bytes lie. So one destination
// may take all of a piece, and the number of steps is that of the longest stream.
int64_t Group::all_to_all(const std::vector<Span>& out, const std::vector<Span>& in) {
  TORCH_CHECK_VALUE(in[rank_].bytes == out[rank_].bytes, "pat_shm all_to_all: rank ", rank_, " sends itself ",
                    in[rank_].bytes, " bytes and expects ", out[rank_].bytes);
  if (in[rank_].bytes) memmove(out[rank_].data, in[rank_].data, in[rank_].bytes);
  if (size_ == 1) return 0;
  Collective c(*this, signature(Op::all_to_all, 0, c10::kByte, ReduceKind::sum, 0));
  const size_t n = size_t(size_), window = segment_->chunk();

  c.begin(true);
  for (size_t j = 0; j < n; ++j) c.counts(rank_)[j] = int64_t(in[j].bytes);
  std::vector<int64_t> counts(n * n);
  auto stage = [&](size_t from) {  // stream bytes [from, from + window)
    size_t at = 0;
    for (size_t j = 0; j < n && at < from + window; ++j) {
      if (int(j) == rank_) continue;
      const size_t lo = std::max(at, from), hi = std::min(at + in[j].bytes, from + window);
      if (lo < hi) memcpy(c.mine() + (lo - from), in[j].data + (lo - at), hi - lo);
      at += in[j].bytes;
    }
  };
  auto take = [&](int p, size_t from) {
    size_t at = 0;
    for (int j = 0; j < rank_; ++j) at += j == p ? 0 : size_t(counts[p * n + j]);
    const size_t lo = std::max(at, from), hi = std::min(at + out[p].bytes, from + window);
    if (lo < hi) memcpy(out[p].data + (lo - at), c.theirs(p) + (lo - from), hi - lo);
  };
  stage(0);
  c.publish();
  for (int k = 0; k < size_; ++k) {
    const int p = (rank_ + k) % size_;
    c.wait(p);
    std::copy_n(c.counts(p), n, counts.begin() + p * n);
    if (size_t(counts[p * n + rank_]) != out[p].bytes) {
      c.mismatch(p, "all_to_all: " + rank_text(p) + " sends " + std::to_string(counts[p * n + rank_]) +
                        " bytes to this rank, which expects " + std::to_string(out[p].bytes));
    }
    if (p != rank_) take(p, 0);
  }
  size_t longest = 0;
  double busiest = 0;
  for (size_t i = 0; i < n; ++i) {
    size_t sends = 0, receives = 0;
    for (size_t j = 0; j < n; ++j) {
      if (j == i) continue;
      sends += size_t(counts[i * n + j]);
      receives += size_t(counts[j * n + i]);
    }
    longest = std::max(longest, sends);
    busiest = std::max(busiest, double(std::max(sends, receives)));
  }
  for (size_t from = window; from < longest; from += window) {
    c.begin(true);
    stage(from);
    c.publish();
    for (int k = 1; k < size_; ++k) {
      const int p = (rank_ + k) % size_;
      c.wait(p);
      take(p, from);
    }
  }
  return c.finish(busiest);
}

int64_t Group::gather(const std::vector<char*>& out, Span in, int root) {
  if (rank_ == root && out[rank_] != in.data && in.bytes) memmove(out[rank_], in.data, in.bytes);
  if (size_ == 1) return 0;
  Collective c(*this, signature(Op::gather, root, c10::kByte, ReduceKind::sum, in.bytes));
  const size_t piece = segment_->chunk();
  size_t at = 0;
  do {
    const size_t len = std::min(piece, in.bytes - at);
    c.begin(rank_ != root);
    if (rank_ == root) {
      for (int p = 0; p < size_; ++p) {
        c.wait(p);
        if (p != rank_ && len) memcpy(out[p] + at, c.theirs(p), len);
      }
    } else {
      if (len) memcpy(c.mine(), in.data + at, len);
      c.publish();
    }
    at += len;
  } while (at < in.bytes);
  return c.finish(double(size_ - 1) * double(in.bytes));
}

int64_t Group::scatter(Span out, const std::vector<char*>& in, int root) {
  if (rank_ == root && out.data != in[rank_] && out.bytes) memmove(out.data, in[rank_], out.bytes);
  if (size_ == 1) return 0;
  Collective c(*this, signature(Op::scatter, root, c10::kByte, ReduceKind::sum, out.bytes));
  const size_t piece = floor64(segment_->chunk() / size_);
  size_t at = 0;
  do {
    const size_t len = std::min(piece, out.bytes - at);
    c.begin(rank_ == root);
    if (rank_ == root) {
      for (int p = 0; p < size_; ++p) {
        if (p != rank_ && len) memcpy(c.mine() + p * piece, in[p] + at, len);
      }
      c.publish();
    } else {
      c.wait(root);
      if (len) memcpy(out.data + at, c.theirs(root) + rank_ * piece, len);
    }
    at += len;
  } while (at < out.bytes);
  return c.finish(double(size_ - 1) * double(out.bytes));
}

}  // namespace pat
