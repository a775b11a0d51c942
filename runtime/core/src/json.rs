//! One value of a JSON text, without reading the rest: the runtime looks at a few numbers of the metadata
//! only.

/// The text of the value at `path`, keys of objects from the outermost on. `None` if there is none, or the
/// text is no JSON up to there.
pub(crate) fn find_value<'a>(json: &'a str, path: &[&str]) -> Option<&'a str> {
    let mut at = JsonCursor { text: json, at: 0 };
    for key in path {
        at.enter_key(key)?;
    }
    at.skip_space();
    let from = at.at;
    at.skip_value()?;
    json.get(from..at.at)
}

struct JsonCursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> JsonCursor<'a> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while self.peek().is_some_and(|c| c.is_ascii_whitespace()) {
            self.at += 1;
        }
    }

    fn expect_byte(&mut self, wanted: u8) -> Option<()> {
        self.skip_space();
        (self.peek()? == wanted).then(|| self.at += 1)
    }

    /// Goes to the value of a key of the object that begins here.
    fn enter_key(&mut self, key: &str) -> Option<()> {
        self.expect_byte(b'{')?;
        loop {
            let found = self.string()?;
            self.expect_byte(b':')?;
            if found == key {
                return Some(());
            }
            self.skip_value()?;
            self.expect_byte(b',')?;
        }
    }

    /// A string as it is written, escapes and all.
    fn string(&mut self) -> Option<&'a str> {
        self.expect_byte(b'"')?;
        let from = self.at;
        loop {
            match self.peek()? {
                b'"' => break,
                b'\\' => self.at += 2,
                _ => self.at += 1,
            }
        }
        self.at += 1;
        self.text.get(from..self.at - 1)
    }

    fn skip_value(&mut self) -> Option<()> {
        let mut depth = 0usize;
        loop {
            self.skip_space();
            match self.peek()? {
                b'"' => drop(self.string()?),
                b'{' | b'[' => {
                    (depth, self.at) = (depth + 1, self.at + 1);
                    continue;
                }
                b'}' | b']' => (depth, self.at) = (depth.checked_sub(1)?, self.at + 1),
                b',' | b':' if depth > 0 => {
                    self.at += 1;
                    continue;
                }
                _ => self.skip_word()?,
            }
            if depth == 0 {
                return Some(());
            }
        }
    }

    /// A number, `true`, `false` or `null`.
    fn skip_word(&mut self) -> Option<()> {
        let from = self.at;
        while self.peek().is_some_and(|c| c.is_ascii_alphanumeric() || b"+-.".contains(&c)) {
            self.at += 1;
        }
        (self.at > from).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_where_they_are() {
        let json = r#" { "a" : [1, {"memory": {"x": 5}}, "}\"]{"], "memory": {"y": {}, "x": 7, "z": null, "w": -1},
            "config": "\"memory\":{\"x\":9}", "last": true }"#;
        assert_eq!(find_value(json, &["memory", "x"]), Some("7"));
        assert_eq!(find_value(json, &["memory", "w"]), Some("-1"));
        assert_eq!(find_value(json, &["memory", "z"]), Some("null"));
        assert_eq!(find_value(json, &["memory", "y"]), Some("{}"));
        assert_eq!(find_value(json, &["last"]), Some("true"));
        assert_eq!(find_value(json, &["a", "x"]), None);
        assert_eq!(find_value(json, &["absent"]), None);
        assert_eq!(find_value(json, &["config"]), Some(r#""\"memory\":{\"x\":9}""#));
    }

    #[test]
    fn any_text_is_read_to_an_end() {
        let json = r#"{"a":[1,{"b":"\u00e4"}],"memory":{"x":7}}"#;
        for end in (0..json.len()).filter(|&end| json.is_char_boundary(end)) {
            let _ = find_value(&json[..end], &["memory", "x"]);
        }
        for bad in ["", "{", "[", "]", "}", "{\"", "{\"a\\", "{\"a\":}", ",", "\u{e4}", "{\"a\"\u{e4}:1}"] {
            assert_eq!(find_value(bad, &["a", "b"]), None, "{bad}");
        }
    }
}
