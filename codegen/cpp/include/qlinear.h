// y[t, n] = sum over k of x[t, k] w[n, k], w quantised (quant.h), x quantised here to 8-bit integers, row by row.
//
// K is cut in segments with one scale of x and one of w. A segment's dot product is exact; an output is one chain over the
// segments in order, acc = fma(dot, w scale * x scale, acc), whatever the number of rows, the tile or the thread.
//
// With one tile of rows a panel's codes stream by once and are unpacked in registers. With more, 4-bit codes are unpacked once
// into the first cache for all of them, where segments are blocks of 32.
#pragma once
#include "linear.h"
#include "qdot.h"

namespace octavo {

// Rows whose sums of a block fill the registers.
constexpr int Q_ROWS = LANES == 16 ? 12 : LANES == 8 ? 5 : 2;
constexpr int Q_MOST_ROWS = 128;    // whose sums are kept at once
constexpr int64_t Q_AHEAD = 1024;   // bytes between a code's fetch and its use
constexpr int64_t UNPACKED = 1024;  // steps along K of a chunk, of one segment at least
constexpr int64_t MOST_GROUPS = UNPACKED / 8;
constexpr int64_t OWN_ROW = 16384;  // elements of a single row, which every thread quantises for itself

// Quantised rows: as tiles [depth/4][rows of the tile][4], one after the other, and numbers of each row, in the same order.
struct QRows {
  int8_t* codes;    // [depth/4][R][4]
  int32_t* starts;  // [blocks][R], what the sums of a block begin with
  float* scales;    // [segments][R]
  float* sums;      // [segments][R], of what the codes stand for

  static int64_t bytes(int64_t rows, const Segments& s) { return rows * (s.depth + 4 * s.blocks() + 8 * s.count); }

  QRows(void* room, int64_t rows, const Segments& s) {
    codes = (int8_t*)room;
    starts = (int32_t*)(codes + rows * s.depth);
    scales = (float*)(starts + rows * s.blocks());
    sums = scales + rows * s.count;
  }

  // The tile whose first row is t0.
  QRows tile(int64_t t0, const Segments& s) const { return at(t0 * s.depth, t0 * s.blocks(), t0 * s.count); }
  // A tile of so many rows from a segment on.
  QRows from(int64_t segment, int64_t rows, const Segments& s) const {
    int64_t k = segment * s.length;
    return at(k * rows, k / s.block * rows, segment * rows);
  }

 private:
  QRows() = default;
  QRows at(int64_t code, int64_t start, int64_t number) const {
    QRows r;
    r.codes = codes + code, r.starts = starts + start, r.scales = scales + number, r.sums = sums + number;
    return r;
  }
};

// Round to nearest even, for |x| < 2^22.
INLINE ni round_native(nf x) { return (ni)(x + 0x1.8p23f) - 0x4B400000; }

// The largest absolute value of x[0..n); NaN if there is one. In bits: those of numbers without a sign are in their order.
template <class T>
INLINE float largest_of(const T* x, int64_t n) {
  ni most{};
  for (int64_t k = 0; k < n; k += W) {
    F v = load_n(x + k, n - k);
    EACH(NV) {
      ni bits = (ni)v.v[i] & 0x7fffffff;
      most = bits > most ? bits : most;
    }
  }
  int32_t lanes[LANES];
  memcpy(lanes, &most, sizeof most);
  _Pragma("GCC unroll 4") for (int w = LANES / 2; w > 0; w /= 2)
    _Pragma("GCC unroll 8") for (int j = 0; j < w; j++) lanes[j] = lanes[j] > lanes[j + w] ? lanes[j] : lanes[j + w];
  float found;
  memcpy(&found, lanes, 4);
  return found;
}

// What a scale divides by; 0 for a scale of 0.
INLINE float inverse_of(float scale) { return scale == 0 ? 0.0f : 1 / scale; }

// x * inverse within a limit; what is no number then is zero.
INLINE nf scaled(nf x, nf inverse, nf limit) {
  nf v = x * inverse;
  nf limited = v < limit ? v : limit;
  limited = limited > -limit ? limited : -limit;
  return (nf)((ni)limited & (v == v));
}

// Codes of 16 elements: round(x * inverse) within 127.
struct Quantizer {
  nf inverse, limit;
  explicit Quantizer(float scale) : inverse(native_splat(inverse_of(scale))), limit(native_splat(127.0f)) {}

