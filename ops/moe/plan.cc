#include "moe/plan.h"

#include <algorithm>
#include <numeric>

#include "host/thread_scratch.h"
#include "isa/kernel_table.h"
#include "matmul/kernel_choice.h"
#include "matmul/linear_plan.h"

namespace ortolan {
namespace {

// Routed rows that are processed at once: bounds the memory of a call. Each time, all their experts are read.
constexpr int64_t kMostRoutedRows = 8192;
// Floats of X or H that a thread packs at once.
constexpr int64_t kChunkFloats = int64_t{1} << 14;
// Stack buffer for the products of one row chunk: three panels of gate and up projections each.
constexpr int64_t kProductFloats = kMostRowChunk * 6 * kPanelColumns;

int64_t Chunks(int64_t count, int64_t chunk) { return (count + chunk - 1) / chunk; }

// An expert that rows are routed to. Routed rows are ordered by expert, then by row of X.
struct ActiveExpert {
  int64_t expert;
  int64_t begin;  // the first routed row
  int64_t count;
  const MatMulKernel* up;
  const MatMulKernel* down;
  int64_t up_bytes;  // offset of its packed rows
  int64_t down_bytes;
};

// Some rows of an expert and some panels of its layer.
struct Piece {
  const ActiveExpert* active;
  int64_t row, rows;
  int64_t panel_begin, panel_end;
};

int64_t RowChunk(const MatMulKernel& kernel) { return kMostRowChunk / kernel.row_block * kernel.row_block; }

// Rows that a thread packs at once.
int64_t PackChunk(const MatMulKernel& kernel, int64_t inputs) {
  return std::max<int64_t>(1, kChunkFloats / (inputs * kernel.row_block)) * kernel.row_block;
}

// Copy the rows of a product, without the padding of its last panel.
void AddScaled(const float* product, int64_t columns, float weight, float* y) {
  for (int64_t j = 0; j < columns; ++j) y[j] += weight * product[j];
}

}  // namespace

// One call of a plan, for at most kMostRoutedRows routed rows, or one row.
class ExpertsRun {
 public:
  ExpertsRun(const ExpertsPlan& plan, Host& host, const ExpertsCall& call)
      : plan_(plan), experts_(plan.experts_), host_(host), call_(call) {
    Route();
  }

  void Run() const {
    const int64_t inner_bytes = Aligned(Rows() * experts_.inner * static_cast<int64_t>(sizeof(float)));
    const HostMemory memory(host_, up_bytes_ + inner_bytes + down_bytes_);
    char* const x = memory.data();
    float* const inner = reinterpret_cast<float*>(x + up_bytes_);
    char* const packed_inner = x + up_bytes_ + inner_bytes;
    PackX(x);
    MultiplyUp(x, inner);
    PackInner(inner, packed_inner);
    MultiplyDown(packed_inner);
  }

 private:
  int64_t Rows() const { return call_.m * call_.k; }
  int64_t UpPanels() const { return BitmapPanels(experts_.inner); }
  int64_t DownPanels() const { return BitmapPanels(experts_.hidden); }

  // Group the routed rows by expert.
  void Route() {
    std::vector<int64_t> starts(static_cast<size_t>(experts_.count + 1));
    for (int64_t i = 0; i < Rows(); ++i) ++starts[static_cast<size_t>(call_.selected[i] + 1)];
    for (size_t e = 1; e < starts.size(); ++e) starts[e] += starts[e - 1];
    for (int64_t e = 0; e < experts_.count; ++e) {
      const int64_t begin = starts[static_cast<size_t>(e)], count = starts[static_cast<size_t>(e + 1)] - begin;
      if (count == 0) continue;
      const MatMulKernel& up = KernelForRows(plan_.up_kernels_, count);
      const MatMulKernel& down = KernelForRows(plan_.down_kernels_, count);
      active_.push_back({e, begin, count, &up, &down, up_bytes_, down_bytes_});
      up_bytes_ += Aligned(up.PackedBytes(*experts_.up.w, count));
      down_bytes_ += Aligned(down.PackedBytes(*experts_.down.w, count));
    }
    slots_.resize(static_cast<size_t>(Rows()));
    for (int64_t i = 0; i < Rows(); ++i) {
      slots_[static_cast<size_t>(starts[static_cast<size_t>(call_.selected[i])]++)] = i;
    }
  }

  // The index into selected and routing_weights of a routed row; divided by k, its row of X.
  int64_t Slot(int64_t routed) const { return slots_[static_cast<size_t>(routed)]; }

  // The pieces of a layer's packing: whole blocks of rows.
  std::vector<Piece> PackPieces(int64_t inputs, const MatMulKernel* ActiveExpert::* kernel) const {
    std::vector<Piece> pieces;
    for (const ActiveExpert& active : active_) {
      const int64_t chunk = PackChunk(*(active.*kernel), inputs);
      for (int64_t row = 0; row < active.count; row += chunk) {
        pieces.push_back({&active, row, std::min(chunk, active.count - row), 0, 0});
      }
    }
    return pieces;
  }

