// Values back to the places that a bit mask keeps, whatever their type.
#include "expand.h"

namespace {

int64_t expand_any(const uint8_t* mask, int64_t count, const uint32_t* values, int64_t stored,
                   uint32_t* out) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return expand_wide(mask, count, values, stored, out);
#endif
  return expand(mask, 0, count, values, 0, stored, out);
}

}  // namespace

// out[i] = the next value where bit i of the mask is set, zero elsewhere; values of 1, 2, 4 or 8
// bytes. Returns how many values were used, or -1 where there are too few.
extern "C" __attribute__((visibility("default"))) int64_t torchcram_expand(
    const uint8_t* mask, int64_t count, const void* values, int64_t stored, int64_t size, void* out) {
  switch (size) {
    case 1: return expand(mask, 0, count, static_cast<const uint8_t*>(values), 0, stored, static_cast<uint8_t*>(out));
    case 2: return expand(mask, 0, count, static_cast<const uint16_t*>(values), 0, stored, static_cast<uint16_t*>(out));
    case 4: return expand_any(mask, count, static_cast<const uint32_t*>(values), stored, static_cast<uint32_t*>(out));
    case 8: return expand(mask, 0, count, static_cast<const uint64_t*>(values), 0, stored, static_cast<uint64_t*>(out));
  }
  return -1;
}
