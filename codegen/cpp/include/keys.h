// Which of a partition's 256 keys a row sees.
#pragma once
#include "vec.h"

namespace octavo {

constexpr int PARTITION = 256;        // keys per softmax
constexpr int STRIPS = PARTITION / W; // vectors of keys in it

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

}  // namespace octavo
