//! Placement of the weights on NUMA nodes.
//!
//! Workers share the rows of a matrix in their order: of `W` workers, worker `w` reads the part from `w / W`
//! to `(w + 1) / W` of its bytes (packings keep the order of rows). Where workers are bound to nodes, each
//! byte has a node that reads it most: a huge page is put where most of its bytes are read.

use std::ops::Range;

use crate::pool::WorkerAffinity;
use crate::table::ParamInfo;

/// The places of weights on machines with several NUMA nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NumaPolicy {
    /// Unplaced: pages of the file where they were read first, by whatever process; huge pages on the node of
    /// the worker that moved them.
    #[default]
    Off,
    /// Huge pages on the node whose workers read most of their bytes. Workers stay on their nodes.
    Local,
    /// Huge pages on all nodes in turns. Workers stay on their nodes.
    Interleave,
}

/// The present places of a model's weights.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightPlacement {
    /// The number of each node that workers are on, and the bytes of weights that were moved to it.
    pub nodes: Vec<(usize, u64)>,
    /// Bytes that are where the file's pages are.
    pub in_file: u64,
    /// The part of the matrices' bytes that lies where it is read, once all huge pages have moved.
    pub near_share: f64,
}

/// Chooses nodes for bytes of weights.
pub(crate) struct NumaPlacer {
    /// Numbers of the nodes, rising.
    nodes: Vec<usize>,
    /// The place of each worker's node in `nodes`.
    worker_nodes: Vec<usize>,
    /// The number of workers of each rank, the first ones being those of the first rank.
    workers_per_rank: usize,
    /// The place of each matrix, in their order.
    matrices: Vec<Range<u64>>,
    interleave: bool,
    /// Homes that were given, and bytes: all that are read, and those that are read where they lie.
    choices: usize,
    bytes_read: u64,
    bytes_near: u64,
}

