// The C interface of the library, called through ctypes.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <initializer_list>
#include <thread>
#include <vector>

#include "packed.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif
#endif

namespace torchcram {

int64_t pack(const float* weight, int64_t rows, const std::vector<int64_t>& inner_starts,
             int64_t layout, const uint16_t* offsets, int64_t panel_bytes, void* out,
             int64_t room);
bool check(const void* memory, int64_t bytes);
void use_openmp(void* parallel);

#if defined(__aarch64__) && !defined(TORCHCRAM_NO_NEON_DOTPROD)
static bool has_dot_products() {
#if defined(__linux__)
  constexpr unsigned long kAsimdDp = 1ul << 20;  // HWCAP_ASIMDDP
  return getauxval(AT_HWCAP) & kAsimdDp;
#else
  return true;  // every ARM processor that macOS runs on has them
#endif
}
#endif

static const Kernels* best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#if !defined(TORCHCRAM_NO_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
    return &kAvx512;
#endif
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kAvx2;
  return &kPortable;
#elif defined(__aarch64__)
#if !defined(TORCHCRAM_NO_NEON_DOTPROD)
  if (has_dot_products()) return &kNeonDotprod;
#endif
  return &kNeon;
#else
  return &kPortable;
#endif
}

static const Kernels* kernels = best();

}  // namespace torchcram

using namespace torchcram;

#define TORCHCRAM_EXPORT extern "C" __attribute__((visibility("default")))

// Version of the functions below; it is raised whenever one of them changes.
TORCHCRAM_EXPORT int torchcram_interface() { return 10; }

TORCHCRAM_EXPORT const char* torchcram_level() { return kernels->name; }

// For tests: uses portable code (0), AVX2 or NEON (1), AVX-512 or NEON with dot products (2); false
// if the machine lacks it.
TORCHCRAM_EXPORT int torchcram_use_level(int level) {
  const Kernels* limit = best();
#if defined(__x86_64__)
#if defined(TORCHCRAM_NO_AVX512)
  const Kernels* known[] = {&kPortable, &kAvx2};
#else
  const Kernels* known[] = {&kPortable, &kAvx2, &kAvx512};
#endif
#elif defined(__aarch64__)
#if defined(TORCHCRAM_NO_NEON_DOTPROD)
  const Kernels* known[] = {&kPortable, &kNeon};
#else
  const Kernels* known[] = {&kPortable, &kNeon, &kNeonDotprod};
#endif
#else
  const Kernels* known[] = {&kPortable};
#endif
  int top = 0;
  while (known[top] != limit) ++top;
  if (level < 0 || level > top) return 0;
  kernels = known[level];
  return 1;
}

TORCHCRAM_EXPORT void torchcram_use_openmp(void* parallel) { use_openmp(parallel); }

// Every function below that allocates memory returns kNoMemory if there is not enough of it.

// Packs a matrix (rows, inner) in a layout: 2 for pairs, 3 for quad rows. Returns the number of
// bytes and writes them if `room` is large enough; -1 if the matrix cannot be packed.
TORCHCRAM_EXPORT int64_t torchcram_pack_linear(const float* weight, int64_t rows, int64_t inner,
                                               int64_t layout, int64_t block, void* out,
                                               int64_t room) {
  if (inner < 1 || block < 1) return -1;
  return without_exceptions([&]() -> int64_t {
    std::vector<uint16_t> offsets(inner);
    for (int64_t k = 0; k < inner; ++k) offsets[k] = uint16_t((k % block + 1) * kPanelBytes);
    std::vector<int64_t> starts;
    for (int64_t k = 0; k < inner; k += block) starts.push_back(k);
    starts.push_back(inner);
    return pack(weight, rows, starts, layout, offsets.data(), (block + 1) * kPanelBytes, out, room);
  });
}

