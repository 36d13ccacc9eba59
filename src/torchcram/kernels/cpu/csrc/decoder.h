// One token at a time through a Llama-like decoder, for one to four sequences.
//
// A token reads every weight once and computes little with it, so that the time is that of reading:
// weights are bit masks and the values that are not zero, in 32, 16 or 8 bits (RowMatrix in
// packed.h). All layers run in one parallel region, because entering one takes as long as a layer.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>

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

constexpr int64_t kRowsPerItem = 32;

constexpr int64_t padded(int64_t inner) { return (inner + kMaskBits - 1) / kMaskBits * kMaskBits; }

// Vectors that matrices are multiplied with: floats, padded with zeros to whole masks. For values
// in 8 bits on machines with the instructions for it, also magnitudes in 7 bits, bits that mark
// negative numbers, and a scale for every 64 numbers.
struct Inputs {
  const float* x;
  int64_t stride;
  uint8_t* magnitudes;
  uint64_t* negative;
  float* scales;
};

#if defined(TORCHCRAM_AVX512)

bool can_multiply_bytes() {
  static const bool can =
      __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512vnni");
  return can;
}

// Rounds `count` vectors; NaN and infinities make the scale of their 64 numbers not finite.
void round_inputs(const Inputs& in, int64_t count) {
  const int64_t groups = in.stride / kMaskBits;
  for (int64_t g = 0; g < count * groups; ++g) {
    const float* x = in.x + g * kMaskBits;
    Ints most{};
    for (int i = 0; i < kMaskBits; i += 16) most = maximum(most, (Ints)absolute(load(x + i)));
    const int32_t bits = _mm512_reduce_max_epi32((__m512i)most);
    float top;
    memcpy(&top, &bits, sizeof top);
    in.scales[g] = top / 127.0f;
    const Vector factor = broadcast(top > 0.0f ? 127.0f / top : 0.0f);
    uint64_t negative = 0;
    for (int i = 0; i < kMaskBits; i += 16) {
      const __m512i q = _mm512_cvtps_epi32((__m512)(load(x + i) * factor));
      negative |= uint64_t(_mm512_movepi32_mask(q)) << i;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(in.magnitudes + g * kMaskBits + i),
                       _mm512_cvtepi32_epi8(_mm512_abs_epi32(q)));
    }
    in.negative[g] = negative;
  }
}

template <int T, bool Masked>
__attribute__((target("avx512vbmi2,avx512vnni"))) void multiply_bytes(const RowMatrix& m,
                                                                      const Inputs& in, int64_t row,
                                                                      float* sums) {
  const int64_t groups = in.stride / kMaskBits;
  const uint64_t* masks = m.masks + (Masked ? row * groups : 0);
  const char* values = static_cast<const char*>(m.values) + m.starts[row];
  __m512 total[T];
  for (int t = 0; t < T; ++t) total[t] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    __m512i w = _mm512_loadu_si512(values);
    if (Masked) {
      w = _mm512_maskz_expand_epi8(masks[g], w);
      values += __builtin_popcountll(masks[g]);
    } else {
      values += kMaskBits;
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const int64_t at = t * groups + g;
      const __m512i x = _mm512_loadu_si512(in.magnitudes + at * kMaskBits);
      const __m512i signed_w = _mm512_mask_sub_epi8(w, in.negative[at], _mm512_setzero_si512(), w);
      const __m512i products = _mm512_dpbusd_epi32(_mm512_setzero_si512(), x, signed_w);
      total[t] =
          _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), _mm512_set1_ps(in.scales[at]), total[t]);
    }
  }
  for (int t = 0; t < T; ++t) sums[t] = _mm512_reduce_add_ps(total[t]);
}

// The next values of a mask as 16 floats, zero where the mask has no bit.
template <int Kind>
TORCHCRAM_INLINE Vector expand(const char*& values, __mmask16 mask) {
  const int count = __builtin_popcount(mask);
  if (Kind == kFloats) {
    const __m512 w = _mm512_maskz_expand_ps(mask, _mm512_loadu_ps(values));
    values += 4 * count;
    return (Vector)w;
  }
  if (Kind == kBfloats) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    const __m512i w = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
    values += 2 * count;
    return (Vector)_mm512_maskz_expand_epi32(mask, w);
  }
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
  const __m512i w = _mm512_maskz_expand_epi32(mask, _mm512_cvtepi8_epi32(bytes));
  values += count;
  return (Vector)_mm512_cvtepi32_ps(w);
}

