// y[t, n] = sum over k of x[t, k] w[n, k], x and w both f32 or both bf16, the sum f32.
//
// Weights lie in panels of 16 outputs, N padded with zeros: f32 as [N/16][K][16], bf16 as [N/16][K/2][16][2], K padded to
// even. Every output is one chain over k = 0, 1, ..., whatever the number of rows, the tile it falls in or the thread that
// computes it.
//
// A panel meets all rows while it is in cache. One tile of rows streams it past once. Several work on a chunk of it in
// turn and keep their sums in memory between chunks: the chunk stays in the first cache, and the next one is fetched behind
// all of them, so that memory and arithmetic overlap.
#pragma once
#include <type_traits>

#include "dot.h"
#include "pool.h"

namespace octavo {

constexpr int MAX_ROWS = LANES == 16 ? 16 : LANES == 8 ? 6 : 3;  // rows whose sums fill the registers
// Bytes between a weight's fetch and its use by one tile: the more, the less of the stream the CPU sees ahead by itself,
// which is little behind a tile of up to 16 rows.
template <class X>
constexpr int64_t STREAM_AHEAD = DOTS<X> && LANES < 16 ? 256 : 1024;
constexpr int64_t CHUNK = 128, LONG_CHUNK = 256;                 // steps along K: what the first cache holds beside few tiles, many
constexpr int64_t MANY_TILES = 8;
constexpr int64_t MOST_TILES = 256 / MAX_ROWS;                   // whose sums are kept at once

// What to fetch while a tile runs: `step` bytes further for each step along K.
struct Ahead {
  const char* at;
  int64_t step;
};

// sums[r][lane] (+)= over `steps` steps of one panel, for R rows, x packed as [steps][R][STEP].
template <class X, int R>
__attribute__((noinline)) void linear_tile(const X* x, const X* w, int64_t steps, float* sums, bool resume, Ahead ahead) {
  nf acc[R][NV];
  if (resume) {
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) EACH(NV) memcpy(&acc[r][i], sums + r * W + i * LANES, sizeof(nf));
  } else {
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) EACH(NV) acc[r][i] = nf{};
  }
  _Pragma("GCC unroll 4") for (int64_t s = 0; s < steps; s++) {
    dot_step<R>(x + s * R * STEP<X>, w + s * STEP<X> * W, acc);
    __builtin_prefetch(ahead.at + s * ahead.step);
  }
  _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) EACH(NV) memcpy(sums + r * W + i * LANES, &acc[r][i], sizeof(nf));
}

template <class X>
using LinearTile = void (*)(const X*, const X*, int64_t, float*, bool, Ahead);

template <class X, int R>
constexpr LinearTile<X> tile_entry() {
  if constexpr (R <= (DOTS<X> ? MAX_ROWS : 1)) return linear_tile<X, R>;
  else return nullptr;
}

template <class X>
inline LinearTile<X> tile_for(int64_t rows) {
  static constexpr LinearTile<X> TABLE[] = {
      nullptr,             tile_entry<X, 1>(),  tile_entry<X, 2>(),  tile_entry<X, 3>(),  tile_entry<X, 4>(),
      tile_entry<X, 5>(),  tile_entry<X, 6>(),  tile_entry<X, 7>(),  tile_entry<X, 8>(),  tile_entry<X, 9>(),
      tile_entry<X, 10>(), tile_entry<X, 11>(), tile_entry<X, 12>(), tile_entry<X, 13>(), tile_entry<X, 14>(),
      tile_entry<X, 15>(), tile_entry<X, 16>()};
  return TABLE[rows];
}

// Rows split into tiles of nearly equal height.
struct RowTiles {
  int64_t rows, count;
  RowTiles(int64_t rows, int most) : rows(rows), count((rows + most - 1) / most) {}
  int64_t first(int64_t i) const { return rows * i / count; }
};

constexpr int64_t PACK_SPAN = 256;  // elements that are packed at a time

// A span of row r of a tile of `rows` rows, packed as [depth/STEP][rows][STEP], zero past K.
template <class T, class X>
INLINE void pack_span(const T* row, int64_t span, int64_t K, int64_t depth, int64_t r, int64_t rows, X* tile) {
  constexpr int64_t S = STEP<X>;
  int64_t k0 = span * PACK_SPAN, k1 = k0 + PACK_SPAN < K ? k0 + PACK_SPAN : K;
  X* out = tile + r * S;
  auto at = [&](int64_t k) -> X& { return out[k / S * S * rows + k % S]; };
  for (int64_t k = k0; k < k1; k++) convert(row[k], &at(k));
  if (k1 == K)
    for (int64_t k = K; k < depth; k++) at(k) = {};
}

