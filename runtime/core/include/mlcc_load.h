/* mlcc_load.h: loads a compiled model (.so) without the system's dynamic loader, on Linux, Android, Windows and macOS.
 *
 * The same file runs on every operating system of its CPU: it imports nothing, and its code calls nothing. This header maps
 * the file, checks what it follows, copies code and table into fresh pages, relocates them and makes them read-only or
 * executable; weights stay in the mapped file. It needs the C library of the system and mlcc.h, and nothing else.
 *
 *   mlcc_loaded model;
 *   const char *error = mlcc_load("model.so", 0, 0, &model);     0, 0: the whole file; else where it lies in a container
 *   if (error) ...
 *   ... model.table, mlcc_section(model.file, model.file_bytes, MLCC_SECTION_WEIGHTS, &bytes) ...
 *   mlcc_unload(&model);                                         no thread is in its code any more
 *
 * Every error is a text of its own, and nothing is left mapped then. Hashes of the file are not computed here (the runtime of
 * mlcc does that): load files that you trust. Linux and Windows (under Wine) are executed in tests, macOS and Android are not.
 */
#ifndef MLCC_LOAD_H
#define MLCC_LOAD_H

#if defined(__linux__) && !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE /* MAP_ANON under -std=c11; include this header first there */
#endif
#include "mlcc.h"
#include <string.h>
#if defined(_WIN32)
#include <stdlib.h>
#include <windows.h>
#else
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__APPLE__)
#include <libkern/OSCacheControl.h>
#include <pthread.h>
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* A loaded model. Fields below the line belong to this header. */
typedef struct mlcc_loaded {
  const mlcc_model_table *table;
  const uint8_t *file; /* the artifact in memory, read-only */
  uint64_t file_bytes;
  /* ---- */
  uint8_t *pages; /* code and table */
  uint64_t pages_bytes;
  void *view; /* the mapping of the file, which begins at a multiple of the system's granularity */
  uint64_t view_bytes;
} mlcc_loaded;

/* ---- the operating system: pages and files */