// Packs a convolution for panels of images; panels of pixels use torchcram_pack_linear.
TORCHCRAM_EXPORT int64_t torchcram_pack_images(const float* weight, int64_t rows, int64_t layout,
                                               const Convolution* shape, void* out, int64_t room) {
  const Convolution& c = *shape;
  Strip strip;
  if (rows < 1 || c.channels < 1 || c.kernel_h < 1 || !strip.lay_out(c)) return -1;
  const ImageBlocks image_blocks(c, strip);
  const int64_t most = image_blocks.channels, bytes = image_blocks.panel_bytes();
  if (bytes > kPanelRoom) return -1;
  return without_exceptions([&]() -> int64_t {
    const int64_t inner = c.kernel_h * c.channels * c.kernel_w;
    std::vector<float> ordered(rows * inner);  // [row][ky][channel][kx]
    std::vector<uint16_t> offsets;
    std::vector<int64_t> starts;
    for (int64_t ky = 0, k = 0; ky < c.kernel_h; ++ky)
      for (int64_t channel = 0; channel < c.channels; ++channel) {
        if (channel % most == 0 && ky % image_blocks.rows == 0) starts.push_back(k);
        const int64_t row_of_panel = ky % image_blocks.rows * most + channel % most;
        for (int64_t kx = 0; kx < c.kernel_w; ++kx, ++k) {
          const int64_t slot = row_of_panel * strip.slots + strip.slot_of[kx];
          offsets.push_back(uint16_t(kPanelBytes + slot * 64));
          const float* from = weight + (channel * c.kernel_h + ky) * c.kernel_w + kx;
          for (int64_t row = 0; row < rows; ++row) ordered[row * inner + k] = from[row * inner];
        }
      }
    starts.push_back(inner);
    return pack(ordered.data(), rows, starts, layout, offsets.data(), bytes, out, room);
  });
}

TORCHCRAM_EXPORT int torchcram_check(const void* memory, int64_t bytes) {
  return check(memory, bytes);
}

// Returns whether the blocks of a matrix fit its panel behind the column of zeros if every `unit`
// of k takes `bytes` there.
static bool fits(const Packed& packed, int64_t unit, int64_t bytes) {
  for (int64_t block = 0; block < packed.blocks(); ++block) {
    const int64_t from = packed.inner_starts[block], to = packed.inner_starts[block + 1];
    if (from % unit || to % unit) return false;
    const int64_t needed = kPanelBytes + (to - from) / unit * bytes;
    if (needed > packed.inner_starts[packed.blocks() + 1]) return false;
  }
  return true;
}

// The same for panels of images: the blocks are those that torchcram_pack_images makes.
static bool fits_images(const Packed& packed, const Convolution& c, const Strip& strip) {
  const ImageBlocks expected(c, strip);
  const int64_t* starts = packed.inner_starts;
  const int64_t row = c.channels * c.kernel_w, blocks = expected.blocks;
  if (packed.blocks() != c.kernel_h / expected.rows * blocks) return false;
  for (int64_t block = 0; block < packed.blocks(); ++block)
    if (starts[block] !=
        block / blocks * expected.rows * row + block % blocks * expected.channels * c.kernel_w)
      return false;
  return starts[packed.blocks() + 1] >= expected.panel_bytes();
}

static Job make_job(const Packed& packed, const float* x, const float* bias, const float* residual,
                    int activation, float* y) {
  Job job;
  job.packed = &packed, job.input = x, job.bias = bias, job.residual = residual;
  job.activation = activation, job.output = y;
  return job;
}

// Runs the tasks of a kernel and returns the result for the caller of the C interface.
static int run_tasks(Task task, const void* job, int64_t count, int threads) {
  return without_exceptions([&] {
    parallel(task, job, count, threads);
    return 1;
  });
}

static int64_t count_splits(int64_t tasks, int threads, const Packed& packed) {
  return tasks >= threads ? 1 : packed.groups();
}

