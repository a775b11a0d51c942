//! Calls of the operating system to map code. One file per kind of system.

#[cfg(unix)]
mod unix;
#[cfg(unix)]
pub(crate) use unix::PageRegion;

/// The protection of a part of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageProtection {
    Read,
    ReadExecute,
}

/// Makes what was written as data visible to instruction fetches of this core; other cores see it when they
/// first run it, since the pages become executable only after this.
pub(crate) fn flush_instructions(code: &[u8]) {
    // x86-64 keeps both coherent.
    #[cfg(target_arch = "aarch64")]
    aarch64::flush(code);
    #[cfg(not(target_arch = "aarch64"))]
    let _ = code;
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use core::arch::asm;

    /// Cleans data lines to the point of unification and drops instruction lines (Arm ARM, D7.5.9).
    pub fn flush(code: &[u8]) {
        let kinds: u64;
        // SAFETY: the register may be read by programs; it has no effect.
        unsafe { asm!("mrs {}, ctr_el0", out(reg) kinds, options(nomem, nostack)) };
        let (instruction_line, data_line) = (4usize << (kinds & 15), 4usize << (kinds >> 16 & 15));
        let (start, end) = (code.as_ptr() as usize, code.as_ptr() as usize + code.len());
        for line in (start / data_line * data_line..end).step_by(data_line) {
            // SAFETY: a line of mapped memory; its contents stay.
            unsafe { asm!("dc cvau, {}", in(reg) line, options(nostack)) };
        }
        // SAFETY: a barrier.
        unsafe { asm!("dsb ish", options(nostack)) };
        for line in (start / instruction_line * instruction_line..end).step_by(instruction_line) {
            // SAFETY: a line of mapped memory; it is fetched anew.
            unsafe { asm!("ic ivau, {}", in(reg) line, options(nostack)) };
        }
        // SAFETY: barriers.
        unsafe { asm!("dsb ish", "isb", options(nostack)) };
    }
}