#if defined(_WIN32)
static inline uint64_t mlcc_os_page(void) {
  SYSTEM_INFO info;
  GetSystemInfo(&info);
  return info.dwPageSize;
}
static inline uint8_t *mlcc_os_reserve(uint64_t bytes) {
  return (uint8_t *)VirtualAlloc(NULL, (SIZE_T)bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}
static inline void mlcc_os_release(uint8_t *pages, uint64_t bytes) {
  (void)bytes;
  VirtualFree(pages, 0, MEM_RELEASE);
}
static inline int mlcc_os_protect(uint8_t *at, uint64_t bytes, int executable) {
  DWORD before;
  if (executable) FlushInstructionCache(GetCurrentProcess(), at, (SIZE_T)bytes);
  return VirtualProtect(at, (SIZE_T)bytes, executable ? PAGE_EXECUTE_READ : PAGE_READONLY, &before) != 0;
}
static inline void mlcc_os_unmap(mlcc_loaded *m) { UnmapViewOfFile(m->view); }
static inline const char *mlcc_os_map(const char *path, uint64_t offset, uint64_t bytes, mlcc_loaded *m) {
  SYSTEM_INFO info;
  LARGE_INTEGER size;
  HANDLE file, mapping;
  uint64_t begin;
  WCHAR *wide;
  int length = MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, NULL, 0);
  if (length <= 0 || !(wide = (WCHAR *)malloc((size_t)length * sizeof(WCHAR)))) return "the path is not UTF-8";
  MultiByteToWideChar(CP_UTF8, 0, path, -1, wide, length);
  file = CreateFileW(wide, GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_DELETE, NULL, OPEN_EXISTING, 0, NULL);
  free(wide);
  if (file == INVALID_HANDLE_VALUE) return "the file cannot be opened";
  if (GetFileType(file) != FILE_TYPE_DISK || !GetFileSizeEx(file, &size)) {
    CloseHandle(file);
    return "the path is not that of a file";
  }
  if (bytes == 0 && offset < (uint64_t)size.QuadPart) bytes = (uint64_t)size.QuadPart - offset;
  if (bytes == 0 || offset > (uint64_t)size.QuadPart || bytes > (uint64_t)size.QuadPart - offset) {
    CloseHandle(file);
    return "the model lies outside of the file";
  }
  GetSystemInfo(&info);
  begin = offset / info.dwAllocationGranularity * info.dwAllocationGranularity;
  mapping = CreateFileMappingW(file, NULL, PAGE_READONLY, 0, 0, NULL);
  CloseHandle(file);
  if (!mapping) return "the file cannot be mapped";
  m->view_bytes = offset - begin + bytes;
  m->view = MapViewOfFile(mapping, FILE_MAP_READ, (DWORD)(begin >> 32), (DWORD)begin, (SIZE_T)m->view_bytes);
  CloseHandle(mapping);
  if (!m->view) return "the file cannot be mapped";
  m->file = (const uint8_t *)m->view + (offset - begin);
  m->file_bytes = bytes;
  return NULL;
}
#else
#if defined(__APPLE__) && defined(__aarch64__)
#define MLCC_OS_JIT MAP_JIT /* pages of code; who writes is a state of the thread */
#else
#define MLCC_OS_JIT 0
#endif
static inline uint64_t mlcc_os_page(void) {
  long bytes = sysconf(_SC_PAGESIZE);
  return bytes > 0 ? (uint64_t)bytes : 4096;
}
static inline uint8_t *mlcc_os_reserve(uint64_t bytes) {
  const int access = PROT_READ | PROT_WRITE | (MLCC_OS_JIT ? PROT_EXEC : 0);
  void *at = mmap(NULL, (size_t)bytes, access, MAP_PRIVATE | MAP_ANON | MLCC_OS_JIT, -1, 0);
#if defined(__APPLE__) && defined(__aarch64__)
  if (at != MAP_FAILED) pthread_jit_write_protect_np(0);
#endif
  return at == MAP_FAILED ? NULL : (uint8_t *)at;
}
static inline void mlcc_os_release(uint8_t *pages, uint64_t bytes) { munmap(pages, (size_t)bytes); }
static inline int mlcc_os_protect(uint8_t *at, uint64_t bytes, int executable) {
#if defined(__APPLE__) && defined(__aarch64__)
  if (executable) sys_icache_invalidate(at, (size_t)bytes);
  pthread_jit_write_protect_np(1); /* nothing is written after the first call: see mlcc_load */
  return 1;
#else
#if defined(__aarch64__)
  if (executable) __builtin___clear_cache((char *)at, (char *)at + bytes);
#endif
  return mprotect(at, (size_t)bytes, executable ? PROT_READ | PROT_EXEC : PROT_READ) == 0;
#endif
}
static inline void mlcc_os_unmap(mlcc_loaded *m) { munmap(m->view, (size_t)m->view_bytes); }
static inline const char *mlcc_os_map(const char *path, uint64_t offset, uint64_t bytes, mlcc_loaded *m) {
  struct stat info;
  uint64_t begin = offset / mlcc_os_page() * mlcc_os_page(), size;
  int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return "the file cannot be opened";
  if (fstat(file, &info) || !S_ISREG(info.st_mode)) {
    close(file);
    return "the path is not that of a file";
  }
  size = (uint64_t)info.st_size;
  if (bytes == 0 && offset < size) bytes = size - offset;
  if (bytes == 0 || offset > size || bytes > size - offset) {
    close(file);
    return "the model lies outside of the file";
  }
  m->view_bytes = offset - begin + bytes;
  m->view = mmap(NULL, (size_t)m->view_bytes, PROT_READ, MAP_PRIVATE, file, (off_t)begin);
  close(file);
  if (m->view == MAP_FAILED) {
    m->view = NULL;
    return "the file cannot be mapped";
  }
  m->file = (const uint8_t *)m->view + (offset - begin);
  m->file_bytes = bytes;
  return NULL;
}
#endif

