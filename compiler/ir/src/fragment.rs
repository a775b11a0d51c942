//! Matrices that the lanes of a warp hold together. Which lane has which element is data: interpreter,
//! generators and packers of operands read the same maps. Source: the figures of `mma` and `ldmatrix` in
//! NVIDIA's "Parallel Thread Execution ISA".

/// Lanes of a warp, as bits of a lane's number.
const LANE_BITS: usize = 5;

/// The step in (row, column) for a set bit of a lane's or an element's number.
pub type BitStride = (u32, u32);

/// A matrix of `rows` x `columns` in the registers of a warp: a linear map from (lane, element) to (row,
/// column), in bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fragment {
    pub rows: u32,
    pub columns: u32,
    /// Steps for each bit of the lane.
    pub lane: [BitStride; LANE_BITS],
    /// Steps for each bit of the number of an element among those of a lane, which are in its registers in
    /// this order.
    pub element: &'static [BitStride],
}

impl Fragment {
    /// Elements that a lane holds.
    pub const fn elements_per_lane(&self) -> u32 {
        1 << self.element.len()
    }

    /// Row and column of element `element` of lane `lane`.
    pub fn coordinates(&self, lane: u32, element: u32) -> (u32, u32) {
        let bits = |number: u32, steps: &[BitStride]| {
            let set = steps.iter().enumerate().filter(|(bit, _)| number >> bit & 1 == 1);
            set.fold((0, 0), |(row, column), (_, step)| (row + step.0, column + step.1))
        };
        let (of_lane, of_element) = (bits(lane, &self.lane), bits(element, self.element));
        (of_lane.0 + of_element.0, of_lane.1 + of_element.1)
    }
}

/// `sums + a * b`, of a warp: `a` is `[m, k]`, `b` `[k, n]`, the sums `[m, n]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MmaLayout {
    pub a: Fragment,
    pub b: Fragment,
    pub accumulator: Fragment,
}

/// Sums of all products: a lane has neighbours of two rows.
const SUMS: Fragment = Fragment {
    rows: 16,
    columns: 8,
    lane: [(0, 2), (0, 4), (1, 0), (2, 0), (4, 0)],
    element: &[(0, 1), (8, 0)],
};

/// m16n8k16, elements of 16 bits.
pub const M16N8K16: MmaLayout = MmaLayout {
    a: Fragment {
        rows: 16,
        columns: 16,
        lane: [(0, 2), (0, 4), (1, 0), (2, 0), (4, 0)],
        element: &[(0, 1), (8, 0), (0, 8)],
    },
    b: Fragment {
        rows: 16,
        columns: 8,
        lane: [(2, 0), (4, 0), (0, 1), (0, 2), (0, 4)],
        element: &[(1, 0), (8, 0)],
    },
    accumulator: SUMS,
};

/// m16n8k32, bytes.
pub const M16N8K32: MmaLayout = MmaLayout {
    a: Fragment {
        rows: 16,
        columns: 32,
        lane: [(0, 4), (0, 8), (1, 0), (2, 0), (4, 0)],
        element: &[(0, 1), (0, 2), (8, 0), (0, 16)],
    },
    b: Fragment {
        rows: 32,
        columns: 8,
        lane: [(4, 0), (8, 0), (0, 1), (0, 2), (0, 4)],
        element: &[(1, 0), (2, 0), (16, 0)],
    },
    accumulator: SUMS,
};

/// One of the matrices that `ldmatrix` reads: 8 rows of 16 bytes, seen as 8 x 8 units of 16 bits. Lane
/// `8 i + r` gives the place of row `r` of matrix `i`.
pub const UNITS: Fragment =
    Fragment { rows: 8, columns: 8, lane: [(0, 2), (0, 4), (1, 0), (2, 0), (4, 0)], element: &[(0, 1)] };

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Every element of the matrix is in one place.
    #[test]
    fn maps_are_complete() {
        let all = [M16N8K16, M16N8K32].into_iter().flat_map(|mma| [mma.a, mma.b, mma.accumulator]);
        for f in all.chain([UNITS]) {
            let places = (0..32).flat_map(|lane| (0..f.elements_per_lane()).map(move |e| (lane, e)));
            let places: BTreeSet<_> = places.map(|(lane, e)| f.coordinates(lane, e)).collect();
            assert_eq!(places.len() as u32, f.rows * f.columns);
            assert_eq!(places.last(), Some(&(f.rows - 1, f.columns - 1)));
        }
    }

    /// The places of some elements, from the figures of the ISA.
    #[test]
    fn maps_are_those_of_the_figures() {
        // groupID = lane / 4, threadID_in_group = lane % 4.
        let (group, thread) = (5, 3);
        let lane = 4 * group + thread;
        let (a, b, sums) = (M16N8K16.a, M16N8K16.b, M16N8K16.accumulator);
        for (i, (row, column)) in
            [(0, 0), (0, 1), (8, 0), (8, 1), (0, 8), (0, 9), (8, 8), (8, 9)].into_iter().enumerate()
        {
            assert_eq!(a.coordinates(lane, i as u32), (group + row, thread * 2 + column));
        }
        for (i, row) in [0, 1, 8, 9].into_iter().enumerate() {
            assert_eq!(b.coordinates(lane, i as u32), (thread * 2 + row, group));
        }
        for (i, (row, column)) in [(0, 0), (0, 1), (8, 0), (8, 1)].into_iter().enumerate() {
            assert_eq!(sums.coordinates(lane, i as u32), (group + row, thread * 2 + column));
        }
        assert_eq!(M16N8K32.a.coordinates(lane, 13), (group + 8, thread * 4 + 17));
        assert_eq!(M16N8K32.b.coordinates(lane, 6), (thread * 4 + 18, group));
    }
}
