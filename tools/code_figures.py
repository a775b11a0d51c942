#!/usr/bin/env python3
"""Figures about the form and the language of a Rust tree, for comparing it with another tree or with itself later.

Usage: tools/code_figures.py [FOLDER ...] [--json] [--list types|tuples|openings]

Prints a table with a column per folder (default: this repository). It reads text and not syntax trees: strings and comments
are blanked first, tests (folders `tests`, files `tests.rs`, modules under `#[cfg(test)]`) are left out. `--list` prints the
places behind a figure: type names that several files define, tuples taken apart in signatures, doc comments that begin with
an answer to a question that stands nowhere.
"""

import argparse
import collections
import json
import pathlib
import re
import statistics
import subprocess
import sys

# Doc comments that begin so are phrases and no sentences.
OPENINGS = ("Of", "What", "As", "Whether", "Who", "Which", "How", "So", "Those", "That", "Where", "When", "If")
DEFINITION = re.compile(r"\b(?:struct|enum|union|trait|type)\s+([A-Z]\w*)")
FUNCTION = re.compile(r"\bfn\s+([a-z_]\w*)\s*(?:<[^({]*>)?\s*\(")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*")
LITERAL = re.compile(
    r'(?P<raw>b?r(?P<hash>#*)".*?"(?P=hash))|(?P<text>b?"(?:[^"\\]|\\.)*")|(?P<char>b?\'(?:[^\'\\]|\\.[^\']*)\')'
    r"|(?P<line>//[^\n]*)|(?P<block>/\*.*?\*/)",
    re.DOTALL,
)


def blanked(text):
    """The text with literals and comments replaced by blanks, lines kept."""
    return LITERAL.sub(lambda found: re.sub(r"[^\n]", " ", found.group(0)), text)


def closing(code, start):
    """The index behind the bracket that closes the one at `start`."""
    pairs = {"(": ")", "{": "}", "[": "]"}
    opened, closed = code[start], pairs[code[start]]
    depth = 0
    for index in range(start, len(code)):
        if code[index] == opened:
            depth += 1
        elif code[index] == closed:
            depth -= 1
            if depth == 0:
                return index + 1
    return len(code)


def without_tests(text, code):
    """Both texts up to the first `#[cfg(test)] mod`, by the rule that tests stand last in a file."""
    found = re.search(r"#\[cfg\(test\)\]\s*(?:#\[[^\]]*\]\s*)*mod\s+\w+\s*\{", code)
    return (text[: found.start()], code[: found.start()]) if found else (text, code)


def parameters(signature):
    """The parameters of a signature without its outer brackets, split at commas of the outer level."""
    depth, last, found = 0, 0, []
    for index, letter in enumerate(signature):
        if letter in "([{<":
            depth += 1
        elif letter in ")]}" or (letter == ">" and signature[index - 1 : index] not in "-="):
            depth -= 1
        elif letter == "," and depth == 0:
            found.append(signature[last:index].strip())
            last = index + 1
    found.append(signature[last:].strip())
    return [parameter for parameter in found if parameter]


