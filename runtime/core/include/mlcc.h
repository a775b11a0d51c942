/* mlcc.h: how to use a compiled model (.so) from C, without any library of ours.
 *
 * The .so exports one data symbol, `mlcc_model`, of type mlcc_model_table. It imports nothing, allocates nothing
 * and starts no threads: the caller owns every buffer and every thread.
 *
 *   1. dlopen the file; table = dlsym(handle, "mlcc_model"); check magic and abi_version. (mlcc_load.h does 1 and 2 without
 *      the system's loader, on every system.)
 *   2. mmap the same file and find the weights: mlcc_section(file, size, MLCC_SECTION_WEIGHTS, &bytes). (A model built
 *      with --split-weights has them in the .safetensors file beside it: they begin at byte 8 + the u64 at byte 0. One
 *      built with --weights-on-load has none: it is for the runtime of mlcc only.)
 *   3. Pick the first variant whose `features` this CPU has: !(v->features & ~mlcc_host_features()). Running another one
 *      is an illegal instruction.
 *   4. Allocate arena_bytes, state_bytes and vocab floats (table->plan), aligned to `alignment` (at least MLCC_BUFFER_ALIGN). Where
 *      page_bytes > 0, also pages of so many bytes for rows of the KV caches and a table of their numbers: one sequence takes
 *      ceil(context / MLCC_PAGE_ROWS) of them at most. From mmap or calloc they cost no memory before they are written.
 *   5. Find the entry points by name (mlcc_find_entry). Fill an mlcc_ctx (zero it first), call create_kv_cache(&ctx, 0, 1), then
 *      prefill / decode, add n to past. A prompt of more than `chunk` tokens takes several calls of prefill; some models have to be told before the first one
 *      (MLCC_STATE_SEQUENCE_LENGTH), some can't take it (MLCC_WHOLE_PROMPTS), nor a prompt that is fed by decode.
 *
 * Entry points are SPMD steps. One thread: step(&ctx, 0, 1), and ctx.barrier may be NULL. W threads: every thread
 * calls step(&ctx, w, W) with the same ctx, and ctx.barrier(ctx.barrier_self, w) must return when all W have called it;
 * W is at most max_workers. ctx.next_chunk may be NULL.
 *
 * Strings are pointer + length, UTF-8, not NUL-terminated. 64-bit little-endian hosts only.
 * This file and the Rust crate mlcc-abi are the same contract; a test of that crate holds them equal.
 */
#ifndef MLCC_H
#define MLCC_H

#include <stddef.h>
#include <stdint.h>
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

/* The convention of all functions between a model and its caller is that of the System V ABI, on Windows too. */
#if defined(_WIN32) && defined(__x86_64__)
#define MLCC_CALL __attribute__((sysv_abi))
#else
#define MLCC_CALL
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define MLCC_MAGIC 0x0049424163636c6dULL /* "mlccABI\0" */
#define MLCC_ABI_VERSION 17u
#define MLCC_BUFFER_ALIGN 64u
#define MLCC_PAGE_ROWS 64u
#define MLCC_SECTION_ALIGN 4096u
#define MLCC_NO_CHUNK 0xffffffffu

#define MLCC_SECTION_WEIGHTS ".mlcc.weights"
#define MLCC_SECTION_RECIPE ".mlcc.recipe"
#define MLCC_SECTION_METADATA ".mlcc.metadata"
#define MLCC_SECTION_TOKENIZER ".mlcc.tokenizer"
#define MLCC_SECTION_CHAT ".mlcc.chat"
#define MLCC_SECTION_GRAPH ".mlcc.graph"
#define MLCC_SECTION_GOLDEN ".mlcc.golden"
#define MLCC_SECTION_REPORT ".mlcc.report"
#define MLCC_SECTION_HASHES ".mlcc.hashes"

/* Return values of entry points. */
#define MLCC_OK 0
#define MLCC_BAD_TOKEN 1    /* a token id is negative or not below vocab */
#define MLCC_BAD_LENGTH 2   /* n, b, n_outputs, or rows of a sequence are out of range */
#define MLCC_CONTEXT_FULL 3 /* past + n exceeds context, or past is negative */

