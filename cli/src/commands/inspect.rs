//! `mlcc inspect`.

use std::path::PathBuf;

use crate::commands::{drawing, print, print_json, resources};
use crate::error::CliError;
use crate::ui::{self, Ui};
use mlcc_abi::section;
use mlcc_driver::compile::QualityReport;
use mlcc_driver::compile::graph::from_section;
use mlcc_driver::compile::keep::scheme_name;
use mlcc_files::did_you_mean;
use mlcc_ir::module::Module;
use mlcc_runtime::Artifact;
use mlcc_target::LevelTuning;
use serde_json::{Value, json};

#[derive(Debug, clap::Args)]
pub struct InspectArgs {
    /// A compiled model, or what one is built of first: a preset name, hf:org/repo, a folder, a GGUF file, or
    /// an address of one (docs/from-a-name.md)
    artifact: PathBuf,
    /// Weight format if a checkpoint is compiled [default: one for this machine: q4i8 on CPUs, q4f16 on GPUs,
    /// q8i8 for models of texts; as stored if small or quantized]
    #[arg(long, value_name = "NAME")]
    quant: Option<String>,
    /// List every parameter with format, packing, shape and size (loads the code)
    #[arg(long)]
    params: bool,
    /// Print the metadata as it is stored
    #[arg(long)]
    metadata: bool,
    /// Print the machine code of the kernels of this name, of all CPU levels (`all` for every function);
    /// needs objdump
    #[arg(long, value_name = "KERNEL", conflicts_with = "json")]
    asm: Option<String>,
    /// Draw the graph that the kernels were made from, with the ops fused into each, as .dot or .svg (needs
    /// Graphviz)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "asm", "metadata"])]
    graph: Option<PathBuf>,
    #[command(flatten)]
    resources: resources::ResourceArgs,
    /// Check the hash of every section, the weights included
    #[arg(long)]
    hashes: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &InspectArgs, ui: &Ui) -> Result<(), CliError> {
    let path = super::checkpoint::artifact_for(&args.artifact, args.quant.as_deref(), ui)?;
    let artifact = Artifact::open(&path)?;
    if args.hashes {
        artifact.verify(u64::MAX)?;
        if args.metadata || args.asm.is_some() || args.graph.is_some() || args.resources.resources {
            // These print one thing only.
            ui.note("the hashes of all sections were checked and are right");
        }
    }
    if args.resources.resources {
        return resources::run(artifact.path(), &args.resources, args.json);
    }
    if let Some(kernel) = &args.asm {
        return print(&assembly(&artifact, kernel)?);
    }
    if let Some(path) = &args.graph {
        return drawing::write_drawing(&graph(&artifact)?, path);
    }
    let json_of = |text: Option<&str>| text.and_then(|t| serde_json::from_str(t).ok()).unwrap_or(Value::Null);
    let mut metadata: Value = json_of(artifact.metadata());
    let report: Value =
        json_of(artifact.section(section::REPORT).and_then(|bytes| std::str::from_utf8(bytes).ok()));
    if let Some(object) = metadata.as_object_mut().filter(|_| !report.is_null()) {
        object.insert("report".into(), report);
    }
    if args.metadata {
        return print_json(&metadata);
    }
    let params = if args.params { params(&artifact)? } else { Value::Null };
    let sections: Vec<Value> = artifact
        .sections()
        .iter()
        .map(|s| json!({ "name": s.name, "offset": s.offset, "bytes": s.bytes, "xxh3_128": hash(&artifact, &s.name) }))
        .collect();
    let whole = json!({
        "path": artifact.path(),
        "machine": artifact.machine_name(),
        "weights_file": artifact.weights_file(),
        "weights_on_load": artifact.weight_generator().map(|recipe| json!({
            "seed": recipe.seed,
            "bytes": recipe.bytes,
            "stored_bytes": recipe.stored_bytes(),
            "xxh3_128": hash(&artifact, section::WEIGHTS),
        })),
        "hashes_checked": args.hashes,
        "sections": sections,
        "metadata": metadata,
        "params": params,
    });
    if args.json { print_json(&whole) } else { print(&text(&artifact, &metadata, &params, args.hashes)) }
}

