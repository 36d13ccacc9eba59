// Images as the innermost dimension instead of the outermost one, and back.
#pragma once

#include "packed.h"
#include "vectors.h"

namespace torchcram {
namespace {

// A task is a square of 64 outer and 64 inner indices, for all indices in the middle: whole cache
// lines of neighbouring pages are read and written together.
void reverse_dimensions(const void* data, int64_t task) {
  const Reversal& r = *static_cast<const Reversal*>(data);
  const int64_t squares = (r.inner + kPanel - 1) / kPanel;
  const int64_t first_outer = task / squares * kPanel, first_inner = task % squares * kPanel;
  const int64_t last_outer = first_outer + kPanel < r.outer ? first_outer + kPanel : r.outer;
  const int64_t last_inner = first_inner + kPanel < r.inner ? first_inner + kPanel : r.inner;
  const int64_t from_step = r.middle * r.inner, to_step = r.middle * r.outer;
  for (int64_t middle = 0; middle < r.middle; ++middle)
    for (int64_t outer = first_outer; outer < last_outer; outer += kLanes)
      for (int64_t inner = first_inner; inner < last_inner; inner += kLanes) {
        const float* from = r.x + (outer * r.middle + middle) * r.inner + inner;
        float* to = r.y + (inner * r.middle + middle) * r.outer + outer;
        if (outer + kLanes <= last_outer && inner + kLanes <= last_inner) {
          Vector m[kLanes];
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) m[i] = load(from + i * from_step);
          transpose(m);
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) store(to + i * to_step, m[i]);
          continue;
        }
        for (int64_t i = 0; i < kLanes && inner + i < last_inner; ++i)
          for (int64_t j = 0; j < kLanes && outer + j < last_outer; ++j)
            to[i * to_step + j] = from[j * from_step + i];
      }
}

}  // namespace
}  // namespace torchcram
