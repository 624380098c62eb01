// What torch.distributed calls: each collective checks its tensors, makes them spans of bytes and calls Group.
// One file because it is one class, and torch.distributed wants all of its methods.
#include "backend.h"

#include <ATen/ATen.h>

#include <numeric>

namespace pat {
namespace {

using c10d::OpType;

ReduceKind kind_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM: return ReduceKind::sum;
    case c10d::ReduceOp::AVG: return ReduceKind::avg;
    case c10d::ReduceOp::PRODUCT: return ReduceKind::product;
    case c10d::ReduceOp::MIN: return ReduceKind::min;
    case c10d::ReduceOp::MAX: return ReduceKind::max;
    case c10d::ReduceOp::BAND: return ReduceKind::band;
    case c10d::ReduceOp::BOR: return ReduceKind::bor;
    case c10d::ReduceOp::BXOR: return ReduceKind::bxor;
    default:
      TORCH_CHECK_VALUE(false, "pat_shm: reduction ", int(op.op_),
                        " is not supported; allowed: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR");
  }
}

void check(const at::Tensor& t, const char* op) {
  TORCH_CHECK_VALUE(t.device().is_cpu(), "pat_shm ", op, ": takes CPU tensors, got one on ", t.device());
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, "pat_shm ", op, ": takes dense tensors, got layout ", t.layout());
}

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* op) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "pat_shm ", op, ": takes one tensor, got ", tensors.size());
  check(tensors[0], op);
  return tensors[0];
}

char* bytes(const at::Tensor& t) { return static_cast<char*>(t.data_ptr()); }
Span span(const at::Tensor& t) { return {bytes(t), t.nbytes()}; }

// A contiguous stand-in for a tensor that is written; copied back by finish() where it is not the tensor itself.
class Out {
 public:
  Out(const at::Tensor& t, bool read_too)
      : target_(t), buffer_(t.is_contiguous() ? t : read_too ? t.detach().contiguous() : at::empty_like(t.detach(),
            at::MemoryFormat::Contiguous)) {}
  const at::Tensor& buffer() const { return buffer_; }
  void finish() {
    if (!buffer_.is_same(target_)) target_.detach().copy_(buffer_);
  }

 private:
  at::Tensor target_, buffer_;
};

std::vector<Out> outs(const std::vector<at::Tensor>& tensors, const char* op) {
  std::vector<Out> all;
  all.reserve(tensors.size());
  for (const auto& t : tensors) {
    check(t, op);
    all.emplace_back(t, false);
  }
  return all;
}

void finish(std::vector<Out>& all) {
  for (auto& o : all) o.finish();
}

std::vector<char*> pointers(const std::vector<Out>& all) {
  std::vector<char*> p;
  for (const auto& o : all) p.push_back(bytes(o.buffer()));
  return p;
}

void check_list(const std::vector<at::Tensor>& list, const at::Tensor& like, int size, const char* op) {
  TORCH_CHECK_VALUE(list.size() == size_t(size), "pat_shm ", op, ": the list must hold one tensor a rank (", size,
                    "), got ", list.size());
  for (const auto& t : list) {
    check(t, op);
    TORCH_CHECK_VALUE(t.scalar_type() == like.scalar_type() && t.numel() == like.numel(), "pat_shm ", op,
                      ": all tensors must have the dtype and element count ", like.scalar_type(), " x ", like.numel(),
                      ", got ", t.scalar_type(), " x ", t.numel());
  }
}

