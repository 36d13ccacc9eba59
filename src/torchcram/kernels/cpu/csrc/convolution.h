// Convolutions: a panel holds the input pixels that a few outputs need.
#pragma once

#if defined(TORCHCRAM_AVX512)
#include <immintrin.h>
#endif

#include "multiply.h"

namespace torchcram {
namespace {

// Adds the residual and applies ReLU while the outputs are written.
TORCHCRAM_INLINE Vector finish(Vector v, const float* residual, bool rectify) {
  if (residual) v += load(residual);
  return rectify ? relu(v) : v;
}

// The outputs of a panel, cut into segments whose input pixels are neighbours in memory.
struct Segments {
  struct Segment {
    int64_t from, to, length;  // offsets in the image and in the panel
  };
  Segment segment[kPanel];
  int64_t count = 0;

  Segments(const Convolution& c, int64_t first, int64_t outputs) {
    const int64_t row = c.stride_h * c.width;  // from the pixels of a row of outputs to the next
    const bool whole = row == c.out_w;         // all outputs have neighbouring pixels
    for (int64_t done = 0; done < outputs;) {
      const int64_t output = first + done, left = outputs - done;
      const int64_t in_row = c.out_w - output % c.out_w;
      const int64_t length = whole || left < in_row ? left : in_row;
      segment[count++] = {output / c.out_w * row + output % c.out_w, done, length};
      done += length;
    }
  }
};

template <int Floats>
TORCHCRAM_INLINE void copy_floats(float* to, const float* from) {
  memcpy(to, from, Floats * sizeof(float));
}

// Copies a few floats by whole vectors, of which the last two may overlap.
TORCHCRAM_INLINE void copy_segment(float* to, const float* from, int64_t length) {
  int64_t i = 0;
  for (; i + 16 <= length; i += 16) copy_floats<16>(to + i, from + i);
  if (i == length) return;
  if (length >= 16) return copy_floats<16>(to + length - 16, from + length - 16);
  if (length >= 8) {
    copy_floats<8>(to, from);
    return copy_floats<8>(to + length - 8, from + length - 8);
  }
  if (length >= 4) {
    copy_floats<4>(to, from);
    return copy_floats<4>(to + length - 4, from + length - 4);
  }
  for (i = 0; i < length; ++i) to[i] = from[i];
}

// Loads the pixels of a block: [k][64 outputs]. Those that the next panel needs follow them in
// memory. Every channel may lie in a page of its own, where the processor prefetches nothing.
void load_pixels(const Job& job, const Segments& segments, int64_t block, const float* image,
                 float* to) {
  const Convolution& c = *job.shape;
  const int64_t plane = c.height * c.width, *starts = job.packed->inner_starts + block;
  int64_t kx = starts[0] % c.kernel_w, ky = starts[0] / c.kernel_w % c.kernel_h;
  int64_t channel = starts[0] / (c.kernel_w * c.kernel_h);
  for (int64_t k = starts[0]; k < starts[1]; ++k, to += kPanel) {
    const int64_t x = kx * c.dilation_w;
    const float* from = image + (channel * c.stride_w + x % c.stride_w) * plane +
                        ky * c.dilation_h * c.width + x / c.stride_w;
    for (int64_t i = 0; i < segments.count; ++i) {
      const Segments::Segment& s = segments.segment[i];
      copy_segment(to + s.to, from + s.from, s.length);
    }
    if (kx == 0 && ky == c.kernel_h - 1) {
      const Segments::Segment& last = segments.segment[segments.count - 1];
      for (int i = 0; i < kPanel; i += 16)
        __builtin_prefetch(from + last.from + last.length + i, 0, 2);  // into L2
    }
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
  const Segments segments(c, first, count);
  const float* input = job.input + image * c.channels * c.stride_w * c.height * c.width;
  for (int64_t block = 0; block < packed.blocks(); ++block) {
    load_pixels(job, segments, block, input, panel + kPanel);
    multiply(rows, block, panel, vectors, job.bias, block == 0);
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

// to[tile] = from[the tile beside it], zero where there is none.
TORCHCRAM_INLINE void load_neighbours(const float* from, const int32_t* neighbour, int64_t images,
                                      float* to) {
#if defined(TORCHCRAM_AVX512)
  if (images == kImages) {
    const __m512i lanes = _mm512_loadu_si512(neighbour);
    const __mmask16 inside = _mm512_movepi32_mask(_mm512_xor_si512(lanes, _mm512_set1_epi32(-1)));
    return _mm512_storeu_ps(to, _mm512_maskz_permutexvar_ps(inside, lanes, _mm512_loadu_ps(from)));
  }
#endif
  for (int64_t i = 0; i < images; ++i) to[i] = neighbour[i] < 0 ? 0.0f : from[neighbour[i]];
}

// Loads panel[channel][slot][image] for the channels of a block, from the row `y` of the input,
// zeros outside of it, and for the 4 outputs that begin at a column. With `Full` there are 16
// images; otherwise the lanes of missing images stay zero.
template <bool Full>
void load_images(const Job& job, int64_t first, int64_t channels, int64_t y, int64_t column,
                 int64_t image, int64_t images, float* panel) {
  const Convolution& c = *job.shape;
  const int64_t step = job.strip->slots * kImages;  // to the next channel
  for (int64_t slot = 0; slot < job.strip->slots; ++slot, panel += kImages) {
    const int64_t x = column * c.stride_w - c.pad_w + job.strip->pixel_of[slot];
    float* to = panel;
    const int below = y < 0 ? -1 : y >= c.height, right = x < 0 ? -1 : x >= c.width;
    const bool outside = below || right;
    // Beyond the next tile there are only pixels of missing outputs, those beside a narrow tile.
    const bool beyond = x < -c.width || x >= 2 * c.width || y < -c.height || y >= 2 * c.height;
    if (outside && (beyond || !job.neighbours->any[1 + below][1 + right])) {
      for (int64_t i = 0; i < channels; ++i, to += step) memset(to, 0, kImages * sizeof(float));
      continue;
    }
    const int64_t in_memory = (y - below * c.height) % job.input_rows;
    const int64_t pixel = in_memory * c.width + x - right * c.width;
    const float* from = job.input + (pixel * c.channels + first) * c.batch + image;
    if (outside) {
      const int32_t* neighbour = job.neighbours->neighbour[1 + below][1 + right];
      for (int64_t i = 0; i < channels; ++i, to += step, from += c.batch)
        load_neighbours(from, neighbour, images, to);
      continue;
    }
    for (int64_t i = 0; i < channels; ++i, to += step, from += c.batch) {
      if (Full)
        for (int lane = 0; lane < kImages; lane += kLanes) store(to + lane, load(from + lane));
      else
        memcpy(to, from, images * sizeof(float));
    }
  }
}

template <bool Full>
void store_images(const Job& job, const RowRange& rows, int64_t sums_panel, int64_t row,
                  int64_t column, int64_t wide, int64_t image, int64_t images) {
  const Packed& packed = *job.packed;
  const Convolution& c = *job.shape;
  const bool rectify = job.activation == kRelu;
  for (int64_t pixel = 0; pixel < wide; ++pixel)
    for (int64_t group = rows.first; group < rows.last; ++group) {
      const float* sums = rows.of(group, sums_panel) + pixel * kImages;
      const int64_t feature = packed.first_row(group), count = packed.group_rows(group);
      const auto at = [&](int64_t rows_in_memory) {
        const int64_t index = row % rows_in_memory * c.out_w + column + pixel;
        return (index * packed.header->rows + feature) * c.batch + image;
      };
      const float* residual = job.residual ? job.residual + at(job.residual_rows) : nullptr;
      float* to = job.output + at(job.output_rows);
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

// The sums of a strip of outputs, 4 wide, of 16 images, while the rows of the input pass by. A row
// of the input is loaded once for all rows of outputs that need it, and their sums wait for the
// next ones: `open` of them at most.
struct ImageStrip {
  const Job& job;
  const Convolution& c;
  const RowRange& rows;
  int64_t first, last;  // rows of outputs
  int64_t column, wide, image, images, open;
  float* panel;

  // Calls a function with each row of the kernel that takes a row of the input for an output of
  // the strip, and with the row of that output.
  template <class Function>
  TORCHCRAM_INLINE void with_outputs(int64_t y, Function function) const {
    for (int64_t ky = 0; ky < c.kernel_h; ++ky) {
      const int64_t from_top = y + c.pad_h - ky * c.dilation_h, row = from_top / c.stride_h;
      if (from_top >= 0 && from_top % c.stride_h == 0 && row >= first && row < last)
        function(ky, row);
    }
  }

  // Rows of the input, those of the tiles above and below included, if there are any.
  int64_t first_input() const { return c.down > 1 ? -c.height : 0; }
  int64_t end_of_input() const { return c.down > 1 ? 2 * c.height : c.height; }

  // Whether no kernel row above this one lies within the input.
  bool is_first(int64_t ky, int64_t row) const {
    return ky == 0 || row * c.stride_h - c.pad_h + (ky - 1) * c.dilation_h < first_input();
  }

  void load_row(int64_t y, int64_t channel, int64_t channels, float* to) const {
    (images == kImages ? load_images<true> : load_images<false>)(job, channel, channels, y, column,
                                                                 image, images, to);
  }

  void add_row(int64_t y) {
    bool needed = false;
    with_outputs(y, [&](int64_t, int64_t) { needed = true; });
    if (!needed) return;
    const Packed& packed = rows.packed;
    const int64_t blocks = packed.blocks() / c.kernel_h, *starts = packed.inner_starts;
    const int vectors = int(wide * kImages / kLanes);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t channel = starts[block] / c.kernel_w;
      load_row(y, channel, starts[block + 1] / c.kernel_w - channel, panel + kPanel);
      with_outputs(y, [&](int64_t ky, int64_t row) {
        multiply(rows, ky * blocks + block, panel, vectors, job.bias,
                 block == 0 && is_first(ky, row), row % open);
      });
    }
  }

  void store_row(int64_t row) const {
    (images == kImages ? store_images<true> : store_images<false>)(
        job, rows, row % open, row, column, wide, image, images);
  }

  // The sums of a row whose kernel lies outside of the input.
  void fill_with_bias(int64_t row) const {
    for (int64_t group = rows.first; group < rows.last; ++group)
      for (int64_t i = 0; i < rows.packed.group_rows(group); ++i)
        for (int64_t lane = 0; lane < kPanel; ++lane)
          rows.of(group, row % open)[i * kPanel + lane] =
              job.bias ? job.bias[rows.packed.first_row(group) + i] : 0.0f;
  }

  // All kernel rows are in one block, and all rows that they need in one panel.
  void run_at_once() {
    for (int64_t row = first; row < last; ++row) {
      for (int64_t ky = 0; ky < c.kernel_h; ++ky)
        load_row(row * c.stride_h - c.pad_h + ky * c.dilation_h, 0, c.channels,
                 panel + kPanel + ky * c.channels * job.strip->slots * kImages);
      multiply(rows, 0, panel, int(wide * kImages / kLanes), job.bias, true, row % open);
      store_row(row);
    }
  }

  void run() {
    if (rows.packed.blocks() < c.kernel_h) return run_at_once();
    const int64_t reach = (c.kernel_h - 1) * c.dilation_h;
    const int64_t end = end_of_input();
    int64_t next = first_input();
    for (int64_t row = first; row < last; ++row) {
      const int64_t top = row * c.stride_h - c.pad_h;
      bool inside = false;
      for (int64_t ky = 0; ky < c.kernel_h; ++ky)
        inside |= top + ky * c.dilation_h >= first_input() && top + ky * c.dilation_h < end;
      if (!inside) {
        fill_with_bias(row);
      } else {
        if (next < top) next = top;
        for (; next < end && next <= top + reach; ++next) add_row(next);
      }
      store_row(row);
    }
  }
};

// The lanes of a panel are 16 images, or tiles of images, its vectors 4 neighbouring outputs. Images
// are the innermost dimension: [row][column][channel][image]. A task is a band of rows of a strip.
void images(const void* data, int64_t task) {
  const Job& job = *static_cast<const Job*>(data);
  const Packed& packed = *job.packed;
  const Convolution& c = *job.shape;
  const int64_t open = (c.kernel_h - 1) * c.dilation_h / c.stride_h + 1;
  const RowRange rows(packed, task % job.splits, job.splits, 0, open);
  const int64_t sets = (c.batch + kImages - 1) / kImages, strips = (c.out_w + 3) / 4;
  const int64_t at = task / job.splits;
  const int64_t image = at % sets * kImages, column = at / sets % strips * 4;
  const int64_t first = job.first_row + at / sets / strips * job.band;
  const auto at_most = [](int64_t count, int64_t most) { return count < most ? count : most; };
  float* panel = scratch(1, kPanelFloats);
  const int64_t images_here = at_most(c.batch - image, kImages);
  if (images_here < kImages) memset(panel, 0, packed.inner_starts[packed.blocks() + 1]);
  clear_column(panel);
  ImageStrip{job,
             c,
             rows,
             first,
             at_most(first + job.band, job.end_row),
             column,
             at_most(c.out_w - column, 4),
             image,
             images_here,
             open,
             panel}
      .run();
}

}  // namespace
}  // namespace torchcram
