// Quantised matrices: how they lie in memory, and rows of x quantised to 8-bit integers.
//
// A matrix [N, K] lies in panels of 16 outputs. A panel holds, one after the other: scales [G][16], zeros [G][16] if it has
// some, offsets [G][16] if it has some, and from the next multiple of 64 bytes its codes. w = (code - zero) * scale + offset.
// Codes lie in quads, four elements of K of one output side by side: 8-bit ones as [K/4][16][4], 4-bit ones as
// [K/8][16][4], the first quad in the low halves of the bytes, the next in the high ones. K is padded to a multiple of 32.
#pragma once
#include <type_traits>

#include "dot.h"
#include "half.h"

namespace octavo {

constexpr int64_t BLOCK = 32;  // elements of K that a panel is padded to

INLINE nf native_load(const int8_t* p) {
  typedef int8_t bytes __attribute__((vector_size(LANES)));
  bytes b;
  memcpy(&b, p, sizeof b);
  return __builtin_convertvector(__builtin_convertvector(b, ni), nf);
}

// A number of e4m3: a sign, four bits of exponent and three of mantissa.
struct f8 {
  uint8_t bits;
};

// Numbers of e4m3 from their bits; NaN, 0x7f, is never packed.
INLINE nf decode_f8(ni bits) {
  nf size = (nf)((bits & 0x7f) << 20) * 0x1p120f;
  return (nf)((ni)size | (bits & 0x80) << 24);
}
// The nearest number of e4m3 to one within 448: a multiple of 2^-9 below 2^-6.
INLINE nf round_f8(nf x) {
  nu bits = (nu)x, size = bits & 0x7fffffff;
  nu small = (nu)((nf)size + 24576.0f - 24576.0f), large = (size + 0x7ffff + (size >> 20 & 1)) & 0xfff00000u;
  return (nf)((size < 0x3c800000u ? small : large) | (bits & 0x80000000u));
}

enum class Codes { U4, I8, F8 };

struct No {};  // instead of the type of zeros or offsets that a matrix has not

// Q: its codes. S: float or f16. Z: int8_t or No. O: float, f16 or No.
template <Codes Q, class S, class Z, class O>
struct Matrix {
  static constexpr Codes CODES = Q;
  static constexpr bool ZEROS = !std::is_same_v<Z, No>, OFFSETS = !std::is_same_v<O, No>, LIFTS = ZEROS || OFFSETS;
  static constexpr int64_t QUAD = Q == Codes::U4 ? 2 * W : 4 * W;  // bytes of a quad of K for 16 outputs

  const uint8_t* data;
  int64_t K, group;  // group: elements of K per scale, 0 for all
  int32_t zero;      // of every code

  int64_t groups() const { return group == 0 ? 1 : (K + group - 1) / group; }
  int64_t depth() const { return padded(K, BLOCK); }
  int64_t zeros_at() const { return groups() * W * int64_t(sizeof(S)); }
  int64_t offsets_at() const { return zeros_at() + (ZEROS ? groups() * W : 0); }
  int64_t codes_at() const { return padded(offsets_at() + (OFFSETS ? groups() * W * int64_t(sizeof(O)) : 0), 64); }
  int64_t panel_bytes() const { return codes_at() + depth() / 4 * QUAD; }
};

// One panel.
template <class M>
struct Panel;

template <Codes Q, class S, class Z, class O>
struct Panel<Matrix<Q, S, Z, O>> {
  const S* scales;
  const Z* zeros;
  const O* offsets;
  const uint8_t* codes;

  Panel(const Matrix<Q, S, Z, O>& m, int64_t panel) {
    const uint8_t* at = m.data + panel * m.panel_bytes();
    scales = (const S*)at;
    zeros = (const Z*)(at + m.zeros_at());
    offsets = (const O*)(at + m.offsets_at());
    codes = at + m.codes_at();
  }

  INLINE nf scale(int64_t g, int i) const { return native_load(scales + g * W + i * LANES); }
  INLINE nf zero(int64_t g, int i) const {
    if constexpr (std::is_same_v<Z, No>) return nf{};
    else return native_load(zeros + g * W + i * LANES);
  }
  INLINE nf offset(int64_t g, int i) const {
    if constexpr (std::is_same_v<O, No>) return nf{};
    else return native_load(offsets + g * W + i * LANES);
  }
  // What a group adds for each unit of its sum of x, beside its codes.
  INLINE nf lift(int64_t g, int i, nf scale) const {
    if constexpr (std::is_same_v<Z, No>) return offset(g, i);
    else return offset(g, i) - zero(g, i) * scale;
  }
};

constexpr int64_t gcd(int64_t a, int64_t b) { return b == 0 ? a : gcd(b, a % b); }

// K in segments of equal length, each within one group of the weights and one of x, made of blocks of at most 32.
struct Segments {
  int64_t K, depth, x_group, length, block, count, per_group;  // per_group: segments that share the weights' scale

  Segments(int64_t K, int64_t group, int64_t x_group) : K(K), depth(padded(K, BLOCK)), x_group(x_group == 0 ? depth : x_group) {
    constexpr int64_t MOST = 1 << 16;  // whose sum of products fits in 32 bits
    length = gcd(group, x_group);
    if (length == 0 || length > depth) length = depth;
    if (length > MOST) length = MOST;
    block = gcd(length, BLOCK);
    count = (K + length - 1) / length;
    per_group = group == 0 ? count : group / length;
  }
  int64_t blocks() const { return depth / block; }
  int64_t end(int64_t s) const { return (s + 1) * length < depth ? (s + 1) * length : depth; }
};

}  // namespace octavo
