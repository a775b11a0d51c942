/* The toy of toy.c for a GPU: launch lists over kernels that fake_cuda.c has. Without `past` in the logits (static
 * arguments, so `decode` can be a CUDA graph), or with it: -DTOY_PAST. */
#include "mlcc.h"

#define VOCAB 5
#define WIDTH 8
#define STR(s) {s, sizeof(s) - 1}
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
#ifndef TOY_SM
#define TOY_SM 80
#endif

#ifdef TOY_PAST
#define PAST {MLCC_ARG_PAST, 8, 0, 0}
#else
#define PAST {MLCC_ARG_INT, 8, 0, 0}
#endif

static const mlcc_launch_arg all_args[] = {
  {MLCC_ARG_STATE, 8, 0, 0}, {MLCC_ARG_WEIGHTS, 8, 0, 0}, {MLCC_ARG_TOKENS, 8, 0, 0}, {MLCC_ARG_LOGITS, 8, 0, 0},
  {MLCC_ARG_N, 4, 0, 0},     PAST,                     {MLCC_ARG_ARENA, 8, 16, 0}, {MLCC_ARG_INT, 4, 1, 0},
};
static const mlcc_launch_arg last_args[] = {
  {MLCC_ARG_STATE, 8, 0, 0}, {MLCC_ARG_WEIGHTS, 8, 0, 0}, {MLCC_ARG_TOKENS, 8, 0, 0}, {MLCC_ARG_LOGITS, 8, 0, 0},
  {MLCC_ARG_N, 4, 0, 0},     PAST,                     {MLCC_ARG_ARENA, 8, 16, 0}, {MLCC_ARG_INT, 4, 0, 0},
};
static const mlcc_launch_arg softmax_args[] = {
  {MLCC_ARG_LOGITS, 8, 0, 0}, {MLCC_ARG_PROBS, 8, 0, 0}, {MLCC_ARG_TEMPERATURE, 4, 0, 0},
};
#define ONE {0, 0, 1, 1}
#define FEED(args) {STR("toy_feed"), {{5, 0, 1, 2}, ONE, ONE}, {32, 2, 1}, 50000, args, COUNT(args)}
/* An empty grid: must not be launched. */
#define EMPTY {STR("toy_never"), {ONE, {0, 0, 0, 7}, ONE}, {1, 1, 1}, 0, 0, 0}

static const mlcc_launch last[] = {FEED(last_args), EMPTY};
static const mlcc_launch all[] = {FEED(all_args)};
static const mlcc_launch softmax[] = {{STR("toy_softmax"), {ONE, ONE, ONE}, {1, 1, 1}, 0, softmax_args, 3}};
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
  .weights_bytes = VOCAB * WIDTH * 4,
  .arena_bytes = 64,
  .state_bytes = WIDTH * 4,
  .alignment = 64,
  .chunk = 3,
  .batch = 1,
  .vocab = VOCAB,
};
