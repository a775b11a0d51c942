/* Runs kernels of a library on buffers from standard input; the buffers go to standard output.
 *
 *   driver LIBRARY < script > results
 *
 * The script is a sequence of: kernel number, buffers, sizes, workers (64-bit words); for each buffer its length and its
 * bytes; the sizes. Workers run one after the other. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef void (*caller)(const uint64_t *args);

static void stop(const char *what) {
  fprintf(stderr, "driver: %s\n", what);
  exit(1);
}

static uint64_t word(void) {
  uint64_t v;
  if (fread(&v, 8, 1, stdin) != 1) stop("the script ends too early");
  return v;
}

int main(int argc, char **argv) {
  if (argc != 2) stop("usage: driver LIBRARY");
  void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) stop(dlerror());
  uint64_t kernel;
  while (fread(&kernel, 8, 1, stdin) == 1) {
    uint64_t args[64], lengths[32];
    uint64_t buffers = word(), sizes = word(), workers = word();
    if (buffers > 32 || buffers + sizes + 3 > 64) stop("too many arguments");
    for (uint64_t i = 0; i < buffers; i++) {
      lengths[i] = word();
      void *memory = aligned_alloc(64, (lengths[i] / 64 + 1) * 64);
      if (!memory || fread(memory, 1, lengths[i], stdin) != lengths[i]) stop("a buffer is incomplete");
      args[i] = (uint64_t)(uintptr_t)memory;
    }
    for (uint64_t i = 0; i < sizes; i++) args[buffers + i] = word();
    char name[32];
    snprintf(name, sizeof name, "mlcc_call_%llu", (unsigned long long)kernel);
    caller call = (caller)dlsym(library, name);
    if (!call) stop(dlerror());
    args[buffers + sizes + 2] = workers;
    for (uint64_t w = 0; w < workers; w++) {
      args[buffers + sizes] = w;
      args[buffers + sizes + 1] = w + 1;
      call(args);
    }
    for (uint64_t i = 0; i < buffers; i++) {
      fwrite((void *)(uintptr_t)args[i], 1, lengths[i], stdout);
      free((void *)(uintptr_t)args[i]);
    }
  }
  return fflush(stdout) ? 1 : 0;
}
