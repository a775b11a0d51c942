//! Tests of kind `codegen`: the instructions in the assembly of a module.
//!
//! A line `// find vpdpbusd zmm` asks for a line of the assembly that holds both words in this order. The
//! result says, line by line, how it is: `vpdpbusd zmm: found`, or `none`. Numbers and order of instructions
//! are left to LLVM.

use super::FileTest;
use mlcc_codegen::llvm::EmitFormat;
use mlcc_codegen::table::{ModelPlan, TableDesc};
use mlcc_codegen::{CodegenInput, LevelInput, emit};
use mlcc_passes::LoweredProgram;

/// The result of each `find` line.
pub fn find_in_assembly(test: &FileTest, program: &LoweredProgram, target: &str) -> Result<String, String> {
    let wanted = test.directive_values("find");
    if wanted.is_empty() {
        return Err("the test has no `// find WORDS` line".into());
    }
    let assembly = compile_to_assembly(program, target)?;
    let outcome = |words: &String| {
        let found = assembly.lines().any(|line| contains_in_order(line, words));
        format!("{words}: {}\n", if found { "found" } else { "none" })
    };
    Ok(wanted.iter().map(outcome).collect())
}

/// All words are in the line, in order.
fn contains_in_order(line: &str, words: &str) -> bool {
    let mut rest = line;
    words.split_whitespace().all(|word| match rest.find(word) {
        Some(at) => {
            rest = &rest[at + word.len()..];
            true
        }
        None => false,
    })
}

/// The text of all levels.
fn compile_to_assembly(program: &LoweredProgram, target: &str) -> Result<String, String> {
    let target = mlcc_target::resolve_target(target).map_err(|e| e.to_string())?;
    let memory = program.memory.as_ref().ok_or("memory is not planned")?;
    let levels = target.levels.iter().zip(&program.levels);
    let levels =
        levels.map(|(level, code)| LevelInput { level, kernels: &code.lowered.kernels, steps: &code.steps });
    let plan = ModelPlan {
        weights_bytes: memory.weights_bytes,
        arena_bytes: memory.arena_bytes(),
        state_bytes: memory.state_bytes,
        chunk: 16,
        batch: 1,
        vocab: 1,
        ..ModelPlan::default()
    };
    let table = TableDesc { plan, ..TableDesc::default() };
    let input = CodegenInput { target: &target, levels: levels.collect(), assembler: None, table };
    let parts = emit(&input, EmitFormat::Assembly).map_err(|e| e.to_string())?;
    let code = parts.iter().filter(|p| p.name != "table").map(|p| String::from_utf8_lossy(&p.bytes));
    Ok(code.collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::contains_in_order;

    #[test]
    fn words_stand_in_order() {
        let line = "\tvpdpbusd\t(%rax){1to16}, %zmm1, %zmm0";
        assert!(contains_in_order(line, "vpdpbusd 1to16 %zmm0"));
        assert!(
            !contains_in_order(line, "%zmm0 vpdpbusd")
                && !contains_in_order(line, "%zmm0 %zmm1")
                && !contains_in_order(line, "vpdpbusds")
        );
    }
}
