//! The pages of one sequence on a GPU, and their numbers where kernels read them.

use std::sync::Arc;

use super::device::{Context, DeviceBuffer};
use super::device_pages::DevicePages;
use super::driver::DevicePtr;
use super::stream::Stream;
use crate::Result;
use crate::page_pool::PagePool;
use crate::page_table::PageTable;

pub(crate) struct SessionPages {
    pub table: PageTable<DevicePages>,
    on_device: DeviceBuffer,
    /// What the device was told.
    sent: Vec<i32>,
}

impl SessionPages {
    /// For a sequence of up to `pages` pages.
    pub fn new(context: &Arc<Context>, pool: &Arc<PagePool<DevicePages>>, pages: u64) -> Result<Self> {
        let on_device = DeviceBuffer::new(context, "the table of pages on the GPU", pages.saturating_mul(4))?;
        Ok(Self { table: PageTable::new(pool), on_device, sent: Vec::with_capacity(pages as usize) })
    }

    /// Where the numbers lie.
    pub fn ptr(&self) -> DevicePtr {
        self.on_device.ptr()
    }

    /// Tells the device of pages that it does not know yet, before launches on the same stream.
    pub fn send(&mut self, stream: &Stream) -> Result<()> {
        let pages = self.table.pages();
        let same = pages.iter().zip(&self.sent).take_while(|(a, b)| a == b).count();
        if same == pages.len() {
            return Ok(());
        }
        self.sent.truncate(same);
        let new = &pages[same..];
        // SAFETY: any i32 may be read as its four bytes.
        let bytes = unsafe { std::slice::from_raw_parts(new.as_ptr().cast::<u8>(), size_of_val(new)) };
        stream.send(self.on_device.ptr() + same as u64 * 4, bytes)?;
        self.sent.extend_from_slice(new);
        Ok(())
    }
}
