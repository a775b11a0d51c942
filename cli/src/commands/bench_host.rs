//! Measurements in a terminal: a bar shows their progress, and an interrupt ends them.

use std::cell::RefCell;
use std::fmt::Display;
use std::sync::atomic::AtomicBool;

use indicatif::ProgressBar;
use mlcc_bench::host::BenchHost;

use crate::interrupt;
use crate::ui::Ui;

pub(crate) struct TerminalHost<'a> {
    what: &'static str,
    ui: &'a Ui,
    bar: RefCell<Option<ProgressBar>>,
}

impl<'a> TerminalHost<'a> {
    /// `what` stands before the bar.
    pub fn new(what: &'static str, ui: &'a Ui) -> TerminalHost<'a> {
        TerminalHost { what, ui, bar: RefCell::new(None) }
    }

    fn with_bar(&self, change: impl FnOnce(&ProgressBar)) {
        if let Some(bar) = &*self.bar.borrow() {
            change(bar);
        }
    }
}

impl BenchHost for TerminalHost<'_> {
    fn cancel_flag(&self) -> &'static AtomicBool {
        interrupt::flag()
    }

    fn start_progress(&self, pieces: u64) {
        let bar = self.ui.count_bar(self.what);
        bar.set_length(pieces);
        self.bar.replace(Some(bar));
    }

    fn set_progress(&self, done: u64) {
        self.with_bar(|bar| bar.set_position(done));
    }

    fn advance_progress(&self) {
        self.with_bar(|bar| bar.inc(1));
    }

    fn set_message(&self, text: String) {
        self.with_bar(|bar| bar.set_message(text));
    }

    fn finish_progress(&self) {
        self.with_bar(ProgressBar::finish_and_clear);
    }

    fn note(&self, text: &dyn Display) {
        self.ui.note(text);
    }

    fn detail(&self, text: &dyn Display) {
        self.ui.detail(text);
    }

    fn warn(&self, text: &dyn Display) {
        self.ui.warn(text);
    }
}
