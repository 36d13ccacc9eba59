// softmax(Q K^T scale) V for tokens that lie as [token][head][feature].
//
// Six queries at a time meet a few vectors of keys, and then of values: sums stay in registers. A
// block of 12 queries shares each panel of 64 keys while it is in L1.
#pragma once

#include "linear.h"

namespace torchcram {
namespace {

constexpr int kQueries = 6, kBlock = 12;
constexpr int kTogether = kLanes == 16 ? 4 : 2;  // vectors; six queries of them fit the registers

// sums[query][v] += factor[query][step i] * from[i * 64 + v], over so many steps
template <int V>
TORCHCRAM_INLINE void accumulate(const float* const (&factors)[kQueries], const float* from,
                                 int64_t stride, int64_t steps, Vector (&sums)[kQueries][V]) {
  for (int64_t i = 0; i < steps; ++i, from += stride) {
    Vector x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) x[v] = load(from + v * kLanes);
#pragma GCC unroll 6
    for (int q = 0; q < kQueries; ++q) {
      const float factor = factors[q][i];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[q][v] += x[v] * factor;
    }
  }
}

// to[query][v] (+)= the sums of six queries.
template <int V>
void six(const float* const (&factors)[kQueries], const float* from, int64_t stride, int64_t steps,
         float* to, int64_t row, bool first) {
  Vector sums[kQueries][V];
#pragma GCC unroll 6
  for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[q][v] = first ? Vector{} : load(to + q * row + v * kLanes);
  }
  accumulate(factors, from, stride, steps, sums);
#pragma GCC unroll 6
  for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(to + q * row + v * kLanes, sums[q][v]);
  }
}

// The same for any number of vectors.
void six(const float* const (&factors)[kQueries], const float* from, int64_t stride, int64_t steps,
         float* to, int64_t row, bool first, int64_t vectors) {
  for (; vectors >= kTogether; vectors -= kTogether, from += kTogether * kLanes,
                               to += kTogether * kLanes)
    six<kTogether>(factors, from, stride, steps, to, row, first);
  for (; vectors > 0; --vectors, from += kLanes, to += kLanes)
    six<1>(factors, from, stride, steps, to, row, first);
}

// 2^x to 2e-7, x at most 0; zero below 2^-126.
TORCHCRAM_INLINE Vector power_of_two(Vector x) {
  const Vector magic = all(12582912.0f + 127.0f);  // rounds to an integer, plus the bias of floats
  const Vector n = x + magic;
  const Vector r = x - (n - magic);
  Vector p = all(1.327647152e-3f);
  p = p * r + 9.675541331e-3f;
  p = p * r + 5.550713275e-2f;
  p = p * r + 2.402211972e-1f;
  p = p * r + 6.931469671e-1f;
  p = p * r + 1.000000072f;
  p *= (Vector)((Ints)n << 23);  // a product, which leaves NaN as it is
  return x < -126.0f ? Vector{} : p;
}

// One number out of all lanes, by halves.
template <class Function>
TORCHCRAM_INLINE float fold(Vector v, Function function) {
  float lanes[kLanes];
  store(lanes, v);
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) lanes[i] = function(lanes[i], lanes[i + half]);
  return lanes[0];
}

// Turns scores into weights up to a factor, which is returned; there is room for whole vectors.
float weigh(float* scores, int64_t keys, float scale) {
  for (int64_t i = keys; i % kLanes; ++i) scores[i] = -3e38f;
  Vector most = all(-3e38f);
  for (int64_t i = 0; i < keys; i += kLanes) most = largest(most, load(scores + i));
  const float top = fold(most, [](float a, float b) { return a > b ? a : b; });
  scale *= 1.44269504f;  // powers of two, not of e
  const Vector shift = all(top * scale);
  Vector sum{};
  for (int64_t i = 0; i < keys; i += kLanes) {
    const Vector x = power_of_two(load(scores + i) * scale - shift);
    store(scores + i, x);
    sum += x;
  }
  return 1.0f / fold(sum, [](float a, float b) { return a + b; });
}

void attention(const void* what, int64_t task) {
  const Attention& job = *static_cast<const Attention*>(what);
  const int64_t wide = job.features, stride = job.heads * wide, tokens = job.tokens;
  const int64_t part = task % job.splits, one = task / job.splits;
  const int64_t at = one / job.heads * tokens * stride + one % job.heads * wide;
  const int64_t panels = (tokens + kPanel - 1) / kPanel, row = panels * kPanel;
  float* keys = scratch(0, panels * kPanel * wide);  // [64 keys][feature][64]
  float* values = scratch(1, tokens * wide);
  float* scores = scratch(2, kBlock * row);
  float* query = scratch(3, 2 * kBlock * wide);
  float* sums = query + kBlock * wide;
  for (int64_t first = 0; first < tokens; first += kPanel)
    take_tokens(job.key + at + first * stride, stride,
                tokens - first < kPanel ? tokens - first : kPanel, wide, keys + first * wide);
  for (int64_t t = 0; t < tokens; ++t)
    memcpy(values + t * wide, job.value + at + t * stride, wide * sizeof(float));
  const int64_t until = tokens * (part + 1) / job.splits;
  for (int64_t first = tokens * part / job.splits; first < until; first += kBlock) {
    const int64_t queries = until - first < kBlock ? until - first : kBlock;
    const float* factors[kQueries];
    for (int64_t q = 0; q < queries; ++q)
      memcpy(query + q * wide, job.query + at + (first + q) * stride, wide * sizeof(float));
    for (int64_t key = 0; key < tokens; key += kPanel) {
      const int64_t left = tokens - key < kPanel ? tokens - key : kPanel;
      for (int64_t q = 0; q < queries; q += kQueries) {
        for (int i = 0; i < kQueries; ++i) factors[i] = query + (q + i) * wide;
        six(factors, keys + key * wide, kPanel, wide, scores + q * row + key, row, true,
            (left + kLanes - 1) / kLanes);
      }
    }
    float over[kBlock];
    for (int64_t q = 0; q < queries; ++q) over[q] = weigh(scores + q * row, tokens, job.scale);
    for (int64_t key = 0; key < tokens; key += kPanel) {
      const int64_t left = tokens - key < kPanel ? tokens - key : kPanel;
      for (int64_t q = 0; q < queries; q += kQueries) {
        for (int i = 0; i < kQueries; ++i) factors[i] = scores + (q + i) * row + key;
        six(factors, values + key * wide, wide, left, sums + q * wide, wide, key == 0,
            wide / kLanes);
      }
    }
    for (int64_t q = 0; q < queries; ++q)
      for (int64_t i = 0; i < wide; i += kLanes)
        store(job.output + at + (first + q) * stride + i, load(sums + q * wide + i) * over[q]);
  }
}

}  // namespace
}  // namespace torchcram