// The functions of layers return 0 and compute nothing if the packed matrix has another shape.
TORCHCRAM_EXPORT int torchcram_linear(const float* x, int64_t tokens, int64_t inner, int64_t rows,
                                      const void* memory, int64_t bytes, const float* bias,
                                      const float* residual, int activation, float* y,
                                      int threads) {
  if (!valid_tables(memory, bytes)) return 0;
  const Packed packed(memory);
  const Header& h = *packed.header;
  if (h.inner != inner || h.rows != rows) return 0;
  if (!fits(packed, 1, kPanelBytes)) return 0;
  const int64_t panels = (tokens + kPanel - 1) / kPanel;
  const int64_t splits = count_splits(panels, threads, packed);
  Job job = make_job(packed, x, bias, residual, activation, y);
  job.tokens = tokens, job.splits = splits;
  return run_tasks(kernels->linear, &job, panels * splits, threads);
}

// Returns whether this machine has kernels for 8 bits.
TORCHCRAM_EXPORT int torchcram_has_int8() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx512vnni")) return 0;
#endif
  return kernels->linear_int8 != nullptr;
}

// A Linear layer in 8 bits, followed by an activation and, if it is not null, a second layer.
TORCHCRAM_EXPORT int torchcram_linear_int8(const float* x, int64_t tokens, int64_t inner,
                                           int64_t rows, const LayerInt8* first, int activation,
                                           const LayerInt8* second, const float* residual, float* y,
                                           int threads) {
  if (!torchcram_has_int8()) return 0;
  const LayerInt8* last = second ? second : first;
  for (const LayerInt8* layer : {first, last}) {
    if (!valid_tables(layer->packed, layer->bytes)) return 0;
    const Packed packed_layer(layer->packed);
    if (packed_layer.header->rows != layer->rows || packed_layer.header->layout != kPairs) return 0;
    if (!fits(packed_layer, 1, kPanelBytes)) return 0;
  }
  const Packed packed(first->packed), then(last->packed);
  if (packed.header->inner != (inner + 3) / 4 || last->rows != rows) return 0;
  if (second && then.header->inner != (first->rows + 3) / 4) return 0;
  const int64_t panels = (tokens + kPanel - 1) / kPanel;
  const int64_t splits = second ? 1 : count_splits(panels, threads, packed);
  Job job = make_job(packed, x, first->bias, residual, activation, y);
  job.tokens = tokens, job.splits = splits;
  job.inner = inner, job.start = first->start, job.scales = first->scales;
  if (second) {
    job.then = &then, job.then_bias = second->bias;
    job.then_start = second->start, job.then_scales = second->scales;
  }
  return run_tasks(kernels->linear_int8, &job, panels * splits, threads);
}

// Two Linear layers with an activation between them.
TORCHCRAM_EXPORT int torchcram_feed_forward(const float* x, int64_t tokens, int64_t inner,
                                            int64_t middle, int64_t rows, const void* first,
                                            int64_t first_bytes, const float* bias, int activation,
                                            const void* second, int64_t second_bytes,
                                            const float* then_bias, const float* residual, float* y,
                                            int threads) {
  if (!valid_tables(first, first_bytes) || !valid_tables(second, second_bytes)) return 0;
  const Packed packed(first), then(second);
  const Header &h = *packed.header, &t = *then.header;
  if (h.inner != inner || h.rows != middle || t.inner != middle || t.rows != rows) return 0;
  if (!fits(packed, 1, kPanelBytes) || !fits(then, 1, kPanelBytes)) return 0;
  Job job = make_job(packed, x, bias, residual, activation, y);
  job.tokens = tokens, job.then = &then, job.then_bias = then_bias;
  return run_tasks(kernels->linear, &job, (tokens + kPanel - 1) / kPanel, threads);
}

// A convolution by panels of images: a job, and what it points to.
struct ImageLayer {
  const Packed packed;
  Strip strip;
  Neighbours neighbours;
  Job job;

