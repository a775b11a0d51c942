//! The pages of one sequence on a GPU, and their numbers where kernels read them.

use std::sync::Arc;

use super::device::{CudaContext, DeviceBuffer};
use super::device_pages::DevicePages;
use super::driver::DevicePtr;
use super::stream::CudaStream;
use crate::Result;
use crate::page_pool::PagePool;
use crate::page_table::PageTable;
use crate::processes::{RankLeader, RankMessageKind};

pub(crate) struct SessionPages {
    pub table: PageTable<DevicePages>,
    on_device: DeviceBuffer,
    /// The page numbers that the device has.
    sent: Vec<i32>,
    /// The leader, on rank 0 of several, and the number of the session.
    leader: Option<(Arc<RankLeader>, u64)>,
}

impl SessionPages {
    /// The table of a sequence of up to `pages` pages.
    pub fn new(
        context: &Arc<CudaContext>,
        pool: &Arc<PagePool<DevicePages>>,
        pages: u64,
        lead: Option<(Arc<RankLeader>, u64)>,
    ) -> Result<Self> {
        let on_device = DeviceBuffer::new(context, "the table of pages on the GPU", pages.saturating_mul(4))?;
        Ok(Self {
            table: PageTable::new(pool),
            on_device,
            sent: Vec::with_capacity(pages as usize),
            leader: lead,
        })
    }

    /// The address of the numbers.
    pub fn ptr(&self) -> DevicePtr {
        self.on_device.ptr()
    }

    /// Tells the device of pages that it does not know yet, before launches on the same stream.
    pub fn send(&mut self, stream: &CudaStream) -> Result<()> {
        let pages = self.table.pages();
        let same = pages.iter().zip(&self.sent).take_while(|(a, b)| a == b).count();
        if same == pages.len() {
            return Ok(());
        }
        let new = &pages[same..];
        if let Some((lead, number)) = &self.leader {
            lead.send_message(|message| {
                message
                    .start_message(RankMessageKind::PageTable)
                    .push_number(*number)
                    .push_number(same as u64)
                    .push_list(new)
            });
        }
        write(&self.on_device, &mut self.sent, stream, same, new)
    }

    /// Takes the numbers behind the first `same` ones from rank 0. `None` where not that many were known.
    pub fn receive(&mut self, stream: &CudaStream, same: usize, new: &[i32]) -> Result<Option<()>> {
        let fits = same <= self.sent.len() && (same + new.len()) * 4 <= self.on_device.len();
        if !fits {
            return Ok(None);
        }
        write(&self.on_device, &mut self.sent, stream, same, new)?;
        stream.synchronize().map(Some)
    }
}

/// Sends the numbers behind the first `same` ones.
fn write(
    on_device: &DeviceBuffer,
    sent: &mut Vec<i32>,
    stream: &CudaStream,
    same: usize,
    new: &[i32],
) -> Result<()> {
    sent.truncate(same);
    // SAFETY: any i32 may be read as its four bytes.
    let bytes = unsafe { std::slice::from_raw_parts(new.as_ptr().cast::<u8>(), size_of_val(new)) };
    stream.send(on_device.ptr() + same as u64 * 4, bytes)?;
    sent.extend_from_slice(new);
    Ok(())
}
