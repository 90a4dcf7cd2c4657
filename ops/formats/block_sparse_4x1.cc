#include "formats/block_sparse_4x1.h"

#include <algorithm>

#include "formats/bitmap.h"
#include "host/error_text.h"

namespace ortolan {
BlockSparseMatrix PackBlockSparse(const int8_t* q, int64_t row_stride, int64_t k, int64_t n) {
  BlockSparseMatrix packed;
  packed.starts.push_back(0);
  std::vector<uint16_t> inputs;
  for (int64_t first = 0; first < n; first += kGroupOutputs) {
    const int64_t outputs = std::min(kGroupOutputs, n - first);
    inputs.clear();
    for (int64_t l = 0; l < k; ++l) {
      const int8_t* block = q + l * row_stride + first;
      if (std::any_of(block, block + outputs, [](int8_t weight) { return weight != 0; })) {
        inputs.push_back(static_cast<uint16_t>(l));
      }
    }
    const size_t stored = inputs.size();
    const size_t quads = (stored + kQuadInputs - 1) / kQuadInputs;
    if (stored > 0) inputs.resize(quads * kQuadInputs, inputs.back());
    packed.indices.insert(packed.indices.end(), inputs.begin(), inputs.end());
    for (size_t quad = 0; quad < quads; ++quad) {
      for (int64_t o = 0; o < kGroupOutputs; ++o) {
        for (size_t i = quad * kQuadInputs; i < (quad + 1) * kQuadInputs; ++i) {
          packed.values.push_back(i < stored && o < outputs ? q[inputs[i] * row_stride + first + o] : int8_t{0});
        }
      }
    }
    packed.starts.push_back(packed.starts.back() + static_cast<int64_t>(quads));
  }
  return packed;
}

void UnpackBlockSparse(const BlockSparseView& view, int8_t* q, int64_t row_stride) {
  for (int64_t l = 0; l < view.k; ++l) std::fill_n(q + l * row_stride, view.n, int8_t{0});
  for (int64_t group = 0; group < view.Groups(); ++group) {
    const int64_t first = group * kGroupOutputs;
    const int64_t outputs = std::min(kGroupOutputs, view.n - first);
    for (int64_t quad = view.starts[group]; quad < view.starts[group + 1]; ++quad) {
      for (int64_t i = 0; i < kQuadInputs; ++i) {
        const int64_t input = view.Index(quad, i);
        if (i > 0 && input == view.Index(quad, i - 1)) continue;
        for (int64_t o = 0; o < outputs; ++o) {
          q[input * row_stride + first + o] = view.Values(quad)[o * kQuadInputs + i];
        }
      }
    }
  }
}

std::vector<int32_t> SumsOfOutputs(const BlockSparseView& view) {
  std::vector<int32_t> sums(static_cast<size_t>(BitmapPanels(view.n) * kPanelColumns));
  for (int64_t group = 0; group < view.Groups(); ++group) {
    for (int64_t quad = view.starts[group]; quad < view.starts[group + 1]; ++quad) {
      for (int64_t i = 0; i < kQuadBytes; ++i) {
        sums[static_cast<size_t>(group * kGroupOutputs + i / kQuadInputs)] += view.Values(quad)[i];
      }
    }
  }
  return sums;
}

std::string ValidateBlockSparse(const BlockSparseClaim& claim) {
  const BlockSparseView& view = claim.view;
  if (view.k < 1 || view.k > kMostSparseInputs || view.n < 1 || view.n > kMostSparseOutputs) {
    return ErrorText("k x n is ", view.k, " x ", view.n, ", expected 1 to ", kMostSparseInputs, " x 1 to ",
                     kMostSparseOutputs);
  }
  const int64_t groups = view.Groups();
  if (claim.start_count != groups + 1) {
    return ErrorText("starts have ", claim.start_count, " elements, expected ", groups + 1);
  }
  if (claim.scale_count != view.n) {
    return ErrorText("scales have ", claim.scale_count, " elements, expected ", view.n);
  }
  const int64_t quads = claim.index_count / kQuadInputs;
  if (claim.index_count % kQuadInputs != 0) {
    return ErrorText("indices have ", claim.index_count, " elements, expected a multiple of ", kQuadInputs);
  }
  if (claim.value_count != quads * kQuadBytes) {
    return ErrorText("values have ", claim.value_count, " elements, expected ", quads * kQuadBytes, " for ",
                     claim.index_count, " indices");
  }
  if (view.starts[0] != 0) return ErrorText("starts begin with ", view.starts[0], ", expected 0");
  if (view.starts[groups] != quads) {
    return ErrorText("starts end with ", view.starts[groups], ", expected the number of quads, ", quads);
  }
  for (int64_t group = 0; group < groups; ++group) {
    if (view.starts[group + 1] < view.starts[group] || view.starts[group + 1] > quads) {
      return ErrorText("starts decrease or exceed the ", quads, " quads after element ", group);
    }
  }
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t end = view.starts[group + 1];
    int64_t before = -1;
    for (int64_t quad = view.starts[group]; quad < end; ++quad) {
      for (int64_t i = 0; i < kQuadInputs; ++i) {
        const int64_t index = view.Index(quad, i);
        if (index >= view.k) return ErrorText("indices hold ", index, ", expected less than k, ", view.k);
        if (index <= before) {
          const int8_t* weights = view.Values(quad) + i;
          const bool fills =
              index == before && i > 0 && quad + 1 == end && (weights[0] | weights[4] | weights[8] | weights[12]) == 0;
          if (!fills) {
            return ErrorText("indices of the group at output ", group * kGroupOutputs, " do not ascend: ", index,
                             " after ", before);
          }
        }
        before = index;
      }
    }
  }
  // Kernels ignore these weights, but SumsOfOutputs does not.
  if (const int64_t outputs = view.n % kGroupOutputs; outputs != 0) {
    for (int64_t quad = view.starts[groups - 1]; quad < quads; ++quad) {
      const int8_t* end = view.Values(quad) + kQuadBytes;
      if (std::any_of(view.Values(quad) + outputs * kQuadInputs, end, [](int8_t weight) { return weight != 0; })) {
        return ErrorText("values hold nonzero weights for outputs from ", view.n, " on, expected zeros");
      }
    }
  }
  return {};
}

}  // namespace ortolan
