//! Where output goes: results to standard output, everything else to standard error.

use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How much is said on standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    Quiet,
    Normal,
    Verbose,
}

#[derive(Clone, Copy, Debug)]
pub struct Ui {
    pub verbosity: Verbosity,
    /// About when the program started.
    pub started: Instant,
}

impl Ui {
    pub fn new(quiet: bool, verbose: u8) -> Self {
        let verbosity = match (quiet, verbose) {
            (true, _) => Verbosity::Quiet,
            (false, 0) => Verbosity::Normal,
            (false, _) => Verbosity::Verbose,
        };
        Self { verbosity, started: Instant::now() }
    }

    /// One line of what is going on.
    pub fn note(&self, text: impl Display) {
        if self.verbosity >= Verbosity::Normal {
            // A closed standard error is no reason to fail.
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    }

    pub fn detail(&self, text: impl Display) {
        if self.verbosity >= Verbosity::Verbose {
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    }

    pub fn warn(&self, text: impl Display) {
        let _ = writeln!(std::io::stderr(), "warning: {text}");
    }

    /// Progress over bytes, for work that begins some time after this; invisible where standard error is no terminal.
    pub fn bytes_progress(&self, what: &'static str) -> Progress {
        self.progress(what, "{bytes} of {total_bytes}", "{bytes_per_sec}  {eta} left")
    }

    /// The same over pieces of work.
    pub fn count_progress(&self, what: &'static str) -> Progress {
        self.progress(what, "{pos} of {len}", "{eta} left")
    }

    fn progress(&self, what: &'static str, amount: &str, rate: &str) -> Progress {
        let waiting = format!("{what:9} {{bar:30}} {amount}  {{wide_msg}}");
        let running = format!("{what:9} {{bar:30}} {amount}  {rate}  {{wide_msg}}");
        Progress { bar: self.bar(&waiting), waiting, running }
    }

    /// A progress bar over pieces of work that begins now.
    pub fn count_bar(&self, what: &'static str) -> ProgressBar {
        self.bar(&format!("{what:9} {{bar:30}} {{pos}} of {{len}}  {{eta}} left  {{wide_msg}}"))
    }

    fn bar(&self, template: &str) -> ProgressBar {
        let visible = self.verbosity >= Verbosity::Normal && std::io::stderr().is_terminal();
        let target = if visible { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(None, target);
        set_template(&bar, template);
        bar
    }
}

fn set_template(bar: &ProgressBar, template: &str) {
    // The templates are constants of this file; a wrong one would only look plain.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
}

/// A bar of which rate and time left count from the start of its own work, not from when the bar was made, and are shown
/// only once something is done.
pub struct Progress {
    bar: ProgressBar,
    waiting: String,
    running: String,
}

impl Progress {
    /// `done` is 0 where the work begins.
    pub fn set(&self, done: u64, total: u64, message: String) {
        self.bar.set_length(total);
        match (self.bar.position(), done) {
            (_, 0) => {
                set_template(&self.bar, &self.waiting);
                self.bar.reset();
            }
            (0, _) => set_template(&self.bar, &self.running),
            _ => {}
        }
        self.bar.set_message(message);
        self.bar.set_position(done);
    }

    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

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
pub fn count(n: u64) -> String {
    match n {
        0..1_000 => n.to_string(),
        1_000..1_000_000 => format!("{:.2} K", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} M", n as f64 / 1e6),
        _ => format!("{:.2} B", n as f64 / 1e9),
    }
}

pub fn seconds(d: Duration) -> String {
    format!("{:.2} s", d.as_secs_f64())
}

/// Columns padded to their widest cell; those with numbers only are right-aligned. The first row is the head.
pub fn table(rows: &[Vec<String>]) -> String {
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
            [count(7), count(1500), count(5_500_000), count(3_062_000_000)].join(", "),
            "7, 1.50 K, 5.50 M, 3.06 B"
        );
    }

    #[test]
    fn progress_counts_from_the_start_of_its_work() {
        let progress = Ui::new(true, 0).bytes_progress("weights");
        std::thread::sleep(Duration::from_millis(300));
        progress.set(0, 1000, String::new());
        assert!(progress.bar.elapsed() < Duration::from_millis(200));
        progress.set(500, 1000, "w".into());
        assert_eq!((progress.bar.position(), progress.bar.length()), (500, Some(1000)));
        progress.clear();
    }

    #[test]
    fn tables_line_up() {
        let row = |cells: [&str; 3]| cells.map(String::from).to_vec();
        let rows = [row(["a", "bytes", "about"]), row(["long", "1", "x"])];
        assert_eq!(table(&rows), "a     bytes  about\nlong      1  x\n");
    }
}
