// Dot products of 8-bit integers: for a native vector of outputs, four elements of K at a time, summed in 32 bits.
//
// Sums are exact, so their order is free. Where a product of 4-bit codes with a block of 32 fits in 16 bits (15 * 127 * 16),
// AVX2 and AVX-512 without VNNI sum blocks in pairs of 16 bits.
#pragma once
#include <utility>

#include "quant.h"

namespace octavo {

typedef int8_t nb __attribute__((vector_size(4 * LANES)));   // LANES outputs, four elements of K each
typedef int16_t nh __attribute__((vector_size(4 * LANES)));  // LANES outputs, two sums each

// Sums stay in the order that they are written in: sorted by the compiler, which may, their terms fill more than the registers.
template <class V>
INLINE V ordered(V v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

INLINE nb load_bytes(const void* p) { nb r; memcpy(&r, p, sizeof r); return r; }
INLINE ni splat_i(int32_t x) { return x - ni{}; }
// Four bytes in every lane.
INLINE ni splat_quad(const void* p) {
  int32_t bits;
  memcpy(&bits, p, 4);
  return splat_i(bits);
}
INLINE nb low_halves(nb v) { return v & 15; }
INLINE nb high_halves(nb v) { return (nb)((nu)v >> 4) & 15; }

#if defined(__AVX512VNNI__)
constexpr int32_t I8_BIAS = 128;  // the instruction takes codes without a sign
#else
constexpr int32_t I8_BIAS = 0;
#endif

// What tiles add to the zero of every code.
template <Codes Q>
constexpr int32_t BIAS = Q == Codes::I8 ? I8_BIAS : 0;

// A vector of codes as `dot` takes it, prepared once for several rows.
template <Codes Q>
struct Factor {
#if defined(__AVX512VNNI__)
  nb codes;
  INLINE explicit Factor(nb w) : codes(Q == Codes::I8 ? w ^ int8_t(-128) : w) {}
  INLINE ni dot(ni sum, ni x) const { return (ni)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x); }
#elif defined(__AVX512BW__)
  nb codes;
  __mmask64 negative;
  INLINE explicit Factor(nb w)
      : codes((nb)_mm512_abs_epi8((__m512i)w)), negative(Q == Codes::I8 ? _mm512_movepi8_mask((__m512i)w) : 0) {}
  INLINE ni dot(ni sum, ni x) const {
    __m512i with_sign = _mm512_mask_sub_epi8((__m512i)x, negative, _mm512_setzero_si512(), (__m512i)x);
    __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, with_sign);
    return sum + (ni)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
  }
#elif defined(__AVX2__)
  nb codes, size;
  INLINE explicit Factor(nb w) : codes(w), size((nb)_mm256_abs_epi8((__m256i)w)) {}
  INLINE ni dot(ni sum, ni x) const {
    __m256i pairs = _mm256_maddubs_epi16((__m256i)size, _mm256_sign_epi8((__m256i)x, (__m256i)codes));
    return sum + (ni)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
#elif defined(__SSE2__)
  __m128i even, odd;
  INLINE explicit Factor(nb w) : even(_mm_srai_epi16(_mm_slli_epi16((__m128i)w, 8), 8)), odd(_mm_srai_epi16((__m128i)w, 8)) {}
  INLINE ni dot(ni sum, ni x) const {
    __m128i x_even = _mm_srai_epi16(_mm_slli_epi16((__m128i)x, 8), 8), x_odd = _mm_srai_epi16((__m128i)x, 8);
    return sum + (ni)_mm_madd_epi16(even, x_even) + (ni)_mm_madd_epi16(odd, x_odd);
  }
#elif defined(__aarch64__)
  int8x16_t codes;
  INLINE explicit Factor(nb w) : codes((int8x16_t)w) {}
  INLINE ni dot(ni sum, ni x) const {
#if defined(__ARM_FEATURE_DOTPROD)
    return (ni)vdotq_s32((int32x4_t)sum, codes, (int8x16_t)x);
#else
    int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8((int8x16_t)x)), high = vmull_high_s8(codes, (int8x16_t)x);
    return (ni)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
#endif
  }
#endif
};

template <Codes Q>
struct Factors {
  Factor<Q> each[NV];
  INLINE explicit Factors(const nb (&w)[NV]) : Factors(w, std::make_integer_sequence<int, NV>()) {}

 private:
  template <int... I>
  INLINE Factors(const nb (&w)[NV], std::integer_sequence<int, I...>) : each{Factor<Q>(w[I])...} {}
};

// Whether blocks are summed in pairs of 16 bits.
template <Codes Q>
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr bool SHORT_SUMS = Q == Codes::U4;
#else
constexpr bool SHORT_SUMS = false;
#endif

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#if defined(__AVX512BW__)
INLINE nh dot_short(nh sum, nb w, ni x) { return sum + (nh)_mm512_maddubs_epi16((__m512i)w, (__m512i)x); }
INLINE ni add_pairs(nh sum) { return (ni)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1)); }
#else
INLINE nh dot_short(nh sum, nb w, ni x) { return sum + (nh)_mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
INLINE ni add_pairs(nh sum) { return (ni)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
#endif
#endif

// Sums of a block with R rows for 16 outputs; `start` of a row is what they begin with.
template <Codes Q, int R, bool SHORT = SHORT_SUMS<Q>>
struct BlockSums {
  ni sum[R][NV];
  INLINE explicit BlockSums(const int32_t* start) {
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) EACH(NV) sum[r][i] = splat_quad(start + r);
  }
  // One quad of K: its codes in native vectors; x [R][4].
  INLINE void add(const nb (&w)[NV], const int8_t* x) {
    Factors<Q> factors(w);
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {
      ni quad = splat_quad(x + r * 4);
      EACH(NV) sum[r][i] = ordered(factors.each[i].dot(sum[r][i], quad));
    }
  }
  INLINE ni of(int r, int i) const { return sum[r][i]; }
};

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
template <Codes Q, int R>
struct BlockSums<Q, R, true> {
  nh sum[R][NV];
  INLINE explicit BlockSums(const int32_t* start) {
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) EACH(NV) sum[r][i] = (nh)splat_quad(start + r);
  }
  INLINE void add(const nb (&w)[NV], const int8_t* x) {
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {
      ni quad = splat_quad(x + r * 4);
      EACH(NV) sum[r][i] = ordered(dot_short(sum[r][i], w[i], quad));
    }
  }
  INLINE ni of(int r, int i) const { return add_pairs(sum[r][i]); }
};
#endif

// What a row's sums of a block start with: -zero times the block's sum of x, given in the halves of its quads.
template <Codes Q>
INLINE int32_t start_of(int32_t zero, int32_t first_pairs, int32_t last_pairs) {
  uint32_t z = uint32_t(zero + BIAS<Q>);
  if constexpr (SHORT_SUMS<Q>) return int32_t((-z * uint32_t(first_pairs) & 0xffff) | -z * uint32_t(last_pairs) << 16);
  else return int32_t(-z * uint32_t(first_pairs + last_pairs));
}

}  // namespace octavo
