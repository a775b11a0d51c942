//! LoRA adapters in PEFT's form, merged into the weights as these are read: `adapter_config.json` beside the adapter's tensors.
//!
//! An adapter's tensors are found by their names, those of the modules that they adapt, and are held against the base: a tensor
//! that belongs to none of it, or has another shape, is an error. What PEFT computes and this does not is refused by name.

mod config;
mod factors;
mod parts;

pub use factors::{TensorFactors, read_lora_factors};

use crate::checkpoint::merged::{AdapterChange, LoraDelta};
use crate::checkpoint::{Checkpoint, TensorInfo, WeightFiles};
use crate::definition::Architecture;
use crate::error::{AdapterError, ConfigError, ModelError};
use crate::tensor_check::squeeze_shape;
use config::AdapterConfig;
use parts::LoraModule;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// An adapter that was asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterRequest {
    /// The folder with `adapter_config.json`.
    pub directory: PathBuf,
    /// Multiplies what it adds.
    pub scale: f64,
}

impl FromStr for AdapterRequest {
    type Err = String;

    /// `DIR` or `DIR=SCALE`.
    fn from_str(text: &str) -> Result<AdapterRequest, String> {
        let whole = AdapterRequest { directory: text.into(), scale: 1.0 };
        match text.rsplit_once('=') {
            Some((directory, scale)) if !Path::new(text).is_dir() => match scale.parse::<f64>() {
                Ok(scale) if scale.is_finite() && !directory.is_empty() => {
                    Ok(AdapterRequest { directory: directory.into(), scale })
                }
                _ => Err(format!(
                    "`{scale}` is not an adapter scale; write DIR or DIR=SCALE, for example my-adapter=0.5"
                )),
            },
            _ if text.is_empty() => Err("names no folder of an adapter".into()),
            _ => Ok(whole),
        }
    }
}

impl AdapterRequest {
    /// The last part of the path.
    pub fn name(&self) -> String {
        let full = self.directory.canonicalize().unwrap_or_else(|_| self.directory.clone());
        full.file_name().map_or_else(|| "adapter".to_string(), |name| name.to_string_lossy().into_owned())
    }
}

/// What adapters did to a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct MergedAdapter {
    pub name: String,
    pub scale: f64,
    /// Tensors of the base that it changed.
    pub tensors: usize,
}

/// The files of weights in the folder of an adapter, best first.
const WEIGHTS: [&str; 2] = ["adapter_model.safetensors", "adapter_model.bin"];

/// The adapter with the most rows of its own for the embedding table, and how many these are, if they are more than the base has:
/// an adapter that was trained after tokens had been added.
pub(crate) fn find_grown_vocab<'a>(
    architecture: &Architecture,
    requests: &'a [AdapterRequest],
) -> Result<Option<(&'a AdapterRequest, usize)>, ModelError> {
    let mut most = None;
    let vocab = architecture.vocab();
    let tables = architecture.tensor_shapes();
    for request in requests {
        let adapter = PeftAdapter::open(request)?;
        for (path, module) in &adapter.lora_modules()? {
            for (end, info) in &module.replaced {
                let name = architecture.canonical_name(&format!("{path}.{end}"));
                let is_table =
                    |(known, shape): &&(String, Vec<usize>)| *known == name && shape.first() == Some(&vocab);
                let Some((_, shape)) = tables.iter().find(is_table) else { continue };
                let rows = info.shape.first().copied().unwrap_or(0);
                let best = most.map_or(vocab, |(_, rows)| rows);
                if info.shape.len() == shape.len() && info.shape[1..] == shape[1..] && rows > best {
                    most = Some((request, rows));
                }
            }
        }
    }
    Ok(most)
}

/// Merges adapters into a checkpoint that has its canonical names and shapes, in their order. The base has `base_vocab` tokens, the
/// architecture those that adapters add too.
pub fn merge_adapters(
    checkpoint: &mut Checkpoint,
    architecture: &Architecture,
    base_vocab: usize,
    requests: &[AdapterRequest],
) -> Result<Vec<MergedAdapter>, ModelError> {
    let mut done = Vec::with_capacity(requests.len());
    let mut replaced: Vec<String> = Vec::new();
    // The shapes of tables that an adapter makes larger.
    let grown = architecture.vocab() != base_vocab;
    let tables = architecture
        .tensor_shapes()
        .into_iter()
        .filter(|(_, shape)| shape.first() == Some(&architecture.vocab()));
    let tables: BTreeMap<String, Vec<usize>> = tables.filter(|_| grown).collect();
    for request in requests {
        let adapter = PeftAdapter::open(request)?;
        let changes = adapter.collect_changes(checkpoint, (architecture, &tables))?;
        for (name, change) in &changes {
            if let AdapterChange::Replace(info) = change {
                if is_already_merged(checkpoint, name) || replaced.contains(name) {
                    let what = format!(
                        "replaces `{name}`, which an earlier adapter changed; the two cannot be combined"
                    );
                    return Err(adapter.tensor_error(info, what).into());
                }
                replaced.push(name.clone());
            }
        }
        let mut names: Vec<&String> = changes.iter().map(|(name, _)| name).collect();
        names.sort();
        names.dedup();
        done.push(MergedAdapter { name: request.name(), scale: request.scale, tensors: names.len() });
        checkpoint.apply_adapter(adapter.weights, changes);
    }
    Ok(done)
}