/* ---- the file: ELF64, as the System V ABI has it */

typedef struct mlcc_segment {
  uint32_t kind, flags; /* flags: 1 executable, 2 writable, 4 readable */
  uint64_t offset, address, align, file_bytes, memory_bytes;
} mlcc_segment;

static inline uint64_t mlcc_long(const uint8_t *at) {
  uint64_t value;
  memcpy(&value, at, 8);
  return value;
}
static inline uint32_t mlcc_word(const uint8_t *at) {
  uint32_t value;
  memcpy(&value, at, 4);
  return value;
}

/* Program header number i; the table lies in the file. */
static inline mlcc_segment mlcc_segment_at(const mlcc_loaded *m, uint32_t i) {
  const uint8_t *h = m->file + mlcc_long(m->file + 32) + (uint64_t)i * 56;
  mlcc_segment s;
  s.kind = mlcc_word(h);
  s.flags = mlcc_word(h + 4);
  s.offset = mlcc_long(h + 8);
  s.address = mlcc_long(h + 16);
  s.file_bytes = mlcc_long(h + 32);
  s.memory_bytes = mlcc_long(h + 40);
  s.align = mlcc_long(h + 48);
  return s;
}

/* The segment that has `bytes` from `address` on, all of them from the file; its index, or -1. */
static inline int mlcc_segment_with(const mlcc_loaded *m, uint64_t address, uint64_t bytes) {
  const uint32_t count = m->file[56] | (uint32_t)m->file[57] << 8;
  uint32_t i;
  for (i = 0; i < count; i++) {
    const mlcc_segment s = mlcc_segment_at(m, i);
    if (s.kind == 1 && address >= s.address && address - s.address <= s.file_bytes && bytes <= s.file_bytes - (address - s.address)) return (int)i;
  }
  return -1;
}

/* Bytes of the file at an address of the image, NULL if they are not all there. */
static inline const uint8_t *mlcc_bytes_at(const mlcc_loaded *m, uint64_t address, uint64_t bytes) {
  const int i = mlcc_segment_with(m, address, bytes);
  mlcc_segment s;
  if (i < 0) return NULL;
  s = mlcc_segment_at(m, (uint32_t)i);
  return m->file + s.offset + (address - s.address);
}

/* Checks the headers and segments; `span` is what they take in memory. */
static inline const char *mlcc_check_segments(const mlcc_loaded *m, uint64_t page, uint64_t *span) {
  const uint8_t *f = m->file;
  uint64_t table, end = 0;
  uint32_t count, machine, i;
  if (m->file_bytes < 64 || f[0] != 0x7f || f[1] != 'E' || f[2] != 'L' || f[3] != 'F') return "the file is not an mlcc artifact: no ELF";
  if (f[4] != 2 || f[5] != 1 || f[16] != 3 || f[17] != 0) return "the file is not an mlcc artifact: no 64-bit shared object";
  machine = f[18] | (uint32_t)f[19] << 8;
#if defined(__x86_64__) || defined(_M_X64)
  if (machine != 62) return "the model is built for another kind of CPU: build it with --target x86-64";
#else
  if (machine != 183) return "the model is built for another kind of CPU: build it with --target aarch64";
#endif
  table = mlcc_long(f + 32);
  count = f[56] | (uint32_t)f[57] << 8;
  if (f[54] != 56 || f[55] != 0 || count == 0 || count > 64) return "the file is damaged: program headers";
  if (table > m->file_bytes || (uint64_t)count * 56 > m->file_bytes - table) return "the file is truncated: program headers";
  for (i = 0; i < count; i++) {
    const mlcc_segment s = mlcc_segment_at(m, i);
    if (s.kind == 7) return "the file is not an mlcc artifact: it has thread-local data";
    if (s.kind == 3) return "the file is not an mlcc artifact: it asks for an interpreter";
    if (s.kind != 1) continue;
    if (s.offset > m->file_bytes || s.file_bytes > m->file_bytes - s.offset) return "the file is truncated: a segment";
    if (s.file_bytes > s.memory_bytes || s.address > (1ULL << 40) || s.memory_bytes > (1ULL << 40)) return "the file is damaged: a segment's size";
    if ((s.flags & 3) == 3) return "the file is damaged: a segment is both writable and executable";
    if (end == 0 && s.address != 0) return "the file is damaged: it does not begin at address 0";
    if (s.address / page * page < end) return "two segments share a page of this system: build the model again";
    end = (s.address + s.memory_bytes + page - 1) / page * page;
    if (end > m->file_bytes + (1ULL << 24)) return "the file is damaged: a segment ends far beyond the file";
  }
  if (end == 0) return "the file is damaged: nothing is to be loaded";
  *span = end;
  return NULL;
}

