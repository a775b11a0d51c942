//! Execution: a launch is blocks, a block is warps that take turns, a warp is 32 lanes with a program counter
//! each.

pub mod addresses;
pub mod alu;
pub mod approx;
pub mod atoms;
pub mod block;
pub mod convert;
pub mod fault;
pub mod floats;
pub mod halves;
pub mod launch;
pub mod loads;
pub mod local;
pub mod matrix;
pub mod registers;
pub mod shared;
pub mod together;
pub mod warp;

/// Lanes of a warp.
pub const LANES: usize = 32;
pub type WarpLanes<T> = [T; LANES];

/// Numbers of the lanes of a mask.
pub fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        let lane = rest.trailing_zeros();
        rest &= rest.wrapping_sub(1);
        (lane < 32).then_some(lane as usize)
    })
}