/* Bits of mlcc_model_table.flags. */
#define MLCC_WHOLE_PROMPTS 1ULL /* a prompt comes in one call of at most chunk tokens, with past 0 */

/* CPU features: bits of mlcc_variant.features. */
#define MLCC_FEATURE_SSE3 (1ULL << 0)
#define MLCC_FEATURE_SSSE3 (1ULL << 1)
#define MLCC_FEATURE_SSE4_1 (1ULL << 2)
#define MLCC_FEATURE_SSE4_2 (1ULL << 3)
#define MLCC_FEATURE_POPCNT (1ULL << 4)
#define MLCC_FEATURE_AVX (1ULL << 5)
#define MLCC_FEATURE_AVX2 (1ULL << 6)
#define MLCC_FEATURE_FMA (1ULL << 7)
#define MLCC_FEATURE_F16C (1ULL << 8)
#define MLCC_FEATURE_BMI1 (1ULL << 9)
#define MLCC_FEATURE_BMI2 (1ULL << 10)
#define MLCC_FEATURE_LZCNT (1ULL << 11)
#define MLCC_FEATURE_MOVBE (1ULL << 12)
#define MLCC_FEATURE_AVX512F (1ULL << 13)
#define MLCC_FEATURE_AVX512BW (1ULL << 14)
#define MLCC_FEATURE_AVX512CD (1ULL << 15)
#define MLCC_FEATURE_AVX512DQ (1ULL << 16)
#define MLCC_FEATURE_AVX512VL (1ULL << 17)
#define MLCC_FEATURE_AVX512VNNI (1ULL << 18)
#define MLCC_FEATURE_AVX512BF16 (1ULL << 19)
#define MLCC_FEATURE_AVX512VBMI (1ULL << 20)
#define MLCC_FEATURE_AVX512FP16 (1ULL << 21)
#define MLCC_FEATURE_AVXVNNI (1ULL << 22)
#define MLCC_FEATURE_AMX_TILE (1ULL << 23)
#define MLCC_FEATURE_AMX_INT8 (1ULL << 24)
#define MLCC_FEATURE_AMX_BF16 (1ULL << 25)
#define MLCC_FEATURE_CMPXCHG16B (1ULL << 26)
#define MLCC_FEATURE_NEON (1ULL << 32)
#define MLCC_FEATURE_FP16 (1ULL << 33)
#define MLCC_FEATURE_DOTPROD (1ULL << 34)
#define MLCC_FEATURE_BF16 (1ULL << 35)
#define MLCC_FEATURE_I8MM (1ULL << 36)
#define MLCC_FEATURE_SVE (1ULL << 37)
#define MLCC_FEATURE_SVE2 (1ULL << 38)
#define MLCC_FEATURE_LSE (1ULL << 39)

typedef struct mlcc_str {
  const char *ptr; /* not NUL-terminated */
  uint64_t len;
} mlcc_str;

/* A sequence of a call of decode_batch or step. */
typedef struct mlcc_sequence {
  uint8_t *state; /* as in mlcc_ctx; no two sequences of a call share one */
  const int32_t *page_table; /* as in mlcc_ctx; no two share a page that one of them writes to */
  int64_t past;   /* tokens that the state has seen before this call */
  int64_t first;  /* number of its first token in this call: that of the tokens of all sequences before it */
  int64_t rows;   /* its tokens in this call, at least 1; decode_batch: 1 */
} mlcc_sequence;

