// The C interface.
#include <initializer_list>
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
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
    return &kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kAvx2;
#endif
  return &kPortable;
}

static const Kernels* kernels = best();

}  // namespace torchcram

using namespace torchcram;

#define TORCHCRAM_EXPORT extern "C" __attribute__((visibility("default")))

TORCHCRAM_EXPORT const char* torchcram_level() { return kernels->name; }

// For tests: 2 AVX-512, 1 AVX2, 0 portable; false where the machine does not have it.
TORCHCRAM_EXPORT int torchcram_use_level(int level) {
  const Kernels* most = best();
#if defined(__x86_64__)
  const Kernels* known[] = {&kPortable, &kAvx2, &kAvx512};
  const int top = most == &kAvx512 ? 2 : most == &kAvx2 ? 1 : 0;
#else
  const Kernels* known[] = {most};
  const int top = 0;
#endif
  if (level < 0 || level > top) return 0;
  kernels = known[level];
  return 1;
}

TORCHCRAM_EXPORT void torchcram_use_openmp(void* parallel) { use_openmp(parallel); }

// The form of a matrix: 2 pairs, 4 patterns. Returns how many bytes it takes, and writes them where
// there is room for them.
TORCHCRAM_EXPORT int64_t torchcram_pack_linear(const float* weight, int64_t rows, int64_t inner,
                                               int64_t form, int64_t block, void* out,
                                               int64_t room) {
  std::vector<uint16_t> offsets(inner);
  for (int64_t k = 0; k < inner; ++k) offsets[k] = uint16_t(k % block * kPanelBytes);
  return pack(weight, rows, inner, form, offsets.data(), block, block * kPanelBytes, out, room);
}

// For panels of images; those of pixels are packed as Linear layers are.
TORCHCRAM_EXPORT int64_t torchcram_pack_images(const float* weight, int64_t rows, int64_t form,
                                               const Convolution* shape, void* out, int64_t room) {
  const Convolution& c = *shape;
  Strip strip;
  if (!strip.lay_out(c)) return -1;
  const int64_t kernel = c.kernel_h * c.kernel_w, slots = c.kernel_h * strip.slots;
  const int64_t most = kPanelMost / (slots * 64);
  const int64_t channels = most > c.channels ? c.channels : most < 1 ? 1 : most;
  if (channels * slots * 64 > 65536) return -1;
  std::vector<uint16_t> offsets(c.channels * kernel);
  for (int64_t k = 0; k < c.channels * kernel; ++k) {
    const int64_t row = k / kernel % channels * c.kernel_h + k / c.kernel_w % c.kernel_h;
    offsets[k] = uint16_t((row * strip.slots + strip.slot_of[k % c.kernel_w]) * 64);
  }
  return pack(weight, rows, c.channels * kernel, form, offsets.data(), channels * kernel,
              channels * slots * 64, out, room);
}

TORCHCRAM_EXPORT int torchcram_check(const void* memory, int64_t bytes) {
  return check(memory, bytes);
}

// Whether the blocks of a matrix fit its panel, if each unit of k takes so many bytes there.
static bool fits(const Packed& packed, int64_t unit, int64_t bytes) {
  for (int64_t block = 0; block < packed.blocks(); ++block) {
    const int64_t from = packed.inner_starts[block], to = packed.inner_starts[block + 1];
    if (from % unit || to % unit) return false;
    if ((to - from) / unit * bytes > packed.inner_starts[packed.blocks() + 1]) return false;
  }
  return true;
}

static Job begin(const Packed& packed, const float* x, const float* bias, const float* residual,
                 int activation, float* y) {
  Job job;
  job.packed = &packed, job.input = x, job.bias = bias, job.residual = residual;
  job.activation = activation, job.output = y;
  return job;
}

static int64_t parts(int64_t tasks, int threads, const Packed& packed) {
  return tasks >= threads ? 1 : packed.groups();
}

// The three return whether the matrix is of the shape that is asked for; nothing is done if not.
TORCHCRAM_EXPORT int torchcram_linear(const float* x, int64_t tokens, int64_t inner, int64_t rows,
                                      const void* memory, const float* bias, const float* residual,
                                      int activation, float* y, int threads) {
  const Packed packed(memory);
  const Header& h = *packed.header;
  if (h.magic != kMagic || h.inner != inner || h.rows != rows) return 0;
  if (!fits(packed, 1, kPanelBytes)) return 0;
  const int64_t panels = (tokens + kPanel - 1) / kPanel;
  const int64_t splits = parts(panels, threads, packed);
  Job job = begin(packed, x, bias, residual, activation, y);
  job.tokens = tokens, job.splits = splits;
  parallel(kernels->linear, &job, panels * splits, threads);
  return 1;
}

