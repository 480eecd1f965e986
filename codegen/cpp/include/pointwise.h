// Helpers of the loops that are printed from the graph: integer division, rounding, copies between layouts.
#pragma once
#include "rows.h"

namespace octavo {

template <class T>
INLINE T floordiv(T a, T b) {
  T q = a / b;
  return q - T((a % b != 0) && ((a < 0) != (b < 0)));
}
INLINE float floordiv(float a, float b) { return floor(a / b); }
INLINE F floordiv(F a, F b) { return floor(a / b); }
template <class T>
INLINE T mod(T a, T b) { return a - floordiv(a, b) * b; }

// NaN in either operand gives NaN.
INLINE float maximum(float a, float b) { return a != a ? a : a > b ? a : b != b ? b : b; }
INLINE float minimum(float a, float b) { return a != a ? a : a < b ? a : b; }
template <class T>
INLINE T maximum(T a, T b) { return a > b ? a : b; }
template <class T>
INLINE T minimum(T a, T b) { return a < b ? a : b; }

// The bf16 nearest to x, as a float.
INLINE float round_bf16(float x) { return to_float(to_bf16(x)); }

// For each row, `parts` pieces of `count` elements, x_step and y_step apart.
template <class T>
KERNEL void copy_parts(Thread& th, const T* x, int64_t x_ld, int64_t x_step, T* y, int64_t y_ld, int64_t y_step,
                       int64_t rows, int64_t parts, int64_t count) {
  for (int64_t t = th.first(rows); t < th.last(rows); t++)
    for (int64_t p = 0; p < parts; p++)
      memcpy(y + t * y_ld + p * y_step, x + t * x_ld + p * x_step, size_t(count) * sizeof(T));
}

// Each row's elements in another order: y [n0, n1, n2, n3] contiguous, x by strides.
template <class T>
KERNEL void permute(Thread& th, const T* x, int64_t x_ld, T* y, int64_t rows, const int64_t (&n)[4], const int64_t (&s)[4]) {
  for (int64_t t = th.first(rows); t < th.last(rows); t++) {
    T* out = y + t * n[0] * n[1] * n[2] * n[3];
    for (int64_t a = 0; a < n[0]; a++)
      for (int64_t b = 0; b < n[1]; b++)
        for (int64_t c = 0; c < n[2]; c++)
          for (int64_t d = 0; d < n[3]; d++) *out++ = x[t * x_ld + a * s[0] + b * s[1] + c * s[2] + d * s[3]];
  }
}

template <class T>
KERNEL void fill(Thread& th, T* y, int64_t count, T value) {
  for (int64_t i = th.first(count); i < th.last(count); i++) y[i] = value;
}

template <class T>
KERNEL void iota(Thread& th, T* y, int64_t count) {
  for (int64_t i = th.first(count); i < th.last(count); i++) y[i] = T(i);
}

}  // namespace octavo
