//! `mlcc interp`: the meaning of a function, a kernel or a whole model, by interpretation.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use mlcc_files::did_you_mean;
use mlcc_interp::equivalence::random_tensor;
use mlcc_interp::graph::{Interpreter, StateValues, Tensor, param_value};
use mlcc_interp::kernel::{ExecutionOptions, KernelBuffer, run_with};
use mlcc_ir::dim::SymValues;
use mlcc_ir::graph::Function;
use mlcc_ir::kernel::{Kernel, ParamAccess};
use mlcc_ir::module::Module;
use mlcc_ir::types::DType;
use serde_json::{Value, json};

use crate::commands::opt::read_program;
use crate::commands::{print, print_json};
use crate::error::CliError;
use crate::ui::Ui;

mod golden;

/// Most tokens of a call, as for `--chunk` of a build.
const MOST_ROWS: i64 = 65536;
/// Most tokens before a call.
const MOST_PAST: i64 = i32::MAX as i64;
/// Most elements of all values together; each takes 8 bytes.
const MOST_ELEMENTS: i64 = 1 << 28;

#[derive(Debug, clap::Args)]
#[command(
    after_help = "A module: mlcc interp file.mlc NAME [ARGUMENT ...] runs the function or kernel @NAME; arguments \
    are lists such as 1,2.5,3, `random SEED`, or `out` for memory that a kernel writes. Missing ones are random (out for \
    outputs of kernels), parameters of the module are random.\nA model: mlcc interp --model DIR --golden FILE replays \
    reference results, through the graph as the model defines it, or with --target through the kernels of a target. \
    DIR may be a module in text form: --weights says where its weights are, and the steps of a lowered module run as \
    written."
)]
pub struct InterpArgs {
    /// A module in text form; `-` is standard input
    #[arg(required_unless_present = "model")]
    file: Option<PathBuf>,
    /// Function or kernel [default: the first function, else the first kernel]
    name: Option<String>,
    /// Values of the inputs in order
    #[arg(allow_hyphen_values = true)]
    arguments: Vec<String>,
    /// Value of the size n
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(i64).range(1..=MOST_ROWS))]
    n: i64,
    /// Value of the size b
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(i64).range(1..=MOST_ROWS))]
    b: i64,
    /// Value of the size past
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(i64).range(0..=MOST_PAST))]
    past: i64,
    /// CPU workers that share a kernel
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    workers: u16,
    /// Seed of random values
    #[arg(short, long, default_value_t = 1)]
    seed: u64,
    /// Print all elements, not only the first 16
    #[arg(long)]
    full: bool,
    #[command(flatten)]
    golden: golden::GoldenArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &InterpArgs, ui: &Ui) -> Result<(), CliError> {
    let Some(file) = &args.file else {
        return golden::run(&args.golden, usize::from(args.workers), args.json, ui);
    };
    let mut program = read_program(file)?;
    if let Some(first) = program.levels.first() {
        program.module.kernels = first.lowered.kernels.clone();
    }
    let module = program.module;
    let syms = SymValues { n: args.n, b: args.b, past: args.past };
    let name = match &args.name {
        Some(name) => name.trim_start_matches('@').to_string(),
        None => first_name(&module, file)?,
    };
    check_sizes(&module, &syms).map_err(|e| CliError::Failed(format!("{}: {e}", file.display())))?;
    let results = match (module.function(&name), module.kernel(&name)) {
        (Some((_, f)), _) => run_function(&module, f, args, &syms),
        (None, Some(kernel)) => run_kernel(kernel, args, &syms),
        (None, None) => Err(unknown_name(&name, &module)),
    };
    let results = results.map_err(|e| CliError::Failed(format!("{}: {e}", file.display())))?;
    if args.json {
        let rows = results.iter().map(|(name, t)| (name.clone(), tensor_json(t)));
        return print_json(&rows.collect::<serde_json::Map<_, _>>());
    }
    print(&results.iter().map(|(name, t)| tensor_text(name, t, args.full)).collect::<String>())
}