  explicit ImageLayer(const void* memory) : packed(memory) {}

  // Returns false if the packed matrix has another shape.
  bool lay_out(const Convolution& c) {
    if (!neighbours.lay_out(c) || !strip.lay_out(c) || !fits_images(packed, c, strip)) return false;
    job.packed = &packed, job.shape = &c, job.strip = &strip, job.neighbours = &neighbours;
    return true;
  }

  // Sets the rows of outputs to compute, and returns the number of tasks.
  int64_t cut(Job& part, int64_t first, int64_t end, int threads) const {
    const Convolution& c = *job.shape;
    part = job;
    // Rows of outputs that one task computes share their pixels; several tasks a thread even out.
    const int64_t strips = (c.batch + kImages - 1) / kImages * ((c.out_w + 3) / 4);
    if (strips < 1) return 0;  // an empty batch
    const int64_t bands = threads > 1 ? (4 * threads + strips - 1) / strips : 1;
    part.first_row = first, part.end_row = end;
    part.band = (end - first + bands - 1) / bands;
    const int64_t tasks = strips * ((end - first + part.band - 1) / part.band);
    part.splits = count_splits(tasks, threads, packed);
    return tasks * part.splits;
  }
};

static bool holds(const void* memory, int64_t bytes, const Convolution& c, int64_t rows) {
  if (!valid_tables(memory, bytes)) return false;
  const Header& h = *Packed(memory).header;
  return h.rows == rows && h.inner == c.channels * c.kernel_h * c.kernel_w;
}

TORCHCRAM_EXPORT int torchcram_convolution(const float* x, const Convolution* shape, int64_t rows,
                                           const void* memory, int64_t bytes, int by_images,
                                           const float* bias, const float* residual, int activation,
                                           float* y, int threads) {
  const Convolution& c = *shape;
  if (!holds(memory, bytes, c, rows)) return 0;
  if (by_images) {
    ImageLayer layer(memory);
    layer.job = make_job(layer.packed, x, bias, residual, activation, y);
    if (!layer.lay_out(c)) return 0;
    layer.job.input_rows = c.height;
    layer.job.residual_rows = layer.job.output_rows = c.out_h;
    Job job;
    const int64_t tasks = layer.cut(job, 0, c.out_h, threads);
    return run_tasks(kernels->images, &job, tasks, threads);
  }
  const Packed packed(memory);
  if (c.down * c.across > 1 || !fits(packed, 1, kPanelBytes)) return 0;
  Job job = make_job(packed, x, bias, residual, activation, y);
  job.shape = shape;
  const int64_t tasks = c.batch * ((c.out_h * c.out_w + kPanel - 1) / kPanel);
  job.splits = count_splits(tasks, threads, packed);
  return run_tasks(kernels->pixels, &job, tasks * job.splits, threads);
}

// Leaves the execution units to the other thread of a core while this one waits.
static inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A chain of convolutions while it runs. The threads wait for each other after each step, within
// one parallel region: a step is so short that starting a region for it would take too long.
class ChainRun {
 public:
  ChainRun(const std::vector<ImageLayer>& layers, const ChainStep* steps, int64_t count,
           int threads)
      : threads_(threads), steps_(count), next_(count * threads), left_(count) {
    for (int64_t i = 0; i < count; ++i) {
      Step& step = steps_[i];
      step.tasks = layers[steps[i].layer].cut(step.job, steps[i].first, steps[i].end, threads);
      left_[i] = step.tasks;
      for (int64_t part = 0; part < threads; ++part)
        next_[i * threads + part] = step.tasks * part / threads;
    }
  }

  // A task is what one thread does in all steps.
  static void run(const void* data, int64_t thread) {
    ChainRun& chain = *const_cast<ChainRun*>(static_cast<const ChainRun*>(data));
    try {
      for (size_t step = 0; step < chain.steps_.size() && chain.wait_before(step); ++step)
        chain.run_step(step, thread);
    } catch (...) {
      chain.failed_ = true;  // the other threads do not wait for this one
      throw;
    }
  }

