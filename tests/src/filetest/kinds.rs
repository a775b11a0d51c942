//! The work of each kind of filetest on its module.

use super::outline::outline;
use super::run::{CallArgument, FileTestCall, parse_call, parse_param};
use super::{FileTest, FileTestKind};
use mlcc_interp::compare::Tolerance;
use mlcc_interp::equivalence::{random_tensor, same_meaning, same_on_ranks};
use mlcc_interp::graph::{EvaluationMode, Interpreter, StateValues, Tensor};
use mlcc_interp::kernel::{KernelBuffer, run_with};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::{Kernel, ParamAccess};
use mlcc_ir::module::Module;
use mlcc_ir::text::{parse_module, print_kernel, print_module};
use mlcc_ir::types::{DType, TensorType};
use mlcc_ir::verify::verify_module;
use mlcc_kernels::params::KernelTarget;
use mlcc_passes::pipeline::{PipelineControl, find_pass};
use mlcc_passes::{CacheType, LoweredProgram, PassContext, QuantScheme, run_pass, run_pipeline};

/// The result as text. `Err` is for tests that cannot be carried out; errors that a test may expect are
/// results.
pub fn run(test: &FileTest) -> Result<String, String> {
    let module = match parse_module(&test.source) {
        Ok(module) => module,
        Err(error) => return Ok(format!("error: {error}\n")),
    };
    if test.kind == FileTestKind::Parse {
        return Ok(reprint(test, &module));
    }
    let verified = verify_module(&module);
    if test.kind == FileTestKind::Verify {
        return Ok(verified.map_or_else(|e| format!("error: {e}\n"), |()| "ok\n".into()));
    }
    verified.map_err(|e| format!("the module is not well formed: {e}"))?;
    match &test.kind {
        FileTestKind::Parse | FileTestKind::Verify => unreachable!("handled above"),
        FileTestKind::Pass(names) => run_passes(module, names, &FileTestOptions::parse(test)?),
        FileTestKind::Lower(target) => lower_module(module, target, &FileTestOptions::parse(test)?),
        #[cfg(feature = "llvm")]
        FileTestKind::Codegen(target) => {
            let options = FileTestOptions::parse(test)?;
            let compiled = compile(module, target, None, &options)?;
            compiled
                .and_then(|(p, _)| super::codegen::find_in_assembly(test, &p, target))
                .or_else(|e| Ok(format!("error: {e}\n")))
        }
        #[cfg(not(feature = "llvm"))]
        FileTestKind::Codegen(_) => Err("built without the feature `llvm19`".into()),
        FileTestKind::Interp => interp(test, &module),
        FileTestKind::InterpKernel => interp_kernel(test, &module),
    }
}

/// The module as printed, or `canonical` if the file is written that way.
fn reprint(test: &FileTest, module: &Module) -> String {
    let printed = print_module(module);
    let is_comment = |line: &&str| line.trim_start().starts_with("//");
    let source: Vec<&str> = test.source.lines().filter(|l| !is_comment(l)).collect();
    match source.iter().copied().eq(printed.lines()) {
        true => "canonical\n".into(),
        false => printed,
    }
}

/// `option` lines of tests that run passes.
struct FileTestOptions {
    /// `option quant q8i8`: the quantization scheme.
    quant: QuantScheme,
    /// `option kv_cache f16`: the storage type of caches.
    kv_cache: CacheType,
    /// `option disable fuse`: an optional pass before `lower` that does not run.
    disabled: Vec<String>,
    /// `option tolerance 0.1`: how far results may be off afterwards, relative to the largest; for passes
    /// that quantize.
    tolerance: f64,
    /// `option explain`: the notes of the passes follow the module.
    explain: bool,
    /// `option outline`: kernels as [`outline`] shows them.
    outline: bool,
    /// `option target sm_90`: the level that graph passes are for; none without it.
    levels: Vec<(String, KernelTarget)>,
    /// `option ranks 2`: among how many ranks `shard` splits the module.
    ranks: usize,
}

