//! `mlcc quants`: the weight formats.

use mlcc_ir::format::{GroupSize, ZeroPoint};
use mlcc_ir::types::{DType, QuantFormat};
use mlcc_passes::scheme::{ActivationType, Q4F16, QuantScheme, SCHEMES};
use serde_json::json;

use crate::commands::{print, print_json};
use crate::error::CliError;
use crate::ui::{self, Ui};
use mlcc_driver::compile::keep::KEEP;

#[derive(Debug, clap::Args)]
pub struct QuantsArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The columns of the table, beside the name and the words about it.
pub const COLUMNS: [&str; 7] =
    ["matrices", "embedding", "head", "bits per weight", "group", "per group", "activations"];

/// A row of the table, which docs/quantization.md has too.
pub fn cells(scheme: &QuantScheme) -> [String; 7] {
    let (group, per_group) = group(scheme.linear);
    let activations = match scheme.activation {
        ActivationType::F32 => "f32",
        ActivationType::BF16 => "bf16",
        ActivationType::I8 => "int8 per group",
    };
    let [matrices, embedding, head] =
        [scheme.linear, scheme.embedding, scheme.head].map(|dtype| dtype.name().to_string());
    let bits = stored_bits(scheme.linear).to_string();
    [matrices, embedding, head, bits, group, per_group, activations.into()]
}

/// Bits of one weight, and of what a group stores spread over it.
pub(crate) fn stored_bits(dtype: DType) -> f64 {
    match dtype {
        DType::Packed(format) => format.bits_per_weight(),
        plain => 8.0 * plain.bytes().map_or(0.0, |b| b as f64),
    }
}

/// Weights of a group, and what is stored of each group.
fn group(dtype: DType) -> (String, String) {
    let DType::Packed(format) = dtype else { return ("-".into(), "-".into()) };
    let group = match format.group {
        GroupSize::Columns(columns) => columns.to_string(),
        GroupSize::Row => "row".into(),
    };
    let zero = match format.zero {
        ZeroPoint::Constant(_) => "",
        ZeroPoint::PerGroup => " and zero point",
        ZeroPoint::Minimum => " and minimum",
    };
    (group, format!("{}{zero}", format.scale.name()))
}

pub fn run(args: &QuantsArgs, _: &Ui) -> Result<(), CliError> {
    if args.json {
        let activation = |a: ActivationType| match a {
            ActivationType::F32 => "f32",
            ActivationType::BF16 => "bf16",
            ActivationType::I8 => "i8",
        };
        let list: Vec<_> = SCHEMES
            .iter()
            .map(|s| {
                json!({
                    "name": s.name, "about": s.about, "embedding": s.embedding.name(), "head": s.head.name(),
                    "linear": s.linear.name(), "bits_per_weight": stored_bits(s.linear),
                    "activation": activation(s.activation),
                })
            })
            .collect();
        return print_json(&list);
    }
    let mut rows = vec![std::iter::once("name").chain(COLUMNS).map(String::from).collect::<Vec<_>>()];
    rows.extend(SCHEMES.iter().map(|s| std::iter::once(s.name.to_string()).chain(cells(s)).collect()));
    let width = SCHEMES.iter().map(|s| s.name.len()).max().unwrap_or(0) + 1;
    let about: String = SCHEMES.iter().map(|s| format!("{:<width$}{}\n", s.name, s.about)).collect();
    let names = format!("q4f16 stands for {Q4F16}; names are case-insensitive");
    let keep = format!("--quant {KEEP}, the default, leaves weights in the types that they are stored in");
    let plain = [DType::F32, DType::F16, DType::BF16];
    let single = plain.into_iter().chain(QuantFormat::ALL.iter().map(|&format| DType::Packed(format)));
    let single: Vec<&str> = single.map(|dtype| dtype.name()).collect();
    let single = format!("formats of single tensors, for --quant-policy: {}", single.join(", "));
    print(&format!("{}\n{about}\n{names}\n{keep}\n{single}\n", ui::format_table(&rows)))
}
