//! From the tensors of a GGUF file to those of the Hugging Face checkpoint: names, and what the converter
//! (`convert_hf_to_gguf.py` of llama.cpp) did to the values.
//!
//! A tensor that has no entry keeps its name; the comparison with the model's own list reports it.

use super::super::TensorInfo;
use super::architecture::{GgufArchitecture, GgufVariant};
use super::conversion::{MappedTensor, TensorConversion, ValueHeadAxis};
use super::view::GgufView;
use super::{GgufMetadata, RawTensor};
use crate::error::CheckpointError;
use TensorConversion::*;

/// Tensors that hold configuration, not weights.
const CONFIGURATION: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

/// More than any model has; keeps a damaged file from asking for millions of tensors.
const MOST_PARTS: usize = 4096;

/// Sizes that the changes depend on.
#[derive(Clone, Copy, Debug)]
struct ConversionSizes {
    query: usize,
    key: usize,
    /// Elements of a head of RWKV.
    head_size: usize,
    /// Heads of a delta rule.
    key_heads: usize,
    value_heads: usize,
    /// Elements of its keys.
    key_size: usize,
    /// As [`Rescaled`] has it; 0: never.
    rescale_every: usize,
}

impl ConversionSizes {
    fn read(metadata: &GgufMetadata, arch: &str) -> Result<ConversionSizes, CheckpointError> {
        let number = |name: &str| metadata.number(&format!("{arch}.{name}"));
        let query = number("attention.head_count")?.unwrap_or(0);
        Ok(ConversionSizes {
            query: query as usize,
            // Where layers differ there is no one order.
            key: number("attention.head_count_kv").ok().flatten().unwrap_or(query) as usize,
            head_size: number("wkv.head_size")?.unwrap_or(0) as usize,
            key_heads: number("ssm.group_count")?.unwrap_or(0) as usize,
            value_heads: number("ssm.time_step_rank")?.unwrap_or(0) as usize,
            key_size: number("ssm.state_size")?.unwrap_or(0) as usize,
            rescale_every: number("rescale_every_n_layers")?.unwrap_or(0) as usize,
        })
    }
}

/// All tensors under their Hugging Face names. Files of an architecture that is not known keep their own names.
pub(super) fn map_tensors(
    label: &str,
    metadata: &GgufMetadata,
    tensors: &[RawTensor],
    architectures: &[&GgufArchitecture],
) -> Result<Vec<TensorInfo>, CheckpointError> {
    let arch = metadata.string("general.architecture")?.unwrap_or("");
    let kind = GgufVariant {
        experts: metadata.number(&format!("{arch}.expert_count"))?.unwrap_or(0) > 0,
        separate_qkv: tensors.iter().any(|raw| raw.name == "blk.0.attn_q.weight"),
        fused_qkvz: tensors.iter().any(|raw| raw.name == "blk.0.ssm_in.weight"),
        packed_experts: tensors.iter().any(|raw| raw.name.ends_with(".ffn_gate_up_exps.weight")),
    };
    let known = architectures.iter().find(|known| known.name == arch);
    let family = known.map(|known| (known.tensor_names)(kind));
    let mut reader =
        ConversionReader { label, sizes: ConversionSizes::read(metadata, arch)?, infos: Vec::new() };
    let draft = first_draft_layer(metadata, arch)?;
    let is_draft = |name: &str| layer_of(name).is_some_and(|layer| draft.is_some_and(|first| layer >= first));
    let is_read = |raw: &&RawTensor| !CONFIGURATION.contains(&raw.name.as_str()) && !is_draft(&raw.name);
    for raw in tensors.iter().filter(is_read) {
        match family.as_ref().and_then(|family| family.map_name(&raw.name)) {
            Some(found) => reader.undo_conversion(raw, found)?,
            None => reader.infos.push(raw.as_stored(raw.name.clone())),
        }
    }
    Ok(reader.infos)
}

