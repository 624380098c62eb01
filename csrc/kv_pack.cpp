#include "kv_pack.h"

#include <ATen/ATen.h>

#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace pat {
namespace {

constexpr int64_t kAhead = 8;  // slots whose rows are fetched ahead: they lie anywhere in the pool
constexpr size_t kLine = 64;

void check_pool(const at::Tensor& t, const char* name) {
  TORCH_CHECK_VALUE(t.device().is_cpu() && t.dim() == 3, name, " must be a CPU tensor [num_slots, heads, dim], got ",
                    t.device(), " ", t.sizes());
  TORCH_CHECK_VALUE(t.numel() == 0 || ((t.size(2) == 1 || t.stride(2) == 1) &&
                                       (t.size(1) == 1 || t.stride(1) == t.size(2))),
                    name, " must be contiguous in its last two dimensions, got shape ", t.sizes(), " strides ",
                    t.strides());
}

void check_index(const at::Tensor& t, const char* name) {
  TORCH_CHECK_VALUE(t.device().is_cpu() && t.dim() == 1 && t.scalar_type() == at::kLong && t.is_contiguous(), name,
                    " must be a contiguous 1-D int64 CPU tensor, got ", t.scalar_type(), " ", t.sizes(), " on ",
                    t.device());
}

// From so many bytes on a layer does not stay in the caches until it is read again.
constexpr int64_t kStreamed = 4 << 20;

// Past the caches: what is overwritten need not be read first, and nothing else is driven out.
inline void stream(char* to, const char* from, size_t bytes) {
#ifdef __SSE2__
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0 && bytes % kLine == 0) {
    for (size_t at = 0; at < bytes; at += kLine) {
      const __m128i* source = reinterpret_cast<const __m128i*>(from + at);
      __m128i* target = reinterpret_cast<__m128i*>(to + at);
      const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    return;
  }
#endif
  memcpy(to, from, bytes);
}

// Streamed stores are not ordered by the locks and flags with which ranks meet afterwards.
inline void drain_streams() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

// The rows of one part in one of the two pools: row i is `bytes` long, at pool + slots[i] * stride.
template <bool kPack, bool kStream>
void copy_rows(char* pool, const int64_t* slots, int64_t n, int64_t stride, size_t bytes, char* staged) {
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n && (kPack || !kStream)) {
      const char* ahead = pool + slots[i + kAhead] * stride;
      for (size_t at = 0; at < bytes; at += kLine) __builtin_prefetch(ahead + at, !kPack);
    }
    char* row = pool + slots[i] * stride;
    char* to = kPack ? staged : row;
    const char* from = kPack ? row : staged;
    kStream ? stream(to, from, bytes) : void(memcpy(to, from, bytes));
    staged += bytes;
  }
}

template <bool kPack>
void copy_rows(char* pool, const int64_t* slots, int64_t n, int64_t stride, size_t bytes, char* staged, bool streamed) {
  streamed ? copy_rows<kPack, true>(pool, slots, n, stride, bytes, staged)
           : copy_rows<kPack, false>(pool, slots, n, stride, bytes, staged);
}

template <bool kPack>
void run(const at::Tensor& k, const at::Tensor& v, const at::Tensor& slots, const at::Tensor& part_offsets,
         const at::Tensor& head_begin, int64_t head_count, const at::Tensor& staged) {
  check_pool(k, "k");
  check_pool(v, "v");
  check_index(slots, "slots");
  check_index(part_offsets, "part_offsets");
  check_index(head_begin, "head_begin");
  const int64_t parts = head_begin.numel(), n = slots.numel(), pool_slots = k.size(0), heads = k.size(1);
  TORCH_CHECK_VALUE(v.size(0) == pool_slots && v.size(1) == heads && v.scalar_type() == k.scalar_type(),
                    "k and v must agree in num_slots, heads and dtype, got ", k.sizes(), " ", k.scalar_type(), " and ",
                    v.sizes(), " ", v.scalar_type());
  TORCH_CHECK_VALUE(staged.device().is_cpu() && staged.dim() == 1 && staged.is_contiguous() &&
                        staged.scalar_type() == k.scalar_type() &&
                        staged.numel() == n * head_count * (k.size(2) + v.size(2)),
                    "the staging buffer must be a contiguous 1-D CPU tensor of ",
                    n * head_count * (k.size(2) + v.size(2)), " ", k.scalar_type(), ", got ", staged.sizes(), " ",
                    staged.scalar_type());
  const int64_t* offset = part_offsets.const_data_ptr<int64_t>();
  const int64_t* first = head_begin.const_data_ptr<int64_t>();
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(part_offsets.numel() == parts + 1 && offset[0] == 0 && offset[parts] == n,
                    "part_offsets must have ", parts + 1, " entries from 0 to ", n, ", got ", part_offsets.numel());
  for (int64_t p = 0; p < parts; ++p) {
    TORCH_CHECK_VALUE(offset[p] <= offset[p + 1], "part_offsets must not decrease, got ", offset[p], " then ",
                      offset[p + 1]);
    TORCH_CHECK_VALUE(first[p] >= 0 && head_count >= 0 && first[p] <= heads - head_count, "part ", p, ": heads [",
                      first[p], ", ", first[p] + head_count, ") are outside the pool's [0, ", heads, ")");
  }
  // All slots are looked at before anything is written.
  for (int64_t i = 0; i < n; ++i) {
    TORCH_CHECK_VALUE(slot[i] >= 0 && slot[i] < pool_slots, "slots[", i, "] = ", slot[i],
                      " is outside the pool's [0, ", pool_slots, ")");
  }
  const int64_t item = int64_t(k.element_size());
  const int64_t k_row = k.size(2) * item, v_row = v.size(2) * item;
  const size_t k_bytes = size_t(head_count * k_row), v_bytes = size_t(head_count * v_row);
  char* const k_pool = static_cast<char*>(k.data_ptr());
  char* const v_pool = static_cast<char*>(v.data_ptr());
  char* at = static_cast<char*>(staged.data_ptr());
  const bool streamed = n * int64_t(k_bytes + v_bytes) >= kStreamed;
  for (int64_t p = 0; p < parts; ++p) {
    const int64_t rows = offset[p + 1] - offset[p];
    copy_rows<kPack>(k_pool + first[p] * k_row, slot + offset[p], rows, k.stride(0) * item, k_bytes, at, streamed);
    at += rows * int64_t(k_bytes);
    copy_rows<kPack>(v_pool + first[p] * v_row, slot + offset[p], rows, v.stride(0) * item, v_bytes, at, streamed);
    at += rows * int64_t(v_bytes);
  }
  if (streamed) drain_streams();
}

}  // namespace

void kv_pack(const at::Tensor& k, const at::Tensor& v, const at::Tensor& slots, const at::Tensor& part_offsets,
             const at::Tensor& head_begin, int64_t head_count, const at::Tensor& out) {
  run<true>(k, v, slots, part_offsets, head_begin, head_count, out);
}

void kv_unpack(const at::Tensor& k, const at::Tensor& v, const at::Tensor& slots, const at::Tensor& part_offsets,
               const at::Tensor& head_begin, int64_t head_count, const at::Tensor& staged) {
  run<false>(k, v, slots, part_offsets, head_begin, head_count, staged);
}

}  // namespace pat
