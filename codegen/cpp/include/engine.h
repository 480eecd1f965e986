// The exported functions. Included once, after the generated `forward`, `BLOCK_BYTES` and `NUM_WEIGHTS`.
#pragma once
#include <mutex>

#include "abi.h"
#include "pool.h"
#include "rows.h"
#include "sample.h"

namespace octavo {

struct Engine {
  Engine(const void* const* weights, int32_t count, int threads) : weights(weights, weights + count), pool(threads) {}
  std::vector<const void*> weights;
  Pool pool;
  std::mutex one_at_a_time;
};

constexpr int NUM_GROUPS = sizeof BLOCK_BYTES / sizeof BLOCK_BYTES[0];

}  // namespace octavo

extern "C" {

int32_t octavo_abi(void) { return 1; }

void* octavo_open(const void* const* weights, int32_t num_weights, int32_t num_threads) {
  if (num_weights != octavo::NUM_WEIGHTS) return nullptr;
  try {
    return new octavo::Engine(weights, num_weights, num_threads);
  } catch (...) {
    return nullptr;  // no memory, or no threads
  }
}

int32_t octavo_forward(void* engine, const octavo_step* step) {
  if (step->num_groups != octavo::NUM_GROUPS) return 1;
  auto& e = *static_cast<octavo::Engine*>(engine);
  std::lock_guard<std::mutex> lock(e.one_at_a_time);
  e.pool.run([&](octavo::Thread& th) { octavo::forward(th, *step, e.weights.data()); });
  return 0;
}

int32_t octavo_sample(void* engine, const octavo_sample_args* args) {
  auto& e = *static_cast<octavo::Engine*>(engine);
  std::lock_guard<std::mutex> lock(e.one_at_a_time);
  return octavo::sample(e.pool, *args);
}

void octavo_copy_blocks(void* engine, int32_t group, void* data, const int32_t* pairs, int32_t n) {
  auto& e = *static_cast<octavo::Engine*>(engine);
  std::lock_guard<std::mutex> lock(e.one_at_a_time);
  int64_t bytes = octavo::BLOCK_BYTES[group];
  e.pool.run([&](octavo::Thread& th) { octavo::copy_blocks(th, static_cast<char*>(data), bytes, pairs, n); });
}

void octavo_logprobs(void* engine, const float* logits, int32_t num_rows, const int32_t* ids, float* out) {
  auto& e = *static_cast<octavo::Engine*>(engine);
  std::lock_guard<std::mutex> lock(e.one_at_a_time);
  octavo::logprobs(e.pool, logits, num_rows, octavo::VOCAB_SIZE, ids, out);
}

void octavo_close(void* engine) { delete static_cast<octavo::Engine*>(engine); }
}
