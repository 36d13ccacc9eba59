// NEON: products of bytes, and values of bit masks, for int8.h and decoder.h.
#pragma once

#include <arm_neon.h>

#include <algorithm>

#include "packed.h"
#include "vectors.h"

namespace torchcram {
namespace {

// Adds the products of four neighbouring bytes to each lane. No byte of `x` is -128, so that two
// products fit 16 bits.
TORCHCRAM_INLINE int32x4_t add_products(int32x4_t sum, int8x16_t x, int8x16_t weights) {
#if defined(TORCHCRAM_DOTPROD)
  return vdotq_s32(sum, x, weights);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(weights));
  const int16x8_t high = vmull_high_s8(x, weights);
  return vpadalq_s16(sum, vpaddq_s16(low, high));
#endif
}

// Rounds scaled activations to [-127, 127]; NaN becomes 0.
TORCHCRAM_INLINE int32x4_t round_to_int8(Vector x) {
  const int32x4_t rounded = vcvtnq_s32_f32((float32x4_t)x);
  return vmaxq_s32(vminq_s32(rounded, vdupq_n_s32(127)), vdupq_n_s32(-127));
}

TORCHCRAM_INLINE int32_t highest(Ints x) { return vmaxvq_s32((int32x4_t)x); }

// For Linear layers in 8 bits; see the functions for AVX-512 in int8.h.

constexpr int kZeroPoint = 0;  // activations are signed

TORCHCRAM_INLINE Ints add_products(Ints sum, Ints x, Ints weights) {
  return (Ints)add_products((int32x4_t)sum, (int8x16_t)x, (int8x16_t)weights);
}

TORCHCRAM_INLINE Ints round_to_bytes(Vector x) { return (Ints)round_to_int8(x) & 255; }

TORCHCRAM_INLINE Vector load_part(const float* from, int64_t count) {
  float lanes[kLanes] = {};
  memcpy(lanes, from, std::min<int64_t>(count, kLanes) * sizeof(float));
  return load(lanes);
}

TORCHCRAM_INLINE void store_bytes(uint8_t* to, Ints x, int64_t count) {
  const uint16x4_t halves = vmovn_u32((uint32x4_t)x);
  const uint8x8_t bytes = vmovn_u16(vcombine_u16(halves, halves));
  memcpy(to, &bytes, count);
}

// For one token at a time; see the functions for AVX-512 in decoder.h, whose `Inputs` are a
// parameter here because decoder.h includes this file.

// Bytes of a table lookup that spread values over lanes by the bits of a mask. Lanes without a bit
// have the index 255, which is outside every table and gives zero.
template <int Masks, int Lanes, int LaneBytes, int ValueBytes>
struct Spread {
  uint8_t index[Masks][Lanes * LaneBytes];
  constexpr Spread() : index() {
    for (int mask = 0; mask < Masks; ++mask) {
      int next = 0;
      for (int lane = 0; lane < Lanes; ++lane) {
        const bool kept = mask >> lane & 1;
        // A value takes the highest bytes of its lane: a bfloat16 is the upper half of a float.
        for (int byte = 0; byte < LaneBytes; ++byte) {
          const int of_value = byte - (LaneBytes - ValueBytes);
          index[mask][lane * LaneBytes + byte] =
              kept && of_value >= 0 ? uint8_t(next * ValueBytes + of_value) : 255;
        }
        next += kept;
      }
    }
  }
};
alignas(64) constexpr Spread<16, 4, 4, 4> kSpreadFloats;
alignas(64) constexpr Spread<16, 4, 4, 2> kSpreadBfloats;
alignas(64) constexpr Spread<256, 8, 1, 1> kSpreadBytes;

// Counts of the bits of a mask.
struct MaskCounts {
  uint64_t nibbles;  // bits of every 4, in 4 bits each
  uint64_t before;   // bits before every 8, in 8 bits each
  int64_t all;

