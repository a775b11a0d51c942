//! Patterns with look-ahead, which no automaton of a grammar has, in the forms that libraries of schemas
//! publish, written without it.

/// Patterns with one that matches the same texts. zod writes them for `z.email()`, and Pydantic for
/// `Decimal`.
const KNOWN: [(&str, &str); 3] = [
    (
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        r"^([A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$",
    ),
    (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^[+-]?(\d+\.?\d*|\.\d+)$"),
    (r"^(?!^[-+.]*$)[+-]?\d*\.?\d*$", r"^[+-]?(\d+\.?\d*|\.\d+)$"),
];

/// An equal pattern without look-ahead; `None` if none is known, or none is needed.
pub(super) fn without_look_ahead(pattern: &str) -> Option<String> {
    let known = |(published, _): &&(&str, &str)| *published == pattern;
    KNOWN.iter().find(known).map(|(_, equal)| (*equal).to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use super::*;
    use fancy_regex::Regex;
    use proptest::prelude::*;

    /// Both forms of each pattern.
    fn compiled() -> &'static [(Regex, Regex)] {
        static COMPILED: OnceLock<Vec<(Regex, Regex)>> = OnceLock::new();
        let compile =
            |(published, equal): &(&str, &str)| (Regex::new(published).unwrap(), Regex::new(equal).unwrap());
        COMPILED.get_or_init(|| KNOWN.iter().map(compile).collect())
    }

    proptest! {
        #[test]
        fn equal_patterns_match_the_same_texts(text in "[a1'+.@-]{0,9}", domain in "[a.-]{0,5}") {
            for text in [format!("{text}@{domain}"), text.clone(), text.replace('@', ""), format!("{text}@a.bc")] {
                for (published, equal) in compiled() {
                    let same = published.is_match(&text).unwrap() == equal.is_match(&text).unwrap();
                    prop_assert!(same, "{:?} {}", text, published.as_str());
                }
            }
        }
    }
}
