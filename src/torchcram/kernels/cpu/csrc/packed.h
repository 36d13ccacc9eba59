// Memory layout of a packed sparse matrix, and declarations shared by all source files.
//
// Y[row, token] = sum over k of W[row, k] X[k, token]. Tokens come in panels of 64, laid out as
// [k][64] floats. The inner dimension is cut into blocks so small that the panel of a block stays
// in L1, and the rows into groups, which are distributed over threads. Each (block, group) has a
// stream of 16-bit numbers and a stream of values, both read once from front to back.
//
// A stream has one of two layouts:
//   pairs      Two rows at a time, each with its own columns. Rows of similar counts are paired,
//   and
//              the shorter one is padded with zeros:
//              count, row, row, then (column, column)...
//   quad rows  Four rows at a time. A column that two of them use is read once for both:
//              shared, rest, 4 rows, then for each shared step the columns of rows (0, 1), (2, 3),
//              (0, 2), (1, 3), (0, 3), (1, 2), 0, 1, 2, 3, then for each remaining step the columns
//              of rows 0, 1, 2, 3. Rows are grouped so that there is little padding.
// A "column" is the offset in bytes of its 64 tokens in the panel. The column at offset 0 holds
// zeros. Padding points to it, so that no NaN or infinity of the input reaches a row that does not
// use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace torchcram {

constexpr int kPanel = 64;                   // tokens
constexpr int kPanelBytes = 256;             // bytes of a panel for one k
constexpr int kMostRows = 384;               // rows of a group, at most
constexpr int kSumsRows = 512;               // rows of the sums of a group, a power of two
constexpr int64_t kPanelRoom = 65536;        // bytes that 16-bit columns can address
constexpr int64_t kMagic = 0x334d415243;     // "CRAM3"
constexpr int64_t kPixelPanelBytes = 28672;  // panel of pixels that fits into L1
constexpr int64_t kFewWeights = 32;          // columns of a block that is not worth its sums
constexpr size_t kAlign = 64;

enum Layout : int64_t { kPairs = 2, kQuadRows = 3 };
enum Activation : int { kNone = 0, kRelu = 1, kGelu = 2, kGeluTanh = 3, kSilu = 4 };

struct Header {
  int64_t magic, bytes, rows, inner, layout, blocks, groups, group_rows, columns_at, values_at;
};

struct Start {
  int64_t column, value;  // start of the streams of a (block, group), in elements
};

// A packed matrix consists of a Header, the first k of each block (blocks + 1 numbers, then the
// bytes of a panel), Starts (blocks * groups + 1), columns and values.
struct Packed {
  const Header* header;
  const int64_t* inner_starts;
  const Start* starts;
  const uint16_t* columns;
  const float* values;

  explicit Packed(const void* memory);  // memory that has passed valid_tables
  int64_t blocks() const { return header->blocks; }
  int64_t groups() const { return header->groups; }
  int64_t first_row(int64_t group) const { return group * header->group_rows; }
  int64_t group_rows(int64_t group) const {
    const int64_t left = header->rows - first_row(group);
    return left < header->group_rows ? left : header->group_rows;
  }
};

// Returns whether memory holds the header and the tables of a packed matrix, and whether everything
// that the tables point to lies within it.
bool valid_tables(const void* memory, int64_t bytes);

// Images may be cut into tiles of equal size, `down` by `across`. Then the batch consists of tiles,
// those of an image one after another, height and width are those of a tile, and what lies beside
// a tile is another one or, at the border of the image, padding.
struct Convolution {
  int64_t batch, channels, height, width, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w,
      dilation_h, dilation_w, out_h, out_w, down, across;
};

constexpr int kImages = 16;  // images, or tiles of them, in a panel of images

// For each tile of a panel, the tiles beside it: neighbour[1 + y][1 + x][tile] is the number of the
// one y below and x to the right, or -1.
struct Neighbours {
  int32_t neighbour[3][3][kImages];
  bool any[3][3];                          // whether a tile has one there
  bool lay_out(const Convolution& shape);  // false if outputs need more than the next tiles
};

