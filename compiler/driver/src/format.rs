//! Numbers and tables as text for people.

use std::time::Duration;

/// `1234567` as `1.2 MB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// `1234567` as `1.23 M`.
pub fn format_count(n: u64) -> String {
    match n {
        0..1_000 => n.to_string(),
        1_000..1_000_000 => format!("{:.2} K", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} M", n as f64 / 1e6),
        _ => format!("{:.2} B", n as f64 / 1e9),
    }
}

/// `1 vector`, `2 vectors`.
pub fn pluralize(n: impl TryInto<u64>, what: &str) -> String {
    let n = n.try_into().unwrap_or(u64::MAX);
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

pub fn format_seconds(d: Duration) -> String {
    format!("{:.2} s", d.as_secs_f64())
}

/// Columns padded to their widest cell; those with numbers only are right-aligned. The first row is the head.
pub fn format_table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let cells = |c: usize| rows.iter().filter_map(move |r| r.get(c));
    let width = |c: usize| cells(c).map(|s| s.chars().count()).max().unwrap_or(0);
    let numeric = |c: usize| {
        cells(c).skip(1).all(|s| s.is_empty() || s == "-" || s.starts_with(|d: char| d.is_ascii_digit()))
    };
    let layout: Vec<(usize, bool)> = (0..columns).map(|c| (width(c), c > 0 && numeric(c))).collect();
    let mut out = String::new();
    for row in rows {
        let cells = row.iter().zip(&layout).map(|(cell, &(w, right))| match right {
            true => format!("{cell:>w$}"),
            false => format!("{cell:<w$}"),
        });
        out.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        out.push('\n');
    }
    out
}

/// The present places of the weights, in words; `None` if they are not placed.
pub fn placement(model: &mlcc_runtime::Model) -> Option<String> {
    let placement = model.placement()?;
    let on_node = |(node, size): &(usize, u64)| format!("{} on node {node}", bytes(*size));
    let nodes: Vec<String> = placement.nodes.iter().map(on_node).collect();
    let (in_file, near) = (bytes(placement.in_file), 100.0 * placement.near_share);
    Some(format!("{}, {in_file} in the file's pages; {near:.0} % where workers read them", nodes.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        assert_eq!(
            [bytes(0), bytes(999), bytes(1000), bytes(999_600), bytes(1_234_567_890)].join(", "),
            "0 B, 999 B, 1.0 kB, 1.0 MB, 1.2 GB"
        );
        assert_eq!(
            [format_count(7), format_count(1500), format_count(5_500_000), format_count(3_062_000_000)]
                .join(", "),
            "7, 1.50 K, 5.50 M, 3.06 B"
        );
        assert_eq!(
            [pluralize(0u8, "text"), pluralize(1u64, "text"), pluralize(2usize, "text")].join(", "),
            "0 texts, 1 text, 2 texts"
        );
    }

    #[test]
    fn tables_line_up() {
        let row = |cells: [&str; 3]| cells.map(String::from).to_vec();
        let rows = [row(["a", "bytes", "about"]), row(["long", "1", "x"])];
        assert_eq!(format_table(&rows), "a     bytes  about\nlong      1  x\n");
    }
}
