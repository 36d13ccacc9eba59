// Checks whether memory holds a packed matrix.
//
// The header and the tables are checked at every call, because the kernels trust them. The streams
// are checked once. If they are overwritten later without torch noticing, results are wrong, but
// the kernels stay within their memory.
#include <initializer_list>

#include "packed.h"

namespace torchcram {

namespace {

bool valid_header(const Header& h, int64_t bytes) {
  const int64_t most = int64_t(1) << 40;
  if (h.magic != kMagic || h.bytes != bytes) return false;
  if (h.layout != kPairs && h.layout != kQuadRows) return false;
  for (int64_t n : {h.rows, h.inner, h.blocks, h.groups, h.group_rows})
    if (n < 1 || n > most) return false;
  if (h.blocks > bytes / 8 || h.groups > bytes / 16 / h.blocks) return false;
  if (h.group_rows % 16 || h.group_rows > kMostRows) return false;
  if ((h.groups - 1) * h.group_rows >= h.rows || h.groups * h.group_rows < h.rows) return false;
  const int64_t tables =
      int64_t(sizeof(Header)) + (h.blocks + 2) * 8 + (h.blocks * h.groups + 1) * 16;
  return h.columns_at % 2 == 0 && h.values_at % 4 == 0 && tables <= h.columns_at &&
         h.columns_at <= h.values_at && h.values_at <= bytes;
}

struct Reader {
  const uint16_t* columns;
  int64_t column, value, last_column, last_value, panel_bytes;

  bool counts(int64_t count, int64_t each_column, int64_t each_value) const {
    return column + count * each_column <= last_column && value + count * each_value <= last_value;
  }
  bool advance(int64_t count, int64_t each_column, int64_t each_value) {
    if (!counts(count, each_column, each_value)) return false;
    for (int64_t i = 0; i < count * each_column; ++i) {
      const int64_t offset = columns[column + i];
      if (offset % kAlign != 0 || offset + kPanelBytes > panel_bytes) return false;
    }
    column += count * each_column;
    value += count * each_value;
    return true;
  }
};

bool valid_pairs(Reader r, int64_t rows) {
  for (int64_t row = 0; row < rows; row += 2) {
    if (r.column + 3 > r.last_column) return false;
    const uint16_t* at = r.columns + r.column;
    if (at[1] > rows || at[2] > rows) return false;  // the last odd row is paired with row `rows`
    r.column += 3;
    if (!r.advance(at[0], 2, 2)) return false;
  }
  return r.column == r.last_column && r.value == r.last_value;
}

bool valid_quad_rows(Reader r, int64_t rows) {
  for (int64_t row = 0; row < rows; row += 4) {
    if (r.column + 6 > r.last_column) return false;
    const uint16_t* at = r.columns + r.column;
    for (int i = 2; i < 6; ++i)
      if (at[i] >= (rows + 3) / 4 * 4) return false;
    r.column += 6;
    if (!r.advance(at[0], 10, 16) || !r.advance(at[1], 4, 4)) return false;
  }
  return r.column == r.last_column && r.value == r.last_value;
}

}  // namespace

// Returns the length of the counts and row numbers in a stream of columns.
static int64_t other_columns(int64_t layout, int64_t rows) {
  return layout == kPairs ? (rows + 1) / 2 * 3 : (rows + 3) / 4 * 6;
}

bool valid_tables(const void* memory, int64_t bytes) {
  if (bytes < int64_t(sizeof(Header)) || reinterpret_cast<uintptr_t>(memory) % alignof(Header))
    return false;
  const Header& h = *static_cast<const Header*>(memory);
  if (!valid_header(h, bytes)) return false;
  const Packed packed(memory);
  const int64_t panel_bytes = packed.inner_starts[h.blocks + 1];
  const int64_t columns = (h.values_at - h.columns_at) / 2, values = (bytes - h.values_at) / 4;
  if (panel_bytes < 2 * kPanelBytes || panel_bytes > kPanelRoom) return false;
  if (panel_bytes % kAlign) return false;
  if (packed.inner_starts[0] != 0 || packed.inner_starts[h.blocks] != h.inner) return false;
  for (int64_t block = 0; block < h.blocks; ++block) {
    const int64_t from = packed.inner_starts[block], to = packed.inner_starts[block + 1];
    if (to <= from || to > h.inner || to - from > 65536) return false;  // increasing from 0
    for (int64_t group = 0; group < h.groups; ++group) {
      const Start* s = packed.starts + block * h.groups + group;
      if (s->column < 0 || s[1].column < s->column || s[1].column > columns) return false;
      if (s->value < 0 || s[1].value < s->value || s[1].value > values) return false;
      const int64_t stored = s[1].value - s->value;
      const int64_t entries =
          s[1].column - s->column - other_columns(h.layout, packed.group_rows(group));
      // In quad rows 16 values may share 10 columns; the values lie behind all columns.
      if (entries < 0 || (h.layout == kPairs && entries != stored)) return false;
    }
  }
  return true;
}

bool check(const void* memory, int64_t bytes) {
  if (!valid_tables(memory, bytes)) return false;
  const Packed packed(memory);
  const Header& h = *packed.header;
  for (int64_t block = 0; block < h.blocks; ++block)
    for (int64_t group = 0; group < h.groups; ++group) {
      const Start* s = packed.starts + block * h.groups + group;
      const Reader r{packed.columns, s->column,  s->value,
                     s[1].column,    s[1].value, packed.inner_starts[h.blocks + 1]};
      const int64_t rows = packed.group_rows(group);
      if (!(h.layout == kPairs ? valid_pairs(r, rows) : valid_quad_rows(r, rows))) return false;
    }
  return true;
}

}  // namespace torchcram