impl FileTestOptions {
    fn parse(test: &FileTest) -> Result<FileTestOptions, String> {
        let mut options = FileTestOptions {
            quant: QuantScheme::default(),
            kv_cache: CacheType::default(),
            disabled: vec![],
            tolerance: 1e-5,
            explain: false,
            outline: false,
            levels: vec![],
            ranks: 1,
        };
        for line in test.directive_values("option") {
            let (key, value) = line.split_once(' ').unwrap_or((&line, ""));
            match (key, value.trim()) {
                ("quant", name) => options.quant = QuantScheme::from_name(name).map_err(|e| e.to_string())?.0,
                ("kv_cache", name) => {
                    let found = CacheType::from_name(name);
                    options.kv_cache = found.ok_or_else(|| format!("{name} is no type of caches"))?;
                }
                ("disable", name) => {
                    find_pass(name).map_err(|e| e.to_string())?;
                    options.disabled.push(name.into());
                }
                ("tolerance", v) => {
                    options.tolerance = v.parse().map_err(|_| format!("tolerance {v} is not a number"))?;
                }
                ("ranks", n) => {
                    options.ranks = n.parse().map_err(|_| format!("{n} is no number of ranks"))?
                }
                ("target", name) => options.levels = parse_levels(name)?,
                ("explain", "") => options.explain = true,
                ("outline", "") => options.outline = true,
                _ => {
                    return Err(format!(
                        "`option {line}`: expected quant, kv_cache, disable, tolerance, target, ranks, explain or outline"
                    ));
                }
            }
        }
        Ok(options)
    }
    fn context(&self, levels: Vec<(String, KernelTarget)>) -> PassContext {
        let (quant, kv_cache, ranks) = (self.quant, self.kv_cache, self.ranks);
        let options = mlcc_passes::PassOptions::new(levels, 16);
        PassContext::new(mlcc_passes::PassOptions { quant, kv_cache, ranks, ..options })
    }
    fn notes(&self, ctx: &PassContext, out: &mut String) {
        if self.explain {
            ctx.notes.iter().for_each(|(pass, note)| out.push_str(&format!("{pass}: {note}\n")));
        }
    }
}

/// Runs passes in order; the module verifies and keeps its meaning.
fn run_passes(module: Module, names: &[String], options: &FileTestOptions) -> Result<String, String> {
    let mut program = LoweredProgram::new(module.clone());
    let mut ctx = options.context(options.levels.clone());
    for name in names {
        find_pass(name).map_err(|e| e.to_string())?;
        if let Err(error) = run_pass(name, &mut program, &mut ctx) {
            return Ok(format!("error: {error}\n"));
        }
        let broken = |what: String| format!("after {name}: {what}\n{}", print_module(&program.module));
        verify_module(&program.module).map_err(|e| broken(e.to_string()))?;
        let same = match program.module.rank_count() {
            1 => same_meaning(&module, &program.module, 1, Tolerance::relative(options.tolerance)),
            _ => same_on_ranks(&module, &program.module, 1),
        };
        same.map_err(|e| broken(e.to_string()))?;
    }
    let mut out = print_module(&program.module);
    options.notes(&ctx, &mut out);
    Ok(out)
}

/// The kernels of the module for a target, after all passes up to `lower`.
fn lower_module(module: Module, target: &str, options: &FileTestOptions) -> Result<String, String> {
    let (program, ctx) = match compile(module, target, Some("lower"), options)? {
        Ok(compiled) => compiled,
        Err(error) => return Ok(format!("error: {error}\n")),
    };
    let kernels = program.levels.iter().flat_map(|level| &level.lowered.kernels);
    let mut out = kernels.map(print_kernel).collect::<Vec<_>>().join("\n");
    if options.outline {
        out = outline(&out);
    }
    options.notes(&ctx, &mut out);
    Ok(out)
}

