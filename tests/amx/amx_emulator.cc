// AMX and AVX-VNNI without hardware, for tests on x86-64 Linux: a SIGILL handler that runs the tile instructions, and
// VPDPBUSD of 256 bits in VEX form.
//
// It runs LDTILECFG, STTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILELOADDT1, TILESTORED, TDPBF16PS, TDPBSSD, TDPBSUD,
// TDPBUSD, TDPBUUD and VPDPBUSD as the Intel 64 Software Developer's Manual defines them. If the CPU would raise
// a fault, the emulator prints one line, "amx emulator: <instruction> at <address>: <reason>", and aborts. Every other
// SIGILL goes to the previous handler.
//
// From LDTILECFG to TILERELEASE, a thread's tiles are in a slot of a fixed pool. So the handler allocates nothing, and
// only a pointer is thread-local: the static TLS block has little space for a library that is loaded late.
//
// Differences from a CPU: start_row must be 0 (no instruction is interrupted half way), and products of NaNs may give
// another NaN.
#include <errno.h>
#include <immintrin.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>

#if !defined(__x86_64__) || !defined(__linux__) || !defined(__FMA__)
#error "needs x86-64 Linux, and -mfma: fused multiply-adds must be instructions that obey MXCSR"
#endif

namespace {

enum Kind : int {
  kLdtilecfg,
  kSttilecfg,
  kTilerelease,
  kTilezero,
  kTileloadd,
  kTileloaddt1,
  kTilestored,
  kTdpbf16ps,
  kTdpbssd,
  kTdpbsud,
  kTdpbusd,
  kTdpbuud,
  kVpdpbusd,
  kKinds,
};

constexpr const char* kNames[kKinds] = {"ldtilecfg",   "sttilecfg",  "tilerelease", "tilezero", "tileloadd",
                                        "tileloaddt1", "tilestored", "tdpbf16ps",   "tdpbssd",  "tdpbsud",
                                        "tdpbusd",     "tdpbuud",    "vpdpbusd"};

constexpr int kTiles = 8;
constexpr int kMaxRows = 16;
constexpr int kMaxColsb = 64;
constexpr int kMaxColumns = kMaxColsb / 4;  // columns of 4 bytes

// The memory operand of LDTILECFG and STTILECFG.
struct Config {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t colsb[16];
  uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

struct Slot {
  std::atomic<bool> taken;
  Config config;
  alignas(64) uint8_t tile[kTiles][kMaxRows][kMaxColsb];
};

constexpr int kSlots = 256;
Slot slots[kSlots];
std::atomic<uint64_t> counts[kKinds];

// Null while the thread has no configured tiles.
__attribute__((tls_model("initial-exec"))) thread_local Slot* my_slot = nullptr;

pthread_mutex_t install_mutex = PTHREAD_MUTEX_INITIALIZER;
bool installed = false;
struct sigaction previous_action;

struct Instruction {
  Kind kind = kKinds;
  int tile = 0;          // the tile to load, store or zero, or C; for vpdpbusd, tile, a and b are vector registers
  int a = 0;             // operand A of a multiplication
  int b = 0;             // operand B of a multiplication; -1 if it is in memory
  uint64_t address = 0;  // address of the memory operand
  int64_t stride = 0;    // stride of a load or store
  const uint8_t* begin = nullptr;
  const uint8_t* end = nullptr;
};

// ---- Error text, written without allocation or stdio, because this runs in a signal handler.

class Line {
 public:
  Line& Text(const char* text) {
    while (*text != '\0' && length_ < sizeof(buffer_) - 1) buffer_[length_++] = *text++;
    return *this;
  }

  Line& Number(uint64_t value, unsigned base = 10) {
    char digits[21];
    char* first = digits + sizeof(digits) - 1;
    *first = '\0';
    do {
      *--first = "0123456789abcdef"[value % base];
      value /= base;
    } while (value != 0);
    return Text(first);
  }

  Line& Tile(int tile) { return Text("tmm").Number(static_cast<uint64_t>(tile)); }

  [[noreturn]] void WriteAndAbort() {
    buffer_[length_++] = '\n';
    for (size_t written = 0; written < length_;) {
      const ssize_t n = write(STDERR_FILENO, buffer_ + written, length_ - written);
      if (n <= 0 && errno != EINTR) break;
      if (n > 0) written += static_cast<size_t>(n);
    }
    abort();
  }

