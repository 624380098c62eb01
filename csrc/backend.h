// The torch.distributed backend "pat_shm": c10d::Backend on top of pat::Group, CPU tensors only.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "group.h"

namespace pat {

// Operations are done when the call returns; with an emulated link and asyncOp the remaining time passes in wait().
class ShmWork : public c10d::Work {
 public:
  ShmWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, int64_t deadline_ns)
      : c10d::Work(rank, type), outputs_(std::move(outputs)), deadline_ns_(deadline_ns) {}

  bool isCompleted() override { return now_ns() >= deadline_ns_; }
  bool isSuccess() const override { return true; }
  std::exception_ptr exception() const override { return nullptr; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 protected:
  std::vector<at::Tensor> outputs_;
  int64_t deadline_ns_;
};

class ShmBackend : public c10d::Backend {
 public:
  ShmBackend(const c10::intrusive_ptr<c10d::Store>& store, GroupInfo info);

  const std::string getBackendName() const override { return "pat_shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return group_->operations(); }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }

  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;

  // A barrier that takes as long as the link takes for `link_bytes` (emulated link; the same on every rank): for bytes
  // that ranks read from memory they share. The rest of that time passes in wait().
  WorkPtr meet(int64_t link_bytes);

  void abort() override { group_->abort(); }
  void shutdown() override { group_->shutdown(); }

 private:
  int64_t all_gather_into(at::Tensor& output, const at::Tensor& input);
  int64_t reduce_scatter_into(at::Tensor& output, const at::Tensor& input, ReduceKind kind);
  WorkPtr done(c10d::OpType type, Tensors outputs, int64_t deadline_ns, bool async);
  void apply(std::chrono::milliseconds timeout);

  std::shared_ptr<Group> group_;  // shared with receives that are still pending
  c10::intrusive_ptr<Options> options_;
  bool described_ = false;
};

}  // namespace pat
