//! Lists and mappings that know how deep and how large they are.
//!
//! The template engine prints, compares, hashes, serializes and drops values by recursion, and a value may
//! hold another one many times (`[x, x]` in a loop: 2^n of them when printed). So every container that a
//! template makes is measured when it is made: its levels and its size written out are bounded, and with them
//! the cost of everything that looks at it.

use super::limits;
use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr, Tuple};
use minijinja::{Error, ErrorKind, Value};
use std::fmt;
use std::sync::Arc;

/// Bytes of one entry of a container.
pub const ENTRY: u64 = 32;
/// Bytes of an empty container.
const CONTAINER: u64 = 96;

/// The engine's list or mapping, and its measure.
pub struct MeasuredContainer {
    object: DynObject,
    levels: usize,
    /// Bytes with everything inside, every occurrence counted.
    size: u64,
    /// The bytes that the meter counts for it.
    counted: u64,
}

impl Drop for MeasuredContainer {
    fn drop(&mut self) {
        limits::free_memory(self.counted);
    }
}

impl fmt::Debug for MeasuredContainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.object, f)
    }
}

impl Object for MeasuredContainer {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        self.object.repr()
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.object.get_value(key)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.object.get_value_by_str(key)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.object.enumerate()
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        self.object.enumerator_len()
    }

    fn is_true(self: &Arc<Self>) -> bool {
        self.object.is_true()
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.object.render(f)
    }
}

/// Bytes that looking at all of a value costs. Objects that are not measured (tuples, namespaces) have
/// measured values inside.
pub fn size(value: &Value) -> u64 {
    if let Some(text) = value.as_str() {
        return text.len() as u64;
    }
    if let Some(measured) = value.downcast_object_ref::<MeasuredContainer>() {
        return measured.size;
    }
    let Some(object) = value.as_object() else { return ENTRY };
    match object.repr() {
        ObjectRepr::Map => (object.try_iter_pairs().into_iter().flatten())
            .fold(ENTRY, |sum, (key, item)| sum.saturating_add(size(&key)).saturating_add(size(&item))),
        ObjectRepr::Seq | ObjectRepr::Iterable => (object.try_iter().into_iter().flatten())
            .fold(ENTRY, |sum, item| sum.saturating_add(size(&item)).saturating_add(ENTRY)),
        _ => ENTRY,
    }
}

/// The most bytes of the value as text: `\u{1b}` for a byte, and brackets.
pub fn printed(value: &Value) -> u64 {
    if value.as_str().is_some() { size(value) } else { size(value).saturating_mul(8) }
}

/// True if a template can change the object after it was made. It can reach itself then, so it is no part of
/// other values.
fn changes(object: &DynObject) -> bool {
    let name = object.type_name();
    name.ends_with("::Namespace") || name.ends_with("::Loop")
}

/// A value that may be part of others: measured, with nothing inside that changes.
pub fn part(value: &Value) -> Result<Value, Error> {
    Ok(walk(value, 0)?.0)
}

/// A result as it goes back to the template: measured, unless it is a namespace or a loop.
pub fn result(value: Value) -> Result<Value, Error> {
    match value.as_object() {
        Some(object) if !changes(object) => part(&value),
        _ => Ok(value),
    }
}

/// The value, its levels and its size.
fn walk(value: &Value, depth: usize) -> Result<(Value, usize, u64), Error> {
    let Some(object) = value.as_object() else { return Ok((value.clone(), 0, ENTRY + size(value))) };
    if let Some(measured) = value.downcast_object_ref::<MeasuredContainer>() {
        return within(depth, measured.levels).map(|()| (value.clone(), measured.levels, measured.size));
    }
    if changes(object) {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "a namespace or a loop cannot be part of another value",
        ));
    }
    within(depth, 1)?;
    let mut measure = ContainerMeasure { levels: 1, size: CONTAINER, depth };
    limits::count_memory(CONTAINER)?;
    match object.repr() {
        ObjectRepr::Seq | ObjectRepr::Iterable => {
            let mut items = Vec::new();
            for item in value.try_iter()?.checked() {
                items.push(measure.add(&item?)?);
            }
            if value.is_tuple() {
                // Tuples are the engine's own, so nothing would give this back.
                return Ok((Value::from(Tuple::from(items)), measure.levels, measure.size));
            }
            let counted = CONTAINER + items.len() as u64 * ENTRY;
            // The groups of `groupby` have names for their items.
            if object.type_name().ends_with("::GroupTuple") {
                return Ok(measure.finish(value.clone(), counted));
            }
            Ok(measure.finish(Value::from(items), counted))
        }
        ObjectRepr::Map => {
            let mut pairs = Vec::new();
            for (key, item) in object.try_iter_pairs().into_iter().flatten() {
                pairs.push((measure.add(&key)?, measure.add(&item)?));
            }
            let counted = CONTAINER + pairs.len() as u64 * 2 * ENTRY;
            Ok(measure.finish(Value::from_pairs(pairs), counted))
        }
        // A macro or a function.
        _ => Ok((value.clone(), 1, CONTAINER)),
    }
}

fn within(depth: usize, levels: usize) -> Result<(), Error> {
    if depth + levels > limits::MOST_LEVELS { Err(limits::too_deep()) } else { Ok(()) }
}

struct ContainerMeasure {
    levels: usize,
    size: u64,
    depth: usize,
}

impl ContainerMeasure {
    fn add(&mut self, value: &Value) -> Result<Value, Error> {
        let (value, levels, size) = walk(value, self.depth + 1)?;
        self.levels = self.levels.max(levels + 1);
        self.size = self.size.saturating_add(size);
        limits::count_memory(ENTRY)?;
        limits::check_size(self.size)?;
        Ok(value)
    }

    fn finish(self, container: Value, counted: u64) -> (Value, usize, u64) {
        let (levels, size) = (self.levels, self.size);
        let object = container.as_object().cloned();
        let value = object.map_or(container, |object| {
            Value::from_object(MeasuredContainer { object, levels, size, counted })
        });
        (value, levels, size)
    }
}

/// A sequence of numbers that are made when they are asked for.
pub fn lazy(range: Value) -> Value {
    let size = (range.len().unwrap_or(0) as u64).saturating_mul(ENTRY);
    range
        .as_object()
        .cloned()
        .map_or(range, |object| Value::from_object(MeasuredContainer { object, levels: 1, size, counted: 0 }))
}