/* What one call works on. Zero it, then set what the call needs. */
typedef struct mlcc_ctx {
  const uint8_t *weights; /* start of the weights payload */
  uint8_t *arena;         /* arena_bytes of scratch */
  uint8_t *state;         /* state_bytes; create_kv_cache initialises all of it but the rows of caches */
  const int32_t *tokens;  /* n token ids, aligned to MLCC_BUFFER_ALIGN; decode_batch: one of each sequence;
                           * step: those of one sequence behind those of the other */
  int64_t n;              /* tokens in this call, 1..chunk; decode_batch: sequences, 1..batch; step: up to the larger */
  int64_t past;           /* tokens that the state has seen before this call */
  float *logits;          /* out: vocab floats (prefill_logits, decode_batch: n * vocab; step: n_outputs * vocab);
                           * in for softmax_with_temperature; NULL in prefill of a model of one rank: none are made */
  float *probs;           /* out of softmax_with_temperature: n * vocab floats; may equal logits */
  void (MLCC_CALL *barrier)(void *self, uint32_t worker); /* may be NULL with one worker */
  void *barrier_self;
  float temperature; /* for softmax_with_temperature; > 0 */
  uint32_t reserved0;
  void (MLCC_CALL *trace)(void *self, uint32_t worker, uint32_t item); /* after each launch and barrier of a step; may be NULL */
  void *trace_self;
  const mlcc_sequence *sequences; /* decode_batch, step: b of them, instead of state and past */
  /* Deals out chunks of large kernels, so that a fast thread helps a slow one; NULL: every thread computes its own share.
   * Gives a number below W * chunks (thread w's own: from w * chunks on) that no thread has got in this launch, or
   * MLCC_NO_CHUNK, once for each thread and launch. Threads come by the same launches in the same order. */
  uint32_t (MLCC_CALL *next_chunk)(void *self, uint32_t worker, uint32_t chunks);
  void *next_chunk_self;
  int64_t b;             /* decode_batch, step: sequences in this call, 1..batch; decode_batch: n */
  const int32_t *output_rows; /* step: n numbers of tokens of this call, aligned as tokens; logits of the first n_outputs */
  int64_t n_outputs;      /* step: 1..n */
  /* Caches, where page_bytes > 0: row i is row i % MLCC_PAGE_ROWS of page page_table[i / MLCC_PAGE_ROWS]. The call reads the pages
   * of rows before past + n and writes to those from row past on; contents of other rows are undefined. */
  uint8_t *pages; /* the first page; aligned as tokens */
  const int32_t *page_table;
  /* Where the model has ranks > 1, called by worker 0 of each rank, all in the same order; else NULL. part: rows rows of row_bytes of
   * this rank; all: gets as many rows of ranks * row_bytes, each with the rows of all ranks in their order. When it returns no other
   * rank reads part any longer. item: number of the item of the step. */
  void (MLCC_CALL *all_gather)(void *self, uint32_t item, const uint8_t *part, uint8_t *all, uint64_t rows, uint64_t row_bytes);
  void *all_gather_self;
  const uint8_t *adapters; /* adapted functions: the matrices of the slots, adapter_bytes, aligned as tokens; those of slot 0 are zero */
} mlcc_ctx;

typedef int32_t (MLCC_CALL *mlcc_step)(mlcc_ctx *ctx, uint32_t worker, uint32_t workers);

/* How an entry point is called: values of mlcc_entry.kind. */
#define MLCC_ENTRY_LAST_LOGITS 0u /* n tokens in, logits of the last one out: prefill, and decode for n == 1 */
#define MLCC_ENTRY_ALL_LOGITS 1u  /* n tokens in, logits of every one out: prefill_logits */
#define MLCC_ENTRY_SOURCE 2u      /* the whole source text in one call, past 0, no logits: encode, of models with an encoder */
#define MLCC_ENTRY_BATCH 3u       /* one token of each of n sequences: decode_batch; may be absent */
#define MLCC_ENTRY_RAGGED 4u      /* any number of tokens of each of b sequences: step; may be absent */
#define MLCC_ENTRY_STATE 5u       /* initial values: create_kv_cache of a fresh state (KV cache or recurrent), reset_kv_cache of a used one */
#define MLCC_ENTRY_ROWS 6u        /* n rows of logits in: softmax_with_temperature, probs = softmax(logits / temperature) */

/* An entry point. Look it up by its name (mlcc_find_entry); leave those alone whose names you do not know. */
typedef struct mlcc_entry {
  mlcc_str name;
  uint32_t kind; /* MLCC_ENTRY_* */
  uint32_t reserved;
  mlcc_step function;
  mlcc_step adapted; /* for calls in which some sequence has an adapter; NULL without slots */
} mlcc_entry;

