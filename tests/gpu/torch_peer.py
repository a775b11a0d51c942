#!/usr/bin/env python3
"""What PyTorch does on the same GPU: `python3 torch_peer.py`, one JSON object per line.

Copies, products in bf16 by cuBLAS, attention (SDPA), and Llama 3 8B in bf16 with random weights as transformers computes it: static
cache, steps as CUDA graphs. A measurement that fails says so ("error"), and the next one begins. Without PyTorch the one line
is `{"name": "torch", "error": "no PyTorch: ..."}`.
"""

import argparse
import contextlib
import json
import sys
import time

LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}
# Tokens before those of a step, and room for all repetitions after them.
PAST, ROOM = 64, 192


def say(**values):
    print(json.dumps(values), flush=True)


class Peer:
    def __init__(self, torch, args):
        self.torch, self.device, self.tiny = torch, args.device, args.tiny
        self.on_gpu = args.device == "cuda"
        self.model = None

    def synchronize(self):
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def measure(self, name, body, **values):
        """Says what the body gives for a name, or its error."""
        try:
            say(name=name, **values, **body())
        except Exception as error:  # Whatever PyTorch raises: the others go on.
            say(name=name, error=f"{type(error).__name__}: {error}".splitlines()[0][:300], **values)
        if self.on_gpu:
            with contextlib.suppress(Exception):
                self.torch.cuda.empty_cache()

    def seconds(self, call, repetitions=20, before=None):
        """Median time of a call."""
        times = []
        for number in range(3 + repetitions):
            if before:
                before()
            self.synchronize()
            if self.on_gpu:
                begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
                self.synchronize()
                taken = begin.elapsed_time(end) * 1e-3
            else:
                since = time.perf_counter()
                call()
                taken = time.perf_counter() - since
            if number >= 3:
                times.append(taken)
        return sorted(times)[len(times) // 2]

    def graph(self, call):
        """The call as a CUDA graph, after it ran on a stream of its own."""
        if not self.on_gpu:
            return call
        cuda = self.torch.cuda
        stream = cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            for _ in range(2):
                call()
        cuda.current_stream().wait_stream(stream)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            call()
        return graph.replay

    def random(self, *shape):
        return self.torch.randn(*shape, device=self.device, dtype=self.torch.bfloat16)

    def copy(self):
        source = self.torch.zeros(1 << (20 if self.tiny else 30), dtype=self.torch.uint8, device=self.device)
        target = self.torch.zeros_like(source)
        return {"bytes_per_s": 2 * source.numel() / self.seconds(lambda: target.copy_(source))}

    def product(self, rows, columns, depth):
        """Activations times weights; several weights in turn, so that caches do not hold them."""
        each = columns * depth * 2
        weights = [self.random(columns, depth) for _ in range(max(1, min(8, (1 << 28) // each)))]
        activations = self.random(rows, depth)
        seconds = self.seconds(self.graph(lambda: [self.torch.matmul(activations, w.T) for w in weights])) / len(weights)
        return {"us": 1e6 * seconds, "tflops": 2e-12 * rows * columns * depth / seconds, "weight_bytes_per_s": each / seconds}

    def attention(self, tokens, config):
        heads, pairs = config["num_attention_heads"], config["num_key_value_heads"]
        size = config["hidden_size"] // heads
        query = self.random(1, heads, tokens, size)
        key, value = (self.random(1, pairs, tokens, size).repeat_interleave(heads // pairs, 1) for _ in range(2))
        sdpa = self.torch.nn.functional.scaled_dot_product_attention
        return {"us": 1e6 * self.seconds(lambda: sdpa(query, key, value, is_causal=True))}

    def load(self, config):
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(**config)
        config._attn_implementation = "sdpa"
        self.torch.set_default_dtype(self.torch.bfloat16)
        begin = time.perf_counter()
        with self.torch.device(self.device):
            self.model = LlamaForCausalLM(config).eval()
        self.synchronize()
        return {"seconds": time.perf_counter() - begin}

    def ids(self, *shape):
        return self.torch.randint(0, self.model.config.vocab_size, shape, device=self.device)

    def prompt(self, tokens, static):
        from transformers import DynamicCache, StaticCache

        ids, made = self.ids(1, tokens), {}

        def fresh():
            config = self.model.config
            made["cache"] = StaticCache(config=config, max_cache_len=tokens) if static else DynamicCache(config=config)

        def run():
            self.model(input_ids=ids, past_key_values=made["cache"], use_cache=True, logits_to_keep=1)

        return {"tok_s": tokens / self.seconds(run, 5, fresh)}

    def step(self, sequences, with_graph):
        """The next token of so many sequences. The mask and positions are given, so that nothing is asked of the GPU meanwhile."""
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=ROOM)
        ids = self.ids(sequences, 1)
        position = self.torch.full((1, 1), PAST, device=self.device)
        mask = (self.torch.arange(ROOM, device=self.device) <= PAST).expand(sequences, 1, 1, ROOM)

        def run():
            model = self.model
            return model(input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True).logits

        run()
        for layer in cache.layers:
            # The cache counts its tokens itself: every repetition writes one row more.
            layer.cumulative_length.fill_(PAST)
        seconds = self.seconds(self.graph(run) if with_graph else run)
        return {"tok_s": sequences / seconds, "ms_per_step": 1e3 * seconds}

    def run(self):
        config = TINY if self.tiny else LLAMA
        self.measure("copy", self.copy)
        large = 128 if self.tiny else 8192
        self.measure(f"matmul {large}x{large}x{large}", lambda: self.product(large, large, large))
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        qkv = hidden + 2 * hidden * config["num_key_value_heads"] // config["num_attention_heads"]
        for columns, depth in [(2 * inner, hidden), (hidden, inner), (qkv, hidden), (hidden, hidden)]:
            for rows in (1, 8) if self.tiny else (1, 8, 32, 64, 512, 2048):
                self.measure(f"matmul {rows} rows {columns}x{depth}", lambda: self.product(rows, columns, depth))
        prompts = (16,) if self.tiny else (512, 2048)
        for tokens in prompts:
            self.measure(f"sdpa causal {tokens}", lambda: self.attention(tokens, config))
        self.measure("llama-3-8b load", lambda: self.load(config))
        if self.model is None:
            return
        for sequences in (1, 2) if self.tiny else (1, 8, 32, 64):
            test = "tg" if sequences == 1 else f"tg@b{sequences}"
            for with_graph in (True, False):
                name = f"llama-3-8b {test}, {'CUDA graph' if with_graph else 'eager'}"
                values = {"model": "llama-3-8b", "test": test}
                self.measure(name, lambda: self.step(sequences, with_graph), **values)
        for tokens in prompts:
            for static in (True, False):
                name = f"llama-3-8b pp{tokens}, {'static' if static else 'growing'} cache"
                self.measure(name, lambda: self.prompt(tokens, static), model="llama-3-8b", test=f"pp{tokens}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try this file without a GPU")
    args = parser.parse_args()
    try:
        import torch
    except (ImportError, OSError) as error:
        say(name="torch", error=f"no PyTorch: {error}")
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        say(name="torch", error=f"PyTorch {torch.__version__} finds no GPU")
        return 0
    device = torch.cuda.get_device_name(0) if args.device == "cuda" else "CPU"
    say(name="torch", version=torch.__version__, cuda=torch.version.cuda, device=device)
    with torch.no_grad():
        Peer(torch, args).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
