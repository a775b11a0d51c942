/* A libnccl.so.2 for tests: processes of one machine exchange through a file that all have mapped. A gather is three pieces of work on the
 * stream that it is given (to the host, the exchange, to the device), by the functions of the CUDA driver that MLCC_CUDA_DRIVER names: so it
 * happens when the stream comes to it, may be recorded in a graph, and waits forever for a process that does not come, as NCCL does.
 * Ranks whose gathers differ in number, size or in whether they are recorded fail. All calls are written down in TEST_RANKS/nccl-RANK.log.
 *
 * TEST_NCCL_VERSION: what ncclGetVersion says. TEST_NCCL_FAULT: `KIND:RANK:NUMBER`, what process RANK does wrong with its gather NUMBER
 * when the stream comes to it: swap (gives its bytes in another order), hang (does not come), refuse (when it is called). */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, MOST = 16, ROOM = 1 << 22 };

typedef struct {
  char internal[128];
} unique_id;

/* What a process puts aside for the others. */
struct slot {
  _Atomic uint64_t given, taken, enqueued;
  uint64_t bytes;
  uint8_t data[ROOM];
};

struct comm {
  int rank, ranks;
  void *stream;
  struct slot *slots;
  uint8_t *staged; /* pinned */
  uint64_t ran, enqueued;
  FILE *log;
};

struct gather {
  struct comm *comm;
  uint64_t bytes;
  uint8_t *from, *to;
};

static void *driver(const char *name) {
  static void *library;
  if (!library) library = dlopen(getenv("MLCC_CUDA_DRIVER"), RTLD_NOW | RTLD_LOCAL);
  void *found = library ? dlsym(library, name) : NULL;
  if (!found) fprintf(stderr, "nccl.c: no %s\n", name), abort();
  return found;
}

static int fault(struct comm *c, const char *kind, uint64_t number) {
  const char *wanted = getenv("TEST_NCCL_FAULT");
  char found[8];
  int rank;
  unsigned long long at;
  return wanted && sscanf(wanted, "%7[a-z]:%d:%llu", found, &rank, &at) == 3 && rank == c->rank && at == number &&
         !strcmp(found, kind);
}

int ncclGetVersion(int *version) {
  *version = getenv("TEST_NCCL_VERSION") ? atoi(getenv("TEST_NCCL_VERSION")) : 22703;
  return OK;
}

int ncclGetUniqueId(unique_id *id) {
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "nccl-%d", (int)getpid());
  return OK;
}

const char *ncclGetErrorString(int status) {
  return status == OK ? "no error" : status == INVALID_USAGE ? "invalid usage" : status == INVALID_ARGUMENT ? "invalid argument" : "unhandled system error";
}

