//! Byte strings with ids, for finding all of them that a text begins with.

/// Sorted entries; a search narrows the range of entries byte by byte.
#[derive(Debug, Clone, Default)]
pub(super) struct PrefixIndex {
    entries: Vec<(Box<[u8]>, u32)>,
    /// Range of the entries by their first byte, for the quick answer "none".
    first: Vec<(u32, u32)>,
}

impl PrefixIndex {
    /// The index of some strings. Of two equal ones that with the lower id stays; empty ones are left out.
    pub fn new(entries: impl IntoIterator<Item = (Vec<u8>, u32)>) -> PrefixIndex {
        let mut entries: Vec<(Box<[u8]>, u32)> = entries
            .into_iter()
            .filter(|(bytes, _)| !bytes.is_empty())
            .map(|(bytes, id)| (bytes.into_boxed_slice(), id))
            .collect();
        entries.sort();
        entries.dedup_by(|b, a| a.0 == b.0);
        let bound = |byte: usize| entries.partition_point(|(bytes, _)| usize::from(bytes[0]) < byte) as u32;
        let first = (0..256).map(|byte| (bound(byte), bound(byte + 1))).collect();
        PrefixIndex { entries, first }
    }

    /// Length and id of every entry that `text` begins with, shortest first.
    pub fn prefixes<'a>(&'a self, text: &'a [u8]) -> PrefixMatches<'a> {
        let range = text.first().and_then(|&byte| self.first.get(usize::from(byte)));
        let (begin, end) = range.copied().unwrap_or((0, 0));
        PrefixMatches { entries: &self.entries[begin as usize..end as usize], text, depth: 1 }
    }

    pub fn longest(&self, text: &[u8]) -> Option<(usize, u32)> {
        self.prefixes(text).last()
    }
}

pub(super) struct PrefixMatches<'a> {
    /// Entries that agree with the text in the first `depth` bytes.
    entries: &'a [(Box<[u8]>, u32)],
    text: &'a [u8],
    depth: usize,
}

impl Iterator for PrefixMatches<'_> {
    type Item = (usize, u32);

    fn next(&mut self) -> Option<(usize, u32)> {
        loop {
            // Sorted: an entry that ends here comes first.
            let (bytes, id) = self.entries.first()?;
            let (ended, depth) = (bytes.len() == self.depth, self.depth);
            let id = *id;
            if ended {
                self.entries = &self.entries[1..];
            }
            match self.text.get(depth) {
                Some(byte) => {
                    let begin = self.entries.partition_point(|(bytes, _)| bytes[depth] < *byte);
                    let end = self.entries.partition_point(|(bytes, _)| bytes[depth] <= *byte);
                    self.entries = &self.entries[begin..end];
                }
                None => self.entries = &[],
            }
            self.depth += 1;
            if ended {
                return Some((depth, id));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_every_prefix() {
        let words: [&[u8]; 7] = [b"a", b"ab", b"abcd", b"b", b"", b"abd", b"a"];
        let index = PrefixIndex::new(words.iter().zip(0..).map(|(word, id)| (word.to_vec(), id)));
        let found = |text: &[u8]| index.prefixes(text).collect::<Vec<_>>();
        assert_eq!(found(b"abcde"), [(1, 0), (2, 1), (4, 2)]);
        assert_eq!(found(b"abd"), [(1, 0), (2, 1), (3, 5)]);
        assert_eq!(found(b"b"), [(1, 3)]);
        assert_eq!(found(b"c"), []);
        assert_eq!(found(b""), []);
        assert_eq!(index.longest(b"abc"), Some((2, 1)));
        assert_eq!(PrefixIndex::default().longest(b"abc"), None);
    }
}
