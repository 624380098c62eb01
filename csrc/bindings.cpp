#include <torch/extension.h>

#include "backend.h"
#include "kv_pack.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "C++ parts of sglang_pat: the shared-memory torch.distributed backend and the KV copy kernels";
  py::module_::import("torch.distributed");  // registers c10d::Backend, the base class below

  py::class_<pat::ShmBackend, c10d::Backend, c10::intrusive_ptr<pat::ShmBackend>>(m, "ShmBackend")
      .def("meet", &pat::ShmBackend::meet, py::arg("link_bytes"), py::call_guard<py::gil_scoped_release>());

  m.def(
      "create_shm_backend",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, int64_t timeout_ms, std::string id,
         std::vector<int64_t> global_ranks, int node_ranks, double link_latency_us, double link_gb_per_s) {
        pat::GroupInfo info;
        info.id = std::move(id);
        info.rank = rank;
        info.size = size;
        info.global_ranks = std::move(global_ranks);
        info.node_ranks = node_ranks;
        info.timeout = std::chrono::milliseconds(timeout_ms);
        info.link.latency_ns = int64_t(link_latency_us * 1e3);
        info.link.bytes_per_ns = link_gb_per_s;  // 1 GB/s is 1 byte/ns
        py::gil_scoped_release release;           // waits for the other ranks
        return c10::make_intrusive<pat::ShmBackend>(store, std::move(info));
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout_ms"), py::arg("id"),
      py::arg("global_ranks"), py::arg("node_ranks"), py::arg("link_latency_us"), py::arg("link_gb_per_s"));

  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def("kv_pack", &pat::kv_pack, no_gil, py::arg("k"), py::arg("v"), py::arg("slots"), py::arg("part_offsets"),
        py::arg("head_begin"), py::arg("head_count"), py::arg("out"));
  m.def("kv_unpack", &pat::kv_unpack, no_gil, py::arg("k"), py::arg("v"), py::arg("slots"), py::arg("part_offsets"),
        py::arg("head_begin"), py::arg("head_count"), py::arg("staged"));
}
