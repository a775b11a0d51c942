//! Reactions to signals that the program inherits and changes.

use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};

/// True if the program was started with this signal ignored.
pub fn is_ignored(signal: i32) -> bool {
    let mut now = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: nothing is set, and `now` is a place for what there is; zeros are a valid value of it.
    let now = unsafe {
        let known = libc::sigaction(signal, null(), now.as_mut_ptr()) == 0;
        known.then(|| now.assume_init())
    };
    now.is_some_and(|now| now.sa_sigaction == libc::SIG_IGN)
}

/// A file that may not grow (`ulimit -f`) becomes an error of the write, which names it, instead of the end
/// of the program. Programs that are started from here inherit that.
pub fn let_writes_fail() {
    ignore(libc::SIGXFSZ);
}

/// A process that only follows another one ends with that one: launchers send their signals to all, and texts
/// are finished first.
pub fn leave_to_first_rank() {
    [libc::SIGINT, libc::SIGTERM, libc::SIGHUP].into_iter().for_each(ignore);
}

fn ignore(signal: i32) {
    // SAFETY: no handler is set, and zeros are a valid mask and valid flags.
    unsafe {
        let mut ignore = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
        ignore.sa_sigaction = libc::SIG_IGN;
        // It cannot fail for signals that there are; if it did, they would end the program as before.
        libc::sigaction(signal, &ignore, null_mut());
    }
}
