// Sampling and log-probabilities, as docs/artifact.md defines them. Every row is computed by one thread.
#pragma once
#include <algorithm>
#include <numeric>
#include <vector>

#include "abi.h"
#include "pool.h"
#include "vmath.h"

namespace octavo {

// Philox-4x32-10 (Salmon et al., SC'11); the first of the four words.
INLINE uint32_t philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0;
    c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c1 = uint32_t(b);
    c3 = uint32_t(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

// Gumbel noise of 16 tokens: -log(-log(u)).
inline void gumbel(const int32_t* ids, uint64_t seed, int32_t position, int32_t sample, double* out) {
  double u[W];
  for (int j = 0; j < W; j++)
    u[j] = ((philox(seed, uint32_t(ids[j]), uint32_t(position), uint32_t(sample), 0) >> 8) + 0.5) * 0x1p-24;
  D x;
  memcpy(&x, u, sizeof x);
  D zero = splat_d(0), g = zero - log_d(zero - log_d(x));
  memcpy(out, &g, sizeof g);
}

// log of the sum of exp(l), in double, in a fixed order.
inline double log_sum_exp(const float* l, int64_t n) {
  F top = splat(-__builtin_inff());
  for (int64_t i = 0; i < n; i += W) {
    F v = load_n(l + i, n - i);
    if (n - i < W) v = select_bits((1u << (n - i)) - 1, v, splat(-__builtin_inff()));
    top = larger(v, top);
  }
  double m = reduce_max(top);
  D sum = splat_d(0);
  for (int64_t i = 0; i < n; i += W) {
    F v = load_n(l + i, n - i);
    if (n - i < W) v = select_bits((1u << (n - i)) - 1, v, splat(-__builtin_inff()));
    sum = sum + exp_d(widen(v) - splat_d(m));
  }
  return m + lane0(log_d(splat_d(reduce_sum(sum))));
}

inline int32_t argmax(const float* l, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 1; i < n; i++)
    if (l[i] > l[best]) best = i;
  return int32_t(best);
}

// Whether the largest logit is a number: none is NaN or infinity, and not all are -infinity.
inline bool has_order(const float* l, int64_t n) {
  int bad = 0, some = 0;
  for (int64_t i = 0; i < n; i++) bad |= !(l[i] < __builtin_inff()), some |= l[i] > -__builtin_inff();
  return !bad && some;
}

// Ids in descending order of z, equal ones by id, as many as asked for at a time.
class Descending {
 public:
  Descending(const float* z, int64_t n) : z_(z), ids_(size_t(n)) { std::iota(ids_.begin(), ids_.end(), 0); }

  // The first `count` ids; further calls may ask for more.
  const int32_t* first(int64_t count) {
    if (count <= ready_) return ids_.data();
    auto before = [z = z_](int32_t a, int32_t b) { return z[a] > z[b] || (z[a] == z[b] && a < b); };
    auto from = ids_.begin() + ready_, to = ids_.begin() + count;
    if (to < ids_.end()) std::nth_element(from, to, ids_.end(), before);
    std::sort(from, to, before);
    ready_ = count;
    return ids_.data();
  }

  int64_t size() const { return int64_t(ids_.size()); }

