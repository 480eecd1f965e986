// Linear recurrences: S = S * exp(decay), u = v or beta * (v - k S), S = S + k u, y = q S, for each head a state S [K, V].
// What a step starts from is the state before the last token's block, and that block's tokens computed again: the same
// operations in the same order however the tokens came, so no bit depends on the chunks. Sums over K have four partial
// sums, of k mod 4. Columns of V do not meet, so a task has one vector of them.
#pragma once
#include "pool.h"
#include "vmath.h"

namespace octavo {

enum Decay { OF_HEAD, OF_KEY, OF_RATES };  // one number, one for each k, or decay[v] * rates[k, v]

// One of the step's operands [T, heads, size]; null where there is none.
struct Operand {
  const float* data;
  int64_t ld;
};

// Where a layer's streams lie in a block, in bytes.
struct StateBlock {
  int64_t key, value, decay, beta, state;
};

struct RecurrenceArgs {
  Operand q, k, v, decay, beta;
  const float* rates;  // [H, K, V] or null
  float* out;
  int64_t ld_out;
  int64_t groups, heads, size;  // of keys, of values; V
  char* data;
  int64_t block_bytes;
  StateBlock at;
  const int32_t* table;
  int64_t table_stride;
  const int32_t *lens, *starts;
  int64_t requests;
};

template <int K, Decay KIND, bool BETA, int BLOCK>
struct Recurrence {
  const RecurrenceArgs& a;

  // What one token adds to one head, columns c.. of V.
  struct Token {
    const float *k, *decay, *beta;
    F v, decay_v;
  };

  void run(Thread& th) const {
    int64_t slices = (a.size + W - 1) / W;
    th.share(a.requests * a.heads * slices, [&](int64_t i) {
      request(i / slices / a.heads, i / slices % a.heads, i % slices * W);
    });
  }

  void request(int64_t r, int64_t h, int64_t c) const {
    int64_t total = a.lens[r], first = total - (a.starts[r + 1] - a.starts[r]);
    if (first == total) return;
    const int32_t* blocks = a.table + r * a.table_stride;
    int64_t n = a.size - c < W ? a.size - c : W;
    F s[K];
    restore(s, blocks, first, h, c, n);
    for (int64_t t = first; t < total; t++) {
      int64_t row = a.starts[r] + t - first;
      Token x = fresh(row, h, c, n);
      if (blocks[t / BLOCK] >= 0) write(block(blocks[t / BLOCK]), s, x, t % BLOCK, h, c, n);
      const float* q = a.q.data + row * a.q.ld + group(h) * K;
      store_n(a.out + row * a.ld_out + h * a.size + c, advance<true>(s, x, q, h, c, n), n);
    }
  }

  // The state that the token at position `first` starts from.
  void restore(F* s, const int32_t* blocks, int64_t first, int64_t h, int64_t c, int64_t n) const {
    if (first == 0) {
      for (int k = 0; k < K; k++) s[k] = splat(0);
      return;
    }
    int64_t from = (first - 1) / BLOCK;
    const char* at = block(blocks[from]);
    const float* state = (const float*)(at + a.at.state) + h * K * a.size + c;
    for (int k = 0; k < K; k++) s[k] = load_n(state + k * a.size, n);
    for (int64_t j = 0; j < first - from * BLOCK; j++) advance<false>(s, stored(at, j, h, c, n), nullptr, h, c, n);
  }

