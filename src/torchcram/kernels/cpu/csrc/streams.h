// What the parts of packing share.
#pragma once

#include <vector>

#include "packed.h"

namespace torchcram {

struct Streams {
  std::vector<uint16_t> columns;
  std::vector<float> values;
};

struct Dense {
  const float* weight;
  int64_t rows, inner;
  const uint16_t* offsets;  // of each k in its panel
  float at(int64_t row, int64_t k) const { return row < rows ? weight[row * inner + k] : 0.0f; }
};

// The streams of rows from first to before last and columns from `from` to before `to`.
void add_fours(const Dense& dense, int64_t first, int64_t last, int64_t from, int64_t to,
               Streams& out);

}  // namespace torchcram