// Slots of the pixels of a row that 4 neighbouring outputs need. The outputs of a kernel column
// have neighbouring slots, whatever the stride.
struct Strip {
  int64_t slots = 0;
  int64_t slot_of[64];    // by kernel column
  int64_t pixel_of[256];  // by slot, relative to the first pixel of the first output
  bool lay_out(const Convolution& shape);  // false if the kernel is too wide
};

// How the weight of a convolution is packed for panels of images: in blocks of one kernel row each
// or, where such blocks would hold few weights, all kernel rows in one block. A panel holds one row
// of the input in the first case, and all rows that an output needs in the second.
struct ImageBlocks {
  int64_t rows;           // kernel rows of a block
  int64_t blocks;         // blocks of a kernel row, or of all of them
  int64_t channels;       // channels of a block, at most
  int64_t channel_bytes;  // bytes of a panel for one channel
  ImageBlocks(const Convolution& shape, const Strip& strip);
  int64_t panel_bytes() const { return kPanelBytes + channels * channel_bytes; }
};

struct Job {
  const Packed* packed = nullptr;
  const float* input = nullptr;
  const float* bias = nullptr;      // may be null
  const float* residual = nullptr;  // laid out like the output; may be null
  float* output = nullptr;
  int activation = kNone;
  int64_t splits = 1;  // parts of the rows that are separate tasks
  // For Linear layers. A second layer, if any, receives the activations of the first.
  int64_t tokens = 0;
  const Packed* then = nullptr;
  const float* then_bias = nullptr;
  // For convolutions.
  const Convolution* shape = nullptr;
  const Strip* strip = nullptr;
  const Neighbours* neighbours = nullptr;
  int64_t band = 0;  // rows of outputs of a task
  // For panels of images: the rows of outputs to compute, and how many rows of the input, the
  // residual and the output are in memory at a time. Row y is stored at y modulo that number.
  int64_t first_row = 0, end_row = 0;
  int64_t input_rows = 0, residual_rows = 0, output_rows = 0;
  // For 8 bits: features of a token, and the initial sum and the scale of each row. The initial sum
  // makes up for a zero point of 128; kernels with signed activations do not read it.
  int64_t inner = 0;
  const int32_t *start = nullptr, *then_start = nullptr;
  const float *scales = nullptr, *then_scales = nullptr;
};

// A convolution by panels of images in a chain. Inputs, residuals and outputs may be rings of rows.
struct ChainLayer {
  const Convolution* shape;
  const void* packed;
  int64_t bytes, rows;
  const float* bias;
  int64_t activation;
  const float* input;
  int64_t input_rows;
  const float* residual;  // may be null
  int64_t residual_rows;
  float* output;
  int64_t output_rows;
};

// Rows of outputs, from `first` up to, not including, `end`, that a layer of a chain computes.
struct ChainStep {
  int64_t layer, first, end;
};

// A Linear layer in 8 bits: the packed matrix with its bytes and rows, and the initial sum, the
// scale and the bias of each row.
struct LayerInt8 {
  const void* packed;
  int64_t bytes, rows;
  const int32_t* start;
  const float *scales, *bias;
};

// softmax(Q K^T scale) V of each sequence and head; tensors are laid out as [token][head][feature].
struct Attention {
  const float *query, *key, *value;
  float* output;
  int64_t tokens, heads, features, splits;  // tokens of a sequence; splits of its queries
  float scale;
};

// y = x * weight / sqrt(mean of x^2 + eps) for every row; a task computes `each` of them.
struct RowNorm {
  const float *x, *weight;
  float* y;
  int64_t rows, width, each;
  float eps;
};

// The maximum of each window of an image; padding counts as minus infinity. Every window holds a
// pixel.
struct MaxPool {
  int64_t height, width, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, out_h, out_w;
  const float* x;
  float* y;
};

// y[inner][middle][outer] = x[outer][middle][inner].
struct Reversal {
  int64_t outer, middle, inner;
  const float* x;
  float* y;
};

// Images [image][channel][row][column] and their tiles [row][column][channel][tile]. Height and
// width are those of a tile; an image has `down` by `across` of them.
struct Tiling {
  int64_t images, channels, height, width, down, across;
  const float* x;
  float* y;
};

