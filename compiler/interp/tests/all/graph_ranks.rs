//! Ranks in lockstep: the result of an all-gather, and the faults where a rank does not keep to it.

use mlcc_interp::graph::{
    AllGatherFault, GraphError, Interpreter, RankError, RankMessage, RankedModel, StateValues, Tensor,
};
use mlcc_ir::dim::SymValues;
use mlcc_ir::module::Module;
use mlcc_ir::text::parse_module;
use std::sync::Arc;

/// Two all-gathers: of `x * w`, with a `w` of each rank, and of the first result times 2.
const TWO: &str = "
module @m {
  param @w : f32[1] role vector = ranks(values(1.0), values(10.0))
  state @seen : f32[1, 2] init 0.0

  fn @f(%0: f32[1, 2]) -> (f32[1, 8]) entry {
    %1 = param @w : f32[1]
    %2 = mul %0, %1 : f32[1, 2]
    state.write @seen, %2
    %3 = exchange %2 {ranks = 2} : f32[1, 4]
    %4 = add %3, %3 : f32[1, 4]
    %5 = exchange %4 {ranks = 2} : f32[1, 8]
    ret %5
  }
}";

/// The same without the second all-gather.
const ONE: &str = "
module @m {
  param @w : f32[1] role vector = ranks(values(1.0), values(10.0))
  state @seen : f32[1, 2] init 0.0

  fn @f(%0: f32[1, 2]) -> (f32[1, 8]) entry {
    %1 = param @w : f32[1]
    %2 = mul %0, %1 : f32[1, 2]
    state.write @seen, %2
    %3 = exchange %2 {ranks = 2} : f32[1, 4]
    %4 = concat %3, %3 {axis = 1} : f32[1, 8]
    ret %4
  }
}";

/// The same with less in the first all-gather.
const SHORT: &str = "
module @m {
  param @w : f32[1] role vector = ranks(values(1.0), values(10.0))
  state @seen : f32[1, 2] init 0.0

  fn @f(%0: f32[1, 2]) -> (f32[1, 8]) entry {
    %1 = slice %0 {axis = 1, start = 0, len = 1} : f32[1, 1]
    %2 = exchange %1 {ranks = 2} : f32[1, 2]
    %3 = concat %2, %2 {axis = 1} : f32[1, 4]
    %4 = exchange %3 {ranks = 2} : f32[1, 8]
    ret %4
  }
}";

/// The same for four ranks.
const FOUR: &str = "
module @m {
  state @seen : f32[1, 2] init 0.0

  fn @f(%0: f32[1, 2]) -> (f32[1, 8]) entry {
    %1 = exchange %0 {ranks = 4} : f32[1, 8]
    ret %1
  }
}";

fn module(text: &str) -> Module {
    parse_module(text).unwrap_or_else(|e| panic!("{e}"))
}

fn values(module: &Module, rank: usize) -> Vec<Tensor> {
    module.params.values().map(|_| Tensor::f32(&[1], &[[1.0, 10.0][rank]])).collect()
}

fn call(interpreter: &Interpreter<'_>, states: &mut StateValues) -> Result<Vec<f32>, GraphError> {
    let x = [Tensor::f32(&[1, 2], &[1.0, 2.0])];
    Ok(interpreter.run_named("f", &x, states, SymValues::for_tokens(1))?[0].to_f32())
}

fn ranks<'m>(modules: [&'m Module; 2]) -> (RankedModel<'m>, Vec<StateValues>) {
    let states = modules.iter().map(|module| StateValues::new(module).unwrap()).collect();
    let all = modules.into_iter().enumerate().map(|(rank, module)| (module, values(module, rank)));
    (RankedModel::new(all.collect()), states)
}

/// The fault of a run, with the rank that had it.
fn fault(error: RankError) -> (usize, AllGatherFault) {
    match *error.error {
        GraphError::Exchange { fault, .. } => (error.rank, *fault),
        other => panic!("rank {}: {other}", error.rank),
    }
}

fn fails(modules: [&str; 2]) -> (usize, AllGatherFault) {
    let modules = modules.map(module);
    let (ranks, mut states) = ranks([&modules[0], &modules[1]]);
    let before = states.clone();
    let error = ranks.run(&mut states, call).unwrap_err();
    assert!(states == before, "a step that failed has changed states");
    fault(error)
}