 private:
  struct Step {
    Job job;
    int64_t tasks;
  };

  // Each thread begins with its own part of the tasks, which is the same part of the image in all
  // steps, and then helps the others. So all tasks are done however many threads there are.
  void run_step(size_t step, int64_t thread) {
    const int64_t tasks = steps_[step].tasks;
    for (int64_t i = 0; i < threads_; ++i) {
      const int64_t part = (thread + i) % threads_, end = tasks * (part + 1) / threads_;
      std::atomic<int64_t>& next = next_[step * threads_ + part];
      for (int64_t task; (task = next.fetch_add(1)) < end;) {
        kernels->images(&steps_[step].job, task);
        left_[step].fetch_sub(1, std::memory_order_release);
      }
    }
  }

  // Waits for all tasks of the step before; false if one of them failed.
  bool wait_before(size_t step) const {
    for (int spins = 0; step > 0 && left_[step - 1].load(std::memory_order_acquire) > 0; ++spins) {
      if (failed_) return false;
      if (spins > kSpins)
        std::this_thread::yield();
      else
        relax();
    }
    return true;
  }

  static constexpr int kSpins = 4096;
  const int64_t threads_;
  std::vector<Step> steps_;
  std::vector<std::atomic<int64_t>> next_, left_;  // the next task of each part, and tasks to do
  std::atomic<bool> failed_{false};
};

// Runs a chain of convolutions by panels of images, some rows of outputs of one layer after
// another. The caller orders the steps so that the rows that a step reads are in memory.
TORCHCRAM_EXPORT int torchcram_chain(const ChainLayer* layers, int64_t count,
                                     const ChainStep* steps, int64_t step_count, int threads) {
  for (int64_t i = 0; i < count; ++i)
    if (!holds(layers[i].packed, layers[i].bytes, *layers[i].shape, layers[i].rows)) return 0;
  return without_exceptions([&] {
    std::vector<ImageLayer> ready;
    ready.reserve(count);  // jobs point into it
    for (int64_t i = 0; i < count; ++i) {
      const ChainLayer& layer = layers[i];
      ready.emplace_back(layer.packed);
      Job& job = ready[i].job;
      job = make_job(ready[i].packed, layer.input, layer.bias, layer.residual,
                     int(layer.activation), layer.output);
      if (!ready[i].lay_out(*layer.shape)) return 0;
      job.input_rows = layer.input_rows, job.residual_rows = layer.residual_rows;
      job.output_rows = layer.output_rows;
    }
    threads = std::max(threads, 1);
    ChainRun run(ready, steps, step_count, threads);
    parallel(ChainRun::run, &run, threads, threads);
    return 1;
  });
}

namespace {

struct Padding {
  const float* x;
  int64_t height, width, top, left, rows, columns, stride;
  float* y;
};

void pad(const void* data, int64_t plane) {
  const Padding& job = *static_cast<const Padding*>(data);
  const float* from = job.x + plane * job.height * job.width;
  float* to = job.y + plane * job.stride * job.rows * job.columns;
  memset(to, 0, job.stride * job.rows * job.columns * sizeof(float));
  for (int64_t remainder = 0; remainder < job.stride; ++remainder) {
    const int64_t before = job.left > remainder ? job.left - remainder : 0;
    const int64_t first = (before + job.stride - 1) / job.stride;  // first column with a pixel
    const int64_t x = first * job.stride + remainder - job.left;
    const int64_t count = x < job.width ? (job.width - x + job.stride - 1) / job.stride : 0;
    float* at = to + (remainder * job.rows + job.top) * job.columns + first;
    for (int64_t row = 0; row < job.height; ++row, at += job.columns) {
      const float* pixels = from + row * job.width + x;
      if (job.stride == 1)
        memcpy(at, pixels, count * sizeof(float));
      else
        for (int64_t i = 0; i < count; ++i) at[i] = pixels[i * job.stride];
    }
  }
}

}  // namespace