fn is_already_merged(checkpoint: &Checkpoint, name: &str) -> bool {
    checkpoint.tensor_info(name).is_some_and(TensorInfo::is_merged)
}

/// True for the module of a head that is the embedding table.
fn is_tied_head(architecture: &Architecture, path: &str) -> bool {
    let name = architecture.canonical_name(&format!("{path}.weight"));
    architecture.tied_embedding().is_some_and(|(_, head)| head == name)
}

/// An adapter that was found and read as far as its names and shapes.
struct PeftAdapter {
    /// The file of its tensors, for messages.
    file: String,
    config: AdapterConfig,
    weights: Checkpoint,
    scale: f64,
}

impl PeftAdapter {
    fn open(request: &AdapterRequest) -> Result<PeftAdapter, ModelError> {
        let directory = &request.directory;
        let missing =
            |what: &'static str| AdapterError::NoAdapter { directory: directory.display().to_string(), what };
        let path = directory.join("adapter_config.json");
        if !mlcc_files::is_file(&path).map_err(ConfigError::from)? {
            return Err(missing("adapter_config.json").into());
        }
        let config = AdapterConfig::read(&path)?;
        let mut file = None;
        for path in WEIGHTS.map(|name| directory.join(name)) {
            if file.is_none() && mlcc_files::is_file(&path).map_err(ConfigError::from)? {
                file = Some(path);
            }
        }
        let file = file.ok_or_else(|| missing("adapter_model.safetensors or adapter_model.bin"))?;
        let weights = Checkpoint::open(&WeightFiles::from_file(&file)?)?;
        Ok(PeftAdapter { file: file.display().to_string(), config, weights, scale: request.scale })
    }

