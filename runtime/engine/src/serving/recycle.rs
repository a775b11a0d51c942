//! Lists that are kept between steps although what they hold is borrowed anew in each.

/// An empty list for another lifetime, in the memory of an old one: the iterators of the standard library
/// collect in place where size and alignment are the same.
pub(super) fn recycle_list<A, B>(mut list: Vec<A>) -> Vec<B> {
    list.clear();
    // Nothing is left that could be converted.
    list.into_iter().filter_map(|_| None).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_stays() {
        let text = String::from("abc");
        let mut list: Vec<&str> = Vec::with_capacity(10);
        list.push(&text);
        let memory = list.as_ptr() as usize;
        let other: Vec<&[u8]> = recycle_list(list);
        assert_eq!((other.capacity(), other.as_ptr() as usize, other.len()), (10, memory, 0));
    }
}
