/* A CUDA driver without a GPU, for tests of the runtime's device code: memory is host memory, kernels are the functions
 * below, streams are synchronous, graphs record and replay launches. A kernel is loaded when it is first launched, which
 * ends a recording. It checks what a driver would crash on: contexts, live handles, ranges of copies, launch shapes. Counters are exported for the test. Memory that is mapped into
 * reserved addresses is checked too; with FAKE_NO_MAPPING in the environment the device has none. */
#define _DEFAULT_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef int R;
typedef uint64_t P;
enum { OK = 0, INVALID = 1, NOT_FOUND = 500, ILLEGAL = 700, LOST = 719, REFUSED = 900, INVALIDATED = 901 };

int fake_launches, fake_graph_launches, fake_live, fake_mapped, fake_shared_bytes, fake_devices = 1, fake_most_mapped = 1 << 30;

/* Set by the test: this many launches more go well; the context is lost, so that every call on a stream fails. */
int fake_good_launches = 1 << 30, fake_lost;
/* This many recordings fail at their end; how many went well; copies to the device, and those of them from pinned memory. */
int fake_refusals, fake_recordings, fake_copies, fake_pinned_copies;
/* Whether a stream has work that nobody has waited for; how often memory was unmapped then, or after the loss. */
int fake_running, fake_wrong_unmaps;

static int context_current;
static struct { P ptr; size_t bytes; } blocks[64];
typedef struct { void *f; unsigned grid[3], block[3], shared; P args[8]; } launch;
static struct { int capturing, invalid, n; launch list[16]; } graph;
static void *loaded[16];
static struct { char *at; size_t bytes; } pinned[8];

#define GRANULE 65536
#define GRANULES 2048 /* of a range */
static struct { P base; size_t bytes; unsigned char state[GRANULES]; } reserved[4]; /* state: 1 mapped, 2 accessible */

static unsigned char *granule(P p) {
  for (int i = 0; i < 4; i++)
    if (reserved[i].base && p >= reserved[i].base && p < reserved[i].base + reserved[i].bytes)
      return &reserved[i].state[(p - reserved[i].base) / GRANULE];
  return 0;
}

static int accessible(P p, size_t n) {
  for (P at = p; at < p + n; at += GRANULE)
    if (!granule(at) || *granule(at) != 2) return 0;
  return n > 0 && granule(p + n - 1) && *granule(p + n - 1) == 2;
}

static int inside(P p, size_t n) {
  if (accessible(p, n)) return 1;
  for (int i = 0; i < 64; i++)
    if (blocks[i].ptr && p >= blocks[i].ptr && p + n <= blocks[i].ptr + blocks[i].bytes) return 1;
  return 0;
}

/* A word of the control block. */
static int64_t word(P p) { return inside(p, 8) ? *(int64_t *)p : -1; }

/* h, weights, tokens, logits, scratch, n, rows before. */
static R feed(const launch *l, int all) {
  float *h = (float *)l->args[0];
  const float *e = (const float *)l->args[1];
  const int32_t *tokens = (const int32_t *)l->args[2];
  float *logits = (float *)l->args[3];
  int64_t n = word(l->args[5]), past = word(l->args[6]);
  if (n < 1 || past < 0) return ILLEGAL;
  if (!inside(l->args[0], 32) || !inside(l->args[1], 160) || !inside(l->args[2], n * 4)) return ILLEGAL;
  if (!inside(l->args[3], (all ? n : 1) * 20) || !inside(l->args[4], 48)) return ILLEGAL;
  if (l->grid[0] != (5 * n + 2) / 2 || l->block[0] != 32 || l->block[1] != 2 || l->shared != 50000) return ILLEGAL;
  for (int64_t t = 0; t < n; t++)
    for (int v = -8; v < 5; v++) {
      if (v < 0) {
        h[v + 8] = h[v + 8] * 0.5f + e[tokens[t] * 8 + v + 8];
        continue;
      }
      float sum = past ? (float)(past + t) : 0;
      for (int i = 0; i < 8; i++) sum += h[i] * e[v * 8 + i];
      logits[(all ? t * 5 : 0) + v] = sum;
    }
  return OK;
}
static R toy_feed(const launch *l) { return feed(l, 0); }
static R toy_feed_all(const launch *l) { return feed(l, 1); }

#ifndef TOY_ROW_BYTES
#define TOY_ROW_BYTES 64
#endif

/* Row t of a cache that is alone in its pages. */
static float *row_of(const launch *l, int64_t t) {
  const int32_t *page = (const int32_t *)l->args[6] + t / 64;
  P at = inside((P)page, 4) ? l->args[0] + (*page * 64 + t % 64) * (P)TOY_ROW_BYTES : 0;
  return at && inside(at, 32) ? (float *)at : 0;
}

