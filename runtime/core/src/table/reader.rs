//! The places of the parts of a loaded table.

use mlcc_abi::{EntryPoint, ModelTable, StepFn, Str};
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
/// Most variants, device images and device entries: their contents may overlap, so each may be as large as
/// the table.
const MOST_LARGE: u64 = 64;

impl<'a> TableReader<'a> {
    /// The values at an address of the table.
    ///
    /// # Safety
    /// The image that `self.image` describes is mapped, with its table at `self.table`, for `'a`,
    /// and not written any more; any bits are a value of `T`.
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

    /// Refuses a function of a variant that is not the one that an entry point of that name has.
    pub fn check_function(&self, variant: &str, name: &str, function: StepFn) -> TableResult<()> {
        let level = variant.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
        // One function may do for both: a fresh state is like one that was used before.
        let names = match EntryPoint::from_name(name) {
            Some(EntryPoint::ResetKvCache) => [name, EntryPoint::CreateKvCache.name()],
            _ => [name, name],
        };
        let symbols = names.map(|name| format!("mlcc_{name}_{level}"));
        let base = (self.table.addr() as u64).wrapping_sub(self.image.model_table().start);
        let at = ((function as *const ()).addr() as u64).wrapping_sub(base);
        if !self.image.is_function(at, &[&symbols[0], &symbols[1]]) {
            return malformed(format!("the entry point {name} of {variant} is not a function of that name"));
        }
        Ok(())
    }
}
