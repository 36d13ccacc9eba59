// One token at a time through a Llama-like decoder, for one to four sequences.
//
// A token reads every weight once and computes little with it, so that the time is that of reading:
// weights are bit masks and the values that are not zero, in 32, 16, 8 or 4 bits (RowMatrix in
// packed.h). All layers run in one parallel region, because entering one takes as long as a layer.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <initializer_list>
#include <new>
#include <type_traits>

#if defined(TORCHCRAM_AVX512)
#include <immintrin.h>
#elif defined(TORCHCRAM_NEON)
#include "neon.h"
#endif

#include "attention.h"
#include "packed.h"
#include "vectors.h"

namespace torchcram {
namespace {

constexpr int64_t kMostItemRows = 128;  // rows that a thread takes at a time
constexpr int64_t kRowsAhead = 8;       // rows whose values are fetched into the cache ahead of use
constexpr int kMostHeads = 4;           // that read the same values at a time
constexpr int64_t kLeastTokens = 64, kMostTokens = 256;  // that an item of attention takes
constexpr int64_t kManyParts = 4;  // of a text, which are worth a phase of their own to join

constexpr int64_t padded(int64_t inner) { return (inner + kMaskBits - 1) / kMaskBits * kMaskBits; }

// Vectors that matrices are multiplied with: floats, padded with zeros to whole masks, and what
// `arrange` makes of them for matrices of some kinds.
struct Inputs {
  const float* x;
  int64_t stride;
  // For bfloat16: of every 32 numbers, those at even positions and then those at odd positions.
  float* halves;
  // For 8 and 4 bits: numbers rounded to [-127, 127] with a scale for every 64, and -128 times the
  // sum of every four.
  int8_t* bytes;
  int32_t* offsets;
  float* scales;
};

// Scales that come before the values of 64 inputs.
constexpr int scales_of(int kind) { return kind == kNibbles ? 1 : kind == kNibbles32 ? 2 : 0; }

// Values of 4 bits for machines without instructions for them: they are unpacked into floats.
template <int T, int Kind, bool Masked>
void multiply_unpacked_nibbles(const RowMatrix& m, const Inputs& in, int64_t row, float* sums) {
  const int64_t groups = in.stride / kMaskBits;
  const uint64_t* masks = m.masks + (Masked ? row * groups : 0);
  const uint8_t* values = static_cast<const uint8_t*>(m.values) + m.starts[row];
  const auto value = [&](int index) {
    return float(int(values[index / 2] >> (index % 2 * 4) & 15) - 8);
  };
  Vector total[T] = {};
  for (int64_t g = 0; g < groups; ++g) {
    constexpr int kScales = scales_of(Kind), kShare = kMaskBits / kScales;
    float scales[kScales], w[kMaskBits] = {};
    memcpy(scales, values, sizeof scales);
    values += sizeof scales;
    int count = 0;
    if (Masked) {
      for (uint64_t mask = masks[g]; mask; mask &= mask - 1)
        w[__builtin_ctzll(mask)] = value(count++);
    } else {
      for (; count < kMaskBits; ++count) w[count] = value(count);
    }
    values += (count + 1) / 2;
    for (int t = 0; t < T; ++t) {
      for (int i = 0; i < kMaskBits; i += kLanes)
        total[t] += load(w + i) * scales[i / kShare] *
                    load(in.x + t * in.stride + g * kMaskBits + i);
    }
  }
  for (int t = 0; t < T; ++t) sums[t] = fold(total[t], [](float a, float b) { return a + b; });
}

#if defined(TORCHCRAM_AVX512)

#define TORCHCRAM_VBMI2 __attribute__((target("avx512vbmi2,avx512vnni")))

// Whether there are instructions that expand values of 8 and 16 bits and multiply bytes.
bool has_vbmi2() {
  static const bool has =
      __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512vnni");
  return has;
}

void split_halves(const Inputs& in, int64_t count) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  for (int64_t i = 0; i < count * in.stride; i += 32) {
    const __m512 a = (__m512)load(in.x + i), b = (__m512)load(in.x + i + 16);
    store(in.halves + i, (Vector)_mm512_permutex2var_ps(a, even, b));
    store(in.halves + i + 16, (Vector)_mm512_permutex2var_ps(a, odd, b));
  }
}

// NaN and infinities make the scale of their 64 numbers not finite.
TORCHCRAM_VBMI2 void round_inputs(const Inputs& in, int64_t count) {
  for (int64_t g = 0; g < count * in.stride / kMaskBits; ++g) {
    const float* x = in.x + g * kMaskBits;
    int8_t* bytes = in.bytes + g * kMaskBits;
    Ints most{};
    for (int i = 0; i < kMaskBits; i += 16) most = maximum(most, (Ints)absolute(load(x + i)));
    const int32_t bits = _mm512_reduce_max_epi32((__m512i)most);
    float top;
    memcpy(&top, &bits, sizeof top);
    in.scales[g] = top / 127.0f;
    const Vector factor = broadcast(top > 0.0f ? 127.0f / top : 0.0f);
    for (int i = 0; i < kMaskBits; i += 16) {
      const __m512i q = _mm512_cvtps_epi32((__m512)(load(x + i) * factor));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + i), _mm512_cvtepi32_epi8(q));
    }
    const __m512i zero = _mm512_setzero_si512();
    const __m512i sums =
        _mm512_dpbusd_epi32(zero, _mm512_set1_epi8(-128), _mm512_loadu_si512(bytes));
    _mm512_storeu_si512(in.offsets + g * 16, _mm512_sub_epi32(zero, sums));
  }
}

