// The feed-forward block for up to 16 rows as one persistent kernel for sm_90a.
//
// 128 CTAs stream their share of the weights, in the order of use, through a ring in shared memory: first gate_up's,
// then down's, so that down's come in while the hidden values are exchanged.  Three warp groups multiply (weights are
// the 64-row operand of wgmma, tokens its columns), one thread asks for weights.  What passes from CTA to CTA goes as
// 8-byte words that carry this launch's number beside the value: a reader polls the word itself, and nothing is reset.
#include <cstdint>
#include <type_traits>

namespace {

constexpr int kK = 2560;
constexpr int kHidden = 9728;
constexpr int kN = 2560;
constexpr int kCtas = 128;
constexpr int kWarpGroups = 3;             // each takes every third block of the sum
constexpr int kWarps = 4 * kWarpGroups;
constexpr int kConsumers = kWarps * 32;
constexpr int kThreads = kConsumers + 32;  // and one warp that asks for weights
constexpr int kGroups1 = 19;               // groups of 8 rows (4 of gate, 4 of up) that a CTA has in gate_up
constexpr int kGroups2 = 20;               // groups of 8 rows in down
constexpr int kUnits1 = kK / 64;           // units of 64 columns
constexpr int kUnits2 = 19;
constexpr int kUnitBytes1 = kGroups1 * 512;
constexpr int kUnitBytes2 = kGroups2 * 512;
constexpr int kSlot = kUnitBytes2;
constexpr int kMTiles = 3;                 // of 64 rows; what is read past a unit's rows counts for nothing
constexpr int kSplits = 8;                 // CTAs that share the sum of one row of down
constexpr int kTileRows = kGroups2 * 8;
constexpr int kSumRows = kTileRows + 4;     // a token's sums in shared memory; so padded, tokens fall on other banks
constexpr int kBlocks1 = kK / 128;
constexpr int kBlocks2 = 10;               // blocks of 128 hidden values that a CTA touches
constexpr int kTokens = 16;
constexpr int kWindowLate = 8;             // units asked for at a time once the hidden values are there
constexpr int kCtaBytes = kUnits1 * kUnitBytes1 + kUnits2 * kUnitBytes2;
constexpr int kScales = kBlocks1 * 4 + kBlocks2 * 2;

struct Args {
  const uint8_t* weights;    // [kCtas, kCtaBytes]
  const float* scales;       // [kCtas, kScales]
  const void* x;             // bf16 [m, kK], or codes [m, kK]
  const float* x_scales;     // nullptr, or fp32 [kK / 128, pad(m, 4)]
  const uint16_t* residual;  // nullptr, or bf16 [m, kN]
  uint16_t* out;             // bf16 [m, kN]
  uint64_t* hidden;          // [kTokens, kHidden / 2] words: two values and the launch
  uint64_t* parts;           // [kN / kTileRows, kSplits, kTokens, kTileRows] words: a sum and the launch
  uint32_t* launches;        // [kCtas]
  int m;
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\n"
      "bra AGAIN;\nDONE:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void load_unit(
    uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t bar, uint64_t policy) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }
__device__ __forceinline__ void shared_to_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A matrix without swizzle: 8 rows x 16 bytes lie together; `along_k` and `along_rows` are the steps to the next such.
__device__ __forceinline__ constexpr uint32_t matrix_steps(uint32_t along_k) { return (along_k >> 4) << 16; }
__device__ __forceinline__ uint64_t matrix(uint32_t low) {  // rows are always 128 bytes apart
  uint64_t d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(8));
  return d;
}
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void mma_wait(float (&d)[4]) {
  asm volatile("wgmma.wait_group.sync.aligned %4;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "n"(PENDING) : "memory");
}
template <int PENDING>
__device__ __forceinline__ void mma_wait(float (&d)[8]) {
  asm volatile("wgmma.wait_group.sync.aligned %8;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
               : "n"(PENDING) : "memory");
}
template <int ADD>
__device__ __forceinline__ void mma(float (&d)[4], uint64_t a, uint64_t b) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %6, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, add, 1, 1;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "l"(a), "l"(b), "n"(ADD));
}
template <int ADD>
__device__ __forceinline__ void mma(float (&d)[8], uint64_t a, uint64_t b) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %10, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, "
               "add, 1, 1;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
               : "l"(a), "l"(b), "n"(ADD));
}

