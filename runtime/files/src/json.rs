//! The extensions of JSON that Python's `json` writes.

use std::borrow::Cow;

/// The substitute for infinity: the largest number that JSON can hold for an f64.
const LARGEST: &str = "1.7976931348623157e308";
const INFINITY: &[u8] = b"Infinity";

/// The text with the largest f64 in place of `Infinity` (also behind a minus). Text in quotes stays.
pub fn without_infinity(json: &[u8]) -> Cow<'_, [u8]> {
    if !json.windows(INFINITY.len()).any(|word| word == INFINITY) {
        return Cow::Borrowed(json);
    }
    let mut plain = Vec::with_capacity(json.len() + LARGEST.len());
    let (mut at, mut quoted) = (0, false);
    while let Some(&byte) = json.get(at) {
        let len = match byte {
            // An escaped quote ends no text.
            b'\\' if quoted => 2.min(json.len() - at),
            _ => 1,
        };
        if byte == b'"' {
            quoted = !quoted;
        }
        if !quoted && json[at..].starts_with(INFINITY) {
            plain.extend(LARGEST.bytes());
            at += INFINITY.len();
            continue;
        }
        plain.extend_from_slice(&json[at..at + len]);
        at += len;
    }
    Cow::Owned(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(json: &str) -> String {
        String::from_utf8(without_infinity(json.as_bytes()).into_owned()).unwrap()
    }

    #[test]
    fn infinities_become_the_largest_number() {
        assert_eq!(plain("[0.0, Infinity]"), format!("[0.0, {LARGEST}]"));
        assert_eq!(plain("[-Infinity]"), format!("[-{LARGEST}]"));
        assert_eq!(LARGEST.parse(), Ok(f64::MAX));
    }

    #[test]
    fn text_stays() {
        for json in
            [r#"{"Infinity": 1}"#, r#"["a\"Infinity"]"#, r#"["\\\"Infinity\\"]"#, "", "{", r#"["Infinity\"#]
        {
            assert_eq!(plain(json), json);
        }
    }
}
