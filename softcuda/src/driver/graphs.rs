//! Recording of streams, graphs, events.

use super::streams::{StreamCapture, StreamWork};
use super::{DriverResult, SoftDriver, Status, fail};

impl SoftDriver {
    pub fn begin_capture(&mut self, stream: u64) -> DriverResult<()> {
        if stream == 0 {
            return fail(Status::StreamCaptureUnsupported, "the default stream cannot record");
        }
        let stream = self.streams.get(stream)?;
        if stream.recording.is_some() {
            return fail(Status::InvalidValue, "the stream records already");
        }
        stream.recording = Some(StreamCapture::default());
        Ok(())
    }

    pub fn end_capture(&mut self, stream: u64) -> DriverResult<u64> {
        let Some(recording) = self.streams.get(stream)?.recording.take() else {
            return fail(Status::InvalidValue, "the stream does not record");
        };
        if self.options.refuse_captures > 0 {
            self.options.refuse_captures -= 1;
            return fail(Status::StreamCaptureInvalidated, "recording is refused (SOFTCUDA_REFUSE_CAPTURES)");
        }
        if let Some(what) = recording.invalid {
            return fail(Status::StreamCaptureInvalidated, what);
        }
        let handle = self.streams.new_handle();
        self.streams.graphs.insert(handle, recording.work);
        Ok(handle)
    }

    pub fn instantiate(&mut self, graph: u64) -> DriverResult<u64> {
        let Some(work) = self.streams.graphs.get(&graph).cloned() else {
            return fail(Status::InvalidHandle, "no such graph");
        };
        let handle = self.streams.new_handle();
        self.streams.executables.insert(handle, work);
        Ok(handle)
    }

    pub fn launch_graph(&mut self, executable: u64, stream: u64) -> DriverResult<()> {
        let Some(work) = self.streams.executables.get(&executable).cloned() else {
            return fail(Status::InvalidHandle, "no such executable graph");
        };
        if self.streams.get(stream)?.recording.is_some() {
            return fail(Status::StreamCaptureUnsupported, "graphs within graphs are not known");
        }
        self.graph_launches += 1;
        work.into_iter().try_for_each(|work| self.enqueue(stream, work))
    }

    pub fn destroy_graph(&mut self, graph: u64) -> DriverResult<()> {
        match self.streams.graphs.remove(&graph) {
            Some(_) => Ok(()),
            None => fail(Status::InvalidHandle, "no such graph"),
        }
    }

    pub fn destroy_executable(&mut self, executable: u64) -> DriverResult<()> {
        match self.streams.executables.remove(&executable) {
            Some(_) => Ok(()),
            None => fail(Status::InvalidHandle, "no such executable graph"),
        }
    }

    pub fn create_event(&mut self) -> u64 {
        let handle = self.streams.new_handle();
        self.streams.events.insert(handle, None);
        handle
    }

    pub fn record_event(&mut self, event: u64, stream: u64) -> DriverResult<()> {
        let Some(happened) = self.streams.events.get_mut(&event) else {
            return fail(Status::InvalidHandle, "no such event");
        };
        *happened = None;
        self.enqueue(stream, StreamWork::Event(event))
    }

    /// Waits until an event has happened, if it was recorded.
    pub fn wait_event(&mut self, event: u64) -> DriverResult<()> {
        if !self.streams.events.contains_key(&event) {
            return fail(Status::InvalidHandle, "no such event");
        }
        let holds = |work: &StreamWork| matches!(work, StreamWork::Event(e) if *e == event);
        let stream =
            self.streams.all.iter().find(|(_, s)| s.work.iter().any(holds)).map(|(handle, _)| *handle);
        stream.map_or(Ok(()), |stream| self.wait(stream))
    }

    /// Milliseconds between two events.
    pub fn elapsed(&self, first: u64, last: u64) -> DriverResult<f32> {
        match (self.streams.events.get(&first), self.streams.events.get(&last)) {
            (Some(Some(first)), Some(Some(last))) => Ok(last.duration_since(*first).as_secs_f32() * 1e3),
            (Some(_), Some(_)) => fail(Status::NotReady, "an event has not happened"),
            _ => fail(Status::InvalidHandle, "no such event"),
        }
    }

    pub fn destroy_event(&mut self, event: u64) -> DriverResult<()> {
        match self.streams.events.remove(&event) {
            Some(_) => Ok(()),
            None => fail(Status::InvalidHandle, "no such event"),
        }
    }
}