// Prepares `count` vectors for matrices of the kinds whose bits are set.
void arrange(const Inputs& in, int64_t count, unsigned kinds) {
  if (!has_vbmi2()) return;
  if (kinds & bit(kBfloats)) split_halves(in, count);
  if (kinds & kRoundedKinds) round_inputs(in, count);
}

// Values and masks of R neighbouring rows.
template <int R>
struct RowReader {
  const uint64_t* masks;
  const char* values[R];
  int64_t groups;
  RowReader(const RowMatrix& m, const Inputs& in, int64_t row) : groups(in.stride / kMaskBits) {
    masks = m.masks ? m.masks + row * groups : nullptr;
    for (int r = 0; r < R; ++r) values[r] = static_cast<const char*>(m.values) + m.starts[row + r];
  }
};

// Adds up the lanes of four vectors at once.
TORCHCRAM_INLINE __m128 add_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
  const auto halves = [](__m512 x) {
    return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  };
  const auto add_pairs = [&](__m512 x, __m512 y) {
    const __m256 first = halves(x), second = halves(y);
    return _mm256_castps_pd(
        _mm256_add_ps(_mm256_unpacklo_ps(first, second), _mm256_unpackhi_ps(first, second)));
  };
  const __m256d ab = add_pairs(a, b), cd = add_pairs(c, d);
  const __m256 all = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)),
                                   _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

template <int R, int T>
TORCHCRAM_INLINE void add_lanes(const Vector (&total)[R][T], float (&sums)[R][T]) {
  for (int t = 0; t < T; ++t) {
    if constexpr (R == 4) {
      float rows[R];
      _mm_storeu_ps(rows, add_lanes((__m512)total[0][t], (__m512)total[1][t], (__m512)total[2][t],
                                    (__m512)total[3][t]));
      for (int r = 0; r < R; ++r) sums[r][t] = rows[r];
    } else {
      for (int r = 0; r < R; ++r) sums[r][t] = _mm512_reduce_add_ps((__m512)total[r][t]);
    }
  }
}

// A register of some value that the compiler does not know. Values are expanded into it: on Zen 4
// that takes half as long as expansion with zero masking.
TORCHCRAM_INLINE __m512i opaque(__m512i value) {
  asm("" : "+v"(value));
  return value;
}

// A weight w is multiplied as w + 128, which is not negative, and the offsets make up for it.
template <int T, int R, bool Masked>
TORCHCRAM_VBMI2 void multiply_bytes(const RowMatrix& m, const Inputs& in, int64_t row,
                                    float (&sums)[R][T]) {
  RowReader<R> rows(m, in, row);
  const __m512i middle = opaque(_mm512_set1_epi8(-128));
  Vector total[R][T] = {};
  for (int64_t g = 0; g < rows.groups; ++g) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      __m512i w = _mm512_xor_si512(middle, _mm512_loadu_si512(rows.values[r]));
      if (Masked) {
        const uint64_t mask = rows.masks[r * rows.groups + g];
        w = _mm512_mask_expand_epi8(middle, mask, w);
        rows.values[r] += __builtin_popcountll(mask);
      } else {
        rows.values[r] += kMaskBits;
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const int64_t at = t * rows.groups + g;
        const __m512i products = _mm512_dpbusd_epi32(
            _mm512_loadu_si512(in.offsets + at * 16), w, _mm512_loadu_si512(in.bytes + at * 64));
        total[r][t] += (Vector)_mm512_cvtepi32_ps(products) * in.scales[at];
      }
    }
  }
  add_lanes(total, sums);
}

// Values are stored as w + 8, and a sixteenth of the offsets makes up for it.
template <int T, int R, int Kind, bool Masked>
TORCHCRAM_VBMI2 void multiply_nibbles(const RowMatrix& m, const Inputs& in, int64_t row,
                                      float (&sums)[R][T]) {
  RowReader<R> rows(m, in, row);
  const __m512i low = _mm512_set1_epi8(15), middle = opaque(_mm512_set1_epi8(8));
  Vector total[R][T] = {};
  for (int64_t g = 0; g < rows.groups; ++g) {
    __m512i offsets[T];
    __m512 scales[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const int64_t at = t * rows.groups + g;
      offsets[t] = _mm512_srai_epi32(_mm512_loadu_si512(in.offsets + at * 16), 4);
      scales[t] = (__m512)opaque((__m512i)_mm512_set1_ps(in.scales[at]));
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float own[scales_of(Kind)];
      memcpy(own, rows.values[r], sizeof own);
      rows.values[r] += sizeof own;
      __m512 scale = _mm512_set1_ps(own[0]);
      if (Kind == kNibbles32)
        scale = _mm512_mask_blend_ps(0xff00, scale, _mm512_set1_ps(own[scales_of(Kind) - 1]));
      const __m512i pairs = _mm512_cvtepu8_epi16(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows.values[r])));
      __m512i w = _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi16(pairs, 4)), low);
      if (Masked) {
        const uint64_t mask = rows.masks[r * rows.groups + g];
        w = _mm512_mask_expand_epi8(middle, mask, w);
        rows.values[r] += (uint64_t(__builtin_popcountll(mask)) + 1) / 2;
      } else {
        rows.values[r] += kMaskBits / 2;
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m512i products = _mm512_dpbusd_epi32(
            offsets[t], w, _mm512_loadu_si512(in.bytes + (t * rows.groups + g) * 64));
        total[r][t] += (Vector)(_mm512_cvtepi32_ps(products) * (scales[t] * scale));
      }
    }
  }
  add_lanes(total, sums);
}

