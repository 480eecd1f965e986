// y[t, n] = sum over k of x[t, k] w[n, k]. Weights lie in panels of 16 outputs, [N/16][K][16], N padded with zeros.
// Every output is one chain of fused multiply-adds over k = 0, 1, ..., whatever the number of rows, the tile it falls
// in or the thread that computes it; rows, panels and threads only decide what shares a weight load.
#pragma once
#include "pool.h"
#include "vec.h"

namespace octavo {

#if defined(__AVX512F__)
constexpr int MAX_ROWS = 14, ACCUMULATORS = 28;
#elif defined(__aarch64__)
constexpr int MAX_ROWS = 6, ACCUMULATORS = 6;
#else
constexpr int MAX_ROWS = LANES == 8 ? 6 : 3, ACCUMULATORS = LANES == 8 ? 6 : 3;
#endif

constexpr int PREFETCH_BYTES = 1024;  // how far ahead of its use a weight is fetched

// Panels that a tile of R rows works on together.
constexpr int panels_for(int rows) { return rows * 4 <= ACCUMULATORS ? 4 : rows * 2 <= ACCUMULATORS ? 2 : 1; }

// out[r][p * 16 + lane] for R rows (x packed as [K][R]) and P panels that follow each other in memory.
template <class T, int R, int P>
__attribute__((noinline)) void linear_tile(const float* x, const T* w, int64_t K, float* out) {
  F acc[R][P];
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) acc[r][p] = splat(0.0f);
  for (int64_t k = 0; k < K; k++) {
    F wv[P];
    _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) {
      wv[p] = load(w + (p * K + k) * W);
      __builtin_prefetch(w + (p * K + k) * W + PREFETCH_BYTES / sizeof(T));
    }
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {
      F xv = splat(x[k * R + r]);
      _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) acc[r][p] = fma(wv[p], xv, acc[r][p]);
    }
  }
  _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)
    _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) store(out + (r * P + p) * W, acc[r][p]);
}

template <class T>
using LinearTile = void (*)(const float*, const T*, int64_t, float*);

template <class T, int P, int R>
constexpr LinearTile<T> tile_entry() {
  if constexpr (R <= MAX_ROWS && (P == 1 || R * P <= ACCUMULATORS)) return linear_tile<T, R, P>;
  else return nullptr;
}

// The kernel for `rows` rows and P panels; null where the registers do not hold it.
template <class T, int P>
inline LinearTile<T> tile_for(int rows) {
  static constexpr LinearTile<T> TABLE[] = {
      nullptr,                tile_entry<T, P, 1>(),  tile_entry<T, P, 2>(),  tile_entry<T, P, 3>(),
      tile_entry<T, P, 4>(),  tile_entry<T, P, 5>(),  tile_entry<T, P, 6>(),  tile_entry<T, P, 7>(),
      tile_entry<T, P, 8>(),  tile_entry<T, P, 9>(),  tile_entry<T, P, 10>(), tile_entry<T, P, 11>(),
      tile_entry<T, P, 12>(), tile_entry<T, P, 13>(), tile_entry<T, P, 14>()};
  return TABLE[rows];
}

template <class T>
inline void run_tile(int panels, int rows, const float* x, const T* w, int64_t K, float* out) {
  LinearTile<T> f = panels == 4 ? tile_for<T, 4>(rows) : panels == 2 ? tile_for<T, 2>(rows) : tile_for<T, 1>(rows);
  f(x, w, K, out);
}

// Rows split into tiles of nearly equal height.
struct RowTiles {
  int64_t rows, count;
  RowTiles(int64_t rows, int most) : rows(rows), count((rows + most - 1) / most) {}
  int64_t first(int64_t i) const { return rows * i / count; }
};

// x[T, K] with row stride ld as tiles of [K][rows of the tile], one after the other.
KERNEL void pack_rows(Thread& th, const float* x, int64_t ld, int64_t K, RowTiles tiles, float* packed) {
  constexpr int64_t CHUNK = 256;
  int64_t chunks = (K + CHUNK - 1) / CHUNK, n = tiles.count * chunks;
  for (int64_t i = th.first(n); i < th.last(n); i++) {
    int64_t tile = i / chunks, k0 = i % chunks * CHUNK, k1 = k0 + CHUNK < K ? k0 + CHUNK : K;
    int64_t t0 = tiles.first(tile), rows = tiles.first(tile + 1) - t0;
    float* out = packed + t0 * K;
    for (int64_t r = 0; r < rows; r++) {
      const float* row = x + (t0 + r) * ld;
      for (int64_t k = k0; k < k1; k++) out[k * rows + r] = row[k];
    }
  }
}

// Calls epilogue(row, first output, accumulators, how many of the 16 outputs exist) for every panel; with PAIRED, panels
// alternate gate and up, and epilogue(row, first output, gate, up, how many) is called for every pair.
// N: outputs as the epilogue counts them. scratch: T * K floats, unused for one row.
template <bool PAIRED, class T, class Epilogue>
KERNEL void linear(Thread& th, const float* x, int64_t ld, int64_t rows, int64_t K, int64_t N, const T* w,
                   float* scratch, Epilogue epilogue) {
  constexpr int LEAST = PAIRED ? 2 : 1;
  constexpr int MOST_ROWS = PAIRED && ACCUMULATORS / 2 < MAX_ROWS ? ACCUMULATORS / 2 : MAX_ROWS;
  if (rows == 0) return;
  RowTiles tiles(rows, MOST_ROWS);
  const float* packed = x;
  if (rows > 1) {
    pack_rows(th, x, ld, K, tiles, scratch);
    th.sync();
    packed = scratch;
  }
  int64_t panels = (N + W - 1) / W * LEAST;
  int tallest = int((rows + tiles.count - 1) / tiles.count);
  int step = panels_for(tallest) < LEAST ? LEAST : panels_for(tallest);
  int64_t units = (panels + step - 1) / step;
  // A unit's panels meet all row tiles while they are in cache; few units are split by rows, so that all threads work.
  int64_t spans = units >= 4 * th.count ? 1 : tiles.count < th.count * 4 ? tiles.count : th.count * 4;
  th.share(units * spans, [&](int64_t item) {
    int64_t p0 = item / spans * step, span = item % spans;
    for (int64_t tile = tiles.count * span / spans; tile < tiles.count * (span + 1) / spans; tile++) {
      int64_t t0 = tiles.first(tile);
      int height = int(tiles.first(tile + 1) - t0);
      alignas(64) float out[(ACCUMULATORS > MAX_ROWS ? ACCUMULATORS : MAX_ROWS) * W];
      for (int64_t p = p0; p < p0 + step && p < panels;) {
        int64_t left = (p0 + step < panels ? p0 + step : panels) - p;
        int n = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        run_tile(n, height, packed + t0 * K, w + p * K * W, K, out);
        for (int r = 0; r < height; r++)
          for (int j = 0; j < n; j += LEAST) {
            int64_t first = (p + j) / LEAST * W, lanes = N - first < W ? N - first : W;
            const float* a = out + (r * n + j) * W;
            if constexpr (PAIRED) epilogue(t0 + r, first, load(a), load(a + W), lanes);
            else epilogue(t0 + r, first, load(a), lanes);
          }
        p += n;
      }
    }
  });
}

// One weight of a panel layout: row n, element k.
template <class T>
inline float panel_element(const T* w, int64_t K, int64_t n, int64_t k) {
  const T* p = w + (n / W * K + k) * W + n % W;
  if constexpr (sizeof(T) == 2) {
    uint32_t bits = uint32_t(p->bits) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
  } else {
    return *p;
  }
}

}  // namespace octavo
