//! The bar of a build: all of its phases on one scale, so that it moves evenly.

use indicatif::ProgressBar;
use mlcc_codegen::CodeListener;
use mlcc_driver::compile::BuildEvent;
use mlcc_passes::pipeline::PIPELINE;

use crate::ui::Ui;

/// The phases of a build by their names, each with its part of the whole: about their shares of the time of
/// models of some hundred million weights. A phase that is left out is passed over.
const PHASES: [(&str, u64); 5] =
    [("read", 20), ("passes", 130), ("code", 250), ("weights", 400), ("report", 200)];

const WHOLE: u64 = 1000;

/// Shown on a terminal alone, and only until the build ends.
#[derive(Clone)]
pub struct BuildBar {
    bar: ProgressBar,
}

impl BuildBar {
    pub fn new(ui: &Ui) -> BuildBar {
        BuildBar { bar: ui.share_bar("build") }
    }

    /// Moves as the build tells.
    pub fn event(&self, event: &BuildEvent<'_>) {
        match event {
            // Files may have to be downloaded first, and then there is a bar for that.
            BuildEvent::Phase("read") => {}
            BuildEvent::Phase(name) => self.set_position(name, 0, 1, (*name).to_owned()),
            BuildEvent::Pass { pass, .. } => {
                let done = PIPELINE.iter().position(|known| known.name == pass.name).map_or(0, |at| at + 1);
                self.set_position(
                    "passes",
                    done as u64,
                    PIPELINE.len() as u64,
                    format!("pass {}", pass.name),
                );
            }
            BuildEvent::Weights { done, total, name } => {
                self.set_position("weights", *done, *total, format!("weights {name}"));
            }
            BuildEvent::Report { done, total, perplexity } => {
                let so_far = if *done > 0 { format!(", perplexity {perplexity:.3}") } else { String::new() };
                let message = format!("report, window {done} of {total}{so_far}");
                self.set_position("report", *done as u64, *total as u64, message);
            }
        }
    }

    /// The listener to which the threads of code generation tell their progress.
    pub fn code_listener(&self) -> CodeListener {
        let bar = self.clone();
        CodeListener::new(move |done, total| {
            bar.set_position(
                "code",
                done as u64,
                total as u64,
                format!("code, {done} of {total} kernels and steps"),
            );
        })
    }

    fn set_position(&self, phase: &str, done: u64, total: u64, message: String) {
        let place = phase_position(phase, done, total);
        // Threads may tell in another order than they are done in.
        if place >= self.bar.position() {
            if self.bar.length().is_none() {
                self.bar.set_length(WHOLE);
            }
            self.bar.set_position(place);
            self.bar.set_message(message);
        }
    }

    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

/// The thousandths of the whole that are done.
fn phase_position(phase: &str, done: u64, total: u64) -> u64 {
    let before = PHASES.iter().take_while(|(name, _)| *name != phase).map(|(_, part)| part);
    let part = PHASES.iter().find(|(name, _)| *name == phase).map_or(0, |(_, part)| *part);
    let share = part as f64 * done as f64 / total.max(1) as f64;
    (before.sum::<u64>() + share as u64).min(WHOLE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_fill_the_whole_in_their_order() {
        assert_eq!(PHASES.iter().map(|(_, part)| part).sum::<u64>(), WHOLE);
        let ends: Vec<[u64; 2]> =
            PHASES.iter().map(|(name, _)| [phase_position(name, 0, 7), phase_position(name, 7, 7)]).collect();
        assert_eq!(ends, [[0, 20], [20, 150], [150, 400], [400, 800], [800, 1000]]);
        assert_eq!(phase_position("weights", 1 << 40, 1 << 41), 600);
        assert_eq!(phase_position("code", 0, 0), 150);
    }

    #[test]
    fn the_bar_never_goes_back() {
        let bar = BuildBar::new(&Ui::new(true, 0));
        bar.event(&BuildEvent::Phase("code"));
        let listener = bar.clone();
        listener.set_position("code", 9, 10, String::new());
        listener.set_position("code", 8, 10, String::new());
        assert_eq!(bar.bar.position(), 375);
        bar.event(&BuildEvent::Weights { done: 1, total: 2, name: "w" });
        assert_eq!((bar.bar.position(), bar.bar.message().as_str()), (600, "weights w"));
        bar.event(&BuildEvent::Report { done: 2, total: 2, perplexity: 7.0 });
        assert_eq!(bar.bar.position(), WHOLE);
        bar.clear();
    }
}