__device__ __forceinline__ void publish(uint64_t* word, uint32_t value, uint32_t launch) {
  const uint64_t both = static_cast<uint64_t>(launch) << 32 | value;
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(word), "l"(both) : "memory");
}
__device__ __forceinline__ uint64_t peek(const uint64_t* word) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
  return v;
}
struct Pair { uint64_t a, b; };
__device__ __forceinline__ Pair peek_pair(const uint64_t* word) {
  Pair v;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(v.a), "=l"(v.b) : "l"(word) : "memory");
  return v;
}
__device__ __forceinline__ bool of_launch(uint64_t word, uint32_t launch) {
  return static_cast<uint32_t>(word >> 32) == launch;
}

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ uint32_t to_bf16x2(float lo, float hi) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ float rounded(float v) { return low(to_bf16x2(v, 0.0f)); }

__device__ __forceinline__ uint32_t to_e4m3x2(uint32_t pair, float multiplier) {
  uint16_t d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high(pair) * multiplier), "f"(low(pair) * multiplier));
  return d;
}

// A group of 128 bf16 values lies in the 8 lanes that agree in `lane & 3`, 16 a lane: codes as 16 bytes a lane; returns
// the scale.  The reference, bit for bit.
__device__ __forceinline__ float quantise(const uint32_t (&v)[8], uint4& codes) {
  uint32_t both = v[0] & 0x7FFF7FFFu;
#pragma unroll
  for (int i = 1; i < 8; ++i) both = __vmaxu2(both, v[i] & 0x7FFF7FFFu);
  both = __vmaxu2(both, __shfl_xor_sync(0xFFFFFFFFu, both, 4));
  both = __vmaxu2(both, __shfl_xor_sync(0xFFFFFFFFu, both, 8));
  both = __vmaxu2(both, __shfl_xor_sync(0xFFFFFFFFu, both, 16));
  const uint32_t largest = max(both << 16, both & 0xFFFF0000u);
  const float amax = __uint_as_float(min(largest, 0x7F7FFFFFu));
  const float multiplier = __fdiv_rn(448.0f, fmaxf(amax, 1e-10f));
  uint32_t c[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    c[i] = to_e4m3x2(v[2 * i], multiplier) | to_e4m3x2(v[2 * i + 1], multiplier) << 16;
  }
  codes = make_uint4(c[0], c[1], c[2], c[3]);
  return largest > 0x7F800000u ? __uint_as_float(0x7FC00000u) : __fdiv_rn(1.0f, multiplier);
}

// A block's sums in the tensor core, which keep about 14 bits, scaled and added in fp32.
template <int MP, int N>
__device__ __forceinline__ void add_scaled(
    float (&total)[N], const float (&d)[N], const float2 (&tokens)[N / 4], float a, float b) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    total[4 * j] += d[4 * j] * (tokens[j].x * a);
    total[4 * j + 2] += d[4 * j + 2] * (tokens[j].x * b);
    if (MP > 1) {
      total[4 * j + 1] += d[4 * j + 1] * (tokens[j].y * a);
      total[4 * j + 3] += d[4 * j + 3] * (tokens[j].y * b);
    }
  }
}

// A warp group's sums to shared memory, [warp group, token, row].
template <int MP, int N>
__device__ __forceinline__ void store_sums(
    float* sums, const float (&total)[kMTiles][N], int group, int warp, int lane) {
#pragma unroll
  for (int t = 0; t < kMTiles; ++t) {
    const int row = t * 64 + warp * 16 + (lane >> 2);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int token = i / 4 * 8 + 2 * (lane & 3) + (i & 1), at = row + (i & 2) * 4;
      if (token < MP && at < kTileRows) sums[(group * MP + token) * kSumRows + at] = total[t][i];
    }
  }
}

