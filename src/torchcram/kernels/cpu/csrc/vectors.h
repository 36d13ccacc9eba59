// Vectors of floats of the instruction set that a file is compiled for, and functions of them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(TORCHCRAM_AVX512)
#include <immintrin.h>
#define TORCHCRAM_LANES 16
#elif defined(TORCHCRAM_AVX2)
#define TORCHCRAM_LANES 8
#else  // NEON and portable code
#define TORCHCRAM_LANES 4
#endif
#define TORCHCRAM_INLINE inline __attribute__((always_inline))

namespace {

constexpr int kLanes = TORCHCRAM_LANES;
#if defined(TORCHCRAM_AVX512) || defined(TORCHCRAM_NEON)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef float Unaligned __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef float Anywhere __attribute__((vector_size(4 * kLanes), aligned(1), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

TORCHCRAM_INLINE Vector load(const float* from) {
  return *reinterpret_cast<const Unaligned*>(from);
}
TORCHCRAM_INLINE Vector load(const uint16_t* from) {  // bfloat16
#if defined(TORCHCRAM_AVX512)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
  return (Vector)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Ints) << 16);
#endif
}
TORCHCRAM_INLINE void store(float* to, Vector v) { *reinterpret_cast<Unaligned*>(to) = v; }
TORCHCRAM_INLINE Vector broadcast(float value) { return Vector{} + value; }
TORCHCRAM_INLINE Vector maximum(Vector a, Vector b) { return a > b ? a : b; }
TORCHCRAM_INLINE Ints maximum(Ints a, Ints b) { return a > b ? a : b; }
TORCHCRAM_INLINE Vector minimum(Vector a, Vector b) { return a < b ? a : b; }

// Activations propagate NaN: comparisons with it are false.
TORCHCRAM_INLINE Vector relu(Vector x) { return x < 0.0f ? Vector{} : x; }

// e^x = 2^n * e^r with |r| <= log(2) / 2; relative error below 2e-7 for x >= -87.
TORCHCRAM_INLINE Vector exponential(Vector x) {
  x = minimum(maximum(x, broadcast(-87.0f)), broadcast(88.0f));
  const Vector magic = broadcast(12582912.0f);  // adding it rounds to an integer
  Vector n = x * 1.44269504f + magic;
  Ints power = (Ints)n << 23;
  n -= magic;
  Vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vector p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (Vector)((Ints)p + power);
}

TORCHCRAM_INLINE Vector absolute(Vector x) { return (Vector)((Ints)x & (Ints{} + 0x7fffffff)); }

// x * P(normal <= x). P - 1/2 is x times a polynomial of x^2 on [0, 25], with an absolute error of
// 2.5e-7.
TORCHCRAM_INLINE Vector gelu(Vector x) {
  const Vector clamped = minimum(maximum(x, broadcast(-5.0f)), broadcast(5.0f));
  const Vector s = clamped * clamped * 0.08f - 1.0f;
  Vector p = broadcast(6.087282090e-04f);
  p = p * s - 1.613265486e-03f;
  p = p * s + 1.722796937e-03f;
  p = p * s - 2.685574116e-03f;
  p = p * s + 6.410513073e-03f;
  p = p * s - 1.116434019e-02f;
  p = p * s + 1.640217379e-02f;
  p = p * s - 2.326865308e-02f;
  p = p * s + 3.144217283e-02f;
  p = p * s - 4.044260830e-02f;
  p = p * s + 5.152052268e-02f;
  p = p * s - 7.029628009e-02f;
  p = p * s + 1.413637847e-01f;
  return x <= -5.0f ? Vector{} : x * (clamped * p + 0.5f);
}

TORCHCRAM_INLINE Vector logistic(Vector x) { return 1.0f / (exponential(-x) + 1.0f); }

// Far below zero the logistic function underflows, and x may be infinite.
TORCHCRAM_INLINE Vector silu(Vector x) { return x < -87.0f ? Vector{} : x * logistic(x); }

TORCHCRAM_INLINE Vector gelu_tanh(Vector x) {
  const Vector clamped = maximum(x, broadcast(-9.0f));  // denormal numbers below it are slow
  const Vector y = x * logistic(clamped * (clamped * clamped * 0.044715f + 1.0f) * 1.595769122f);
  return x < -9.0f ? Vector{} : y;
}

// Swaps the off-diagonal squares of side S, 2 S, 4 S, ... of a kLanes x kLanes matrix.
template <int S>
struct TransposeStep {
  static TORCHCRAM_INLINE void run(Vector (&m)[kLanes]) {
    Ints first, second;
    for (int lane = 0; lane < kLanes; ++lane) {
      first[lane] = lane & S ? kLanes + (lane ^ S) : lane;
      second[lane] = lane & S ? kLanes + lane : lane ^ S;
    }
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row) {
      if (row & S) continue;
      Vector a = m[row], b = m[row + S];
#if defined(__clang__)
      for (int lane = 0; lane < kLanes; ++lane) {
        m[row][lane] = lane & S ? b[lane ^ S] : a[lane];
        m[row + S][lane] = lane & S ? b[lane] : a[lane ^ S];
      }
#else
      m[row] = __builtin_shuffle(a, b, first);
      m[row + S] = __builtin_shuffle(a, b, second);
#endif
    }
    TransposeStep<S * 2>::run(m);
  }
};
template <>
struct TransposeStep<kLanes> {
  static TORCHCRAM_INLINE void run(Vector (&)[kLanes]) {}
};

TORCHCRAM_INLINE void transpose(Vector (&m)[kLanes]) { TransposeStep<1>::run(m); }

}  // namespace
