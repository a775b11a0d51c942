//! The memory that the program has freed and its allocator keeps.

/// Gives freed memory back to the system: glibc keeps the heaps of threads as large as they once were. Other
/// allocators have no such call.
pub fn trim_heaps() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it changes nothing that is in use, and locks what it looks at.
    unsafe {
        libc::malloc_trim(0);
    }
}