// Whether there are kernels for 8 bits here.
TORCHCRAM_EXPORT int torchcram_has_int8() {
#if defined(__x86_64__)
  return kernels->linear_int8 != nullptr && __builtin_cpu_supports("avx512vnni");
#else
  return 0;
#endif
}

// A Linear layer in 8 bits, or two where there is a second, an activation after the first.
TORCHCRAM_EXPORT int torchcram_linear_int8(const float* x, int64_t tokens, int64_t inner,
                                           int64_t rows, const Layer8* first, int activation,
                                           const Layer8* second, const float* residual, float* y,
                                           int threads) {
  if (!torchcram_has_int8()) return 0;
  const Packed packed(first->packed), then(second ? second->packed : first->packed);
  const Header &h = *packed.header, &t = *then.header;
  for (const Header* each : {&h, &t})
    if (each->magic != kMagic || each->form != kPairs) return 0;
  if (!fits(packed, 1, kPanelBytes) || !fits(then, 1, kPanelBytes)) return 0;
  if (h.inner != (inner + 3) / 4 || t.rows != rows) return 0;
  if (second && t.inner != (h.rows + 3) / 4) return 0;
  const int64_t panels = (tokens + kPanel - 1) / kPanel;
  const int64_t splits = second ? 1 : parts(panels, threads, packed);
  Job job = begin(packed, x, first->bias, residual, activation, y);
  job.tokens = tokens, job.splits = splits;
  job.inner = inner, job.start = first->start, job.scales = first->scales;
  if (second) {
    job.then = &then, job.then_bias = second->bias;
    job.then_start = second->start, job.then_scales = second->scales;
  }
  parallel(kernels->linear_int8, &job, panels * splits, threads);
  return 1;
}

// Two Linear layers, an activation between them.
TORCHCRAM_EXPORT int torchcram_feed_forward(const float* x, int64_t tokens, int64_t inner,
                                            int64_t rows, const void* first, const float* bias,
                                            int activation, const void* second,
                                            const float* then_bias, const float* residual, float* y,
                                            int threads) {
  const Packed packed(first), then(second);
  const Header &h = *packed.header, &t = *then.header;
  if (h.magic != kMagic || t.magic != kMagic) return 0;
  if (h.inner != inner || t.rows != rows || h.rows != t.inner) return 0;
  if (!fits(packed, 1, kPanelBytes) || !fits(then, 1, kPanelBytes)) return 0;
  Job job = begin(packed, x, bias, residual, activation, y);
  job.tokens = tokens, job.then = &then, job.then_bias = then_bias;
  parallel(kernels->linear, &job, (tokens + kPanel - 1) / kPanel, threads);
  return 1;
}

TORCHCRAM_EXPORT int torchcram_convolution(const float* x, const Convolution* shape, int64_t rows,
                                           const void* memory, int by_images, const float* bias,
                                           const float* residual, int activation, float* y,
                                           int threads) {
  const Packed packed(memory);
  const Header& h = *packed.header;
  const Convolution& c = *shape;
  if (h.magic != kMagic || h.rows != rows) return 0;
  if (h.inner != c.channels * c.kernel_h * c.kernel_w) return 0;
  Strip strip;
  if (by_images && !strip.lay_out(c)) return 0;
  const int64_t kernel = c.kernel_h * c.kernel_w;
  if (by_images ? !fits(packed, kernel, c.kernel_h * strip.slots * 64)
                : !fits(packed, 1, kPanelBytes))
    return 0;
  const int64_t tasks = by_images ? (c.batch + 15) / 16 * c.out_h
                                  : c.batch * ((c.out_h * c.out_w + kPanel - 1) / kPanel);
  const int64_t splits = parts(tasks, threads, packed);
  Job job = begin(packed, x, bias, residual, activation, y);
  job.splits = splits, job.shape = shape, job.strip = &strip;
  parallel(by_images ? kernels->images : kernels->pixels, &job, tasks * splits, threads);
  return 1;
}
