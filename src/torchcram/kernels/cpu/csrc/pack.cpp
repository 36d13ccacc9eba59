// Packs a dense matrix for the kernels, and checks what claims to be packed.
#include <algorithm>
#include <cstring>
#include <vector>

#include "streams.h"

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

namespace {

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
        const bool fill = j >= ks.size();
        out.columns.push_back(fill ? 0 : dense.offsets[ks[j]]);
        out.values.push_back(fill ? 0.0f : dense.at(first + order[pair + i], ks[j]));
      }
  }
}

}  // namespace

// Returns how many bytes it takes, -1 where there is nothing; writes them where there is room.
int64_t pack(const float* weight, int64_t rows, int64_t inner, int64_t form,
             const uint16_t* offsets, int64_t block, int64_t panel_bytes, void* out, int64_t room) {
  if (rows < 1 || inner < 1 || block < 1) return -1;
  Header h{};
  h.magic = kMagic, h.rows = rows, h.inner = inner, h.form = form;
  h.blocks = (inner + block - 1) / block;
  h.groups = 1;
  while (rows > h.groups * kMostRows) h.groups *= 2;
  h.group_rows = ((rows + h.groups - 1) / h.groups + 15) / 16 * 16;
  h.groups = (rows + h.group_rows - 1) / h.group_rows;
  std::vector<int64_t> inner_starts;
  for (int64_t b = 0; b <= h.blocks; ++b) inner_starts.push_back(std::min(b * block, inner));
  inner_starts.push_back(panel_bytes);
  const Dense dense{weight, rows, inner, offsets};
  Streams streams;
  std::vector<Start> starts;
  for (int64_t b = 0; b < h.blocks; ++b)
    for (int64_t g = 0; g < h.groups; ++g) {
      starts.push_back({int64_t(streams.columns.size()), int64_t(streams.values.size())});
      auto add = form == kPairs ? add_pairs : add_fours;
      add(dense, g * h.group_rows, std::min((g + 1) * h.group_rows, rows), inner_starts[b],
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
  memcpy(to + starts_at(h), starts.data(), starts.size() * sizeof(Start));
  memcpy(to + h.columns_at, streams.columns.data(), streams.columns.size() * 2);
  std::copy(streams.values.begin(), streams.values.end(),  // none at all where all weights are zero
            reinterpret_cast<float*>(to + h.values_at));
  return h.bytes;
}

}  // namespace torchcram