/// The fault after a message on its way to a rank is changed.
fn tampered(tamper: &(dyn Fn(usize, RankMessage) -> Option<RankMessage> + Sync)) -> (usize, AllGatherFault) {
    let module = module(TWO);
    let (ranks, mut states) = ranks([&module, &module]);
    fault(ranks.with_tamper(tamper).run(&mut states, call).unwrap_err())
}

#[test]
fn all_ranks_get_the_parts_of_all_in_their_order() {
    let module = module(TWO);
    let (ranks, mut states) = ranks([&module, &module]);
    for _ in 0..3 {
        let results = ranks.run(&mut states, call).unwrap();
        let half = [2.0, 4.0, 20.0, 40.0];
        assert_eq!(results, [[half, half].concat(), [half, half].concat()]);
    }
    let seen = |rank: usize| states[rank].get(module.state("seen").unwrap()).unwrap().data.clone();
    assert_eq!([seen(0), seen(1)], [[1.0, 2.0], [10.0, 20.0]]);
}

#[test]
fn a_rank_that_misses_an_exchange_is_named() {
    let missed = AllGatherFault::Missed { rank: 0, number: 1, other: 1, count: 1 };
    assert_eq!(fails([TWO, ONE]), (0, missed));
    let missed = AllGatherFault::Missed { rank: 1, number: 1, other: 0, count: 1 };
    assert_eq!(fails([ONE, TWO]), (1, missed));
}

#[test]
fn parts_of_other_sizes_are_refused() {
    let (rank, fault) = fails([TWO, SHORT]);
    let (expected, found) = ("f32[1, 2]".into(), "f32[1, 1]".into());
    assert_eq!((rank, fault), (0, AllGatherFault::Size { rank: 0, number: 0, other: 1, expected, found }));
}

#[test]
fn parts_of_ranks_that_are_not_there_are_not_read() {
    assert_eq!(fails([FOUR, FOUR]), (0, AllGatherFault::Ranks { expected: 4, found: 2 }));
    let module = module(TWO);
    let interpreter = Interpreter::new(&module, |_| Tensor::f32(&[1], &[1.0]));
    let error = call(&interpreter, &mut StateValues::new(&module).unwrap()).unwrap_err();
    assert!(
        matches!(&error, GraphError::Exchange { fault, .. } if **fault == AllGatherFault::Alone { ranks: 2 }),
        "{error}"
    );
}

#[test]
fn dropped_swapped_stale_and_short_messages_are_found() {
    let dropped = tampered(&|to, m| (to != 1 || m.from != 0 || m.number != 1).then_some(m));
    assert_eq!(dropped, (1, AllGatherFault::NotSent { rank: 1, number: 1, other: 0 }));
    let swapped = tampered(&|_, m| Some(RankMessage { from: 1 - m.from, ..m }));
    let expected = AllGatherFault::Misdirected { rank: 0, number: 0, other: 0, from: 1, found: 0 };
    assert_eq!(swapped, (0, expected));
    let stale = tampered(&|_, m| Some(RankMessage { number: m.number.saturating_sub(1), ..m }));
    let expected = AllGatherFault::Misdirected { rank: 0, number: 1, other: 0, from: 0, found: 0 };
    assert_eq!(stale, (0, expected));
    let short = tampered(&|to, m| {
        let part = Arc::new(Tensor::f32(&[1, 1], &[0.0]));
        Some(if to == 1 && m.from == 0 { RankMessage { part, ..m } } else { m })
    });
    let (expected, found) = ("f32[1, 2]".into(), "f32[1, 1]".into());
    assert_eq!(short, (1, AllGatherFault::Size { rank: 1, number: 0, other: 0, expected, found }));
}

#[test]
fn of_several_errors_the_cause_is_told() {
    let module = module(TWO);
    let (ranks, mut states) = ranks([&module, &module]);
    let gone = || GraphError::NoFunction("@gone".into());
    // Rank 0 only waits for rank 1.
    let step = |interpreter: &Interpreter<'_>, states: &mut StateValues| match interpreter.rank() {
        1 => Err(gone()),
        _ => call(interpreter, states),
    };
    let error = ranks.run(&mut states, step).unwrap_err();
    assert_eq!(error, RankError { rank: 1, error: Box::new(gone()) });
}