  INLINE I operator()(F x) const {
    I r;
    EACH(NV) r.v[i] = round_native(scaled(x.v[i], inverse, limit));
    return r;
  }
};

INLINE void store_codes(int8_t* p, I codes) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)codes.v[0]));
#elif defined(__AVX2__)
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)codes.v[0], (__m256i)codes.v[1]), 0xD8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#elif defined(__SSE2__)
  __m128i low = _mm_packs_epi32((__m128i)codes.v[0], (__m128i)codes.v[1]);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(low, _mm_packs_epi32((__m128i)codes.v[2], (__m128i)codes.v[3])));
#elif defined(__aarch64__)
  int16x8_t low = vcombine_s16(vmovn_s32((int32x4_t)codes.v[0]), vmovn_s32((int32x4_t)codes.v[1]));
  int16x8_t high = vcombine_s16(vmovn_s32((int32x4_t)codes.v[2]), vmovn_s32((int32x4_t)codes.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
#endif
}

// Sums of codes at even and at odd pairs of k.
struct PairSums {
  ni lanes{};
  INLINE void add(I codes) { EACH(NV) lanes += codes.v[i]; }
  INLINE void get(int32_t& first, int32_t& last) const {
    int32_t s[LANES];
    memcpy(s, &lanes, sizeof s);
    first = last = 0;
    _Pragma("GCC unroll 4") for (int j = 0; j < LANES; j += 4) first += s[j] + s[j + 1], last += s[j + 2] + s[j + 3];
  }
};

// A block of row r: its first `n` elements of x are codes, the others zero. Returns the sum of the codes.
template <Codes Q, class T>
INLINE int32_t quantize_block(const T* x, int64_t n, int64_t block, Quantizer quantize, int32_t zero, int64_t R, int8_t* to,
                              int32_t* start) {
  alignas(64) int8_t codes[BLOCK];
  PairSums sums;
  _Pragma("GCC unroll 2") for (int64_t j = 0; j < block; j += W) {
    int64_t count = n - j < block - j ? n - j : block - j;
    I part = quantize(load_n(x + j, count < 0 ? 0 : count));
    store_codes(codes + j, part);
    sums.add(part);
  }
  _Pragma("GCC unroll 8") for (int64_t j = 0; j < block; j += 4) memcpy(to + j * R, codes + j, 4);
  int32_t first_pairs, last_pairs;
  sums.get(first_pairs, last_pairs);
  *start = start_of<Q>(zero, first_pairs, last_pairs);
  return first_pairs + last_pairs;
}

// Row r of a tile of R rows.
template <Codes Q, class T>
KERNEL void quantize_row(const T* x, const Segments& s, int32_t zero, int64_t r, int64_t R, QRows out) {
  float scale = 0;
  for (int64_t i = 0, left = 0; i < s.count; i++, left -= s.length) {  // all of them first: their latencies overlap
    if (left <= 0) {
      int64_t begin = i * s.length, n = s.x_group < s.K - begin ? s.x_group : s.K - begin;
      scale = (n == BLOCK ? largest_of(x + begin, BLOCK) : largest_of(x + begin, n)) / 127;
      left = s.x_group;
    }
    out.scales[i * R + r] = scale;
  }
  int8_t* to = out.codes + r * 4;
  int32_t* start = out.starts + r;
  for (int64_t i = 0; i < s.count; i++) {
    int64_t begin = i * s.length, end = s.end(i);
    int32_t sum = 0;
    Quantizer quantize(out.scales[i * R + r]);
    for (int64_t k = begin; k < end; k += s.block, start += R, to += s.block * R) {
      bool whole = s.block == BLOCK && s.K - k >= BLOCK;
      if (whole) sum += quantize_block<Q>(x + k, BLOCK, BLOCK, quantize, zero, R, to, start);
      else sum += quantize_block<Q>(x + k, s.K - k, s.block, quantize, zero, R, to, start);
    }
    out.sums[i * R + r] = out.scales[i * R + r] * float(sum);
  }
}

// Rows of x, ld apart, quantised in tiles.
template <Codes Q, class T>
KERNEL void quantize_rows(Thread& th, const T* x, int64_t ld, RowTiles tiles, Segments s, int32_t zero, QRows out) {
  int64_t tile = 0;
  for (int64_t t = th.first(tiles.rows); t < th.last(tiles.rows); t++) {
    while (tiles.first(tile + 1) <= t) tile++;
    int64_t t0 = tiles.first(tile);
    quantize_row<Q>(x + t * ld, s, zero, t - t0, tiles.first(tile + 1) - t0, out.tile(t0, s));
  }
}

// Scales of a panel's groups, and what they add for each unit of a row's sum (lifts), as floats: [groups][16].
struct GroupNumbers {
  const float* scales;
  const float* lifts;
};

// sums[r][lane] (+)= over segments first..last-1 of one panel, for R rows. OPEN: each code has a byte.
// SINGLE: segments are blocks of 32. `codes`, the rows and the numbers of groups begin with the first segment.
template <Codes Q, int R, bool OPEN, bool SINGLE, bool LIFTS>
__attribute__((noinline)) void q_tile(QRows x, const uint8_t* codes, GroupNumbers groups, const Segments& s, int64_t first,
                                      int64_t last, float* sums) {
  constexpr bool HALVES = Q == Codes::U4 && !OPEN;
  nf acc[R][NV];
  if (first > 0) {
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) EACH(NV) acc[r][i] = native_load(sums + r * W + i * LANES);
  } else {
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) EACH(NV) acc[r][i] = nf{};
  }
  int64_t left = (first / s.per_group + 1) * s.per_group - first;
  // The sums of the next block.
  auto block = [&]() __attribute__((always_inline)) {
    BlockSums<Q, R> sum(x.starts);
    x.starts += R;
    auto two_quads = [&]() __attribute__((always_inline)) {
      nb a[NV], b[NV];
      if constexpr (HALVES) {
        EACH(NV) {
          nb both = load_bytes(codes + i * sizeof(nb));
          a[i] = low_halves(both), b[i] = high_halves(both);
        }
      } else {
        EACH(NV) a[i] = load_bytes(codes + i * sizeof(nb)), b[i] = load_bytes(codes + 4 * W + i * sizeof(nb));
      }
      if constexpr (!OPEN) {
        __builtin_prefetch(codes + Q_AHEAD);
        if constexpr (!HALVES) __builtin_prefetch(codes + Q_AHEAD + 64);
      }
      codes += HALVES ? 4 * W : 8 * W;
      sum.add(a, x.codes);
      sum.add(b, x.codes + R * 4);
      x.codes += R * 8;
    };
    if constexpr (SINGLE) {
      two_quads(), two_quads(), two_quads(), two_quads();
    } else {
      for (int64_t k = 0; k < s.block; k += 8) two_quads();
    }
    return sum;
  };
  for (int64_t i = first; i < last; i++) {
    nf dot[R][NV];
    auto sum = block();
    if constexpr (SINGLE) {
      _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) EACH(NV) dot[r][i] = __builtin_convertvector(sum.of(r, i), nf);
    } else {
      ni total[R][NV];
      _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) EACH(NV) total[r][i] = sum.of(r, i);
      for (int64_t k = i * s.length + s.block; k < s.end(i); k += s.block) {
        auto more = block();
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) EACH(NV) total[r][i] += more.of(r, i);
      }
      _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) EACH(NV) dot[r][i] = __builtin_convertvector(total[r][i], nf);
    }
    EACH(NV) {
      nf scale = native_load(groups.scales + i * LANES);
      _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)
        acc[r][i] = native_fma(dot[r][i], scale * native_splat(x.scales[r]), acc[r][i]);
      if constexpr (LIFTS) {
        nf lift = native_load(groups.lifts + i * LANES);
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) acc[r][i] = native_fma(lift, native_splat(x.sums[r]), acc[r][i]);
      }
    }
    x.scales += R, x.sums += R;
    if (--left == 0) groups.scales += W, groups.lifts += W, left = s.per_group;
  }
  _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) EACH(NV) memcpy(sums + r * W + i * LANES, &acc[r][i], sizeof(nf));
}