// The rows of a tensor that go to, or come from, each rank.
std::vector<Span> split_rows(const at::Tensor& t, const std::vector<int64_t>& sizes, int n, const char* what) {
  const int64_t rows = t.dim() == 0 ? 1 : t.size(0);
  std::vector<Span> parts;
  if (sizes.empty()) {
    TORCH_CHECK_VALUE(rows % n == 0, "pat_shm all_to_all: dimension 0 of the ", what, " (", rows,
                      ") does not divide by the group size (", n, "); give split sizes");
  } else {
    TORCH_CHECK_VALUE(sizes.size() == size_t(n), "pat_shm all_to_all: ", sizes.size(), " ", what,
                      " split sizes given for ", n, " ranks");
    for (const int64_t s : sizes) TORCH_CHECK_VALUE(s >= 0, "pat_shm all_to_all: negative split size ", s);
    const int64_t sum = std::accumulate(sizes.begin(), sizes.end(), int64_t(0));
    TORCH_CHECK_VALUE(sum == rows, "pat_shm all_to_all: the ", what, " split sizes sum to ", sum, ", dimension 0 is ",
                      rows);
  }
  const size_t row_bytes = rows == 0 ? 0 : t.nbytes() / size_t(rows);
  char* at = bytes(t);
  for (int p = 0; p < n; ++p) {
    const size_t len = size_t(sizes.empty() ? rows / n : sizes[p]) * row_bytes;
    parts.push_back({at, len});
    at += len;
  }
  return parts;
}

// A receive runs when it is waited for: then irecv before isend, on both sides, does not hang.
class RecvWork : public ShmWork {
 public:
  RecvWork(std::shared_ptr<Group> group, int rank, int from, at::Tensor target, int tag)
      : ShmWork(rank, OpType::RECV, {target}, 0), group_(std::move(group)), from_(from), out_(target, false) {
    receive_ = group_->post_receive(span(out_.buffer()), from, tag, out_.buffer());
  }
  bool isCompleted() override {
    if (!group_->test_receive(receive_, from_)) return false;
    land();
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    wait_until_ns(group_->finish_receive(receive_, from_));
    land();
    return true;
  }
  int sourceRank() const override { return from_; }

 private:
  void land() {
    std::lock_guard<std::mutex> lock(landing_);
    if (!landed_) out_.finish();
    landed_ = true;
  }
  std::shared_ptr<Group> group_;
  int from_;
  Out out_;
  std::shared_ptr<Receive> receive_;
  std::mutex landing_;
  bool landed_ = false;
};

}  // namespace

bool ShmWork::wait(std::chrono::milliseconds) {
  if (deadline_ns_ != 0) wait_until_ns(deadline_ns_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  wait(kNoTimeout);
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  future->markCompleted(c10::IValue(outputs_));
  return future;
}

ShmBackend::ShmBackend(const c10::intrusive_ptr<c10d::Store>& store, GroupInfo info)
    : c10d::Backend(info.rank, info.size) {
  options_ = c10::make_intrusive<Options>("pat_shm", info.timeout);
  group_ = std::make_shared<Group>(*store, std::move(info));
}

void ShmBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  group_->set_timeout(timeout);
}

// A call's own timeout counts for this call only; the group's is set back here. The description comes after creation.
void ShmBackend::apply(std::chrono::milliseconds timeout) {
  group_->set_timeout(timeout == c10d::kUnsetTimeout ? options_->timeout : timeout);
  if (!described_ && !pg_desc_.empty()) {
    group_->set_description(pg_desc_);
    described_ = true;
  }
}

