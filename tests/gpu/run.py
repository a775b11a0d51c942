#!/usr/bin/env python3
"""Replays reference cases on an NVIDIA GPU and measures speed, from a bundle of tests/gpu/pack.

    tests/gpu/run [--bundle FILE] [--minutes 8] [--out DIR] ...
    python3 run.py ...                                   # inside of an unpacked bundle

Needs python3 and the NVIDIA driver, nothing else. In the order: the device and its copy bandwidth, the reference cases, texts of a
server, PyTorch where it is installed, tokens per second. Every case is a process with a time limit; one that crashes or hangs is
told with the end of its messages, and the rest goes on; after Ctrl-C or SIGTERM nothing more is begun. Results are written as they come:
mlcc-gpu-results.jsonl, one object per line, and mlcc-gpu-results.txt.

Without a bundle, in the project's folder, one is packed first (tests/gpu/pack, which needs cargo and LLVM).

Exit code: 0 all reference cases within the tolerance and all texts right, 1 a miss, an error or a case that was not run, 2 wrong
usage, 3 no GPU.
"""

import argparse
import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time

import report
from device import missing_driver

HERE = os.path.dirname(os.path.abspath(__file__))
MANIFEST = "bundle.json"
# Share of the time that reference cases may take where speed is measured too.
GOLDEN_SHARE = 0.6
# Lines of a failed case's messages that are kept.
LAST_LINES = 8
REPETITIONS = 2


class Results:
    """Results as they come: objects into one file, lines of text into another and onto the screen."""

    def __init__(self, folder):
        os.makedirs(folder, exist_ok=True)
        self.lock = threading.Lock()
        self.objects = open(os.path.join(folder, "mlcc-gpu-results.jsonl"), "w", encoding="utf-8")
        self.text = open(os.path.join(folder, "mlcc-gpu-results.txt"), "w", encoding="utf-8")
        self.all = []

    def add(self, result):
        with self.lock:
            self.all.append(result)
            self.objects.write(json.dumps(result) + "\n")
            self.objects.flush()

    def say(self, line):
        with self.lock:
            print(line, flush=True)
            self.text.write(line + "\n")
            self.text.flush()


# Processes of the cases that run.
RUNNING = set()


