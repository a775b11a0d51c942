//! Ctrl-C, SIGTERM and SIGHUP: the first asks the running command to end in order, so that nothing
//! half-written stays behind, and the second ends the program at once, after files and folders that are not
//! complete are removed. Where a command waits for its user there is nothing to end in order, and the first
//! ends the program. SIGTERM and SIGHUP mean the whole program, also where Ctrl-C would only stop one answer
//! of a chat. A program that was started with SIGHUP ignored (`nohup`) goes on.

use std::io::Write;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mlcc_files::unfinished;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static AT_PROMPT: AtomicBool = AtomicBool::new(false);
/// The command has a prompt, to which it would go back.
static HAS_PROMPT: AtomicBool = AtomicBool::new(false);
static INSTALL: Once = Once::new();

/// A command that has not ended by then is doing something long (code of a large model): its user gets a
/// message.
const PATIENCE: Duration = Duration::from_secs(1);

/// Exit code of a program that SIGINT ended, as shells count; SIGTERM and SIGHUP get no other.
pub const EXIT_CODE: i32 = 130;

/// Says that the command waits for its user, or no longer. A press that came before the prompt counts as
/// answered.
pub fn wait_at_prompt(waits: bool) {
    HAS_PROMPT.store(true, Ordering::SeqCst);
    INTERRUPTED.store(false, Ordering::SeqCst);
    AT_PROMPT.store(waits, Ordering::SeqCst);
}

/// The flag that the signals set from now on. Commands that never ask for it are ended by the signal itself.
pub fn flag() -> &'static AtomicBool {
    INSTALL.call_once(|| {
        // Without a handler the signal ends the program, which is right as well.
        let hangup = (!crate::signals::is_ignored(SIGHUP)).then_some(SIGHUP);
        if let Ok(mut signals) = Signals::new([SIGINT, SIGTERM].into_iter().chain(hangup)) {
            std::thread::spawn(move || signals.forever().for_each(receive));
        }
    });
    &INTERRUPTED
}

fn receive(signal: i32) {
    let whole_program = signal != SIGINT && HAS_PROMPT.load(Ordering::SeqCst);
    if whole_program || AT_PROMPT.load(Ordering::SeqCst) {
        unfinished::remove_all();
        std::process::exit(EXIT_CODE);
    }
    if INTERRUPTED.swap(true, Ordering::SeqCst) {
        unfinished::remove_all();
        // Without what libraries do at the end of a program: other threads are still in them.
        signal_hook::low_level::exit(EXIT_CODE);
    }
    // This thread has to be free for a second press.
    std::thread::spawn(|| {
        std::thread::sleep(PATIENCE);
        if INTERRUPTED.load(Ordering::SeqCst) {
            // The terminal may be closed.
            let _ = writeln!(
                std::io::stderr(),
                "interrupted: what is being worked on comes to its end first; Ctrl-C again ends at once"
            );
        }
    });
}
