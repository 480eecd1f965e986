// AVX-512 for machines without it: instructions that the integer dot products name, in plain loops. Included before qdot.h
// it makes the headers take their paths for AVX-512; with EMULATE_VNNI those for VNNI too.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define asm(...)  // no register of 64 bytes for what an empty asm keeps in order
#define __AVX512F__ 1
#define __AVX512BW__ 1
#if defined(EMULATE_VNNI)
#define __AVX512VNNI__ 1
#endif

namespace emulated {

template <class E, class V>
struct Lanes {
  E at[sizeof(V) / sizeof(E)];
  Lanes() = default;
  Lanes(V v) { memcpy(at, &v, sizeof v); }
};

// f(lane) for every lane of a V of elements E.
template <class E, class V, class Fn>
inline V each(Fn f) {
  E at[sizeof(V) / sizeof(E)];
  for (int i = 0; i < int(sizeof(V) / sizeof(E)); i++) at[i] = f(i);
  V v;
  memcpy(&v, at, sizeof v);
  return v;
}

using F = Lanes<float, __m512>;
using I = Lanes<int32_t, __m512i>;
using H = Lanes<int16_t, __m512i>;
using B = Lanes<int8_t, __m512i>;
using U = Lanes<uint8_t, __m512i>;

template <class E>
inline __m512i splat(E x) { return each<E, __m512i>([&](int) { return x; }); }
inline __m512i abs_bytes(B a) { return each<int8_t, __m512i>([&](int i) { return int8_t(a.at[i] < 0 ? -a.at[i] : a.at[i]); }); }
inline uint64_t signs(B a) {
  uint64_t m = 0;
  for (int i = 0; i < 64; i++) m |= uint64_t(a.at[i] < 0) << i;
  return m;
}
inline __m512i mask_sub_bytes(B from, uint64_t m, B a, B b) {
  return each<int8_t, __m512i>([&](int i) { return m >> i & 1 ? int8_t(a.at[i] - b.at[i]) : from.at[i]; });
}
inline __m512i pairs_of_bytes(U a, B b) {  // it saturates
  return each<int16_t, __m512i>([&](int i) {
    int sum = a.at[2 * i] * b.at[2 * i] + a.at[2 * i + 1] * b.at[2 * i + 1];
    return int16_t(sum > 32767 ? 32767 : sum < -32768 ? -32768 : sum);
  });
}
inline __m512i pairs_of_words(H a, H b) {
  return each<int32_t, __m512i>([&](int i) { return a.at[2 * i] * b.at[2 * i] + a.at[2 * i + 1] * b.at[2 * i + 1]; });
}
inline __m512i quads_of_bytes(I sum, U a, B b) {
  return each<int32_t, __m512i>([&](int i) {
    uint32_t s = uint32_t(sum.at[i]);
    for (int j = 4 * i; j < 4 * i + 4; j++) s += uint32_t(a.at[j] * b.at[j]);
    return int32_t(s);
  });
}

}  // namespace emulated

// What isa.h, vec.h and half.h name is not called: what it is does not matter.
template <class... A>
inline __m512 unused_ps(A...) { return __m512{}; }
template <class... A>
inline __m512d unused_pd(A...) { return __m512d{}; }
template <class... A>
inline __m512i unused_i(A...) { return __m512i{}; }
#define _mm512_fmadd_ps unused_ps
#define _mm512_fmadd_pd unused_pd
#define _mm512_max_ps unused_ps
#define _mm512_sqrt_ps unused_ps
#define _mm512_mask_blend_ps unused_ps
#define _mm512_cvtph_ps unused_ps
#define _mm512_reduce_max_ps(x) (x)[0]
#define _mm512_castpd256_pd512 unused_pd
#define _mm512_insertf64x4 unused_pd
#define _mm512_cvtepu16_epi32 unused_i
#define _mm512_slli_epi32 unused_i
#define _mm256_loadu2_m128i(a, b) _mm256_setzero_si256()

#define _mm512_set1_epi16(x) emulated::splat<int16_t>(x)
#define _mm512_setzero_si512() emulated::splat<int32_t>(0)
#define _mm512_abs_epi8 emulated::abs_bytes
#define _mm512_movepi8_mask emulated::signs
#define _mm512_mask_sub_epi8 emulated::mask_sub_bytes
#define _mm512_maddubs_epi16 emulated::pairs_of_bytes
#define _mm512_madd_epi16 emulated::pairs_of_words
#define _mm512_dpbusd_epi32 emulated::quads_of_bytes
