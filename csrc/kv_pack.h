// Copying the heads of live KV slots between a pool layer and a flat staging buffer, on CPU.
#pragma once

#include <ATen/core/Tensor.h>

namespace pat {

// See sglang_pat/switch/kv.py for the arguments and the layout of `staged`. Shapes are checked there and, as far as
// memory safety needs it, here again. Errors: ValueError (a slot, part or head outside the pool, a wrong size).
void kv_pack(const at::Tensor& k, const at::Tensor& v, const at::Tensor& slots, const at::Tensor& part_offsets,
             const at::Tensor& head_begin, int64_t head_count, const at::Tensor& out);
void kv_unpack(const at::Tensor& k, const at::Tensor& v, const at::Tensor& slots, const at::Tensor& part_offsets,
               const at::Tensor& head_begin, int64_t head_count, const at::Tensor& staged);

}  // namespace pat
