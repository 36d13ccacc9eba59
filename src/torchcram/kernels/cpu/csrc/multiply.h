// Products of a packed matrix and a panel of tokens, from the innermost loops up.
#pragma once

#include <type_traits>

#include "packed.h"
#include "vectors.h"

namespace torchcram {
namespace {

constexpr int kQuadVectors = kRegisters == 32 ? 4 : 2;  // sums of 4 rows fit the registers
constexpr int kPairVectors = kRegisters == 32 && kLanes < 16 ? 8 : 4;

// The streams of a block and a group of rows. Even if they were overwritten after the check, the
// kernels stay within memory: counts never lead beyond the values, rows are taken modulo those of
// the sums, and 16-bit columns always point into the room of a panel.
struct Stream {
  const uint16_t* column;
  const float* value;
  const float* end;
};

// Initial sums of a row: its bias (zero if null) in the first block, the earlier sums in the
// others.
template <int V>
TORCHCRAM_INLINE void init_sums(Vector (&sum)[V], const Vector* at, const float* bias, int64_t row,
                                bool first) {
  const Vector start = first && bias ? broadcast(bias[row]) : Vector{};
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) sum[v] = first ? start : at[v];
}

template <int V, bool First>
void run_pairs(const char* panel, Stream s, float* sums, int64_t rows, const float* bias) {
  for (int64_t row = 0; row < rows; row += 2) {
    int count = s.column[0];
    const int64_t i = s.column[1] % kSumsRows, j = s.column[2] % kSumsRows;
    if (2 * count > s.end - s.value) return;
    Vector* a = reinterpret_cast<Vector*>(sums + i * kPanel);
    Vector* b = reinterpret_cast<Vector*>(sums + j * kPanel);
    s.column += 3;
    Vector sum[2][V];
    init_sums(sum[0], a, i < rows ? bias : nullptr, i, First);
    init_sums(sum[1], b, j < rows ? bias : nullptr, j, First);
    for (; count > 1; count -= 2, s.column += 4, s.value += 4) {
      uint64_t four;  // columns in one load: loads limit the speed
      memcpy(&four, s.column, sizeof four);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i, four >>= 32) {
        const Anywhere* x = reinterpret_cast<const Anywhere*>(panel + uint16_t(four));
        const Anywhere* y = reinterpret_cast<const Anywhere*>(panel + uint16_t(four >> 16));
        const float p = s.value[2 * i], q = s.value[2 * i + 1];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sum[0][v] += x[v] * p;
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sum[1][v] += y[v] * q;
      }
    }
    for (; count > 0; --count, s.column += 2, s.value += 2) {
      const Anywhere* x = reinterpret_cast<const Anywhere*>(panel + s.column[0]);
      const Anywhere* y = reinterpret_cast<const Anywhere*>(panel + s.column[1]);
      const float p = s.value[0], q = s.value[1];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[0][v] += x[v] * p;
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[1][v] += y[v] * q;
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) a[v] = sum[0][v], b[v] = sum[1][v];
  }
}

// Adds one column to the sums of two rows.
template <int A, int B, int V>
TORCHCRAM_INLINE void add_both(const char* panel, uint64_t column, const float* value,
                               Vector (&sum)[4][V]) {
  const Anywhere* from = reinterpret_cast<const Anywhere*>(panel + uint16_t(column));
  const float p = value[0], q = value[1];
  Vector x[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) x[v] = from[v];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) sum[A][v] += x[v] * p;
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) sum[B][v] += x[v] * q;
}

// Adds to each of four rows its own column.
template <int V>
TORCHCRAM_INLINE void add_each(const char* panel, const uint16_t* columns, const float* value,
                               Vector (&sum)[4][V]) {
  uint64_t four;  // columns in one load: loads limit the speed
  memcpy(&four, columns, sizeof four);
#pragma GCC unroll 4
  for (int row = 0; row < 4; ++row, four >>= 16) {
    const Anywhere* from = reinterpret_cast<const Anywhere*>(panel + uint16_t(four));
    const float p = value[row];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[row][v] += from[v] * p;
  }
}

