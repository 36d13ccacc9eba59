// Vectors of floats as wide as this file is compiled for, and what is done to them alone.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(TORCHCRAM_AVX512)
#define TORCHCRAM_LANES 16
#elif defined(TORCHCRAM_AVX2)
#define TORCHCRAM_LANES 8
#else
#define TORCHCRAM_LANES 4
#endif
#define TORCHCRAM_INLINE inline __attribute__((always_inline))

namespace {

constexpr int kLanes = TORCHCRAM_LANES;
typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef float Unaligned __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

TORCHCRAM_INLINE Vector load(const float* from) {
  return *reinterpret_cast<const Unaligned*>(from);
}
TORCHCRAM_INLINE void store(float* to, Vector v) { *reinterpret_cast<Unaligned*>(to) = v; }
TORCHCRAM_INLINE Vector all(float value) { return Vector{} + value; }
TORCHCRAM_INLINE Vector largest(Vector a, Vector b) { return a > b ? a : b; }
TORCHCRAM_INLINE Vector smallest(Vector a, Vector b) { return a < b ? a : b; }

// e^x by 2^n * e^r, |r| <= log(2) / 2; relative error below 2e-7, x at least -87.
TORCHCRAM_INLINE Vector exponential(Vector x) {
  x = smallest(largest(x, all(-87.0f)), all(88.0f));
  const Vector magic = all(12582912.0f);  // adding it rounds to an integer
  Vector n = x * 1.44269504f + magic;
  Ints power = (Ints)n << 23;
  n -= magic;
  Vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vector p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (Vector)((Ints)p + power);
}

TORCHCRAM_INLINE Vector magnitude(Vector x) { return (Vector)((Ints)x & (Ints{} + 0x7fffffff)); }

// x * P(normal <= x): Abramowitz and Stegun 7.1.26, absolute error of the error function 1.5e-7.
TORCHCRAM_INLINE Vector gelu(Vector x) {
  Vector z = magnitude(x) * 0.70710678f;
  Vector t = 1.0f / (z * 0.3275911f + 1.0f);
  Vector p = all(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  Vector tail = p * t * exponential(-z * z) * 0.5f;  // P(normal > |x|)
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

TORCHCRAM_INLINE Vector logistic(Vector x) { return 1.0f / (exponential(-x) + 1.0f); }

TORCHCRAM_INLINE Vector gelu_tanh(Vector x) {
  return x * logistic(x * (x * x * 0.044715f + 1.0f) * 1.595769122f);
}

// Exchanges the off-diagonal squares of side S of a matrix of kLanes x kLanes, for S = 1, 2, 4, ...
template <int S>
struct Exchange {
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
    Exchange<S * 2>::run(m);
  }
};
template <>
struct Exchange<kLanes> {
  static TORCHCRAM_INLINE void run(Vector (&)[kLanes]) {}
};

TORCHCRAM_INLINE void transpose(Vector (&m)[kLanes]) { Exchange<1>::run(m); }

}  // namespace
