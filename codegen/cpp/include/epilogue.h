// What a linear does with its accumulators before they are stored: bias, activation, gate, residual.
#pragma once
#include "vmath.h"

namespace octavo {

struct None { static INLINE F apply(F x) { return x; } };
struct Relu { static INLINE F apply(F x) { return relu(x); } };
struct Silu { static INLINE F apply(F x) { return silu(x); } };
struct Gelu { static INLINE F apply(F x) { return gelu(x); } };
struct GeluTanh { static INLINE F apply(F x) { return gelu_tanh(x); } };
struct Sigmoid { static INLINE F apply(F x) { return sigmoid(x); } };
struct Tanh { static INLINE F apply(F x) { return tanh(x); } };

// y = act(x + bias) + residual, or act(gate + bias) * (up + bias) + residual, in f32 and rounded once where it is stored.
template <class Act, class Y, class R>
struct Epilogue {
  Y* y;
  int64_t y_ld;
  const float* bias;  // [N], gated [2N]; or null
  const R* residual;  // rows r_ld apart; or null
  int64_t r_ld, N;

  // That of one expert, whose biases are row e of [E, halves * N].
  INLINE Epilogue of_expert(int64_t e, int64_t halves) const {
    Epilogue mine = *this;
    if (bias) mine.bias += e * halves * N;
    return mine;
  }

  INLINE F biased(F x, int64_t n, int64_t lanes) const { return bias ? x + load_n(bias + n, lanes) : x; }

  INLINE void put(int64_t t, int64_t n, F x, int64_t lanes) const {
    if (residual) x = x + load_n(residual + t * r_ld + n, lanes);
    store_n(y + t * y_ld + n, x, lanes);
  }

  INLINE void operator()(int64_t t, int64_t n, F x, int64_t lanes) const {
    put(t, n, Act::apply(biased(x, n, lanes)), lanes);
  }

  INLINE void operator()(int64_t t, int64_t n, F gate, F up, int64_t lanes) const {
    put(t, n, Act::apply(biased(gate, n, lanes)) * biased(up, N + n, lanes), lanes);
  }
};

}  // namespace octavo
