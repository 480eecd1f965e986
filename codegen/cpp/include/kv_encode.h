// How floats become the codes of a KV stream: the arithmetic of ir/ops/kv_codes.py, in f32, the same bits everywhere.
#pragma once
#include "kv_codes.h"

namespace octavo {
namespace kv {

// What codes stand for: code * scale + minimum; inverse is 1 / scale, and 0 where the scale is.
struct Scale {
  f16 scale, minimum;
  float inverse, low;
};

template <class T> constexpr float LARGEST = 127.0f;  // code
template <> constexpr float LARGEST<f8> = 448.0f;
template <> constexpr float LARGEST<u4> = 15.0f;
template <> constexpr float LARGEST<u2> = 3.0f;

// The largest lane; NaN if there is one.
inline float largest_lane(F x) {
  float t[W], top;
  store(t, x);
  top = t[0];
  for (int j = 1; j < W; j++) top = t[j] > top || t[j] != t[j] ? t[j] : top;
  return top;
}

// The scale of n elements: symmetric, or from the smallest to the largest.
template <class T, class S>
inline Scale measure(const S* x, int64_t n) {
  F top = splat(-__builtin_inff()), bottom = top;
  for (int64_t i = 0; i < n; i += W) {
    F v = load_n(x + i, n - i);
    if constexpr (!SHIFTED<T>) {
      top = maximum(top, abs(v));
    } else {
      if (n - i < W) v = select_bits((1u << (n - i)) - 1, v, splat(to_float(x[i])));
      top = maximum(top, v);
      bottom = maximum(bottom, neg(v));
    }
  }
  float most = largest_lane(top), least = SHIFTED<T> ? -largest_lane(bottom) : 0;
  Scale s{to_f16((most - least) / LARGEST<T>), to_f16(least), 0, 0};
  float scale = to_float(s.scale);
  s.inverse = scale == 0 ? 0 : 1 / scale;
  if (SHIFTED<T>) s.low = to_float(s.minimum);
  return s;
}

// The nearest integers, ties to even, of numbers below 2^22.
INLINE I nearest(F x) {
  I r;
  EACH(NV) r.v[i] = (ni)(x.v[i] + 12582912.0f) - 0x4b400000;
  return r;
}

// The nearest e4m3, ties to even, of numbers up to 448.
INLINE I nearest_f8(F x) {
  I r, tiny = nearest(abs(x) * splat(512.0f));  // in units of the smallest
  EACH(NV) {
    nu bits = (nu)x.v[i], magnitude = bits & 0x7fffffff;
    nu rounded = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - 960;
    nu code = magnitude < 0x3c800000 ? (nu)tiny.v[i] : rounded;  // 2^-6
    r.v[i] = (ni)(code | (bits >> 24 & 0x80));
  }
  return r;
}

// The codes of 16 elements, a byte each.
template <class T>
INLINE void encode(F x, const Scale& s, uint8_t* codes) {
  F scaled = (SHIFTED<T> ? x - splat(s.low) : x) * splat(s.inverse);
  scaled = select(scaled == scaled, scaled, splat(0.0f));
  scaled = minimum(maximum(scaled, splat(SHIFTED<T> ? 0 : -LARGEST<T>)), splat(LARGEST<T>));
  I r;
  if constexpr (std::is_same_v<T, f8>) r = nearest_f8(scaled);
  else r = nearest(scaled);
  int32_t wide[W];
  EACH(NV) memcpy(wide + i * LANES, &r.v[i], sizeof(ni));
  for (int j = 0; j < W; j++) codes[j] = uint8_t(wide[j]);
}

// A strip of codes as it lies in memory.
template <class T>
INLINE void pack(const uint8_t* codes, T* out) {
  constexpr int PER_BYTE = 8 / BITS<T>, COUNT = W / PER_BYTE;
  uint8_t packed[COUNT];
  for (int j = 0; j < COUNT; j++) {
    packed[j] = codes[j];
    for (int i = 1; i < PER_BYTE; i++) packed[j] |= uint8_t(codes[j + i * COUNT] << i * BITS<T>);
  }
  memcpy(out, packed, COUNT);
}

// One code of a strip of packed ones; the others stay.
template <class T>
inline void put(uint8_t code, T* strip, int64_t at) {
  constexpr int COUNT = W * BITS<T> / 8;
  uint8_t* byte = (uint8_t*)strip + at % COUNT;
  int shift = int(at / COUNT) * BITS<T>;
  *byte = uint8_t((*byte & ~(((1 << BITS<T>) - 1) << shift)) | code << shift);
}

}  // namespace kv
}  // namespace octavo
