"""lm-evaluation-harness through `mlcc serve` finds the perplexity that `mlcc eval` finds: `tests/serve/run`. Arguments: mlcc, a checkpoint folder."""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import lm_eval  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

# Tokens of a window: the first is context only. Both programs cut the text alike where windows overlap by one token and none is left over.
CONTEXT, WINDOWS = 128, 6


def text_of_whole_windows(tokenizer, text):
    """The begin of a text that fills windows, its first token, and the rest. The parts have to be the same tokens when read again."""
    encode = lambda part: tokenizer.encode(part, add_special_tokens=False)
    for begin in range(0, len(text), 100):
        ids = encode(text[begin:])[: 1 + WINDOWS * (CONTEXT - 1)]
        whole, rest = tokenizer.decode(ids), tokenizer.decode(ids[1:])
        if len(ids) == 1 + WINDOWS * (CONTEXT - 1) and encode(whole) == ids and encode(rest) == ids[1:]:
            return whole, ids[0], rest
    raise SystemExit("no part of the text is the same tokens when it is read again")


def by_harness(url, folder, scratch, first, rest):
    path = scratch / "text.json"
    path.write_text(json.dumps([{"text": rest}]))
    task = {"task": "local_text", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test",
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}", "metric_list": [{"metric": "byte_perplexity"}]}
    model = {"model": "m", "base_url": url + "/v1/completions", "tokenizer": str(folder), "tokenizer_backend": "huggingface",
             "custom_prefix_token_id": first, "max_length": CONTEXT + 1, "batch_size": 2, "num_concurrent": 2}
    found = lm_eval.simple_evaluate(model="local-completions", model_args=model, tasks=[task], bootstrap_iters=0)
    nats = math.log(found["results"]["local_text"]["byte_perplexity,none"]) * len(rest.encode())
    return math.exp(nats / (WINDOWS * (CONTEXT - 1)))


def by_eval(mlcc, artifact, scratch, whole):
    path = scratch / "text.txt"
    path.write_text(whole)
    command = [mlcc, "eval", artifact, "--text", path, "--context", str(CONTEXT), "--stride", str(CONTEXT - 1), "--json", "-q"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["tokens"] == WINDOWS * (CONTEXT - 1), found
    return found["perplexity"]


def main():
    mlcc, folder = sys.argv[1], Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        artifact = scratch / "m.so"
        subprocess.run([mlcc, "build", "-m", folder, "--quant", "f32", "--no-report", "-q", "-o", artifact], check=True, stdout=subprocess.DEVNULL)
        text = (Path(__file__).parents[2] / "docs/serve.md").read_text()
        whole, first, rest = text_of_whole_windows(AutoTokenizer.from_pretrained(folder), text)
        wanted = by_eval(mlcc, artifact, scratch, whole)
        command = [mlcc, "serve", artifact, "--port", "0", "--json", "--alias", "m"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            found = by_harness(json.loads(server.stdout.readline())["url"], folder, scratch, first, rest)
        finally:
            server.terminate()
            server.wait()
    assert abs(found / wanted - 1) < 1e-4, (found, wanted)
    print(f"lm-eval {lm_eval.__version__}: perplexity {found:.4f}, mlcc eval {wanted:.4f}: ok")


main()
