use super::*;
use std::convert::Infallible;

const PROTOCOL: EvalProtocol = EvalProtocol { context: 4, stride: 4 };

/// Every row the same distribution.
fn constant(probabilities: &[f64]) -> impl WindowModel {
    let row: Vec<f32> = probabilities.iter().map(|p| p.ln() as f32 + 7.0).collect();
    from_fn(move |tokens| Ok::<_, Infallible>(row.repeat(tokens.len())))
}

fn perplexity_of(windows: &EvalWindows<'_>, mut model: impl WindowModel) -> Result<Perplexity, EvalError> {
    let mut last = Perplexity::default();
    let result = perplexity(windows, &mut model, |so_far| last = *so_far);
    if let Ok(result) = &result {
        assert_eq!(*result, last);
        assert_eq!(result.windows, windows.count());
    }
    result
}

fn distance(
    windows: &EvalWindows<'_>,
    mut reference: impl WindowModel,
    mut this: impl WindowModel,
) -> Result<ModelComparison, EvalError> {
    compare(windows, &mut reference, &mut this, |_| ())
}

#[test]
fn incomplete_window_is_dropped_and_first_token_is_context() {
    let tokens = [0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 1];
    let windows = EvalWindows::new(&tokens, PROTOCOL, 2).unwrap();
    assert_eq!(windows.count(), 2);
    let cut: Vec<_> = windows.iter().map(|w| (w.tokens.to_vec(), w.first_scored)).collect();
    assert_eq!(cut, [(vec![0, 1, 1, 0], 1), (vec![0, 0, 1, 1], 1)]);

    let result = perplexity_of(&windows, constant(&[0.25, 0.75])).unwrap();
    // Scored: 1 1 0 and 0 1 1.
    let expected = -(4.0 * 0.75f64.ln() + 2.0 * 0.25f64.ln());
    assert_eq!(result.tokens_scored, 6);
    assert!((result.nll_sum - expected).abs() < 1e-6);
    assert!((result.perplexity() - (expected / 6.0).exp()).abs() < 1e-6);
}

/// The numbers of eval.json beside the small model of the project.
#[test]
fn windows_of_a_whole_text() {
    let tokens = vec![0; 26635];
    let windows = EvalWindows::new(&tokens, EvalProtocol::default(), 4096).unwrap();
    assert_eq!(windows.count(), 104);
    assert_eq!(windows.iter().map(|w| w.tokens.len() - w.first_scored).sum::<usize>(), 26520);
}

#[test]
fn each_row_predicts_the_next_token() {
    // A model that is sure that the next token is one more than this one.
    let successor = || {
        from_fn(|tokens| {
            let row = |&t: &TokenId| (0..5).map(move |id| if id == (t + 1) % 5 { 20.0 } else { 0.0 });
            Ok::<_, Infallible>(tokens.iter().flat_map(row).collect())
        })
    };
    let counting = [0, 1, 2, 3, 4, 0, 1, 2];
    let result = perplexity_of(&EvalWindows::new(&counting, PROTOCOL, 5).unwrap(), successor()).unwrap();
    assert!(result.perplexity() < 1.0001, "{result:?}");
    let wrong = [0, 2, 4, 1];
    assert!(
        perplexity_of(&EvalWindows::new(&wrong, PROTOCOL, 5).unwrap(), successor()).unwrap().mean_nll()
            > 19.0
    );
}

#[test]
fn overlapping_windows_score_a_token_once() {
    let tokens = [0; 10];
    let windows = EvalWindows::new(&tokens, EvalProtocol { context: 4, stride: 3 }, 2).unwrap();
    // Windows begin at 0, 3, 6; tokens 1 to 9 are scored.
    assert_eq!(windows.count(), 3);
    assert_eq!(perplexity_of(&windows, constant(&[0.5, 0.5])).unwrap().tokens_scored, 9);
    let windows = EvalWindows::new(&tokens, EvalProtocol { context: 4, stride: 1 }, 2).unwrap();
    assert_eq!(perplexity_of(&windows, constant(&[0.5, 0.5])).unwrap().tokens_scored, 9);
}

