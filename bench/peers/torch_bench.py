#!/usr/bin/env python3
"""Measures transformers on torch with the shapes of a GGUF file that write_model.py made; one JSON line per test.

    python3 bench/peers/torch_bench.py MODEL-bf16.gguf -t 2 -p 512 -n 32 -r 3

Only the name of the preset is taken from the file; weights are random in bfloat16 (f16 files: float16).
"""

import argparse
import json
import pathlib
import resource
import statistics
import time

import gguf
import torch
import transformers

PRESETS = pathlib.Path(__file__).parents[2] / "models/src/presets/transformers.json"


def build(path):
    name = bytes(gguf.GGUFReader(path).fields["general.name"].parts[-1]).decode()
    config = dict(next(entry["config"] for entry in json.loads(PRESETS.read_text()) if entry["name"] == name))
    kind = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    dtype = torch.float16 if "f16" in path and "bf16" not in path else torch.bfloat16
    torch.set_default_dtype(dtype)
    return transformers.AutoModelForCausalLM.from_config(kind).eval(), config["vocab_size"]


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-gen", type=int, default=32)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, words = build(arguments.model)
    prompt, generated = [], []
    for turn in range(arguments.repetitions + 1):
        start = time.perf_counter()
        output = model(torch.randint(3, words, (1, arguments.n_prompt)), logits_to_keep=1, use_cache=True)
        read = time.perf_counter()
        cache = model(torch.randint(3, words, (1, 1)), use_cache=True).past_key_values
        begin = time.perf_counter()
        for _ in range(arguments.n_gen):
            output = model(torch.randint(3, words, (1, 1)), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
        end = time.perf_counter()
        if turn > 0:
            prompt.append(arguments.n_prompt / (read - start))
            generated.append(arguments.n_gen / (end - begin))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for name, rates in ((f"pp{arguments.n_prompt}", prompt), (f"tg{arguments.n_gen}", generated)):
        print(json.dumps({"engine": "torch " + torch.__version__, "test": name, "threads": arguments.threads, "tok_s": statistics.median(rates),
                          "tok_s_min": min(rates), "tok_s_max": max(rates), "peak_memory": peak}), flush=True)


if __name__ == "__main__":
    main()
