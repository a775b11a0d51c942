//! Taps that another program has written: a safetensors file with a tensor `[positions, width]` per tap, the
//! token ids in `tokens` and, optionally, `logits` (`tools/dump_hf.py` makes one with transformers).

use std::path::Path;

use mlcc_models::Checkpoint;
use mlcc_models::checkpoint::CheckpointFormat;

use super::{BoxedError, TapCall, TapOutput};

/// The tensor with the prompt.
const TOKENS: &str = "tokens";

pub struct TapFile {
    pub tokens: Vec<i32>,
    taps: Vec<TapOutput>,
}

impl TapFile {
    pub fn read(path: &Path) -> Result<TapFile, BoxedError> {
        let label = path.display();
        let bytes = mlcc_files::read(path, mlcc_files::FileKind::Layers)
            .map_err(|e| format!("cannot read {label}: {e}"))?;
        let origin = label.to_string();
        let checkpoint = Checkpoint::from_bytes(&origin, CheckpointFormat::Safetensors, bytes)?;
        let mut file = TapFile { tokens: Vec::new(), taps: Vec::new() };
        for info in checkpoint.tensors() {
            let data = checkpoint.read(&info.name)?;
            let values = data.to_f32()?;
            if info.name == TOKENS {
                file.tokens = values.iter().map(|&v| v as i32).collect();
                continue;
            }
            let &[_, width] = data.shape() else {
                let shape = data.shape();
                return Err(
                    format!("{label}: {} is {shape:?}, expected [positions, width]", info.name).into()
                );
            };
            file.taps.push(TapOutput { name: info.name.clone(), width, values });
        }
        let positions = file.tokens.len();
        if positions == 0 {
            return Err(format!("{label} has no tensor `{TOKENS}` with the token ids of the prompt").into());
        }
        for tap in &file.taps {
            let rows = tap.values.len().checked_div(tap.width).unwrap_or(0);
            if rows != positions && rows != 1 {
                let name = &tap.name;
                return Err(
                    format!("{label}: {name} has {rows} rows for a prompt of {positions} tokens").into()
                );
            }
        }
        Ok(file)
    }

    /// The file's values for the taps of a call, in as many rows as were found: those of the last positions.
    /// Rows that the file lacks (it may hold the last position only) leave the tap out.
    pub fn expected(&self, call: &TapCall, found: &[TapOutput]) -> Vec<TapOutput> {
        let rows_of = |tap: &TapOutput| {
            let other = found.iter().find(|f| f.name == tap.name)?;
            let rows = other.values.len().checked_div(other.width)?;
            let end = call.start + call.tokens.len();
            let have = tap.values.len() / tap.width;
            let (from, to) = match have == self.tokens.len() {
                true => (end.checked_sub(rows)?, end),
                false if end == self.tokens.len() && rows == 1 => (0, 1),
                false => return None,
            };
            let values = tap.values.get(from * tap.width..to * tap.width)?.to_vec();
            Some(TapOutput { name: tap.name.clone(), width: tap.width, values })
        };
        self.taps.iter().filter_map(rows_of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_the_call_are_taken() {
        let tap =
            |name: &str, values: &[f32]| TapOutput { name: name.into(), width: 2, values: values.to_vec() };
        let file = TapFile {
            tokens: vec![1, 2, 3],
            taps: vec![tap("a", &[0., 1., 2., 3., 4., 5.]), tap("logits", &[8., 9.])],
        };
        let first = TapCall { start: 0, tokens: vec![1, 2] };
        let found = [tap("a", &[0.; 4]), tap("logits", &[0.; 2])];
        assert_eq!(file.expected(&first, &found), [tap("a", &[0., 1., 2., 3.])]);
        let last = TapCall { start: 2, tokens: vec![3] };
        let found = [tap("a", &[0.; 2]), tap("logits", &[0.; 2])];
        assert_eq!(file.expected(&last, &found), [tap("a", &[4., 5.]), tap("logits", &[8., 9.])]);
        // Only the last row of a call: the norm after the layers.
        assert_eq!(file.expected(&first, &[tap("a", &[0.; 2])]), [tap("a", &[2., 3.])]);
    }
}
