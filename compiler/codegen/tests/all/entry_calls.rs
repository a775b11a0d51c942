//! Calls of entry points as a C program makes them, with arguments that the runtime never passes on.

use mlcc_abi::{Ctx, EntryPoint, ModelTable, StepFn, Variant, status};

use crate::toy::{reference, weights};

const TOKENS: [i32; 4] = [3, 1, 4, 1];

/// The function of an entry point.
///
/// # Safety
/// The variant is one of a loaded artifact's table.
unsafe fn entry_function(variant: &Variant, point: EntryPoint) -> Option<StepFn> {
    // SAFETY: by contract.
    let rows = unsafe { std::slice::from_raw_parts(variant.entries, variant.n_entries as usize) };
    let name = |row: &&mlcc_abi::VariantEntry| {
        // SAFETY: by contract.
        let name = unsafe { std::slice::from_raw_parts(row.name.ptr, row.name.len as usize) };
        name == point.name().as_bytes() && row.kind == point.kind() as u32
    };
    rows.iter().find(name)?.function
}

/// Holds the entry points of the toy's weakest variant to the status codes of the ABI, and its table to the
/// metadata.
pub fn refuses_bad_arguments(table: &ModelTable, metadata: &str) {
    // SAFETY: the table has variants, the weakest last.
    let weakest = unsafe { &*table.variants.add(table.n_variants as usize - 1) };
    let weights = weights();
    let (mut arena, mut state, mut logits, mut probs) = ([0f32; 24], [9f32; 8], [0f32; 5], [0f32; 5]);
    let mut call = |point: EntryPoint, tokens: &[i32], past: i64| {
        let mut ctx = Ctx {
            weights: weights.as_ptr(),
            arena: arena.as_mut_ptr().cast(),
            state: state.as_mut_ptr().cast(),
            tokens: tokens.as_ptr(),
            n: tokens.len() as i64,
            past,
            logits: logits.as_mut_ptr(),
            probs: probs.as_mut_ptr(),
            temperature: 2.0,
            b: 1,
            ..Ctx::EMPTY
        };
        // SAFETY: of a loaded table; every buffer is as large as the plan says.
        unsafe { entry_function(weakest, point).unwrap()(&mut ctx, 0, 1) }
    };
    let (full, ok) = (status::CONTEXT_FULL, status::OK);
    let (prefill, decode) = (EntryPoint::Prefill, EntryPoint::Decode);
    assert_eq!(call(EntryPoint::CreateKvCache, &[], 0), ok);
    assert_eq!(call(prefill, &[1, 5], 0), status::BAD_TOKEN);
    assert_eq!(call(prefill, &[-1], 0), status::BAD_TOKEN);
    assert_eq!(call(prefill, &[], 0), status::BAD_LENGTH);
    assert_eq!(call(prefill, &[0; 4], 0), status::BAD_LENGTH);
    assert_eq!(call(decode, &[0; 2], 0), status::BAD_LENGTH);
    for (past, outcome) in [(-1, full), (-2, full), (i64::MIN, full), (i64::MAX, full), (7, ok)] {
        assert_eq!(call(prefill, &TOKENS[..2], past), outcome, "past {past}");
        assert_eq!(call(decode, &TOKENS[..1], past), outcome, "past {past}");
    }
    assert_eq!(call(EntryPoint::ResetKvCache, &[], 0), ok);
    assert_eq!(call(decode, &TOKENS[..1], 0), ok);
    assert_eq!(call(EntryPoint::Softmax, &[0], 0), ok);
    assert_eq!(logits.to_vec(), reference(&TOKENS[..1])[0]);
    let sum: f32 = logits.iter().map(|x| x / 2.0).sum();
    assert_eq!(probs.to_vec(), logits.map(|x| x / 2.0 / sum).to_vec());
    let text = table.metadata;
    // SAFETY: a text of the table, which lives as long as the library.
    let text = unsafe { std::slice::from_raw_parts(text.ptr, text.len as usize) };
    assert_eq!(text, metadata.as_bytes());
}
