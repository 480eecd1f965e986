// Kernels that treat each row (token) by itself: embedding, norms, rotary embedding, gathers.
// A value is `rows` rows, `ld` elements apart, each of contiguous elements.
#pragma once
#include "linear.h"
#include "vmath.h"

namespace octavo {

// y[t] = row ids[t] of a table [V, width]; an id outside the table gives NaN, which sampling reports.
template <class Id, class T>
KERNEL void embed_rows(Thread& th, const Id* ids, int64_t rows, const T* table, int64_t V, int64_t width, float* y) {
  for (int64_t t = th.first(rows); t < th.last(rows); t++) {
    bool inside = ids[t] >= 0 && int64_t(ids[t]) < V;
    const T* row = table + (inside ? int64_t(ids[t]) : 0) * width;
    for (int64_t i = 0; i < width; i += W)
      store_n(y + t * width + i, inside ? load_n(row + i, width - i) : splat(__builtin_nanf("")), width - i);
  }
}

// The same from a table that lies in panels, because a linear reads it too.
template <class Id, class T>
KERNEL void embed_panels(Thread& th, const Id* ids, int64_t rows, const T* panels, int64_t V, int64_t width, float* y) {
  for (int64_t t = th.first(rows); t < th.last(rows); t++) {
    bool inside = ids[t] >= 0 && int64_t(ids[t]) < V;
    int64_t id = inside ? int64_t(ids[t]) : 0;
    for (int64_t i = 0; i < width; i++)
      y[t * width + i] = inside ? panel_element(panels, width, id, i) : __builtin_nanf("");
  }
}

// y[q] = x[rows[q]].
template <class T, class Id>
KERNEL void take_rows(Thread& th, const T* x, int64_t ld, int64_t width, const Id* rows, int64_t n, T* y, int64_t y_ld) {
  for (int64_t q = th.first(n); q < th.last(n); q++)
    memcpy(y + q * y_ld, x + int64_t(rows[q]) * ld, size_t(width) * sizeof(T));
}

// y[t, i] = x[t, columns[i]] for x of `width` columns; NaN where there is no such column.
template <class Id>
KERNEL void take_columns(Thread& th, const float* x, int64_t ld, int64_t rows, int64_t width, const Id* columns,
                         int64_t n, float* y) {
  for (int64_t t = th.first(rows); t < th.last(rows); t++)
    for (int64_t i = 0; i < n; i++) {
      bool inside = columns[i] >= 0 && int64_t(columns[i]) < width;
      y[t * n + i] = inside ? x[t * ld + int64_t(columns[i])] : __builtin_nanf("");
    }
}

// Where norms find row i of `inner` rows per token.
struct Rows {
  int64_t tokens, ld, inner, width;
  int64_t count() const { return tokens * inner; }
  int64_t at(int64_t i) const { return i / inner * ld + i % inner * width; }
};

// x / sqrt(mean(x^2) + eps) * w. w: [inner or 1, width] with w_step elements between inner rows, or null.
template <class Y>
KERNEL void rms_norm(Thread& th, const float* x, Rows in, const float* w, int64_t w_step, float eps, Y* y) {
  int64_t n = in.count(), width = in.width;
  for (int64_t i = th.first(n); i < th.last(n); i++) {
    const float *row = x + in.at(i), *weight = w + i % in.inner * w_step;
    F sum = splat(0.0f);
    for (int64_t c = 0; c < width; c += W) {
      F v = load_n(row + c, width - c);
      sum = fma(v, v, sum);
    }
    F scale = rsqrt(splat(reduce_sum(sum) / float(width) + eps));
    for (int64_t c = 0; c < width; c += W) {
      F v = load_n(row + c, width - c) * scale;
      if (w) v = v * load_n(weight + c, width - c);
      store_n(y + i * width + c, v, width - c);
    }
  }
}

// (x - mean) / sqrt(var + eps) * w + b.
template <class Y>
KERNEL void layer_norm(Thread& th, const float* x, Rows in, const float* w, const float* b, int64_t w_step, float eps,
                       Y* y) {
  int64_t n = in.count(), width = in.width;
  for (int64_t i = th.first(n); i < th.last(n); i++) {
    const float* row = x + in.at(i);
    int64_t at = i % in.inner * w_step;
    F sum = splat(0.0f), square = splat(0.0f);
    for (int64_t c = 0; c < width; c += W) sum = sum + load_n(row + c, width - c);
    F mean = splat(reduce_sum(sum) / float(width));
    for (int64_t c = 0; c < width; c += W) {
      F v = load_n(row + c, width - c) - mean;
      if (width - c < W) v = select_bits((1u << (width - c)) - 1, v, splat(0.0f));
      square = fma(v, v, square);
    }
    F scale = rsqrt(splat(reduce_sum(square) / float(width) + eps));
    for (int64_t c = 0; c < width; c += W) {
      F v = (load_n(row + c, width - c) - mean) * scale;
      if (w) v = v * load_n(w + at + c, width - c);
      if (b) v = v + load_n(b + at + c, width - c);
      store_n(y + i * width + c, v, width - c);
    }
  }
}

// Rotates pairs of each head: (i, i + pairs) or, interleaved, (2i, 2i + 1), from `offset`; the rest is copied.
// cos, sin: rows cs_ld apart, cs_step between heads (0: one for all).
struct Rope { int64_t pairs, offset, cs_ld, cs_step; };

template <bool INTERLEAVED>
KERNEL void rope(Thread& th, const float* x, Rows in, const float* cos, const float* sin, Rope form, float* y) {
  int64_t n = in.count(), P = form.pairs;
  for (int64_t i = th.first(n); i < th.last(n); i++) {
    const float* row = x + in.at(i);
    int64_t at = i / in.inner * form.cs_ld + i % in.inner * form.cs_step;
    const float *c = cos + at, *s = sin + at;
    float* out = y + i * in.width;
    if (form.offset > 0 || 2 * P < in.width) memcpy(out, row, size_t(in.width) * sizeof(float));
    row += form.offset;
    out += form.offset;
    if (INTERLEAVED) {
      for (int64_t j = 0; j < P; j++) {
        float a = row[2 * j], b = row[2 * j + 1];
        out[2 * j] = a * c[j] - b * s[j];
        out[2 * j + 1] = b * c[j] + a * s[j];
      }
    } else {
      for (int64_t j = 0; j < P; j += W) {
        int64_t m = P - j;
        F a = load_n(row + j, m), b = load_n(row + P + j, m), cv = load_n(c + j, m), sv = load_n(s + j, m);
        store_n(out + j, a * cv - b * sv, m);
        store_n(out + P + j, b * cv + a * sv, m);
      }
    }
  }
}

// Blocks of `bytes` from pairs[i][0] to pairs[i][1].
KERNEL void copy_blocks(Thread& th, char* data, int64_t bytes, const int32_t* pairs, int64_t n) {
  for (int64_t i = th.first(n); i < th.last(n); i++)
    memcpy(data + pairs[2 * i + 1] * bytes, data + pairs[2 * i] * bytes, size_t(bytes));
}

// Reductions of each row's elements, in a fixed order.
KERNEL void sum_rows(Thread& th, const float* x, Rows in, float scale, float* y) {
  for (int64_t i = th.first(in.count()); i < th.last(in.count()); i++) {
    F sum = splat(0.0f);
    for (int64_t c = 0; c < in.width; c += W) sum = sum + load_n(x + in.at(i) + c, in.width - c);
    y[i] = reduce_sum(sum) * scale;
  }
}

KERNEL void max_rows(Thread& th, const float* x, Rows in, float* y) {
  for (int64_t i = th.first(in.count()); i < th.last(in.count()); i++) {
    float top = x[in.at(i)];
    for (int64_t c = 1; c < in.width; c++) {
      float v = x[in.at(i) + c];
      if (v > top || v != v) top = v;
    }
    y[i] = top;
  }
}

// Sums (or maxima) over an axis that `inner` elements follow: a row is [width / inner, inner]; one chain per output,
// along the axis.
template <bool MAX>
KERNEL void fold_rows(Thread& th, const float* x, Rows in, int64_t inner, float scale, float* y) {
  for (int64_t i = th.first(in.count()); i < th.last(in.count()); i++) {
    const float* row = x + in.at(i);
    for (int64_t c = 0; c < inner; c += W) {
      F found = load_n(row + c, inner - c);
      for (int64_t j = inner; j < in.width; j += inner) {
        F v = load_n(row + j + c, inner - c);
        found = MAX ? maximum(found, v) : found + v;
      }
      store_n(y + i * inner + c, MAX ? found : found * splat(scale), inner - c);
    }
  }
}

KERNEL void softmax_rows(Thread& th, const float* x, Rows in, float* y) {
  for (int64_t i = th.first(in.count()); i < th.last(in.count()); i++) {
    const float* row = x + in.at(i);
    float* out = y + i * in.width;
    float top = -__builtin_inff();
    for (int64_t c = 0; c < in.width; c++) top = row[c] > top ? row[c] : top;
    F sum = splat(0.0f);
    for (int64_t c = 0; c < in.width; c += W) {
      int64_t m = in.width - c;
      F e = exp(load_n(row + c, m) - splat(top));
      if (m < W) e = select_bits((1u << m) - 1, e, splat(0.0f));
      store_n(out + c, e, m);
      sum = sum + e;
    }
    F total = splat(reduce_sum(sum));
    for (int64_t c = 0; c < in.width; c += W) store_n(out + c, load_n(out + c, in.width - c) / total, in.width - c);
  }
}

template <class T>
KERNEL void cumsum_rows(Thread& th, const T* x, Rows in, T* y) {
  for (int64_t i = th.first(in.count()); i < th.last(in.count()); i++) {
    T sum = 0;
    for (int64_t c = 0; c < in.width; c++) y[i * in.width + c] = sum = sum + x[in.at(i) + c];
  }
}

// z[b] = x[b] y[b] for each token: x [.., M, K], y [.., K, N]; one chain per output, over k in order.
KERNEL void matmul_rows(Thread& th, const float* x, int64_t x_ld, const float* y, int64_t y_ld, int64_t tokens,
                        int64_t batch, int64_t M, int64_t K, int64_t N, float* z) {
  int64_t n = tokens * batch * M;
  for (int64_t i = th.first(n); i < th.last(n); i++) {
    int64_t t = i / (batch * M), b = i / M % batch;
    const float *a = x + t * x_ld + (i % (batch * M)) * K, *w = y + t * y_ld + b * K * N;
    for (int64_t c = 0; c < N; c += W) {
      F sum = splat(0.0f);
      for (int64_t k = 0; k < K; k++) sum = fma(splat(a[k]), load_n(w + k * N + c, N - c), sum);
      store_n(z + i * N + c, sum, N - c);
    }
  }
}

}  // namespace octavo
