// The exported functions. Included once, after the generated `forward`, `BLOCK_BYTES` and `NUM_WEIGHTS`.
#pragma once
#include <memory>
#include <mutex>

#include "abi.h"
#include "common.h"
#include "pool.h"
#include "rows.h"

namespace octavo {

struct Engine {
  Engine(const void* const* weights, int32_t count, int threads)
      : weights(weights, weights + count), pool(std::make_shared<Pool>(threads)) {}
  std::vector<const void*> weights;
  std::shared_ptr<Pool> pool;
  octavo_mark* marks = nullptr;  // [threads, marks_per_thread], or null
  int64_t marks_per_thread = 0;
  std::mutex one_at_a_time;
};

// The step as one thread runs it, with marks.
inline void recorded(Thread& th, Engine& e, const octavo_step& step) {
  octavo_mark* mine = e.marks + th.id * e.marks_per_thread;
  Marks marks{mine, mine + e.marks_per_thread};
  th.marks = &marks;
  forward(th, step, e.weights.data());
  th.sync();
  th.mark(OCTAVO_END);
}

constexpr int NUM_GROUPS = sizeof BLOCK_BYTES / sizeof BLOCK_BYTES[0];

}  // namespace octavo

extern "C" {

int32_t octavo_abi(void) { return 3; }

void* octavo_open(const void* const* weights, int32_t num_weights, int32_t num_threads) {
  if (num_weights != octavo::NUM_WEIGHTS) return nullptr;
  try {
    return new octavo::Engine(weights, num_weights, num_threads);
  } catch (...) {
    return nullptr;  // no memory, or no threads
  }
}

void octavo_set_weights(void* engine, const void* const* weights) {
  auto& e = *static_cast<octavo::Engine*>(engine);
  std::lock_guard<std::mutex> lock(e.one_at_a_time);
  e.weights.assign(weights, weights + octavo::NUM_WEIGHTS);
}

// Works with the threads of another library's engine from now on, and ends its own: two pools whose threads spin between
// steps would be in each other's way. Both libraries are of one artifact, built of the same headers; one step at a time.
void octavo_share_threads(void* engine, void* other) {
  auto& e = *static_cast<octavo::Engine*>(engine);
  std::lock_guard<std::mutex> lock(e.one_at_a_time);
  e.pool = static_cast<octavo::Engine*>(other)->pool;
}

int32_t octavo_forward(void* engine, const octavo_step* step) {
  if (step->num_groups != octavo::NUM_GROUPS) return 1;
  auto& e = *static_cast<octavo::Engine*>(engine);
  std::lock_guard<std::mutex> lock(e.one_at_a_time);
  e.pool->run([&](octavo::Thread& th) {
    if (e.marks) octavo::recorded(th, e, *step);
    else octavo::forward(th, *step, e.weights.data());
  });
  return 0;
}

int32_t octavo_sample(void* engine, const octavo_sample_args* args) {
  auto& e = *static_cast<octavo::Engine*>(engine);
  std::lock_guard<std::mutex> lock(e.one_at_a_time);
  return octavo::sample_rows(*e.pool, *args);
}

void octavo_copy_blocks(void* engine, int32_t group, void* data, const int32_t* pairs, int32_t n) {
  auto& e = *static_cast<octavo::Engine*>(engine);
  std::lock_guard<std::mutex> lock(e.one_at_a_time);
  int64_t bytes = octavo::BLOCK_BYTES[group];
  e.pool->run([&](octavo::Thread& th) { octavo::copy_blocks(th, static_cast<char*>(data), bytes, pairs, n); });
}

void octavo_logprobs(void* engine, const float* logits, int32_t num_rows, const int32_t* ids, float* out) {
  auto& e = *static_cast<octavo::Engine*>(engine);
  std::lock_guard<std::mutex> lock(e.one_at_a_time);
  octavo::score_rows(*e.pool, logits, num_rows, octavo::VOCAB_SIZE, ids, out);
}

void octavo_record(void* engine, octavo_mark* marks, int64_t marks_per_thread) {
  auto& e = *static_cast<octavo::Engine*>(engine);
  std::lock_guard<std::mutex> lock(e.one_at_a_time);
  e.marks = marks;
  e.marks_per_thread = marks_per_thread;
}

void octavo_measure(int32_t num_threads, const void* data, int64_t bytes, octavo_limits* limits) {
  octavo::Pool pool(num_threads);
  *limits = octavo::measure_limits(pool, static_cast<const char*>(data), bytes);
}

void octavo_close(void* engine) { delete static_cast<octavo::Engine*>(engine); }
}
