// Attention: softmax(Q K^T scale) V for tensors laid out as [token][head][feature].
//
// The inner loop multiplies six queries by a few vectors of keys, and later of values, so that the
// sums stay in registers. A block of 12 queries shares each panel of 64 keys while it is in L1.
#pragma once

#include "linear.h"

namespace torchcram {
namespace {

constexpr int kQueries = 6, kBlock = 12;
constexpr int kTileVectors = kRegisters == 32 ? 4 : 2;  // sums of six queries fit the registers

// sums[query][v] += sum over steps i of factors[query][i] * from[i * stride + v].
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

// to[query][v] = the sums of six queries; added to what is there unless `first`.
template <int V>
void attend_6_queries(const float* const (&factors)[kQueries], const float* from, int64_t stride,
                      int64_t steps, float* to, int64_t row, bool first) {
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
void attend_6_queries(const float* const (&factors)[kQueries], const float* from, int64_t stride,
                      int64_t steps, float* to, int64_t row, bool first, int64_t vectors) {
  for (; vectors >= kTileVectors;
       vectors -= kTileVectors, from += kTileVectors * kLanes, to += kTileVectors * kLanes)
    attend_6_queries<kTileVectors>(factors, from, stride, steps, to, row, first);
  for (; vectors > 0; --vectors, from += kLanes, to += kLanes)
    attend_6_queries<1>(factors, from, stride, steps, to, row, first);
}

// 2^x for x <= 0 with a relative error of 2e-7; zero below 2^-126.
TORCHCRAM_INLINE Vector power_of_two(Vector x) {
  const Vector magic =
      broadcast(12582912.0f + 127.0f);  // rounds to an integer and adds the exponent bias
  const Vector n = x + magic;
  const Vector r = x - (n - magic);
  Vector p = broadcast(1.327647152e-3f);
  p = p * r + 9.675541331e-3f;
  p = p * r + 5.550713275e-2f;
  p = p * r + 2.402211972e-1f;
  p = p * r + 6.931469671e-1f;
  p = p * r + 1.000000072f;
  p *= (Vector)((Ints)n << 23);  // a product, so that NaN stays NaN
  return x < -126.0f ? Vector{} : p;
}

// Reduces all lanes to a single number by halving.
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

// Replaces scores by exp(scale * (score - maximum)) and returns the inverse of their sum. The row
// is padded to a whole number of vectors. Writes the maximum of scale * score / log 2.
float softmax_in_place(float* scores, int64_t keys, float scale, float* top = nullptr) {
  for (int64_t i = keys; i % kLanes; ++i) scores[i] = -3e38f;
  Vector highest = broadcast(-3e38f);
  for (int64_t i = 0; i < keys; i += kLanes) highest = maximum(highest, load(scores + i));
  const float highest_score = fold(highest, [](float a, float b) { return a > b ? a : b; });
  scale *= 1.44269504f;  // exp(x) = 2^(x / log 2)
  const Vector shift = broadcast(highest_score * scale);
  if (top) *top = highest_score * scale;
  Vector sum{};
  for (int64_t i = 0; i < keys; i += kLanes) {
    const Vector x = power_of_two(load(scores + i) * scale - shift);
    store(scores + i, x);
    sum += x;
  }
  return 1.0f / fold(sum, [](float a, float b) { return a + b; });
}

void attention(const void* data, int64_t task) {
  const Attention& job = *static_cast<const Attention*>(data);
  const int64_t features = job.features, stride = job.heads * features, tokens = job.tokens;
  const int64_t split = task % job.splits, sequence_head = task / job.splits;
  const int64_t at =
      sequence_head / job.heads * tokens * stride + sequence_head % job.heads * features;
  const int64_t panels = (tokens + kPanel - 1) / kPanel, row = panels * kPanel;
  float* keys = scratch(0, panels * kPanel * features);  // [64 keys][feature][64]
  float* values = scratch(1, tokens * features);
  float* scores = scratch(2, kBlock * row);
  float* query = scratch(3, 2 * kBlock * features);
  float* sums = query + kBlock * features;
  for (int64_t first = 0; first < tokens; first += kPanel)
    load_tokens(job.key + at + first * stride, stride,
                tokens - first < kPanel ? tokens - first : kPanel, features,
                keys + first * features);
  for (int64_t t = 0; t < tokens; ++t)
    memcpy(values + t * features, job.value + at + t * stride, features * sizeof(float));
  const int64_t end = tokens * (split + 1) / job.splits;
  for (int64_t first = tokens * split / job.splits; first < end; first += kBlock) {
    const int64_t queries = end - first < kBlock ? end - first : kBlock;
    const float* factors[kQueries];
    for (int64_t q = 0; q < queries; ++q)
      memcpy(query + q * features, job.query + at + (first + q) * stride, features * sizeof(float));
    for (int64_t key = 0; key < tokens; key += kPanel) {
      const int64_t left = tokens - key < kPanel ? tokens - key : kPanel;
      for (int64_t q = 0; q < queries; q += kQueries) {
        for (int i = 0; i < kQueries; ++i) factors[i] = query + (q + i) * features;
        attend_6_queries(factors, keys + key * features, kPanel, features, scores + q * row + key,
                         row, true, (left + kLanes - 1) / kLanes);
      }
    }
    float inverse_sums[kBlock];
    for (int64_t q = 0; q < queries; ++q)
      inverse_sums[q] = softmax_in_place(scores + q * row, tokens, job.scale);
    for (int64_t key = 0; key < tokens; key += kPanel) {
      const int64_t left = tokens - key < kPanel ? tokens - key : kPanel;
      for (int64_t q = 0; q < queries; q += kQueries) {
        for (int i = 0; i < kQueries; ++i) factors[i] = scores + (q + i) * row + key;
        attend_6_queries(factors, values + key * features, features, left, sums + q * features,
                         features, key == 0, features / kLanes);
      }
    }
    for (int64_t q = 0; q < queries; ++q)
      for (int64_t i = 0; i < features; i += kLanes)
        store(job.output + at + (first + q) * stride + i,
              load(sums + q * features + i) * inverse_sums[q]);
  }
}

}  // namespace
}  // namespace torchcram
