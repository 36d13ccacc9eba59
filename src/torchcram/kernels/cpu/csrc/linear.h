// Linear layers: Y = activation(X W^T + bias) + residual for tensors laid out as [token][feature].
#pragma once

#include "multiply.h"

namespace torchcram {
namespace {

// panel[k][token] = x[token][k] for kLanes values of k; zeros for missing tokens.
template <bool Full>
TORCHCRAM_INLINE void load_square(const float* x, int64_t stride, int64_t tokens, float* panel) {
  Vector m[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) m[i] = Full || i < tokens ? load(x + i * stride) : Vector{};
  transpose(m);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(panel + i * kPanel, m[i]);
}

void load_tokens(const float* x, int64_t stride, int64_t tokens, int64_t inner, float* panel) {
  const int64_t squares = inner / kLanes * kLanes;
  int64_t t = 0;
  for (; t + kLanes <= tokens; t += kLanes)
    for (int64_t k = 0; k < squares; k += kLanes)
      load_square<true>(x + t * stride + k, stride, kLanes, panel + k * kPanel + t);
  for (int64_t k = 0; t < tokens && k < squares; k += kLanes)
    load_square<false>(x + t * stride + k, stride, tokens - t, panel + k * kPanel + t);
  for (int64_t k = squares; k < inner; ++k)
    for (t = 0; t < (tokens + kLanes - 1) / kLanes * kLanes; ++t)
      panel[k * kPanel + t] = t < tokens ? x[t * stride + k] : 0.0f;
}

// y[token][row] = sums[row][token] + residual[token][row] for at most kLanes rows and tokens.
TORCHCRAM_INLINE void store_square(const float* sums, int64_t rows, int64_t tokens,
                                   const float* residual, float* y, int64_t stride) {
  Vector m[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) m[i] = load(sums + i * kPanel);
  transpose(m);
  if (rows >= kLanes && tokens >= kLanes) {
    if (residual) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) m[i] += load(residual + i * stride);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(y + i * stride, m[i]);
    return;
  }
  for (int64_t i = 0; i < tokens && i < kLanes; ++i)
    for (int64_t j = 0; j < rows && j < kLanes; ++j)
      y[i * stride + j] = m[i][j] + (residual ? residual[i * stride + j] : 0.0f);
}

// y[token][row] = activation(sums[row][token]) + residual[token][row]; the sums are overwritten.
void store_tokens(float* sums, int64_t rows, int64_t tokens, int activation, const float* residual,
                  float* y, int64_t stride) {
  activate(sums, (rows + kLanes - 1) / kLanes * kLanes * kPanel, activation);
  // Few tokens at a time: each may lie in its own memory page, and touching many pages is slow.
  for (int64_t t = 0; t < tokens; t += kLanes)
    for (int64_t row = 0; row < rows; row += kLanes) {
      const int64_t at = t * stride + row;
      store_square(sums + row * kPanel + t, rows - row, tokens - t,
                   residual ? residual + at : nullptr, y + at, stride);
    }
}

// Computes the sums of the rows for `tokens` tokens from `first` on.
void multiply_tokens(const Job& job, const RowRange& rows, int64_t first, int64_t tokens) {
  const Packed& packed = rows.packed;
  const int64_t inner = packed.header->inner;
  const int vectors = (tokens + kLanes - 1) / kLanes;
  float* panel = scratch(1, kPanelFloats);
  clear_column(panel);
  for (int64_t block = 0; block < packed.blocks(); ++block) {
    const int64_t k = packed.inner_starts[block];
    load_tokens(job.input + first * inner + k, inner, tokens, packed.inner_starts[block + 1] - k,
                panel + kPanel);
    multiply(rows, block, panel, vectors, job.bias, block == 0);
  }
}

void store_rows(const Job& job, const RowRange& rows, int64_t first, int64_t tokens,
                int activation) {
  const int64_t all_rows = rows.packed.header->rows;
  for (int64_t group = rows.first; group < rows.last; ++group) {
    const int64_t at = first * all_rows + rows.packed.first_row(group);
    store_tokens(rows.of(group), rows.packed.group_rows(group), tokens, activation,
                 job.residual ? job.residual + at : nullptr, job.output + at, all_rows);
  }
}

void linear(const void* data, int64_t task) {
  const Job& job = *static_cast<const Job*>(data);
  const int64_t first = task / job.splits * kPanel;
  const int64_t tokens = job.tokens - first < kPanel ? job.tokens - first : kPanel;
  const RowRange rows(*job.packed, task % job.splits, job.splits, 0);
  multiply_tokens(job, rows, first, tokens);
  if (job.then == nullptr) return store_rows(job, rows, first, tokens, job.activation);
  // The sums of the first layer are the panels of the second. The column before a panel belongs to
  // the previous panel, which is no longer needed, and becomes the column of zeros.
  activate(rows.sums, job.packed->header->rows * kPanel, job.activation);
  const RowRange next(*job.then, 0, 1, 2);
  for (int64_t block = 0; block < job.then->blocks(); ++block) {
    float* panel = rows.sums + (job.then->inner_starts[block] - 1) * kPanel;
    clear_column(panel);
    multiply(next, block, panel, (tokens + kLanes - 1) / kLanes, job.then_bias, block == 0);
  }
  store_rows(job, next, first, tokens, kNone);
}

}  // namespace
}  // namespace torchcram
