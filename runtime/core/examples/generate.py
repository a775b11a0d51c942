#!/usr/bin/env python3
"""Greedy generation with nothing but Python's standard library: token ids in, token ids out, one thread.

    python3 runtime/core/examples/generate.py model.so 16 510 2776 369

The structures are those of runtime/core/include/mlcc.h.
"""
import ctypes as c
import mmap
import os
import platform
import struct
import sys

MAGIC, ABI_VERSION = int.from_bytes(b"mlccABI\0", "little"), 17
PAGE_ROWS = 64
WHOLE_PROMPTS, SEQUENCE_LENGTH = 1, 3  # a flag of the table, a kind of state
PROBLEMS = {1: "a token is outside of the vocabulary", 3: "the context is full"}
# Bits of mlcc_variant.features by the names that /proc/cpuinfo gives the features.
CPUINFO = {
    "x86_64": "pni ssse3 sse4_1 sse4_2 popcnt avx avx2 fma f16c bmi1 bmi2 abm movbe avx512f avx512bw avx512cd avx512dq "
    "avx512vl avx512_vnni avx512_bf16 avx512vbmi avx512_fp16 avx_vnni amx_tile amx_int8 amx_bf16 cx16",
    "aarch64": "asimd asimdhp asimddp bf16 i8mm sve sve2 atomics",
}
FIRST_BIT = {"x86_64": 0, "aarch64": 32}


class Str(c.Structure):
    _fields_ = [("ptr", c.c_void_p), ("len", c.c_uint64)]

    def __str__(self):
        return c.string_at(self.ptr, self.len).decode()


class Ctx(c.Structure):
    _fields_ = (
        [(name, c.c_void_p) for name in ("weights", "arena", "state", "tokens")]
        + [("n", c.c_int64), ("past", c.c_int64)]
        + [(name, c.c_void_p) for name in ("logits", "probs", "barrier", "barrier_self")]
        + [("temperature", c.c_float), ("reserved0", c.c_uint32)]
        + [(name, c.c_void_p) for name in ("trace", "trace_self", "sequences", "next_chunk", "next_chunk_self")]
        + [("b", c.c_int64), ("output_rows", c.c_void_p), ("n_outputs", c.c_int64)]
        + [("pages", c.c_void_p), ("page_table", c.c_void_p)]
        + [("all_gather", c.c_void_p), ("all_gather_self", c.c_void_p), ("adapters", c.c_void_p)]
    )


Step = c.CFUNCTYPE(c.c_int32, c.POINTER(Ctx), c.c_uint32, c.c_uint32)


class Entry(c.Structure):
    _fields_ = [
        ("name", Str), ("kind", c.c_uint32), ("reserved", c.c_uint32), ("function", c.c_void_p), ("adapted", c.c_void_p)
    ]  # fmt: skip


class Variant(c.Structure):
    _fields_ = [("name", Str), ("features", c.c_uint64), ("entries", c.POINTER(Entry)), ("n_entries", c.c_uint64)]


class State(c.Structure):
    _fields_ = [
        ("name", Str), ("offset", c.c_uint64), ("bytes", c.c_uint64), ("init", c.c_uint32), ("fill", c.c_float),
        ("format", Str), ("kind", c.c_uint32), ("sinks", c.c_uint32), ("rows", c.c_uint64), ("row_bytes", c.c_uint64),
    ]  # fmt: skip


class Plan(c.Structure):
    _fields_ = [
        (name, c.c_uint64)
        for name in (
            "weights_bytes", "arena_bytes", "state_bytes", "alignment", "chunk", "context", "batch", "vocab",
            "max_workers", "page_bytes", "text_width", "ranks", "adapter_slots", "adapter_rank", "adapter_bytes",
            "decoder_start",
        )
    ]  # fmt: skip


class Model(c.Structure):
    _fields_ = (
        [("magic", c.c_uint64), ("abi_version", c.c_uint32), ("struct_size", c.c_uint32), ("flags", c.c_uint64)]
        + [(name, Str) for name in ("target", "compiler", "metadata")]
        + [("variants", c.POINTER(Variant)), ("n_variants", c.c_uint64)]
        + [("params", c.c_void_p), ("n_params", c.c_uint64), ("states", c.POINTER(State)), ("n_states", c.c_uint64)]
        + [(name, c.c_uint64) for name in ("images", "n_images", "device_entries", "n_device_entries")]
        + [("plan", Plan)]
        + [("reserved", c.c_uint64 * 3)]
    )  # fmt: skip


