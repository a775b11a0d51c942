//! Round trips of random modules, and texts that are refused.

use super::{parse_module, print_module};
use crate::module::Module;
use crate::testing::TestRng;
use crate::testing::graph::{GraphOptions, random_module};
use crate::verify::verify_module;

/// Structural equality of what a module declares, as far as random modules go.
fn assert_same(a: &Module, b: &Module) {
    assert_eq!(a.name, b.name);
    assert!(a.params.values().eq(b.params.values()));
    assert!(a.states.values().eq(b.states.values()));
    assert_eq!(a.functions.len(), b.functions.len());
    for (f, g) in a.functions.values().zip(b.functions.values()) {
        assert_eq!((&f.name, f.kind, &f.inputs, &f.outputs), (&g.name, g.kind, &g.inputs, &g.outputs));
        assert_eq!((&f.values, &f.nodes, &f.body), (&g.values, &g.nodes, &g.body), "@{}", f.name);
    }
}

#[test]
fn random_modules_round_trip() {
    for seed in 0..200 {
        let module = random_module(seed, &GraphOptions::ALL);
        verify_module(&module).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{}", print_module(&module)));
        let text = print_module(&module);
        let again = parse_module(&text).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{text}"));
        assert_same(&module, &again);
        assert_eq!(print_module(&again), text, "seed {seed}");
    }
}

#[test]
fn the_generator_reaches_every_op() {
    let mut names = std::collections::BTreeSet::new();
    for seed in 0..200 {
        let module = random_module(seed, &GraphOptions::ALL);
        names.extend(module.functions.values().flat_map(|f| f.live_nodes()).map(|(_, n)| n.op.name()));
    }
    let all = "abs add call cast concat constant cos dequantize div erf exp gather group_quantize group_scale group_sum \
        layer_norm log matmul matmul_i8 max min mul neg param permute quantize_rows recip reduce_max reduce_sum reshape rms_norm rsqrt \
        scan select_ge sigmoid sin slice softmax sqrt state.read state.write sub tanh";
    assert_eq!(names.into_iter().collect::<Vec<_>>(), all.split_whitespace().collect::<Vec<_>>());
}

#[test]
fn dead_nodes_do_not_show() {
    let mut module = random_module(3, &GraphOptions::ALL);
    let id = module.function("main").unwrap().0;
    let f = &mut module.functions[id];
    f.body.pop();
    f.outputs = vec![f.inputs[1]];
    let text = print_module(&module);
    assert_eq!(print_module(&parse_module(&text).unwrap()), text);
}

/// Line and column, and the message, of the error in a text.
fn error(text: &str) -> String {
    parse_module(text).map(|_| ()).expect_err("the text must be refused").to_string()
}

fn in_function(line: &str) -> String {
    error(&format!("module @m {{\nfn @f(%x: f32[2]) -> (f32[2]) entry {{\n{line}\nret %x\n}}\n}}"))
}

#[test]
fn module_level_errors() {
    for (text, message) in [
        ("", "1:1: expected `module`, found the end of the text"),
        (
            "module @m {",
            "1:12: expected param, state, taps, fn, kernel, step or `}`, found the end of the text",
        ),
        ("module @m { } x", "1:15: expected the end of the text, found `x`"),
        ("module @m { param @w : q7[2] }", "1:24: unknown element type `q7`"),
        (
            "module @m { param @w : f32[2] role king = tensor(\"w\") }",
            "1:36: expected one of embedding, head, linear, low_rank, vector, found `king`",
        ),
        (
            "module @m { param @w : f32[2] role vector = sum(tensor(\"w\")) }",
            "1:45: expected tensor, scale, neg_exp, exp, transpose, concat, offset, rows, columns, column_range, unit_rows, values, adapter or ranks, found `sum`",
        ),
        (
            "module @m {\nstate @s : f32[2] init 0\nstate @s : f32[2] init 0 }",
            "3:1: state @s is declared twice",
        ),
        ("module @m { state @s : f32[2] init zero }", "1:36: expected the state's first value, found `zero`"),
        (
            "module @m {\nfn @f() -> () entry { ret }\nfn @f() -> () entry { ret } }",
            "3:1: function @f is defined twice",
        ),
    ] {
        assert_eq!(error(text), message);
    }
    let nested = format!("module @m {{ param @w : f32[2] role vector = {}", "neg_exp(".repeat(100_000));
    assert!(error(&nested).contains("nested deeper"), "{}", error(&nested));
}