  TORCHCRAM_INLINE explicit MaskCounts(uint64_t mask) {
    const uint64_t twos = 0x3333333333333333, fours = 0x0f0f0f0f0f0f0f0f;
    const uint64_t pairs = mask - (mask >> 1 & 0x5555555555555555);
    nibbles = (pairs & twos) + (pairs >> 2 & twos);
    const uint64_t through = ((nibbles + (nibbles >> 4)) & fours) * 0x0101010101010101;
    before = through << 8;
    all = int64_t(through >> 56);
  }
};

// NaN and infinities make the scale of their 64 numbers not finite.
template <class Inputs>
void round_inputs(const Inputs& in, int64_t count) {
  const int64_t groups = in.stride / kMaskBits;
  for (int64_t g = 0; g < count * groups; ++g) {
    const float* x = in.x + g * kMaskBits;
    Ints most{};
    for (int i = 0; i < kMaskBits; i += kLanes) most = maximum(most, (Ints)absolute(load(x + i)));
    const int32_t bits = highest(most);
    float top;
    memcpy(&top, &bits, sizeof top);
    in.scales[g] = top / 127.0f;
    const Vector factor = broadcast(top > 0.0f ? 127.0f / top : 0.0f);
    for (int i = 0; i < kMaskBits; i += 16) {
      int16x4_t q[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) q[j] = vmovn_s32(round_to_int8(load(x + i + 4 * j) * factor));
      const int8x8_t low = vmovn_s16(vcombine_s16(q[0], q[1]));
      const int8x8_t high = vmovn_s16(vcombine_s16(q[2], q[3]));
      vst1q_s8(in.bytes + g * kMaskBits + i, vcombine_s8(low, high));
    }
  }
}

template <class Inputs>
void arrange(const Inputs& in, int64_t count, unsigned kinds) {
  if (kinds & kRoundedKinds) round_inputs(in, count);
}

// Unpacks up to 64 values of 4 bits, which are stored as w + 8.
TORCHCRAM_INLINE void unpack_nibbles(const uint8_t* from, int8_t* to) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const uint8x16_t pairs = vld1q_u8(from + 16 * i);
    const uint8x16_t low = vandq_u8(pairs, vdupq_n_u8(15)), high = vshrq_n_u8(pairs, 4);
    const int8x16_t middle = vdupq_n_s8(8);
    vst1q_s8(to + 32 * i, vsubq_s8(vreinterpretq_s8_u8(vzip1q_u8(low, high)), middle));
    vst1q_s8(to + 32 * i + 16, vsubq_s8(vreinterpretq_s8_u8(vzip2q_u8(low, high)), middle));
  }
}

// Values of 8 bits, or of 4 bits with one or two scales for every 64 inputs.
template <int T, int Kind, bool Masked, class Inputs>
void multiply_integers(const RowMatrix& m, const Inputs& in, int64_t row, float* sums) {
  const int64_t groups = in.stride / kMaskBits;
  const uint64_t* masks = m.masks + (Masked ? row * groups : 0);
  const int8_t* stored = static_cast<const int8_t*>(m.values) + m.starts[row];
  float32x4_t total[T] = {};
  for (int64_t g = 0; g < groups; ++g) {
    int8x16_t w[4];
    int8_t unpacked[kMaskBits + 16];  // values may be read beyond the last
    const int8_t* values = stored;
    float scales[2] = {1.0f, 1.0f};
    if (Kind != kBytes) {
      constexpr int kSize = Kind == kNibbles ? sizeof(float) : 2 * sizeof(float);
      memcpy(scales, stored, kSize);
      stored += kSize;
      unpack_nibbles(reinterpret_cast<const uint8_t*>(stored), unpacked);
      values = unpacked;
    }
    int64_t count = kMaskBits;
    if (Masked) {
      const uint64_t mask = masks[g];
      const MaskCounts ones(mask);
      int8x8_t part[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const int8x16_t from = vld1q_s8(values + (ones.before >> (8 * i) & 255));
        part[i] = vqtbl1_s8(from, vld1_u8(kSpreadBytes.index[mask >> (8 * i) & 255]));
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) w[i] = vcombine_s8(part[2 * i], part[2 * i + 1]);
      count = ones.all;
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) w[i] = vld1q_s8(values + 16 * i);
    }
    stored += Kind == kBytes ? count : (count + 1) / 2;
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const int64_t at = t * groups + g;
      const int8_t* x = in.bytes + at * kMaskBits;
      int32x4_t products[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        int32x4_t& sum = products[Kind == kNibbles32 ? i / 2 : 0];
        sum = add_products(sum, vld1q_s8(x + 16 * i), w[i]);
      }
      const float scale = in.scales[at];
      total[t] = vfmaq_n_f32(total[t], vcvtq_f32_s32(products[0]), scales[0] * scale);
      if (Kind == kNibbles32)
        total[t] = vfmaq_n_f32(total[t], vcvtq_f32_s32(products[1]), scales[1] * scale);
    }
  }
  for (int t = 0; t < T; ++t) sums[t] = vaddvq_f32(total[t]);
}

