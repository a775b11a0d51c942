//! Everything that no artifact has is refused, by an error that names it.

use mlcc_abi::elf::ElfFile;
use mlcc_loader::{CodeFunction, CodeImage, ImageError};
use proptest::prelude::*;

use crate::builder::{
    self, CODE, DATA, HASHES, PROGRAM_HEADERS, RELATIVE, RELOCATIONS, STACK, TABLE, TABLE_BYTES,
};

fn refused(change: impl FnOnce(&mut Vec<u8>)) -> ImageError {
    let mut file = builder::shared_object();
    change(&mut file);
    let elf = ElfFile::parse(&file).expect("the headers are whole");
    CodeImage::check(&elf).map(|_| ()).expect_err("it has to be refused")
}

fn segment(index: usize, what: &'static str) -> ImageError {
    ImageError::Segment { index, what }
}

#[test]
fn an_image_of_a_linker_is_taken() {
    let file = builder::shared_object();
    let elf = ElfFile::parse(&file).expect("it is well-formed");
    let image = CodeImage::check(&elf).expect("it is as an artifact is");
    assert_eq!(image.model_table(), TABLE..TABLE + TABLE_BYTES);
    assert!(image.contains_range(&(TABLE..TABLE + TABLE_BYTES)));
    assert!(!image.contains_range(&(TABLE..DATA + 0x301)), "beyond the segment");
    assert!(image.is_function(CODE, &["answer"]));
    assert!(!image.is_function(CODE, &["question"]) && !image.is_function(TABLE, &["answer"]));
    let functions: Vec<_> = image.functions().collect();
    assert_eq!(functions, [CodeFunction { name: "answer", address: CODE, bytes: 6 }]);
}

#[test]
fn foreign_machines_and_segments_are_refused() {
    assert_eq!(refused(|f| builder::put(f, 18, &243u16.to_le_bytes())), ImageError::Machine(243));
    let header = |index: usize| PROGRAM_HEADERS + 56 * index;
    assert_eq!(
        refused(|f| builder::put(f, header(1) + 4, &7u32.to_le_bytes())),
        segment(1, "is both writable and executable")
    );
    assert_eq!(
        refused(|f| builder::put(f, header(1) + 4, &1u32.to_le_bytes())),
        segment(1, "is not readable")
    );
    assert_eq!(
        refused(|f| builder::put_longs(f, header(1) + 16, &[CODE + 8])),
        segment(1, "lies elsewhere in a page than in the file")
    );
    assert_eq!(
        refused(|f| builder::put_longs(f, header(2) + 16, &[CODE])),
        segment(2, "shares a page with the one before, or lies before it")
    );
    assert_eq!(
        refused(|f| builder::put_longs(f, header(1) + 40, &[0x800])),
        segment(1, "is read-only and larger than its part of the file")
    );
    assert_eq!(
        refused(|f| builder::put_longs(f, header(2) + 40, &[1 << 40])),
        segment(2, "ends far beyond the size of the file")
    );
    let stack = |flags: u32| move |f: &mut Vec<u8>| builder::put(f, header(STACK) + 4, &flags.to_le_bytes());
    assert_eq!(refused(stack(7)), ImageError::ForeignSegment { kind: 0x6474_e551 });
    let local = |f: &mut Vec<u8>| builder::put_segment(f, STACK, 7, 4, DATA..DATA + 8);
    assert_eq!(refused(local), ImageError::ForeignSegment { kind: 7 }, "thread-local storage");
}

#[test]
fn dynamic_tables_that_ask_for_more_are_refused() {
    let tag = |tag: u64, new: u64| {
        move |f: &mut Vec<u8>| builder::put_longs(f, builder::dynamic_value(tag) - 8, &[new])
    };
    // DT_NEEDED, DT_INIT, DT_INIT_ARRAY, DT_REL, DT_JMPREL, DT_TEXTREL, DT_RELR
    for foreign in [1, 12, 25, 17, 23, 22, 36] {
        assert_eq!(refused(tag(9, foreign)), ImageError::DynamicTag(foreign));
    }
    assert!(matches!(refused(tag(9, 5)), ImageError::DynamicTable("a tag stands twice")));
    let value = |tag: u64, new: u64| {
        move |f: &mut Vec<u8>| builder::put_longs(f, builder::dynamic_value(tag), &[new])
    };
    assert!(matches!(refused(value(11, 16)), ImageError::DynamicTable(_)), "size of symbols");
    assert!(matches!(refused(value(5, 1 << 40)), ImageError::Symbols(_)), "place of strings");
    assert!(matches!(refused(value(6, u64::MAX)), ImageError::Symbols(_)), "place of symbols");
    assert_eq!(refused(value(7, DATA)), ImageError::WritableTables);
    assert!(matches!(refused(value(8, 25)), ImageError::RelocationTable(_)), "size of relocations");
    assert!(matches!(refused(value(8, 1 << 40)), ImageError::RelocationTable(_)));
    // A bucket that leads to a symbol before the first, and a table without buckets.
    let word = |at: usize, new: u32| move |f: &mut Vec<u8>| builder::put(f, HASHES + at, &new.to_le_bytes());
    assert!(matches!(refused(word(4, 7)), ImageError::Symbols(_)));
    assert!(matches!(refused(word(0, 0)), ImageError::Symbols(_)));
}

#[test]
fn relocations_stay_inside_of_data() {
    let write = |at: u64, kind: u64, to: u64| {
        refused(move |f| builder::put_longs(f, RELOCATIONS + 24, &[at, kind, to]))
    };
    let is = |error: ImageError, what| assert_eq!(error, ImageError::Relocation { index: 1, what });
    is(write(TABLE, RELATIVE + 1, CODE), "is no relative one");
    is(write(CODE, RELATIVE, CODE), "writes outside of data");
    is(write(DATA + 0x2fc, RELATIVE, CODE), "writes outside of data");
    is(write(TABLE + 4, RELATIVE, CODE), "writes outside of data");
    is(write(u64::MAX - 3, RELATIVE, CODE), "writes outside of data");
    is(write(DATA + 8, RELATIVE, CODE), "writes into the dynamic table");
    is(write(TABLE, RELATIVE, 1 << 40), "leads outside of the image");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    /// Any damage is an image that can be mapped or a typed error.
    #[test]
    fn damage_is_an_error_or_nothing(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut file = builder::shared_object();
        for (at, value) in changes {
            // Headers and tables; zeros and code carry nothing.
            let at = at.index(0x400 + 0x300);
            let at = if at < 0x400 { at } else { DATA as usize + at - 0x400 };
            file[at] = value;
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len()));
        }
        let Ok(elf) = ElfFile::parse(&file) else { return Ok(()) };
        if let Ok(image) = CodeImage::check(&elf) {
            let _ = image.functions().count();
            let _ = mlcc_loader::LoadedImage::map(&image);
        }
    }
}
