// Paged attention with a softmax per partition (arXiv 2205.14135), the same arithmetic for one query row and for many.
//
// A row is one (token, head). Keys are taken in partitions of 256 at absolute positions: a row's scores over the keys of
// a partition that it sees, their largest, powers of two of the differences, and the sum of the values so weighted, key
// after key. Partitions are combined in order. Which keys a row sees depends on (query position, key position, mask)
// alone, and no other key's value enters its sums: rows that are computed together only share loads. So a row's bits
// depend on its own request's keys and nothing else, and slots that hold no token yet are never used in arithmetic
// that counts.
#pragma once
#include "pool.h"
#include "vmath.h"

namespace octavo {

constexpr int PARTITION = 256;        // keys per softmax
constexpr int STRIPS = PARTITION / W; // vectors of keys in it
constexpr int SUB_ROWS = LANES == 4 ? 3 : 6;  // rows that share registers
constexpr int SUBS = 8;               // groups of SUB_ROWS that share a partition while it is in cache
constexpr int PARTIAL_SLOTS = 64;     // (token, partition) pairs that may be computed apart
constexpr float LOG2E = 1.44269504f;

// Vectors of 16 that R rows accumulate in registers at once: a power of two, for each row.
constexpr int together(int rows) {
  int most = (LANES == 16 ? 24 : 12) / (rows * NV);
  return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

// One layer's keys and values in a KV group. K lies as [G, D, block] in a block of tokens, V as [G, block, E].
struct Cache {
  const char* data;
  int64_t block_bytes, key_offset, value_offset;
  const int32_t* table;  // [R, stride]
  int64_t stride;
};

template <class Y>  // float or bf16
struct AttentionArgs {
  const float* q;      // [T, H, D], rows q_ld apart
  int64_t q_ld;
  Y* out;              // [T, H, E], rows out_ld apart
  int64_t out_ld;
  int heads, kv_heads;
  float scale, softcap;               // softcap 0: none
  const float *sinks, *slopes;        // [H] or null
  Cache cache;
  const int32_t *lens, *starts;       // [R], [R+1]
  int64_t requests;
  float* partials;     // PARTIAL_SLOTS * H * (E rounded up to 16, + 2)
};

// A bit for each key of a partition.
struct Keys {
  uint64_t word[PARTITION / 64];

  bool holds(int key) const { return word[key / 64] >> key % 64 & 1; }
  uint32_t strip(int i) const { return uint32_t(word[i / 4] >> i % 4 * W) & 0xffff; }
  bool any() const {
    uint64_t all = 0;
    for (uint64_t w : word) all |= w;
    return all != 0;
  }
  // The first key from `key` on; PARTITION if there is none.
  int next(int key) const {
    for (int i = key / 64; i < PARTITION / 64; i++) {
      uint64_t rest = i == key / 64 ? word[i] & ~uint64_t(0) << key % 64 : word[i];
      if (rest) return i * 64 + __builtin_ctzll(rest);
    }
    return PARTITION;
  }
  // One more than the last key.
  int end() const {
    for (int i = PARTITION / 64; i-- > 0;)
      if (word[i]) return i * 64 + 64 - __builtin_clzll(word[i]);
    return 0;
  }
  // The keys that are here and whose predecessor is not, or the other way round.
  Keys edges() const {
    Keys out;
    for (int i = 0; i < PARTITION / 64; i++) out.word[i] = word[i] ^ (word[i] << 1 | (i ? word[i - 1] >> 63 : 0));
    return out;
  }
  void add(const Keys& other) {
    for (int i = 0; i < PARTITION / 64; i++) word[i] |= other.word[i];
  }
};

// BLOCK: tokens of a KV block. Keys are scored in strips of 16 whatever it is: a strip is a part of a block or, where
// blocks are smaller, made of two pieces, so that bits do not depend on it.
template <class Y, class KT, class VT, int D, int E, int BLOCK, class Mask>
class Attention {
 public:
  static constexpr int EV = (E + W - 1) / W, EP = EV * W;
  static constexpr int STATE = EP + 2;  // accumulators, largest score, sum of the weights

  Attention(const AttentionArgs<Y>& args, const Mask& mask)
      : a_(args), mask_(mask), group_(args.heads / args.kv_heads) {}

  __attribute__((noinline)) void run(Thread& th) const {
    Plan plan = this->plan(th.count);
    Walk walk{};
    th.share(plan.items, [&](int64_t i) {
      while (i >= walk.item + items(plan, walk)) advance(plan, walk);
      compute(plan, walk, i - walk.item);
    });
    if (plan.slots == 0) return;
    th.sync();
    combine(plan, th);
  }

 private:
  static constexpr int MOST = SUB_ROWS * SUBS;
  static constexpr int PIECE = BLOCK < W ? BLOCK : W;  // keys of a strip that lie in one block
  static constexpr int PIECES = W / PIECE;             // of a strip
  static_assert((PIECES == 1 || PIECES == 2) && BLOCK % PIECE == 0 && PARTITION % BLOCK == 0);

  // How a step is cut into items: a tile of rows of one KV head over all its partitions or, apart, over one.
  struct Plan {
    int64_t tile_rows;
    int64_t most_cost;  // rows times partitions of an item that need not be cut
    int64_t items, slots;
  };
  // A request, its first item, and its first slot among the partials.
  struct Walk { int64_t request, item, slot; };
  struct Span { int64_t first, last; };
  struct Tile {
    int64_t request, first;  // first row
    int rows, g;
  };
  struct Row { int64_t token, head, position; };  // token: in the step
  // Sums of weighted values, largest score and sum of weights of N rows.
  template <int N>
  struct State {
    alignas(64) float acc[N][EP];
    float m[N], l[N];
  };

  int64_t num_tokens(int64_t r) const { return a_.starts[r + 1] - a_.starts[r]; }
  int64_t num_rows(int64_t r) const { return num_tokens(r) * group_; }
  int64_t num_tiles(const Plan& plan, int64_t r) const { return (num_rows(r) + plan.tile_rows - 1) / plan.tile_rows; }

  // The partitions that hold all keys seen from the positions first..last.
  Span partitions(int64_t r, int64_t first, int64_t last) const {
    int64_t low = mask_.low(first), high = mask_.high(last), len = a_.lens[r];
    return {low < 0 ? 0 : low / PARTITION, ((high < len ? high : len) + PARTITION - 1) / PARTITION};
  }
  Span partitions(int64_t r) const { return partitions(r, a_.lens[r] - num_tokens(r), a_.lens[r] - 1); }
  int64_t num_partitions(int64_t r) const {
    Span span = partitions(r);
    return span.last - span.first;
  }

  Plan plan(int threads) const {
    constexpr int SHARES = 8;  // items for each thread, at least, where there is enough to do
    int64_t rows = 0, cost = 0;
    for (int64_t r = 0; r < a_.requests; r++) {
      rows += num_rows(r);
      cost += num_rows(r) * num_partitions(r);
    }
    int64_t subs = rows * a_.kv_heads / (SHARES * threads * SUB_ROWS);
    Plan plan{(subs < 1 ? 1 : subs > SUBS ? SUBS : subs) * SUB_ROWS, cost * a_.kv_heads / (SHARES * threads), 0, 0};
    Walk walk{};
    while (walk.request < a_.requests) advance(plan, walk);
    plan.items = walk.item;
    plan.slots = walk.slot;
    return plan;
  }

  bool apart(const Plan& plan, const Walk& at) const {
    int64_t rows = num_rows(at.request), parts = num_partitions(at.request);
    return parts > 1 && (rows < plan.tile_rows ? rows : plan.tile_rows) * parts > plan.most_cost &&
           at.slot + num_tokens(at.request) * parts <= PARTIAL_SLOTS;
  }

  int64_t items(const Plan& plan, const Walk& at) const {
    int64_t tiles = num_tiles(plan, at.request) * a_.kv_heads;
    return apart(plan, at) ? tiles * num_partitions(at.request) : tiles;
  }

  void advance(const Plan& plan, Walk& at) const {
    at.item += items(plan, at);
    if (apart(plan, at)) at.slot += num_tokens(at.request) * num_partitions(at.request);
    at.request++;
  }

  Row row(const Tile& t, int64_t j) const {
    int64_t token = (t.first + j) / group_, start = a_.starts[t.request];
    return {start + token, t.g * group_ + (t.first + j) % group_, a_.lens[t.request] - num_tokens(t.request) + token};
  }

  // A head's tiles follow each other, as they share its keys; the last ones see the most and come first.
  Tile tile(const Plan& plan, int64_t r, int64_t i) const {
    int64_t tiles = num_tiles(plan, r), first = (tiles - 1 - i % tiles) * plan.tile_rows, rows = num_rows(r) - first;
    return {r, first, int(rows < plan.tile_rows ? rows : plan.tile_rows), int(i / tiles)};
  }

  void compute(const Plan& plan, const Walk& at, int64_t i) const {
    if (!apart(plan, at)) return whole(tile(plan, at.request, i));
    Span span = partitions(at.request);
    int64_t parts = span.last - span.first, tiles = num_tiles(plan, at.request) * a_.kv_heads;
    part(tile(plan, at.request, i % tiles), span.first + i / tiles, at.slot + i / tiles, parts);
  }

  void whole(const Tile& t) const {
    alignas(64) float q[MOST * D];
    pack_queries(t, q);
    State<MOST> total;
    for (int j = 0; j < t.rows; j++) clear(total.acc[j], total.m[j], total.l[j]);
    Span span = partitions(t.request, row(t, 0).position, row(t, t.rows - 1).position);
    State<SUB_ROWS> state;
    for (int64_t p = span.first; p < span.last; p++)
      for (int first = 0; first < t.rows; first += SUB_ROWS) {
        int n = t.rows - first < SUB_ROWS ? t.rows - first : SUB_ROWS;
        partition(t, first, n, q + first * D, p, state);
        for (int j = 0; j < n; j++)
          merge(total.acc[first + j], total.m[first + j], total.l[first + j], state.acc[j], state.m[j], state.l[j]);
      }
    for (int j = 0; j < t.rows; j++) finish(row(t, j), total.acc[j], total.m[j], total.l[j]);
  }

  // slot: of the request's first token and this partition; a token has a slot for each of `parts` partitions.
  void part(const Tile& t, int64_t p, int64_t slot, int64_t parts) const {
    alignas(64) float q[MOST * D];
    pack_queries(t, q);
    State<SUB_ROWS> state;
    for (int first = 0; first < t.rows; first += SUB_ROWS) {
      int n = t.rows - first < SUB_ROWS ? t.rows - first : SUB_ROWS;
      partition(t, first, n, q + first * D, p, state);
      for (int j = 0; j < n; j++) {
        Row at = row(t, first + j);
        float* out = a_.partials + ((slot + (at.token - a_.starts[t.request]) * parts) * a_.heads + at.head) * STATE;
        memcpy(out, state.acc[j], EP * sizeof(float));
        out[EP] = state.m[j];
        out[EP + 1] = state.l[j];
      }
    }
  }

  void combine(const Plan& plan, Thread& th) const {
    int64_t base = 0;  // rows of the requests before
    for (Walk at{}; at.request < a_.requests; advance(plan, at)) {
      if (!apart(plan, at)) continue;
      int64_t parts = num_partitions(at.request), start = a_.starts[at.request];
      int64_t rows = num_tokens(at.request) * a_.heads;
      for (int64_t i = (th.id + th.count - base % th.count) % th.count; i < rows; i += th.count) {
        int64_t token = i / a_.heads, head = i % a_.heads;
        State<1> total;
        clear(total.acc[0], total.m[0], total.l[0]);
        for (int64_t p = 0; p < parts; p++) {
          const float* part = a_.partials + ((at.slot + token * parts + p) * a_.heads + head) * STATE;
          merge(total.acc[0], total.m[0], total.l[0], part, part[EP], part[EP + 1]);
        }
        finish({start + token, head, 0}, total.acc[0], total.m[0], total.l[0]);
      }
      base += rows;
    }
  }

  // Rows of D, times what makes their products with keys the exponents of two; before a softcap, its argument.
  void pack_queries(const Tile& t, float* out) const {
    float factor = a_.softcap != 0 ? a_.scale / a_.softcap : a_.scale * LOG2E;
    for (int j = 0; j < t.rows; j++) {
      Row at = row(t, j);
      const float* q = a_.q + at.token * a_.q_ld + at.head * D;
      for (int d = 0; d < D; d++) out[j * D + d] = q[d] * factor;
    }
  }

  // The keys from `key` on that the query at `position` sees and the cache holds.
  Keys visible(int64_t position, int64_t key, int64_t len) const {
    int64_t low = mask_.low(position) - key, high = mask_.high(position) - key;
    if (high > len - key) high = len - key;
    auto ones = [](int64_t n) { return n <= 0 ? 0 : n >= 64 ? ~uint64_t(0) : (uint64_t(1) << n) - 1; };
    Keys keys;
    for (int i = 0; i < PARTITION / 64; i++) keys.word[i] = ones(high - i * 64) & ~ones(low - i * 64);
    if constexpr (Mask::GENERAL)
      for (int j = keys.next(0); j < PARTITION; j = keys.next(j + 1))
        if (!mask_.sees(position, key + j)) keys.word[j / 64] &= ~(uint64_t(1) << j % 64);
    return keys;
  }

  // The softmax of n rows, from `first` on, over one partition's keys.
  void partition(const Tile& t, int first, int n, const float* q, int64_t p, State<SUB_ROWS>& state) const {
    int64_t key = p * PARTITION;
    Keys seen[SUB_ROWS], any{}, edges{};
    Row rows[SUB_ROWS];
    for (int j = 0; j < n; j++) {
      rows[j] = row(t, first + j);
      bool same = j > 0 && rows[j].position == rows[j - 1].position;
      seen[j] = same ? seen[j - 1] : visible(rows[j].position, key, a_.lens[t.request]);
      any.add(seen[j]);
      edges.add(seen[j].edges());
      clear(state.acc[j], state.m[j], state.l[j]);
    }
    if (!any.any()) return;
    const KT* k[STRIPS * PIECES];
    const VT* v[STRIPS * PIECES];
    int begin = any.next(0), end = any.end();
    locate(t, key, begin / PIECE, (end + PIECE - 1) / PIECE, k, v);
    alignas(64) float s[SUB_ROWS * PARTITION];
    score(n, q, k, v, begin / W, (end + W - 1) / W, s);
    for (int j = 0; j < n; j++) weigh(rows[j], key, seen[j], s + j * PARTITION, state.m[j], state.l[j]);
    for (int low = edges.next(0), high; low < end; low = high) {
      high = edges.next(low + 1);
      for (int j = 0, height; j < n; j += height) {  // keys low..high-1 are the same to each row
        bool sees = seen[j].holds(low);
        for (height = 1; j + height < n && seen[j + height].holds(low) == sees;) height++;
        if (sees) accumulate(height, s + j * PARTITION, v, low, high, state.acc[j]);
      }
    }
  }

  // Where the partition's pieces p0..p1-1 lie. The table says nothing of other pieces: where one of them makes up a
  // strip, the strip's other piece stands in, as it can be read and its scores there are not selected.
  void locate(const Tile& t, int64_t key, int p0, int p1, const KT** k, const VT** v) const {
    const int32_t* table = a_.cache.table + t.request * a_.cache.stride + key / BLOCK;
    for (int p = p0; p < p1; p++) {
      const char* block = a_.cache.data + table[p * PIECE / BLOCK] * a_.cache.block_bytes;
      int token = p * PIECE % BLOCK;
      k[p] = (const KT*)(block + a_.cache.key_offset) + int64_t(t.g) * D * BLOCK + token;
      v[p] = (const VT*)(block + a_.cache.value_offset) + int64_t(t.g) * BLOCK * E + token * E;
    }
    if constexpr (PIECES == 2) {
      if (p0 % 2) k[p0 - 1] = k[p0], v[p0 - 1] = v[p0];
      if (p1 % 2) k[p1] = k[p1 - 1], v[p1] = v[p1 - 1];
    }
  }

  template <int N>
  struct Constant { static constexpr int value = N; };

  // s[row][key] = sum over d of q[row][d] k[d][key], for strips s0..s1-1; fetches those keys' values meanwhile.
  template <int R>
  static __attribute__((noinline)) void score_rows(const float* q, const KT* const* k, const VT* const* v, int s0, int s1,
                                                   float* s) {
    auto strips = [=](int at, auto count) {
      constexpr int N = decltype(count)::value;
      F acc[R][N];
      for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) acc[r][i] = splat(0.0f);
      for (int d = 0; d < D; d++) {
        F kv[N];
        _Pragma("GCC unroll 4") for (int i = 0; i < N; i++) {
          kv[i] = strip(k + (at + i) * PIECES, d);
          fetch(v + (at + i) * PIECES, d);
        }
        _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {
          F x = splat(q[r * D + d]);
          _Pragma("GCC unroll 4") for (int i = 0; i < N; i++) acc[r][i] = fma(x, kv[i], acc[r][i]);
        }
      }
      _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int i = 0; i < N; i++) store(s + r * PARTITION + (at + i) * W, acc[r][i]);
    };
    int at = s0;
    constexpr int N = together(R);
    if constexpr (N == 4) for (; at + 4 <= s1; at += 4) strips(at, Constant<4>{});
    if constexpr (N >= 2) for (; at + 2 <= s1; at += 2) strips(at, Constant<2>{});
    for (; at < s1; at++) strips(at, Constant<1>{});
  }