// y = silu(gate) * up; a task computes `each` values.
struct GatedProduct {
  const float *gate, *up;
  float* y;
  int64_t count, each;
};

// A matrix for products with a few vectors, row after row: for every 64 inputs a mask, and the
// values whose bits are set. Without masks all values are there, padded with zeros to whole masks.
// Values of 4 bits are stored as w + 8, the first of two in the lower half of a byte; those of
// every 64 inputs begin with a byte of their own, and before it comes their scale, a float, or with
// kNibbles32 the scales of the first and of the last 32 inputs.
constexpr int kMaskBits = 64;
constexpr int64_t kMostSequences = 4;
enum Kind : int64_t { kFloats = 0, kBfloats = 1, kBytes = 2, kNibbles = 3, kNibbles32 = 4 };
constexpr unsigned bit(int64_t kind) { return 1u << kind; }
constexpr unsigned kRoundedKinds = bit(kBytes) | bit(kNibbles) | bit(kNibbles32);  // their inputs

struct RowMatrix {
  int64_t rows, inner, kind;
  const uint64_t* masks;  // [row][inner / 64]; may be null
  const void* values;     // readable for 64 bytes beyond the last
  const int64_t* starts;  // first value of each row, in bytes
  const float* scales;    // of the rows; may be null
  const float* bias;      // may be null
};

// A layer of a decoder: x += O attention(rotated Q n, K n, V n), x += D (silu(G m) * U m), where n
// and m are x divided by its root mean square and multiplied by a weight.
struct DecoderLayer {
  RowMatrix query, key, value, out, gate, up, down;
  const float *norm_before, *norm_between;
};

struct Decoder {
  int64_t layers, hidden, heads, memory_heads, features, middle;
  float eps, scale;
  const DecoderLayer* layer;
  const float* norm;  // after the last layer
};

// The next token of some sequences that have `past` tokens each.
struct DecoderStep {
  const Decoder* decoder;
  int64_t sequences, past, capacity;
  int64_t bfloats;             // whether keys and values are bfloat16, and not float32
  void* memory;                // [layer][keys, values][sequence][head][capacity][feature]
  const float *cosine, *sine;  // [feature]
  const float* input;          // [sequence][hidden]
  float* output;               // [sequence][hidden]
};

typedef void (*Task)(const void* job, int64_t task);

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  Task linear, pixels, images, attention, linear_int8;  // linear_int8 may be null
  void (*decoder)(const void* step, int threads);
  void (*row_product)(const RowMatrix& matrix, const float* x, int64_t count, float* y,
                      int threads);
  Task norm_rows, gate_values, max_pool, reverse_dimensions, cut_tiles, join_tiles;
};

extern const Kernels kAvx512, kAvx2, kNeonDotprod, kNeon, kPortable;

// Runs task(job, 0), ..., task(job, count - 1) on up to `threads` threads, including this one.
// Throws std::bad_alloc if a task did on any thread; some tasks have not been run then.
void parallel(Task task, const void* job, int64_t count, int threads);

// Returns aligned, uninitialized memory of this thread, at least `floats` long. May throw
// std::bad_alloc.
float* scratch(int slot, size_t floats);

// Writes the column of zeros at the start of a panel.
static inline void clear_column(float* panel) { memset(panel, 0, kPanelBytes); }

// Floats of a panel, including all that 16-bit columns can address.
constexpr size_t kPanelFloats = (kPanelRoom + kPanelBytes) / sizeof(float);

// Result of the functions of the C interface when memory runs out.
constexpr int kNoMemory = -2;

// Runs the body of a function of the C interface; no exception leaves it.
template <class Body>
auto without_exceptions(Body body) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (...) {  // std::bad_alloc, or std::length_error of a vector
    return kNoMemory;
  }
}

// For tests, builds with TORCHCRAM_FAULTS count allocations and make a chosen one fail. They keep
// no memory between calls, so that every call allocates.
#if defined(TORCHCRAM_FAULTS)
constexpr bool kFaults = true;
void count_allocation();
#else
constexpr bool kFaults = false;
inline void count_allocation() {}
#endif

}  // namespace torchcram