 private:
  const float* z_;
  std::vector<int32_t> ids_;
  int64_t ready_ = 0;
};

INLINE double weight_of(double below_top, double temperature) {
  return lane0(exp_d(splat_d(below_top / temperature)));
}

// How many of the `kept` most likely tokens it takes to reach top_p of their probability at a temperature.
inline int64_t nucleus(Descending& order, const float* l, int64_t kept, double temperature, double top_p) {
  double top = l[order.first(1)[0]], total = 0;
  if (kept == order.size()) {
    D sum = splat_d(0);
    for (int64_t i = 0; i < kept; i += W) {
      F v = load_n(l + i, kept - i);
      if (kept - i < W) v = select_bits((1u << (kept - i)) - 1, v, splat(-__builtin_inff()));
      sum = sum + exp_d((widen(v) - splat_d(top)) / splat_d(temperature));
    }
    total = reduce_sum(sum);
  } else {
    const int32_t* ids = order.first(kept);
    for (int64_t i = 0; i < kept; i++) total += weight_of(l[ids[i]] - top, temperature);
  }
  double sum = 0;
  for (int64_t i = 0, ready = 0; i < kept; i++) {
    if (i == ready) ready = std::min(kept, std::max<int64_t>(256, ready * 8));
    sum += weight_of(l[order.first(ready)[i]] - top, temperature);
    if (sum >= top_p * total) return i + 1;
  }
  return kept;
}

struct SampleRow {
  float temperature, top_p, min_p;
  int32_t top_k;
  uint64_t seed;
  int32_t sample, position;
};

// The token with the largest z + noise among those with z >= least; equal ones by id.
inline int32_t noisiest(const float* l, const int32_t* ids, int64_t n, double least, const SampleRow& row) {
  double best = -__builtin_inf();
  int32_t chosen = -1;
  for (int64_t i = 0; i < n; i += W) {
    int32_t id[W];
    int64_t m = n - i < W ? n - i : W;
    for (int64_t j = 0; j < W; j++) id[j] = j < m ? (ids ? ids[i + j] : int32_t(i + j)) : 0;
    double noise[W];
    gumbel(id, row.seed, row.position, row.sample, noise);
    for (int64_t j = 0; j < m; j++) {
      double z = double(l[id[j]]) / double(row.temperature), value = z + noise[j];
      if (z < least) continue;
      if (value > best || (value == best && id[j] < chosen)) best = value, chosen = id[j];
    }
  }
  return chosen;
}

// z = l / temperature is in double; dividing by it keeps the order of the logits, which top-k and top-p sort by.
inline int32_t sample_row(const float* l, int64_t V, const SampleRow& row) {
  int32_t likeliest = argmax(l, V);
  if (row.temperature == 0) return likeliest;
  double top = double(l[likeliest]) / double(row.temperature);
  double least = row.min_p > 0 ? top + lane0(log_d(splat_d(double(row.min_p)))) : -__builtin_inf();
  bool some = row.top_k > 0 && row.top_k < V;
  int32_t chosen;
  if (!some && row.top_p >= 1) {
    chosen = noisiest(l, nullptr, V, least, row);
  } else {
    Descending order(l, V);
    int64_t kept = some ? row.top_k : V;
    if (row.top_p < 1) kept = nucleus(order, l, kept, row.temperature, row.top_p);
    chosen = noisiest(l, order.first(kept), kept, least, row);
  }
  return chosen < 0 ? likeliest : chosen;
}

// 0, or 2 where a row of logits has no largest that is a number.
inline int32_t sample(Pool& pool, const octavo_sample_args& a) {
  std::atomic<int32_t> error{0};
  pool.run([&](Thread& th) {
    th.share(a.num_rows, [&](int64_t q) {
      const float* l = a.logits + q * a.vocab_size;
      if (!has_order(l, a.vocab_size)) {
        error = 2;
        return;
      }
      SampleRow row = {a.temperature[q], a.top_p[q], a.min_p[q], a.top_k[q], a.seed[q], a.sample_index[q], a.position[q]};
      a.ids[q] = sample_row(l, a.vocab_size, row);
      double total = log_sum_exp(l, a.vocab_size);
      a.logprobs[q] = float(l[a.ids[q]] - total);
      if (a.num_top == 0) return;
      Descending order(l, a.vocab_size);
      const int32_t* ids = order.first(std::min(a.num_top, a.vocab_size));
      for (int32_t i = 0; i < a.num_top; i++) {
        a.top_ids[q * a.num_top + i] = i < a.vocab_size ? ids[i] : -1;
        a.top_logprobs[q * a.num_top + i] = i < a.vocab_size ? float(l[ids[i]] - total) : -__builtin_inff();
      }
    });
  });
  return error;
}

inline void logprobs(Pool& pool, const float* logits, int64_t rows, int64_t V, const int32_t* ids, float* out) {
  pool.run([&](Thread& th) {
    th.share(rows, [&](int64_t q) {
      const float* l = logits + q * V;
      bool inside = ids[q] >= 0 && ids[q] < V;
      out[q] = inside ? float(l[ids[q]] - log_sum_exp(l, V)) : __builtin_nanf("");
    });
  });
}

}  // namespace octavo
