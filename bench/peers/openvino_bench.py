#!/usr/bin/env python3
"""Measures OpenVINO GenAI on a GGUF file, which it converts while loading; one JSON line per test.

    python3 bench/peers/openvino_bench.py MODEL.gguf -t 2 -p 512 -n 128 -r 3

Prompt speed is from the time to the first token, generation speed from the time per further token.
"""

import argparse
import json
import resource
import statistics

import numpy
import openvino
import openvino_genai as genai


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-gen", type=int, default=128)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    pipeline = genai.LLMPipeline(arguments.model, "CPU", INFERENCE_NUM_THREADS=arguments.threads)
    random = numpy.random.default_rng(0)
    prompt, generated = [], []
    for turn in range(arguments.repetitions + 1):
        tokens = random.integers(3, 20000, (1, arguments.n_prompt))  # new ones: the pipeline remembers prompts
        inputs = genai.TokenizedInputs(openvino.Tensor(tokens), openvino.Tensor(numpy.ones_like(tokens)))
        metrics = pipeline.generate(inputs, max_new_tokens=arguments.n_gen, ignore_eos=True, do_sample=False).perf_metrics
        if turn > 0:
            prompt.append(arguments.n_prompt / metrics.get_ttft().mean * 1e3)
            generated.append(1e3 / metrics.get_tpot().mean)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for name, rates in ((f"pp{arguments.n_prompt}", prompt), (f"tg{arguments.n_gen}", generated)):
        print(json.dumps({"engine": "OpenVINO " + openvino.__version__.split("-")[0], "test": name, "threads": arguments.threads,
                          "tok_s": statistics.median(rates), "tok_s_min": min(rates), "tok_s_max": max(rates), "peak_memory": peak}), flush=True)


if __name__ == "__main__":
    main()
