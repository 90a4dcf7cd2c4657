// The wrappers of ops/simd/amx_tiles.h as C functions, one instruction per call, and instructions without a wrapper.
//
// Tiles keep their contents between calls of one thread, so a test can configure, load, multiply and store in separate
// calls.
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <xmmintrin.h>

#include <utility>

#include "simd/amx_tiles.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace ortolan {
namespace {

// ---- instructions that no kernel uses ----

constexpr int kTileBytes = kMaxTileRows * kMaxTileColsb;

// Write the current configuration, or 64 zero bytes if no tiles are configured.
inline void StoreTileConfig(TileConfig* config) { __asm__ volatile("sttilecfg %0" : "=m"(*config) : : "memory"); }

// Load a tile with the hint (T1) that the bytes will not be used again soon.
template <int kTile>
inline void TileLoadStream(const void* base, int64_t stride) {
  static_assert(0 <= kTile && kTile < kTiles);
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(base), "r"(stride), "i"(kTile) : "memory");
}

// In the mnemonic TDPBxyD, x and y give the types of A and B: S is signed, U unsigned.
template <int kC, int kA, int kB>
inline void TileDpBusd() {
  static_assert(AreProductTiles<kC, kA, kB>());
  __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

template <int kC, int kA, int kB>
inline void TileDpBuud() {
  static_assert(AreProductTiles<kC, kA, kB>());
  __asm__ volatile("tdpbuud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

// ---- calls ----

// Call run.operator()<tile>().
template <typename Run>
void WithTile(int tile, Run run) {
  [&]<int... kNumbers>(std::integer_sequence<int, kNumbers...>) {
    ((tile == kNumbers ? run.template operator()<kNumbers>() : void()), ...);
  }(std::make_integer_sequence<int, kTiles>());
}

enum Product : int { kBf16, kBssd, kBsud, kBusd, kBuud };

template <int kC, int kA, int kB>
void Multiply(int product) {
  if (product == kBf16) TileDpBf16<kC, kA, kB>();
  if (product == kBssd) TileDpBssd<kC, kA, kB>();
  if (product == kBsud) TileDpBsud<kC, kA, kB>();
  if (product == kBusd) TileDpBusd<kC, kA, kB>();
  if (product == kBuud) TileDpBuud<kC, kA, kB>();
}

// Instructions below read these relative to %rip, without a register.
const void* address_base;
int64_t address_index;
uint64_t saved_base;
uint64_t saved_index;

// Load tile 0 from displacement(base, index, scale), with the given registers. rsp cannot be used.
#define LOAD_FROM(displacement, base, index, scale)                                                                    \
  __asm__ volatile("movq %%" #base ", %0\n\tmovq %%" #index ", %1\n\tmovq %2, %%" #base "\n\tmovq %3, %%" #index       \
                   "\n\ttileloadd " #displacement "(%%" #base ",%%" #index "," #scale "), %%tmm0\n\tmovq %0, %%" #base \
                   "\n\tmovq %1, %%" #index                                                                            \
                   : "+m"(saved_base), "+m"(saved_index)                                                               \
                   : "m"(address_base), "m"(address_index)                                                             \
                   : "memory")

struct Form {
  int displacement;
  int scale;
};

// Addressing forms: each register as base and as index, each scale, and displacements of 0, 8 and 32 bits of both
// signs.
#define ADDRESS_FORMS(FORM)   \
  FORM(0, 0, rax, rbx, 1)     \
  FORM(1, 64, rbx, rcx, 2)    \
  FORM(2, -64, rcx, rdx, 4)   \
  FORM(3, 4096, rdx, rsi, 8)  \
  FORM(4, -4096, rsi, rdi, 1) \
  FORM(5, 0, rdi, rbp, 2)     \
  FORM(6, 0, rbp, r8, 4)      \
  FORM(7, 127, r8, r9, 8)     \
  FORM(8, 128, r9, r10, 1)    \
  FORM(9, -128, r10, r11, 2)  \
  FORM(10, -129, r11, r12, 4) \
  FORM(11, 0, r12, r13, 8)    \
  FORM(12, 0, r13, r14, 1)    \
  FORM(13, 8, r14, r15, 2)    \
  FORM(14, -8, r15, rax, 4)

#define FORM_ROW(number, displacement, base, index, scale) {displacement, scale},
constexpr Form kForms[] = {ADDRESS_FORMS(FORM_ROW)};

TileConfig static_config;
thread_local TileConfig thread_config;

}  // namespace
}  // namespace ortolan

using namespace ortolan;

EXPORT void shim_configure(const void* config) {
  TileConfig copy;
  memcpy(&copy, config, sizeof(copy));
  LoadTileConfig(copy);
}

EXPORT void shim_store_config(TileConfig* config) { StoreTileConfig(config); }
EXPORT void shim_release() { TileRelease(); }

EXPORT void shim_zero(int tile) {
  WithTile(tile, []<int kTile>() { TileZero<kTile>(); });
}

EXPORT void shim_load(int tile, const void* base, int64_t stride) {
  WithTile(tile, [=]<int kTile>() { TileLoad<kTile>(base, stride); });
}

EXPORT void shim_load_stream(int tile, const void* base, int64_t stride) {
  WithTile(tile, [=]<int kTile>() { TileLoadStream<kTile>(base, stride); });
}

EXPORT void shim_store(int tile, void* base, int64_t stride) {
  WithTile(tile, [=]<int kTile>() { TileStore<kTile>(base, stride); });
}

// The tiles of C, A and B are c, c + 1 and c + 2, modulo eight.
EXPORT void shim_multiply(int product, int c) {
  WithTile(c, [=]<int kC>() { Multiply<kC, (kC + 1) % kTiles, (kC + 2) % kTiles>(product); });
}

// Multiply bf16 tiles with this MXCSR, and return MXCSR after it.
EXPORT unsigned shim_multiply_under_mxcsr(int c, unsigned mxcsr) {
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(mxcsr);
  shim_multiply(kBf16, c);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(saved);
  return after;
}

EXPORT int shim_form_count() { return sizeof(kForms) / sizeof(kForms[0]); }

// Load tile 0 from rows `stride` apart, with an addressing form of ADDRESS_FORMS. Not thread-safe.
EXPORT void shim_load_by_form(int form, const char* base, int64_t stride) {
  address_base = base - kForms[form].displacement;
  address_index = stride / kForms[form].scale;
#define FORM_CASE(number, displacement, base, index, scale) \
  if (form == number) LOAD_FROM(displacement, base, index, scale);
  ADDRESS_FORMS(FORM_CASE)
}

// Copy 1024 bytes to the stack, below the red zone, and load tile 0 with rsp as the base register.
EXPORT void shim_load_from_stack(const void* bytes) {
  int64_t count = kTileBytes;
  __asm__ volatile(
      "subq $1280, %%rsp\n\tleaq 64(%%rsp), %%rdi\n\tcld\n\trep movsb\n\tmovq $64, %%r12\n\t"
      "tileloadd 64(%%rsp,%%r12,1), %%tmm0\n\taddq $1280, %%rsp"
      : "+S"(bytes), "+c"(count)
      :
      : "rdi", "r12", "memory", "cc");
}

// Load tile 0 without an index register: all rows come from `row`.
EXPORT void shim_load_without_index(const void* row) {
  __asm__ volatile("tileloadd (%0), %%tmm0" : : "r"(row) : "memory");
}

// Load tile 0 without a base register, from the absolute address 0x20000000. Return false if it cannot be mapped.
EXPORT bool shim_load_without_base(const void* bytes) {
  void* const wanted = reinterpret_cast<void*>(0x20000000);
  void* const page =
      mmap(wanted, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  if (page != wanted) {
    if (page != MAP_FAILED) munmap(page, 4096);
    return false;
  }
  memcpy(page, bytes, kTileBytes);
  const int64_t stride = 16;
  __asm__ volatile("tileloadd 0x20000000(,%0,4), %%tmm0" : : "r"(stride) : "memory");
  munmap(page, 4096);
  return true;
}

// LDTILECFG and STTILECFG with memory operands relative to %rip and %fs, and with base and index.
EXPORT void shim_configure_rip(const void* config) {
  memcpy(&static_config, config, sizeof(static_config));
  LoadTileConfig(static_config);
}

EXPORT void shim_configure_fs(const void* config) {
  memcpy(&thread_config, config, sizeof(thread_config));
  int64_t thread_pointer = 0;
  __asm__("movq %%fs:0, %0" : "=r"(thread_pointer));
  const int64_t offset = reinterpret_cast<int64_t>(&thread_config) - thread_pointer;
  __asm__ volatile("ldtilecfg %%fs:(%0)" : : "r"(offset) : "memory");
}

EXPORT void shim_configure_indexed(const void* config) {
  const int64_t index = 24;
  const char* base = static_cast<const char*>(config) - 100 - 4 * index;
  __asm__ volatile("ldtilecfg 100(%0,%1,4)" : : "r"(base), "r"(index) : "memory");
}

EXPORT void shim_store_config_indexed(void* config) {
  const int64_t index = -8;
  char* base = static_cast<char*>(config) + 1000 - 8 * index;
  __asm__ volatile("sttilecfg -1000(%0,%1,8)" : : "r"(base), "r"(index) : "memory");
}

// Multiplications whose operands are not three different tiles, as bytes, because the wrappers and gas reject them.
EXPORT void shim_multiply_same_a_b() { __asm__ volatile(".byte 0xc4, 0xe2, 0x72, 0x5c, 0xc1"); }  // tmm0, tmm1, tmm1
EXPORT void shim_multiply_same_c_a() { __asm__ volatile(".byte 0xc4, 0xe2, 0x6b, 0x5e, 0xc0"); }  // tmm0, tmm0, tmm2
EXPORT void shim_multiply_same_c_b() { __asm__ volatile(".byte 0xc4, 0xe2, 0x79, 0x5e, 0xc1"); }  // tmm0, tmm1, tmm0

// VPDPBUSD of AVX-VNNI: c [8] += a [32] x b [32].
//
// Forms 0 and 1 have b in a low or high register, form 2 in memory (base and index), form 3 has c in a high register.
// Return false if register 0 or 15 changes.
EXPORT __attribute__((target("avx2"))) bool shim_dot_quads(int form, int32_t* c, const uint8_t* a, const int8_t* b) {
  __asm__ volatile(
      "vmovdqu (%0), %%ymm1\n\tvmovdqu (%1), %%ymm9\n\tvmovdqu (%2), %%ymm2\n\tvmovdqu (%2), %%ymm10\n\t"
      "vpcmpeqd %%ymm0, %%ymm0, %%ymm0\n\tvpabsd %%ymm0, %%ymm15\n\tvmovdqu %%ymm1, %%ymm14"
      :
      : "r"(c), "r"(a), "r"(b)
      : "xmm0", "xmm1", "xmm2", "xmm9", "xmm10", "xmm14", "xmm15");
  const int64_t index = 8;
  if (form == 0) __asm__ volatile("%{vex%} vpdpbusd %%ymm2, %%ymm9, %%ymm1" : : : "xmm1");
  if (form == 1) __asm__ volatile("%{vex%} vpdpbusd %%ymm10, %%ymm9, %%ymm1" : : : "xmm1");
  if (form == 2) __asm__ volatile("%{vex%} vpdpbusd -32(%0,%1,4), %%ymm9, %%ymm1" : : "r"(b), "r"(index) : "xmm1");
  if (form == 3) {
    __asm__ volatile("vmovdqu %%ymm14, %%ymm13\n\t%{vex%} vpdpbusd %%ymm10, %%ymm9, %%ymm13\n\tvmovdqu %%ymm13, %%ymm1"
                     :
                     :
                     : "xmm1", "xmm13");
  }
  int32_t zero[8], fifteen[8];
  __asm__ volatile("vmovdqu %%ymm1, (%0)\n\tvmovdqu %%ymm0, (%1)\n\tvmovdqu %%ymm15, (%2)"
                   :
                   : "r"(c), "r"(zero), "r"(fifteen)
                   : "memory");
  for (int i = 0; i < 8; ++i) {
    if (zero[i] != -1 || fifteen[i] != 1) return false;
  }
  return true;
}

EXPORT void shim_undefined_instruction() { __asm__ volatile("ud2"); }

// c[16][16] += 1 x b, with a and b stored and c loaded in one function that the compiler may reorder.
EXPORT void shim_multiply_local(const float* b, float* c) {
  alignas(64) uint16_t a_tile[16][32];
  alignas(64) uint16_t b_tile[16][32];
  alignas(64) float c_tile[16][16];
  TileConfig config;
  for (int tile = 0; tile < 3; ++tile) config.Set(tile, kMaxTileRows, kMaxTileColsb);
  LoadTileConfig(config);
  for (int round = 0; round < 2; ++round) {
    for (int m = 0; m < 16; ++m) {
      for (int k = 0; k < 32; ++k) a_tile[m][k] = 0x3f80;
      for (int n = 0; n < 16; ++n) c_tile[m][n] = c[16 * m + n];
    }
    for (int k = 0; k < 32; ++k) {
      for (int n = 0; n < 16; ++n) {
        uint32_t bits = 0;
        memcpy(&bits, &b[16 * (32 * round + k) + n], sizeof(bits));
        b_tile[k / 2][2 * n + k % 2] = static_cast<uint16_t>(bits >> 16);
      }
    }
    TileLoad<0>(c_tile, 64);
    TileLoad<1>(a_tile, 64);
    TileLoad<2>(b_tile, 64);
    TileDpBf16<0, 1, 2>();
    TileStore<0>(c_tile, 64);
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 16; ++n) c[16 * m + n] = c_tile[m][n];
    }
  }
  TileRelease();
}
