#include "reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#if defined(__F16C__) && defined(__AVX2__)
#include <immintrin.h>
#endif

namespace pat {
namespace {

constexpr size_t kBlock = 256;  // elements whose accumulators stay in the first-level cache

// Loads of one block into accumulators and the way back.
template <class T, class Acc>
struct Convert {
  static void load(Acc* acc, const T* in, size_t n) {
    for (size_t i = 0; i < n; ++i) acc[i] = static_cast<Acc>(in[i]);
  }
  static void store(T* out, const Acc* acc, size_t n) {
    for (size_t i = 0; i < n; ++i) out[i] = static_cast<T>(acc[i]);
  }
};

template <>
struct Convert<c10::BFloat16, float> {
  static void load(float* acc, const c10::BFloat16* in, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      const uint32_t bits = uint32_t(in[i].x) << 16;
      memcpy(acc + i, &bits, 4);
    }
  }
  static void store(c10::BFloat16* out, const float* acc, size_t n) {
    for (size_t i = 0; i < n; ++i) {  // round to nearest even, written so that it vectorises
      uint32_t bits;
      memcpy(&bits, acc + i, 4);
      const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
      out[i].x = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
  }
};

#if defined(__F16C__) && defined(__AVX2__)
template <>
struct Convert<c10::Half, float> {
  static void load(float* acc, const c10::Half* in, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
      _mm256_storeu_ps(acc + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
    }
    for (; i < n; ++i) acc[i] = static_cast<float>(in[i]);
  }
  static void store(c10::Half* out, const float* acc, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(acc + i), _MM_FROUND_TO_NEAREST_INT));
    }
    for (; i < n; ++i) out[i] = c10::Half(acc[i]);
  }
};
#endif

// Integers wrap on overflow, as everywhere in torch; in unsigned arithmetic that is defined.
template <class A>
A add(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    return A(U(a) + U(b));
  } else {
    return a + b;
  }
}
template <class A>
A mul(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    return A(uint64_t(a) * uint64_t(b));
  } else {
    return a * b;
  }
}

template <ReduceKind K, class A>
A combine(A a, A b) {
  if constexpr (K == ReduceKind::sum || K == ReduceKind::avg) return add(a, b);
  if constexpr (K == ReduceKind::product) return mul(a, b);
  if constexpr (K == ReduceKind::min) return (a != a || a < b) ? a : b;  // a != a: NaN wins, from either side
  if constexpr (K == ReduceKind::max) return (a != a || a > b) ? a : b;
  if constexpr (std::is_integral_v<A>) {
    if constexpr (K == ReduceKind::band) return A(a & b);
    if constexpr (K == ReduceKind::bor) return A(a | b);
    if constexpr (K == ReduceKind::bxor) return A(a ^ b);
  }
  return a;
}

template <class T, class A, ReduceKind K>
void run(void* out_bytes, const void* const* in, int n, size_t count) {
  T* out = static_cast<T*>(out_bytes);
  A acc[kBlock];
  A term[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t len = std::min(kBlock, count - at);
    Convert<T, A>::load(acc, static_cast<const T*>(in[0]) + at, len);
    for (int r = 1; r < n; ++r) {
      const T* source = static_cast<const T*>(in[r]) + at;
      if constexpr (std::is_same_v<T, A>) {
        for (size_t i = 0; i < len; ++i) acc[i] = combine<K, A>(acc[i], source[i]);
      } else {
        Convert<T, A>::load(term, source, len);
        for (size_t i = 0; i < len; ++i) acc[i] = combine<K, A>(acc[i], term[i]);
      }
    }
    if constexpr (K == ReduceKind::avg) {
      for (size_t i = 0; i < len; ++i) acc[i] = A(acc[i] / A(n));
    }
    Convert<T, A>::store(out + at, acc, len);
  }
}

template <class T, class A>
void dispatch(void* out, const void* const* in, int n, size_t count, ReduceKind kind) {
  // An integer mean needs room for the sum of all ranks.
  using Mean = std::conditional_t<std::is_integral_v<A>,
                                  std::conditional_t<std::is_unsigned_v<A>, uint64_t, int64_t>, A>;
  switch (kind) {
    case ReduceKind::sum: return run<T, A, ReduceKind::sum>(out, in, n, count);
    case ReduceKind::avg: return run<T, Mean, ReduceKind::avg>(out, in, n, count);
    case ReduceKind::product: return run<T, A, ReduceKind::product>(out, in, n, count);
    case ReduceKind::min: return run<T, A, ReduceKind::min>(out, in, n, count);
    case ReduceKind::max: return run<T, A, ReduceKind::max>(out, in, n, count);
    default: break;
  }
  if constexpr (std::is_integral_v<A>) {
    switch (kind) {
      case ReduceKind::band: return run<T, A, ReduceKind::band>(out, in, n, count);
      case ReduceKind::bor: return run<T, A, ReduceKind::bor>(out, in, n, count);
      case ReduceKind::bxor: return run<T, A, ReduceKind::bxor>(out, in, n, count);
      default: break;
    }
  }
}

ReduceKind bool_kind(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::sum:
    case ReduceKind::max: return ReduceKind::bor;
    case ReduceKind::product:
    case ReduceKind::min: return ReduceKind::band;
    default: return kind;
  }
}

}  // namespace

void check_reduction(c10::ScalarType t, ReduceKind kind) {
  const bool floating = t == c10::kFloat || t == c10::kDouble || t == c10::kHalf || t == c10::kBFloat16;
  const bool integral = c10::isIntegralType(t, /*includeBool=*/true);
  TORCH_CHECK_VALUE(floating || integral, "pat_shm cannot reduce ", c10::toString(t),
                    "; allowed: float32, float64, float16, bfloat16, all integers, bool");
  const bool bitwise = kind == ReduceKind::band || kind == ReduceKind::bor || kind == ReduceKind::bxor;
  TORCH_CHECK_VALUE(!(floating && bitwise), "pat_shm: BAND, BOR and BXOR need an integer or bool tensor, got ",
                    c10::toString(t));
  TORCH_CHECK_VALUE(!(t == c10::kBool && kind == ReduceKind::avg), "pat_shm: AVG of bool is not defined");
}

void reduce(void* out, const void* const* in, int n, size_t count, c10::ScalarType t, ReduceKind kind) {
  switch (t) {
    case c10::kFloat: return dispatch<float, float>(out, in, n, count, kind);
    case c10::kDouble: return dispatch<double, double>(out, in, n, count, kind);
    case c10::kHalf: return dispatch<c10::Half, float>(out, in, n, count, kind);
    case c10::kBFloat16: return dispatch<c10::BFloat16, float>(out, in, n, count, kind);
    case c10::kLong: return dispatch<int64_t, int64_t>(out, in, n, count, kind);
    case c10::kInt: return dispatch<int32_t, int32_t>(out, in, n, count, kind);
    case c10::kShort: return dispatch<int16_t, int16_t>(out, in, n, count, kind);
    case c10::kChar: return dispatch<int8_t, int8_t>(out, in, n, count, kind);
    case c10::kByte: return dispatch<uint8_t, uint8_t>(out, in, n, count, kind);
    case c10::kUInt16: return dispatch<uint16_t, uint16_t>(out, in, n, count, kind);
    case c10::kUInt32: return dispatch<uint32_t, uint32_t>(out, in, n, count, kind);
    case c10::kUInt64: return dispatch<uint64_t, uint64_t>(out, in, n, count, kind);
    case c10::kBool: return dispatch<uint8_t, uint8_t>(out, in, n, count, bool_kind(kind));
    default: check_reduction(t, kind);
  }
}

}  // namespace pat
