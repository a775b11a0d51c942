/* The toy of cached.c (one cache, `k`) for a GPU: a launch list over a kernel that fake_cuda.c has.
 * -DTOY_CONTEXT=n, -DTOY_WINDOW=6 as there. -DTOY_ROW_BYTES=n: of which the first 32 are used. -DTOY_GROWING: a block for every
 * row of the cache. */
#include <stddef.h>

#include "mlcc.h"

#define VOCAB 5
#ifdef TOY_CONTEXT
#define CONTEXT TOY_CONTEXT
#else
#define CONTEXT 100000
#endif
#ifndef TOY_WINDOW
#define TOY_WINDOW 0
#endif
#ifndef TOY_ROW_BYTES
#define TOY_ROW_BYTES 64
#endif
#define STR(s) {s, sizeof(s) - 1}
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
#define ARG(k, at) {.kind = k, .offset = at}
#if TOY_WINDOW
_Static_assert(TOY_WINDOW == 6, "the kernel's window");
#define KERNEL "toy_window6"
#else
#define KERNEL "toy_cached"
#endif

static const mlcc_launch_arg args[] = {
  ARG(MLCC_ARG_PAGES, 0), ARG(MLCC_ARG_WEIGHTS, 0), ARG(MLCC_ARG_TOKENS, 0), ARG(MLCC_ARG_LOGITS, 0),
  ARG(MLCC_ARG_CONTROL, offsetof(mlcc_control, n)), ARG(MLCC_ARG_CONTROL, offsetof(mlcc_control, past)),
  ARG(MLCC_ARG_PAGE_TABLE, 0), ARG(MLCC_ARG_STATE, 0),
};
#define ONE {.constant = 1, .div = 1}
#ifdef TOY_GROWING
#define BLOCKS {.coef_n = 1, .coef_past = 1, .div = 1}
#else
#define BLOCKS ONE
#endif
#define FEED(name) {STR(name), {BLOCKS, ONE, ONE}, {1, 1, 1}, 0, args, COUNT(args), MLCC_REPEAT_ONCE, 0}
static const mlcc_launch last[] = {FEED(KERNEL)};
static const mlcc_launch all[] = {FEED(KERNEL "_all")};
static const mlcc_device_entry entries[] = {
  {STR("prefill"), last, 1},
  {STR("decode"), last, 1},
  {STR("prefill_logits"), all, 1},
};
static const uint8_t ptx[] = "// toy ptx";
static const mlcc_device_image images[] = {{STR("ptx"), 80, 0, ptx, sizeof(ptx) - 1}};
static const mlcc_state states[] = {
#if TOY_WINDOW
  {STR("dropped"), 0, 4, MLCC_INIT_ZERO, 0, STR("i32"), MLCC_STATE_DROPPED_ROWS, 0, TOY_WINDOW, 0},
#endif
  {STR("k"), 0, (uint64_t)CONTEXT * TOY_ROW_BYTES, MLCC_INIT_ZERO, 0, STR("f32"), MLCC_STATE_CACHE, 0, CONTEXT, TOY_ROW_BYTES},
};

__attribute__((visibility("default"))) const mlcc_model_table mlcc_model = {
  .magic = MLCC_MAGIC,
  .abi_version = MLCC_ABI_VERSION,
  .struct_size = sizeof(mlcc_model_table),
  .target = STR("cuda"),
  .compiler = STR("toy 1"),
  .metadata = STR("{\"model\":\"toy\"}"),
  .states = states,
  .n_states = COUNT(states),
  .images = images,
  .n_images = 1,
  .device_entries = entries,
  .n_device_entries = COUNT(entries),
  .plan.weights_bytes = VOCAB * 8 * 4,
  .plan.state_bytes = 64,
  .plan.page_bytes = MLCC_PAGE_ROWS * TOY_ROW_BYTES,
  .plan.alignment = 64,
  .plan.chunk = 3,
  .plan.context = CONTEXT,
  .plan.batch = 1,
  .plan.vocab = VOCAB,
};
