//! Memory of requests. The most that a request can need is counted before it is done, and taken from a pool
//! of fixed size, so that all requests together need no more than the server has said at its start.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;

/// Memory of requests by default.
pub const USUAL_REQUESTS: u64 = 256 << 20;
/// The unit of pools in bytes.
const UNIT: usize = 1 << 10;
/// Freed requests of this many bytes are worth a look at what the allocator can give back.
const LARGE: usize = 8 << 20;

/// A number of bytes that requests take and give back.
#[derive(Debug)]
pub struct BytePool {
    free: Arc<Semaphore>,
    units: u32,
}

/// Bytes of a pool, until it is dropped.
#[derive(Debug)]
pub struct MemoryLease {
    permit: OwnedSemaphorePermit,
    /// The flag that is set when much was given back.
    freed: Option<Arc<AtomicBool>>,
}

impl Drop for MemoryLease {
    fn drop(&mut self) {
        if let Some(freed) = self.freed.as_ref().filter(|_| self.bytes() >= LARGE) {
            freed.store(true, Ordering::Relaxed);
        }
    }
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}

impl BytePool {
    pub fn new(bytes: u64) -> BytePool {
        let units = u32::try_from(bytes / UNIT as u64).unwrap_or(u32::MAX).clamp(1, 1 << 28);
        BytePool { free: Arc::new(Semaphore::new(units as usize)), units }
    }

    /// The bytes of the pool, taken or not.
    pub fn bytes(&self) -> usize {
        self.units as usize * UNIT
    }

    /// Takes bytes, if they are free now.
    pub fn try_take(&self, bytes: usize) -> Option<MemoryLease> {
        let permit = Arc::clone(&self.free).try_acquire_many_owned(units(bytes)).ok()?;
        Some(MemoryLease { permit, freed: None })
    }

    /// Takes bytes, in turn with others; `None` if the pool never has that many.
    pub async fn lease(&self, bytes: usize) -> Option<MemoryLease> {
        let units = units(bytes);
        if units > self.units {
            return None;
        }
        let permit = Arc::clone(&self.free).acquire_many_owned(units).await.ok()?;
        Some(MemoryLease { permit, freed: None })
    }
}

impl MemoryLease {
    pub fn bytes(&self) -> usize {
        self.permit.num_permits() * UNIT
    }

    /// Takes the bytes that are missing to `bytes`, if they are free now.
    pub fn grow_to(&mut self, bytes: usize, pool: &BytePool) -> bool {
        let missing = bytes.saturating_sub(self.bytes());
        if missing == 0 {
            return true;
        }
        match pool.try_take(missing) {
            Some(mut more) => {
                let count = more.permit.num_permits();
                if let Some(permit) = more.permit.split(count) {
                    self.permit.merge(permit);
                }
                true
            }
            None => false,
        }
    }

    /// Gives back all but `bytes`.
    pub fn shrink_to(&mut self, bytes: usize) {
        let kept = units(bytes) as usize;
        let most = self.permit.num_permits().saturating_sub(kept);
        if most * UNIT >= LARGE
            && let Some(freed) = &self.freed
        {
            freed.store(true, Ordering::Relaxed);
        }
        drop(self.permit.split(most));
    }
}

/// The memory of all requests of a server.
#[derive(Debug)]
pub struct RequestMemory {
    /// Bodies take these as they come. A request that comes while all are taken is refused: none waits with a
    /// part of its body.
    pub bodies: BytePool,
    /// Requests take these until their texts are launched, or their answer is there. They wait for their
    /// share, which they take at once.
    pub work: BytePool,
    /// Answers that are not streamed take these as they grow, and conversations of requests that run.
    pub answers: BytePool,
    freed: Arc<AtomicBool>,
}

impl RequestMemory {
    /// Pools of `bytes` bytes together.
    pub fn new(bytes: u64) -> RequestMemory {
        let (bodies, work, answers) =
            (BytePool::new(bytes / 4), BytePool::new(bytes / 2), BytePool::new(bytes / 4));
        RequestMemory { bodies, work, answers, freed: Arc::default() }
    }

    /// A lease for a body that grows with it.
    pub fn lease_body(&self) -> Option<MemoryLease> {
        Some(self.marked(self.bodies.try_take(0)?))
    }

    /// A lease for what a request needs until it is launched; it waits for it.
    pub async fn lease_work(&self, bytes: usize) -> Result<MemoryLease, ApiError> {
        let lease = self.work.lease(bytes).await.ok_or_else(|| too_much("the request", bytes, &self.work))?;
        Ok(self.marked(lease))
    }

    /// Takes more for a request at work, which does not wait for it.
    pub fn extend_lease(&self, lease: &mut MemoryLease, bytes: usize) -> Result<(), ApiError> {
        let all = lease.bytes().saturating_add(bytes);
        if all > self.work.bytes() {
            return Err(too_much("the request", all, &self.work));
        }
        match lease.grow_to(all, &self.work) {
            true => Ok(()),
            false => Err(ApiError::out_of_memory("requests")),
        }
    }

    /// A lease for an answer until it is sent.
    pub fn lease_answer(&self, bytes: usize) -> Result<MemoryLease, ApiError> {
        if bytes > self.answers.bytes() {
            return Err(too_much("the answer", bytes, &self.answers));
        }
        let lease = self.answers.try_take(bytes).ok_or_else(|| ApiError::out_of_memory("answers"))?;
        Ok(self.marked(lease))
    }