/* The model's code for one level of CPU. */
typedef struct mlcc_variant {
  mlcc_str name; /* for example x86-64-v3 */
  uint64_t features;
  const mlcc_entry *entries;
  uint64_t n_entries;
} mlcc_variant;

/* One packed parameter. */
typedef struct mlcc_param {
  mlcc_str name;    /* as in the checkpoint */
  mlcc_str format;  /* weight format, for example q4f16_1 */
  mlcc_str packing; /* order in memory; empty = row-major */
  uint32_t ndim;
  uint32_t of_slots; /* 1: it lies in mlcc_ctx.adapters, with those of all slots one behind the other; 0: among the weights */
  uint64_t dims[4]; /* logical dims, slowest first */
  uint64_t offset;  /* from the start of the weights payload, or of the adapters */
  uint64_t bytes;
} mlcc_param;

#define MLCC_INIT_ZERO 0u
#define MLCC_INIT_FILL_F32 1u

#define MLCC_STATE_RECURRENT 0u /* of fixed size, replaced by every step */
#define MLCC_STATE_CACHE 1u     /* one row per position: reads the first `past`, writes the `n` after them */
/* One int32_t, zero at first, that the caller owns. A model that has it looks back only rows - 1 rows, and on the first
 * `sinks` ones: a caller whose caches are full may move the last rows - 1 rows of every cache to right after those, add the
 * number of rows it dropped here, and go on with past = sinks + rows - 1. */
#define MLCC_STATE_DROPPED_ROWS 2u
/* One int32_t, zero at first, that the caller owns: tokens that the sequence will have when the prompt has ended that is
 * being fed in several calls. Written before the first of them, and set to zero by a caller that goes back. */
#define MLCC_STATE_SEQUENCE_LENGTH 3u
/* One int32_t, zero at first, that the caller owns: the slot of the adapter of the sequence, from 1 on; 0: it has none. */
#define MLCC_STATE_ADAPTER_SLOT 4u
/* One int32_t, zero at first, that encode writes: so many first rows of the caches are of the source text. A caller may go back in
 * the sequence no further. */
#define MLCC_STATE_SOURCE_LENGTH 5u

/* One piece of the state block and how it begins. */
typedef struct mlcc_state {
  mlcc_str name;
  uint64_t offset;
  uint64_t bytes;
  uint32_t init; /* MLCC_INIT_* */
  float fill;
  mlcc_str format;    /* type of the elements, for example f16 */
  uint32_t kind;      /* MLCC_STATE_* */
  uint32_t sinks;     /* of the number of dropped rows: first rows that are never dropped; else 0 */
  uint64_t rows;      /* of a cache: rows planned, at least `context`; of dropped rows: the window; else 0 */
  uint64_t row_bytes; /* of a cache: row i lies at offset + i * row_bytes of the state, or of its page, counted there; else 0 */
} mlcc_state;

#define MLCC_DEVICE_LATER 0u  /* PTX: this and every later compute capability; a cubin: of the same major version */
#define MLCC_DEVICE_EXACT 1u  /* no other one (sm_90a) */
#define MLCC_DEVICE_FAMILY 2u /* this and later ones of its family (sm_100f) */

/* Device code; ptr[len] is a NUL byte. */
typedef struct mlcc_device_image {
  mlcc_str kind; /* ptx or cubin */
  uint32_t sm;   /* compute capability * 10 */
  uint32_t scope; /* MLCC_DEVICE_* */
  const uint8_t *ptr;
  uint64_t len;
} mlcc_device_image;

/* ceil((coef_n * n + coef_past * past + constant) / div) */
typedef struct mlcc_dim_expr {
  int64_t coef_n;
  int64_t coef_past;
  int64_t constant;
  int64_t div;
} mlcc_dim_expr;

/* What changes from call to call, in the device's memory; launches are the same in every call. */
typedef struct mlcc_control {
  int64_t n;
  int64_t past;
  int64_t b;        /* 0 in calls of one sequence */
  int64_t n_outputs; /* 0 in calls of other entry points than step */
  float temperature;
  uint32_t reserved;
} mlcc_control;

