//! The room on disks.

use std::path::Path;

/// Free bytes of the file system that `path` is on, or would be once its folders are made; `None` where the
/// system does not say.
#[cfg(unix)]
pub fn free_bytes(path: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let absolute = std::path::absolute(path).ok()?;
    let there = absolute.ancestors().find(|folder| folder.exists())?;
    let name = std::ffi::CString::new(there.as_os_str().as_bytes()).ok()?;
    let mut found = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the name ends with a zero and outlives the call, which fills the struct where it returns 0.
    let found = unsafe {
        match libc::statvfs(name.as_ptr(), found.as_mut_ptr()) {
            0 => found.assume_init(),
            _ => return None,
        }
    };
    #[allow(clippy::unnecessary_cast, reason = "the types differ from system to system")]
    let (blocks, size) = (found.f_bavail as u64, found.f_frsize as u64);
    blocks.checked_mul(size)
}

/// Unknown on this system.
#[cfg(not(unix))]
pub fn free_bytes(_: &Path) -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn folders_to_come_have_the_room_of_those_around_them() {
        let folder = tempfile::tempdir().unwrap();
        assert!(free_bytes(&folder.path().join("not/there/yet")).is_some());
    }
}
