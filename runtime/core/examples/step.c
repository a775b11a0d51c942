/* Two texts that go through the model together, through mlcc.h alone: while the first one is being continued token by
 * token, the second one's prompt is read in pieces beside it. Token ids in, two lines of token ids out, one thread.
 *
 *   cc -O2 -I runtime/core/include runtime/core/examples/step.c -o step -ldl
 *   ./step ./model.so 16 510 2776 369 -- 12092 13
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

#define TEXTS 2

typedef struct text {
  int32_t *ids; /* the prompt, then what was generated */
  int64_t prompt, len, fed;
  uint8_t *state;
  int32_t *pages; /* the numbers of its pages */
} text;

static int fail(const char *what) {
  fprintf(stderr, "step: %s\n", what);
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
  int border = 3;
  while (border < argc && strcmp(argv[border], "--")) border++;
  if (border == 3 || border + 1 >= argc) return fail("usage: step ./MODEL.so COUNT TOKEN_ID... -- TOKEN_ID...");
  const int64_t count = atol(argv[2]);

  /* The code and the weights, as in generate.c. */
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
  const mlcc_step create_kv_cache = mlcc_find_entry(variant, "create_kv_cache"), step = mlcc_find_entry(variant, "step");
  if (!create_kv_cache) return fail("entry points are missing");
  if (!step || model->plan.batch < TEXTS) return fail("the model takes one text at a time: build it with --max-batch 2");
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

  /* Memory of a step, for all texts: a row of logits for each output token, here one per text at most. */
  const int64_t most = (int64_t)(model->plan.chunk > model->plan.batch ? model->plan.chunk : model->plan.batch);
  int32_t *tokens = aligned((uint64_t)most * sizeof(int32_t), MLCC_BUFFER_ALIGN);
  int32_t *output_rows = aligned((uint64_t)most * sizeof(int32_t), MLCC_BUFFER_ALIGN);
  ctx.arena = aligned(model->plan.arena_bytes, model->plan.alignment);
  ctx.logits = aligned(TEXTS * model->plan.vocab * sizeof(float), MLCC_BUFFER_ALIGN);
  if (!tokens || !output_rows || !ctx.arena || !ctx.logits) return fail("out of memory");

  /* Pages for the caches of all texts, which take them by turns. They cost no memory before they are written. */
  const uint64_t pages_each = model->plan.page_bytes ? (model->plan.context + MLCC_PAGE_ROWS - 1) / MLCC_PAGE_ROWS : 0;
  ctx.pages = aligned(TEXTS * pages_each * model->plan.page_bytes, MLCC_BUFFER_ALIGN);
  if (!ctx.pages) return fail("out of memory");

  /* Memory of each text. */
  text texts[TEXTS];
  for (int t = 0; t < TEXTS; t++) {
    char **from = argv + (t ? border + 1 : 3);
    texts[t].prompt = texts[t].len = t ? argc - border - 1 : border - 3;
    texts[t].fed = 0;
    texts[t].ids = malloc((uint64_t)(texts[t].prompt + count + 1) * sizeof(int32_t));
    texts[t].state = ctx.state = aligned(model->plan.state_bytes, model->plan.alignment);
    texts[t].pages = aligned(pages_each * sizeof(int32_t), MLCC_BUFFER_ALIGN);
    if (!texts[t].ids || !ctx.state || !texts[t].pages) return fail("out of memory");
    for (uint64_t i = 0; i < pages_each; i++) texts[t].pages[i] = (int32_t)(i * TEXTS + (uint64_t)t);
    for (int64_t i = 0; i < texts[t].prompt; i++) texts[t].ids[i] = atoi(from[i]);
    int32_t status = create_kv_cache(&ctx, 0, 1);
    if (status != MLCC_OK) return fail(problem(status));
    /* What a prompt in several pieces needs, as in generate.c. */
    if (model->flags & MLCC_WHOLE_PROMPTS) return fail("this model reads no prompt in pieces");
    for (uint64_t i = 0; i < model->n_states; i++)
      if (model->states[i].kind == MLCC_STATE_SEQUENCE_LENGTH)
        *(int32_t *)(ctx.state + model->states[i].offset) = (int32_t)texts[t].prompt;
  }

  for (;;) {
    /* The second text comes when the first one has a token. Everybody who has tokens that were not fed gets rows. */
    mlcc_sequence sequences[TEXTS];
    text *rows_of[TEXTS], *logits_of[TEXTS];
    ctx.n = ctx.b = ctx.n_outputs = 0;
    for (int t = 0; t < TEXTS; t++) {
      text *x = &texts[t];
      if (x->fed == x->len || (t && texts[0].len == texts[0].prompt)) continue;
      /* At least one row is left for each text behind. */
      int64_t left = x->len - x->fed, room = most - ctx.n - (TEXTS - 1 - t), rows = left < room ? left : room;
      memcpy(tokens + ctx.n, x->ids + x->fed, (uint64_t)rows * sizeof(int32_t));
      sequences[ctx.b] = (mlcc_sequence){.state = x->state, .page_table = x->pages, .past = x->fed, .first = ctx.n, .rows = rows};
      rows_of[ctx.b++] = x;
      ctx.n += rows;
      /* Logits of the last token that there is; those of the middle of a prompt interest nobody. */
      if (rows == left) logits_of[ctx.n_outputs] = x, output_rows[ctx.n_outputs++] = (int32_t)ctx.n - 1;
    }
    if (ctx.b == 0) break;
    /* A step has at least one output row; all `n` numbers have to be those of rows. */
    int64_t asked = ctx.n_outputs;
    for (int64_t i = asked; i < ctx.n; i++) output_rows[i] = 0;
    if (asked == 0) ctx.n_outputs = 1;
    ctx.tokens = tokens;
    ctx.output_rows = output_rows;
    ctx.sequences = sequences;
    int32_t status = step(&ctx, 0, 1);
    if (status != MLCC_OK) return fail(problem(status));
    for (int64_t i = 0; i < ctx.b; i++) rows_of[i]->fed += sequences[i].rows;
    for (int64_t i = 0; i < asked; i++) {
      text *x = logits_of[i];
      if (x->len < x->prompt + count) x->ids[x->len++] = argmax(ctx.logits + i * (int64_t)model->plan.vocab, model->plan.vocab);
      if (x->len == x->prompt + count) x->fed = x->len; /* the last token is not needed again */
    }
  }
  for (int t = 0; t < TEXTS; t++)
    for (int64_t i = texts[t].prompt; i < texts[t].len; i++)
      printf("%d%c", texts[t].ids[i], i + 1 < texts[t].len ? ' ' : '\n');
  return 0;
}
