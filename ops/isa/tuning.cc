#include "isa/tuning.h"

#include <algorithm>
#include <string_view>

#if defined(__linux__)
#include <unistd.h>
#endif

namespace ortolan {
namespace {

constexpr uint32_t kAny = ~uint32_t{0};
constexpr int64_t kKiB = 1024;
constexpr int64_t kPieceMacs = int64_t{1} << 19;

// Measured on Zen 5 with one thread and weights in memory; see the operators' READMEs.
constexpr PrefetchDistances kZen5Distances{
    .weights = 12288,
    .weight_blocks = 12288,
    .int4 = 8192,
    .int4_bitmap = 6144,
    .int4_masks = 3072,
    .sparse4x1 = 2048,
    .key_codes = 16384,
    .key_codes_avx2 = 4096,
};

// Measured on a CPU with AMX, one thread, weights in memory or L3. Far prefetches wait for the buffers of L1 misses.
constexpr PrefetchDistances kSapphireRapidsDistances = [] {
  PrefetchDistances distances = kZen5Distances;
  distances.weights = 2048;
  distances.int4 = 3072;
  return distances;
}();

// Distances for a CPU that was not measured: at most a quarter of its L1 data cache.
constexpr PrefetchDistances Borrowed(PrefetchDistances of, int64_t l1_kib) {
  for (int64_t* distance : {&of.weights, &of.weight_blocks, &of.int4, &of.int4_bitmap, &of.int4_masks, &of.sparse4x1,
                            &of.key_codes, &of.key_codes_avx2}) {
    *distance = std::min(*distance, l1_kib * kKiB / 4);
  }
  return of;
}

// Borrowed, except for int4, which was measured on Zen 4 with one thread and weights in memory.
constexpr PrefetchDistances kZen4Distances = [] {
  PrefetchDistances distances = Borrowed(kZen5Distances, 32);
  distances.int4 = 4096;
  return distances;
}();

// Measured on Zen 5 for m, k and n from 1024; see masked_matmul/README.md.
constexpr MaskedMatMulCosts kZen5Costs{
    .blocks = 1.05,
    .blocks_pattern = 0.015,
    .pack_columns = 40.0,
    .two_sided = 1.33,
    .two_sided_pack = 0.18,
    .pattern = 0.03,
    .list = 0.03,
    .copy = 110.0,
    .values = 1.3,
    .values_list = 0.12,
    .values_pack = 30.0,
    .least_gain = 0.9,
    .most_panel_rows = 512,
};

struct Row {
  const char* vendor;
  uint32_t family;
  uint32_t model;
  Features needs;
  Tuning tuning;

  bool Fits(const CpuModel& cpu, Features features) const {
    return std::string_view(vendor) == cpu.vendor && (family == kAny || family == cpu.family) &&
           (model == kAny || model == cpu.model) && features.Has(needs);
  }
};

constexpr Row kRows[] = {
#define ORTOLAN_TUNING(name, vendor, family, model, needs, l1, l2, distances, weights) \
  {vendor,                                                                             \
   family,                                                                             \
   model,                                                                              \
   feature_set::needs,                                                                 \
   {name, l1 * kKiB, l2 * kKiB, distances, kZen5Costs, kPieceMacs, {weights}}},
#include "isa/tuning.inc"
#undef ORTOLAN_TUNING
};

// Return the cache size the system reports, or `least` if it reports none.
int64_t CacheBytes([[maybe_unused]] int level, int64_t least) {
#if defined(__linux__) && defined(_SC_LEVEL1_DCACHE_SIZE)
  const long bytes = sysconf(level == 1 ? _SC_LEVEL1_DCACHE_SIZE : _SC_LEVEL2_CACHE_SIZE);
  return bytes > 0 ? bytes : least;
#else
  return least;
#endif
}

Tuning FindRow() {
  const CpuModel cpu = DetectedModel();
  for (const Row& row : kRows) {
    if (row.Fits(cpu, DetectedFeatures())) return row.tuning;
  }
  const int64_t l1_bytes = CacheBytes(1, 32 * kKiB);
  return {"unknown",  l1_bytes, CacheBytes(2, 256 * kKiB), Borrowed(kZen5Distances, l1_bytes / kKiB), kZen5Costs,
          kPieceMacs, {}};
}

// Tuning follows the detected CPU, not ORTOLAN_ISA, except for most_panel_rows and the claims' limits on int8 layers
// and caches, which depend on the features kernels may use. fast_dot_bf16 depends on the vendor alone, so tuning.inc
// does not list it.
Tuning FindTuning() {
  Tuning tuning = FindRow();
  // A dense product by panels beats ONNX Runtime's only with 512-bit vectors.
  if (!ActiveFeatures().Has(feature_set::avx512bw)) tuning.masked.most_panel_rows = 0;
  // From 80 % zero blocks on, VNNISpMM is not slower than ONNX Runtime's int8 layers with one row, although those need
  // no VNNI (vnni_spmm/README.md). Without AVX2 nothing was measured, so no int8 layer and no cache is claimed.
  const bool has_avx2 = ActiveFeatures().Has(feature_set::avx2);
  if (!ActiveFeatures().Has(feature_set::avx512vnni) && !ActiveFeatures().Has(feature_set::avxvnni)) {
    tuning.claims.int8_zero_blocks = has_avx2 ? 0.8 : 2.0;
  }
  tuning.claims.cached_attention = has_avx2;
  // Measured on Granite Rapids and assumed for other Intel CPUs; see nomad_attention/README.md.
  tuning.fast_dot_bf16 = DetectedModel().vendor != std::string_view("GenuineIntel");
  return tuning;
}

}  // namespace

const Tuning& ActiveTuning() {
  static const Tuning tuning = FindTuning();
  return tuning;
}

}  // namespace ortolan