#[test]
fn function_level_errors() {
    for (line, message) in [
        ("%y = exp %z : f32[2]", "3:10: %z is not defined before this use"),
        ("%x = exp %x : f32[2]", "3:1: %x is defined twice"),
        ("%y = twist %x : f32[2]", "3:6: there is no op twist"),
        ("%y = exp %x", "4:1: expected `:`, found `ret`"),
        ("%y, %z = exp %x : f32[2]", "3:1: 2 results but 1 types"),
        ("%y = exp %x {axis = 1} : f32[2]", "3:6: exp has no attribute axis"),
        ("%y = softmax %x, : f32[2]", "3:18: expected a value (`%name`), found `:`"),
        ("%y = permute %x : f32[2]", "3:6: permute lacks the attribute perm"),
        ("%y = permute %x {perm = [n]} : f32[2]", "3:6: permute: attribute perm is a list of counts"),
        ("%y = matmul %x {transpose_b = 1} : f32[2]", "3:6: matmul: attribute transpose_b is true or false"),
        ("%y = param @w : f32[2]", "3:12: parameter @w is not declared above"),
        ("%y = param : f32[2]", "3:6: param names a parameter"),
        ("state.write @s, %x", "3:13: state @s is not declared above"),
        ("%y = call %x {function = @g} : f32[2]", "3:26: the module has no function @g"),
        (
            "%y = exp %x : f32[k]",
            "3:19: unknown size `k`: expected a number, n, b, past, floordiv, min, max or mul",
        ),
    ] {
        assert_eq!(in_function(line), message, "{line}");
    }
    assert_eq!(
        error("module @m { fn @f(%x: f32[2]) -> (f32[3]) entry { ret %x } }"),
        "1:35: function @f returns (f32[2]), not what is written here"
    );
    assert_eq!(
        error("module @m { fn @f(%x: f32[2]) -> () main { ret } }"),
        "1:37: expected entry, body or group, found `main`"
    );
}

#[test]
fn sizes_and_operands_are_limited() {
    let message = in_function("%y = exp %x : f32[4294967296, 4294967296]");
    assert_eq!(message, "3:19: a tensor of more than 2^48 elements");
    let message = in_function("%y = reshape %x {dims = [16777216*n, 16777216, 2]} : f32[2]");
    assert_eq!(message, "3:26: a tensor of more than 2^48 elements");
    let message = in_function("%y = group_scale %x {group = 0} : f32[2]");
    assert_eq!(message, "3:6: group_scale: attribute group is a positive count");
    let message = in_function(&format!("%y = concat %x{} {{axis = 0}} : f32[2]", ", %x".repeat(2000)));
    assert!(message.ends_with("more than 1024 operands"), "{message}");
}

/// Damaged texts are refused or mean something else, but nothing panics on them.
#[test]
fn damaged_texts_do_not_panic() {
    let mut rng = TestRng(5);
    let (mut parsed, mut verified) = (0, 0);
    for seed in 0..30 {
        let text = print_module(&random_module(seed, &GraphOptions::ALL));
        let words: Vec<&str> = text.split_inclusive([' ', ',', '[', ']', '(', ')', '\n']).collect();
        for _ in 0..30 {
            let mut words = words.clone();
            let (at, from) = (rng.below(words.len()), rng.below(words.len()));
            match rng.below(3) {
                0 => {
                    words.remove(at);
                }
                1 => words[at] = words[from],
                _ => words.swap(at, from),
            }
            let Ok(module) = parse_module(&words.concat()) else { continue };
            parsed += 1;
            verified += usize::from(verify_module(&module).is_ok());
            print_module(&module);
        }
    }
    assert!(parsed > 50 && verified > 10, "{parsed} parsed, {verified} verified: the damage is too heavy");
}
