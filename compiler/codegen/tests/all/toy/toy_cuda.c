/* The toy of toy.c for a GPU: launch lists over kernels that fake_cuda.c has. Without `past` in the logits, or with it:
 * -DTOY_PAST. -DTOY_PROBS=n: a kind of argument that there is not. */
#include <stddef.h>

#include "mlcc.h"

#define VOCAB 5
#define WIDTH 8
#define STR(s) {s, sizeof(s) - 1}
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
#ifndef TOY_SM
#define TOY_SM 80
#endif

#define CONTROL(field) {MLCC_ARG_CONTROL, 0, offsetof(mlcc_control, field)}
#ifdef TOY_PAST
#define ROWS CONTROL(past)
#else
#define ROWS CONTROL(n_outputs)
#endif

static const mlcc_launch_arg feed_args[] = {
  {MLCC_ARG_STATE, 0, 0},  {MLCC_ARG_WEIGHTS, 0, 0}, {MLCC_ARG_TOKENS, 0, 0}, {MLCC_ARG_LOGITS, 0, 0},
  {MLCC_ARG_ARENA, 0, 16}, CONTROL(n),               ROWS,
};
#ifndef TOY_PROBS
#define TOY_PROBS MLCC_ARG_PROBS
#endif
static const mlcc_launch_arg softmax_args[] = {
  {MLCC_ARG_LOGITS, 0, 0}, {TOY_PROBS, 0, 0}, CONTROL(temperature),
};
#define ONE {0, 0, 1, 1}
#define FEED(name) {STR(name), {{5, 0, 1, 2}, ONE, ONE}, {32, 2, 1}, 50000, feed_args, COUNT(feed_args), MLCC_REPEAT_ONCE, 0}
/* An empty grid: must not be launched. */
#define EMPTY {STR("toy_never"), {ONE, {0, 0, 0, 7}, ONE}, {1, 1, 1}, 0, 0, 0, MLCC_REPEAT_ONCE, 0}

static const mlcc_launch last[] = {FEED("toy_feed"), EMPTY};
static const mlcc_launch all[] = {FEED("toy_feed_all")};
static const mlcc_launch softmax[] = {{STR("toy_softmax"), {ONE, ONE, ONE}, {1, 1, 1}, 0, softmax_args, 3, MLCC_REPEAT_ONCE, 0}};
static const mlcc_device_entry entries[] = {
  {STR("prefill"), last, COUNT(last)},
  {STR("decode"), last, COUNT(last)},
  {STR("prefill_logits"), all, COUNT(all)},
  {STR("softmax_with_temperature"), softmax, COUNT(softmax)},
};
static const uint8_t ptx[] = "// toy ptx";
static const mlcc_device_image images[] = {{STR("ptx"), TOY_SM, 0, ptx, sizeof(ptx) - 1}};
static const mlcc_state states[] = {
  {STR("h"), 0, WIDTH * 4, MLCC_INIT_FILL_F32, -1.0f, STR("f32"), MLCC_STATE_RECURRENT, 0, 0, 0},
};

__attribute__((visibility("default"))) const mlcc_model_table mlcc_model = {
  .magic = MLCC_MAGIC,
  .abi_version = MLCC_ABI_VERSION,
  .struct_size = sizeof(mlcc_model_table),
  .target = STR("cuda"),
  .compiler = STR("toy 1"),
  .metadata = STR("{\"model\":\"toy\"}"),
  .states = states,
  .n_states = 1,
  .images = images,
  .n_images = 1,
  .device_entries = entries,
  .n_device_entries = COUNT(entries),
  .plan.weights_bytes = VOCAB * WIDTH * 4,
  .plan.arena_bytes = 64,
  .plan.state_bytes = WIDTH * 4,
  .plan.alignment = 64,
  .plan.chunk = 3,
  .plan.batch = 1,
  .plan.vocab = VOCAB,
};
