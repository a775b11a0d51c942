#!/usr/bin/env python3
"""Draws docs/pipeline.svg, the picture of the compiler in README.md.

Usage: tools/pipeline_svg.py > docs/pipeline.svg
"""

WIDTH, HEIGHT = 1000, 420
FILE, COMPILER, CHECK, RUNTIME = "#fdf3d7", "#e3ecfa", "#eeeeee", "#e0f2e3"
LINE = "#44546a"

parts = []


def box(x, y, width, height, colour, title, lines):
    """A box with a bold title and lines of text below it; returns its place."""
    parts.append(
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" stroke="{LINE}"/>'
    )
    middle = x + width / 2
    top = y + (height - 17 * len(lines)) / 2 + 5
    parts.append(f'<text x="{middle:g}" y="{top:g}" class="title">{title}</text>')
    for number, line in enumerate(lines, 1):
        parts.append(f'<text x="{middle:g}" y="{top + 17 * number:g}">{line}</text>')
    return x, y, width, height


def arrow(*points, dashed=False):
    """A line through the points with a head at its end."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    dash = ' stroke-dasharray="4 4"' if dashed else ""
    parts.append(
        f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.5" marker-end="url(#head)"{dash}/>'
    )


def label(x, y, text, anchor="middle"):
    parts.append(f'<text x="{x:g}" y="{y:g}" class="label" style="text-anchor:{anchor}">{text}</text>')


def right(place, share=0.5):
    x, y, width, height = place
    return x + width, y + height * share


def left(place, share=0.5):
    x, y, _, height = place
    return x, y + height * share


def top(place, share=0.5):
    x, y, width, _ = place
    return x + width * share, y


def bottom(place, share=0.5):
    x, y, width, height = place
    return x + width * share, y + height


def draw():
    checkpoint = box(15, 40, 140, 200, FILE, "checkpoint", ["Hugging Face", "RWKV .pth", "GGUF", "", "weights, config,", "tokenizer"])
    graph = box(200, 40, 150, 90, COMPILER, "graph IR", ["from the model", "definition: prefill,", "decode, batches"])
    kernel = box(420, 40, 150, 90, COMPILER, "kernel IR", ["loops for the exact", "shapes, memory", "plan, barriers"])
    code = box(640, 40, 150, 90, COMPILER, "code generation", ["LLVM or Cranelift:", "x86-64 and AArch64", "levels; PTX"])
    packer = box(455, 170, 335, 70, COMPILER, "packer", ["weights are streamed, quantized and packed", "in the order that the kernels read them"])
    artifact = box(855, 40, 130, 200, FILE, "model.so", ["code per level", "packed weights", "tokenizer", "memory plan", "tables, hashes"])
    checks = box(200, 300, 370, 105, CHECK, "interpreters", ["run both IRs after every pass; results are compared", "layer by layer: mlcc verify, mlcc bisect", "bounds, races and barriers of kernels are checked"])
    runtime = box(640, 300, 150, 105, RUNTIME, "runtime", ["checks the file,", "worker pool,", "sessions, caches;", "Rust, C, Python"])
    engine = box(855, 300, 130, 105, RUNTIME, "engine", ["tokenizer, chat,", "sampler, text"])

    arrow(right(checkpoint, 0.225), left(graph))
    arrow(right(graph), left(kernel))
    label(385, 20, "passes: quantize, fuse, outline; lower")
    arrow((385, 27), (385, 80), dashed=True)
    arrow(right(kernel), left(code))
    arrow(right(code), left(artifact, 0.225))
    arrow(right(checkpoint, 0.825), left(packer))
    arrow(bottom(kernel, 100 / 150), top(packer, 65 / 335))
    label(528, 155, "packing", "start")
    arrow(right(packer), left(artifact, 0.825))
    arrow(bottom(graph), top(checks, 75 / 370), dashed=True)
    arrow(bottom(kernel, 18 / 150), (438, 300), dashed=True)
    arrow(bottom(artifact), (bottom(artifact)[0], 270), (715, 270), top(runtime))
    arrow(right(runtime), left(engine))


def main():
    draw()
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">')
    print("<!-- Made by tools/pipeline_svg.py. -->")
    print("<style>text { font: 13px sans-serif; text-anchor: middle; fill: #1c2733 }")
    print(".title { font-weight: bold; font-size: 15px } .label { font-style: italic }</style>")
    print(
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/></marker></defs>'
    )
    print(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    print("\n".join(parts))
    print("</svg>")


if __name__ == "__main__":
    main()
