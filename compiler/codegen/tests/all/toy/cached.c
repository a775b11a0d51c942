/* A model with KV caches that can be checked by hand, written against mlcc.h alone:
 *   row[p]    = E[token at position p]                  (two caches: `k` holds E, `v` holds 2 * E)
 *   logits[v] = sum over p <= position of (1 + p % 3) * sum_i k[p][i] * E[v][i], and the same with v[p] - 2 * k[p] (= 0)
 * Rows beyond the sequence are never read: create_kv_cache leaves them as they are.
 *
 * -DTOY_CONTEXT=n    planned rows
 * -DTOY_ROW=n        floats of a row (at least 8, the rest is not used)
 * -DTOY_BAD_ROWS=n   rows that the table claims
 * -DTOY_WINDOW=n     only the n newest rows are seen, and older ones may be dropped; p above is the position
 * -DTOY_FLAGS=n      flags of the table
 * -DTOY_LENGTH       a state for the announced length of the sequence, at byte 8
 * -DTOY_LAST=n       calls that go beyond so many tokens fail
 * -DTOY_CHUNK=n      tokens of a call
 * -DTOY_BATCH=n      sequences of a call of `decode_batch` and `step`, which there are from 2 on
 * -DTOY_GAP=n        bytes of a page that nobody uses, a multiple of 64
 * -DTOY_MIXED        a recurrent state besides: the sum of all tokens, added to every logit
 */
#include "mlcc.h"

#define VOCAB 5
#define WIDTH 8
#ifndef TOY_CHUNK
#define TOY_CHUNK 3
#endif
#ifndef TOY_BATCH
#define TOY_BATCH 1
#endif
#ifndef TOY_GAP
#define TOY_GAP 0
#endif
#ifndef TOY_CONTEXT
#define TOY_CONTEXT 300
#endif
#ifndef TOY_FLAGS
#define TOY_FLAGS 0
#endif
#ifndef TOY_ROW
#define TOY_ROW 8
#endif
#define ROW_BYTES (TOY_ROW * 4ULL)
#define CACHE_BYTES (TOY_CONTEXT * ROW_BYTES)
/* In a page. */
#define K_AT 0ULL
#define V_AT (MLCC_PAGE_ROWS * ROW_BYTES + TOY_GAP)
#define PAGE_BYTES (V_AT + MLCC_PAGE_ROWS * ROW_BYTES)
#ifdef TOY_WINDOW
#define FIRST_SEEN (t >= TOY_WINDOW ? t - TOY_WINDOW + 1 : 0)
#else
#define FIRST_SEEN 0
#endif
#if defined(__aarch64__)
#define TARGET "aarch64"
#else
#define TARGET "x86-64"
#endif

/* Row `t` of the cache that begins at `part` of every page of a sequence. */
static float *row_of(const mlcc_ctx *c, const mlcc_sequence *s, int64_t t, uint64_t part) {
  const uint64_t page = (uint64_t)s->page_table[t / MLCC_PAGE_ROWS];
  return (float *)(c->pages + page * PAGE_BYTES + part + t % MLCC_PAGE_ROWS * ROW_BYTES);
}

/* The tokens of one sequence; logits of the last one, or of all. */
static int32_t feed(const mlcc_ctx *c, const mlcc_sequence *s, float *logits, int all) {
  const float *e = (const float *)c->weights;
  const int32_t *tokens = c->tokens + s->first;
  float *sum = (float *)s->state;
  if (s->past + s->rows > TOY_CONTEXT) return MLCC_CONTEXT_FULL;
#ifdef TOY_LAST
  if (s->past + s->rows > TOY_LAST) return MLCC_BAD_TOKEN;
#endif
  (void)sum;
#ifdef TOY_WINDOW
  const int64_t dropped = *(const int32_t *)(s->state + 4);
#else
  const int64_t dropped = 0;
#endif
  for (int64_t t = s->past; t < s->past + s->rows; t++) {
    const float *row = e + tokens[t - s->past] * WIDTH;
    /* Null where further tokens of the prompt follow. */
    float *out = logits ? logits + (all ? (t - s->past) * VOCAB : 0) : 0;
    float *new_k = row_of(c, s, t, K_AT), *new_v = row_of(c, s, t, V_AT);
    for (int i = 0; i < WIDTH; i++) new_k[i] = row[i], new_v[i] = 2 * row[i];
#ifdef TOY_MIXED
    *sum += (float)tokens[t - s->past];
#endif
    for (int o = 0; out && o < VOCAB; o++) {
      float logit = 0;
      for (int64_t p = FIRST_SEEN; p <= t; p++) {
        const float *k = row_of(c, s, p, K_AT), *v = row_of(c, s, p, V_AT);
        for (int i = 0; i < WIDTH; i++)
          logit += (float)(1 + (dropped + p) % 3) * k[i] * e[o * WIDTH + i] + (v[i] - 2 * k[i]);
      }
#ifdef TOY_MIXED
      logit += *sum;
#endif
      out[o] = logit;
    }
  }
  return MLCC_OK;
}

