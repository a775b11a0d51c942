/* Greedy generation through mlcc.h alone: token ids in, token ids out, one thread.
 *
 *   cc -O2 -I runtime/core/include runtime/core/examples/generate.c -o generate -ldl
 *   ./generate ./model.so 16 510 2776 369
 */
#define _DEFAULT_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mlcc.h"

static int fail(const char *what) {
  fprintf(stderr, "generate: %s\n", what);
  return 1;
}

static const char *problem(int32_t status) {
  switch (status) {
    case MLCC_BAD_TOKEN: return "a token is outside of the vocabulary";
    case MLCC_CONTEXT_FULL: return "the context is full";
    default: return "the step failed";
  }
}

static int32_t argmax(const float *x, uint64_t n) {
  uint64_t best = 0;
  for (uint64_t i = 1; i < n; i++)
    if (x[i] > x[best]) best = i;
  return (int32_t)best;
}

static void *aligned(uint64_t bytes, uint64_t alignment) {
  return aligned_alloc(alignment, (bytes / alignment + 1) * alignment);
}

int main(int argc, char **argv) {
  if (argc < 4) return fail("usage: generate ./MODEL.so COUNT TOKEN_ID...");

  /* The code. */
  void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) return fail(dlerror());
  const mlcc_model_table *model = dlsym(library, "mlcc_model");
  if (!model || model->magic != MLCC_MAGIC) return fail("not an mlcc artifact");
  if (model->abi_version != MLCC_ABI_VERSION) return fail("built for another ABI version: build the model again");
  if (model->plan.ranks > 1) return fail("split among ranks, of which this program runs one");
  const mlcc_variant *variant = NULL;
  for (uint64_t i = 0; i < model->n_variants && !variant; i++)
    if (!(model->variants[i].features & ~mlcc_host_features())) variant = &model->variants[i];
  if (!variant) return fail("no variant for this CPU");

  /* The weights: mapped from the same file. */
  struct stat info;
  int file = open(argv[1], O_RDONLY);
  if (file < 0 || fstat(file, &info)) return fail("cannot open the model");
  const void *bytes = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, file, 0);
  if (bytes == MAP_FAILED) return fail("cannot map the model");
  uint64_t weights_bytes = 0;
  mlcc_ctx ctx;
  memset(&ctx, 0, sizeof ctx);
  ctx.weights = mlcc_section(bytes, (uint64_t)info.st_size, MLCC_SECTION_WEIGHTS, &weights_bytes);
  if (!ctx.weights || weights_bytes < model->plan.weights_bytes) return fail("the model has no weights");

  /* The memory plan. */
  ctx.arena = aligned(model->plan.arena_bytes, model->plan.alignment);
  ctx.state = aligned(model->plan.state_bytes, model->plan.alignment);
  ctx.logits = aligned(model->plan.vocab * sizeof(float), MLCC_BUFFER_ALIGN);
  if (!ctx.arena || !ctx.state || !ctx.logits) return fail("out of memory");
  if (model->plan.page_bytes) { /* Rows of the KV caches. One sequence has its pages in order; others would have others of them. */
    const uint64_t pages = (model->plan.context + MLCC_PAGE_ROWS - 1) / MLCC_PAGE_ROWS;
    int32_t *table = aligned(pages * sizeof(int32_t), MLCC_BUFFER_ALIGN);
    ctx.pages = aligned(pages * model->plan.page_bytes, MLCC_BUFFER_ALIGN);
    if (!ctx.pages || !table) return fail("out of memory");
    for (uint64_t i = 0; i < pages; i++) table[i] = (int32_t)i;
    ctx.page_table = table;
  }
  const mlcc_step create_kv_cache = mlcc_find_entry(variant, "create_kv_cache");
  const mlcc_step prefill = mlcc_find_entry(variant, "prefill"), decode = mlcc_find_entry(variant, "decode");
  if (!create_kv_cache || !prefill || !decode) return fail("entry points are missing");
  int32_t status = create_kv_cache(&ctx, 0, 1);
  if (status != MLCC_OK) return fail(problem(status));

  /* The prompt, in calls of at most `chunk` tokens. Some models need to know of all of it from the first call on. */
  int64_t count = atol(argv[2]), prompt = argc - 3, chunk = (int64_t)model->plan.chunk;
  if (prompt > chunk && model->flags & MLCC_WHOLE_PROMPTS) return fail("the prompt is too long: build with a larger --chunk");
  for (uint64_t i = 0; i < model->n_states; i++)
    if (prompt > chunk && model->states[i].kind == MLCC_STATE_SEQUENCE_LENGTH)
      *(int32_t *)(ctx.state + model->states[i].offset) = (int32_t)prompt;
  int32_t *tokens = aligned(model->plan.chunk * sizeof(int32_t), MLCC_BUFFER_ALIGN);
  if (!tokens) return fail("out of memory");
  ctx.tokens = tokens;
  for (; ctx.past < prompt; ctx.past += ctx.n) {
    ctx.n = prompt - ctx.past < chunk ? prompt - ctx.past : chunk;
    for (int64_t i = 0; i < ctx.n; i++) tokens[i] = atoi(argv[3 + ctx.past + i]);
    status = prefill(&ctx, 0, 1);
    if (status != MLCC_OK) return fail(problem(status));
  }

  /* One token after the other. */
  ctx.n = 1;
  for (int64_t i = 0; i < count; i++, ctx.past++) {
    tokens[0] = argmax(ctx.logits, model->plan.vocab);
    printf(i == 0 ? "%d" : " %d", tokens[0]);
    status = i + 1 < count ? decode(&ctx, 0, 1) : MLCC_OK;
    if (status != MLCC_OK) return fail(problem(status));
  }
  printf("\n");
  return 0;
}