template <int T, int R, bool Masked>
TORCHCRAM_VBMI2 void multiply_halves(const RowMatrix& m, const Inputs& in, int64_t row,
                                     float (&sums)[R][T]) {
  RowReader<R> rows(m, in, row);
  const __m512i zero = opaque(_mm512_setzero_si512());
  const __m512i high = _mm512_set1_epi32(int32_t(0xffff0000));
  Vector total[R][T] = {};
  for (int64_t g = 0; g < rows.groups; ++g) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const uint64_t mask = Masked ? rows.masks[r * rows.groups + g] : 0;
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part) {
        __m512i w = _mm512_loadu_si512(rows.values[r]);
        if (Masked) {
          w = _mm512_mask_expand_epi16(zero, __mmask32(mask >> (32 * part)), w);
          rows.values[r] += 2 * __builtin_popcount(uint32_t(mask >> (32 * part)));
        } else {
          rows.values[r] += 64;
        }
        const Vector even = (Vector)_mm512_slli_epi32(w, 16);
        const Vector odd = (Vector)_mm512_and_si512(w, high);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          const float* x = in.halves + t * in.stride + g * kMaskBits + 32 * part;
          total[r][t] += even * load(x);
          total[r][t] += odd * load(x + 16);
        }
      }
    }
  }
  add_lanes(total, sums);
}

// The next 16 values of a row as floats, or those of a mask and zeros in between.
template <int Kind, bool Masked>
TORCHCRAM_INLINE Vector next_values(const char*& values, __mmask16 mask, __m512i zero) {
  __m512i w;
  if (Kind == kFloats)
    w = _mm512_loadu_si512(values);
  else if (Kind == kBfloats)
    w = _mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values))), 16);
  else
    w = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
  constexpr int bytes = Kind == kFloats ? 4 : Kind == kBfloats ? 2 : 1;
  values += bytes * (Masked ? __builtin_popcount(mask) : 16);
  if (Masked) w = _mm512_mask_expand_epi32(zero, mask, w);
  return Kind == kBytes ? (Vector)_mm512_cvtepi32_ps(w) : (Vector)w;
}

template <int T, int R, int Kind, bool Masked>
void multiply_floats(const RowMatrix& m, const Inputs& in, int64_t row, float (&sums)[R][T]) {
  RowReader<R> rows(m, in, row);
  const __m512i zero = opaque(_mm512_setzero_si512());
  Vector total[R][T] = {};
  for (int64_t g = 0; g < rows.groups; ++g) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const uint64_t mask = Masked ? rows.masks[r * rows.groups + g] : 0;
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        const Vector w =
            next_values<Kind, Masked>(rows.values[r], __mmask16(mask >> (16 * part)), zero);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          const float* x = in.x + t * in.stride + g * kMaskBits + 16 * part;
          total[r][t] += w * load(x);
        }
      }
    }
  }
  add_lanes(total, sums);
}

template <int T, int R, int Kind, bool Masked>
void multiply_4_bits(const RowMatrix& m, const Inputs& in, int64_t row, float (&sums)[R][T]) {
  if (has_vbmi2()) return multiply_nibbles<T, R, Kind, Masked>(m, in, row, sums);
  for (int r = 0; r < R; ++r) multiply_unpacked_nibbles<T, Kind, Masked>(m, in, row + r, sums[r]);
}

template <int T, int R, bool Masked>
void multiply_kind(const RowMatrix& m, const Inputs& in, int64_t row, float (&sums)[R][T]) {
  if (m.kind == kFloats) return multiply_floats<T, R, kFloats, Masked>(m, in, row, sums);
  if (m.kind == kBfloats) {
    if (has_vbmi2()) return multiply_halves<T, R, Masked>(m, in, row, sums);
    return multiply_floats<T, R, kBfloats, Masked>(m, in, row, sums);
  }
  if (m.kind == kNibbles) return multiply_4_bits<T, R, kNibbles, Masked>(m, in, row, sums);
  if (m.kind == kNibbles32) return multiply_4_bits<T, R, kNibbles32, Masked>(m, in, row, sums);
  if (has_vbmi2()) return multiply_bytes<T, R, Masked>(m, in, row, sums);
  multiply_floats<T, R, kBytes, Masked>(m, in, row, sums);
}

template <int T, int R>
void multiply_neighbours(const RowMatrix& m, const Inputs& in, int64_t row, float (&sums)[R][T]) {
  if (m.masks)
    multiply_kind<T, R, true>(m, in, row, sums);
  else
    multiply_kind<T, R, false>(m, in, row, sums);
}