// Pads planes with zeros and sorts columns by their remainders modulo the stride:
// [plane][remainder][row][column]. Returns 1.
TORCHCRAM_EXPORT int torchcram_pad(const float* x, int64_t planes, int64_t height, int64_t width,
                                   int64_t top, int64_t left, int64_t rows, int64_t columns,
                                   int64_t stride, float* y, int threads) {
  const Padding job{x, height, width, top, left, rows, columns, stride, y};
  return run_tasks(pad, &job, planes, threads);
}

// Max pooling of planes. `sizes` holds the size of a plane, of a window, of its steps, of the
// padding and of the output, rows before columns. Returns 0 and computes nothing if a window would
// lie outside of the padded plane.
TORCHCRAM_EXPORT int torchcram_max_pool(const float* x, int64_t planes, const int64_t* sizes,
                                        float* y, int threads) {
  const MaxPool job{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5],
                    sizes[6], sizes[7], sizes[8], sizes[9], x,        y};
  const auto inside = [](int64_t size, int64_t kernel, int64_t stride, int64_t pad, int64_t out) {
    return size > 0 && kernel > 0 && stride > 0 && pad >= 0 && 2 * pad <= kernel && out > 0 &&
           (out - 1) * stride + kernel <= size + 2 * pad;
  };
  if (!inside(job.height, job.kernel_h, job.stride_h, job.pad_h, job.out_h) ||
      !inside(job.width, job.kernel_w, job.stride_w, job.pad_w, job.out_w))
    return 0;
  return run_tasks(kernels->max_pool, &job, planes, threads);
}

// Asks the system for huge pages for the whole pages of a new block of memory, which then costs far
// fewer page faults when it is first written. Returns 1 if the system was asked.
TORCHCRAM_EXPORT int torchcram_use_huge_pages(void* memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE)), at = uintptr_t(memory);
  const uintptr_t first = (at + page - 1) / page * page, last = (at + bytes) / page * page;
  return first < last && madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE) == 0;
#else
  (void)memory, (void)bytes;
  return 0;
#endif
}

// Reverses the order of three dimensions in memory. Returns 1.
TORCHCRAM_EXPORT int torchcram_reverse_dimensions(const float* x, int64_t outer, int64_t middle,
                                                  int64_t inner, float* y, int threads) {
  const Reversal job{outer, middle, inner, x, y};
  const int64_t tasks = ((outer + kPanel - 1) / kPanel) * ((inner + kPanel - 1) / kPanel);
  return run_tasks(kernels->reverse_dimensions, &job, tasks, threads);
}

static int run_tiling(Task task, const Tiling& job, int threads) {
  const int64_t sets = (job.images * job.down * job.across + kImages - 1) / kImages;
  return run_tasks(task, &job, job.height * sets, threads);
}

// Cuts images [image][channel][row][column] into tiles [row][column][channel][tile]; height and
// width are those of a tile. Returns 1.
TORCHCRAM_EXPORT int torchcram_cut_tiles(const float* x, int64_t images, int64_t channels,
                                         int64_t height, int64_t width, int64_t down,
                                         int64_t across, float* y, int threads) {
  return run_tiling(kernels->cut_tiles, {images, channels, height, width, down, across, x, y},
                    threads);
}

// Puts the tiles together again. Returns 1.
TORCHCRAM_EXPORT int torchcram_join_tiles(const float* x, int64_t images, int64_t channels,
                                          int64_t height, int64_t width, int64_t down,
                                          int64_t across, float* y, int threads) {
  return run_tiling(kernels->join_tiles, {images, channels, height, width, down, across, x, y},
                    threads);
}

