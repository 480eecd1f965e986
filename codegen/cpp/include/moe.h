// Linears of experts: y[p] = W[e] x[row of p] for each pair p of a token and a slot, e the expert that the token chose there.
//
// Each expert's matrix lies in panels of its own, as linear's (linear.h, quant.h), one expert's after the other's. Pairs are
// sorted by expert; the rows of one expert meet each of its panels while it is in cache, as all rows do in a linear. An
// output is the same chain over K as there, whatever other pairs its expert has.
//
// Where no expert has several rows, as in a decode step of one request, rows are read where they lie: no thread waits.
#pragma once
#include "qfloat.h"

namespace octavo {

constexpr int64_t MOST_EXPERTS = 1024;

// The pairs of a step sorted by expert. Every thread finds it out for itself. Pairs of an id that is no expert have none.
template <class Id>
struct Routes {
  const Id* ids;  // [pairs]
  int64_t pairs, fan, E;  // fan: pairs that read one row
  int64_t active = 0;     // experts that have pairs
  bool several = false;   // whether one has more than one
  int32_t counts[MOST_EXPERTS], starts[MOST_EXPERTS], firsts[MOST_EXPERTS];  // of an expert: pairs, pairs before it, its first

  Routes(const Id* ids, int64_t pairs, int64_t fan, int64_t E) : ids(ids), pairs(pairs), fan(fan), E(E) {
    memset(counts, 0, size_t(E) * sizeof *counts);
    for (int64_t p = 0; p < pairs; p++)
      if (is_expert(p) && counts[ids[p]]++ == 0) firsts[ids[p]] = int32_t(p);
    for (int64_t e = 0, start = 0; e < E; start += counts[e++]) {
      starts[e] = int32_t(start);
      active += counts[e] > 0, several |= counts[e] > 1;
    }
  }

  bool is_expert(int64_t p) const { return ids[p] >= 0 && int64_t(ids[p]) < E; }
  int64_t rows() const { return (pairs + fan - 1) / fan; }

