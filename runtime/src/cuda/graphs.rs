//! `decode` as CUDA graphs: the launches of a token recorded once and started together.
//!
//! All arguments are the same for every token ([`super::control`]), so one graph serves every length unless a grid grows
//! with it. Then a graph has the grids of the longest sequence of a bucket, whose bounds are powers of two. Blocks that a token
//! does not need return at once; beyond the first bucket there are at most as many of them as others, and a context of 32k
//! takes eight graphs.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use super::device::Gpu;
use super::driver::{self, Driver, Handle};
use super::launches::{Bases, Kernel, Sizes, Span};
use crate::Result;

/// Lengths of the first bucket.
const FIRST_BUCKET: i64 = 256;
/// A driver may refuse to record because of something that does not last.
const ATTEMPTS: u32 = 3;

/// The graphs of a session.
#[derive(Default)]
pub(crate) struct Graphs {
    made: Vec<(Span, Handle)>,
    refused: u32,
    notice: Option<String>,
}

/// Whether all kernels of `decode` have run once. The driver loads a kernel when it is first launched, which it cannot do
/// while it records.
#[derive(Default)]
pub(crate) struct Loaded(AtomicBool);

impl Graphs {
    /// Puts the launches of a token on the stream, as a graph where that is possible. `past`: tokens before this one.
    pub fn decode(
        &mut self,
        device: &Gpu,
        kernels: &[Kernel],
        bases: &Bases,
        past: u64,
        context: u64,
        stream: Handle,
    ) -> Result<()> {
        let sizes = Sizes { n: 1, past: Span::of(past), ..Sizes::default() };
        let span = bucket(kernels, sizes.past, context);
        let known = self.made.iter().find(|(of, _)| *of == span).map(|(_, graph)| *graph);
        let graph = match known {
            Some(graph) => Some(graph),
            None if self.refused < ATTEMPTS && device.decode_loaded.0.load(Ordering::Relaxed) => {
                self.record(device, kernels, bases, &Sizes { past: span, ..sizes }, stream)
            }
            None => None,
        };
        let Some(graph) = graph else {
            device.launch(kernels, bases, &sizes, stream)?;
            device.decode_loaded.0.store(true, Ordering::Relaxed);
            return Ok(());
        };
        let driver = device.context().enter()?;
        // SAFETY: the graph's arguments are the buffers of this session and those of the executor, which stay where they are.
        driver.check("cuGraphLaunch", unsafe { (driver.f.graph_launch)(graph, stream) })
    }

    /// Why tokens are decoded without a graph, once that has been given up.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// `None` where the driver refuses: the kernels still run one by one, and errors of their own show there.
    fn record(
        &mut self,
        device: &Gpu,
        kernels: &[Kernel],
        bases: &Bases,
        sizes: &Sizes,
        stream: Handle,
    ) -> Option<Handle> {
        match capture(device, kernels, bases, sizes, stream) {
            Ok(graph) => {
                self.made.push((sizes.past, graph));
                self.refused = 0;
                Some(graph)
            }
            Err(error) => {
                self.refused += 1;
                if self.refused == ATTEMPTS {
                    self.notice = Some(format!(
                        "tokens are decoded kernel by kernel, which is slower: the driver refused {ATTEMPTS} times to record \
                         them as a CUDA graph ({error})"
                    ));
                }
                None
            }
        }
    }

    /// Nothing of them may be running.
    pub fn destroy(&mut self, driver: &Driver) {
        for (_, graph) in self.made.drain(..) {
            // SAFETY: instantiated once in `capture`.
            unsafe { (driver.f.graph_exec_destroy)(graph) };
        }
    }
}

fn capture(device: &Gpu, kernels: &[Kernel], bases: &Bases, sizes: &Sizes, stream: Handle) -> Result<Handle> {
    let driver = device.context().enter()?;
    // SAFETY: the stream is the session's; every begin is followed by an end.
    unsafe {
        let status = (driver.f.capture_begin)(stream, driver::CAPTURE_THREAD_LOCAL);
        driver.check("cuStreamBeginCapture", status)?;
        let launched = device.launch(kernels, bases, sizes, stream);
        let (mut graph, mut exec) = (null_mut(), null_mut());
        let ended = driver.check("cuStreamEndCapture", (driver.f.capture_end)(stream, &mut graph));
        let made = launched.and(ended).and_then(|()| {
            driver.check("cuGraphInstantiate", (driver.f.graph_instantiate)(&mut exec, graph, 0))
        });
        if !graph.is_null() {
            (driver.f.graph_destroy)(graph);
        }
        made.map(|()| exec)
    }
}

/// The lengths that have a graph in common with those of `past`, none beyond `context` (0: unbounded).
fn bucket(kernels: &[Kernel], past: Span, context: u64) -> Span {
    if kernels.iter().any(Kernel::grows) { bucket_of(past.last, context) } else { Span::default() }
}

fn bucket_of(past: i64, context: u64) -> Span {
    let end = ((past + 1).max(FIRST_BUCKET) as u64).next_power_of_two() as i64;
    let first = if end == FIRST_BUCKET { 0 } else { end / 2 };
    let last = match i64::try_from(context) {
        Ok(context) if context > 0 => end.min(context) - 1,
        _ => end - 1,
    };
    Span { first, last }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_every_length_once() {
        for context in [0, 1, 200, 256, 257, 5000, 8192] {
            let mut expected = Span { first: 0, last: -1 };
            for past in 0..if context == 0 { 10_000 } else { context as i64 } {
                let span = bucket_of(past, context);
                if past > expected.last {
                    assert_eq!(span.first, past, "context {context}");
                    let longest = if past == 0 { FIRST_BUCKET } else { 2 * past };
                    assert!(span.last < longest && (context == 0 || span.last < context as i64));
                    expected = span;
                }
                assert_eq!(span, expected, "{past} of {context}");
            }
        }
    }
}
