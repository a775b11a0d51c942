//! CPUs of a thread.

use std::io;

/// Words of 64 CPUs: as many as Linux has at most (8192).
const WORDS: usize = 128;

/// Logical CPUs by their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSet {
    words: Vec<u64>,
}

impl CpuSet {
    pub fn insert(&mut self, cpu: usize) {
        let word = cpu / 64;
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (cpu % 64);
    }

    pub fn contains(&self, cpu: usize) -> bool {
        self.words.get(cpu / 64).is_some_and(|word| word >> (cpu % 64) & 1 == 1)
    }

    /// The CPUs of the calling thread.
    #[cfg(test)]
    pub fn of_this_thread() -> CpuSet {
        let words = system::current().unwrap();
        (0..64 * WORDS).filter(|&cpu| words[cpu / 64] >> (cpu % 64) & 1 == 1).collect()
    }

    /// Moves the calling thread there, until what is returned is dropped: then it may run where it might
    /// before.
    pub fn bind_thread(&self) -> io::Result<AffinityGuard> {
        let before = system::current()?;
        system::set(&self.words)?;
        Ok(AffinityGuard { before })
    }
}

impl FromIterator<usize> for CpuSet {
    fn from_iter<I: IntoIterator<Item = usize>>(cpus: I) -> Self {
        let mut set = CpuSet::default();
        cpus.into_iter().for_each(|cpu| set.insert(cpu));
        set
    }
}

/// See [`CpuSet::bind_thread`].
#[must_use]
pub struct AffinityGuard {
    before: [u64; WORDS],
}

impl Drop for AffinityGuard {
    fn drop(&mut self) {
        // Where the system has taken these CPUs away meanwhile, the thread stays where it is.
        let _ = system::set(&self.before);
    }
}

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod system {
    use std::ffi::c_int;
    use std::io;

    use super::WORDS;

    unsafe extern "C" {
        fn sched_getaffinity(thread: c_int, bytes: usize, mask: *mut u64) -> c_int;
        fn sched_setaffinity(thread: c_int, bytes: usize, mask: *const u64) -> c_int;
    }

    pub fn current() -> io::Result<[u64; WORDS]> {
        let mut words = [0; WORDS];
        // SAFETY: as many bytes as are said; 0 is the calling thread.
        match unsafe { sched_getaffinity(0, size_of_val(&words), words.as_mut_ptr()) } {
            0 => Ok(words),
            _ => Err(io::Error::last_os_error()),
        }
    }

    pub fn set(words: &[u64]) -> io::Result<()> {
        // SAFETY: as many bytes as are said; 0 is the calling thread.
        match unsafe { sched_setaffinity(0, size_of_val(words), words.as_ptr()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
mod system {
    use std::io;

    use super::WORDS;

    pub fn current() -> io::Result<[u64; WORDS]> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn set(_: &[u64]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_goes_there_and_comes_back() {
        let before = CpuSet::of_this_thread();
        let first = (0..8192).find(|&cpu| before.contains(cpu)).unwrap();
        let one = CpuSet::from_iter([first]);
        {
            let _there = one.bind_thread().unwrap();
            assert_eq!(CpuSet::of_this_thread(), one);
        }
        assert_eq!(CpuSet::of_this_thread(), before);
        assert!(CpuSet::default().bind_thread().is_err(), "nowhere");
        assert_eq!(CpuSet::of_this_thread(), before);
    }
}