fn parse_levels(target: &str) -> Result<Vec<(String, KernelTarget)>, String> {
    let target = mlcc_target::resolve_target(target).map_err(|e| e.to_string())?;
    let level = |level: &_| KernelTarget::new(target.arch, level);
    Ok(target.levels.iter().map(|l| (l.name.clone(), level(l))).collect())
}

/// The passes up to `stop_after`, or all of them. The inner error is the program's, which a test may expect.
fn compile(
    module: Module,
    target: &str,
    stop_after: Option<&str>,
    options: &FileTestOptions,
) -> Result<Result<(LoweredProgram, PassContext), String>, String> {
    let mut program = LoweredProgram::new(module);
    let mut ctx = options.context(parse_levels(target)?);
    let control = PipelineControl {
        disabled: options.disabled.clone(),
        stop_after: stop_after.map(String::from),
        verify: true,
        ..PipelineControl::default()
    };
    let result = run_pipeline(&mut program, &mut ctx, control).map_err(|e| e.to_string());
    Ok(result.map(|()| (program, ctx)))
}

fn parse_calls(test: &FileTest) -> Result<Vec<FileTestCall>, String> {
    let calls =
        test.directive_values("run").iter().map(|line| parse_call(line)).collect::<Result<Vec<_>, _>>()?;
    if calls.is_empty() {
        return Err("the test has no `// run @name: arguments` line".into());
    }
    Ok(calls)
}

/// Runs functions in order with the states that they leave.
fn interp(test: &FileTest, module: &Module) -> Result<String, String> {
    let params = param_values(test, module)?;
    let calls = parse_calls(test)?;
    let results = [EvaluationMode::Fast, EvaluationMode::Plain].map(|mode| {
        let interpreter = Interpreter::new(module, |id| params[id.0 as usize].clone()).with_mode(mode);
        interp_calls(&interpreter, module, &calls)
    });
    let [fast, plain] = results;
    let (fast, plain) = (fast?, plain?);
    if fast != plain {
        return Err(format!("fast and plain evaluation differ:\n{fast}\n{plain}"));
    }
    Ok(fast)
}

fn interp_calls(
    interpreter: &Interpreter,
    module: &Module,
    calls: &[FileTestCall],
) -> Result<String, String> {
    let mut states = match StateValues::new(module) {
        Ok(states) => states,
        Err(error) => return Ok(format!("error: {error}\n")),
    };
    let mut out = String::new();
    for call in calls {
        let (_, f) = module.function(&call.name).ok_or_else(|| format!("no function @{}", call.name))?;
        let types: Vec<&TensorType> = f.inputs.iter().map(|&v| f.ty(v)).collect();
        if types.len() != call.arguments.len() {
            return Err(format!("@{} takes {} arguments", call.name, types.len()));
        }
        let inputs = types
            .iter()
            .zip(&call.arguments)
            .map(|(ty, argument)| tensor(ty, argument, &call.syms))
            .collect::<Result<Vec<_>, _>>()?;
        match interpreter.run_named(&call.name, &inputs, &mut states, call.syms) {
            Ok(outputs) => {
                for tensor in outputs {
                    out.push_str(&format!("@{} {}\n", call.name, format_tensor(&tensor)));
                }
            }
            Err(error) => out.push_str(&format!("@{} error: {error}\n", call.name)),
        }
    }
    for (id, state) in module.states.iter() {
        if let Some(tensor) = states.get(id) {
            out.push_str(&format!("state @{} {}\n", state.name, format_tensor(tensor)));
        }
    }
    Ok(out)
}

/// Given values, else random ones.
fn param_values(test: &FileTest, module: &Module) -> Result<Vec<Tensor>, String> {
    let mut given =
        test.directive_values("param").iter().map(|l| parse_param(l)).collect::<Result<Vec<_>, _>>()?;
    let mut values = Vec::new();
    for (id, param) in module.params.iter() {
        let argument = match given.iter().position(|(name, _)| *name == param.name) {
            Some(at) => given.swap_remove(at).1,
            None => CallArgument::Random(u64::from(id.0)),
        };
        values.push(tensor(&param.ty, &argument, &SymValues::for_tokens(1))?);
    }
    match given.first() {
        Some((name, _)) => Err(format!("the module has no parameter @{name}")),
        None => Ok(values),
    }
}

