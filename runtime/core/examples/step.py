#!/usr/bin/env python3
"""Two texts that go through the model together: while the first one is being continued token by token, the second one's
prompt is read in pieces beside it. Token ids in, two lines of token ids out, one thread.

    python3 runtime/core/examples/step.py model.so 16 510 2776 369 -- 12092 13

Structures and loading are those of generate.py beside this file.
"""
import ctypes as c
import sys

from generate import PAGE_ROWS, PROBLEMS, SEQUENCE_LENGTH, WHOLE_PROMPTS, Ctx, Step, buffer, opened


class Sequence(c.Structure):
    _fields_ = [("state", c.c_void_p), ("page_table", c.c_void_p), ("past", c.c_int64), ("first", c.c_int64), ("rows", c.c_int64)]


class Text:
    """A prompt and what was generated, how much of it was fed, and the state and pages that remember that."""

    def __init__(self, ids, state, pages):
        self.ids, self.prompt, self.fed, self.state, self.pages = ids, len(ids), 0, state, pages


def main(path, count, prompts):
    model, entries, weights, keep_weights = opened(path)
    if "step" not in entries or model.plan.batch < len(prompts):
        sys.exit(f"step: the model takes one text at a time: build it with --max-batch {len(prompts)}")
    if model.flags & WHOLE_PROMPTS:
        sys.exit("step: this model reads no prompt in pieces")
    # Memory of a step, for all texts: a row of logits for each output token, here one per text at most.
    most, vocab = max(model.plan.chunk, model.plan.batch), model.plan.vocab
    arena, keep_arena = buffer(model.plan.arena_bytes, model.plan.alignment)
    logits_at, keep_logits = buffer(4 * vocab * len(prompts), 64)
    tokens_at, keep_tokens = buffer(4 * most, 64)
    output_rows_at, keep_output_rows = buffer(4 * most, 64)
    logits = (c.c_float * (vocab * len(prompts))).from_address(logits_at)
    tokens, output_rows = [(c.c_int32 * most).from_address(at) for at in (tokens_at, output_rows_at)]
    ctx = Ctx(weights=weights, arena=arena, logits=logits_at, tokens=tokens_at, output_rows=output_rows_at)

    def call(entry):
        if status := Step(entry)(ctx, 0, 1):
            sys.exit(f"step: {PROBLEMS.get(status, 'the step failed')}")

    # Pages for the caches of all texts, which take them by turns. They cost no memory before they are written.
    pages_each = -(-model.plan.context // PAGE_ROWS) if model.plan.page_bytes else 0
    ctx.pages, keep_pages = buffer(len(prompts) * pages_each * model.plan.page_bytes, 64)
    texts, keep_states = [], []
    for ids in prompts:
        ctx.state, keep = buffer(model.plan.state_bytes, model.plan.alignment)
        keep_states.append(keep)
        call(entries["create_kv_cache"])
        # What some models need for a prompt in several pieces, as in generate.py.
        for s in model.states[: model.n_states]:
            if s.kind == SEQUENCE_LENGTH:
                c.c_int32.from_address(ctx.state + s.offset).value = len(ids)
        pages = range(len(texts), pages_each * len(prompts), len(prompts))
        texts.append(Text(list(ids), ctx.state, (c.c_int32 * pages_each)(*pages)))

    while True:
        # The second text comes when the first one has a token. Everybody who has tokens that were not fed gets rows.
        begun = len(texts[0].ids) > texts[0].prompt
        parts, asked, n = [], [], 0
        for i, text in enumerate(texts if begun else texts[:1]):
            # At least one row is left for each text behind.
            piece = text.ids[text.fed :][: most - n - (len(texts) - 1 - i)]
            if not piece:
                continue
            tokens[n : n + len(piece)] = piece
            parts.append((text, Sequence(text.state, c.addressof(text.pages), text.fed, n, len(piece))))
            n += len(piece)
            # Logits of the last token that there is; those of the middle of a prompt interest nobody.
            if text.fed + len(piece) == len(text.ids):
                asked.append((text, n - 1))
        if not parts:
            break
        # A step has at least one output row; all `n` numbers have to be those of rows.
        rows = [row for _, row in asked]
        output_rows[:n] = rows + [0] * (n - len(rows))
        sequences = (Sequence * len(parts))(*(sequence for _, sequence in parts))
        ctx.n, ctx.b, ctx.n_outputs, ctx.sequences = n, len(parts), max(len(rows), 1), c.addressof(sequences)
        call(entries["step"])
        for text, sequence in parts:
            text.fed += sequence.rows
        for i, (text, _) in enumerate(asked):
            if len(text.ids) < text.prompt + count:
                text.ids.append(max(range(vocab), key=lambda v: logits[i * vocab + v]))
            if len(text.ids) == text.prompt + count:
                text.fed = len(text.ids)  # the last token is not needed again
    for text in texts:
        print(*text.ids[text.prompt :])


if __name__ == "__main__":
    border = sys.argv.index("--") if "--" in sys.argv else 0
    if border < 4 or border + 1 >= len(sys.argv):
        sys.exit("usage: step.py MODEL.so COUNT TOKEN_ID... -- TOKEN_ID...")
    main(sys.argv[1], int(sys.argv[2]), [[int(a) for a in part] for part in (sys.argv[3:border], sys.argv[border + 1 :])])
