// Packs a dense matrix for the kernels.
#include <algorithm>
#include <cstring>
#include <vector>

#include "packed.h"

namespace torchcram {

static int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

static int64_t starts_at(const Header& h) { return sizeof(Header) + (h.blocks + 2) * 8; }

Packed::Packed(const void* memory) {
  const char* at = static_cast<const char*>(memory);
  header = reinterpret_cast<const Header*>(at);
  inner_starts = reinterpret_cast<const int64_t*>(at + sizeof(Header));
  starts = reinterpret_cast<const Start*>(at + starts_at(*header));
  columns = reinterpret_cast<const uint16_t*>(at + header->columns_at);
  values = reinterpret_cast<const float*>(at + header->values_at);
}

bool Strip::lay_out(const Convolution& c) {
  if (c.kernel_w < 1 || c.stride_w < 1 || c.dilation_w < 1) return false;
  const int64_t reach = (c.kernel_w - 1) * c.dilation_w + 1;
  if (c.kernel_w > 64 || reach > 64 || c.stride_w > 32) return false;
  for (int64_t remainder = 0; remainder < c.stride_w; ++remainder) {
    int64_t most = -1;
    for (int64_t kx = 0; kx < c.kernel_w; ++kx) {
      const int64_t x = kx * c.dilation_w;
      if (x % c.stride_w != remainder) continue;
      slot_of[kx] = slots + x / c.stride_w;
      most = x / c.stride_w + 3;  // the last of 4 outputs
    }
    for (int64_t i = 0; i <= most; ++i) pixel_of[slots++] = remainder + i * c.stride_w;
  }
  return true;
}

// Whether outputs of a tile need no pixel beyond the tiles beside it, and lie where they would lie
// if the image were not cut.
static bool reaches_next_tile(int64_t tiles, int64_t size, int64_t out, int64_t kernel,
                              int64_t stride, int64_t pad, int64_t dilation) {
  if (tiles == 1) return true;
  const int64_t last = (out - 1) * stride - pad + (kernel - 1) * dilation;
  return out * stride == size && pad <= size && last < 2 * size;
}

bool Neighbours::lay_out(const Convolution& c) {
  if (c.down < 1 || c.across < 1 || c.down > kImages || c.across > kImages) return false;
  const int64_t tiles = c.down * c.across;
  if (kImages % tiles || c.batch % tiles) return false;
  if (!reaches_next_tile(c.down, c.height, c.out_h, c.kernel_h, c.stride_h, c.pad_h, c.dilation_h))
    return false;
  if (!reaches_next_tile(c.across, c.width, c.out_w, c.kernel_w, c.stride_w, c.pad_w, c.dilation_w))
    return false;
  for (int64_t y = -1; y <= 1; ++y)
    for (int64_t x = -1; x <= 1; ++x) {
      any[1 + y][1 + x] = false;
      for (int64_t tile = 0; tile < kImages; ++tile) {
        const int64_t row = tile % tiles / c.across + y, column = tile % c.across + x;
        const bool inside = row >= 0 && row < c.down && column >= 0 && column < c.across;
        neighbour[1 + y][1 + x][tile] = inside ? int32_t(tile + y * c.across + x) : -1;
        any[1 + y][1 + x] |= inside;
      }
    }
  return true;
}

ImageBlocks::ImageBlocks(const Convolution& c, const Strip& strip) {
  const int64_t slot_bytes = 64, row_bytes = strip.slots * slot_bytes;
  const bool few = c.channels * c.kernel_w < kFewWeights;
  rows = few && c.channels * c.kernel_h * row_bytes <= kPixelPanelBytes ? c.kernel_h : 1;
  channel_bytes = rows * row_bytes;
  const int64_t limit = std::max(kPixelPanelBytes / channel_bytes, int64_t(1));
  blocks = (c.channels + limit - 1) / limit;
  channels = (c.channels + blocks - 1) / blocks;
}

namespace {

struct Streams {
  std::vector<uint16_t> columns;
  std::vector<float> values;
};

struct Dense {
  const float* weight;
  int64_t rows, inner;
  const uint16_t* offsets;  // offset of each k in its panel
  float at(int64_t row, int64_t k) const { return row < rows ? weight[row * inner + k] : 0.0f; }
};

// Appends rows [first, last) and columns [from, to) to the streams, two rows at a time.
void add_pairs(const Dense& dense, int64_t first, int64_t last, int64_t from, int64_t to,
               Streams& out) {
  std::vector<std::vector<int64_t>> kept;
  for (int64_t row = first; row < last + (last - first) % 2; ++row) {
    kept.emplace_back();
    for (int64_t k = from; k < to; ++k)
      if (dense.at(row, k) != 0.0f) kept.back().push_back(k);
  }
  std::vector<size_t> order(kept.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return kept[a].size() < kept[b].size(); });
  for (size_t pair = 0; pair < order.size(); pair += 2) {
    const size_t count = kept[order[pair + 1]].size();
    out.columns.push_back(count);
    for (int i = 0; i < 2; ++i) out.columns.push_back(order[pair + i]);
    for (size_t j = 0; j < count; ++j)
      for (int i = 0; i < 2; ++i) {
        const std::vector<int64_t>& ks = kept[order[pair + i]];
        const bool fill_pair = j >= ks.size();
        out.columns.push_back(fill_pair ? 0 : dense.offsets[ks[j]]);
        out.values.push_back(fill_pair ? 0.0f : dense.at(first + order[pair + i], ks[j]));
      }
  }
}

// The pairs among four rows, in the order in which the kernel reads them.
constexpr int kRowPairs[6][2] = {{0, 1}, {2, 3}, {0, 2}, {1, 3}, {0, 3}, {1, 2}};

struct Row {
  int64_t row;
  std::vector<uint64_t> columns;  // bit set
  int64_t count = 0;