int ncclCommInitRank(struct comm **to, int ranks, unique_id id, int rank) {
  char path[400];
  if (!getenv("TEST_RANKS") || ranks < 1 || ranks > MOST || rank < 0 || rank >= ranks || !id.internal[0]) return INVALID_ARGUMENT;
  struct comm *c = calloc(1, sizeof *c);
  snprintf(path, sizeof path, "%s/%s", getenv("TEST_RANKS"), id.internal);
  int file = open(path, O_RDWR | O_CREAT, 0600);
  if (!c || file < 0 || ftruncate(file, (off_t)sizeof(struct slot) * ranks)) return SYSTEM_ERROR;
  c->slots = mmap(NULL, sizeof(struct slot) * ranks, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  snprintf(path, sizeof path, "%s/nccl-%d.log", getenv("TEST_RANKS"), rank);
  c->log = fopen(path, "w");
  c->rank = rank, c->ranks = ranks;
  int (*pin)(void **, size_t, unsigned) = (int (*)(void **, size_t, unsigned))driver("cuMemHostAlloc");
  if (c->slots == MAP_FAILED || !c->log || pin((void **)&c->staged, (size_t)ROOM * (ranks + 1), 0)) return SYSTEM_ERROR;
  setvbuf(c->log, NULL, _IOLBF, 0);
  fprintf(c->log, "init %d of %d\n", rank, ranks);
  return *to = c, OK;
}

/* Waits until all have come so far. */
static void all_come(struct comm *c, int taken, uint64_t number) {
  for (int r = 0; r < c->ranks; r++) {
    _Atomic uint64_t *count = taken ? &c->slots[r].taken : &c->slots[r].given;
    while (atomic_load(count) < number) usleep(20);
  }
}

/* The stream has come to a gather. */
static void run(void *argument) {
  struct gather *g = argument;
  struct comm *c = g->comm;
  uint64_t number = c->ran++;
  struct slot *own = &c->slots[c->rank];
  if (fault(c, "hang", number))
    for (;;) sleep(1);
  memcpy(own->data, g->from, g->bytes);
  if (fault(c, "swap", number))
    for (uint64_t i = 0; i + 1 < g->bytes; i += 2) own->data[i] = g->from[i + 1], own->data[i + 1] = g->from[i];
  own->bytes = g->bytes;
  atomic_store(&own->given, number + 1);
  all_come(c, 0, number + 1);
  for (int r = 0; r < c->ranks; r++) {
    if (c->slots[r].bytes != g->bytes) {
      fprintf(c->log, "fault: gather %llu has %llu bytes, of rank %d %llu\n", (unsigned long long)number,
              (unsigned long long)g->bytes, r, (unsigned long long)c->slots[r].bytes);
      _exit(9);
    }
    memcpy(g->to + r * g->bytes, c->slots[r].data, g->bytes);
  }
  atomic_store(&own->taken, number + 1);
  all_come(c, 1, number + 1);
  fprintf(c->log, "ran %llu\n", (unsigned long long)g->bytes);
}

int ncclAllGather(const void *from, void *to, size_t bytes, int type, struct comm *c, void *stream) {
  if (!c || !from || !to || type != 1 || !bytes || bytes > ROOM || !stream) return INVALID_ARGUMENT;
  if (c->stream && c->stream != stream) return fprintf(c->log, "fault: another stream\n"), INVALID_USAGE;
  c->stream = stream;
  uint64_t number = c->enqueued++;
  if (fault(c, "refuse", number)) return SYSTEM_ERROR;
  int (*is_capturing)(void *, int *) = (int (*)(void *, int *))driver("cuStreamIsCapturing");
  int (*to_host)(void *, uint64_t, size_t, void *) = (int (*)(void *, uint64_t, size_t, void *))driver("cuMemcpyDtoHAsync_v2");
  int (*to_device)(uint64_t, const void *, size_t, void *) =
      (int (*)(uint64_t, const void *, size_t, void *))driver("cuMemcpyHtoDAsync_v2");
  int (*call)(void *, void (*)(void *), void *) = (int (*)(void *, void (*)(void *), void *))driver("cuLaunchHostFunc");
  struct gather *g = malloc(sizeof *g); /* graphs run it again */
  int recorded = 0;
  if (!g || is_capturing(stream, &recorded)) return SYSTEM_ERROR;
  *g = (struct gather){c, bytes, c->staged, c->staged + ROOM};
  fprintf(c->log, "gather %zu%s\n", bytes, recorded ? " recorded" : "");
  if (to_host(g->from, (uint64_t)from, bytes, stream) || call(stream, run, g) ||
      to_device((uint64_t)to, g->to, bytes * c->ranks, stream))
    return SYSTEM_ERROR;
  return OK;
}

static int end(struct comm *c, const char *how) {
  int (*unpin)(void *) = (int (*)(void *))driver("cuMemFreeHost");
  fprintf(c->log, "%s\n", how);
  fclose(c->log);
  unpin(c->staged);
  munmap(c->slots, sizeof(struct slot) * c->ranks);
  free(c);
  return OK;
}

int ncclCommDestroy(struct comm *c) { return end(c, "destroy"); }
int ncclCommAbort(struct comm *c) { return end(c, "abort"); }
