/* What entry points may rely on: entries ./MODEL.so FILL TOKEN_ID...
 * Every buffer holds bytes FILL before the first call. Feeds the tokens by decode and prints the bits of the last logits;
 * then holds softmax_with_temperature of several rows against that of each, and calls that have to be refused against
 * what stands before the state and the pages. */
#define _DEFAULT_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "mlcc.h"

#define BEFORE 4096
#define ROWS 3

static int fill;

static int fail(const char *what) {
  fprintf(stderr, "entries: %s\n", what);
  return 1;
}

static uint8_t *filled(uint64_t bytes) {
  uint64_t size = (bytes / 4096 + 1) * 4096;
  uint8_t *memory = aligned_alloc(4096, size);
  if (!memory) exit(fail("out of memory"));
  return memset(memory, fill, size);
}

int main(int argc, char **argv) {
  if (argc < 4) return fail("usage: entries ./MODEL.so FILL TOKEN_ID...");
  fill = atoi(argv[2]);
  void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) return fail(dlerror());
  const mlcc_model_table *model = dlsym(library, "mlcc_model");
  const mlcc_variant *variant = NULL;
  for (uint64_t i = 0; i < model->n_variants && !variant; i++)
    if (!(model->variants[i].features & ~mlcc_host_features())) variant = &model->variants[i];
  if (!variant) return fail("no variant for this CPU");

  struct stat info;
  int file = open(argv[1], O_RDONLY);
  if (file < 0 || fstat(file, &info)) return fail("cannot open the model");
  const void *bytes = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, file, 0);
  if (bytes == MAP_FAILED) return fail("cannot map the model");
  mlcc_ctx ctx;
  memset(&ctx, 0, sizeof ctx);
  uint64_t weights_bytes = 0, row_bytes = model->plan.vocab * sizeof(float);
  ctx.weights = mlcc_section(bytes, (uint64_t)info.st_size, MLCC_SECTION_WEIGHTS, &weights_bytes);
  ctx.arena = filled(model->plan.arena_bytes);
  uint8_t *before = filled(BEFORE + model->plan.state_bytes);
  ctx.state = before + BEFORE;
  /* Pages of the sequence in another order than its rows. */
  const int64_t pages = model->plan.page_bytes ? (int64_t)((model->plan.context + MLCC_PAGE_ROWS - 1) / MLCC_PAGE_ROWS) : 0;
  uint8_t *before_pages = filled(BEFORE + (uint64_t)pages * model->plan.page_bytes);
  int32_t *table = (int32_t *)filled((uint64_t)pages * sizeof(int32_t));
  for (int64_t i = 0; i < pages; i++) table[i] = (int32_t)(pages - 1 - i);
  ctx.pages = before_pages + BEFORE;
  ctx.page_table = table;
  ctx.logits = (float *)filled(row_bytes);
  _Alignas(MLCC_BUFFER_ALIGN) int32_t tokens[2] = {0, 0};
  ctx.tokens = tokens;
  if (mlcc_find_entry(variant, "create_kv_cache")(&ctx, 0, 1) != MLCC_OK) return fail("create_kv_cache");
  ctx.n = 1;
  for (int i = 3; i < argc; i++, ctx.past++) {
    tokens[0] = atoi(argv[i]);
    if (mlcc_find_entry(variant, "decode")(&ctx, 0, 1) != MLCC_OK) return fail("decode");
  }
  for (uint64_t i = 0; i < model->plan.vocab; i++) {
    uint32_t bits;
    memcpy(&bits, &ctx.logits[i], sizeof bits);
    printf("%08x ", bits);
  }
  printf("\n");

  /* Rows that differ. */
  float *rows = (float *)filled(ROWS * row_bytes), *together = (float *)filled(ROWS * row_bytes);
  float *single = (float *)filled(row_bytes), *row = (float *)filled(row_bytes);
  for (uint64_t i = 0; i < ROWS * model->plan.vocab; i++) rows[i] = (float)((i * 7919 + i / model->plan.vocab) % 101) / 10;
  mlcc_ctx rest = ctx;
  rest.temperature = 0.7f;
  rest.n = ROWS, rest.logits = rows, rest.probs = together;
  if (mlcc_find_entry(variant, "softmax_with_temperature")(&rest, 0, 1) != MLCC_OK) return fail("softmax_with_temperature");
  for (int i = 0; i < ROWS; i++) {
    memcpy(row, rows + (uint64_t)i * model->plan.vocab, row_bytes);
    rest.n = 1, rest.logits = row, rest.probs = single;
    if (mlcc_find_entry(variant, "softmax_with_temperature")(&rest, 0, 1) != MLCC_OK) return fail("softmax_with_temperature");
    if (memcmp(single, together + (uint64_t)i * model->plan.vocab, row_bytes)) return fail("rows of probabilities differ");
  }

  /* A sequence cannot have seen fewer tokens than none. */
  for (int64_t past = -2; past < 0; past++) {
    ctx.past = past;
    ctx.n = 1;
    if (mlcc_find_entry(variant, "decode")(&ctx, 0, 1) != MLCC_CONTEXT_FULL) return fail("decode took a negative past");
    ctx.n = model->plan.chunk > 1 ? 2 : 1;
    if (mlcc_find_entry(variant, "prefill")(&ctx, 0, 1) != MLCC_CONTEXT_FULL) return fail("prefill took a negative past");
  }
  for (int i = 0; i < BEFORE; i++)
    if (before[i] != (uint8_t)fill || before_pages[i] != (uint8_t)fill)
      return fail("something was written before the state or the pages");
  return 0;
}
