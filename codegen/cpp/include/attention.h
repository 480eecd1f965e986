// Paged attention with a softmax per partition (arXiv 2205.14135), the same arithmetic for one query row and for many.
//
// A row is one (token, head). Keys are taken in partitions of 256 at absolute positions: a row's scores over the keys of
// a partition that it sees, their largest, powers of two of the differences, and the sum of the values so weighted, key
// after key. Partitions are combined in order. Which keys a row sees depends on (query position, key position, mask)
// alone, and no other key's value enters its sums: rows that are computed together only share loads. So a row's bits
// depend on its own request's keys and nothing else, and slots that hold no token yet are never used in arithmetic
// that counts.
//
// Where a group has a tail, a row reads the block of its own position from there, where it is exact, as a partition of
// its own that is combined last; partitions of the quantised cache end before that block.
#pragma once
#include <type_traits>

#include "partition.h"
#include "pool.h"

namespace octavo {

constexpr int SUBS = 8;               // groups of SUB_ROWS that share a partition while it is in cache
constexpr int PARTIAL_SLOTS = 64;     // (token, partition) pairs that may be computed apart

template <class Y>  // float or bf16
struct AttentionArgs {
  const float* q;      // [T, H, D], rows q_ld apart
  int64_t q_ld;
  Y* out;              // [T, H, E], rows out_ld apart
  int64_t out_ld;
  int heads, kv_heads;
  float scale, softcap;               // softcap 0: none
  const float *sinks, *slopes;        // [H] or null
  const float* table;                 // [H, distances] or null: what is added by distance
  int64_t distances;
  Cache cache, tail;
  const int32_t *lens, *starts;       // [R], [R+1]
  int64_t requests;
  float* partials;     // PARTIAL_SLOTS * H * (E rounded up to 16, + 2)
};

// Main, Tail: Partition of the cache and of the tail; Tail is void where there is none.
template <class Y, class Main, class Tail, int D, int E, class Mask>
class Attention {
 public:
  static constexpr bool TAILED = !std::is_void_v<Tail>;
  static constexpr int EP = Main::EP, BLOCK = Main::TOKENS;
  static constexpr int STATE = EP + 2;  // accumulators, largest score, sum of the weights

  Attention(const AttentionArgs<Y>& args, const Mask& mask)
      : a_(args), mask_(mask), scores_{args.softcap, args.slopes, args.table, args.distances}, group_(args.heads / args.kv_heads) {}

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
  // Sums of weighted values, largest score and sum of weights of N rows.
  template <int N>
  struct State {
    alignas(64) float acc[N][EP];
    float m[N], l[N];
  };

  int64_t num_tokens(int64_t r) const { return a_.starts[r + 1] - a_.starts[r]; }
  int64_t num_rows(int64_t r) const { return num_tokens(r) * group_; }
  int64_t num_tiles(const Plan& plan, int64_t r) const { return (num_rows(r) + plan.tile_rows - 1) / plan.tile_rows; }
  static int64_t own_block(int64_t position) { return position / BLOCK * BLOCK; }

  // The partitions that hold all keys of the cache seen from the positions first..last; the tail's comes after them.
  Span partitions(int64_t r, int64_t first, int64_t last) const {
    int64_t low = mask_.low(first), high = mask_.high(last), len = TAILED ? own_block(last) : a_.lens[r];
    return {low < 0 ? 0 : low / PARTITION, ((high < len ? high : len) + PARTITION - 1) / PARTITION};
  }
  Span partitions(int64_t r) const { return partitions(r, a_.lens[r] - num_tokens(r), a_.lens[r] - 1); }
  int64_t num_partitions(int64_t r) const {
    Span span = partitions(r);
    return span.last - span.first + TAILED;
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
    int64_t token = (t.first + j) / group_, start = a_.starts[t.request], len = a_.lens[t.request];
    int64_t position = len - num_tokens(t.request) + token;
    return {start + token, t.g * group_ + (t.first + j) % group_, position, 0, TAILED ? own_block(position) : len};
  }

