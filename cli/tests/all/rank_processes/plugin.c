/* A plug-in in place of libmlcc_mpi.so (mlcc_abi::processes): processes of one machine speak through sockets. Every message says what it
 * is, and a process fails that hears another than it waits for. All calls are written down in RANKS/RANK.log.
 *
 * TEST_RANKS: a folder for sockets and logs. TEST_RANK: the number of this process. OMPI_COMM_WORLD_SIZE: how many there are.
 * TEST_FAULT: `KIND:RANK:NUMBER`, what process RANK does wrong with its exchange NUMBER: drop (says nothing), short (says less),
 * stale (says it is the one before). TEST_GREETING: `OFFSET:TEXT`, what stands in the first exchange of this process in place of what it gives. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, LATE = 1, FAILED = 2, MOST = 16 };
enum { EXCHANGE = 1, TELL = 2 };

struct header {
  uint64_t kind, number, rows, bytes;
};

/* What goes to another process, or comes from it: a header and bytes. */
struct transfer {
  struct header header;
  uint8_t *data;
  uint64_t len, done;
  int active;
};

static int sockets[MOST];
static uint32_t own, count;
static uint64_t exchanges, told[MOST];
static struct transfer out[MOST], in[MOST];
static FILE *log_file;
static struct {
  char kind[8];
  uint32_t rank;
  uint64_t number;
} fault;

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int64_t after(uint64_t limit) { return limit ? now() + (int64_t)limit : INT64_MAX; }

static struct sockaddr_un address(uint32_t rank) {
  struct sockaddr_un to = {.sun_family = AF_UNIX};
  snprintf(to.sun_path, sizeof to.sun_path, "%s/%u.socket", getenv("TEST_RANKS"), rank);
  return to;
}

/* A piece of a transfer; 1: done, 0: not yet, -1: the other one has gone. */
static int step(int socket, struct transfer *t, int writes) {
  uint64_t head = sizeof t->header, all = head + t->len;
  while (t->done < all) {
    uint8_t *at = t->done < head ? (uint8_t *)&t->header + t->done : t->data + (t->done - head);
    size_t len = t->done < head ? head - t->done : all - t->done;
    ssize_t moved = writes ? send(socket, at, len, MSG_NOSIGNAL) : recv(socket, at, len, 0);
    if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
    if (moved <= 0) return -1;
    t->done += (uint64_t)moved;
    /* Whoever hears looks at it first: another message than the one that is waited for has another length. */
    if (!writes && t->done == head && t->len) return 0;
  }
  return 1;
}

/* Until all transfers have been made. `want` is what headers of others have to be. */
static int run(const struct header *want, uint64_t limit, uint32_t *late) {
  int64_t end = after(limit);
  for (;;) {
    struct pollfd polls[MOST];
    int open = 0;
    uint32_t with = own;
    for (uint32_t r = 0; r < count; r++) {
      polls[r] = (struct pollfd){.fd = -1};
      for (int writes = 0; writes < 2; writes++) {
        struct transfer *t = writes ? &out[r] : &in[r];
        if (!t->active) continue;
        uint64_t before = t->done;
        int moved = step(sockets[r], t, writes);
        if (!writes && before < sizeof t->header && t->done >= sizeof t->header &&
            memcmp(&t->header, &want[r], sizeof t->header)) {
          fprintf(log_file, "fault: process %u says kind %llu, number %llu, %llu rows of %llu bytes\n", r,
                  (unsigned long long)t->header.kind, (unsigned long long)t->header.number,
                  (unsigned long long)t->header.rows, (unsigned long long)t->header.bytes);
          return FAILED;
        }
        if (moved < 0) return FAILED;
        if (moved) {
          t->active = 0;
        } else {
          polls[r].fd = sockets[r];
          polls[r].events |= writes ? POLLOUT : POLLIN;
          with = r;
          open = 1;
        }
      }
    }
    if (!open) return OK;
    int64_t left = end - now();
    if (left <= 0) {
      *late = with;
      return LATE;
    }
    poll(polls, count, left > 1000 ? 1000 : (int)left);
  }
}

static struct header header(uint64_t kind, uint64_t number, uint64_t rows, uint64_t bytes) {
  return (struct header){kind, number, rows, bytes};
}

static int connect_all(void) {
  int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  struct sockaddr_un to = address(own);
  if (listener < 0 || bind(listener, (struct sockaddr *)&to, sizeof to) || listen(listener, MOST)) return FAILED;
  for (uint32_t r = 0; r < own; r++) {
    int64_t end = now() + 60000;
    to = address(r);
    for (;;) {
      sockets[r] = socket(AF_UNIX, SOCK_STREAM, 0);
      if (!connect(sockets[r], (struct sockaddr *)&to, sizeof to)) break;
      close(sockets[r]);
      if (now() > end) return FAILED;
      usleep(2000);
    }
    if (write(sockets[r], &own, sizeof own) != sizeof own) return FAILED;
  }
  for (uint32_t i = own + 1; i < count; i++) {
    struct pollfd waits = {.fd = listener, .events = POLLIN};
    if (poll(&waits, 1, 60000) <= 0) return FAILED;
    int other = accept(listener, NULL, NULL);
    uint32_t rank;
    if (other < 0 || read(other, &rank, sizeof rank) != sizeof rank || rank <= own || rank >= count) return FAILED;
    sockets[rank] = other;
  }
  for (uint32_t r = 0; r < count; r++) {
    if (r != own) fcntl(sockets[r], F_SETFL, O_NONBLOCK);
  }
  close(listener);
  return OK;
}

