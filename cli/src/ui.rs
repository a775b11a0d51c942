//! The output of commands: results to standard output, everything else to standard error.

use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
pub use mlcc_driver::format::{bytes, format_count, format_seconds, format_table, placement, pluralize};

/// The amount of messages on standard error.
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

    /// Progress over bytes, for work that begins some time after this; invisible where standard error is no
    /// terminal.
    pub fn bytes_progress(&self, what: &'static str) -> ByteProgress {
        let waiting = format!("{what:9} {{bar:30}} {{bytes}} of {{total_bytes}}  {{wide_msg}}");
        let running = format!(
            "{what:9} {{bar:30}} {{bytes}} of {{total_bytes}}  {{bytes_per_sec}}  {{eta}} left  {{wide_msg}}"
        );
        ByteProgress { bar: self.bar(&waiting), waiting, running }
    }

    /// A progress bar over shares of one piece of work, which the message tells.
    pub fn share_bar(&self, what: &'static str) -> ProgressBar {
        self.bar(&format!("{what:9} {{bar:30}} {{percent:>3}} %  {{elapsed}}  {{wide_msg}}"))
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

/// A bar of which rate and time left count from the start of its own work, not from when the bar was made,
/// and are shown only once something is done.
pub struct ByteProgress {
    bar: ProgressBar,
    waiting: String,
    running: String,
}

impl ByteProgress {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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
}
