// Paged attention with an online softmax (arXiv 2205.14135), the same arithmetic for one query row and for many.
//
// A row is one (token, head). Keys are visited in tiles of 64 at absolute positions, inside partitions of 256 whose
// results are combined in order. Whether a row takes part in a tile, and which of the tile's keys it sums over, depends
// on (query position, key position, mask) alone: rows that share a tile only share its loads. So a row's bits depend on
// its own request's keys and nothing else, and slots that hold no token yet are never used in arithmetic that counts.
#pragma once
#include "pool.h"
#include "vmath.h"

namespace octavo {

constexpr int BLOCK = 16;             // tokens of a KV block
constexpr int KEY_TILE = 64;          // keys per softmax step
constexpr int TILE_BLOCKS = KEY_TILE / BLOCK;
constexpr int PARTITION = 256;        // keys per partition
constexpr int SUB_ROWS = LANES == 4 ? 3 : 6;  // rows that share registers
constexpr int SUBS = 8;               // groups of SUB_ROWS that share a key tile while it is in cache
constexpr int PARTIAL_SLOTS = 64;     // (token, partition) pairs that may be computed apart

// One layer's keys and values in a KV group. K lies as [G, D, BLOCK] in a block, V as [G, BLOCK, E].
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

template <class Y, class KT, class VT, int D, int E, class Mask>
class Attention {
 public:
  static constexpr int EV = (E + W - 1) / W, EP = EV * W;
  static constexpr int STATE = EP + 2;  // accumulators, maximum, sum

  Attention(const AttentionArgs<Y>& args, const Mask& mask) : a_(args), mask_(mask), group_(args.heads / args.kv_heads) {}

  __attribute__((noinline)) void run(Thread& th) const {
    int64_t tiles = 0, split = 0, slots = 0;
    for (int64_t r = 0; r < a_.requests; r++) {
      tiles += num_tiles(r);
      split += num_tiles(r) * num_partitions(r);
      slots += num_tokens(r) * num_partitions(r);
    }
    bool apart = split > tiles && slots <= PARTIAL_SLOTS && tiles * a_.kv_heads < 8 * th.count;
    if (!apart) {
      th.share(tiles * a_.kv_heads, [&](int64_t i) { whole(i / a_.kv_heads, int(i % a_.kv_heads)); });
      return;
    }
    th.share(split * a_.kv_heads, [&](int64_t i) { part(i / a_.kv_heads, int(i % a_.kv_heads)); });
    th.sync();
    combine(th);
  }

 private:
  static constexpr int MOST = SUB_ROWS * SUBS;

  struct Tile {
    int64_t request, first;  // first row
    int rows;
  };
  struct Row { int64_t token, head, position; };  // token: in the step
  // Running softmax of up to MOST rows.
  struct State {
    alignas(64) float acc[MOST][EP];
    float m[MOST];
    F l[MOST];
  };

  int64_t num_tokens(int64_t r) const { return a_.starts[r + 1] - a_.starts[r]; }
  int64_t num_tiles(int64_t r) const { return (num_tokens(r) * group_ + MOST - 1) / MOST; }
  int64_t num_partitions(int64_t r) const { return (int64_t(a_.lens[r]) + PARTITION - 1) / PARTITION; }

  Row row(int64_t r, int64_t index, int g) const {
    int64_t t = index / group_;
    return {a_.starts[r] + t, g * group_ + index % group_, a_.lens[r] - num_tokens(r) + t};
  }

  // The last tiles of a request see the most keys: they come first.
  Tile tile(int64_t r, int64_t i) const {
    int64_t rows = num_tokens(r) * group_, first = (num_tiles(r) - 1 - i) * MOST;
    return {r, first, int(rows - first < MOST ? rows - first : MOST)};
  }

  void whole(int64_t i, int g) const {
    int64_t r = 0;
    for (; i >= num_tiles(r); r++) i -= num_tiles(r);
    Tile t = tile(r, i);
    alignas(64) float q[MOST * D];
    alignas(64) float total[MOST * STATE];
    pack_queries(t, g, q);
    for (int j = 0; j < t.rows; j++) clear(total + j * STATE);
    State state;
    for (int64_t p = 0; p < num_partitions(r); p++) {
      partition(t, g, q, p, state);
      for (int j = 0; j < t.rows; j++) {
        float one[STATE];
        write(state, j, one);
        merge(total + j * STATE, one);
      }
    }
    for (int j = 0; j < t.rows; j++) finish(row(r, t.first + j, g), total + j * STATE);
  }

