// Send and receive of Group: one small ring of slots for each ordered pair of ranks.
//
// A receive is posted at once and filled while somebody waits. A send returns when its last slot is in the ring; while
// the ring is full it takes in what others send to this rank, so two ranks that send to each other first do not hang.
#include <algorithm>
#include <cstring>

#include "group.h"

namespace pat {

void Group::begin_message(int from, const Slot& slot) {
  Inbox& box = inbox_[from];
  box.filled = 0;
  const auto same_tag = [&](const auto& r) { return r->tag == slot.tag; };
  const auto it = std::find_if(box.posted.begin(), box.posted.end(), same_tag);
  if (it != box.posted.end()) {
    box.current = *it;
    box.posted.erase(it);
    box.current->sent_ns = slot.sent_ns;
    if (box.current->into.bytes != size_t(slot.total)) {
      fail(Fault::mismatch, from, rank_text(from) + " sends a message of " + std::to_string(slot.total) +
                                      " bytes (tag " + std::to_string(slot.tag) + "), the receive takes " +
                                      std::to_string(box.current->into.bytes));
    }
    return;
  }
  box.current_message = std::make_shared<Message>();
  box.current_message->data.resize(size_t(slot.total));
  box.current_message->tag = slot.tag;
  box.current_message->sent_ns = slot.sent_ns;
  box.unexpected.push_back(box.current_message);
}

void Group::drain(int from) {
  Channel& channel = segment_->channel(from, rank_);
  Inbox& box = inbox_[from];
  uint32_t tail = channel.tail.load(std::memory_order_relaxed);
  bool moved = false;
  while (channel.head.load(std::memory_order_acquire) != tail) {
    const Slot& slot = channel.slots[tail % kSlots];
    const size_t total = size_t(slot.total);
    if (!box.current && !box.current_message) begin_message(from, slot);
    char* to = box.current ? box.current->into.data : box.current_message->data.data();
    if (slot.bytes) memcpy(to + box.filled, slot.data, slot.bytes);
    box.filled += slot.bytes;
    channel.tail.store(++tail, std::memory_order_release);
    segment_->bell(from).bump();
    moved = true;
    if (box.filled < total) continue;
    if (box.current) {
      box.current->done = true;
    } else {
      box.current_message->filled = box.filled;
      if (const auto& claim = box.current_message->claimed) {
        if (total) memcpy(claim->into.data, to, total);
        claim->done = true;
        box.unexpected.erase(std::find(box.unexpected.begin(), box.unexpected.end(), box.current_message));
      }
    }
    box.current.reset();
    box.current_message.reset();
  }
  // Another thread of this rank may sleep on what has just come in.
  if (moved && segment_->bell(rank_).sleepers.load() != 0) segment_->bell(rank_).bump();
}

std::shared_ptr<Receive> Group::post_receive(Span into, int from, int tag, std::any keep) {
  check_usable();
  TORCH_CHECK_VALUE(from >= 0 && from < size_ && from != rank_, "pat_shm recv: source must be another rank of 0..",
                    size_ - 1, ", got ", from, " on rank ", rank_);
  auto r = std::make_shared<Receive>();
  r->into = into;
  r->tag = tag;
  r->keep = std::move(keep);
  std::lock_guard<std::mutex> lock(message_mutex_);
  Inbox& box = inbox_[from];
  for (auto it = box.unexpected.begin(); it != box.unexpected.end(); ++it) {
    Message& m = **it;
    if (m.tag != tag || m.claimed) continue;
    if (m.data.size() != into.bytes) {
      fail(Fault::mismatch, from, rank_text(from) + " sent a message of " + std::to_string(m.data.size()) +
                                      " bytes (tag " + std::to_string(tag) + "), the receive takes " +
                                      std::to_string(into.bytes));
    }
    r->sent_ns = m.sent_ns;
    if (*it == box.current_message) {
      m.claimed = r;
    } else {
      if (into.bytes) memcpy(into.data, m.data.data(), into.bytes);
      r->done = true;
      box.unexpected.erase(it);
    }
    return r;
  }
  box.posted.push_back(r);
  return r;
}

bool Group::test_receive(const std::shared_ptr<Receive>& r, int from) {
  std::lock_guard<std::mutex> lock(message_mutex_);
  if (!r->done) drain(from);
  const Link& link = info_.link;
  return r->done && (!link.on() || now_ns() >= r->sent_ns + link.duration_ns(double(r->into.bytes)));
}

int64_t Group::finish_receive(const std::shared_ptr<Receive>& r, int from) {
  const int64_t entered = now_ns();
  auto ready = [&] {
    std::lock_guard<std::mutex> lock(message_mutex_);
    if (!r->done) drain(from);
    return r->done;
  };
  if (!ready()) {
    check_usable();
    const std::string doing = "recv of " + std::to_string(r->into.bytes) + " bytes, tag " + std::to_string(r->tag);
    wait_on(segment_->bell(rank_), segment_->header().fault, spins_, ready, [&] {
      check_wait(from, entered, doing);
      const bool left = segment_->peer(from).left.load(std::memory_order_acquire) != 0;
      if ((left || segment_->is_dead(from)) && !ready()) fail(left ? Fault::left : Fault::died, from, doing);
    });
  }
  const Link& link = info_.link;
  return link.on() ? r->sent_ns + link.duration_ns(double(r->into.bytes)) : 0;
}

int64_t Group::send(Span data, int to, int tag) {
  check_usable();
  TORCH_CHECK_VALUE(to >= 0 && to < size_ && to != rank_, "pat_shm send: destination must be another rank of 0..",
                    size_ - 1, ", got ", to, " on rank ", rank_);
  std::lock_guard<std::mutex> sending(send_mutex_[to]);
  const int64_t entered = now_ns();
  const std::string doing = "send of " + std::to_string(data.bytes) + " bytes, tag " + std::to_string(tag);
  Channel& channel = segment_->channel(rank_, to);
  uint32_t head = channel.head.load(std::memory_order_relaxed);
  auto has_room = [&] { return head - channel.tail.load(std::memory_order_acquire) < uint32_t(kSlots); };
  size_t at = 0;
  do {
    if (!has_room()) {
      auto ready = [&] {
        if (has_room()) return true;
        std::lock_guard<std::mutex> lock(message_mutex_);
        for (int p = 0; p < size_; ++p) {
          if (p != rank_) drain(p);
        }
        return has_room();
      };
      wait_on(segment_->bell(rank_), segment_->header().fault, spins_, ready, [&] {
        check_wait(to, entered, doing);
        const bool left = segment_->peer(to).left.load(std::memory_order_acquire) != 0;
        if (left || segment_->is_dead(to)) fail(left ? Fault::left : Fault::died, to, doing);
      });
    }
    Slot& slot = channel.slots[head % kSlots];
    slot.total = int64_t(data.bytes);
    slot.sent_ns = entered;
    slot.tag = tag;
    slot.bytes = uint32_t(std::min(kSlotBytes, data.bytes - at));
    if (slot.bytes) memcpy(slot.data, data.data + at, slot.bytes);
    channel.head.store(++head, std::memory_order_release);
    segment_->bell(to).bump();
    at += slot.bytes;
  } while (at < data.bytes);
  const Link& link = info_.link;
  return link.on() ? entered + link.duration_ns(double(data.bytes)) : 0;
}

}  // namespace pat
