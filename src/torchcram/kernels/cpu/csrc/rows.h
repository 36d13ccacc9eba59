// Functions of single rows: root mean square norm, and the product of a gated feed-forward layer.
#pragma once

#include "decoder.h"

namespace torchcram {
namespace {

void norm_rows(const void* data, int64_t task) {
  const RowNorm& job = *static_cast<const RowNorm*>(data);
  const int64_t first = task * job.each;
  const int64_t last = first + job.each < job.rows ? first + job.each : job.rows;
  for (int64_t row = first; row < last; ++row)
    normalize(job.x + row * job.width, job.weight, job.width, job.eps, job.y + row * job.width);
}

void gate_values(const void* data, int64_t task) {
  const GatedProduct& job = *static_cast<const GatedProduct*>(data);
  int64_t i = task * job.each;
  const int64_t last = i + job.each < job.count ? i + job.each : job.count;
  for (; i + kLanes <= last; i += kLanes)
    store(job.y + i, silu(load(job.gate + i)) * load(job.up + i));
  if (i == last) return;
  float gate[kLanes] = {}, up[kLanes] = {};
  memcpy(gate, job.gate + i, (last - i) * sizeof(float));
  memcpy(up, job.up + i, (last - i) * sizeof(float));
  store(gate, silu(load(gate)) * load(up));
  memcpy(job.y + i, gate, (last - i) * sizeof(float));
}

}  // namespace
}  // namespace torchcram
