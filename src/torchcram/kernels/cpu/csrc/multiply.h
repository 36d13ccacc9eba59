// Products of a packed matrix and a panel of tokens.
#pragma once

#include "rows.h"

namespace torchcram {
namespace {

template <int V, bool First>
void run(bool pairs, const char* panel, Stream s, float* sums, int64_t rows, const float* bias) {
  if (pairs) return run_pairs<V, First>(panel, s, sums, rows, bias);
  if constexpr (V <= kFourVectors) run_fours<V, First>(panel, s, sums, rows, bias);
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
  const bool pairs = packed.header->form == kPairs;
  const int most = pairs ? kPairVectors : kFourVectors;
  if (First && bias) bias += packed.first_row(group);
  for (int done = 0; done < vectors; done += most) {
    const char* x = panel + done * sizeof(Vector);
    float* y = sums + done * kLanes;
    switch (vectors - done < most ? vectors - done : most) {
      case 1: run<1, First>(pairs, x, s, y, rows, bias); break;
      case 2: run<2, First>(pairs, x, s, y, rows, bias); break;
      case 3: run<3, First>(pairs, x, s, y, rows, bias); break;
      case 4: run<4, First>(pairs, x, s, y, rows, bias); break;
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
    // Behind the last rows there is room for whatever row a stream may name and, where the sums are
    // the panel of another layer, for whatever its columns may point to; a column is before them.
    static_assert(kSumsRows * kPanelBytes >= kPanelRoom + kPanelBytes, "");
    const int64_t rows = packed.first_row(last) - packed.first_row(first) + kSumsRows;
    sums = scratch(slot, (rows + 1) * kPanel) + kPanel;
  }
  float* of(int64_t group) const {
    return sums + (packed.first_row(group) - packed.first_row(first)) * kPanel;
  }
};

// sums += W[rows, block] panel, for the first `vectors` vectors of the panel, whose first column
// holds zeros; the first block starts from the bias.
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