#elif !defined(TORCHCRAM_NEON)  // which has these functions in neon.h

void arrange(const Inputs&, int64_t, unsigned) {}

template <int Kind>
TORCHCRAM_INLINE float value_at(const char* values, int64_t index) {
  if (Kind == kFloats) return reinterpret_cast<const float*>(values)[index];
  if (Kind == kBytes) return reinterpret_cast<const int8_t*>(values)[index];
  const uint32_t bits = uint32_t(reinterpret_cast<const uint16_t*>(values)[index]) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <int T, int Kind>
void multiply_floats(const RowMatrix& m, const Inputs& in, int64_t row, float* sums) {
  const int64_t groups = in.stride / kMaskBits;
  const char* values = static_cast<const char*>(m.values) + m.starts[row];
  int64_t next = 0;
  float total[T] = {};
  for (int64_t g = 0; g < groups; ++g) {
    const float* x = in.x + g * kMaskBits;
    if (!m.masks) {
      for (int k = 0; k < kMaskBits; ++k, ++next)
        for (int t = 0; t < T; ++t) total[t] += value_at<Kind>(values, next) * x[t * in.stride + k];
      continue;
    }
    for (uint64_t mask = m.masks[row * groups + g]; mask; mask &= mask - 1, ++next) {
      const int k = __builtin_ctzll(mask);
      for (int t = 0; t < T; ++t) total[t] += value_at<Kind>(values, next) * x[t * in.stride + k];
    }
  }
  for (int t = 0; t < T; ++t) sums[t] = total[t];
}

template <int T, int Kind>
void multiply_4_bits(const RowMatrix& m, const Inputs& in, int64_t row, float* sums) {
  if (m.masks)
    multiply_unpacked_nibbles<T, Kind, true>(m, in, row, sums);
  else
    multiply_unpacked_nibbles<T, Kind, false>(m, in, row, sums);
}

template <int T, int R>
void multiply_neighbours(const RowMatrix& m, const Inputs& in, int64_t row, float (&sums)[R][T]) {
  for (int r = 0; r < R; ++r) {
    if (m.kind == kFloats)
      multiply_floats<T, kFloats>(m, in, row + r, sums[r]);
    else if (m.kind == kBfloats)
      multiply_floats<T, kBfloats>(m, in, row + r, sums[r]);
    else if (m.kind == kNibbles)
      multiply_4_bits<T, kNibbles>(m, in, row + r, sums[r]);
    else if (m.kind == kNibbles32)
      multiply_4_bits<T, kNibbles32>(m, in, row + r, sums[r]);
    else
      multiply_floats<T, kBytes>(m, in, row + r, sums[r]);
  }
}

#endif

// Multiplies R neighbouring rows with T vectors and adds the bias; sums[t * stride + row].
template <int T, int R>
TORCHCRAM_INLINE void multiply_some(const RowMatrix& m, const Inputs& in, int64_t row, float* sums,
                                    int64_t stride) {
  float sum[R][T];
  multiply_neighbours<T, R>(m, in, row, sum);
  for (int r = 0; r < R; ++r) {
    const float scale = m.scales ? m.scales[row + r] : 1.0f;
    const float bias = m.bias ? m.bias[row + r] : 0.0f;
    for (int t = 0; t < T; ++t) sums[t * stride + row + r] = sum[r][t] * scale + bias;
  }
}

// Fetches the values and masks of rows into the cache. They follow each other in memory, but
// processors by themselves fetch ahead within a page only.
TORCHCRAM_INLINE void prefetch_rows(const RowMatrix& m, const Inputs& in, int64_t first,
                                    int64_t last) {
  const auto fetch = [](const char* from, const char* to) {
    for (; from < to; from += 64) __builtin_prefetch(from);
  };
  const char* values = static_cast<const char*>(m.values);
  fetch(values + m.starts[first], values + m.starts[last]);
  if (!m.masks) return;
  const char* masks = reinterpret_cast<const char*>(m.masks);
  const int64_t bytes = in.stride / 8;
  fetch(masks + first * bytes, masks + last * bytes);
}

template <int T>
void multiply_rows(const RowMatrix& m, const Inputs& in, int64_t first, int64_t last, float* sums,
                   int64_t stride) {
  int64_t row = first;
  for (; row + 4 <= last; row += 4) {
    const int64_t ahead = row + kRowsAhead;
    if (ahead + 4 < last) prefetch_rows(m, in, ahead, ahead + 4);
    multiply_some<T, 4>(m, in, row, sums, stride);
  }
  for (; row < last; ++row) multiply_some<T, 1>(m, in, row, sums, stride);
}

void multiply(const RowMatrix& m, const Inputs& in, int64_t count, int64_t first, int64_t last,
              float* sums, int64_t stride) {
  switch (count) {
    case 1:
      return multiply_rows<1>(m, in, first, last, sums, stride);
    case 2:
      return multiply_rows<2>(m, in, first, last, sums, stride);
    case 3:
      return multiply_rows<3>(m, in, first, last, sums, stride);
    default:
      return multiply_rows<4>(m, in, first, last, sums, stride);
  }
}

// Memory for the vectors of a product with up to `inner` inputs, in floats.
size_t inputs_room(int64_t count, int64_t inner) {
  const size_t width = padded(inner) * count;
  return 2 * width + width / 2 + width / kMaskBits + 64;
}

// Lays the vectors out in memory; the floats are to be written, their padding with zeros.
Inputs lay_out(float* memory, int64_t count, int64_t inner) {
  const int64_t width = padded(inner) * count;
  Inputs in;
  in.x = memory;
  in.stride = padded(inner);
  in.halves = memory + width;
  in.bytes = reinterpret_cast<int8_t*>(memory + 2 * width);
  in.offsets = reinterpret_cast<int32_t*>(memory + 2 * width + width / 4);
  in.scales = memory + 2 * width + width / 2;
  return in;
}

// Phases of one parallel region. The thread that leads opens a phase, and all threads that have
// arrived take its items; a thread that never arrives is not missed.
class Crew {
 public:
  typedef void (*Item)(const void* job, int64_t item);

  // Runs all items of a phase; called by the thread that leads. Throws std::bad_alloc if one did.
  void run(Item item, const void* job, int64_t count) {
    const uint64_t number = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    Phase& phase = phases_[number & 1];
    phase.item.store(item, std::memory_order_relaxed);
    phase.job.store(job, std::memory_order_relaxed);
    phase.count.store(count, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(number << 32, std::memory_order_release);
    help();
    for (int spins = 0; done_.load(std::memory_order_acquire) != count; ++spins) relax(spins);
    if (failed_.load(std::memory_order_relaxed)) throw std::bad_alloc();
  }

  void finish() { over_.store(true, std::memory_order_release); }

  // Takes items of all phases until the end; called by the other threads.
  void follow() {
    for (int spins = 0; !over_.load(std::memory_order_acquire); ++spins) {
      if (help())
        spins = 0;
      else
        relax(spins);
    }
  }

 private:
  struct Phase {
    std::atomic<Item> item{nullptr};
    std::atomic<const void*> job{nullptr};
    std::atomic<int64_t> count{0};
  };

  // Takes items of the current phase until none is left; returns whether there was one.
  bool help() {
    bool helped = false;
    for (;;) {
      uint64_t ticket = ticket_.load(std::memory_order_acquire);
      // A phase is overwritten two phases later; its ticket can no longer be taken then.
      const Phase& phase = phases_[(ticket >> 32) & 1];
      const int64_t index = int64_t(ticket & 0xffffffff);
      const int64_t count = phase.count.load(std::memory_order_relaxed);
      const Item item = phase.item.load(std::memory_order_relaxed);
      const void* job = phase.job.load(std::memory_order_relaxed);
      if (index >= count) return helped;
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      try {
        item(job, index);
      } catch (...) {
        failed_.store(true, std::memory_order_relaxed);
      }
      done_.fetch_add(1, std::memory_order_acq_rel);
      helped = true;
    }
  }

  static void relax(int spins) {
    if (spins > 4096) {
      sched_yield();  // there may be more threads than cores
      return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
  }

  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<bool> over_{false}, failed_{false};
  Phase phases_[2];
};

// What the items of a layer share.
struct LayerWork {
  const DecoderStep* step;
  const DecoderLayer* layer;
  int64_t index;  // of the layer
  int threads;
  Inputs normed, attended, middle;
  float *x, *query, *key, *value;  // x: [sequence][hidden]; the others: [sequence][head][feature]
  // Attention to parts of the tokens: [sequence][head][part], each with its features, the highest
  // score and the sum of the weights.
  float* parts;
  int64_t part_count, part_tokens;

  int64_t part_floats() const { return step->decoder->features + kLanes; }
};

// Rows of an item: two items for every thread, unless they would be very small or large.
int64_t item_rows(int64_t rows, int threads) {
  const int64_t even = (rows / (2 * threads) + 15) / 16 * 16;
  return std::min(std::max(even, int64_t(16)), kMostItemRows);
}

int64_t items(int64_t rows, int threads) {
  const int64_t each = item_rows(rows, threads);
  return (rows + each - 1) / each;
}

struct Range {
  int64_t first, last;
  Range(int64_t rows, int threads, int64_t item)
      : first(item * item_rows(rows, threads)),
        last(std::min(first + item_rows(rows, threads), rows)) {}
};

float* floats(const Inputs& in) { return const_cast<float*>(in.x); }

// y = x * w / sqrt(mean of x^2 + eps), for one vector.
void normalize(const float* x, const float* weight, int64_t width, float eps, float* y) {
  Vector squares{};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) squares += load(x + i) * load(x + i);
  float sum = fold(squares, [](float a, float b) { return a + b; });
  for (; i < width; ++i) sum += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(sum / float(width) + eps);
  for (i = 0; i + kLanes <= width; i += kLanes)
    store(y + i, load(weight + i) * (load(x + i) * factor));
  for (; i < width; ++i) y[i] = weight[i] * (x[i] * factor);
}

void normalize_all(const LayerWork& work, const float* weight) {
  const DecoderStep& step = *work.step;
  const int64_t hidden = step.decoder->hidden;
  for (int64_t s = 0; s < step.sequences; ++s)
    normalize(work.x + s * hidden, weight, hidden, step.decoder->eps,
              floats(work.normed) + s * work.normed.stride);
}

void project(const void* data, int64_t item) {  // query, key and value
  const LayerWork& work = *static_cast<const LayerWork*>(data);
  const RowMatrix* matrices[] = {&work.layer->query, &work.layer->key, &work.layer->value};
  float* sums[] = {work.query, work.key, work.value};
  for (int i = 0; i < 3; ++i) {
    const int64_t rows = matrices[i]->rows, count = items(rows, work.threads);
    if (item >= count) {
      item -= count;
      continue;
    }
    const Range range(rows, work.threads, item);
    return multiply(*matrices[i], work.normed, work.step->sequences, range.first, range.last,
                    sums[i], rows);
  }
}

// Rotates pairs (i, i + half) of every head.
void rotate(float* heads, int64_t count, int64_t features, const float* cosine, const float* sine) {
  const int64_t half = features / 2;
  for (; count > 0; --count, heads += features)
    for (int64_t i = 0; i < half; ++i) {
      const float a = heads[i], b = heads[i + half];
      heads[i] = a * cosine[i] - b * sine[i];
      heads[i + half] = b * cosine[i + half] + a * sine[i + half];
    }
}

// Keys or values of a sequence and a head: [token][feature].
template <class T>
T* memory_of(const LayerWork& work, int64_t values, int64_t sequence, int64_t head) {
  const DecoderStep& step = *work.step;
  const Decoder& d = *step.decoder;
  const int64_t row =
      ((work.index * 2 + values) * step.sequences + sequence) * d.memory_heads + head;
  return static_cast<T*>(step.memory) + row * step.capacity * d.features;
}

void write_cache(const float* from, int64_t count, float* to) {
  memcpy(to, from, count * sizeof(float));
}

void write_cache(const float* from, int64_t count, uint16_t* to) {  // rounds to bfloat16
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    memcpy(&bits, from + i, sizeof bits);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    to[i] = is_nan ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

template <class T>
void remember(const LayerWork& work) {
  const DecoderStep& step = *work.step;
  const Decoder& d = *step.decoder;
  for (int64_t s = 0; s < step.sequences; ++s) {
    rotate(work.query + s * d.heads * d.features, d.heads, d.features, step.cosine, step.sine);
    float* key = work.key + s * d.memory_heads * d.features;
    const float* value = work.value + s * d.memory_heads * d.features;
    rotate(key, d.memory_heads, d.features, step.cosine, step.sine);
    for (int64_t h = 0; h < d.memory_heads; ++h) {
      const int64_t at = step.past * d.features;
      write_cache(key + h * d.features, d.features, memory_of<T>(work, 0, s, h) + at);
      write_cache(value + h * d.features, d.features, memory_of<T>(work, 1, s, h) + at);
    }
  }
}

// scores[t] = query . keys[t], for kLanes tokens at a time: a transposition adds up all lanes of
// all tokens at once.
template <class T>
void score_tokens(const float* query, const T* keys, int64_t tokens, int64_t features,
                  const T* next, float* scores) {
  const auto product = [&](int64_t token) {
    const T* key = keys + token * features;
    Vector sum{};
    for (int64_t i = 0; i < features; i += kLanes) sum += load(query + i) * load(key + i);
    return sum;
  };
  int64_t t = 0;
  for (; t + kLanes <= tokens; t += kLanes) {
    for (int64_t i = 0; next && i < kLanes * features; i += int64_t(64 / sizeof(T)))
      __builtin_prefetch(next + t * features + i);
    Vector sums[kLanes];
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) sums[j] = product(t + j);
    transpose(sums);
#pragma GCC unroll 16
    for (int j = 1; j < kLanes; ++j) sums[0] += sums[j];
    store(scores + t, sums[0]);
  }
  for (; t < tokens; ++t) scores[t] = fold(product(t), [](float a, float b) { return a + b; });
}

// y[h] = factor[h] * sum over tokens of weights[h][t] * values[t], for H heads and V vectors of
// their features.
template <int H, int V, class T>
TORCHCRAM_INLINE void weigh(const T* values, const float* const* weights, int64_t tokens,
                            int64_t features, const float* factors, float* const* y, int64_t at) {
  Vector sums[H][V] = {};
  values += at;
  for (int64_t t = 0; t < tokens; ++t, values += features) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const Vector value = load(values + v * kLanes);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) sums[h][v] += value * weights[h][t];
    }
  }
  for (int h = 0; h < H; ++h)
    for (int v = 0; v < V; ++v) store(y[h] + at + v * kLanes, sums[h][v] * factors[h]);
}