  void PackX(char* packed) const {
    const int64_t hidden = experts_.hidden;
    const int64_t row_bytes = hidden * static_cast<int64_t>(sizeof(float));
    const std::vector<Piece> pieces = PackPieces(hidden, &ActiveExpert::up);
    int64_t most_rows = 0;
    for (const Piece& piece : pieces) most_rows = std::max(most_rows, piece.rows);
    ForEachWithScratch(
        host_, static_cast<int64_t>(pieces.size()), most_rows * row_bytes, [&](int64_t i, char* scratch) {
          const Piece& piece = pieces[static_cast<size_t>(i)];
          const MatMulKernel& kernel = *piece.active->up;
          const int64_t first = piece.active->begin + piece.row;
          const auto x_of = [&](int64_t routed) { return call_.x + Slot(routed) / call_.k * hidden; };
          const float* rows = x_of(first);
          if (piece.rows > 1) {
            float* const gathered = reinterpret_cast<float*>(scratch);
            for (int64_t j = 0; j < piece.rows; ++j) std::copy_n(x_of(first + j), hidden, gathered + j * hidden);
            rows = gathered;
          }
          char* const to = packed + piece.active->up_bytes + piece.row * kernel.packed_row_bytes(*experts_.up.w);
          kernel.pack(*experts_.up.w, rows, row_bytes, piece.rows, to);
        });
  }

  void PackInner(const float* inner, char* packed) const {
    const std::vector<Piece> pieces = PackPieces(experts_.inner, &ActiveExpert::down);
    host_.ParallelFor(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
      const Piece& piece = pieces[static_cast<size_t>(i)];
      const MatMulKernel& kernel = *piece.active->down;
      const float* const rows = inner + (piece.active->begin + piece.row) * experts_.inner;
      char* const to = packed + piece.active->down_bytes + piece.row * kernel.packed_row_bytes(*experts_.down.w);
      kernel.pack(*experts_.down.w, rows, experts_.inner * static_cast<int64_t>(sizeof(float)), piece.rows, to);
    });
  }

  void MultiplyUp(const char* packed, float* inner) const {
    std::vector<Piece> pieces;
    for (const ActiveExpert& active : active_) {
      const int64_t chunk = RowChunk(*active.up);
      const int64_t panel_inputs = experts_.up.panel_inputs * (experts_.gated ? 2 : 1);
      const int64_t macs = PanelMacs(*active.up, std::min(active.count, chunk), panel_inputs);
      const int64_t panels = PiecePanels(UpPanels(), macs, PanelsTogether(*active.up, active.count));
      for (int64_t row = 0; row < active.count; row += chunk) {
        for (int64_t panel = 0; panel < UpPanels(); panel += panels) {
          pieces.push_back(
              {&active, row, std::min(chunk, active.count - row), panel, std::min(UpPanels(), panel + panels)});
        }
      }
    }
    host_.ParallelFor(static_cast<int64_t>(pieces.size()),
                      [&](int64_t i) { MultiplyUpPiece(pieces[static_cast<size_t>(i)], packed, inner); });
  }

  // Arguments of a product of rows of an expert, without an output.
  static MatMulArgs ArgsOf(const ExpertsLayer& layer, const MatMulKernel& kernel, const char* packed, int64_t row,
                           int64_t rows) {
    MatMulArgs args;
    args.m = rows;
    args.x = packed + row * kernel.packed_row_bytes(*layer.w);
    args.w = layer.w;
    args.bias = layer.bias;
    return args;
  }

  void MultiplyUpPiece(const Piece& piece, const char* packed, float* inner) const {
    alignas(64) float products[kProductFloats];
    const ActiveExpert& active = *piece.active;
    const int64_t halves = experts_.gated ? 2 : 1;
    const int64_t most = PanelsThatFit(*active.up, kProductFloats / halves, piece.rows);
    MatMulArgs args = ArgsOf(experts_.up, *active.up, packed + active.up_bytes, piece.row, piece.rows);
    for (int64_t panel = piece.panel_begin; panel < piece.panel_end; panel += most) {
      const int64_t count = std::min(most, piece.panel_end - panel);
      const int64_t column = panel * kPanelColumns, stride = halves * count * kPanelColumns;
      args.y_row_bytes = stride * static_cast<int64_t>(sizeof(float));
      for (int64_t half = 0; half < halves; ++half) {
        const int64_t first = (active.expert * halves + half) * UpPanels() + panel;
        args.y = products + half * count * kPanelColumns;
        args.y_panel = first;
        active.up->multiply(args, first, first + count);
      }
      EpilogueArgs end;
      end.m = piece.rows;
      end.n = std::min(column + count * kPanelColumns, experts_.inner) - column;
      end.y = inner + (active.begin + piece.row) * experts_.inner + column;
      end.y_row_bytes = experts_.inner * static_cast<int64_t>(sizeof(float));
      end.x = products;
      end.x_row_bytes = args.y_row_bytes;
      end.activation = experts_.activation;
      if (experts_.gated) {
        AdjustGate(products, piece.rows, count * kPanelColumns, stride);
        end.factor = products + count * kPanelColumns;
      }
      plan_.epilogue_(end);
    }
  }

