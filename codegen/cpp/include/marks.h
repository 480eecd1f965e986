// What a profiled step leaves behind: when each thread came to each kernel, and when it waited for the others.
#pragma once
#include <chrono>

#include "abi.h"

namespace octavo {

inline int64_t now_ns() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// One thread's marks, in order; those that find no room are dropped.
struct Marks {
  octavo_mark *next, *end;

  void add(int64_t what) {
    if (next != end) *next++ = {now_ns(), what};
  }
};

}  // namespace octavo