  Row(const Dense& dense, int64_t row, int64_t from, int64_t to)
      : row(row), columns((to - from + 63) / 64) {
    for (int64_t k = from; k < to; ++k) {
      const bool kept = dense.at(row, k) != 0.0f;
      columns[(k - from) / 64] |= uint64_t(kept) << (k - from) % 64;
      count += kept;
    }
  }
  int in_common(const Row& other) const {
    int count = 0;
    for (size_t i = 0; i < columns.size(); ++i)
      count += __builtin_popcountll(columns[i] & other.columns[i]);
    return count;
  }
};

struct Shared {
  int64_t k;  // -1 for padding by the column of zeros
  bool used[2];
};

// Four rows, and the columns that are read once for two of them. Every pair of rows has the same
// number of shared columns.
struct QuadRows {
  const Dense* dense;
  int64_t rows[4];
  std::vector<int64_t> users[16];  // columns by the bit set of the rows that use them
  size_t shared = 0, rest = 0;     // steps with and without shared columns
  std::vector<Shared> pairs[6];
  std::vector<int64_t> alone[4];

  QuadRows(const Dense& dense, const Row* quad, int64_t from, int64_t to) : dense(&dense) {
    for (int i = 0; i < 4; ++i) rows[i] = quad[i].row;
    for (int64_t k = from; k < to; ++k) {
      int bits = 0;
      for (int i = 0; i < 4; ++i) bits |= (dense.at(rows[i], k) != 0.0f) << i;
      users[bits].push_back(k);
    }
    size_t most = 0;
    for (int bits = 0; bits < 16; ++bits)
      most += users[bits].size() * (__builtin_popcount(bits) / 2);
    most /= 6;  // more shared steps are never filled
    size_t best = 0, least = SIZE_MAX;
    for (size_t count = most * 3 / 4; count <= most; ++count) {
      assign_columns(count);
      const size_t cost = 64 * shared + 21 * rest;  // 64 multiplications or 21 paired loads
      if (cost < least) least = cost, best = count;
    }
    assign_columns(best);
  }

  void assign_columns(size_t count) {
    shared = count;
    for (auto& pair : pairs) pair.clear();
    for (auto& row : alone) row.clear();
    for (int size = 1; size <= 4; ++size)  // columns with a choice of pairs come last
      for (int bits = 1; bits < 16; ++bits)
        if (__builtin_popcount(bits) == size)
          for (int64_t k : users[bits]) assign(k, bits);
    for (int pair = 0; pair < 6; ++pair)
      while (pairs[pair].size() < shared) fill_pair(pair);
    rest = 0;  // a shared step also has a single column of each row
    for (const auto& row : alone) rest = std::max(rest, std::max(row.size(), shared) - shared);
  }

  void assign(int64_t k, int bits) {
    for (int best = 0; best >= 0;) {
      best = -1;
      for (int pair = 0; pair < 6; ++pair) {
        if (!(bits >> kRowPairs[pair][0] & bits >> kRowPairs[pair][1] & 1)) continue;
        if (pairs[pair].size() < (best < 0 ? shared : pairs[best].size())) best = pair;
      }
      if (best < 0) break;
      pairs[best].push_back({k, {true, true}});
      bits &= ~(1 << kRowPairs[best][0] | 1 << kRowPairs[best][1]);
    }
    for (int row = 0; row < 4; ++row)
      if (bits >> row & 1) alone[row].push_back(k);
  }

  // A pair without a column left in common takes a single column of either row, but only one that
  // the other row uses in another step: a zero factor would pass NaN and infinities of the input to
  // a row that does not use that column.
  void fill_pair(int pair) {
    const int a = kRowPairs[pair][0], b = kRowPairs[pair][1];
    const bool second_first = alone[b].size() > alone[a].size();
    for (const bool second : {second_first, !second_first}) {
      std::vector<int64_t>& from = alone[second ? b : a];
      const int64_t other = rows[second ? a : b];
      for (size_t i = from.size(); i-- > 0;) {
        if (dense->at(other, from[i]) == 0.0f) continue;
        pairs[pair].push_back({from[i], {!second, second}});
        from.erase(from.begin() + i);
        return;
      }
    }
    pairs[pair].push_back({-1, {false, false}});
  }