class Tree:
    """What is counted in one folder."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.lines_of_files, self.lines_of_functions = [], []
        self.function_names, self.counts_of_parameters = [], []
        self.types = collections.defaultdict(list)
        self.tuples, self.openings = [], []
        self.doc_comments = self.test_lines = self.wide_lines = 0
        self.unwraps = self.unsafe_blocks = 0
        for path in self.files("*.rs"):
            self.read(path)
        self.prose, self.wide_prose = self.markdown()

    def files(self, pattern):
        listed = subprocess.run(
            ["git", "-C", str(self.folder), "ls-files", "-z", pattern], capture_output=True, text=True, check=False
        )
        if listed.returncode == 0:
            names = [name for name in listed.stdout.split("\0") if name]
        else:
            names = [str(path.relative_to(self.folder)) for path in self.folder.rglob(pattern)]
        return [name for name in sorted(names) if (self.folder / name).is_file()]

    def read(self, name):
        text = (self.folder / name).read_text(encoding="utf-8", errors="replace")
        parts = pathlib.PurePath(name).parts
        if "tests" in parts[:-1] or parts[-1] in ("tests.rs", "test.rs"):
            self.test_lines += text.count("\n")
            return
        whole = text.count("\n")
        text, code = without_tests(text, blanked(text))
        self.test_lines += whole - text.count("\n")
        self.lines_of_files.append(whole)
        self.wide_lines += sum(len(line) > 110 for line in text.splitlines())
        self.unwraps += len(re.findall(r"\.unwrap\(\)|\.expect\(", code))
        self.unsafe_blocks += len(re.findall(r"\bunsafe\s*\{", code))
        for found in DEFINITION.finditer(code):
            before = code[code.rfind("\n", 0, found.start()) + 1 : found.start()]
            if found.group(0).startswith("type") and before.startswith((" ", "\t")):
                continue  # an associated type
            self.types[found.group(1)].append(name)
        self.comments(name, text)
        for found in FUNCTION.finditer(code):
            self.function(name, code, found)

    def comments(self, name, text):
        previous = ""
        for number, line in enumerate(text.splitlines(), 1):
            stripped = line.strip()
            doc = re.match(r"//[/!] ?(.*)", stripped)
            if doc and not previous.startswith(("///", "//!")):
                self.doc_comments += 1
                word = re.match(r"[A-Za-z]+", doc.group(1))
                if word and word.group(0) in OPENINGS:
                    self.openings.append(f"{name}:{number}: {doc.group(1)}")
            previous = stripped

    def function(self, name, code, found):
        start = found.end() - 1
        end = closing(code, start)
        listed = parameters(code[start + 1 : end - 1])
        line = code.count("\n", 0, found.start()) + 1
        self.function_names.append(found.group(1))
        self.counts_of_parameters.append(len(listed))
        self.tuples += [f"{name}:{line}: {found.group(1)}: {one}" for one in listed if one.startswith("(")]
        body = re.compile(r"[{;]").search(code, end)
        if body and body.group(0) == "{":
            last = closing(code, body.start())
            self.lines_of_functions.append(code.count("\n", found.start(), last) + 1)

    def markdown(self):
        prose = wide = 0
        for name in self.files("*.md"):
            fenced = False
            for line in (self.folder / name).read_text(encoding="utf-8", errors="replace").splitlines():
                if line.lstrip().startswith("```"):
                    fenced = not fenced
                elif not fenced and line.strip() and not line.startswith(("|", "    ", "#")):
                    prose += 1
                    wide += len(line) > 120
        return prose, wide

    def shared_types(self):
        return {name: files for name, files in self.types.items() if len(set(files)) > 1}

    def figures(self):
        functions = max(1, len(self.function_names))
        definitions = max(1, sum(map(len, self.types.values())))
        lines = max(1, sum(self.lines_of_files))
        shared = sum(map(len, self.shared_types().values()))
        one_word = sum(len(WORD.findall(name)) == 1 for name in self.types)
        return {
            "Rust lines, tests apart": lines,
            "test lines : code lines": round(self.test_lines / lines, 2),
            "files": len(self.lines_of_files),
            "file lines, median / p90 / max": spread(self.lines_of_files),
            "functions": len(self.function_names),
            "function lines, median / p90 / max": spread(self.lines_of_functions),
            "functions above 80 lines, %": share(sum(n > 80 for n in self.lines_of_functions), functions),
            "functions above 7 parameters": sum(n > 7 for n in self.counts_of_parameters),
            "tuples taken apart in signatures": len(self.tuples),
            "function name, mean letters": round(statistics.fmean(map(len, self.function_names or [""])), 1),
            "type names": len(self.types),
            "type names of one word, %": share(one_word, max(1, len(self.types))),
            "type definitions that share their name, %": share(shared, definitions),
            "doc comments": self.doc_comments,
            "doc comments that begin with Of, What, As, ..., %": share(len(self.openings), max(1, self.doc_comments)),
            "unwrap, expect per 1000 lines": round(1000 * self.unwraps / lines, 2),
            "unsafe blocks": self.unsafe_blocks,
            "Rust lines above 110 columns per 1000": round(1000 * self.wide_lines / lines, 1),
            "Markdown lines of prose above 120 columns, %": share(self.wide_prose, max(1, self.prose)),
        }

    def listing(self, kind):
        if kind == "types":
            shared = sorted(self.shared_types().items(), key=lambda one: (-len(set(one[1])), one[0]))
            return [f"{len(set(files)):3} {name}: {', '.join(sorted(set(files)))}" for name, files in shared]
        return self.tuples if kind == "tuples" else self.openings


def share(part, whole):
    return round(100 * part / whole, 2)


def spread(values):
    ordered = sorted(values) or [0]
    return f"{int(statistics.median(ordered))} / {ordered[int(0.9 * (len(ordered) - 1))]} / {ordered[-1]}"


def main():
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("folders", nargs="*", default=[pathlib.Path(__file__).resolve().parent.parent])
    reader.add_argument("--json", action="store_true")
    reader.add_argument("--list", choices=("types", "tuples", "openings"))
    asked = reader.parse_args()
    trees = [Tree(folder) for folder in asked.folders]
    if asked.list:
        for tree in trees:
            print("\n".join(tree.listing(asked.list)))
    elif asked.json:
        json.dump({str(tree.folder): tree.figures() for tree in trees}, sys.stdout, indent=1)
        print()
    else:
        names = [tree.folder.resolve().name for tree in trees]
        print("| | " + " | ".join(names) + " |\n| --- |" + " --- |" * len(names))
        columns = [tree.figures() for tree in trees]
        for row in columns[0]:
            print(f"| {row} | " + " | ".join(str(column[row]) for column in columns) + " |")


if __name__ == "__main__":
    main()
