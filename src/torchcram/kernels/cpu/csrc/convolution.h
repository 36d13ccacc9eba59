// Convolutions: a panel holds the input pixels that a few outputs need.
#pragma once

#include "multiply.h"

namespace torchcram {
namespace {

// Adds the residual and applies ReLU while the outputs are written.
TORCHCRAM_INLINE Vector finish(Vector v, const float* residual, bool rectify) {
  if (residual) v += load(residual);
  return rectify ? relu(v) : v;
}

// Offsets of the input pixels of runs of neighbouring outputs; all runs have the same length.
struct Runs {
  int64_t length, count, at[kPanel];
  Runs(const Convolution& c, int64_t first, int64_t outputs) {
    length = c.out_w % 16 == 0 ? 16 : c.out_w % 8 == 0 ? 8 : c.out_w % 4 == 0 ? 4 : 1;
    count = outputs / length;  // a row of outputs is a whole number of runs
    for (int64_t i = 0; i < count; ++i) {
      const int64_t output = first + i * length;
      at[i] = output / c.out_w * c.stride_h * c.width + output % c.out_w;
    }
  }
};

template <int Length>
void load_runs(const float* from, const Runs& runs, float* to) {
  for (int64_t i = 0; i < runs.count; ++i) memcpy(to + i * Length, from + runs.at[i], Length * 4);
}

// Loads the pixels of a block: [k][64 outputs].
template <int Length>
void load_pixels(const Job& job, const Runs& runs, int64_t block, const float* image, float* to) {
  const Convolution& c = *job.shape;
  const int64_t plane = c.height * c.width, *starts = job.packed->inner_starts + block;
  int64_t kx = starts[0] % c.kernel_w, ky = starts[0] / c.kernel_w % c.kernel_h;
  int64_t channel = starts[0] / (c.kernel_w * c.kernel_h);
  for (int64_t k = starts[0]; k < starts[1]; ++k, to += kPanel) {
    const int64_t x = kx * c.dilation_w;
    load_runs<Length>(image + (channel * c.stride_w + x % c.stride_w) * plane +
                          ky * c.dilation_h * c.width + x / c.stride_w,
                      runs, to);
    if (++kx < c.kernel_w) continue;
    kx = 0;
    if (++ky < c.kernel_h) continue;
    ky = 0;
    ++channel;
  }
}

// The lanes of a panel are neighbouring outputs of one image in row-major order. The input is
// padded already, and its columns are sorted by their remainders modulo the stride:
// [image][channel][remainder][row][column].
void pixels(const void* data, int64_t task) {
  const Job& job = *static_cast<const Job*>(data);
  const Packed& packed = *job.packed;
  const Convolution& c = *job.shape;
  const bool rectify = job.activation == kRelu;
  const RowRange rows(packed, task % job.splits, job.splits, 0);
  const int64_t outputs = c.out_h * c.out_w, panels = (outputs + kPanel - 1) / kPanel;
  const int64_t image = task / job.splits / panels, first = task / job.splits % panels * kPanel;
  const int64_t count = outputs - first < kPanel ? outputs - first : kPanel;
  const int vectors = (count + kLanes - 1) / kLanes;
  const size_t used = packed.inner_starts[packed.blocks() + 1];
  float* panel = scratch(1, kPanelFloats);
  if (count % kLanes) memset(panel, 0, used);  // some lanes have no output
  clear_column(panel);
  const Runs runs(c, first, count);
  const auto take = runs.length == 16  ? load_pixels<16>
                    : runs.length == 8 ? load_pixels<8>
                    : runs.length == 4 ? load_pixels<4>
                                       : load_pixels<1>;
  for (int64_t block = 0; block < packed.blocks(); ++block) {
    take(job, runs, block, job.input + image * c.channels * c.stride_w * c.height * c.width,
         panel + kPanel);
    multiply(rows, block, panel, vectors, job.bias);
  }
  for (int64_t group = rows.first; group < rows.last; ++group)
    for (int64_t row = 0; row < packed.group_rows(group); ++row) {
      const float* sums = rows.of(group) + row * kPanel;
      const int64_t at =
          (image * packed.header->rows + packed.first_row(group) + row) * outputs + first;
      const float* residual = job.residual ? job.residual + at : nullptr;
      float* y = job.output + at;
      int64_t i = 0;
      for (; i + kLanes <= count; i += kLanes)
        store(y + i, finish(load(sums + i), residual ? residual + i : nullptr, rectify));
      if (i < count) {
        float last[kLanes] = {};
        if (residual) memcpy(last, residual + i, (count - i) * sizeof(float));
        store(last, finish(load(sums + i), residual ? last : nullptr, rectify));
        memcpy(y + i, last, (count - i) * sizeof(float));
      }
    }
}

constexpr int kImages = 16;  // images in a panel, for each of 4 neighbouring outputs

// Loads panel[channel][ky][slot][image] for the channels of a block and the 4 outputs that begin at
// a column. With `Full` there are 16 images; otherwise the lanes of missing images stay zero.
template <bool Full>
void load_images(const Job& job, int64_t block, int64_t row, int64_t column, int64_t image,
                 int64_t images, float* panel) {
  const Convolution& c = *job.shape;
  const int64_t kernel = c.kernel_h * c.kernel_w, *starts = job.packed->inner_starts + block;
  const int64_t first = starts[0] / kernel, channels = starts[1] / kernel - first;
  const int64_t step = c.kernel_h * job.strip->slots * kImages;  // to the next channel
  for (int64_t ky = 0; ky < c.kernel_h; ++ky) {
    const int64_t y = row * c.stride_h + ky * c.dilation_h - c.pad_h;
    for (int64_t slot = 0; slot < job.strip->slots; ++slot, panel += kImages) {
      const int64_t x = column * c.stride_w - c.pad_w + job.strip->pixel_of[slot];
      float* to = panel;
      if (y < 0 || y >= c.height || x < 0 || x >= c.width) {
        for (int64_t i = 0; i < channels; ++i, to += step) memset(to, 0, kImages * sizeof(float));
        continue;
      }
      const float* from = job.input + ((y * c.width + x) * c.channels + first) * c.batch + image;
      for (int64_t i = 0; i < channels; ++i, to += step, from += c.batch) {
        if (Full)
          for (int lane = 0; lane < kImages; lane += kLanes) store(to + lane, load(from + lane));
        else
          memcpy(to, from, images * sizeof(float));
      }
    }
  }
}

template <bool Full>
void store_images(const Job& job, const RowRange& rows, int64_t row, int64_t column, int64_t wide,
                  int64_t image, int64_t images) {
  const Packed& packed = *job.packed;
  const Convolution& c = *job.shape;
  const bool rectify = job.activation == kRelu;
  for (int64_t pixel = 0; pixel < wide; ++pixel)
    for (int64_t group = rows.first; group < rows.last; ++group) {
      const float* sums = rows.of(group) + pixel * kImages;
      const int64_t feature = packed.first_row(group), count = packed.group_rows(group);
      const int64_t pixel_index = (row * c.out_w + column + pixel) * packed.header->rows + feature;
      const int64_t at = pixel_index * c.batch + image;
      const float* residual = job.residual ? job.residual + at : nullptr;
      float* to = job.output + at;
      for (int64_t r = 0; r < count; ++r, sums += kPanel, to += c.batch) {
        if (Full) {
          for (int i = 0; i < kImages; i += kLanes)
            store(to + i, finish(load(sums + i), residual ? residual + i : nullptr, rectify));
        } else {
          float values[kImages] = {};
          if (residual) memcpy(values, residual, images * sizeof(float));
          for (int i = 0; i < kImages; i += kLanes)
            store(values + i, finish(load(sums + i), residual ? values + i : nullptr, rectify));
          memcpy(to, values, images * sizeof(float));
        }
        if (residual) residual += c.batch;
      }
    }
}

// The lanes of a panel are 16 images, its vectors 4 neighbouring outputs. Images are the innermost
// dimension: [row][column][channel][image]. A task is a row of outputs of 16 images.
void images(const void* data, int64_t task) {
  const Job& job = *static_cast<const Job*>(data);
  const Packed& packed = *job.packed;
  const Convolution& c = *job.shape;
  const RowRange rows(packed, task % job.splits, job.splits, 0);
  const int64_t sets = (c.batch + kImages - 1) / kImages;
  const int64_t image = task / job.splits % sets * kImages, row = task / job.splits / sets;
  const int64_t images_here = c.batch - image < kImages ? c.batch - image : kImages;
  const bool full = images_here == kImages;
  const size_t used = packed.inner_starts[packed.blocks() + 1];
  float* panel = scratch(1, kPanelFloats);
  if (!full) memset(panel, 0, used);
  clear_column(panel);
  for (int64_t column = 0; column < c.out_w; column += 4) {
    const int64_t wide = c.out_w - column < 4 ? c.out_w - column : 4;
    for (int64_t block = 0; block < packed.blocks(); ++block) {
      (full ? load_images<true> : load_images<false>)(job, block, row, column, image, images_here,
                                                      panel + kPanel);
      multiply(rows, block, panel, int(wide * kImages / kLanes), job.bias);
    }
    (full ? store_images<true> : store_images<false>)(job, rows, row, column, wide, image,
                                                      images_here);
  }
}

}  // namespace
}  // namespace torchcram