using QTile = void (*)(QRows, const uint8_t*, GroupNumbers, const Segments&, int64_t, int64_t, float*);

template <Codes Q, bool OPEN, bool SINGLE, bool LIFTS, int... R>
inline QTile q_tile_of(int64_t rows, std::integer_sequence<int, R...>) {
  static constexpr QTile TABLE[] = {q_tile<Q, R + 1, OPEN, SINGLE, LIFTS>...};
  return TABLE[rows - 1];
}

template <Codes Q, bool LIFTS>
inline QTile q_tile_for(int64_t rows, bool open, bool single) {
  constexpr auto ROWS = std::make_integer_sequence<int, Q_ROWS>();
  if (open) return q_tile_of<Q, Q == Codes::U4, true, LIFTS>(rows, ROWS);
  return single ? q_tile_of<Q, false, true, LIFTS>(rows, ROWS) : q_tile_of<Q, false, false, LIFTS>(rows, ROWS);
}

// Steps along K of a panel, a byte for each code.
inline void open_codes(const uint8_t* codes, int64_t steps, uint8_t* out) {
  for (int64_t k = 0; k < steps; k += 8, codes += 4 * W, out += 8 * W)
    EACH(NV) {
      nb both = load_bytes(codes + i * sizeof(nb)), low = low_halves(both), high = high_halves(both);
      memcpy(out + i * sizeof(nb), &low, sizeof low);
      memcpy(out + 4 * W + i * sizeof(nb), &high, sizeof high);
    }
}

