//! `json.dumps` of Python.

use super::limits::{self, BoundedText};
use super::{operators, values};
use minijinja::value::Kwargs;
use minijinja::{Error, Value};

/// `json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)`.
pub fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        _ => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let style = PythonJson { item, key, indent, depth: 0, empty: true, ascii: ascii.unwrap_or(false) };
    let mut text = BoundedText::value();
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, style);
    let written = match sort_keys {
        Some(true) => {
            limits::check_memory(values::size(value).saturating_mul(4))?;
            serde_json::to_value(value).and_then(|mut sorted| {
                // A JSON value has its keys in either order, by a feature of its crate that any other crate
                // may ask for.
                sorted.sort_all_objects();
                serde::Serialize::serialize(&sorted, &mut serializer)
            })
        }
        _ => serde::Serialize::serialize(value, &mut serializer),
    };
    let written = written.map_err(|error| format!("cannot be written as JSON: {error}"));
    Ok(operators::counted(text.finish(written)?))
}

const SPACES: &str = "                                                                ";

/// Python's separators and indentation.
struct PythonJson {
    item: String,
    key: String,
    indent: Option<usize>,
    depth: usize,
    /// Nothing has been written into the innermost container yet.
    empty: bool,
    ascii: bool,
}

impl PythonJson {
    fn new_line<W: ?Sized + std::io::Write>(&self, writer: &mut W) -> std::io::Result<()> {
        match self.indent {
            Some(indent) => {
                writer.write_all(b"\n")?;
                let mut spaces = indent.saturating_mul(self.depth);
                while spaces > 0 {
                    let some = spaces.min(SPACES.len());
                    writer.write_all(&SPACES.as_bytes()[..some])?;
                    spaces -= some;
                }
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn begin<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, bracket: &str) -> std::io::Result<()> {
        self.depth += 1;
        self.empty = true;
        writer.write_all(bracket.as_bytes())
    }

    fn end<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, bracket: &str) -> std::io::Result<()> {
        self.depth -= 1;
        if !self.empty {
            self.new_line(writer)?;
        }
        self.empty = false;
        writer.write_all(bracket.as_bytes())
    }

    fn begin_item<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.empty = false;
        self.new_line(writer)
    }
}

impl serde_json::ser::Formatter for PythonJson {
    fn begin_array<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.begin(writer, "[")
    }
    fn end_array<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.end(writer, "]")
    }
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        self.begin_item(w, first)
    }
    fn begin_object<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.begin(writer, "{")
    }
    fn end_object<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.end(writer, "}")
    }
    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        self.begin_item(w, first)
    }
    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }
    fn write_string_fragment<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> std::io::Result<()> {
        for c in fragment.chars() {
            let mut units = [0u16; 2];
            match c {
                // Python escapes DEL only where it escapes all but ASCII, and then not at all: it is ASCII.
                c if c.is_ascii() || !self.ascii => write!(writer, "{c}")?,
                c => {
                    for unit in c.encode_utf16(&mut units) {
                        write!(writer, "\\u{unit:04x}")?;
                    }
                }
            }
        }
        Ok(())
    }
}