  // Calls f(pair, expert, its place among all sorted pairs) for those of first..last-1 that have an expert.
  template <class Fn>
  void each(int64_t first, int64_t last, Fn f) const {
    int32_t next[MOST_EXPERTS];
    memcpy(next, starts, size_t(E) * sizeof *next);
    for (int64_t p = 0; p < last; p++)
      if (is_expert(p)) {
        int64_t at = next[ids[p]]++;
        if (p >= first) f(p, int64_t(ids[p]), at);
      }
  }
};

// Where a row lies among tiles: the tile's first row and how many it has.
struct InTile {
  int64_t first, rows;
  InTile(RowTiles tiles, int64_t row) {
    int64_t tile = ((row + 1) * tiles.count - 1) / tiles.rows;
    first = tiles.first(tile), rows = tiles.first(tile + 1) - first;
  }
};

// Rows of x as pack_rows packs them, in the order of sorted pairs, each expert's in tiles of their own; order: those pairs.
template <class T, class X, class Id>
KERNEL void pack_pairs(Thread& th, const T* x, int64_t ld, int64_t K, int64_t depth, const Routes<Id>& routes, X* packed,
                       int32_t* order) {
  int64_t spans = (K + PACK_SPAN - 1) / PACK_SPAN, first = th.first(routes.pairs * spans), last = th.last(routes.pairs * spans);
  routes.each(first / spans, (last + spans - 1) / spans, [&](int64_t p, int64_t e, int64_t at) {
    InTile tile(RowTiles(routes.counts[e], MAX_ROWS), at - routes.starts[e]);
    int64_t t0 = routes.starts[e] + tile.first;
    for (int64_t i = p * spans < first ? first : p * spans; i < (p + 1) * spans && i < last; i++)
      pack_span(x + p / routes.fan * ld, i % spans, K, depth, at - t0, tile.rows, packed + t0 * depth);
    if (p * spans >= first) order[at] = int32_t(p);
  });
}

// Calls sums(expert, its tiles, first tile, tile after the last, panel, room for their rows' sums), and the epilogue with
// what it leaves there. Threads draw a panel of an expert, or a pair, and a span of its rows; with one tile and RUNS, a run
// of panels. Rows of pairs without an expert become NaN.
template <bool PAIRED, int ROWS, int MOST_SUMS, bool RUNS, class Id, class Sums, class Epilogue>
inline void share_experts(Thread& th, const Routes<Id>& routes, int64_t N, const int32_t* order, Sums sums, Epilogue epilogue) {
  constexpr int64_t PANELS = PAIRED ? 2 : 1, MOST = MOST_SUMS / ROWS;
  int64_t units = (N + W - 1) / W, all = units * (routes.active > 0 ? routes.active : 1);
  int64_t wanted = (4 * th.count + all - 1) / all;  // few panels are split by rows, so that all threads work
  struct Split { int64_t runs, spans; };
  auto split = [&](int64_t e) {
    RowTiles tiles(routes.counts[e], ROWS);
    int64_t least = (tiles.count + MOST - 1) / MOST;
    int64_t spans = wanted <= least ? least : wanted < tiles.count ? wanted : tiles.count;
    return Split{RUNS && tiles.count == 1 ? num_runs(units, (th.count + routes.active - 1) / routes.active) : units, spans};
  };
  alignas(64) float room[PANELS][MOST_SUMS * W];
  auto unit = [&](int64_t e, int64_t at, int64_t first, int64_t last) {
    RowTiles tiles(routes.counts[e], ROWS);
    Epilogue mine = epilogue.of_expert(e, PANELS);
    int64_t n = at * W, lanes = N - n < W ? N - n : W, panel = (e * units + at) * PANELS;
    for (int64_t p = 0; p < PANELS; p++) sums(e, tiles, first, last, panel + p, room[p]);
    int64_t t0 = tiles.first(first), t1 = tiles.first(last);
    for (int64_t t = t0; t < t1; t++) {
      int64_t pair = tiles.rows == 1 ? routes.firsts[e] : order[routes.starts[e] + t];
      const float* a = room[0] + (t - t0) * W;
      if constexpr (PAIRED) mine(pair, n, load(a), load(a + MOST_SUMS * W), lanes);
      else mine(pair, n, load(a), lanes);
    }
  };
  int64_t total = 0;
  for (int64_t e = 0; e < routes.E; e++) total += split(e).runs * split(e).spans;
  int64_t e = -1, next = 0;  // items before next are those of experts 0..e
  Split now{};
  th.share(total, [&](int64_t item) {
    while (item >= next) now = split(++e), next += now.runs * now.spans;
    int64_t i = item - (next - now.runs * now.spans), run = i / now.spans, span = i % now.spans;
    int64_t tiles = RowTiles(routes.counts[e], ROWS).count;
    for (int64_t at = units * run / now.runs; at < units * (run + 1) / now.runs; at++)
      unit(e, at, tiles * span / now.spans, tiles * (span + 1) / now.spans);
  });
  for (int64_t p = th.first(routes.pairs); p < th.last(routes.pairs); p++)
    for (int64_t n = 0; n < N && !routes.is_expert(p); n += W) epilogue.put(p, n, splat(__builtin_nanf("")), N - n < W ? N - n : W);
}

// x: rows ld apart, each read by `fan` pairs. ids: [pairs]. N: outputs of an expert as the epilogue counts them.
// scratch: pairs * (K + 1) floats, K rounded up to even.
template <bool PAIRED, class T, class Id, class Epilogue>
KERNEL void moe_linear(Thread& th, const T* x, int64_t ld, int64_t pairs, int64_t fan, int64_t K, int64_t N, const T* w,
                       const Id* ids, int64_t E, float* scratch, Epilogue epilogue) {
  using X = std::conditional_t<DOTS<T>, T, float>;
  if (pairs == 0) return;
  Routes<Id> routes(ids, pairs, fan, E);
  int64_t depth = padded(K, STEP<T>);
  X* packed = (X*)scratch;
  int32_t* order = (int32_t*)(scratch + pairs * padded(K, 2));
  if (routes.several || K != depth) {
    pack_pairs(th, x, ld, K, depth, routes, packed, order);
    th.sync();
  }
  auto sums = [&](int64_t e, RowTiles tiles, int64_t first, int64_t last, int64_t panel, float* room) {
    const T* weights = w + panel * depth * W;
    if (tiles.rows == 1 && K == depth) panel_sums(x + routes.firsts[e] / fan * ld, tiles, 0, 1, weights, depth, room);
    else panel_sums(packed + routes.starts[e] * depth, tiles, first, last, weights, depth, room);
  };
  share_experts<PAIRED, MAX_ROWS, MOST_TILES * MAX_ROWS, false>(th, routes, N, order, sums, epilogue);
}

// Row 0 of a tile of one, quantised, as row r of a tile of R.
INLINE void copy_quantised(QRows from, const Segments& s, int64_t r, int64_t R, QRows to) {
  for (int64_t i = 0; i < s.depth / 4; i++) memcpy(to.codes + (i * R + r) * 4, from.codes + i * 4, 4);
  for (int64_t i = 0; i < s.blocks(); i++) to.starts[i * R + r] = from.starts[i];
  for (int64_t i = 0; i < s.count; i++) to.scales[i * R + r] = from.scales[i], to.sums[i * R + r] = from.sums[i];
}

// Rows of sorted pairs quantised, each expert's in tiles of their own. A row that several pairs read, which follow one
// another, is quantised once and copied.
template <Codes Q, class T, class Id>
KERNEL void quantize_pairs(Thread& th, const T* x, int64_t ld, const Routes<Id>& routes, Segments s, int32_t zero, QRows out,
                           int32_t* order) {
  alignas(64) char room[OWN_ROW * 5 / 2];
  QRows own(room, 1, s);
  bool once = routes.fan > 1 && s.depth <= OWN_ROW;
  int64_t row = -1;  // that `own` has
  routes.each(th.first(routes.pairs), th.last(routes.pairs), [&](int64_t p, int64_t e, int64_t at) {
    InTile place(RowTiles(routes.counts[e], Q_ROWS), at - routes.starts[e]);
    int64_t t0 = routes.starts[e] + place.first;
    QRows tile = out.tile(t0, s);
    const T* from = x + p / routes.fan * ld;
    if (!once) {
      quantize_row<Q>(from, s, zero, at - t0, place.rows, tile);
    } else {
      if (row != p / routes.fan) quantize_row<Q>(from, s, zero, 0, 1, own), row = p / routes.fan;
      copy_quantised(own, s, at - t0, place.rows, tile);
    }
    order[at] = int32_t(p);
  });
}

// As moe_linear with a quantised matrix; x is quantised in groups of x_group (0: whole rows).
// scratch: pairs * (K + 1) floats, K rounded up to a multiple of 32.
template <bool PAIRED, class T, class M, class Id, class Epilogue>
KERNEL void qmoe_linear(Thread& th, const T* x, int64_t ld, int64_t pairs, int64_t fan, int64_t N, M w, int64_t x_group,
                        const Id* ids, int64_t E, float* scratch, Epilogue epilogue) {
  if (pairs == 0) return;
  Routes<Id> routes(ids, pairs, fan, E);
  Segments s(w.K, w.group, x_group);
  alignas(64) char room[OWN_ROW * 5 / 2];
  bool own = !routes.several && routes.rows() * s.depth <= OWN_ROW;  // every thread quantises the rows for itself
  QRows packed(own ? (void*)room : scratch, own ? routes.rows() : pairs, s);
  int32_t* order = (int32_t*)(scratch + pairs * s.depth);
  if (own) {
    for (int64_t r = 0; r < routes.rows(); r++) quantize_row<M::CODES>(x + r * ld, s, w.zero, 0, 1, packed.tile(r, s));
  } else {
    quantize_pairs<M::CODES>(th, x, ld, routes, s, w.zero, packed, order);
    th.sync();
  }
  auto sums = [&](int64_t e, RowTiles tiles, int64_t first, int64_t last, int64_t panel, float* out) {
    int64_t row = own ? routes.firsts[e] / fan : routes.starts[e];
    q_panel_sums(packed.tile(row, s), tiles, first, last, Panel<M>(w, panel), s, out);
  };
  share_experts<PAIRED, Q_ROWS, Q_MOST_ROWS, true>(th, routes, N, order, sums, epilogue);
}

// Rows of sorted pairs as pack_rounded packs rows.
template <class Grid, class T, class Id>
KERNEL void pack_rounded_pairs(Thread& th, const T* x, int64_t ld, int64_t K, int64_t group, const Routes<Id>& routes,
                               float* packed, int32_t* order) {
  routes.each(th.first(routes.pairs), th.last(routes.pairs), [&](int64_t p, int64_t e, int64_t at) {
    InTile tile(RowTiles(routes.counts[e], MAX_ROWS), at - routes.starts[e]);
    int64_t t0 = routes.starts[e] + tile.first;
    round_row<Grid>(x + p / routes.fan * ld, K, group, tile.rows, packed + t0 * K + (at - t0));
    order[at] = int32_t(p);
  });
}

// As qmoe_linear, x rounded to a grid in groups of x_group, and multiplied as a float.
template <bool PAIRED, class Grid, class T, class M, class Id, class Epilogue>
KERNEL void qmoe_linear_float(Thread& th, const T* x, int64_t ld, int64_t pairs, int64_t fan, int64_t N, M w, int64_t x_group,
                              const Id* ids, int64_t E, float* scratch, Epilogue epilogue) {
  constexpr bool IN_PLACE = std::is_same_v<T, float> && !Grid::ROUNDS;
  if (pairs == 0) return;
  Routes<Id> routes(ids, pairs, fan, E);
  int32_t* order = (int32_t*)(scratch + pairs * w.K);
  if (routes.several || !IN_PLACE) {
    if constexpr (Grid::ROUNDS) pack_rounded_pairs<Grid>(th, x, ld, w.K, x_group, routes, scratch, order);
    else pack_pairs(th, x, ld, w.K, w.K, routes, scratch, order);
    th.sync();
  }
  auto sums = [&](int64_t e, RowTiles tiles, int64_t first, int64_t last, int64_t panel, float* out) {
    const float* rows = scratch + routes.starts[e] * w.K;
    if constexpr (IN_PLACE) {
      if (tiles.rows == 1) rows = x + routes.firsts[e] / fan * ld;
    }
    qf_panel_sums(rows, tiles, first, last, w, panel, out);
  };
  share_experts<PAIRED, MAX_ROWS, Q_MOST_ROWS, true>(th, routes, N, order, sums, epilogue);
}

}  // namespace octavo
