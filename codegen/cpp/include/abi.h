// The C interface of a compiled model, version 3; docs/artifact.md says what each field means.
#pragma once
#include <cstdint>

extern "C" {

struct octavo_kv_group {
  void* data;
  const int32_t* slots;  // [T]
  const int32_t* table;  // [R, table_stride]
  int64_t table_stride;
};

struct octavo_step {
  int32_t num_tokens, num_requests, num_rows, num_groups;
  const int32_t *ids, *pos;  // [T]
  const int32_t* starts;     // [R+1]
  const int32_t* lens;       // [R]
  const int32_t* rows;       // [Q]
  const octavo_kv_group* groups;
  void* arena;               // 64-byte aligned
  float* logits;             // [Q, V]
};

struct octavo_sample_args {
  int32_t num_rows, vocab_size, num_top;
  const float* logits;  // [Q, V]
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  const uint64_t* seed;
  const int32_t *sample_index, *position;
  int32_t* ids;
  float* logprobs;
  int32_t* top_ids;
  float* top_logprobs;
};

// What a thread did from `ns` on (a steady clock): a kernel by its number, or one of the negative values.
struct octavo_mark {
  int64_t ns, what;
};
enum { OCTAVO_WAIT = -1, OCTAVO_RESUME = -2, OCTAVO_END = -3 };

struct octavo_limits {
  double read_bytes_per_s, f32_ops_per_s, bf16_ops_per_s, i8_ops_per_s, u4_ops_per_s;
};

#define OCTAVO_EXPORT __attribute__((visibility("default")))
OCTAVO_EXPORT int32_t octavo_abi(void);
OCTAVO_EXPORT void* octavo_open(const void* const* weights, int32_t num_weights, int32_t num_threads);
OCTAVO_EXPORT void octavo_share_threads(void* engine, void* other);
OCTAVO_EXPORT int32_t octavo_forward(void* engine, const octavo_step* step);
OCTAVO_EXPORT int32_t octavo_sample(void* engine, const octavo_sample_args* args);
OCTAVO_EXPORT void octavo_copy_blocks(void* engine, int32_t group, void* data, const int32_t* pairs, int32_t n);
OCTAVO_EXPORT void octavo_logprobs(void* engine, const float* logits, int32_t num_rows, const int32_t* ids, float* out);
OCTAVO_EXPORT void octavo_record(void* engine, octavo_mark* marks, int64_t marks_per_thread);
OCTAVO_EXPORT void octavo_measure(int32_t num_threads, const void* data, int64_t bytes, octavo_limits* limits);
OCTAVO_EXPORT void octavo_set_weights(void* engine, const void* const* weights);
OCTAVO_EXPORT void octavo_close(void* engine);
}