/// Where the layers of a draft head begin, of which nothing is read.
fn first_draft_layer(metadata: &GgufMetadata, arch: &str) -> Result<Option<u64>, CheckpointError> {
    let number = |name: &str| metadata.number(&format!("{arch}.{name}"));
    let draft = number("nextn_predict_layers")?.filter(|&layers| layers > 0);
    Ok(draft.and_then(|draft| Some(number("block_count").ok()??.saturating_sub(draft))))
}

fn layer_of(name: &str) -> Option<u64> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

/// Tensors as they are found.
struct ConversionReader<'a> {
    label: &'a str,
    sizes: ConversionSizes,
    infos: Vec<TensorInfo>,
}

impl ConversionReader<'_> {
    fn undo_conversion(&mut self, raw: &RawTensor, found: MappedTensor) -> Result<(), CheckpointError> {
        let MappedTensor { name, change, layer } = found;
        let (view, sizes) = (GgufView::of_tensor(raw), self.sizes);
        match change {
            Same => self.infos.push(raw.as_stored(name)),
            QueryHeads => self.push_reordered(raw, name, interleaved_rows(view.rows, sizes.query))?,
            KeyHeads => self.push_reordered(raw, name, interleaved_rows(view.rows, sizes.key))?,
            HeadsInside => self.push_reordered(raw, name, order_heads_inside(view.rows, sizes.query))?,
            FalconGroups => self.push_reordered(raw, name, order_falcon_groups(view.rows, sizes))?,
            PlusOne => self.push_view(raw, name, raw.shape.clone(), GgufView { add: -1.0, ..view }),
            Rescaled => {
                let halvings = layer.checked_div(sizes.rescale_every).unwrap_or(0);
                let scale = 2f32.powi(halvings.min(100) as i32);
                self.push_view(raw, name, raw.shape.clone(), GgufView { scale, ..view });
            }
            NegExp => {
                // A number per head got an axis of its own.
                let flat = raw.shape.last() == Some(&1);
                let shape = if flat { vec![raw.elements()] } else { raw.shape.clone() };
                self.push_view(raw, name, shape, GgufView { log: true, ..view });
            }
            ValueHeads(axis) => self.push_value_heads(raw, name, axis)?,
            HalvesByKeyHead(halves) => self.push_halves(raw, &name, halves)?,
            Matrix => {
                let shape = vec![view.rows, view.row];
                self.infos.push(TensorInfo { shape, ..raw.as_stored(name) });
            }
            Flat => self.infos.push(TensorInfo { shape: vec![raw.elements()], ..raw.as_stored(name) }),
            Transposed => {
                let &[rows, columns] = raw.shape.as_slice() else {
                    return Err(self.conversion_error(raw, "expected a matrix"));
                };
                let view = GgufView { transpose: Some(rows), ..view };
                self.push_view(raw, name, vec![columns, rows], view);
            }
            TransposedEach => {
                let &[count, rows, columns] = raw.shape.as_slice() else {
                    return Err(self.conversion_error(raw, "expected a list of matrices"));
                };
                let view = GgufView { transpose: Some(rows), ..view };
                self.push_view(raw, name, vec![count, columns, rows], view);
            }
            SplitHeads => {
                let heads = exact_quotient(raw.elements(), sizes.head_size).ok_or_else(|| {
                    self.conversion_error(raw, &format!("which does not fit heads of {}", sizes.head_size))
                })?;
                self.infos.push(TensorInfo { shape: vec![heads, sizes.head_size], ..raw.as_stored(name) });
            }
            Experts | Heads => {
                let parts: Vec<String> = (0..raw.shape.first().map_or(0, |&n| n.min(MOST_PARTS + 1)))
                    .map(|i| i.to_string())
                    .collect();
                self.push_parts(raw, &name, &parts)?;
            }
            Stacked(names) => {
                let parts: Vec<String> = names.iter().map(|part| (*part).to_string()).collect();
                self.push_parts(raw, &name, &parts)?;
            }
        }
        Ok(())
    }

    fn push_view(&mut self, raw: &RawTensor, name: String, shape: Vec<usize>, view: GgufView) {
        self.infos.push(raw.with_view(name, shape, view));
    }

    /// Rows in the order that the checkpoint has them in; `None` does not fit the heads.
    fn push_reordered(
        &mut self,
        raw: &RawTensor,
        name: String,
        order: Option<Vec<u32>>,
    ) -> Result<(), CheckpointError> {
        let ConversionSizes { query, key, .. } = self.sizes;
        let order = order.ok_or_else(|| {
            self.conversion_error(raw, &format!("which does not fit {query} query and {key} key heads"))
        })?;
        let view = GgufView { order: Some(order), ..GgufView::of_tensor(raw) };
        self.push_view(raw, name, raw.shape.clone(), view);
        Ok(())
    }

    /// Value heads in the order of their key heads.
    fn push_value_heads(
        &mut self,
        raw: &RawTensor,
        name: String,
        axis: ValueHeadAxis,
    ) -> Result<(), CheckpointError> {
        let (view, sizes) = (GgufView::of_tensor(raw), self.sizes);
        let keys = match axis {
            ValueHeadAxis::RowsAfterKeys => sizes.key_heads.saturating_mul(sizes.key_size).saturating_mul(2),
            ValueHeadAxis::Rows | ValueHeadAxis::Columns | ValueHeadAxis::Decays => 0,
        };
        let along = if axis == ValueHeadAxis::Columns { view.row } else { view.rows };
        let order = along.checked_sub(keys).and_then(|values| order_by_key_head(values, sizes));
        let Some(values) = order else {
            let ConversionSizes { key_heads, value_heads, .. } = sizes;
            let what = format!("which does not fit {value_heads} value and {key_heads} key heads");
            return Err(self.conversion_error(raw, &what));
        };
        let log = axis == ValueHeadAxis::Decays;
        if sizes.key_heads == sizes.value_heads && !log {
            self.infos.push(raw.as_stored(name));
            return Ok(());
        }
        let order = (0..keys as u32).chain(values.into_iter().map(|row| row + keys as u32)).collect();
        let view = match axis {
            ValueHeadAxis::Columns => GgufView { columns: Some(order), ..view },
            ValueHeadAxis::Rows | ValueHeadAxis::RowsAfterKeys | ValueHeadAxis::Decays => {
                GgufView { order: Some(order), log, ..view }
            }
        };
        self.push_view(raw, name, raw.shape.clone(), view);
        Ok(())
    }

    /// Two tensors whose rows take turns by key head.
    fn push_halves(&mut self, raw: &RawTensor, name: &str, halves: [&str; 2]) -> Result<(), CheckpointError> {
        let (view, ConversionSizes { key_heads, value_heads, .. }) = (GgufView::of_tensor(raw), self.sizes);
        let group =
            exact_quotient(value_heads, key_heads).filter(|_| view.rows == value_heads.saturating_mul(2));
        let (Some(group), &[_, columns]) = (group, raw.shape.as_slice()) else {
            let what = format!("which does not fit {value_heads} value and {key_heads} key heads");
            return Err(self.conversion_error(raw, &what));
        };
        for (half, part) in halves.iter().enumerate() {
            let stored = |row: usize| row / group * 2 * group + half * group + row % group;
            let order = (0..value_heads).map(|row| stored(row) as u32).collect();
            let view = GgufView { order: Some(order), ..view.clone() };
            self.push_view(raw, name.replace("{e}", part), vec![value_heads, columns], view);
        }
        Ok(())
    }

    /// The parts along the first axis as tensors of their own: `name` with each of `parts` in its place.
    fn push_parts(&mut self, raw: &RawTensor, name: &str, parts: &[String]) -> Result<(), CheckpointError> {
        let fits = raw.shape.len() > 1 && raw.shape[0] == parts.len() && raw.elements() > 0;
        if !fits || parts.len() > MOST_PARTS {
            return Err(self.conversion_error(
                raw,
                &format!("expected a list of {} parts, at most {MOST_PARTS}", parts.len()),
            ));
        }
        let view = GgufView::of_tensor(raw);
        let (shape, rows) = (&raw.shape[1..], view.rows / parts.len());
        for (number, part) in parts.iter().enumerate() {
            let view = GgufView { first: number * rows, ..view.clone() };
            self.push_view(raw, name.replace("{e}", part), shape.to_vec(), view);
        }
        Ok(())
    }

    fn conversion_error(&self, raw: &RawTensor, what: &str) -> CheckpointError {
        CheckpointError::UnsupportedTensor {
            file: self.label.to_string(),
            tensor: raw.name.clone(),
            detail: format!("has shape {:?}, {what}", raw.shape),
        }
    }
}

