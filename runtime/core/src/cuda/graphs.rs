//! Steps as CUDA graphs: the launches of a call recorded once and started together.
//!
//! All arguments are the same in every call ([`super::control`]), only grids differ, and blocks that a call
//! does not need return at once. So a graph has the grids of the largest call of a bucket, whose bounds are
//! powers of two: of the length of sequences where a grid grows with it, of the number of sequences, of their
//! rows and of those whose logits are wanted. A context of 32k takes eight graphs at most, batches of up to
//! 64 sequences seven.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use super::device::CudaDevice;
use super::driver::{self, CudaDriver, DriverHandle};
use super::launches::{BaseAddresses, BatchSizes, GridSizes, LengthRange, ResolvedLaunch};
use crate::{Error, Result};

/// Lengths of the first bucket.
const FIRST_BUCKET: i64 = 256;
/// A driver may refuse to record because of something that does not last.
const ATTEMPTS: u32 = 3;
/// Most graphs of an entry point; then the one that was used longest ago goes.
const MOST: usize = 32;

/// The graphs of an entry point.
pub(crate) struct CudaGraphCache {
    /// The name of the work without them, for [`CudaGraphCache::performance_warning`].
    what: &'static str,
    /// The one that was used last is the last.
    recorded: Vec<(GridSizes, DriverHandle)>,
    /// Sizes of calls that had none, likewise.
    seen: Vec<GridSizes>,
    refusals: u32,
    warning: Option<String>,
}

/// True once all kernels of a list have run. The driver loads a kernel when it is first launched, which it
/// cannot do while it records.
#[derive(Default)]
pub(crate) struct KernelsLoaded(AtomicBool);

impl CudaGraphCache {
    pub fn new(what: &'static str) -> Self {
        Self { what, recorded: Vec::new(), seen: Vec::new(), refusals: 0, warning: None }
    }