// The numbers of groups first..last-1 as floats.
template <class M>
inline void group_numbers(const Panel<M>& panel, int64_t first, int64_t last, float* scales, float* lifts) {
  for (int64_t g = first; g < last; g++, scales += W, lifts += W)
    EACH(NV) {
      nf scale = panel.scale(g, i);
      memcpy(scales + i * LANES, &scale, sizeof scale);
      if constexpr (M::LIFTS) {
        nf lift = panel.lift(g, i, scale);
        memcpy(lifts + i * LANES, &lift, sizeof lift);
      }
    }
}

// sums[row - first row][16] of the rows of tiles first..last-1 with one panel, in chunks of K.
template <class M>
KERNEL void q_panel_sums(QRows x, RowTiles tiles, int64_t first, int64_t last, Panel<M> panel, const Segments& s, float* sums) {
  constexpr bool HALVES = M::CODES == Codes::U4;
  bool single = s.length == BLOCK, open = HALVES && single && last - first > 1;
  int64_t chunk = s.length < UNPACKED ? UNPACKED / s.length : 1;
  alignas(64) uint8_t room[HALVES ? UNPACKED * W : 1];
  alignas(64) float scales[MOST_GROUPS * W], lifts[M::LIFTS ? MOST_GROUPS * W : W];
  for (int64_t i = 0; i < s.count; i += chunk) {
    int64_t stop = i + chunk < s.count ? i + chunk : s.count, k = i * s.length;
    const uint8_t* codes = panel.codes + k / 4 * M::QUAD;
    group_numbers(panel, i / s.per_group, (stop - 1) / s.per_group + 1, scales, lifts);
    if (open) open_codes(codes, s.end(stop - 1) - k, room);
    for (int64_t tile = first; tile < last; tile++) {
      int64_t t0 = tiles.first(tile), rows = tiles.first(tile + 1) - t0;
      q_tile_for<M::CODES, M::LIFTS>(rows, open, single)(x.tile(t0, s).from(i, rows, s), open ? room : codes, {scales, lifts},
                                                         s, i, stop, sums + (t0 - tiles.first(first)) * W);
    }
  }
}

