// Max pooling of images whose columns are the innermost dimension.
#pragma once

#include "packed.h"
#include "vectors.h"

namespace torchcram {
namespace {

// The larger value; a NaN wins, as in torch.
TORCHCRAM_INLINE Vector larger(Vector most, Vector v) {
  return ((v > most) | (v != v)) ? v : most;
}
TORCHCRAM_INLINE float larger(float most, float v) { return v > most || v != v ? v : most; }

// A task is a plane: a channel of an image. First come the maxima of the rows of the windows, then
// those of neighbouring columns, both as if the columns had a stride of one; then some are skipped.
void max_pool(const void* data, int64_t plane) {
  const MaxPool& p = *static_cast<const MaxPool*>(data);
  const float* x = p.x + plane * p.height * p.width;
  float* y = p.y + plane * p.out_h * p.out_w;
  const int64_t padded = p.width + 2 * p.pad_w + 2 * kLanes, used = (p.out_w - 1) * p.stride_w + 1;
  float *rows = scratch(1, 2 * padded), *windows = rows + padded;
  for (int64_t i = 0; i < padded; ++i) rows[i] = -__builtin_inff();
  float* columns = rows + p.pad_w;
  for (int64_t row = 0; row < p.out_h; ++row, y += p.out_w) {
    const int64_t top = row * p.stride_h - p.pad_h, bottom = top + p.kernel_h;
    const int64_t first = top < 0 ? 0 : top, last = bottom < p.height ? bottom : p.height;
    int64_t i = 0;
    for (; i + kLanes <= p.width; i += kLanes) {
      Vector v = load(x + first * p.width + i);
      for (int64_t r = first + 1; r < last; ++r) v = larger(v, load(x + r * p.width + i));
      store(columns + i, v);
    }
    for (; i < p.width; ++i) {
      float v = x[first * p.width + i];
      for (int64_t r = first + 1; r < last; ++r) v = larger(v, x[r * p.width + i]);
      columns[i] = v;
    }
    for (i = 0; i < used; i += kLanes) {
      Vector v = load(rows + i);
      for (int64_t k = 1; k < p.kernel_w; ++k) v = larger(v, load(rows + i + k));
      store(windows + i, v);
    }
    for (i = 0; i < p.out_w; ++i) y[i] = windows[i * p.stride_w];
  }
}

}  // namespace
}  // namespace torchcram