/// All values have to fit into memory.
fn check_sizes(module: &Module, syms: &SymValues) -> Result<(), String> {
    let functions = module.functions.values().flat_map(|f| f.values.values().map(|v| &v.ty));
    let types = functions.chain(module.params.values().map(|p| &p.ty));
    let types = types.chain(module.states.values().map(|s| &s.ty)).map(|ty| ty.dims.as_slice());
    let buffers = module.kernels.iter().flat_map(|k| k.bufs.values().map(|b| std::slice::from_ref(&b.len)));
    let mut most = Some(0i64);
    for dims in types.chain(buffers) {
        let elements = dims.iter().try_fold(1i64, |all, dim| all.checked_mul(dim.checked_eval(syms)?.max(0)));
        most = most.zip(elements).and_then(|(most, elements)| most.checked_add(elements));
    }
    match most {
        Some(0..=MOST_ELEMENTS) => Ok(()),
        _ => Err(format!(
            "with n = {}, b = {} and past = {} its values have more than {MOST_ELEMENTS} elements in total, the \
             maximum of the interpreter: give smaller sizes",
            syms.n, syms.b, syms.past
        )),
    }
}

fn first_name(module: &Module, file: &Path) -> Result<String, CliError> {
    let function = module.functions.values().next().map(|f| f.name.clone());
    function
        .or_else(|| module.kernels.first().map(|k| k.name.clone()))
        .ok_or_else(|| CliError::Failed(format!("{}: there is nothing to run in it", file.display())))
}

fn unknown_name(name: &str, module: &Module) -> String {
    let functions = module.functions.values().map(|f| f.name.as_str());
    let all = functions.chain(module.kernels.iter().map(|k| k.name.as_str()));
    let near = did_you_mean(name, all);
    format!("there is no function or kernel @{name}: {near}`mlcc opt` prints the module with all")
}

/// One argument of the command line.
enum InterpArgument {
    Values(Vec<f64>),
    Random(u64),
    Out,
}

fn argument(text: &str) -> Result<InterpArgument, String> {
    let text = text.trim();
    if text == "out" {
        return Ok(InterpArgument::Out);
    }
    if let Some(seed) = text.strip_prefix("random") {
        let seed = seed.trim().parse().map_err(|_| format!("`{text}`: expected `random` and a number"));
        return seed.map(InterpArgument::Random);
    }
    let list = text.trim_start_matches('[').trim_end_matches(']');
    let number =
        |x: &str| x.trim().parse::<f64>().map_err(|_| format!("`{x}` in an argument is not a number"));
    list.split(',')
        .filter(|x| !x.trim().is_empty())
        .map(number)
        .collect::<Result<_, _>>()
        .map(InterpArgument::Values)
}

fn run_function(
    module: &Module,
    f: &Function,
    args: &InterpArgs,
    syms: &SymValues,
) -> Result<Vec<(String, Tensor)>, String> {
    let mut inputs = Vec::new();
    for (i, &v) in f.inputs.iter().enumerate() {
        let ty = f.ty(v);
        let dims: Vec<usize> = ty.dims.iter().map(|d| d.eval(syms).max(0) as usize).collect();
        let given = args.arguments.get(i).map(|a| argument(a)).transpose()?;
        inputs.push(match given.unwrap_or(InterpArgument::Random(args.seed.wrapping_add(i as u64))) {
            InterpArgument::Values(values) => {
                tensor(ty.dtype, &dims, values).map_err(|e| format!("input {i}: {e}"))?
            }
            InterpArgument::Random(seed) => random_tensor(ty.dtype, &dims, seed),
            InterpArgument::Out => return Err(format!("input {i}: `out` is for kernels")),
        });
    }
    let mut params = Vec::new();
    for (i, param) in module.params.values().enumerate() {
        let seed = args.seed.wrapping_add(1000 + i as u64);
        let dims: Vec<usize> = param.ty.dims.iter().map(|d| d.eval(syms).max(0) as usize).collect();
        let mut plain = param.clone();
        if !matches!(param.source, mlcc_ir::module::ParamSource::Values(_)) {
            plain.source = mlcc_ir::module::ParamSource::Tensor(param.name.clone());
        }
        let value = param_value(&plain, &|_| Some(random_tensor(DType::F32, &dims, seed)));
        params.push(value.map_err(|e| e.to_string())?);
    }
    let interpreter = Interpreter::new(module, |id| params[id.0 as usize].clone());
    let mut states = StateValues::new(module).map_err(|e| e.to_string())?;
    let outputs = interpreter.run_named(&f.name, &inputs, &mut states, *syms).map_err(|e| e.to_string())?;
    let mut results: Vec<(String, Tensor)> =
        outputs.into_iter().enumerate().map(|(i, t)| (format!("output {i}"), t)).collect();
    for (id, state) in module.states.iter() {
        if let Some(value) = states.get(id) {
            results.push((format!("state @{}", state.name), value.clone()));
        }
    }
    Ok(results)
}

