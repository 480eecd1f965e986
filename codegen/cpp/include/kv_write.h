// Writes into the KV cache: new tokens into their slots and, where scales span a block, full blocks from the tail.
// A stream of keys lies as [heads, size, BLOCK] in a block, another as [heads, BLOCK, size].
#pragma once
#include "kv_encode.h"
#include "pool.h"

namespace octavo {

// One head's row of a token.
template <bool KEYS, int BLOCK, class T>
inline void write_plain(const float* row, int64_t size, T* head, int64_t token) {
  if constexpr (KEYS)
    for (int64_t d = 0; d < size; d++) convert(row[d], head + d * BLOCK + token);
  else
    for (int64_t d = 0; d < size; d += W) store_n(head + token * size + d, load_n(row + d, size - d), size - d);
}

template <int BLOCK, class T>
inline void write_key(const float* row, int64_t size, const kv::Scale& scale, char* head, int64_t token) {
  for (int64_t d = 0; d < size; d += W) {
    uint8_t codes[W];
    kv::encode<T>(load_n(row + d, size - d), scale, codes);
    for (int64_t j = 0; j < W && d + j < size; j++) {
      char* tokens = head + (d + j) * kv::bytes<T>(BLOCK);
      if constexpr (kv::PACKED<T>) kv::put(codes[j], (T*)(tokens + kv::bytes<T>(token / W * W)), token % W);
      else tokens[token] = char(codes[j]);
    }
  }
}

template <class T, class S>
inline void write_value(const S* row, int64_t size, const kv::Scale& scale, char* to) {
  for (int64_t d = 0; d < size; d += W) {
    uint8_t codes[W];
    kv::encode<T>(load_n(row + d, size - d), scale, codes);
    if constexpr (kv::PACKED<T>) kv::pack(codes, (T*)(to + kv::bytes<T>(d)));
    else memcpy(to + d, codes, size_t(size - d < W ? size - d : W));
  }
}

// Bytes of a token's row in a stream of values; strips of packed codes are whole.
template <class T>
constexpr int64_t row_bytes(int64_t size) { return kv::bytes<T>(kv::PACKED<T> ? (size + W - 1) / W * W : size); }

template <bool KEYS, int BLOCK, class T>
inline void write_codes(const float* row, int64_t size, char* block, const Place& at, int64_t head, int64_t token) {
  kv::Scale scale = kv::measure<T>(row, size);
  int64_t index = head * BLOCK + token;
  memcpy(block + at.scales + index * 2, &scale.scale, 2);
  if (kv::SHIFTED<T>) memcpy(block + at.minima + index * 2, &scale.minimum, 2);
  char* codes = block + at.codes;
  if constexpr (KEYS) write_key<BLOCK, T>(row, size, scale, codes + head * size * kv::bytes<T>(BLOCK), token);
  else write_value<T>(row, size, scale, codes + index * row_bytes<T>(size));
}

// One stream's rows [T, heads, size] into its slots, in blocks of BLOCK tokens. Threads divide the tokens or, where
// tokens share bytes, the heads.
template <bool KEYS, int BLOCK, class T>
KERNEL void kv_write(Thread& th, const float* x, int64_t ld, int64_t tokens, int64_t heads, int64_t size,
                     const int32_t* slots, char* data, int64_t block_bytes, Place at) {
  constexpr bool SHARED = KEYS && kv::PACKED<T>;
  int64_t t0 = SHARED ? 0 : th.first(tokens), t1 = SHARED ? tokens : th.last(tokens);
  int64_t h0 = SHARED ? th.first(heads) : 0, h1 = SHARED ? th.last(heads) : heads;
  for (int64_t t = t0; t < t1; t++) {
    if (slots[t] < 0) continue;
    char* block = data + slots[t] / BLOCK * block_bytes;
    int64_t token = slots[t] % BLOCK;
    for (int64_t h = h0; h < h1; h++) {
      const float* row = x + t * ld + h * size;
      if constexpr (kv::SCALED<T>) write_codes<KEYS, BLOCK, T>(row, size, block, at, h, token);
      else write_plain<KEYS, BLOCK>(row, size, (T*)(block + at.codes) + h * size * BLOCK, token);
    }
  }
}

// A stream of a group's cache, or of its tail.
struct Stored {
  char* data;
  int64_t block_bytes;
  Place at;
  const int32_t* table;  // [R, stride]
  int64_t stride;

  char* block(int64_t request, int64_t index) const { return data + table[request * stride + index] * block_bytes; }
};

// A head's keys of a full block, each channel with a scale of its own.
template <int BLOCK, class T, class S>
inline void seal_keys(const S* from, int64_t size, char* block, const Place& at, int64_t head) {
  for (int64_t d = 0; d < size; d++) {
    int64_t index = head * size + d;
    const S* tokens = from + d * BLOCK;
    kv::Scale scale = kv::measure<T>(tokens, BLOCK);
    memcpy(block + at.scales + index * 2, &scale.scale, 2);
    memcpy(block + at.minima + index * 2, &scale.minimum, 2);
    write_value<T>(tokens, BLOCK, scale, block + at.codes + index * kv::bytes<T>(BLOCK));
  }
}

// A head's values of a full block, each token with a scale of its own.
template <int BLOCK, class T, class S>
inline void seal_values(const S* from, int64_t size, char* block, const Place& at, int64_t head) {
  for (int64_t token = 0; token < BLOCK; token++) {
    int64_t index = head * BLOCK + token;
    const S* row = from + token * size;
    kv::Scale scale = kv::measure<T>(row, size);
    memcpy(block + at.scales + index * 2, &scale.scale, 2);
    if (kv::SHIFTED<T>) memcpy(block + at.minima + index * 2, &scale.minimum, 2);
    write_value<T>(row, size, scale, block + at.codes + index * row_bytes<T>(size));
  }
}

// One stream's blocks that become full in this step, from the tail, of elements S, into the cache, of codes T. KEYS have
// their scales per channel, others per token.
template <bool KEYS, int BLOCK, class T, class S>
KERNEL void kv_seal(Thread& th, int64_t heads, int64_t size, const int32_t* lens, const int32_t* starts,
                    int64_t requests, Stored cache, Stored tail) {
  int64_t item = 0;  // a head of a block of a request
  for (int64_t r = 0; r < requests; r++) {
    int64_t before = lens[r] - (starts[r + 1] - starts[r]);
    for (int64_t i = before / BLOCK; i < lens[r] / BLOCK; i++)
      for (int64_t h = 0; h < heads; h++) {
        if (item++ % th.count != th.id) continue;
        const S* from = (const S*)(tail.block(r, i) + tail.at.codes) + h * size * BLOCK;
        if constexpr (KEYS) seal_keys<BLOCK, T>(from, size, cache.block(r, i), cache.at, h);
        else seal_values<BLOCK, T>(from, size, cache.block(r, i), cache.at, h);
      }
  }
}

}  // namespace octavo
