use super::*;
use proptest::prelude::*;

/// Features notes, GPT-2 example of ggml: logits of ten tokens.
const EXAMPLE: [f32; 10] = [0.5, 2.0, 1.5, 0.0, 1.0, -0.5, 3.0, 0.2, 2.5, 1.8];

fn plain() -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: Some(1),
        ..SamplingParams::default()
    }
}

fn distribution(params: SamplingParams, logits: &[f32]) -> Vec<(TokenId, f64)> {
    let mut sampler = Sampler::new(params, logits.len()).unwrap();
    sampler.distribution(logits).unwrap().iter().map(|c| (c.id, c.probability)).collect()
}

fn assert_close(found: &[(TokenId, f64)], expected: &[(TokenId, f64)]) {
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for (f, e) in found.iter().zip(expected) {
        assert!(f.0 == e.0 && (f.1 - e.1).abs() < 5e-4, "{found:?} is not {expected:?}");
    }
}

#[test]
fn worked_example() {
    let params = SamplingParams { temperature: 0.9, top_k: 5, ..plain() };
    let top_5 = [(6, 0.4245), (8, 0.2436), (1, 0.1398), (9, 0.1119), (2, 0.0802)];
    assert_close(&distribution(params.clone(), &EXAMPLE), &top_5);
    let params = SamplingParams { top_p: 0.9, ..params };
    let cut = [(6, 0.4616), (8, 0.2648), (1, 0.1519), (9, 0.1217)];
    assert_close(&distribution(params, &EXAMPLE), &cut);
}

#[test]
fn min_p_is_relative_to_the_likeliest() {
    // exp(-0.5) = 0.61, exp(-1.0) = 0.37 and exp(-1.2) = 0.301 are above 0.3, exp(-1.5) = 0.22 is not.
    let params = SamplingParams { min_p: 0.3, ..plain() };
    let mut ids: Vec<TokenId> = distribution(params, &EXAMPLE).iter().map(|c| c.0).collect();
    ids.sort_unstable();
    assert_eq!(ids, [1, 6, 8, 9]);
    let only = SamplingParams { min_p: 1.0, ..plain() };
    assert_close(&distribution(only, &EXAMPLE), &[(6, 1.0)]);
}

#[test]
fn greedy_takes_the_lowest_of_equal_ids() {
    let mut sampler = Sampler::new(SamplingParams::greedy(), 4).unwrap();
    assert_eq!(sampler.sample(&[1.0, 3.0, 3.0, -1.0]), Ok(1));
    assert_eq!(sampler.sample(&[-0.0, 0.0, 0.0, -1.0]), Ok(0));
    let top_1 = SamplingParams { top_k: 1, ..plain() };
    assert_eq!(Sampler::new(top_1, 4).unwrap().sample(&[1.0, 3.0, 3.0, -1.0]), Ok(1));
}

#[test]
fn not_a_number_is_never_chosen() {
    let logits = [f32::NAN, 1.0, f32::NEG_INFINITY, f32::NAN];
    for params in [SamplingParams::greedy(), plain(), SamplingParams { top_k: 2, ..plain() }] {
        assert_eq!(distribution(params, &logits), [(1, 1.0)]);
    }
    // All infinite ones are equally probable.
    assert_close(
        &distribution(plain(), &[f32::INFINITY, 5.0, f32::INFINITY]),
        &[(0, 0.5), (1, 0.0), (2, 0.5)],
    );
    for params in [SamplingParams::greedy(), plain()] {
        let mut sampler = Sampler::new(params, 2).unwrap();
        let error = sampler.sample(&[f32::NAN, f32::NEG_INFINITY]).unwrap_err();
        assert_eq!(error, SampleError::NoFiniteLogit { vocab: 2 });
        assert_eq!(sampler.sample(&[0.0; 3]), Err(SampleError::Length { expected: 2, found: 3 }));
    }
}

#[test]
fn penalties_see_the_accepted_tokens() {
    let params = SamplingParams { repeat_penalty: 2.0, ..SamplingParams::greedy() };
    let mut sampler = Sampler::new(params, 10).unwrap();
    assert_eq!(sampler.sample(&EXAMPLE), Ok(6));
    sampler.accept(6);
    assert_eq!(sampler.sample(&EXAMPLE), Ok(8));
    sampler.reset();
    assert_eq!(sampler.sample(&EXAMPLE), Ok(6));
}

/// Texts of a seed must stay the same in all versions: never change these numbers.
#[test]
fn seed_gives_the_same_tokens_for_ever() {
    let params = SamplingParams { seed: Some(42), ..SamplingParams::default() };
    let mut sampler = Sampler::new(params, 10).unwrap();
    let tokens: Vec<TokenId> = (0..16).map(|_| sampler.sample(&EXAMPLE).unwrap()).collect();
    assert_eq!(tokens, [8, 6, 8, 4, 1, 6, 8, 1, 8, 1, 6, 6, 6, 9, 6, 6]);
}

