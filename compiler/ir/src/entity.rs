//! Typed u32 ids and the dense vectors they index (the idea of cranelift-entity, in the few lines that we
//! need).

use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// A typed index into one arena.
pub trait EntityId: Copy + Eq + Ord {
    fn from_index(index: usize) -> Self;
    fn index(self) -> usize;
}

/// Declares a u32 newtype id with its print prefix, e.g. `v12`.
macro_rules! entity {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u32);
        impl $crate::entity::EntityId for $name {
            fn from_index(index: usize) -> Self { $name(index as u32) }
            fn index(self) -> usize { self.0 as usize }
        }
        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { write!(f, concat!($prefix, "{}"), self.0) }
        }
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { write!(f, concat!($prefix, "{}"), self.0) }
        }
    };
}
pub(crate) use entity;

/// A dense arena: values are pushed, never removed, and found by their id.
#[derive(Clone, PartialEq, Eq)]
pub struct EntityArena<I, T> {
    items: Vec<T>,
    id: PhantomData<I>,
}

impl<I: EntityId, T> EntityArena<I, T> {
    pub fn new() -> Self {
        EntityArena { items: Vec::new(), id: PhantomData }
    }
    pub fn push(&mut self, item: T) -> I {
        self.items.push(item);
        I::from_index(self.items.len() - 1)
    }
    pub fn len(&self) -> usize {
        self.items.len()
    }
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = I> + use<I, T> {
        (0..self.items.len()).map(I::from_index)
    }
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (I, &T)> {
        self.items.iter().enumerate().map(|(i, t)| (I::from_index(i), t))
    }
    pub fn values(&self) -> std::slice::Iter<'_, T> {
        self.items.iter()
    }
    pub fn get(&self, id: I) -> Option<&T> {
        self.items.get(id.index())
    }
    pub fn get_mut(&mut self, id: I) -> Option<&mut T> {
        self.items.get_mut(id.index())
    }
}

impl<I: EntityId, T> Default for EntityArena<I, T> {
    fn default() -> Self {
        Self::new()
    }
}
impl<I: EntityId, T> Index<I> for EntityArena<I, T> {
    type Output = T;
    fn index(&self, id: I) -> &T {
        &self.items[id.index()]
    }
}
impl<I: EntityId, T> IndexMut<I> for EntityArena<I, T> {
    fn index_mut(&mut self, id: I) -> &mut T {
        &mut self.items[id.index()]
    }
}
impl<I: EntityId, T: std::fmt::Debug> std::fmt::Debug for EntityArena<I, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.items).finish()
    }
}
