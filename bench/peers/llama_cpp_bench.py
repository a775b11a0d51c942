#!/usr/bin/env python3
"""Measures llama.cpp (package llama-cpp-python) on a GGUF file; one JSON line per test.

    python3 bench/peers/llama_cpp_bench.py MODEL.gguf -t 2 -p 512 -n 128 -d 0,2048 -b 1,4 -r 3

Tests are named as by `mlcc bench`: ppN a prompt of N tokens, tgN@dD N single tokens after D others, tgN@bB N tokens for
each of B sequences. Time is that of llama_decode, which includes the copy of the logits.
"""

import argparse
import ctypes
import json
import random
import resource
import statistics
import time

import llama_cpp as api


def numbers(text):
    return [int(part) for part in text.split(",")]


class Engine:
    def __init__(self, path, threads, context, sequences):
        api.llama_backend_init()
        self.quiet = api.llama_log_callback(lambda *_: None)
        api.llama_log_set(self.quiet, ctypes.c_void_p(0))
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        params = api.llama_context_default_params()
        params.n_ctx = context * sequences
        params.n_seq_max = sequences
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit("llama.cpp cannot make a context")
        self.words = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(512, 0, 1)
        self.random = random.Random(0)

    def clear(self):
        api.llama_memory_clear(api.llama_get_memory(self.context), True)

    def decode(self, rows):
        """Rows are (sequence, position, wants logits)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for index, (sequence, position, logits) in enumerate(rows):
            batch.token[index] = self.random.randrange(3, self.words)
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = logits
        if api.llama_decode(self.context, batch) != 0:
            raise SystemExit("llama_decode failed")
        api.llama_synchronize(self.context)

    def prompt(self, tokens, sequence=0):
        for begin in range(0, tokens, 512):
            end = min(tokens, begin + 512)
            self.decode([(sequence, at, at == tokens - 1) for at in range(begin, end)])

    def generate(self, tokens, depth, sequences):
        for step in range(tokens):
            self.decode([(sequence, depth + step, True) for sequence in range(sequences)])


def measure(engine, before, test, tokens, repetitions):
    """Tokens per second of `test`, each time after `before`; one turn more than counted."""
    rates = []
    for turn in range(repetitions + 1):
        engine.clear()
        before()
        start = time.perf_counter()
        test()
        if turn > 0:
            rates.append(tokens / (time.perf_counter() - start))
    return rates


def report(name, threads, rates):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    line = {"engine": "llama.cpp " + api.__version__, "test": name, "threads": threads, "tok_s": statistics.median(rates),
            "tok_s_min": min(rates), "tok_s_max": max(rates), "peak_memory": peak}
    print(json.dumps(line), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-p", "--n-prompt", type=numbers, default=[512])
    parser.add_argument("-n", "--n-gen", type=int, default=128)
    parser.add_argument("-d", "--depth", type=numbers, default=[0])
    parser.add_argument("-b", "--batch", type=numbers, default=[1])
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    longest = max(*arguments.n_prompt, max(arguments.depth) + arguments.n_gen, 1)
    engine = Engine(arguments.model, arguments.threads, longest + 64, max(arguments.batch))
    for tokens in arguments.n_prompt:
        if tokens:
            rates = measure(engine, lambda: None, lambda: engine.prompt(tokens), tokens, arguments.repetitions)
            report(f"pp{tokens}", arguments.threads, rates)
    tokens = arguments.n_gen
    for depth in arguments.depth if tokens else []:
        for batch in arguments.batch:
            def fill():
                for sequence in range(batch):
                    engine.prompt(depth, sequence)
            rates = measure(engine, fill, lambda: engine.generate(tokens, depth, batch), tokens * batch, arguments.repetitions)
            name = f"tg{tokens}" + (f"@d{depth}" if depth else "") + (f"@b{batch}" if batch > 1 else "")
            report(name, arguments.threads, rates)


if __name__ == "__main__":
    main()