def stop(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def execute(command, limit):
    """Exit code (None: it was stopped), standard output, last lines of standard error, and seconds."""
    begin = time.monotonic()
    try:
        # In a session of its own, so that whatever it started ends with it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        return 126, "", [f"cannot start {command[0]}: {error.strerror}"], 0.0
    RUNNING.add(process)
    try:
        out, err = process.communicate(timeout=max(limit, 0.1))
        code = process.returncode
    except subprocess.TimeoutExpired:
        stop(process)
        out, err = process.communicate()
        code = None
    finally:
        RUNNING.discard(process)
    lines = err.decode(errors="replace").strip().splitlines()[-LAST_LINES:]
    return code, out.decode(errors="replace"), lines, time.monotonic() - begin


def failure(code, limit):
    if code is None:
        return f"stopped after {limit:.0f} s"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


class Bundle:
    def __init__(self, folder, args):
        self.folder, self.args = folder, args
        with open(os.path.join(folder, MANIFEST), encoding="utf-8") as manifest:
            self.manifest = json.load(manifest)
        self.end = self.golden_end = time.monotonic() + 60 * args.minutes
        self.mlcc = [self.path(self.manifest["program"])]

    def end_now(self, *_):
        """On a signal: the time is over, what is known is told."""
        self.end = self.golden_end = 0
        for process in list(RUNNING):
            stop(process)

    def path(self, name):
        return os.path.join(self.folder, name)

    def choose_libc(self):
        """Takes the C library of the bundle where the machine's is too old; what goes wrong, or None."""
        own, loader = self.mlcc, self.manifest.get("loader")
        bundled = [self.path(loader), "--library-path", self.path("lib")] + own if loader else None
        ways = {"system": [own], "bundle": [bundled], "auto": [own, bundled]}[self.args.libc]
        lines = ["the bundle has no C library"]
        for way in filter(None, ways):
            code, _, lines, _ = execute(way + ["--version"], 30)
            if code == 0:
                self.mlcc = way
                return None
        return "; ".join(lines)

    def limit(self, end):
        return min(self.args.timeout, end - time.monotonic())

    def golden(self, case):
        result = {"kind": "golden", **case}
        limit = self.limit(self.golden_end)
        if limit <= 1:
            return {**result, "result": "not run: no time left"}
        command = ["verify", self.path(case["artifact"]), "--golden", self.path(case["golden"])]
        command += ["--tolerance", str(case["tolerance"]), "--json"]
        code, out, err, seconds = execute(self.mlcc + command, limit)
        result["seconds"] = round(seconds, 2)
        try:
            found = json.loads(out)
            result["error"] = found["worst_relative_error"]
            result["greedy"] = f"{found['greedy_equal']}/{found['greedy_expected']}"
            result["result"] = "ok" if code == 0 else "MISS"
        except (ValueError, KeyError, TypeError):
            result["result"] = "failed: " + failure(code, limit)
        if code != 0:
            result["stderr"] = err
        return result

    def texts(self, case):
        result = {"kind": "texts", **case}
        limit = self.limit(self.end)
        if limit <= 1:
            return {**result, "result": "not run: no time left"}
        command = [sys.executable, self.path("texts.py"), "--reference", self.path(case["reference"]), self.path(case["artifact"])]
        code, out, err, seconds = execute(command + self.mlcc, limit)
        result["seconds"] = round(seconds, 2)
        try:
            result["ways"] = json.loads(out)
            result["result"] = "ok" if code == 0 else "MISS"
        except ValueError:
            result.update(result="failed: " + failure(code, limit), stderr=err)
        return result

    def peer(self):
        """What PyTorch does here: the objects of torch_peer.py."""
        limit = self.limit(self.end)
        if limit <= 1:
            return [{"kind": "peer", "name": "torch", "error": "not run: no time left"}]
        command = [sys.executable, self.path("torch_peer.py")]
        if self.manifest["target"] == "cpu":
            command += ["--device", "cpu", "--tiny"]
        code, out, err, _ = execute(command, limit)
        found = []
        for line in out.splitlines():
            try:
                found.append({"kind": "peer", **json.loads(line)})
            except (ValueError, TypeError):
                pass  # A line that it did not finish.
        if code != 0:
            found.append({"kind": "peer", "name": "torch", "error": failure(code, limit), "stderr": err})
        return found

    def speed(self, case, device):
        result = {"kind": "speed", **case}
        limit = self.limit(self.end)
        if limit <= 1:
            return {**result, "result": "not run: no time left"}
        if not fits(case.get("target", ""), device):
            return {**result, "result": f"not run: built for {case['target']}"}
        command = ["bench", self.path(case["artifact"]), *case["tests"].split()]
        command += ["-r", str(REPETITIONS), "--warm-up", "0", "-o", "json"]
        bandwidth = device.get("copy_bytes_per_s")
        code, out, err, seconds = execute(self.mlcc + command, limit)
        result["seconds"] = round(seconds, 2)
        try:
            rows = json.loads(out) if code == 0 else []
            keys = ("test", "tok_s", "tok_s_min", "tok_s_max", "bytes_per_token", "level")
            result["tests"] = [{key: row[key] for key in keys} for row in rows]
            for row in result["tests"] if bandwidth else []:
                row["share_of_copy_bandwidth"] = row["tok_s"] * row["bytes_per_token"] / bandwidth
        except (ValueError, KeyError, TypeError):
            code = code or 1
        result["result"] = "ok" if code == 0 else "failed: " + failure(code, limit)
        if code != 0:
            result["stderr"] = err
        return result

    def run(self, results):
        device = self.device(results)
        wrong = self.choose_libc()
        if wrong:
            results.add({"kind": "program", "result": f"failed: {wrong}"})
            results.say(f"mlcc does not start: {wrong}")
        goldens, speeds = self.manifest["goldens"], self.manifest["speed"] if self.args.bench else []
        if speeds:
            self.golden_end -= (1 - GOLDEN_SHARE) * (self.end - time.monotonic())
        results.say(report.GOLDEN_HEAD)
        jobs = self.args.jobs or min(12, os.cpu_count() or 1)
        # Kernels are built by the CPU when a model is loaded: several cases at a time.
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(self.golden, case) for case in goldens]
            for future in concurrent.futures.as_completed(futures):
                results.add(future.result())
                show(results, [report.golden_line(results.all[-1])], results.all[-1])
        for case in self.manifest.get("texts", []):
            results.add(self.texts(case))
            show(results, report.texts_lines(results.all[-1]), results.all[-1])
        results.say("")
        for row in self.peer() if speeds and self.args.peer else []:
            results.add(row)
            show(results, [report.peer_line(row)], row)
        for case in speeds:
            results.add(self.speed(case, device))
            show(results, report.speed_lines(results.all[-1]), results.all[-1])
        return device

    def device(self, results):
        target = self.manifest["target"]
        limit = min(self.args.timeout, 60)
        code, out, err, _ = execute([sys.executable, os.path.join(HERE, "device.py"), target], limit)
        try:
            device = {"kind": "device", "target": target, **json.loads(out)}
        except ValueError:
            device = {"kind": "device", "target": target, "device": "unknown", "stderr": err}
            device["result"] = "failed: " + failure(code, limit)
        results.add(device)
        results.say(report.device_line(device))
        return device


