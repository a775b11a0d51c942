#!/usr/bin/env python3
"""Greedy texts of `mlcc serve`: many requests at once and one after the other, against those of a CPU build.

    python3 texts.py --reference FILE ARTIFACT MLCC...   # compares; MLCC... is the program with what goes before its arguments
    python3 texts.py --write FILE ARTIFACT MLCC...       # writes the reference

A text follows the reference for as long as it has the same tokens, with log probabilities at most TOLERANCE apart. It may leave it
only for the reference's second token, and only where that is at most TIE less likely than the first: there rounding decides, and
what comes afterwards is another text, which is not compared.

Prints one JSON object. Exit code: 0 all texts follow the reference, 1 some do not, 2 the server did not answer.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request

# Twice what f16 products in another order were seen to differ on a GPU (4e-3), and what a tie may then be.
TOLERANCE = 0.01
TIE = 0.05
AT_ONCE = 16
SECONDS = 100

WORDS = ["The sea was", "Once upon a time", "She said", "The old man and the boy went", "It", "In the morning"]
# Short ones, some that are read in pieces, and lengths that end everywhere in a page.
PROMPTS = WORDS + [f"{word} " * 40 + word for word in WORDS] + [f"{word} and then he came to the house" for word in WORDS[:4]]


def tokens_of(number):
    """Texts end at different steps, so that others go on beside fewer."""
    return 24 + 5 * (number % 7)


class Server:
    def __init__(self, mlcc, artifact):
        self.messages = tempfile.TemporaryFile()
        command = [*mlcc, "serve", artifact, "--port", "0"]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.messages, stderr=self.messages)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def said(self):
        # From the file's begin; the server writes where it is.
        return os.pread(self.messages.fileno(), 1 << 16, 0).decode(errors="replace").strip()

    def address(self):
        """Where it listens, once it says so."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            found = re.search(r"at (http://127\.0\.0\.1:\d+)", self.said())
            if found:
                return found.group(1)
            time.sleep(0.05)
        raise OSError("mlcc serve did not begin")


def fetch(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)


def texts(address, model, at_once):
    """Of each prompt: its tokens, each with its log probability and the two likeliest."""

    def ask(number):
        body = {"model": model, "prompt": PROMPTS[number], "max_tokens": tokens_of(number), "temperature": 0, "logprobs": 2}
        found = fetch(f"{address}/v1/completions", body)["choices"][0]["logprobs"]
        best = [sorted(top.items(), key=lambda item: -item[1])[:2] for top in found["top_logprobs"]]
        return [list(step) for step in zip(found["tokens"], found["token_logprobs"], best)]

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, range(len(PROMPTS))))


def follow(text, reference):
    """How many tokens are those of the reference, the worst distance among them, and what is wrong."""
    worst = 0.0
    for place, (ours, theirs) in enumerate(zip(text, reference)):
        token, log, _ = ours
        expected, expected_log, best = theirs
        if token != expected:
            second, second_log = best[1] if len(best) > 1 else (None, float("-inf"))
            if token == second and expected_log - second_log <= TIE:
                return place, worst, None
            what = f"{expected!r} ({expected_log:.3f}; the second is {second!r}, {second_log:.3f})"
            return place, worst, f"token {place} is {token!r}, expected {what}"
        # Not `>`: a NaN is wrong.
        if not abs(log - expected_log) <= TOLERANCE:
            return place, worst, f"token {place} ({token!r}) has the log probability {log:.4f}, expected {expected_log:.4f}"
        worst = max(worst, abs(log - expected_log))
    if len(text) != len(reference):
        return len(text), worst, f"{len(text)} tokens, expected {len(reference)}"
    return len(text), worst, None


def compare(found, reference):
    followed = [follow(*pair) for pair in zip(found, reference)]
    wrong = [f"prompt {number}: {what}" for number, (_, _, what) in enumerate(followed) if what]
    if len(found) != len(reference):
        wrong.append(f"{len(found)} texts, expected {len(reference)}")
    return {
        "texts": len(found),
        "equal": sum(count == len(text) for (count, _, _), text in zip(followed, reference)),
        "tokens": sum(count for count, _, _ in followed),
        "of_tokens": sum(map(len, reference)),
        "worst": max((worst for _, worst, _ in followed), default=0.0),
        "wrong": wrong,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", metavar="FILE")
    parser.add_argument("--write", metavar="FILE")
    parser.add_argument("artifact")
    parser.add_argument("mlcc", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.mlcc or bool(args.reference) == bool(args.write):
        parser.error("one of --reference and --write, an artifact and the program are needed")
    result, times = {}, {}
    with Server(args.mlcc, args.artifact) as server:
        try:
            address = server.address()
            model = fetch(f"{address}/v1/models")["data"][0]["id"]
            for name, at_once in [("alone", 1)] if args.write else [("at once", AT_ONCE), ("alone", 1)]:
                begin = time.monotonic()
                result[name] = texts(address, model, at_once)
                times[name] = round(time.monotonic() - begin, 3)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            print(f"{type(error).__name__}: {error}\n{server.said()}", file=sys.stderr)
            return 2
    if args.write:
        with open(args.write, "w", encoding="utf-8") as file:
            json.dump(result["alone"], file)
        return 0
    with open(args.reference, encoding="utf-8") as file:
        reference = json.load(file)
    found = {name: {**compare(of, reference), "seconds": times[name]} for name, of in result.items()}
    print(json.dumps(found))
    return 1 if any(of["wrong"] for of in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
