// Packs rows by fours: a column that two of them use is read once for both.
#include <algorithm>

#include "streams.h"

namespace torchcram {

namespace {

// The pairs among four rows, in the order of the kernel's steps.
constexpr int kPairs[6][2] = {{0, 1}, {2, 3}, {0, 2}, {1, 3}, {0, 3}, {1, 2}};

struct Row {
  int64_t row;
  std::vector<uint64_t> columns;  // bits
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
  int64_t k;  // -1: none, the column of zeros fills the slot
  bool used[2];
};

// Four rows and which columns are read for two of them at once. Each pair of rows has as many.
struct Four {
  const Dense* dense;
  int64_t rows[4];
  std::vector<int64_t> users[16];  // columns by the bits of the rows that use them
  size_t shared = 0, rest = 0;     // steps: with shared columns, without
  std::vector<Shared> pairs[6];
  std::vector<int64_t> alone[4];

  Four(const Dense& dense, const Row* four, int64_t from, int64_t to) : dense(&dense) {
    for (int i = 0; i < 4; ++i) rows[i] = four[i].row;
    for (int64_t k = from; k < to; ++k) {
      int bits = 0;
      for (int i = 0; i < 4; ++i) bits |= (dense.at(rows[i], k) != 0.0f) << i;
      users[bits].push_back(k);
    }
    size_t most = 0;
    for (int bits = 0; bits < 16; ++bits)
      most += users[bits].size() * (__builtin_popcount(bits) / 2);
    most /= 6;  // beyond it there is nothing to share
    size_t best = 0, least = SIZE_MAX;
    for (size_t count = most * 3 / 4; count <= most; ++count) {
      divide(count);
      const size_t cost = 64 * shared + 21 * rest;  // 64 multiplications or 21 loads, two at a time
      if (cost < least) least = cost, best = count;
    }
    divide(best);
  }

  void divide(size_t count) {
    shared = count;
    for (auto& pair : pairs) pair.clear();
    for (auto& row : alone) row.clear();
    for (int size = 1; size <= 4; ++size)  // columns that leave a choice come last
      for (int bits = 1; bits < 16; ++bits)
        if (__builtin_popcount(bits) == size)
          for (int64_t k : users[bits]) place(k, bits);
    for (int pair = 0; pair < 6; ++pair)
      while (pairs[pair].size() < shared) fill(pair);
    rest = 0;  // each step with shared columns has one of each row alone as well
    for (const auto& row : alone) rest = std::max(rest, std::max(row.size(), shared) - shared);
  }

  void place(int64_t k, int bits) {
    for (int best = 0; best >= 0;) {
      best = -1;
      for (int pair = 0; pair < 6; ++pair) {
        if (!(bits >> kPairs[pair][0] & bits >> kPairs[pair][1] & 1)) continue;
        if (pairs[pair].size() < (best < 0 ? shared : pairs[best].size())) best = pair;
      }
      if (best < 0) break;
      pairs[best].push_back({k, {true, true}});
      bits &= ~(1 << kPairs[best][0] | 1 << kPairs[best][1]);
    }
    for (int row = 0; row < 4; ++row)
      if (bits >> row & 1) alone[row].push_back(k);
  }

  // A pair that has no column left in common takes one of the single columns of either row, but
  // only one that the other row uses as well, in another step: a factor of zero would pass NaN and
  // infinities of the input on to a row that does not use that column.
  void fill(int pair) {
    const int a = kPairs[pair][0], b = kPairs[pair][1];
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
        for (int i = 0; i < 2; ++i) value(both.used[i], kPairs[pair][i], both.k);
      }
      for (int row = 0; row < 4; ++row) {
        const int64_t k = step < alone[row].size() ? alone[row][step] : -1;
        column(k);
        value(k >= 0, row, k);
      }
    }
  }
};

// Moves rows with many columns in common together, by fours. A partner is one of the next rows: the
// more there are to choose from, the more is shared, but the less alike are the counts.
void match(std::vector<Row>& rows) {
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

}  // namespace

void add_fours(const Dense& dense, int64_t first, int64_t last, int64_t from, int64_t to,
               Streams& out) {
  std::vector<Row> rows;
  for (int64_t row = first; row < first + (last - first + 3) / 4 * 4; ++row)
    rows.emplace_back(dense, row, from, to);
  std::stable_sort(rows.begin(), rows.end(),
                   [](const Row& a, const Row& b) { return a.count < b.count; });
  match(rows);
  std::vector<Four> fours;
  for (size_t i = 0; i < rows.size(); i += 4) fours.emplace_back(dense, &rows[i], from, to);
  // Loops that mostly end where the last one did: a branch that was not foreseen costs as much as
  // eight weights.
  std::stable_sort(fours.begin(), fours.end(), [](const Four& a, const Four& b) {
    return a.shared != b.shared ? a.shared < b.shared : a.rest < b.rest;
  });
  for (const Four& four : fours) four.write(first, out);
}

}  // namespace torchcram
