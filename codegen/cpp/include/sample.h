// Sampling and log-probabilities, as docs/artifact.md defines them. Threads draw strips of a row, whose size is fixed, and
// what strips give is combined in order: no bit depends on the number of threads or on the other rows.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "abi.h"
#include "pool.h"
#include "vmath.h"

namespace octavo {

constexpr int64_t STRIP = 64 * W;  // tokens
constexpr float NO_LOGIT = -__builtin_inff();
constexpr float LIGHT = 8;  // a light token weighs less than exp(-8) times the heaviest
constexpr double LEAST_NOISE = -2.86, MOST_NOISE = 17.33;  // of u = 2^-25 and 1 - 2^-25: -2.8525 and 17.3287

// Philox-4x32-10 (Salmon et al., SC'11) of 16 counters (ids[j], c1, c2, 0); the first of the four words.
INLINE void philox(uint64_t key, const int32_t* ids, uint32_t c1, uint32_t c2, uint32_t* out) {
  uint32_t x0[W], x1[W], x2[W], x3[W];
  for (int j = 0; j < W; j++) x0[j] = uint32_t(ids[j]), x1[j] = c1, x2[j] = c2, x3[j] = 0;
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; round++) {
    for (int j = 0; j < W; j++) {
      uint64_t a = uint64_t(0xD2511F53u) * x0[j], b = uint64_t(0xCD9E8D57u) * x2[j];
      x0[j] = uint32_t(b >> 32) ^ x1[j] ^ k0;
      x2[j] = uint32_t(a >> 32) ^ x3[j] ^ k1;
      x1[j] = uint32_t(b);
      x3[j] = uint32_t(a);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  memcpy(out, x0, sizeof x0);
}

// Gumbel noise of 16 of Philox's words: -log(-log(u)).
inline void gumbel(const uint32_t* words, double* out) {
  double u[W];
  for (int j = 0; j < W; j++) u[j] = ((words[j] >> 8) + 0.5) * 0x1p-24;
  D x;
  memcpy(&x, u, sizeof x);
  D zero = splat_d(0), g = zero - log_d(zero - log_d(x));
  memcpy(out, &g, sizeof g);
}

INLINE double log_1(double x) { return lane0(log_d(splat_d(x))); }
INLINE double exp_1(double x) { return lane0(exp_d(splat_d(x))); }

// 16 logits, -infinity past the end.
INLINE F logits_at(const float* l, int64_t n) {
  if (n >= W) return load(l);
  float t[W];
  for (int j = 0; j < W; j++) t[j] = j < n ? l[j] : NO_LOGIT;
  return load(t);
}

// The largest logit in each lane of a strip; infinity where one is NaN or infinity.
inline F strip_maxima(const float* l, int64_t n) {
  F most = splat(NO_LOGIT), infinity = splat(__builtin_inff());
  for (int64_t i = 0; i < n; i += W) {
    F v = logits_at(l + i, n - i);
    most = larger(select(v < infinity, v, infinity), most);
  }
  return most;
}

// The sum of exp(l - top).
inline double strip_sum(const float* l, int64_t n, float top) {
  D sum = splat_d(0);
  for (int64_t i = 0; i < n; i += W) sum = sum + widen(exp(logits_at(l + i, n - i) - splat(top)));
  return reduce_sum(sum);
}

// The sum of the tokens' weights, exp((l - top) / temperature), to double's accuracy.
inline double strip_weight(const float* l, int64_t n, float top, float temperature) {
  D sum = splat_d(0), per = splat_d(1 / double(temperature));
  for (int64_t i = 0; i < n; i += W) sum = sum + exp_d((widen(logits_at(l + i, n - i)) - splat_d(top)) * per);
  return reduce_sum(sum);
}

// The weights of a strip's or a row's tokens in two sums: of those that are not light, to double's accuracy, and of the
// light ones, which are many, to `LIGHT_ERROR` of their sum.
struct Mass {
  double heavy = 0, light = 0;
};
constexpr double LIGHT_ERROR = 0x1p-15;  // (l - top) / temperature of up to 104 is off by 2e-5, 64 sums by 4e-6

INLINE bool any(I mask) {
  ni all = mask.v[0];
  for (int i = 1; i < NV; i++) all |= mask.v[i];
  int64_t words[LANES / 2], bits = 0;
  memcpy(words, &all, sizeof words);
  for (int64_t word : words) bits |= word;
  return bits != 0;
}

INLINE float lightest_heavy(float top, float temperature) { return top - LIGHT * temperature; }

inline Mass strip_mass(const float* l, int64_t n, float top, float temperature) {
  F light = splat(0), bound = splat(lightest_heavy(top, temperature)), per_f = splat(1 / temperature);
  D heavy = splat_d(0), per = splat_d(1 / double(temperature));
  for (int64_t i = 0; i < n; i += W) {
    F v = logits_at(l + i, n - i);
    I is_light = v < bound;
    light = light + select(is_light, exp((v - splat(top)) * per_f), splat(0));
    if (any(~is_light)) heavy = heavy + exp_d((widen(select(is_light, splat(NO_LOGIT), v)) - splat_d(top)) * per);
  }
  return {reduce_sum(heavy), reduce_sum(widen(light))};
}

struct Token {
  float l;
  int32_t id;
};
using Tokens = std::vector<Token>;

INLINE bool before(Token a, Token b) { return a.l > b.l || (a.l == b.l && a.id < b.id); }

// A token and its z + noise; of equal values the lowest id counts.
struct Best {
  double value = -__builtin_inf();
  int32_t id = NONE;

  static constexpr int32_t NONE = INT32_MAX;
  void take(double v, int32_t i) {
    if (v > value || (v == value && i < id)) value = v, id = i;
  }
};

// One row: its logits, what to do with them, and room for what its strips give.
struct Row {
  const float* l;  // [V]
  int64_t V;
  float temperature, top_p, min_p;
  int32_t top_k;
  uint64_t seed;
  int32_t sample, position;
  float* maxima;    // [strips, 16]
  double* sums;     // [strips]: strip_sum
  Mass* masses;     // [strips]: strip_mass
  Best* bests;      // [strips]

  static int64_t strips_of(int64_t V) { return (V + STRIP - 1) / STRIP; }
  int64_t strips() const { return strips_of(V); }
  const float* strip(int64_t s) const { return l + s * STRIP; }
  int64_t size(int64_t s) const { return std::min(STRIP, V - s * STRIP); }

  bool keeps_top_k() const { return top_k > 0 && top_k < V; }
  bool keeps_all() const { return !keeps_top_k() && top_p >= 1; }
  double z(float logit) const { return double(logit) / double(temperature); }

  float top() const {
    F most = splat(NO_LOGIT);
    for (int64_t s = 0; s < strips(); s++) most = larger(load(maxima + s * W), most);
    return reduce_max(most);
  }

  // The least z that min-p keeps.
  double least_z() const { return min_p > 0 ? z(top()) + log_1(min_p) : -__builtin_inf(); }

  static double total(const double* parts, int64_t n) {
    double sum = 0;
    for (int64_t s = 0; s < n; s++) sum += parts[s];
    return sum;
  }
  double log_sum_exp() const { return top() + log_1(total(sums, strips())); }

  Mass mass() const {
    Mass sum;
    for (int64_t s = 0; s < strips(); s++) sum.heavy += masses[s].heavy, sum.light += masses[s].light;
    return sum;
  }

  // All weights to double's accuracy.
  double weight() const {
    double sum = 0;
    for (int64_t s = 0; s < strips(); s++) sum += strip_weight(strip(s), size(s), top(), temperature);
    return sum;
  }

  // The lowest id whose logit is `value`, which is the largest.
  int32_t first(float value) const {
    int64_t s = 0;
    while (reduce_max(load(maxima + s * W)) < value) s++;
    int64_t i = s * STRIP;
    while (l[i] != value) i++;
    return int32_t(i);
  }

  // All tokens with a logit of at least `least`, by id.
  Tokens at_least(float least) const {
    Tokens found;
    for (int64_t s = 0; s < strips(); s++) {
      if (reduce_max(load(maxima + s * W)) < least) continue;
      for (int64_t i = s * STRIP, end = i + size(s); i < end; i += W) {
        int64_t n = std::min<int64_t>(W, end - i);
        if (!any(logits_at(l + i, n) >= splat(least))) continue;
        for (int64_t j = i; j < i + n; j++)
          if (l[j] >= least) found.push_back({l[j], int32_t(j)});
      }
    }
    return found;
  }

  // The k largest, in no order. The k-th largest of the maxima is a bound: k tokens reach it.
  Tokens largest(int64_t k) const {
    std::vector<float> m(maxima, maxima + strips() * W);
    float bound = NO_LOGIT;
    if (k <= int64_t(m.size())) {
      std::nth_element(m.begin(), m.begin() + (k - 1), m.end(), std::greater<float>());
      bound = m[size_t(k - 1)];
    }
    Tokens found = at_least(bound);
    if (k < int64_t(found.size())) std::nth_element(found.begin(), found.begin() + k, found.end(), before);
    found.resize(size_t(std::min(k, int64_t(found.size()))));
    return found;
  }
};

// The weights of tokens, as in strip_weight.
inline double weight(const Token* tokens, int64_t n, float top, float temperature) {
  double sum = 0;
  for (int64_t i = 0; i < n; i += W) {
    float l[W];
    for (int64_t j = 0; j < W; j++) l[j] = i + j < n ? tokens[i + j].l : NO_LOGIT;
    sum += strip_weight(l, std::min<int64_t>(W, n - i), top, temperature);
  }
  return sum;
}

// Leaves the shortest run of tokens, in descending order, whose weight reaches `need`. It is narrowed down to a few
// tokens that are worth sorting. Returns whether it is the same for every `need` that differs by up to `error`.
inline bool nucleus(Tokens& tokens, double need, double error, float top, float temperature) {
  auto first = tokens.begin(), last = tokens.end();  // the run ends in (first, last]
  while (last - first > 2 * W) {
    auto middle = first + (last - first) / 4;
    std::nth_element(first, middle, last, before);
    double part = weight(&*first, middle - first, top, temperature);
    if (part >= need) {
      last = middle;
    } else {
      need -= part;
      first = middle;
    }
  }
  std::sort(first, last, before);
  double before_last = need;
  while (first < last && need > 0) before_last = need, need -= weight(&*first++, 1, top, temperature);
  tokens.resize(size_t(first - tokens.begin()));
  return before_last > error && need + error <= 0;
}

// The nucleus of a row of which top-k keeps all, for masses of which the light one is off by up to `error`.
inline bool nucleus_of_row(const Row& row, Mass mass, double error, Tokens& tokens) {
  float top = row.top();
  double total = mass.heavy + mass.light, need = row.top_p * total;
  if (mass.heavy >= need + error) {
    tokens = row.at_least(lightest_heavy(top, row.temperature));
  } else {  // all lighter tokens together weigh at most half of what may be left out
    double lightest = (1 - double(row.top_p)) * total / (2 * double(row.V));
    tokens = row.at_least(std::nextafter(float(top + row.temperature * log_1(lightest)), NO_LOGIT));
  }
  return nucleus(tokens, need, error, top, row.temperature);
}

// The tokens that top-k and top-p keep. The light ones are weighed closely where it decides.
inline Tokens kept(const Row& row) {
  float top = row.top();
  if (row.keeps_top_k()) {
    Tokens tokens = row.largest(row.top_k);
    if (row.top_p >= 1) return tokens;
    double total = weight(tokens.data(), int64_t(tokens.size()), top, row.temperature);
    nucleus(tokens, row.top_p * total, 0, top, row.temperature);
    return tokens;
  }
  Tokens tokens;
  Mass mass = row.mass();
  if (nucleus_of_row(row, mass, mass.light * LIGHT_ERROR, tokens)) return tokens;
  nucleus_of_row(row, {mass.heavy, std::max(0.0, row.weight() - mass.heavy)}, 0, tokens);
  return tokens;
}

// The best of some tokens with z >= least. Those that cannot come near best.value are not looked at closely: u
// would have to reach exp(-exp(z - best.value)).
inline void noisiest(const float* l, const int32_t* ids, int64_t n, double least, const Row& row, Best& best) {
  F most = splat(NO_LOGIT);
  for (int64_t i = 0; i < n; i += W) most = larger(logits_at(l + i, n - i), most);
  double z = row.z(reduce_max(most)), need = best.value - z - std::abs(best.value) * 1e-15;
  if (z < least || need > MOST_NOISE) return;
  double reach = exp_1(-exp_1(-need)) * 0x1p24 - 2;
  for (int64_t i = 0; i < n; i += W) {
    int32_t id[W];
    int64_t m = std::min<int64_t>(W, n - i);
    for (int64_t j = 0; j < W; j++) id[j] = ids[i + (j < m ? j : 0)];
    uint32_t words[W], most_word = 0;
    philox(row.seed, id, uint32_t(row.position), uint32_t(row.sample), words);
    for (int64_t j = 0; j < W; j++) most_word = std::max(most_word, words[j]);
    if (double(most_word >> 8) < reach) continue;
    double noise[W];
    gumbel(words, noise);
    for (int64_t j = 0; j < m; j++)
      if (row.z(l[i + j]) >= least) best.take(row.z(l[i + j]) + noise[j], id[j]);
  }
}

// The best of a strip of a row of which all tokens are kept.
inline Best noisiest_of_strip(const Row& row, int64_t s) {
  constexpr int64_t PART = 16 * W;
  Best best;
  best.value = row.z(row.top()) + LEAST_NOISE;  // what the largest logit has at least
  double least = row.least_z();
  int32_t ids[PART];
  for (int64_t i = 0; i < row.size(s); i += PART) {
    for (int64_t j = 0; j < PART; j++) ids[j] = int32_t(s * STRIP + i + j);
    noisiest(row.strip(s) + i, ids, std::min(PART, row.size(s) - i), least, row, best);
  }
  return best;
}

// The best of the tokens that top-k and top-p keep.
inline Best noisiest_of_kept(const Row& row) {
  Tokens tokens = kept(row);
  std::vector<float> l(tokens.size());
  std::vector<int32_t> ids(tokens.size());
  for (size_t i = 0; i < tokens.size(); i++) l[i] = tokens[i].l, ids[i] = tokens[i].id;
  Best best;
  noisiest(l.data(), ids.data(), int64_t(l.size()), row.least_z(), row, best);
  return best;
}

inline int32_t sample_row(const Row& row) {
  int32_t likeliest = row.first(row.top());
  if (row.temperature == 0) return likeliest;
  Best best;
  if (row.keeps_all())
    for (int64_t s = 0; s < row.strips(); s++) {
      if (row.bests[s].id != Best::NONE) best.take(row.bests[s].value, row.bests[s].id);
    }
  else
    best = noisiest_of_kept(row);
  return best.id == Best::NONE ? likeliest : best.id;
}

// The likeliest tokens in order, with their log-probabilities; past the vocabulary -1 and -infinity.
inline void top_logprobs(const Row& row, double log_total, int32_t width, int32_t* ids, float* logprobs) {
  Tokens tokens = row.largest(width);
  std::sort(tokens.begin(), tokens.end(), before);
  tokens.resize(size_t(width), {NO_LOGIT, -1});
  for (int32_t i = 0; i < width; i++) ids[i] = tokens[size_t(i)].id, logprobs[i] = float(tokens[size_t(i)].l - log_total);
}

// The rows of a call, and memory for their strips.
class SampleRows {
 public:
  explicit SampleRows(const octavo_sample_args& a)
      : a_(a), strips_(Row::strips_of(a.vocab_size)), maxima_(size_t(count() * W)), sums_(size_t(count())),
        masses_(size_t(count())), bests_(size_t(count())) {}

  int64_t strips() const { return strips_; }
  int64_t count() const { return a_.num_rows * strips_; }

  Row at(int64_t q) {
    int64_t s = q * strips_;
    return {a_.logits + q * a_.vocab_size, a_.vocab_size, a_.temperature[q], a_.top_p[q], a_.min_p[q], a_.top_k[q],
            a_.seed[q], a_.sample_index[q], a_.position[q], &maxima_[size_t(s * W)], &sums_[size_t(s)],
            &masses_[size_t(s)], &bests_[size_t(s)]};
  }

  bool wants_sums() const { return a_.logprobs || a_.num_top > 0; }

  // Whether a row's strips have more to give than their maxima.
  bool has_second_pass() const {
    bool sampled = false;
    for (int32_t q = 0; q < a_.num_rows; q++) sampled |= a_.temperature[q] > 0;
    return sampled || wants_sums();
  }

 private:
  const octavo_sample_args& a_;
  int64_t strips_;
  std::vector<float> maxima_;
  std::vector<double> sums_;
  std::vector<Mass> masses_;
  std::vector<Best> bests_;
};

// What a strip gives, once all maxima of its row are known.
inline void second_pass(Row row, int64_t s, bool wants_sums) {
  float top = row.top();
  if (wants_sums) row.sums[s] = strip_sum(row.strip(s), row.size(s), top);
  if (row.temperature == 0) return;
  if (row.keeps_all()) row.bests[s] = noisiest_of_strip(row, s);
  else if (!row.keeps_top_k()) row.masses[s] = strip_mass(row.strip(s), row.size(s), top, row.temperature);
}

inline bool has_order(float top) { return top > NO_LOGIT && top < __builtin_inff(); }

inline void finish_row(const Row& row, bool wants_sums, int64_t q, const octavo_sample_args& a) {
  a.ids[q] = sample_row(row);
  if (!wants_sums) return;
  double log_total = row.log_sum_exp();
  if (a.logprobs) a.logprobs[q] = float(row.l[a.ids[q]] - log_total);
  if (a.num_top > 0) top_logprobs(row, log_total, a.num_top, a.top_ids + q * a.num_top, a.top_logprobs + q * a.num_top);
}

// 0, or 2 where a row of logits has no largest that is a number.
inline int32_t sample(Pool& pool, const octavo_sample_args& a) {
  std::atomic<int32_t> error{0};
  SampleRows rows(a);
  bool wants_sums = rows.wants_sums(), has_second_pass = rows.has_second_pass();
  pool.run([&](Thread& th) {
    th.share(rows.count(), [&](int64_t i) {
      Row row = rows.at(i / rows.strips());
      int64_t s = i % rows.strips();
      store(row.maxima + s * W, strip_maxima(row.strip(s), row.size(s)));
    });
    th.sync();
    if (has_second_pass) {
      th.share(rows.count(), [&](int64_t i) {
        Row row = rows.at(i / rows.strips());
        if (has_order(row.top())) second_pass(row, i % rows.strips(), wants_sums);
      });
      th.sync();
    }
    th.share(a.num_rows, [&](int64_t q) {
      Row row = rows.at(q);
      if (has_order(row.top())) finish_row(row, wants_sums, q, a);
      else error = 2;
    });
  });
  return error;
}

// log of the sum of exp(l), with the bits that sampling gives.
inline double log_sum_exp(const float* l, int64_t V) {
  F most = splat(NO_LOGIT);
  for (int64_t i = 0; i < V; i += STRIP) most = larger(strip_maxima(l + i, std::min(STRIP, V - i)), most);
  float top = reduce_max(most);
  double sum = 0;
  for (int64_t i = 0; i < V; i += STRIP) sum += strip_sum(l + i, std::min(STRIP, V - i), top);
  return top + log_1(sum);
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
