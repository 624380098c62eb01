// Element-wise reduction over ranks, in rank order, so that every rank that reduces the same bytes gets the same bits.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>

namespace pat {

enum class ReduceKind : uint8_t { sum, avg, product, min, max, band, bor, bxor };

// out[i] = op over r of in[r][i], i < count. `out` may be one of the inputs (same element positions), nothing else.
// float16 and bfloat16 are accumulated in float32 and rounded once. Integer AVG truncates towards zero. MIN and MAX
// propagate NaN. bool: SUM, MAX, BOR are "or"; PRODUCT, MIN, BAND are "and".
void reduce(void* out, const void* const* in, int n, size_t count, c10::ScalarType dtype, ReduceKind kind);

// Errors: ValueError if the dtype has no such reduction.
void check_reduction(c10::ScalarType dtype, ReduceKind kind);

}  // namespace pat
