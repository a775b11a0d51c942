//! Values as Python prints them, which models write where JSON is asked for: `['a', None, {'b': True}]`.

use serde_json::{Map, Value as Json};

/// Lists inside of each other.
const DEEPEST: usize = 64;

/// The JSON value of a Python literal; `None` if the text is none.
pub(super) fn literal(text: &str) -> Option<Json> {
    let mut reader = LiteralReader { rest: text };
    let value = reader.value(0)?;
    reader.blanks();
    reader.rest.is_empty().then_some(value)
}

struct LiteralReader<'t> {
    rest: &'t str,
}

impl LiteralReader<'_> {
    fn blanks(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn eat(&mut self, text: &str) -> bool {
        self.blanks();
        match self.rest.strip_prefix(text) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn value(&mut self, depth: usize) -> Option<Json> {
        self.blanks();
        match self.rest.chars().next().filter(|_| depth < DEEPEST)? {
            '[' => self.list("[", "]", depth),
            '(' => self.list("(", ")", depth),
            '{' => self.mapping(depth),
            quote @ ('\'' | '"') => self.text(quote).map(Json::String),
            _ => self.word(),
        }
    }

    fn list(&mut self, open: &str, close: &str, depth: usize) -> Option<Json> {
        self.eat(open);
        let mut values = Vec::new();
        while !self.eat(close) {
            values.push(self.value(depth + 1)?);
            if !self.eat(",") {
                return self.eat(close).then_some(Json::Array(values));
            }
        }
        Some(Json::Array(values))
    }

    fn mapping(&mut self, depth: usize) -> Option<Json> {
        self.eat("{");
        let mut values = Map::new();
        while !self.eat("}") {
            let key = match self.value(depth + 1)? {
                Json::String(key) => key,
                key @ (Json::Number(_) | Json::Bool(_) | Json::Null) => key.to_string(),
                _ => return None,
            };
            if !self.eat(":") {
                return None;
            }
            values.insert(key, self.value(depth + 1)?);
            if !self.eat(",") {
                return self.eat("}").then_some(Json::Object(values));
            }
        }
        Some(Json::Object(values))
    }

    fn text(&mut self, quote: char) -> Option<String> {
        let mut text = String::new();
        let mut chars = self.rest.char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            match c {
                _ if c == quote => {
                    self.rest = &self.rest[at + c.len_utf8()..];
                    return Some(text);
                }
                '\\' => match chars.next()?.1 {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    '\n' => {}
                    escape @ ('x' | 'u' | 'U') => {
                        let digits = if escape == 'x' {
                            2
                        } else if escape == 'u' {
                            4
                        } else {
                            8
                        };
                        let hex: String = chars.by_ref().take(digits).map(|(_, c)| c).collect();
                        text.push(char::from_u32(u32::from_str_radix(&hex, 16).ok()?)?);
                    }
                    other => text.push(other),
                },
                c => text.push(c),
            }
        }
        None
    }

    fn word(&mut self) -> Option<Json> {
        let end = self.rest.find(|c: char| c.is_whitespace() || ",]})':\"".contains(c));
        let (word, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest;
        match word {
            "True" | "true" => Some(true.into()),
            "False" | "false" => Some(false.into()),
            "None" | "null" => Some(Json::Null),
            _ => serde_json::from_str(word).ok().filter(Json::is_number),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::literal;
    use serde_json::{Value, json};

    #[test]
    fn literals_are_read() {
        let cases = [
            ("['a', \"b\", 'it\\'s']", json!(["a", "b", "it's"])),
            ("{'a': True, 'b': [None, 1.5, -2], 3: ()}", json!({"a": true, "b": [null, 1.5, -2], "3": []})),
            ("('x',)", json!(["x"])),
            ("[1, 2,]", json!([1, 2])),
            ("['\\u00e9\\x41\\n']", json!(["éA\n"])),
            ("None", Value::Null),
        ];
        for (text, value) in cases {
            assert_eq!(literal(text), Some(value), "{text}");
        }
        for text in ["['a'", "[a]", "{'a'}", "['a'] b", "", "{[1]: 2}", &"[".repeat(1000)] {
            assert_eq!(literal(text), None, "{text}");
        }
    }
}