/* Checks the dynamic table: the exported symbol `mlcc_model`, whose address it gives, and relocations that stay inside. */
static inline const char *mlcc_check_dynamic(const mlcc_loaded *m, uint64_t *model, const uint8_t **relocations, uint64_t *count) {
  const uint32_t segments = m->file[56] | (uint32_t)m->file[57] << 8;
#if defined(__x86_64__) || defined(_M_X64)
  const uint64_t relative = 8;
#else
  const uint64_t relative = 1027;
#endif
  uint64_t strings = 0, string_bytes = 0, symbols = 0, hash = 0, list = 0, bytes = 0, from = 0, to = 0, i;
  const uint8_t *table = NULL, *symbol, *buckets, *name;
  int data;
  for (i = 0; i < segments; i++) {
    const mlcc_segment s = mlcc_segment_at(m, (uint32_t)i);
    if (s.kind != 2) continue;
    if (table) return "the file is damaged: it has two dynamic tables";
    table = mlcc_bytes_at(m, s.address, s.file_bytes);
    from = s.address, to = s.address + s.file_bytes;
    if (!table || s.file_bytes % 16) return "the file is damaged: its dynamic table";
  }
  if (!table) return "the file is not an mlcc artifact: no dynamic table";
  for (i = 0; from + i < to && mlcc_long(table + i) != 0; i += 16) {
    const uint64_t tag = mlcc_long(table + i), value = mlcc_long(table + i + 8);
    switch (tag) {
      case 5: strings = value; break;
      case 6: symbols = value; break;
      case 7: list = value; break;
      case 8: bytes = value; break;
      case 10: string_bytes = value; break;
      case 0x6ffffef5: hash = value; break;
      case 9: case 11:
        if (value != 24) return "the file is damaged: its symbols or relocations have another size than those of ELF64";
        break;
      /* Numbers without consequences here. */
      case 14: case 16: case 21: case 30: case 0x6ffffff9: case 0x6ffffffb: case 0x70000001: case 0x70000003: case 0x70000005: break;
      default: return "the file is not an mlcc artifact: it asks the loader for more than artifacts need";
    }
  }
  /* One symbol, which the hash table names as the first one. */
  buckets = mlcc_bytes_at(m, hash, 16);
  symbol = buckets ? mlcc_bytes_at(m, symbols + 24ULL * mlcc_word(buckets + 4), 24) : NULL;
  if (!symbol || mlcc_word(symbol) >= string_bytes) return "the file is not an mlcc artifact: no symbol";
  name = mlcc_bytes_at(m, strings + mlcc_word(symbol), sizeof "mlcc_model");
  if (!name || memcmp(name, "mlcc_model", sizeof "mlcc_model")) return "the file is not an mlcc artifact: no symbol `mlcc_model`";
  *model = mlcc_long(symbol + 8);
  data = mlcc_segment_with(m, *model, 16);
  if (data < 0 || *model % 8 || !(mlcc_segment_at(m, (uint32_t)data).flags & 2)) return "the file is damaged: the model table does not lie in data";
  *relocations = bytes ? mlcc_bytes_at(m, list, bytes) : m->file;
  *count = bytes / 24;
  if (!*relocations || bytes % 24) return "the file is damaged: its relocations";
  for (i = 0; i < *count; i++) {
    const uint8_t *r = *relocations + 24 * i;
    const uint64_t at = mlcc_long(r), target = mlcc_long(r + 16);
    const int place = mlcc_segment_with(m, at, 8);
    if (mlcc_long(r + 8) != relative) return "the file is not an mlcc artifact: a relocation is not a relative one";
    if (at % 8 || place < 0 || !(mlcc_segment_at(m, (uint32_t)place).flags & 2)) return "the file is damaged: a relocation writes outside of data";
    if (at < to && at + 8 > from) return "the file is damaged: a relocation writes into the dynamic table";
    if (mlcc_segment_with(m, target, 0) < 0) return "the file is damaged: a relocation leads outside of the image";
  }
  return NULL;
}

