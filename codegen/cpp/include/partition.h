// The softmax of a few rows over the keys of one partition, which lie in blocks of a KV group.
//
// Codes become floats in registers. What scales a key belongs to its score or, of a value, to its weight: one
// multiplication for each row and key. Keys with a scale per channel are multiplied by queries that are scaled instead,
// once for each block.
#pragma once
#include "keys.h"
#include "kv_codes.h"
#include "vmath.h"

namespace octavo {

constexpr int SUB_ROWS = LANES == 4 ? 3 : 6;  // rows that share registers
constexpr float LOG2E = 1.44269504f;

// Vectors of 16 that R rows accumulate in registers at once: a power of two, for each row.
constexpr int together(int rows) {
  int most = (LANES == 16 ? 24 : 12) / (rows * NV);
  return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

// One layer's keys and values in a KV group. K lies as [G, D, block] in a block of tokens, V as [G, block, E]; scales
// and minima as [G, block] or, per channel, [G, D].
struct Cache {
  const char* data;
  int64_t block_bytes;
  Place key, value;
  const int32_t* table;  // [R, stride]
  int64_t stride;
};

// A (token, head): its query, the head of its keys, and the keys that it may see, where its mask lets it.
struct Row { int64_t token, head, position, first, last; };

// How scores become exponents of two.
struct Scores {
  float softcap;        // 0: none
  const float* slopes;  // [H] or null
  const float* table;   // [H, distances] or null
  int64_t distances;

  bool plain() const { return softcap == 0 && !slopes && !table; }
  // Softcap and what is added by distance, of 16 keys from `key` on.
  F bend(const Row& at, int64_t key, F x) const {
    static const float IOTA[W] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (softcap != 0) x = tanh(x) * splat(softcap * LOG2E);
    if (table) return fma(by_distance(at, at.position - key), splat(LOG2E), x);
    if (!slopes) return x;
    return fma(splat(slopes[at.head] * LOG2E), load(IOTA) + splat(float(key - at.position)), x);
  }
  // The row of the table from `distance` down, of 16 keys.
  F by_distance(const Row& at, int64_t distance) const {
    const float* row = table + at.head * distances;
    const int64_t last = distances - 1;
    if (distance - (W - 1) >= last) return splat(row[last]);
    alignas(64) float found[W];
    if (distance - (W - 1) >= 0 && distance <= last) {
      const float* from = row + distance - (W - 1);
      for (int i = 0; i < W; i++) found[i] = from[W - 1 - i];
    } else {
      for (int i = 0; i < W; i++) {
        int64_t d = distance - i;
        found[i] = row[d < 0 ? 0 : d > last ? last : d];
      }
    }
    return load(found);
  }
};

// K, V: Elements. BLOCK: tokens of a KV block. Keys are scored in strips of 16 whatever it is: a strip is a part of a
// block or, where blocks are smaller, made of two pieces, so that bits do not depend on it.
template <class K, class V, int D, int E, int BLOCK>
class Partition {
 public:
  using KT = typename K::type;
  using VT = typename V::type;
  static constexpr int EV = (E + W - 1) / W, EP = EV * W;
  static constexpr int TOKENS = BLOCK;

  // For the n <= SUB_ROWS rows: the sums of weighted values acc [n, EP], the largest exponents m and the sums of the
  // weights l over the p-th partition. q: [n, D] rows.
  template <class Mask>
  static void run(const Cache& cache, const Scores& scores, const Mask& mask, int64_t request, int g, const Row* rows,
                  int n, const float* q, int64_t p, float* acc, float* m, float* l) {
    int64_t key = p * PARTITION;
    Keys seen[SUB_ROWS], any{}, edges{};
    for (int j = 0; j < n; j++) {
      bool same = j > 0 && rows[j].position == rows[j - 1].position;
      seen[j] = same ? seen[j - 1] : visible(mask, rows[j], key);
      any.add(seen[j]);
      edges.add(seen[j].edges());
      clear(acc + j * EP, m[j], l[j]);
    }
    if (!any.any()) return;
    int begin = any.next(0), end = any.end();
    Pieces at{cache, g, (end + W - 1) / W, {}, {}, {}};
    locate(at, cache.table + request * cache.stride + key / BLOCK, begin / PIECE, (end + PIECE - 1) / PIECE);
    alignas(64) float s[SUB_ROWS * PARTITION];
    float bias[SUB_ROWS];
    score(n, q, at, begin / W, (end + W - 1) / W, s);
    for (int j = 0; j < n; j++)
      bias[j] = weigh(at, scores, rows[j], key, seen[j], q + j * D, s + j * PARTITION, m[j], l[j]);
    for (int low = edges.next(0), high; low < end; low = high) {
      high = edges.next(low + 1);
      for (int j = 0, height; j < n; j += height) {  // keys low..high-1 are the same to each row
        bool sees = seen[j].holds(low);
        for (height = 1; j + height < n && seen[j + height].holds(low) == sees;) height++;
        if (sees) accumulate(height, s + j * PARTITION, at, low, high, acc + j * EP);
      }
    }
    if constexpr (VALUE_MINIMA)
      for (int j = 0; j < n; j++)
        for (int e = 0; e < EP; e += W) store(acc + j * EP + e, load(acc + j * EP + e) + splat(bias[j]));
  }

  static void clear(float* acc, float& m, float& l) {
    for (int e = 0; e < EP; e += W) store(acc + e, splat(0.0f));
    m = -__builtin_inff();
    l = 0;
  }

 private:
  static constexpr int PIECE = BLOCK < W ? BLOCK : W;  // keys of a strip that lie in one block
  static constexpr int PIECES = W / PIECE;             // of a strip
  static_assert((PIECES == 1 || PIECES == 2) && BLOCK % PIECE == 0 && PARTITION % BLOCK == 0);
  static_assert(PIECES == 1 || !(kv::PACKED<KT> || kv::PACKED<VT>), "a strip of packed codes lies in one block");
  static_assert(!V::PER_CHANNEL);
  static constexpr bool KEY_MINIMA = K::PER_TOKEN && kv::SHIFTED<KT>, VALUE_MINIMA = kv::SHIFTED<VT>;
  static constexpr int LINE = 64;  // bytes that are fetched together
  static constexpr int SHARING = BLOCK <= W ? 1 : kv::BITS<KT> < 32 ? LINE * 8 / W / kv::BITS<KT> : 1;  // strips in it
  static constexpr int64_t KEY_STEP = kv::bytes<KT>(BLOCK);                      // from one d to the next
  static constexpr int64_t VALUE_STEP = kv::bytes<VT>(kv::PACKED<VT> ? EP : E);  // from one token to the next

  // Where the pieces of a partition lie: their keys, their values, their blocks.
  struct Pieces {
    const Cache& cache;
    int g, end;  // end: one more than the last strip
    const char *k[STRIPS * PIECES], *v[STRIPS * PIECES], *block[STRIPS * PIECES];

    // What each key of strip i has of an array [G, BLOCK], `offset` bytes into each block.
    F per_token(int64_t offset, int i) const {
      auto piece = [&](int p) { return (const f16*)(block[p] + offset) + g * BLOCK + p * PIECE % BLOCK; };
      if constexpr (PIECES == 2) return load_halves(piece(2 * i), piece(2 * i + 1));
      else return load(piece(i));
    }
  };

  // The keys from `key` on that a row sees.
  template <class Mask>
  static Keys visible(const Mask& mask, const Row& at, int64_t key) {
    int64_t low = mask.low(at.position), high = mask.high(at.position);
    low = (low > at.first ? low : at.first) - key;
    high = (high < at.last ? high : at.last) - key;
    auto ones = [](int64_t n) { return n <= 0 ? 0 : n >= 64 ? ~uint64_t(0) : (uint64_t(1) << n) - 1; };
    Keys keys;
    for (int i = 0; i < PARTITION / 64; i++) keys.word[i] = ones(high - i * 64) & ~ones(low - i * 64);
    if constexpr (Mask::GENERAL)
      for (int j = keys.next(0); j < PARTITION; j = keys.next(j + 1))
        if (!mask.sees(at.position, key + j)) keys.word[j / 64] &= ~(uint64_t(1) << j % 64);
    return keys;
  }

  // Where the pieces p0..p1-1 lie. The table says nothing of other pieces: where one of them makes up a strip, the
  // strip's other piece stands in, as it can be read and its scores there are not selected.
  static void locate(Pieces& at, const int32_t* table, int p0, int p1) {
    const Cache& cache = at.cache;
    for (int p = p0; p < p1; p++) {
      const char* block = cache.data + table[p * PIECE / BLOCK] * cache.block_bytes;
      int token = p * PIECE % BLOCK;
      at.block[p] = block;
      at.k[p] = block + cache.key.codes + at.g * D * KEY_STEP + kv::bytes<KT>(token);
      at.v[p] = block + cache.value.codes + (int64_t(at.g) * BLOCK + token) * VALUE_STEP;
    }
    for (int d = 0; d < D; d++) fetch_key(at.k[p0], d);
    fetch_scales(at, p0, p1);
    auto stand_in = [&](int p, int by) { at.k[p] = at.k[by], at.v[p] = at.v[by], at.block[p] = at.block[by]; };
    if constexpr (PIECES == 2) {
      if (p0 % 2) stand_in(p0 - 1, p0);
      if (p1 % 2) stand_in(p1, p1 - 1);
    }
  }

  // The scales and minima of the pieces p0..p1-1, into the cache.
  static void fetch_scales(const Pieces& at, int p0, int p1) {
    auto all = [&](int64_t offset, int count) {
      for (int p = p0; p < p1; p += BLOCK / PIECE)
        for (int i = 0; i < count * 2; i += LINE) __builtin_prefetch(at.block[p] + offset + at.g * count * 2 + i);
    };
    const Place &key = at.cache.key, &value = at.cache.value;
    if constexpr (kv::SCALED<KT>) all(key.scales, K::PER_CHANNEL ? D : BLOCK);
    if constexpr (kv::SHIFTED<KT>) all(key.minima, K::PER_CHANNEL ? D : BLOCK);
    if constexpr (kv::SCALED<VT>) all(value.scales, BLOCK);
    if constexpr (VALUE_MINIMA) all(value.minima, BLOCK);
  }

  template <int N>
  struct Constant { static constexpr int value = N; };

  // s[row][key] = bias[row] + sum over d of q[row][d] k[d][key], for strips s0..s1-1; fetches those keys' values
  // meanwhile.
  template <int R>
  static __attribute__((noinline)) void score_rows(const float* q, const float* bias, const Pieces& pieces, int s0,
                                                   int s1, float* s) {
    auto strips = [=, &pieces](int at, auto count) {
      constexpr int N = decltype(count)::value;
      const char *k[N][PIECES], *v[N][PIECES], *next[N];  // next: keys to fetch meanwhile
      for (int i = 0; i < N; i++)
        for (int j = 0; j < PIECES; j++)
          k[i][j] = pieces.k[(at + i) * PIECES + j], v[i][j] = pieces.v[(at + i) * PIECES + j];
      for (int i = 0; i < N; i++) next[i] = pieces.k[(at + i + N < pieces.end ? at + i + N : pieces.end - 1) * PIECES];
      F acc[R][N];
      for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) acc[r][i] = splat(0.0f);
      _Pragma("GCC unroll 4") for (int d = 0; d < D; d++) {
        _Pragma("GCC unroll 4") for (int i = 0; i < N; i++) {
          F x = strip(k[i], d);
          fetch(v[i], d);
          if (i % SHARING == 0) fetch_key(next[i], d);
          const float* factors = again(q);
          _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) acc[r][i] = fma(splat(factors[r * D + d]), x, acc[r][i]);
        }
      }
      _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int i = 0; i < N; i++) {
          if constexpr (K::PER_CHANNEL) acc[r][i] = acc[r][i] + splat(bias[r]);
          store(s + r * PARTITION + (at + i) * W, acc[r][i]);
        }
    };
    int at = s0;
    constexpr int N = together(R);
    if constexpr (N == 4) for (; at + 4 <= s1; at += 4) strips(at, Constant<4>{});
    if constexpr (N >= 2) for (; at + 2 <= s1; at += 2) strips(at, Constant<2>{});
    for (; at < s1; at++) strips(at, Constant<1>{});
  }

  // The same pointer, to be read from again: kept in registers, what it points at would leave too few for the sums.
  static INLINE const float* again(const float* p) {
    __asm__ volatile("" : "+r"(p));
    return p;
  }

  // Element d of a strip's keys.
  static INLINE F strip(const char* const* k, int d) {
    if constexpr (PIECES == 2) return kv::load_strip((const KT*)(k[0] + d * KEY_STEP), (const KT*)(k[1] + d * KEY_STEP));
    else return kv::load_strip((const KT*)(k[0] + d * KEY_STEP));
  }

  // The d-th of D parts of a strip's values, into the cache.
  static INLINE void fetch(const char* const* v, int d) {
    constexpr int PART = int(W * VALUE_STEP) / D, OF_PIECE = (D + PIECES - 1) / PIECES;
    constexpr int EVERY = PART >= LINE || PART == 0 ? 1 : LINE / PART;
    if (d % EVERY != 0) return;
    int piece = PIECES == 2 && d >= OF_PIECE;
    const char* from = v[piece] + (d - piece * OF_PIECE) * PART;
    for (int i = 0; i < (PART > LINE ? PART : LINE); i += LINE) __builtin_prefetch(from + i);
  }

  // Element d of a strip's keys, into the cache, where it begins a line. The CPU sees streams of floats ahead by itself.
  static INLINE void fetch_key(const char* k, int d) {
    constexpr int EVERY = KEY_STEP >= LINE ? 1 : LINE / KEY_STEP;
    if (kv::SCALED<KT> && d % EVERY == 0) __builtin_prefetch(k + d * KEY_STEP);
  }

  template <int R>
  static void score_all(const float* q, const Pieces& at, int s0, int s1, float* s) {
    if constexpr (K::PER_CHANNEL) return score_blocks<R>(q, at, s0, s1, s);
    else return score_rows<R>(q, nullptr, at, s0, s1, s);
  }

  // The same where each block has scales and minima of its own, which become parts of the queries.
  template <int R>
  static void score_blocks(const float* q, const Pieces& at, int s0, int s1, float* s) {
    constexpr int OF_BLOCK = BLOCK / W;  // strips
    for (int first = s0, last; first < s1; first = last) {
      last = (first / OF_BLOCK + 1) * OF_BLOCK;
      alignas(64) float scaled[R * D];
      float bias[R];
      fold<R>(q, at, first, scaled, bias);
      score_rows<R>(scaled, bias, at, first, last < s1 ? last : s1, s);
    }
  }

  // Queries times the scales of strip i's block, and the sums of their products with its minima.
  template <int R>
  static void fold(const float* q, const Pieces& at, int i, float* scaled, float* bias) {
    const f16* scales = (const f16*)(at.block[i] + at.cache.key.scales) + at.g * D;
    const f16* minima = (const f16*)(at.block[i] + at.cache.key.minima) + at.g * D;
    F sum[R];
    for (int r = 0; r < R; r++) sum[r] = splat(0.0f);
    for (int d = 0; d < D; d += W) {
      F scale = load_n(scales + d, D - d), minimum = load_n(minima + d, D - d);
      _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {
        F x = load_n(q + r * D + d, D - d);
        store_n(scaled + r * D + d, x * scale, D - d);
        sum[r] = fma(x, minimum, sum[r]);
      }
    }
    for (int r = 0; r < R; r++) bias[r] = reduce_sum(sum[r]);
  }

  static void score(int n, const float* q, const Pieces& at, int s0, int s1, float* s) {
    switch (n) {
      case 1: return score_all<1>(q, at, s0, s1, s);
      case 2: return score_all<2>(q, at, s0, s1, s);
      case 3: return score_all<3>(q, at, s0, s1, s);
      case 4: if constexpr (SUB_ROWS >= 4) return score_all<4>(q, at, s0, s1, s); break;
      case 5: if constexpr (SUB_ROWS >= 5) return score_all<5>(q, at, s0, s1, s); break;
      case 6: if constexpr (SUB_ROWS >= 6) return score_all<6>(q, at, s0, s1, s); break;
    }
  }

  static float sum_of(const float* q) {
    F sum = splat(0.0f);
    for (int d = 0; d < D; d += W) sum = sum + load_n(q + d, D - d);
    return reduce_sum(sum);
  }

  // s = 2^(s - m) times the scales of the values, for the keys that the row sees, m the largest exponent, l the sum of
  // the powers; anything for other keys of the strips s0..s1-1, which hold all of them. Returns the sum of the powers
  // times the minima of the values.
  static float weigh(const Pieces& at, const Scores& scores, const Row& row, int64_t key, const Keys& seen,
                     const float* q, float* s, float& m, float& l) {
    if (!seen.any()) return 0;
    F minus = splat(-__builtin_inff()), top = minus, sum = splat(0.0f), low = splat(0.0f);
    const bool plain = scores.plain();
    F shift = splat(KEY_MINIMA ? sum_of(q) : 0);
    const Cache& cache = at.cache;
    int s0 = seen.next(0) / W, s1 = (seen.end() + W - 1) / W;
    for (int i = s0; i < s1; i++) {
      uint32_t bits = seen.strip(i);
      F x = load(s + i * W);
      if constexpr (K::PER_TOKEN) x = x * (at.per_token(cache.key.scales, i) * splat(kv::UNIT<KT>));
      if constexpr (KEY_MINIMA) x = fma(shift, at.per_token(cache.key.minima, i), x);
      if (!plain) x = scores.bend(row, key + i * W, x);
      if (bits != 0xffff) x = select_bits(bits, x, minus);
      if (K::PER_TOKEN || !plain || bits != 0xffff) store(s + i * W, x);
      top = larger(x, top);
    }
    m = reduce_max(top);
    F largest = splat(m);
    for (int i = s0; i < s1; i++) {
      F x = exp2(load(s + i * W) - largest);
      sum = sum + x;
      if constexpr (VALUE_MINIMA) {
        F minima = at.per_token(cache.value.minima, i);
        uint32_t bits = seen.strip(i);
        low = fma(x, bits == 0xffff ? minima : select_bits(bits, minima, splat(0.0f)), low);
      }
      if constexpr (V::PER_TOKEN) x = x * (at.per_token(cache.value.scales, i) * splat(kv::UNIT<VT>));
      store(s + i * W, x);
    }
    l = reduce_sum(sum);
    return VALUE_MINIMA ? reduce_sum(low) : 0;
  }

  // acc[row][e] += sum over keys low..high-1, in order, of s[row][key] v[key][e].
  template <int R>
  static __attribute__((noinline)) void accumulate_rows(const float* s, const Pieces& at, int low, int high, float* acc) {
    auto columns = [=, &at](int e0, auto count, auto tail) {
      constexpr int N = decltype(count)::value, TAIL = decltype(tail)::value;
      F sum[R][N];
      _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int c = 0; c < N; c++) sum[r][c] = load(acc + r * EP + e0 + c * W);
      int key = low;
      do {
        int end = (key / PIECE + 1) * PIECE < high ? (key / PIECE + 1) * PIECE : high;
        const char* from = at.v[key / PIECE] + key % PIECE * VALUE_STEP + kv::bytes<VT>(e0);
        for (; key < end; key++, from += VALUE_STEP)
          _Pragma("GCC unroll 4") for (int c = 0; c < N; c++) {
            F x = elements<TAIL>(from + kv::bytes<VT>(c * W));
            const float* weights = again(s);
            _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
              sum[r][c] = fma(splat(weights[r * PARTITION + key]), x, sum[r][c]);
          }
      } while (key < high);
      _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int c = 0; c < N; c++) store(acc + r * EP + e0 + c * W, sum[r][c]);
    };
    constexpr int LAST = kv::PACKED<VT> ? 0 : E % W, FULL = LAST ? E / W : EV, N = together(R);
    int e = 0;
    if constexpr (N == 4) for (; e + 4 <= FULL; e += 4) columns(e * W, Constant<4>{}, Constant<0>{});
    if constexpr (N >= 2) for (; e + 2 <= FULL; e += 2) columns(e * W, Constant<2>{}, Constant<0>{});
    for (; e < FULL; e++) columns(e * W, Constant<1>{}, Constant<0>{});
    if constexpr (LAST != 0) columns(FULL * W, Constant<1>{}, Constant<LAST>{});
  }

  // 16 elements of a value, or the first TAIL of them.
  template <int TAIL>
  static INLINE F elements(const char* from) {
    if constexpr (TAIL != 0) return load_n((const VT*)from, TAIL);
    else return kv::load_strip((const VT*)from);
  }

  static void accumulate(int n, const float* s, const Pieces& at, int low, int high, float* acc) {
    switch (n) {
      case 1: return accumulate_rows<1>(s, at, low, high, acc);
      case 2: return accumulate_rows<2>(s, at, low, high, acc);
      case 3: return accumulate_rows<3>(s, at, low, high, acc);
      case 4: if constexpr (SUB_ROWS >= 4) return accumulate_rows<4>(s, at, low, high, acc); break;
      case 5: if constexpr (SUB_ROWS >= 5) return accumulate_rows<5>(s, at, low, high, acc); break;
      case 6: if constexpr (SUB_ROWS >= 6) return accumulate_rows<6>(s, at, low, high, acc); break;
    }
  }
};

}  // namespace octavo
