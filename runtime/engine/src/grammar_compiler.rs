//! The compilation of grammars of strangers: with bounded size and time, on threads with stacks of their own.
//! Grammars are kept for later requests.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use mlcc_text::{Grammar, GrammarError, GrammarFactory, GrammarSpec, Tokenizer};

/// The time after which a client gets the error that its grammar takes too long. The work ends later, by
/// llguidance's own limits.
const PATIENCE: Duration = Duration::from_secs(10);
/// Grammars that are compiled at a time, given up ones among them. Others wait for a place.
const MOST_COMPILING: usize = 4;
/// Grammars that are kept compiled.
const KEPT: usize = 32;

/// Makes grammars for one vocabulary. The first use of a vocabulary costs about a second per 100 thousand
/// tokens.
pub struct GrammarCompiler {
    factory: Arc<GrammarFactory>,
    shared: Arc<SharedGrammars>,
}

/// State that requests and the threads that compile for them share.
#[derive(Default)]
struct SharedGrammars {
    grammars: Mutex<GrammarCache>,
    /// A grammar was kept, or is no longer compiled.
    changed: Condvar,
}

#[derive(Default)]
struct GrammarCache {
    compiling: Vec<GrammarSpec>,
    /// Used longest ago first.
    kept: VecDeque<(GrammarSpec, Grammar)>,
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GrammarCompiler({} tokens)", self.factory.vocab())
    }
}

impl GrammarCompiler {
    /// The compiler for a model with `vocab` logits.
    pub fn new(tokenizer: &Tokenizer, vocab: usize) -> Result<GrammarCompiler, GrammarError> {
        let factory = Arc::new(GrammarFactory::new(tokenizer, vocab)?);
        Ok(GrammarCompiler { factory, shared: Arc::default() })
    }

    /// A grammar at its begin. Equal grammars that are asked for together are compiled once.
    pub fn compile(&self, spec: &GrammarSpec) -> Result<Grammar, GrammarError> {
        spec.check_size()?;
        let deadline = Instant::now() + PATIENCE;
        match CompileSlot::acquire(&self.shared, spec, deadline)? {
            GrammarLookup::Cached(grammar) => Ok(*grammar),
            GrammarLookup::Compile(place) => self.compile_in(place, deadline),
        }
    }

    /// Compiles on a separate thread, for as long as a client would wait.
    fn compile_in(&self, place: CompileSlot, deadline: Instant) -> Result<Grammar, GrammarError> {
        let factory = Arc::clone(&self.factory);
        let (sender, receiver) = mpsc::channel();
        let compile = move || {
            let made = factory.compile(&place.spec).map(|grammar| place.cache_grammar(grammar));
            drop(place);
            // The receiver may have left.
            let _ = sender.send(made);
        };
        let thread =
            std::thread::Builder::new().name("mlcc-grammar".into()).stack_size(GrammarFactory::STACK);
        thread.spawn(compile).map_err(|error| GrammarError::Thread { reason: error.to_string() })?;
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(made) => made,
            Err(mpsc::RecvTimeoutError::Timeout) => Err(TOO_SLOW),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                Err(GrammarError::Invalid { reason: "the compiler of grammars failed".into() })
            }
        }
    }
}

const TOO_SLOW: GrammarError = GrammarError::TooSlow { seconds: PATIENCE.as_secs() };

impl SharedGrammars {
    fn lock(&self) -> MutexGuard<'_, GrammarCache> {
        self.grammars.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GrammarCache {
    fn find_cached(&mut self, spec: &GrammarSpec) -> Option<Grammar> {
        let found = self.kept.iter().position(|(of, _)| of == spec)?;
        let entry = self.kept.remove(found)?;
        let fresh = entry.1.separate();
        self.kept.push_back(entry);
        Some(fresh)
    }
}

/// The result of a request for a grammar.
enum GrammarLookup {
    Cached(Box<Grammar>),
    Compile(CompileSlot),
}

/// One of the places for grammars that are being compiled.
struct CompileSlot {
    shared: Arc<SharedGrammars>,
    spec: GrammarSpec,
}

impl CompileSlot {
    /// Waits until the grammar is there, or a place to compile it.
    fn acquire(
        shared: &Arc<SharedGrammars>,
        spec: &GrammarSpec,
        deadline: Instant,
    ) -> Result<GrammarLookup, GrammarError> {
        let mut grammars = shared.lock();
        loop {
            if let Some(grammar) = grammars.find_cached(spec) {
                return Ok(GrammarLookup::Cached(Box::new(grammar)));
            }
            let equal = grammars.compiling.contains(spec);
            if !equal && grammars.compiling.len() < MOST_COMPILING {
                grammars.compiling.push(spec.clone());
                return Ok(GrammarLookup::Compile(CompileSlot {
                    shared: Arc::clone(shared),
                    spec: spec.clone(),
                }));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let running = grammars.compiling.len();
                return Err(if equal { TOO_SLOW } else { GrammarError::Busy { running } });
            }
            grammars = shared.changed.wait_timeout(grammars, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Keeps a grammar for later requests, and gives one at its begin.
    fn cache_grammar(&self, grammar: Grammar) -> Grammar {
        let fresh = grammar.separate();
        let mut grammars = self.shared.lock();
        if grammars.kept.len() >= KEPT {
            grammars.kept.pop_front();
        }
        grammars.kept.push_back((self.spec.clone(), grammar));
        fresh
    }
}

impl Drop for CompileSlot {
    fn drop(&mut self) {
        let mut grammars = self.shared.lock();
        if let Some(found) = grammars.compiling.iter().position(|spec| *spec == self.spec) {
            grammars.compiling.swap_remove(found);
        }
        drop(grammars);
        self.shared.changed.notify_all();
    }
}