  // A head's tiles follow each other, as they share its keys; the last ones see the most and come first.
  Tile tile(const Plan& plan, int64_t r, int64_t i) const {
    int64_t tiles = num_tiles(plan, r), first = (tiles - 1 - i % tiles) * plan.tile_rows, rows = num_rows(r) - first;
    return {r, first, int(rows < plan.tile_rows ? rows : plan.tile_rows), int(i / tiles)};
  }

  void compute(const Plan& plan, const Walk& at, int64_t i) const {
    if (!apart(plan, at)) return whole(tile(plan, at.request, i));
    Span span = partitions(at.request);
    int64_t parts = num_partitions(at.request), tiles = num_tiles(plan, at.request) * a_.kv_heads;
    part(tile(plan, at.request, i % tiles), span.first + i / tiles, span.last, at.slot + i / tiles, parts);
  }

  void whole(const Tile& t) const {
    alignas(64) float q[MOST * D];
    pack_queries(t, q);
    State<MOST> total;
    for (int j = 0; j < t.rows; j++) Main::clear(total.acc[j], total.m[j], total.l[j]);
    Span span = partitions(t.request, row(t, 0).position, row(t, t.rows - 1).position);
    State<SUB_ROWS> state;
    for (int64_t p = span.first; p < span.last + TAILED; p++)
      for (int first = 0; first < t.rows; first += SUB_ROWS) {
        int n = t.rows - first < SUB_ROWS ? t.rows - first : SUB_ROWS;
        sub(t, first, n, q + first * D, p, p == span.last, state);
        for (int j = 0; j < n; j++)
          merge(total.acc[first + j], total.m[first + j], total.l[first + j], state.acc[j], state.m[j], state.l[j]);
      }
    for (int j = 0; j < t.rows; j++) finish(row(t, j), total.acc[j], total.m[j], total.l[j]);
  }

  // p: the partition, or `last` for the tail's. slot: of the request's first token and this partition; a token has a
  // slot for each of `parts` partitions.
  void part(const Tile& t, int64_t p, int64_t last, int64_t slot, int64_t parts) const {
    alignas(64) float q[MOST * D];
    pack_queries(t, q);
    State<SUB_ROWS> state;
    for (int first = 0; first < t.rows; first += SUB_ROWS) {
      int n = t.rows - first < SUB_ROWS ? t.rows - first : SUB_ROWS;
      sub(t, first, n, q + first * D, p, p == last, state);
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
        Main::clear(total.acc[0], total.m[0], total.l[0]);
        for (int64_t p = 0; p < parts; p++) {
          const float* part = a_.partials + ((at.slot + token * parts + p) * a_.heads + head) * STATE;
          merge(total.acc[0], total.m[0], total.l[0], part, part[EP], part[EP + 1]);
        }
        finish({start + token, head, 0, 0, 0}, total.acc[0], total.m[0], total.l[0]);
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

  // The softmax of n rows, from `first` on, over the keys of one partition or of the tail.
  void sub(const Tile& t, int first, int n, const float* q, int64_t p, bool tail, State<SUB_ROWS>& state) const {
    Row rows[SUB_ROWS];
    for (int j = 0; j < n; j++) rows[j] = row(t, first + j);
    if constexpr (TAILED)
      if (tail) return sub_tail(t, rows, n, q, state);
    Main::run(a_.cache, scores_, mask_, t.request, t.g, rows, n, q, p, state.acc[0], state.m, state.l);
  }

  // Rows whose own blocks are one block, and then the next.
  void sub_tail(const Tile& t, Row* rows, int n, const float* q, State<SUB_ROWS>& state) const {
    for (int j = 0, m; j < n; j += m) {
      int64_t own = own_block(rows[j].position);
      for (m = 0; j + m < n && own_block(rows[j + m].position) == own; m++) {
        rows[j + m].first = own;
        rows[j + m].last = own + BLOCK < a_.lens[t.request] ? own + BLOCK : a_.lens[t.request];
      }
      std::conditional_t<TAILED, Tail, Main>::run(a_.tail, scores_, mask_, t.request, t.g, rows + j, m, q + j * D,
                                                  own / PARTITION, state.acc[j], state.m + j, state.l + j);
    }
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
  const Scores scores_;
  const int group_;
};

}  // namespace octavo
