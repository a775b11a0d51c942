//! `option outline`: the loops, branches and buffers of kernels, and the numbers of loads, stores and
//! instructions between them. Kernels of many rows have a thousand lines, most of which repeat.

use std::collections::BTreeMap;

/// The outline of the text of one kernel or several.
pub fn outline(text: &str) -> String {
    let (mut out, mut between) = (String::new(), BTreeMap::new());
    for line in text.lines() {
        let code = line.trim_start();
        if is_structure(code) {
            flush(&mut out, &mut between, &line[..line.len() - code.len()], code);
            out.push_str(line);
            out.push('\n');
        } else {
            count(code, &mut between);
        }
    }
    out
}

fn is_structure(code: &str) -> bool {
    let blocks = code.ends_with('{') || code.starts_with('}');
    blocks || code.is_empty() || code.starts_with("alloc ") || code == "barrier"
}

/// Counts accesses of memory and instructions of a line.
fn count(code: &str, between: &mut BTreeMap<String, usize>) {
    let mut add = |what: &str, times: usize| {
        if times > 0 {
            *between.entry(what.into()).or_default() += times;
        }
    };
    let prefetches = code.starts_with("instr.prefetch");
    add("load", code.matches("load(").count() - usize::from(prefetches));
    add("store", usize::from(code.starts_with("store(")));
    for rest in code.split("instr.").skip(1) {
        let name = rest.split('(').next().unwrap_or(rest);
        add(name, 1);
    }
}

/// Writes the counts before the line `next`, in whose block they are unless that closes one.
fn flush(out: &mut String, between: &mut BTreeMap<String, usize>, indent: &str, next: &str) {
    let counts: Vec<String> =
        std::mem::take(between).into_iter().map(|(what, n)| format!("{n} {what}")).collect();
    if !counts.is_empty() {
        let deeper = if next.starts_with('}') { "  " } else { "" };
        out.push_str(&format!("{indent}{deeper}... {}\n", counts.join(", ")));
    }
}

#[cfg(test)]
mod tests {
    use super::outline;

    #[test]
    fn lines_between_are_counted() {
        let text = "kernel @k() {\n  store(%y, 0, load(%x, 0))\n  for %i in 2 {\n    $1 = instr.dot(load(%x, %i))\n  }\n}\n";
        let expected =
            "kernel @k() {\n  ... 1 load, 1 store\n  for %i in 2 {\n    ... 1 dot, 1 load\n  }\n}\n";
        assert_eq!(outline(text), expected);
    }
}
