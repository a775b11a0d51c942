#!/usr/bin/env python3
"""Replays reference cases on an NVIDIA GPU and measures speed, from a bundle of tests/gpu/pack.

    tests/gpu/run [--bundle FILE] [--minutes 8] [--out DIR] ...
    python3 run.py ...                                   # inside of an unpacked bundle

Needs python3 and the NVIDIA driver, nothing else. In the order: the device and its copy bandwidth, the reference cases, tokens
per second. Every case is a process with a time limit; one that crashes or hangs is told with the end of its messages, and
the rest goes on; after Ctrl-C or SIGTERM nothing more is begun. Results are written as they come: mlcc-gpu-results.jsonl, one object per line, and mlcc-gpu-results.txt.

Without a bundle, in the project's folder, one is packed first (tests/gpu/pack, which needs cargo and LLVM).

Exit code: 0 all reference cases within the tolerance, 1 a miss, an error or a case that was not run, 2 wrong usage, 3 no GPU.
"""

import argparse
import concurrent.futures
import ctypes
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
MANIFEST = "bundle.json"
# Share of the time that reference cases may take where speed is measured too.
GOLDEN_SHARE = 0.6
# Lines of a failed case's messages that are kept.
LAST_LINES = 8
# Loading the model, building its kernels, three repetitions.
REPETITIONS = 3


def driver_name():
    return os.environ.get("MLCC_CUDA_DRIVER") or "libcuda.so.1"


# The device, in a process of its own: a driver may hang.


def probe_cuda():
    """Name, compute capability, driver and copy bandwidth of GPU 0, through the driver API."""
    cuda = ctypes.CDLL(driver_name())

    def call(name, *args):
        status = getattr(cuda, name)(*args)
        if status != 0:
            raise RuntimeError(f"{name} failed with status {status}")

    size, pointer = ctypes.c_size_t, ctypes.c_uint64
    call("cuInit", 0)
    count, device = ctypes.c_int(), ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    if count.value < 1:
        raise RuntimeError("there is no NVIDIA GPU")
    call("cuDeviceGet", ctypes.byref(device), 0)
    name = ctypes.create_string_buffer(256)
    call("cuDeviceGetName", name, 256, device)
    found = {"device": name.value.decode(errors="replace"), "devices": count.value}
    capability = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        value = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        capability.append(str(value.value))
    found["capability"] = ".".join(capability)
    version, memory = ctypes.c_int(), size()
    if hasattr(cuda, "cuDriverGetVersion") and cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:
        found["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    if hasattr(cuda, "cuDeviceTotalMem_v2") and cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device) == 0:
        found["memory_bytes"] = memory.value
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    # Much more than the caches hold.
    buffer_bytes = min(1 << 30, (found.get("memory_bytes") or 1 << 28) // 8)
    buffers = [pointer(), pointer()]
    for buffer in buffers:
        call("cuMemAlloc_v2", ctypes.byref(buffer), size(buffer_bytes))

    def copies(number):
        begin = time.perf_counter()
        for _ in range(number):
            call("cuMemcpyDtoDAsync_v2", buffers[1], buffers[0], size(buffer_bytes), None)
        call("cuStreamSynchronize", None)
        return number * 2 * buffer_bytes / max(time.perf_counter() - begin, 1e-9)

    copies(3)
    found["copy_bytes_per_s"] = max(copies(20) for _ in range(3))
    for buffer in buffers:
        call("cuMemFree_v2", buffer)
    call("cuDevicePrimaryCtxRelease_v2", device)
    return found


def probe_cpu():
    name = "CPU"
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
            name = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), name)
    except OSError:
        pass
    length = 64 << 20
    source, target = bytearray(b"\1") * length, bytearray(length)
    to = (ctypes.c_char * length).from_buffer(target)
    begin_of = (ctypes.c_char * length).from_buffer(source)
    rates = []
    for _ in range(4):
        begin = time.perf_counter()
        ctypes.memmove(to, begin_of, length)
        rates.append(2 * length / (time.perf_counter() - begin))
    return {"device": name, "copy_bytes_per_s": max(rates), "copy_threads": 1}


# Running a bundle.


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

    def speed(self, case, bandwidth):
        result = {"kind": "speed", **case}
        limit = self.limit(self.end)
        if limit <= 1:
            return {**result, "result": "not run: no time left"}
        command = ["bench", self.path(case["artifact"]), "-p", str(case["prompt"]), "-n", str(case["generate"])]
        command += ["-r", str(REPETITIONS), "--warm-up", "0", "-o", "json"]
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
        results.say(GOLDEN_ROW.format("case", "format", "worst error", "tolerance", "greedy", "s", "result"))
        jobs = self.args.jobs or min(4, os.cpu_count() or 1)
        # Kernels are built by the CPU when a model is loaded: several cases at a time.
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(self.golden, case) for case in goldens]
            for future in concurrent.futures.as_completed(futures):
                results.add(future.result())
                show(results, golden_line(results.all[-1]), results.all[-1])
        results.say("")
        bandwidth = device.get("copy_bytes_per_s")
        for case in speeds:
            result = self.speed(case, bandwidth)
            results.add(result)
            for line in speed_lines(result):
                results.say(line)
            show(results, None, result)
        return device

    def device(self, results):
        target = self.manifest["target"]
        limit = min(self.args.timeout, 60)
        code, out, err, _ = execute([sys.executable, os.path.abspath(__file__), "--probe", target], limit)
        try:
            device = {"kind": "device", "target": target, **json.loads(out)}
        except ValueError:
            device = {"kind": "device", "target": target, "device": "unknown", "stderr": err}
            device["result"] = "failed: " + failure(code, limit)
        results.add(device)
        results.say(device_line(device))
        return device


