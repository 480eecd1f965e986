// What engines of all graphs have alike. common.cpp defines it: built apart, it is the same code for every graph.
#pragma once
#include "abi.h"
#include "pool.h"

namespace octavo {

int32_t sample_rows(Pool& pool, const octavo_sample_args& args);

void score_rows(Pool& pool, const float* logits, int64_t rows, int64_t V, const int32_t* ids, float* out);

octavo_limits measure_limits(Pool& pool, const char* data, int64_t bytes);

}  // namespace octavo
