//! Ctrl-C: the first press asks the running command to end in order, the second ends the program. Where a command waits
//! for its user there is nothing to end in order, and the first press ends the program.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static AT_PROMPT: AtomicBool = AtomicBool::new(false);
static INSTALL: Once = Once::new();

/// A command that has not ended by then is doing something long (code of a large model): its user is told.
const PATIENCE: Duration = Duration::from_secs(1);

/// Exit code of a program that SIGINT ended, as shells count.
pub const EXIT_CODE: i32 = 130;

/// Says that the command waits for its user, or no longer. A press that came before the prompt counts as answered.
pub fn wait_at_prompt(waits: bool) {
    INTERRUPTED.store(false, Ordering::SeqCst);
    AT_PROMPT.store(waits, Ordering::SeqCst);
}

/// The flag that Ctrl-C sets from now on. Commands that never ask for it are ended by the signal itself.
pub fn flag() -> &'static AtomicBool {
    INSTALL.call_once(|| {
        let handler = || {
            if INTERRUPTED.swap(true, Ordering::SeqCst) || AT_PROMPT.load(Ordering::SeqCst) {
                std::process::exit(EXIT_CODE);
            }
            // The handler has a thread of its own, which has to be free for a second press.
            std::thread::spawn(|| {
                std::thread::sleep(PATIENCE);
                if INTERRUPTED.load(Ordering::SeqCst) {
                    eprintln!("interrupted: what is being worked on comes to its end first; Ctrl-C again ends at once");
                }
            });
        };
        // Without a handler the signal ends the program, which is right as well.
        let _ = ctrlc::set_handler(handler);
    });
    &INTERRUPTED
}