GOLDEN_ROW = "{:<16} {:<9} {:>11} {:>9} {:>9} {:>6}  {}"


def golden_line(result):
    error = result.get("error")
    return GOLDEN_ROW.format(
        result["case"],
        result["format"],
        "-" if error is None else f"{error:.1e}",
        f"{result['tolerance']:g}",
        result.get("greedy", "-"),
        result.get("seconds", "-"),
        result["result"] + (f" ({result['flags']})" if result["flags"] else ""),
    )


def speed_lines(result):
    if result["result"] != "ok":
        return [f"{result['name']:<28} {result['result']}"]
    lines = []
    for row in result["tests"]:
        share = row.get("share_of_copy_bandwidth")
        share = "" if share is None else f", {100 * share:.1f} % of the copy bandwidth"
        lines.append(
            f"{result['name']:<28} {row['test']:<8} {row['tok_s']:>10.1f} tok/s "
            f"({row['tok_s_min']:.1f} - {row['tok_s_max']:.1f}), {row['bytes_per_token'] / 1e6:.1f} MB per token{share}"
        )
    return lines


def show(results, line, result):
    if line:
        results.say(line)
    for message in result.get("stderr", []):
        results.say(f"    {message}")


def device_line(device):
    parts = [device["device"]]
    if "capability" in device:
        parts.append(f"compute capability {device['capability']}")
    if "cuda" in device:
        parts.append(f"driver for CUDA {device['cuda']}")
    if "memory_bytes" in device:
        parts.append(f"{device['memory_bytes'] / 2**30:.0f} GiB")
    rate = device.get("copy_bytes_per_s")
    parts.append("copy bandwidth not measured" if rate is None else f"copies {rate / 1e9:.1f} GB/s (read and written)")
    return ", ".join(parts)


def summary(results, device):
    """One table of all: a row per model and format."""
    lines = ["", device_line(device), "", "| model | quant | worst error | tolerance | pp tok/s | tg tok/s | of copy bandwidth | result |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |")
    order = {"golden": 0, "speed": 1}
    for result in sorted((r for r in results.all if r["kind"] in order), key=lambda r: (order[r["kind"]], r["number"])):
        cells = [result["case"], result["format"] + (f" {result['flags']}" if result["flags"] else "")]
        if result["kind"] == "golden":
            error = result.get("error")
            cells += ["-" if error is None else f"{error:.1e}", f"{result['tolerance']:g}", "", "", ""]
        else:
            tests = {row["test"][:2]: row for row in result.get("tests", [])}
            rate = {name: f"{row['tok_s']:.1f}" for name, row in tests.items()}
            share = tests.get("tg", {}).get("share_of_copy_bandwidth")
            cells += ["", "", rate.get("pp", "-"), rate.get("tg", "-"), "-" if share is None else f"{100 * share:.1f} %"]
        lines.append("| " + " | ".join(cells + [result["result"]]) + " |")
    return lines


def run_bundle(folder, args):
    results = Results(args.out)
    bundle = Bundle(folder, args)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, bundle.end_now)
    device = bundle.run(results)
    for line in summary(results, device):
        results.say(line)
    goldens = [r for r in results.all if r["kind"] == "golden"]
    misses = [r for r in goldens if r["result"] != "ok"]
    broken = [r for r in results.all if r["kind"] != "golden" and r.get("result", "ok").startswith("failed")]
    absent = [r for r in results.all if r["kind"] == "speed" and r["result"].startswith("not run")]
    ok = not misses and not broken
    results.add({"kind": "summary", "ok": ok, "goldens": len(goldens), "misses": len(misses), "failed": len(broken)})
    results.say("")
    if absent:
        results.say("no time left for: " + ", ".join(r["name"] for r in absent))
    if ok:
        results.say(f"all {len(goldens)} reference cases are within the tolerance" if goldens else "no reference cases")
    else:
        results.say(f"{len(misses)} of {len(goldens)} reference cases are not within the tolerance, {len(broken)} other failures")
    return 0 if ok else 1


def missing_driver():
    try:
        ctypes.CDLL(driver_name())
        return None
    except OSError as error:
        return f"no NVIDIA driver on this machine ({error})"


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
    parser.add_argument("--jobs", type=int, metavar="N", help="reference cases at a time [4, at most the CPUs]")
    parser.add_argument("--no-bench", dest="bench", action="store_false", help="only the reference cases")
    parser.add_argument("--allow-missing", action="store_true", help="a machine without a GPU is a skip and no failure")
    parser.add_argument(
        "--libc", choices=("auto", "system", "bundle"), default="auto", help="the C library for mlcc [the system's, if new enough]"
    )
    parser.add_argument("--mlcc", metavar="PROGRAM", help="without a bundle: an mlcc with LLVM, in place of building one")
    parser.add_argument("--keep", metavar="DIR", help="without a bundle: where the artifacts go, to be kept")
    parser.add_argument("--probe", choices=("cuda", "cpu"), help=argparse.SUPPRESS)
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
    if args.probe:
        print(json.dumps(probe_cuda() if args.probe == "cuda" else probe_cpu()))
        return 0
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
