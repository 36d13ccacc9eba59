// Decodes stored values: expands them by a bit mask and multiplies integers by their scales.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Expands from position `at` on, after `used` values have been consumed. Returns the number of
// values consumed in total, or -1 if there are too few.
template <class T>
int64_t expand(const uint8_t* mask, int64_t at, int64_t count, const T* values, int64_t used,
               int64_t stored, T* out) {
  for (; at < count; at += 8) {
    const unsigned bits = mask[at / 8];
    const int here = count - at < 8 ? int(count - at) : 8;
    if (here == 8 && stored - used >= 8) {  // branch-free, and never beyond the values
      for (int i = 0; i < 8; ++i) {
        const T kept = bits >> i & 1;
        out[at + i] = values[used] & T(0 - kept);
        used += kept;
      }
      continue;
    }
    for (int i = 0; i < here; ++i) {
      const bool kept = bits >> i & 1;
      if (kept && used == stored) return -1;
      out[at + i] = kept ? values[used++] : T(0);
    }
  }
  return used;
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) int64_t expand_wide(const uint8_t* mask, int64_t count,
                                                       const uint32_t* values, int64_t stored,
                                                       uint32_t* out) {
  int64_t at = 0, used = 0;
  for (; at + 16 <= count && stored - used >= 16; at += 16) {
    uint16_t bits;
    memcpy(&bits, mask + at / 8, 2);
    _mm512_storeu_si512(out + at,
                        _mm512_maskz_expand_epi32(bits, _mm512_loadu_si512(values + used)));
    used += __builtin_popcount(bits);
  }
  return expand(mask, at, count, values, used, stored, out);
}
#else
inline int64_t expand_wide(const uint8_t*, int64_t, const uint32_t*, int64_t, uint32_t*) {
  return 0;
}
#endif

int64_t expand_words(const uint8_t* mask, int64_t count, const uint32_t* values, int64_t stored,
                     uint32_t* out) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return expand_wide(mask, count, values, stored, out);
#endif
  return expand(mask, 0, count, values, 0, stored, out);
}

constexpr int kChunk = 2048;  // positions decoded at a time; their buffers stay in L1
#define TORCHCRAM_INLINE inline __attribute__((always_inline))

// Packed integers of `bits` bits, lowest bit first. The lowest integer encodes -0.0.
struct Integers {
  const uint8_t* packed;
  int64_t bytes;
  int bits;
  float number[256];

  Integers(const void* packed, int64_t stored, int bits)
      : packed(static_cast<const uint8_t*>(packed)), bytes((stored * bits + 7) / 8), bits(bits) {
    const int sign = bits ? 1 << (bits - 1) : 0;
    for (int code = 0; code < 2 * sign; ++code) number[code] = code < sign ? code : code - 2 * sign;
    number[sign] = -0.0f;
  }

  // Unpacks `count` integers from `first`, a multiple of 8, on; writes up to 7 more.
  TORCHCRAM_INLINE void read(int64_t first, int64_t count, float* out) const {
    const uint8_t* at = packed + first / 8 * bits;
    for (int64_t i = 0; i < count; i += 8, at += bits) {
      uint64_t word = 0;
      const int64_t left = packed + bytes - at;
      if (left >= 8)
        memcpy(&word, at, 8);
      else
        memcpy(&word, at, left < bits ? left : bits);
      for (int j = 0; j < 8; ++j) out[i + j] = number[word >> (j * bits) & ((1 << bits) - 1)];
    }
  }
};

#if defined(__x86_64__)
#define TORCHCRAM_WIDE __attribute__((target("avx512f,avx512bw,avx512vl,popcnt")))

// The same for 4 and 8 bits, 16 integers at a time; the last ones go through `read`.
TORCHCRAM_WIDE void read_wide(const Integers& from, int64_t first, int64_t count, float* out) {
  const uint8_t* at = from.packed + first / 8 * from.bits;
  const __m512 table = _mm512_loadu_ps(from.number);
  int64_t i = 0;
  if (from.bits == 8)
    for (; i + 16 <= count; i += 16, at += 16) {
      const __m512i code = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at));
      const __mmask16 lowest = _mm512_cmpeq_epi32_mask(code, _mm512_set1_epi32(-128));
      const __m512 number = _mm512_cvtepi32_ps(code);
      _mm512_storeu_ps(out + i, _mm512_mask_mov_ps(number, lowest, _mm512_set1_ps(-0.0f)));
    }
  else if (from.bits == 4)
    for (; i + 16 <= count; i += 16, at += 8) {
      const __m128i two = _mm_loadl_epi64((const __m128i*)at), half = _mm_set1_epi8(15);
      const __m128i low = _mm_and_si128(two, half);
      const __m128i high = _mm_and_si128(_mm_srli_epi16(two, 4), half);
      const __m512i code = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high));
      _mm512_storeu_ps(out + i, _mm512_permutexvar_ps(code, table));
    }
  from.read(first + i, count - i, out + i);
}

// Bypasses the caches: a whole tensor would evict everything else.
TORCHCRAM_WIDE void store_wide(const float* from, int64_t count, float* out) {
  int64_t i = 0;
  if (reinterpret_cast<uintptr_t>(out) % 64 == 0)
    for (; i + 16 <= count; i += 16) _mm512_stream_ps(out + i, _mm512_loadu_ps(from + i));
  memcpy(out + i, from + i, (count - i) * sizeof(float));
}
#else
inline void read_wide(const Integers&, int64_t, int64_t, float*) {}
inline void store_wide(const float*, int64_t, float*) {}
#endif

