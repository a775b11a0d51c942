//! Values of a register in the 32 lanes of a warp, of which some may be unknown.

/// Lanes of a warp.
pub const LANES: usize = 32;
pub const ALL: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
pub struct LaneWords {
    pub v: [u32; LANES],
    /// A bit per lane.
    pub known: u32,
}

impl LaneWords {
    pub const UNKNOWN: LaneWords = LaneWords { v: [0; LANES], known: 0 };

    pub fn splat(value: u32) -> LaneWords {
        LaneWords { v: [value; LANES], known: ALL }
    }

    pub fn map(self, f: impl Fn(u32) -> u32) -> LaneWords {
        LaneWords { v: self.v.map(f), known: self.known }
    }

    /// Combines three values lane by lane.
    pub fn zip_map(self, b: LaneWords, c: LaneWords, f: impl Fn(u32, u32, u32) -> u32) -> LaneWords {
        let known = self.known & b.known & c.known;
        LaneWords { v: std::array::from_fn(|i| f(self.v[i], b.v[i], c.v[i])), known }
    }

    /// The lanes of `mask` are taken from `new`.
    pub fn set(&mut self, new: &LaneWords, mask: u32) {
        for i in 0..LANES {
            if mask >> i & 1 == 1 {
                self.v[i] = new.v[i];
            }
        }
        self.known = self.known & !mask | new.known & mask;
    }
}

/// The lanes of a mask.
pub fn active_lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |i| mask >> i & 1 == 1)
}
