//! The limits of one rendering, and the meter of the rendering that runs on this thread.
//!
//! The template engine counts steps ([`MOST_STEPS`], its "fuel") and nested calls. It does not count the cost
//! of a step, so everything that makes text or values asks here first.

use crate::chat::TemplateHost;
use minijinja::{Error, ErrorKind};
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// Instructions of the template engine; a thousand messages in a large template take a fiftieth of it.
pub const MOST_STEPS: u64 = 5_000_000;
/// Time of the processor that a small conversation may take; what else runs on the machine does not count ...
const LEAST_TIME: Duration = Duration::from_secs(1);
/// ... and for every byte of the conversation. Templates that collect messages in a list copy it for each of
/// them.
const TIME_PER_BYTE: Duration = Duration::from_micros(4);
/// Levels of lists and mappings inside each other; JSON as `serde_json` reads it has 128.
pub const MOST_LEVELS: usize = 140;
/// Bytes of values and, apart from them, of text that a template may make of a small conversation ...
const LEAST_BYTES: u64 = 16 << 20;
/// ... and for every byte of the conversation. Templates copy a message a few times (`trim`, `split`, `+`).
const BYTES_PER_BYTE: u64 = 16;
/// Looking at the clock costs what working on this many bytes does.
const BYTES_PER_LOOK: u64 = 256 << 10;
/// The fixed cost of an operation, in bytes of work.
const OPERATION: u64 = 64;
/// Texts shorter than this are too many to keep track of: they count until the end.
const TRACKED: usize = 1 << 10;

/// The limit that a rendering has reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum RenderLimit {
    #[error("more than {bytes} bytes of values")]
    Memory { bytes: u64 },
    #[error("more than {bytes} bytes of text")]
    Text { bytes: u64 },
    #[error("more than {milliseconds} ms")]
    Time { milliseconds: u64 },
    #[error("more than {MOST_LEVELS} levels of nested values")]
    Levels,
}

struct RenderMeter {
    most: Cell<u64>,
    memory: Cell<u64>,
    text: Cell<u64>,
    /// Bytes of work since the clock was read last.
    work: Cell<u64>,
    time: Cell<Duration>,
    end: Cell<Duration>,
    /// The host whose clock is read.
    host: Cell<Option<&'static dyn TemplateHost>>,
    reached: Cell<Option<RenderLimit>>,
    /// Long texts that were counted; those without other owners are given back.
    texts: RefCell<Vec<Arc<str>>>,
}

thread_local! {
    static METER: RenderMeter = const { RenderMeter {
        most: Cell::new(0),
        memory: Cell::new(0),
        text: Cell::new(0),
        work: Cell::new(0),
        time: Cell::new(Duration::MAX),
        end: Cell::new(Duration::MAX),
        host: Cell::new(None),
        reached: Cell::new(None),
        texts: RefCell::new(Vec::new()),
    } };
}

/// Makes this thread render for `host`; an earlier rendering counts no more.
pub fn enter_host(host: &'static dyn TemplateHost) {
    METER.with(|meter| {
        meter.host.set(Some(host));
        meter.texts.borrow_mut().clear();
    });
}

/// Begins a rendering of `input` bytes of conversation on this thread.
pub fn begin_rendering(input: u64) {
    let most = LEAST_BYTES.saturating_add(input.saturating_mul(BYTES_PER_BYTE));
    let per_byte = TIME_PER_BYTE.saturating_mul(u32::try_from(input).unwrap_or(u32::MAX));
    let time = LEAST_TIME.saturating_add(per_byte);
    METER.with(|meter| {
        meter.most.set(most);
        meter.memory.set(most);
        meter.text.set(most);
        meter.work.set(0);
        meter.time.set(time);
        meter.end.set(meter.now().saturating_add(time));
        meter.reached.set(None);
    });
}

/// The first limit that was reached. The engine may have wrapped the error or lost it in formatting.
pub fn reached_limit() -> Option<RenderLimit> {
    METER.with(|meter| meter.reached.get())
}

fn reach_limit(limit: RenderLimit) -> Error {
    METER.with(|meter| {
        if meter.reached.get().is_none() {
            meter.reached.set(Some(limit));
        }
    });
    Error::new(ErrorKind::InvalidOperation, limit.to_string()).with_source(limit)
}

pub fn too_deep() -> Error {
    reach_limit(RenderLimit::Levels)
}