struct Stored {
  const uint8_t* mask;  // null if every position has a value
  int64_t count;        // positions
  const void* values;
  int64_t stored;
  int bits;             // bits of an integer; 0 for floats
  const float* scales;  // may be null
  int64_t per_scale;    // positions that share a scale
  float* out;
};

int64_t count_ones(const uint8_t* mask, int64_t places) {
  int64_t count = 0, at = 0;
  for (; at + 64 <= places; at += 64) {
    uint64_t bits;
    memcpy(&bits, mask + at / 8, 8);
    count += __builtin_popcountll(bits);
  }
  for (; at < places; ++at) count += mask[at / 8] >> at % 8 & 1;
  return count;
}

// Multiplies the values of positions from `at` on by their scales.
TORCHCRAM_INLINE void scale(const Stored& s, int64_t at, int64_t count, float* values) {
  for (int64_t i = 0; i < count;) {
    const int64_t row = (at + i) / s.per_scale, next = (row + 1) * s.per_scale - at;
    const float factor = s.scales[row];
    for (const int64_t stop = next < count ? next : count; i < stop; ++i) values[i] *= factor;
  }
}

// Returns the number of values consumed, or -1 if there are too few.
TORCHCRAM_INLINE int64_t decode(const Stored& s, bool wide) {
  const Integers integers(s.values, s.stored, s.bits);
  float unpacked[kChunk + 32], expanded[kChunk];
  int64_t used = 0;
  for (int64_t at = 0; at < s.count; at += kChunk) {
    const int64_t here = s.count - at < kChunk ? s.count - at : kChunk;
    const int64_t needed = s.mask ? count_ones(s.mask + at / 8, here) : here;
    if (needed > s.stored - used) return -1;
    const float* from = static_cast<const float*>(s.values) + used;
    if (s.bits) {
      const int64_t first = used / 8 * 8, count = needed + used % 8;
      wide ? read_wide(integers, first, count, unpacked) : integers.read(first, count, unpacked);
      from = unpacked + used % 8;
    }
    if (!s.mask) {
      memcpy(expanded, from, here * sizeof(float));
    } else {
      // more values can be read than are needed
      const int64_t available = s.bits ? needed + 16 : s.stored - used;
      const uint32_t* values = reinterpret_cast<const uint32_t*>(from);
      uint32_t* out = reinterpret_cast<uint32_t*>(expanded);
      wide ? expand_wide(s.mask + at / 8, here, values, available, out)
           : expand(s.mask + at / 8, 0, here, values, 0, available, out);
    }
    if (s.scales) scale(s, at, here, expanded);
    if (wide)
      store_wide(expanded, here, s.out + at);
    else
      memcpy(s.out + at, expanded, here * sizeof(float));
    used += needed;
  }
  return used;
}

#if defined(__x86_64__)
TORCHCRAM_WIDE int64_t decode_wide(const Stored& s) {
  const int64_t used = decode(s, true);
  _mm_sfence();
  return used;
}
#endif

}  // namespace

// Returns the number of bits set among the first `places` of a mask.
extern "C" __attribute__((visibility("default"))) int64_t torchcram_count_ones(const uint8_t* mask,
                                                                               int64_t places) {
  return count_ones(mask, places);
}

// out[i] = table[bytes[i]] for rows of `wide` bytes.
extern "C" __attribute__((visibility("default"))) void torchcram_look_up(
    const uint8_t* table, int64_t wide, const uint8_t* bytes, int64_t count, uint8_t* out) {
  if (wide < 1) return;  // nothing to copy, and `out` may be null
  if (wide == 1)
    for (int64_t i = 0; i < count; ++i) out[i] = table[bytes[i]];
  else
    for (int64_t i = 0; i < count; ++i) memcpy(out + i * wide, table + bytes[i] * wide, wide);
}

// Decodes floats or integers. Returns the number of values consumed, or -1 if there are too few.
extern "C" __attribute__((visibility("default"))) int64_t
torchcram_decode(const uint8_t* mask, int64_t count, const void* values, int64_t stored, int bits,
                 const float* scales, int64_t per_scale, float* out) {
  const Stored s{mask, count, values, stored, bits, scales, per_scale, out};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl"))
    return decode_wide(s);
#endif
  return decode(s, false);
}

// out[i] = the next value if bit i of the mask is set, else zero; values have 1, 2, 4 or 8 bytes.
// Returns the number of values consumed, or -1 if there are too few.
extern "C" __attribute__((visibility("default"))) int64_t
torchcram_expand(const uint8_t* mask, int64_t count, const void* values, int64_t stored,
                 int64_t size, void* out) {
  switch (size) {
    case 1:
      return expand(mask, 0, count, static_cast<const uint8_t*>(values), 0, stored,
                    static_cast<uint8_t*>(out));
    case 2:
      return expand(mask, 0, count, static_cast<const uint16_t*>(values), 0, stored,
                    static_cast<uint16_t*>(out));
    case 4:
      return expand_words(mask, count, static_cast<const uint32_t*>(values), stored,
                          static_cast<uint32_t*>(out));
    case 8:
      return expand(mask, 0, count, static_cast<const uint64_t*>(values), 0, stored,
                    static_cast<uint64_t*>(out));
  }
  return -1;
}