template <int T, int Kind>
void multiply_floats(const RowMatrix& m, const Inputs& in, int64_t row, float* sums) {
  const int64_t groups = in.stride / kMaskBits;
  const uint64_t* masks = m.masks ? m.masks + row * groups : nullptr;
  const char* values = static_cast<const char*>(m.values) + m.starts[row];
  Vector total[T][4] = {};
  for (int64_t g = 0; g < groups; ++g) {
    const uint64_t mask = masks ? masks[g] : ~uint64_t(0);
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const Vector w = expand<Kind>(values, __mmask16(mask >> (16 * part)));
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t)
        total[t][part] += w * load(in.x + t * in.stride + g * kMaskBits + 16 * part);
    }
  }
  for (int t = 0; t < T; ++t)
    sums[t] =
        _mm512_reduce_add_ps((__m512)((total[t][0] + total[t][1]) + (total[t][2] + total[t][3])));
}

#elif defined(TORCHCRAM_NEON)  // the other functions are in neon.h

constexpr bool can_multiply_bytes() { return true; }

#else

bool can_multiply_bytes() { return false; }
void round_inputs(const Inputs&, int64_t) {}

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

#endif

// Multiplies rows with T vectors and adds the bias; sums[t * stride + row].
template <int T>
void multiply_rows(const RowMatrix& m, const Inputs& in, int64_t first, int64_t last, float* sums,
                   int64_t stride) {
  const bool bytes = m.kind == kBytes && can_multiply_bytes();
  for (int64_t row = first; row < last; ++row) {
    float sum[T];
    if (bytes) {
#if defined(TORCHCRAM_AVX512)
      (m.masks ? multiply_bytes<T, true> : multiply_bytes<T, false>)(m, in, row, sum);
#elif defined(TORCHCRAM_NEON)
      multiply_bytes<T>(m, in, row, sum);
#endif
    } else if (m.kind == kFloats) {
      multiply_floats<T, kFloats>(m, in, row, sum);
    } else if (m.kind == kBfloats) {
      multiply_floats<T, kBfloats>(m, in, row, sum);
    } else {
      multiply_floats<T, kBytes>(m, in, row, sum);
    }
    const float scale = m.scales ? m.scales[row] : 1.0f, bias = m.bias ? m.bias[row] : 0.0f;
    for (int t = 0; t < T; ++t) sums[t * stride + row] = sum[t] * scale + bias;
  }
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
  return width + width / 4 + width / kMaskBits * 3 + 64;  // floats, bytes, bits and scales
}

// Lays the vectors out in memory; the floats are to be written, their padding with zeros.
Inputs lay_out(float* memory, int64_t count, int64_t inner) {
  const int64_t width = padded(inner) * count;
  Inputs in;
  in.x = memory;
  in.stride = padded(inner);
  in.negative = reinterpret_cast<uint64_t*>(memory + width);
  in.scales = memory + width + width / kMaskBits * 2;
  in.magnitudes = reinterpret_cast<uint8_t*>(memory + width + width / kMaskBits * 3 + 16);
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
  Inputs normed, attended, middle;
  float *x, *query, *key, *value;  // x: [sequence][hidden]; the others: [sequence][head][feature]
};

int64_t items(int64_t rows) { return (rows + kRowsPerItem - 1) / kRowsPerItem; }

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
    const int64_t rows = matrices[i]->rows, count = items(rows);
    if (item >= count) {
      item -= count;
      continue;
    }
    const int64_t first = item * kRowsPerItem;
    return multiply(*matrices[i], work.normed, work.step->sequences, first,
                    std::min(first + kRowsPerItem, rows), sums[i], rows);
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
float* memory_of(const LayerWork& work, int64_t values, int64_t sequence, int64_t head) {
  const DecoderStep& step = *work.step;
  const Decoder& d = *step.decoder;
  const int64_t row =
      ((work.index * 2 + values) * step.sequences + sequence) * d.memory_heads + head;
  return step.memory + row * step.capacity * d.features;
}

