// The C interface.
#include <vector>

#include "packed.h"

namespace torchcram {

int64_t pack(const float* weight, int64_t rows, int64_t inner, int64_t form,
             const uint16_t* offsets, int64_t block, int64_t panel_bytes, void* out, int64_t room);
bool check(const void* memory, int64_t bytes);
void use_openmp(void* parallel);

static const Kernels* best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#if !defined(TORCHCRAM_NO_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
    return &kAvx512;
#endif
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kAvx2;
#endif
  return &kPortable;
}

static const Kernels* kernels = best();

}  // namespace torchcram

using namespace torchcram;

#define TORCHCRAM_EXPORT extern "C" __attribute__((visibility("default")))

// Goes up with every change of the functions below: another number is of other sources.
TORCHCRAM_EXPORT int torchcram_interface() { return 2; }

TORCHCRAM_EXPORT const char* torchcram_level() { return kernels->name; }

// For tests: 2 AVX-512, 1 AVX2, 0 portable; false where the machine does not have it.
TORCHCRAM_EXPORT int torchcram_use_level(int level) {
  const Kernels* most = best();
#if defined(__x86_64__)
#if defined(TORCHCRAM_NO_AVX512)
  const Kernels* known[] = {&kPortable, &kAvx2};
#else
  const Kernels* known[] = {&kPortable, &kAvx2, &kAvx512};
#endif
  int top = 0;
  while (known[top] != most) ++top;
#else
  const Kernels* known[] = {most};
  const int top = 0;
#endif
  if (level < 0 || level > top) return 0;
  kernels = known[level];
  return 1;
}

TORCHCRAM_EXPORT void torchcram_use_openmp(void* parallel) { use_openmp(parallel); }

// Every function below that allocates memory returns kNoMemory where there is not enough of it.

// The form of a matrix: 2 pairs, 3 fours. Returns how many bytes it takes, and writes them where
// there is room for them; -1 where it cannot be packed.
TORCHCRAM_EXPORT int64_t torchcram_pack_linear(const float* weight, int64_t rows, int64_t inner,
                                               int64_t form, int64_t block, void* out,
                                               int64_t room) {
  if (inner < 1 || block < 1) return -1;
  return without_exceptions([&]() -> int64_t {
    std::vector<uint16_t> offsets(inner);
    for (int64_t k = 0; k < inner; ++k) offsets[k] = uint16_t((k % block + 1) * kPanelBytes);
    return pack(weight, rows, inner, form, offsets.data(), block, (block + 1) * kPanelBytes, out,
                room);
  });
}

// For panels of images; those of pixels are packed as Linear layers are.
TORCHCRAM_EXPORT int64_t torchcram_pack_images(const float* weight, int64_t rows, int64_t form,
                                               const Convolution* shape, void* out, int64_t room) {
  const Convolution& c = *shape;
  Strip strip;
  if (c.channels < 1 || c.kernel_h < 1 || !strip.lay_out(c)) return -1;
  const int64_t kernel = c.kernel_h * c.kernel_w, slots = c.kernel_h * strip.slots;
  const int64_t most = kPanelMost / (slots * 64);
  const int64_t channels = most > c.channels ? c.channels : most < 1 ? 1 : most;
  const int64_t bytes = kPanelBytes + channels * slots * 64;
  if (bytes > kPanelRoom) return -1;
  return without_exceptions([&]() -> int64_t {
    std::vector<uint16_t> offsets(c.channels * kernel);
    for (int64_t k = 0; k < c.channels * kernel; ++k) {
      const int64_t row = k / kernel % channels * c.kernel_h + k / c.kernel_w % c.kernel_h;
      const int64_t slot = row * strip.slots + strip.slot_of[k % c.kernel_w];
      offsets[k] = uint16_t(kPanelBytes + slot * 64);
    }
    return pack(weight, rows, c.channels * kernel, form, offsets.data(), channels * kernel, bytes,
                out, room);
  });
}

TORCHCRAM_EXPORT int torchcram_check(const void* memory, int64_t bytes) {
  return check(memory, bytes);
}

#include "layers.h"
