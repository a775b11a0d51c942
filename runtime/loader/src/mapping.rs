//! An image in memory.

use core::ops::Range;

use crate::dynamic::{RELOCATION_BYTES, long_at};
use crate::error::MapError;
use crate::image::{CodeImage, EXECUTABLE};
use crate::os::{PageProtection, PageRegion, flush_instructions};

/// The segments of a [`CodeImage`] in pages of their own: relocated, then read-only or executable. The file
/// is not used any more, and dropping it removes the code.
#[derive(Debug)]
pub struct LoadedImage {
    region: PageRegion,
}

impl LoadedImage {
    /// Copies the segments, writes the relocations and protects every page.
    pub fn map(image: &CodeImage<'_>) -> Result<Self, MapError> {
        let page = PageRegion::page_bytes();
        let bytes = image.mapped_segments().last().map_or(0, |last| last.vaddr + last.memory_bytes);
        let span = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_next_multiple_of(page));
        let span = span.filter(|&span| span > 0).ok_or(MapError::TooLarge { bytes })?;
        let places = page_ranges(image, page)?;
        let region = PageRegion::reserve(span).map_err(|source| MapError::Memory { bytes: span, source })?;
        let mut loaded = Self { region };
        loaded.copy(image);
        loaded.relocate(image);
        for (place, protection) in places {
            if protection == PageProtection::ReadExecute {
                flush_instructions(&loaded.region.as_slice()[place.clone()]);
            }
            loaded.region.protect(place, protection).map_err(|source| MapError::Protect { source })?;
        }
        Ok(loaded)
    }

    /// The address at which address 0 of the image lies.
    pub fn base(&self) -> *const u8 {
        self.region.as_ptr()
    }

    /// Copies what the file has of each segment, all of which lie inside of the region; the rest stays zero.
    fn copy(&mut self, image: &CodeImage<'_>) {
        let memory = self.region.as_mut_slice();
        for segment in image.mapped_segments() {
            let Some(bytes) = image.bytes(segment.vaddr, segment.file_bytes) else { continue };
            memory[segment.vaddr as usize..][..bytes.len()].copy_from_slice(bytes);
        }
    }

    /// Writes absolute addresses over the places of relative relocations; [`CodeImage::check`] has looked at
    /// each.
    fn relocate(&mut self, image: &CodeImage<'_>) {
        let base = self.region.as_ptr() as u64;
        let memory = self.region.as_mut_slice();
        for relocation in image.relocations.chunks_exact(RELOCATION_BYTES as usize) {
            let (Some(at), Some(to)) = (long_at(relocation, 0), long_at(relocation, 16)) else { continue };
            memory[at as usize..][..8].copy_from_slice(&base.wrapping_add(to).to_le_bytes());
        }
    }
}

/// The whole pages of each segment and their protection. Data is not written after the relocations.
fn page_ranges(
    image: &CodeImage<'_>,
    page: usize,
) -> Result<std::vec::Vec<(Range<usize>, PageProtection)>, MapError> {
    let mut places = std::vec::Vec::new();
    let mut end = 0;
    for segment in image.mapped_segments() {
        let start = segment.vaddr as usize / page * page;
        if start < end {
            return Err(MapError::PageSize { page });
        }
        end = ((segment.vaddr + segment.memory_bytes) as usize).next_multiple_of(page);
        let code = segment.flags & EXECUTABLE != 0;
        let protection = if code { PageProtection::ReadExecute } else { PageProtection::Read };
        places.push((start..end, protection));
    }
    Ok(places)
}