/* The pages, weights, tokens, logits, n, past, the table, the number of dropped rows. As many blocks as rows, or more, or one. */
static R cached(const launch *l, int all, int64_t window) {
  const float *e = (const float *)l->args[1];
  const int32_t *tokens = (const int32_t *)l->args[2];
  float *logits = (float *)l->args[3];
  int64_t n = word(l->args[4]), past = word(l->args[5]);
  int64_t dropped = window ? *(const uint32_t *)l->args[7] : 0;
  if (n < 1 || past < 0 || (l->grid[0] != 1 && l->grid[0] < past + n)) return ILLEGAL;
  if (!inside(l->args[2], n * 4) || (window && !inside(l->args[7], 4))) return ILLEGAL;
  for (int64_t t = 0; t < past + n; t++)
    if (!row_of(l, t)) return ILLEGAL;
  for (int64_t t = past; t < past + n; t++) {
    memcpy(row_of(l, t), e + 8 * tokens[t - past], 32);
    for (int v = 0; v < 5; v++) {
      float sum = 0;
      for (int64_t p = window && t >= window ? t - window + 1 : 0; p <= t; p++) {
        const float *row = row_of(l, p);
        for (int i = 0; i < 8; i++) sum += (float)(1 + (dropped + p) % 3) * row[i] * e[v * 8 + i];
      }
      logits[(all ? (t - past) * 5 : 0) + v] = sum;
    }
  }
  return OK;
}
static R toy_cached(const launch *l) { return cached(l, 0, 0); }
static R toy_cached_all(const launch *l) { return cached(l, 1, 0); }
static R toy_window6(const launch *l) { return cached(l, 0, 6); }
static R toy_window6_all(const launch *l) { return cached(l, 1, 6); }

static R toy_softmax(const launch *l) {
  const float *logits = (const float *)l->args[0];
  float *probs = (float *)l->args[1], temperature;
  if (!inside(l->args[2], 4)) return ILLEGAL;
  memcpy(&temperature, (void *)l->args[2], 4);
  for (int v = 0; v < 5; v++) probs[v] = logits[v] / temperature;
  return OK;
}

static R toy_never(const launch *l) {
  (void)l;
  return ILLEGAL;
}

static R run(const launch *l) {
  R (*f)(const launch *);
  memcpy(&f, &l->f, sizeof f);
  fake_launches++, fake_running = 1;
  return f(l);
}