// x[T, K], rows ld apart, as tiles one after the other.
template <class T, class X>
KERNEL void pack_rows(Thread& th, const T* x, int64_t ld, int64_t K, int64_t depth, RowTiles tiles, X* packed) {
  int64_t spans = (K + PACK_SPAN - 1) / PACK_SPAN, n = tiles.count * spans;
  for (int64_t i = th.first(n); i < th.last(n); i++) {
    int64_t tile = i / spans, t0 = tiles.first(tile), rows = tiles.first(tile + 1) - t0;
    for (int64_t r = 0; r < rows; r++) pack_span(x + (t0 + r) * ld, i % spans, K, depth, r, rows, packed + t0 * depth);
  }
}

// Weights as the rows that meet them: themselves, or widened into `room`.
template <class T>
INLINE const T* weights_for(const T*, const T* w, int64_t, float*) { return w; }
INLINE const float* weights_for(const float*, const bf16* w, int64_t K, float* room) {
  widen_pairs(w, K, room);
  return room;
}

// sums[row - first row][16] of the rows of tiles first..last-1 with one panel.
template <class T, class X>
inline void panel_sums(const X* packed, RowTiles tiles, int64_t first, int64_t last, const T* w, int64_t depth,
                       float* sums) {
  constexpr bool WIDENED = sizeof(X) != sizeof(T);
  int64_t count = last - first;
  bool streams = count == 1 && !WIDENED;
  int64_t chunk = streams ? depth : (count < MANY_TILES ? CHUNK : LONG_CHUNK) * STEP<X>;
  alignas(64) float room[WIDENED ? LONG_CHUNK * W : 1];
  for (int64_t k = 0; k < depth; k += chunk) {
    int64_t length = k + chunk < depth ? chunk : depth - k, steps = length / STEP<X>;
    int64_t share = length * W * int64_t(sizeof(T)) / count;  // bytes that a tile fetches
    const char* next = (const char*)(w + k * W) + (streams ? STREAM_AHEAD<X> : chunk * W * int64_t(sizeof(T)));
    const X* weights = weights_for(packed, w + k * W, length, room);
    for (int64_t tile = first; tile < last; tile++) {
      int64_t t0 = tiles.first(tile), rows = tiles.first(tile + 1) - t0;
      Ahead ahead{next + (tile - first) * share, share / steps};
      float* out = sums + (t0 - tiles.first(first)) * W;
      tile_for<X>(rows)(packed + t0 * depth + k * rows, weights, steps, out, k > 0, ahead);
    }
  }
}

// The panels with packed rows; threads draw a panel, or a pair, and a span of the rows.
template <bool PAIRED, class T, class X, class Epilogue>
inline void linear_panels(Thread& th, const X* packed, RowTiles tiles, int64_t depth, int64_t N, const T* w,
                          Epilogue epilogue) {
  constexpr int64_t PANELS = PAIRED ? 2 : 1, MOST_SUMS = MOST_TILES * MAX_ROWS * W;
  int64_t units = (N + W - 1) / W, least = (tiles.count + MOST_TILES - 1) / MOST_TILES;
  int64_t wanted = (4 * th.count + units - 1) / units;  // few panels are split by rows, so that all threads work
  int64_t spans = wanted <= least ? least : wanted < tiles.count ? wanted : tiles.count;
  th.share(units * spans, [&](int64_t item) {
    int64_t n = item / spans * W, lanes = N - n < W ? N - n : W;
    int64_t first = tiles.count * (item % spans) / spans, last = tiles.count * (item % spans + 1) / spans;
    alignas(64) float sums[PANELS][MOST_SUMS];
    for (int64_t p = 0; p < PANELS; p++)
      panel_sums(packed, tiles, first, last, w + (n / W * PANELS + p) * depth * W, depth, sums[p]);
    int64_t t0 = tiles.first(first), t1 = tiles.first(last);
    for (int64_t t = t0; t < t1; t++) {
      const float* a = sums[0] + (t - t0) * W;
      if constexpr (PAIRED) epilogue(t, n, load(a), load(a + MOST_SUMS), lanes);
      else epilogue(t, n, load(a), lanes);
    }
  });
}

// Most rows that are read where they lie in one tile: a pointer each. Of two tiles the second finds the panel in cache.
constexpr int FEW_ROWS = MAX_ROWS < 8 ? MAX_ROWS : 8;
constexpr int64_t MOST_FEW = 2 * FEW_ROWS;
constexpr int64_t FEW_AHEAD = 768;  // STREAM_AHEAD of several: of the stream the CPU sees less ahead
constexpr int64_t FEW_BYTES = 96 << 10;  // of rows that a thread widens for itself