#define MLCC_ARG_WEIGHTS 0u
#define MLCC_ARG_ARENA 1u
#define MLCC_ARG_STATE 2u
#define MLCC_ARG_TOKENS 3u
#define MLCC_ARG_LOGITS 4u
#define MLCC_ARG_PROBS 5u
#define MLCC_ARG_CONTROL 6u /* mlcc_control */
#define MLCC_ARG_OUTPUT_ROWS 7u
#define MLCC_ARG_SEQUENCES 8u /* mlcc_sequence, with addresses of the device */
#define MLCC_ARG_PAGES 9u
#define MLCC_ARG_PAGE_TABLE 10u
#define MLCC_ARG_ADAPTERS 11u

#define MLCC_REPEAT_ONCE 0u
#define MLCC_REPEAT_OUTPUTS 1u /* n of the grid: rows whose logits are wanted */
/* For each sequence, by its number in z. n and past of the grid: the most that one has. Arguments in the state and in the table of
 * pages: bytes from the beginning of one. */
#define MLCC_REPEAT_EACH_SEQUENCE 2u

/* An address: base + offset. */
typedef struct mlcc_launch_arg {
  uint32_t kind; /* MLCC_ARG_* */
  uint32_t reserved;
  uint64_t offset;
} mlcc_launch_arg;

typedef struct mlcc_launch {
  mlcc_str kernel;
  mlcc_dim_expr grid[3]; /* at least so many blocks; those beyond do nothing */
  uint32_t block[3];
  uint32_t shared_bytes;
  const mlcc_launch_arg *args;
  uint64_t n_args;
  uint32_t repeat; /* MLCC_REPEAT_* */
  uint32_t reserved;
} mlcc_launch;

/* The launch list of one entry point on a device. */
typedef struct mlcc_device_entry {
  mlcc_str name; /* prefill, decode, prefill_logits, ... */
  const mlcc_launch *launches;
  uint64_t n_launches;
} mlcc_device_entry;

/* The sizes that callers allocate by. */
typedef struct mlcc_plan {
  uint64_t weights_bytes;
  uint64_t arena_bytes;
  uint64_t state_bytes;
  uint64_t alignment;   /* of arena, state and weights; at most 4096 */
  uint64_t chunk;       /* most tokens in one prefill call */
  uint64_t context;     /* most tokens in the state; 0 = unbounded */
  uint64_t batch;       /* sequences that the plan holds */
  uint64_t vocab;
  uint64_t max_workers; /* 0 = any number */
  uint64_t page_bytes;  /* of a page with MLCC_PAGE_ROWS rows of every cache; 0 = there is none */
  /* Floats of the vector of a text. Not 0: whole texts are read and nothing is kept. Of the steps that take tokens there is `step`
   * alone; its sequences have no state and no pages, and past 0; a wanted row gives text_width floats in place of vocab, and the last
   * row of a text stands for it. 0: the model makes logits. */
  uint64_t text_width;
  /* Ranks that the model is split among: each runs the same code with memory of its own and the weights of its own section,
   * MLCC_SECTION_WEIGHTS of rank 0, with ".1", ".2", ... behind it of the others. 0 and 1: it is whole. */
  uint64_t ranks;
  uint64_t adapter_slots; /* adapters that fit beside each other; 0: there are no slots */
  uint64_t adapter_rank;  /* the rank that each has room for */
  uint64_t adapter_bytes; /* of the matrices of all slots */
  /* Of an encoder-decoder model the token that its decoder starts with, plus 1: a sequence is the tokens of the source text, which
   * encode takes, this token, and what follows, which the other steps take. 0: there is no encoder. */
  uint64_t decoder_start;
} mlcc_plan;