/// The graph of an artifact.
fn graph(artifact: &Artifact) -> Result<Module, CliError> {
    let failed = |what: String| CliError::Failed(format!("{}: {what}", artifact.path().display()));
    let Some(bytes) = artifact.section(section::GRAPH) else {
        let what = "it holds no graph (its weights are generated at load time, or it is from an older mlcc): draw a \
            module with mlcc opt --dot";
        return Err(failed(what.into()));
    };
    from_section(bytes).map_err(|e| failed(format!("section {}: {e}", section::GRAPH)))
}

/// Disassemblers, by preference: older ones know fewer instructions.
const DISASSEMBLERS: [&str; 4] = ["llvm-objdump-22", "llvm-objdump-19", "llvm-objdump", "objdump"];

/// The functions of a kernel as a disassembler prints them.
fn assembly(artifact: &Artifact, kernel: &str) -> Result<String, CliError> {
    let path = artifact.path();
    // Without this flag, LLVM's names no instruction that the first AArch64 processors lacked.
    let aarch64 = artifact.machine_name() == "aarch64";
    let run = |program: &&str| {
        let mut command = std::process::Command::new(program);
        command.args((aarch64 && program.starts_with("llvm")).then_some("--mattr=+all"));
        command.args(["-d", "--no-show-raw-insn"]).arg(path).output().ok().filter(|o| o.status.success())
    };
    let Some(out) = DISASSEMBLERS.iter().find_map(run) else {
        let names = DISASSEMBLERS.join(", ");
        return Err(CliError::usage(format!(
            "no disassembler ({names}) was found that reads {}",
            path.display()
        )));
    };
    let text = String::from_utf8_lossy(&out.stdout);
    let functions = functions(&text);
    let wanted = |name: &str| {
        kernel == "all" || name == kernel || name.strip_prefix(kernel).is_some_and(|r| r.starts_with('.'))
    };
    let found: Vec<&str> = functions.iter().filter(|(name, _)| wanted(name)).map(|(_, text)| *text).collect();
    if found.is_empty() {
        let names: Vec<&str> =
            functions.iter().map(|(name, _)| name.split('.').next().unwrap_or(name)).collect();
        return Err(CliError::usage(format!(
            "no kernel `{kernel}`: {}--asm all prints every function, with its name",
            did_you_mean(kernel, names)
        )));
    }
    Ok(found.join("\n"))
}

/// Name and text of each function in a disassembly: each begins with `address <name>:`.
fn functions(text: &str) -> Vec<(&str, &str)> {
    let mut starts: Vec<(usize, &str)> = Vec::new();
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let name = line.trim_end().strip_suffix(">:").and_then(|l| l.split_once('<'));
        if let Some((_, name)) = name {
            starts.push((at, name));
        }
        at += line.len();
    }
    let ends = starts.iter().skip(1).map(|(at, _)| *at).chain([text.len()]);
    starts.iter().zip(ends).map(|(&(at, name), end)| (name, text[at..end].trim_end())).collect()
}

fn hash(artifact: &Artifact, section: &str) -> Option<String> {
    artifact.hash(section).map(|h| format!("{h:032x}"))
}

/// The parameter table; it is in the code, so it is there only for artifacts of this machine.
fn params(artifact: &Artifact) -> Result<Value, CliError> {
    let model = crate::commands::load(artifact.path(), Some(1), false)?;
    let row = |p: &mlcc_runtime::ParamInfo| {
        json!({
            "name": p.name, "format": p.format, "packing": p.packing, "dims": p.dims,
            "offset": p.offset, "bytes": p.bytes,
        })
    };
    Ok(model.table().params.iter().map(row).collect())
}

