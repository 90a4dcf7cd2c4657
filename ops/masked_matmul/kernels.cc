#include "masked_matmul/panel_loop.h"
#include "masked_matmul/rows_loop.h"
#include "masked_matmul/tile_loop.h"
#include "masked_matmul/value_list_loop.h"

namespace ortolan::ORTOLAN_TARGET {

extern const MaskedMatMulFunctions kMaskedMatMul;
constexpr MaskedMatMulFunctions kMaskedMatMul{
    .dense_panels = Simd::kLanes > 1,
    .tile_rows = kTileRows,
    .sparse_tile_rows = kSparseTileRows,
    .scan_rows = &ScanRows,
    .scan_blocks = &ScanBlocks,
    .pack_blocks = &PackBlocks,
    .pack_tile = &PackTile<kTileRows>,
    .pack_sparse_tile = &PackTile<kSparseTileRows>,
    .multiply_tile = &MultiplyTile,
    .multiply_sparse_tile = &MultiplySparseTile,
    .list_values = &ListValues,
    .multiply_values = &MultiplyValues,
    .list_inputs = &ListInputs,
    .multiply_rows = {&MultiplyRows<float>, &MultiplyRows<uint16_t>, &MultiplyRows<int8_t>},
    .pack_inputs = {&PackInputs<float>, &PackInputs<uint16_t>, &PackInputs<int8_t>},
    .multiply_panel = &MultiplyPanel,
};

}  // namespace ortolan::ORTOLAN_TARGET