typedef struct mlcc_model_table {
  uint64_t magic;
  uint32_t abi_version;
  uint32_t struct_size;
  uint64_t flags;    /* MLCC_WHOLE_PROMPTS */
  mlcc_str target;   /* x86-64, aarch64 or cuda */
  mlcc_str compiler; /* name and version */
  mlcc_str metadata; /* JSON */
  const mlcc_variant *variants; /* best first; none for a device target */
  uint64_t n_variants;
  const mlcc_param *params;
  uint64_t n_params;
  const mlcc_state *states;
  uint64_t n_states;
  const mlcc_device_image *images;
  uint64_t n_images;
  const mlcc_device_entry *device_entries;
  uint64_t n_device_entries;
  mlcc_plan plan;
  uint64_t reserved[3];
} mlcc_model_table;

/* The function of an entry point, for example "prefill"; NULL if the variant has none. */
static inline mlcc_step mlcc_find_entry(const mlcc_variant *variant, const char *name) {
  uint64_t i, k;
  for (i = 0; i < variant->n_entries; i++) {
    const mlcc_entry *entry = &variant->entries[i];
    for (k = 0; k < entry->name.len && name[k] == entry->name.ptr[k] && name[k]; k++) {
    }
    if (k == entry->name.len && !name[k]) return entry->function;
  }
  return NULL;
}

/* Finds a section of the artifact, given the whole file in memory (mmap it). NULL if there is none or the file is
 * damaged. Payload sections are aligned to MLCC_SECTION_ALIGN in the file. */
static inline const void *mlcc_section(const void *file, uint64_t size, const char *name, uint64_t *bytes) {
  const uint8_t *f = (const uint8_t *)file;
  const uint64_t header = 64, entry = 64;
  uint64_t shoff, name_off, name_len;
  uint16_t count, names_index, i;
  uint16_t entry_size;
  if (size < header || f[0] != 0x7f || f[1] != 'E' || f[2] != 'L' || f[3] != 'F' || f[4] != 2 || f[5] != 1) return NULL;
  __builtin_memcpy(&shoff, f + 40, 8);
  __builtin_memcpy(&entry_size, f + 58, 2);
  __builtin_memcpy(&count, f + 60, 2);
  __builtin_memcpy(&names_index, f + 62, 2);
  if (entry_size != entry || names_index >= count || shoff > size || (uint64_t)count * entry > size - shoff) return NULL;
  __builtin_memcpy(&name_off, f + shoff + names_index * entry + 24, 8);
  __builtin_memcpy(&name_len, f + shoff + names_index * entry + 32, 8);
  if (name_off > size || name_len > size - name_off) return NULL;
  for (i = 0; i < count; i++) {
    const uint8_t *h = f + shoff + i * entry;
    uint32_t at, kind;
    uint64_t off, len, k;
    __builtin_memcpy(&at, h, 4);
    __builtin_memcpy(&kind, h + 4, 4);
    __builtin_memcpy(&off, h + 24, 8);
    __builtin_memcpy(&len, h + 32, 8);
    for (k = 0; at + k < name_len && name[k] && f[name_off + at + k] == (uint8_t)name[k]; k++) {
    }
    if (at + k >= name_len || name[k] || f[name_off + at + k] || kind == 8) continue;
    if (off > size || len > size - off) return NULL;
    if (bytes) *bytes = len;
    return f + off;
  }
  return NULL;
}