/* Ends the use of a model; may be called twice. */
static inline void mlcc_unload(mlcc_loaded *m) {
  if (m->pages) mlcc_os_release(m->pages, m->pages_bytes);
  if (m->view) mlcc_os_unmap(m);
  memset(m, 0, sizeof *m);
}

/* Copies the segments into pages, relocates and protects them. */
static inline const char *mlcc_place(mlcc_loaded *m, uint64_t page, const uint8_t *relocations, uint64_t count) {
  const uint32_t segments = m->file[56] | (uint32_t)m->file[57] << 8;
  uint64_t k;
  uint32_t i;
  m->pages = mlcc_os_reserve(m->pages_bytes);
  if (!m->pages) return "out of memory";
  for (i = 0; i < segments; i++) {
    const mlcc_segment s = mlcc_segment_at(m, i);
    if (s.kind == 1) memcpy(m->pages + s.address, m->file + s.offset, (size_t)s.file_bytes);
  }
  for (k = 0; k < count; k++) {
    const uint8_t *r = relocations + 24 * k;
    const uint64_t address = (uint64_t)(uintptr_t)m->pages + mlcc_long(r + 16);
    memcpy(m->pages + mlcc_long(r), &address, 8);
  }
  for (i = 0; i < segments; i++) {
    const mlcc_segment s = mlcc_segment_at(m, i);
    const uint64_t begin = s.address / page * page, end = (s.address + s.memory_bytes + page - 1) / page * page;
    if (s.kind == 1 && !mlcc_os_protect(m->pages + begin, end - begin, (int)(s.flags & 1)))
      return "this process may not have executable memory: permit it (SELinux execmem, hardened runtime with allow-jit)";
  }
  return NULL;
}

/* Loads the artifact in `bytes` bytes of a file from `offset` on; 0 bytes: to the end of the file. NULL, or what is wrong. */
static inline const char *mlcc_load(const char *path, uint64_t offset, uint64_t bytes, mlcc_loaded *m) {
  const uint64_t page = mlcc_os_page();
  const uint8_t *relocations = NULL;
  const mlcc_model_table *table;
  uint64_t model = 0, count = 0;
  const char *error;
  memset(m, 0, sizeof *m);
  error = mlcc_os_map(path, offset, bytes, m);
  if (!error) error = mlcc_check_segments(m, page, &m->pages_bytes);
  if (!error) error = mlcc_check_dynamic(m, &model, &relocations, &count);
  if (!error) {
    /* The first fields have their place in every version; a table of this one lies in data as a whole. */
    const uint8_t *begin = mlcc_bytes_at(m, model, 16);
    if (mlcc_long(begin) != MLCC_MAGIC) error = "the file is not an mlcc artifact: no magic number";
    else if (mlcc_word(begin + 8) != MLCC_ABI_VERSION) error = "the model has another ABI version: build it again with the mlcc of this header";
    else if (mlcc_segment_with(m, model, sizeof(mlcc_model_table)) < 0) error = "the file is damaged: the model table is cut off";
  }
  if (!error) error = mlcc_place(m, page, relocations, count);
  if (error) {
    mlcc_unload(m);
    return error;
  }
  table = (const mlcc_model_table *)(const void *)(m->pages + model);
  m->table = table;
  return NULL;
}

#ifdef __cplusplus
}
#endif
#endif