template <int MP, int SLOTS>
struct Shared {
  static constexpr int kLine = MP < 8 ? 8 : MP;  // scales of a block, token beside token
  static constexpr int kRing = 0;
  static constexpr int kX = SLOTS * kSlot + 768;       // the last rows of a slot are read past its end
  static constexpr int kSums = kX + kBlocks2 * 128 * MP;  // behind the hidden values, where x was
  static constexpr int kXScales = kSums + kWarpGroups * kSumRows * MP * 4;
  static constexpr int kHScales = kXScales + kBlocks1 * kLine * 4;
  static constexpr int kWScales = kHScales + kBlocks2 * kLine * 4;
  static constexpr int kFull = kWScales + (kScales + 12) / 4 * 16;
  static constexpr int kEmpty = kFull + SLOTS * 8;
  static constexpr int kOpen = kEmpty + SLOTS * 8;
  static constexpr int kBytes = kOpen + 16;
  static_assert(kUnits2 % (2 * kWarpGroups) <= kWarpGroups);
  static_assert(kSums + kWarpGroups * kSumRows * MP * 4 >= kX + kK * MP);
};

// One element of the result: the parts of all splits in order, the residual, one rounding.
__device__ __forceinline__ void reduce(const Args& args, int tile, int row, int token, uint32_t launch) {
  const int at = token * kN + tile * kTileRows + row;
  const uint64_t* const parts = args.parts + (static_cast<int64_t>(tile * kSplits) * kTokens + token) * kTileRows + row;
  const float added = args.residual != nullptr ? low(args.residual[at]) : 0.0f;
  uint64_t v[kSplits];
  while (true) {
    bool all = true;
#pragma unroll
    for (int s = 0; s < kSplits; ++s) v[s] = peek(parts + s * (kTokens * kTileRows));
#pragma unroll
    for (int s = 0; s < kSplits; ++s) all = all && of_launch(v[s], launch);
    if (all) break;
  }
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kSplits; ++s) sum += __uint_as_float(static_cast<uint32_t>(v[s]));
  if (args.residual != nullptr) sum += added;
  args.out[at] = static_cast<uint16_t>(to_bf16x2(sum, 0.0f));
}