    /// Takes more for an answer, up to `bytes` and some room.
    pub fn grow_answer(&self, lease: &mut MemoryLease, bytes: usize) -> Result<(), ApiError> {
        let (pool, roomy) = (&self.answers, bytes + bytes / 4);
        if bytes > pool.bytes() {
            return Err(too_much("the answer", bytes, pool));
        }
        match lease.bytes() >= bytes || lease.grow_to(roomy, pool) || lease.grow_to(bytes, pool) {
            true => Ok(()),
            false => Err(ApiError::out_of_memory("answers")),
        }
    }

    fn marked(&self, mut lease: MemoryLease) -> MemoryLease {
        lease.freed = Some(Arc::clone(&self.freed));
        lease
    }

    /// Tells if much was freed since this was asked last.
    pub fn take_freed(&self) -> bool {
        self.freed.swap(false, Ordering::Relaxed)
    }
}

fn too_much(what: &str, bytes: usize, pool: &BytePool) -> ApiError {
    let mib = |bytes: usize| bytes.div_ceil(1 << 20);
    let message = format!(
        "{what} may need {} MiB of memory, this server has {} for it (--request-memory): ask for less at a time",
        mib(bytes),
        mib(pool.bytes())
    );
    ApiError::request("request_too_large", message)
}

/// The most bytes that the values of a JSON text can take in memory, from the text outside of its strings.
pub fn parsed_bytes(body: &[u8]) -> usize {
    // Lists and objects begin with room for four, and have twice the room that they need while they grow.
    const VALUE: usize = size_of::<Value>();
    const FIELD: usize = VALUE + size_of::<String>() + size_of::<usize>();
    const LIST: usize = 4 * VALUE + 16;
    const OBJECT: usize = 4 * FIELD + 96;
    let (mut bytes, mut rest) = (body.len(), body.iter());
    while let Some(byte) = rest.next() {
        bytes += match byte {
            b'[' => LIST,
            b'{' => OBJECT,
            b',' => 2 * VALUE,
            b':' => 2 * (FIELD - VALUE) + 32,
            b'"' => {
                while let Some(byte) = rest.next() {
                    match byte {
                        b'"' => break,
                        b'\\' => _ = rest.next(),
                        _ => {}
                    }
                }
                16
            }
            _ => 0,
        };
    }
    bytes
}

/// The bytes that a value takes in memory.
pub fn value_bytes(value: &Value) -> usize {
    let inside = match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.capacity() + 16,
        Value::Array(values) => {
            let spare = values.capacity() - values.len();
            values.iter().map(value_bytes).sum::<usize>() + spare * size_of::<Value>() + 16
        }
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| name.capacity() + 56 + value_bytes(value);
            fields.iter().map(field).sum::<usize>() + 96
        }
    };
    size_of::<Value>() + inside
}

/// A body of an answer that keeps its memory until it is sent.
pub struct LeasedBody {
    bytes: Option<Bytes>,
    _lease: MemoryLease,
}

impl LeasedBody {
    /// A body of `text`; a small one keeps nothing.
    pub fn with_lease(text: String, mut lease: MemoryLease) -> Body {
        if text.len() < LARGE / 8 {
            return Body::from(text);
        }
        lease.shrink_to(text.capacity());
        Body::new(LeasedBody { bytes: Some(text.into()), _lease: lease })
    }
}

impl HttpBody for LeasedBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<hyper::body::Frame<Bytes>, Self::Error>>> {
        Poll::Ready(self.bytes.take().map(|bytes| Ok(hyper::body::Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_none()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        hyper::body::SizeHint::with_exact(self.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_come_back() {
        let pool = BytePool::new(10 << 10);
        let mut one = pool.try_take(1).unwrap();
        assert_eq!((pool.bytes(), one.bytes()), (10 << 10, 1 << 10));
        assert!(one.grow_to(4 << 10, &pool) && !one.grow_to(11 << 10, &pool));
        assert!(pool.try_take(6 << 10).is_some() && pool.try_take(7 << 10).is_none());
        one.shrink_to(2 << 10);
        let rest = pool.try_take(8 << 10);
        assert!(rest.is_some() && pool.try_take(1).is_none());
        drop((one, rest));
        assert!(pool.try_take(10 << 10).is_some());
    }

    #[test]
    fn what_a_text_becomes_is_counted_from_above() {
        let deep = format!("{}{}", "[".repeat(100), "]".repeat(100));
        let lists = format!("[{}1]", "[],".repeat(1000));
        let singles = format!("[{}[1]]", "[1],".repeat(1000));
        let objects = format!("[{}{{}}]", r#"{"a":{}},"#.repeat(1000));
        let text = format!("\"{}\"", r#"[,{:\"["#.repeat(1000));
        for json in [&deep, &lists, &singles, &objects, &text, r#"{"a": [1, "b", null, {"c": 2.5}]}"#] {
            let value: Value = serde_json::from_str(json).unwrap();
            let (most, found) = (parsed_bytes(json.as_bytes()), value_bytes(&value));
            assert!(found <= most && most < 8 * found, "{found} {most} {json:.60}");
        }
        // Not closed, or ended inside of an escape.
        assert!(parsed_bytes(b"[\"\\") > 3);
    }
}
