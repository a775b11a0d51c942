//! Where the parts of a loaded table lie.

use mlcc_abi::{self as abi, Entries, ModelTable, Str};
use mlcc_loader::CodeImage;

use super::{TableResult, malformed};

/// A loaded table and what its addresses are held against.
pub(crate) struct TableReader<'a> {
    pub image: &'a CodeImage<'a>,
    /// The symbol `mlcc_model` of the loaded image.
    pub table: *const ModelTable,
    /// The metadata as the file has them beside the code.
    pub metadata: Option<&'a str>,
}

/// Longest name, of anything.
const MOST_NAME_BYTES: u64 = 4096;
/// Most variants, device images and device entries: their contents may overlap, so each may be as large as the table.
const MOST_LARGE: u64 = 64;

impl<'a> TableReader<'a> {
    /// The values at an address of the table.
    ///
    /// # Safety
    /// The image that `self.image` describes is mapped, with its table at `self.table`, for `'a`, and not written any more; any
    /// bits are a value of `T`.
    pub unsafe fn array<T>(&self, at: *const T, n: u64, what: &str) -> TableResult<&'a [T]> {
        if n == 0 {
            return Ok(&[]);
        }
        let base = (self.table.addr() as u64).wrapping_sub(self.image.model_table().start);
        let from = (at.addr() as u64).wrapping_sub(base);
        let end = n.checked_mul(size_of::<T>() as u64).and_then(|bytes| from.checked_add(bytes));
        if !at.is_aligned() || end.is_none_or(|end| !self.image.contains_range(&(from..end))) {
            return malformed(format!("the table's {what} lie outside of the file"));
        }
        // SAFETY: by contract; inside of one mapped segment, aligned and not null.
        Ok(unsafe { std::slice::from_raw_parts(at, n as usize) })
    }

    /// # Safety
    /// As [`TableReader::array`].
    pub unsafe fn long_text(&self, s: Str) -> TableResult<String> {
        // SAFETY: by contract; any bits are a byte.
        let bytes = unsafe { self.array(s.ptr, s.len, "texts") }?;
        String::from_utf8(bytes.to_vec()).or_else(|_| malformed("a text of the table is not UTF-8"))
    }

    /// # Safety
    /// As [`TableReader::array`].
    pub unsafe fn name(&self, s: Str) -> TableResult<String> {
        if s.len > MOST_NAME_BYTES {
            return malformed(format!("the table has a name of {} bytes", s.len));
        }
        // SAFETY: by contract.
        unsafe { self.long_text(s) }
    }

    /// An array of things that are large each.
    ///
    /// # Safety
    /// As [`TableReader::array`].
    pub unsafe fn bounded_array<T>(&self, at: *const T, n: u64, what: &str) -> TableResult<&'a [T]> {
        if n > MOST_LARGE {
            return malformed(format!("the table has {n} {what}, more than {MOST_LARGE}"));
        }
        // SAFETY: by contract.
        unsafe { self.array(at, n, what) }
    }

    /// Every entry point of a variant is code, and of that name.
    pub fn check_entries(&self, variant: &str, entries: &Entries) -> TableResult<()> {
        let level = variant.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
        let [prefill, decode, logits, batch, step, create, reset, softmax, metadata, adapted @ ..] =
            abi::ENTRY_NAMES;
        let [with_prefill, with_decode, with_logits, with_batch, with_step, encode] = adapted;
        let steps = [
            (prefill, entries.prefill),
            (decode, entries.decode),
            (logits, entries.prefill_logits),
            (batch, entries.decode_batch),
            (step, entries.step),
            (create, entries.create_kv_cache),
            (reset, entries.reset_kv_cache),
            (softmax, entries.softmax_with_temperature),
            (with_prefill, entries.adapted_prefill),
            (with_decode, entries.adapted_decode),
            (with_logits, entries.adapted_prefill_logits),
            (with_batch, entries.adapted_decode_batch),
            (with_step, entries.adapted_step),
            (encode, entries.encode),
        ];
        let steps =
            steps.map(|(name, step)| (name, step.map(|f| f as *const ()), format!("mlcc_{name}_{level}")));
        let metadata = (metadata, entries.get_metadata.map(|f| f as *const ()), format!("mlcc_{metadata}"));
        // One function may do for both: a fresh state is like one that was used before.
        let create = format!("mlcc_{create}_{level}");
        for (name, function, symbol) in steps.iter().chain([&metadata]) {
            let Some(function) = function else { continue };
            let base = (self.table.addr() as u64).wrapping_sub(self.image.model_table().start);
            let names = [symbol.as_str(), if *name == reset { create.as_str() } else { symbol }];
            if !self.image.is_function((function.addr() as u64).wrapping_sub(base), &names) {
                return malformed(format!(
                    "the entry point {name} of {variant} is not a function of that name"
                ));
            }
        }
        Ok(())
    }
}
