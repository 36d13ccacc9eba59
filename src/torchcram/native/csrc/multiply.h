// Products of a packed matrix and a panel of tokens.
#pragma once

#include "packed.h"
#include "vectors.h"

namespace torchcram {
namespace {

constexpr int kPatternVectors = kLanes == 16 ? 4 : 2;  // 4 rows of them fit the registers
constexpr int kPairVectors = 4;

struct Stream {
  const uint16_t* column;
  const float* value;
};

// The columns that the rows in the bits of P use, then those of P - 1, ... 1.
template <int V, int P>
struct Pattern {
  static TORCHCRAM_INLINE void run(const char* panel, const uint16_t* counts, Stream& s,
                                   Vector (&sum)[4][V]) {
    for (int left = counts[P - 1]; left > 0; --left) {
      const Vector* from = reinterpret_cast<const Vector*>(panel + *s.column++);
      Vector x[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) x[v] = from[v];
      const float* w = s.value;
#pragma GCC unroll 4
      for (int row = 0; row < 4; ++row) {
        if (!(P >> row & 1)) continue;
        const float weight = *w++;
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[row][v] += x[v] * weight;
      }
      s.value += __builtin_popcount(P);
    }
    Pattern<V, P - 1>::run(panel, counts, s, sum);
  }
};
template <int V>
struct Pattern<V, 0> {
  static TORCHCRAM_INLINE void run(const char*, const uint16_t*, Stream&, Vector (&)[4][V]) {}
};

// What a row starts from: its bias in the first block (no bias: null), what there is in the others.
template <int V>
TORCHCRAM_INLINE void begin(Vector (&sum)[V], const Vector* at, const float* bias, int64_t row,
                            bool first) {
  const Vector start = first && bias ? all(bias[row]) : Vector{};
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) sum[v] = first ? start : at[v];
}

template <int V, bool First>
void run_patterns(const char* panel, Stream s, float* sums, int64_t rows, const float* bias) {
  for (int64_t row = 0; row < rows; row += 4) {
    Vector sum[4][V];
    Vector* at[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      at[r] = reinterpret_cast<Vector*>(sums + (row + r) * kPanel);
      begin(sum[r], at[r], row + r < rows ? bias : nullptr, row + r, First);
    }
    const uint16_t* counts = s.column;
    s.column += 15;
    Pattern<V, 15>::run(panel, counts, s, sum);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) at[r][v] = sum[r][v];
    }
  }
}

template <int V, bool First>
void run_pairs(const char* panel, Stream s, float* sums, int64_t rows, const float* bias) {
  for (int64_t row = 0; row < rows; row += 2) {
    int count = s.column[0];
    const int64_t i = s.column[1], j = s.column[2];
    Vector* a = reinterpret_cast<Vector*>(sums + i * kPanel);
    Vector* b = reinterpret_cast<Vector*>(sums + j * kPanel);
    s.column += 3;
    Vector sum[2][V];
    begin(sum[0], a, i < rows ? bias : nullptr, i, First);
    begin(sum[1], b, j < rows ? bias : nullptr, j, First);
    for (; count > 1; count -= 2, s.column += 4, s.value += 4) {
      uint64_t four;  // columns by one load: it is loads that limit the speed
      memcpy(&four, s.column, sizeof four);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i, four >>= 32) {
        const Vector* x = reinterpret_cast<const Vector*>(panel + uint16_t(four));
        const Vector* y = reinterpret_cast<const Vector*>(panel + uint16_t(four >> 16));
        const float p = s.value[2 * i], q = s.value[2 * i + 1];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[0][v] += x[v] * p;
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[1][v] += y[v] * q;
      }
    }
    for (; count > 0; --count, s.column += 2, s.value += 2) {
      const Vector* x = reinterpret_cast<const Vector*>(panel + s.column[0]);
      const Vector* y = reinterpret_cast<const Vector*>(panel + s.column[1]);
      const float p = s.value[0], q = s.value[1];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[0][v] += x[v] * p;
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[1][v] += y[v] * q;
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) a[v] = sum[0][v], b[v] = sum[1][v];
  }
}

template <bool First>
void multiply(const Packed& packed, int64_t block, int64_t group, const char* panel, float* sums,
              int vectors, const float* bias) {
  const Start& start = packed.starts[block * packed.groups() + group];
  const Stream s{packed.columns + start.column, packed.values + start.value};
  const int64_t rows = packed.group_rows(group);
  const bool pairs = packed.header->form == kPairs;
  const int most = pairs ? kPairVectors : kPatternVectors;
  if (First && bias) bias += packed.first_row(group);
  for (int done = 0; done < vectors; done += most) {
    const char* x = panel + done * sizeof(Vector);
    float* y = sums + done * kLanes;
    switch ((vectors - done < most ? vectors - done : most) * 2 + pairs) {
      case 3: run_pairs<1, First>(x, s, y, rows, bias); break;
      case 5: run_pairs<2, First>(x, s, y, rows, bias); break;
      case 7: run_pairs<3, First>(x, s, y, rows, bias); break;
      case 9: run_pairs<4, First>(x, s, y, rows, bias); break;
      case 2: run_patterns<1, First>(x, s, y, rows, bias); break;
      case 4: run_patterns<2, First>(x, s, y, rows, bias); break;
#if TORCHCRAM_LANES == 16
      case 6: run_patterns<3, First>(x, s, y, rows, bias); break;
      case 8: run_patterns<4, First>(x, s, y, rows, bias); break;
#endif
    }
  }
}

// A part of the rows: groups from first to before last, and where their sums are: [row][64].
struct Rows {
  int64_t first, last;
  float* sums;
  const Packed& packed;
  Rows(const Packed& p, int64_t part, int64_t parts, int slot)
      : first(p.groups() * part / parts), last(p.groups() * (part + 1) / parts), packed(p) {
    // Rows that fill up the last pair, four or vector need room as well, and, where the sums are
    // the panel of another layer, whatever its columns may point to.
    const int64_t rows = packed.first_row(last) - packed.first_row(first) + 16;
    sums = scratch(slot, rows * kPanel + 65536 / 4);
  }
  float* of(int64_t group) const {
    return sums + (packed.first_row(group) - packed.first_row(first)) * kPanel;
  }
};

// sums += W[rows, block] panel, for the first `vectors` vectors of the panel; the first block
// starts from the bias.
void multiply(const Rows& rows, int64_t block, const float* panel, int vectors, const float* bias) {
  const char* x = reinterpret_cast<const char*>(panel);
  for (int64_t group = rows.first; group < rows.last; ++group) {
    if (block == 0)
      multiply<true>(rows.packed, block, group, x, rows.of(group), vectors, bias);
    else
      multiply<false>(rows.packed, block, group, x, rows.of(group), vectors, nullptr);
  }
}

template <class Function>
TORCHCRAM_INLINE void each(float* values, int64_t count, Function function) {
  for (int64_t i = 0; i < count; i += kLanes) store(values + i, function(load(values + i)));
}

// In place; `count` is a multiple of the lanes.
void activate(float* values, int64_t count, int activation) {
  switch (activation) {
    case kRelu: return each(values, count, relu);
    case kGelu: return each(values, count, gelu);
    case kGeluTanh: return each(values, count, gelu_tanh);
    case kSilu: return each(values, count, silu);
  }
}

}  // namespace
}  // namespace torchcram
