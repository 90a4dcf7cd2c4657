// y = x W + bias, with 4-bit W in groups (formats/int4_group.h) and x quantized on the CPU. OpenCL C 1.2.
//
// The host defines
//
//     GROUP       inputs of a group: 32, 64 or 128
//     SCALE_F16   1: scales and minimums are float16; 0: float32
//     OFFSETS     what W has besides scales: 0 nothing, 1 zero points, 2 zero points in sixteenths, 3 minimums
//
// Products have the bits of the CPU's kernels: a group's sum is an integer, and floats are added group by group, with
// fma only where the CPU's kernels use MultiplyAdd.
#pragma OPENCL FP_CONTRACT OFF

#define PANEL 16              // columns of a panel
#define GROUP_PAIRS (GROUP / 8)  // pairs of rows of weights: 4 inputs each, in low and high nibbles
#define SCALED_SUMS (OFFSETS >= 2)

// Return sum + the products of four nibbles, one per byte, with four int8.
static int DotQuad(uint w, uint x, int sum) {
#ifdef __opencl_c_integer_dot_product_input_4x8bit_packed
  return sum + dot_4x8packed_ss_int(w, x);
#else
  const int4 products = convert_int4(as_char4(w)) * convert_int4(as_char4(x));
  return sum + products.x + products.y + products.z + products.w;
#endif
}

static float LoadScale(__global const uchar* from, int at) {
#if SCALE_F16
  return vload_half(at, (__global const half*)from);
#else
  return ((__global const float*)from)[at];
#endif
}

// The values that end a group of a column.
typedef struct {
  float scale;
  float minimum;   // for nibbles less 8
  int zero_point;
} Ends;

static Ends EndsAt(__global const uchar* scales, __global const uchar* offsets, int at) {
  Ends ends;
  ends.scale = LoadScale(scales, at);
  ends.minimum = 0.0f;
  ends.zero_point = 8;
#if OFFSETS == 1
  ends.zero_point = offsets[at];
#elif OFFSETS == 2
  ends.minimum = (float)(128 - offsets[at]) * 0.0625f * ends.scale;
#elif OFFSETS == 3
  ends.minimum = fma(8.0f, ends.scale, LoadScale(offsets, at));
#endif
  return ends;
}

// The terms stored after the q of a packed row.
static float RowScale(__global const uint* row_terms, int group) { return as_float(row_terms[group]); }
static int MinusSum(__global const uint* row_terms, int groups, int group) { return as_int(row_terms[groups + group]); }
static float ScaledSum(__global const uint* row_terms, int groups, int group) {
  return as_float(row_terms[2 * groups + group]);
}

#define ARGUMENTS                                                                                              \
  __global const uchar *all_weights, ulong weights_at, __global const uchar *all_scales, ulong scales_at,      \
      __global const uchar *all_offsets, ulong offsets_at, __global const uint *inputs, int x_at, int has_bias, \
      __global float *y, int m, int n, int pairs, int groups, int row_words

// pairs: pairs of rows of weights of a panel. inputs: the bias [n] and, from x_at on, m packed rows of row_words.

// Few rows of x: a work group computes one row and one panel of W. Slices of it multiply a group each, and the first
// slice adds their float sums in order.
#define SLICES 16

