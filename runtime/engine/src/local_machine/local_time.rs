//! The clock on the wall: seconds since 1970 as the time zone of this machine counts them.

use std::time::{SystemTime, UNIX_EPOCH};

/// Now, in local time as Python's `datetime.now()` has it; in UTC where the zone is not known.
pub(super) fn now() -> u64 {
    let utc = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    utc.saturating_add_signed(offset(utc))
}

/// Seconds by which local time is ahead of UTC.
#[cfg(unix)]
fn offset(utc: u64) -> i64 {
    let Ok(time) = libc::time_t::try_from(utc) else { return 0 };
    let mut local = std::mem::MaybeUninit::<libc::tm>::uninit();
    // SAFETY: `time` is read and `local` is written, both are valid for that; null says that nothing was
    // written.
    let written = unsafe { !libc::localtime_r(&time, local.as_mut_ptr()).is_null() };
    if !written {
        return 0;
    }
    // SAFETY: `localtime_r` has filled it.
    let local = unsafe { local.assume_init() };
    #[allow(clippy::useless_conversion, reason = "of 32 bits on some machines")]
    i64::from(local.tm_gmtoff)
}

#[cfg(not(unix))]
fn offset(_: u64) -> i64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zones_are_within_a_day_of_utc_in_steps_of_a_minute() {
        // The bounds of any machine; zones of whole minutes since 1972.
        for utc in [0x4000_0000, 0x6900_0000] {
            let offset = offset(utc);
            assert!(offset.abs() <= 26 * 3600 && offset % 60 == 0, "{offset}");
        }
        assert!(now() > 0x6000_0000);
    }
}