static int32_t one(const mlcc_ctx *c, int all) {
  if (c->n < 1 || c->n > TOY_CHUNK) return MLCC_BAD_LENGTH;
  const mlcc_sequence s = {.state = c->state, .page_table = c->page_table, .past = c->past, .first = 0, .rows = c->n};
  return feed(c, &s, c->logits, all);
}
static int32_t once(mlcc_ctx *c, uint32_t w, uint32_t ws) { return (void)ws, w ? MLCC_OK : one(c, 0); }
static int32_t all(mlcc_ctx *c, uint32_t w, uint32_t ws) { return (void)ws, w ? MLCC_OK : one(c, 1); }

#if TOY_BATCH > 1
#define ROWS (TOY_CHUNK > TOY_BATCH ? TOY_CHUNK : TOY_BATCH)
/* Those of all sequences, then the wanted ones. */
static int32_t together(const mlcc_ctx *c, int wanted) {
  float logits[ROWS * VOCAB];
  if (c->n < 1 || c->n > ROWS || c->b < 1 || c->b > TOY_BATCH) return MLCC_BAD_LENGTH;
  for (int64_t i = 0, first = 0; i < c->b; first += c->sequences[i].rows, i++) {
    const mlcc_sequence *s = &c->sequences[i];
    if (s->first != first || s->rows < 1 || first + s->rows > c->n) return MLCC_BAD_LENGTH;
    const int32_t status = feed(c, s, logits + first * VOCAB, 1);
    if (status != MLCC_OK) return status;
  }
  for (int64_t i = 0; i < (wanted ? c->n_outputs : c->n); i++)
    for (int v = 0; v < VOCAB; v++) c->logits[i * VOCAB + v] = logits[(wanted ? c->output_rows[i] : i) * VOCAB + v];
  return MLCC_OK;
}
static int32_t decode_all(mlcc_ctx *c, uint32_t w, uint32_t ws) { return (void)ws, w ? MLCC_OK : together(c, 0); }
static int32_t step_all(mlcc_ctx *c, uint32_t w, uint32_t ws) { return (void)ws, w ? MLCC_OK : together(c, 1); }
#endif
static int32_t create(mlcc_ctx *c, uint32_t w, uint32_t ws) {
  (void)ws;
  if (w == 0) ((float *)c->state)[0] = ((float *)c->state)[1] = ((float *)c->state)[2] = 0;
  return MLCC_OK;
}
static const char metadata_text[] = "{\"model\":\"toy\"}";

#ifndef TOY_BAD_ROWS
#define TOY_BAD_ROWS TOY_CONTEXT
#endif
#define STR(s) {s, sizeof(s) - 1}
#define CACHE(name, at) {STR(name), at, CACHE_BYTES, MLCC_INIT_ZERO, 0, STR("f32"), MLCC_STATE_CACHE, 0, TOY_BAD_ROWS, ROW_BYTES}

static const mlcc_entry entries[] = {
  {STR("prefill"), MLCC_ENTRY_LAST_LOGITS, 0, once, 0},
  {STR("decode"), MLCC_ENTRY_LAST_LOGITS, 0, once, 0},
  {STR("prefill_logits"), MLCC_ENTRY_ALL_LOGITS, 0, all, 0},
#if TOY_BATCH > 1
  {STR("decode_batch"), MLCC_ENTRY_BATCH, 0, decode_all, 0},
  {STR("step"), MLCC_ENTRY_RAGGED, 0, step_all, 0},
#endif
  {STR("create_kv_cache"), MLCC_ENTRY_STATE, 0, create, 0},
  {STR("reset_kv_cache"), MLCC_ENTRY_STATE, 0, create, 0},
};
static const mlcc_variant variants[] = {{STR("baseline"), 0, entries, sizeof(entries) / sizeof(entries[0])}};
static const mlcc_state states[] = {
#ifdef TOY_MIXED
  {STR("sum"), 0, 4, MLCC_INIT_ZERO, 0, STR("f32"), MLCC_STATE_RECURRENT, 0, 0, 0},
#endif
#ifdef TOY_WINDOW
  {STR("dropped"), 4, 4, MLCC_INIT_ZERO, 0, STR("i32"), MLCC_STATE_DROPPED_ROWS, 0, TOY_WINDOW, 0},
#endif
#ifdef TOY_LENGTH
  {STR("length"), 8, 4, MLCC_INIT_ZERO, 0, STR("i32"), MLCC_STATE_SEQUENCE_LENGTH, 0, 0, 0},
#endif
  CACHE("k", K_AT),
  CACHE("v", V_AT),
};

__attribute__((visibility("default"))) const mlcc_model_table mlcc_model = {
  .magic = MLCC_MAGIC,
  .abi_version = MLCC_ABI_VERSION,
  .struct_size = sizeof(mlcc_model_table),
  .flags = TOY_FLAGS,
  .target = STR(TARGET),
  .compiler = STR("toy 1"),
  .metadata = STR(metadata_text),
  .variants = variants,
  .n_variants = 1,
  .states = states,
  .n_states = sizeof(states) / sizeof(states[0]),
  .plan.weights_bytes = VOCAB * WIDTH * 4,
  .plan.state_bytes = 64,
  .plan.page_bytes = PAGE_BYTES,
  .plan.alignment = 64,
  .plan.chunk = TOY_CHUNK,
  .plan.context = TOY_CONTEXT,
  .plan.batch = TOY_BATCH,
  .plan.vocab = VOCAB,
};
