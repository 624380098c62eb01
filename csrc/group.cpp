// Life, faults and error messages of a group. The collectives are in collectives.cpp, send and receive in messages.cpp.
#include "group.h"

#include <c10/util/Exception.h>

namespace pat {
namespace {

// A few microseconds where every rank has a core: a yield with nobody else on the core is nearly as quick as a spin, and
// the scheduler does put two ranks on one core of a busy machine although the other would do; each spin then keeps the
// awaited rank off the core (4 KB, two ranks on one core: 16 us with 100 spins, 60 us with 1000). Where ranks outnumber
// cores that is the normal case, so yield almost at once.
constexpr int kSpins = 100;
constexpr int kSpinsCrowded = 20;

std::string describe(const GroupInfo& info, const std::string& description) {
  std::string text = "pat_shm group ";
  if (!description.empty()) text += "\"" + description + "\" ";
  text += "(id " + info.id + "), rank " + std::to_string(info.rank) + " of " + std::to_string(info.size);
  if (!info.global_ranks.empty()) text += " (global rank " + std::to_string(info.global_ranks[info.rank]) + ")";
  return text;
}

int global_rank(const GroupInfo& info) {
  return info.global_ranks.empty() ? info.rank : int(info.global_ranks[info.rank]);
}

}  // namespace

Group::Group(c10d::Store& store, GroupInfo info)
    : info_(std::move(info)), timeout_ms_(info_.timeout.count()), rank_(info_.rank), size_(info_.size) {
  TORCH_CHECK_VALUE(size_ >= 1 && size_ <= kMaxRanks, "pat_shm: a group has 1 to ", kMaxRanks, " ranks, got ", size_);
  TORCH_CHECK_VALUE(rank_ >= 0 && rank_ < size_, "pat_shm: rank ", rank_, " is not in a group of ", size_);
  TORCH_CHECK_VALUE(info_.global_ranks.empty() || info_.global_ranks.size() == size_t(size_), "pat_shm: ",
                    info_.global_ranks.size(), " global ranks given for a group of ", size_);
  segment_ = std::make_unique<Segment>(store, rank_, size_, global_rank(info_), info_.link, info_.timeout, who());
  for (int r = 0; r < size_; ++r) {
    const Peer& p = segment_->peer(r);
    TORCH_CHECK_VALUE(p.link_latency_ns == info_.link.latency_ns && p.link_bytes_per_ns == info_.link.bytes_per_ns,
                      who(), ": all ranks must emulate the same link; this rank has ", info_.link.latency_ns, " ns and ",
                      info_.link.bytes_per_ns, " GB/s, ", rank_text(r), " has ", p.link_latency_ns, " ns and ",
                      p.link_bytes_per_ns, " GB/s (0: none)");
  }
  spins_ = std::max(info_.node_ranks, size_) > segment_->cores() ? kSpinsCrowded : kSpins;
  send_mutex_ = std::make_unique<std::mutex[]>(size_);
  inbox_.resize(size_);
}

Group::~Group() {
  // A forked child holds a copy of this object and is not the rank.
  if (segment_->owned_by_this_process()) shutdown();
}

void Group::shutdown() {
  if (left_.exchange(true)) return;
  segment_->peer(rank_).left.store(1, std::memory_order_release);
  wake_all();
}

void Group::abort() {
  uint64_t none = 0;
  const uint64_t fault = uint64_t(Fault::aborted) << 32 | uint64_t(rank_) << 16 | uint64_t(rank_);
  segment_->header().fault.compare_exchange_strong(none, fault);
  wake_all();
}

void Group::wake_all() {
  for (int r = 0; r < size_; ++r) {
    futex_wake_all(segment_->line(r).flag.word);
    futex_wake_all(segment_->bell(r).word);
  }
}

void Group::set_description(const std::string& d) {
  std::lock_guard<std::mutex> lock(state_mutex_);
  description_ = d;
}

std::string Group::who() const {
  std::lock_guard<std::mutex> lock(state_mutex_);
  return describe(info_, description_);
}

std::string Group::rank_text(int r) const {
  const Peer& p = segment_->peer(r);
  return "rank " + std::to_string(r) + " (global rank " + std::to_string(p.global_rank) + ", pid " +
         std::to_string(p.process.pid) + ")";
}

void Group::check_usable() {
  if (left_.load(std::memory_order_relaxed)) {
    C10_THROW_ERROR(DistBackendError, who() + ": this rank has shut the group down");
  }
  if (segment_->header().fault.load(std::memory_order_relaxed) == 0) return;
  std::string why;
  {
    std::lock_guard<std::mutex> lock(state_mutex_);
    why = broken_;
  }
  if (!why.empty()) C10_THROW_ERROR(DistBackendError, "the group is unusable since an earlier error: " + why);
  check_fault("starting an operation");
}

void Group::raise(Fault kind, int culprit, int reporter, const std::string& doing) {
  std::string text = who() + ": ";
  const std::string other = rank_text(culprit);
  switch (kind) {
    case Fault::aborted: text += "aborted by " + other + " during " + doing; break;
    case Fault::died: text += other + " is gone (killed or exited) during " + doing; break;
    case Fault::left: text += other + " has shut the group down and will not take part in " + doing; break;
    case Fault::timeout:
      text += "timeout of " + std::to_string(timeout_ms_.load()) + " ms waiting for " + other + " during " + doing;
      break;
    default: text += "calls do not match: " + doing; break;
  }
  if (reporter != rank_ && kind != Fault::aborted) text += " (noticed by rank " + std::to_string(reporter) + ")";
  {
    std::lock_guard<std::mutex> lock(state_mutex_);
    if (broken_.empty()) broken_ = text;
  }
  C10_THROW_ERROR(DistBackendError, text);
}

void Group::fail(Fault kind, int culprit, const std::string& doing) {
  uint64_t none = 0;
  const uint64_t fault = uint64_t(kind) << 32 | uint64_t(culprit) << 16 | uint64_t(rank_);
  segment_->header().fault.compare_exchange_strong(none, fault);
  wake_all();
  raise(kind, culprit, rank_, doing);
}

void Group::check_fault(const std::string& doing) {
  const uint64_t f = segment_->header().fault.load(std::memory_order_acquire);
  if (f == 0) return;
  const auto kind = Fault(f >> 32);
  const int culprit = int(f >> 16 & 0xffff), reporter = int(f & 0xffff);
  raise(kind, culprit, reporter, kind == Fault::mismatch ? "rank " + std::to_string(reporter) + " reports that " +
        rank_text(culprit) + " called something else while this rank was in " + doing : doing);
}

// Called now and then by a waiter: throws if waiting for `peer` is vain or has lasted too long.
void Group::check_wait(int peer, int64_t entered_ns, const std::string& doing) {
  check_fault(doing);
  if (now_ns() - entered_ns > timeout_ms_.load() * 1'000'000LL) fail(Fault::timeout, peer, doing);
}

}  // namespace pat