/* Features of this CPU (bits MLCC_FEATURE_*). Needs GCC 11 or Clang 17, or later ones. */
static inline uint64_t mlcc_host_features(void) {
  uint64_t bits = 0;
#if defined(__x86_64__)
#define MLCC_HAS(feature, name) bits |= __builtin_cpu_supports(name) ? (feature) : 0
  __builtin_cpu_init();
  MLCC_HAS(MLCC_FEATURE_SSE3, "sse3");
  MLCC_HAS(MLCC_FEATURE_SSSE3, "ssse3");
  MLCC_HAS(MLCC_FEATURE_SSE4_1, "sse4.1");
  MLCC_HAS(MLCC_FEATURE_SSE4_2, "sse4.2");
  MLCC_HAS(MLCC_FEATURE_POPCNT, "popcnt");
  MLCC_HAS(MLCC_FEATURE_AVX, "avx");
  MLCC_HAS(MLCC_FEATURE_AVX2, "avx2");
  MLCC_HAS(MLCC_FEATURE_FMA, "fma");
  MLCC_HAS(MLCC_FEATURE_F16C, "f16c");
  MLCC_HAS(MLCC_FEATURE_BMI1, "bmi");
  MLCC_HAS(MLCC_FEATURE_BMI2, "bmi2");
  MLCC_HAS(MLCC_FEATURE_LZCNT, "lzcnt");
  MLCC_HAS(MLCC_FEATURE_MOVBE, "movbe");
  MLCC_HAS(MLCC_FEATURE_AVX512F, "avx512f");
  MLCC_HAS(MLCC_FEATURE_AVX512BW, "avx512bw");
  MLCC_HAS(MLCC_FEATURE_AVX512CD, "avx512cd");
  MLCC_HAS(MLCC_FEATURE_AVX512DQ, "avx512dq");
  MLCC_HAS(MLCC_FEATURE_AVX512VL, "avx512vl");
  MLCC_HAS(MLCC_FEATURE_AVX512VNNI, "avx512vnni");
  MLCC_HAS(MLCC_FEATURE_AVX512BF16, "avx512bf16");
  MLCC_HAS(MLCC_FEATURE_AVX512VBMI, "avx512vbmi");
#undef MLCC_HAS
  /* Not every compiler above knows the names of these; two of them need of the system what AVX and AVX-512 need. */
  unsigned a, b, c, d;
  if (__get_cpuid(1, &a, &b, &c, &d)) bits |= (c >> 13 & 1) ? MLCC_FEATURE_CMPXCHG16B : 0;
  if (bits & MLCC_FEATURE_AVX512F && __get_cpuid_count(7, 0, &a, &b, &c, &d)) bits |= (d >> 23 & 1) ? MLCC_FEATURE_AVX512FP16 : 0;
  if (bits & MLCC_FEATURE_AVX2 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) bits |= (a >> 4 & 1) ? MLCC_FEATURE_AVXVNNI : 0;
#elif defined(__aarch64__) && defined(__linux__)
  unsigned long a = getauxval(16), b = getauxval(26); /* AT_HWCAP, AT_HWCAP2 */
  bits |= (a >> 1 & 1) ? MLCC_FEATURE_NEON : 0;
  bits |= (a >> 10 & 1) ? MLCC_FEATURE_FP16 : 0;
  bits |= (a >> 20 & 1) ? MLCC_FEATURE_DOTPROD : 0;
  bits |= (a >> 22 & 1) ? MLCC_FEATURE_SVE : 0;
  bits |= (a >> 8 & 1) ? MLCC_FEATURE_LSE : 0;
  bits |= (b >> 1 & 1) ? MLCC_FEATURE_SVE2 : 0;
  bits |= (b >> 13 & 1) ? MLCC_FEATURE_I8MM : 0;
  bits |= (b >> 14 & 1) ? MLCC_FEATURE_BF16 : 0;
#elif defined(__aarch64__) && defined(__APPLE__)
  static const struct {
    const char *name;
    uint64_t feature;
  } known[] = {{"FEAT_FP16", MLCC_FEATURE_FP16}, {"FEAT_DotProd", MLCC_FEATURE_DOTPROD}, {"FEAT_LSE", MLCC_FEATURE_LSE},
               {"FEAT_BF16", MLCC_FEATURE_BF16}, {"FEAT_I8MM", MLCC_FEATURE_I8MM}};
  unsigned i;
  bits |= MLCC_FEATURE_NEON;
  for (i = 0; i < sizeof known / sizeof known[0]; i++) {
    char name[64] = "hw.optional.arm.";
    int value = 0;
    size_t size = sizeof value;
    __builtin_strcat(name, known[i].name);
    if (!sysctlbyname(name, &value, &size, NULL, 0) && value) bits |= known[i].feature;
  }
#elif defined(__aarch64__)
  bits |= MLCC_FEATURE_NEON; /* every CPU of this kind */
#endif
  return bits;
}

#ifdef __cplusplus
}
#endif

#endif