/// Counts an operation that looks at `bytes`.
pub fn count_work(bytes: u64) -> Result<(), Error> {
    let limit = METER.with(|meter| {
        let work = meter.work.get().saturating_add(bytes).saturating_add(OPERATION);
        let look = work >= BYTES_PER_LOOK;
        meter.work.set(if look { 0 } else { work });
        (look && meter.now() >= meter.end.get()).then(|| meter.time.get())
    });
    match limit {
        Some(time) => Err(reach_limit(RenderLimit::Time { milliseconds: time.as_millis() as u64 })),
        None => Ok(()),
    }
}

/// Counts `bytes` of a value that is about to be made.
pub fn count_memory(bytes: u64) -> Result<(), Error> {
    count_work(bytes)?;
    let (taken, most) = METER.with(|meter| {
        if meter.memory.get() < bytes {
            meter.collect();
        }
        let left = meter.memory.get().checked_sub(bytes);
        meter.memory.set(left.unwrap_or(0));
        (left.is_some(), meter.most.get())
    });
    if taken { Ok(()) } else { Err(reach_limit(RenderLimit::Memory { bytes: most })) }
}

/// There is room for `bytes` that are needed for a moment.
pub fn check_memory(bytes: u64) -> Result<(), Error> {
    count_memory(bytes)?;
    free_memory(bytes);
    Ok(())
}

/// A value of `bytes`, written out, is not larger than all values together may be.
pub fn check_size(bytes: u64) -> Result<(), Error> {
    let most = METER.with(|meter| meter.most.get());
    if bytes > most { Err(reach_limit(RenderLimit::Memory { bytes: most })) } else { Ok(()) }
}

/// Gives back what [`count_memory`] counted.
pub fn free_memory(bytes: u64) {
    // The meter is dropped at the end of the thread.
    let _ = METER.try_with(|meter| meter.memory.set(meter.memory.get().saturating_add(bytes)));
}

/// Counts `bytes` of text that is about to be written, to the prompt or into a `set` block.
pub fn count_text(bytes: u64) -> Result<(), Error> {
    count_work(bytes)?;
    let left = METER.with(|meter| {
        let left = meter.text.get().checked_sub(bytes);
        meter.text.set(left.unwrap_or(0));
        left.ok_or(meter.most.get())
    });
    left.map(drop).map_err(|bytes| reach_limit(RenderLimit::Text { bytes }))
}

/// Tracks a text that [`count_memory`] has counted; it no longer counts once it is dropped.
pub fn track_text(text: &Arc<str>) {
    if text.len() >= TRACKED {
        METER.with(|meter| meter.texts.borrow_mut().push(Arc::clone(text)));
    }
}

impl RenderMeter {
    fn now(&self) -> Duration {
        self.host.get().map_or(Duration::ZERO, TemplateHost::processor_time)
    }

    fn collect(&self) {
        let mut freed = 0;
        self.texts.borrow_mut().retain(|text| {
            let used = Arc::strong_count(text) > 1;
            freed += if used { 0 } else { text.len() as u64 };
            used
        });
        self.memory.set(self.memory.get().saturating_add(freed));
    }
}

/// A text that grows within the limit: what `count` says of every piece.
pub struct BoundedText {
    text: String,
    count: fn(u64) -> Result<(), Error>,
}

impl BoundedText {
    /// The text of a value ([`count_memory`]).
    pub fn value() -> BoundedText {
        BoundedText { text: String::new(), count: count_memory }
    }

    /// Written text ([`count_text`]).
    pub fn output() -> BoundedText {
        BoundedText { text: String::new(), count: count_text }
    }

    /// `written` is the result of the writing: an error is a limit's.
    pub fn finish<E: std::fmt::Display>(self, written: Result<(), E>) -> Result<String, Error> {
        match (written, reached_limit()) {
            (Ok(()), _) => Ok(self.text),
            (Err(_), Some(limit)) => Err(reach_limit(limit)),
            (Err(error), None) => Err(Error::new(ErrorKind::InvalidOperation, error.to_string())),
        }
    }
}

impl std::fmt::Write for BoundedText {
    fn write_str(&mut self, piece: &str) -> std::fmt::Result {
        (self.count)(piece.len() as u64).map_err(|_| std::fmt::Error)?;
        self.text.push_str(piece);
        Ok(())
    }
}

impl std::io::Write for BoundedText {
    fn write(&mut self, piece: &[u8]) -> std::io::Result<usize> {
        let text = std::str::from_utf8(piece).map_err(std::io::Error::other)?;
        (self.count)(piece.len() as u64).map_err(std::io::Error::other)?;
        self.text.push_str(text);
        Ok(piece.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