template <int H, class T>
void weigh_values(const T* values, const float* const* weights, int64_t tokens, int64_t features,
                  const float* factors, float* const* y) {
  constexpr int V = kRegisters >= 32 ? 4 : 2;
  int64_t i = 0;
  for (; i + V * kLanes <= features; i += V * kLanes)
    weigh<H, V>(values, weights, tokens, features, factors, y, i);
  for (; i < features; i += kLanes)
    weigh<H, 1>(values, weights, tokens, features, factors, y, i);
}

// Attends to a part of the tokens, with all heads that share keys and values: these are read once.
template <class T>
void attend(const void* data, int64_t item) {
  const LayerWork& work = *static_cast<const LayerWork*>(data);
  const DecoderStep& step = *work.step;
  const Decoder& d = *step.decoder;
  const int64_t part = item % work.part_count, of_memory = item / work.part_count;
  const int64_t sequence = of_memory / d.memory_heads, shared = of_memory % d.memory_heads;
  const int64_t first = part * work.part_tokens, heads = d.heads / d.memory_heads;
  const int64_t tokens = std::min(work.part_tokens, step.past + 1 - first);
  const T* keys = memory_of<T>(work, 0, sequence, shared) + first * d.features;
  const T* values = memory_of<T>(work, 1, sequence, shared) + first * d.features;
  const int64_t row_floats = (tokens + kLanes - 1) / kLanes * kLanes;
  float *memory = scratch(4, kMostHeads * row_floats), *scores[kMostHeads], *y[kMostHeads];
  for (int64_t first_head = 0; first_head < heads; first_head += kMostHeads) {
    const int count = int(std::min(heads - first_head, int64_t(kMostHeads)));
    float factors[kMostHeads];
    for (int h = 0; h < count; ++h) {
      const int64_t head = shared * heads + first_head + h, row = sequence * d.heads + head;
      scores[h] = memory + h * row_floats;
      y[h] = work.parts + (row * work.part_count + part) * work.part_floats();
      score_tokens(work.query + row * d.features, keys, tokens, d.features,
                   first_head + h == 0 ? values : nullptr, scores[h]);
      factors[h] = softmax_in_place(scores[h], tokens, d.scale, y[h] + d.features);
      y[h][d.features + 1] = 1.0f / factors[h];
    }
    const auto weigh_all = [&](auto number) {
      weigh_values<number.value>(values, scores, tokens, d.features, factors, y);
    };
    if (count == 4)
      weigh_all(std::integral_constant<int, 4>());
    else if (count == 3)
      weigh_all(std::integral_constant<int, 3>());
    else if (count == 2)
      weigh_all(std::integral_constant<int, 2>());
    else
      weigh_all(std::integral_constant<int, 1>());
  }
}

