#!/usr/bin/env python3
"""Runs mlcc and its peers on the same random-weight model, in turn, and prints one table.

    python3 bench/peers/compare.py tinyllama-1.1b --formats q4_0,q8_0 -t 1,2 --rounds 3

Every engine reads the same GGUF file. A round runs each engine once, each after all cores were busy for some seconds (the
clock and the host's placement of virtual cores settle); figures are medians over rounds. The limits are those that
`mlcc bench` probed beside its own figures.
"""

import argparse
import json
import multiprocessing
import pathlib
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
SCHEMES = {"q4_0": "q4i8", "q8_0": "q8i8", "f16": "f16", "bf16": "bf16bf16"}
PEERS = {"llama.cpp": "llama_cpp_bench.py", "openvino": "openvino_bench.py", "torch": "torch_bench.py"}


def spin(until):
    while time.monotonic() < until:
        pass


def warm_up(seconds, threads):
    until = time.monotonic() + seconds
    workers = [multiprocessing.Process(target=spin, args=(until,)) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def output_of(command):
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"{command[0]} {command[1]}: {reason}", file=sys.stderr)
        return ""
    return done.stdout


def run_mlcc(options, artifact, threads):
    command = [options.mlcc, "bench", artifact, "-t", threads, "-p", options.n_prompt, "-n", options.n_gen, "-d", options.depth,
               "-r", options.repetitions, "--warm-up", options.warm_up, "-o", "json"]
    if options.batch != "1":
        command += ["--batch", options.batch]
    return json.loads(output_of(command) or "[]")


def run_peer(options, peer, model, threads):
    command = [sys.executable, HERE / PEERS[peer], model, "-t", threads, "-p", options.n_prompt, "-n", options.n_gen, "-r", options.repetitions]
    if peer == "llama.cpp":
        command += ["-d", options.depth, "-b", options.batch]
    warm_up(options.warm_up, threads)
    return [json.loads(line) for line in output_of(command).splitlines() if line.startswith("{")]


def prepare(options, format):
    """The GGUF file and the artifact of one format, made if they are not there."""
    options.folder.mkdir(parents=True, exist_ok=True)
    model = options.folder / f"{options.preset}-{format}.gguf"
    artifact = options.folder / f"{options.preset}-{SCHEMES[format]}.so"
    if not model.exists():
        subprocess.run([sys.executable, HERE / "write_model.py", options.preset, format, "-o", model], check=True)
    if not artifact.exists():
        command = [options.mlcc, "build", "-q", "--model", model, "--quant", SCHEMES[format], "--target", "cpu", "-o", artifact]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return model, artifact


def measure(options, format):
    """Rows by (threads, test, engine): list of results, one per round."""
    model, artifact = prepare(options, format)
    rows = {}
    for _ in range(options.rounds):
        for threads in options.threads:
            for result in run_mlcc(options, artifact, threads):
                rows.setdefault((threads, result["test"], "mlcc " + SCHEMES[format]), []).append(result)
            for peer in options.peers:
                for result in run_peer(options, peer, model, threads):
                    rows.setdefault((threads, result["test"], f"{result['engine']} {format}"), []).append(result)
    return rows


def print_table(rows):
    print("| engine | threads | test | tok/s | min - max | mlcc is faster | of mlcc's limit |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    tests = dict.fromkeys((threads, test) for threads, test, _ in rows)
    for threads, test in tests:
        engines = {engine: results for (t, name, engine), results in rows.items() if (t, name) == (threads, test)}
        rates = {engine: statistics.median(result["tok_s"] for result in results) for engine, results in engines.items()}
        ours = next((rate for engine, rate in rates.items() if engine.startswith("mlcc")), None)
        for engine, results in engines.items():
            low = min(result["tok_s_min"] for result in results)
            high = max(result["tok_s_max"] for result in results)
            limits = [result["limit"] for result in results if result.get("limit")]
            share = f"{rates[engine] / statistics.median(limits):.0%}" if limits else ""
            ratio = f"{ours / rates[engine]:.2f} x" if ours and not engine.startswith("mlcc") else ""
            print(f"| {engine} | {threads} | {test} | {rates[engine]:.1f} | {low:.1f} - {high:.1f} | {ratio} | {share} |")


def processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def main():
    listed = lambda text: text.split(",")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("preset")
    parser.add_argument("--formats", type=listed, default=["q4_0", "q8_0"])
    parser.add_argument("--peers", type=listed, default=["llama.cpp", "openvino"], help="of " + ", ".join(PEERS))
    parser.add_argument("-t", "--threads", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2])
    parser.add_argument("-p", "--n-prompt", default="512")
    parser.add_argument("-n", "--n-gen", default="128")
    parser.add_argument("-d", "--depth", default="0")
    parser.add_argument("-b", "--batch", default="1")
    parser.add_argument("-r", "--repetitions", default="2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--mlcc", default="target/release/mlcc")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("target/peers"), help="where models and artifacts are kept")
    options = parser.parse_args()
    print(f"{options.preset}, {processor()}, {time.strftime('%Y-%m-%d')}\n")
    for format in options.formats:
        print_table(measure(options, format))
        print()


if __name__ == "__main__":
    main()