// Self-attention of each sequence; returns 0 if there is no kernel for it.
TORCHCRAM_EXPORT int torchcram_attention(const float* query, const float* key, const float* value,
                                         int64_t batch, int64_t tokens, int64_t heads,
                                         int64_t features, float scale, float* output,
                                         int threads) {
  // The kernel takes the maximum before it scales, and marks missing keys by a score of -3e38.
  if (features % 16 || !(scale >= 1e-30f)) return 0;
  const int64_t tasks = batch * heads;
  const int64_t splits = tasks >= threads ? 1 : tokens < threads ? tokens : threads;
  const Attention job{query, key, value, output, tokens, heads, features, splits, scale};
  return run_tasks(kernels->attention, &job, tasks * splits, threads);
}

// Values that a thread takes at a time: enough to be worth its start, and a whole number of vectors.
constexpr int64_t kLeastValues = 16384;

// Divides every row by its root mean square and multiplies it by a weight. Returns 1.
TORCHCRAM_EXPORT int torchcram_norm_rows(const float* x, int64_t rows, int64_t width,
                                         const float* weight, float eps, float* y, int threads) {
  if (width < 1) return 1;
  const int64_t each = std::max(kLeastValues / width, int64_t(1));
  const RowNorm job{x, weight, y, rows, width, each, eps};
  return run_tasks(kernels->norm_rows, &job, (rows + each - 1) / each, threads);
}

// y = silu(gate) * up. Returns 1.
TORCHCRAM_EXPORT int torchcram_gate_values(const float* gate, const float* up, int64_t count,
                                           float* y, int threads) {
  const GatedProduct job{gate, up, y, count, kLeastValues};
  return run_tasks(kernels->gate_values, &job, (count + kLeastValues - 1) / kLeastValues, threads);
}

// Returns whether a matrix for products with a few vectors has a shape that can be computed with.
static bool valid_rows(const RowMatrix& m) {
  if (m.kind < kFloats || m.kind > kNibbles32) return false;
  return m.rows > 0 && m.inner > 0 && m.values && m.starts;
}

// y = x W^T + b for one to four vectors; returns 0 if the matrix or the number of vectors is not
// valid.
TORCHCRAM_EXPORT int torchcram_row_product(const RowMatrix* matrix, const float* x, int64_t count,
                                           float* y, int threads) {
  if (!valid_rows(*matrix) || count < 1 || count > kMostSequences) return 0;
  return without_exceptions([&] {
    kernels->row_product(*matrix, x, count, y, threads);
    return 1;
  });
}

// The next token of one to four sequences; returns 0 if shapes do not fit each other.
TORCHCRAM_EXPORT int torchcram_decoder_step(const DecoderStep* step, int threads) {
  const Decoder& d = *step->decoder;
  if (step->sequences < 1 || step->sequences > kMostSequences) return 0;
  if (step->past < 0 || step->past >= step->capacity) return 0;
  if (d.features < 1 || d.features % 16 || d.memory_heads < 1 || d.heads % d.memory_heads) return 0;
  const int64_t wide = d.heads * d.features, narrow = d.memory_heads * d.features;
  for (int64_t i = 0; i < d.layers; ++i) {
    const DecoderLayer& l = d.layer[i];
    const struct {
      const RowMatrix& matrix;
      int64_t rows, inner;
    } expected[] = {{l.query, wide, d.hidden},    {l.key, narrow, d.hidden},
                    {l.value, narrow, d.hidden},  {l.out, d.hidden, wide},
                    {l.gate, d.middle, d.hidden}, {l.up, d.middle, d.hidden},
                    {l.down, d.hidden, d.middle}};
    for (const auto& e : expected)
      if (!valid_rows(e.matrix) || e.matrix.rows != e.rows || e.matrix.inner != e.inner) return 0;
  }
  return without_exceptions([&] {
    kernels->decoder(step, threads < 1 ? 1 : threads);
    return 1;
  });
}
