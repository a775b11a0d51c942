//! `mlcc quants`: the weight formats.

use mlcc_passes::scheme::{ActivationType, Q4F16, SCHEMES};
use serde_json::json;

use crate::commands::{print, print_json};
use crate::error::CliError;
use crate::ui::{self, Ui};
use mlcc_driver::build::keep::KEEP;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, _: &Ui) -> Result<(), CliError> {
    let activation = |a: ActivationType| match a {
        ActivationType::F32 => "f32",
        ActivationType::BF16 => "bf16",
        ActivationType::I8 => "i8",
    };
    if args.json {
        let list: Vec<_> = SCHEMES
            .iter()
            .map(|s| {
                json!({
                    "name": s.name, "about": s.about, "embedding": s.embedding.name(), "head": s.head.name(),
                    "linear": s.linear.name(), "activation": activation(s.activation),
                })
            })
            .collect();
        return print_json(&list);
    }
    let mut rows = vec![["name", "embedding", "head", "linear", "activations"].map(String::from).to_vec()];
    for s in SCHEMES {
        let cells = [s.name, s.embedding.name(), s.head.name(), s.linear.name(), activation(s.activation)];
        rows.push(cells.map(String::from).to_vec());
    }
    let width = SCHEMES.iter().map(|s| s.name.len()).max().unwrap_or(0) + 1;
    let about: String = SCHEMES.iter().map(|s| format!("{:<width$}{}\n", s.name, s.about)).collect();
    let names = format!("q4f16 stands for {Q4F16}; names are taken in any case");
    let keep = format!("--quant {KEEP}, the default, leaves weights in the types that they are stored in");
    print(&format!("{}\n{about}\n{names}\n{keep}\n", ui::table(&rows)))
}
