//! Object files by the text that they are made from.

use crate::cache::ObjectCache;
use crate::error::CodegenError;
use crate::pool;
use object::build::elf::{Builder, SectionData};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use xxhash_rust::xxh3::Xxh3;

/// The name that a kernel's function has in its object, whatever the kernel is called.
pub const KERNEL_SYMBOL: &str = "mlcc.kernel";

/// Hash of all that an object depends on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ObjectKey(u128);

impl ObjectKey {
    pub fn from_parts(parts: &[&[u8]]) -> ObjectKey {
        let mut hash = Xxh3::new();
        for part in parts {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        ObjectKey(hash.digest128())
    }

    pub fn bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }
}

impl ObjectKey {
    /// Digits of its text.
    pub const DIGITS: usize = 32;
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The number of objects that a build has linked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ObjectCounts {
    pub objects: usize,
    /// Objects of earlier builds among them.
    pub from_cache: usize,
}

/// The objects of one build.
pub struct ObjectStore<'a> {
    /// `None` while one is made.
    made: Mutex<BTreeMap<ObjectKey, Option<Vec<u8>>>>,
    cache: Option<&'a ObjectCache>,
    from_cache: AtomicUsize,
    listener: Option<&'a CodeListener>,
}

/// Hears how many of the pieces of code of a build are there, from the threads that make them.
#[derive(Clone)]
pub struct CodeListener(Arc<dyn Fn(usize, usize) + Send + Sync>);

impl CodeListener {
    /// `listener` is given how many are done, and how many there will be.
    pub fn new(listener: impl Fn(usize, usize) + Send + Sync + 'static) -> CodeListener {
        CodeListener(Arc::new(listener))
    }
}

impl fmt::Debug for CodeListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CodeListener")
    }
}

impl<'a> ObjectStore<'a> {
    pub fn new(cache: Option<&'a ObjectCache>, listener: Option<&'a CodeListener>) -> ObjectStore<'a> {
        ObjectStore { made: Mutex::default(), cache, from_cache: AtomicUsize::new(0), listener }
    }

    /// Runs the pieces of work that make objects, and tells the listener of each that is done.
    pub fn run<T: Send>(
        &self,
        threads: usize,
        order: &[usize],
        work: impl Fn(usize) -> Result<T, CodegenError> + Sync,
    ) -> Result<Vec<T>, CodegenError> {
        let done = AtomicUsize::new(0);
        pool::run(threads, order, |i| {
            let result = work(i)?;
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            if let Some(CodeListener(listener)) = self.listener {
                listener(done, order.len());
            }
            Ok(result)
        })
    }

    /// Makes sure that there is such an object once all threads are done: makes it, unless another thread
    /// does.
    pub fn ensure_object(
        &self,
        key: ObjectKey,
        make: impl FnOnce() -> Result<Vec<u8>, CodegenError>,
    ) -> Result<ObjectKey, CodegenError> {
        let begun = match self.lock_objects().entry(key) {
            Entry::Occupied(_) => true,
            Entry::Vacant(place) => place.insert(None).is_some(),
        };
        if !begun {
            let object = self.load_or_make(key, make)?;
            self.lock_objects().insert(key, Some(object));
        }
        Ok(key)
    }

    fn load_or_make(
        &self,
        key: ObjectKey,
        make: impl FnOnce() -> Result<Vec<u8>, CodegenError>,
    ) -> Result<Vec<u8>, CodegenError> {
        let Some(cache) = self.cache else { return make() };
        if let Some(object) = cache.get(key) {
            self.from_cache.fetch_add(1, Ordering::Relaxed);
            return Ok(object);
        }
        let object = make()?;
        cache.store_object(key, &object);
        Ok(object)
    }

    /// The objects, after all work was done. Leaves the cache within its limit.
    pub fn finish(&self) -> ObjectCounts {
        let made = ObjectCounts {
            objects: self.lock_objects().len(),
            from_cache: self.from_cache.load(Ordering::Relaxed),
        };
        if let Some(cache) = self.cache.filter(|_| made.from_cache < made.objects) {
            cache.evict_oldest();
        }
        made
    }

    fn lock_objects(&self) -> MutexGuard<'_, BTreeMap<ObjectKey, Option<Vec<u8>>>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An object that was requested, after all work was done without error.
    pub fn get(&self, key: &ObjectKey) -> Vec<u8> {
        self.lock_objects().get(key).and_then(Option::as_ref).cloned().unwrap_or_default()
    }
}

/// The object with [`KERNEL_SYMBOL`] under other names, all of which are hidden.
pub fn with_symbols(bytes: &[u8], names: &[String]) -> Result<Vec<u8>, CodegenError> {
    let error = |what: String| CodegenError::Object { what };
    let mut file = Builder::read(bytes).map_err(|e| error(e.to_string()))?;
    let kernel = file.symbols.iter().find(|s| s.name.as_slice() == KERNEL_SYMBOL.as_bytes());
    let kernel = kernel.ok_or_else(|| error("it does not define the kernel".into()))?;
    let (id, section, info, other) = (kernel.id(), kernel.section, kernel.st_info, kernel.st_other);
    let (value, size) = (kernel.st_value, kernel.st_size);
    for name in names {
        let symbol = file.symbols.add();
        symbol.name = name.as_bytes().to_vec().into();
        (symbol.section, symbol.st_info, symbol.st_other) = (section, info, other);
        (symbol.st_value, symbol.st_size) = (value, size);
    }
    file.symbols.get_mut(id).delete = true;
    // LLVM keeps the names of sections among those of symbols.
    if !file.sections.iter().any(|s| matches!(s.data, SectionData::SectionString)) {
        let names = file.sections.add();
        names.name = b".shstrtab".as_slice().into();
        names.sh_type = object::elf::SHT_STRTAB;
        names.sh_addralign = 1;
        names.data = SectionData::SectionString;
    }
    let mut out = Vec::new();
    file.write(&mut out).map_err(|e| error(e.to_string()))?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_hear_of_every_piece() {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let listener = CodeListener::new({
            let heard = heard.clone();
            move |done, total| heard.lock().unwrap().push((done, total))
        });
        let objects = ObjectStore::new(None, Some(&listener));
        assert_eq!(objects.run(2, &[2, 0, 1], Ok).unwrap(), [0, 1, 2]);
        let mut heard = heard.lock().unwrap().clone();
        heard.sort();
        assert_eq!(heard, [(1, 3), (2, 3), (3, 3)]);
    }
}