void remember(const LayerWork& work) {
  const DecoderStep& step = *work.step;
  const Decoder& d = *step.decoder;
  for (int64_t s = 0; s < step.sequences; ++s) {
    rotate(work.query + s * d.heads * d.features, d.heads, d.features, step.cosine, step.sine);
    float* key = work.key + s * d.memory_heads * d.features;
    const float* value = work.value + s * d.memory_heads * d.features;
    rotate(key, d.memory_heads, d.features, step.cosine, step.sine);
    for (int64_t h = 0; h < d.memory_heads; ++h) {
      const size_t bytes = d.features * sizeof(float), at = step.past * d.features;
      memcpy(memory_of(work, 0, s, h) + at, key + h * d.features, bytes);
      memcpy(memory_of(work, 1, s, h) + at, value + h * d.features, bytes);
    }
  }
}

void attend(const void* data, int64_t item) {
  const LayerWork& work = *static_cast<const LayerWork*>(data);
  const DecoderStep& step = *work.step;
  const Decoder& d = *step.decoder;
  const int64_t sequence = item / d.heads, head = item % d.heads, tokens = step.past + 1;
  const int64_t shared = head / (d.heads / d.memory_heads);
  const float* query = work.query + item * d.features;
  const float* key = memory_of(work, 0, sequence, shared);
  const float* value = memory_of(work, 1, sequence, shared);
  float* scores = scratch(4, tokens + kLanes);
  for (int64_t t = 0; t < tokens; ++t, key += d.features) {
    Vector sum{};
    for (int64_t i = 0; i < d.features; i += kLanes) sum += load(query + i) * load(key + i);
    scores[t] = fold(sum, [](float a, float b) { return a + b; });
  }
  const float inverse = softmax_in_place(scores, tokens, d.scale);
  float* y = floats(work.attended) + sequence * work.attended.stride + head * d.features;
  for (int64_t i = 0; i < d.features; i += kLanes) {
    Vector sum{};
    for (int64_t t = 0; t < tokens; ++t) sum += load(value + t * d.features + i) * scores[t];
    store(y + i, sum * inverse);
  }
}

// x += W y, for the rows of an item.
void add_product(const LayerWork& work, const RowMatrix& matrix, const Inputs& in, int64_t item) {
  const int64_t first = item * kRowsPerItem, last = std::min(first + kRowsPerItem, matrix.rows);
  float sums[kMostSequences * kRowsPerItem];
  multiply(matrix, in, work.step->sequences, first, last, sums - first, kRowsPerItem);
  for (int64_t s = 0; s < work.step->sequences; ++s)
    for (int64_t row = first; row < last; ++row)
      work.x[s * matrix.rows + row] += sums[s * kRowsPerItem + row - first];
}

void project_back(const void* data, int64_t item) {
  const LayerWork& work = *static_cast<const LayerWork*>(data);
  add_product(work, work.layer->out, work.attended, item);
}

void gate_and_up(const void* data, int64_t item) {
  const LayerWork& work = *static_cast<const LayerWork*>(data);
  const int64_t first = item * kRowsPerItem, rows = work.layer->gate.rows;
  const int64_t last = std::min(first + kRowsPerItem, rows), count = work.step->sequences;
  float gates[kMostSequences * kRowsPerItem] = {}, ups[kMostSequences * kRowsPerItem] = {};
  multiply(work.layer->gate, work.normed, count, first, last, gates - first, kRowsPerItem);
  multiply(work.layer->up, work.normed, count, first, last, ups - first, kRowsPerItem);
  for (int64_t s = 0; s < count; ++s) {
    float *gate = gates + s * kRowsPerItem, *up = ups + s * kRowsPerItem;
    for (int64_t i = 0; i < kRowsPerItem; i += kLanes)
      store(gate + i, silu(load(gate + i)) * load(up + i));
    memcpy(floats(work.middle) + s * work.middle.stride + first, gate,
           (last - first) * sizeof(float));
  }
}

