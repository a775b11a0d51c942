//! A map by address, with a hash that is fast and no defence against anybody.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

pub type ByAddress<T> = HashMap<u64, T, BuildHasherDefault<AddressHasher>>;

/// Multiplies by an odd number near 2^64 over the golden ratio (Knuth, "The Art of Computer Programming",
/// 6.4).
#[derive(Default)]
pub struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, address: u64) {
        let mixed = (self.0 ^ address).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}
