"""Lines and tables of the results of run.py."""

import re

GOLDEN_ROW = "{:<16} {:<9} {:>11} {:>9} {:>9} {:>6}  {}"
GOLDEN_HEAD = GOLDEN_ROW.format("case", "format", "worst error", "tolerance", "greedy", "s", "result")


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


def texts_lines(result):
    lines = [f"{result['name']}: {result['result']}"]
    for name, found in result.get("ways", {}).items():
        lines.append(
            f"    {name}: {found['equal']} of {found['texts']} texts and {found['tokens']} of {found['of_tokens']} tokens as on the CPU, "
            f"log probabilities at most {found['worst']:.1e} apart, {found['seconds']} s"
        )
        lines += [f"    {name}: {wrong}" for wrong in found["wrong"]]
    return lines


def percent(share):
    return "-" if share is None else f"{100 * share:.1f} %"


def speed_lines(result):
    if result["result"] != "ok":
        return [f"{result['name']:<28} {result['result']}"]
    lines = []
    for row in result["tests"]:
        share = row.get("share_of_copy_bandwidth")
        share = "" if share is None else f", {percent(share)} of the copy bandwidth"
        lines.append(
            f"{result['name']:<28} {row['test']:<13} {row['tok_s']:>10.1f} tok/s "
            f"({row['tok_s_min']:.1f} - {row['tok_s_max']:.1f}), {row['bytes_per_token'] / 1e6:.1f} MB per token{share}"
        )
    return lines


def peer_line(row):
    units = [("tok_s", 1, "tok/s"), ("us", 1, "us"), ("tflops", 1, "TFLOP/s"), ("weight_bytes_per_s", 1e-9, "GB/s of weights")]
    units += [("bytes_per_s", 1e-9, "GB/s (read and written)"), ("seconds", 1, "s")]
    parts = [f"{row[key] * scale:.1f} {unit}" for key, scale, unit in units if key in row]
    if "version" in row:
        parts.append(f"{row['version']}, CUDA {row['cuda']}, {row['device']}")
    return f"PyTorch, {row['name']}: " + (row.get("error") or ", ".join(parts))


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


def table(names, rows):
    """Names that end with a colon are of numbers."""
    lines = ["| " + " | ".join(name.rstrip(":") for name in names) + " |"]
    lines.append("| " + " | ".join("---:" if name.endswith(":") else "---" for name in names) + " |")
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def of_kind(results, kind):
    return sorted((r for r in results if r["kind"] == kind), key=lambda r: r["number"])


def peers_of(results):
    """The best of PyTorch's ways for each model and test."""
    found = {}
    for row in results:
        if row["kind"] == "peer" and "test" in row and "tok_s" in row:
            key = (row["model"], row["test"])
            found[key] = max(found.get(key, 0.0), row["tok_s"])
    return found


def speed_rows(result, peers):
    if not result.get("tests"):
        return [[result["name"], "", "-", "-", "-", "-", "-", result["result"]]]
    rows = []
    for test in result["tests"]:
        # However many tokens are generated, PyTorch's step is one of them.
        peer = peers.get((result["case"], re.sub(r"^tg\d+", "tg", test["test"])))
        beside = ["-", "-"] if peer is None else [f"{peer:.1f}", f"{test['tok_s'] / peer:.2f}"]
        spread = f"{test['tok_s_min']:.1f} - {test['tok_s_max']:.1f}"
        share = percent(test.get("share_of_copy_bandwidth"))
        rows.append([result["name"], test["test"], f"{test['tok_s']:.1f}", spread, share, *beside, result["result"]])
    return rows


def summary(results, device):
    """Two tables of all: a row for each reference case, and a row for each test of speed."""
    lines = ["", device_line(device)]
    goldens, speeds = of_kind(results, "golden"), of_kind(results, "speed")
    if goldens:
        rows = []
        for result in goldens:
            error = result.get("error")
            quant = result["format"] + (f" {result['flags']}" if result["flags"] else "")
            error = "-" if error is None else f"{error:.1e}"
            rows.append([result["case"], quant, error, f"{result['tolerance']:g}", result["result"]])
        lines += [""] + table(["model", "quant", "worst error:", "tolerance:", "result"], rows)
    if speeds:
        peers = peers_of(results)
        names = ["model", "test", "tok/s:", "min - max:", "of copy bandwidth:", "PyTorch bf16 tok/s:", "ratio:", "result"]
        lines += [""] + table(names, [row for result in speeds for row in speed_rows(result, peers)])
    return lines
