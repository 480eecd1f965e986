/* The C ABI of docs/artifact.md around the tiny model of tests/runtime/fake.py, so that the loader, the packing and the
   ctypes declarations are tested without the compiler. Structures are written here again from the document. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct { void* data; const int32_t* slots; const int32_t* table; int64_t table_stride; } octavo_kv_group;
typedef struct {
  int32_t num_tokens, num_requests, num_rows, num_groups;
  const int32_t *ids, *pos, *starts, *lens, *rows;
  const octavo_kv_group* groups;
  void* arena;
  float* logits;
} octavo_step;
typedef struct {
  int32_t num_rows, vocab_size, num_top;
  const float* logits;
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  const uint64_t* seed;
  const int32_t *sample_index, *position;
  int32_t* ids;
  float* logprobs;
  int32_t* top_ids;
  float* top_logprobs;
} octavo_sample_args;
typedef struct { const float *w0, *w1; int32_t threads; } engine;

enum { BLOCK = 16, VOCAB = 97, SLOT_BYTES = 128 };

static uint64_t mix(uint64_t h, uint64_t word) {
  h = (h ^ word) * 0xBF58476D1CE4E5B9u;
  h ^= h >> 27;
  h *= 0x94D049BB133111EBu;
  return h ^ (h >> 31);
}
#ifndef START
#define START 0x9E3779B97F4A7C15u
#endif

int32_t octavo_abi(void) { return 3; }

static int holds_weights(const engine* e) {
  for (int i = 0; i < 5; i++)
    if (e->w0[i] != i) return 0;
  for (int i = 0; i < 48; i++)
    if (e->w1[i] != i) return 0;
  return 1;
}

void* octavo_open(const void* const* weights, int32_t num_weights, int32_t num_threads) {
  if (num_weights != 2 || num_threads == 77) return NULL;
  engine* e = malloc(sizeof *e);
  *e = (engine){weights[0], weights[1], num_threads};
  return holds_weights(e) ? e : NULL;
}

void octavo_set_weights(void* engine_, const void* const* weights) {
  engine* e = engine_;
  e->w0 = weights[0], e->w1 = weights[1];
}

static uint64_t* slot(const octavo_kv_group* g, int64_t s) {
  return (uint64_t*)((char*)g->data + s * SLOT_BYTES);
}

static int64_t slot_at(const octavo_kv_group* g, int r, int p) {
  return (int64_t)g->table[r * g->table_stride + p / BLOCK] * BLOCK + p % BLOCK;
}

int32_t octavo_forward(void* e, const octavo_step* s) {
  if (!holds_weights(e)) return 15;
  uint64_t* states = s->arena;
  if ((uintptr_t)s->arena % 64 || s->num_groups != 1) return 1;
  const octavo_kv_group* g = s->groups;
  for (int r = 0; r < s->num_requests; r++)
    for (int t = s->starts[r]; t < s->starts[r + 1]; t++) {
      int p = s->pos[t];
      if (s->ids[t] == 13 && p == 0) return 13;
      if (p != s->lens[r] - (s->starts[r + 1] - s->starts[r]) + t - s->starts[r]) return 2;
      if (g->slots[t] != slot_at(g, r, p)) return 3;
      uint64_t* mine = slot(g, g->slots[t]);
      uint64_t state = s->ids[t], key = mix(mix(mix(START, 0), state), p);
      mine[0] = key;
      uint64_t second = mix(mix(START, 7), state), whole = mix(START, state);
      for (int k = 0; k <= p; k++) second = mix(second, slot(g, slot_at(g, r, k))[0]);
      for (int k = 0; k <= p; k++) whole = mix(whole, slot(g, slot_at(g, r, k))[0]);
      mine[1] = second;
      for (int k = 0; k <= p; k++) whole = mix(whole, slot(g, slot_at(g, r, k))[1]);
      states[t] = whole;
    }
  for (int q = 0; q < s->num_rows; q++)
    for (int v = 0; v < VOCAB; v++)
      s->logits[q * VOCAB + v] = (float)(mix(states[s->rows[q]], v) >> 40) * 0x1p-22f;
  return 0;
}

static float logprob(const float* l, int id) {
  double sum = 0;
  for (int v = 0; v < VOCAB; v++) sum += exp(l[v]);
  return (float)(l[id] - log(sum));
}

/* Greedy. With num_top == 7 the parameters come back as top_logprobs. */
int32_t octavo_sample(void* e, const octavo_sample_args* a) {
  (void)e;
  if (a->vocab_size != VOCAB) return 1;
  for (int q = 0; q < a->num_rows; q++) {
    const float* l = a->logits + (int64_t)q * VOCAB;
    int best = 0;
    for (int v = 1; v < VOCAB; v++)
      if (l[v] > l[best]) best = v;
    a->ids[q] = best;
    if (a->logprobs) a->logprobs[q] = logprob(l, best);
    for (int k = 0; k < a->num_top; k++) a->top_ids[q * a->num_top + k] = 100 * q + k;
    if (a->num_top == 7) {
      float echo[7] = {a->temperature[q], a->top_p[q], a->min_p[q], (float)a->top_k[q],
                       (float)a->seed[q], (float)a->sample_index[q], (float)a->position[q]};
      memcpy(a->top_logprobs + 7 * q, echo, sizeof echo);
    }
  }
  return 0;
}

void octavo_copy_blocks(void* e, int32_t group, void* data, const int32_t* pairs, int32_t n) {
  (void)e, (void)group;
  for (int i = 0; i < n; i++)
    memcpy((char*)data + (int64_t)pairs[2 * i + 1] * BLOCK * SLOT_BYTES,
           (char*)data + (int64_t)pairs[2 * i] * BLOCK * SLOT_BYTES, BLOCK * SLOT_BYTES);
}

void octavo_logprobs(void* e, const float* logits, int32_t num_rows, const int32_t* ids, float* out) {
  (void)e;
  for (int q = 0; q < num_rows; q++) out[q] = logprob(logits + (int64_t)q * VOCAB, ids[q]);
}

void octavo_record(void* e, int64_t* marks, int64_t marks_per_thread) { (void)e, (void)marks, (void)marks_per_thread; }

void octavo_close(void* e) { free(e); }