#[test]
fn divergence_is_that_of_the_definition() {
    let tokens = [0, 1, 2, 0];
    let windows = EvalWindows::new(&tokens, PROTOCOL, 3).unwrap();
    let result = distance(&windows, constant(&[0.5, 0.3, 0.2]), constant(&[0.2, 0.3, 0.5])).unwrap();
    let expected = 0.5 * (0.5f64 / 0.2).ln() + 0.2 * (0.2f64 / 0.5).ln();
    assert!((result.kl_divergence - expected).abs() < 1e-6, "{result:?}");
    assert_eq!(result.same_top_token, 0.0);
    assert!((result.reference.mean_nll() + (0.3f64 * 0.2 * 0.5).ln() / 3.0).abs() < 1e-6);

    let same = distance(&windows, constant(&[0.5, 0.3, 0.2]), constant(&[0.5, 0.3, 0.2])).unwrap();
    assert_eq!((same.kl_divergence, same.kl_max, same.same_top_token), (0.0, 0.0, 1.0));
    assert_eq!(same.this, same.reference);
}

#[test]
fn divergence_is_not_symmetric() {
    let tokens = [0, 0];
    let windows = EvalWindows::new(&tokens, EvalProtocol { context: 2, stride: 2 }, 2).unwrap();
    let (p, q) = (&[0.9, 0.1], &[0.5, 0.5]);
    let kl = |a: f64, b: f64| a * (a / b).ln();
    let result = distance(&windows, constant(p), constant(q)).unwrap();
    assert!((result.kl_divergence - kl(0.9, 0.5) - kl(0.1, 0.5)).abs() < 1e-6, "KL(reference || this)");
}

#[test]
fn bad_input_is_named() {
    let error = |tokens: &[TokenId], context, stride| {
        EvalWindows::new(tokens, EvalProtocol { context, stride }, 4).unwrap_err().to_string()
    };
    assert!(error(&[0; 8], 1, 1).contains("--context is 1"));
    assert!(error(&[0; 8], 4, 5).contains("--stride is 5"));
    assert!(error(&[0; 8], 4, 0).contains("--stride is 0"));
    assert!(error(&[0; 3], 4, 4).contains("3 tokens"));
    assert!(error(&[0, 1, 4, 2], 4, 4).contains("token 2 of the text has id 4"));
    assert!(error(&[0, -1, 3, 2], 4, 4).contains("id -1"));
}

#[test]
fn broken_models_are_named() {
    let tokens = [0; 8];
    let windows = EvalWindows::new(&tokens, PROTOCOL, 2).unwrap();
    // Wrong in the second window.
    let with = |value: f32| {
        let mut calls = 0;
        from_fn(move |_| {
            calls += 1;
            let mut logits = vec![0.0; 8];
            logits[2] = if calls == 2 { value } else { 0.0 };
            Ok::<_, Infallible>(logits)
        })
    };
    for bad in [f32::NAN, f32::INFINITY] {
        let message = perplexity_of(&windows, with(bad)).unwrap_err().to_string();
        assert!(message.contains("position 1 of window 1"), "{message}");
        let message = distance(&windows, with(bad), with(0.0)).unwrap_err().to_string();
        assert!(message.contains("the reference model"), "{message}");
    }
    // A forbidden token is no error.
    assert!(perplexity_of(&windows, with(-1e30)).is_ok());
    let short = from_fn(|_| Ok::<_, Infallible>(vec![0.0f32; 7]));
    let message = perplexity_of(&windows, short).unwrap_err().to_string();
    assert!(message.contains("7 logits for window 0, expected 8"), "{message}");
    let fails = from_fn(|_| Err::<Vec<f32>, _>("out of order"));
    assert!(perplexity_of(&windows, fails).unwrap_err().to_string().contains("window 0: out of order"));
}