fn text(artifact: &Artifact, metadata: &Value, params: &Value, hashes_checked: bool) -> String {
    let get = |path: &str| match metadata.pointer(path) {
        None | Some(Value::Null) => "-".to_string(),
        Some(Value::String(s)) => s.clone(),
        Some(other) => other.to_string(),
    };
    let size = |path: &str| metadata.pointer(path).and_then(Value::as_u64).map_or("-".into(), ui::bytes);
    let number =
        |path: &str| metadata.pointer(path).and_then(Value::as_u64).map_or("-".into(), ui::format_count);
    let levels = metadata.pointer("/target/levels").and_then(Value::as_array);
    let levels: Vec<&str> = levels.into_iter().flatten().filter_map(Value::as_str).collect();
    let tokenizer = match metadata.pointer("/tokenizer/kind") {
        None | Some(Value::Null) => "none".into(),
        Some(_) => format!("{}, {} tokens", get("/tokenizer/kind"), get("/tokenizer/tokens")),
    };
    let batch = metadata.pointer("/memory/batch").and_then(Value::as_u64).unwrap_or(1);
    let mut rows = vec![
        ["model".to_string(), format!("{} ({})", get("/model/name"), get("/model/type"))],
        ["parameters".into(), number("/model/parameters")],
        ["quantization".into(), scheme_name(metadata)],
        ["target".into(), format!("{} for {}", levels.join(", "), artifact.machine_name())],
        ["compiler".into(), format!("{}, back end {}", get("/compiler"), get("/backend"))],
        ["context".into(), get("/memory/context").replace('-', "no limit")],
        ["chunk".into(), format!("{} tokens", get("/memory/chunk"))],
        ["batch".into(), ui::pluralize(batch, "sequence")],
        ["weights".into(), size("/memory/weights_bytes")],
        ["state".into(), size("/memory/sequence_bytes") + &cache_text(metadata)],
        ["scratch".into(), size("/memory/arena_bytes")],
        ["tokenizer".into(), tokenizer],
    ];
    if let Some(images) = metadata.pointer("/target/images").and_then(Value::as_array) {
        let row = rows.iter().position(|[name, _]| name == "compiler").unwrap_or(rows.len());
        rows.insert(row, ["images".into(), images.iter().map(image_text).collect::<Vec<_>>().join(", ")]);
        if metadata.pointer("/target/ptxas").is_some() {
            rows.insert(row + 1, ["assembler".into(), format!("ptxas {}", get("/target/ptxas"))]);
        }
    }
    if let Some(ranks) = metadata.pointer("/memory/ranks").and_then(Value::as_u64).filter(|&ranks| ranks > 1)
    {
        let row = rows.iter().position(|[name, _]| name == "weights").unwrap_or(rows.len());
        rows.insert(row, ["ranks".into(), format!("{ranks}, each with weights and scratch")]);
    }
    if metadata.pointer("/source/repository").is_some() {
        rows.insert(
            1,
            ["from".into(), format!("hf:{}@{}", get("/source/repository"), get("/source/commit"))],
        );
    }
    if let Some(slots) = metadata.pointer("/memory/adapter_slots").and_then(Value::as_u64).filter(|&n| n > 0)
    {
        let row = rows.iter().position(|[name, _]| name == "state").unwrap_or(rows.len());
        let (rank, bytes) = (get("/memory/adapter_rank"), size("/memory/adapter_bytes"));
        rows.insert(
            row,
            ["adapters".into(), format!("{slots} slots of rank {rank}, {bytes} once all are filled")],
        );
    }
    let adapters = metadata.pointer("/source/adapters").and_then(Value::as_array);
    for adapter in adapters.into_iter().flatten() {
        let name = adapter["name"].as_str().unwrap_or("-");
        rows.insert(
            1,
            ["adapter".into(), format!("{name} (scale {})", adapter["scale"].as_f64().unwrap_or(1.0))],
        );
    }
    let tuning = metadata
        .pointer("/tuning/content")
        .and_then(|t| serde_json::from_value::<LevelTuning>(t.clone()).ok());
    if let Some(tuning) = tuning {
        rows.push(["tuning".into(), format!("{tuning} ({})", get("/tuning/xxh3_128"))]);
    }
    let quality =
        metadata.get("report").and_then(|r| serde_json::from_value::<QualityReport>(r.clone()).ok());
    if let Some(quality) = quality {
        rows.push(["quality".into(), quality.text()]);
        rows.push(["reference".into(), quality.reference.clone()]);
    }
    if let Some(recipe) = artifact.weight_generator() {
        let stored = ui::bytes(recipe.stored_bytes());
        let text = format!("random, made on load from seed {}; {stored} of them stored", recipe.seed);
        rows.push(["values".into(), text]);
    }
    if let Some(file) = artifact.weights_file() {
        rows.push(["weights file".into(), file.display().to_string()]);
    }
    if hashes_checked {
        rows.push(["hashes".into(), "checked, those of all sections are right".into()]);
    }
    let width = rows.iter().map(|r| r[0].len()).max().unwrap_or(0);
    let mut out: String = rows.iter().map(|[name, value]| format!("{name:<width$}  {value}\n")).collect();
    out.push('\n');
    out.push_str(&ui::format_table(&format_rows(metadata)));
    out.push('\n');
    let mut rows = vec![vec!["section".to_string(), "bytes".into()]];
    rows.extend(artifact.sections().iter().map(|s| vec![s.name.clone(), s.bytes.to_string()]));
    out.push_str(&ui::format_table(&rows));
    if let Some(list) = params.as_array() {
        out.push('\n');
        out.push_str(&ui::format_table(&param_rows(list)));
    }
    out
}

