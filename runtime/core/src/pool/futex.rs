//! Sleeping until a word of memory changes.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while `word` is `seen`, until [`wake`], but not longer than `most`; may return early. The system
/// compares before it puts the thread to sleep, so a change and its `wake` after the caller's last look are
/// not missed.
pub fn wait(word: &AtomicU32, seen: u32, most: Duration) {
    system::wait(word, seen, most);
}

/// Wakes all who sleep at `word`.
pub fn wake(word: &AtomicU32) {
    system::wake(word);
}

#[cfg(all(
    target_os = "linux",
    target_pointer_width = "64",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod system {
    use std::ffi::{c_int, c_long};
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    #[cfg(target_arch = "x86_64")]
    const SYS_FUTEX: c_long = 202;
    #[cfg(target_arch = "aarch64")]
    const SYS_FUTEX: c_long = 98;
    /// `FUTEX_WAIT` and `FUTEX_WAKE` with `FUTEX_PRIVATE_FLAG`: within one process.
    const WAIT: c_int = 128;
    const WAKE: c_int = 1 | 128;

    /// `struct timespec` of 64-bit systems.
    #[repr(C)]
    struct Timespec {
        seconds: i64,
        nanoseconds: i64,
    }

    unsafe extern "C" {
        fn syscall(number: c_long, ...) -> c_long;
    }

    pub fn wait(word: &AtomicU32, seen: u32, most: Duration) {
        let most = Timespec {
            seconds: most.as_secs().min(i64::MAX as u64) as i64,
            nanoseconds: most.subsec_nanos().into(),
        };
        // SAFETY: the word is four aligned bytes that live on, the time lives through the call, which keeps
        // neither. Every error (changed before, interrupted, time over) means that the caller looks again.
        let _ = unsafe { syscall(SYS_FUTEX, word.as_ptr(), WAIT, seen, &raw const most) };
    }

    pub fn wake(word: &AtomicU32) {
        // SAFETY: the address is only looked up among those of sleepers.
        let _ = unsafe { syscall(SYS_FUTEX, word.as_ptr(), WAKE, c_int::MAX) };
    }
}

/// Without such a call: short sleeps.
#[cfg(not(all(
    target_os = "linux",
    target_pointer_width = "64",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
mod system {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    const NAP: Duration = Duration::from_micros(50);

    pub fn wait(word: &AtomicU32, seen: u32, most: Duration) {
        if word.load(Ordering::Acquire) == seen {
            std::thread::sleep(most.min(NAP));
        }
    }

    pub fn wake(_: &AtomicU32) {}
}
