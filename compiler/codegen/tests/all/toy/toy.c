/* A model small enough to be checked by hand, written against mlcc.h alone:
 *   h = h / 2 + E[token]         (state: 8 floats, at first -1; E: VOCAB rows of 8 floats, the weights)
 *   logits[v] = sum h * E[v] + past
 * Work is sliced over workers with a barrier between the two phases.
 *
 * -DTOY_ABI=n        another ABI version
 * -DTOY_FEATURES=b   features that the best variant needs
 * -DTOY_ONLY_BEST    no baseline variant
 * -DTOY_MINIMAL      only `decode`: the runtime has to do without the rest
 * -DTOY_CONTEXT=n    a bounded context
 * -DTOY_BIAS=x       added to each logit (another build)
 */
#include "mlcc.h"

#define VOCAB 5
#define WIDTH 8
#define CHUNK 3
#ifndef TOY_ABI
#define TOY_ABI MLCC_ABI_VERSION
#endif
#ifndef TOY_FEATURES
#define TOY_FEATURES 0
#endif
#ifndef TOY_CONTEXT
#define TOY_CONTEXT 0
#endif
#ifndef TOY_BIAS
#define TOY_BIAS 0
#endif
#if defined(__aarch64__)
#define TARGET "aarch64"
#else
#define TARGET "x86-64"
#endif

static void meet(mlcc_ctx *c, uint32_t worker, uint32_t workers) {
  if (workers > 1) c->barrier(c->barrier_self, worker);
}

static int32_t feed(mlcc_ctx *c, uint32_t w, uint32_t ws, int all) {
  const float *e = (const float *)c->weights;
  float *h = (float *)c->state, *scratch = (float *)c->arena;
  if (c->n < 1 || c->n > CHUNK) return MLCC_BAD_LENGTH;
  for (int64_t t = 0; t < c->n; t++) {
    /* Null where further tokens of the prompt follow. */
    float *out = c->logits ? c->logits + (all ? t * VOCAB : 0) : 0;
    for (uint32_t i = w * WIDTH / ws; i < (w + 1) * WIDTH / ws; i++) {
      h[i] = h[i] * 0.5f + e[c->tokens[t] * WIDTH + i];
      scratch[i] = h[i];
    }
    meet(c, w, ws);
    for (uint32_t v = w * VOCAB / ws; out && v < (w + 1) * VOCAB / ws; v++) {
      float sum = (float)(c->past + t) + TOY_BIAS;
      for (int i = 0; i < WIDTH; i++) sum += scratch[i] * e[v * WIDTH + i];
      out[v] = sum;
    }
    meet(c, w, ws);
  }
  return MLCC_OK;
}

static int32_t decode(mlcc_ctx *c, uint32_t w, uint32_t ws) { return feed(c, w, ws, 0); }

#ifndef TOY_MINIMAL
static int32_t prefill(mlcc_ctx *c, uint32_t w, uint32_t ws) { return feed(c, w, ws, 0); }
static int32_t prefill_logits(mlcc_ctx *c, uint32_t w, uint32_t ws) { return feed(c, w, ws, 1); }

static int32_t create(mlcc_ctx *c, uint32_t w, uint32_t ws) {
  float *h = (float *)c->state;
  for (uint32_t i = w * WIDTH / ws; i < (w + 1) * WIDTH / ws; i++) h[i] = -1.0f;
  return MLCC_OK;
}

/* exp is left out: the shares of logits / temperature, enough to see that the buffers arrive. */
static int32_t softmax(mlcc_ctx *c, uint32_t w, uint32_t ws) {
  float sum = 0;
  (void)ws;
  if (w != 0) return MLCC_OK;
  for (int v = 0; v < VOCAB; v++) sum += c->logits[v] / c->temperature;
  for (int v = 0; v < VOCAB; v++) c->probs[v] = c->logits[v] / c->temperature / sum;
  return MLCC_OK;
}

#endif
static const char metadata_text[] = "{\"model\":\"toy\"}";

#define STR(s) {s, sizeof(s) - 1}

static const mlcc_entry entries[] = {
  {STR("decode"), MLCC_ENTRY_LAST_LOGITS, 0, decode, 0},
#ifndef TOY_MINIMAL
  {STR("prefill"), MLCC_ENTRY_LAST_LOGITS, 0, prefill, 0},
  {STR("prefill_logits"), MLCC_ENTRY_ALL_LOGITS, 0, prefill_logits, 0},
  {STR("create_kv_cache"), MLCC_ENTRY_STATE, 0, create, 0},
  {STR("reset_kv_cache"), MLCC_ENTRY_STATE, 0, create, 0},
  {STR("softmax_with_temperature"), MLCC_ENTRY_ROWS, 0, softmax, 0},
#endif
};
#define ENTRIES entries, sizeof(entries) / sizeof(entries[0])

static const mlcc_variant variants[] = {
  {STR("best"), TOY_FEATURES, ENTRIES},
#ifndef TOY_ONLY_BEST
  {STR("baseline"), 0, ENTRIES},
#endif
};
static const mlcc_param params[] = {
  {STR("embedding"), STR("f32"), STR(""), 2, 0, {VOCAB, WIDTH, 0, 0}, 0, VOCAB * WIDTH * 4},
};
static const mlcc_state states[] = {
  {STR("h"), 0, WIDTH * 4, MLCC_INIT_FILL_F32, -1.0f, STR("f32"), MLCC_STATE_RECURRENT, 0, 0, 0},
};

__attribute__((visibility("default"))) const mlcc_model_table mlcc_model = {
  .magic = MLCC_MAGIC,
  .abi_version = TOY_ABI,
  .struct_size = sizeof(mlcc_model_table),
  .target = STR(TARGET),
  .compiler = STR("toy 1"),
  .metadata = STR(metadata_text),
  .variants = variants,
  .n_variants = sizeof(variants) / sizeof(variants[0]),
  .params = params,
  .n_params = 1,
  .states = states,
  .n_states = 1,
  .plan.weights_bytes = VOCAB * WIDTH * 4,
  .plan.arena_bytes = WIDTH * 4,
  .plan.state_bytes = WIDTH * 4,
  .plan.alignment = 64,
  .plan.chunk = CHUNK,
  .plan.context = TOY_CONTEXT,
  .plan.batch = 1,
  .plan.vocab = VOCAB,
};
