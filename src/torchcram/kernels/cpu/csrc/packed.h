// How a sparse matrix lies in memory, and what the parts of the library share.
//
// Y[row, token] = sum over k of W[row, k] X[k, token]. Tokens come in panels of 64, which lie as
// [k][64] floats. The inner dimension is cut into blocks so small that the panel of one stays in
// L1, the rows into groups, which threads can share among themselves. Each (block, group) is a
// stream of 16-bit numbers and one of values, read once from front to back.
//
// Two forms of stream:
//   pairs    two rows at a time, each with its own columns, as many for both (the shorter is
//            filled up with entries of value zero; rows are paired by their counts):
//            count, row, row, then (column, column)...
//   fours    four rows at a time; a column that two of them use is read once for both:
//            shared, rest, 4 rows, then for each shared step the columns of rows (0, 1), (2, 3),
//            (0, 2), (1, 3), (0, 3), (1, 2), 0, 1, 2, 3, then for each step of the rest those of
//            rows 0, 1, 2, 3 (zeros fill up, and rows are grouped so that there are few)
// A "column" is the offset in bytes of its 64 tokens in the panel. The column at offset 0 holds
// zeros: entries that fill up a pair or a four point to it, so that no NaN or infinity of the input
// reaches a row that does not use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace torchcram {

constexpr int kPanel = 64;                   // tokens
constexpr int kPanelBytes = 256;             // of one k
constexpr int kMostRows = 384;               // of a group
constexpr int kSumsRows = 512;               // of the sums of a group: a power of two
constexpr int64_t kPanelRoom = 65536;        // bytes that columns, numbers of 16 bits, can point to
constexpr int64_t kMagic = 0x324d415243;     // "CRAM2"
constexpr int64_t kPixelPanelBytes = 28672;  // bytes of a panel of pixels that L1 holds
constexpr size_t kAlign = 64;

enum Layout : int64_t { kPairs = 2, kQuadRows = 3 };
enum Activation : int { kNone = 0, kRelu = 1, kGelu = 2, kGeluTanh = 3, kSilu = 4 };

struct Header {
  int64_t magic, bytes, rows, inner, layout, blocks, groups, group_rows, columns_at, values_at;
};

struct Start {
  int64_t column, value;  // where the streams of a (block, group) begin, in elements
};

// A packed matrix: Header, starts of the blocks along k (blocks + 1, then the panel's bytes),
// Starts (blocks * groups + 1), columns, values.
struct Packed {
  const Header* header;
  const int64_t* inner_starts;
  const Start* starts;
  const uint16_t* columns;
  const float* values;

  explicit Packed(const void* memory);  // whose tables have been checked
  int64_t blocks() const { return header->blocks; }
  int64_t groups() const { return header->groups; }
  int64_t first_row(int64_t group) const { return group * header->group_rows; }
  int64_t group_rows(int64_t group) const {
    const int64_t left = header->rows - first_row(group);
    return left < header->group_rows ? left : header->group_rows;
  }
};

// Whether memory of so many bytes has the header and the tables of a packed matrix; what the tables
// lead to is within it.
bool valid_tables(const void* memory, int64_t bytes);

struct Convolution {
  int64_t batch, channels, height, width, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w,
      dilation_h, dilation_w, out_h, out_w;
};

// Where the pixels of 4 neighbouring outputs lie in a strip of one kernel row: outputs of one
// kernel column are neighbours there, whatever the stride.
struct Strip {
  int64_t slots = 0;
  int64_t slot_of[64];                     // by kernel column
  int64_t pixel_of[256];                   // by slot: relative to the first output's first pixel
  bool lay_out(const Convolution& shape);  // false where the kernel is too wide
};

struct Job {
  const Packed* packed = nullptr;
  const float* input = nullptr;
  const float* bias = nullptr;      // may be null
  const float* residual = nullptr;  // laid out as the output; may be null
  float* output = nullptr;
  int activation = kNone;
  int64_t splits = 1;  // parts of the rows that run apart
  // Linear layers; there may be a second one, which gets the activations of the first.
  int64_t tokens = 0;
  const Packed* then = nullptr;
  const float* then_bias = nullptr;
  // Convolutions.
  const Convolution* shape = nullptr;
  const Strip* strip = nullptr;
  // For 8 bits: features of a token, what each row starts from, and its scale.
  int64_t inner = 0;
  const int32_t *start = nullptr, *then_start = nullptr;
  const float *scales = nullptr, *then_scales = nullptr;
};

// A Linear layer in 8 bits: the packed matrix, its bytes and rows, what each row starts from, its
// scale, its bias.
struct LayerInt8 {
  const void* packed;
  int64_t bytes, rows;
  const int32_t* start;
  const float *scales, *bias;
};

// softmax(Q K^T scale) V for each sequence and head, all laid out as [token][head][feature].
struct Attention {
  const float *query, *key, *value;
  float* output;
  int64_t tokens, heads, features, splits;  // tokens of a sequence; parts of them that run apart
  float scale;
};

typedef void (*Task)(const void* job, int64_t task);

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  Task linear, pixels, images, attention, linear_int8;  // the last may be null
};

extern const Kernels kAvx512, kAvx2, kPortable;

// Runs task(job, 0 .. count - 1) on up to `threads` threads, this one included. Throws
// std::bad_alloc where a task did, on whatever thread; some tasks have not been run then.
void parallel(Task task, const void* job, int64_t count, int threads);

// Memory of this thread, at least `floats` long, aligned, contents undefined; or std::bad_alloc.
float* scratch(int slot, size_t floats);

// The column of zeros at the start of a panel.
static inline void clear_column(float* panel) { memset(panel, 0, kPanelBytes); }

// Floats of a panel, with room for whatever its columns may point to.
constexpr size_t kPanelFloats = (kPanelRoom + kPanelBytes) / sizeof(float);

// What the functions of the C interface return where memory runs out.
constexpr int kNoMemory = -2;

// Runs the body of a function of the C interface, which no exception may leave.
template <class Body>
auto without_exceptions(Body body) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (...) {  // std::bad_alloc, or std::length_error of a vector that no memory could hold
    return kNoMemory;
  }
}

// Builds with TORCHCRAM_FAULTS count allocations and let one of them fail, for tests; so that there
// are some to fail, they keep no memory for the next call.
#if defined(TORCHCRAM_FAULTS)
constexpr bool kFaults = true;
void count_allocation();
#else
constexpr bool kFaults = false;
inline void count_allocation() {}
#endif

}  // namespace torchcram
