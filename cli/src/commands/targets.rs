//! `mlcc targets`: the machines that can be compiled for.

use mlcc_target::{Arch, FeatureLevel, detected_features};
use serde_json::{Value, json};

use crate::commands::{print, print_json};
use crate::error::CliError;
use crate::ui::{self, Ui};

#[derive(Debug, clap::Args)]
pub struct TargetsArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &TargetsArgs, _: &Ui) -> Result<(), CliError> {
    let specs = mlcc_target::specs().map_err(mlcc_target::TargetError::from)?;
    let host = mlcc_target::resolve_target("cpu").ok();
    let mut list: Vec<Value> = Vec::new();
    let mut rows =
        vec![["target", "stands for", "vector bits", "features beyond"].map(String::from).to_vec()];
    if let Some(host) = &host {
        list.push(json!({ "name": "cpu", "stands_for": [host.name] }));
        rows.push(vec!["cpu".into(), format!("{} (this machine)", host.name), String::new(), String::new()]);
    }
    for spec in &specs {
        let defaults: Vec<&str> = spec.default_levels().map(|l| l.name.as_str()).collect();
        list.push(json!({ "name": spec.name, "stands_for": defaults, "triple": spec.triple }));
        rows.push(vec![spec.name.clone(), defaults.join(","), String::new(), String::new()]);
        for (i, level) in spec.levels.iter().enumerate() {
            let runs = runs_here(spec.arch, level);
            list.push(json!({
                "name": level.name, "triple": spec.triple, "vector_bits": level.vector_bits,
                "features": level.features, "runs_here": runs,
            }));
            let below: &[String] = if i > 0 { &spec.levels[i - 1].features } else { &[] };
            let new: Vec<&str> =
                level.features.iter().filter(|f| !below.contains(f)).map(String::as_str).collect();
            let here = if runs { "runs here" } else { "" };
            rows.push(vec![
                format!("  {}", level.name),
                here.into(),
                level.vector_bits.to_string(),
                new.join(" "),
            ]);
        }
        for machine in &spec.machines {
            let runs = runs_here(spec.arch, machine);
            let like = spec.levels.iter().find(|l| l.features == machine.features);
            let like = like.map_or(String::new(), |l| l.name.clone());
            list.push(json!({
                "name": machine.name, "triple": spec.triple, "vector_bits": machine.vector_bits,
                "features": machine.features, "runs_here": runs, "level": like,
            }));
            let here = if runs { "runs here" } else { "" };
            let name = format!("  {}", machine.name);
            rows.push(vec![
                name,
                here.into(),
                machine.vector_bits.to_string(),
                format!("{like}, tuned for it"),
            ]);
        }
    }
    if args.json {
        return print_json(&list);
    }
    print(&ui::format_table(&rows))
}

fn runs_here(arch: Arch, level: &FeatureLevel) -> bool {
    let have = detected_features();
    Arch::of_host() == Some(arch) && level.features.iter().all(|f| have.contains(&f.as_str()))
}
