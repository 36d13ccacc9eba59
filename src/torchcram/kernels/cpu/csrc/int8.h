// Linear layers in 8 bits: Y = activation(X W^T + bias) + residual.
//
// Four neighbouring weights of a row are one 32-bit value of the packed matrix; a value is stored
// if any of the four is not zero. Four activations of a token are one 32-bit lane of the panel.
// They are unsigned with zero point 128 for AVX-512 and signed for NEON, and each token has its own
// scale.
#pragma once

#if defined(TORCHCRAM_AVX512) || defined(TORCHCRAM_NEON)

#if defined(TORCHCRAM_AVX512)
#include <immintrin.h>
#else
#include "neon.h"
#endif

#include "linear.h"

namespace torchcram {
namespace {

typedef int32_t Words __attribute__((vector_size(4 * kLanes), aligned(1), may_alias));

#if defined(TORCHCRAM_AVX512)

constexpr int kZeroPoint = 128;  // activations are unsigned

// Adds the products of four neighbouring bytes of activations and weights to each lane.
TORCHCRAM_INLINE Ints add_products(Ints sum, Ints x, Ints weights) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)weights);
}

// Rounds scaled activations and adds the zero point; the lowest 8 bits of a lane count.
TORCHCRAM_INLINE Ints round_to_bytes(Vector x) {
  return (Ints)_mm512_cvtps_epi32((__m512)x) + kZeroPoint;
}

TORCHCRAM_INLINE int32_t highest(Ints x) { return _mm512_reduce_max_epi32((__m512i)x); }

TORCHCRAM_INLINE __mmask16 first_lanes(int64_t count) { return __mmask16((1u << count) - 1); }

// Loads the first `count` lanes, and zeros into the others.
TORCHCRAM_INLINE Vector load_part(const float* from, int64_t count) {
  return (Vector)_mm512_maskz_loadu_ps(first_lanes(count), from);
}

// Writes the lowest byte of each of the first `count` lanes.
TORCHCRAM_INLINE void store_bytes(uint8_t* to, Ints x, int64_t count) {
  _mm512_mask_cvtepi32_storeu_epi8(to, first_lanes(count), (__m512i)x);
}

#endif

TORCHCRAM_INLINE Ints broadcast_bits(float value) {
  int32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return Ints{} + bits;
}

