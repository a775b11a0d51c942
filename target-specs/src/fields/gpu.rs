//! Values of the schedules of GPU kernels.

use toml::{Table, Value};

/// Rows and columns of a product, with the warps along them.
const TILES: [([i64; 2], [i64; 2]); 16] = [
    ([32, 64], [2, 2]),
    ([32, 128], [1, 4]),
    ([64, 64], [2, 2]),
    ([64, 128], [1, 4]),
    ([64, 128], [2, 2]),
    ([64, 128], [2, 4]),
    ([64, 256], [2, 4]),
    ([128, 32], [4, 1]),
    ([128, 64], [2, 2]),
    ([128, 64], [4, 1]),
    ([128, 64], [4, 2]),
    ([128, 128], [2, 2]),
    ([128, 128], [2, 4]),
    ([128, 128], [4, 2]),
    ([128, 256], [2, 4]),
    ([256, 64], [4, 2]),
];
const STAGES: [i64; 5] = [2, 3, 4, 5, 6];

const WARPS: [i64; 4] = [1, 2, 4, 8];
const KEYS: [i64; 3] = [16, 32, 64];
const SHARED_BYTES: [i64; 4] = [32 << 10, 48 << 10, 72 << 10, 99 << 10];

/// `now` with these keys in place of the same ones.
fn with(now: &Table, changes: &[(&str, Value)]) -> Value {
    let changes = changes.iter().map(|(key, value)| (key.to_string(), value.clone()));
    Value::Table(now.clone().into_iter().chain(changes).collect())
}

/// Other tiles with as many stages, then other stages of the same tile.
pub(super) fn products(now: &Value) -> Vec<Value> {
    let Some(now) = now.as_table() else { return Vec::new() };
    let tiles = TILES.iter().map(|&([rows, columns], warps)| {
        let warps = warps.map(Value::from).to_vec();
        with(now, &[("rows", rows.into()), ("columns", columns.into()), ("warps", warps.into())])
    });
    tiles.chain(STAGES.map(|stages| with(now, &[("stages", stages.into())]))).collect()
}

/// One key changed at a time.
pub(super) fn attentions(now: &Value) -> Vec<Value> {
    let Some(now) = now.as_table() else { return Vec::new() };
    let keys = [("warps", &WARPS[..]), ("keys", &KEYS), ("shared_bytes", &SHARED_BYTES)];
    keys.iter().flat_map(|(key, values)| values.iter().map(|&v| with(now, &[(*key, v.into())]))).collect()
}

/// The products, for people.
pub(super) fn describe_products() -> String {
    let tiles =
        TILES.map(|([rows, columns], [down, across])| format!("{rows} x {columns} of {down} x {across}"));
    format!("rows x columns of warps {}; stages {}", tiles.join(", "), list(&STAGES))
}

pub(super) fn describe_attentions() -> String {
    format!("warps {}; keys {}; shared_bytes {}", list(&WARPS), list(&KEYS), list(&SHARED_BYTES))
}

fn list(numbers: &[i64]) -> String {
    numbers.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")
}