impl NumaPlacer {
    /// `None` where nothing is to be placed: workers are on one node, or are bound to none. `ranks` of equal
    /// numbers of workers each read weights of their own, which lie as `params` say.
    pub fn new(
        numa: NumaPolicy,
        places: &[WorkerAffinity],
        ranks: usize,
        params: &[ParamInfo],
    ) -> Option<NumaPlacer> {
        let mut nodes: Vec<usize> = places.iter().map(|place| place.node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        if numa == NumaPolicy::Off || nodes.len() < 2 {
            return None;
        }
        let of_workers: Vec<usize> =
            places.iter().filter_map(|place| nodes.binary_search(&place.node).ok()).collect();
        let each = (of_workers.len() / ranks.max(1)).max(1);
        let mut matrices: Vec<Range<u64>> =
            params.iter().filter(|param| !param.in_adapter_slots).flat_map(matrices).collect();
        matrices.sort_by_key(|matrix| (matrix.start, matrix.end));
        let interleave = numa == NumaPolicy::Interleave;
        Some(NumaPlacer {
            nodes,
            worker_nodes: of_workers,
            workers_per_rank: each,
            matrices,
            interleave,
            choices: 0,
            bytes_read: 0,
            bytes_near: 0,
        })
    }

    /// The nodes that are chosen from.
    pub fn nodes(&self) -> &[usize] {
        &self.nodes
    }

    /// The place of a worker's node in [`NumaPlacer::nodes`].
    pub fn worker_node(&self, worker: usize) -> usize {
        self.worker_nodes.get(worker).copied().unwrap_or(0)
    }

    /// The node for these bytes of a rank's weights, as a place in [`NumaPlacer::nodes`].
    pub fn choose_node(&mut self, rank: usize, bytes: Range<u64>) -> usize {
        let mut read = vec![0; self.nodes.len()];
        // Matrices do not overlap.
        let from = self.matrices.partition_point(|matrix| matrix.end <= bytes.start);
        for matrix in self.matrices[from..].iter().take_while(|matrix| matrix.start < bytes.end) {
            self.add_reads(rank, matrix, &bytes, &mut read);
        }
        let most = read.iter().copied().max().unwrap_or(0);
        let turn = self.choices % self.nodes.len();
        let reader = read.iter().position(|&r| r == most && most > 0).unwrap_or(turn);
        let home = if self.interleave { turn } else { reader };
        self.choices += 1;
        self.bytes_read += read.iter().sum::<u64>();
        self.bytes_near += read[home];
        home
    }

    /// The part of what is read that lies where it is read, of all bytes that [`NumaPlacer::choose_node`] was
    /// asked for.
    pub fn near_share(&self) -> f64 {
        if self.bytes_read == 0 { 1.0 } else { self.bytes_near as f64 / self.bytes_read as f64 }
    }

    fn add_reads(&self, rank: usize, matrix: &Range<u64>, bytes: &Range<u64>, read: &mut [u64]) {
        let Some(readers) = self.worker_nodes.chunks_exact(self.workers_per_rank).nth(rank) else { return };
        let workers = readers.len() as u128;
        let size = u128::from(matrix.end - matrix.start);
        let border = |worker: u128| matrix.start + (size * worker / workers) as u64;
        let (start, end) = (matrix.start.max(bytes.start), matrix.end.min(bytes.end));
        let first = u128::from(start - matrix.start) * workers / size;
        for worker in first.. {
            let (from, to) = (border(worker).max(start), border(worker + 1).min(end));
            if border(worker) >= end || worker >= workers {
                break;
            }
            read[readers[worker as usize]] += to.saturating_sub(from);
        }
    }
}

/// The matrices of a parameter: one, or those of all experts, in order.
fn matrices(param: &ParamInfo) -> impl Iterator<Item = Range<u64>> {
    let (offset, bytes) = (param.offset, param.bytes);
    let outer = param.dims.len().saturating_sub(2);
    let count = param.dims[..outer].iter().fold(1u64, |n, &dim| n.saturating_mul(dim)).clamp(1, bytes.max(1));
    let at = move |i: u64| offset + (u128::from(bytes) * u128::from(i) / u128::from(count)) as u64;
    (0..count).map(move |i| at(i)..at(i + 1)).filter(|matrix| !matrix.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::CpuSet;

    fn places(nodes: &[usize]) -> Vec<WorkerAffinity> {
        nodes.iter().map(|&node| WorkerAffinity { cpus: CpuSet::from_iter([node]), node }).collect()
    }

    fn param(offset: u64, bytes: u64, dims: &[u64]) -> ParamInfo {
        let (name, format, packing) = Default::default();
        ParamInfo { name, format, packing, dims: dims.to_vec(), in_adapter_slots: false, offset, bytes }
    }

    fn homes(homes: &mut NumaPlacer, piece: u64, pieces: u64) -> Vec<usize> {
        (0..pieces).map(|i| homes.choose_node(0, i * piece..(i + 1) * piece)).collect()
    }

    #[test]
    fn pages_go_to_their_readers() {
        // Two matrices of 800 and 400 bytes, then one for each of two experts, of 200.
        let params = [param(800, 400, &[4, 100]), param(0, 800, &[8, 100]), param(1200, 400, &[2, 2, 100])];
        let four = places(&[0, 0, 2, 2]);
        let mut local = NumaPlacer::new(NumaPolicy::Local, &four, 1, &params).unwrap();
        assert_eq!((local.nodes(), local.worker_node(3)), (&[0, 2][..], 1));
        assert_eq!(homes(&mut local, 100, 16), [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1]);
        assert_eq!(local.near_share(), 1.0);
        // Pages that hold more than one worker's rows: most bytes decide.
        let mut local = NumaPlacer::new(NumaPolicy::Local, &four, 1, &params).unwrap();
        assert_eq!(homes(&mut local, 600, 2), [0, 1]);
        assert!((local.near_share() - 800.0 / 1200.0).abs() < 1e-9, "400 of 600 each");
        // Beyond all matrices, in turns.
        assert_eq!([local.choose_node(0, 5000..6000), local.choose_node(0, 6000..7000)], [0, 1]);
    }

    #[test]
    fn unequal_nodes_have_unequal_shares() {
        // Three workers on one node, one on the other: three quarters and one quarter of the rows.
        let mut local =
            NumaPlacer::new(NumaPolicy::Local, &places(&[1, 1, 1, 0]), 1, &[param(0, 800, &[8, 100])])
                .unwrap();
        assert_eq!(homes(&mut local, 100, 8), [1, 1, 1, 1, 1, 1, 0, 0]);
    }

    /// Each rank has a node, and all of its weights are there.
    #[test]
    fn weights_of_a_rank_go_to_its_workers() {
        let four = places(&[0, 0, 2, 2]);
        let mut local = NumaPlacer::new(NumaPolicy::Local, &four, 2, &[param(0, 800, &[8, 100])]).unwrap();
        let of_rank =
            |local: &mut NumaPlacer, rank| [0, 400, 700].map(|at| local.choose_node(rank, at..at + 100));
        assert_eq!((of_rank(&mut local, 0), of_rank(&mut local, 1)), ([0; 3], [1; 3]));
        assert_eq!(local.near_share(), 1.0);
    }

    #[test]
    fn interleaved_pages_go_round() {
        let mut all =
            NumaPlacer::new(NumaPolicy::Interleave, &places(&[0, 1]), 1, &[param(0, 800, &[8, 100])])
                .unwrap();
        assert_eq!(homes(&mut all, 100, 8), [0, 1, 0, 1, 0, 1, 0, 1]);
        assert_eq!(all.near_share(), 0.5);
    }

    #[test]
    fn one_node_needs_no_placing() {
        let params = [param(0, 800, &[8, 100])];
        assert!(NumaPlacer::new(NumaPolicy::Local, &places(&[1, 1]), 1, &params).is_none());
        assert!(NumaPlacer::new(NumaPolicy::Local, &[], 1, &params).is_none());
        assert!(NumaPlacer::new(NumaPolicy::Off, &places(&[0, 1]), 1, &params).is_none());
    }

    #[test]
    fn strange_parameters_are_no_reason_to_fail() {
        let params =
            [param(0, 0, &[]), param(7, 3, &[u64::MAX, u64::MAX, 1, 1]), param(u64::MAX - 10, 5, &[5])];
        let mut local = NumaPlacer::new(NumaPolicy::Local, &places(&[0, 1]), 1, &params).unwrap();
        assert!(local.choose_node(0, 0..100) < 2);
        assert!(local.choose_node(0, u64::MAX - 20..u64::MAX) < 2);
    }
}
