#!/usr/bin/env python3
"""Cycles that a model of a processor predicts for the innermost loops of a kernel: a look at code for machines that are not at hand.

    bench/cycles.py model.so matmul_i8_896x896 --level armv8.6 --cpu neoverse-v1,neoverse-n2

Reads the machine code by `mlcc inspect --asm` and asks llvm-mca (package llvm). Its models have no caches and no memory, and
take an address that an instruction moves on for as late as its result; loops without multiplications are left out.
"""

import argparse
import collections
import re
import shutil
import subprocess
import sys

PRODUCTS = re.compile(r"smmla|smlal|smull|usdot|sdot|bfdot|fmla|vpdp|vdpbf16|vpmadd|vfn?m(add|sub)")
ITERATIONS = 50
TARGETS = {"aarch64": ["-mtriple=aarch64", "-mattr=+v8.6a,+dotprod,+i8mm,+bf16"], "x86-64": ["-mtriple=x86_64"]}


def output(command, text=None):
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def instructions(text):
    """Address, text and target of a jump within the function."""
    for line in text.splitlines():
        if found := re.match(r"\s*([0-9a-f]+):\s+(\S.*)", line):
            code = re.split(r"\s*(?://|#(?=\s))", found[2])[0]
            to = re.search(r"0x([0-9a-f]+)\s*<", code)
            yield int(found[1], 16), re.sub(r"\s*<.*", "", code).strip(), to and int(to[1], 16)


def innermost(code):
    loops = {(to, at) for at, _, to in code if to is not None and to <= at}
    inside = lambda a, b: a != b and b[0] <= a[0] and a[1] <= b[1]
    return sorted(loop for loop in loops if not any(inside(other, loop) for other in loops))


def cycles(mca, target, cpu, body):
    # A jump goes nowhere in particular.
    text = "\n".join(re.sub(r"0x[0-9a-f]+$", ".", line) if re.match(r"b|cb|tb|j", line) else line for line in body)
    out = output([mca, *TARGETS[target], f"-mcpu={cpu}", f"-iterations={ITERATIONS}"], text)
    return int(re.search(r"Total Cycles:\s+(\d+)", out)[1]) / ITERATIONS


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact")
    parser.add_argument("kernel")
    parser.add_argument("--level", help="CPU level, where the artifact has several")
    parser.add_argument("--cpu", default="neoverse-n1,neoverse-v1,neoverse-n2", help="names of LLVM, separated by commas")
    parser.add_argument("--mlcc", default="mlcc", help="the program")
    args = parser.parse_args()
    mca = next((name for name in ("llvm-mca-22", "llvm-mca-19", "llvm-mca") if shutil.which(name)), None)
    if mca is None:
        sys.exit("error: no llvm-mca was found (`apt install llvm`)")
    listing = output([args.mlcc, "inspect", "--asm", args.kernel, args.artifact])
    cpus = args.cpu.split(",")
    print("| loop at | instructions | products | " + " | ".join(f"{cpu}, products per cycle" for cpu in cpus) + " |")
    print("| --- | ---: | --- |" + " ---: |" * len(cpus))
    for function in re.split(r"\n(?=[0-9a-f]+ <[^>]+>:)", listing):
        name = re.match(r"[0-9a-f]+ <([^>]+)>", function)[1]
        if args.level and not name.endswith(re.sub(r"\W", "_", args.level)):
            continue
        code = list(instructions(function))
        target = "x86-64" if any("%" in text for _, text, _ in code) else "aarch64"
        for begin, end in innermost(code):
            body = [text for at, text, _ in code if begin <= at <= end]
            products = [line for line in body if PRODUCTS.match(line)]
            if len(products) < 4:
                continue
            count = collections.Counter(line.split()[0] for line in products)
            kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(count.items()))
            times = [cycles(mca, target, cpu, body) for cpu in cpus]
            cells = " | ".join(f"{time:.1f}, {len(products) / time:.2f}" for time in times)
            print(f"| {name}+{begin - code[0][0]:#x} | {len(body)} | {kinds} | {cells} |")


if __name__ == "__main__":
    main()