// Up to 4 values as floats, one for each bit of the mask, zero in the other lanes.
template <int Kind, bool Masked>
TORCHCRAM_INLINE Vector spread(const char* values, unsigned mask) {
  const uint8_t* from = reinterpret_cast<const uint8_t*>(values);
  if (!Masked && Kind == kFloats) return (Vector)vld1q_u8(from);
  if (!Masked) return (Vector)vshll_n_u16(vreinterpret_u16_u8(vld1_u8(from)), 16);
  const uint8_t* index = Kind == kFloats ? kSpreadFloats.index[mask] : kSpreadBfloats.index[mask];
  return (Vector)vqtbl1q_u8(vld1q_u8(from), vld1q_u8(index));
}

template <int T, int Kind, bool Masked, class Inputs>
void multiply_floats(const RowMatrix& m, const Inputs& in, int64_t row, float* sums) {
  constexpr int kSize = Kind == kFloats ? 4 : 2;
  const int64_t groups = in.stride / kMaskBits;
  const uint64_t* masks = m.masks + (Masked ? row * groups : 0);
  const char* values = static_cast<const char*>(m.values) + m.starts[row];
  Vector total[T][4] = {};
  for (int64_t g = 0; g < groups; ++g) {
    const uint64_t mask = Masked ? masks[g] : ~uint64_t(0);
    const MaskCounts ones(mask);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      int64_t before = 4 * i;
      if (Masked) {
        before = ones.before >> (i / 2 * 8) & 255;
        if (i % 2) before += ones.nibbles >> (4 * (i - 1)) & 15;
      }
      const Vector w = spread<Kind, Masked>(values + kSize * before, mask >> (4 * i) & 15);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t)
        total[t][i % 4] += w * load(in.x + t * in.stride + g * kMaskBits + 4 * i);
    }
    values += kSize * ones.all;
  }
  for (int t = 0; t < T; ++t)
    sums[t] = vaddvq_f32((float32x4_t)((total[t][0] + total[t][1]) + (total[t][2] + total[t][3])));
}

template <int T, bool Masked, class Inputs>
void multiply_row(const RowMatrix& m, const Inputs& in, int64_t row, float* sums) {
  if (m.kind == kFloats) return multiply_floats<T, kFloats, Masked>(m, in, row, sums);
  if (m.kind == kBfloats) return multiply_floats<T, kBfloats, Masked>(m, in, row, sums);
  if (m.kind == kBytes) return multiply_integers<T, kBytes, Masked>(m, in, row, sums);
  if (m.kind == kNibbles) return multiply_integers<T, kNibbles, Masked>(m, in, row, sums);
  multiply_integers<T, kNibbles32, Masked>(m, in, row, sums);
}

template <int T, int R, class Inputs>
void multiply_neighbours(const RowMatrix& m, const Inputs& in, int64_t row, float (&sums)[R][T]) {
  for (int r = 0; r < R; ++r) {
    if (m.masks)
      multiply_row<T, true>(m, in, row + r, sums[r]);
    else
      multiply_row<T, false>(m, in, row + r, sums[r]);
  }
}

}  // namespace
}  // namespace torchcram