template <int V, bool First>
void run_quad_rows(const char* panel, Stream s, float* sums, int64_t rows, const float* bias) {
  for (int64_t row = 0; row < rows; row += 4) {
    int shared = s.column[0], rest = s.column[1];
    if (16 * shared + 4 * rest > s.end - s.value) return;
    Vector sum[4][V];
    Vector* at[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const int64_t i = s.column[2 + r] % kSumsRows;
      at[r] = reinterpret_cast<Vector*>(sums + i * kPanel);
      init_sums(sum[r], at[r], i < rows ? bias : nullptr, i, First);
    }
    s.column += 6;
    for (; shared > 0; --shared, s.column += 10, s.value += 16) {
      uint64_t four;
      uint32_t two;
      memcpy(&four, s.column, sizeof four);
      memcpy(&two, s.column + 4, sizeof two);
      add_both<0, 1>(panel, four, s.value, sum);
      add_both<2, 3>(panel, four >> 16, s.value + 2, sum);
      add_both<0, 2>(panel, four >> 32, s.value + 4, sum);
      add_both<1, 3>(panel, four >> 48, s.value + 6, sum);
      add_both<0, 3>(panel, two, s.value + 8, sum);
      add_both<1, 2>(panel, two >> 16, s.value + 10, sum);
      add_each(panel, s.column + 6, s.value + 12, sum);
    }
    for (; rest > 0; --rest, s.column += 4, s.value += 4) add_each(panel, s.column, s.value, sum);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) at[r][v] = sum[r][v];
    }
  }
}

// Calls a function with the number of vectors, from 1 to Most, as a constant of its type.
template <int Most, class Function>
TORCHCRAM_INLINE void with_constant(int vectors, Function function) {
  if constexpr (Most > 1) {
    if (vectors < Most) return with_constant<Most - 1>(vectors, function);
  }
  function(std::integral_constant<int, Most>());
}

TORCHCRAM_INLINE Stream stream(const Packed& packed, int64_t block, int64_t group) {
  const Start* at = packed.starts + block * packed.groups() + group;
  return {packed.columns + at->column, packed.values + at->value, packed.values + at[1].value};
}

template <bool First>
void multiply(const Packed& packed, int64_t block, int64_t group, const char* panel, float* sums,
              int vectors, const float* bias) {
  const Stream s = stream(packed, block, group);
  const int64_t rows = packed.group_rows(group);
  const bool pairs = packed.header->layout == kPairs;
  const int limit = pairs ? kPairVectors : kQuadVectors;
  if (First && bias) bias += packed.first_row(group);
  for (int done = 0; done < vectors; done += limit) {
    const char* x = panel + done * sizeof(Vector);
    float* y = sums + done * kLanes;
    with_constant<kPairVectors>(vectors - done < limit ? vectors - done : limit,
                                [&](auto constant) {
                                  constexpr int V = decltype(constant)::value;
                                  if (pairs) return run_pairs<V, First>(x, s, y, rows, bias);
                                  if constexpr (V <= kQuadVectors)
                                    run_quad_rows<V, First>(x, s, y, rows, bias);
                                });
  }
}

// Groups of rows from `first` up to, not including, `last`, and their sums: [row][64]. There may be
// sums of several panels.
struct RowRange {
  int64_t first, last;
  float* sums;
  const Packed& packed;
  RowRange(const Packed& p, int64_t part, int64_t parts, int slot, int64_t panels = 1)
      : first(p.groups() * part / parts), last(p.groups() * (part + 1) / parts), packed(p) {
    // There is room behind the last rows for any row that a stream may name and, if the sums are
    // the panel of another layer, for any column that its streams may name. One column comes first.
    static_assert(kSumsRows * kPanelBytes >= kPanelRoom + kPanelBytes, "");
    sums = scratch(slot, (panels * panel_rows() + kSumsRows + 1) * kPanel) + kPanel;
  }
  float* of(int64_t group, int64_t panel = 0) const {
    const int64_t row = packed.first_row(group) - packed.first_row(first);
    return sums + (panel * panel_rows() + row) * kPanel;
  }

 private:
  // Rows of a panel, including those that streams name in place of missing ones.
  int64_t panel_rows() const { return (last - first) * packed.header->group_rows; }
};

// sums += W[rows, block] panel for the first `vectors` vectors of the panel, whose first column
// holds zeros. The first product of a panel starts from the bias.
void multiply(const RowRange& rows, int64_t block, const float* panel, int vectors,
              const float* bias, bool first, int64_t sums = 0) {
  const char* x = reinterpret_cast<const char*>(panel);
  for (int64_t group = rows.first; group < rows.last; ++group) {
    float* y = rows.of(group, sums);
    if (first)
      multiply<true>(rows.packed, block, group, x, y, vectors, bias);
    else
      multiply<false>(rows.packed, block, group, x, y, vectors, nullptr);
  }
}

template <class Function>
TORCHCRAM_INLINE void each(float* values, int64_t count, Function function) {
  for (int64_t i = 0; i < count; i += kLanes) store(values + i, function(load(values + i)));
}

// Applies an activation in place; `count` is a multiple of the lanes.
void activate(float* values, int64_t count, int activation) {
  switch (activation) {
    case kRelu:
      return each(values, count, relu);
    case kGelu:
      return each(values, count, gelu);
    case kGeluTanh:
      return each(values, count, gelu_tanh);
    case kSilu:
      return each(values, count, silu);
  }
}

}  // namespace
}  // namespace torchcram