template <int V, bool First>
void run_rows_int8(const char* panel, Stream s, int32_t* sums, int64_t rows, const int32_t* start) {
  for (int64_t row = 0; row < rows; row += 2) {
    int count = s.column[0];
    const int64_t i = s.column[1] % kSumsRows, j = s.column[2] % kSumsRows;
    if (2 * count > s.end - s.value) return;
    Words* a = reinterpret_cast<Words*>(sums + i * kPanel);
    Words* b = reinterpret_cast<Words*>(sums + j * kPanel);
    s.column += 3;
    const Ints p = Ints{} + (First && kZeroPoint && i < rows ? start[i] : 0);
    const Ints q = Ints{} + (First && kZeroPoint && j < rows ? start[j] : 0);
    Ints sum[2][V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      sum[0][v] = First ? p : a[v];
      sum[1][v] = First ? q : b[v];
    }
    for (; count > 0; --count, s.column += 2, s.value += 2) {
      const Words* x = reinterpret_cast<const Words*>(panel + s.column[0]);
      const Words* y = reinterpret_cast<const Words*>(panel + s.column[1]);
      const Ints w = broadcast_bits(s.value[0]), u = broadcast_bits(s.value[1]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[0][v] = add_products(sum[0][v], x[v], w);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[1][v] = add_products(sum[1][v], y[v], u);
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) a[v] = sum[0][v], b[v] = sum[1][v];
  }
}

template <bool First>
void multiply_int8(const RowRange& rows, int64_t block, const float* panel, int vectors,
                   const int32_t* start) {
  const char* x = reinterpret_cast<const char*>(panel);
  for (int64_t group = rows.first; group < rows.last; ++group) {
    const Stream s = stream(rows.packed, block, group);
    int32_t* y = reinterpret_cast<int32_t*>(rows.of(group));
    const int64_t count = rows.packed.group_rows(group);
    const int32_t* from = start + rows.packed.first_row(group);
    for (int done = 0; done < vectors; done += kPairVectors)
      with_constant<kPairVectors>(
          vectors - done < kPairVectors ? vectors - done : kPairVectors, [&](auto constant) {
            run_rows_int8<decltype(constant)::value, First>(x + done * sizeof(Vector), s,
                                                            y + done * kLanes, count, from);
          });
  }
}

// Magnitudes are compared as integers, which orders NaN above all numbers: it becomes the scale of
// its token, and thereby all outputs of that token.

// Quantizes tokens to bytes [token][inner], padded to a multiple of 4, and writes their scales.
void quantize_tokens(const float* x, int64_t inner, int64_t tokens, uint8_t* bytes, float* scales) {
  const int64_t wide = (inner + 3) / 4 * 4;
  for (int64_t t = 0; t < tokens; ++t, x += inner, bytes += wide) {
    Ints most{};
    int64_t k = 0;
    for (; k + kLanes <= inner; k += kLanes) most = maximum(most, (Ints)absolute(load(x + k)));
    most = maximum(most, (Ints)absolute(load_part(x + k, inner - k)));
    const int32_t bits = highest(most);
    float top;
    memcpy(&top, &bits, sizeof top);
    scales[t] = top / 127.0f;
    const Vector factor = broadcast(top > 0.0f ? 127.0f / top : 0.0f);
    for (k = 0; k < inner; k += kLanes) {
      const int64_t here = inner - k < kLanes ? inner - k : kLanes;
      store_bytes(bytes + k, round_to_bytes(load_part(x + k, here) * factor), here);
    }
    for (k = inner; k < wide; ++k) bytes[k] = kZeroPoint;
  }
}

// Converts integer sums to floats: sum * row scale * token scale + bias.
void scale_sums(const RowRange& rows, const float* scales, const float* tokens, const float* bias) {
  for (int64_t group = rows.first; group < rows.last; ++group)
    for (int64_t r = 0; r < rows.packed.group_rows(group); ++r) {
      float* at = rows.of(group) + r * kPanel;
      const int64_t row = rows.packed.first_row(group) + r;
      const Vector scale = broadcast(scales[row]), start = broadcast(bias ? bias[row] : 0.0f);
      for (int i = 0; i < kPanel; i += kLanes) {
        const Ints integers = *reinterpret_cast<const Words*>(at + i);
        const Vector sum = __builtin_convertvector(integers, Vector);
        store(at + i, sum * (scale * load(tokens + i)) + start);
      }
    }
}

// Quantizes [row][token] to the panel of the next layer and writes the scales of the tokens.
void quantize_rows(const float* sums, int64_t rows, float* panel, float* scales) {
  for (int i = 0; i < kPanel; i += kLanes) {
    Ints bits{};
    for (int64_t row = 0; row < rows; ++row)
      bits = maximum(bits, (Ints)absolute(load(sums + row * kPanel + i)));
    const Vector most = (Vector)bits;
    store(scales + i, most / 127.0f);
    const Vector factor = most > 0.0f ? 127.0f / most : Vector{};
    for (int64_t row = 0; row < rows; row += 4) {
      Ints word{};
      for (int j = 3; j >= 0; --j) {
        const Vector x = row + j < rows ? load(sums + (row + j) * kPanel + i) * factor : Vector{};
        word = word << 8 | round_to_bytes(x);
      }
      *reinterpret_cast<Words*>(panel + row / 4 * kPanel + i) = word;
    }
  }
}

void multiply_int8(const RowRange& rows, int64_t block, const float* panel, int vectors,
                   const int32_t* start) {
  (block ? multiply_int8<false> : multiply_int8<true>)(rows, block, panel, vectors, start);
}

void linear_int8(const void* data, int64_t task) {
  const Job& job = *static_cast<const Job*>(data);
  const Packed& packed = *job.packed;
  const int64_t first = task / job.splits * kPanel, words = packed.header->inner;
  const int64_t tokens = job.tokens - first < kPanel ? job.tokens - first : kPanel;
  const int vectors = (tokens + kLanes - 1) / kLanes;
  const RowRange rows(packed, task % job.splits, job.splits, 0);
  float* bytes = scratch(2, kPanel * words);
  float* scales = scratch(3, kPanel);
  memset(scales, 0, kPanel * sizeof(float));
  quantize_tokens(job.input + first * job.inner, job.inner, tokens,
                  reinterpret_cast<uint8_t*>(bytes), scales);
  float* panel = scratch(1, kPanelFloats);
  clear_column(panel);
  for (int64_t block = 0; block < packed.blocks(); ++block) {
    const int64_t k = packed.inner_starts[block];
    load_tokens(bytes + k, words, tokens, packed.inner_starts[block + 1] - k, panel + kPanel);
    multiply_int8(rows, block, panel, vectors, job.start);
  }
  scale_sums(rows, job.scales, scales, job.bias);
  if (job.then == nullptr) return store_rows(job, rows, first, tokens, job.activation);
  const int64_t middle = packed.header->rows;
  activate(rows.sums, middle * kPanel, job.activation);
  // The column before a later panel need not be zero: an integer times a zero weight adds nothing.
  float* next_panel = scratch(2, ((middle + 3) / 4 + 1) * kPanel + kPanelFloats) + kPanel;
  clear_column(next_panel - kPanel);
  quantize_rows(rows.sums, middle, next_panel, scales);
  const RowRange next(*job.then, 0, 1, 4);
  for (int64_t block = 0; block < job.then->blocks(); ++block)
    multiply_int8(next, block, next_panel + (job.then->inner_starts[block] - 1) * kPanel, vectors,
                  job.then_start);
  scale_sums(next, job.then_scales, scales, job.then_bias);
  store_rows(job, next, first, tokens, kNone);
}

}  // namespace
}  // namespace torchcram

#endif