ShmBackend::WorkPtr ShmBackend::done(OpType type, Tensors outputs, int64_t deadline_ns, bool async) {
  if (deadline_ns != 0 && !async) wait_until_ns(deadline_ns);
  return c10::make_intrusive<ShmWork>(rank_, type, std::move(outputs), async ? deadline_ns : 0);
}

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor& t = only(tensors, "broadcast");
  apply(opts.timeout);
  Out out(t, true);
  const int64_t deadline = group_->broadcast(span(out.buffer()), int(opts.rootRank));
  if (rank_ != opts.rootRank) out.finish();
  return done(OpType::BROADCAST, tensors, deadline, opts.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const at::Tensor& t = only(tensors, "all_reduce");
  const ReduceKind kind = kind_of(opts.reduceOp);
  check_reduction(t.scalar_type(), kind);
  apply(opts.timeout);
  Out out(t, true);
  const int64_t deadline = group_->all_reduce(out.buffer().data_ptr(), size_t(t.numel()), t.scalar_type(), kind);
  out.finish();
  return done(OpType::ALLREDUCE, tensors, deadline, opts.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  WorkPtr last;
  for (auto& t : tensors) {
    Tensors one{t};
    last = allreduce(one, opts);
  }
  return last ? last : done(OpType::ALLREDUCE_COALESCED, {}, 0, false);
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& t = only(tensors, "reduce");
  const ReduceKind kind = kind_of(opts.reduceOp);
  check_reduction(t.scalar_type(), kind);
  apply(opts.timeout);
  Out out(t, true);
  const int64_t deadline = group_->reduce(out.buffer().data_ptr(), size_t(t.numel()), t.scalar_type(), kind,
                                          int(opts.rootRank));
  if (rank_ == opts.rootRank) out.finish();
  return done(OpType::REDUCE, tensors, deadline, opts.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) {
  const at::Tensor input = only(inputs, "all_gather").contiguous();
  TORCH_CHECK_VALUE(outputs.size() == 1, "pat_shm all_gather: takes one output list, got ", outputs.size());
  check_list(outputs[0], input, size_, "all_gather");
  apply(opts.timeout);
  auto out = outs(outputs[0], "all_gather");
  const int64_t deadline = group_->all_gather(pointers(out), span(input));
  finish(out);
  return done(OpType::ALLGATHER, outputs[0], deadline, opts.asyncOp);
}

int64_t ShmBackend::all_gather_into(at::Tensor& output, const at::Tensor& input) {
  check(output, "all_gather_into_tensor");
  check(input, "all_gather_into_tensor");
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type() && output.numel() == input.numel() * size_,
                    "pat_shm all_gather_into_tensor: the output must hold ", size_, " times the input (",
                    input.scalar_type(), " x ", input.numel(), "), got ", output.scalar_type(), " x ",
                    output.numel());
  const at::Tensor in = input.contiguous();
  Out out(output, false);
  std::vector<char*> parts;
  for (int p = 0; p < size_; ++p) parts.push_back(bytes(out.buffer()) + size_t(p) * in.nbytes());
  const int64_t deadline = group_->all_gather(parts, span(in));
  out.finish();
  return deadline;
}

ShmBackend::WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& opts) {
  apply(opts.timeout);
  const int64_t deadline = all_gather_into(output, input);
  return done(OpType::_ALLGATHER_BASE, {output}, deadline, opts.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "pat_shm all_gather_into_tensor: ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs");
  apply(opts.timeout);
  int64_t deadline = 0;
  for (size_t i = 0; i < inputs.size(); ++i) deadline = all_gather_into(outputs[i], inputs[i]);
  return done(OpType::COALESCED, outputs, deadline, opts.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& opts) {
  const at::Tensor input = only(inputs, "gather").contiguous();
  const bool root = rank_ == opts.rootRank;
  TORCH_CHECK_VALUE(outputs.size() == size_t(root), "pat_shm gather: the root gives one output list, the others none");
  if (root) check_list(outputs[0], input, size_, "gather");
  apply(opts.timeout);
  auto out = outs(root ? outputs[0] : Tensors{}, "gather");
  const int64_t deadline = group_->gather(pointers(out), span(input), int(opts.rootRank));
  finish(out);
  return done(OpType::GATHER, root ? outputs[0] : Tensors{}, deadline, opts.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ScatterOptions& opts) {
  const at::Tensor& output = only(outputs, "scatter");
  const bool root = rank_ == opts.rootRank;
  TORCH_CHECK_VALUE(inputs.size() == size_t(root), "pat_shm scatter: the root gives one input list, the others none");
  if (root) check_list(inputs[0], output, size_, "scatter");
  apply(opts.timeout);
  Tensors in;
  std::vector<char*> parts;
  if (root) {
    for (const auto& t : inputs[0]) in.push_back(t.contiguous());
  }
  for (const auto& t : in) parts.push_back(bytes(t));
  Out out(output, false);
  const int64_t deadline = group_->scatter(span(out.buffer()), parts, int(opts.rootRank));
  out.finish();
  return done(OpType::SCATTER, outputs, deadline, opts.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                               const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = only(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs.size() == 1, "pat_shm reduce_scatter: takes one input list, got ", inputs.size());
  check_list(inputs[0], output, size_, "reduce_scatter");
  const ReduceKind kind = kind_of(opts.reduceOp);
  check_reduction(output.scalar_type(), kind);
  apply(opts.timeout);
  Tensors in;
  std::vector<char*> parts;
  for (const auto& t : inputs[0]) {
    in.push_back(t.contiguous());
    parts.push_back(bytes(in.back()));
  }
  Out out(output, false);
  const int64_t deadline = group_->reduce_scatter(out.buffer().data_ptr(), parts, size_t(output.numel()),
                                                  output.scalar_type(), kind);
  out.finish();
  return done(OpType::REDUCE_SCATTER, outputs, deadline, opts.asyncOp);
}

int64_t ShmBackend::reduce_scatter_into(at::Tensor& output, const at::Tensor& input, ReduceKind kind) {
  check(output, "reduce_scatter_tensor");
  check(input, "reduce_scatter_tensor");
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type() && input.numel() == output.numel() * size_,
                    "pat_shm reduce_scatter_tensor: the input must hold ", size_, " times the output (",
                    output.scalar_type(), " x ", output.numel(), "), got ", input.scalar_type(), " x ",
                    input.numel());
  check_reduction(output.scalar_type(), kind);
  const at::Tensor in = input.contiguous();
  Out out(output, false);
  std::vector<char*> parts;
  for (int p = 0; p < size_; ++p) parts.push_back(bytes(in) + size_t(p) * output.nbytes());
  const int64_t deadline = group_->reduce_scatter(out.buffer().data_ptr(), parts, size_t(output.numel()),
                                                  output.scalar_type(), kind);
  out.finish();
  return deadline;
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& opts) {
  apply(opts.timeout);
  const int64_t deadline = reduce_scatter_into(output, input, kind_of(opts.reduceOp));
  return done(OpType::_REDUCE_SCATTER_BASE, {output}, deadline, opts.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "pat_shm reduce_scatter_tensor: ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs");
  apply(opts.timeout);
  int64_t deadline = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    deadline = reduce_scatter_into(outputs[i], inputs[i], kind_of(opts.reduceOp));
  }
  return done(OpType::COALESCED, outputs, deadline, opts.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits,
                                              std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& opts) {
  check(output, "all_to_all_single");
  check(input, "all_to_all_single");
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), "pat_shm all_to_all_single: the output is ",
                    output.scalar_type(), ", the input ", input.scalar_type());
  apply(opts.timeout);
  const at::Tensor in = input.contiguous();
  Out out(output, false);
  const int64_t deadline = group_->all_to_all(split_rows(out.buffer(), output_splits, size_, "output"),
                                              split_rows(in, input_splits, size_, "input"));
  out.finish();
  return done(OpType::ALLTOALL_BASE, {output}, deadline, opts.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == size_t(size_) && inputs.size() == size_t(size_), "pat_shm all_to_all: takes ",
                    size_, " outputs and inputs, got ", outputs.size(), " and ", inputs.size());
  apply(opts.timeout);
  Tensors in;
  std::vector<Span> from, to;
  for (const auto& t : inputs) {
    check(t, "all_to_all");
    in.push_back(t.contiguous());
    from.push_back(span(in.back()));
  }
  auto out = outs(outputs, "all_to_all");
  for (const auto& o : out) to.push_back(span(o.buffer()));
  const int64_t deadline = group_->all_to_all(to, from);
  finish(out);
  return done(OpType::ALLTOALL, outputs, deadline, opts.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& opts) {
  apply(opts.timeout);
  const int64_t deadline = group_->barrier();
  return done(OpType::BARRIER, {}, deadline, opts.asyncOp);
}

ShmBackend::WorkPtr ShmBackend::meet(int64_t link_bytes) {
  TORCH_CHECK_VALUE(link_bytes >= 0, "pat_shm meet: ", link_bytes, " bytes given; allowed: 0 or more");
  apply(c10d::kUnsetTimeout);
  return done(OpType::BARRIER, {}, group_->barrier(link_bytes), true);
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int to, int tag) {
  const at::Tensor t = only(tensors, "send").contiguous();
  const int64_t deadline = group_->send(span(t), to, tag);
  return done(OpType::SEND, {}, deadline, true);
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int from, int tag) {
  return c10::make_intrusive<RecvWork>(group_, rank_, from, only(tensors, "recv"), tag);
}

}  // namespace pat
