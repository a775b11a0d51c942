/* Generates tokens greedily with mlcc_load.h, on Linux, Windows, macOS and Android alike:
 *
 *   cc -O2 -I runtime/core/include runtime/core/examples/load.c -o load -lpthread
 *   ./load MODEL.so OFFSET LENGTH THREADS COUNT TOKEN_ID...       OFFSET and LENGTH: where the model lies in the file; 0 0: it is the file
 */
#include "mlcc_load.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

static mlcc_ctx ctx;
static mlcc_step step; /* NULL ends the threads */
static uint32_t workers;
static int32_t status;
static atomic_uint arrived, turn;

/* Returns when all workers have called it. */
static void MLCC_CALL wait_for_all(void *self, uint32_t worker) {
  const uint32_t mine = atomic_load(&turn);
  (void)self, (void)worker;
  if (atomic_fetch_add(&arrived, 1) + 1 == workers) {
    atomic_store(&arrived, 0);
    atomic_store(&turn, mine + 1);
  } else {
    while (atomic_load(&turn) == mine) {
    }
  }
}

static void *work(void *number) {
  const uint32_t worker = (uint32_t)(uintptr_t)number;
  for (;;) {
    wait_for_all(NULL, worker); /* the first thread has set `step` and `ctx` */
    if (!step) return NULL;
    const int32_t result = step(&ctx, worker, workers);
    if (worker == 0) status = result;
    wait_for_all(NULL, worker);
    if (worker == 0) return NULL;
  }
}

static void run(mlcc_step next) {
  step = next;
  work(NULL);
}

static void *buffer(uint64_t bytes) {
  uint8_t *memory = calloc(bytes + 4096, 1);
  if (!memory) exit((fprintf(stderr, "load: out of memory\n"), 1));
  return memory + (4096 - (uintptr_t)memory % 4096) % 4096;
}

static int fail(const char *what) { return fprintf(stderr, "load: %s\n", what), 1; }

int main(int argc, char **argv) {
  mlcc_loaded m;
  if (argc < 7) return fail("usage: load MODEL.so OFFSET LENGTH THREADS COUNT TOKEN_ID...");
  const char *error = mlcc_load(argv[1], strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10), &m);
  if (error) return fail(error);
  const mlcc_plan *plan = &m.table->plan;
  const mlcc_variant *variant = m.table->variants, *end = variant + m.table->n_variants;
  while (variant < end && variant->features & ~mlcc_host_features()) variant++;
  if (variant == end) return fail("no variant for this CPU");
  const mlcc_step prefill = mlcc_find_entry(variant, "prefill"), decode = mlcc_find_entry(variant, "decode");
  const mlcc_step create = mlcc_find_entry(variant, "create_kv_cache");
  const int64_t count = atol(argv[5]), prompt = argc - 6;
  workers = (uint32_t)atoi(argv[4]);
  if (!prefill || !decode || !create) return fail("no entry points for a text: it is an embedding model");
  if (plan->ranks > 1 || plan->decoder_start) return fail("models that are split among ranks, or have an encoder, are not run by this program");
  if (workers < 1 || (plan->max_workers && workers > plan->max_workers)) return fail("too many threads, or none");
  ctx.weights = mlcc_section(m.file, m.file_bytes, MLCC_SECTION_WEIGHTS, NULL);
  if (!ctx.weights) return fail("the model has no weights");
  ctx.arena = buffer(plan->arena_bytes), ctx.state = buffer(plan->state_bytes);
  ctx.logits = buffer(plan->vocab * sizeof(float)), ctx.pages = buffer((plan->context + 64) / 64 * plan->page_bytes);
  int32_t *tokens = buffer((uint64_t)(prompt + count) * sizeof(int32_t)), *table = buffer((plan->context / 64 + 1) * sizeof(int32_t));
  int32_t *fed = buffer(plan->chunk * sizeof(int32_t));
  for (uint64_t i = 0; i <= plan->context / 64; i++) table[i] = (int32_t)i;
  for (int64_t i = 0; i < prompt; i++) tokens[i] = atoi(argv[6 + i]);
  ctx.page_table = table, ctx.tokens = fed, ctx.barrier = wait_for_all;
  for (uint32_t w = 1; w < workers; w++) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, (void *)(uintptr_t)w)) return fail("cannot start a thread");
    pthread_detach(thread);
  }
  run(create);
  for (int64_t len = prompt; status == MLCC_OK && len <= prompt + count; ctx.past += ctx.n) {
    ctx.n = ctx.past < prompt ? prompt - ctx.past : 1;
    if (ctx.n > (int64_t)plan->chunk) ctx.n = (int64_t)plan->chunk;
    memcpy(fed, tokens + ctx.past, (size_t)ctx.n * sizeof(int32_t));
    run(ctx.n == 1 ? decode : prefill);
    if (ctx.past + ctx.n < len) continue;
    int32_t best = 0;
    for (uint64_t i = 1; i < plan->vocab; i++)
      if (ctx.logits[i] > ctx.logits[best]) best = (int32_t)i;
    if (len < prompt + count) printf(len == prompt ? "%d" : " %d", tokens[len] = best);
    if (++len == prompt + count) break;
  }
  printf("\n");
  run(NULL);
  return status == MLCC_OK ? (mlcc_unload(&m), 0) : fail("a step failed");
}
