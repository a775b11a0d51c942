//! The JSON object of a call as it comes: keys in any order, arguments as an object or as the text of one, or
//! none.

/// A JSON value that comes character by character.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct JsonValue {
    kind: Option<ValueForm>,
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// Text that has come and was not given out.
    text: String,
    ended: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ValueForm {
    /// An object or a list.
    Nested,
    Quoted,
    /// A number or a word.
    Plain,
}

impl JsonValue {
    /// True if the character belongs to the value; one that does not ends it.
    pub fn push(&mut self, c: char) -> bool {
        let kind = *self.kind.get_or_insert(match c {
            '{' | '[' => ValueForm::Nested,
            '"' => ValueForm::Quoted,
            _ => ValueForm::Plain,
        });
        if kind == ValueForm::Plain && (c.is_whitespace() || matches!(c, ',' | '}' | ']' | '<' | '"')) {
            self.ended = true;
            return false;
        }
        match c {
            _ if self.escaped => self.escaped = false,
            '\\' if self.in_string => self.escaped = true,
            '"' => {
                self.in_string = !self.in_string;
                self.ended = !self.in_string && self.depth == 0;
            }
            '{' | '[' if !self.in_string => self.depth += 1,
            '}' | ']' if !self.in_string => {
                self.depth -= 1;
                self.ended = self.depth == 0;
            }
            _ => {}
        }
        self.text.push(c);
        true
    }

    pub fn is_empty(&self) -> bool {
        self.kind.is_none()
    }

    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// The text of a JSON string that has ended.
    pub fn as_string(&self) -> Option<String> {
        serde_json::from_str(&self.text).ok().filter(|_| self.ended)
    }

    /// The part of arguments that is sure and was not given out: an object as it comes, the text of one as a
    /// whole.
    pub fn take_arguments(&mut self) -> String {
        match self.kind {
            Some(ValueForm::Nested) => std::mem::take(&mut self.text),
            Some(ValueForm::Quoted) if self.ended => {
                let text = self.as_string().unwrap_or_default();
                self.text.clear();
                text.trim().to_owned()
            }
            _ => String::new(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum ObjectPosition {
    /// Before the object; whether a list of them may begin.
    Open,
    /// Before a key, or behind a value.
    Between,
    Key(JsonValue),
    Colon,
    Value(JsonValue),
    End,
}

/// The names of the keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CallKeys {
    pub name: String,
    pub arguments: String,
    /// Only the keys mark a call, so that an object with others is none.
    pub alone: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeyRole {
    Name,
    Arguments,
    /// The call itself, as some write it: `{"type": "function", "function": {...}}`.
    Wrapper,
    Other,
}

impl CallKeys {
    fn role(&self, key: &str) -> Option<KeyRole> {
        match key {
            _ if key == self.name || key == "name" => Some(KeyRole::Name),
            _ if key == self.arguments => Some(KeyRole::Arguments),
            "arguments" | "parameters" => Some(KeyRole::Arguments),
            "function" => Some(KeyRole::Wrapper),
            "id" | "type" => Some(KeyRole::Other),
            _ => (!self.alone).then_some(KeyRole::Other),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ObjectProgress {
    /// More has to come.
    More,
    /// It is none.
    Broken,
    End,
}

/// The object of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CallObject {
    keys: CallKeys,
    /// Bytes of what is held that were read.
    pub read: usize,
    place: ObjectPosition,
    role: KeyRole,
    wrapped: bool,
    /// True if it is one of a list.
    pub listed: bool,
    /// True if it is not the first one.
    pub follows: bool,
    pub name: Option<String>,
    arguments: Option<JsonValue>,
    /// True if it is known to be a call, and reported.
    pub told: bool,
    /// True if any arguments were given out.
    pub argued: bool,
}

impl CallObject {
    /// A new object; held text is read from `read` on.
    pub fn new(keys: CallKeys, read: usize) -> CallObject {
        CallObject {
            keys,
            read,
            place: ObjectPosition::Open,
            role: KeyRole::Other,
            wrapped: false,
            listed: false,
            follows: false,
            name: None,
            arguments: None,
            told: false,
            argued: false,
        }
    }

    /// The next one of a list.
    pub fn following(keys: CallKeys) -> CallObject {
        CallObject { listed: true, follows: true, ..CallObject::new(keys, 0) }
    }

    /// True if enough is known to report a call: its name, and that its arguments have started or do not
    /// come.
    pub fn is_call(&self) -> bool {
        let argues = match &self.place {
            ObjectPosition::Value(value) => self.role == KeyRole::Arguments && value.kind.is_some(),
            place => self.arguments.is_some() || *place == ObjectPosition::End,
        };
        self.name.is_some() && argues
    }

    /// The part of the arguments that is sure and was not given out.
    pub fn take_arguments(&mut self) -> String {
        let inside = match &mut self.place {
            ObjectPosition::Value(value) if self.role == KeyRole::Arguments => Some(value),
            _ => self.arguments.as_mut(),
        };
        inside.map(JsonValue::take_arguments).unwrap_or_default()
    }

    /// Reads on in what is held.
    pub fn push(&mut self, held: &str) -> ObjectProgress {
        while let Some(c) = held.get(self.read..).and_then(|rest| rest.chars().next()) {
            match self.character(c) {
                Some(true) => self.read += c.len_utf8(),
                Some(false) => {}
                None => return ObjectProgress::Broken,
            }
            if self.place == ObjectPosition::End {
                return ObjectProgress::End;
            }
        }
        ObjectProgress::More
    }

    /// True if the character was read; `None` if no call has it there.
    fn character(&mut self, c: char) -> Option<bool> {
        match &mut self.place {
            ObjectPosition::Key(key) => {
                key.push(c);
                if key.has_ended() {
                    self.role = self.keys.role(&key.as_string()?)?;
                    self.place = ObjectPosition::Colon;
                }
            }
            ObjectPosition::Value(value) if value.kind.is_none() && c.is_whitespace() => {}
            ObjectPosition::Value(value)
                if value.kind.is_none() && c == '{' && self.role == KeyRole::Wrapper =>
            {
                self.wrapped = true;
                self.place = ObjectPosition::Between;
            }
            ObjectPosition::Value(value) => {
                let taken = value.push(c);
                if value.has_ended() {
                    let value = std::mem::take(value);
                    self.value(value)?;
                }
                return Some(taken);
            }
            _ if c.is_whitespace() => {}
            ObjectPosition::Open => match c {
                '{' => self.place = ObjectPosition::Between,
                '[' if !self.listed => self.listed = true,
                _ => return None,
            },
            ObjectPosition::Between => match c {
                ',' => {}
                '"' => {
                    let mut key = JsonValue::default();
                    key.push(c);
                    self.place = ObjectPosition::Key(key);
                }
                '}' if self.wrapped => self.wrapped = false,
                '}' => self.place = ObjectPosition::End,
                _ => return None,
            },
            ObjectPosition::Colon => {
                if c != ':' {
                    return None;
                }
                self.place = ObjectPosition::Value(JsonValue::default());
                return Some(true);
            }
            ObjectPosition::End => return None,
        }
        Some(true)
    }

    /// A value has ended.
    fn value(&mut self, value: JsonValue) -> Option<()> {
        match self.role {
            KeyRole::Name => self.name = Some(value.as_string()?),
            KeyRole::Wrapper => self.name = self.name.take().or(Some(value.as_string()?)),
            KeyRole::Arguments => self.arguments = Some(value),
            KeyRole::Other => {}
        }
        self.place = ObjectPosition::Between;
        Some(())
    }
}