  // Element d of a strip's keys.
  static INLINE F strip(const KT* const* k, int d) {
    if constexpr (PIECES == 2) return load_halves(k[0] + d * BLOCK, k[1] + d * BLOCK);
    else return load(k[0] + d * BLOCK);
  }

  // The d-th of D parts of a strip's values, into the cache.
  static INLINE void fetch(const VT* const* v, int d) {
    constexpr int PART = W * E * int(sizeof(VT)) / D, OF_PIECE = (D + PIECES - 1) / PIECES;
    int piece = PIECES == 2 && d >= OF_PIECE;
    const char* from = (const char*)v[piece] + (d - piece * OF_PIECE) * PART;
    for (int i = 0; i < PART; i += 64) __builtin_prefetch(from + i);
  }

  static void score(int n, const float* q, const KT* const* k, const VT* const* v, int s0, int s1, float* s) {
    switch (n) {
      case 1: return score_rows<1>(q, k, v, s0, s1, s);
      case 2: return score_rows<2>(q, k, v, s0, s1, s);
      case 3: return score_rows<3>(q, k, v, s0, s1, s);
      case 4: if constexpr (SUB_ROWS >= 4) return score_rows<4>(q, k, v, s0, s1, s); break;
      case 5: if constexpr (SUB_ROWS >= 5) return score_rows<5>(q, k, v, s0, s1, s); break;
      case 6: if constexpr (SUB_ROWS >= 6) return score_rows<6>(q, k, v, s0, s1, s); break;
    }
  }

