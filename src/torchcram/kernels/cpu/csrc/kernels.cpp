// The kernels, compiled once per instruction set.
#include "attention.h"
#include "convolution.h"
#include "decoder.h"
#include "int8.h"
#include "linear.h"
#include "pooling.h"
#include "reversal.h"
#include "rows.h"
#include "tiles.h"

namespace torchcram {
namespace {

#if defined(TORCHCRAM_AVX512)
#define TORCHCRAM_KERNELS kAvx512
constexpr const char* kName = "avx512";
#elif defined(TORCHCRAM_AVX2)
#define TORCHCRAM_KERNELS kAvx2
constexpr const char* kName = "avx2";
#elif defined(TORCHCRAM_DOTPROD)
#define TORCHCRAM_KERNELS kNeonDotprod
constexpr const char* kName = "neon_dotprod";
#elif defined(TORCHCRAM_NEON)
#define TORCHCRAM_KERNELS kNeon
constexpr const char* kName = "neon";
#else
#define TORCHCRAM_KERNELS kPortable
constexpr const char* kName = "portable";
#endif

#if defined(TORCHCRAM_AVX512) || defined(TORCHCRAM_NEON)
constexpr Task kInt8 = linear_int8;
#else
constexpr Task kInt8 = nullptr;
#endif

}  // namespace

extern const Kernels TORCHCRAM_KERNELS;
const Kernels TORCHCRAM_KERNELS = {
    kName,   linear,      pixels,    images,      attention, kInt8,
    decoder, row_product, norm_rows, gate_values, max_pool,  reverse_dimensions,
    cut_tiles, join_tiles};

}  // namespace torchcram