  // The state after a token; y if READ.
  template <bool READ>
  INLINE F advance(F* s, const Token& x, const float* q, int64_t h, int64_t c, int64_t n) const {
    float factors[K];
    if constexpr (KIND == OF_KEY)
      for (int k = 0; k < K; k += W) store_n(factors + k, exp(load_n(x.decay + k, K - k)), K - k);
    F one = KIND == OF_HEAD ? exp(splat(x.decay[0])) : splat(0);
    const float* rates = a.rates + (KIND == OF_RATES ? h * K * a.size + c : 0);
    auto decayed = [&](int k) {
      if constexpr (KIND == OF_HEAD) return s[k] * one;
      else if constexpr (KIND == OF_KEY) return s[k] * splat(factors[k]);
      else return s[k] * exp(x.decay_v * load_n(rates + k * a.size, n));
    };
    F u = x.v, y[4] = {splat(0), splat(0), splat(0), splat(0)};
    if constexpr (BETA) {
      F known[4] = {splat(0), splat(0), splat(0), splat(0)};
      each([&](int k, int part) {
        s[k] = decayed(k);
        known[part] = fma(splat(x.k[k]), s[k], known[part]);
      });
      u = splat(x.beta[0]) * (x.v - sum(known));
    }
    each([&](int k, int part) {
      s[k] = fma(splat(x.k[k]), u, BETA ? s[k] : decayed(k));
      if constexpr (READ) y[part] = fma(splat(q[k]), s[k], y[part]);
    });
    return sum(y);
  }

  template <class Fn>
  INLINE static void each(Fn f) {
    int k = 0;
    for (; k + 4 <= K; k += 4) f(k, 0), f(k + 1, 1), f(k + 2, 2), f(k + 3, 3);
    for (int part = 0; k < K; k++, part++) f(k, part);
  }

  INLINE static F sum(const F* parts) { return (parts[0] + parts[1]) + (parts[2] + parts[3]); }

  int64_t group(int64_t h) const { return h / (a.heads / a.groups); }
  char* block(int64_t index) const { return a.data + index * a.block_bytes; }
  static constexpr int64_t width(int64_t size) { return KIND == OF_HEAD ? 1 : KIND == OF_KEY ? K : size; }

  Token fresh(int64_t row, int64_t h, int64_t c, int64_t n) const {
    Token x;
    x.k = a.k.data + row * a.k.ld + group(h) * K;
    x.v = load_n(a.v.data + row * a.v.ld + h * a.size + c, n);
    x.decay = a.decay.data + row * a.decay.ld + h * width(a.size);
    x.beta = BETA ? a.beta.data + row * a.beta.ld + h : nullptr;
    if constexpr (KIND == OF_RATES) x.decay_v = load_n(x.decay + c, n);
    return x;
  }

  Token stored(const char* at, int64_t j, int64_t h, int64_t c, int64_t n) const {
    Token x;
    x.k = (const float*)(at + a.at.key) + (group(h) * BLOCK + j) * K;
    x.v = load_n((const float*)(at + a.at.value) + (h * BLOCK + j) * a.size + c, n);
    x.decay = (const float*)(at + a.at.decay) + (h * BLOCK + j) * width(a.size);
    x.beta = BETA ? (const float*)(at + a.at.beta) + h * BLOCK + j : nullptr;
    if constexpr (KIND == OF_RATES) x.decay_v = load_n(x.decay + c, n);
    return x;
  }

  // A token's operands and, where it is its block's first, the state before it. What columns or heads share is the
  // first one's.
  void write(char* at, const F* s, const Token& x, int64_t j, int64_t h, int64_t c, int64_t n) const {
    if (j == 0) {
      float* state = (float*)(at + a.at.state) + h * K * a.size + c;
      for (int k = 0; k < K; k++) store_n(state + k * a.size, s[k], n);
    }
    store_n((float*)(at + a.at.value) + (h * BLOCK + j) * a.size + c, x.v, n);
    float* decay = (float*)(at + a.at.decay) + (h * BLOCK + j) * width(a.size);
    if constexpr (KIND == OF_RATES) store_n(decay + c, x.decay_v, n);
    if (c > 0) return;
    if constexpr (KIND != OF_RATES) memcpy(decay, x.decay, size_t(width(a.size)) * sizeof(float));
    if constexpr (BETA) ((float*)(at + a.at.beta))[h * BLOCK + j] = x.beta[0];
    if (h % (a.heads / a.groups) == 0)
      memcpy((float*)(at + a.at.key) + (group(h) * BLOCK + j) * K, x.k, K * sizeof(float));
  }
};

template <int K, Decay KIND, bool BETA, int BLOCK>
KERNEL void recurrence(Thread& th, const RecurrenceArgs& args) {
  Recurrence<K, KIND, BETA, BLOCK>{args}.run(th);
}

}  // namespace octavo