/// Rows of a head: (half, i) is stored at (i, half).
fn interleaved_rows(rows: usize, heads: usize) -> Option<Vec<u32>> {
    let head = exact_quotient(rows, heads)?;
    let half = exact_quotient(head, 2)?;
    Some(
        (0..rows)
            .map(|row| row / head * head + row % head % half * 2 + row % head / half)
            .map(|r| r as u32)
            .collect(),
    )
}

/// Row (head, part, i) of three parts is stored at (part, head, i).
fn order_heads_inside(rows: usize, heads: usize) -> Option<Vec<u32>> {
    let size = exact_quotient(rows, heads.checked_mul(3)?)?;
    let stored = |row: usize| {
        let (head, part, i) = (row / (3 * size), row / size % 3, row % size);
        (part * heads + head) * size + i
    };
    Some((0..rows).map(|row| stored(row) as u32).collect())
}

/// Row (group, part, i), where a group has its queries, one key and one value, is stored with all queries first.
fn order_falcon_groups(rows: usize, heads: ConversionSizes) -> Option<Vec<u32>> {
    let size = exact_quotient(rows, heads.key.checked_mul(2)?.checked_add(heads.query)?)?;
    let queries = exact_quotient(heads.query, heads.key)?;
    let stored = |row: usize| {
        let (group, part, i) = (row / ((queries + 2) * size), row / size % (queries + 2), row % size);
        let head = match part {
            part if part < queries => group * queries + part,
            part => heads.query + (part - queries) * heads.key + group,
        };
        head * size + i
    };
    Some((0..rows).map(|row| stored(row) as u32).collect())
}