// The mean of all parts, with the weights that the softmax over all tokens gives them.
void join_parts(const void* data, int64_t row) {
  const LayerWork& work = *static_cast<const LayerWork*>(data);
  const int64_t features = work.step->decoder->features, heads = work.step->decoder->heads;
  float* parts = work.parts + row * work.part_count * work.part_floats();
  float *y = floats(work.attended) + row / heads * work.attended.stride + row % heads * features;
  float top = parts[features], sum = 0.0f;
  for (int64_t p = 1; p < work.part_count; ++p)
    top = std::max(top, parts[p * work.part_floats() + features]);
  for (int64_t p = 0; p < work.part_count; ++p) {
    float* part = parts + p * work.part_floats();
    part[features] = std::exp2(part[features] - top) * part[features + 1];
    sum += part[features];
  }
  memset(y, 0, features * sizeof(float));
  for (int64_t p = 0; p < work.part_count; ++p) {
    const float *part = parts + p * work.part_floats(), weight = part[features] / sum;
    for (int64_t i = 0; i < features; i += kLanes)
      store(y + i, load(y + i) + load(part + i) * weight);
  }
}

// x += W y, for the rows of an item.
void add_product(const LayerWork& work, const RowMatrix& matrix, const Inputs& in, int64_t item) {
  const Range range(matrix.rows, work.threads, item);
  float sums[kMostSequences * kMostItemRows];
  multiply(matrix, in, work.step->sequences, range.first, range.last, sums - range.first,
           kMostItemRows);
  for (int64_t s = 0; s < work.step->sequences; ++s)
    for (int64_t row = range.first; row < range.last; ++row)
      work.x[s * matrix.rows + row] += sums[s * kMostItemRows + row - range.first];
}