void project_down(const void* data, int64_t item) {
  const LayerWork& work = *static_cast<const LayerWork*>(data);
  add_product(work, work.layer->down, work.middle, item);
}

void lead(const DecoderStep& step, Crew& crew) {
  const Decoder& d = *step.decoder;
  const int64_t n = step.sequences, wide = d.heads * d.features,
                narrow = d.memory_heads * d.features;
  const size_t rooms[] = {inputs_room(n, d.hidden), inputs_room(n, wide), inputs_room(n, d.middle)};
  const size_t room = rooms[0] + rooms[1] + rooms[2] + n * (d.hidden + wide + 2 * narrow) + 64;
  float* memory = scratch(0, room);
  memset(memory, 0, room * sizeof(float));  // the padding of all vectors
  LayerWork work;
  work.step = &step;
  work.normed = lay_out(memory, n, d.hidden);
  work.attended = lay_out(memory += rooms[0], n, wide);
  work.middle = lay_out(memory += rooms[1], n, d.middle);
  work.x = memory += rooms[2];
  work.query = memory += n * d.hidden;
  work.key = memory += n * wide;
  work.value = memory + n * narrow;
  memcpy(work.x, step.input, n * d.hidden * sizeof(float));
  const bool bytes = d.rounds && can_multiply_bytes();
  for (work.index = 0; work.index < d.layers; ++work.index) {
    work.layer = d.layer + work.index;
    normalize_all(work, work.layer->norm_before);
    if (bytes) round_inputs(work.normed, n);
    crew.run(project, &work, items(wide) + 2 * items(narrow));
    remember(work);
    crew.run(attend, &work, n * d.heads);
    if (bytes) round_inputs(work.attended, n);
    crew.run(project_back, &work, items(d.hidden));
    normalize_all(work, work.layer->norm_between);
    if (bytes) round_inputs(work.normed, n);
    crew.run(gate_and_up, &work, items(d.middle));
    if (bytes) round_inputs(work.middle, n);
    crew.run(project_down, &work, items(d.hidden));
  }
  for (int64_t s = 0; s < n; ++s)
    normalize(work.x + s * d.hidden, d.norm, d.hidden, d.eps, step.output + s * d.hidden);
}

struct DecoderJob {
  const DecoderStep* step;
  Crew* crew;
};

// The first task leads, and all others follow it.
void decoder_step(const void* data, int64_t task) {
  const DecoderJob& job = *static_cast<const DecoderJob*>(data);
  if (task > 0) return job.crew->follow();
  struct Finish {
    Crew* crew;
    ~Finish() { crew->finish(); }
  } finish{job.crew};
  lead(*job.step, *job.crew);
}

// Runs the tasks of `count` threads, of which none waits for another to arrive.
void decoder(const void* data, int threads) {
  Crew crew;
  const DecoderJob job{static_cast<const DecoderStep*>(data), &crew};
  parallel(decoder_step, &job, threads, threads);
}

// Rows of a matrix, with the vectors laid out by `row_product`.
struct RowJob {
  const RowMatrix* matrix;
  Inputs in;
  int64_t count;
  float* y;
};

void multiply_item(const void* data, int64_t item) {
  const RowJob& job = *static_cast<const RowJob*>(data);
  const int64_t first = item * kRowsPerItem, rows = job.matrix->rows;
  multiply(*job.matrix, job.in, job.count, first, std::min(first + kRowsPerItem, rows), job.y,
           rows);
}

// y = x W^T + b for up to kMostSequences vectors.
void row_product(const RowMatrix& matrix, const float* x, int64_t count, float* y, int threads) {
  const size_t room = inputs_room(count, matrix.inner);
  float* memory = scratch(0, room);
  memset(memory, 0, room * sizeof(float));
  RowJob job{&matrix, lay_out(memory, count, matrix.inner), count, y};
  for (int64_t t = 0; t < count; ++t)
    memcpy(memory + t * job.in.stride, x + t * matrix.inner, matrix.inner * sizeof(float));
  if (matrix.kind == kBytes && can_multiply_bytes()) round_inputs(job.in, count);
  parallel(multiply_item, &job, items(matrix.rows), threads);
}

}  // namespace
}  // namespace torchcram
