// The largest elements of rows, and elements of rows at indices of their own: what chooses experts.
#pragma once
#include "rows.h"

namespace octavo {

// Whether a comes before b among the largest: NaN before all numbers.
template <class T>
INLINE bool is_larger(T a, T b) { return a > b; }
INLINE bool is_larger(float a, float b) { return a > b || (a != a && b == b); }
INLINE bool is_larger(bf16 a, bf16 b) { return is_larger(to_float(a), to_float(b)); }

// The k largest of each row in falling order and where they are; of equal ones those that come first.
template <class T>
KERNEL void topk_rows(Thread& th, const T* x, Rows in, int64_t k, T* values, int32_t* indices) {
  for (int64_t i = th.first(in.count()); i < th.last(in.count()); i++) {
    const T* row = x + in.at(i);
    T* found = values + i * k;
    int32_t* at = indices + i * k;
    for (int64_t c = 0; c < in.width; c++) {
      if (c >= k && !is_larger(row[c], found[k - 1])) continue;
      int64_t j = c < k ? c : k - 1;
      for (; j > 0 && is_larger(row[c], found[j - 1]); j--) found[j] = found[j - 1], at[j] = at[j - 1];
      found[j] = row[c], at[j] = int32_t(c);
    }
  }
}

INLINE void set_missing(float* y) { *y = __builtin_nanf(""); }
INLINE void set_missing(bf16* y) { convert(__builtin_nanf(""), y); }
template <class T>
INLINE void set_missing(T* y) { *y = 0; }

// y[i, j] = x[i, at[i, j]]; NaN, among integers 0, where there is no such element.
template <class T, class Id>
KERNEL void take_along_rows(Thread& th, const T* x, Rows in, const Id* at, Rows at_rows, T* y) {
  int64_t k = at_rows.width;
  for (int64_t i = th.first(in.count()); i < th.last(in.count()); i++) {
    const T* row = x + in.at(i);
    const Id* indices = at + at_rows.at(i);
    for (int64_t j = 0; j < k; j++) {
      int64_t c = int64_t(indices[j]);
      if (c >= 0 && c < in.width) y[i * k + j] = row[c];
      else set_missing(y + i * k + j);
    }
  }
}

}  // namespace octavo