  void write(int64_t first, Streams& out) const {
    const auto value = [&](bool used, int row, int64_t k) {
      out.values.push_back(used ? dense->at(rows[row], k) : 0.0f);
    };
    const auto column = [&](int64_t k) { out.columns.push_back(k < 0 ? 0 : dense->offsets[k]); };
    out.columns.push_back(shared);
    out.columns.push_back(rest);
    for (int64_t row : rows) out.columns.push_back(row - first);
    for (size_t step = 0; step < shared + rest; ++step) {
      for (int pair = 0; step < shared && pair < 6; ++pair) {
        const Shared& both = pairs[pair][step];
        column(both.k);
        for (int i = 0; i < 2; ++i) value(both.used[i], kRowPairs[pair][i], both.k);
      }
      for (int row = 0; row < 4; ++row) {
        const int64_t k = step < alone[row].size() ? alone[row][step] : -1;
        column(k);
        value(k >= 0, row, k);
      }
    }
  }
};

// Reorders rows so that each four in a row have many columns in common. Partners are chosen among
// the next few rows: more of them would share more columns, but differ more in their counts.
void group_similar_rows(std::vector<Row>& rows) {
  const size_t choice = rows.size() / 24;
  for (size_t at = 0; at < rows.size(); ++at) {
    int most = -1;
    size_t best = at;
    for (size_t i = at; at % 4 && i < std::min(at + choice, rows.size()); ++i) {
      int count = 0;
      for (size_t j = at / 4 * 4; j < at; ++j) count += rows[i].in_common(rows[j]);
      if (count > most) most = count, best = i;
    }
    std::rotate(rows.begin() + at, rows.begin() + best, rows.begin() + best + 1);
  }
}

// The same, four rows at a time; a column that two of them use is read once for both.
void add_quad_rows(const Dense& dense, int64_t first, int64_t last, int64_t from, int64_t to,
                   Streams& out) {
  std::vector<Row> rows;
  for (int64_t row = first; row < first + (last - first + 3) / 4 * 4; ++row)
    rows.emplace_back(dense, row, from, to);
  std::stable_sort(rows.begin(), rows.end(),
                   [](const Row& a, const Row& b) { return a.count < b.count; });
  group_similar_rows(rows);
  std::vector<QuadRows> quads;
  for (size_t i = 0; i < rows.size(); i += 4) quads.emplace_back(dense, &rows[i], from, to);
  // Neighbours have similar loop counts: a mispredicted branch costs as much as eight weights.
  std::stable_sort(quads.begin(), quads.end(), [](const QuadRows& a, const QuadRows& b) {
    return a.shared != b.shared ? a.shared < b.shared : a.rest < b.rest;
  });
  for (const QuadRows& quad : quads) quad.write(first, out);
}

}  // namespace

// Returns the number of bytes, -1 for an empty matrix, and writes them if there is room.
// `inner_starts` holds the first k of each block, and then the number of k.
int64_t pack(const float* weight, int64_t rows, const std::vector<int64_t>& inner_starts,
             int64_t layout, const uint16_t* offsets, int64_t panel_bytes, void* out,
             int64_t room) {
  const int64_t inner = inner_starts.back();
  if (rows < 1 || inner < 1) return -1;
  Header h{};
  h.magic = kMagic, h.rows = rows, h.inner = inner, h.layout = layout;
  h.blocks = inner_starts.size() - 1;
  h.groups = 1;
  while (rows > h.groups * kMostRows) h.groups *= 2;
  h.group_rows = ((rows + h.groups - 1) / h.groups + 15) / 16 * 16;
  h.groups = (rows + h.group_rows - 1) / h.group_rows;
  const Dense dense{weight, rows, inner, offsets};
  Streams streams;
  std::vector<Start> starts;
  for (int64_t b = 0; b < h.blocks; ++b)
    for (int64_t g = 0; g < h.groups; ++g) {
      starts.push_back({int64_t(streams.columns.size()), int64_t(streams.values.size())});
      auto add_rows = layout == kPairs ? add_pairs : add_quad_rows;
      add_rows(dense, g * h.group_rows, std::min((g + 1) * h.group_rows, rows), inner_starts[b],
               inner_starts[b + 1], streams);
    }
  starts.push_back({int64_t(streams.columns.size()), int64_t(streams.values.size())});
  h.columns_at = aligned(starts_at(h) + starts.size() * sizeof(Start));
  h.values_at = aligned(h.columns_at + streams.columns.size() * 2);
  h.bytes = aligned(h.values_at + streams.values.size() * 4);
  if (out == nullptr || room < h.bytes) return h.bytes;
  char* to = static_cast<char*>(out);
  memset(to, 0, h.bytes);
  memcpy(to, &h, sizeof h);
  memcpy(to + sizeof h, inner_starts.data(), inner_starts.size() * 8);
  memcpy(to + sizeof h + inner_starts.size() * 8, &panel_bytes, 8);
  memcpy(to + starts_at(h), starts.data(), starts.size() * sizeof(Start));
  memcpy(to + h.columns_at, streams.columns.data(), streams.columns.size() * 2);
  std::copy(streams.values.begin(), streams.values.end(),  // empty if all weights are zero
            reinterpret_cast<float*>(to + h.values_at));
  return h.bytes;
}

}  // namespace torchcram