void project_back(const void* data, int64_t item) {
  const LayerWork& work = *static_cast<const LayerWork*>(data);
  add_product(work, work.layer->out, work.attended, item);
}

void gate_and_up(const void* data, int64_t item) {
  const LayerWork& work = *static_cast<const LayerWork*>(data);
  const Range range(work.layer->gate.rows, work.threads, item);
  const int64_t first = range.first, rows = range.last - first, count = work.step->sequences;
  float gates[kMostSequences * kMostItemRows], ups[kMostSequences * kMostItemRows];
  multiply(work.layer->gate, work.normed, count, first, range.last, gates - first, kMostItemRows);
  multiply(work.layer->up, work.normed, count, first, range.last, ups - first, kMostItemRows);
  for (int64_t s = 0; s < count; ++s) {
    float *gate = gates + s * kMostItemRows, *up = ups + s * kMostItemRows;
    for (int64_t i = rows; i % kLanes; ++i) gate[i] = up[i] = 0.0f;
    for (int64_t i = 0; i < rows; i += kLanes)
      store(gate + i, silu(load(gate + i)) * load(up + i));
    memcpy(floats(work.middle) + s * work.middle.stride + first, gate, rows * sizeof(float));
  }
}

void project_down(const void* data, int64_t item) {
  const LayerWork& work = *static_cast<const LayerWork*>(data);
  add_product(work, work.layer->down, work.middle, item);
}