/// An image for GPUs, and how new the driver has to be.
fn image_text(image: &Value) -> String {
    let text = |key: &str| image[key].as_str().unwrap_or("-").to_string();
    format!("{} for {} (CUDA {})", text("kind"), text("for"), text("cuda"))
}

/// The bytes that a token adds to the state, where it grows.
fn cache_text(metadata: &Value) -> String {
    let Some(cache) = metadata.pointer("/memory/cache").filter(|c| !c.is_null()) else {
        return String::new();
    };
    let formats = cache["formats"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let formats: Vec<&str> = formats.collect();
    let token = ui::bytes(cache["bytes_per_token"].as_u64().unwrap_or(0));
    let mut out = format!(" with all rows used, {token} a token in {}", formats.join(" and "));
    if let Some(window) = metadata.pointer("/memory/window").and_then(Value::as_u64) {
        let sinks = metadata.pointer("/memory/sinks").and_then(Value::as_u64).unwrap_or(0);
        out += &match sinks {
            0 => format!("; sees {window} tokens"),
            _ => format!("; sees the first {sinks} and the newest {window} tokens"),
        };
    }
    out
}

fn format_rows(metadata: &Value) -> Vec<Vec<String>> {
    let mut rows = vec![["format", "tensors", "parameters", "bytes"].map(String::from).to_vec()];
    for f in metadata.pointer("/quantization/formats").and_then(Value::as_array).into_iter().flatten() {
        let n = |key: &str| f[key].as_u64().unwrap_or(0);
        let name = f["format"].as_str().unwrap_or("-").to_string();
        rows.push(vec![
            name,
            n("tensors").to_string(),
            ui::format_count(n("parameters")),
            ui::bytes(n("bytes")),
        ]);
    }
    rows
}

fn param_rows(list: &[Value]) -> Vec<Vec<String>> {
    let mut rows = vec![["parameter", "format", "packing", "shape", "bytes"].map(String::from).to_vec()];
    for p in list {
        let text = |key: &str| p[key].as_str().unwrap_or("-").to_string();
        let packing = Some(text("packing")).filter(|p| !p.is_empty()).unwrap_or_else(|| "row_major".into());
        rows.push(vec![text("name"), text("format"), packing, p["dims"].to_string(), p["bytes"].to_string()]);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::functions;

    #[test]
    fn functions_of_a_disassembly() {
        let text =
            "\nx.so: file format\n\n0000 <norm.v4>:\n   0: ret\n\n0010 <norm_2.v4>:\n  10: jmp 4 <norm.v4>\n";
        let want = [
            ("norm.v4", "0000 <norm.v4>:\n   0: ret"),
            ("norm_2.v4", "0010 <norm_2.v4>:\n  10: jmp 4 <norm.v4>"),
        ];
        assert_eq!(functions(text), want);
    }
}
