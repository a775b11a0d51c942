//! `mlcc models`: architectures that are read, and models known by name.

use mlcc_models::{families, presets};
use serde_json::json;

use crate::commands::{print, print_json};
use crate::error::CliError;
use crate::ui::{self, Ui};

#[derive(Debug, clap::Args)]
pub struct ModelsArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &ModelsArgs, _: &Ui) -> Result<(), CliError> {
    let elements = |preset: &mlcc_models::presets::Preset| -> u64 {
        let tensors = preset.model_config().architecture.tensor_shapes();
        tensors.iter().map(|(_, shape)| shape.iter().product::<usize>() as u64).sum()
    };
    if args.json {
        let architectures: Vec<_> =
            families::variants().map(|e| json!({ "model_type": e.model_type, "about": e.about })).collect();
        let presets: Vec<_> = presets::all_presets()
            .map(|p| {
                json!({
                    "name": p.name, "repository": p.repo, "layers": p.layers, "hidden": p.hidden,
                    "parameters": elements(p),
                })
            })
            .collect();
        let gguf: Vec<_> = families::gguf_architectures()
            .iter()
            .map(|known| json!({ "architecture": known.name, "model_type": known.model_type }))
            .collect();
        return print_json(&json!({ "architectures": architectures, "gguf": gguf, "presets": presets }));
    }
    let mut rows = vec![["model_type in config.json", "architecture"].map(String::from).to_vec()];
    rows.extend(families::variants().map(|e| vec![e.model_type.to_string(), e.about.to_string()]));
    let mut rows_of_presets =
        vec![["name for --model", "parameters", "layers", "hidden", "weights"].map(String::from).to_vec()];
    for p in presets::all_presets() {
        let (layers, hidden) = (p.layers.to_string(), p.hidden.to_string());
        rows_of_presets.push(vec![
            p.name.into(),
            ui::format_count(elements(p)),
            layers,
            hidden,
            p.repo.into(),
        ]);
    }
    let mut rows_of_gguf = vec![["architecture of a GGUF file", "read as"].map(String::from).to_vec()];
    let known = families::gguf_architectures();
    rows_of_gguf.extend(known.iter().map(|known| vec![known.name.to_string(), known.model_type.to_string()]));
    let tables = [rows, rows_of_gguf, rows_of_presets].map(|rows| ui::format_table(&rows));
    print(&tables.join("\n"))
}
