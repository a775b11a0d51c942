//! Damaged and hostile weight files: each is refused with a message that names what is wrong.

use crate::common::{PickleWriter, golden, safetensors, stored_zip, torch_archive};
use mlcc_models::checkpoint::{CheckpointFormat, FiniteCheck, WeightFiles};
use mlcc_models::{Checkpoint, CheckpointError, tensor_check};

#[track_caller]
fn refused(format: CheckpointFormat, bytes: &[u8], parts: &[&str]) {
    let error = Checkpoint::from_bytes("model.x", format, bytes.to_vec()).expect_err("refused").to_string();
    for part in parts.iter().chain(&["model.x"]) {
        assert!(error.contains(part), "expected `{part}` in: {error}");
    }
}

#[track_caller]
fn bad_safetensors(header: &str, data: &[u8], parts: &[&str]) {
    refused(CheckpointFormat::Safetensors, &safetensors(header, data), parts);
}

#[track_caller]
fn bad_pickle(pickle: &[u8], parts: &[&str]) {
    refused(CheckpointFormat::Torch, &torch_archive(pickle, &[("0", &[0; 24])]), parts);
}

const TWO: &str = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F16","shape":[2,1],"data_offsets":[8,12]}}"#;

#[test]
fn safetensors_cut_anywhere_is_refused() {
    let file = safetensors(TWO, &[1; 12]);
    assert_eq!(
        Checkpoint::from_bytes("x", CheckpointFormat::Safetensors, file.clone()).unwrap().tensors().len(),
        2
    );
    for end in 0..file.len() {
        refused(CheckpointFormat::Safetensors, &file[..end], &["damaged or was not copied completely"]);
    }
    let longer = [file.as_slice(), &[0]].concat();
    refused(CheckpointFormat::Safetensors, &longer, &["holds 13 bytes of tensors, its header describes 12"]);
}

/// Every single-bit error in the header is either refused or gives a checkpoint the reference reader accepts too.
#[test]
fn safetensors_header_bits_may_flip() {
    let file = safetensors(TWO, &[1; 12]);
    let mut accepted = 0;
    for bit in 0..8 * (8 + TWO.len()) {
        let mut flipped = file.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        if let Ok(checkpoint) = Checkpoint::from_bytes("x", CheckpointFormat::Safetensors, flipped.clone()) {
            let reference = safetensors::SafeTensors::deserialize(&flipped).expect("the reference reads it");
            assert_eq!(reference.len(), checkpoint.tensors().len());
            accepted += 1;
        }
    }
    assert!(accepted > 0, "flips inside a name are harmless");
}