    /// What it has, by the modules of the base.
    fn lora_modules(&self) -> Result<BTreeMap<String, LoraModule<'_>>, AdapterError> {
        let modules = parts::group_by_module(self.weights.tensors())
            .map_err(|(info, what)| self.tensor_error(info, what))?;
        match modules.is_empty() {
            true => Err(AdapterError::NoAdapter { directory: self.file.clone(), what: "a tensor" }),
            false => Ok(modules),
        }
    }

    /// What the adapter does to tensors of the base, by their canonical names.
    fn collect_changes(
        &self,
        base: &Checkpoint,
        (architecture, tables): (&Architecture, &BTreeMap<String, Vec<usize>>),
    ) -> Result<Vec<(String, AdapterChange)>, ModelError> {
        let mut changes = Vec::new();
        for (path, module) in &self.lora_modules()? {
            if self.config.keeps_ties && is_tied_head(architecture, path) {
                continue;
            }
            for (end, info) in &module.replaced {
                let target = self.find_target(base, architecture, &format!("{path}.{end}"), info)?;
                let table = tables.get(&target.name);
                let wanted = table.unwrap_or(&target.shape);
                if squeeze_shape(wanted) != squeeze_shape(&info.shape) {
                    let what = format!(
                        "has shape {:?}, `{}` of the base has {:?}",
                        info.shape, target.name, target.shape
                    );
                    return Err(match table {
                        None => self.wrong_base_error(info, what),
                        Some(_) => self.tensor_error(
                            info,
                            format!(
                                "{what}, but another tensor or adapter makes it {wanted:?}; adapters that add tokens \
                                 must agree on their number. Save the embedding table and the head with \
                                 `save_embedding_layers`, or merge with PEFT (`merge_and_unload`) and build the merged \
                                 model"
                            ),
                        ),
                    }
                    .into());
                }
                changes.push((target.name.clone(), AdapterChange::Replace((*info).clone())));
            }
            self.add_factor_changes(base, architecture, (path, module), &mut changes)?;
        }
        self.check_tied_embedding(architecture, &mut changes)?;
        Ok(changes)
    }

    /// What the factors of a module change: its weight, and its bias.
    fn add_factor_changes(
        &self,
        base: &Checkpoint,
        architecture: &Architecture,
        (path, module): (&str, &LoraModule),
        changes: &mut Vec<(String, AdapterChange)>,
    ) -> Result<(), ModelError> {
        let Some((a, b, transposed)) =
            module.factor_pair().map_err(|(info, what)| self.tensor_error(info, what))?
        else {
            return Ok(());
        };
        let (rank, [rows, columns]) = self.check_ranks(a, b)?;
        let expected = if transposed { [columns, rows] } else { [rows, columns] };
        let target = self.find_target(base, architecture, &format!("{path}.weight"), a)?;
        if target.shape != expected {
            let what = format!(
                "has shape {:?} and its partner {:?}, for a weight of {expected:?}; `{}` of the base has {:?}",
                a.shape, b.shape, target.name, target.shape
            );
            return Err(self.wrong_base_error(a, what).into());
        }
        let scale = (self.scale * self.config.module_scale(path, rank)?) as f32;
        let magnitude = self.checked_magnitude(module, a, transposed, expected[0])?;
        if let Some(term) = module.bias {
            let bias = self.find_target(base, architecture, &format!("{path}.bias"), term)?;
            if squeeze_shape(&bias.shape) != squeeze_shape(&term.shape) {
                let what =
                    format!("has shape {:?}, `{}` of the base has {:?}", term.shape, bias.name, bias.shape);
                return Err(self.wrong_base_error(term, what).into());
            }
            changes.push((bias.name.clone(), AdapterChange::Sum { term: term.clone(), scale }));
        }
        let product = LoraDelta { a: a.clone(), b: b.clone(), scale, transposed, magnitude };
        changes.push((target.name.clone(), AdapterChange::Product(Box::new(product))));
        Ok(())
    }

    /// The lengths of the rows, where the adapter has them.
    fn checked_magnitude(
        &self,
        module: &LoraModule,
        a: &TensorInfo,
        transposed: bool,
        rows: usize,
    ) -> Result<Option<TensorInfo>, AdapterError> {
        match module.magnitude {
            None if self.config.dora && !transposed => {
                Err(self.tensor_error(a, "lacks `lora_magnitude_vector`, which `use_dora` needs".into()))
            }
            None => Ok(None),
            Some(info) if transposed => Err(self.tensor_error(
                info,
                "belongs to an embedding; DoRA is merged into linear layers only".into(),
            )),
            Some(info) if info.elements() != rows => {
                let what = format!("has shape {:?}, the weight has {rows} rows", info.shape);
                Err(self.wrong_base_error(info, what))
            }
            Some(info) => Ok(Some(info.clone())),
        }
    }

    /// The tensor of the base under a name as PEFT has it.
    fn find_target<'a>(
        &self,
        base: &'a Checkpoint,
        architecture: &Architecture,
        name: &str,
        info: &TensorInfo,
    ) -> Result<&'a TensorInfo, AdapterError> {
        let canonical = architecture.canonical_name(name);
        if let Some((_, head)) = architecture.tied_embedding()
            && head == canonical
        {
            // A head beside a tied embedding is not read, so a change of it would be lost.
            let what = format!("changes the head `{canonical}`, which is the embedding table in this model");
            return Err(self.tensor_error(info, what));
        }
        base.tensor_info(&canonical).ok_or_else(|| {
            let experts = match name.contains("experts") {
                true => " under this name; adapters of experts that are stored as one tensor are not merged",
                false => "",
            };
            self.wrong_base_error(
                info,
                format!("adapts `{canonical}`, which the base does not have{experts}"),
            )
        })
    }

    /// Where the head is the embedding table an adapter of the table would change both, which PEFT does when it merges and does not
    /// when it runs.
    fn check_tied_embedding(
        &self,
        architecture: &Architecture,
        changes: &mut [(String, AdapterChange)],
    ) -> Result<(), AdapterError> {
        let Some((embedding, _)) = architecture.tied_embedding().filter(|_| !self.config.keeps_ties) else {
            return Ok(());
        };
        let info = match changes.iter().find(|(name, _)| *name == embedding) {
            None => return Ok(()),
            Some((_, AdapterChange::Replace(info) | AdapterChange::Sum { term: info, .. })) => info,
            Some((_, AdapterChange::Product(product))) => &product.a,
        };
        let what = "changes the embedding table, which is also the head of this model; the adapter does not say \
            whether the head changes too (`ensure_weight_tying`)";
        Err(self.tensor_error(info, what.into()))
    }

    fn tensor_error(&self, info: &TensorInfo, detail: String) -> AdapterError {
        AdapterError::Tensor { file: self.file.clone(), tensor: info.name.clone(), detail }
    }

    fn wrong_base_error(&self, info: &TensorInfo, detail: String) -> AdapterError {
        let base = self.config.base.clone();
        AdapterError::OtherBase { file: self.file.clone(), tensor: info.name.clone(), detail, base }
    }
}

impl From<ConfigError> for AdapterError {
    fn from(error: ConfigError) -> AdapterError {
        AdapterError::Config(Box::new(error))
    }
}