fn tensor(dtype: DType, dims: &[usize], values: Vec<f64>) -> Result<Tensor, String> {
    let expected: usize = dims.iter().product();
    match values.len() == expected {
        true => Ok(Tensor::new(dtype, dims, values)),
        false => Err(format!("{dtype}{dims:?} has {expected} elements, {} given", values.len())),
    }
}

fn run_kernel(kernel: &Kernel, args: &InterpArgs, syms: &SymValues) -> Result<Vec<(String, Tensor)>, String> {
    let mut buffers = Vec::new();
    for (i, &id) in kernel.params.iter().enumerate() {
        let decl = &kernel.bufs[id];
        let len = decl.len.eval(syms).max(0) as usize;
        let default = if decl.access == ParamAccess::Out {
            InterpArgument::Out
        } else {
            InterpArgument::Random(args.seed.wrapping_add(i as u64))
        };
        let given = args.arguments.get(i).map(|a| argument(a)).transpose()?.unwrap_or(default);
        let values = match given {
            InterpArgument::Values(values) => values,
            InterpArgument::Random(seed) => random_tensor(decl.dtype, &[len], seed).data,
            InterpArgument::Out => vec![0.0; len],
        };
        if values.len() != len {
            return Err(format!("buffer %{} has {len} elements, {} given", decl.name, values.len()));
        }
        buffers.push(buffer(decl.dtype, &values));
    }
    run_with(kernel, &mut buffers, syms, &ExecutionOptions::with_workers(usize::from(args.workers)))
        .map_err(|e| e.to_string())?;
    let written =
        kernel.params.iter().zip(&buffers).filter(|(id, _)| kernel.bufs[**id].access != ParamAccess::In);
    Ok(written.map(|(id, b)| (format!("%{}", kernel.bufs[*id].name), buffer_tensor(b))).collect())
}

fn buffer(dtype: DType, values: &[f64]) -> KernelBuffer {
    match dtype.is_float() {
        true => KernelBuffer::from_floats(dtype, &values.iter().map(|&v| v as f32).collect::<Vec<_>>()),
        false => KernelBuffer::from_ints(dtype, &values.iter().map(|&v| v as i64).collect::<Vec<_>>()),
    }
}

fn buffer_tensor(buffer: &KernelBuffer) -> Tensor {
    let data = match buffer.dtype.is_float() {
        true => buffer.to_f32().into_iter().map(f64::from).collect(),
        false => buffer.to_i64().into_iter().map(|v| v as f64).collect(),
    };
    Tensor { dtype: buffer.dtype, dims: vec![buffer.len()], data }
}

fn tensor_json(t: &Tensor) -> Value {
    json!({ "dtype": t.dtype.name(), "dims": t.dims, "data": t.data })
}

fn tensor_text(name: &str, t: &Tensor, full: bool) -> String {
    const FEW: usize = 16;
    let shown = if full { t.data.len() } else { t.data.len().min(FEW) };
    let mut out = format!("{name}: {} = [", t.describe());
    for (i, v) in t.data[..shown].iter().enumerate() {
        let _ = write!(out, "{}{v}", if i > 0 { ", " } else { "" });
    }
    if shown < t.data.len() {
        let _ = write!(out, ", ... {} more", t.data.len() - shown);
    }
    out.push_str("]\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments() {
        assert!(matches!(argument("[1, -2.5]"), Ok(InterpArgument::Values(v)) if v == [1.0, -2.5]));
        assert!(matches!(argument("1"), Ok(InterpArgument::Values(v)) if v == [1.0]));
        assert!(matches!(argument("random 7"), Ok(InterpArgument::Random(7))));
        assert!(matches!(argument("out"), Ok(InterpArgument::Out)));
        assert!(argument("random").is_err() && argument("1,x").is_err());
    }
}