#[test]
fn safetensors_headers_that_lie() {
    let entry = |rest: &str| format!(r#"{{"w":{{{rest}}}}}"#);
    let data = [0u8; 16];
    bad_safetensors("[]", &[], &["bad header", "object of tensors"]);
    bad_safetensors("{", &[], &["bad header"]);
    bad_safetensors("{} x", &[], &["bad header"]);
    bad_safetensors(&"[".repeat(100_000), &[], &["bad header"]);
    let huge = entry(r#""dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,16]"#);
    bad_safetensors(&huge, &data, &["tensor `w`", "has 16 bytes, not what shape"]);
    let wide = entry(r#""dtype":"F32","shape":[2],"data_offsets":[0,16]"#);
    bad_safetensors(&wide, &data, &["tensor `w`", "has 16 bytes, not what shape [2] of f32 needs"]);
    let outside = entry(r#""dtype":"F32","shape":[4],"data_offsets":[16,32]"#);
    bad_safetensors(&outside, &data, &["tensor `w`", "lies at bytes 16..32 of 16 bytes"]);
    let backwards = entry(r#""dtype":"F32","shape":[4],"data_offsets":[16,0]"#);
    bad_safetensors(&backwards, &data, &["tensor `w`", "lies at bytes 16..0"]);
    let unknown = entry(r#""dtype":"Q4","shape":[4],"data_offsets":[0,16]"#);
    bad_safetensors(&unknown, &data, &["tensor `w`", "Q4"]);
    let tiny = entry(r#""dtype":"F4","shape":[32],"data_offsets":[0,16]"#);
    bad_safetensors(&tiny, &data, &["tensor `w`", "F4", "does not support"]);
    let negative = entry(r#""dtype":"F32","shape":[-4],"data_offsets":[0,16]"#);
    bad_safetensors(&negative, &data, &["tensor `w`", "-4"]);
    let dims = entry(&format!(r#""dtype":"U8","shape":[{}16],"data_offsets":[0,16]"#, "1,".repeat(9000)));
    bad_safetensors(&dims, &data, &["tensor `w`"]);
    let far = entry(r#""dtype":"F32","shape":[4],"data_offsets":[0,18446744073709551615]"#);
    bad_safetensors(&far, &data, &["tensor `w`"]);
}

#[test]
fn safetensors_tensors_that_overlap_or_repeat() {
    let two = |second: &str, offsets: &str| {
        format!(
            r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}},"{second}":{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}}}"#
        )
    };
    bad_safetensors(
        &two("b", "[4,12]"),
        &[0; 12],
        &["tensor `b`", "overlaps", "starts at byte 4, expected 8"],
    );
    bad_safetensors(&two("b", "[0,8]"), &[0; 8], &["tensor `b`", "overlaps"]);
    bad_safetensors(&two("b", "[12,20]"), &[0; 20], &["tensor `b`", "follows a gap"]);
    bad_safetensors(&two("a", "[8,16]"), &[0; 16], &["`a` occurs twice"]);
    bad_safetensors(&two("a", "[0,8]"), &[0; 8], &["`a` occurs twice"]);
}

#[test]
fn safetensors_header_lengths_beyond_reason() {
    for length in [u64::MAX, u64::MAX - 7, 1 << 62, 100_000_001] {
        let file = [&length.to_le_bytes()[..], b"{}"].concat();
        refused(CheckpointFormat::Safetensors, &file, &["not a safetensors file", &length.to_string()]);
    }
}

#[test]
fn torch_archive_cut_anywhere_is_refused() {
    let pickle = PickleWriter::one_tensor("w", ("FloatStorage", "0", 6), 0, &[6], &[1]);
    let file = torch_archive(&pickle, &[("0", &[0; 24])]);
    assert_eq!(
        Checkpoint::from_bytes("x", CheckpointFormat::Torch, file.clone()).unwrap().tensors().len(),
        1
    );
    for end in 0..file.len() {
        assert!(Checkpoint::from_bytes("x", CheckpointFormat::Torch, file[..end].to_vec()).is_err(), "{end}");
    }
    let whole = std::fs::read(golden("rwkv4-pth").join("model.pth")).unwrap();
    for share in 1..64 {
        let cut = &whole[..whole.len() * share / 64];
        refused(CheckpointFormat::Torch, cut, &["broken zip"]);
    }
}

#[test]
fn pickles_cut_anywhere_are_refused() {
    let pickle = PickleWriter::one_tensor("w", ("FloatStorage", "0", 6), 0, &[6], &[1]);
    for end in 0..pickle.len() {
        bad_pickle(&pickle[..end], &["pickle byte", "ends"]);
    }
}

#[test]
fn code_in_a_pickle_is_refused_by_name() {
    // os.system("...") in the spellings that pickle has.
    let call = |global: PickleWriter| global.raw(b"(").text("touch pwned").raw(b"tR").end();
    let system = call(PickleWriter::new().global("os", "system"));
    bad_pickle(&system, &["`os.system`", "does not run code"]);
    bad_pickle(&call(PickleWriter::new().global("posix", "system")), &["`posix.system`"]);
    let stacked = PickleWriter::new().text("builtins").text("eval").raw(b"\x93");
    bad_pickle(&call(stacked), &["`builtins.eval`"]);
    bad_pickle(&PickleWriter::new().raw(b"(").text("id").raw(b"ios\nsystem\n").end(), &["INST"]);
    // Names that look near.
    bad_pickle(&call(PickleWriter::new().global("torch", "load")), &["`torch.load`"]);
    bad_pickle(
        &call(PickleWriter::new().global("torch._utils", "_rebuild_tensor_v2.__globals__")),
        &["__globals__"],
    );
    bad_pickle(&call(PickleWriter::new().global("torch._utils", "_rebuild_qtensor")), &["_rebuild_qtensor"]);
    // A whole module saved instead of its state dict.
    let module = PickleWriter::new().global("__main__", "RWKV").raw(b")\x81}b").end();
    bad_pickle(&module, &["`__main__.RWKV`", "state_dict()"]);
    // Allowed names, used for something else.
    bad_pickle(&PickleWriter::new().global("torch", "FloatStorage").raw(b")R").end(), &["calls a class"]);
    bad_pickle(
        &PickleWriter::new().global("collections", "OrderedDict").raw(b"}b").end(),
        &["sets attributes of a class"],
    );
    for (opcode, name) in
        [(b'\x81', "NEWOBJ"), (b'\x82', "EXT1"), (b'o', "OBJ"), (b'P', "PERSID"), (b'2', "DUP")]
    {
        bad_pickle(&PickleWriter::new().raw(&[opcode]).end(), &[name]);
    }
}

#[test]
fn pickles_that_break_the_stack_machine() {
    let writer = PickleWriter::new;
    bad_pickle(&writer().end(), &["empty stack"]);
    bad_pickle(&writer().raw(b"t").end(), &["was not opened"]);
    bad_pickle(&writer().raw(b"(K\x01(\x85").end(), &["takes more values"]);
    bad_pickle(&writer().raw(b"}(K\x01u").end(), &["key without a value"]);
    bad_pickle(&writer().raw(b"K\x01K\x02K\x03s").end(), &["sets an item of an integer"]);
    bad_pickle(&writer().raw(b"}K\x01a").end(), &["appends to a dict"]);
    bad_pickle(&writer().raw(b"h\x05").end(), &["memo 5"]);
    bad_pickle(&writer().raw(b"X\xff\xff\xff\xff").end(), &["middle of a value"]);
    bad_pickle(&writer().raw(b"X\x01\x00\x00\x00\xff").end(), &["not UTF-8"]);
    bad_pickle(&writer().raw(b"\x8a\x09123456789").end(), &["integer of 9 bytes"]);
    bad_pickle(b"\x80\x09.", &["protocol 9"]);
    bad_pickle(&writer().raw(b"K\x01Q").end(), &["persistent id"]);
    bad_pickle(&writer().raw(b"K\x01").end(), &["holds an integer, expected a state dict"]);
    bad_pickle(&writer().raw(b"}").end(), &["dict without tensors"]);
}

#[test]
fn large_pickles_cost_neither_recursion_nor_time() {
    let nested = PickleWriter::new().raw(b")").raw(&vec![0x85; 3_000_000]).end();
    bad_pickle(&nested, &["holds a tuple"]);
    bad_pickle(&PickleWriter::new().raw(&vec![b'('; 3_000_000]).end(), &["empty stack"]);
    bad_pickle(&PickleWriter::new().raw(&vec![b'N'; 5_000_000]).end(), &["more than 4194304 instructions"]);
    bad_pickle(&vec![b'N'; (16 << 20) + 1], &["at most 16777216 are read"]);
}

#[test]
fn torch_tensors_that_do_not_fit_their_storage() {
    let storage = ("FloatStorage", "0", 6);
    let one = |offset: i32, shape: &[i32], strides: &[i32]| {
        PickleWriter::one_tensor("w", storage, offset, shape, strides)
    };
    bad_pickle(&one(0, &[7], &[1]), &["shape [7]", "storage of 6 elements"]);
    bad_pickle(&one(1, &[6], &[1]), &["offset 1"]);
    bad_pickle(&one(0, &[2, 3], &[4, 1]), &["strides [4, 1]"]);
    bad_pickle(&one(0, &[i32::MAX, i32::MAX, i32::MAX], &[0, 0, 0]), &["shape"]);
    bad_pickle(&one(0, &[6, 2], &[1, 0]), &["strides [1, 0]"]);
    bad_pickle(&one(0, &[-6], &[1]), &["without a shape"]);
    bad_pickle(&one(-1, &[6], &[1]), &["without an offset"]);
    bad_pickle(&one(0, &[6], &[1, 1]), &["1 dimensions with 2 strides"]);
    bad_pickle(&one(0, &[1; 17], &[1; 17]), &["without a shape"]);
    let missing = PickleWriter::one_tensor("w", ("FloatStorage", "5", 6), 0, &[6], &[1]);
    bad_pickle(&missing, &["tensor `w`", "storage `data/5` is not in the archive"]);
    let short = PickleWriter::one_tensor("w", ("FloatStorage", "0", 7), 0, &[6], &[1]);
    bad_pickle(&short, &["tensor `w`", "has 24 bytes, 28 are needed"]);
    let many = PickleWriter::one_tensor("w", ("ComplexFloatStorage", "0", 7), 0, &[6], &[1]);
    bad_pickle(&many, &["`torch.ComplexFloatStorage`"]);
}

#[test]
fn files_that_are_no_torch_archives() {
    let torch = |bytes: &[u8], parts: &[&str]| refused(CheckpointFormat::Torch, bytes, parts);
    torch(b"", &["not a torch archive"]);
    torch(b"version https://git-lfs.github.com/spec/v1", &["not a torch archive"]);
    torch(b"\x80\x02\x8a\x0alFc\x9cF\xf9 j\xa8P\x19.", &["before version 1.6"]);
    torch(&stored_zip(&[("a.txt", b"x")]), &["without `data.pkl`"]);
    torch(&stored_zip(&[("m/data.pkl", b"x"), ("n/data/0", b"y")]), &["several folders"]);
    torch(&stored_zip(&[("m/data.pkl", b"\x80\x02}."), ("m/byteorder", b"big")]), &["byte order `big`"]);
    let mut compressed = stored_zip(&[("m/data.pkl", b"\x80\x02}.")]);
    let directory = compressed.windows(4).position(|w| w == b"PK\x01\x02").unwrap();
    compressed[directory + 10] = 8;
    torch(&compressed, &["compressed"]);
}

#[test]
fn one_name_twice() {
    let writer = PickleWriter::new().raw(b"}(").text("w").tensor(("FloatStorage", "0", 6), 0, &[6], &[1]);
    let twice = writer.text("w").tensor(("FloatStorage", "0", 6), 0, &[6], &[1]).raw(b"u").end();
    bad_pickle(&twice, &["`w` occurs twice"]);

    // Both namings in one file.
    let header = r#"{"emb.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"rwkv.embeddings.weight":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
    let file = safetensors(header, &[0; 8]);
    let mut checkpoint = Checkpoint::from_bytes("model.x", CheckpointFormat::Safetensors, file).unwrap();
    let error =
        checkpoint.rename(mlcc_models::families::rwkv4::naming::rwkv4_canonical).unwrap_err().to_string();
    assert!(
        error.contains("`rwkv.embeddings.weight` occurs twice") && error.contains("(as `emb.weight`)"),
        "{error}"
    );
}

fn write_shards(index: &str, shards: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    for (name, bytes) in shards {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

fn shard(name: &str) -> Vec<u8> {
    safetensors(&format!(r#"{{"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#), &[0; 4])
}

fn open_sharded(index: &str, shards: &[(&str, Vec<u8>)]) -> Result<Checkpoint, CheckpointError> {
    let dir = write_shards(index, shards);
    WeightFiles::in_directory(dir.path()).and_then(|weights| Checkpoint::open(&weights))
}

#[test]
fn shards_and_their_index() {
    let index = r#"{"weight_map":{"a":"1.safetensors","b":"2.safetensors"}}"#;
    let both = [("1.safetensors", shard("a")), ("2.safetensors", shard("b"))];
    assert_eq!(open_sharded(index, &both).unwrap().tensors().len(), 2);

    let fails = |index: &str, shards: &[(&str, Vec<u8>)], parts: &[&str]| {
        let error = open_sharded(index, shards).expect_err("refused").to_string();
        for part in parts {
            assert!(error.contains(part), "expected `{part}` in: {error}");
        }
    };
    fails(index, &both[..1], &["names the shard 2.safetensors, which is missing"]);
    let swapped = [("1.safetensors", shard("b")), ("2.safetensors", shard("a"))];
    fails(index, &swapped, &["`a` is in 1.safetensors, but that file does not have it"]);
    let twice = [("1.safetensors", shard("a")), ("2.safetensors", shard("a"))];
    fails(index, &twice, &["`a` occurs twice", "1.safetensors", "2.safetensors"]);
    fails(r#"{"weight_map":{"a":"../1.safetensors"}}"#, &both, &["plain file name", "../1.safetensors"]);
    fails(r#"{"weight_map":{"a":".."}}"#, &both, &["plain file name"]);
    fails(r#"{"weight_map":{"a":7}}"#, &both, &["weight_map.a"]);
    fails(r#"{"weight_map":[]}"#, &both, &["weight_map"]);
    fails(r#"{}"#, &both, &["weight_map"]);
    fails("{", &both, &["not valid JSON"]);
    fails(r#"{"weight_map":{}}"#, &both, &["names no shards"]);
}

#[test]
fn directories_without_one_clear_file() {
    let dir = tempfile::tempdir().unwrap();
    let error = WeightFiles::in_directory(dir.path()).unwrap_err().to_string();
    assert!(error.contains("no weights in") && error.contains("model.safetensors"), "{error}");
    std::fs::write(dir.path().join("b.pth"), b"x").unwrap();
    std::fs::write(dir.path().join("a.pth"), b"x").unwrap();
    let error = WeightFiles::in_directory(dir.path()).unwrap_err().to_string();
    assert!(error.contains("a.pth, b.pth; name the one to use"), "{error}");
    std::fs::write(dir.path().join("model.safetensors"), b"").unwrap();
    let error = Checkpoint::open(&WeightFiles::in_directory(dir.path()).unwrap()).unwrap_err().to_string();
    assert!(error.contains("model.safetensors: is empty"), "{error}");
    let missing = WeightFiles::from_file(&dir.path().join("c.pth")).unwrap();
    let error = Checkpoint::open(&missing).unwrap_err().to_string();
    assert!(error.contains("cannot open") && error.contains("c.pth"), "{error}");
}

#[test]
fn all_tensors_that_do_not_fit_are_named_at_once() {
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1,1,2],"data_offsets":[8,16]},"mask":{"dtype":"BOOL","shape":[1],"data_offsets":[16,17]},"x":{"dtype":"F16","shape":[1],"data_offsets":[17,19]}}"#;
    let file = safetensors(header, &[0; 19]);
    let checkpoint = Checkpoint::from_bytes("model.x", CheckpointFormat::Safetensors, file).unwrap();
    let need = |list: &[(&str, &[usize])]| -> Vec<(String, Vec<usize>)> {
        list.iter().map(|(name, shape)| (name.to_string(), shape.to_vec())).collect()
    };
    let needed = need(&[("a", &[3]), ("b", &[2]), ("c", &[4, 4]), ("d", &[5])]);
    let mismatch = tensor_check::check_tensors(&needed, &checkpoint, |_| false).unwrap_err();
    assert_eq!(mismatch.missing, need(&[("c", &[4, 4]), ("d", &[5])]));
    assert_eq!(mismatch.extra, need(&[("x", &[1])]));
    assert_eq!(mismatch.misshaped, [("a".to_string(), vec![3], vec![2])]);
    let text = mismatch.to_string();
    for part in
        ["model.x", "missing: c, expected [4, 4]", "missing: d", "a, expected [3], found [2]", "x [1]"]
    {
        assert!(text.contains(part), "expected `{part}` in: {text}");
    }
    tensor_check::check_tensors(&need(&[("a", &[2]), ("b", &[2]), ("x", &[])]), &checkpoint, |_| false)
        .unwrap();
    tensor_check::check_tensors(&need(&[("a", &[2]), ("b", &[2])]), &checkpoint, |name| name == "x").unwrap();
}

#[test]
fn weights_that_are_not_finite_are_named() {
    let values: Vec<u8> =
        [1.0f32, 2.0, 3.0, 4.0, f32::NAN, 6.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let header = r#"{"blocks.0.att.key.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
    let file = safetensors(header, &values);
    let checkpoint = Checkpoint::from_bytes("model.x", CheckpointFormat::Safetensors, file).unwrap();
    let info = &checkpoint.tensors()[0];
    let mut row = [0.0; 3];
    checkpoint.read(&info.name).unwrap().read_f32_into(3, &mut row).unwrap();
    let error = FiniteCheck::new(info).check(3, &row).unwrap_err().to_string();
    for part in ["blocks.0.att.key.weight", "NaN", "[1, 1]", "element 4"] {
        assert!(error.contains(part), "expected `{part}` in: {error}");
    }
}