// MP: rows there is room for.   SLOTS: units in the ring.   REDUCERS: how many of the CTAs that share rows of down add.
// WINDOW, WINDOW_DOWN: units asked for at a time in gate_up, and in down before the hidden values are there: the more
// weights are on their way, the later these come.  All by measurement.
template <int MP, int SLOTS, int REDUCERS, int WINDOW, int WINDOW_DOWN>
__device__ __forceinline__ void run(const Args& args) {
  using S = Shared<MP, SLOTS>;
  constexpr int kAcc = MP <= 8 ? 4 : 8;
  constexpr int kTiles = kAcc / 4;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t base = shared_address(smem);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, cta = blockIdx.x;
  static_assert(SLOTS % 2 == 0 && SLOTS >= 2 * kWarpGroups && SLOTS <= 32);
  uint32_t given;
  asm("mov.u32 %0, %dynamic_smem_size;" : "=r"(given));
  if (given < S::kBytes || gridDim.x != kCtas) __trap();
  if (warp == kWarps) {
    if (lane < SLOTS) {
      barrier_init(base + S::kFull + 8 * lane, 1);
      barrier_init(base + S::kEmpty + 8 * lane, 4);
    }
    if (lane == 0) *reinterpret_cast<volatile uint32_t*>(smem + S::kOpen) = 0;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    shared_to_async();
    __syncwarp();
    asm volatile("bar.arrive 2, %0;" ::"n"(kThreads) : "memory");
    if (lane == 0) {
      uint64_t policy;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      const uint8_t* from = args.weights + static_cast<int64_t>(cta) * kCtaBytes;
      int slot = 0;
      uint32_t parity = 1;
      int arrived = 0, next = 0;
      uint32_t arrived_parity = 0;
      volatile uint32_t* const open = reinterpret_cast<volatile uint32_t*>(smem + S::kOpen);
      for (int u = 0; u < kUnits1 + kUnits2; ++u) {
        const uint32_t bytes = u < kUnits1 ? kUnitBytes1 : kUnitBytes2;
        const int window = *open ? kWindowLate : u < kUnits1 ? WINDOW : WINDOW_DOWN;
        while (u - arrived >= window) {
          barrier_wait(base + S::kFull + 8 * next, arrived_parity);
          ++arrived;
          if (++next == SLOTS) { next = 0; arrived_parity ^= 1; }
        }
        barrier_wait(base + S::kEmpty + 8 * slot, parity);
        load_unit(base + S::kRing + slot * kSlot, from, bytes, base + S::kFull + 8 * slot, policy);
        from += bytes;
        if (++slot == SLOTS) { slot = 0; parity ^= 1; }
      }
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
    return;
  }

  float* const w_scales = reinterpret_cast<float*>(smem + S::kWScales);
  for (int i = threadIdx.x; i < kScales; i += kConsumers) w_scales[i] = args.scales[cta * kScales + i];
  const int group_of_warp = warp >> 2;
  const int in_group = warp & 3;
  asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory");

  asm volatile("griddepcontrol.wait;" ::: "memory");
  const uint32_t launch = args.launches[cta] + 1;
  // Four groups aside in a warp: of four tokens where there are as many, else of four blocks.
  constexpr int kTokensAside = MP >= 4 ? 4 : 1, kAside = 4 / kTokensAside;
  const int chunk = lane >> 2, aside = lane & 3;
  float* const x_scales = reinterpret_cast<float*>(smem + S::kXScales);
  {
    if (args.x_scales != nullptr) {
      const uint32_t* codes = static_cast<const uint32_t*>(args.x);
      const int padded = (args.m + 3) & ~3;
      for (int task = warp; task < kBlocks1 * args.m; task += kWarps) {
        const int token = task / kBlocks1, block = task % kBlocks1;
        uint8_t* const to = smem + S::kX + ((block * 8 + (lane >> 2)) * MP + token) * 16 + (lane & 3) * 4;
        *reinterpret_cast<uint32_t*>(to) = codes[token * (kK / 4) + block * 32 + lane];
        if (lane == 0) x_scales[block * S::kLine + token] = args.x_scales[block * padded + token];
      }
    } else {
      constexpr int kBatch = MP <= 2 ? 1 : MP == 4 ? 2 : MP == 8 ? 4 : 7;
      const int tasks = (args.m + kTokensAside - 1) / kTokensAside * (kBlocks1 / kAside);
      const uint4* rows = static_cast<const uint4*>(args.x);
      for (int first = warp; first < tasks; first += kWarps * kBatch) {
        uint4 v[kBatch][2];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int task = first + b * kWarps;
          const int token = task / (kBlocks1 / kAside) * kTokensAside + (kTokensAside > 1 ? aside : 0);
          const int block = task % (kBlocks1 / kAside) * kAside + (kTokensAside > 1 ? 0 : aside);
          if (task < tasks && token < args.m) {
            v[b][0] = rows[token * (kK / 8) + block * 16 + chunk * 2];
            v[b][1] = rows[token * (kK / 8) + block * 16 + chunk * 2 + 1];
          }
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int task = first + b * kWarps;
          const int token = task / (kBlocks1 / kAside) * kTokensAside + (kTokensAside > 1 ? aside : 0);
          const int block = task % (kBlocks1 / kAside) * kAside + (kTokensAside > 1 ? 0 : aside);
          if (task < tasks) {
            const uint4 one = v[b][0], two = v[b][1];
            const uint32_t values[8] = {one.x, one.y, one.z, one.w, two.x, two.y, two.z, two.w};
            uint4 codes;
            const float scale = quantise(values, codes);
            if (token < args.m) {
              *reinterpret_cast<uint4*>(smem + S::kX + ((block * 8 + chunk) * MP + token) * 16) = codes;
              if (chunk == 0) x_scales[block * S::kLine + token] = scale;
            }
          }
        }
      }
    }
  }
  shared_to_async();
  consumers_sync();

  float total[kMTiles][kAcc];
#pragma unroll
  for (int t = 0; t < kMTiles; ++t)
#pragma unroll
    for (int i = 0; i < kAcc; ++i) total[t][i] = 0.0f;
  const int column = 2 * (lane & 3);

  float* const sums = reinterpret_cast<float*>(smem + S::kSums);
  {  // gate_up
    const int hidden0 = cta * (kGroups1 * 4);
    const int row_block0 = hidden0 / 128;
    const int kind = lane < 16 ? 0 : 2;
    int scale_of[kMTiles][2];
#pragma unroll
    for (int t = 0; t < kMTiles; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        scale_of[t][i] = kind + min((hidden0 + (t * 8 + in_group * 2 + i) * 4) / 128 - row_block0, 1);
    const uint32_t x_at = (base + S::kX) >> 4 | matrix_steps(MP * 16);
    const uint32_t w_at = (base + S::kRing) >> 4 | matrix_steps(kGroups1 * 128);
    int slot = 2 * group_of_warp % SLOTS;
    uint32_t parity = 2 * group_of_warp / SLOTS & 1;
#pragma unroll 1
    for (int block = group_of_warp; block < kBlocks1; block += kWarpGroups) {
      float d[kMTiles][kAcc];
      barrier_wait(base + S::kFull + 8 * slot, parity);
      barrier_wait(base + S::kFull + 8 * slot + 8, parity);
      mma_fence();
      const uint32_t w = w_at + slot * (kSlot / 16);
      const uint32_t x = x_at + block * 8 * MP;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t wk = w + k / 2 * (kSlot / 16) + k % 2 * (2 * kGroups1 * 8);
#pragma unroll
        for (int t = 0; t < kMTiles; ++t) {
          if (k == 0) mma<0>(d[t], matrix(wk + t * 64), matrix(x));
          else mma<1>(d[t], matrix(wk + t * 64), matrix(x + k * 2 * MP));
        }
      }
      mma_commit();
      float2 sx[kTiles];
      const float* const sx_at = x_scales + block * S::kLine + column;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) sx[j] = *reinterpret_cast<const float2*>(sx_at + 8 * j);
#pragma unroll
      for (int t = 0; t < kMTiles; ++t) mma_wait<0>(d[t]);
      if (lane == 0) {
        barrier_arrive(base + S::kEmpty + 8 * slot);
        barrier_arrive(base + S::kEmpty + 8 * slot + 8);
      }
      slot += 2 * kWarpGroups;
      if (slot >= SLOTS) { slot -= SLOTS; parity ^= 1; }
#pragma unroll
      for (int t = 0; t < kMTiles; ++t)
        add_scaled<MP>(
            total[t], d[t], sx, w_scales[block * 4 + scale_of[t][0]], w_scales[block * 4 + scale_of[t][1]]);
    }
    consumers_sync();  // x is read no more: sums and hidden values take its place
    store_sums<MP>(sums, total, group_of_warp, in_group, lane);
    consumers_sync();
    for (int i = threadIdx.x; i < kGroups1 * 2 * args.m; i += kConsumers) {
      const int token = i / (kGroups1 * 2), pair = i % (kGroups1 * 2);
      const float* const at = sums + token * kSumRows + pair / 2 * 8 + pair % 2 * 2;
      float h[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float gate = rounded(at[c] + at[kSumRows * MP + c] + at[2 * kSumRows * MP + c]);
        const float up = rounded(at[4 + c] + at[kSumRows * MP + 4 + c] + at[2 * kSumRows * MP + 4 + c]);
        h[c] = __fdiv_rn(gate, 1.0f + __expf(-gate)) * up;
      }
      publish(args.hidden + token * (kHidden / 2) + hidden0 / 2 + pair, to_bf16x2(h[0], h[1]), launch);
    }
  }

  const int tile = cta / kSplits, split = cta % kSplits;
  const int block0 = split * kUnits2 / 2;
  float* const h_scales = reinterpret_cast<float*>(smem + S::kHScales);
  {
    constexpr int kBatch = MP <= 4 ? 1 : MP == 8 ? 2 : 4;
    constexpr int kAcross = (kBlocks2 + kAside - 1) / kAside;
    const int tasks = (args.m + kTokensAside - 1) / kTokensAside * kAcross;
    for (int first = warp; first < tasks; first += kWarps * kBatch) {
      Pair v[kBatch][4];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int task = first + b * kWarps;
        const int token = task / kAcross * kTokensAside + (kTokensAside > 1 ? aside : 0);
        const int block = task % kAcross * kAside + (kTokensAside > 1 ? 0 : aside);
        const uint64_t* const words = args.hidden + token * (kHidden / 2) + (block0 + block) * 64 + chunk * 2;
        if (task < tasks && token < args.m && block < kBlocks2) {
#pragma unroll
          for (int i = 0; i < 4; ++i) v[b][i] = peek_pair(words + 16 * i);
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int task = first + b * kWarps;
        const int token = task / kAcross * kTokensAside + (kTokensAside > 1 ? aside : 0);
        const int block = task % kAcross * kAside + (kTokensAside > 1 ? 0 : aside);
        const uint64_t* const words = args.hidden + token * (kHidden / 2) + (block0 + block) * 64 + chunk * 2;
        if (task < tasks) {
          const bool mine = token < args.m && block < kBlocks2;
          if (mine) {
            while (true) {
              bool all = true;
#pragma unroll
              for (int i = 0; i < 4; ++i) all = all && of_launch(v[b][i].a, launch) && of_launch(v[b][i].b, launch);
              if (all) break;
#pragma unroll
              for (int i = 0; i < 4; ++i) v[b][i] = peek_pair(words + 16 * i);
            }
          }
          __syncwarp();
          uint32_t values[8];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            values[2 * i] = static_cast<uint32_t>(v[b][i].a);
            values[2 * i + 1] = static_cast<uint32_t>(v[b][i].b);
          }
          uint4 codes;
          const float scale = quantise(values, codes);
          if (mine) {  // four pieces of four values, each 32 values behind the one before
            const uint32_t of_piece[4] = {codes.x, codes.y, codes.z, codes.w};
            uint8_t* const to = smem + S::kX + (chunk & 3) * 4;
#pragma unroll
            for (int i = 0; i < 4; ++i)
              *reinterpret_cast<uint32_t*>(to + ((block * 8 + 2 * i + (chunk >> 2)) * MP + token) * 16) = of_piece[i];
            if (chunk == 0) h_scales[block * S::kLine + token] = scale;
          }
        }
      }
    }
  }
  shared_to_async();
  consumers_sync();
  if (threadIdx.x == 0) *reinterpret_cast<volatile uint32_t*>(smem + S::kOpen) = 1;

  {  // down
    const int row_block0 = tile * kTileRows / 128;
    int scale_of[kMTiles][2];
#pragma unroll
    for (int t = 0; t < kMTiles; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        scale_of[t][i] = kBlocks1 * 4 + min((tile * kTileRows + (t * 8 + in_group * 2 + i) * 8) / 128 - row_block0, 1);
    const int half = split & 1;
    const uint32_t h_at = (base + S::kX + half * 4 * MP * 16) >> 4 | matrix_steps(MP * 16);
    const uint32_t w_at = (base + S::kRing) >> 4 | matrix_steps(kGroups2 * 128);
#pragma unroll
    for (int t = 0; t < kMTiles; ++t)
#pragma unroll
      for (int i = 0; i < kAcc; ++i) total[t][i] = 0.0f;
    int slot = (kUnits1 + group_of_warp) % SLOTS;
    uint32_t parity = (kUnits1 + group_of_warp) / SLOTS & 1;
    auto take = [&](int unit, auto count) {  // this unit and the next of this warp group, at once
      constexpr int kCount = decltype(count)::value;
      float d[kCount][kMTiles][kAcc];
      int slots[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        slots[i] = slot;
        barrier_wait(base + S::kFull + 8 * slot, parity);
        slot += kWarpGroups;
        if (slot >= SLOTS) { slot -= SLOTS; parity ^= 1; }
      }
      mma_fence();
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const uint32_t w = w_at + slots[i] * (kSlot / 16);
        const uint32_t h = h_at + (unit + i * kWarpGroups) * 4 * MP;
#pragma unroll
        for (int t = 0; t < kMTiles; ++t) mma<0>(d[i][t], matrix(w + t * 64), matrix(h));
#pragma unroll
        for (int t = 0; t < kMTiles; ++t) mma<1>(d[i][t], matrix(w + 2 * kGroups2 * 8 + t * 64), matrix(h + 2 * MP));
      }
      mma_commit();
#pragma unroll
      for (int i = 0; i < kCount; ++i)
#pragma unroll
        for (int t = 0; t < kMTiles; ++t) mma_wait<0>(d[i][t]);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (lane == 0) barrier_arrive(base + S::kEmpty + 8 * slots[i]);
        const int block = (unit + i * kWarpGroups + half) >> 1;
        float2 sh[kTiles];
        const float* const sh_at = h_scales + block * S::kLine + column;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) sh[j] = *reinterpret_cast<const float2*>(sh_at + 8 * j);
#pragma unroll
        for (int t = 0; t < kMTiles; ++t)
          add_scaled<MP>(
              total[t], d[i][t], sh, w_scales[block * 2 + scale_of[t][0]], w_scales[block * 2 + scale_of[t][1]]);
      }
    };
    constexpr int kRounds = kUnits2 / (2 * kWarpGroups);
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round)
      take(group_of_warp + round * 2 * kWarpGroups, std::integral_constant<int, 2>());
    if (group_of_warp < kUnits2 % (2 * kWarpGroups))
      take(group_of_warp + kRounds * 2 * kWarpGroups, std::integral_constant<int, 1>());
    store_sums<MP>(sums, total, group_of_warp, in_group, lane);
    consumers_sync();
    uint64_t* const parts = args.parts + static_cast<int64_t>(cta) * (kTokens * kTileRows);
    for (int i = threadIdx.x; i < kTileRows * args.m; i += kConsumers) {
      const float* const at = sums + i / kTileRows * kSumRows + i % kTileRows;
      publish(parts + i, __float_as_uint(at[0] + at[kSumRows * MP] + at[2 * kSumRows * MP]), launch);
    }
  }

  if (threadIdx.x == 0) args.launches[cta] = launch;  // all have read it: they met at barriers since
  if (split >= kSplits - REDUCERS) {  // the others end here, so that the next launch may start
    constexpr int kShare = kTileRows / REDUCERS;
    for (int i = threadIdx.x; i < kShare * args.m; i += kConsumers)
      reduce(args, tile, (split - (kSplits - REDUCERS)) * kShare + i % kShare, i / kShare, launch);
  }
}

}  // namespace

#define KERNEL(MP, SLOTS, REDUCERS, WINDOW, WINDOW_DOWN)                                                  \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) mlp_##MP(const __grid_constant__ Args args) { \
    run<MP, SLOTS, REDUCERS, WINDOW, WINDOW_DOWN>(args);                                                 \
  }
KERNEL(1, 20, 1, 6, 4)
KERNEL(2, 20, 1, 6, 4)
KERNEL(4, 20, 2, 6, 4)
KERNEL(8, 18, 4, 7, 3)
KERNEL(16, 16, 8, 6, 2)