  // s = 2^(s - m) for the keys that the row sees, m the largest of them, l the sum of the powers; 0 for other keys of
  // the strips s0..s1-1, which hold all of them.
  void weigh(const Row& at, int64_t key, const Keys& seen, float* s, float& m, float& l) const {
    if (!seen.any()) return;
    F minus = splat(-__builtin_inff()), top = minus, sum = splat(0.0f);
    bool plain = a_.softcap == 0 && !a_.slopes;
    int s0 = seen.next(0) / W, s1 = (seen.end() + W - 1) / W;
    for (int i = s0; i < s1; i++) {
      uint32_t bits = seen.strip(i);
      F x = load(s + i * W);
      if (!plain) x = bend(at, key + i * W, x);
      if (bits != 0xffff) x = select_bits(bits, x, minus);
      if (!plain || bits != 0xffff) store(s + i * W, x);
      top = larger(x, top);
    }
    m = reduce_max(top);
    F largest = splat(m);
    for (int i = s0; i < s1; i++) {
      F x = exp2(load(s + i * W) - largest);
      store(s + i * W, x);
      sum = sum + x;
    }
    l = reduce_sum(sum);
  }

  // Softcap and ALiBi, of 16 keys from `key` on.
  F bend(const Row& at, int64_t key, F x) const {
    static const float IOTA[W] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (a_.softcap != 0) x = tanh(x) * splat(a_.softcap * LOG2E);
    if (!a_.slopes) return x;
    return fma(splat(a_.slopes[at.head] * LOG2E), load(IOTA) + splat(float(key - at.position)), x);
  }