  // Apply limit, alpha and beta to rows of gate and factor, which are `columns` floats apart. NaN stays NaN.
  void AdjustGate(float* products, int64_t rows, int64_t columns, int64_t stride) const {
    const float alpha = experts_.alpha, beta = experts_.beta, limit = experts_.limit;
    if (alpha == 1.0f && beta == 0.0f && limit == std::numeric_limits<float>::infinity()) return;
    for (int64_t i = 0; i < rows; ++i, products += stride) {
      float* const factor = products + columns;
      for (int64_t j = 0; j < columns; ++j) {
        const float gate = products[j] > limit ? limit : products[j];
        const float most = factor[j] > limit ? limit : factor[j];
        products[j] = alpha * gate;
        factor[j] = ((most < -limit ? -limit : most) + beta) / alpha;
      }
    }
  }

  // A piece is some columns of Y for all experts, so that the sum of a row has one order and needs no locks.
  void MultiplyDown(const char* packed) const {
    int64_t macs = 0, together = 1;
    for (const ActiveExpert& active : active_) {
      macs += PanelMacs(*active.down, active.count, experts_.down.panel_inputs);
      together = std::lcm(together, PanelsTogether(*active.down, active.count));
    }
    const int64_t panels = PiecePanels(DownPanels(), macs, together);
    host_.ParallelFor(Chunks(DownPanels(), panels), [&](int64_t i) {
      const int64_t begin = i * panels, end = std::min(DownPanels(), begin + panels);
      const int64_t column = begin * kPanelColumns;
      const int64_t columns = std::min(end * kPanelColumns, experts_.hidden) - column;
      for (int64_t row = 0; row < call_.m; ++row) std::fill_n(call_.y + row * experts_.hidden + column, columns, 0.0f);
      for (const ActiveExpert& active : active_) AddDown(active, packed + active.down_bytes, begin, end);
    });
  }

  // Add an expert's rows to some panels of Y.
  void AddDown(const ActiveExpert& active, const char* packed, int64_t panel_begin, int64_t panel_end) const {
    alignas(64) float products[kProductFloats];
    const int64_t chunk = RowChunk(*active.down);
    for (int64_t row = 0; row < active.count; row += chunk) {
      const int64_t rows = std::min(chunk, active.count - row);
      const int64_t most = PanelsThatFit(*active.down, kProductFloats, rows);
      MatMulArgs args = ArgsOf(experts_.down, *active.down, packed, row, rows);
      for (int64_t panel = panel_begin; panel < panel_end; panel += most) {
        const int64_t count = std::min(most, panel_end - panel), stride = count * kPanelColumns;
        const int64_t first = active.expert * DownPanels() + panel, column = panel * kPanelColumns;
        args.y = products;
        args.y_row_bytes = stride * static_cast<int64_t>(sizeof(float));
        args.y_panel = first;
        active.down->multiply(args, first, first + count);
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t slot = Slot(active.begin + row + i);
          AddScaled(products + i * stride, std::min(stride, experts_.hidden - column), call_.routing_weights[slot],
                    call_.y + slot / call_.k * experts_.hidden + column);
        }
      }
    }
  }

  const ExpertsPlan& plan_;
  const Experts& experts_;
  Host& host_;
  const ExpertsCall& call_;
  std::vector<ActiveExpert> active_;
  std::vector<int64_t> slots_;
  int64_t up_bytes_ = 0, down_bytes_ = 0;  // of all packed rows
};

ExpertsPlan::ExpertsPlan(const Experts& experts, Features features)
    : experts_(experts),
      up_kernels_(SupportedKernels(experts.up.kernels, features, {experts.up.w})),
      down_kernels_(SupportedKernels(experts.down.kernels, features, {experts.down.w})),
      epilogue_(SelectKernel(EpilogueKernels(), features).run) {}

void ExpertsPlan::Run(Host& host, const ExpertsCall& call) const {
  const int64_t rows = std::max<int64_t>(1, kMostRoutedRows / std::max<int64_t>(1, call.k));
  for (int64_t row = 0; row < call.m; row += rows) {
    ExpertsCall part = call;
    part.m = std::min(rows, call.m - row);
    part.x += row * experts_.hidden;
    part.selected += row * call.k;
    part.routing_weights += row * call.k;
    part.y += row * experts_.hidden;
    ExpertsRun(*this, host, part).Run();
  }
}

}  // namespace ortolan
