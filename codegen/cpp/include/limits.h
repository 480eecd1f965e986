// What this machine does at best, measured by loops of the kernels' own instructions: a plain read, products of f32, dot
// products of 8-bit x and codes and, where the level has them, dot products of bf16.
#pragma once
#include "pool.h"
#include "qdot.h"

namespace octavo {

// Words of 8 bytes added up: a plain read.
inline int64_t sum_words(const char* data, int64_t bytes) {
  constexpr int64_t STRIDE = 4 * 4 * LANES;
  nl sum[4] = {};
  int64_t i = 0;
  for (; i + STRIDE <= bytes; i += STRIDE)
    _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
      nl word;
      memcpy(&word, data + i + j * 4 * LANES, sizeof word);
      sum[j] += word;
    }
  int64_t total = 0;
  for (int j = 0; j < 4; j++)
    for (int lane = 0; lane < LANES / 2; lane++) total += sum[j][lane];
  for (int64_t word; i + 8 <= bytes; i += 8) {
    memcpy(&word, data + i, sizeof word);
    total += word;
  }
  return total;
}

constexpr int CHAINS = 10;  // independent accumulators: more than latency times units of any core so far

// CHAINS chains of `count` steps x = step(x). Returns something that depends on all of them.
template <class Step>
inline float run_chains(int64_t count, Step step) {
  volatile float start = 1.0f;
  nf x[CHAINS];
  for (int c = 0; c < CHAINS; c++) x[c] = native_splat(start);
  for (int64_t i = 0; i < count; i++) _Pragma("GCC unroll 10") for (int c = 0; c < CHAINS; c++) x[c] = step(x[c]);
  float sum = 0;
  for (int c = 0; c < CHAINS; c++) sum += x[c][0];
  return sum;
}

inline float multiply_adds(int64_t count) {
  volatile float scale = 0.9999f, bias = 1e-9f;
  nf a = native_splat(scale), b = native_splat(bias);
  return run_chains(count, [&](nf x) { return native_fma(x, a, b); });
}

#if defined(__AVX512BF16__)
constexpr int BF16_OPS = 4 * LANES;  // of one instruction: two products and two sums a lane
inline float bf16_dots(int64_t count) {
  volatile int16_t bits = 0x3f80;
  __m512bh a = (__m512bh)_mm512_set1_epi16(bits);
  return run_chains(count, [&](nf x) { return (nf)_mm512_dpbf16_ps((__m512)x, a, a); });
}
#else
constexpr int BF16_OPS = 0;
inline float bf16_dots(int64_t) { return 0; }
#endif

constexpr int DOT_ROWS = LANES == 16 ? 10 : LANES == 8 ? 5 : 2;  // whose sums fill the registers
constexpr int64_t DOT_OPS = 2 * DOT_ROWS * 4 * W;                // of a step along a quad of K

// `count` steps of a tile: codes in registers, nothing but the sums.
template <Codes Q>
inline float integer_dots(int64_t count) {
  volatile int8_t one = 1;
  int8_t x[DOT_ROWS * 4];
  int32_t start[DOT_ROWS] = {};
  memset(x, one, sizeof x);
  nb codes[NV];
  EACH(NV) codes[i] = one - nb{};
  BlockSums<Q, DOT_ROWS> sums(start);
  for (int64_t c = 0; c < count; c++) {
    EACH(NV) codes[i] = ordered(codes[i]);
    sums.add(codes, x);
  }
  float total = 0;
  for (int r = 0; r < DOT_ROWS; r++) EACH(NV) total += float(sums.of(r, i)[0]);
  return total;
}

// Seconds from when all threads begin a job until all are done.
template <class Job>
double timed(Pool& pool, Job job) {
  int64_t start = 0, end = 0;
  pool.run([&](Thread& th) {
    th.sync();
    if (th.id == 0) start = now_ns();
    job(th);
    th.sync();
    if (th.id == 0) end = now_ns();
  });
  return double(end - start) * 1e-9;
}

// bf16_ops_per_s is 0 where the level has no such instruction.
inline octavo_limits measure(Pool& pool, const char* data, int64_t bytes) {
  constexpr int64_t COUNT = 1 << 23;
  std::atomic<int64_t> words{0};
  std::atomic<float> sum{0};
  int64_t lines = bytes / 64;
  double read = timed(pool, [&](Thread& th) {
    int64_t first = th.first(lines) * 64;
    words += sum_words(data + first, th.last(lines) * 64 - first);
  });
  double fma = timed(pool, [&](Thread&) { sum = multiply_adds(COUNT); });
  double dot = BF16_OPS ? timed(pool, [&](Thread&) { sum = bf16_dots(COUNT); }) : 1;
  double i8 = timed(pool, [&](Thread&) { sum = integer_dots<Codes::I8>(COUNT / 8); });
  double u4 = timed(pool, [&](Thread&) { sum = integer_dots<Codes::U4>(COUNT / 8); });
  double steps = double(COUNT) * CHAINS * pool.count(), dots = double(COUNT / 8) * DOT_OPS * pool.count();
  return {double(lines * 64) / read, steps * 2 * LANES / fma, steps * BF16_OPS / dot, dots / i8, dots / u4};
}

}  // namespace octavo
