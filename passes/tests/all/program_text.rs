//! Programs as text: after every pass they read back as they were, the rest of the pipeline has the same
//! result, and damaged texts are errors, not panics.

use mlcc_ir::testing::TestRng;
use mlcc_ir::testing::graph::{GraphOptions, random_module};
use mlcc_kernels::params::KernelTarget;
use mlcc_passes::pipeline::PipelineControl;
use mlcc_passes::text::{parse_program, print_program};
use mlcc_passes::verify::verify_program;
use mlcc_passes::{
    ChunkWork, LoweredProgram, PIPELINE, PassContext, PassError, PassOptions, QuantScheme, run_pipeline,
};

fn context(target: &str, quant: &str) -> PassContext {
    let target = mlcc_target::resolve_target(target).unwrap();
    // One of the cases has the flag.
    let batch_invariant = quant == "f32";
    let level = |l: &mlcc_target::FeatureLevel| {
        (l.name.clone(), KernelTarget { batch_invariant, ..KernelTarget::new(target.arch, l) })
    };
    let mut options = PassOptions::new(target.levels.iter().map(level).collect(), 4);
    options.quant = QuantScheme::from_name(quant).unwrap().0;
    options.min_chunk_work = Some(ChunkWork { bytes: 8, dots: 8, flops: 8, times_of_cache: 64 });
    PassContext::new(options)
}

/// The texts after each pass; `None` where no kernel can do what the module needs.
fn texts(seed: u64, target: &str, quant: &str) -> Option<Vec<(&'static str, String)>> {
    let module = random_module(seed, &GraphOptions { nodes: 14, ..GraphOptions::SMOOTH });
    let mut program = LoweredProgram::new(module);
    let mut texts = Vec::new();
    let mut after = |pass: &mlcc_passes::Pass, program: &LoweredProgram, _: usize| {
        verify_program(program).unwrap_or_else(|e| panic!("seed {seed}, after {}: {e}", pass.name));
        texts.push((pass.name, print_program(program)));
    };
    let control = PipelineControl { after: Some(&mut after), ..PipelineControl::default() };
    match run_pipeline(&mut program, &mut context(target, quant), control) {
        Err(PassError::Unsupported { .. }) => None,
        result => {
            result.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            Some(texts)
        }
    }
}

const CASES: [(&str, &str); 3] = [("x86-64-v3,x86-64-v2", "q4i8"), ("armv8.0", "f32"), ("sm_80", "q8f16_1")];

#[test]
fn programs_read_back_after_every_pass() {
    for (target, quant) in CASES {
        let mut lowered = 0;
        for seed in 0..8 {
            for (pass, text) in texts(seed, target, quant).into_iter().flatten() {
                let what = format!("seed {seed}, {target}, after {pass}");
                let again = parse_program(&text).unwrap_or_else(|e| panic!("{what}: {e}\n{text}"));
                verify_program(&again).unwrap_or_else(|e| panic!("{what}: {e}\n{text}"));
                assert_eq!(again.after, Some(pass));
                assert!(print_program(&again) == text, "{what}: prints otherwise\n{text}");
                lowered += usize::from(!again.levels.is_empty());
            }
        }
        assert!(lowered >= 5, "{target}");
    }
}

#[test]
fn the_rest_of_the_pipeline_makes_the_same_of_a_text() {
    for (target, quant) in CASES {
        for seed in 0..2 {
            let Some(texts) = texts(seed, target, quant) else { continue };
            let (_, last) = texts.last().unwrap();
            for (pass, text) in &texts {
                let mut program = parse_program(text).unwrap();
                let control = PipelineControl { resume: true, ..PipelineControl::default() };
                run_pipeline(&mut program, &mut context(target, quant), control).unwrap();
                let text = print_program(&program);
                let differing = text.lines().zip(last.lines()).find(|(got, want)| got != want);
                assert!(text == *last, "seed {seed}, {target}, from {pass} on: {differing:#?}");
            }
        }
    }
}

#[test]
fn a_program_cannot_stop_where_it_has_been() {
    let text = "module @m {\n}\n\nprogram after dce {\n}\n";
    let mut program = parse_program(text).unwrap();
    assert_eq!(print_program(&program), text);
    let control =
        PipelineControl { resume: true, stop_after: Some("cse".into()), ..PipelineControl::default() };
    let error = run_pipeline(&mut program, &mut context("x86-64-v2", "f32"), control).unwrap_err();
    assert_eq!(error, PassError::Behind { name: "cse".into(), after: "dce" });
}

/// Words, numbers, names and marks of a text, with the space between them.
fn pieces(text: &str) -> Vec<String> {
    let mut pieces: Vec<String> = Vec::new();
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut before = ' ';
    for c in text.chars() {
        match pieces.last_mut() {
            Some(last) if word(c) && word(before) => last.push(c),
            _ => pieces.push(c.into()),
        }
        before = c;
    }
    pieces
}

#[test]
fn damaged_texts_are_errors_and_no_panics() {
    let mut refused = 0;
    for (target, quant) in CASES {
        let Some(texts) = (0..8).find_map(|seed| texts(seed, target, quant)) else { panic!("{target}") };
        let behind = PIPELINE.iter().position(|p| p.name == "lower").unwrap();
        for (_, text) in &texts[behind..] {
            let whole = pieces(text);
            for seed in 0..60 {
                let mut rng = TestRng(seed + 1);
                let mut damaged = whole.clone();
                for _ in 0..1 + rng.below(3) {
                    let at = rng.below(damaged.len());
                    let other = damaged[rng.below(damaged.len())].clone();
                    match rng.below(4) {
                        0 => drop(damaged.remove(at)),
                        1 => damaged.insert(at, other),
                        2 => damaged[at] = other,
                        _ => damaged[at] = ["0", "18446744073709551615", "n", "}", "1", "-"][at % 6].into(),
                    }
                }
                let damaged = damaged.concat();
                let bad = match parse_program(&damaged) {
                    Ok(program) => verify_program(&program).is_err(),
                    Err(error) => error.line > 0,
                };
                refused += usize::from(bad && damaged != *text);
            }
        }
    }
    assert!(refused > 200, "{refused}");
}

fn error(from: &str, to: &str) -> String {
    let found = (0..8).find_map(|seed| texts(seed, "x86-64-v2", "f32")).unwrap();
    let text = &found.last().unwrap().1;
    let damaged = text.replacen(from, to, 1);
    assert_ne!(*text, damaged, "`{from}` is not in the text:\n{text}");
    match parse_program(&damaged) {
        Err(error) => error.message,
        Ok(program) => verify_program(&program).unwrap_err().message,
    }
}

#[test]
fn mistakes_are_told() {
    for (from, to, message) in [
        ("program after", "program before", "expected `{`, found `before`"),
        ("after plan_barriers", "after lunch", "unknown pass `lunch`"),
        ("arch x86_64", "arch z80", "expected one of x86_64, aarch64, nvptx, found `z80`"),
        (" bits 128", " bits 1", "vectors of 1 bits"),
        ("    entry @", "    entry @x ", "expected `{`"),
        ("      launch @", "      lunch @", "expected a buffer, launch, exchange, update or `}`"),
        ("memory chunk", "memory lunch", "expected `chunk`, found `lunch`"),
        ("      %1 = ", "      %7 = ", "expected buffer %1, found %7"),
        (" at 0 bytes ", " at 64000000 bytes ", "expected a multiple of 64 from 0 on"),
        ("      launch @", "      launch @x", "the level has no kernel @x"),
    ] {
        let found = error(from, to);
        assert!(found.contains(message), "{from} -> {to}: {found}");
    }
}
