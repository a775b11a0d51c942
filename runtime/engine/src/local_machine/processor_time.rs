//! The clock of a thread: what else runs on the machine does not count.

#[cfg(unix)]
mod clock {
    use std::time::Duration;

    /// Processor time of this thread.
    pub fn now() -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is valid for writing.
        if unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) } != 0 {
            return Duration::ZERO;
        }
        Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
    }
}

#[cfg(not(unix))]
mod clock {
    use std::sync::OnceLock;
    use std::time::{Duration, Instant};

    pub fn now() -> Duration {
        static BEGIN: OnceLock<Instant> = OnceLock::new();
        BEGIN.get_or_init(Instant::now).elapsed()
    }
}

pub(super) use clock::now;