 private:
  char buffer_[256];
  size_t length_ = 0;
};

Line Violation(const Instruction& instruction) {
  Line line;
  return line.Text("amx emulator: ")
      .Text(kNames[instruction.kind])
      .Text(" at 0x")
      .Number(reinterpret_cast<uint64_t>(instruction.begin), 16)
      .Text(": ");
}

// ---- Decoding

// Return a general register by its number in ModRM, SIB and VEX.
uint64_t Register(const mcontext_t& context, int number) {
  constexpr int kIndices[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return static_cast<uint64_t>(context.gregs[kIndices[number]]);
}

// Return the thread pointer, the base of %fs, whose first word points to itself.
uint64_t FsBase() {
  uint64_t base = 0;
  __asm__("movq %%fs:0, %0" : "=r"(base));
  return base;
}

template <typename T>
T Read(const uint8_t*& from) {
  T value;
  memcpy(&value, from, sizeof(value));
  from += sizeof(value);
  return value;
}

struct Vex {
  int reg_high;    // bit 3 of ModRM.reg
  int index_high;  // bit 3 of SIB.index
  int base_high;   // bit 3 of ModRM.rm or SIB.base
  int vvvv;
  int prefix;  // 0 none, 1 66, 2 F3, 3 F2
};

// Decode the memory operand after the ModRM byte. Return false for a form that the instruction lacks.
bool DecodeMemory(const mcontext_t& context, const Vex& vex, int mod, int rm, bool needs_sib, bool fs,
                  const uint8_t*& at, Instruction* out) {
  if (mod == 3 || (needs_sib && rm != 4)) return false;
  bool ip_relative = false;
  uint64_t base = 0;
  uint64_t index = 0;
  int displacement_bytes = mod == 0 ? 0 : (mod == 1 ? 1 : 4);
  if (rm == 4) {
    const uint8_t sib = *at++;
    const int index_number = ((sib >> 3) & 7) | vex.index_high;
    if (index_number != 4) index = Register(context, index_number) << (sib >> 6);
    if ((sib & 7) == 5 && mod == 0) {
      displacement_bytes = 4;
    } else {
      base = Register(context, (sib & 7) | vex.base_high);
    }
  } else if (rm == 5 && mod == 0) {
    ip_relative = true;
    displacement_bytes = 4;
  } else {
    base = Register(context, rm | vex.base_high);
  }
  int64_t displacement = 0;
  if (displacement_bytes == 1) displacement = Read<int8_t>(at);
  if (displacement_bytes == 4) displacement = Read<int32_t>(at);
  if (ip_relative) base = reinterpret_cast<uint64_t>(at);
  out->stride = static_cast<int64_t>(index);
  out->address = base + static_cast<uint64_t>(displacement) + (needs_sib ? 0 : index) + (fs ? FsBase() : 0);
  return true;
}

// Decode a VPDPBUSD instruction from its ModRM byte on.
bool DecodeVectorProduct(const mcontext_t& context, const Vex& vex, bool fs, const uint8_t* at, Instruction* out) {
  if (vex.prefix != 1) return false;
  const uint8_t modrm = *at++;
  const int mod = modrm >> 6;
  out->kind = kVpdpbusd;
  out->tile = ((modrm >> 3) & 7) | vex.reg_high;
  out->a = vex.vvvv;
  out->b = (modrm & 7) | vex.base_high;
  if (mod != 3) {
    if (!DecodeMemory(context, vex, mod, modrm & 7, false, fs, at, out)) return false;
    out->b = -1;
  }
  out->end = at;
  return true;
}

// Return false for an instruction that this file does not emulate. Bytes after the instruction are not read.
bool Decode(const mcontext_t& context, Instruction* out) {
  const uint8_t* at = reinterpret_cast<const uint8_t*>(context.gregs[REG_RIP]);
  out->begin = at;
  bool fs = false;
  for (; *at == 0x2e || *at == 0x36 || *at == 0x3e || *at == 0x26 || *at == 0x64; ++at) fs |= *at == 0x64;

  // Three-byte VEX, map 0F38, W0, 128 bits (256 for vectors). R, X, B and vvvv are stored inverted.
  if (*at++ != 0xc4) return false;
  const uint8_t byte1 = *at++;
  if ((byte1 & 0x1f) != 2) return false;
  const uint8_t byte2 = *at++;
  if ((byte2 & 0x80) != 0) return false;
  const bool is_256 = (byte2 & 0x04) != 0;
  const Vex vex = {byte1 & 0x80 ? 0 : 8, byte1 & 0x40 ? 0 : 8, byte1 & 0x20 ? 0 : 8, 15 - ((byte2 >> 3) & 15),
                   byte2 & 3};

  const uint8_t opcode = *at++;
  if (is_256) return opcode == 0x50 && DecodeVectorProduct(context, vex, fs, at, out);
  if (opcode != 0x49 && opcode != 0x4b && opcode != 0x5c && opcode != 0x5e) return false;
  const uint8_t modrm = *at++;
  const int mod = modrm >> 6;
  const int reg = ((modrm >> 3) & 7) | vex.reg_high;
  const int rm = modrm & 7;
  if (reg >= kTiles) return false;
  out->tile = reg;

  if (opcode == 0x5c || opcode == 0x5e) {
    if (mod != 3 || vex.base_high != 0 || vex.vvvv >= kTiles) return false;
    constexpr Kind kInt8[4] = {kTdpbuud, kTdpbusd, kTdpbsud, kTdpbssd};
    if (opcode == 0x5c && vex.prefix != 2) return false;
    out->kind = opcode == 0x5c ? kTdpbf16ps : kInt8[vex.prefix];
    out->a = rm;
    out->b = vex.vvvv;
  } else if (vex.vvvv != 0) {
    return false;
  } else if (opcode == 0x4b) {
    constexpr Kind kMoves[4] = {kKinds, kTileloaddt1, kTilestored, kTileloadd};
    out->kind = kMoves[vex.prefix];
    if (out->kind == kKinds || !DecodeMemory(context, vex, mod, rm, true, fs, at, out)) return false;
  } else if (mod == 3) {
    if (rm != 0) return false;
    if (vex.prefix == 3) {
      out->kind = kTilezero;
    } else if (vex.prefix == 0 && reg == 0) {
      out->kind = kTilerelease;
    } else {
      return false;
    }
  } else {
    if (reg != 0 || vex.prefix > 1) return false;
    out->kind = vex.prefix == 0 ? kLdtilecfg : kSttilecfg;
    if (!DecodeMemory(context, vex, mod, rm, false, fs, at, out)) return false;
  }
  out->end = at;
  return true;
}

// ---- Running

bool AnyNonzero(const void* bytes, size_t count) {
  const auto* byte = static_cast<const uint8_t*>(bytes);
  for (size_t i = 0; i < count; ++i) {
    if (byte[i] != 0) return true;
  }
  return false;
}

void Release() {
  if (my_slot == nullptr) return;
  my_slot->taken.store(false, std::memory_order_release);
  my_slot = nullptr;
}

void CheckConfig(const Instruction& instruction, const Config& config) {
  if (config.palette > 1) Violation(instruction).Text("palette is ").Number(config.palette).WriteAndAbort();
  if (config.palette == 0) return;
  if (config.start_row != 0) Violation(instruction).Text("start_row is not 0").WriteAndAbort();
  if (AnyNonzero(config.reserved, sizeof(config.reserved)) || AnyNonzero(config.colsb + kTiles, 16) ||
      AnyNonzero(config.rows + kTiles, 8)) {
    Violation(instruction).Text("a reserved byte is not 0").WriteAndAbort();
  }
  for (int t = 0; t < kTiles; ++t) {
    const int rows = config.rows[t];
    const int colsb = config.colsb[t];
    if (rows > kMaxRows || colsb > kMaxColsb || (rows == 0) != (colsb == 0)) {
      Violation(instruction)
          .Tile(t)
          .Text(" has ")
          .Number(config.rows[t])
          .Text(" rows of ")
          .Number(config.colsb[t])
          .Text(" bytes")
          .WriteAndAbort();
    }
  }
}

void Configure(const Instruction& instruction) {
  Config config;
  memcpy(&config, reinterpret_cast<const void*>(instruction.address), sizeof(config));
  CheckConfig(instruction, config);
  if (config.palette == 0) return Release();
  for (int i = 0; my_slot == nullptr && i < kSlots; ++i) {
    if (!slots[i].taken.exchange(true, std::memory_order_acquire)) my_slot = &slots[i];
  }
  if (my_slot == nullptr) {
    Violation(instruction).Number(kSlots).Text(" other threads have tiles configured").WriteAndAbort();
  }
  my_slot->config = config;
  memset(my_slot->tile, 0, sizeof(my_slot->tile));
}

// Abort unless the tile is configured with valid sizes.
void CheckTile(const Instruction& instruction, int tile) {
  if (my_slot == nullptr) Violation(instruction).Text("no tiles are configured").WriteAndAbort();
  const int colsb = my_slot->config.colsb[tile];
  if (colsb == 0) Violation(instruction).Tile(tile).Text(" is not configured").WriteAndAbort();
  if (colsb % 4 != 0) {
    Violation(instruction)
        .Tile(tile)
        .Text(" has rows of ")
        .Number(my_slot->config.colsb[tile])
        .Text(" bytes, not a multiple of 4")
        .WriteAndAbort();
  }
}

void CheckEqual(const Instruction& instruction, int tile1, const char* what1, int value1, int tile2, const char* what2,
                int value2) {
  if (value1 == value2) return;
  Violation(instruction)
      .Tile(tile1)
      .Text(what1)
      .Text(" is ")
      .Number(static_cast<uint64_t>(value1))
      .Text(", ")
      .Tile(tile2)
      .Text(what2)
      .Text(" is ")
      .Number(static_cast<uint64_t>(value2))
      .WriteAndAbort();
}

void CheckProduct(const Instruction& instruction) {
  const int c = instruction.tile;
  const int a = instruction.a;
  const int b = instruction.b;
  if (c == a || c == b || a == b) {
    Violation(instruction)
        .Text("two operands are the same tile: ")
        .Tile(c)
        .Text(", ")
        .Tile(a)
        .Text(", ")
        .Tile(b)
        .WriteAndAbort();
  }
  for (const int tile : {c, a, b}) CheckTile(instruction, tile);
  const Config& config = my_slot->config;
  CheckEqual(instruction, c, ".colsb", config.colsb[c], b, ".colsb", config.colsb[b]);
  CheckEqual(instruction, c, ".rows", config.rows[c], a, ".rows", config.rows[a]);
  CheckEqual(instruction, a, ".colsb / 4", config.colsb[a] / 4, b, ".rows", config.rows[b]);
}

uint32_t Word(int tile, int row, int column) {
  uint32_t word;
  memcpy(&word, &my_slot->tile[tile][row][4 * column], sizeof(word));
  return word;
}

// Return the bf16 value of even k (Even) or odd k (Odd) in a word of A or B, as a float.
float Even(uint32_t word) {
  word <<= 16;
  float value;
  memcpy(&value, &word, sizeof(value));
  return value;
}

float Odd(uint32_t word) {
  word &= 0xffff0000u;
  float value;
  memcpy(&value, &word, sizeof(value));
  return value;
}

// Call with MXCSR set. It must not be inlined into the code that sets MXCSR, because the compiler does not know that
// arithmetic depends on it.
__attribute__((noinline)) void MultiplyBf16(int c, int a, int b) {
  const int rows = my_slot->config.rows[c];
  const int columns = my_slot->config.colsb[c] / 4;
  const int pairs = my_slot->config.rows[b];
  float b_even[kMaxRows][kMaxColumns] = {};
  float b_odd[kMaxRows][kMaxColumns] = {};
  for (int k = 0; k < pairs; ++k) {
    for (int n = 0; n < columns; ++n) {
      b_even[k][n] = Even(Word(b, k, n));
      b_odd[k][n] = Odd(Word(b, k, n));
    }
  }
  for (int m = 0; m < rows; ++m) {
    float even[kMaxColumns] = {};
    float odd[kMaxColumns] = {};
    for (int k = 0; k < pairs; ++k) {
      const float a_even = Even(Word(a, m, k));
      const float a_odd = Odd(Word(a, m, k));
      for (int n = 0; n < kMaxColumns; ++n) {
        even[n] = __builtin_fmaf(a_even, b_even[k][n], even[n]);
        odd[n] = __builtin_fmaf(a_odd, b_odd[k][n], odd[n]);
      }
    }
    for (int n = 0; n < columns; ++n) {
      uint8_t* element = &my_slot->tile[c][m][4 * n];
      float value;
      memcpy(&value, element, sizeof(value));
      value += even[n] + odd[n];
      memcpy(element, &value, sizeof(value));
    }
  }
}

void MultiplyBf16WithOwnRounding(int c, int a, int b) {
  // Round to nearest even, denormals are zero, flush to zero, all exceptions masked.
  constexpr unsigned kMxcsr = 0x1f80 | 0x8040;
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(kMxcsr);
  MultiplyBf16(c, a, b);
  _mm_setcsr(saved);
}

// Types A8 and B8 are int8_t or uint8_t. Sums are unsigned, so that they wrap around as in the instruction.
template <typename A8, typename B8>
void MultiplyInt8(int c, int a, int b) {
  const int rows = my_slot->config.rows[c];
  const int columns = my_slot->config.colsb[c] / 4;
  const int quads = my_slot->config.rows[b];
  for (int m = 0; m < rows; ++m) {
    for (int n = 0; n < columns; ++n) {
      uint32_t sum = Word(c, m, n);
      for (int k = 0; k < quads; ++k) {
        for (int i = 0; i < 4; ++i) {
          const auto x = static_cast<A8>(my_slot->tile[a][m][4 * k + i]);
          const auto y = static_cast<B8>(my_slot->tile[b][k][4 * n + i]);
          sum += static_cast<uint32_t>(static_cast<int32_t>(x) * static_cast<int32_t>(y));
        }
      }
      memcpy(&my_slot->tile[c][m][4 * n], &sum, sizeof(sum));
    }
  }
}

void Multiply(const Instruction& instruction) {
  CheckProduct(instruction);
  const int c = instruction.tile;
  const int a = instruction.a;
  const int b = instruction.b;
  switch (instruction.kind) {
    case kTdpbf16ps:
      return MultiplyBf16WithOwnRounding(c, a, b);
    case kTdpbssd:
      return MultiplyInt8<int8_t, int8_t>(c, a, b);
    case kTdpbsud:
      return MultiplyInt8<int8_t, uint8_t>(c, a, b);
    case kTdpbusd:
      return MultiplyInt8<uint8_t, int8_t>(c, a, b);
    default:
      return MultiplyInt8<uint8_t, uint8_t>(c, a, b);
  }
}

void LoadOrStore(const Instruction& instruction) {
  const int tile = instruction.tile;
  CheckTile(instruction, tile);
  const size_t colsb = my_slot->config.colsb[tile];
  uint64_t address = instruction.address;
  for (int row = 0; row < my_slot->config.rows[tile]; ++row) {
    auto* memory = reinterpret_cast<uint8_t*>(address);
    uint8_t* bytes = my_slot->tile[tile][row];
    if (instruction.kind == kTilestored) {
      memcpy(memory, bytes, colsb);
    } else {
      memcpy(bytes, memory, colsb);
    }
    address += static_cast<uint64_t>(instruction.stride);
  }
}

// A 256-bit vector register in the state that the handler restores on return (Intel's manual, XSAVE, standard format).
class VectorRegister {
 public:
  VectorRegister(const mcontext_t& machine, int number)
      : state_(reinterpret_cast<uint8_t*>(machine.fpregs)),
        present_(reinterpret_cast<uint64_t*>(state_ + 512)),
        low_(state_ + kLow + 16 * number),
        high_(state_ + kHigh + 16 * number) {}
  // Parts of the state that are absent hold their initial value, zero.
  void Load(uint8_t* to) const {
    memset(to, 0, 32);
    if ((*present_ & 2) != 0) memcpy(to, low_, 16);
    if ((*present_ & 4) != 0) memcpy(to + 16, high_, 16);
  }
  // Mark both parts as present. In an absent part, all registers have the initial value, so they are set to zero.
  void Store(const uint8_t* from) {
    if ((*present_ & 2) == 0) memset(state_ + kLow, 0, 256);
    if ((*present_ & 4) == 0) memset(state_ + kHigh, 0, 256);
    *present_ |= 6;
    memcpy(low_, from, 16);
    memcpy(high_, from + 16, 16);
  }

 private:
  static constexpr int kLow = 160;   // the lower 128 bits of register 0
  static constexpr int kHigh = 576;  // its upper 128 bits

  uint8_t* state_;
  uint64_t* present_;  // in the header: one bit for each part of the state
  uint8_t* low_;
  uint8_t* high_;
};

void MultiplyVectors(const Instruction& instruction, const mcontext_t& machine) {
  uint8_t a[32], b[32], c[32];
  VectorRegister sums(machine, instruction.tile);
  sums.Load(c);
  VectorRegister(machine, instruction.a).Load(a);
  if (instruction.b < 0) {
    memcpy(b, reinterpret_cast<const void*>(instruction.address), sizeof(b));
  } else {
    VectorRegister(machine, instruction.b).Load(b);
  }
  for (int lane = 0; lane < 8; ++lane) {
    uint32_t sum;
    memcpy(&sum, c + 4 * lane, sizeof(sum));
    for (int i = 4 * lane; i < 4 * lane + 4; ++i) {
      sum += static_cast<uint32_t>(static_cast<int32_t>(a[i]) * static_cast<int32_t>(static_cast<int8_t>(b[i])));
    }
    memcpy(c + 4 * lane, &sum, sizeof(sum));
  }
  sums.Store(c);
}

void Run(const Instruction& instruction, const mcontext_t& machine) {
  switch (instruction.kind) {
    case kLdtilecfg:
      return Configure(instruction);
    case kSttilecfg: {
      auto* memory = reinterpret_cast<void*>(instruction.address);
      if (my_slot == nullptr) {
        memset(memory, 0, sizeof(Config));
      } else {
        memcpy(memory, &my_slot->config, sizeof(Config));
      }
      return;
    }
    case kTilerelease:
      return Release();
    case kTilezero:
      CheckTile(instruction, instruction.tile);
      memset(my_slot->tile[instruction.tile], 0, sizeof(my_slot->tile[0]));
      return;
    case kTileloadd:
    case kTileloaddt1:
    case kTilestored:
      return LoadOrStore(instruction);
    case kVpdpbusd:
      return MultiplyVectors(instruction, machine);
    default:
      return Multiply(instruction);
  }
}

// ---- The signal

void PassOn(int signal_number, siginfo_t* info, void* context) {
  if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
    previous_action.sa_sigaction(signal_number, info, context);
  } else if (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN) {
    previous_action.sa_handler(signal_number);
  } else if (info->si_code > 0 || previous_action.sa_handler == SIG_DFL) {
    // With the default action, the faulting instruction or the resent signal ends the process.
    signal(signal_number, SIG_DFL);
    if (info->si_code <= 0) raise(signal_number);
  }
}

void OnIllegalInstruction(int signal_number, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  mcontext_t& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
  Instruction instruction;
  // si_code > 0 means that the CPU raised the signal, not kill() or raise().
  if (info->si_code > 0 && Decode(machine, &instruction)) {
    Run(instruction, machine);
    counts[instruction.kind].fetch_add(1, std::memory_order_relaxed);
    machine.gregs[REG_RIP] = static_cast<greg_t>(reinterpret_cast<uint64_t>(instruction.end));
  } else {
    PassOn(signal_number, info, context);
  }
  errno = saved_errno;
}

bool IsOurs(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == OnIllegalInstruction;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Install a SIGILL handler for the whole process. Return 0 or an errno. A second call has no effect.
EXPORT int amx_emulator_install() {
  pthread_mutex_lock(&install_mutex);
  int error = 0;
  struct sigaction now;
  if (sigaction(SIGILL, nullptr, &now) != 0) {
    error = errno;
  } else if (!IsOurs(now)) {
    // A handler installed after ours may call ours. If ours called it back, both would recurse.
    if (!installed) previous_action = now;
    struct sigaction action = {};
    action.sa_sigaction = OnIllegalInstruction;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGILL, &action, nullptr) != 0) error = errno;
  }
  if (error == 0) installed = true;
  pthread_mutex_unlock(&install_mutex);
  return error;
}

// Restore the previous SIGILL handler. Return 0 or an errno: EBUSY if another handler was installed since.
EXPORT int amx_emulator_uninstall() {
  pthread_mutex_lock(&install_mutex);
  int error = 0;
  if (installed) {
    struct sigaction now;
    if (sigaction(SIGILL, nullptr, &now) != 0) {
      error = errno;
    } else if (!IsOurs(now)) {
      error = EBUSY;
    } else if (sigaction(SIGILL, &previous_action, nullptr) != 0) {
      error = errno;
    }
    if (error == 0) installed = false;
  }
  pthread_mutex_unlock(&install_mutex);
  return error;
}

EXPORT void amx_emulator_reset_counts() {
  for (std::atomic<uint64_t>& count : counts) count.store(0, std::memory_order_relaxed);
}

// Return how often an instruction (lower-case mnemonic) ran in all threads since the last reset; -1 if it is unknown.
EXPORT int64_t amx_emulator_count(const char* name) {
  for (int kind = 0; kind < kKinds; ++kind) {
    if (strcmp(name, kNames[kind]) == 0) return static_cast<int64_t>(counts[kind].load(std::memory_order_relaxed));
  }
  return -1;
}

// Return the number of threads with configured tiles that are not released, including threads that have ended.
EXPORT int amx_emulator_live_threads_with_config() {
  int live = 0;
  for (const Slot& slot : slots) live += slot.taken.load(std::memory_order_acquire) ? 1 : 0;
  return live;
}