__kernel __attribute__((reqd_work_group_size(PANEL, SLICES, 1))) void FewRows(ARGUMENTS) {
  __local float sums[SLICES][PANEL];
  __local float scales_of[SLICES][PANEL];
#if SCALED_SUMS
  __local float added[SLICES][PANEL];
#endif
  const int column = get_local_id(0);
  const int slice = get_local_id(1);
  const int panel = get_group_id(0);
  const int row = get_group_id(2);
  __global const uint* weights = (__global const uint*)(all_weights + weights_at) + (size_t)panel * pairs * PANEL;
  __global const uint* x = inputs + x_at + (size_t)row * row_words;
  __global const uint* row_terms = x + 2 * pairs;
  float total = 0.0f;
  for (int first = 0; first < groups; first += SLICES) {
    const int group = first + slice;
    if (group < groups) {
      const int begin = group * GROUP_PAIRS;
      const int end = min(begin + GROUP_PAIRS, pairs);
      int sum = 0;
      for (int pair = begin; pair < end; ++pair) {
        const uint w = weights[pair * PANEL + column];
        sum = DotQuad(w & 0x0f0f0f0f, x[2 * pair], sum);
        sum = DotQuad(w >> 4 & 0x0f0f0f0f, x[2 * pair + 1], sum);
      }
      const Ends ends =
          EndsAt(all_scales + scales_at, all_offsets + offsets_at, (panel * groups + group) * PANEL + column);
      sums[slice][column] = (float)(sum + ends.zero_point * MinusSum(row_terms, groups, group));
      scales_of[slice][column] = ends.scale * RowScale(row_terms, group);
#if SCALED_SUMS
      added[slice][column] = ends.minimum;
#endif
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (slice == 0) {
      const int count = min(SLICES, groups - first);
      for (int s = 0; s < count; ++s) {
#if SCALED_SUMS
        total = fma(ScaledSum(row_terms, groups, first + s), added[s][column], total);
#endif
        total = fma(sums[s][column], scales_of[s][column], total);
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  const int j = panel * PANEL + column;
  if (slice != 0 || j >= n) return;
  y[(size_t)row * n + j] = has_bias ? total + ((__global const float*)inputs)[j] : total;
}

// Many rows of x: a work group computes TILE_ROWS rows of TILE_COLUMNS columns, group by group, with weights and
// activations in local memory. A work item has one column and ITEM_ROWS rows, so it splits each nibble once for all of
// them.
#define TILE_COLUMNS 64
#define ROW_BLOCKS 4
#define ITEM_ROWS 8
#define TILE_ROWS (ROW_BLOCKS * ITEM_ROWS)
#define ITEMS (TILE_COLUMNS * ROW_BLOCKS)

__kernel __attribute__((reqd_work_group_size(TILE_COLUMNS, ROW_BLOCKS, 1))) void ManyRows(ARGUMENTS) {
  __local uint tile_w[GROUP_PAIRS * TILE_COLUMNS];
  __local uint tile_x[TILE_ROWS * 2 * GROUP_PAIRS];
  const int column = get_local_id(0);
  const int item = get_local_id(1) * TILE_COLUMNS + column;
  const int panels = (n + PANEL - 1) / PANEL;
  const int panel = get_group_id(0) * (TILE_COLUMNS / PANEL) + column / PANEL;
  const int is_inside = panel < panels;
  const int first_row = get_group_id(1) * TILE_ROWS;
  const int block = get_local_id(1) * ITEM_ROWS;  // the first row of the item, in the tile
  __global const uint* weights = (__global const uint*)(all_weights + weights_at) +
                                 (is_inside ? (size_t)panel * pairs * PANEL : 0) + column % PANEL;
  __global const uint* x = inputs + x_at + (size_t)first_row * row_words;
  float totals[ITEM_ROWS];
  for (int r = 0; r < ITEM_ROWS; ++r) totals[r] = 0.0f;
  for (int group = 0; group < groups; ++group) {
    const int begin = group * GROUP_PAIRS;
    const int count = min(GROUP_PAIRS, pairs - begin);
    for (int pair = get_local_id(1); pair < count; pair += ROW_BLOCKS) {
      tile_w[pair * TILE_COLUMNS + column] = is_inside ? weights[(begin + pair) * PANEL] : 0;
    }
    for (int at = item; at < TILE_ROWS * 2 * GROUP_PAIRS; at += ITEMS) {
      const int row = at / (2 * GROUP_PAIRS);
      const int quad = at % (2 * GROUP_PAIRS);
      const int is_there = first_row + row < m && quad < 2 * count;
      tile_x[at] = is_there ? x[(size_t)row * row_words + 2 * begin + quad] : 0;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (is_inside && first_row + block < m) {
      int sums[ITEM_ROWS];
      for (int r = 0; r < ITEM_ROWS; ++r) sums[r] = 0;
      for (int pair = 0; pair < count; ++pair) {
        const uint w = tile_w[pair * TILE_COLUMNS + column];
        for (int r = 0; r < ITEM_ROWS; ++r) {
          __local const uint* q = tile_x + (block + r) * 2 * GROUP_PAIRS + 2 * pair;
          sums[r] = DotQuad(w & 0x0f0f0f0f, q[0], sums[r]);
          sums[r] = DotQuad(w >> 4 & 0x0f0f0f0f, q[1], sums[r]);
        }
      }
      const Ends ends = EndsAt(all_scales + scales_at, all_offsets + offsets_at,
                               (panel * groups + group) * PANEL + column % PANEL);
      const int rows = min(ITEM_ROWS, m - first_row - block);
      for (int r = 0; r < rows; ++r) {
        __global const uint* row_terms = x + (size_t)(block + r) * row_words + 2 * pairs;
#if SCALED_SUMS
        totals[r] = fma(ScaledSum(row_terms, groups, group), ends.minimum, totals[r]);
#endif
        totals[r] = fma((float)(sums[r] + ends.zero_point * MinusSum(row_terms, groups, group)),
                        ends.scale * RowScale(row_terms, group), totals[r]);
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  const int j = get_group_id(0) * TILE_COLUMNS + column;
  if (j >= n) return;
  const int rows = min(ITEM_ROWS, m - first_row - block);
  for (int r = 0; r < rows; ++r) {
    __global float* to = y + (size_t)(first_row + block + r) * n + j;
    *to = has_bias ? totals[r] + ((__global const float*)inputs)[j] : totals[r];
  }
}