R cuInit(unsigned flags) { return flags; }
R cuDeviceGetCount(int *n) { return *n = fake_devices, OK; }
R cuDeviceGet(int *d, int i) { return *d = i + 40, OK; }
R cuDeviceGetUuid(unsigned char *to, int device) { return memset(to, device, 16), OK; }
R cuDeviceGetName(char *s, int n, int d) { return d == 40 ? (strncpy(s, "Fake GPU", n), OK) : INVALID; }
R cuDeviceGetAttribute(int *v, int a, int d) {
  if (a == 102) return *v = !getenv("FAKE_NO_MAPPING"), d == 40 ? OK : INVALID;
  return *v = a == 75 ? 8 : 6, d == 40 && (a == 75 || a == 76) ? OK : INVALID;
}
R cuDevicePrimaryCtxRetain(void **c, int d) { return *c = blocks, fake_live++, d == 40 ? OK : INVALID; }
R cuDevicePrimaryCtxRelease_v2(int d) { return fake_live--, d == 40 ? OK : INVALID; }
R cuCtxSetCurrent(void *c) { return context_current = c == blocks, OK; }
R cuModuleLoadDataEx(void **m, const void *image, unsigned n, int *options, void **values) {
  if (!context_current || n != 2 || options[0] != 5) return INVALID;
  if (strcmp(image, "// toy ptx")) return strcpy(values[0], "line 1: not the toy"), 218;
  return *m = &graph, fake_live++, OK;
}
R cuModuleUnload(void *m) { return fake_live--, m == &graph ? OK : INVALID; }
R cuModuleGetFunction(void **f, void *m, const char *name) {
  R (*found)(const launch *) = 0;
#define KERNEL(f) \
  if (!strcmp(name, #f)) found = f;
  KERNEL(toy_feed) KERNEL(toy_feed_all) KERNEL(toy_cached) KERNEL(toy_cached_all)
  KERNEL(toy_window6) KERNEL(toy_window6_all) KERNEL(toy_softmax) KERNEL(toy_never)
  memcpy(f, &found, sizeof found);
  return m == &graph && found ? OK : NOT_FOUND;
}
R cuFuncSetAttribute(void *f, int a, int v) { return fake_shared_bytes = v, f && a == 8 ? OK : INVALID; }
R cuMemAlloc_v2(P *p, size_t n) {
  for (int i = 0; context_current && i < 64; i++)
    if (!blocks[i].ptr) {
      *p = blocks[i].ptr = (P)memset(malloc(n), 0xff, n); /* NaN: fresh memory is undefined */
      return blocks[i].bytes = n, fake_live++, OK;
    }
  return 2;
}
R cuMemFree_v2(P p) {
  for (int i = 0; i < 64; i++)
    if (blocks[i].ptr == p) return free((void *)p), blocks[i].ptr = 0, fake_live--, OK;
  return INVALID;
}
R cuMemGetInfo_v2(size_t *free, size_t *all) { return *free = *all = 1 << 30, context_current ? OK : INVALID; }
/* CUmemAllocationProp as far as it matters: pinned memory on device 40. */
typedef struct { int type, handles, location, device; } prop;
static int plain(const prop *p) { return p->type == 1 && p->handles == 0 && p->location == 1 && p->device == 40; }
R cuMemGetAllocationGranularity(size_t *n, const prop *p, int which) {
  return *n = GRANULE, plain(p) && which == 1 ? OK : INVALID;
}
R cuMemAddressReserve(P *p, size_t n, size_t align, P wish, uint64_t flags) {
  if (!context_current || n % GRANULE || align || wish || flags) return INVALID;
  if (n / GRANULE > GRANULES) return 2;
  for (int i = 0; i < 4; i++)
    if (!reserved[i].base) {
      void *at = mmap(0, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (at == MAP_FAILED) return 2;
      memset(reserved[i].state, 0, sizeof reserved[i].state);
      return *p = reserved[i].base = (P)at, reserved[i].bytes = n, fake_live++, OK;
    }
  return 2;
}
R cuMemAddressFree(P p, size_t n) {
  for (int i = 0; i < 4; i++)
    if (reserved[i].base == p && reserved[i].bytes == n) {
      for (size_t g = 0; g < n / GRANULE; g++)
        if (reserved[i].state[g]) return INVALID;
      return munmap((void *)p, n), reserved[i].base = 0, fake_live--, OK;
    }
  return INVALID;
}
R cuMemCreate(uint64_t *h, size_t n, const prop *p, uint64_t flags) {
  if (fake_mapped >= fake_most_mapped) return 2;
  return *h = 77, fake_live++, n == GRANULE && plain(p) && !flags ? OK : INVALID;
}
R cuMemRelease(uint64_t h) { return fake_live--, h == 77 ? OK : INVALID; }
R cuMemMap(P p, size_t n, size_t offset, uint64_t h, uint64_t flags) {
  if (!granule(p) || *granule(p) || p % 4096 || n != GRANULE || offset || h != 77 || flags) return INVALID;
  return *granule(p) = 1, fake_mapped++, OK;
}
R cuMemUnmap(P p, size_t n) {
  if (fake_running || fake_lost) fake_wrong_unmaps++;
  if (!granule(p) || !*granule(p) || n != GRANULE) return INVALID;
  mprotect((void *)p, n, PROT_NONE);
  return *granule(p) = 0, fake_mapped--, OK;
}
R cuMemSetAccess(P p, size_t n, const int *access, size_t count) {
  if (!granule(p) || *granule(p) != 1 || n != GRANULE || count != 1) return INVALID;
  if (access[0] != 1 || access[1] != 40 || access[2] != 3) return INVALID;
  mprotect((void *)p, n, PROT_READ | PROT_WRITE);
  memset((void *)p, 0xff, n); /* NaN: fresh memory is undefined */
  return *granule(p) = 2, OK;
}
#define STREAM_OK(s) (context_current && !fake_lost && !graph.capturing && (!(s) || (s) == (void *)&fake_live))
#define RUNS(s) (STREAM_OK(s) && (fake_running = 1))
R cuMemHostAlloc(void **p, size_t n, unsigned flags) {
  for (int i = 0; context_current && !flags && i < 8; i++)
    if (!pinned[i].at) return *p = pinned[i].at = malloc(n), pinned[i].bytes = n, fake_live++, OK;
  return 2;
}
R cuMemFreeHost(void *p) {
  for (int i = 0; i < 8; i++)
    if (pinned[i].at == p) return free(p), pinned[i].at = 0, fake_live--, OK;
  return INVALID;
}
R cuMemcpyHtoDAsync_v2(P to, const void *from, size_t n, void *s) {
  const char *at = from;
  fake_copies++;
  for (int i = 0; i < 8; i++)
    if (pinned[i].at && at >= pinned[i].at && at + n <= pinned[i].at + pinned[i].bytes) fake_pinned_copies++;
  return RUNS(s) && inside(to, n) ? (memcpy((void *)to, from, n), OK) : INVALID;
}
R cuMemcpyDtoHAsync_v2(void *to, P from, size_t n, void *s) {
  return RUNS(s) && inside(from, n) ? (memcpy(to, (void *)from, n), OK) : INVALID;
}
R cuMemcpyDtoDAsync_v2(P to, P from, size_t n, void *s) {
  return RUNS(s) && inside(from, n) && inside(to, n) ? (memcpy((void *)to, (void *)from, n), OK) : INVALID;
}
R cuMemcpy2DAsync_v2(const void *copy, void *s) { return (void)copy, (void)s, INVALID; }
R cuMemsetD8Async(P to, unsigned char v, size_t n, void *s) {
  return RUNS(s) && inside(to, n) ? (memset((void *)to, v, n), OK) : INVALID;
}
R cuMemsetD32Async(P to, unsigned v, size_t n, void *s) {
  if (!RUNS(s) || !inside(to, n * 4)) return INVALID;
  for (size_t i = 0; i < n; i++) ((unsigned *)to)[i] = v;
  return OK;
}
R cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                 void *s, void **params, void **extra) {
  launch l = {f, {gx, gy, gz}, {bx, by, bz}, shared, {0}};
  if (!context_current || s != (void *)&fake_live || extra || !gx || !gy || !gz) return INVALID;
  for (int i = 0; i < 8; i++) l.args[i] = *(P *)params[i];
  if (fake_lost || fake_good_launches-- <= 0) return fake_good_launches++, ILLEGAL;
  int known = 0;
  while (known < 15 && loaded[known] && loaded[known] != f) known++;
  if (graph.capturing && !loaded[known]) return graph.invalid = 1, REFUSED;
  loaded[known] = f;
  if (!graph.capturing) return run(&l);
  return graph.list[graph.n++] = l, OK;
}
R cuStreamCreate(void **s, unsigned flags) { return *s = &fake_live, fake_live++, flags == 1 ? OK : INVALID; }
R cuStreamSynchronize(void *s) { return STREAM_OK(s) ? fake_running = 0, OK : LOST; }
R cuStreamDestroy_v2(void *s) { return fake_live--, s == (void *)&fake_live ? OK : INVALID; }
/* The one kind of event: without times, happened at once. */
R cuEventCreate(void **e, unsigned flags) { return *e = &reserved, fake_live++, flags == 2 ? OK : INVALID; }
R cuEventRecord(void *e, void *s) { return e == &reserved && STREAM_OK(s) ? OK : INVALID; }
R cuEventSynchronize(void *e) { return e == &reserved && !fake_lost ? OK : LOST; }
R cuEventDestroy_v2(void *e) { return fake_live--, e == &reserved ? OK : INVALID; }
R cuStreamBeginCapture_v2(void *s, int mode) {
  return graph.capturing = 1, graph.invalid = 0, graph.n = 0, s == (void *)&fake_live && mode == 1 ? OK : INVALID;
}
R cuStreamEndCapture(void *s, void **g) {
  graph.capturing = 0;
  if (graph.invalid || fake_refusals > 0) return fake_refusals -= fake_refusals > 0, *g = 0, INVALIDATED;
  return *g = &graph, fake_recordings++, s ? OK : INVALID;
}
R cuGraphInstantiateWithFlags(void **e, void *g, uint64_t flags) {
  if (g != &graph || flags) return INVALID;
  *e = malloc(sizeof graph);
  memcpy(*e, &graph, sizeof graph);
  return fake_live++, OK;
}
R cuGraphLaunch(void *e, void *s) {
  const launch *l = (const launch *)((const char *)e + ((const char *)graph.list - (const char *)&graph));
  int n = ((const int *)e)[2];
  fake_graph_launches++;
  for (int i = 0; i < n; i++)
    if (run(l + i)) return ILLEGAL;
  return STREAM_OK(s) ? OK : INVALID;
}
R cuGraphDestroy(void *g) { return g == &graph ? OK : INVALID; }
R cuGraphExecDestroy(void *e) { return free(e), fake_live--, OK; }
R cuGetErrorName(R r, const char **s) { return *s = r == 218 ? "CUDA_ERROR_INVALID_PTX" : "CUDA_ERROR_FAKE", OK; }
R cuGetErrorString(R r, const char **s) { return *s = "fake error", r ? OK : INVALID; }