  void part(int64_t i, int g) const {
    int64_t r = 0, base = 0;
    for (; i >= num_tiles(r) * num_partitions(r); r++) {
      i -= num_tiles(r) * num_partitions(r);
      base += num_tokens(r) * num_partitions(r);
    }
    int64_t parts = num_partitions(r), p = i % parts;
    Tile t = tile(r, i / parts);
    alignas(64) float q[MOST * D];
    pack_queries(t, g, q);
    State state;
    partition(t, g, q, p, state);
    for (int j = 0; j < t.rows; j++) {
      Row at = row(r, t.first + j, g);
      int64_t slot = base + (at.token - a_.starts[r]) * parts + p;
      write(state, j, a_.partials + (slot * a_.heads + at.head) * STATE);
    }
  }

  void combine(Thread& th) const {
    int64_t base = 0;
    for (int64_t r = 0; r < a_.requests; r++) {
      int64_t parts = num_partitions(r), rows = num_tokens(r) * a_.heads;
      for (int64_t i = th.first(rows); i < th.last(rows); i++) {
        int64_t t = i / a_.heads, head = i % a_.heads;
        alignas(64) float total[STATE];
        clear(total);
        for (int64_t p = 0; p < parts; p++)
          merge(total, a_.partials + ((base + t * parts + p) * a_.heads + head) * STATE);
        finish({a_.starts[r] + t, head, 0}, total);
      }
      base += num_tokens(r) * parts;
    }
  }

  // q of each group of SUB_ROWS rows as [D][rows of the group].
  void pack_queries(const Tile& t, int g, float* out) const {
    for (int first = 0; first < t.rows; first += SUB_ROWS) {
      int n = t.rows - first < SUB_ROWS ? t.rows - first : SUB_ROWS;
      for (int j = 0; j < n; j++) {
        Row at = row(t.request, t.first + first + j, g);
        const float* q = a_.q + at.token * a_.q_ld + at.head * D;
        for (int d = 0; d < D; d++) out[first * D + d * n + j] = q[d];
      }
    }
  }

  // The rows' softmax over one partition's keys.
  void partition(const Tile& t, int g, const float* q, int64_t p, State& state) const {
    for (int j = 0; j < t.rows; j++) {
      memset(state.acc[j], 0, sizeof state.acc[j]);
      state.m[j] = -__builtin_inff();
      state.l[j] = splat(0.0f);
    }
    int64_t len = a_.lens[t.request], end = (p + 1) * PARTITION < len ? (p + 1) * PARTITION : len;
    for (int64_t key = p * PARTITION; key < end; key += KEY_TILE)
      for (int first = 0; first < t.rows; first += SUB_ROWS) {
        int n = t.rows - first < SUB_ROWS ? t.rows - first : SUB_ROWS;
        step(t, g, q + first * D, first, n, key, state);
      }
  }

  // Bit j: the query at `position` sees key + j, and the cache holds it.
  uint64_t visible(int64_t position, int64_t key, int64_t len) const {
    int64_t low = mask_.low(position) - key, high = mask_.high(position) - key;
    if (low < 0) low = 0;
    if (high > len - key) high = len - key;
    if (high > KEY_TILE) high = KEY_TILE;
    if (low >= high) return 0;
    uint64_t bits = (~uint64_t(0) >> (64 - (high - low))) << low;
    if constexpr (Mask::GENERAL)
      for (int64_t j = low; j < high; j++)
        if (!mask_.sees(position, key + j)) bits &= ~(uint64_t(1) << j);
    return bits;
  }

  // One tile of 64 keys for n rows.
  void step(const Tile& t, int g, const float* q, int first, int n, int64_t key, State& state) const {
    int64_t len = a_.lens[t.request];
    uint64_t bits[SUB_ROWS], any = 0, all = ~uint64_t(0);
    Row rows[SUB_ROWS];
    for (int j = 0; j < n; j++) {
      rows[j] = row(t.request, t.first + first + j, g);
      bool same = j > 0 && rows[j].position == rows[j - 1].position;
      bits[j] = same ? bits[j - 1] : visible(rows[j].position, key, len);
      any |= bits[j];
      all &= bits[j];
    }
    if (!any) return;
    const KT* k[TILE_BLOCKS];
    const VT* v[TILE_BLOCKS];
    locate(t.request, g, key, any, k, v);
    alignas(64) float s[SUB_ROWS * KEY_TILE];
    score(n, q, k, s);
    alignas(64) float before[W] = {}, after[W] = {}, decay[W];
    for (int j = 0; j < n; j++) {
      before[j] = after[j] = 0;
      if (!bits[j]) continue;
      float top = finish_scores(rows[j], key, bits[j], s + j * KEY_TILE);
      before[j] = state.m[first + j];
      after[j] = top > before[j] ? top : before[j];
      state.m[first + j] = after[j];
    }
    store(decay, exp(load(before) - load(after)));
    for (int j = 0; j < n; j++)
      if (bits[j]) state.l[first + j] = fma(state.l[first + j], splat(decay[j]), weigh(s + j * KEY_TILE, after[j]));
    if (all == ~uint64_t(0)) return accumulate(n, s, v, 0, KEY_TILE, decay, state.acc[first]);
    for (int j = 0; j < n; j++)
      if (bits[j])
        accumulate(1, s + j * KEY_TILE, v, __builtin_ctzll(bits[j]), 64 - __builtin_clzll(bits[j]), decay + j,
                   state.acc[first + j]);
  }