static int32_t join(uint32_t *rank, uint32_t *ranks) {
  const char *number = getenv("TEST_RANK"), *size = getenv("OMPI_COMM_WORLD_SIZE");
  if (!getenv("TEST_RANKS") || !number || !size) return FAILED;
  own = (uint32_t)atoi(number);
  count = (uint32_t)atoi(size);
  char path[200];
  snprintf(path, sizeof path, "%s/%u.log", getenv("TEST_RANKS"), own);
  log_file = fopen(path, "w");
  if (count < 2 || count > MOST || own >= count || !log_file) return FAILED;
  setvbuf(log_file, NULL, _IOLBF, 0);
  if (getenv("TEST_FAULT")) {
    unsigned long long at;
    if (sscanf(getenv("TEST_FAULT"), "%7[a-z]:%u:%llu", fault.kind, &fault.rank, &at) != 3) return FAILED;
    fault.number = at;
  }
  *rank = own;
  *ranks = count;
  return connect_all();
}

static int is_fault(const char *kind) {
  return fault.rank == own && fault.number == exchanges && !strcmp(fault.kind, kind);
}

static int32_t exchange(const uint8_t *from, uint8_t *all, uint64_t rows, uint64_t row_bytes, uint64_t limit,
                        uint32_t *late) {
  uint64_t bytes = rows * row_bytes;
  struct header want[MOST];
  const char *greeting = exchanges ? NULL : getenv("TEST_GREETING");
  static uint8_t edited[256];
  if (greeting) {
    const char *text = strchr(greeting, ':');
    size_t offset = (size_t)atoi(greeting);
    if (!text || bytes > sizeof edited || offset + strlen(text + 1) > bytes) return FAILED;
    memcpy(edited, from, bytes);
    memcpy(edited + offset, text + 1, strlen(text + 1));
    from = edited;
  }
  uint8_t *room = malloc(bytes * count + 1);
  if (!room) return FAILED;
  fprintf(log_file, "exchange %llu %llu\n", (unsigned long long)rows, (unsigned long long)row_bytes);
  if (is_fault("drop")) {
    /* Longer than anybody waits. */
    sleep(30);
    free(room);
    return FAILED;
  }
  for (uint32_t r = 0; r < count; r++) {
    if (r == own) continue;
    struct header says = header(EXCHANGE, exchanges, rows, row_bytes);
    want[r] = says;
    if (is_fault("short")) says.bytes /= 2;
    if (is_fault("stale")) says.number -= 1;
    out[r] = (struct transfer){says, (uint8_t *)from, bytes, 0, 1};
    in[r] = (struct transfer){.data = room + r * bytes, .len = bytes, .active = 1};
  }
  int result = run(want, limit, late);
  /* What was not sent stays where it is. */
  if (result) return result;
  memcpy(room + own * bytes, from, bytes);
  for (uint64_t row = 0; row < rows; row++) {
    for (uint32_t r = 0; r < count; r++) {
      memcpy(all + (row * count + r) * row_bytes, room + r * bytes + row * row_bytes, row_bytes);
    }
  }
  free(room);
  exchanges++;
  return OK;
}

static int32_t tell(const uint8_t *bytes, uint64_t len, uint64_t limit, uint32_t *late) {
  fprintf(log_file, "tell %llu\n", (unsigned long long)len);
  for (uint32_t r = 0; r < count; r++) {
    if (r != own) out[r] = (struct transfer){header(TELL, told[own], 1, len), (uint8_t *)bytes, len, 0, 1};
  }
  told[own]++;
  return run(NULL, limit, late);
}

static int32_t hear(uint32_t from, uint8_t *bytes, uint64_t len, uint64_t limit, uint32_t *late) {
  fprintf(log_file, "hear %u %llu\n", from, (unsigned long long)len);
  if (from >= count || from == own) return FAILED;
  struct header want[MOST];
  want[from] = header(TELL, told[from]++, 1, len);
  in[from] = (struct transfer){.data = bytes, .len = len, .active = 1};
  return run(want, limit, late);
}

static int32_t leave(void) {
  fprintf(log_file, "leave\n");
  for (uint32_t r = 0; r < count; r++) {
    if (r != own) shutdown(sockets[r], SHUT_WR);
  }
  return OK;
}

static void quit(int32_t code) {
  fprintf(log_file, "abort %d\n", code);
  _exit(code);
}

/* mlcc_abi::processes::ProcessTable. */
__attribute__((visibility("default"))) const struct {
  uint32_t version, struct_size;
  const char *name;
  int32_t (*join)(uint32_t *, uint32_t *);
  int32_t (*exchange)(const uint8_t *, uint8_t *, uint64_t, uint64_t, uint64_t, uint32_t *);
  int32_t (*tell)(const uint8_t *, uint64_t, uint64_t, uint32_t *);
  int32_t (*hear)(uint32_t, uint8_t *, uint64_t, uint64_t, uint32_t *);
  int32_t (*leave)(void);
  void (*abort)(int32_t);
} mlcc_processes = {VERSION, 64, "sockets", join, exchange, tell, hear, leave, quit};
