//! Streaming a large file keeps about one tensor of it in memory. Alone in its process, because it looks at the process.
#![cfg(target_os = "linux")]

use mlcc_models::Checkpoint;
use mlcc_models::checkpoint::WeightFiles;
use std::io::Write;

/// Bytes of mapped files that are in memory now.
fn resident_file_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssFile:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

#[test]
fn a_tensor_leaves_memory_when_it_is_dropped() {
    const TENSORS: usize = 8;
    const BYTES: usize = 16 << 20;
    let entries: Vec<String> = (0..TENSORS)
        .map(|i| {
            let (start, end) = (i * BYTES, (i + 1) * BYTES);
            format!(r#""t{i}":{{"dtype":"F16","shape":[{}],"data_offsets":[{start},{end}]}}"#, BYTES / 2)
        })
        .collect();
    let header = format!("{{{}}}", entries.join(","));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    // The rest is a hole of zeros.
    file.set_len((8 + header.len() + TENSORS * BYTES) as u64).unwrap();

    let checkpoint = Checkpoint::open(&WeightFiles::from_file(&path).unwrap()).unwrap();
    let before = resident_file_bytes();
    let mut piece = vec![1.0f32; 1 << 16];
    for info in checkpoint.tensors() {
        let tensor = checkpoint.read(&info.name).unwrap();
        for start in (0..tensor.elements()).step_by(piece.len()) {
            tensor.read_f32_into(start, &mut piece).unwrap();
            assert!(piece.iter().all(|&x| x == 0.0));
        }
        let now = resident_file_bytes() - before;
        assert!(now >= BYTES / 2, "the tensor being read is in memory: {now}");
        assert!(now < 2 * BYTES, "only the tensor being read is in memory: {now}");
    }
}
