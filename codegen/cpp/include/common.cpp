#include "common.h"

#include "limits.h"
#include "sample.h"

namespace octavo {

int32_t sample_rows(Pool& pool, const octavo_sample_args& args) { return sample(pool, args); }

void score_rows(Pool& pool, const float* logits, int64_t rows, int64_t V, const int32_t* ids, float* out) {
  logprobs(pool, logits, rows, V, ids, out);
}

octavo_limits measure_limits(Pool& pool, const char* data, int64_t bytes) { return measure(pool, data, bytes); }

}  // namespace octavo