    /// Puts the launches of a token on the stream, as a graph where that is possible. `loaded` tells whether
    /// all of them have run. `past`: tokens before this one, of `context` at most.
    pub fn run_decode(
        &mut self,
        device: &CudaDevice,
        (kernels, loaded): (&[ResolvedLaunch], &KernelsLoaded),
        bases: &BaseAddresses,
        (past, context): (u64, u64),
        adapted: bool,
        stream: DriverHandle,
    ) -> Result<()> {
        let sizes = GridSizes { n: 1, past: LengthRange::single(past), adapted, ..GridSizes::default() };
        let largest = GridSizes { past: length_bucket(kernels, sizes.past, context), ..sizes };
        let has_run = loaded.0.load(Ordering::Relaxed);
        self.run_sizes(device, kernels, bases, (sizes, largest), has_run, stream)?;
        loaded.0.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The same for a step of several sequences, of which a call has at most `most`. The second call of a
    /// bucket is recorded: many pieces of prompts come once.
    pub fn run_batch(
        &mut self,
        device: &CudaDevice,
        kernels: &[ResolvedLaunch],
        bases: &BaseAddresses,
        (sizes, most): (GridSizes, GridSizes),
        context: u64,
        stream: DriverHandle,
    ) -> Result<()> {
        let past = LengthRange { first: 0, ..length_bucket(kernels, sizes.past, context) };
        let largest = GridSizes { past, ..round_sizes(&sizes, &most) };
        let known = self.recorded.iter().any(|(of, _)| *of == largest);
        let loaded = known || self.seen.contains(&largest);
        if !loaded {
            if self.seen.len() == MOST {
                self.seen.remove(0);
            }
            self.seen.push(largest);
        }
        self.run_sizes(device, kernels, bases, (sizes, largest), loaded, stream)
    }

    fn run_sizes(
        &mut self,
        device: &CudaDevice,
        kernels: &[ResolvedLaunch],
        bases: &BaseAddresses,
        (sizes, largest): (GridSizes, GridSizes),
        loaded: bool,
        stream: DriverHandle,
    ) -> Result<()> {
        let graph = match self.find_graph(&largest) {
            None if loaded && self.refusals < ATTEMPTS => {
                let made = self.record_graph(device, kernels, bases, &largest, stream);
                // The others have one.
                match (made, device.ranks()) {
                    (None, Some(_)) => return Err(Error::NoRankGraph { what: self.what }),
                    (made, _) => made,
                }
            }
            found => found,
        };
        // Ranks exchange as many rows, whoever of them has a graph.
        let sizes = if device.ranks().is_some() { largest } else { sizes };
        let Some(graph) = graph else { return device.launch(kernels, bases, &sizes, stream) };
        let driver = device.context().make_current()?;
        // SAFETY: the graph's arguments are the buffers of its owner and of the executor. These stay where
        // they are, or the graph is destroyed before.
        driver.check("cuGraphLaunch", unsafe { (driver.functions.graph_launch)(graph, stream) })
    }

    fn find_graph(&mut self, sizes: &GridSizes) -> Option<DriverHandle> {
        let at = self.recorded.iter().position(|(of, _)| of == sizes)?;
        self.recorded[at..].rotate_left(1);
        self.recorded.last().map(|(_, graph)| *graph)
    }

    /// The reason why it goes without graphs, once they have been given up.
    pub fn performance_warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// `None` where the driver refuses: the kernels still run one by one, and errors of their own show there.
    fn record_graph(
        &mut self,
        device: &CudaDevice,
        kernels: &[ResolvedLaunch],
        bases: &BaseAddresses,
        sizes: &GridSizes,
        stream: DriverHandle,
    ) -> Option<DriverHandle> {
        let made = capture_launches(device, kernels, bases, sizes, stream).and_then(|graph| {
            let driver = device.context().make_current()?;
            if self.recorded.len() == MOST {
                // SAFETY: instantiated once in `capture_launches`. Whoever has started it has waited for it.
                unsafe { (driver.functions.graph_exec_destroy)(self.recorded.remove(0).1) };
            }
            Ok(graph)
        });
        match made {
            Ok(graph) => {
                self.recorded.push((*sizes, graph));
                self.refusals = 0;
                Some(graph)
            }
            Err(error) => {
                self.refusals += 1;
                if self.refusals == ATTEMPTS {
                    self.warning = Some(format!(
                        "{} kernel by kernel, which is slower: the driver refused {ATTEMPTS} times to record them as a CUDA graph \
                         ({error})",
                        self.what
                    ));
                }
                None
            }
        }
    }

    /// None of them may be running.
    pub fn destroy(&mut self, driver: &CudaDriver) {
        for (_, graph) in self.recorded.drain(..) {
            // SAFETY: instantiated once in `capture_launches`.
            unsafe { (driver.functions.graph_exec_destroy)(graph) };
        }
    }
}

fn capture_launches(
    device: &CudaDevice,
    kernels: &[ResolvedLaunch],
    bases: &BaseAddresses,
    sizes: &GridSizes,
    stream: DriverHandle,
) -> Result<DriverHandle> {
    let driver = device.context().make_current()?;
    // SAFETY: the stream is the session's; every begin is followed by an end.
    unsafe {
        let status = (driver.functions.capture_begin)(stream, driver::CAPTURE_THREAD_LOCAL);
        driver.check("cuStreamBeginCapture", status)?;
        let launched = device.launch(kernels, bases, sizes, stream);
        let (mut graph, mut exec) = (null_mut(), null_mut());
        let ended = driver.check("cuStreamEndCapture", (driver.functions.capture_end)(stream, &mut graph));
        let made = launched.and(ended).and_then(|()| {
            driver.check("cuGraphInstantiate", (driver.functions.graph_instantiate)(&mut exec, graph, 0))
        });
        if !graph.is_null() {
            (driver.functions.graph_destroy)(graph);
        }
        made.map(|()| exec)
    }
}

/// The lengths that have a graph in common with those of `past`, none beyond `context` (0: unbounded).
fn length_bucket(kernels: &[ResolvedLaunch], past: LengthRange, context: u64) -> LengthRange {
    if kernels.iter().any(ResolvedLaunch::grid_grows) {
        bucket_range(past.last, context)
    } else {
        LengthRange::default()
    }
}

/// The largest call that has a graph in common with this one, none beyond `most`.
fn round_sizes(sizes: &GridSizes, most: &GridSizes) -> GridSizes {
    let up =
        |size: i64, most: i64| (size.max(1) as u64).next_power_of_two().min(most.max(size) as u64) as i64;
    let (batch, limits) = (&sizes.batch, &most.batch);
    GridSizes {
        n: up(sizes.n, most.n),
        past: sizes.past,
        adapted: sizes.adapted,
        batch: BatchSizes {
            sequences: up(batch.sequences, limits.sequences),
            max_rows: up(batch.max_rows, limits.max_rows),
            outputs: up(batch.outputs, limits.outputs),
        },
    }
}

fn bucket_range(past: i64, context: u64) -> LengthRange {
    let end = ((past + 1).max(FIRST_BUCKET) as u64).next_power_of_two() as i64;
    let first = if end == FIRST_BUCKET { 0 } else { end / 2 };
    let last = match i64::try_from(context) {
        Ok(context) if context > 0 => end.min(context) - 1,
        _ => end - 1,
    };
    LengthRange { first, last }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_every_length_once() {
        for context in [0, 1, 200, 256, 257, 5000, 8192] {
            let mut expected = LengthRange { first: 0, last: -1 };
            for past in 0..if context == 0 { 10_000 } else { context as i64 } {
                let span = bucket_range(past, context);
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

    #[test]
    fn batches_of_a_bucket_have_its_power_of_two_or_the_most() {
        let of = |n, sequences, most_rows, wanted| {
            let batch = BatchSizes { sequences, max_rows: most_rows, outputs: wanted };
            GridSizes { n, batch, ..GridSizes::default() }
        };
        let most = of(48, 24, 48, 48);
        assert_eq!(round_sizes(&of(1, 1, 1, 1), &most), of(1, 1, 1, 1));
        assert_eq!(round_sizes(&of(9, 9, 1, 9), &most), of(16, 16, 1, 16));
        assert_eq!(round_sizes(&of(17, 17, 1, 17), &most), of(32, 24, 1, 32));
        assert_eq!(round_sizes(&of(40, 3, 33, 2), &most), of(48, 4, 48, 2));
        let buckets: std::collections::BTreeSet<i64> =
            (1..=64).map(|b| round_sizes(&of(b, b, 1, b), &of(64, 64, 64, 64)).n).collect();
        assert_eq!(buckets.len(), 7);
    }
}
