// What a KV stream's elements are in memory, and how 16 of them, a strip, become floats.
//
// Codes of u4 and u2 are packed by strips: byte j of 8 holds codes j and j + 8, byte j of 4 the codes j, j + 4, j + 8
// and j + 12, from the low bits up. What a code stands for is code * scale, or code * scale + minimum.
#pragma once
#include <type_traits>

#include "half.h"

namespace octavo {

namespace kv {

struct i8 { int8_t code; };
struct f8 { int8_t code; };  // e4m3, without infinities
struct u4 { uint8_t pair; };
struct u2 { uint8_t four; };

template <class T> constexpr int BITS = 8 * sizeof(T);
template <> constexpr int BITS<u4> = 4;
template <> constexpr int BITS<u2> = 2;
template <class T> constexpr bool PACKED = BITS<T> < 8;
template <class T> constexpr bool SCALED = BITS<T> <= 8;
template <class T> constexpr bool SHIFTED = PACKED<T>;  // whether there is a minimum beside each scale
template <class T> constexpr float UNIT = 1.0f;         // what a code of 1 is loaded as, and how often it fits in 1
template <> constexpr float UNIT<f8> = 256.0f;
template <class T> constexpr int64_t bytes(int64_t codes) { return codes * BITS<T> / 8; }

INLINE nf native_load(const i8* p) {
#if defined(__AVX512F__)
  return (nf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (nf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  int8_t tmp __attribute__((vector_size(LANES)));
  memcpy(&tmp, p, sizeof tmp);
  return __builtin_convertvector(__builtin_convertvector(tmp, ni), nf);
#endif
}

// e4m3 over 256: its bits, moved, are those of an f16, subnormals too.
INLINE nf native_load(const f8* p) {
#if defined(__AVX512F__)
  __m256i x = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  return (nf)_mm512_cvtph_ps(_mm256_and_si256(x, _mm256_set1_epi16(int16_t(0xbfff))));
#elif defined(__AVX2__) && defined(__F16C__)
  __m128i x = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7);
  return (nf)_mm256_cvtph_ps(_mm_and_si128(x, _mm_set1_epi16(int16_t(0xbfff))));
#else
  int8_t tmp __attribute__((vector_size(LANES)));
  memcpy(&tmp, p, sizeof tmp);
  nu x = (nu)__builtin_convertvector(tmp, ni);
  return (nf)(x << 20 & 0x87f00000u) * 0x1p112f;
#endif
}

// A strip of a stream's elements.
template <class T>
INLINE F load_strip(const T* p) { return load(p); }

#if defined(__AVX2__) && defined(__F16C__) && !defined(__AVX512F__)
template <>
INLINE F load_strip(const f8* p) {
  __m256i x = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  x = _mm256_and_si256(x, _mm256_set1_epi16(int16_t(0xbfff)));
  return {(nf)_mm256_cvtph_ps(_mm256_castsi256_si128(x)), (nf)_mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
#endif

template <>
INLINE F load_strip(const u4* p) {
  F r;
#if defined(__AVX512F__)
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i x = _mm512_cvtepu8_epi32(_mm_castpd_si128(_mm_loaddup_pd((const double*)p)));
  x = _mm512_srlv_epi32(x, _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4));
  r.v[0] = (nf)_mm512_permutexvar_ps(x, table);
#elif defined(__AVX2__)
  __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  r.v[0] = (nf)_mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(15)));
  r.v[1] = (nf)_mm256_cvtepi32_ps(_mm256_srli_epi32(x, 4));
#else
  EACH(2) {
    uint8_t tmp __attribute__((vector_size(LANES)));
    memcpy(&tmp, p + i * LANES, sizeof tmp);
    ni x = __builtin_convertvector(tmp, ni);
    r.v[i] = __builtin_convertvector(x & 15, nf);
    r.v[i + 2] = __builtin_convertvector(x >> 4, nf);
  }
#endif
  return r;
}

template <>
INLINE F load_strip(const u2* p) {
  F r;
#if defined(__AVX2__)
  int32_t four;
  memcpy(&four, p, sizeof four);
#endif
#if defined(__AVX512F__)
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
  __m512i x = _mm512_set1_epi32(four);  // lanes are shifted so far that their two bits are the lowest
  x = _mm512_srlv_epi32(x, _mm512_setr_epi32(0, 8, 16, 24, 2, 10, 18, 26, 4, 12, 20, 28, 6, 14, 22, 30));
  r.v[0] = (nf)_mm512_permutevar_ps(table, x);
#elif defined(__AVX2__)
  const __m256 table = _mm256_setr_ps(0, 1, 2, 3, 0, 1, 2, 3);
  __m256i x = _mm256_set1_epi32(four);  // lanes are shifted so far that their two bits are the lowest
  r.v[0] = (nf)_mm256_permutevar_ps(table, _mm256_srlv_epi32(x, _mm256_setr_epi32(0, 8, 16, 24, 2, 10, 18, 26)));
  r.v[1] = (nf)_mm256_permutevar_ps(table, _mm256_srlv_epi32(x, _mm256_setr_epi32(4, 12, 20, 28, 6, 14, 22, 30)));
#else
  uint8_t tmp __attribute__((vector_size(LANES)));
  memcpy(&tmp, p, sizeof tmp);
  ni x = __builtin_convertvector(tmp, ni);
  EACH(NV) r.v[i] = __builtin_convertvector(x >> 2 * i & 3, nf);
#endif
  return r;
}

// Elements 0 to 7 from one place, 8 to 15 from another.
template <class T>
INLINE F load_strip(const T* low, const T* high) {
  static_assert(!PACKED<T>);
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 1) {
    __m128i both = _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i*)low), _mm_loadl_epi64((const __m128i*)high));
    alignas(16) T tmp[W];
    _mm_store_si128((__m128i*)tmp, both);
    return load(tmp);
  } else {
    return load_halves(low, high);
  }
#else
  using octavo::native_load;
  F r;
  EACH(NV) r.v[i] = native_load(i < NV / 2 ? low + i * LANES : high + i * LANES - W / 2);
  return r;
#endif
}

}  // namespace kv

// A stream's elements: of type T, with a scale for each token and head or, per channel, for each head and channel of a
// block.
template <class T, bool CHANNEL = false>
struct Elements {
  using type = T;
  static constexpr bool PER_CHANNEL = CHANNEL, PER_TOKEN = kv::SCALED<T> && !CHANNEL;
  static_assert(!CHANNEL || kv::SHIFTED<T>);
};

// Where a stream lies in a block: bytes from its start. What there is none of is not read.
struct Place { int64_t codes, scales, minima; };

}  // namespace octavo