  // acc[row][e] += sum over keys low..high-1, in order, of s[row][key] v[key][e].
  template <int R>
  static __attribute__((noinline)) void accumulate_rows(const float* s, const VT* const* v, int low, int high, float* acc) {
    auto columns = [=](int e0, auto count, auto tail) {
      constexpr int N = decltype(count)::value, TAIL = decltype(tail)::value;
      F sum[R][N];
      _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int c = 0; c < N; c++) sum[r][c] = load(acc + r * EP + e0 + c * W);
      int key = low;
      do {
        int end = (key / PIECE + 1) * PIECE < high ? (key / PIECE + 1) * PIECE : high;
        const VT* from = v[key / PIECE] + key % PIECE * E + e0;
        for (; key < end; key++, from += E) {
          F x[N];
          _Pragma("GCC unroll 4") for (int c = 0; c < N; c++) x[c] = TAIL ? load_n(from + c * W, TAIL) : load(from + c * W);
          _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {
            F p = splat(s[r * PARTITION + key]);
            _Pragma("GCC unroll 4") for (int c = 0; c < N; c++) sum[r][c] = fma(p, x[c], sum[r][c]);
          }
        }
      } while (key < high);
      _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int c = 0; c < N; c++) store(acc + r * EP + e0 + c * W, sum[r][c]);
    };
    constexpr int FULL = E / W, LAST = E % W, N = together(R);
    int e = 0;
    if constexpr (N == 4) for (; e + 4 <= FULL; e += 4) columns(e * W, Constant<4>{}, Constant<0>{});
    if constexpr (N >= 2) for (; e + 2 <= FULL; e += 2) columns(e * W, Constant<2>{}, Constant<0>{});
    for (; e < FULL; e++) columns(e * W, Constant<1>{}, Constant<0>{});
    if constexpr (LAST != 0) columns(FULL * W, Constant<1>{}, Constant<LAST>{});
  }

  static void accumulate(int n, const float* s, const VT* const* v, int low, int high, float* acc) {
    switch (n) {
      case 1: return accumulate_rows<1>(s, v, low, high, acc);
      case 2: return accumulate_rows<2>(s, v, low, high, acc);
      case 3: return accumulate_rows<3>(s, v, low, high, acc);
      case 4: if constexpr (SUB_ROWS >= 4) return accumulate_rows<4>(s, v, low, high, acc); break;
      case 5: if constexpr (SUB_ROWS >= 5) return accumulate_rows<5>(s, v, low, high, acc); break;
      case 6: if constexpr (SUB_ROWS >= 6) return accumulate_rows<6>(s, v, low, high, acc); break;
    }
  }

  static void clear(float* acc, float& m, float& l) {
    for (int e = 0; e < EP; e += W) store(acc + e, splat(0.0f));
    m = -__builtin_inff();
    l = 0;
  }

  // The first row's state becomes the softmax over its own keys and the second's. Only a row that sees no key has l = 0.
  static void merge(float* acc, float& m, float& l, const float* part_acc, float part_m, float part_l) {
    if (part_l == 0) return;
    float top = m > part_m ? m : part_m;
    alignas(64) float keep[W] = {m, part_m};
    store(keep, exp2(load(keep) - splat(top)));
    F a = splat(keep[0]), b = splat(keep[1]);
    for (int e = 0; e < EP; e += W) store(acc + e, fma(load(part_acc + e), b, load(acc + e) * a));
    m = top;
    l = l * keep[0] + part_l * keep[1];
  }

  void finish(const Row& at, const float* acc, float m, float l) const {
    float keep = 1;
    if (a_.sinks) {
      float sink = a_.sinks[at.head] * LOG2E, top = m > sink ? m : sink;
      keep = exp2(m - top);
      l = l * keep + exp2(sink - top);
    }
    Y* out = a_.out + at.token * a_.out_ld + at.head * E;
    for (int e = 0; e < E; e += W) {
      F x = l == 0 ? splat(0.0f) : load(acc + e) * splat(keep) / splat(l);
      store_n(out + e, x, E - e);
    }
  }

  const AttentionArgs<Y>& a_;
  const Mask& mask_;
  const int group_;
};

}  // namespace octavo