void lead(const DecoderStep& step, Crew& crew, int threads) {
  const Decoder& d = *step.decoder;
  const int64_t n = step.sequences, wide = d.heads * d.features,
                narrow = d.memory_heads * d.features;
  const size_t rooms[] = {inputs_room(n, d.hidden), inputs_room(n, wide), inputs_room(n, d.middle)};
  const size_t room = rooms[0] + rooms[1] + rooms[2] + n * (d.hidden + wide + 2 * narrow) + 64;
  float* memory = scratch(0, room);
  memset(memory, 0, room * sizeof(float));  // the padding of all vectors
  LayerWork work;
  work.step = &step;
  work.threads = threads;
  work.normed = lay_out(memory, n, d.hidden);
  work.attended = lay_out(memory += rooms[0], n, wide);
  work.middle = lay_out(memory += rooms[1], n, d.middle);
  work.x = memory += rooms[2];
  work.query = memory += n * d.hidden;
  work.key = memory += n * wide;
  work.value = memory + n * narrow;
  const int64_t tokens = step.past + 1, even = (tokens / (8 * threads) + kLanes) / kLanes * kLanes;
  work.part_tokens = std::min(std::max(even, kLeastTokens), kMostTokens);
  work.part_count = (tokens + work.part_tokens - 1) / work.part_tokens;
  work.parts = scratch(1, n * d.heads * work.part_count * work.part_floats());
  memcpy(work.x, step.input, n * d.hidden * sizeof(float));
  unsigned kinds = 0;
  for (int64_t i = 0; i < d.layers; ++i) {
    const DecoderLayer& l = d.layer[i];
    for (const RowMatrix* m : {&l.query, &l.key, &l.value, &l.out, &l.gate, &l.up, &l.down})
      kinds |= bit(m->kind);
  }
  for (work.index = 0; work.index < d.layers; ++work.index) {
    work.layer = d.layer + work.index;
    normalize_all(work, work.layer->norm_before);
    arrange(work.normed, n, kinds);
    crew.run(project, &work, items(wide, threads) + 2 * items(narrow, threads));
    step.bfloats ? remember<uint16_t>(work) : remember<float>(work);
    crew.run(step.bfloats ? attend<uint16_t> : attend<float>, &work,
             n * d.memory_heads * work.part_count);
    if (work.part_count > kManyParts)
      crew.run(join_parts, &work, n * d.heads);
    else
      for (int64_t row = 0; row < n * d.heads; ++row) join_parts(&work, row);
    arrange(work.attended, n, kinds);
    crew.run(project_back, &work, items(d.hidden, threads));
    normalize_all(work, work.layer->norm_between);
    arrange(work.normed, n, kinds);
    crew.run(gate_and_up, &work, items(d.middle, threads));
    arrange(work.middle, n, kinds);
    crew.run(project_down, &work, items(d.hidden, threads));
  }
  for (int64_t s = 0; s < n; ++s)
    normalize(work.x + s * d.hidden, d.norm, d.hidden, d.eps, step.output + s * d.hidden);
}

struct DecoderJob {
  const DecoderStep* step;
  Crew* crew;
  int threads;
};

// The first task leads, and all others follow it.
void decoder_step(const void* data, int64_t task) {
  const DecoderJob& job = *static_cast<const DecoderJob*>(data);
  if (task > 0) return job.crew->follow();
  struct Finish {
    Crew* crew;
    ~Finish() { crew->finish(); }
  } finish{job.crew};
  lead(*job.step, *job.crew, job.threads);
}

// Runs the tasks of `count` threads, of which none waits for another to arrive.
void decoder(const void* data, int threads) {
  Crew crew;
  const DecoderJob job{static_cast<const DecoderStep*>(data), &crew, threads};
  parallel(decoder_step, &job, threads, threads);
}

// Rows of a matrix, with the vectors laid out by `row_product`.
struct RowJob {
  const RowMatrix* matrix;
  Inputs in;
  int64_t count;
  float* y;
  int threads;
};

void multiply_item(const void* data, int64_t item) {
  const RowJob& job = *static_cast<const RowJob*>(data);
  const Range range(job.matrix->rows, job.threads, item);
  multiply(*job.matrix, job.in, job.count, range.first, range.last, job.y, job.matrix->rows);
}

// y = x W^T + b for up to kMostSequences vectors.
void row_product(const RowMatrix& matrix, const float* x, int64_t count, float* y, int threads) {
  const size_t room = inputs_room(count, matrix.inner);
  float* memory = scratch(0, room);
  memset(memory, 0, room * sizeof(float));
  threads = std::max(threads, 1);
  RowJob job{&matrix, lay_out(memory, count, matrix.inner), count, y, threads};
  for (int64_t t = 0; t < count; ++t)
    memcpy(memory + t * job.in.stride, x + t * matrix.inner, matrix.inner * sizeof(float));
  arrange(job.in, count, bit(matrix.kind));
  parallel(multiply_item, &job, items(matrix.rows, threads), threads);
}

}  // namespace
}  // namespace torchcram
