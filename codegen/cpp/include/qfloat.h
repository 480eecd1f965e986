// Quantised matrices by floats: linears whose x stays as it is, or is rounded to a grid and multiplied as a float, and
// lookups in tables. Weights of a chunk of K become floats in the first cache, for all rows; sums are as linear's (linear.h).
#pragma once
#include "linear.h"
#include "qlinear.h"

namespace octavo {

// Quads of codes from `codes` on as floats before they are scaled: out[j] is element j of 8 (U4) or 4 of K, for 16 outputs.
template <Codes Q>
constexpr int64_t LOADED = Q == Codes::U4 ? 8 : 4;

template <Codes Q>
INLINE nf decode(ni bytes, int j) {
  if constexpr (Q == Codes::U4) return __builtin_convertvector((bytes >> (j % 4 * 8 + j / 4 * 4)) & 15, nf);
  if constexpr (Q == Codes::I8) return __builtin_convertvector((bytes << (24 - j * 8)) >> 24, nf);
  if constexpr (Q == Codes::F8) return decode_f8((bytes >> (j * 8)) & 0xff);
}

// Elements k0..k1-1 of K of a panel, k0 a multiple of 32, as [k][16]. Groups have a multiple of 8 elements.
template <class M>
inline void dequantize_panel(const M& w, const Panel<M>& panel, int64_t k0, int64_t k1, float* out) {
  constexpr Codes Q = M::CODES;
  const uint8_t* codes = panel.codes + k0 / 4 * M::QUAD;
  const nf zero = native_splat(float(w.zero));
  int64_t group = w.group == 0 ? w.depth() : w.group;
  for (int64_t k = k0; k < k1;) {
    int64_t g = k / group, end = (g + 1) * group < k1 ? (g + 1) * group : k1;
    nf scale[NV], shift[NV], offset[NV];
    EACH(NV) scale[i] = panel.scale(g, i), offset[i] = panel.offset(g, i), shift[i] = zero + panel.zero(g, i);
    for (; k < end; k += LOADED<Q>, codes += 4 * W, out += LOADED<Q> * W) {
      __builtin_prefetch(codes + Q_AHEAD);
      EACH(NV) {
        ni bytes;
        memcpy(&bytes, codes + i * sizeof bytes, sizeof bytes);
        _Pragma("GCC unroll 8") for (int j = 0; j < LOADED<Q>; j++) {
          nf x = decode<Q>(bytes, j);
          if constexpr (Q != Codes::F8) x = x - shift[i];
          x = x * scale[i];
          if constexpr (M::OFFSETS) x = x + offset[i];
          memcpy(out + j * W + i * LANES, &x, sizeof x);
        }
      }
    }
  }
}

// Grids that x is rounded to, in groups with a scale.
struct Exact {
  static constexpr bool ROUNDS = false;
  static INLINE nf round(nf x) { return x; }
  static constexpr float LARGEST = 1;
};
struct Int8 {
  static constexpr bool ROUNDS = true;
  static INLINE nf round(nf x) { return __builtin_convertvector(round_native(x), nf); }
  static constexpr float LARGEST = 127;
};
struct Float8 {
  static constexpr bool ROUNDS = true;
  static INLINE nf round(nf x) { return round_f8(x); }
  static constexpr float LARGEST = 448;
};

// A row of a tile of R, as pack_rows packs it for f32, each group of `group` elements (0: all) rounded to a grid.
template <class Grid, class T>
INLINE void round_row(const T* row, int64_t K, int64_t group, int64_t R, float* out) {
  int64_t step = group == 0 ? K : group;
  for (int64_t g = 0; g < K; g += step) {
    int64_t end = K - g < step ? K : g + step;
    float scale = largest_of(row + g, end - g) / Grid::LARGEST, found[W];
    for (int64_t k = g; k < end; k += W) {
      F v = load_n(row + k, end - k), r;
      EACH(NV) {
        nf code = scaled(v.v[i], native_splat(inverse_of(scale)), native_splat(Grid::LARGEST));
        r.v[i] = Grid::round(code) * native_splat(scale);
      }
      store(found, r);
      for (int64_t j = 0; j < W && k + j < end; j++) out[(k + j) * R] = found[j];
    }
  }
}

// Rows of x, ld apart, rounded in tiles.
template <class Grid, class T>
KERNEL void pack_rounded(Thread& th, const T* x, int64_t ld, int64_t K, int64_t group, RowTiles tiles, float* packed) {
  int64_t tile = 0;
  for (int64_t t = th.first(tiles.rows); t < th.last(tiles.rows); t++) {
    while (tiles.first(tile + 1) <= t) tile++;
    int64_t t0 = tiles.first(tile);
    round_row<Grid>(x + t * ld, K, group, tiles.first(tile + 1) - t0, packed + t0 * K + (t - t0));
  }
}

// sums[row - first row][16] of the rows of tiles first..last-1 with one panel.
template <class M>
KERNEL void qf_panel_sums(const float* packed, RowTiles tiles, int64_t first, int64_t last, const M& w, int64_t panel,
                          float* sums) {
  Panel<M> codes(w, panel);
  alignas(64) float room[(CHUNK + 8) * W];
  for (int64_t k = 0; k < w.K; k += CHUNK) {
    int64_t end = k + CHUNK < w.K ? k + CHUNK : w.K;
    dequantize_panel(w, codes, k, end, room);
    for (int64_t tile = first; tile < last; tile++) {
      int64_t t0 = tiles.first(tile), rows = tiles.first(tile + 1) - t0;
      const float* x = packed + t0 * w.K + k * rows;
      tile_for<float>(rows)(x, room, end - k, sums + (t0 - tiles.first(first)) * W, k > 0, Ahead{(const char*)room, 0});
    }
  }
}

// As qlinear, x rounded to a grid in groups of x_group, and multiplied as a float. scratch: T * K floats.
template <bool PAIRED, class Grid, class T, class M, class Epilogue>
KERNEL void qlinear_float(Thread& th, const T* x, int64_t ld, int64_t rows, int64_t N, M w, int64_t x_group, float* scratch,
                          Epilogue epilogue) {
  if (rows == 0) return;
  RowTiles tiles(rows, MAX_ROWS);
  const float* packed = scratch;
  if constexpr (std::is_same_v<T, float> && !Grid::ROUNDS) {
    if (rows == 1) packed = x;
  }
  if (packed == scratch) {
    if constexpr (Grid::ROUNDS) pack_rounded<Grid>(th, x, ld, w.K, x_group, tiles, scratch);
    else pack_rows(th, x, ld, w.K, w.K, tiles, scratch);
    th.sync();
  }
  auto sums = [&](int64_t first, int64_t last, int64_t panel, float* room) {
    qf_panel_sums(packed, tiles, first, last, w, panel, room);
  };
  share_panels<PAIRED, MAX_ROWS, Q_MOST_ROWS>(th, tiles, N, sums, epilogue);
}

// y[t] = row ids[t] of a table [V, K]; an id outside the table gives NaN.
template <class Id, class M, class Y>
KERNEL void qembed(Thread& th, const Id* ids, int64_t rows, M table, int64_t V, Y* y) {
  for (int64_t t = th.first(rows); t < th.last(rows); t++) {
    bool inside = ids[t] >= 0 && int64_t(ids[t]) < V;
    int64_t id = inside ? int64_t(ids[t]) : 0, lane = id % W, K = table.K;
    Panel<M> panel(table, id / W);
    for (int64_t k = 0; k < K; k += CHUNK) {
      alignas(64) float room[(CHUNK + 8) * W];
      int64_t end = k + CHUNK < K ? k + CHUNK : K;
      dequantize_panel(table, panel, k, end, room);
      for (int64_t j = k; j < end; j++) convert(inside ? room[(j - k) * W + lane] : __builtin_nanf(""), y + t * K + j);
    }
  }
}

}  // namespace octavo