/// An argument of a type. Wrong lengths become tensors of that length, so that tests can see them refused.
fn tensor(ty: &TensorType, argument: &CallArgument, syms: &SymValues) -> Result<Tensor, String> {
    let dims: Vec<usize> = ty.dims.iter().map(|d| d.eval(syms).max(0) as usize).collect();
    match argument {
        CallArgument::Values(values) if values.len() == dims.iter().product::<usize>() => {
            Ok(Tensor::new(ty.dtype, &dims, values.clone()))
        }
        CallArgument::Values(values) => Ok(Tensor::new(ty.dtype, &[values.len()], values.clone())),
        CallArgument::Random(seed) => Ok(random_tensor(ty.dtype, &dims, *seed)),
        CallArgument::Out => Err("`out` is for kernels".into()),
    }
}

fn format_tensor(tensor: &Tensor) -> String {
    let elements: Vec<String> = tensor.data.iter().map(|&v| format_number(tensor.dtype, v)).collect();
    let dims: Vec<String> = tensor.dims.iter().map(usize::to_string).collect();
    format!("{}[{}] [{}]", tensor.dtype, dims.join(", "), elements.join(", "))
}

fn format_number(dtype: DType, v: f64) -> String {
    if dtype.is_int() || dtype == DType::Bool { format!("{v}") } else { format!("{:?}", v as f32) }
}

fn interp_kernel(test: &FileTest, module: &Module) -> Result<String, String> {
    let mut out = String::new();
    for call in parse_calls(test)? {
        let kernel = module.kernel(&call.name).ok_or_else(|| format!("no kernel @{}", call.name))?;
        if call.arguments.len() != kernel.params.len() {
            return Err(format!("@{} takes {} buffers", call.name, kernel.params.len()));
        }
        let mut buffers: Vec<KernelBuffer> =
            (0..kernel.params.len()).map(|i| buffer(kernel, i, &call.arguments[i], &call.syms)).collect();
        match run_with(
            kernel,
            &mut buffers,
            &call.syms,
            &mlcc_interp::kernel::ExecutionOptions::with_workers(call.workers),
        ) {
            Ok(()) => format_written(kernel, &buffers, &mut out),
            Err(error) => out.push_str(&format!("@{} error: {error}\n", kernel.name)),
        }
    }
    Ok(out)
}

fn buffer(kernel: &Kernel, i: usize, argument: &CallArgument, syms: &SymValues) -> KernelBuffer {
    let decl = &kernel.bufs[kernel.params[i]];
    let len = decl.len.eval(syms).max(0) as usize;
    match argument {
        CallArgument::Out => KernelBuffer::zeros(decl.dtype, len),
        CallArgument::Random(seed) => {
            let values = random_tensor(decl.dtype, &[len], *seed).to_f32();
            KernelBuffer::from_floats(decl.dtype, &values)
        }
        CallArgument::Values(values) => {
            let values: Vec<f32> = values.iter().map(|&v| v as f32).collect();
            KernelBuffer::from_floats(decl.dtype, &values)
        }
    }
}

fn format_written(kernel: &Kernel, buffers: &[KernelBuffer], out: &mut String) {
    for (id, buffer) in kernel.params.iter().zip(buffers) {
        let decl = &kernel.bufs[*id];
        if decl.access == ParamAccess::In {
            continue;
        }
        let elements: Vec<String> = match decl.dtype.is_int() {
            true => buffer.to_i64().iter().map(i64::to_string).collect(),
            false => buffer.to_f32().iter().map(|v| format!("{v:?}")).collect(),
        };
        out.push_str(&format!("@{} %{} {} [{}]\n", kernel.name, decl.name, decl.dtype, elements.join(", ")));
    }
}
