#include "matmul/block_int8_weight.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <new>

#include "host/op_error.h"
#include "matmul/pack_panels.h"

namespace ortolan {
namespace {

// Return the zero points as bytes, because codes less zero points are computed modulo 256.
std::vector<uint8_t> BytesOfZeroPoints(const Int8Weight& w) {
  std::vector<uint8_t> zeros;
  for (const int16_t zero : w.zero_points) zeros.push_back(static_cast<uint8_t>(zero));
  return zeros;
}

// Count the values of one input that are in blocks with nonzero values.
int64_t StoredOf(const uint8_t* codes, const std::vector<uint8_t>& zeros) {
  const int64_t n = static_cast<int64_t>(zeros.size()), whole = n / kGroupOutputs * kGroupOutputs;
  int64_t blocks = 0;
  for (int64_t j = 0; j < whole; j += kGroupOutputs) {
    blocks += std::memcmp(codes + j, zeros.data() + j, kGroupOutputs) != 0;
  }
  const bool is_last_stored = !std::equal(codes + whole, codes + n, zeros.data() + whole);
  return blocks * kGroupOutputs + (is_last_stored ? n - whole : 0);
}

std::vector<BlockSparseMatrix> PackedPanels(const Int8Weight& w) {
  const std::vector<uint8_t> zeros = BytesOfZeroPoints(w);
  std::vector<BlockSparseMatrix> panels(static_cast<size_t>(BitmapPanels(w.n)));
  const int64_t panel_bytes = w.k * kPanelColumns;
  std::atomic<bool> is_out_of_memory = false;
  ForEachPanel(BitmapPanels(w.n), panel_bytes, panel_bytes, [&](int64_t panel, int8_t* q) {
    const int64_t first = panel * kPanelColumns, columns = std::min(kPanelColumns, w.n - first);
    for (int64_t l = 0; l < w.k; ++l) {
      const uint8_t* const codes = w.codes + l * w.Row() + first;
      const uint8_t* const minus = zeros.data() + first;
      for (int64_t j = 0; j < columns; ++j) {
        q[l * columns + j] = static_cast<int8_t>(static_cast<uint8_t>(codes[j] - minus[j]));
      }
    }
    try {
      panels[static_cast<size_t>(panel)] = PackBlockSparse(q, columns, w.k, columns);
    } catch (const std::bad_alloc&) {
      is_out_of_memory = true;
    }
  });
  if (is_out_of_memory) throw std::bad_alloc();
  return panels;
}

// Append a panel to the panels so far.
void Append(const BlockSparseMatrix& panel, BlockSparseMatrix& whole) {
  const int64_t quads = whole.starts.back();
  whole.values.insert(whole.values.end(), panel.values.begin(), panel.values.end());
  whole.indices.insert(whole.indices.end(), panel.indices.begin(), panel.indices.end());
  std::transform(panel.starts.begin() + 1, panel.starts.end(), std::back_inserter(whole.starts),
                 [=](int64_t start) { return quads + start; });
}

}  // namespace

bool IsBlockSparse(const Int8Weight& w, double least_zeros) {
  if (w.transposed || w.k > kMostSparseInputs || w.n > kMostSparseOutputs) return false;
  const std::vector<uint8_t> zeros = BytesOfZeroPoints(w);
  const double all = static_cast<double>(w.k) * static_cast<double>(w.n);
  int64_t stored = 0;
  for (int64_t l = 0; l < w.k; ++l) {
    stored += StoredOf(w.codes + l * w.Row(), zeros);
    if (1 - static_cast<double>(stored) / all < least_zeros) return false;
  }
  return RangeOf(w).FitsInt8();
}

BlockColumns::BlockColumns(std::span<const Int8Weight> parts) {
  packed_.k = parts.front().k;
  own_.starts.push_back(0);
  for (const Int8Weight& part : parts) {
    for (const BlockSparseMatrix& panel : PackedPanels(part)) Append(panel, own_);
    packed_.n += part.n;
    own_scales_.insert(own_scales_.end(), part.scales.begin(), part.scales.end());
  }
  packed_.values = own_.values;
  packed_.indices = own_.indices;
  packed_.starts = own_.starts;
  packed_.scales = own_scales_;
  SetWeight();
}

BlockColumns::BlockColumns(const PackedBlocks& packed) : packed_(packed) { SetWeight(); }

void BlockColumns::SetWeight() {
  const BlockSparseView view{packed_.k, packed_.n, packed_.values.data(),
                             reinterpret_cast<const uint8_t*>(packed_.indices.data()), packed_.starts.data()};
  const auto count = [](const auto& values) { return static_cast<int64_t>(values.size()); };
  const std::string problem = ValidateBlockSparse(
      {view, count(packed_.values), count(packed_.indices), count(packed_.starts), count(packed_.scales)});
  if (!problem.empty()) throw OpError(problem);
  sums_ = SumsOfOutputs(view);
  w_ = {{packed_.k, packed_.n}, view, sums_.data(), packed_.scales.data(), {}};
}

}  // namespace ortolan