  // The tile's blocks; those that no row sees are replaced by one that is seen, so that nothing else is read.
  void locate(int64_t r, int g, int64_t key, uint64_t any, const KT** k, const VT** v) const {
    const int32_t* table = a_.cache.table + r * a_.cache.stride + key / BLOCK;
    int seen = __builtin_ctzll(any) / BLOCK;
    for (int b = 0; b < TILE_BLOCKS; b++) {
      int use = (any >> (b * BLOCK)) & 0xffff ? b : seen;
      const char* block = a_.cache.data + table[use] * a_.cache.block_bytes;
      k[b] = (const KT*)(block + a_.cache.key_offset) + int64_t(g) * D * BLOCK;
      v[b] = (const VT*)(block + a_.cache.value_offset) + int64_t(g) * BLOCK * E;
    }
  }

  // s[row][key] = sum over d of q[d][row] k[d][key].
  template <int R>
  static __attribute__((noinline)) void score_rows(const float* q, const KT* const* k, float* s) {
    constexpr int B = LANES == 16 ? TILE_BLOCKS : 1;  // blocks at once
    for (int b0 = 0; b0 < TILE_BLOCKS; b0 += B) {
      F acc[R][B];
      for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) acc[r][b] = splat(0.0f);
      for (int d = 0; d < D; d++) {
        F kv[B];
        _Pragma("GCC unroll 4") for (int b = 0; b < B; b++) kv[b] = load(k[b0 + b] + d * BLOCK);
        _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {
          F x = splat(q[d * R + r]);
          _Pragma("GCC unroll 4") for (int b = 0; b < B; b++) acc[r][b] = fma(x, kv[b], acc[r][b]);
        }
      }
      _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int b = 0; b < B; b++) store(s + r * KEY_TILE + (b0 + b) * W, acc[r][b]);
    }
  }

  static void score(int n, const float* q, const KT* const* k, float* s) {
    switch (n) {
      case 1: return score_rows<1>(q, k, s);
      case 2: return score_rows<2>(q, k, s);
      case 3: return score_rows<3>(q, k, s);
      case 4: if constexpr (SUB_ROWS >= 4) return score_rows<4>(q, k, s); break;
      case 5: if constexpr (SUB_ROWS >= 5) return score_rows<5>(q, k, s); break;
      case 6: if constexpr (SUB_ROWS >= 6) return score_rows<6>(q, k, s); break;
    }
  }

  // Scale, softcap, ALiBi, then -inf where the row does not see. Returns the largest.
  float finish_scores(const Row& at, int64_t key, uint64_t bits, float* s) const {
    static const float IOTA[W] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    F minus = splat(-__builtin_inff()), top = minus;
    for (int b = 0; b < TILE_BLOCKS; b++) {
      F x = load(s + b * W) * splat(a_.scale);
      if (a_.softcap != 0) x = tanh(x / splat(a_.softcap)) * splat(a_.softcap);
      if (a_.slopes) {
        F distance = load(IOTA) + splat(float(key + b * W - at.position));
        x = fma(splat(a_.slopes[at.head]), distance, x);
      }
      x = select_bits(uint32_t(bits >> (b * W)) & 0xffff, x, minus);
      store(s + b * W, x);
      top = larger(x, top);
    }
    return reduce_max(top);
  }

  // s = exp(s - top); returns the lanes' sums.
  static F weigh(float* s, float top) {
    F p[TILE_BLOCKS];
    EACH(TILE_BLOCKS) {
      p[i] = exp(load(s + i * W) - splat(top));
      store(s + i * W, p[i]);
    }
    return (p[0] + p[1]) + (p[2] + p[3]);
  }

  // acc[row][e] = acc[row][e] * decay[row] + sum over keys low..high-1, in order, of s[row][key] v[key][e].
  template <int R>
  static __attribute__((noinline)) void accumulate_rows(const float* s, const VT* const* v, int low, int high,
                                                        const float* decay, float* acc) {
    constexpr int C = LANES == 16 ? 4 : 1;  // vectors of the head at once
    constexpr int FULL = E / W, LAST = E % W;
    auto columns = [&](int e0, auto count, auto tail) {
      constexpr int N = decltype(count)::value, TAIL = decltype(tail)::value;
      F sum[R][N];
      _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int c = 0; c < N; c++)
          sum[r][c] = load(acc + r * EP + e0 + c * W) * splat(decay[r]);
      for (int b = low / BLOCK; b * BLOCK < high; b++) {
        int j0 = low > b * BLOCK ? low - b * BLOCK : 0, j1 = high - b * BLOCK < BLOCK ? high - b * BLOCK : BLOCK;
        for (int j = j0; j < j1; j++) {
          F x[N];
          _Pragma("GCC unroll 4") for (int c = 0; c < N; c++)
            x[c] = TAIL ? load_n(v[b] + j * E + e0 + c * W, TAIL) : load(v[b] + j * E + e0 + c * W);
          _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {
            F p = splat(s[r * KEY_TILE + b * BLOCK + j]);
            _Pragma("GCC unroll 4") for (int c = 0; c < N; c++) sum[r][c] = fma(p, x[c], sum[r][c]);
          }
        }
      }
      _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int c = 0; c < N; c++) store(acc + r * EP + e0 + c * W, sum[r][c]);
    };
    int e = 0;
    for (; e + C <= FULL; e += C) columns(e * W, Constant<C>{}, Constant<0>{});
    for (; e < FULL; e++) columns(e * W, Constant<1>{}, Constant<0>{});
    if constexpr (LAST != 0) columns(FULL * W, Constant<1>{}, Constant<LAST>{});
  }
  template <int N>
  struct Constant { static constexpr int value = N; };

  static void accumulate(int n, const float* s, const VT* const* v, int low, int high, const float* decay, float* acc) {
    switch (n) {
      case 1: return accumulate_rows<1>(s, v, low, high, decay, acc);
      case 2: return accumulate_rows<2>(s, v, low, high, decay, acc);
      case 3: return accumulate_rows<3>(s, v, low, high, decay, acc);
      case 4: if constexpr (SUB_ROWS >= 4) return accumulate_rows<4>(s, v, low, high, decay, acc); break;
      case 5: if constexpr (SUB_ROWS >= 5) return accumulate_rows<5>(s, v, low, high, decay, acc); break;
      case 6: if constexpr (SUB_ROWS >= 6) return accumulate_rows<6>(s, v, low, high, decay, acc); break;
    }
  }

  static void clear(float* total) {
    memset(total, 0, EP * sizeof(float));
    total[EP] = -__builtin_inff();
    total[EP + 1] = 0;
  }

  static void write(const State& state, int j, float* out) {
    memcpy(out, state.acc[j], EP * sizeof(float));
    out[EP] = state.m[j];
    out[EP + 1] = reduce_sum(state.l[j]);
  }

  // total becomes the softmax over its own keys and part's.
  static void merge(float* total, const float* part) {
    if (part[EP] == -__builtin_inff()) return;
    if (total[EP] == -__builtin_inff()) {
      memcpy(total, part, STATE * sizeof(float));
      return;
    }
    float top = total[EP] > part[EP] ? total[EP] : part[EP];
    float a = exp(total[EP] - top), b = exp(part[EP] - top);
    for (int e = 0; e < EP; e += W) store(total + e, fma(load(part + e), splat(b), load(total + e) * splat(a)));
    total[EP] = top;
    total[EP + 1] = total[EP + 1] * a + part[EP + 1] * b;
  }

  void finish(const Row& at, float* total) const {
    float top = total[EP], sum = total[EP + 1], keep = 1;
    if (a_.sinks) {
      float sink = a_.sinks[at.head], higher = top > sink ? top : sink;
      keep = exp(top - higher);
      sum = sum * keep + exp(sink - higher);
    }
    Y* out = a_.out + at.token * a_.out_ld + at.head * E;
    for (int e = 0; e < E; e += W) {
      F x = sum == 0 ? splat(0.0f) : load(total + e) * splat(keep) / splat(sum);
      store_n(out + e, x, E - e);
    }
  }

  const AttentionArgs<Y>& a_;
  const Mask& mask_;
  const int group_;
};

}  // namespace octavo