// How many runs of neighbours `units` panels are drawn in, where each is read once. Whoever begins a run waits for memory,
// which sees no more ahead of a panel than what follows it: a panel of 4-bit codes is read in less time than that takes.
inline int64_t num_runs(int64_t units, int threads) {
  constexpr int64_t LONGEST = 16;
  int64_t least = 4 * threads, runs = (units + LONGEST - 1) / LONGEST;
  runs = (runs + threads - 1) / threads * threads;
  return units < least ? units : runs < least ? least : runs;
}

// Calls sums(first tile, tile after the last, panel, room for their rows' sums), and the epilogue with what it leaves there.
// Threads draw a panel, or a pair, and a span of the rows, of at most `most` tiles of ROWS; with one tile, a run of panels.
template <bool PAIRED, int ROWS, int MOST_SUMS, class Sums, class Epilogue>
inline void share_panels(Thread& th, RowTiles tiles, int64_t N, Sums sums, Epilogue epilogue) {
  constexpr int64_t PANELS = PAIRED ? 2 : 1, MOST = MOST_SUMS / ROWS;
  int64_t units = (N + W - 1) / W, least = (tiles.count + MOST - 1) / MOST;
  int64_t wanted = (4 * th.count + units - 1) / units;  // few panels are split by rows, so that all threads work
  int64_t spans = wanted <= least ? least : wanted < tiles.count ? wanted : tiles.count;
  int64_t runs = tiles.count == 1 ? num_runs(units, th.count) : units;
  alignas(64) float room[PANELS][MOST_SUMS * W];
  auto unit = [&](int64_t at, int64_t first, int64_t last) {
    int64_t n = at * W, lanes = N - n < W ? N - n : W;
    for (int64_t p = 0; p < PANELS; p++) sums(first, last, at * PANELS + p, room[p]);
    int64_t t0 = tiles.first(first), t1 = tiles.first(last);
    for (int64_t t = t0; t < t1; t++) {
      const float* a = room[0] + (t - t0) * W;
      if constexpr (PAIRED) epilogue(t, n, load(a), load(a + MOST_SUMS * W), lanes);
      else epilogue(t, n, load(a), lanes);
    }
  };
  th.share(runs * spans, [&](int64_t item) {
    int64_t run = item % runs, span = item / runs;
    for (int64_t at = units * run / runs; at < units * (run + 1) / runs; at++)
      unit(at, tiles.count * span / spans, tiles.count * (span + 1) / spans);
  });
}

// The panels with quantised rows.
template <bool PAIRED, class M, class Epilogue>
inline void q_panels(Thread& th, QRows x, RowTiles tiles, int64_t N, M w, const Segments& s, Epilogue epilogue) {
  auto sums = [&](int64_t first, int64_t last, int64_t panel, float* room) {
    q_panel_sums(x, tiles, first, last, Panel<M>(w, panel), s, room);
  };
  share_panels<PAIRED, Q_ROWS, Q_MOST_ROWS>(th, tiles, N, sums, epilogue);
}

// As linear (linear.h) with a quantised matrix; x is quantised in groups of x_group (0: whole rows).
// scratch: QRows::bytes of the rows.
template <bool PAIRED, class T, class M, class Epilogue>
KERNEL void qlinear(Thread& th, const T* x, int64_t ld, int64_t rows, int64_t N, M w, int64_t x_group, void* scratch,
                    Epilogue epilogue) {
  if (rows == 0) return;
  Segments s(w.K, w.group, x_group);
  RowTiles tiles(rows, Q_ROWS);
  alignas(64) char own[OWN_ROW * 5 / 2];
  if (rows == 1 && s.depth <= OWN_ROW) {
    QRows row(own, 1, s);
    quantize_row<M::CODES>(x, s, w.zero, 0, 1, row);
    return q_panels<PAIRED>(th, row, tiles, N, w, s, epilogue);
  }
  QRows packed(scratch, rows, s);
  quantize_rows<M::CODES>(th, x, ld, tiles, s, w.zero, packed);
  th.sync();
  q_panels<PAIRED>(th, packed, tiles, N, w, s, epilogue);
}

}  // namespace octavo
