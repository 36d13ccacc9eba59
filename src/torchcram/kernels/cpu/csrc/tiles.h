// Images cut into tiles that are the innermost dimension, and put together again.
#pragma once

#if defined(TORCHCRAM_AVX512)
#include <immintrin.h>
#endif

#include "packed.h"
#include "vectors.h"

namespace torchcram {
namespace {

// Loads the first `count` lanes, and zeros into the others.
TORCHCRAM_INLINE Vector load_first(const float* from, int64_t count) {
#if defined(TORCHCRAM_AVX512)
  return (Vector)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from);
#else
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = from[i];
  return load(lanes);
#endif
}

// Stores the first `count` lanes.
TORCHCRAM_INLINE void store_first(float* to, Vector v, int64_t count) {
#if defined(TORCHCRAM_AVX512)
  _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), (__m512)v);
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
#endif
}

// A task is a row of the tiles of a panel, for all channels.
template <bool Cut>
void copy_tiles(const void* data, int64_t task) {
  const Tiling& t = *static_cast<const Tiling*>(data);
  const int64_t tiles = t.down * t.across, all = t.images * tiles;
  const int64_t row = task % t.height, first = task / t.height * kImages;
  const int64_t line = t.width * t.across, plane = line * t.height * t.down;
  const int64_t step = t.channels * all;  // from a pixel of the tiles to the next
  int64_t lines[kImages] = {};            // offsets of the row of each tile in the images
  for (int64_t i = 0; i < kImages && first + i < all; ++i) {
    const int64_t image = (first + i) / tiles, tile = (first + i) % tiles;
    lines[i] = image * t.channels * plane + (tile / t.across * t.height + row) * line +
               tile % t.across * t.width;
  }
  for (int64_t channel = 0; channel < t.channels; ++channel)
    for (int64_t lane = 0; lane < kImages && first + lane < all; lane += kLanes)
      for (int64_t column = 0; column < t.width; column += kLanes) {
        const int64_t from_tile = (row * t.width + column) * step + channel * all + first + lane;
        const int64_t in_image = channel * plane + column;
        const int64_t columns = t.width - column < kLanes ? t.width - column : kLanes;
        const int64_t lanes = all - first - lane < kLanes ? all - first - lane : kLanes;
        const int64_t rows = Cut ? lanes : columns, rest = Cut ? columns : lanes;
        Vector m[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          const float* from = t.x + (Cut ? lines[lane + i] + in_image : from_tile + i * step);
          m[i] = i < rows ? load_first(from, rest) : Vector{};
        }
        transpose(m);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          float* to = t.y + (Cut ? from_tile + i * step : lines[lane + i] + in_image);
          if (i < rest) store_first(to, m[i], rows);
        }
      }
}

void cut_tiles(const void* data, int64_t task) { copy_tiles<true>(data, task); }
void join_tiles(const void* data, int64_t task) { copy_tiles<false>(data, task); }

}  // namespace
}  // namespace torchcram
