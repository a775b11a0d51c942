//! Adapters that texts are written with.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Numbers of adapters; none comes twice, so that a state is never taken for that of a later one.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// An adapter of a model, under a name. Only the model knows its content. Copies are the same adapter.
#[derive(Clone)]
pub struct TextAdapter(Arc<AdapterIdentity>);

struct AdapterIdentity {
    id: u64,
    name: String,
    forgotten: AtomicBool,
    handle: Box<dyn Any + Send + Sync>,
}

/// The adapter of states that may be used together; `None` for those without one.
pub(super) type AdapterId = Option<u64>;

impl TextAdapter {
    /// `handle` is the argument of the model's [`ModelRunner::set_adapter`](super::ModelRunner::set_adapter):
    /// for compiled models a [`mlcc_runtime::LoadedAdapter`].
    pub fn new(name: &str, handle: impl Any + Send + Sync) -> TextAdapter {
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let forgotten = AtomicBool::new(false);
        TextAdapter(Arc::new(AdapterIdentity {
            id,
            name: name.to_owned(),
            forgotten,
            handle: Box::new(handle),
        }))
    }

    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The handle that it was made of, if that is a `T`.
    pub fn handle<T: 'static>(&self) -> Option<&T> {
        self.0.handle.downcast_ref()
    }

    pub(super) fn id(&self) -> u64 {
        self.0.id
    }

    /// No state of it is kept from now on.
    pub(super) fn mark_forgotten(&self) {
        self.0.forgotten.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_forgotten(&self) -> bool {
        self.0.forgotten.load(Ordering::Relaxed)
    }
}

impl PartialEq for TextAdapter {
    fn eq(&self, other: &TextAdapter) -> bool {
        self.id() == other.id()
    }
}

impl Eq for TextAdapter {}

impl fmt::Debug for TextAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TextAdapter").field(&self.name()).finish()
    }
}

/// The id of a sequence's adapter, if it has one.
pub(super) fn adapter_id(adapter: Option<&TextAdapter>) -> AdapterId {
    adapter.map(TextAdapter::id)
}