def fits(target, device):
    """Whether kernels for a target run on a device, as far as both are known."""
    built = re.match(r"sm_(\d+)$", target)
    capability = device.get("capability")
    return not built or not capability or int(built.group(1)) <= int(capability.replace(".", ""))


def show(results, lines, result):
    for line in lines:
        results.say(line)
    for message in result.get("stderr", []):
        results.say(f"    {message}")


def run_bundle(folder, args):
    results = Results(args.out)
    bundle = Bundle(folder, args)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, bundle.end_now)
    device = bundle.run(results)
    for line in report.summary(results.all, device):
        results.say(line)
    goldens = [r for r in results.all if r["kind"] == "golden"]
    misses = [r for r in goldens if r["result"] != "ok"]
    broken = [r for r in results.all if r["kind"] != "golden" and r.get("result", "ok").startswith("failed")]
    broken += [r for r in results.all if r["kind"] == "texts" and r["result"] != "ok" and r not in broken]
    absent = [r for r in results.all if r["kind"] == "speed" and r["result"].startswith("not run")]
    ok = not misses and not broken
    results.add({"kind": "summary", "ok": ok, "goldens": len(goldens), "misses": len(misses), "failed": len(broken)})
    results.say("")
    if absent:
        results.say("not run: " + ", ".join(r["name"] for r in absent))
    if ok:
        results.say(f"all {len(goldens)} reference cases are within the tolerance" if goldens else "no reference cases")
    else:
        results.say(f"{len(misses)} of {len(goldens)} reference cases are not within the tolerance, {len(broken)} other failures")
    return 0 if ok else 1


def unpack(file, folder):
    with tarfile.open(file, "r:*") as archive:
        # Older Pythons know no filters.
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder, **safe)
    for root, _, files in os.walk(folder):
        if MANIFEST in files:
            return root
    sys.exit(f"{file} is no bundle of tests/gpu/pack: it has no {MANIFEST}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", metavar="FILE", help="a bundle of tests/gpu/pack, or the folder of one")
    parser.add_argument("--minutes", type=float, default=8, help="what is not begun by then is not run [8]")
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS", help="most time of one case [60]")
    parser.add_argument("--out", default=".", metavar="DIR", help="where results go [the current folder]")
    parser.add_argument("--jobs", type=int, metavar="N", help="reference cases at a time [12, at most the CPUs]")
    parser.add_argument("--no-bench", dest="bench", action="store_false", help="only the reference cases")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="no PyTorch beside mlcc")
    parser.add_argument("--allow-missing", action="store_true", help="a machine without a GPU is a skip and no failure")
    parser.add_argument(
        "--libc", choices=("auto", "system", "bundle"), default="auto", help="the C library for mlcc [the system's, if new enough]"
    )
    parser.add_argument("--mlcc", metavar="PROGRAM", help="without a bundle: an mlcc with LLVM, in place of building one")
    parser.add_argument("--keep", metavar="DIR", help="without a bundle: where the artifacts go, to be kept")
    return parser.parse_args()


def pack_folder(args, folder):
    """In the project's folder: the bundle of this source, not compressed."""
    command = [sys.executable, os.path.join(HERE, "pack"), "--folder", folder]
    if args.mlcc:
        command += ["--mlcc", args.mlcc, "--program", args.mlcc]
    if not args.bench:
        command.append("--no-bench")
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        sys.exit(code)


def target_of(folder):
    with open(os.path.join(folder, MANIFEST), encoding="utf-8") as manifest:
        return json.load(manifest)["target"]


def main():
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="mlcc-gpu-") as scratch:
        folder = None
        if args.bundle:
            folder = args.bundle if os.path.isdir(args.bundle) else unpack(args.bundle, scratch)
        elif os.path.exists(os.path.join(HERE, MANIFEST)):
            folder = HERE
        wrong = missing_driver() if folder is None or target_of(folder) == "cuda" else None
        if wrong and args.allow_missing:
            print(f"skipped: {wrong}")
            return 0
        if wrong:
            print(f"{wrong}: install it, or give --allow-missing to skip", file=sys.stderr)
            return 3
        if folder is None:
            folder = args.keep or scratch
            pack_folder(args, folder)
        return run_bundle(folder, args)


if __name__ == "__main__":
    sys.exit(main())
