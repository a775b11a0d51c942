/* Logits of a prompt as raw floats: logits ./MODEL.so LEVEL PIECE TOKEN_ID...
 * The tokens enter in calls of PIECE tokens, by the code for the CPU level LEVEL, with one thread. */
#define _DEFAULT_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "mlcc.h"

static int fail(const char *what) {
  fprintf(stderr, "logits: %s\n", what);
  return 1;
}

static void *aligned(uint64_t bytes) { return aligned_alloc(4096, (bytes / 4096 + 1) * 4096); }

int main(int argc, char **argv) {
  if (argc < 5) return fail("usage: logits ./MODEL.so LEVEL PIECE TOKEN_ID...");
  void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) return fail(dlerror());
  const mlcc_model_table *model = dlsym(library, "mlcc_model");
  const mlcc_variant *variant = NULL;
  for (uint64_t i = 0; i < model->n_variants; i++) {
    const mlcc_variant *one = &model->variants[i];
    if (one->name.len == strlen(argv[2]) && !memcmp(one->name.ptr, argv[2], one->name.len)) {
      if (one->features & ~mlcc_host_features()) return fail("this CPU lacks the level");
      variant = one;
    }
  }
  if (!variant) return fail("the artifact lacks the level");

  struct stat info;
  int file = open(argv[1], O_RDONLY);
  if (file < 0 || fstat(file, &info)) return fail("cannot open the model");
  const void *bytes = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, file, 0);
  if (bytes == MAP_FAILED) return fail("cannot map the model");
  uint64_t weights_bytes = 0;
  mlcc_ctx ctx;
  memset(&ctx, 0, sizeof ctx);
  ctx.weights = mlcc_section(bytes, (uint64_t)info.st_size, MLCC_SECTION_WEIGHTS, &weights_bytes);
  ctx.arena = aligned(model->plan.arena_bytes);
  ctx.state = aligned(model->plan.state_bytes);
  const uint64_t pages = model->plan.page_bytes ? (model->plan.context + MLCC_PAGE_ROWS - 1) / MLCC_PAGE_ROWS : 0;
  int32_t *table = aligned(pages * sizeof(int32_t));
  ctx.pages = aligned(pages * model->plan.page_bytes);
  if (!ctx.pages || !table) return fail("no memory");
  for (uint64_t i = 0; i < pages; i++) table[i] = (int32_t)i;
  ctx.page_table = table;
  ctx.logits = aligned(model->plan.vocab * sizeof(float));
  int32_t *tokens = aligned(model->plan.chunk * sizeof(int32_t));
  if (!ctx.weights || !ctx.arena || !ctx.state || !ctx.logits || !tokens) return fail("no weights or no memory");
  mlcc_find_entry(variant, "create_kv_cache")(&ctx, 0, 1);

  int piece = atoi(argv[3]);
  if (piece < 1 || (uint64_t)piece > model->plan.chunk) return fail("pieces have 1 to `chunk` tokens");
  for (int at = 4; at < argc; at += (int)ctx.n) {
    ctx.n = argc - at < piece ? argc - at : piece;
    for (int i = 0; i < ctx.n; i++) tokens[i] = atoi(argv[at + i]);
    ctx.tokens = tokens;
    mlcc_step step = mlcc_find_entry(variant, ctx.n == 1 ? "decode" : "prefill");
    if (step(&ctx, 0, 1) != MLCC_OK) return fail("a step failed");
    ctx.past += ctx.n;
  }
  return fwrite(ctx.logits, sizeof(float), model->plan.vocab, stdout) != model->plan.vocab;
}