// sums[r][lane] = over all of K of one panel, for R rows x[K], ld apart. The order is linear_tile's.
template <class T, int R>
__attribute__((noinline)) void few_tile(const float* x, int64_t ld, const T* w, int64_t depth, float* sums) {
  nf acc[R][NV];
  _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) EACH(NV) acc[r][i] = nf{};
  const char* ahead = (const char*)w + (R > 1 ? FEW_AHEAD : STREAM_AHEAD<T>);
  _Pragma("GCC unroll 4") for (int64_t k = 0; k < depth; k += STEP<T>) {
    few_step<R>(x + k, ld, w + k * W, acc);
    __builtin_prefetch(ahead + k * W * int64_t(sizeof(T)));
  }
  _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) EACH(NV) memcpy(sums + r * W + i * LANES, &acc[r][i], sizeof(nf));
}

template <class T, int R>
constexpr auto few_entry() -> void (*)(const float*, int64_t, const T*, int64_t, float*) {
  if constexpr (R <= FEW_ROWS) return few_tile<T, R>;
  else return nullptr;
}

// The panels with few rows, which need not be packed, so that no thread waits for that; threads draw a panel, or a pair.
template <bool PAIRED, class T, class Epilogue>
inline void linear_few(Thread& th, const float* x, int64_t ld, int64_t rows, int64_t depth, int64_t N, const T* w,
                       Epilogue epilogue) {
  static constexpr void (*TABLE[])(const float*, int64_t, const T*, int64_t, float*) = {
      nullptr,           few_entry<T, 1>(), few_entry<T, 2>(), few_entry<T, 3>(), few_entry<T, 4>(),
      few_entry<T, 5>(), few_entry<T, 6>(), few_entry<T, 7>(), few_entry<T, 8>()};
  constexpr int64_t PANELS = PAIRED ? 2 : 1;
  RowTiles tiles(rows, FEW_ROWS);
  th.share((N + W - 1) / W, [&](int64_t item) {
    int64_t n = item * W, lanes = N - n < W ? N - n : W;
    alignas(64) float sums[PANELS][MOST_FEW * W];
    for (int64_t p = 0; p < PANELS; p++)
      for (int64_t tile = 0; tile < tiles.count; tile++) {
        int64_t t0 = tiles.first(tile), count = tiles.first(tile + 1) - t0;
        TABLE[count](x + t0 * ld, ld, w + (item * PANELS + p) * depth * W, depth, sums[p] + t0 * W);
      }
    for (int64_t t = 0; t < rows; t++) {
      if constexpr (PAIRED) epilogue(t, n, load(sums[0] + t * W), load(sums[1] + t * W), lanes);
      else epilogue(t, n, load(sums[0] + t * W), lanes);
    }
  });
}

// Rows as f32, 0 past K: themselves, or widened into `room`, rows `ld` apart then.
INLINE const float* few_rows(const float* x, int64_t*, int64_t, int64_t, int64_t, float*) { return x; }
INLINE const float* few_rows(const bf16* x, int64_t* ld, int64_t rows, int64_t K, int64_t depth, float* room) {
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t k = 0; k < K; k++) room[r * depth + k] = to_float(x[r * *ld + k]);
    if (K < depth) room[r * depth + K] = 0;
  }
  *ld = depth;
  return room;
}

// Calls epilogue(row, first output, accumulators, how many of the 16 outputs exist) for every panel; with PAIRED, panels
// alternate gate and up, and epilogue(row, first output, gate, up, how many) is called for every pair.
// x: rows ld apart. N: outputs as the epilogue counts them. scratch: T * K floats, K rounded up to even.
template <bool PAIRED, class T, class Epilogue>
KERNEL void linear(Thread& th, const T* x, int64_t ld, int64_t rows, int64_t K, int64_t N, const T* w, float* scratch,
                   Epilogue epilogue) {
  using X = std::conditional_t<DOTS<T>, T, float>;
  if (rows == 0) return;
  RowTiles tiles(rows, MAX_ROWS);
  int64_t depth = padded(K, STEP<T>);
  if (rows == 1 && K == depth) return linear_panels<PAIRED>(th, x, tiles, depth, N, w, epilogue);
  if constexpr (std::is_same_v<X, float>) {
    constexpr bool WIDENED = sizeof(X) != sizeof(T);
    if (rows > 1 && rows <= MOST_FEW && (!WIDENED || rows * depth * int64_t(sizeof(float)) <= FEW_BYTES)) {
      alignas(64) float room[WIDENED ? FEW_BYTES / sizeof(float) : 1];
      const float* few = few_rows(x, &ld, rows, K, depth, room);
      return linear_few<PAIRED>(th, few, ld, rows, depth, N, w, epilogue);
    }
  }
  pack_rows(th, x, ld, K, depth, tiles, (X*)scratch);
  th.sync();
  linear_panels<PAIRED>(th, (const X*)scratch, tiles, depth, N, w, epilogue);
}

// One weight of a panel layout: row n, element k.
template <class T>
inline float panel_element(const T* w, int64_t K, int64_t n, int64_t k) {
  constexpr int64_t S = STEP<T>;
  return to_float(w[(n / W * padded(K, S) + k / S * S) * W + n % W * S + k % S]);
}

}  // namespace octavo
