// Values to the places that a bit mask keeps.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// From the place `at` on, of which `used` values are gone; returns how many are used in the end, or
// -1 where there are too few.
template <class T>
int64_t expand(const uint8_t* mask, int64_t at, int64_t count, const T* values, int64_t used,
               int64_t stored, T* out) {
  for (; at < count; at += 8) {
    const unsigned bits = mask[at / 8];
    const int here = count - at < 8 ? int(count - at) : 8;
    if (here == 8 && stored - used >= 8) {  // without a branch, and never beyond the values
      for (int i = 0; i < 8; ++i) {
        const T one = bits >> i & 1;
        out[at + i] = values[used] & T(0 - one);
        used += one;
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
    _mm512_storeu_si512(out + at, _mm512_maskz_expand_epi32(bits, _mm512_loadu_si512(values + used)));
    used += __builtin_popcount(bits);
  }
  return expand(mask, at, count, values, used, stored, out);
}
#else
inline int64_t expand_wide(const uint8_t*, int64_t, const uint32_t*, int64_t, uint32_t*) { return 0; }
#endif

}  // namespace