/// Element (key head, value head of it, i) is stored at (value head of it, key head, i).
fn order_by_key_head(count: usize, sizes: ConversionSizes) -> Option<Vec<u32>> {
    let (size, group) =
        (exact_quotient(count, sizes.value_heads)?, exact_quotient(sizes.value_heads, sizes.key_heads)?);
    let stored = |at: usize| {
        let (head, i) = (at / size, at % size);
        (head % group * sizes.key_heads + head / group) * size + i
    };
    Some((0..count).map(|at| stored(at) as u32).collect())
}

/// The quotient, if there is no rest.
fn exact_quotient(number: usize, by: usize) -> Option<usize> {
    (by != 0 && number.is_multiple_of(by)).then(|| number / by)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows after a conversion: number of the original row at each stored place.
    fn restored(stored: &[u32], order: &[u32]) -> Vec<u32> {
        order.iter().map(|&row| stored[row as usize]).collect()
    }

    fn sizes(query: usize, key: usize) -> ConversionSizes {
        ConversionSizes {
            query,
            key,
            head_size: 0,
            key_heads: 2,
            value_heads: 4,
            key_size: 1,
            rescale_every: 0,
        }
    }

    #[test]
    fn conversions_are_undone() {
        let all: Vec<u32> = (0..24).collect();
        // reshape(2, 2, 6).swapaxes(1, 2): head, half, i.
        let rows = |f: &dyn Fn(u32, u32, u32) -> u32, a: u32, b: u32, c: u32| -> Vec<u32> {
            let pairs = (0..a).flat_map(|x| (0..b).map(move |y| (x, y)));
            pairs.flat_map(|(x, y)| (0..c).map(move |z| (x, y, z))).map(|(x, y, z)| f(x, y, z)).collect()
        };
        let stored = rows(&|head, i, half| head * 12 + half * 6 + i, 2, 6, 2);
        assert_eq!(restored(&stored, &interleaved_rows(24, 2).unwrap()), all);
        // reshape(2, 3, 4) to q, k, v.
        let stored = rows(&|part, head, i| head * 12 + part * 4 + i, 3, 2, 4);
        assert_eq!(restored(&stored, &order_heads_inside(24, 2).unwrap()), all);
        // Two groups of one query head, a key and a value of 4; the same order as above.
        let order = order_falcon_groups(24, sizes(2, 2)).unwrap();
        assert_eq!(restored(&stored, &order), all);
        // Groups of two query heads: q q k v, elements of 3.
        let stored = [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 6, 7, 8, 18, 19, 20, 9, 10, 11, 21, 22, 23];
        let order = order_falcon_groups(24, sizes(4, 2)).unwrap();
        assert_eq!(restored(&stored, &order), all);
        // Value heads of 3 by 2 key heads: the first of each, then the second of each.
        let stored = [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11];
        let order = order_by_key_head(12, sizes(4, 2)).unwrap();
        assert_eq!(restored(&stored, &order), all[..12]);
        assert_eq!(order_by_key_head(10, sizes(4, 2)), None);
        for bad in [
            interleaved_rows(24, 0),
            interleaved_rows(24, 7),
            interleaved_rows(24, 24),
            order_heads_inside(24, 3),
        ] {
            assert_eq!(bad, None);
        }
    }

    fn raw(name: &str, shape: &[usize]) -> RawTensor {
        let dtype = crate::StoredType::F32;
        RawTensor { name: name.into(), dtype, shape: shape.to_vec(), file: 0, start: 0 }
    }

    fn undone(shape: &[usize], change: TensorConversion, layer: usize) -> Result<Vec<TensorInfo>, String> {
        let sizes = ConversionSizes { rescale_every: 2, head_size: 8, ..sizes(4, 2) };
        let mut reader = ConversionReader { label: "m.gguf", sizes, infos: Vec::new() };
        let found = MappedTensor { name: "n.{e}".into(), change, layer };
        reader.undo_conversion(&raw("t", shape), found).map_err(|error| error.to_string())?;
        Ok(reader.infos)
    }

    #[test]
    fn weights_that_were_halved_are_doubled() {
        for (layer, scale) in [(0, 1.0), (1, 1.0), (2, 2.0), (5, 4.0)] {
            let infos = undone(&[4, 4], Rescaled, layer).unwrap();
            let crate::checkpoint::TensorStorage::View(view) = &infos[0].storage else { panic!("a view") };
            assert_eq!(view.scale, scale, "layer {layer}");
        }
    }

    #[test]
    fn stacked_tensors_come_apart() {
        let names = |infos: &[TensorInfo]| infos.iter().map(|info| info.name.clone()).collect::<Vec<_>>();
        let infos = undone(&[2, 1, 1, 6], Stacked(&["w", "k"]), 0).unwrap();
        assert_eq!(
            (names(&infos), infos[1].shape.clone()),
            (vec!["n.w".into(), "n.k".into()], vec![1, 1, 6])
        );
        let infos = undone(&[3, 8], Heads, 0).unwrap();
        assert_eq!((infos.len(), infos[2].name.as_str(), infos[2].shape.as_slice()), (3, "n.2", &[8][..]));
        assert_eq!(undone(&[16], SplitHeads, 0).unwrap()[0].shape, [2, 8]);
        for (shape, change) in
            [(&[3, 6][..], Stacked(&["w", "k"])), (&[2, 0], Heads), (&[5000, 1], Experts), (&[8], Heads)]
        {
            assert!(undone(shape, change, 0).unwrap_err().contains("parts"), "{shape:?}");
        }
        assert!(undone(&[12], SplitHeads, 0).unwrap_err().contains("heads of 8"));
        assert!(undone(&[2, 2], TransposedEach, 0).unwrap_err().contains("a list of matrices"));
    }
}