def host_features():
    with open("/proc/cpuinfo") as f:
        lines = [line.split(":")[1] for line in f if line.startswith(("flags", "Features"))]
    have, machine = set(lines[0].split()) if lines else set(), platform.machine()
    names = CPUINFO.get(machine, "").split()
    return sum(1 << (FIRST_BIT[machine] + i) for i, name in enumerate(names) if name in have)


def section(file, wanted):
    """(offset, size) of a section of the ELF file."""
    (table,) = struct.unpack_from("<Q", file, 40)
    size, count, names = struct.unpack_from("<HHH", file, 58)
    (names_at,) = struct.unpack_from("<Q", file, table + names * size + 24)
    for i in range(count):
        (name,) = struct.unpack_from("<I", file, table + i * size)
        if file[names_at + name : file.find(b"\0", names_at + name)] == wanted.encode():
            return struct.unpack_from("<QQ", file, table + i * size + 24)
    sys.exit(f"generate: the model has no section {wanted}")


def buffer(size, alignment):
    """Aligned zeroed memory: (its address, what keeps it alive)."""
    memory = c.create_string_buffer(size + alignment)
    return -(-c.addressof(memory) // alignment) * alignment, memory


def opened(path):
    """(the model's table, its entry points for this CPU by name, the address of its weights, what keeps them mapped)."""
    model = Model.in_dll(c.CDLL(os.path.abspath(path)), "mlcc_model")
    if model.magic != MAGIC or model.abi_version != ABI_VERSION:
        sys.exit("generate: not an mlcc artifact of this ABI version")
    if model.plan.decoder_start:
        sys.exit("generate: an encoder-decoder model, whose source text this program does not feed")
    if model.plan.ranks > 1:
        sys.exit("generate: split among ranks, of which this program runs one")
    host = host_features()
    fitting = [v for v in model.variants[: model.n_variants] if not v.features & ~host]
    if not fitting:
        sys.exit("generate: no variant for this CPU")

    with open(path, "rb") as f:
        # A private writable mapping, because ctypes takes no address of a read-only one; nothing is written.
        file = mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    start, _ = section(file, ".mlcc.weights")
    mapped = c.c_char.from_buffer(file)
    entries = {str(e.name): e.function for e in fitting[0].entries[: fitting[0].n_entries]}
    return model, entries, c.addressof(mapped) + start, mapped


def main(path, count, prompt):
    model, entries, weights, keep_weights = opened(path)
    arena, keep_arena = buffer(model.plan.arena_bytes, model.plan.alignment)
    state, keep_state = buffer(model.plan.state_bytes, model.plan.alignment)
    logits_at, keep_logits = buffer(4 * model.plan.vocab, 64)
    tokens_at, keep_tokens = buffer(4 * model.plan.chunk, 64)
    # Rows of the KV caches. One sequence has its pages in order; others would have others of them.
    pages_of_text = -(-model.plan.context // PAGE_ROWS) if model.plan.page_bytes else 0
    pages, keep_pages = buffer(pages_of_text * model.plan.page_bytes, 64)
    table = (c.c_int32 * pages_of_text)(*range(pages_of_text))
    logits = (c.c_float * model.plan.vocab).from_address(logits_at)
    tokens = (c.c_int32 * model.plan.chunk).from_address(tokens_at)
    ctx = Ctx(weights=weights, arena=arena, state=state, logits=logits_at, tokens=tokens_at)
    ctx.pages, ctx.page_table = pages, c.addressof(table)

    def call(entry, ids):
        tokens[: len(ids)], ctx.n = ids, len(ids)
        if status := Step(entry)(ctx, 0, 1):
            sys.exit(f"generate: {PROBLEMS.get(status, 'the step failed')}")
        ctx.past += len(ids)

    call(entries["create_kv_cache"], [])
    # The prompt, in calls of at most `chunk` tokens. Some models need to know of all of it from the first call on.
    if len(prompt) > model.plan.chunk:
        if model.flags & WHOLE_PROMPTS:
            sys.exit("generate: the prompt is too long: build with a larger --chunk")
        for s in model.states[: model.n_states]:
            if s.kind == SEQUENCE_LENGTH:
                c.c_int32.from_address(state + s.offset).value = len(prompt)
    for at in range(0, len(prompt), model.plan.chunk):
        call(entries["prefill"], prompt[at : at + model.plan.chunk])
    ids = []
    while len(ids) < count:
        ids.append(max(range(model.plan.vocab), key=lambda v: logits[v]))
        if len(ids) < count:
            call(entries["decode"], ids[-1:])
    print(*ids)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("usage: generate.py MODEL.so COUNT TOKEN_ID...")
    main(sys.argv[1], int(sys.argv[2]), [int(a) for a in sys.argv[3:]])