#[test]
fn biases_come_before_everything_else() {
    let biased = |bias: &[(TokenId, f32)], params| {
        let changes = LogitChanges { bias: bias.to_vec(), ..LogitChanges::default() };
        let mut sampler = Sampler::with_changes(params, changes, 10).unwrap();
        sampler.distribution(&EXAMPLE).unwrap().iter().map(|c| (c.id, c.probability)).collect::<Vec<_>>()
    };
    assert_eq!(biased(&[(6, -100.0)], SamplingParams::greedy()), [(8, 1.0)]);
    assert_eq!(biased(&[(5, 100.0)], SamplingParams { min_p: 0.01, ..plain() }), [(5, 1.0)]);
    let mut moved = EXAMPLE;
    moved[0] += 2.5;
    assert_eq!(biased(&[(0, 2.5)], plain()), distribution(plain(), &moved));
    assert!(biased(&[(6, f32::NEG_INFINITY)], plain()).iter().all(|c| c.0 != 6));
    for (bias, found) in [((10, 1.0), "for token 10"), ((-1, 1.0), "for token -1"), ((0, f32::NAN), "NaN")] {
        let changes = LogitChanges { bias: vec![bias], ..LogitChanges::default() };
        let error = Sampler::with_changes(plain(), changes, 10).unwrap_err();
        assert_eq!((error.name, error.found.as_str()), ("logit_bias", found));
    }
}

#[test]
fn ends_wait_for_the_least_number_of_tokens() {
    let changes = LogitChanges { banned_until_min: vec![6, 8, 99], min_tokens: 2, ..LogitChanges::default() };
    let mut sampler = Sampler::with_changes(SamplingParams::greedy(), changes, 10).unwrap();
    let mut next = || {
        let token = sampler.sample(&EXAMPLE).unwrap();
        sampler.accept(token);
        token
    };
    assert_eq!([next(), next(), next()], [1, 1, 6]);
    sampler.reset();
    assert_eq!(sampler.sample(&EXAMPLE), Ok(1));
}

#[test]
fn without_a_seed_each_sampler_has_its_own() {
    let seeds: Vec<u64> =
        (0..4).map(|_| Sampler::new(SamplingParams::default(), 2).unwrap().seed()).collect();
    assert!(seeds.windows(2).any(|pair| pair[0] != pair[1]), "{seeds:?}");
}

#[test]
fn draws_follow_the_probabilities() {
    let mut sampler = Sampler::new(plain(), 3).unwrap();
    let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
    let mut counts = [0u32; 3];
    for _ in 0..20_000 {
        counts[sampler.sample(&logits).unwrap() as usize] += 1;
    }
    for (count, p) in counts.iter().zip([0.5, 0.3, 0.2]) {
        assert!((f64::from(*count) / 20_000.0 - p).abs() < 0.015, "{counts:?}");
    }
}

/// The definition, by sorting everything.
fn reference(params: &SamplingParams, logits: &[f32]) -> Vec<(TokenId, f64)> {
    let mut all: Vec<(TokenId, f64)> = logits
        .iter()
        .enumerate()
        .map(|(id, &l)| (id as TokenId, f64::from(l) / f64::from(params.temperature)))
        .collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if params.top_k > 0 {
        all.truncate(params.top_k as usize);
    }
    let max = all[0].1;
    all.iter_mut().for_each(|c| c.1 = (c.1 - max).exp());
    let total: f64 = all.iter().map(|c| c.1).sum();
    if params.top_p < 1.0 {
        let mut sum = 0.0;
        let reached = all.iter().position(|c| {
            sum += c.1;
            sum >= f64::from(params.top_p) * total
        });
        all.truncate(reached.map_or(all.len(), |last| last + 1));
    }
    all.retain(|c| c.1 >= f64::from(params.min_p));
    let kept: f64 = all.iter().map(|c| c.1).sum();
    all.iter_mut().for_each(|c| c.1 /= kept);
    all
}

proptest! {
    // Few distinct values, so that ties at every cut are common; more tokens than the first sorted block.
    #[test]
    fn equals_the_definition(
        steps in proptest::collection::vec(-20i8..20, 1..900),
        temperature in 0.2f32..2.0,
        top_k in prop_oneof![Just(0u32), 1u32..1000],
        top_p in prop_oneof![Just(1.0f32), 0.01f32..1.0],
        min_p in prop_oneof![Just(0.0f32), 0.0f32..0.5],
    ) {
        let logits: Vec<f32> = steps.iter().map(|&s| f32::from(s) / 8.0).collect();
        let params = SamplingParams { temperature, top_k, top_p, min_p, ..plain() };
        let mut found = distribution(params.clone(), &logits);
        found.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let expected = reference(&params, &logits);
        // A cut may fall one token apart where a sum meets the limit within rounding.
        prop_assert!(found.len().abs_diff(expected.len()) <= 1, "{} {}", found.len(), expected.len());
        if found.len() == expected.len() {
            for (f, e) in found.iter().zip(&expected) {
                prop_assert_eq!(f.0, e.0);
                prop_assert!((f.1 - e.1).abs() < 1e-9);
            }
        }
        let sum: f64 = found.iter().map(|c| c.1).sum();
        prop_assert!((sum - 1.0).abs() < 1e-9);
    }
}
